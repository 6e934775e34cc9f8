"""The growing exponential in torch's own AveragedModel, against dense weights."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tailavg import Exponential
from tailavg.torch.functions import growing_avg_fn, growing_multi_avg_fn
from tests.support.cases import WINDOWS, windows
from tests.support.model import averages, weight_matrix

FUNCTIONS = {
    "multi_avg_fn": lambda window: {"multi_avg_fn": growing_multi_avg_fn(window)},
    "avg_fn": lambda window: {"avg_fn": growing_avg_fn(window)},
}
functions = pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS)


class Net(nn.Module):
    """Parameters of two precisions, and buffers of three kinds."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.single = nn.Parameter(torch.zeros(2, 2))
        self.more = nn.Parameter(torch.zeros(()))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("seen", torch.tensor(False))


def run(averaged, model, steps, seed=0):
    """Update with random tensors; their values, and the averages after each."""
    random = np.random.default_rng(seed)
    rows = []
    for t in range(1, steps + 1):
        with torch.no_grad():
            for tensor in [*model.parameters(), model.mean, model.phase]:
                tensor.copy_(torch.as_tensor(1 + random.random(tuple(tensor.shape))))
            model.phase *= 1 + 2j
            model.steps.fill_(3 * t)
            model.seen.fill_(t % 2 == 0)
        averaged.update_parameters(model)
        rows.append([copy.deepcopy(m.state_dict()) for m in (model, averaged.module)])
    return zip(*rows, strict=True)


def values(states, name):
    return np.array([state[name].numpy() for state in states])


@functions
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("use_buffers", [False, True])
def test_averages_are_the_growing_exponential_of_the_weights(make, window, use_buffers):
    model = Net()
    averaged = AveragedModel(model, use_buffers=use_buffers, **make(window))
    given_states, averaged_states = run(averaged, model, 60)
    matrix = weight_matrix(Exponential(window), 60)
    for name in model.state_dict():
        given_values, got = values(given_states, name), values(averaged_states, name)
        if name in ("steps", "seen") or (name in ("mean", "phase") and not use_buffers):
            np.testing.assert_array_equal(got, given_values)
        else:
            rtol = 1e-12 if name == "wide" else 3e-6
            np.testing.assert_allclose(got, averages(matrix, given_values), rtol=rtol)
    assert averaged.n_averaged == 60


@given(windows)
@settings(max_examples=20)
def test_both_functions_are_the_decay_of_the_rule(window):
    multi, single = growing_multi_avg_fn(window), growing_avg_fn(window)
    many = [torch.tensor([5.0, 1.0], dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)]
    one, new = [x.clone() for x in many], [x + 3 for x in many]
    for n in [1, 2, 7, torch.tensor(12), 10**6]:
        g = Exponential(window).decay(int(n) + 1)
        expected = [g * x + (1 - g) * y for x, y in zip(many, new, strict=True)]
        multi(many, new, n)
        one = [single(x, y, n) for x, y in zip(one, new, strict=True)]
        torch.testing.assert_close(many, expected, rtol=1e-14, atol=0)
        torch.testing.assert_close(one, expected, rtol=1e-14, atol=0)


@functions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_averaged_in_16_bits(make, dtype):
    model = nn.Linear(3, 2).to(dtype)
    averaged = AveragedModel(model, **make(4))
    rows = []
    for t in range(1, 13):
        with torch.no_grad():
            model.weight.fill_(t)
        averaged.update_parameters(model)
        rows.append(averaged.module.weight[0, 0].item())
    assert averaged.module.weight.dtype == dtype
    expected = weight_matrix(Exponential(4), 12) @ np.arange(1.0, 13)
    np.testing.assert_allclose(rows, expected, rtol=0.02)


def test_a_single_average_may_be_wider_than_the_weights():
    average = growing_avg_fn(1.0)(torch.tensor([1.0]), torch.tensor([2.0], dtype=torch.bfloat16), 3)
    assert average.dtype == torch.float32
    assert average.item() == 1.25


@functions
def test_a_resumed_run_is_the_uninterrupted_one(make):
    model = Net()
    whole, resumed = (AveragedModel(model, use_buffers=True, **make(0.25)) for _ in range(2))
    list(run(whole, model, 10))
    resumed.load_state_dict(whole.state_dict())
    states = []
    for averaged in (whole, resumed):
        list(run(averaged, model, 5, seed=1))
        states.append(averaged.state_dict().values())
    assert resumed.n_averaged == 15
    assert all(map(torch.equal, *states))


@functions
@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_functions_can_be_copied_and_pickled(make, again):
    """As `ddp_spawn` does, with the functions and with a whole model that has them."""
    [(name, function)] = make(0.25).items()
    copied = again(function)
    assert copied == function != make(0.5)[name]
    assert "Exponential(" in repr(copied)
    assert "0.25" in repr(copied)
    model = Net()
    whole, other = AveragedModel(model, **{name: function}), AveragedModel(model, **{name: copied})
    list(run(whole, model, 10))
    list(run(other, model, 10))
    other = again(other)
    for averaged in (whole, other):
        list(run(averaged, model, 5, seed=1))
    assert all(map(torch.equal, whole.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("make", [growing_multi_avg_fn, growing_avg_fn])
@pytest.mark.parametrize("bad", [0, 1.5, True, "0.5", None], ids=repr)
def test_a_bad_window_is_refused(make, bad):
    with pytest.raises((ValueError, TypeError), match="window: expected"):
        make(bad)
