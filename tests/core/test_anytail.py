"""AnyTail: its blocks against a slow model, and what it costs to read a window of them."""

import copy
import math
import pickle
from fractions import Fraction
from functools import partial
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailavg import AnyTail, AnytimeWindow, Decay, Fixed, Growing, TailAverage
from tailavg.core.profile import dense_weights, profile
from tailavg.core.rules import check_window, size_of
from tests.support.any_tails import TAILS, Tails, every_tail
from tests.support.cases import short
from tests.support.effort import some
from tests.support.schedule import advance, closes, turn

# The blocks


@every_tail
def test_blocks_are_those_of_the_policy_at_every_step(rule):
    tails, starts = Tails(rule), [0]
    average = TailAverage(rule)
    for t in range(1, 2001):
        tails.add()
        average.update(1.0)
        starts = advance(rule, starts, t)
        assert starts == tails.starts(), t
        assert len(starts) == min(t, rule.accumulators)
        if t < 300:
            assert list(chain(*tails.blocks)) == list(range(t))
        if t % 37 == 0 or t < 40:
            assert advance(rule, [0], t) == starts
            assert average.state_dict()["starts"] == starts


def sizes_of_the_policy(rule, steps):
    """As `Tails`, but on sizes alone and from one turn to the next: yields the step and starts."""
    tails = Tails(rule)
    c, part = tails.exact, tails.part
    starts = list(range(tails.m))
    while True:
        low, high = starts[-1], 2 * starts[-1] + 2  # the first step at which the newest is full
        while high - low > 1:
            t = (low + high) // 2
            if t - starts[-1] >= part * t:
                high = t
            else:
                low = t
        if high - starts[-1] < part * high:
            raise AssertionError("the newest block is never full")
        if high >= steps:
            return starts
        ends = [*starts[1:], high]
        costs = [
            Fraction(ends[i + 1] - starts[i]) / max(high - ends[i + 1], c * ends[i + 1] / (1 - c))
            for i in range(tails.m - 1)
        ]
        del starts[costs.index(min(costs)) + 1]
        starts.append(high)


@pytest.mark.parametrize(
    "rule", [AnyTail(), AnyTail(6), AnyTail(8, 0.4), AnyTail(20, 0.03)], ids=short
)
def test_blocks_are_those_of_the_policy_after_a_million_and_a_billion(rule):
    for t in (10**6 + 12345, 10**9):
        starts = advance(rule, [0], t)
        assert starts == sizes_of_the_policy(rule, t)
        assert starts[0] == 0
        assert len(starts) == rule.accumulators


@settings(max_examples=some(30, 100))
@given(
    st.integers(6, 40),
    st.one_of(st.floats(0.001, 0.999), st.sampled_from([0.1, 0.25, 1 / 3, 0.5])),
    st.lists(st.integers(1, 5000), min_size=1, max_size=5).map(sorted),
)
def test_blocks_at_any_step_are_those_of_a_longer_way_and_cover_the_stream(m, shortest, steps):
    rule, starts = AnyTail(m, shortest), [0]
    for t in steps:
        starts = advance(rule, starts, t)
        assert starts == advance(rule, [0], t)
        assert starts[0] == 0
        assert len(starts) == min(t, m)
        assert all(a < b for a, b in pairwise([*starts, t]))
        # the newest block alone is never more than the shortest window, but for one sample
        assert t - starts[-1] < max(1, shortest * t) + 1


# Overhead: samples touched over samples asked for

OVERHEADS = {6: 2.13, 8: 1.79, 10: 1.64, 12: 1.45, 16: 1.34}
HUNDREDTHS = np.arange(10, 101)


def turns(rule, last):
    """The blocks, with the first and the last step at which they are those."""
    starts, first = [0], 1
    while first <= last:
        end = closes(rule, starts)
        yield starts, first, min(end, last)
        starts, first = turn(rule, starts, end), end + 1


def touched(starts, t):
    """How many samples a read at steps t touches, for each window in hundredths of the stream."""
    enough = (t - starts[..., None, None]) * 100 >= HUNDREDTHS * t
    return (t - np.where(enough, starts[..., None, None], 0)).min(axis=0)


