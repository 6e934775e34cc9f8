"""What is averaged: parameters and buffers, chosen by patterns and options."""

import pytest
import torch
from torch import nn

from tailavg import AnytimeWindow
from tailavg.torch import ParameterAverage
from tests.support.torch_models import (
    History,
    Odd,
    assert_averages,
    batches,
    bits,
    named,
    small,
    walked,
)


def test_patterns_choose_what_is_averaged_and_the_rest_keeps_its_current_value():
    model = small()
    names = [name for name, _ in model.named_parameters()]
    chosen = {
        "include 0.*": ({"include": "0.*"}, {"0.weight", "0.bias"}),
        "include several": (
            {"include": ["0.weight", "*.bias"]},
            {"0.weight", "0.bias", "1.bias", "3.bias"},
        ),
        "exclude": ({"exclude": "*.bias"}, {n for n in names if not n.endswith("bias")}),
        "both": ({"include": "0.*", "exclude": ("*bias",)}, {"0.weight"}),
        "callable": ({"include": lambda name: name == "3.weight"}, {"3.weight"}),
        "excluding callable": ({"exclude": lambda name: name != "3.weight"}, {"3.weight"}),
    }
    for case, (options, kept) in chosen.items():
        average, _, history = walked(model, 10, 40, **options)
        assert set(average.state_dict()["partial"]) == kept, case
        expected, got = history.average(average.rule), average.averaged_state_dict()
        assert list(got) == list(model.state_dict())
        assert_averages(got, {name: expected[name] for name in kept})
        before = bits(model)
        with average.average_parameters():
            assert_averages(named(model), {name: expected[name] for name in kept})
            for name in set(names) - kept:
                assert bits({name: named(model)[name]}).items() <= before.items()
                assert bits({name: got[name]}).items() <= before.items()
        assert bits(model) == before


def test_what_is_left_out_follows_the_model_when_a_state_moves_on():
    model = small()
    average, walk, _ = walked(model, 10, 5, exclude="0.*")
    walk.step()  # no update: outputs still have the present value
    assert bits(average.averaged_state_dict())["0.weight"] == bits(model)["0.weight"]


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_an_error(option):
    for patterns in ("haed.*", ["0.*", "haed.*"]):
        with pytest.raises(ValueError, match="haed"):
            ParameterAverage(small(), 10, **{option: patterns})
    for wrong in (3, [4]):
        with pytest.raises((TypeError, ValueError)):
            ParameterAverage(small(), 10, **{option: wrong})


def test_a_parameter_whose_elements_share_memory_is_refused_by_name():
    model = small()
    model.shared = nn.Parameter(torch.ones(1).expand(3))
    with pytest.raises(ValueError, match="shared"):
        ParameterAverage(model, 10)
    assert ParameterAverage(model, 10, exclude="shared").count == 0


@pytest.mark.parametrize("buffers", ["copy", "skip"])
def test_a_buffer_whose_elements_share_memory_is_copied(buffers):
    """Masks are often made with `expand`."""
    model = small()
    model.register_buffer("mask", torch.ones(1, 3).expand(4, 3))
    model.register_buffer("position_ids", torch.arange(5).expand((1, -1)))
    average, _, _ = walked(model, 10, 25, buffers=buffers)
    before = bits(model)
    with average.average_parameters():
        assert bits(model) != before
    assert bits(model) == before
    assert bits(average.averaged_state_dict())["mask"] == before["mask"]
    average.update()


def test_parameters_of_eight_bits_are_averaged():
    weight = torch.ones(3).to(torch.float8_e4m3fn)
    average = ParameterAverage({"w": weight}, AnytimeWindow(1.0))
    for value in (1.0, 2.0, 2.0, 1.0):
        weight.copy_(torch.full((3,), value))
        average.update()
    assert average.averaged_state_dict(dtype=torch.float32)["w"].tolist() == [1.5] * 3
    assert average.averaged_state_dict()["w"].dtype == torch.float8_e4m3fn
    with average.average_parameters():
        assert weight.float().tolist() == [1.5] * 3
    assert weight.float().tolist() == [1.0] * 3


