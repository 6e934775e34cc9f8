"""Averages that are attached to optimizers: which steps count, and wrappers as trainers have."""

import functools
import gc
import math

import accelerate
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

from tailavg import AnytimeWindow
from tailavg.torch import ParameterAverage
from tests.support.torch_models import History, assert_averages, snapshot


def trained(folder, steps, resume=False):
    """A training loop as accelerate's users write it; two batches make a step."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    average = ParameterAverage(model, AnytimeWindow(10))
    average.attach(optimizer)
    accelerator.register_for_checkpointing(average)
    history = History(accelerator.unwrap_model(model))
    if resume:
        accelerator.load_state(folder)
    for step in range(average.count, steps):
        for half in range(2):
            random = torch.Generator().manual_seed(2 * step + half)
            with accelerator.accumulate(model):
                loss = model(torch.randn(4, 3, generator=random)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        history.record()
    accelerator.save_state(folder)
    return average, history


def test_accelerate_counts_steps_and_resumes_to_the_bit(tmp_path):
    average, history = trained(tmp_path / "whole", 25)
    assert average.count == 25
    assert_averages(average.averaged_state_dict(), history.average(AnytimeWindow(10)))
    trained(tmp_path / "first", 13)
    resumed, _ = trained(tmp_path / "first", 25, resume=True)
    assert snapshot(resumed.state_dict()) == snapshot(average.state_dict())


class Wrapper:
    """As those of Lightning and of many others."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()


def test_wrappers_in_wrappers():
    model = nn.Linear(2, 1)
    optimizer = Wrapper(Wrapper(torch.optim.SGD(model.parameters(), lr=0.1)))
    average = ParameterAverage(model, 10)
    handle = average.attach(optimizer)
    optimizer.step()
    assert average.count == 1
    with pytest.raises(RuntimeError, match="attached already"):
        average.attach(optimizer)
    handle.remove()
    optimizer.step()
    assert average.count == 1


@pytest.mark.parametrize("other", [object(), Wrapper(None), Wrapper("Adam"), nn.Linear(1, 1)])
def test_what_is_no_optimizer_is_named(other):
    average = ParameterAverage(nn.Linear(2, 1), 10)
    kind = type(other).__name__
    with pytest.raises(
        TypeError, match=rf"expected an optimizer of torch.*got {kind}; call update"
    ):
        average.attach(other)
    average.update()  # not attached


def test_a_step_is_not_counted_by_hand_too():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = ParameterAverage(model, 10, update_every=2)
    handle = average.attach(optimizer)
    for _ in range(3):
        optimizer.step()
    before = snapshot(average.state_dict())
    with pytest.raises(RuntimeError, match="count twice; remove this call, or call remove"):
        average.update()
    assert snapshot(average.state_dict()) == before
    optimizer.step()
    assert average.count == 2
    handle.remove()
    average.update()
    average.update()
    assert average.count == 3
    average.attach(optimizer)
    del optimizer
    gc.collect()
    average.update()  # the optimizer is gone, and its hook with it
    average.update()
    assert average.count == 4


def test_an_optimizer_of_other_parameters_is_refused():
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    average = ParameterAverage(model, 10, exclude="bias")
    for parameters in (other.parameters(), [model.bias]):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        with pytest.raises(ValueError, match="SGD has none of the averaged parameters; attach the"):
            average.attach(Wrapper(optimizer))
        optimizer.step()
        assert average.count == 0
    average.update()  # not attached
    average.attach(torch.optim.SGD([*other.parameters(), model.weight], lr=0.1))


def test_parameters_are_known_by_their_memory_and_when_they_are_replaced():
    model = nn.Linear(2, 1)
    ParameterAverage(model.state_dict(), 10).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    average = ParameterAverage(model, 10)
    model.weight = nn.Parameter(torch.ones(1, 2))
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    average.attach(optimizer)
    optimizer.step()
    assert average.averaged_state_dict()["weight"].tolist() == [[1.0, 1.0]]