def worst_overhead(rule, first, last):
    """Over all steps. Between two turns, what a window touches is (t - start) / (c t), which grows
    with t until a newer block suffices: only the steps before that count, and those before a turn.
    """
    worst = 0.0
    for starts, begin, end in turns(rule, last):
        begin = max(begin, first)
        if begin > end:
            continue
        starts = np.array(starts)
        rest = np.maximum(1, 100 - HUNDREDTHS)
        before = -(-starts[:, None] * 100 // rest) - 1
        t = np.vstack([before, np.full((2, len(HUNDREDTHS)), [[begin], [end]])])
        t = np.where((t >= begin) & (t <= end), t, end)
        worst = max(worst, (touched(starts, t) * 100 / (HUNDREDTHS * t)).max())
    return worst


@pytest.mark.parametrize(("accumulators", "most"), OVERHEADS.items())
def test_the_worst_overhead_is_what_is_promised_from_a_thousand_to_a_billion(accumulators, most):
    rule = AnyTail(accumulators)
    assert 0.1 ** (-1 / (accumulators - 2)) < worst_overhead(rule, 1000, 100_000) <= most
    assert worst_overhead(rule, 1000, 10**9) <= most


@pytest.mark.parametrize("accumulators", [6, 12])
def test_the_worst_overhead_by_turns_is_that_of_every_step(accumulators):
    rule, starts, worst = AnyTail(accumulators), [0], 0.0
    for t in range(1, 4001):
        starts = advance(rule, starts, t)
        if t >= 1000:
            age = t - np.array(starts)
            enough = age[:, None] * 100 >= HUNDREDTHS * t
            least = np.where(enough, age[:, None], t).min(axis=0)
            worst = max(worst, (least * 100 / (HUNDREDTHS * t)).max())
    assert math.isclose(worst, worst_overhead(rule, 1000, 4000), rel_tol=1e-12)


def test_what_is_touched_is_what_the_profile_says():
    rule = AnyTail(8)
    for t in (1000, 1234, 5000, 99_999, 10**9 + 7):
        starts = advance(rule, [0], t)
        found = touched(np.array(starts), np.full((1, len(HUNDREDTHS)), t))[0]
        for hundredths, samples in zip(HUNDREDTHS.tolist(), found.tolist(), strict=True):
            got = profile(rule, starts, t, hundredths / 100)
            assert got.oldest_age == samples - 1, (t, hundredths)


# Effective size


def check_effective_size(rule, window, starts, t):
    got, k = profile(rule, starts, t, window), min(t, size_of(rule, window, t))
    assert got.count == t
    assert got.accumulators == rule.accumulators
    assert k * (1 - 1e-9) <= got.effective_size < k + 1, (window, t)
    if t - starts[-1] < k:
        assert math.isclose(got.effective_size, k, rel_tol=1e-9), (window, t)


@pytest.mark.parametrize("rule", [*TAILS, AnyTail(10, 0.001), AnyTail(6, 0.999)], ids=short)
def test_the_effective_size_is_that_of_the_window(rule):
    random, starts = np.random.default_rng(0), [0]
    sampled = np.unique(np.geomspace(61, 10**6, 25).astype(int)).tolist()
    for t in [*range(1, 61), *sampled]:
        starts = advance(rule, starts, t)
        fractions = rule.shortest + (1 - rule.shortest) * random.random(4)
        least = max(1, math.ceil(rule.shortest * t))
        counts = [least, t - 1, t, t + 3, *random.integers(least, t + 1, 3).tolist()]
        for window in (rule.shortest, *fractions.tolist(), 1.0):
            check_effective_size(rule, window, starts, t)
        for window in counts:
            if window >= least:
                check_effective_size(rule, window, starts, t)


@settings(max_examples=some(60, 400))
@given(
    st.integers(6, 40),
    st.one_of(st.floats(0.003, 0.999), st.sampled_from([0.1, 0.07, 0.25, 1 / 3, 0.5])),
    st.one_of(st.integers(1, 400), st.integers(1, 10**9)),
    st.data(),
)
def test_any_window_of_any_tail_at_any_step_has_its_size(m, shortest, t, data):
    rule = AnyTail(m, shortest)
    starts = advance(rule, [0], t)
    least = max(1, math.ceil(shortest * t))
    counts = st.integers(least, max(least, 2 * t))
    window = data.draw(
        st.one_of(
            counts, st.floats(shortest, 1.0), st.builds(Growing, st.floats(shortest, 1.0), counts)
        )
    )
    check_effective_size(rule, window, starts, t)
    if t < 10_000:
        alpha = dense_weights(rule, starts, t, window)
        assert math.isclose(alpha.sum(), 1.0, rel_tol=1e-12)
        assert (alpha >= 0).all()


# The rule itself


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"accumulators": 5}, ValueError),
        ({"accumulators": 0}, ValueError),
        ({"accumulators": 6.0}, TypeError),
        ({"accumulators": "6"}, TypeError),
        ({"accumulators": True}, TypeError),
        ({"accumulators": None}, TypeError),
        ({"shortest": 0}, ValueError),
        ({"shortest": 0.0}, ValueError),
        ({"shortest": 1}, ValueError),
        ({"shortest": 1.0}, ValueError),
        ({"shortest": 100}, ValueError),
        ({"shortest": -0.1}, ValueError),
        ({"shortest": math.nan}, ValueError),
        ({"shortest": math.inf}, ValueError),
        ({"shortest": "0.1"}, TypeError),
        ({"shortest": None}, TypeError),
        ({"shortest": True}, TypeError),
        ({"shortest": 0.1j}, TypeError),
        ({"shortest": Growing(0.1)}, TypeError),
        ({"shortest": 10**400}, ValueError),
        ({"shortest": 1e-310}, ValueError),
        ({"shortest": Fraction(1, 10**7)}, ValueError),
        ({"shortest": 1 - Fraction(1, 10**20)}, ValueError),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_tail_that_cannot_be_is_refused(options, error):
    with pytest.raises(error, match=f"{next(iter(options))}: expected .*, got "):
        AnyTail(**options)