def test_parameters_without_a_shape_are_refused_by_name():
    with pytest.raises(ValueError, match=r"0\.weight"):
        ParameterAverage(nn.Sequential(nn.LazyLinear(3)), 10)


def test_everything_excluded_is_an_error():
    with pytest.raises(ValueError, match="exclude"):
        ParameterAverage(small(), 10, exclude="*")


def test_buffers_are_copied_unless_asked_otherwise():
    model = small()
    average = ParameterAverage(model, 10)
    for _ in batches(model, 20):
        average.update()
    current = {name: b.clone() for name, b in model.named_buffers()}
    got = average.averaged_state_dict()
    assert bits({n: got[n] for n in current}) == bits(current)
    before = bits(model)
    with average.average_parameters():
        assert bits(dict(model.named_buffers())) == bits(current)
        for _ in batches(model, 3, seed=1):
            pass
        assert bits(dict(model.named_buffers())) != bits(current)
    assert bits(model) == before, "what BatchNorm did inside stays inside"
    other = small(seed=2)
    average.copy_to(other)
    assert bits(dict(other.named_buffers())) == bits(current)


def test_buffers_may_be_averaged():
    model, rule = small(), AnytimeWindow(10)
    average, history = ParameterAverage(model, rule, buffers="average"), History()
    for _ in batches(model, 50):
        average.update()
        history.record(dict(model.named_buffers()) | named(model))
    expected = history.average(rule)
    got = average.averaged_state_dict()
    assert_averages(got, expected)
    assert int(got["1.num_batches_tracked"]) == 50
    assert {"1.running_mean", "1.running_var"} < set(average.state_dict()["partial"])
    before = bits(model)
    with average.average_parameters():
        assert_averages(dict(model.named_buffers()), {n: expected[n] for n in ("1.running_mean",)})
        assert int(model[1].num_batches_tracked) == 50
        for _ in batches(model, 3, seed=1):
            pass
    assert bits(model) == before
    other = small(seed=2)
    average.copy_to(other)
    assert bits(dict(other.named_buffers())) == bits(
        {n: got[n] for n in dict(model.named_buffers())}
    )


def test_buffers_may_be_left_alone():
    model = small()
    average = ParameterAverage(model, 10, buffers="skip")
    for _ in batches(model, 20):
        average.update()
    got, current = average.averaged_state_dict(), dict(model.named_buffers())
    assert list(got) == list(model.state_dict())
    assert bits({n: got[n] for n in current}) == bits(current)
    before = bits(current)
    with average.average_parameters():
        for _ in batches(model, 3, seed=1):
            pass
        inside = bits(current)
        assert inside != before
    assert bits(current) == inside, "skipped: a swap does not touch them"
    other = small(seed=2)
    fresh = bits(dict(other.named_buffers()))
    average.copy_to(other)
    assert bits(dict(other.named_buffers())) == fresh


def test_buffers_outside_of_the_state_dict_go_along_with_swaps_and_copies():
    model = Odd()
    average, _, _ = walked(model, 10, 3)
    assert "cache" not in average.averaged_state_dict()
    before = bits(model)
    with average.average_parameters():
        model.cache.fill_(7.0)
        model.steps.fill_(7)
    assert bits(model) == before
    other = Odd(seed=3)
    average.copy_to(other)
    assert bits({"": other.cache}) == bits({"": model.cache})


def test_a_buffer_replaced_inside_a_swap_is_put_back():
    """`self.steps = self.steps + 1` binds a new tensor, as many models do."""
    model = Odd()
    average, _, _ = walked(model, 10, 3)
    before = bits(model)
    with average.average_parameters():
        model.steps = model.steps + 1
        model.norm.running_mean = torch.full((4,), 9.0)
    assert bits(model) == before
    average.update()


def test_a_buffer_may_change_its_shape_between_swaps():
    """A cache that grows is copied, not averaged: it is whatever it is."""
    model = Odd()
    average, walk, _ = walked(model, 10, 3)
    model.cache = torch.rand(9)
    model.nothing = torch.rand(2)
    walk.step()
    average.update()
    before = bits(model)
    with average.average_parameters():
        model.cache = torch.rand(2)
    assert bits(model) == before
