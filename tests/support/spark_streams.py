"""Real Spark in tests: a session, streams of files, and what they should give."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailavg import TailAverage

MARKS = [
    pytest.mark.slow,
    pytest.mark.xdist_group("spark"),  # in one process, with one Spark
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support"),
    pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning"),  # of JAX
]
"""Of tests that need a real Spark: `pytestmark = runs.MARKS`."""

ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
INSTALL = "apt-get install openjdk-17-jre-headless"
SCHEMA = "run string, step long, loss double"


def java() -> str | None:
    """Where Java is, if it is there."""
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=f"{home}/bin" if home else None)


def session(**options: Any) -> Any:
    """A small local Spark, whose workers run this Python."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]")
    settings = {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.sql.streaming.stateStore.providerClass": ROCKSDB,
        "spark.python.worker.faulthandler.enabled": "false",
        **options,
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def rows(keys: int, each: int, seed: int = 0) -> dict[str, np.ndarray]:
    """The numbers of keys: a random walk of each."""
    rng = np.random.default_rng(seed)
    return {f"run{key}": rng.normal(size=each).cumsum() for key in range(keys)}


def write(folder: Path, name: str, table: pa.Table) -> None:
    """A file of a stream, there at once and whole; its name is a number, and they come in order."""
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / f".{name}")
    os.utime(folder / f".{name}", (1e9 + int(name), 1e9 + int(name)))
    (folder / f".{name}").rename(folder / f"{name}.parquet")


def table(found: dict[str, np.ndarray], steps: slice, rng: np.random.Generator) -> pa.Table:
    """Those rows of each key, shuffled."""
    count = len(next(iter(found.values())))
    step = np.arange(count)[steps]
    order = rng.permutation(len(step) * len(found))
    run = np.repeat(np.array(list(found), object), len(step))[order]
    loss = np.concatenate([xs[steps] for xs in found.values()])[order]
    return pa.table({"run": run, "step": np.tile(step, len(found))[order], "loss": loss})


def one_by_one(rule: Any, xs: np.ndarray) -> list[float]:
    """The averages after each number."""
    average = TailAverage(rule)
    found = []
    for x in xs.tolist():
        average.update(x)
        found.append(average.value())
    return found


def started(df: Any, folder: Path, **trigger: Any) -> Any:
    """A streaming query with its checkpoint and sink in a folder."""
    writer = df.writeStream.format("parquet").option("path", str(folder / "out"))
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    return writer.trigger(**trigger).start()


def ran(df: Any, folder: Path) -> Any:
    """A streaming query that has run on all that is there."""
    query = started(df, folder, availableNow=True)
    query.awaitTermination()
    return query
