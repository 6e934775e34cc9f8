"""Freshest: the least mean age at the variance of a window, against a slow search for it."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailavg import (
    AnyTail,
    AnytimeWindow,
    Exponential,
    Fixed,
    Freshest,
    Growing,
    TailAverage,
    TailAverages,
)
from tailavg.core.equation import freshest, read
from tests.support.any_tails import TAILS, Tails
from tests.support.cases import EVERY_KIND, short
from tests.support.effort import some
from tests.support.model import Window, smaller_root
from tests.support.model import freshest as slow_freshest


def of_blocks(sizes, k):
    """The weights that the library gives to blocks."""
    ages = np.array([*np.cumsum(sizes[::-1])[::-1], 0], float)
    return freshest(ages, k, np)


def by_sample(tails, window):
    """The weight of each sample of an AnyTail, oldest first."""
    k = min(tails.t, Window.of(window).size(tails.t))
    weights = np.zeros(tails.t)
    blocks = slow_freshest([len(block) for block in tails.blocks], k)
    for block, weight in zip(tails.blocks, blocks, strict=True):
        weights[block] = weight / len(block)
    return weights


SIZES = st.lists(st.integers(1, 400), min_size=1, max_size=13)


# The equation


@settings(max_examples=some(200, 3000))
@given(sizes=SIZES, part=st.floats(0, 1))
def test_weights_are_those_of_the_slow_search(sizes, part):
    t = sum(sizes)
    k = sizes[-1] + part * (t - sizes[-1])  # the newest block fits the window
    weights = of_blocks(sizes, k)
    np.testing.assert_allclose(weights, slow_freshest(sizes, k).astype(float), rtol=0, atol=1e-9)
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    assert 1 / (weights**2 / sizes).sum() == pytest.approx(k, rel=1e-9)


@settings(max_examples=some(100, 1000))
@given(sizes=st.lists(st.integers(1, 400), min_size=2, max_size=8), part=st.floats(0.01, 0.99))
def test_no_other_weights_of_that_variance_are_fresher(sizes, part):
    """Any step along the surface of equal variance makes the average older."""
    sizes = np.array(sizes, float)
    t, ages = sizes.sum(), np.cumsum(sizes[::-1])[::-1] - sizes / 2
    k = sizes[-1] + part * (t - sizes[-1])
    best = of_blocks(sizes.tolist(), k)
    rng = np.random.default_rng(len(sizes))
    for scale in (1e-3, 0.1, 1.0):
        for _ in range(20):
            other = np.maximum(0, best + scale * rng.normal(size=len(sizes)) * sizes / t)
            other /= other.sum()
            mean = sizes / t  # towards equal weights, the variance falls: find where it is 1/k
            low, high = 0.0, 1.0
            if (other**2 / sizes).sum() < 1 / k:
                continue  # more samples than k: a fresher one of that variance is not meant
            for _ in range(60):
                middle = (low + high) / 2
                mixed = other + middle * (mean - other)
                low, high = (middle, high) if (mixed**2 / sizes).sum() > 1 / k else (low, middle)
            mixed = other + high * (mean - other)
            assert mixed @ ages >= best @ ages * (1 - 1e-9)


@pytest.mark.parametrize(("old", "new", "k"), [(100, 50, 100), (7, 3, 8.5), (40, 40, 79.0)])
def test_two_blocks_have_the_papers_weight(old, new, k):
    assert of_blocks([old, new], k)[0] == pytest.approx(smaller_root(old, new, k), rel=1e-12)
    np.testing.assert_allclose(of_blocks([old, new], k), read([old, new], k), rtol=1e-12)


@pytest.mark.parametrize("k", [50, 1000, 25_000])
def test_of_single_samples_the_weights_are_a_straight_line(k):
    weights = Freshest(k).weights(2 * k)[::-1]
    ages = np.arange(2 * k) + 0.5
    line = np.maximum(0, 1 - ages / (4 * k / 3)) * 1.5 / k
    np.testing.assert_allclose(weights, line, rtol=0, atol=2 / k**2)
    assert weights @ ages == pytest.approx(4 * k / 9, rel=1 / k)
    assert np.count_nonzero(weights) == pytest.approx(4 * k / 3, abs=2)


def test_blocks_that_are_empty_or_few():
    assert of_blocks([5], 3).tolist() == [1.0]
    assert of_blocks([5], 5).tolist() == [1.0]
    np.testing.assert_allclose(of_blocks([0, 0, 6, 3, 1], 8), [0, 0, *of_blocks([6, 3, 1], 8)])
    np.testing.assert_allclose(of_blocks([4, 3, 2], 9), [4 / 9, 3 / 9, 2 / 9])


def test_long_streams_keep_their_digits():
    for scale in (10**6, 10**12, 10**17):
        weights = of_blocks([9 * scale, 5 * scale, 2 * scale, scale], 10 * scale)
        np.testing.assert_allclose(weights, of_blocks([9, 5, 2, 1], 10), rtol=1e-12)


# An AnyTail


@pytest.mark.parametrize("rule", TAILS, ids=short)
def test_an_any_tail_at_every_step(rule):
    average, tails, steps = TailAverage(rule), Tails(rule), 150
    xs = np.random.default_rng(0).normal(3, 1, steps)
    windows = [Growing(rule.shortest), Growing(0.95), Growing(1.0), Fixed(10 * steps)]
    readings = [Freshest(window) for window in windows]
    scanned = TailAverage(rule).scan(xs, readings)
    for t in range(1, steps + 1):
        average.update(xs[t - 1])
        tails.add()
        for i, (window, reading) in enumerate(zip(windows, readings, strict=True)):
            assert scanned[i, t - 1] == pytest.approx(average.value(reading), rel=1e-12)
            if t not in {1, 2, 13, 32, 99, 150}:
                continue
            alpha = by_sample(tails, window)
            np.testing.assert_allclose(average.weights(reading), alpha, rtol=0, atol=1e-9)
            assert average.value(reading) == pytest.approx(alpha @ xs[:t], rel=1e-9)
            got = average.profile(reading)
            k = max(len(tails.blocks[-1]), min(t, Window.of(window).size(t)))
            assert got.effective_size == pytest.approx(k, rel=1e-9)
            assert got.mean_age == pytest.approx(alpha @ (t - 1 - np.arange(t)), rel=1e-6, abs=1e-6)
            assert got.accumulators == rule.accumulators


def test_it_is_fresher_than_the_plain_read_and_the_exact_window():
    average, ages = TailAverage(AnyTail()), []
    average.update_many(np.zeros(500))
    for _ in range(3000):
        average.update(0.0)
        fresh, plain = average.profile(Freshest(0.25)), average.profile(0.25)
        assert fresh.mean_age <= plain.mean_age * (1 + 1e-12)
        ages.append(fresh.mean_age / fresh.size)
        assert fresh.oldest_age < 1.5 * fresh.size
    assert 4 / 9 <= np.mean(ages) < 0.45  # the limit; half a window is the exact one's


@settings(max_examples=some(8, 40))
@given(
    rule=st.sampled_from(TAILS),
    part=st.floats(0, 1),
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    kind=st.sampled_from(["float", "float64 (3,)", "float32 (3,)", "complex"]),
)
def test_scans_of_long_streams_in_pieces(rule, part, sizes, kind):
    reading = Freshest(rule.shortest + part * (1 - rule.shortest))
    xs = EVERY_KIND[kind].draw(sum(sizes))
    scanned, single, begin = TailAverage(rule), TailAverage(rule), 0
    for size in sizes:
        averages = scanned.scan(xs[begin : begin + size], reading)
        for x in xs[begin : begin + size]:
            single.update(x)
        begin += size
        rtol = 2e-5 if "32" in kind else 1e-11
        np.testing.assert_allclose(averages[-1], single.value(reading), rtol=rtol, atol=rtol)


def test_of_each_key():
    averages, keys = TailAverages(AnyTail()), ["a", "b", "a", "a", "b"] * 40
    xs = np.random.default_rng(1).normal(size=len(keys))
    scanned = averages.scan(keys, xs, Freshest(0.3))
    for key in "ab":
        mine = [each == key for each in keys]
        expected = TailAverage(AnyTail()).scan(xs[mine], Freshest(0.3))
        np.testing.assert_allclose(scanned[mine], expected, rtol=1e-12)
        assert averages.value(key, Freshest(0.3)) == pytest.approx(expected[-1], rel=1e-12)


def test_a_resumed_average_reads_the_same(tmp_path):
    average = TailAverage(AnyTail())
    average.update_many(np.random.default_rng(2).normal(size=777))
    average.save(tmp_path / "x.npz")
    loaded = TailAverage.load(tmp_path / "x.npz")
    assert loaded.value(Freshest(0.2)) == average.value(Freshest(0.2))
    assert average.standard_error(Freshest(0.2)) > 0


def test_a_bad_sample_leaves():
    """A block without weight is left out: 0 times NaN would be NaN."""
    xs = np.ones(300)
    xs[3] = math.nan
    average = TailAverage(AnyTail())
    assert average.scan(xs, Freshest(0.5))[-1] == average.value(Freshest(0.5)) == pytest.approx(1)
    assert math.isnan(average.value(Freshest(1.0)))


# What is refused


def test_windows_that_cannot_be_read():
    average = TailAverage(AnyTail())
    average.update_many(range(1000))
    for call in (average.value, average.weights, average.profile):
        for window in (0.05, 50):
            with pytest.raises(ValueError, match=r"at least 0.1 of the samples .* got Freshest"):
                call(Freshest(window))
    for window in (0, 0.0, -1, 1.5):
        with pytest.raises(ValueError, match="window: expected an int"):
            Freshest(window)
    assert average.count == 1000


@pytest.mark.parametrize("rule", [AnytimeWindow(100), Exponential(0.25)])
def test_other_rules_have_their_own_weights(rule):
    average = TailAverage(rule)
    average.update_many(range(10))
    with pytest.raises(ValueError, match="has its own window, got Freshest"):
        average.value(Freshest(0.2))


def test_it_is_no_rule():
    with pytest.raises(
        TypeError,
        match=r"got Freshest.*; average with AnyTail\(\), and read the average with value",
    ):
        TailAverage(Freshest(0.2))


def test_it_is_a_value():
    assert Freshest(0.2) == Freshest(Growing(0.2)) != Freshest(Fixed(2))
    assert len({Freshest(0.2), Freshest(0.2)}) == 1
    assert repr(Freshest(5)) == "Freshest(window=Fixed(k=5))"
    assert pickle.loads(pickle.dumps(Freshest(5))) == Freshest(5)
