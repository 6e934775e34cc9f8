"""Averages that are attached to optimizers in wrappers, as trainers have them."""

import accelerate
import pytest
import torch
from torch import nn

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
    average.attach(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1))


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
