"""Tensors that share memory: averaged, swapped, copied, or refused by name."""

import copy

import pytest
import torch
from torch import nn

from tailavg.torch import AveragedModel, ParameterAverage
from tests.support.torch_models import (
    assert_averages,
    bits,
    named,
    saved,
    snapshot,
    walked,
    walked_module,
    wide,
)


def same_data(a):
    return a, a.data


def same_parameter(a):
    return a, a


def transposed(a):
    return a, a.data.t()


def flattened(a):
    return a, a.data.view(-1)


def partly(a):
    flat = torch.rand(a.numel() * 3 // 2)
    return flat[: a.numel()], flat[a.numel() // 2 :]


def inside(a):
    return a, a.data[1:-1, 1:-1]


def apart(a):
    flat = torch.rand(2 * a.numel())
    return flat[: a.numel()], flat[a.numel() :]


def every_other(a):
    flat = torch.rand(2 * a.numel())
    return flat[::2], flat[1::2]


def columns(a):
    return a.data[:, : len(a) // 2], a.data[:, len(a) // 2 :]


class Shared(nn.Module):
    """Two parameters on the memory of one, and one that has nothing to do with them."""

    def __init__(self, share, size, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        first, second = share(nn.Parameter(torch.rand(size, size)))
        self.a = nn.Parameter(first)
        self.other = nn.Linear(3, 2)
        self.b = nn.Parameter(second)


PARTIAL = [transposed, flattened, partly, inside]
APART = [apart, every_other, columns]
every_kind = pytest.mark.parametrize("share", [same_data, same_parameter, *APART])
every_size = pytest.mark.parametrize("size", [4, 100])  # small tensors go another way


@every_kind
@every_size
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_swap_shows_the_averages_and_gives_every_bit_back(share, size, device):
    model = Shared(share, size)
    average, walk, history = walked(model, 5, 12, device=device)
    walk.step()
    before, expected = bits(model), history.average(average.rule)
    with average.average_parameters():
        assert_averages(named(model), expected)
    assert bits(model) == before
    average.store()
    average.copy_to()
    assert_averages(named(model), expected)
    average.restore()
    assert bits(model) == before
    assert_averages(average.averaged_state_dict(), expected)
    average.copy_to()
    assert_averages(named(model), expected)


@pytest.mark.parametrize("share", [same_data, same_parameter])
def test_the_same_view_of_the_same_memory_is_averaged_once(share):
    model = Shared(share, 4)
    average, _, history = walked(model, 5, 12)
    assert list(average.state_dict()["partial"]) == ["a", "other.weight", "other.bias"]
    got = average.averaged_state_dict()
    assert got["a"] is got["b"]
    state = saved(average.state_dict())
    resumed = ParameterAverage(Shared(share, 4, seed=1), 5)
    resumed.load_state_dict(state)
    assert snapshot(resumed.state_dict()) == snapshot(state)
    # a state of a model that was not tied
    untied = state | {"partial": state["partial"] | {"b": state["partial"]["a"].clone()}}
    with pytest.raises(ValueError, match=r"partial: a and b are tied in this model"):
        resumed.load_state_dict(untied)
    assert snapshot(resumed.state_dict()) == snapshot(state)
    assert_averages(resumed.averaged_state_dict(), history.average(average.rule))


@every_kind
@every_size
def test_copies_go_into_a_model_that_shares_in_the_same_way_or_not_at_all(share, size):
    average, _, history = walked(Shared(share, size), 5, 12)
    alike, none = Shared(share, size, seed=1), copy.deepcopy(Shared(share, size, seed=2))
    assert none.a.data_ptr() != none.b.data_ptr()
    for other in (alike, none):
        average.copy_to(other)
        assert_averages(named(other), history.average(average.rule))


def test_a_copy_into_a_model_that_shares_more_is_refused():
    model = Shared(same_data, 4)
    average, _, _ = walked(copy.deepcopy(model), 5, 12)
    before = bits(model)
    with pytest.raises(ValueError, match="a and b are one tensor"):
        average.copy_to(model)
    assert bits(model) == before


@pytest.mark.parametrize("share", PARTIAL)
def test_memory_that_is_shared_in_part_is_refused_by_both_names(share):
    model = Shared(share, 4)
    message = r"(a and b|b and a) share part of their memory.*clone\(\)"
    for make in (ParameterAverage, AveragedModel):
        with pytest.raises(ValueError, match=message):
            make(model, 5)
    with pytest.raises(ValueError, match=message):
        ParameterAverage(model, 5, exclude="b")
    before = bits(model)
    average, _, _ = walked(Shared(lambda a: (a, a.data.clone()), 4), 5, 12)
    with pytest.raises(ValueError, match=r"share part|shape"):
        average.copy_to(model)
    assert bits(model) == before
    average = ParameterAverage(model, 5, exclude=["a", "b"])  # as it is
    average.update()
    with average.average_parameters():
        pass
    assert bits(model) == before


@every_kind
@every_size
def test_an_averaged_model_has_the_averages(share, size):
    averaged, _, history = walked_module(Shared(share, size), 5, 12)
    assert_averages(named(averaged.module), history.average(averaged.rule))
    state = saved(averaged.state_dict())
    resumed = AveragedModel(Shared(share, size, seed=1), 5)
    resumed.load_state_dict(state)
    assert bits(resumed) == bits(averaged)


class Buffered(nn.Module):
    """A buffer that shows a parameter, before or after it."""

    def __init__(self, size, view, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        weight = nn.Parameter(torch.rand(size, size))
        self.early = nn.Module()
        self.early.register_buffer("shown", view(weight.data))
        self.weight = weight
        self.late = nn.Module()
        self.late.register_buffer("shown", view(weight.data))


@every_size
@pytest.mark.parametrize("buffers", ["copy", "average", "skip"])
def test_a_buffer_that_is_a_parameter_is_averaged_with_it(size, buffers):
    model = Buffered(size, lambda weight: weight)
    average, walk, history = walked(model, 5, 12, buffers=buffers)
    expected = history.average(average.rule)["weight"]
    expected = {"weight": expected, "early.shown": expected, "late.shown": expected}
    walk.step()
    before = bits(model)
    with average.average_parameters():
        assert_averages(model.state_dict(), expected)
    assert bits(model) == before
    assert_averages(average.averaged_state_dict(), expected)
    for other in (
        Buffered(size, lambda weight: weight, seed=1),
        Buffered(size, torch.clone, seed=1),
    ):
        average.copy_to(other)
        assert_averages(other.state_dict(), expected)
    averaged, walk, history = walked_module(model, 5, 12)
    assert_averages(named(averaged.module), history.average(averaged.rule))


WRONG = {
    "other numbers": (lambda weight: weight.view(torch.int32), {}),
    "a part": (lambda weight: weight[0], {}),
    "a part, skipped": (lambda weight: weight[0], {"buffers": "skip"}),
    "transposed": (lambda weight: weight.t(), {}),
    "expanded": (lambda weight: weight[:1].expand(9, -1), {}),
}


@pytest.mark.parametrize(("view", "options"), WRONG.values(), ids=WRONG)
def test_memory_that_is_averaged_only_in_part_is_refused_by_both_names(view, options):
    with pytest.raises(ValueError, match=r"early\.shown.*weight|weight.*early\.shown"):
        ParameterAverage(Buffered(4, view), 5, **options)


def test_complex_numbers_and_their_parts_are_refused():
    spin = torch.rand(4, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"spin and parts share part"):
        ParameterAverage({"spin": spin, "parts": torch.view_as_real(spin)}, 5)


def tie(model):
    model.b = nn.Parameter(model.a.data)


def tie_data(model):
    model.b.data = model.a.data


def untie(model):
    model.b = nn.Parameter(model.b.data.clone())


def untie_data(model):
    model.b.data = model.b.data.clone()


def double(model):
    model.double()  # torch breaks such ties


@pytest.mark.parametrize(
    ("share", "change"),
    [
        (lambda a: (a, a.data.clone()), tie),
        (lambda a: (a, a.data.clone()), tie_data),
        (same_data, untie),
        (same_data, untie_data),
        (same_data, double),
    ],
)
def test_a_tie_that_is_made_or_broken_later_is_refused_by_name(share, change):
    model = Shared(share, 100)
    average, _, _ = walked(model, 5, 12)
    state = snapshot(average.state_dict())
    live = average.state_dict()
    change(model)
    before = bits(model)
    for call in (average.update, lambda: average.average_parameters().__enter__(), average.copy_to):
        with pytest.raises(ValueError, match=r"b (had|was) .*, and (has|is) .* now"):
            call()
        assert bits(model) == before
        assert snapshot(live) == state


def test_memory_that_is_shared_in_part_later_is_refused():
    model = Shared(lambda a: (a, a.data.clone()), 100)
    average, _, _ = walked(model, 5, 12)
    state = snapshot(average.state_dict())
    model.b.data = model.a.data.t()
    before = bits(model)
    with pytest.raises(ValueError, match="share part"):
        average.update()
    model.b.data = model.b.data.clone()
    assert bits(model) == before
    assert snapshot(average.state_dict()) == state


@pytest.mark.parametrize("share", [same_data, apart])
def test_a_model_that_is_converted_inside_a_swap_gets_all_weights_back(share):
    model = Shared(share, 100)
    average, walk, _ = walked(model, 5, 12)
    walk.step()
    before = {name: wide(tensor) for name, tensor in named(model).items()}
    with average.average_parameters():
        model.double()
    assert all((wide(tensor) == before[name]).all() for name, tensor in named(model).items())
