"""Tensors without names, as `model.parameters()` gives them, go by their order."""

import pytest
import torch
from torch import nn

from tailavg.torch import ParameterAverage
from tests.support.torch_models import Walk, bits, named, saved, small, snapshot


def pair(steps=25):
    """An average of a model's parameters, one of the model itself, and the model."""
    model = small()
    unnamed, reference = ParameterAverage(model.parameters(), 10), ParameterAverage(model, 10)
    walk = Walk(model)
    for _ in range(steps):
        walk.step()
        unnamed.update()
        reference.update()
    return unnamed, reference, model


def test_parameters_alone_are_averaged_under_their_numbers():
    unnamed, reference, model = pair()
    got = unnamed.averaged_state_dict()
    assert list(got) == [str(i) for i in range(len(named(model)))]
    expected = reference.averaged_state_dict()
    assert list(bits(got).values()) == [bits(expected)[name] for name in named(model)]
    before = bits(model)
    with unnamed.average_parameters():
        assert bits(named(model)).items() <= bits(expected).items()
    assert bits(model) == before
    unnamed.store()
    unnamed.copy_to()
    assert bits(named(model)).items() <= bits(expected).items()
    unnamed.restore()
    assert bits(model) == before
    resumed = ParameterAverage(list(model.parameters()), 10)
    resumed.load_state_dict(saved(unnamed.state_dict()))
    assert snapshot(resumed.state_dict()) == snapshot(unnamed.state_dict())


@pytest.mark.parametrize("give", [nn.Module.parameters, lambda m: m, lambda m: nn.DataParallel(m)])
def test_a_copy_goes_into_another_models_parameters_by_order(give):
    unnamed, reference, model = pair()
    other = small(seed=3)
    unnamed.copy_to(give(other))
    expected = bits(reference.averaged_state_dict())
    assert bits(named(other)) == {name: expected[name] for name in named(model)}


def test_a_copy_into_more_or_fewer_or_other_parameters_is_refused():
    unnamed, reference, _ = pair()
    other = small(seed=3)
    before = bits(other)
    more = [*other.parameters(), torch.zeros(1)]
    for wrong in (more, list(other.parameters())[:-1], list(other.parameters())[::-1]):
        with pytest.raises(ValueError, match="model: "):
            unnamed.copy_to(wrong)
    with pytest.raises(ValueError, match="unexpected 0, 1"):  # a model has names
        reference.copy_to(other.parameters())
    assert bits(other) == before


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (torch.zeros(2, 2), "Tensor"),
        ([torch.zeros(2), ("b", torch.zeros(2))], "Tensor"),
        ([("b", torch.zeros(2)), torch.zeros(2)], "Tensor"),
        ([("b", torch.zeros(2), 1)], "tuple"),
        ([1.0], "float"),
        ([(1, torch.zeros(2))], "a pair of int and Tensor"),
    ],
)
def test_anything_else_is_refused(given, got):
    with pytest.raises(TypeError, match=f"a list of tensors, got {got}"):
        ParameterAverage(given, 10)
