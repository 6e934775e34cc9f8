"""AnyTail: its blocks against a slow model, and every window of them against dense weights."""

import copy
import math
import pickle
from decimal import Decimal
from fractions import Fraction
from functools import cache
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import KINDS, METHODS, WAYS, assert_close, bits, chunks, short, take
from model import Blocks, Window, averages
from tailavg import (
    AnyTail,
    AnytimeWindow,
    ExactWindow,
    Exponential,
    Fixed,
    Growing,
    Profile,
    RawTail,
    TailAverage,
)
from tailavg.core.profile import dense_weights, profile, reading
from tailavg.core.schedule import advance, turn
from tailavg.core.windows import as_window

TAILS = [
    AnyTail(),
    AnyTail(6),
    AnyTail(6, 0.5),
    AnyTail(7, 0.9),
    AnyTail(8, 0.01),
    AnyTail(9, 1 / 3),
    AnyTail(16, 0.25),
    AnyTail(30, 0.07),
]
FLOAT, ROW = KINDS["float"], KINDS["float64 (3,)"]
OTHER_KINDS = [
    KINDS[name]
    for name in (
        "complex", "0-d float32", "float16 (3,)", "float32 (3,)", "float64 (3,)",
        "complex64 (2,)", "int32 (2,)", "float64 (8, 16)",
    )
]  # fmt: skip
every_tail = pytest.mark.parametrize("rule", TAILS, ids=short)
every_method = pytest.mark.parametrize("method", METHODS)


class Tails(Blocks):
    """The policy in words, on lists of samples.

    Every sample is a block until all accumulators are used. Then a block is closed when it has its
    share, and two neighbours make room: those whose joint size is least against the samples since
    their end, or against as many as there will be when the shortest window ends there, if it does
    not yet; of equals, the oldest.
    """

    def __init__(self, rule):
        self.m, self.c = rule.accumulators, rule.shortest
        simple = Fraction(self.c).limit_denominator(10**6)  # 1/10, not what stands for it
        self.exact = simple if float(simple) == self.c else Fraction(self.c)
        best = (0.3 + 2 * math.log(1 / self.c) / (1 - self.c)) / (self.m - 1)
        self.part = Fraction(round(1000 * min(1, best)), 1000) * self.exact
        self.blocks: list[list[int]] = [[]]
        self.t = 0

    def _is_full(self) -> bool:
        newest = len(self.blocks[-1])
        if len(self.blocks) < self.m:
            return newest > 0
        return newest * self.part.denominator >= self.part.numerator * self.t

    def add(self) -> None:
        if self._is_full():
            if len(self.blocks) == self.m:
                self._merge()
            self.blocks.append([])
        self.blocks[-1].append(self.t)
        self.t += 1

    def _merge(self) -> None:
        costs = []
        since = self.t
        for older, newer in reversed(list(pairwise(self.blocks))):
            end = newer[-1] + 1
            since = self.t - end
            at_first = self.exact * end / (1 - self.exact)
            costs.append((len(older) + len(newer)) / Fraction(max(since, at_first)))
        costs.reverse()
        i = costs.index(min(costs))
        self.blocks[i : i + 2] = [self.blocks[i] + self.blocks[i + 1]]

    def of(self, window) -> np.ndarray:
        """The weights of all samples in the average of this window."""
        self.window = Window.of(as_window(window))
        return self.alpha()


def windows_of(rule, steps):
    """Windows that can be read at every step up to `steps`."""
    least = math.ceil(rule.shortest * steps)
    fractions = [rule.shortest, (1 + 2 * rule.shortest) / 3, 0.95, 1.0]
    return [*fractions, least, 2 * least, 10 * steps, Growing(1.0, at_most=least + 3)]


@cache
def weight_matrices(rule, steps):
    """For each window, row t - 1 has the weights at step t."""
    tails = Tails(rule)
    windows = windows_of(rule, steps)
    found = np.zeros((len(windows), steps, steps))
    for t in range(1, steps + 1):
        tails.add()
        for matrix, window in zip(found, windows, strict=True):
            matrix[t - 1, :t] = tails.of(window)
    return list(zip(windows, found, strict=True))


# The blocks


@every_tail
def test_blocks_are_those_of_the_policy_at_every_step(rule):
    tails, starts = Tails(rule), [0]
    average = TailAverage(rule)
    for t in range(1, 3001):
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
    for t in (10**5, 10**6, 10**6 + 12345, 10**9, 10**12 + 1):
        starts = advance(rule, [0], t)
        assert starts == sizes_of_the_policy(rule, t)
        assert starts[0] == 0
        assert len(starts) == rule.accumulators


