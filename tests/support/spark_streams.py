"""Real Spark in tests: a session, streams of files, and what they should give."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailavg import TailAverage

MARKS = [
    pytest.mark.slow,
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


def make_home(folder: Path) -> Path:
    """Make a SPARK_HOME whose Python workers start quickly.

    Spark gives the worker of a streaming query 10 s to connect, which nothing can change. Workers
    import pyspark from a zip file in SPARK_HOME and compile it each time. Several at once were too
    late on a busy machine: "Python worker failed to connect back". Without that file they import
    the installed pyspark, which is compiled, in a fifth of the time.
    """
    spec = find_spec("pyspark")
    assert spec is not None
    for name in ("bin", "jars"):
        (folder / name).symlink_to(Path(str(spec.origin)).with_name(name))
    return folder


def session(**options: str) -> Any:
    """A small local Spark, whose workers run this Python."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.log.level": "OFF",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.stateStore.providerClass": ROCKSDB,
        "spark.python.worker.faulthandler.enabled": "false",
        **options,
    }
    return builder.config(map=settings).getOrCreate()


def losses(keys: int, steps: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw the numbers of keys: a random walk of each."""
    rng = np.random.default_rng(seed)
    return {f"run{key}": rng.normal(size=steps).cumsum() for key in range(keys)}


def table(losses: dict[str, np.ndarray], steps: slice, rng: np.random.Generator) -> pa.Table:
    """Those rows of each key, shuffled."""
    count = len(next(iter(losses.values())))
    step = np.arange(count)[steps]
    order = rng.permutation(len(step) * len(losses))
    run = np.repeat(np.array(list(losses), object), len(step))[order]
    loss = np.concatenate([xs[steps] for xs in losses.values()])[order]
    return pa.table({"run": run, "step": np.tile(step, len(losses))[order], "loss": loss})


def one_by_one(rule: Any, xs: np.ndarray) -> list[float]:
    """The averages after each number."""
    average = TailAverage(rule)
    averages = []
    for x in xs.tolist():
        average.update(x)
        averages.append(average.value())
    return averages


def expected(losses: dict[str, np.ndarray], rule: Any, first: int = 0) -> list[tuple[Any, ...]]:
    """Rows of run, step and average, from the step `first` on, as `rows` gives them."""
    averages = [
        (run, step, average)
        for run, xs in losses.items()
        for step, average in enumerate(one_by_one(rule, xs))
        if step >= first
    ]
    return sorted(averages, key=repr)


def write(folder: Path, name: str, table: pa.Table) -> None:
    """Write a file of a stream atomically; its name is a number, and Spark takes them in order."""
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / f".{name}")
    os.utime(folder / f".{name}", (1e9 + int(name), 1e9 + int(name)))
    (folder / f".{name}").rename(folder / f"{name}.parquet")


def stream(spark: Any, folder: Path, schema: str = SCHEMA, files: int = 1) -> Any:
    """A stream of the files in `folder / "in"`, so many in a batch."""
    reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", files)
    return reader.parquet(str(folder / "in"))


def started(df: Any, folder: Path, **trigger: Any) -> Any:
    """Start a streaming query with its checkpoint and sink in a folder."""
    writer = df.writeStream.format("parquet").option("path", str(folder / "out"))
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    return writer.trigger(**trigger).start()


def ran(df: Any, folder: Path) -> Any:
    """Run a streaming query on all files that are there."""
    query = started(df, folder, availableNow=True)
    query.awaitTermination()
    return query


def rows(df: Any, *columns: str) -> list[tuple[Any, ...]]:
    """Those columns of a table, sorted."""
    return sorted(map(tuple, df.select(*columns).collect()), key=repr)


def out(spark: Any, folder: Path, *columns: str) -> list[tuple[Any, ...]]:
    """What a query has written, sorted."""
    return rows(spark.read.parquet(str(folder / "out")), *columns)