# Steps that do not train


OPTIMIZERS = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "SGD with momentum": functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "tensor": lambda parameters, lr: torch.optim.Adam(parameters, lr=torch.tensor(lr)),
}
every_optimizer = pytest.mark.parametrize("create", OPTIMIZERS.values(), ids=OPTIMIZERS)


def take_steps(model, optimizer, steps):
    for _ in range(steps):
        model(torch.rand(4, 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@every_optimizer
def test_the_step_that_creates_the_state_of_an_optimizer_does_not_count(create):
    """`torch.distributed.checkpoint` takes it, with a learning rate and gradients of 0."""
    model = nn.Linear(2, 1)
    optimizer = create(model.parameters(), lr=0.1)
    average = ParameterAverage(model, 10)
    average.attach(optimizer)
    get_optimizer_state_dict(model, optimizer)
    assert average.count == 0
    take_steps(model, optimizer, 20)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    assert average.count == 20

    resumed = nn.Linear(2, 1)
    resumed.load_state_dict(model_state)
    optimizer = create(resumed.parameters(), lr=0.1)
    another = ParameterAverage(resumed, 10)
    another.attach(optimizer)
    another.load_state_dict(average.state_dict())
    set_optimizer_state_dict(resumed, optimizer, optimizer_state)
    assert another.count == 20
    take_steps(resumed, optimizer, 1)
    assert another.count == 21


@every_optimizer
def test_a_warm_up_from_zero_counts(create):
    model = nn.Linear(2, 1)
    optimizer = create(model.parameters(), lr=0.1)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 5)
    average = ParameterAverage(model, 10)
    average.attach(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0
    for step in range(10):
        take_steps(model, optimizer, 1)
        warm_up.step()
        assert average.count == step + 1


@pytest.mark.parametrize(
    ("rates", "gradients", "counts"),
    [
        ((0.0, 0.0), (0.0, 0.0), False),
        ((0.0, 0.0), (None, 0.0), False),
        ((0.0, 0.0), (None, None), False),
        ((0.0, 0.1), (0.0, 0.0), True),  # momentum and weight decay may change the parameters
        ((0.0, 0.1), (None, None), True),
        ((0.0, 0.0), (0.0, 1e-40), True),
        ((0.0, 0.0), (math.nan, None), True),
    ],
)
def test_a_step_without_rates_and_gradients_does_not_count(rates, gradients, counts):
    model = nn.Linear(2, 1)
    groups = [{"params": p, "lr": lr} for p, lr in zip(model.parameters(), rates, strict=True)]
    optimizer = torch.optim.SGD(groups)
    average = ParameterAverage(model, 10)
    average.attach(optimizer)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = None if gradient is None else torch.full_like(parameter, gradient)
    optimizer.step()
    assert average.count == counts


def test_sparse_gradients_at_a_rate_of_zero():
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    average = ParameterAverage(model, 10)
    average.attach(optimizer)
    model(torch.tensor([1, 1, 3])).sum().backward()
    optimizer.step()
    assert average.count == 1
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert average.count == 1


def test_an_average_tells_whether_it_is_swapped():
    average = ParameterAverage(nn.Linear(2, 1), 10)
    assert not average.swapped
    average.update()
    with average.average_parameters():
        assert average.swapped
    assert not average.swapped
    average.store()
    assert average.swapped
    average.restore()
    assert not average.swapped


def test_an_optimizer_that_loses_the_parameters_is_refused_at_its_first_step():
    """As by `deepspeed.initialize`, after which the optimizer trains copies."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = ParameterAverage(model, 0.5)
    average.attach(optimizer)
    (group,) = optimizer.param_groups
    group["params"] = [torch.ones(3, requires_grad=True)]
    group["params"][0].grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"with DeepSpeed, .* call update\(\) after each engine"):
        optimizer.step()
    assert average.count == 0
