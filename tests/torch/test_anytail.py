"""ParameterAverage of an AnyTail: every window against NumPy's."""

import math

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tailavg import AnyTail, AnytimeWindow, Exponential, Fixed, Growing, TailAverage
from tailavg.torch import AveragedModel, ParameterAverage, convert_tail_batchnorm
from tests.support.cases import short
from tests.support.torch_models import (
    History,
    Odd,
    Walk,
    assert_averages,
    bits,
    counted,
    named,
    outputs,
    saved,
    small,
    snapshot,
    tensors_of,
    tolerance,
    wide,
)

TAILS = [AnyTail(), AnyTail(6), AnyTail(8, 0.4), AnyTail(7, 0.02)]
every_tail = pytest.mark.parametrize("rule", TAILS, ids=short)


# The averages


@every_tail
def test_every_window_is_that_of_numpy(rule):
    """Steps enough for many folds and merges; reads in between change nothing."""
    tensors, steps = tensors_of(), 1101
    read_at = {1, 2, 5, 6, 7, 8, 12, 13, 14, 40, 255, 256, 257, 513, 1000, 1001, 1101}
    average, unread = ParameterAverage(tensors, rule), ParameterAverage(tensors, rule)
    exact = {name: TailAverage(rule) for name in tensors}
    random = np.random.default_rng(0)
    for t in range(1, steps + 1):
        for name, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(1 + random.random(3)))
            exact[name].update(wide(tensor))
        average.update()
        unread.update()
        if t in read_at:
            for window in (rule.shortest, 0.55, 1.0, math.ceil(rule.shortest * t), t, 2 * t):
                expected = {name: run.value(window) for name, run in exact.items()}
                got = average.averaged_state_dict(window=window)
                assert_averages(got, expected)
                wider = average.averaged_state_dict(torch.float64, window)
                for name in ("float32", "bfloat16", "float16"):
                    np.testing.assert_allclose(wide(wider[name]), expected[name], rtol=4e-6)
                before = bits(tensors)
                with average.average_parameters(window):
                    assert bits(tensors) == bits(got)
                assert bits(tensors) == before
                weights = exact["float64"].weights(window)
                assert np.array_equal(average.weights(window), weights)
                assert average.profile(window) == exact["float64"].profile(window)
            state, other = average.state_dict(), exact["float64"].state_dict()
            assert (state["starts"], state["rule"]) == (other["starts"], other["rule"])
    assert snapshot(average.state_dict()) == snapshot(unread.state_dict())
    assert average.count == steps


@settings(max_examples=25)
@given(
    st.integers(6, 20),
    st.floats(0.02, 0.9),
    st.lists(st.integers(1, 700), min_size=1, max_size=3, unique=True).map(sorted),
    st.floats(0, 1),
)
def test_any_tail_resumed_at_any_step_is_that_of_numpy(m, shortest, stops, window):
    rule, weight = AnyTail(m, shortest), torch.zeros(2, dtype=torch.float64)
    window = min(1.0, shortest + (1 - shortest) * window)
    average, exact = ParameterAverage({"w": weight}, rule), TailAverage(rule)
    for t, x in enumerate((1 + np.random.default_rng(m).random((stops[-1], 2))), start=1):
        weight.copy_(torch.from_numpy(x))
        average.update()
        exact.update(x)
        if t in stops:
            got = average.averaged_state_dict(window=window)["w"]
            np.testing.assert_allclose(wide(got), exact.value(window), rtol=1e-12)
            resumed = ParameterAverage({"w": weight}, rule)
            resumed.load_state_dict(saved(average.state_dict()))
            average = resumed


