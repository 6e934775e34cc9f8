"""Periods of time in `tailavg.pandas`, against lists of samples, `scan` and pandas' windows."""

from datetime import timedelta

import numpy as np
import pandas as pd
import pytest

from tailavg import AnytimeWindow, Elapsed, Exponential, TailAverage, TailAverages
from tailavg.numpy import kernel
from tailavg.pandas import tail_mean, tail_std, tail_var
from tests.support.cases import assert_close
from tests.support.model import variances
from tests.support.periods import SECOND, times_of, weights_after_each

PERIOD = 600 * SECOND


@pytest.fixture(params=["compiled", "without numba"], autouse=True)
def way(request, monkeypatch):
    if request.param == "compiled":
        pytest.importorskip("numba")
        monkeypatch.setattr(kernel, "LONG", 0)
        monkeypatch.setattr(kernel, "SHORT", 0)
    else:
        monkeypatch.setattr(kernel, "installed", lambda: False)


def frame(rows: int = 300, runs: int = 3, kind: str = "random") -> pd.DataFrame:
    rng = np.random.default_rng(rows)
    times = pd.to_datetime(times_of(rows, kind)) + pd.Timedelta(days=20000)
    numbers = {"loss": 1 + rng.random(rows), "hits": rng.integers(1, 9, rows)}
    return pd.DataFrame({"time": times, "run": rng.integers(0, runs, rows), **numbers})


def of_each_run(df, expected):
    """What a function of times and losses gives for each run, in the order of the rows."""
    out = np.full(len(df), np.nan)
    for run in set(df["run"]):
        rows = (df["run"] == run).to_numpy()
        out[rows] = expected(df["time"].to_numpy()[rows], df["loss"].to_numpy()[rows])
    return out


@pytest.mark.parametrize("kind", ["random", "bursts"])
@pytest.mark.parametrize("accumulators", [3, 5])
def test_averages_are_those_of_lists_of_samples(kind, accumulators):
    df, rule = frame(kind=kind), AnytimeWindow(Elapsed("10min"), accumulators)
    series = df.set_index("time")["loss"]

    def weights(times):
        return weights_after_each(times.astype("datetime64[ns]").astype(int), PERIOD, accumulators)

    matrix = weights(df["time"].to_numpy())
    assert_close(tail_mean(series, rule), matrix @ series.to_numpy(), 1e-12)
    for ddof in (0, 1):
        expected = variances(matrix, series.to_numpy(), ddof)
        np.testing.assert_allclose(tail_var(series, rule, ddof=ddof), expected, 1e-9, 1e-12)
        std = tail_std(series, rule, ddof=ddof)
        np.testing.assert_allclose(std, np.sqrt(expected), 1e-6, 1e-7)
    by_run = tail_mean(df, rule, on="time", by="run")["loss"]
    assert_close(by_run, of_each_run(df, lambda ts, xs: weights(ts) @ xs), 1e-12)


@pytest.mark.parametrize("rule", ["10min", Exponential("10min")], ids=str)
def test_averages_are_bit_identical_to_scan(rule):
    df = frame()
    series = df.set_index("time")["loss"]
    got = tail_mean(series, rule)
    pd.testing.assert_index_equal(got.index, series.index)
    expected = TailAverage(rule).scan(series.to_numpy(), series.index.to_numpy())
    np.testing.assert_array_equal(got, expected)
    std = TailAverage(rule, variance=True).scan(series.to_numpy(), df["time"].to_numpy(), of="std")
    np.testing.assert_array_equal(tail_std(series, rule), std)
    by_run = tail_mean(df, rule, on="time", by="run")
    assert list(by_run.columns) == ["loss", "hits"]
    scans = of_each_run(df, lambda ts, xs: TailAverage(rule).scan(xs, ts))
    np.testing.assert_array_equal(by_run["loss"], scans)


def test_the_bias_is_a_small_part_of_the_period():
    """On a ramp, an average and pandas' exact mean differ by their lag."""
    for seconds, most in (np.arange(4000.0), 0.04), (times_of(4000) / SECOND, 0.1):
        ramp = pd.Series(seconds, index=pd.to_datetime(seconds, unit="s"))[seconds < 3600]
        for period in (100, 600):
            apart = tail_mean(ramp, timedelta(seconds=period)) - exact(ramp, period)
            newer = apart[ramp > 2 * period] / period
            assert newer.max() < most
            assert newer.min() > (-1e-6 if most < 0.1 else -0.05)
            assert newer.mean() > 0  # on average, the lag is less than that of the exact mean


def exact(series, seconds):
    return series.rolling(f"{seconds}s").mean()


def test_the_first_period_and_a_pause_are_exact():
    seconds = np.concatenate([np.arange(0, 500, 7), np.arange(5000, 5590, 5)])
    series = frame(len(seconds))["loss"].set_axis(pd.to_datetime(seconds, unit="s"))
    assert_close(tail_mean(series, "10min"), exact(series, 600), 1e-12)
    assert_close(tail_std(series, "10min")[1:], series.rolling("10min").std()[1:], 1e-9)


