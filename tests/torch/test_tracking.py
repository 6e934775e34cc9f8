"""Parameters that are replaced, moved or converted under an average."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from tailavg import AnytimeWindow, Exponential
from tailavg.torch import ParameterAverage
from tests.support.cases import short
from tests.support.torch_models import (
    Odd,
    assert_averages,
    bits,
    named,
    small,
    snapshot,
    walked,
    walked_module,
    wide,
)


def replaced_weight(model):
    model[0].weight = nn.Parameter(torch.full((4, 3), 5.0))


def assigned_state(model):
    model.load_state_dict(small(seed=9).state_dict(), assign=True)


def new_data(model):
    model[0].weight.data = torch.full((4, 3), 5.0)


def new_submodule(model):
    model[0] = nn.Linear(3, 4)


def doubled(model):
    model.to(torch.float64)


def halved(model):
    model.to(torch.bfloat16)


def transposed(model):
    model[0].weight.data = torch.full((3, 4), 5.0).t()


def parametrized(model):
    """torch's own way to recompute a weight: its parameters get other names."""
    torch.nn.utils.parametrizations.weight_norm(model[0])


@pytest.mark.parametrize(
    "change",
    [replaced_weight, assigned_state, new_data, new_submodule, doubled, halved, transposed],
)
@pytest.mark.parametrize("rule", [AnytimeWindow(10), Exponential(10)], ids=short)
def test_a_replaced_parameter_is_noticed(rule, change):
    model = small()
    average, walk, history = walked(model, rule, 25)
    change(model)
    before = bits(model)
    with average.average_parameters():  # a swap before the next update
        assert_averages(named(model), history.average(rule))
        assert bits(model) != before
    assert bits(model) == before
    for _ in range(4):
        average.update()  # the new values count at once
        history.record()
        assert_averages(average.averaged_state_dict(), history.average(rule))
        walk.step()
    got = average.averaged_state_dict()
    assert {n: x.dtype for n, x in got.items()} == {
        n: x.dtype for n, x in model.state_dict().items()
    }
    before = bits(model)
    with average.average_parameters():
        assert bits(model) != before
    assert bits(model) == before
    assert model[0].weight.requires_grad


def test_a_change_of_memory_format_is_noticed():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, 3))
    average, walk, history = walked(model, 10, 15)
    for memory_format in (torch.channels_last, torch.contiguous_format):
        model.to(memory_format=memory_format)
        for _ in range(15):
            walk.step()
            average.update()
            history.record()
        assert_averages(average.averaged_state_dict(), history.average(average.rule))
        before = bits(model)
        with average.average_parameters():
            assert_averages(named(model), history.average(average.rule))
            assert model[0].weight.is_contiguous(memory_format=memory_format)
        assert bits(model) == before


def test_new_data_of_a_plain_tensor_is_noticed_too():
    weight = nn.Parameter(torch.ones(3))
    average = ParameterAverage({"w": weight}, AnytimeWindow(1.0))
    average.update()
    weight.data = torch.full((3,), 2.0)
    average.update()
    assert average.averaged_state_dict()["w"].tolist() == [1.5, 1.5, 1.5]
    weight.data = torch.ones(4)
    with pytest.raises(ValueError, match="w"):
        average.update()


def taller(model):
    model[3] = nn.Linear(4, 3)


def longer(model):
    model.append(nn.Linear(2, 2))


def shorter(model):
    del model[3]


def without_bias(model):
    model[0].bias = None


def with_new_parameter(model):
    model[2].gain = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (taller, "3.weight"),
        (longer, "4.weight"),
        (shorter, "3.weight"),
        (without_bias, "0.bias"),
        (with_new_parameter, "2.gain"),
        (parametrized, "0.weight|0.parametrizations"),
    ],
)
def test_parameters_that_changed_shape_appeared_or_vanished_raise_by_name(change, name):
    model = small()
    average, _, _ = walked(model, 10, 25)
    live = average.state_dict()
    state = snapshot(live)
    change(model)
    before = bits(model)
    for call in (average.update, lambda: average.average_parameters().__enter__(), average.copy_to):
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            call()
        assert bits(model) == before
        assert average.count == 25
        assert snapshot(live) == state


def test_a_change_that_is_undone_is_forgiven():
    model = small()
    average, walk, history = walked(model, 10, 25)
    old = model[3]
    model[3] = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"3\.weight"):
        average.update()
    model[3] = old
    for _ in range(10):
        walk.step()
        average.update()
        history.record()
    assert_averages(average.averaged_state_dict(), history.average(average.rule))


