"""`Elapsed`: periods and times, the weights of a window of time, and who refuses one."""

from datetime import UTC, date, datetime, timedelta, timezone
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailavg import (
    AnyTail,
    AnytimeWindow,
    Decay,
    Elapsed,
    ExactWindow,
    Exponential,
    Fixed,
    Freshest,
    Growing,
    RawTail,
    TailAverage,
)
from tailavg.core.clock import clock_for, starts_at
from tailavg.core.elapsed import LONGEST, nanoseconds, samples_since, times_in
from tailavg.core.rules import as_training_rule
from tests.support.effort import some
from tests.support.model import ElapsedBlocks

DAY = 86_400.0
HOUR_EAST = timezone(timedelta(hours=1))

PERIODS = [
    ("10min", 600.0),
    ("1h30m", 5400.0),
    (" 1 h 30 minutes ", 5400.0),
    ("1.5 hours", 5400.0),
    ("min", 60.0),
    (".5s", 0.5),
    ("250ms", 0.25),
    ("7 days", 7 * DAY),
    ("1D", DAY),
    ("3us", 3e-6),
    ("3µs", 3e-6),
    ("1ns", 1e-9),
    (10, 10.0),
    (0.25, 0.25),
    (np.float32(0.5), 0.5),
    (timedelta(days=1, seconds=2, microseconds=3), DAY + 2 + 3e-6),
    (np.timedelta64(10, "m"), 600.0),
    (np.timedelta64(200, "D"), 200 * DAY),
]


@pytest.mark.parametrize(("period", "seconds"), PERIODS)
def test_a_period_is_text_a_timedelta_or_seconds(period, seconds):
    elapsed = Elapsed(period)
    assert elapsed.period == seconds
    assert elapsed.length == round(seconds * 1e9)
    assert Elapsed(elapsed.period) == elapsed
    for rule in (AnytimeWindow, Exponential):
        assert rule(elapsed).window == elapsed
    if not isinstance(period, int | float | np.floating):  # a number is a number of samples
        assert TailAverage(period).rule == AnytimeWindow(elapsed)
        assert Exponential(period) == Exponential(elapsed)


@pytest.mark.parametrize(
    "period",
    [
        *[
            "",
            " ",
            "10",
            "10 parsecs",
            "-5min",
            "1e3s",
            "10min,",
            "1M",
            "0min",
            "0.1ns",
            "9" * 400 + "d",
        ],
        *[0, -1.0, float("nan"), float("inf"), 10**400, 200 * 365 * DAY, timedelta(0)],
        *[timedelta(days=-1), timedelta.max, np.timedelta64("NaT"), np.timedelta64(2**62, "s")],
        *[np.timedelta64(1, "M"), np.timedelta64(1, "Y")],
    ],
)
def test_a_bad_period_is_refused(period):
    with pytest.raises(ValueError, match=r"^period: expected .*, got "):
        Elapsed(period)


@pytest.mark.parametrize("period", [None, True, np.True_, [1], b"10min", 1j, datetime(2024, 1, 1)])
def test_what_is_no_period_is_refused(period):
    with pytest.raises(TypeError, match="period: expected seconds, a timedelta or text"):
        Elapsed(period)


TIMES = [
    (0, 0),
    (-1.5, -1_500_000_000),
    (0.1, 100_000_000),
    (np.float32(0.1), 100_000_001),
    (np.int8(3), 3_000_000_000),
    (1.7e9, 1_700_000_000_000_000_000),
    (datetime(1970, 1, 2), 86_400_000_000_000),
    (datetime(1970, 1, 2, 0, 0, 0, 1), 86_400_000_001_000),
    (datetime(1970, 1, 2, 1, tzinfo=HOUR_EAST), 86_400_000_000_000),
    (datetime(1960, 1, 1, tzinfo=UTC), -315_619_200_000_000_000),
    (date(1970, 1, 2), 86_400_000_000_000),
    (np.datetime64("1970-01-02"), 86_400_000_000_000),
    *((np.datetime64(7, unit), 7 * 10**power) for unit, power in [("s", 9), ("ms", 6), ("us", 3)]),
    (np.datetime64(7, "ns"), 7),
    (np.datetime64(7, "m"), 420 * 10**9),
    (np.datetime64("2001"), 978_307_200 * 10**9),
]


@pytest.mark.parametrize(("t", "expected"), TIMES)
def test_times_are_whole_nanoseconds(t, expected):
    assert nanoseconds(t) == expected
    for ts in ([t], np.array([t]), np.array([t], object)):
        times = times_in(ts)
        assert times.dtype == np.int64
        assert times.tolist() == [expected]
    assert type(nanoseconds(t)) is int


@pytest.mark.parametrize(
    "t",
    [
        *[
            float("nan"),
            float("inf"),
            -float("inf"),
            1e300,
            10**400,
            -(2**63),
            LONGEST / 1e9 * 1.001,
        ],
        *[datetime(3000, 1, 1), datetime.max, datetime.min, date(1700, 1, 1)],
        *[np.datetime64("NaT"), np.datetime64("9999-01-01"), np.datetime64("1800-01-01", "ns")],
        np.datetime64(-(2**63) + 1, "s"),
    ],
)
def test_times_out_of_range_are_refused(t):
    for call in (lambda: nanoseconds(t), lambda: times_in([t])):
        with pytest.raises(ValueError, match=r"expected a time within 146 years of 1970"):
            call()


