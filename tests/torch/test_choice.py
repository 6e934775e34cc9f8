"""The choice of the best window of an AnyTail."""

import math
import statistics

import numpy as np
import pytest
import torch
from torch import nn

from tailavg import AnyTail, AnytimeWindow, Exponential, Growing
from tailavg.torch import ParameterAverage
from tests.support.torch_models import FailAt, bits, counted, small, snapshot, walked

errors = pytest.mark.parametrize(
    "error", [ValueError, KeyboardInterrupt, SystemExit, torch.OutOfMemoryError, StopIteration]
)


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
        with pytest.raises(ValueError, match="window"):
            average.select_tail(evaluate, windows)
    with pytest.raises(TypeError, match="window: "):
        average.select_tail(evaluate, [0.5, "0.6"])
    with pytest.raises(TypeError):
        average.select_tail(evaluate, 0.5)
    with pytest.raises(ValueError, match=r"select_tail: expected .*window"):
        average.select_tail(evaluate, [])
    with (
        average.average_parameters(0.5),
        pytest.raises(RuntimeError, match="not possible during a swap"),
    ):
        average.select_tail(evaluate, [0.5])
    average.store()
    with pytest.raises(RuntimeError, match="not possible during a swap"):
        average.select_tail(evaluate)
    average.restore()
    for rule in (AnytimeWindow(10), Exponential(0.3)):
        _, other = counted(rule)
        with pytest.raises(ValueError, match=r"select_tail: .* has only one window|window: "):
            other.select_tail(evaluate)
        with pytest.raises(ValueError, match="has its own window"):
            other.select_tail(evaluate, [0.5])
    with pytest.raises(ValueError, match="at least one sample"):
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
    average, _, _ = walked(model, AnyTail(6), 50)
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
        with pytest.raises(RuntimeError, match="not possible during a swap"):
            average.select_tail(call)
        assert weight.tolist() == [99.0, 99.0]
        assert average.count == 100


def test_an_error_while_swapping_in_leaves_the_training_weights():
    model = small()
    average, _, _ = walked(model, AnyTail(6), 40)
    before, n, failed = bits(model), 0, True
    while failed:
        n += 1
        try:
            with FailAt(n, RuntimeError):
                average.select_tail(lambda: 1.0, [0.1, 0.5])
            failed = False
        except RuntimeError:
            # what fails on the way back is taken up again
            if average._saved is not None:
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
