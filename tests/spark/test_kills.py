"""Queries that are killed with their driver in the middle of a batch are as if never stopped.

Slow: each kill needs a Spark of its own.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from tests.support import spark_kills
from tests.support import spark_streams as runs
from tests.support.effort import some
from tests.support.paths import ROOT
from tests.support.processes import started

pytestmark = runs.MARKS

QUERIES, KILLS, FILES = some((1, 1, 10), (5, 2, 40))
KEYS = 10


def batches(folder: Path, log: str) -> int:
    """Count the batches in a log of a checkpoint: `offsets` once begun, `commits` once done."""
    path = folder / "checkpoint" / log
    return sum(file.name.isdigit() for file in path.iterdir()) if path.exists() else 0


def kill_in_a_batch(folders: list[Path]) -> None:
    """Run the queries until each has done a batch, and kill them in the middle of another."""
    before = [batches(folder, "commits") for folder in folders]
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.spark_kills", *folders]

    def ready():
        commits = [batches(folder, "commits") for folder in folders]
        if any(now == was for now, was in zip(commits, before, strict=True)):
            return False
        return any(
            batches(folder, "offsets") > now for folder, now in zip(folders, commits, strict=True)
        )

    with started(*command, cwd=ROOT, start_new_session=True) as driver:
        try:
            while True:
                assert driver.poll() is None, "the queries ended before they were killed"
                if ready():
                    os.killpg(driver.pid, signal.SIGSTOP)
                    if ready():  # and remains so
                        break
                    os.killpg(driver.pid, signal.SIGCONT)
                time.sleep(0.01)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)  # Python and Java; workers end, too


def test_queries_that_are_killed_give_what_unbroken_ones_give(spark, tmp_path):
    folders = [tmp_path / str(query) for query in range(QUERIES)]
    for query, folder in enumerate(folders):
        folder.mkdir()
        losses, rng = runs.losses(KEYS, FILES, seed=query), np.random.default_rng(query)
        for i in range(FILES):
            runs.write(folder / "in", str(i), runs.table(losses, slice(i, i + 1), rng))
    for _ in range(KILLS):
        kill_in_a_batch(folders)
    for query, folder in enumerate(folders):  # to the end, in batches of another size
        spark_kills.start(spark, folder, files=7).awaitTermination()
        averages = runs.out(spark, folder, "run", "step", "loss_tail")
        assert averages == runs.expected(runs.losses(KEYS, FILES, seed=query), 20)
