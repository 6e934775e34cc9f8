"""What does not train takes no memory, is exported as it is, and is not trained unnoticed."""

import pytest
import torch
from torch import nn

from tailavg import AnytimeWindow
from tailavg.torch import ParameterAverage
from tests.support.torch_models import History, assert_averages, bits, flat_tensors


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, as in LoRA."""

    def __init__(self, size=64, rank=2):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(size, size).requires_grad_(False)
        self.down = nn.Linear(size, rank, bias=False)
        self.up = nn.Linear(rank, size, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def train(model, average, steps, history=None):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    handle = average.attach(optimizer)
    for step in range(steps):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if history is not None:
            history.record()
    handle.remove()


def held(average):
    return sum(x.numel() for x in flat_tensors(average.state_dict()))


def test_only_the_adapter_is_held_and_outputs_are_complete():
    model = Adapted()
    average, everything = (
        ParameterAverage(model, 10),
        ParameterAverage(model, 10, trainable_only=False),
    )
    history = History(model)
    everything.attach(optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(30):
        optimizer.step()
    train(model, average, 30, history)
    assert list(average.state_dict()["partial"]) == ["down.weight", "up.weight"]
    assert held(average) == 4 * 2 * 2 * 64
    assert held(everything) == 4 * sum(p.numel() for p in model.parameters())
    got = average.averaged_state_dict()
    assert list(got) == list(model.state_dict())
    assert_averages(got, history.average(AnytimeWindow(10)))
    assert bits(dict(model.base.named_parameters())) == bits(
        {name: got[f"base.{name}"] for name in ("weight", "bias")}
    )
    other = Adapted()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(7.0)
    average.copy_to(other)
    assert bits(dict(other.named_parameters())) == bits(got)


def test_another_model_may_be_frozen_or_not():
    model = Adapted()
    average = ParameterAverage(model, 10)
    train(model, average, 30)
    frozen = Adapted().requires_grad_(False)
    average.copy_to(frozen)
    trained = Adapted().requires_grad_(True)
    average.copy_to(trained)
    assert bits(frozen) == bits(trained) == bits(average.averaged_state_dict())


def test_a_parameter_that_is_trained_later_is_told_at_once_and_nothing_changes():
    model = Adapted()
    average = ParameterAverage(model, 10)
    train(model, average, 30)
    before = bits(average.averaged_state_dict())
    model.base.requires_grad_(True)
    expected = (
        r"parameters that were frozen .* now train: base\.weight, base\.bias; create a new "
        "average, with trainable_only=False"
    )
    for call in (average.update, average.averaged_state_dict, average.state_dict):
        with pytest.raises(ValueError, match=expected):
            call()
    model.base.requires_grad_(False)
    assert average.count == 30
    assert bits(average.averaged_state_dict()) == before
    average.update()


def test_all_of_a_model_that_is_thawed_later_is_averaged_if_asked_for():
    model = Adapted()
    average, history = ParameterAverage(model, 40, trainable_only=False), History(model)
    train(model, average, 20, history)
    model.base.requires_grad_(True)
    train(model, average, 20, history)
    assert_averages(average.averaged_state_dict(), history.average(AnytimeWindow(40)))


def test_a_parameter_that_is_frozen_later_stays_in_the_average():
    model = Adapted()
    average, history = ParameterAverage(model, 40), History(model)
    train(model, average, 20, history)
    model.down.requires_grad_(False)
    model.up.weight = nn.Parameter(model.up.weight.detach().clone())  # so that it looks again
    train(model, average, 10, history)
    assert_averages(average.averaged_state_dict(), history.average(AnytimeWindow(40)))


def test_a_state_of_parameters_that_are_frozen_by_now_says_what_to_do():
    model = Adapted()
    average = ParameterAverage(model, 40)
    train(model, average, 20)
    model.down.requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"down\.weight is not averaged here.*trainable_only=False"
    ):
        ParameterAverage(model, 40).load_state_dict(average.state_dict())
    whole = ParameterAverage(Adapted(), 40, trainable_only=False)
    with pytest.raises(ValueError, match=r"base\.weight"):
        whole.load_state_dict(average.state_dict())


def test_a_model_without_trained_parameters_says_what_to_do():
    with pytest.raises(ValueError, match="trainable_only=False to average frozen parameters too"):
        ParameterAverage(Adapted().requires_grad_(False), 10)
    average = ParameterAverage(Adapted().requires_grad_(False), 10, trainable_only=False)
    average.update()
    plain = ParameterAverage({"w": torch.zeros(3)}, 10)  # of a tensor nobody said that it stays
    plain.update()
    assert plain.count == 1


def test_tied_parameters_train_if_one_does():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["a"].weight.requires_grad_(False)
    model["b"].weight.data = model["a"].weight.data
    average = ParameterAverage(model, 10)
    assert "a.weight" in average.state_dict()["partial"]