@pytest.mark.parametrize("window", [1, 1000, Fixed(10**15), Growing(0.5, 1000), 0.05])
def test_a_window_that_must_fail_in_a_long_run_is_refused_before_it(window):
    for reading in (window, Decay(window, "cosine")):
        with pytest.raises(
            ValueError, match=r"is too short for AnyTail.* at least 0\.1, or a Decay"
        ):
            check_window(AnyTail(), reading)


@pytest.mark.parametrize("window", [0.1, 1.0, Growing(0.25)])
def test_a_fraction_serves_a_run_of_any_length(window):
    for reading in (window, Decay(window, "cosine"), Decay(window, "linear")):
        check_window(AnyTail(), reading)


@pytest.mark.parametrize("rule", [AnyTail(), AnyTail(6, 0.3)])
@pytest.mark.parametrize(
    "window", [1, 7, 1000, Growing(0.05), Growing(0.5, 20), Decay(9, "cosine")]
)
def test_a_window_is_refused_for_a_run_in_which_a_read_would_fail(rule, window):
    def refuses(check, t):
        try:
            check(window, t)
        except ValueError:
            return True
        return False

    failed = False
    for t in range(1, 12_000):
        failed |= refuses(rule.window, t)
        if t < 200 or t % 997 == 0 or t in (3333, 3334, 10_000, 10_001):
            assert refuses(partial(check_window, rule), t) == failed
    with pytest.raises(ValueError, match="is too short for the 12000 counted steps of this run"):
        check_window(rule, window, 12_000)


def test_only_a_window_that_is_needed_is_accepted():
    with pytest.raises(ValueError, match=r"no window of its own: pass one, as in window=0\.25"):
        check_window(AnyTail(), None)
    with pytest.raises(ValueError, match=r"has its own window, got 0\.5"):
        check_window(AnytimeWindow(10), 0.5)
    with pytest.raises(ValueError, match=r"expected an int >= 1 .* got 0"):
        check_window(AnyTail(), 0)
    check_window(AnytimeWindow(10), None)


def test_tiny_fractions_keep_their_promise():
    """The newest block alone must not be larger than the shortest window, but for one sample."""
    for shortest in (1e-6, 1.0000001e-6, 1.234567e-6, 1.7e-6, 1e-5 / 3):
        rule = AnyTail(6, shortest)
        for start in (10**9, 10**12, 10**15):
            newest = rule.closes([0, 1, 2, 3, 4, start]) - start
            assert newest < shortest * (start + newest) + 1


def test_a_tail_is_a_plain_description():
    assert AnyTail() == AnyTail(12, 0.1) == AnyTail(accumulators=np.int64(12), shortest=1 / 10)
    assert AnyTail(6) != AnyTail(7)
    assert len({AnyTail(), AnyTail(12), AnyTail(6)}) == 2
    assert repr(AnyTail(8, Fraction(1, 4))) == "AnyTail(accumulators=8, shortest=0.25)"
    rule = AnyTail()
    advance(rule, [0], 1000)
    assert copy.deepcopy(rule) == pickle.loads(pickle.dumps(rule)) == rule
    with pytest.raises(AttributeError):
        rule.shortest = 0.2
