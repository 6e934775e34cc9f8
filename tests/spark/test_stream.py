"""`tail_mean` of streams on a real Spark, against `TailAverage` key by key.

Slow: each streaming query takes a few seconds to start.
"""

import datetime as dt
import json
import re
import time
from decimal import Decimal
from itertools import pairwise
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest

from tailavg import AnyTail, AnytimeWindow, ExactWindow, Exponential, TailAverage
from tailavg.spark import saved_states, tail_mean
from tailavg.spark.frames import _Processor
from tests.support import spark_streams as runs
from tests.support.effort import exhaustive, some
from tests.support.model import variances, weight_matrix

pytestmark = runs.MARKS


def put(folder, name, rows, schema):
    runs.write(folder / "in", name, pa.Table.from_pylist(rows, schema))


SMALL = pa.schema([("run", pa.string()), ("step", pa.int64()), ("loss", pa.float64())])


def given(*rows):
    return [dict(zip(("run", "step", "loss"), row, strict=True)) for row in rows]


def test_each_key_is_averaged_one_by_one(spark, tmp_path):
    keys, steps = some((100, 250), (1000, 1000))  # the last file has several batches of Arrow
    losses, rng = runs.losses(keys, steps), np.random.default_rng(1)
    cuts = [0, 1, steps // 4, steps]
    for i, (start, end) in enumerate(pairwise(cuts)):
        runs.write(tmp_path / "in", str(i), runs.table(losses, slice(start, end), rng))
    lines = runs.stream(spark, tmp_path)
    query = runs.ran(tail_mean(lines, "loss", 0.25, by="run", order_by="step"), tmp_path)
    counts = [batch["numInputRows"] for batch in query.recentProgress]
    assert counts == [keys * (end - start) for start, end in pairwise(cuts)]
    rows = spark.read.parquet(str(tmp_path / "out")).toArrow()
    assert rows.schema.names == ["run", "step", "loss", "loss_tail"]
    rows = rows.sort_by([("run", "ascending"), ("step", "ascending")])
    averages = rows["loss_tail"].to_numpy().reshape(keys, steps)
    for i, run in enumerate(sorted(losses)):
        expected, scale = TailAverage(0.25).scan(losses[run]), np.abs(losses[run]).max()
        np.testing.assert_allclose(averages[i], expected, rtol=0, atol=1e-12 * scale, err_msg=run)
        if i % 10 == 0:
            assert averages[i].tolist() == runs.one_by_one(0.25, losses[run]), run


EARLY = [("a", 1, 1.0), ("a", 3, 2.0), ("b", 1, None), ("c", 1, 7.0), ("b", 1, 2.0)]
LATE = {
    "include": [("a", 2, 6.0), ("a", 4, 7.0), ("a", None, 7.0), ("a", 2, 8.0), ("a", 5, 8.0)],
    "drop": [("a", 4, 4.0), ("a", 5, 4.0)],
}


@pytest.mark.parametrize(
    "late", ["drop", pytest.param("include", marks=exhaustive("test_job and test_table have it"))]
)
def test_late_rows_new_keys_and_missing_values(late, spark, tmp_path):
    from pyspark.errors import StreamingQueryException

    put(tmp_path, "0", given(("a", 1, 1.0), ("a", 3, 3.0), ("b", 1, None)), SMALL)
    put(tmp_path, "1", given(("a", 2, 9.0), ("a", 4, 5.0), ("c", 1, 7.0)), SMALL)
    put(tmp_path, "2", given(), SMALL)
    late_rows = ("a", None, 9.0), ("a", 2, 7.0)
    put(tmp_path, "3", given(*late_rows, ("a", 5, float("nan")), ("b", 1, 2.0)), SMALL)
    options = {"rule": 2, "by": "run", "order_by": "step"}
    lines = runs.stream(spark, tmp_path)
    query = runs.ran(tail_mean(lines, "loss", late=late, **options), tmp_path)
    metrics = [batch["observedMetrics"]["tailavg loss_tail"] for batch in query.recentProgress]
    assert sum(row["late"] for row in metrics) == 3
    rows = runs.out(spark, tmp_path, "run", "step", "loss_tail")
    assert rows == sorted([*EARLY, *LATE[late]], key=repr)

    # a query that goes on may treat late rows differently: here they end it
    put(tmp_path, "4", given(("a", 3, 9.0)), SMALL)
    message = r"step: expected at least 5, .* got 3 in a row"
    with pytest.raises(StreamingQueryException, match=message):
        runs.ran(tail_mean(lines, "loss", late="error", **options), tmp_path)


def test_a_window_of_time_in_a_stream_and_in_a_table(spark, tmp_path):
    start = dt.datetime(2026, 5, 1, tzinfo=dt.UTC)
    kinds = [("run", pa.string()), ("at", pa.timestamp("us", "UTC")), ("loss", pa.float64())]
    # 4 is late, and counts as 5; 1 is beyond the watermark, 30, and counts as 31
    minutes = [[3, 0, 5], [12, 4], [30, 31], [33, 1]]
    losses = {minute: float(minute**2) for minute in (0, 1, 3, 4, 5, 12, 30, 31, 33)}
    rows = [
        [{"run": "a", "at": start + dt.timedelta(minutes=m), "loss": losses[m]} for m in batch]
        for batch in minutes
    ]
    for i, batch in enumerate(rows):
        put(tmp_path, str(i), batch, pa.schema(kinds))
    times = [start + dt.timedelta(minutes=m) for m in (0, 3, 5, 5, 12, 30, 31, 31, 33)]
    xs = [losses[m] for m in (0, 3, 5, 4, 12, 30, 31, 1, 33)]
    averages = TailAverage("10min").scan(xs, times).tolist()

    lines = runs.stream(spark, tmp_path, "run string, at timestamp, loss double")
    options = {"by": "run", "order_by": "at"}
    marked = lines.withWatermark("at", "1 minute")
    query = runs.ran(tail_mean(marked, "loss", "10min", **options), tmp_path)
    metrics = [batch["observedMetrics"]["tailavg loss_tail"] for batch in query.recentProgress]
    assert sum(row["late"] for row in metrics) == 2
    found = runs.out(spark, tmp_path, "loss", "loss_tail")
    assert found == sorted(zip(xs, averages, strict=True), key=repr)
    state = saved_states(spark, str(tmp_path / "checkpoint")).first()["state"]
    assert TailAverage.from_state_dict(json.loads(state)).value() == averages[-1]

    table = spark.createDataFrame([row for batch in rows for row in batch], lines.schema)
    averaged = tail_mean(table, "loss", ["10min", dt.timedelta(hours=1)], **options)
    assert averaged.columns[-2:] == ["loss_tail_600s", "loss_tail_3600s"]
    minute_order = sorted(losses)
    times = [start + dt.timedelta(minutes=m) for m in minute_order]
    xs = [losses[m] for m in minute_order]
    windows = [TailAverage(window).scan(xs, times).tolist() for window in ("10min", "1h")]
    found = runs.rows(averaged, "loss", "loss_tail_600s", "loss_tail_3600s")
    assert found == sorted(zip(xs, *windows, strict=True), key=repr)


def test_another_rule_on_an_old_checkpoint_is_refused_and_the_state_goes_elsewhere(spark, tmp_path):
    from pyspark.errors import StreamingQueryException

    losses, rng = runs.losses(5, 60), np.random.default_rng(1)
    runs.write(tmp_path / "in", "0", runs.table(losses, slice(0, 40), rng))
    lines = runs.stream(spark, tmp_path)
    runs.ran(tail_mean(lines, "loss", 0.25, by="run", order_by="step", output="latest"), tmp_path)
    runs.write(tmp_path / "in", "1", runs.table(losses, slice(40, 60), rng))
    with pytest.raises(
        StreamingQueryException, match=r"rule: the checkpoint .*c=0.25.* got .*c=0.5"
    ):
        runs.ran(tail_mean(lines, "loss", 0.5, by="run", order_by="step"), tmp_path)

    states = saved_states(spark, str(tmp_path / "checkpoint"))
    assert states.columns == ["run", "step", "column", "state"]
    for row in states.collect():
        average = TailAverage.from_state_dict(json.loads(row["state"]))
        saved = row["column"], row["step"], average.count, average.nan_policy
        assert saved == ("loss", 39, 40, "omit")
        assert average.value() == runs.one_by_one(0.25, losses[row["run"]][:40])[-1]

    # a new checkpoint goes on where the old one was, and so does a table
    again = tmp_path / "again"
    again.mkdir()
    options = {"by": "run", "order_by": "step", "initial_state": states, "late": "error"}
    table = spark.read.parquet(str(tmp_path / "in"))
    averages, of_table = (
        tail_mean(df.where("step >= 40"), "loss", 0.25, **options) for df in (lines, table)
    )
    runs.ran(averages, again)
    expected = runs.expected(losses, 0.25, first=40)
    assert runs.out(spark, again, "run", "step", "loss_tail") == expected
    assert runs.rows(of_table, "run", "step", "loss_tail") == expected


def test_several_columns_windows_and_deviations_in_one_state(spark, tmp_path):
    xs = np.random.default_rng(3).normal(size=300)
    schema = pa.schema(
        [("run", pa.string()), ("step", pa.int32()), ("loss", pa.float32()), ("hits", pa.int64())]
    )
    rows = [{"run": "a", "step": i, "loss": x, "hits": int(8 * x)} for i, x in enumerate(xs)]
    put(tmp_path, "0", rows[:200], schema)
    put(tmp_path, "1", rows[200:], schema)
    lines = runs.stream(spark, tmp_path, "run string, step int, loss float, hits long")
    options = {"by": "run", "order_by": "step", "output": "latest"}
    df = tail_mean(lines, ["loss", "hits"], [0.1, 0.5, 20], std=True, **options)
    assert df.columns == [
        "run", "step", "loss_tail_0_1", "loss_tail_0_1_std", "loss_tail_0_5", "loss_tail_0_5_std",
        "loss_tail_20", "loss_tail_20_std", "hits_tail_0_1", "hits_tail_0_1_std", "hits_tail_0_5",
        "hits_tail_0_5_std", "hits_tail_20", "hits_tail_20_std",
    ]  # fmt: skip
    runs.ran(df, tmp_path)
    for row in spark.read.parquet(str(tmp_path / "out")).collect():
        count = row["step"] + 1
        assert count in (200, 300)
        for column in ("loss", "hits"):
            taken = np.array(
                [one[column] for one in rows[:count]], np.float32 if column == "loss" else float
            )
            average = TailAverage(AnyTail(12, 0.1), variance=True)
            for x in taken.astype(float).tolist():
                average.update(x)
            assert row[f"{column}_tail_0_1"] == average.value(0.1)
            assert row[f"{column}_tail_0_5"] == average.value(0.5)
            assert row[f"{column}_tail_20"] == runs.one_by_one(20, taken.astype(float))[-1]
            weights = weight_matrix(AnytimeWindow(20), 300)[:count, :count]
            (*_, expected) = np.sqrt(variances(weights, taken.astype(float), ddof=1))
            assert row[f"{column}_tail_20_std"] == pytest.approx(expected, rel=1e-9)
            assert row[f"{column}_tail_0_5_std"] == pytest.approx(average.std(0.5), rel=1e-9)
    states = saved_states(spark, str(tmp_path / "checkpoint"))
    assert states.count() == 4
    last = json.loads(states.where("column = 'hits' and state like '%Fixed%'").first()["state"])
    assert TailAverage.from_state_dict(last).std() == pytest.approx(row["hits_tail_20_std"])


def test_whatever_is_not_averaged_passes_as_it_is(spark, tmp_path):
    schema = (
        "day date, at timestamp, price decimal(10,2), n long, flag boolean, x double, raw binary, "
        "many array<int>, map map<string,double>, deep struct<a:int,b:array<string>>, "
        "ntz timestamp_ntz, loss int"
    )
    when = dt.datetime(2024, 3, 31, 2, 30, 0, 1)
    plain = dt.date(9999, 1, 1), when, Decimal("12.34"), 2**62 + 1, True, float("nan"), b"\0"
    nested = [1, None], {"a": None}, (1, ["x", None])
    full, none = (*plain, *nested, when, 4), (None,) * 12
    written = spark.createDataFrame([none, full, full], schema)
    written.write.parquet(str(tmp_path / "in"))
    by = ["at", "price", "n", "flag", "raw", "ntz"]
    df = runs.stream(spark, tmp_path, schema)
    runs.ran(tail_mean(df, "loss", Exponential(2), by=by, order_by="day"), tmp_path)
    back = spark.read.parquet(str(tmp_path / "out"))
    assert back.schema[:-1] == written.schema
    rows = [sorted(map(repr, one.drop("loss_tail").collect())) for one in (written, back)]
    assert rows[0] == rows[1]
    assert sorted(row["loss_tail"] or 0 for row in back.collect()) == [0, 4.0, 4.0]
    keys = saved_states(spark, str(tmp_path / "checkpoint")).select(by)
    rows = [sorted(map(repr, one.collect())) for one in (written.select(by).distinct(), keys)]
    assert rows[0] == rows[1]


def test_a_stream_without_keys_or_order(spark, tmp_path):
    schema = pa.schema([("loss", pa.float64())])
    put(tmp_path, "0", [{"loss": 1.0}], schema)
    put(tmp_path, "1", [{"loss": 3.0}], schema)
    df = tail_mean(runs.stream(spark, tmp_path, "loss double"), "loss", 2)
    assert df.columns == ["loss", "loss_tail"]
    runs.ran(df, tmp_path)
    assert runs.out(spark, tmp_path, "loss", "loss_tail") == [(1.0, 1.0), (3.0, 2.0)]
    assert saved_states(spark, str(tmp_path / "checkpoint")).columns == ["column", "state"]


@pytest.mark.parametrize(
    ("ttl", "second"),
    [
        pytest.param(dt.timedelta(hours=1), 3.0, marks=exhaustive("forgetting takes as long")),
        (dt.timedelta(milliseconds=1), 5.0),
    ],
    ids=["kept", "forgotten"],
)
def test_a_key_without_rows_is_forgotten(ttl, second, spark, tmp_path):
    put(tmp_path, "0", given(("a", 1, 1.0)), SMALL)
    put(tmp_path, "1", given(("a", 2, 5.0)), SMALL)
    df = tail_mean(runs.stream(spark, tmp_path), "loss", 1.0, by="run", ttl=ttl)
    query = runs.started(df, tmp_path, processingTime="0 seconds")
    try:  # it makes batches without rows, too, and never says that it has done all
        while sum(batch["numInputRows"] for batch in query.recentProgress) < 2:
            assert query.isActive, query.exception()
            time.sleep(0.05)
    finally:
        query.stop()
    assert runs.out(spark, tmp_path, "step", "loss_tail") == [(1, 1.0), (2, second)]


@pytest.mark.parametrize(
    ("ttl", "milliseconds"),
    [
        (None, None),
        (dt.timedelta(days=7), 604_800_000),
        (dt.timedelta(seconds=1.5), 1500),
        (dt.timedelta(microseconds=1), 1),
    ],
)
def test_spark_is_told_the_ttl_in_milliseconds(ttl, milliseconds):
    handle = Mock()
    _Processor("job", "key", ttl).init(handle)
    handle.getMapState.assert_called_once_with("averages", "key", "state binary", milliseconds)


def test_mistakes_are_told_before_anything_runs(spark, tmp_path):
    (tmp_path / "in").mkdir()
    lines = runs.stream(spark, tmp_path)
    for mistake, error, message in (
        (
            {"columns": "acc"},
            ValueError,
            "columns: expected one of ['run', 'step', 'loss'], got 'acc'",
        ),
        (
            {"columns": "run"},
            TypeError,
            "columns: 'run' is of type string, expected numbers; cast it",
        ),
        ({"columns": []}, ValueError, "columns: expected at least one"),
        ({"by": "runs"}, ValueError, "by: expected one of"),
        ({"by": "step"}, ValueError, "order_by: expected a column that is not in by, got 'step'"),
        (
            {"by": (), "order_by": "run"},
            TypeError,
            "order_by: 'run' is of type string, expected numbers, dates or timestamps",
        ),
        (
            {"rule": AnyTail()},
            ValueError,
            "AnyTail has no window of its own: pass its windows instead, as in [0.1, 0.25, 0.5]",
        ),
        (
            {"rule": ExactWindow(2)},
            ValueError,
            "rule: expected a rule that stores no samples, got ExactWindow",
        ),
        (
            {"rule": "10min", "order_by": None},
            ValueError,
            "order_by: a window of time needs the column with the time of each row",
        ),
        ({"rule": [0.1, 0.1]}, ValueError, "rule: expected one or more different windows, got"),
        ({"rule": [0.1, 1.5]}, ValueError, "rule: expected an int >= 1"),
        ({"rule": 1.5}, ValueError, "rule: expected an int >= 1"),
        ({"output": "all"}, ValueError, "output: expected one of ('rows', 'latest'), got 'all'"),
        ({"late": "keep"}, ValueError, "late: expected one of"),
        ({"nan_policy": "skip"}, ValueError, "nan_policy: expected one of"),
        ({"ttl": 5}, ValueError, "ttl: expected a positive timedelta, got 5"),
        ({"std": 1}, TypeError, "std: expected True or False, got 1"),
        ({"buckets": 0}, ValueError, "buckets: expected an int from 1 to 4096, got 0"),
        ({"initial_state": spark.range(1)}, ValueError, "initial_state: expected a column 'run'"),
    ):
        asked = {"columns": "loss", "rule": 0.25, "by": "run", "order_by": "step"} | mistake
        with pytest.raises(error, match=re.escape(message)):
            tail_mean(lines, **asked)
    dotted = lines.withColumnRenamed("step", "a.b")
    with pytest.raises(ValueError, match=r"df: column 'a.b' has a dot .*; rename it"):
        tail_mean(dotted, "loss", 0.25, by="run")
    taken = lines.withColumnRenamed("step", "loss_tail")
    with pytest.raises(ValueError, match="df: column 'loss_tail' exists"):
        tail_mean(taken, "loss", 0.25, by="run")
    provider = "spark.sql.streaming.stateStore.providerClass"
    spark.conf.unset(provider)
    try:
        with pytest.raises(
            ValueError,
            match=r"expected a session with the RocksDB state store, .* call spark.conf.set",
        ):
            tail_mean(lines, "loss", 0.25, by="run")
    finally:
        spark.conf.set(provider, runs.ROCKSDB)
