"""`standard_error`: against block means taken from all samples, and what it estimates."""

import math
from itertools import pairwise

import numpy as np
import pytest

from tailavg import (
    AnyTail,
    AnytimeWindow,
    Decay,
    ExactWindow,
    Exponential,
    Growing,
    TailAverage,
)
from tailavg.core.clock import starts_at

CASES = [
    (AnytimeWindow(100, 5), None),
    (AnytimeWindow(100, 12), None),
    (AnytimeWindow(0.25, 6), None),
    (AnytimeWindow(Growing(0.5, at_most=300), 7), None),
    (AnytimeWindow(0.3, 5, turns="paper"), None),
    (AnyTail(12), 0.1),
    (AnyTail(12), 0.7),
    (AnyTail(8), Decay(0.5, "cosine")),
]


def from_samples(xs, starts, weights):
    """The standard error of Σ wᵢ mᵢ, if each of nᵢ samples has the variance that the mᵢ show."""
    pieces = [(xs[a:b], weights[a:b].sum()) for a, b in pairwise([*starts, len(xs)])]
    pieces = [(piece, weight) for piece, weight in pieces if weight > 0]
    if len(pieces) < 4:
        return np.full(xs.shape[1:], np.nan)
    overall = np.concatenate([piece for piece, _ in pieces]).mean(0)
    spread = sum(len(piece) * (piece.mean(0) - overall) ** 2 for piece, _ in pieces)
    factor = sum(weight**2 / len(piece) for piece, weight in pieces)
    return np.sqrt(spread / (len(pieces) - 1) * factor)


@pytest.mark.parametrize(("rule", "window"), CASES, ids=str)
@pytest.mark.parametrize("shape", [(), (2, 3)], ids=["numbers", "arrays"])
def test_is_that_of_block_means(rule, window, shape):
    xs = np.random.default_rng(3).normal(size=(1400, *shape)) + 5.0
    average = TailAverage(rule)
    done = 0
    for t in (1, 2, 3, 17, 100, 255, 256, 257, 1000, 1400):
        average.update_many(xs[done:t])
        done = t
        expected = from_samples(xs[:t], starts_at(rule, t), average.weights(window))
        got = average.standard_error(window)
        assert isinstance(got, np.ndarray if shape else float)
        np.testing.assert_allclose(got, expected, rtol=1e-9)


@pytest.mark.parametrize("k", [16, 20, 47, 48, 600])
def test_an_exact_window_has_twelve_batches_of_at_least_four_samples(k):
    xs = np.random.default_rng(0).normal(size=1000)
    average = TailAverage(ExactWindow(k))
    average.update_many(xs)
    starts = [
        1000 - k + sum(map(len, np.array_split(xs[-k:], min(12, k // 4))[:i]))
        for i in range(min(12, k // 4))
    ]
    expected = from_samples(xs, starts, average.weights())
    assert average.standard_error() == pytest.approx(expected, rel=1e-9)


def test_an_exact_window_allows_for_autocorrelation():
    """Samples with the correlation 0.9: the error is four times that of independent ones."""
    noise = np.random.default_rng(1).normal(size=(1500, 2000))
    for t in range(1, len(noise)):
        noise[t] = 0.9 * noise[t - 1] + math.sqrt(0.19) * noise[t]
    average = TailAverage(ExactWindow(1000))
    average.update_many(noise)
    ratio = np.sqrt(np.mean(average.standard_error() ** 2)) / average.value().std()
    assert 0.85 < ratio < 1.05


def test_estimates_the_spread_of_averages_over_runs():
    """Of 4,000 runs: of independent samples, and of samples that are alike for a while."""
    noise = np.random.default_rng(1).normal(size=(2000, 4000))
    alike = np.empty_like(noise)
    alike[0] = noise[0]
    for t in range(1, len(noise)):
        alike[t] = 0.6 * alike[t - 1] + 0.8 * noise[t]
    for xs, low in ((noise, 0.97), (alike, 0.9)):
        average = TailAverage(AnytimeWindow(600, 12))
        average.update_many(xs)
        ratio = np.sqrt(np.mean(average.standard_error() ** 2)) / average.value().std()
        assert low < ratio < 1.05
    # as if they were independent, the error of the second would be half of what it is
    assert np.std(average.value()) > 1.9 / math.sqrt(600)


def test_is_nan_without_four_blocks():
    for rule in (Exponential(10), AnytimeWindow(10), AnytimeWindow(1.0, 12), ExactWindow(15)):
        average = TailAverage(rule)
        average.update_many(np.arange(100.0))
        assert math.isnan(average.standard_error())
    average = TailAverage(AnytimeWindow(0.25, 12))
    with pytest.raises(ValueError, match="at least one sample"):
        average.standard_error()
    average.update(1.0)
    assert math.isnan(average.standard_error())


@pytest.mark.parametrize("scale", [1e-310, 1e200, 1e306])
def test_of_the_smallest_and_largest_floats(scale):
    xs = np.random.default_rng(0).normal(size=400)
    errors = []
    for factor in (1.0, scale):
        average = TailAverage(AnytimeWindow(100, 12))
        average.update_many(xs * factor)
        errors.append(average.standard_error() / factor)
    assert errors[1] == pytest.approx(errors[0], rel=1e-3)


def test_reads_and_changes_nothing():
    average = TailAverage(AnytimeWindow(50, 6), dtype=np.float32)
    average.update_many(np.random.default_rng(0).normal(size=(300, 4)))
    before = average.copy()
    assert average.standard_error().dtype == np.float32
    assert average == before