@settings(max_examples=60)
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
        closes = rule.closes(starts)
        yield starts, first, min(closes, last)
        starts, first = turn(rule, starts, closes), closes + 1


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
            got = profile(reading(rule, hundredths / 100, t), starts, t)
            assert got.oldest_age == samples - 1, (t, hundredths)


# Effective size


def check_effective_size(rule, window, starts, t):
    asked = reading(rule, window, t)
    got, k = profile(asked, starts, t), min(t, asked.size(t))
    assert got.count == t
    assert got.accumulators == rule.accumulators
    assert k * (1 - 1e-9) <= got.effective_size < k + 1, (window, t)
    if t - starts[-1] < k:
        assert math.isclose(got.effective_size, k, rel_tol=1e-9), (window, t)


@pytest.mark.parametrize("rule", [*TAILS, AnyTail(10, 0.001), AnyTail(6, 0.999)], ids=short)
def test_the_effective_size_is_that_of_the_window(rule):
    random, starts = np.random.default_rng(0), [0]
    sampled = np.unique(np.geomspace(301, 10**6, 25).astype(int)).tolist()
    for t in [*range(1, 301), *sampled]:
        starts = advance(rule, starts, t)
        fractions = rule.shortest + (1 - rule.shortest) * random.random(4)
        least = max(1, math.ceil(rule.shortest * t))
        counts = [least, t - 1, t, t + 3, *random.integers(least, t + 1, 3).tolist()]
        for window in (rule.shortest, *fractions.tolist(), 1.0):
            check_effective_size(rule, window, starts, t)
        for window in counts:
            if window >= least:
                check_effective_size(rule, window, starts, t)


@settings(max_examples=200)
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
        alpha = dense_weights(reading(rule, window, t), starts, t)
        assert math.isclose(alpha.sum(), 1.0, rel_tol=1e-12)
        assert (alpha >= 0).all()


# The averages


@every_tail
def test_weights_and_profiles_are_those_of_the_model_at_every_step(rule):
    average, steps = TailAverage(rule), 200
    matrices = weight_matrices(rule, steps)
    for t in range(1, steps + 1):
        average.update(1.0)
        for window, matrix in matrices:
            alpha = matrix[t - 1, :t]
            np.testing.assert_allclose(average.weights(window), alpha, rtol=1e-9, atol=1e-15)
            got, ages = average.profile(window), t - 1 - np.arange(t)
            assert isinstance(got, Profile)
            assert math.isclose(got.size, Window.of(as_window(window)).size(t), rel_tol=1e-15)
            assert math.isclose(got.effective_size, 1 / (alpha @ alpha), rel_tol=1e-9)
            assert math.isclose(got.mean_age, alpha @ ages, rel_tol=1e-9, abs_tol=1e-9)
            assert got.oldest_age == ages[np.argmax(alpha > 0)]


@every_method
@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        *((rule, FLOAT) for rule in TAILS),
        *((rule, kind) for rule in (AnyTail(), AnyTail(6, 0.5)) for kind in OTHER_KINDS),
    ],
    ids=lambda of: short(of) if isinstance(of, AnyTail) else f"{of.dtype} {of.shape}",
)
def test_every_window_is_the_average_by_its_weights(rule, kind, method):
    steps = 200
    xs, average = kind.draw(steps), TailAverage(rule)
    matrices = weight_matrices(rule, steps)
    windows = [window for window, _ in matrices]
    expected = [averages(matrix, xs) for _, matrix in matrices]
    take(average, kind, xs[:1], "update", 1.0)  # what a sample is, its first one tells
    for start, end in pairwise([1, 2, 5, 29, 30, 31, 128, steps]):
        if method == "scan":
            got = average.scan(xs[start:end], windows)
            assert got.shape == (len(windows), end - start, *(kind.shape or ()))
            assert got.dtype == kind.held
        else:
            take(average, kind, xs[start:end], method, windows[0])
            got = np.array([average.value(window) for window in windows])[:, None]
        for values, right in zip(got, expected, strict=True):
            assert_close(values, right[end - values.shape[0] : end], kind.rtol)
    for window in windows:
        value = average.value(window)
        if kind.shape is None:
            assert type(value) is (complex if kind.dtype == "complex128" else float)
        else:
            assert isinstance(value, np.ndarray)
            assert (value.shape, value.dtype) == (kind.shape, kind.held)
    assert average.dtype == kind.held
    assert average.count == steps


