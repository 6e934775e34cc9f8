"""Periods of time in `TailMean` and `TailVar`, against lists of samples and river's own windows."""

import copy
import pickle
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from river import feature_extraction, optim, stats, utils

from tailavg import AnytimeWindow, Elapsed, Exponential, TailAverage
from tailavg.river import TailAverager, TailMean, TailVar
from tests.support.cases import assert_close
from tests.support.model import variances
from tests.support.periods import SECOND, times_of, weights_after_each

PERIOD = timedelta(minutes=10)
START = datetime(2026, 1, 1)


def drawn(rows: int = 300):
    xs = np.random.default_rng(rows).normal(1, 1, rows)
    return xs, [START + timedelta(seconds=t // SECOND) for t in times_of(rows).tolist()]


def after_each(stat, xs, ts):
    got = []
    for x, t in zip(xs.tolist(), ts, strict=True):
        stat.update(x, t=t)
        got.append(stat.get())
    return got


def test_statistics_are_those_of_lists_of_samples():
    xs, ts = drawn()
    matrix = weights_after_each(times_of(300), 600 * SECOND)
    assert_close(after_each(TailMean(PERIOD), xs, ts), matrix @ xs, 1e-12)
    for ddof in (0, 1):
        expected = np.nan_to_num(variances(matrix, xs, ddof))
        np.testing.assert_allclose(after_each(TailVar(PERIOD, ddof), xs, ts), expected, 1e-9, 1e-9)


@pytest.mark.parametrize("rule", [PERIOD, "10min", Exponential(PERIOD)], ids=str)
def test_averages_are_those_of_tail_average(rule):
    xs, ts = drawn()
    average = TailAverage(rule)
    got = after_each(TailMean(rule), xs, ts)
    assert_close(got, average.scan(xs, ts), 1e-12)
    assert got[-1] == after_each(TailMean(rule), xs, np.array(ts, "datetime64[us]"))[-1]
    assert got[-1] == after_each(TailMean(rule), xs, [t.replace(tzinfo=UTC) for t in ts])[-1]


def test_the_bias_is_a_small_part_of_the_period():
    """On a ramp, an average and river's exact mean differ by their lag."""
    xs = np.arange(2000.0)
    ts = [START + timedelta(seconds=x) for x in xs]
    exact = after_each(utils.TimeRolling(stats.Mean, period=PERIOD), xs, ts)
    newer = np.subtract(after_each(TailMean(PERIOD), xs, ts), exact)
    assert newer.max() < 600 * 0.04
    assert newer.min() > -1e-6
    assert abs(newer[:600]).max() < 1e-9  # exact in the first period


def test_agg_passes_times():
    xs, ts = drawn(60)
    agg = feature_extraction.Agg(on="x", by="place", how=TailMean(PERIOD))
    alone = [TailMean(PERIOD), TailMean(PERIOD)]
    for i, (x, t) in enumerate(zip(xs.tolist(), ts, strict=True)):
        agg.learn_one({"place": i % 2, "x": x}, t=t)
        alone[i % 2].update(x, t)
    (value,) = agg.transform_one({"place": 1}).values()
    assert value == alone[1].get()
    assert value != alone[0].get()


def test_without_times_the_time_is_now():
    mean = TailMean("1h")
    mean.update(1.0)
    mean.update(3.0)
    assert mean.get() == 2.0


def test_names_sizes_and_clones():
    mean = TailMean(PERIOD)
    assert mean.window_size == 0
    assert mean.name == "tailmean_0_10_00"
    assert TailVar("10min").name == "tailvar_10min"
    after_each(mean, np.arange(20.0), [START + timedelta(minutes=minute) for minute in range(20)])
    assert mean.window_size == 10
    assert mean.clone().rule == PERIOD
    assert mean.clone().get() == 0.0


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda stat: pickle.loads(pickle.dumps(stat)),
        lambda stat: type(stat).from_state_dict(stat.state_dict()),
    ],
)
@pytest.mark.parametrize("kind", [TailMean, TailVar])
def test_a_copy_goes_on_bit_for_bit(kind, copied):
    xs, ts = drawn()
    whole, stat = after_each(kind(PERIOD), xs, ts), kind(PERIOD)
    after_each(stat, xs[:150], ts[:150])
    assert after_each(copied(stat), xs[150:], ts[150:]) == whole[150:]


def test_what_is_refused_changes_nothing():
    mean = TailMean(PERIOD)
    mean.update(1.0, START)
    for x, t, error, message in [
        (2.0, START - PERIOD, ValueError, "go back"),
        (2.0, "2026-01-01", TypeError, "t: expected seconds, a datetime"),
        (2.0, np.datetime64("NaT"), ValueError, "t: "),
        ("2", START, TypeError, "x: expected a number"),
    ]:
        with pytest.raises(error, match=message):
            mean.update(x, t)
        assert (mean.get(), mean.window_size) == (1.0, 1)
    with pytest.raises(TypeError, match="t: samples have times only"):
        TailMean(100).update(1.0, START)
    for rule in (PERIOD, AnytimeWindow(Elapsed(60.0)), Exponential("1h")):
        with pytest.raises(TypeError, match=r"rule: .* steps have no times"):
            TailAverager(optim.SGD(0.1), rule)
