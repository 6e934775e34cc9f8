"""The clock: what is due, what an average is made of, what a state may look like."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailavg import AnyTail, AnytimeWindow, ExactWindow, Exponential, Growing, TailAverage
from tailavg.core.clock import FOLD, SMALLEST, SUM, BlockClock, Store, clock_for, factors, starts_at
from tailavg.core.equation import read
from tailavg.core.windows import NEVER
from tests.support.cases import RULES, anytime_windows, of_rules
from tests.support.effort import some
from tests.support.model import weight_matrix
from tests.support.schedule import advance

FOLDING = [rule for rule in RULES if not isinstance(rule, ExactWindow)]


class Held(Store):
    """A store of explicit weights: a sum and means of the samples' indices."""

    def __init__(self, places: int, steps: int) -> None:
        self.sum, self.means = np.zeros(steps), [np.zeros(steps) for _ in range(places)]

    def fold(self, total, weight, carry):
        self.means[-1] = (1 - weight) * self.means[-1] + weight * self.sum / total
        self.sum = np.zeros_like(self.sum)

    def turn(self, gone, weight):
        mean = self.means.pop(gone)
        if weight:
            self.means[gone - 1] = (1 - weight) * self.means[gone - 1] + weight * mean
        self.means.append(np.zeros_like(self.sum))
        self.sum = np.zeros_like(self.sum)


@of_rules([*FOLDING, Exponential(400), AnyTail(6)])
def test_a_store_that_does_as_it_is_told_holds_the_weights_of_the_model(rule):
    steps = 400
    clock, store = clock_for(rule), Held(len(clock_for(rule).blocks), steps)
    window = (0.3,) if isinstance(rule, AnyTail) else ()
    expected = None if window else weight_matrix(rule, steps)
    for t in range(steps):
        clock.prepare(store)
        store.sum[t] += clock.factor
        clock.count += 1
        parts = [(w, store.sum if b == SUM else store.means[b]) for w, b in clock.terms(*window)]
        weights = sum(weight * part for weight, part in parts)
        if expected is not None:
            np.testing.assert_allclose(weights, expected[t], rtol=1e-9, atol=1e-12)
        assert abs(weights.sum() - 1) < 1e-12


@of_rules([*RULES, ExactWindow(10), AnyTail(6)])
@pytest.mark.parametrize("count", [0, 1, 7, 255, 256, 257, 600])
def test_a_clock_goes_on_from_where_another_one_stood(rule, count):
    average, clock = TailAverage(rule), clock_for(rule)
    for _ in range(count):
        average.update(1.0)
    state = average.state_dict()
    clock.restore(count, state["starts"], state["folded"])
    assert (clock.count, clock.starts, clock.folded) == (count, state["starts"], state["folded"])


@pytest.mark.parametrize(
    ("rule", "count"),
    [
        (AnytimeWindow(0.25), 10**15),
        (AnytimeWindow(1e-5), 10**12),
        (AnytimeWindow(1e-6, 5), 10**9),
        (AnytimeWindow(Growing(0.001, 10**6)), 10**15),
        (AnyTail(12, 0.001), 10**9),
    ],
    ids=str,
)
def test_a_state_is_checked_without_a_replay_of_the_stream(rule, count):
    clock = BlockClock(rule)
    turns = []
    rule_closes = type(rule).closes
    type(rule).closes = lambda self, starts: turns.append(1) or rule_closes(self, starts)
    try:
        for starts in ([count - 1] * rule.accumulators, list(range(rule.accumulators))):
            with pytest.raises(ValueError, match="corrupt state"):
                clock.restore(count, starts, count)
    finally:
        type(rule).closes = rule_closes
    assert len(turns) < 3000
    assert (clock.count, clock.starts) == (0, [])


@given(anytime_windows, st.integers(1, 300), st.integers(0, 12), st.sampled_from([-2, -1, 1, 2]))
def test_a_start_that_is_off_is_refused(rule, count, place, by):
    clock, starts = BlockClock(rule), advance(rule, [0], count)
    clock.restore(count, starts, count)
    starts[place % len(starts)] += by
    with pytest.raises(ValueError, match="corrupt state"):
        BlockClock(rule).restore(count, starts, count)


@settings(max_examples=some(15, 100))
@given(
    st.floats(1e-5, 1e-3), st.integers(2, 6), st.integers(10**6, 10**8), st.sampled_from([-1, 1])
)
def test_after_many_turns_the_last_start_must_follow_from_those_before(c, accumulators, t, by):
    rule = AnytimeWindow(c, accumulators)
    starts = starts_at(rule, t)
    clock = BlockClock(rule)
    clock.restore(t, starts, t)
    assert clock.starts == starts
    with pytest.raises(ValueError, match="corrupt state"):
        clock.restore(t, [*starts[:-1], starts[-1] + by], t)
    assert clock.starts == starts


@given(
    st.floats(1e-4, 0.3),
    st.one_of(st.none(), st.integers(1, 60)),
    st.integers(2, 5),
    st.sampled_from(["balanced", "paper"]),
    st.integers(1, 6000),
)
def test_blocks_are_the_same_in_one_stride_or_turn_by_turn(c, cap, places, turns, t):
    rule = AnytimeWindow(Growing(c, cap), places, turns)
    clock = BlockClock(rule)
    for _ in range(t):
        clock.count = min(clock.closes, t)
        if clock.count == t:
            break
        clock.turn()
    assert clock.starts == starts_at(rule, t)


def test_all_samples_stay_for_good_in_a_window_of_everything():
    for t in (10, 10**6, 10**12, 10**15):
        clock = BlockClock(AnytimeWindow(1.0))
        clock.advance(t)
        assert clock.starts[0] == 0
        assert Growing(1.0).filled_at(t) == NEVER


@of_rules([Exponential(10), Exponential(400), Exponential(0.3), Exponential(0.001)])
@pytest.mark.parametrize("folded", [0, 1, 5, 100, 5000])
def test_factors_are_those_of_the_decays(rule, folded):
    decay, fresh, scales = factors(rule, folded, FOLD, SMALLEST)
    decays = rule.decay(np.arange(folded + 1, folded + len(fresh) + 1))
    assert decay == decays[0]
    np.testing.assert_allclose(scales, np.cumprod(np.append(1.0, decays[1:])), rtol=1e-12)
    np.testing.assert_allclose(fresh * scales, 1 - decays, rtol=1e-12)
    assert scales.min() >= SMALLEST


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 300))
def test_terms_are_those_of_the_equation(sizes, k):
    clock = BlockClock(AnytimeWindow(k, len(sizes) + 1))
    clock.blocks = [0, *np.cumsum([0, *sizes[:-1]]).tolist()]
    clock.count = clock.folded = sum(sizes)
    got = np.zeros(len(sizes) + 1)
    for weight, block in clock.terms():
        got[block] = weight
    np.testing.assert_allclose(got[1:], read(sizes, k), rtol=1e-12, atol=1e-15)


def test_an_every_tail_that_lacks_the_beginning_is_refused():
    """Also after too many merges to replay: its blocks cover the whole stream."""
    rule, t = AnyTail(12, 0.001), 10**6
    starts, clock = starts_at(rule, t), BlockClock(rule)
    clock.restore(t, starts, t)
    assert clock.starts == starts
    for wrong in ([1, *starts[1:]], [starts[0], *starts[:-1]], [*starts[:-1], t]):
        with pytest.raises(ValueError, match="corrupt state"):
            clock.restore(t, wrong, t)
    assert clock.starts == starts
