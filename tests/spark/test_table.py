"""`tail_mean` of tables on a real Spark."""

import datetime as dt
import json
import math

import numpy as np
import pytest

from tailavg import Exponential, TailAverage
from tailavg.spark import tail_mean
from tailavg.spark.job import _spread
from tests.support import spark_streams as runs

pytestmark = runs.MARKS


def frame(spark, keys, steps):
    losses = runs.losses(keys, steps)
    table = runs.table(losses, slice(None), np.random.default_rng(0))
    return losses, spark.createDataFrame(table.to_pandas())


def test_each_key_is_averaged_one_by_one(spark):
    losses, df = frame(spark, 20, 100)
    for rule in (0.25, 7, Exponential(0.25)):
        averages = tail_mean(df, "loss", rule, by="run", order_by="step")
        rows = runs.rows(averages, "run", "step", "loss_tail")
        assert rows == runs.expected(losses, rule), rule


def test_one_key_larger_than_a_batch_of_arrow(spark):
    losses, df = frame(spark, 1, 25_000)
    latest = tail_mean(df, "loss", 0.5, by="run", order_by="step", output="latest")
    assert latest.columns == ["run", "step", "loss_tail"]
    expected = runs.one_by_one(0.5, losses["run0"])
    assert latest.collect() == [("run0", 24_999, expected[-1])]
    each = tail_mean(df, "loss", 0.5, by="run", order_by="step")
    assert [value for _, value in sorted(runs.rows(each, "step", "loss_tail"))] == expected


@pytest.mark.parametrize("size", [2, 10_000])
def test_without_a_key_and_with_missing_values(size, spark):
    rows = [(math.nan, 1.0), (None, 2.0), (1.0, None), (3.0, math.nan), (2.0, 4.0)]
    df = spark.createDataFrame(rows, "at double, x double")
    expected = [(math.nan, 1.0), (None, 1.5), (1.0, 1.5), (2.0, 7 / 3), (3.0, 7 / 3)]
    of_arrow = "spark.sql.execution.arrow.maxRecordsPerBatch"
    spark.conf.set(of_arrow, size)
    try:
        averages = runs.rows(tail_mean(df, "x", 1.0, order_by="at"), "at", "x_tail")
        assert repr(averages) == repr(sorted(expected, key=repr))
        latest = tail_mean(df, "x", 1.0, order_by="at", output="latest", nan_policy="propagate")
        assert repr(latest.collect()) == "[Row(at=3.0, x_tail=nan)]"
    finally:
        spark.conf.unset(of_arrow)


def test_a_table_takes_states_made_in_python(spark):
    average = TailAverage(4)
    average.update_many([1.0, 2.0, 3.0])
    states = [("a", "x", json.dumps(average.state_dict()))]
    states = spark.createDataFrame(states, "k string, column string, state string")
    df = spark.createDataFrame([("a", 1, 4.0), ("b", 1, 9.0)], "k string, t int, x double")
    averages = tail_mean(df, "x", 4, by="k", order_by="t", initial_state=states)
    assert averages.columns == ["k", "t", "x", "x_tail"]
    assert runs.rows(averages, "k", "x_tail") == [("a", 2.5), ("b", 9.0)]


def test_standard_deviations_go_on_from_a_state(spark):
    average = TailAverage(2, variance=True)
    average.update(1.0)
    states = [("a", "x", json.dumps(average.state_dict()))]
    states = spark.createDataFrame(states, "k string, column string, state string")
    rows = [("a", 1, 3.0), ("b", 1, 9.0), ("b", 2, None)]
    df = spark.createDataFrame(rows, "k string, t int, x double")
    options = {"by": "k", "order_by": "t", "std": True}
    averages = tail_mean(df, "x", 2, initial_state=states, **options)
    assert averages.columns == ["k", "t", "x", "x_tail", "x_tail_std"]
    expected = [("a", 2.0, pytest.approx(2**0.5)), ("b", 9.0, None), ("b", 9.0, None)]
    assert runs.rows(averages, "k", "x_tail", "x_tail_std") == expected


@pytest.mark.parametrize(
    ("late", "expected"), [({}, [2.5]), ({"late": "include"}, [2.5]), ({"late": "drop"}, [])]
)
def test_rows_before_the_latest_of_a_state_are_late(late, expected, spark):
    average = TailAverage(4)
    average.update_many([1.0, 2.0, 3.0])
    states = [("a", 5, "x", json.dumps(average.state_dict()))]
    states = spark.createDataFrame(states, "k string, t int, column string, state string")
    df = spark.createDataFrame([("a", 4, 4.0)], "k string, t int, x double")
    averages = tail_mean(df, "x", 4, by="k", order_by="t", initial_state=states, **late)
    assert [row["x_tail"] for row in averages.collect()] == expected


def test_spark_spreads_buckets_evenly(spark):
    for buckets in (1, 3, 64):
        ids = _spread(buckets).tolist()
        partitions = [n for n in range(1, buckets + 1) if buckets % n == 0]
        df = spark.createDataFrame([(number,) for number in ids], "bucket int")
        places = df.selectExpr(*(f"pmod(hash(bucket), {n})" for n in partitions)).collect()
        expected = [tuple(bucket % n for n in partitions) for bucket in range(buckets)]
        assert places == expected, f"{buckets} buckets"


def test_what_only_a_stream_has(spark):
    df = spark.createDataFrame([(1, 1.0)], "t int, x double")
    with pytest.raises(ValueError, match="order_by: a table has no order; name a column"):
        tail_mean(df, "x", 2)
    with pytest.raises(ValueError, match="ttl: it applies to streams only"):
        tail_mean(df, "x", 2, order_by="t", ttl=dt.timedelta(seconds=1))
