"""Numerics: long streams, large offsets, and accumulators of few digits."""

from itertools import pairwise

import numpy as np
import pytest

from tailavg import AnytimeWindow, ExactWindow, Exponential, Growing, RawTail, TailAverage
from tailavg.core.equation import read
from tests.support.cases import of_rules, short
from tests.support.effort import exhaustive, some
from tests.support.schedule import advance

OFFSET = 1e8
MANY, LONG = some(200_000, 10**6), some(300_000, 10**7)
WINDOWS = [1000, LONG // 4, 0.25, Growing(0.25, at_most=LONG // 10)]


def truth(rule, xs, steps):
    """The averages of samples that are near 0, at some steps, in float64."""
    xs = xs.astype(float)
    if isinstance(rule, Exponential):
        values, average = [], 0.0
        for start, end in pairwise([0, *steps]):
            decays = rule.decay(np.arange(start + 1, end + 1))
            kept = np.append(np.cumprod(decays[::-1])[::-1], 1.0)  # of each sample, to the end
            average = kept[0] * average + ((1 - decays) * kept[1:]) @ xs[start:end]
            values.append(average)
        return np.array(values)
    sums = np.concatenate([np.zeros_like(xs[:1]), np.cumsum(xs, axis=0)])
    values, starts = [], [0]
    for t in steps:
        if isinstance(rule, ExactWindow):
            blocks, weights = [(t - rule.samples(t), t)], [1.0]
        else:
            starts = advance(rule, starts, t)
            blocks = list(pairwise([*starts, t]))
            weights = read([end - start for start, end in blocks], rule.size(t))
        means = [(sums[end] - sums[start]) / (end - start) for start, end in blocks]
        values.append(sum(w * mean for w, mean in zip(weights, means, strict=True)))
    return np.array(values)


def noise_and_steps(rule, steps, every):
    noise = np.random.default_rng(0).normal(size=steps)
    noise = (OFFSET + noise) - OFFSET  # what is left of it beside the offset
    at = [1, 2, 3, *range(every, steps, every), steps]
    return noise, at, truth(rule, noise, at)


long_rules = of_rules(
    [
        *map(AnytimeWindow, WINDOWS),
        AnytimeWindow(LONG // 4, 2),
        AnytimeWindow(0.5, 7),
        AnytimeWindow(0.25, turns="paper"),
        RawTail(1.0, total=LONG),
        Exponential(LONG // 4),
        Exponential(0.25),
    ]
)


@long_rules
def test_long_streams_in_chunks_keep_12_digits_beside_a_large_offset(rule):
    noise, steps, expected = noise_and_steps(rule, LONG, 99_991)
    xs = OFFSET + noise
    for method in ("update_many", "scan"):
        average, values = TailAverage(rule), []
        for start, end in pairwise([0, *steps]):
            got = getattr(average, method)(xs[start:end])
            values.append(average.value())
            assert got is None or abs(got[-1] - values[-1]) <= 1e-12 * OFFSET
        np.testing.assert_allclose(np.array(values), OFFSET + expected, rtol=1e-12)


@long_rules
def test_the_average_of_one_number_again_and_again_is_that_number(rule):
    constant = OFFSET + 0.1
    for method in ("update_many", "scan"):
        average = TailAverage(rule)
        for size in (1, 77, LONG // 10 - 78, *[3 * LONG // 10] * 3):
            got = getattr(average, method)(np.full(size, constant))
            assert abs(average.value() / constant - 1) < 1e-12
            assert got is None or np.abs(got / constant - 1).max() < 1e-12
        assert average.count == LONG


@of_rules([*map(AnytimeWindow, [1000, 0.25]), RawTail(1.0, total=MANY), Exponential(MANY // 4)])
def test_samples_one_by_one_keep_12_digits_beside_a_large_offset(rule):
    noise, steps, expected = noise_and_steps(rule, MANY, 9973)
    average, constant, values = TailAverage(rule), TailAverage(rule), []
    for start, end in pairwise([0, *steps]):
        for x in (OFFSET + noise[start:end]).tolist():
            average.update(x)
            constant.update(OFFSET + 0.1)
        values.append(average.value())
        assert abs(constant.value() / (OFFSET + 0.1) - 1) < 1e-12
    np.testing.assert_allclose(values, OFFSET + expected, rtol=1e-12)


@exhaustive("ten million updates, one by one")
def test_ten_million_samples_one_by_one_keep_12_digits_beside_a_large_offset():
    rule = AnytimeWindow(0.25)
    noise, steps, expected = noise_and_steps(rule, LONG, 99_991)
    average, values = TailAverage(rule), []
    for start, end in pairwise([0, *steps]):
        for x in (OFFSET + noise[start:end]).tolist():
            average.update(x)
        values.append(average.value())
    np.testing.assert_allclose(values, OFFSET + expected, rtol=1e-12)


@pytest.fixture(scope="module")
def hard_for_float32():
    """A constant, a slow random walk, and three kinds of noise, a column each."""
    rng, steps = np.random.default_rng(1), MANY
    columns = [
        np.full(steps, 0.1),
        1 + np.cumsum(rng.normal(size=steps)) * 1e-5,
        1 + 1e-3 * rng.normal(size=steps),
        rng.normal(1, 1, steps),
        rng.normal(10, 0.1, steps),
        1 + np.arange(steps) / steps,
    ]
    return np.stack(columns, axis=1).astype(np.float32)


def scales(xs):
    return np.sqrt((xs.astype(float) ** 2).mean(axis=0))


float32_rules = pytest.mark.parametrize(
    ("rule", "tolerance"),
    [
        (AnytimeWindow(0.5), 1e-5),
        (RawTail(1.0, total=MANY), 1e-5),
        (Exponential(MANY // 4), 1e-4),
    ],
    ids=short,
)


@float32_rules
def test_float32_samples_one_by_one_keep_their_digits(rule, tolerance, hard_for_float32):
    xs = hard_for_float32
    steps = [1, 10, 255, 256, 257, *range(1009, len(xs), 1009), len(xs)]
    average, values = TailAverage(rule), []
    for start, end in pairwise([0, *steps]):
        for x in xs[start:end]:
            average.update(x)
        values.append(average.value())
    assert average.dtype == np.float32
    errors = np.abs(np.array(values) - truth(rule, xs, steps)) / scales(xs)
    assert errors.max(axis=0) == pytest.approx(np.zeros(xs.shape[1]), abs=tolerance)


@float32_rules
@pytest.mark.parametrize("method", ["update_many", "scan"])
def test_float32_samples_in_chunks_keep_their_digits(rule, tolerance, hard_for_float32, method):
    xs = hard_for_float32
    steps = [1, 300, *range(1000, len(xs), 40_009), len(xs)]
    average, values = TailAverage(rule), []
    for start, end in pairwise([0, *steps]):
        got = getattr(average, method)(xs[start:end])
        values.append(average.value() if got is None else got[-1])
    errors = np.abs(np.array(values) - truth(rule, xs, steps)) / scales(xs)
    assert errors.max(axis=0) == pytest.approx(np.zeros(xs.shape[1]), abs=tolerance)


@pytest.mark.parametrize(
    ("rule", "tolerance"),
    [(AnytimeWindow(50_000, 2), 1e-5), (Exponential(12_500), 1e-4)],
    ids=short,
)
def test_numbers_can_be_held_in_float32_too(rule, tolerance):
    average, x = TailAverage(rule, dtype=np.float32), float(np.float32(0.1))
    for _ in range(50_000):
        average.update(x)
    assert average.value() == pytest.approx(0.1, rel=tolerance)


@of_rules([AnytimeWindow(5000), Exponential(5000), ExactWindow(1000)])
def test_float16_samples_are_accumulated_in_float32(rule):
    xs = np.random.default_rng(2).normal(100, 1, (20_000, 2)).astype(np.float16)
    steps = [1, 1000, 7777, 20_000]
    average, values = TailAverage(rule), []
    for start, end in pairwise([0, *steps]):
        for x in xs[start:end]:
            average.update(x)
        values.append(average.value())
    assert average.dtype == np.float32
    np.testing.assert_allclose(values, truth(rule, xs, steps), rtol=1e-5)


@pytest.mark.parametrize("window", [10, 0.3, Growing(0.5, at_most=40)], ids=str)
def test_exact_window_forgets_a_huge_sample_altogether(window):
    rule = ExactWindow(window)
    xs = np.random.default_rng(3).random(3000)
    clean = TailAverage(rule).scan(xs)
    xs[[5, 40, 41]] = 1e16, -1e300, 1e300
    average = TailAverage(rule)
    values = average.scan(xs)
    gone = np.arange(1, 3001) - rule.samples(np.arange(1, 3001)) > 41
    np.testing.assert_allclose(values[gone], clean[gone], rtol=1e-15)
    assert average.value() == pytest.approx(clean[-1], rel=1e-15)


@of_rules([AnytimeWindow(10), AnytimeWindow(100, 5), AnytimeWindow(0.3)])
def test_an_anytime_window_forgets_a_huge_sample_with_its_block(rule):
    xs = np.random.default_rng(4).random(3000)
    clean = TailAverage(rule).scan(xs)
    xs[40] = 1e16
    average, added = TailAverage(rule), TailAverage(rule)
    values = average.scan(xs)
    added.update_many(xs)
    np.testing.assert_allclose(values[-2000:], clean[-2000:], rtol=1e-12)
    assert added.value() == pytest.approx(clean[-1], rel=1e-12)


@of_rules([AnytimeWindow(7), AnytimeWindow(0.3), ExactWindow(7), Exponential(7)])
def test_samples_near_the_ends_of_float64_are_averaged(rule):
    for x in (5e-324, 1e-308, 1e290):
        average = TailAverage(rule)
        average.update_many(np.full(100, x))
        for _ in range(100):
            average.update(x)
        assert average.value() == pytest.approx(x, rel=1e-12, abs=1e-323)