def test_a_module_that_is_replaced_where_the_old_one_was_in_memory_is_noticed():
    """Python gives the place of a deleted object to the next one: an id is no proof."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    model = Net()
    average = ParameterAverage(model, AnytimeWindow(1))
    average.update()
    for value in range(50):
        del model.head
        model.head = nn.Linear(4, 2)
        nn.init.constant_(model.head.weight, value)
        average.update()
        assert (average.averaged_state_dict()["head.weight"] == value).all()
        with average.average_parameters():
            nn.init.zeros_(model.head.weight)
        assert (model.head.weight == value).all()


@pytest.mark.parametrize(
    "cut", [lambda x: x[:1], lambda x: x[:, :1], lambda x: x[0, :1], lambda x: x.t()]
)
def test_a_shape_that_changes_at_the_same_place_in_memory_is_noticed(cut):
    """Such a tensor may even broadcast into its accumulator."""
    model = small()
    average, _, _ = walked(model, 10, 25)
    model[0].weight.data = cut(model[0].weight.data)
    before = bits(model)
    for call in (average.update, lambda: average.average_parameters().__enter__(), average.copy_to):
        with pytest.raises(ValueError, match=r"0\.weight"):
            call()
        assert average.count == 25
        assert bits(model) == before


def test_a_layout_that_changes_at_the_same_place_in_memory_is_noticed():
    weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    average = ParameterAverage({"w": weight}, AnytimeWindow(1))
    average.update()
    weight.data = weight.data.t()
    average.update()
    assert average.averaged_state_dict()["w"].tolist() == [[1.0, 3.0], [2.0, 4.0]]
    with average.average_parameters():
        assert weight.tolist() == [[1.0, 3.0], [2.0, 4.0]]


def test_a_type_that_changes_at_the_same_place_in_memory_is_noticed():
    memory = torch.full((4,), 2.0)
    weight = nn.Parameter(memory)
    average = ParameterAverage({"w": weight}, AnytimeWindow(1))
    average.update()
    weight.data = torch.zeros(0)
    halves = memory.view(torch.bfloat16)[:4]
    halves.fill_(3.0)
    weight.data = halves
    average.update()
    assert average.averaged_state_dict()["w"].tolist() == [3.0] * 4


def test_a_tie_that_is_broken_or_made_is_noticed_or_refused():
    """After the untying the two have two averages: one accumulator cannot hold them."""
    model = Odd()
    average, _, _ = walked(model, 10, 5)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with pytest.raises(ValueError, match=r"head\.weight|embed\.weight"):
        average.update()
    assert average.count == 5


MOVES = {
    "double": lambda model: model.double(),
    "new data": lambda model: [setattr(p, "data", p.data.clone()) for p in model.parameters()],
    "assigned": lambda model: model.load_state_dict(
        {name: x.clone() for name, x in model.state_dict().items()}, assign=True
    ),
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_model_that_is_moved_or_converted_inside_a_swap_gets_its_weights_back(move):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
    average, walk, history = walked(model, 10, 25)
    before = {name: wide(x) for name, x in model.state_dict().items()}
    with average.average_parameters():
        move(model)
        assert_averages(named(model), history.average(average.rule), torch.float32)
    after = {name: wide(x) for name, x in model.state_dict().items()}
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values, err_msg=name)
    walk.step()
    average.update()
    history.record()
    assert_averages(average.averaged_state_dict(), history.average(average.rule), torch.float32)


def test_what_changes_its_shape_inside_a_swap_comes_back_too():
    def grown(model):
        model.cache = torch.ones(9)

    def resized(model):
        model.cache.resize_(9)

    def dropped(model):
        model.cache = None

    def unbiased(model):
        model.module.bias = None

    def reshaped(model):
        model.module.bias = nn.Parameter(torch.zeros(3))

    for change in (grown, resized, dropped, unbiased, reshaped):
        model = Odd()
        average, _, _ = walked(model, 10, 25)
        before = bits(model)
        with average.average_parameters():
            change(model)
        assert bits(model) == before, change.__name__
        with pytest.raises(RuntimeError, match="store"):
            average.restore()
        average.update()
        assert average.count == 26


def test_a_parameter_replaced_inside_a_swap_does_not_spoil_the_others():
    model = small()
    average, _, _ = walked(model, 10, 25)
    before = bits(model)
    with average.average_parameters():
        model[0].weight = nn.Parameter(torch.zeros(4, 3))
    after = bits(model)
    assert {n: x for n, x in after.items() if n != "0.weight"} == {
        n: x for n, x in before.items() if n != "0.weight"
    }
    assert after["0.weight"] == before["0.weight"]


def to_meta(model):
    model[0].weight = nn.Parameter(torch.empty(4, 3, device="meta"))


def all_to_meta(model):
    model.to("meta")


def to_complex(model):
    model[0].weight = nn.Parameter(torch.ones(4, 3, dtype=torch.complex64))


def to_whole_numbers(model):
    model[0].weight = nn.Parameter(torch.ones(4, 3, dtype=torch.int32), requires_grad=False)


def to_sparse(model):
    model[0].weight = nn.Parameter(torch.ones(4, 3).to_sparse())


def to_sparse_rows(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that these are in beta
        model[0].weight = nn.Parameter(torch.ones(4, 3).to_sparse_csr())


def to_four_bits(model):
    packed = torch.zeros(4, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    model[0].weight = nn.Parameter(packed, requires_grad=False)


UNREADABLE = [
    to_meta,
    all_to_meta,
    to_complex,
    to_whole_numbers,
    to_sparse,
    to_sparse_rows,
    to_four_bits,
]


@pytest.mark.parametrize("change", UNREADABLE)
def test_a_parameter_without_numbers_to_add_is_refused_by_name_and_changes_nothing(change):
    model = small()
    average, _, _ = walked(model, 10, 25)
    averaged, _, _ = walked_module(model, 10, 25)
    live, state = average.state_dict(), snapshot(average.state_dict())
    before = bits(averaged)
    good = copy.deepcopy(model)
    change(model)
    for call in (average.update, lambda: average.average_parameters().__enter__(), average.copy_to):
        with pytest.raises(ValueError, match=r"0\.weight"):
            call()
    with pytest.raises(ValueError, match=r"0\.weight"):
        averaged.update_parameters(model)
    assert snapshot(live) == state
    assert bits(averaged) == before
    averaged.update_parameters(good)
    assert averaged.count == 26
    model.load_state_dict(good.state_dict(), assign=True)
    average.update()
    assert average.count == 26


@pytest.mark.parametrize("change", [to_meta, to_sparse, to_sparse_rows, to_four_bits])
def test_tensors_without_numbers_are_refused_at_once_unless_excluded(change):
    model = small()
    change(model)
    with pytest.raises(ValueError, match=r"0\.weight"):
        ParameterAverage(model, 10, trainable_only=False)
    ParameterAverage(model, 10, exclude="0.weight").update()
