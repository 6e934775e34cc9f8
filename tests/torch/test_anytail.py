"""ParameterAverage of an AnyTail: every window against NumPy's, and the choice of the best one."""

import copy
import io
import math
import statistics

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cases import short
from tailavg import AnyTail, AnytimeWindow, Exponential, Fixed, Growing, TailAverage
from tailavg.torch import AveragedModel, ParameterAverage, convert_tail_batchnorm
from torch_models import (
    FailAt,
    History,
    Odd,
    Walk,
    assert_averages,
    bits,
    named,
    small,
    snapshot,
    tolerance,
    wide,
)

TAILS = [AnyTail(), AnyTail(6), AnyTail(8, 0.4), AnyTail(7, 0.02)]
every_tail = pytest.mark.parametrize("rule", TAILS, ids=short)
errors = pytest.mark.parametrize(
    "error", [ValueError, KeyboardInterrupt, SystemExit, torch.OutOfMemoryError, StopIteration]
)


def tensors_of(width: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """One tensor of each floating type."""
    torch.manual_seed(seed)
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
    return {str(kind)[6:]: torch.rand(width, dtype=kind) for kind in kinds}


def walked(model, rule, steps: int, seed: int = 0, **options):
    """An average after so many updates, and the model's walk."""
    average, walk = ParameterAverage(model, rule, **options), Walk(model, seed)
    for _ in range(steps):
        walk.step()
        average.update()
    return average, walk


def saved(state):
    """A state through a file, with nothing unpickled but tensors and plain data."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def counted(rule=None, steps: int = 100, **options):
    """A weight that was 0, 1, 2, …, and its average."""
    weight = torch.zeros(2)
    average = ParameterAverage({"w": weight}, rule or AnyTail(8), **options)
    for step in range(steps):
        weight.fill_(step)
        average.update()
    return weight, average


# The averages


@every_tail
def test_every_window_is_that_of_numpy(rule):
    """Steps enough for many folds and merges; reads in between change nothing."""
    tensors, steps = tensors_of(), 2500
    read_at = {1, 2, 5, 6, 7, 8, 12, 13, 14, 40, 255, 256, 257, 513, 1000, 1001, 1777, 2499, 2500}
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
    average, walk = ParameterAverage(model, rule, update_every=2), Walk(model)
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


def outputs(average, folder):
    return {
        "average_parameters": lambda window: average.average_parameters(window).__enter__(),
        "copy_to": lambda window: average.copy_to(window=window),
        "copy_to another": lambda window: average.copy_to({"w": torch.zeros(2)}, window),
        "averaged_state_dict": lambda window: average.averaged_state_dict(window=window),
        "full_state_dict": lambda window: average.full_state_dict(window=window),
        "save_averaged": lambda window: average.save_averaged(folder / "file", window=window),
        "weights": lambda window: average.weights(window),
        "profile": lambda window: average.profile(window),
        "select_tail": lambda window: average.select_tail(lambda: 1.0, [1.0, window]),
    }


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
    refused(weight, average, call, None, ValueError, r"window: .*at least 0\.1 .*got none")
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
    refused(weight, average, call, 0.5, ValueError, "window: expected none, since")


def test_size_is_that_of_a_window():
    _, average = counted()
    with pytest.raises(ValueError, match="window: "):
        _ = average.size
    assert average.profile(0.3).size == 30
    assert "AnyTail" in repr(average)


@pytest.mark.parametrize("call", [call for call in CALLS if call != "weights"])
def test_reading_before_the_first_update_is_an_error(call, tmp_path):
    average = ParameterAverage({"w": torch.zeros(2)}, AnyTail())
    with pytest.raises(RuntimeError, match="at least one update"):
        outputs(average, tmp_path)[call](0.5)


def test_a_module_with_one_set_of_weights_is_no_tail():
    model = small()
    before = bits(model)
    with pytest.raises(TypeError, match=r"rule: expected one with a window.*ParameterAverage"):
        AveragedModel(model, AnyTail())
    with pytest.raises(TypeError):
        convert_tail_batchnorm(model, AnyTail())
    assert bits(model) == before


# The choice of a window


def test_the_best_window_is_found_with_the_whole_table():
    weight, average = counted()
    windows, seen = [0.1, 0.3, 25, Growing(0.8), 1.0], []

    def evaluate():
        seen.append(weight.tolist())
        return weight[0].item()

    expected = [
        (window, average.averaged_state_dict(window=window)["w"][0].item()) for window in windows
    ]
    found = average.select_tail(evaluate, windows)
    assert (found.window, found.score) == expected[-1]
    assert found.scores == expected
    assert [x for x, _ in seen] == [score for _, score in expected]
    assert average.select_tail(evaluate, iter(windows), best=max).window == 0.1
    assert average.select_tail(evaluate, windows, max) == (*expected[0], expected)
    assert average.select_tail(evaluate, (25,)).window == 25
    assert weight.tolist() == [99.0, 99.0]


@pytest.mark.parametrize("shortest", [0.001, 0.02, 0.1, 1 / 3, 0.5, 0.9, 0.97, 0.99, 0.9999])
def test_windows_by_default_go_from_the_shortest_to_all_each_once(shortest):
    for steps in (1, 2, 9, 100):
        weight, average = counted(AnyTail(6, shortest), steps)
        calls = []
        found = average.select_tail(lambda: calls.append(1) or 1.0)  # noqa: B023
        windows = [window for window, _ in found.scores]
        assert (windows[0], windows[-1]) == (shortest, 1.0)
        assert windows == sorted(set(windows))
        assert len(calls) == len(windows) <= 8
        assert len(windows) == 8 or shortest >= 0.9
        assert found.window == shortest  # the first of equals
        assert weight[0] == steps - 1


def test_one_and_all_are_two_windows():
    weight, average = counted(steps=5)
    for windows in ([1, 1.0], [1.0, 1]):
        found = average.select_tail(lambda: weight[0].item(), windows)
        assert (found.window, type(found.window), found.score) == (1.0, float, 2.0)
        found = average.select_tail(lambda: weight[0].item(), windows, best=max)
        assert (found.window, type(found.window), found.score) == (1, int, 4.0)
        assert len(found.scores) == 2


def test_a_score_may_be_any_number():
    weight, average = counted()
    with_graph = torch.ones((), requires_grad=True)
    for kind in (
        lambda: weight[0],
        lambda: 2 * with_graph,
        lambda: np.float32(2.0),
        lambda: np.array(3),
        lambda: True,
    ):
        found = average.select_tail(kind, [0.1, 0.5])
        assert type(found.score) is float
        assert all(type(score) is float for _, score in found.scores)
    found = average.select_tail(lambda: -math.inf if weight[0] < 50 else math.inf, [0.1, 1.0])
    assert (found.window, found.score) == (1.0, -math.inf)


def test_a_score_that_is_nan_is_never_the_best():
    weight, average = counted()
    for best in (min, max):
        scores = iter([math.nan, 2.0, math.nan, 3.0])
        found = average.select_tail(lambda: next(scores), [0.1, 0.2, 0.3, 0.4], best)  # noqa: B023
        assert (found.window, found.score) == ((0.2, 2.0) if best is min else (0.4, 3.0))
        assert math.isnan(found.scores[0][1])
        assert len(found.scores) == 4
    with pytest.raises(ValueError, match=r"select_tail: .*NaN"):
        average.select_tail(lambda: math.nan, [0.1, 0.2])
    assert weight.tolist() == [99.0, 99.0]


def test_choices_that_make_no_sense_are_refused_before_the_first_evaluation():
    weight, average = counted()
    calls = []

    def evaluate():
        calls.append(1)
        return 1.0

    for windows in ([0.5, 0.05], [0.5, 9], [1.0, 0.0], [0.5, None], (x for x in (1.0, 2.5))):
        with pytest.raises(ValueError, match="window: "):
            average.select_tail(evaluate, windows)
    with pytest.raises(TypeError, match="window: "):
        average.select_tail(evaluate, [0.5, "0.6"])
    with pytest.raises(TypeError):
        average.select_tail(evaluate, 0.5)
    with pytest.raises(ValueError, match=r"select_tail: expected .*window"):
        average.select_tail(evaluate, [])
    with average.average_parameters(0.5), pytest.raises(RuntimeError, match="put aside"):
        average.select_tail(evaluate, [0.5])
    average.store()
    with pytest.raises(RuntimeError, match="put aside"):
        average.select_tail(evaluate)
    average.restore()
    for rule in (AnytimeWindow(10), Exponential(0.3)):
        _, other = counted(rule)
        with pytest.raises(ValueError, match=r"select_tail: expected an AnyTail|window: "):
            other.select_tail(evaluate)
        with pytest.raises(ValueError, match="window: expected none"):
            other.select_tail(evaluate, [0.5])
    with pytest.raises(RuntimeError, match="at least one update"):
        ParameterAverage({"w": weight}, AnyTail()).select_tail(evaluate)
    assert not calls
    assert weight.tolist() == [99.0, 99.0]


def test_a_choice_of_what_is_no_score_is_refused():
    weight, average = counted()
    scores = iter([1.0, 2.0, 3.0, 5.0])
    with pytest.raises(ValueError, match="best"):
        average.select_tail(lambda: next(scores), [0.1, 0.2, 0.3, 0.4], best=statistics.mean)
    assert weight.tolist() == [99.0, 99.0]


@errors
@pytest.mark.parametrize("at", [1, 2, 3])
def test_whatever_evaluate_raises_the_training_weights_come_back(error, at):
    model = small()
    average, _ = walked(model, AnyTail(6), 50)
    before, state, calls = bits(model), snapshot(average.state_dict()), []

    def evaluate():
        calls.append(1)
        model(torch.ones(4, 3))  # moves BatchNorm's statistics
        with torch.no_grad():
            model[0].weight.fill_(7.0)
        if len(calls) == at:
            raise error("stopped here")
        return 1.0

    with pytest.raises(error, match="stopped here"):
        average.select_tail(evaluate, [0.1, 0.5, 1.0])
    assert len(calls) == at
    assert bits(model) == before
    assert snapshot(average.state_dict()) == state
    at = 0
    assert average.select_tail(evaluate, [0.1, 0.5]).window == 0.1
    assert bits(model) == before


@pytest.mark.parametrize("result", [None, "good", 1j, [1.0, 2.0], torch.ones(2)], ids=repr)
def test_a_result_that_is_no_number_is_an_error_and_the_weights_come_back(result):
    weight, average = counted()
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        average.select_tail(lambda: result)
    assert weight.tolist() == [99.0, 99.0]
    average.update()


def test_neither_updates_nor_choices_can_be_made_inside_of_a_choice():
    weight, average = counted()
    for call in (average.update, average.state_dict, lambda: average.select_tail(lambda: 1.0)):
        with pytest.raises(RuntimeError, match="put aside"):
            average.select_tail(call)
        assert weight.tolist() == [99.0, 99.0]
        assert average.count == 100


def test_an_error_while_swapping_in_leaves_the_training_weights():
    model = small()
    average, _ = walked(model, AnyTail(6), 40)
    before, n, failed = bits(model), 0, True
    while failed:
        n += 1
        try:
            with FailAt(n, RuntimeError):
                average.select_tail(lambda: 1.0, [0.1, 0.5])
            failed = False
        except RuntimeError:
            # what fails on the way back is taken up again
            if average._aside.holds:
                average.restore()
        assert bits(model) == before, n
        assert n < 500
    assert n > 5


def test_a_choice_by_the_loss_of_a_network():
    torch.manual_seed(0)
    x = torch.rand(64, 3)
    y = x @ torch.tensor([[1.0], [2.0], [-1.0]]) + 0.3 * torch.randn(64, 1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    average = ParameterAverage(model, AnyTail(8))
    average.attach(optimizer)
    for step in range(300):
        optimizer.zero_grad()
        part = torch.arange(4) + 4 * (step % 16)
        nn.functional.mse_loss(model(x[part]), y[part]).backward()
        optimizer.step()

    @torch.no_grad()
    def loss():
        return nn.functional.mse_loss(model(x), y)

    before, last = bits(model), loss().item()
    found = average.select_tail(loss)
    assert bits(model) == before
    assert found.score == min(score for _, score in found.scores) < last
    with average.average_parameters(found.window):
        assert loss().item() == found.score


# States


@pytest.mark.parametrize("stop", [1, 5, 6, 7, 100, 255, 256, 300, 777])
def test_a_resumed_run_is_as_one_that_never_stopped_to_the_bit(stop):
    rule = AnyTail(6, 0.15)
    average, walk = walked(small(), rule, stop)
    state = saved(average.state_dict())
    model = small(seed=3)
    resumed = ParameterAverage(model, rule)
    resumed.load_state_dict(state)
    model.load_state_dict(walk.model.state_dict())
    again = Walk(model)
    again.random.set_state(walk.random.get_state())
    for _ in range(400):
        for run, steps in ((average, walk), (resumed, again)):
            steps.step()
            run.update()
    assert snapshot(resumed.state_dict()) == snapshot(average.state_dict())
    for window in (0.15, 0.5, 1.0, 400):
        assert bits(resumed.averaged_state_dict(window=window)) == bits(
            average.averaged_state_dict(window=window)
        )


def test_a_state_is_that_of_numpy_with_tensors_by_name():
    _, average = counted(steps=700)
    exact = TailAverage(AnyTail(8))
    exact.update_many(np.repeat(np.arange(700.0)[:, None], 2, axis=1))
    state, other = average.state_dict(), exact.state_dict()
    for key in ("format", "version", "rule", "count", "starts"):
        assert state[key] == other[key]
    assert len(state["blocks"]) == len(state["starts"]) == 8
    for block, mean in zip(state["blocks"][:-1], other["blocks"][:-1], strict=True):
        np.testing.assert_allclose(wide(block["w"]), mean, rtol=1e-6)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    _, average = counted(steps=300)
    state = saved(average.state_dict())
    starts = state["starts"]
    before = snapshot(average.state_dict())
    wrong = [
        {"count": 10**6},
        {"count": 0},
        {"folded": 0},
        {"starts": starts[:-1]},
        {"starts": [start + (start == starts[3]) for start in starts]},
        {"blocks": state["blocks"][:-1]},
        {"blocks": [*state["blocks"], state["partial"]]},
        {"rule": state["rule"] | {"accumulators": 9}},
        {"rule": state["rule"] | {"accumulators": 5}},
        {"rule": state["rule"] | {"shortest": 0.2}},
        {"rule": counted(0.1)[1].state_dict()["rule"]},
        {"partial": {}},
        {"partial": {"w": torch.zeros(3)}},
    ]
    for change in wrong:
        with pytest.raises(ValueError, match="state: "):
            average.load_state_dict(state | change)
        assert snapshot(average.state_dict()) == before, change
    for rule in (AnyTail(9), AnyTail(8, 0.2), AnytimeWindow(0.1, 8)):
        other = ParameterAverage({"w": torch.zeros(2)}, rule)
        with pytest.raises(ValueError, match="state: expected"):
            other.load_state_dict(state)
        assert other.count == 0
    average.load_state_dict(state)
    assert snapshot(average.state_dict()) == before


def test_a_fresh_state_has_every_tensor_so_that_it_can_be_loaded_into():
    fresh = ParameterAverage({"w": torch.zeros(2)}, AnyTail(8))
    state = fresh.state_dict()
    assert len(state["blocks"]) == 8
    _, average = counted(steps=4)
    average.load_state_dict(saved(state))
    assert average.count == 0


def test_a_copy_goes_its_own_way():
    model = small()
    average, walk = walked(model, AnyTail(6), 100)
    other = copy.deepcopy(average)
    before = snapshot(other.state_dict())
    for _ in range(50):
        walk.step()
        average.update()
    assert snapshot(other.state_dict()) == before
    assert other.count == 100


def test_an_update_that_was_interrupted_in_a_merge_is_not_passed_over(tmp_path):
    _, average = counted(AnyTail(6), steps=300)
    closes = average.rule.closes(average.state_dict()["starts"])
    while average.count < closes:
        average.update()
    state = saved(average.state_dict())
    interrupted = 0
    for n in range(1, 20):
        try:
            with FailAt(n, KeyboardInterrupt):
                average.update()
        except KeyboardInterrupt:
            try:
                average.state_dict()
            except RuntimeError:
                interrupted += 1
                for name, call in outputs(average, tmp_path).items():
                    if name not in ("weights", "profile"):  # of which the tensors are no part
                        with pytest.raises(RuntimeError, match="not whole"):
                            call(0.5)
        average.load_state_dict(state)
        assert snapshot(average.state_dict()) == snapshot(state)
    assert interrupted > 2