def test_every_way_to_pass_times_and_groups_gives_the_same():
    df = frame()
    expected = tail_mean(df, "10min", on="time", by="run")["loss"].to_numpy()
    indexed = df.set_index("time")
    levels = df.set_index(["run", "time"])
    oslo = df.assign(time=df["time"].dt.tz_localize("UTC").dt.tz_convert("Europe/Oslo"))
    for got in (
        tail_mean(indexed, timedelta(minutes=10), by="run")["loss"],
        tail_mean(indexed.groupby("run"), Elapsed(600))["loss"],
        tail_mean(indexed.groupby("run")["loss"], "10min"),
        tail_mean(indexed["loss"], "10min", by=df["run"].to_numpy()),
        tail_mean(df.groupby("run"), "10min", on="time")["loss"],
        tail_mean(df.groupby("run")[["loss"]], "10min", on="time")["loss"],
        tail_mean(levels["loss"], "10min", on="time", by="run"),
        tail_mean(levels, "10min", on="time", by="run")["loss"],
        tail_mean(oslo, "10min", on="time", by="run")["loss"],
        tail_mean(oslo.set_index("time"), pd.Timedelta("10min"), by="run")["loss"],
        tail_mean(df.sort_values("run", kind="stable"), "10min", on="time", by="run")[
            "loss"
        ].sort_index(),  # times go back between groups
    ):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "dtype",
    [
        *(
            f"datetime64[{unit}{zone}]"
            for unit in ("s", "ms", "us", "ns")
            for zone in ("", ", UTC")
        ),
        "timestamp[s][pyarrow]",
        "timestamp[us, tz=Europe/Oslo][pyarrow]",
    ],
)
def test_every_dtype_of_times(dtype):
    df = frame()
    expected = tail_mean(df, "10min", on="time")["loss"].to_numpy()
    if "," in dtype:
        df["time"] = df["time"].dt.tz_localize("UTC")
    df["time"] = df["time"].astype(dtype)
    assert str(df["time"].dtype) == dtype
    np.testing.assert_array_equal(tail_mean(df, "10min", on="time")["loss"], expected)
    np.testing.assert_array_equal(tail_mean(df.set_index("time")["loss"], "10min"), expected)


@pytest.mark.parametrize("rule", ["10min", Exponential("10min")], ids=str)
def test_parts_give_what_the_whole_gives(rule, tmp_path):
    df, state = frame(), TailAverages(rule, nan_policy="omit", variance=True)
    whole, parts = tail_std(df, rule, on="time", by="run"), []
    for part in (df[:100], df[100:101], df[101:]):
        parts.append(tail_std(part, rule, on="time", by="run", state=state))
        state.save(tmp_path / "state")
        state = TailAverages.load(tmp_path / "state")
    np.testing.assert_allclose(pd.concat(parts), whole, 1e-7, 1e-9)
    before = state.copy()
    with pytest.raises(ValueError, match="go back"):
        tail_std(df, rule, on="time", by="run", state=state)
    assert state == before


def test_a_missing_value_is_skipped_with_its_time():
    df = frame()
    df.loc[::3, "loss"] = np.nan
    got, known = tail_mean(df, "10min", on="time")["loss"], df.dropna()
    expected = tail_mean(known, "10min", on="time")["loss"]
    assert_close(got[known.index], expected, 1e-12)
    assert_close(got[3::3], got.shift()[3::3], 1e-12)


def test_no_rows():
    df = frame()[:0]
    assert tail_mean(df, "10min", on="time", by="run").shape == (0, 2)
    assert tail_mean(df.set_index("time")["loss"], "10min").shape == (0,)


def test_what_is_refused():
    df = frame()
    missing = df.assign(time=df["time"].where(df.index != 7))
    for refused, error, message in [
        (lambda: tail_mean(df["loss"], "10min"), ValueError, "pass on=.* or .* a DatetimeIndex"),
        (lambda: tail_mean(df, "10min", by="run"), ValueError, "needs the time of each row"),
        (lambda: tail_mean(df, "10min", on="when"), ValueError, "on: expected the name.*'when'"),
        (lambda: tail_mean(df["loss"], "10min", on="time"), ValueError, "pass its DataFrame"),
        (lambda: tail_mean(df, "10min", on=df["time"]), ValueError, "on: .* got a Series"),
        (lambda: tail_mean(df, "10min", on="run"), TypeError, "on: .*'run' of int64.*to_datetime"),
        (lambda: tail_mean(df, 100, on="time"), TypeError, "on: .* leave out on, or pass a window"),
        (lambda: tail_std(df, 0.5, on="time"), TypeError, "on: "),
        (lambda: tail_mean(df[::-1], "10min", on="time"), ValueError, "go back.*sort"),
        (lambda: tail_mean(df[::-1], "10min", on="time", by="run"), ValueError, "go back.*sort"),
        (lambda: tail_mean(missing, "10min", on="time"), ValueError, "got NaT; drop"),
        (lambda: tail_mean(missing.set_index("time"), "10min"), ValueError, "got NaT; drop"),
        (lambda: tail_mean(df, "10min", on="time", window=0.5), ValueError, "window: "),
    ]:
        with pytest.raises(error, match=message):
            refused()
