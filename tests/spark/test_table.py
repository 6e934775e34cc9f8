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


def frame(spark, keys, each, seed=0):
    found = runs.rows(keys, each, seed)
    table = runs.table(found, slice(None), np.random.default_rng(seed))
    return found, spark.createDataFrame(table.to_pandas())


def told(df, *columns):
    return sorted(map(tuple, df.select(*columns).collect()), key=repr)


@pytest.mark.parametrize("rule", [0.25, 7, Exponential(0.25)], ids=str)
def test_each_key_is_averaged_one_by_one(rule, spark):
    found, df = frame(spark, 20, 100)
    got = told(tail_mean(df, "loss", rule, by="run", order_by="step"), "run", "step", "loss_tail")
    assert got == sorted(
        (
            (run, step, value)
            for run, xs in found.items()
            for step, value in enumerate(runs.one_by_one(rule, xs))
        ),
        key=repr,
    )


def test_one_key_larger_than_a_batch_of_arrow(spark):
    found, df = frame(spark, 1, 25_000)
    latest = tail_mean(df, "loss", 0.5, by="run", order_by="step", output="latest")
    assert latest.columns == ["run", "step", "loss_tail"]
    want = runs.one_by_one(0.5, found["run0"])
    assert latest.collect() == [("run0", 24_999, want[-1])]
    each = tail_mean(df, "loss", 0.5, by="run", order_by="step")
    assert [value for _, value in sorted(told(each, "step", "loss_tail"))] == want


def test_without_a_key_and_with_missing_values(spark):
    rows = [(math.nan, 1.0), (None, 2.0), (1.0, None), (3.0, math.nan), (2.0, 4.0)]
    df = spark.createDataFrame(rows, "at double, x double")
    got = told(tail_mean(df, "x", 1.0, order_by="at"), "at", "x_tail")
    want = [(math.nan, 1.0), (None, 1.5), (1.0, 1.5), (2.0, 7 / 3), (3.0, 7 / 3)]
    assert repr(got) == repr(sorted(want, key=repr))
    latest = tail_mean(df, "x", 1.0, order_by="at", output="latest", nan_policy="propagate")
    assert repr(latest.collect()) == "[Row(at=3.0, x_tail=nan)]"


def test_a_table_takes_states_made_in_python(spark):
    average = TailAverage(4)
    average.update_many([1.0, 2.0, 3.0])
    states = [("a", "x", json.dumps(average.state_dict()))]
    states = spark.createDataFrame(states, "k string, column string, state string")
    df = spark.createDataFrame([("a", 1, 4.0), ("b", 1, 9.0)], "k string, t int, x double")
    got = tail_mean(df, "x", 4, by="k", order_by="t", initial_state=states)
    assert got.columns == ["k", "t", "x", "x_tail"]
    assert told(got, "k", "x_tail") == [("a", 2.5), ("b", 9.0)]


@pytest.mark.parametrize("buckets", [1, 3, 64])
def test_spark_spreads_buckets_evenly(buckets, spark):
    ids = _spread(buckets).tolist()
    found = spark.createDataFrame([(number,) for number in ids], "bucket int")
    for partitions in (n for n in range(1, buckets + 1) if buckets % n == 0):
        places = found.selectExpr(f"pmod(hash(bucket), {partitions})").collect()
        assert [place for (place,) in places] == [bucket % partitions for bucket in range(buckets)]


def test_what_only_a_stream_has(spark):
    df = spark.createDataFrame([(1, 1.0)], "t int, x double")
    with pytest.raises(ValueError, match="order_by: expected a column, since a table has no order"):
        tail_mean(df, "x", 2)
    with pytest.raises(ValueError, match="ttl: expected none for a table"):
        tail_mean(df, "x", 2, order_by="t", ttl=dt.timedelta(seconds=1))