@every_tail
@settings(max_examples=5)
@given(parts=chunks(900), kind=st.sampled_from(["float", "float32 (3,)", "complex128 (2, 3)"]))
def test_any_chunks_by_any_method_give_the_same_averages(rule, kind, parts):
    kind, window = KINDS[kind], (1 + rule.shortest) / 2
    xs = kind.draw(900)
    values = TailAverage(rule).scan(xs, window)
    average = TailAverage(rule)
    for start, end, method in parts:
        got = take(average, kind, xs[start:end], method, window)
        assert_close(got, values[start:end] if method == "scan" else values[end - 1], kind.rtol)
        assert average.count == end
        assert_close(average.value(window), values[end - 1], kind.rtol)
    assert average.state_dict()["starts"] == advance(rule, [0], 900)


@settings(max_examples=60)
@given(
    st.integers(6, 25),
    st.one_of(st.floats(0.005, 0.99), st.sampled_from([0.1, 0.25, 1 / 3, 0.5])),
    st.sampled_from([FLOAT, ROW]),
    chunks(250),
    st.data(),
)
def test_any_tail_in_any_chunks_follows_the_model(m, shortest, kind, parts, data):
    rule, xs = AnyTail(m, shortest), kind.draw(250)
    counts = st.integers(math.ceil(250 * shortest), 300)
    window = data.draw(st.one_of(st.floats(shortest, 0.99), st.just(1.0), counts))
    tails, expected = Tails(rule), []
    for t in range(1, 251):
        tails.add()
        expected.append(np.tensordot(tails.of(window), xs[:t], 1))
    average = TailAverage(rule)
    for start, end, method in parts:
        got = take(average, kind, xs[start:end], method, window)
        assert_close(got, expected[start:end] if method == "scan" else expected[end - 1], 1e-12)


