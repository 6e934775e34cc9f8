"""Copies and pickles of an average: they go on with the tensors of the copy."""

import copy
import pickle

import pytest
import torch

from tailavg.torch import AveragedModel, ParameterAverage
from tests.support.torch_models import assert_averages, bits, small, snapshot, walked

WAYS = {"copied": copy.deepcopy, "pickled": lambda x: pickle.loads(pickle.dumps(x))}
every_way = pytest.mark.parametrize("again", WAYS.values(), ids=WAYS)


@every_way
def test_a_copy_takes_the_samples_of_its_own_tensors_wherever_they_are(again, monkeypatch):
    """Even at the same addresses: what is freed is soon given to the next tensor."""
    tensors = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.float64)}
    average = ParameterAverage(tensors, 1)
    average.update()
    # as if each were where the old one was
    monkeypatch.setattr("tailavg.torch.tracking._PLACE", (torch.Tensor.stride,) * 3)
    average._tracking._places = [[t.stride() for t in tensors.values()]] * 3
    tensors, average = again((tensors, average))
    for value in (1.0, 2.0):
        for tensor in tensors.values():
            tensor.fill_(value)
        average.update()
        for tensor in average.averaged_state_dict().values():
            assert (tensor == value).all()


@every_way
def test_a_copy_of_a_model_and_its_average_goes_on_by_itself(again):
    model = small()
    average, walk, history = walked(model, 10, 25)
    state = snapshot(average.state_dict())
    walk.model, average_of_copy = again((model, average))
    history.model = walk.model
    for _ in range(15):
        walk.step()
        average_of_copy.update()
        history.record()
    assert_averages(average_of_copy.averaged_state_dict(), history.average(average.rule))
    assert snapshot(average.state_dict()) == state


@every_way
def test_a_copy_inside_a_swap_is_refused(again):
    """As a state is: the training weights would be those of another model."""
    model = small()
    average, walk, _ = walked(model, 10, 25)
    walk.step()
    before = bits(model)
    with average.average_parameters(), pytest.raises(RuntimeError, match="restore"):
        again((model, average))
    assert bits(model) == before
    again((model, average))


@every_way
def test_a_copy_of_an_averaged_model_goes_on_by_itself(again):
    model = small()
    averaged, whole = AveragedModel(model, 5), AveragedModel(model, 5)
    for step in range(20):
        torch.nn.init.constant_(model[0].weight, step)
        averaged.update_parameters(model)
        whole.update_parameters(model)
        averaged = again(averaged)
    assert bits(averaged) == bits(whole)
