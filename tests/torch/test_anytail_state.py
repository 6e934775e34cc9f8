"""States of a ParameterAverage of an AnyTail."""

import copy

import numpy as np
import pytest
import torch

from tailavg import AnyTail, AnytimeWindow, TailAverage
from tailavg.torch import ParameterAverage
from tests.support import schedule
from tests.support.torch_models import (
    FailAt,
    Walk,
    bits,
    counted,
    outputs,
    saved,
    small,
    snapshot,
    walked,
    wide,
)


@pytest.mark.parametrize("stop", [1, 5, 6, 7, 255, 256, 300])
def test_a_resumed_run_is_as_one_that_never_stopped_to_the_bit(stop):
    rule = AnyTail(6, 0.15)
    average, walk, _ = walked(small(), rule, stop)
    state = saved(average.state_dict())
    model = small(seed=3)
    resumed = ParameterAverage(model, rule)
    resumed.load_state_dict(state)
    model.load_state_dict(walk.model.state_dict())
    again = Walk(model)
    again.random.set_state(walk.random.get_state())
    for _ in range(270):
        for run, steps in ((average, walk), (resumed, again)):
            steps.step()
            run.update()
    assert snapshot(resumed.state_dict()) == snapshot(average.state_dict())
    for window in (0.15, 0.5, 1.0, 200):
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
    average, walk, _ = walked(model, AnyTail(6), 100)
    other = copy.deepcopy(average)
    before = snapshot(other.state_dict())
    for _ in range(50):
        walk.step()
        average.update()
    assert snapshot(other.state_dict()) == before
    assert other.count == 100


def test_an_update_that_was_interrupted_in_a_merge_is_not_passed_over(tmp_path):
    _, average = counted(AnyTail(6), steps=300)
    closes = schedule.closes(average.rule, average.state_dict()["starts"])
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
                        with pytest.raises(RuntimeError, match="incomplete"):
                            call(0.5)
        average.load_state_dict(state)
        assert snapshot(average.state_dict()) == snapshot(state)
    assert interrupted > 2