def test_averages_of_bfloat16_are_held_in_single_precision():
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    average, exact = ParameterAverage(model, AnyTail(6)), TailAverage(AnyTail(6))
    for t in range(1500):
        nn.init.constant_(model.weight, 1.0 if t < 700 else 1.0078125)  # the next there is
        average.update()
        exact.update(wide(model.weight))
    for window in (0.1, 0.6, 1.0):
        got = average.averaged_state_dict(torch.float32, window)["weight"]
        np.testing.assert_allclose(wide(got), exact.value(window), rtol=1e-6)
        assert average.averaged_state_dict(window=window)["weight"].dtype == torch.bfloat16
        with average.average_parameters(window=window):
            rtol = tolerance(torch.bfloat16)
            np.testing.assert_allclose(wide(model.weight), exact.value(window), rtol=rtol)
    assert {x.dtype for x in average.state_dict()["partial"].values()} == {torch.float32}


def test_a_model_of_all_kinds_at_once_is_averaged(tmp_path):
    rule, model = AnyTail(6, 0.2), Odd()
    average = ParameterAverage(model, rule, update_every=2, trainable_only=False)
    walk = Walk(model)
    history = History(model)
    for step in range(120):
        walk.step()
        average.update()
        if step % 2:
            history.record()
    assert average.count == 60
    before = bits(model)
    exact = TailAverage(rule)
    exact.update_many(range(60))
    for window in (0.2, 0.5, 45):
        alpha = exact.weights(window)
        expected = {
            name: np.tensordot(alpha, np.array(xs), 1) for name, xs in history.samples.items()
        }
        got = average.averaged_state_dict(window=window)
        assert list(got) == list(model.state_dict())
        assert_averages(got, {name: x for name, x in expected.items() if name in got})
        assert bits(average.full_state_dict(window=window)) == bits(got)
        with average.average_parameters(window):
            assert_averages(named(model), expected)
        assert bits(model) == before
        other = Odd(seed=1)
        average.copy_to(other, window)
        assert bits(named(other)) == bits({name: got[name] for name in named(other)})
        average.save_averaged(tmp_path / "averaged", window=window)
        for name, tensor in safetensors.torch.load_file(tmp_path / "averaged").items():
            assert bits({"": tensor}) == bits({"": got[name]}), name
    average.copy_to(window=0.2)
    assert bits(named(model)) != {name: x for name, x in before.items() if name in named(model)}


def test_nan_leaves_a_window_that_does_not_touch_its_block():
    rule, weight = AnyTail(8), torch.ones(3)
    average, exact = ParameterAverage({"w": weight}, rule), TailAverage(rule)
    for t in range(1, 1200):
        weight.fill_(1.0)
        if t == 600:
            weight[1] = math.nan
        average.update()
        exact.update(wide(weight))
        if t % 7 == 0:
            for window in (0.1, 0.3, 1.0):
                got = average.averaged_state_dict(window=window)["w"]
                assert np.array_equal(np.isnan(wide(got)), np.isnan(exact.value(window))), t
    assert not torch.isnan(average.averaged_state_dict(window=0.1)["w"]).any()
    assert torch.isnan(average.averaged_state_dict(window=1.0)["w"][1])


def test_infinity_is_data_when_blocks_are_merged():
    rule, weight = AnyTail(6), torch.ones(3, dtype=torch.float64)
    average, exact = ParameterAverage({"w": weight}, rule), TailAverage(rule)
    for t in range(100):
        weight.copy_(torch.tensor([math.inf, -math.inf, math.inf if t % 2 else 1.0]))
        if t:
            weight.fill_(1.0)
        average.update()
        exact.update(wide(weight))
    got = average.averaged_state_dict(window=1.0)["w"]
    np.testing.assert_array_equal(np.isposinf(wide(got)), np.isposinf(exact.value(1.0)))
    np.testing.assert_array_equal(np.isneginf(wide(got)), np.isneginf(exact.value(1.0)))


def test_large_tensors_are_merged_to_their_last_element():
    """Tensors that are worked on part by part."""
    steps, rule = 60, AnyTail(6)
    sizes = {
        "a": (2**20 + 3, torch.float32),
        "b": (70_001, torch.bfloat16),
        "c": (5, torch.float32),
    }
    tensors = {name: (1 + torch.arange(n) % 7).to(kind) for name, (n, kind) in sizes.items()}
    bases = {name: tensor.clone() for name, tensor in tensors.items()}
    average, exact = ParameterAverage(tensors, rule), TailAverage(rule)
    for t in range(steps):
        factor = 2.0 ** (t % 3)  # exact in every type: one number tells the average
        for name, base in bases.items():
            torch.mul(base, factor, out=tensors[name])
        average.update()
        exact.update(factor)
    for window in (0.1, 0.45, 1.0):
        got = average.averaged_state_dict(torch.float32, window)
        for name, base in bases.items():
            expected = base.float() * exact.value(window)
            torch.testing.assert_close(got[name], expected, rtol=1e-6, atol=0)


