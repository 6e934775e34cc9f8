"""Periods of time in `tailavg.polars`, against lists of samples, `scan` and polars' windows."""

from datetime import timedelta

import numpy as np
import polars as pl
import pytest

from tailavg import AnytimeWindow, Elapsed, Exponential, TailAverage, TailAverages
from tailavg.numpy import kernel
from tailavg.polars import tail_mean, tail_std, tail_var
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


def frame(rows: int = 300, runs: int = 3, kind: str = "random") -> pl.DataFrame:
    rng = np.random.default_rng(rows)
    times = times_of(rows, kind).astype("datetime64[ns]")
    numbers = {"loss": 1 + rng.random(rows), "hits": rng.integers(1, 9, rows)}
    return pl.DataFrame({"time": times, "run": rng.integers(0, runs, rows), **numbers})


def loss_of(frame) -> np.ndarray:
    return frame["loss"].to_numpy()


@pytest.mark.parametrize("kind", ["random", "bursts"])
def test_statistics_are_those_of_lists_of_samples(kind):
    df, rule = frame(kind=kind), AnytimeWindow(Elapsed("10min"), 5)
    matrix = weights_after_each(df["time"].to_numpy().astype(int), PERIOD, 5)
    assert_close(tail_mean(df["loss"], rule, on=df["time"]), matrix @ loss_of(df), 1e-12)
    expected = variances(matrix, loss_of(df), 0)
    got = df.select(tail_var(pl.col("loss"), rule, on="time", ddof=0))["loss"]
    np.testing.assert_allclose(got, expected, 1e-9, 1e-12)
    std = tail_std(df, rule, on="time", ddof=0)["loss"]
    np.testing.assert_allclose(std, np.sqrt(expected), 1e-6, 1e-7)


@pytest.mark.parametrize("rule", ["10min", Exponential("10min")], ids=str)
def test_averages_are_bit_identical_to_scan(rule):
    df = frame()
    scan = TailAverage(rule).scan(loss_of(df), df["time"].to_numpy())
    np.testing.assert_array_equal(tail_mean(df["loss"], rule, on=df["time"]), scan)
    by_run = loss_of(tail_mean(df, rule, on="time", by="run"))
    for run in range(3):
        rows = (df["run"] == run).to_numpy()
        scan = TailAverage(rule).scan(loss_of(df)[rows], df["time"].to_numpy()[rows])
        np.testing.assert_array_equal(by_run[rows], scan)


def test_the_bias_is_a_small_part_of_the_period():
    """On a ramp, an average and polars' exact mean differ by their lag."""
    seconds = np.arange(3600)
    times = pl.Series("time", seconds * 1000).cast(pl.Datetime("ms"))
    df = pl.DataFrame({"time": times, "ramp": seconds.astype(float)})
    exact = pl.col("ramp").rolling_mean_by("time", "10m")
    newer = df.select(tail_mean(pl.col("ramp"), "10m", on="time") - exact)["ramp"].to_numpy()
    assert newer.max() < 600 * 0.04
    assert newer.min() > -1e-6
    assert abs(newer[:600]).max() < 1e-9  # exact in the first period


def test_every_way_to_pass_times_and_groups_gives_the_same():
    df, period = frame(), timedelta(minutes=10)
    expected = loss_of(tail_mean(df, "10min", on="time", by="run"))
    by_run = tail_mean(pl.col("loss"), period, on="time", by="run")
    each = pl.col("loss").pipe(tail_mean, Elapsed(600), on=pl.col("time"))
    lists = df.group_by("run", maintain_order=True).agg(each, "time").explode("loss", "time")
    for got in (
        df.with_columns(by_run),
        df.lazy().with_columns(by_run).collect(),
        df.lazy().with_columns(by_run).collect(engine="streaming"),
        df.with_columns(each.over("run")),
        df.with_columns(
            tail_mean(pl.col("loss"), period, on="time", by=["run", pl.col("run") + 1])
        ),
        df.with_columns(tail_mean(df["loss"], period, on=df["time"], by=df["run"])),
        tail_mean(df, "10min", on=pl.col("time"), by="run"),
        tail_mean(df, "10min", on=pl.col("time").dt.offset_by("1d"), by="run"),
        # times go back between groups
        df.with_row_index().sort("run", "index").with_columns(by_run).sort("index"),
    ):
        np.testing.assert_array_equal(loss_of(got), expected)
    runs = df["run"].unique(maintain_order=True)
    of_runs = [expected[(df["run"] == run).to_numpy()] for run in runs]
    np.testing.assert_array_equal(loss_of(lists), np.concatenate(of_runs))


