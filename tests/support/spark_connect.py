"""A client of Spark Connect: python -m tests.support.spark_connect PORT FOLDER."""

import sys
from pathlib import Path

import numpy as np
from pyspark.sql import SparkSession

from tailavg.spark import saved_states, tail_mean
from tests.support import spark_streams as runs


def main(port: str, folder: Path) -> None:
    spark = SparkSession.builder.remote(f"sc://localhost:{port}").getOrCreate()
    losses, rng = runs.losses(7, 50), np.random.default_rng(0)
    for i in range(2):
        runs.write(folder / "in", str(i), runs.table(losses, slice(25 * i, 25 * i + 25), rng))
    expected = runs.expected(losses, 0.25)
    table = spark.read.parquet(str(folder / "in"))
    averages = tail_mean(table, "loss", 0.25, by="run", order_by="step")
    assert type(averages).__module__.startswith("pyspark.sql.connect"), type(averages)
    assert runs.rows(averages, "run", "step", "loss_tail") == expected
    runs.ran(tail_mean(runs.stream(spark, folder), "loss", 0.25, by="run", order_by="step"), folder)
    assert runs.out(spark, folder, "run", "step", "loss_tail") == expected
    assert saved_states(spark, str(folder / "checkpoint")).count() == 7
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