def test_memory_is_the_accumulators_and_one_more():
    weight = torch.zeros(1000)
    average = ParameterAverage({"w": weight}, AnyTail(9))
    assert len(average.state_dict()["blocks"]) == 9
    pointers = set()
    for step in range(400):
        weight.fill_(step)
        average.update()
        state = average.state_dict()
        held = [*state["blocks"], state["partial"]]
        pointers |= {tensors["w"].untyped_storage().data_ptr() for tensors in held}
    assert len(pointers) == 10  # merges move nothing


def test_accumulators_may_be_kept_on_a_device_of_their_own():
    weight, average = counted(device="cpu", steps=300)
    _, plain = counted(steps=300)
    assert snapshot(average.state_dict()) == snapshot(plain.state_dict())
    moved = average.to("cpu")
    for window in (0.1, 0.5, 300):
        assert bits(moved.averaged_state_dict(window=window)) == bits(
            plain.averaged_state_dict(window=window)
        )
    assert average.select_tail(lambda: weight[0].item()).window == 1.0


# Windows that cannot be read

CALLS = list(outputs(None, None))


def refused(weight, average, call, window, error, match):
    before, state = bits({"w": weight}), snapshot(average.state_dict())
    with pytest.raises(error, match=match):
        call(window)
    assert bits({"w": weight}) == before
    assert snapshot(average.state_dict()) == state  # nor is it swapped in


@pytest.mark.parametrize("call", CALLS)
def test_a_window_that_cannot_be_read_is_refused_and_changes_nothing(call, tmp_path):
    weight, average = counted()
    call = outputs(average, tmp_path)[call]
    for window in (0.05, 9, Fixed(3), Growing(0.5, at_most=9)):
        refused(
            weight, average, call, window, ValueError, r"window: .*at least 0\.1 .* of 100, got"
        )
    refused(weight, average, call, None, ValueError, "AnyTail has no window of its own")
    for window in (0, 1.5, -0.5, math.nan):
        refused(weight, average, call, window, ValueError, "window: expected an int")
    for window in ("0.5", True, [0.5], AnyTail(), torch.tensor(0.5)):
        refused(weight, average, call, window, TypeError, "window: expected an int")
    assert not list(tmp_path.iterdir())
    call(0.1)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("rule", [AnytimeWindow(10), Exponential(0.3)], ids=short)
def test_a_rule_that_has_a_window_takes_no_other(rule, call, tmp_path):
    weight, average = counted(rule)
    call = outputs(average, tmp_path)[call]
    refused(weight, average, call, 0.5, ValueError, "has its own window")


def test_size_is_that_of_the_stream_or_of_a_window():
    _, average = counted()
    assert average.size == 100.0  # of the whole stream
    assert average.profile(0.3).size == 30
    assert "AnyTail" in repr(average)


@pytest.mark.parametrize("call", [call for call in CALLS if call != "weights"])
def test_reading_before_the_first_update_is_an_error(call, tmp_path):
    average = ParameterAverage({"w": torch.zeros(2)}, AnyTail())
    with pytest.raises(ValueError, match="at least one sample"):
        outputs(average, tmp_path)[call](0.5)


def test_a_module_with_one_set_of_weights_is_no_tail():
    model = small()
    before = bits(model)
    with pytest.raises(TypeError, match=r"rule: AnyTail.* has no window.*ParameterAverage"):
        AveragedModel(model, AnyTail())
    with pytest.raises(TypeError):
        convert_tail_batchnorm(model, AnyTail())
    assert bits(model) == before
