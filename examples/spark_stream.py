"""Tail averages in Spark: of a stream of files that is stopped and goes on, and of a rate source.

    python examples/spark_stream.py [FOLDER]

Three training runs log their losses to files. A query averages the last quarter of each run, is
stopped, and goes on from its checkpoint. What it holds is then read in plain Python. Then a source
of twenty readings a second is averaged while it runs.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the Python of the workers

from pyspark.sql import DataFrame, SparkSession

from tailavg import TailAverage
from tailavg.spark import saved_states, tail_mean

RUNS = {"small": 1.0, "medium": 0.7, "large": 0.5}
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def losses(run: str, steps: int) -> list[float]:
    """What a run logs: a fall, and noise."""
    rng = np.random.default_rng(len(run))
    fall = RUNS[run] * (1 + 3 * np.exp(-np.arange(steps) / 100))
    return (fall + 0.2 * rng.normal(size=steps)).tolist()


def log(folder: Path, first: int, last: int) -> None:
    """Write a file of JSON lines, with the steps of all runs."""
    folder.mkdir(exist_ok=True)
    lines = [
        json.dumps({"run": run, "step": step, "loss": losses(run, last)[step]})
        for step in range(first, last)
        for run in RUNS
    ]
    whole = folder / f".{first}"  # Spark reads no file whose name begins with a dot
    whole.write_text("\n".join(lines))
    whole.rename(folder / f"{first}.json")


def averages(spark: SparkSession, folder: Path) -> DataFrame:
    """The stream of logs, with the average of the last quarter of each run after each row."""
    logs = spark.readStream.schema("run string, step long, loss double").json(str(folder / "logs"))
    return tail_mean(logs, "loss", 0.25, by="run", order_by="step")


def run_query(spark: SparkSession, folder: Path) -> None:
    """Average what is there, and stop."""
    writer = (
        averages(spark, folder).writeStream.format("parquet").option("path", str(folder / "out"))
    )
    query = writer.option("checkpointLocation", str(folder / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination()


def from_files(spark: SparkSession, folder: Path) -> None:
    """A query that is stopped and goes on."""
    log(folder / "logs", 0, 400)
    run_query(spark, folder)
    log(folder / "logs", 400, 1000)
    run_query(spark, folder)  # on the same checkpoint: from step 400 on
    rows = spark.read.parquet(str(folder / "out"))
    print(f"{rows.count()} rows; the last of each run:")
    rows.where("step = 999").orderBy("run").show()
    print("The same in plain Python, and what the checkpoint holds:")
    for row in saved_states(spark, str(folder / "checkpoint")).orderBy("run").collect():
        alone = TailAverage(0.25)
        for loss in losses(row["run"], 1000):
            alone.update(loss)
        held = TailAverage.from_state_dict(json.loads(row["state"]))
        print(f"{row['run']:8} {alone.value():.6f} {held.value():.6f} after {held.count} steps")


def from_rate(spark: SparkSession, enough: int) -> None:
    """Readings of four sensors, as they come, until there were so many."""
    readings = spark.readStream.format("rate").option("rowsPerSecond", 20).load()
    readings = readings.selectExpr("value % 4 AS sensor", "timestamp AS at", "sin(value / 50) AS x")
    latest = tail_mean(readings, "x", 50, by="sensor", order_by="at", output="latest")
    query = latest.writeStream.format("memory").queryName("sensors").start()
    while query.isActive and sum(batch["numInputRows"] for batch in query.recentProgress) < enough:
        time.sleep(0.2)
    query.stop()
    print("The average of the last 50 readings of each sensor, at the end:")
    spark.sql(
        "SELECT sensor, max_by(x_tail, at) AS average FROM sensors GROUP BY sensor ORDER BY sensor"
    ).show()


def main(folder: Path) -> None:
    """Run both."""
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
    from_files(spark, folder)
    from_rate(spark, enough=200)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
