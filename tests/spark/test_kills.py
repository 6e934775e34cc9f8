"""Five queries, killed twice with their driver while they run, are as if never stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.support import spark_streams as runs

pytestmark = runs.MARKS

SCRIPT = Path(runs.__file__).parent / "spark_kills.py"
QUERIES, KILLS, FILES, KEYS = 5, 2, 40, 10


def batches(folder: Path, log: str) -> int:
    """How many batches are in a log of a checkpoint: `offsets` once begun, `commits` once done."""
    found = folder / "checkpoint" / log
    return sum(file.name.isdigit() for file in found.iterdir()) if found.exists() else 0


def kill(folders: list[Path], delay: float) -> int:
    """Kill a driver when each query has done a batch, and how many were in the midst of one."""
    before, deadline = [batches(folder, "commits") for folder in folders], time.monotonic() + 200
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "1", *folders], start_new_session=True, **quiet
    )
    try:
        while any(
            batches(*one, "commits") == was for *one, was in zip(folders, before, strict=True)
        ):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(delay)
        assert process.poll() is None, "the queries ended before they were killed"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # Python, Java and all workers
        process.wait()
    return sum(batches(folder, "offsets") > batches(folder, "commits") for folder in folders)


def rows_of(sink: Path) -> list[tuple]:
    """The rows of the files that the sink's log names: others are of batches cut short."""
    names = set()
    for file in (sink / "_spark_metadata").glob("[0-9]*"):
        lines = file.read_text().splitlines()[1:]
        names |= {json.loads(line)["path"].removeprefix("file://") for line in lines}
    rows = []
    for name in names:
        table = pq.read_table(name)
        columns = (table[column].to_pylist() for column in ("run", "step", "loss_tail"))
        rows += zip(*columns, strict=True)
    return rows


@pytest.mark.usefixtures("spark_is_there")
def test_queries_that_are_killed_give_what_unbroken_ones_give(tmp_path):
    folders = [tmp_path / str(query) for query in range(QUERIES)]
    for query, folder in enumerate(folders):
        folder.mkdir()
        found, rng = runs.rows(KEYS, FILES, seed=query), np.random.default_rng(query)
        for i in range(FILES):
            runs.write(folder / "in", str(i), runs.table(found, slice(i, i + 1), rng))
    in_batches = [kill(folders, delay) for delay in np.linspace(0.1, 0.4, KILLS)]
    assert sum(in_batches) >= QUERIES * KILLS // 2
    # to the end, in batches of another size
    subprocess.run(
        [sys.executable, SCRIPT, "7", *folders], check=True, timeout=300, capture_output=True
    )
    for query, folder in enumerate(folders):
        want = [
            (run, step, value)
            for run, xs in runs.rows(KEYS, FILES, seed=query).items()
            for step, value in enumerate(runs.one_by_one(20, xs))
        ]
        assert sorted(rows_of(folder / "out")) == sorted(want)
