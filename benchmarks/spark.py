"""Averages of streams in Spark against Spark's own: `make bench`.

    python benchmarks/spark.py [--rounds 3] [--report]

Streaming queries over the same files on local[2], from their start to their end; candidates take
turns after a round that does not count, and the median counts. Spark's own average gives one row
for each key, as output="latest" does; those by hand keep a running mean, the least that a Python
function with a state can do. Then how the time grows with keys, rows and cores, and the size of
states, and what follows from it on paper for many more. The rows go to results/spark.csv, and as
tables to results/spark.md, which --report makes anew without measuring.
"""

import argparse
import csv
import os
import platform
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numba
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from tailavg import AnytimeWindow
from tailavg.spark import tail_mean

RESULTS = Path(__file__).parent / "results"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
SCHEMA = "run string, step long, loss double"
OUTPUT = f"{SCHEMA}, mean double"


def session(cores: int) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(f"local[{cores}]")
    for name, value in (
        ("spark.ui.enabled", "false"),
        ("spark.driver.memory", "6g"),
        ("spark.sql.shuffle.partitions", "4"),
        ("spark.sql.streaming.stateStore.providerClass", ROCKSDB),
    ):
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def write(folder: Path, keys: int, each: int, files: int) -> Path:
    """Shuffled rows of keys, in files of successive steps."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    rng = np.random.default_rng(0)
    names = np.array([f"run{key}" for key in range(keys)], object)
    for i, steps in enumerate(np.array_split(np.arange(each), files)):
        order = rng.permutation(keys * len(steps))
        rows = {
            "run": np.tile(names, len(steps))[order],
            "step": np.repeat(steps, keys)[order],
            "loss": rng.normal(size=len(order)),
        }
        pq.write_table(pa.table(rows), folder / f"{i}.parquet")
        os.utime(folder / f"{i}.parquet", (1e9 + i, 1e9 + i))
    return folder


def own(df: DataFrame) -> DataFrame:
    return df.groupBy("run").agg(sql.avg("loss"))


class RunningMean(StatefulProcessor):
    """A mean of all rows, by hand."""

    def init(self, handle: Any) -> None:
        self._state = handle.getValueState("state", "state binary")

    def handleInputRows(  # noqa: N802
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: Any,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        held = self._state.get()
        frame, state = averaged(rows, held[0] if held else None)
        self._state.update((state,))
        yield frame

    def close(self) -> None:
        pass


def averaged(rows: Iterator[pd.DataFrame], held: Any) -> tuple[pd.DataFrame, bytes]:
    count, total = struct.unpack("qd", held) if held is not None else (0, 0.0)
    frame = pd.concat(list(rows)).sort_values("step")
    sums = total + frame["loss"].to_numpy().cumsum()
    counts = count + np.arange(1, len(frame) + 1)
    return frame.assign(mean=sums / counts), struct.pack("qd", counts[-1], sums[-1])


def with_state(_: Any, rows: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    frame, held = averaged(rows, state.get[0] if state.exists else None)
    state.update((held,))
    yield frame


def by_hand(df: DataFrame) -> DataFrame:
    return df.groupBy("run").transformWithStateInPandas(RunningMean(), OUTPUT, "Append", "None")


def by_hand_before(df: DataFrame) -> DataFrame:
    return df.groupBy("run").applyInPandasWithState(
        with_state, OUTPUT, "state binary", "append", "NoTimeout"
    )


def tail(df: DataFrame, **options: Any) -> DataFrame:
    return tail_mean(df, "loss", 0.25, by="run", order_by="step", **options)


CANDIDATES: dict[str, Callable[[DataFrame], DataFrame]] = {
    "Spark's own avg (one row for each key)": own,
    'tail_mean, output="latest"': lambda df: tail(df, output="latest"),
    "tail_mean": tail,
    "applyInPandasWithState by hand": by_hand_before,
    "transformWithStateInPandas by hand": by_hand,
}


def timed(
    spark: SparkSession, folder: Path, make: Callable[[DataFrame], DataFrame], files: int = 1
) -> tuple[float, Any]:
    """The seconds that a query takes, and what it says of itself."""
    df = make(
        spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", files).parquet(str(folder))
    )
    with tempfile.TemporaryDirectory() as checkpoint:
        writer = df.writeStream.format("noop").option("checkpointLocation", checkpoint)
        mode = "update" if make is own else "append"
        start = perf_counter()
        query = writer.outputMode(mode).trigger(availableNow=True).start()
        query.awaitTermination()
        return perf_counter() - start, query.lastProgress


def rate(rows: int, seconds: float) -> str:
    return f"{rows / seconds:,.0f}"


def compared(spark: SparkSession, folder: Path, rounds: int) -> list[list[str]]:
    """Candidates against each other."""
    found = []
    for keys, each in ((1000, 1000), (20_000, 5)):
        write(folder, keys, each, 1)
        group, took = f"{keys:,} keys × {each:,} rows", {name: [] for name in CANDIDATES}
        for i in range(rounds + 1):
            for name, make in CANDIDATES.items():
                slow = each == 5 and "by hand" in name and i > 1  # half a minute each: one round
                if not slow:
                    seconds, _ = timed(spark, folder, make)
                    took[name] += [seconds] if i else []
        first = statistics.median(next(iter(took.values())))
        for name, times in took.items():
            each_took = statistics.median(times)
            found.append([group, name, rate(keys * each, each_took), f"{each_took / first:.3g}"])
            print(*found[-1], sep="  ", flush=True)
    return found


GROWTH = ((1000, 1000, 1), (1000, 4000, 1), (1000, 1000, 4), (20_000, 50, 1), (200_000, 5, 1))


def growth(spark: SparkSession, folder: Path, cores: int) -> list[list[str]]:
    """How the time of `tail_mean` grows with keys and rows."""
    found, took = [], []
    for keys, each, files in GROWTH if cores > 1 else GROWTH[:1]:
        write(folder, keys, each, files)
        took.append(min(timed(spark, folder, tail)[0] for _ in range(2)))
        batches = "" if files == 1 else f" in {files} micro-batches"
        group = f"tail_mean, {cores} core{'s' * (cores > 1)}"
        name = f"{keys:,} keys × {each:,} rows{batches}"
        found.append([group, name, rate(keys * each, took[-1]), f"{took[-1] / took[0]:.3g}"])
        print(*found[-1], sep="  ", flush=True)
    return found


def sizes(spark: SparkSession, folder: Path) -> list[list[str]]:
    """The bytes of a state: as it is written, and in a compacted file."""
    found = []
    write(folder, 20_000, 50, 1)
    for name, rule in (
        ("3 accumulators", 0.25),
        ("5 accumulators", AnytimeWindow(0.25, accumulators=5)),
        ("[0.1, 0.25, 0.5]: 12 accumulators", [0.1, 0.25, 0.5]),
    ):

        def make(df: DataFrame, rule: Any = rule) -> DataFrame:
            return tail_mean(df, "loss", rule, by="run", order_by="step", output="latest")

        _, progress = timed(spark, folder, make)
        metrics = progress["stateOperators"][0]["customMetrics"]
        written = metrics["rocksdbTotalBytesWritten"] / metrics["rocksdbPutCount"]
        on_disk = metrics["rocksdbSstFileSize"] / 20_000
        found.append(
            ["bytes of a state, 20,000 keys × 50 rows", name, f"{written:.0f}", f"{on_disk:.0f}"]
        )
        print(*found[-1], sep="  ", flush=True)
    return found


def report(rows: list[list[str]]) -> str:
    """All of it as tables, and what follows for 10⁸ keys and 10⁶ rows a second."""
    speeds = [row for row in rows if "bytes" not in row[0]]
    states = [row for row in rows if "bytes" in row[0]]
    versions = (
        f"Python {platform.python_version()}, pyspark {pyspark.__version__}, "
        f"Arrow {pa.__version__}, pandas {pd.__version__}, numba {numba.__version__}; local[2]."
    )
    lines = [versions, "", "| | rows a second | time, ratio |", "| --- | ---: | ---: |"]
    seen = ""
    for group, name, number, ratio in speeds:
        if group != seen:
            lines.append(f"| **{group}** | | |")
            seen = group
        lines.append(f"| {name} | {number} | {ratio} |")
    lines += ["", f"| {states[0][0]} | as written | on disk |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {written} | {on_disk} |" for _, name, written, on_disk in states]
    grown = [row for row in speeds if row[0] == "tail_mean, 2 cores"]
    took = [
        keys * each / float(row[2].replace(",", ""))
        for row, (keys, each, _) in zip(grown, GROWTH, strict=True)
    ]
    row = 2 * (took[1] - took[0]) / (1000 * 3000)
    key = 2 * (took[4] - took[0]) / (200_000 - 1000)
    size = float(states[0][2])
    lines += [
        "",
        f"So a row takes {1e6 * row:.1f} µs of a core, and a key {1e6 * key:.0f} µs in each "
        "micro-batch in which it has rows. On paper, for 10⁸ keys and 10⁶ rows a second, each of a "
        f"random key, with a state of {1e8 * size / 1e9:.0f} GB as written:",
        "",
        "| a micro-batch every | keys in it | cores | written, MB/s | rows of one of 256 tasks |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for text, seconds in (("second", 1), ("minute", 60), ("10 minutes", 600)):
        keys = 1e8 * -np.expm1(-1e6 * seconds / 1e8)
        cores = 1e6 * row + keys * key / seconds
        written, rows_of_task = keys * size / seconds / 1e6, 1e6 * seconds / 256
        found = (
            f"{keys / 1e6:,.0f} million",
            f"{cores:.0f}",
            f"{written:.0f}",
            f"{rows_of_task:,.0f}",
        )
        lines.append(f"| {text} | {' | '.join(found)} |")
    return "\n".join(lines) + "\n"


def measured(rounds: int) -> list[list[str]]:
    """All rows, in this process and in one with a single core."""
    spark = session(2)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "in"
        rows = compared(spark, folder, rounds) + growth(spark, folder, 2)
        states = sizes(spark, folder)
    spark.stop()
    alone = [sys.executable, __file__, "--alone"]
    text = subprocess.run(alone, capture_output=True, text=True, check=True).stdout
    return [*rows, *(row for row in csv.reader(text.splitlines()) if len(row) == 4), *states]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="that count (%(default)s)")
    parser.add_argument("--report", action="store_true", help="make the tables from the CSV anew")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.alone:
        with tempfile.TemporaryDirectory() as scratch:
            spark, folder = session(1), Path(scratch) / "in"
            timed(spark, write(folder, 100, 100, 1), tail)
            csv.writer(sys.stdout).writerows(growth(spark, folder, 1))
        return
    if not options.report:
        with (RESULTS / "spark.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["group", "candidate", "rows a second", "time, ratio to the first"])
            writer.writerows(measured(options.rounds))
    with (RESULTS / "spark.csv").open(newline="") as file:
        text = report(list(csv.reader(file))[1:])
    (RESULTS / "spark.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