@pytest.mark.parametrize("t", ["2020-01-01", None, True, 1j, b"1", [1], np.timedelta64(1, "s")])
def test_what_is_no_time_is_refused(t):
    with pytest.raises(TypeError, match="t: expected seconds, a datetime or a datetime64"):
        nanoseconds(t)
    with pytest.raises((TypeError, ValueError), match=r"ts?: expected"):
        times_in([t])


def test_times_have_one_axis():
    assert times_in([]).tolist() == []
    for ts in (3.0, [[1.0, 2.0]], np.array([[1]], object), np.datetime64("2020")):
        with pytest.raises(ValueError, match="ts: expected a sequence of times, got shape"):
            times_in(ts)


# Weights


gaps = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 60), st.sampled_from([0, 50, 100, 250, 2000])),
    min_size=1,
    max_size=80,
)


@settings(max_examples=some(80, 1000))
@given(gaps=gaps, period=st.integers(1, 120), z=st.integers(1, 12), late=st.integers(0, 200))
def test_weights_are_those_of_the_model(gaps, period, z, late):
    """And no sample that is (1 + 1/z) periods old has one, at any time."""
    clock, model = clock_for(AnytimeWindow(Elapsed(period * 1e-9), z + 1)), ElapsedBlocks(period, z)
    times = np.cumsum(gaps).tolist()
    average = TailAverage(clock.rule)
    for time in times:
        model.add(time)
        average.update(1.0, np.datetime64(time, "ns"))
    alpha = model.alpha()
    np.testing.assert_allclose(average.weights(), alpha, rtol=1e-9, atol=1e-15)
    k = float(model.samples())
    assert abs(average.size - k) <= 1e-12 * k
    profile = average.profile()
    ages = np.arange(len(times))[::-1]
    assert abs(profile.effective_size * (alpha**2).sum() - 1) < 1e-9
    assert abs(profile.mean_age - alpha @ ages) < 1e-9 * len(times)
    for at in (times[-1], times[-1] + late):
        alpha = model.alpha(at)
        value = average.value(at=np.datetime64(at, "ns"))
        assert np.isnan(value) == (alpha is None) == (at - times[-1] >= period)
        if alpha is not None:
            used = [time for time, weight in zip(times, alpha, strict=True) if weight]
            assert (at - used[0]) * z < period * (z + 1)
            assert used[-1] == times[-1]


@settings(max_examples=some(50, 500))
@given(gaps=gaps, start=st.integers(-10, 3000))
def test_samples_since_interpolates_in_the_block_that_is_cut(gaps, start):
    times = np.cumsum(gaps)
    blocks = np.split(times, range(7, len(times), 7))
    sizes, firsts, lasts = zip(*((len(b), b[0], b[-1]) for b in blocks if len(b)), strict=True)
    k = samples_since(start, sizes, firsts, lasts)
    exact = int((times > start).sum())
    cut = [b for b in blocks if len(b) and b[0] <= start < b[-1]]
    assert abs(k - exact) < (len(cut[0]) if cut else 1e-12)
    assert 0 <= k <= len(times)


def test_a_block_of_time_closes_after_its_share_of_the_period():
    clock = clock_for(AnytimeWindow(Elapsed(10e-9), 4))  # z = 3: blocks of 3.33 ns
    assert clock.length == 10
    average = TailAverage(clock.rule)
    for time in range(30):
        average.update(1.0, np.datetime64(time, "ns"))
    firsts = average.state_dict()["elapsed"]["first"]
    assert [b - a for a, b in pairwise(firsts)] == [4, 4, 4]


# Who has no window of time


ELAPSED = [Elapsed(5), "10min", timedelta(minutes=10), np.timedelta64(10, "m")]
REFUSED = "expected an int >= 1 .*, got .*; a window of time works in"


@pytest.mark.parametrize("window", ELAPSED, ids=repr)
def test_other_rules_and_readings_refuse_a_window_of_time(window):
    anytail = TailAverage(AnyTail())
    anytail.update(1.0)
    before = anytail.copy()
    for call in (
        lambda: ExactWindow(window),
        lambda: RawTail(window, total=100),
        lambda: Freshest(window),
        lambda: Decay(window, "linear"),
        lambda: anytail.value(window),
        lambda: anytail.weights(window),
        lambda: anytail.scan([1.0], [window]),
    ):
        with pytest.raises(TypeError, match=REFUSED):
            call()
    assert anytail == before
    for call in (lambda: Fixed(str(window)), lambda: Growing(window)):
        with pytest.raises((TypeError, ValueError), match=r"expected (an int|a fraction)"):
            call()
    with pytest.raises(ValueError, match='an Elapsed window needs turns="balanced"'):
        AnytimeWindow(window, turns="paper")


@pytest.mark.parametrize("rule", [AnytimeWindow("10min"), Exponential("10min")], ids=str)
def test_what_depends_on_the_step_alone_refuses_a_window_of_time(rule):
    with pytest.raises(TypeError, match="depend on the times of samples"):
        starts_at(rule, 100)
    with pytest.raises(TypeError, match="depends on their times"):
        rule.size(10)
    if isinstance(rule, Exponential):
        for call in (rule.decay, rule.weight):
            with pytest.raises(TypeError, match="depends on their times"):
                call(10)
    with pytest.raises(TypeError, match="the weights of a model have none"):
        as_training_rule(rule)
    for window in ELAPSED:
        with pytest.raises(TypeError, match=REFUSED):
            as_training_rule(window)
