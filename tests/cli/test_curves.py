"""Curves in bins: each bin has the least and greatest of its rows, however they came."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailavg import AnytimeWindow, TailAverage
from tailavg.cli.charts import limits, ticks
from tailavg.cli.curves import BANDED, BandKind, Grid, Track

RULE = AnytimeWindow(0.3, 12)


def samples(size, seed=0, odd=()):
    ys = np.random.default_rng(seed).normal(size=size)
    for place, value in odd:
        ys[place % size] = value
    return np.arange(size) * 2.5, ys


def taken(xs, ys, cuts, most=64, log=False, band=BandKind.error):
    track = Track([(RULE, None)], most, log, band)
    edges = [0, *sorted(cut % (len(ys) + 1) for cut in cuts), len(ys)]
    for start, stop in pairwise(edges):
        track.take(xs[start:stop], ys[start:stop])
    return track


def test_windows_of_time():
    xs, ys = samples(500)
    times = np.datetime64("2026-05-01", "ns") + (xs * 1e9).astype("timedelta64[ns]")
    rules = AnytimeWindow("5min", 12), RULE
    track = Track([(rule, None) for rule in rules], 1024, False, BandKind.error)
    for start, stop in pairwise([0, 1, 300, 500]):
        track.take(xs[start:stop], ys[start:stop], times[start:stop])
    elapsed, counted = track.lines()[1:]
    expected = TailAverage(rules[0])
    np.testing.assert_allclose(elapsed.bins.low, expected.scan(ys, times), rtol=1e-12)
    np.testing.assert_allclose(counted.bins.low, TailAverage(RULE).scan(ys), rtol=1e-12)
    assert elapsed.error == expected.standard_error()


@given(
    st.integers(1, 3000),
    st.lists(st.integers(0, 3000), max_size=8),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([np.nan, np.inf, -np.inf]))),
)
@example(64, [], False, [])
@example(65, [64], False, [])
@example(129, list(range(129)), False, [])
@example(1, [], True, [(0, np.nan)])
def test_bins_hold_the_extremes_of_their_rows(size, cuts, log, odd):
    xs, ys = samples(size, odd=odd)
    averages = TailAverage(RULE).scan(ys)
    track = taken(xs, ys, cuts, log=log)
    ends = track.lines()[0].bins.end
    assert ends[-1] == size
    assert len(ends) <= 64 if not log else len(ends) <= 8 * np.log2(size + 1) + 8
    starts = np.concatenate([[0], ends[:-1]])
    for line, curve in zip(track.lines(), (ys, averages), strict=True):
        bins, known = line.bins, np.isfinite(curve)
        np.testing.assert_array_equal(bins.end, ends)
        np.testing.assert_array_equal(bins.first, xs[starts])
        np.testing.assert_array_equal(bins.last, xs[ends - 1])
        low = np.minimum.reduceat(np.where(known, curve, np.inf), starts)
        high = np.maximum.reduceat(np.where(known, curve, -np.inf), starts)
        np.testing.assert_allclose(bins.low, low, rtol=1e-12)
        np.testing.assert_allclose(bins.high, high, rtol=1e-12)
    assert track.lines()[1].now == pytest.approx(averages[-1], nan_ok=True)


@pytest.mark.parametrize("log", [False, True])
def test_does_not_depend_on_how_rows_come(log):
    xs, ys = samples(5000)
    whole, parts = (taken(xs, ys, cuts, log=log) for cuts in ([], range(0, 5000, 7)))
    for one, two in zip(whole.lines(), parts.lines(), strict=True):
        for field in ("end", "first", "last"):
            np.testing.assert_array_equal(getattr(one.bins, field), getattr(two.bins, field))
        for field in ("low", "high"):
            np.testing.assert_allclose(getattr(one.bins, field), getattr(two.bins, field))
        if one.band is not None:
            for a, b in zip(one.band, two.band, strict=True):
                np.testing.assert_allclose(a, b)


@pytest.mark.parametrize("size", [40, 300, 20_000])
@pytest.mark.parametrize("log", [False, True])
def test_band_is_a_standard_error_of_few_rows(size, log):
    xs, ys = samples(size)
    band = taken(xs, ys, [size // 3], log=log).lines()[1].band
    assert len(band.x) <= BANDED + 1
    assert size < 50 or len(band.x) >= BANDED // 5
    average, done = TailAverage(RULE), 0
    for x, low, high in zip(*band, strict=True):
        row = round(x / 2.5) + 1
        average.update_many(ys[done:row])
        done = row
        error = average.standard_error()
        assert low == pytest.approx(average.value() - error, nan_ok=True)
        assert high == pytest.approx(average.value() + error, nan_ok=True)
    assert done == size


def test_points_pass_through_every_sample_of_narrow_bins():
    xs, ys = samples(100)
    for most in (128, 64):  # one and two samples to a bin
        line = taken(xs, ys, [], most=most).lines()[0]
        np.testing.assert_array_equal(line.points(), [xs, ys])


@pytest.mark.parametrize("after", [1, 63, 64, 1000, 2990])
@pytest.mark.parametrize("log", [False, True])
def test_rows_before_are_averaged_and_not_drawn(after, log):
    xs, ys = samples(3000)
    ys[:after] += 1000
    track = Track([(RULE, None)], 64, log, BandKind.error, after)
    for start in range(0, 3000, 700):
        track.take(xs[start : start + 700], ys[start : start + 700])
    raw, line = track.lines()
    scanned = TailAverage(RULE).scan(ys)
    for drawn, curve in ((raw, ys), (line, scanned)):
        points = drawn.points()
        assert points[0].min() == xs[after]
        assert points[1].max() == pytest.approx(curve[after:].max())
        assert points[1].min() == pytest.approx(curve[after:].min())
    assert line.band is None or line.band.x.min() >= xs[after]
    assert Track([(RULE, None)], 64, log, BandKind.error, 3000).lines() == []


def test_a_band_has_the_gaps_of_its_curve():
    xs, ys = samples(2000, odd=[(1000, np.nan)])
    x, low, _ = taken(xs, ys, []).lines()[1].band
    known = np.isfinite(TailAverage(RULE).scan(ys)[np.round(x / 2.5).astype(int)])
    assert 10 < np.count_nonzero(~known) < len(x)
    np.testing.assert_array_equal(np.isfinite(low)[20:], known[20:])


def test_lines_do_not_go_back():
    xs = np.concatenate([np.arange(50), np.arange(30)])
    line = taken(xs, np.arange(80.0), [], most=128).lines()[0]
    across, drawn = line.points()
    assert len(drawn) == 81
    assert np.isnan(drawn[50])
    assert across[51] == 0


def test_gaps_are_not_bridged():
    xs, ys = samples(10, odd=[(4, np.nan)])
    _, drawn = taken(xs, ys, []).lines()[0].points()
    np.testing.assert_array_equal(np.isnan(drawn), np.arange(10) == 4)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(3, 12))
def test_ticks_are_few_and_within(least, width, most):
    found = ticks(least, least + width, most, log=False)
    assert 1 <= len(found) <= most + 1
    assert all(least - 1e-9 * width <= tick <= least + width * (1 + 1e-9) for tick in found)
    steps = np.diff(found)
    np.testing.assert_allclose(steps, steps[:1].repeat(len(steps)), rtol=1e-4)


@given(st.floats(1e-9, 1e6), st.floats(1.2, 1e15), st.integers(3, 12))
def test_ticks_of_a_logarithmic_axis(least, ratio, most):
    found = ticks(least, least * ratio, most, log=True)
    assert 1 <= len(found) <= most + 1
    assert all(least * (1 - 1e-9) <= tick <= least * ratio * (1 + 1e-9) for tick in found)


def test_limits():
    values = [np.array([np.nan, 3.0, -1.0]), np.array([np.inf, 0.5])]
    assert limits(values, log=False) == (-1.0, 3.0)
    assert limits(values, log=True) == (0.5, 3.0)
    assert limits([np.array([2.0])], log=False) == (1.5, 2.5)
    assert limits([np.array([3.5, 3.5 + 1e-15])], log=False) == pytest.approx((3.0, 4.0))
    assert limits([np.array([1e17])], log=False) == pytest.approx((0.999e17, 1.001e17))
    assert limits([np.array([np.nan])], log=True) == (1.0, 10.0)


def test_a_grid_in_octaves_has_all_ends_whatever_it_is_asked():
    grid = Grid(256, log=True)
    whole = grid.ends(0, 10_000)
    parts = [grid.ends(start, start + 37) for start in range(0, 10_000, 37)]
    np.testing.assert_array_equal(np.concatenate(parts)[: len(whole)], whole)
