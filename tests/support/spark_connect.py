"""Spark Connect, in a process of its own: python spark_connect.py FOLDER."""

import os
import sys
from pathlib import Path

import numpy as np

from tailavg.spark import saved_states, tail_mean
from tests.support import spark_streams as runs


def main(folder: Path) -> None:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.remote("local[2]").config("spark.sql.shuffle.partitions", "2")
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", runs.ROCKSDB)
    found, rng = runs.rows(7, 50), np.random.default_rng(0)
    for i in range(2):
        runs.write(folder / "in", str(i), runs.table(found, slice(25 * i, 25 * i + 25), rng))
    want = sorted(
        (run, step, value)
        for run, xs in found.items()
        for step, value in enumerate(runs.one_by_one(0.25, xs))
    )
    reader = spark.readStream.schema(runs.SCHEMA).option("maxFilesPerTrigger", 1)
    sources = reader.parquet(str(folder / "in")), spark.read.parquet(str(folder / "in"))
    stream, table = (tail_mean(df, "loss", 0.25, by="run", order_by="step") for df in sources)
    assert type(table).__module__.startswith("pyspark.sql.connect"), type(table)
    columns = "run", "step", "loss_tail"
    assert sorted(map(tuple, table.select(*columns).collect())) == want
    runs.ran(stream, folder)
    assert (
        sorted(map(tuple, spark.read.parquet(str(folder / "out")).select(*columns).collect()))
        == want
    )
    assert saved_states(spark, str(folder / "checkpoint")).count() == 7
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