def test_a_frame_keeps_its_times_and_keys():
    df = frame()
    got = tail_mean(df, "10min", on="time", by="run")
    assert got.select("time", "run").equals(df.select("time", "run"))
    assert got.schema == {**df.schema, "hits": pl.Float64}


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Oslo"])
@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_every_dtype_of_times(unit, zone):
    df = frame()
    expected = loss_of(tail_mean(df, "10min", on="time"))
    times = df["time"].dt.cast_time_unit(unit).dt.replace_time_zone(zone)
    np.testing.assert_array_equal(tail_mean(df["loss"], "10min", on=times), expected)


def test_dates():
    dates = pl.Series(["2026-01-01", "2026-01-01", "2026-01-02", "2026-01-09"]).str.to_date()
    got = tail_mean(pl.Series([1.0, 3.0, 5.0, 9.0]), "7d", on=dates)
    assert got.to_list() == [1.0, 2.0, 3.0, 9.0]


def test_parts_give_what_the_whole_gives():
    df, state = frame(), TailAverages("10min", nan_policy="omit", variance=True)
    whole = tail_std(df, "10min", on="time", by="run")
    parts = [
        tail_std(part, "10min", on="time", by="run", state=state)
        for part in (df[:100], df[100:101], df[101:])
    ]
    got = np.concatenate([part["loss"].to_numpy() for part in parts])
    np.testing.assert_allclose(got, loss_of(whole), 1e-7, 1e-9)
    before = state.copy()
    with pytest.raises(ValueError, match="go back"):
        tail_std(df, "10min", on="time", by="run", state=state)
    assert state == before


def test_a_deviation_is_null_while_the_window_has_one_sample():
    xs, times = pl.Series([1.0, 3.0, 5.0, 9.0]), pl.from_epoch(pl.Series([0, 1, 2, 5000]))
    state = TailAverages("10min", nan_policy="omit", variance=True)
    for rows, expected in (slice(2), [None, 2.0]), (slice(2, 4), [4.0, None]):
        got = tail_var(xs[rows], "10min", on=times[rows], state=state)
        assert got.round(9).to_list() == expected


def test_a_null_is_skipped_with_its_time():
    df = frame().with_columns(loss=pl.when(pl.int_range(pl.len()) % 3 > 0).then("loss"))
    got = tail_mean(df, "10min", on="time")["loss"]
    known = df["loss"].is_not_null()
    expected = tail_mean(df.filter(known), "10min", on="time")["loss"]
    assert got[0] is None
    assert_close(got.filter(known), expected, 1e-12)
    assert_close(got[3::3], got.shift()[3::3], 1e-12)


def test_no_rows():
    df = frame()[:0]
    assert tail_mean(df, "10min", on="time", by="run").shape == (0, 4)
    assert df.select(tail_mean(pl.col("loss"), "10min", on="time")).shape == (0, 1)


def test_what_is_refused():
    df, loss = frame(), pl.col("loss")
    missing = df.with_columns(pl.when(pl.int_range(pl.len()) != 7).then("time").alias("time"))
    back = df.reverse()
    for refused, error, message in [
        (lambda: tail_mean(loss, "10min"), ValueError, "pass on="),
        (lambda: tail_mean(df["loss"], "10min"), ValueError, "pass on="),
        (lambda: tail_mean(df, "10min", by="run"), ValueError, "needs the time of each row"),
        (lambda: tail_mean(df["loss"], "10min", on="time"), TypeError, "on: expected a Series"),
        (lambda: tail_mean(df, "10min", on="run"), TypeError, "on: .*'run' of Int64.*from_epoch"),
        (lambda: tail_mean(loss, 100, on="time"), TypeError, "on: .* leave out on, or pass a win"),
        (lambda: tail_std(df, 0.5, on="time"), TypeError, "on: "),
        (lambda: tail_mean(back, "10min", on="time"), ValueError, "go back.*sort"),
        (lambda: tail_mean(back, "10min", on="time", by="run"), ValueError, "go back.*sort"),
        (lambda: back.select(tail_mean(loss, "10min", on="time")), ValueError, "go back.*sort"),
        (lambda: tail_mean(missing, "10min", on="time"), ValueError, "got null; drop"),
        (lambda: tail_mean(df["loss"], "10min", on=df["time"][1:]), ValueError, "299"),
        (lambda: tail_mean(loss, "10min", on="time", window=0.5), ValueError, "window: "),
    ]:
        with pytest.raises(error, match=message):
            refused()