@pytest.mark.parametrize("kind", ["float", "float32 (3,)", "complex128 (2, 3)"])
@pytest.mark.parametrize("rule", [AnyTail(), AnyTail(6, 0.4)], ids=short)
def test_long_chunks_give_the_same_averages(rule, kind):
    """Chunks that span many turns and folds, and more samples than any buffer takes."""
    kind, steps = KINDS[kind], 40_000
    xs, windows = kind.draw(steps), [rule.shortest, 0.7, 1.0, steps // 2]
    one, values = TailAverage(rule), {}
    marks = {1, 776, 777, 778, 15_000, 17_001, 39_999, steps}
    for t, x in enumerate(kind.each(xs), start=1):
        one.update(x)
        if t in marks:
            values[t] = [one.value(window) for window in windows]
            alpha = one.weights(windows[1])
            assert_close(values[t][1], np.tensordot(alpha, xs[:t].astype(complex), 1), kind.rtol)
    for cuts in ([], [1, 777, 17_001]):
        scanned, added = TailAverage(rule), TailAverage(rule)
        got = []
        for start, end in pairwise([0, *cuts, steps]):
            got.append(scanned.scan(xs[start:end], windows))
            added.update_many(xs[start:end])
            for i, window in enumerate(windows):
                assert_close(added.value(window), values[end][i], kind.rtol)
                assert_close(scanned.value(window), values[end][i], kind.rtol)
        got = np.concatenate(got, axis=1)
        for t in marks:
            assert_close(got[:, t - 1], values[t], kind.rtol)
        assert scanned == added


def test_a_million_samples_in_single_precision_keep_five_digits():
    """Each merge rounds the mean, and the oldest samples are merged again and again."""
    random = np.random.default_rng(0)
    xs = (1 + random.random((10**6, 2))).astype(np.float32)
    single, double = TailAverage(AnyTail(6)), TailAverage(AnyTail(6), dtype="float64")
    for start in range(0, 10**6, 2500):
        single.update_many(xs[start : start + 2500])
    double.update_many(xs)
    for window in (0.1, 0.35, 1.0, 500_000):
        assert_close(single.value(window), double.value(window), 4e-7)


@every_method
def test_sums_of_many_large_numbers_do_not_overflow(method):
    xs = np.full((40_000, 2), 1e35, np.float32)
    average = TailAverage(AnyTail(6, 0.5))
    got = take(average, KINDS["float32 (3,)"], xs, method, 0.6)
    assert_close(got, 1e35, 2e-6)
    assert_close(average.value(0.6), 1e35, 2e-6)


@every_method
def test_samples_may_have_many_elements_or_none(method):
    for width in (0, 1, 20_000):
        xs = 1 + np.random.default_rng(0).random((30, width))
        average = TailAverage(AnyTail(6))
        got = take(average, ROW, xs, method, 0.4)
        assert average.value(0.4).shape == (width,)
        expected = average.weights(0.4) @ xs
        assert_close(got[-1] if method == "scan" else got, expected, 1e-12)
        assert_close(average.value(1.0), xs.mean(axis=0), 1e-12)


def test_a_stream_of_one_number_has_that_average():
    average = TailAverage(AnyTail(7, 0.2))
    for _ in range(3000):
        average.update(0.1)
        assert math.isclose(average.value(0.2), 0.1, rel_tol=1e-14)
        assert math.isclose(average.value(1.0), 0.1, rel_tol=1e-14)


@pytest.mark.parametrize("kind", ["float", "float32 (3,)", "0-d float64"])
def test_scan_with_one_window_is_that_row_of_a_scan_with_several(kind):
    kind = KINDS[kind]
    rule, xs = AnyTail(8, 0.2), kind.draw(300)
    windows = [0.2, 0.5, 1.0, 70, Fixed(90), Growing(0.9, at_most=64)]
    for some in (windows, tuple(windows), windows[:1]):
        several = TailAverage(rule)
        first = several.scan(xs[:100], some)
        second = several.scan(xs[100:], some)
        assert first.shape[:2] == (len(some), 100)
        for i, window in enumerate(some):
            one = TailAverage(rule)
            assert np.array_equal(one.scan(xs[:100], window), first[i])
            assert np.array_equal(one.scan(xs[100:], window), second[i])
            assert one == several


def test_values_and_states_are_not_shared_with_the_caller():
    xs = ROW.draw(50)
    kept, average = xs.copy(), TailAverage(AnyTail(6))
    average.update_many(xs)
    before = [average.value(window) for window in (0.1, 1.0)]
    xs[...] = 0
    average.value(0.1)[...] = 5
    average.weights(0.1)[...] = 5
    state = average.state_dict()
    state["blocks"][...] = 7
    state["starts"].clear()
    state["partial"][...] = 7
    scanned = TailAverage(AnyTail(6))
    scanned.scan(kept, [0.1, 1.0])[...] = 3
    for run in (average, scanned):
        assert_close([run.value(window) for window in (0.1, 1.0)], before, 1e-15)


# NaN and infinities


@every_method
@pytest.mark.parametrize("kind", [FLOAT, ROW], ids=["float", "array"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", [AnyTail(), AnyTail(6, 0.05), AnyTail(8, 0.4)], ids=short)
def test_nan_and_infinity_last_as_long_as_their_block_has_a_weight(rule, bad, kind, method):
    steps = 200
    xs = kind.draw(steps)
    xs.reshape(steps, -1)[[3, 47, 110], 0] = bad
    matrices = weight_matrices(rule, steps)
    windows = [window for window, _ in matrices]
    expected = np.array([averages(matrix, xs) for _, matrix in matrices])
    average = TailAverage(rule)
    for start in range(0, steps, 50 if method == "scan" else 1):
        if method == "scan":
            got = average.scan(xs[start : start + 50], windows)
            assert_close(got, expected[:, start : start + 50], 1e-12)
        else:
            take(average, kind, xs[start : start + 1], method, 1.0)
            got = [average.value(window) for window in windows]
            assert_close(got, expected[:, start], 1e-12)
    clean = np.isfinite(expected[:, -1].reshape(len(windows), -1)).all(axis=1)
    assert clean[0]  # the shortest window
    assert not clean[windows.index(1.0)]
    assert not np.isnan(average.weights(0.5)).any()


def test_a_window_is_clean_as_soon_as_it_does_not_touch_the_bad_block():
    rule = AnyTail(10)
    average = TailAverage(rule)
    average.update_many(np.ones(5000))
    average.update(math.nan)
    assert math.isnan(average.value(0.1))
    cleaned, starts = {}, advance(rule, [0], 5001)
    for t in range(5002, 12_000):
        average.update(1.0)
        starts = advance(rule, starts, t)
        after = next(start for start in [*starts, t] if start > 5000)
        for window in (0.1, 0.2, 0.3):
            touches = t - after < window * t * (1 - 1e-12)
            assert math.isnan(average.value(window)) is touches, (t, window)
            if not touches:
                cleaned.setdefault(window, t)
    assert cleaned[0.1] < cleaned[0.2] < cleaned[0.3]
    assert cleaned[0.1] < 1.3 * 5000


def test_omit_leaves_samples_with_nan_out_whole_and_does_not_count_them():
    for kind in (FLOAT, ROW, KINDS["float32 (3,)"], KINDS["complex"]):
        rule, xs = AnyTail(6, 0.2), kind.draw(300)
        kept = np.random.default_rng(1).random(300) < 0.7
        kept[:4] = False, False, False, True
        xs.reshape(300, -1)[~kept, -1] = math.nan
        windows = [0.2, 0.6, 1.0, 300]
        expected = TailAverage(rule).scan(xs[kept], windows)
        one, many, scanned = (TailAverage(rule, nan_policy="omit") for _ in range(3))
        many.update_many(xs[:120])
        many.update_many(xs[120:])
        for x in kind.each(xs):
            one.update(x)
        parts = [scanned.scan(xs[a:b], windows) for a, b in pairwise([0, 2, 90, 300])]
        values = np.concatenate(parts, axis=1)
        assert values.shape == (4, *xs.shape)
        assert np.isnan(values[:, :3]).all()
        assert_close(values[:, 3:], expected[:, np.cumsum(kept)[3:] - 1], kind.rtol)
        assert_close(scanned.scan(xs[:2], 0.6), values[[1, 1], -1], kind.rtol)
        assert scanned.scan(xs[:2], windows).shape == (4, 2, *xs.shape[1:])
        for average in (one, many, scanned):
            assert average.count == kept.sum()
            assert len(average.weights(0.6)) == kept.sum()
            for i, window in enumerate(windows):
                assert_close(average.value(window), expected[i, -1], kind.rtol)


def test_a_count_is_long_enough_if_it_is_for_the_samples_that_are_counted():
    average = TailAverage(AnyTail(), nan_policy="omit")
    average.update_many(range(95))
    got = average.scan([1.0] + [math.nan] * 9, 10)
    assert average.count == 96
    assert_close(got, average.value(10), 1e-12)


def test_raise_refuses_a_nan_and_changes_nothing():
    average = TailAverage(AnyTail(6), nan_policy="raise")
    average.update_many(range(40))
    before = average.copy()
    for call in (
        lambda: average.update(math.nan),
        lambda: average.update_many([1.0, math.nan]),
        lambda: average.scan([1.0, math.nan], 0.5),
        lambda: average.scan([1.0, math.nan], [0.5, 1.0]),
    ):
        with pytest.raises(ValueError, match="NaN"):
            call()
        assert average == before
    assert average.scan([2.0, math.inf], [0.1, 1.0]).shape == (2, 2)


@pytest.mark.parametrize("policy", ["raise", "omit"])
@pytest.mark.parametrize("kind", [FLOAT, ROW], ids=["float", "array"])
def test_a_policy_changes_nothing_where_there_is_no_nan(kind, policy):
    xs, rule = kind.draw(300), AnyTail(7, 0.3)
    plain, guarded = TailAverage(rule), TailAverage(rule, nan_policy=policy)
    for average in (plain, guarded):
        take(average, kind, xs[:200], "update", 1.0)
        average.update_many(xs[200:])
    assert np.array_equal(plain.value(0.4), guarded.value(0.4))


# Windows that cannot be read


def refuses(average, call, error, match):
    """Whether `call` raises, and leaves the average as it was."""
    before = average.copy()
    with pytest.raises(error, match=match):
        call(average)
    assert average == before
    assert repr(average) == repr(before)
    assert average.count == before.count


def reads(window):
    return {
        "value": lambda average: average.value(window),
        "weights": lambda average: average.weights(window),
        "profile": lambda average: average.profile(window),
        "scan": lambda average: average.scan([1.0], window),
        "scan several": lambda average: average.scan([1.0], [1.0, window]),
    }


@pytest.mark.parametrize("call", reads(None))
@pytest.mark.parametrize("window", [0.05, 0.0999999, 3, 99, Growing(0.5, at_most=80), Fixed(1)])
def test_a_window_that_is_too_short_is_refused_with_the_shortest(window, call):
    average = TailAverage(AnyTail(8, 0.1))
    average.update_many(range(1000))
    refuses(average, reads(window)[call], ValueError, r"window: expected .*at least 0\.1.*10.*got ")


def test_the_shortest_window_itself_can_be_read():
    for shortest in (0.1, 0.07, 1 / 3, 0.29, 0.999, 0.123456789):
        average = TailAverage(AnyTail(6, shortest))
        for t in range(1, 400):
            average.update(1.0)
            least = max(1, math.ceil(shortest * t - 1e-9))
            for window in (shortest, least, Fixed(least), np.float64(shortest), np.int64(least)):
                average.value(window)
            if least > 1 and t > 1:
                with pytest.raises(ValueError, match=f"at least {shortest:g} .* of {t}, got"):
                    average.value(least - 1)


def test_numbers_of_every_kind_stand_for_a_window():
    average = TailAverage(AnyTail())
    average.update_many(range(1000))
    for window in (Fraction(1, 2), np.float64(0.5), np.float32(0.5), Growing(0.5), np.float16(0.5)):
        assert average.value(window) == average.value(0.5)
        assert average.scan([500.0], window).shape == (1,)
    for window in (Fixed(500), np.int32(500), np.uint8(200)):
        assert average.value(window) == average.value(int(getattr(window, "k", window)))


@pytest.mark.parametrize("call", reads(None))
def test_a_window_is_needed(call):
    average = TailAverage(AnyTail(8, 0.2))
    average.update_many(range(100))
    refuses(average, reads(None)[call], ValueError, r"at least 0\.2 .*, 20(\.2)? of 10")
    for bare in (
        lambda average: average.value(),
        lambda average: average.weights(),
        lambda average: average.profile(),
        lambda average: average.scan([1.0]),
        lambda average: average.size,
    ):
        refuses(average, bare, ValueError, r"window: expected .*at least 0\.2")


@pytest.mark.parametrize("call", reads(None))
@pytest.mark.parametrize(
    "window",
    ["0.3", b"0.3", True, np.True_, 0.3j, Decimal("0.3"), {0.3}, {0.3: 1}, object(), float,
     AnytimeWindow(0.3), AnyTail(), np.array([[0.3]]), [[0.3]], "", np.array(0.3)],
    ids=lambda window: type(window).__name__,
)  # fmt: skip
def test_what_is_no_window_is_refused(window, call):
    average = TailAverage(AnyTail())
    average.update_many(range(100))
    refuses(average, reads(window)[call], TypeError, r"window: expected an int >= 1 .*got ")


@pytest.mark.parametrize("call", reads(None))
@pytest.mark.parametrize("window", [0, -1, 0.0, -0.3, 1.5, 2.0, math.nan, math.inf], ids=repr)
def test_a_number_that_is_no_window_is_refused(window, call):
    average = TailAverage(AnyTail())
    average.update_many(range(100))
    refuses(average, reads(window)[call], ValueError, r"window: expected an int >= 1 .*got ")


def test_a_scan_without_any_window_is_refused():
    average = TailAverage(AnyTail())
    average.update_many(range(100))
    for nothing in ([], ()):
        refuses(average, lambda run: run.scan([1.0], nothing), ValueError, "window: expected")  # noqa: B023


@pytest.mark.parametrize("windows", [100, [0.5, 100], [1.0, Growing(1.0, at_most=100)]], ids=repr)
def test_a_count_that_is_too_short_at_the_end_of_a_scan_is_refused_before_anything_is_taken(
    windows,
):
    average = TailAverage(AnyTail())
    average.update_many(range(950))
    assert average.value(100) > 0
    too_many = np.ones(51)
    refuses(average, lambda average: average.scan(too_many, windows), ValueError, "100.1 of 1001")
    assert average.scan(too_many[:50], windows).shape[-1] == 50
    assert average.count == 1000
    fresh = TailAverage(AnyTail())
    refuses(fresh, lambda average: average.scan(np.ones(1001), windows), ValueError, "of 1001")
    assert fresh.dtype is None


@pytest.mark.parametrize(
    "rule", [100, 0.3, Exponential(10), ExactWindow(5), RawTail(0.5, 40)], ids=short
)
@pytest.mark.parametrize("call", reads(None))
def test_a_rule_that_has_a_window_takes_no_other(rule, call):
    average = TailAverage(rule)
    average.update_many(range(50))
    refuses(average, reads(0.3)[call], ValueError, "window: expected none, since .* has its own")


def test_reads_before_the_first_sample_are_refused():
    average = TailAverage(AnyTail())
    for call in ("value", "profile"):
        for window in (None, 0.3, 5):
            with pytest.raises(ValueError, match="at least one"):
                getattr(average, call)(*() if window is None else (window,))
    assert len(average.weights(0.3)) == 0
    assert average.count == 0


BAD_CHUNKS = {
    "empty": ([], ValueError, "samples: expected at least one"),
    "a number": (3.0, ValueError, "samples: expected a sequence"),
    "text": ("abc", TypeError, "samples: expected real"),
    "None": (None, TypeError, "samples: expected real"),
    "ragged": ([[1.0], [1.0, 2.0]], ValueError, "samples: expected arrays of one shape"),
    "no samples of a shape": (np.ones((0, 3)), ValueError, "samples: expected at least one"),
    "another shape": (np.ones((2, 3)), ValueError, "sample: expected shape"),
    "complex": ([1j], TypeError, "sample: expected real"),
    "masked": (np.ma.masked_array([1.0]), TypeError, "samples: expected numbers"),
}


@pytest.mark.parametrize(("xs", "error", "match"), BAD_CHUNKS.values(), ids=BAD_CHUNKS)
@pytest.mark.parametrize("policy", ["propagate", "raise", "omit"])
def test_bad_samples_are_refused(xs, error, match, policy):
    average = TailAverage(AnyTail(6), nan_policy=policy)
    average.update_many(range(50))
    refuses(average, lambda average: average.update_many(xs), error, match)
    refuses(average, lambda average: average.scan(xs, 0.5), error, match)
    refuses(average, lambda average: average.scan(xs, [0.5, 40]), error, match)


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


@pytest.mark.parametrize("shortest", [1e-6, 1e-5 / 3, 1 - 2.0**-53, 1 - 1e-9])
def test_the_most_extreme_tails_average_all_the_same(shortest):
    average = TailAverage(AnyTail(6, shortest))
    average.update_many(range(100))
    assert math.isclose(average.value(1.0), 49.5)
    assert average.value(shortest) >= 49.4
    assert math.isclose(average.weights(shortest).sum(), 1)


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


# States


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["float", "complex", "0-d float32", "float32 (3,)", "int32 (2,)"])
@pytest.mark.parametrize("rule", [AnyTail(), AnyTail(6, 0.4)], ids=short)
def test_a_resumed_run_is_as_one_that_never_stopped_to_the_bit(rule, kind, way):
    if way == "json" and kind != "float":
        return
    kind = KINDS[kind]
    xs, average = kind.draw(1500), TailAverage(rule)
    for stop, after in [(1, 4), (4, 12), (12, 37), (37, 290), (290, 900), (900, 1500)]:
        half = (stop + after) // 2
        take(average, kind, xs[average.count : stop], "update", 1.0)
        resumed = WAYS[way](average)
        assert resumed == average
        assert repr(resumed) == repr(average)
        assert bits(resumed) == bits(average)
        for run in (average, resumed):
            take(run, kind, xs[stop:half], "update", 1.0)
            run.update_many(xs[half : half + 1])
            run.scan(xs[half + 1 : after], 0.5)
        assert bits(resumed) == bits(average)
        for window in (rule.shortest, 0.77, 1500):
            once, again = average.value(window), resumed.value(window)
            assert np.asarray(once).tobytes() == np.asarray(again).tobytes()
            assert np.array_equal(average.weights(window), resumed.weights(window))
        average = resumed


@settings(max_examples=40)
@given(
    st.integers(6, 20),
    st.floats(0.01, 0.9),
    st.sampled_from(["float", "0-d float32", "float32 (3,)", "complex128 (2, 3)"]),
    st.sampled_from(sorted(WAYS)),
    chunks(700),
)
def test_a_run_resumed_after_every_chunk_is_as_one_that_never_was(m, shortest, kind, way, parts):
    kind = KINDS[kind]
    way = "file" if way == "json" and kind.shape is not None else way
    xs = kind.draw(700)
    average = stopped = TailAverage(AnyTail(m, shortest))
    for start, end, method in parts:
        stopped = WAYS[way](stopped)
        values = take(average, kind, xs[start:end], method, 0.95)
        again = take(stopped, kind, xs[start:end], method, 0.95)
        assert np.asarray(values).tobytes() == np.asarray(again).tobytes()
        assert bits(average) == bits(stopped)


@pytest.mark.parametrize("way", WAYS)
def test_nan_and_infinity_are_resumed_too(way):
    average = TailAverage(AnyTail(6))
    for x in [1.0, math.nan, 2.0, math.inf, 3.0, 4.0, 5.0, 6.0]:
        average.update(x)
    resumed = WAYS[way](average)
    assert resumed == average
    for run in (average, resumed):
        run.update_many(np.ones(50))
    np.testing.assert_equal(resumed.value(1.0), average.value(1.0))
    assert resumed.value(0.1) == average.value(0.1) == 1.0


def test_the_blocks_of_a_state_are_means_of_their_samples():
    xs = np.sin(np.arange(3000.0))
    for rule in (AnyTail(), AnyTail(6, 0.3)):
        average = TailAverage(rule)
        for t, x in enumerate(xs.tolist(), start=1):
            average.update(x)
            if t % 41 == 0:
                state = average.state_dict()
                assert state["rule"] == {
                    "type": "AnyTail",
                    "accumulators": rule.accumulators,
                    "shortest": rule.shortest,
                }
                assert state["starts"][0] == 0
                ends = [*state["starts"][1:], state["folded"]]
                expected = [
                    xs[start:end].mean() if end > start else 0.0
                    for start, end in zip(state["starts"], ends, strict=True)
                ]
                np.testing.assert_allclose(state["blocks"], expected, rtol=0, atol=1e-13)
                fresh = xs[state["folded"] : t].sum()
                assert math.isclose(state["partial"], fresh, rel_tol=1e-9, abs_tol=1e-9)


def a_state(rule=AnyTail(6), steps=600, shape=()):  # noqa: B008
    average = TailAverage(rule)
    average.update_many(np.sin(np.arange(steps * math.prod(shape))).reshape(steps, *shape))
    return average.state_dict()


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize(
    "change",
    [
        {"count": 1},
        {"count": 0},
        {"count": -1},
        {"count": 10**6},
        {"count": 10**15},
        {"folded": 0},
        {"folded": 601},
        {"starts": []},
        {"starts": [0, 1]},
        {"starts": [0, 100, 200, 300, 400, 500]},
        {"starts": [1, 2, 3, 4, 5, 6]},
        {"blocks": []},
        {"blocks": np.zeros((7, 2))},
        {"partial": np.zeros(3)},
        {"rule": {"type": "AnyTail"}},
        {"rule": {"type": "AnyTail", "accumulators": 7, "shortest": 0.1}},
        {"rule": {"type": "AnyTail", "accumulators": 6, "shortest": 0.2}},
        {"rule": {"type": "AnyTail", "accumulators": 5, "shortest": 0.1}},
        {"rule": {"type": "AnyTail", "accumulators": 6, "shortest": 1.0}},
        {"rule": {"type": "AnyTail", "accumulators": 6, "shortest": "0.1"}},
        {"rule": {"type": "AnyTail", "accumulators": 6, "shortest": 0.1, "window": 3}},
        {"rule": {"type": "AnytimeWindow", "window": {"type": "AnyTail"}}},
        {"rule": {"type": "AnytimeWindow", "window": {"type": "Fixed", "k": 50}}},
    ],
    ids=str,
)
def test_a_state_that_was_tampered_with_is_refused(change, shape):
    state = a_state(shape=shape)
    TailAverage.from_state_dict(state)
    with pytest.raises(ValueError, match="state: "):
        TailAverage.from_state_dict({**state, **change})


def test_a_state_of_another_rule_is_no_tail():
    for rule in (AnytimeWindow(0.1, 6), AnytimeWindow(50, 6), Exponential(0.1), RawTail(0.1, 600)):
        with pytest.raises(ValueError, match="state: "):
            TailAverage.from_state_dict({**a_state(rule), "rule": a_state()["rule"]})


def test_each_start_of_a_state_counts():
    state = a_state()
    for i in range(6):
        for by in (-1, 1):
            starts = [start + by * (i == j) for j, start in enumerate(state["starts"])]
            with pytest.raises(ValueError, match="state: "):
                TailAverage.from_state_dict({**state, "starts": starts})


def test_averages_are_equal_when_their_states_are():
    one, other = TailAverage(AnyTail(6)), TailAverage(AnyTail(6))
    for average in (one, other):
        average.update_many(range(100))
    assert one == other
    other.update(1.0)
    assert one != other
    one.update(2.0)
    assert one != other
    assert TailAverage(AnyTail(6)) != TailAverage(AnyTail(7))
    assert TailAverage(AnyTail(6)) != TailAverage(AnyTail(6, 0.2))
    assert TailAverage(AnyTail(6)) != TailAverage(6)
    assert repr(one) == (
        "<TailAverage(AnyTail(accumulators=6, shortest=0.1), dtype='float64'): 101 samples>"
    )


def test_a_file_that_is_damaged_is_refused(tmp_path):
    average = TailAverage(AnyTail(6))
    average.update_many(np.ones((100, 3)))
    path = tmp_path / "average"
    average.save(path)
    assert TailAverage.load(path) == average
    content = path.read_bytes()
    for length in range(0, len(content), 301):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="average: expected a file saved by tailavg"):
            TailAverage.load(path)
