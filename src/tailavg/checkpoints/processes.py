"""Processes that average together: one, or those that `torchrun` or `--workers` started.

`Merge.run` calls a `Group`. Its processes exchange short messages through a store of torch; what
they read and write is in files. `workers` starts processes on this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from tailavg.checkpoints.checkpoint import CheckpointError

__all__ = ["ALONE", "Group", "group", "rank", "size", "workers"]

STORE = "TAILAVG_STORE"
"""The environment variable with the URL of the store that the processes of `workers` share."""
GRACE = 5.0
"""Seconds after which the other processes are ended, too, if one has failed."""


def rank() -> int:
    """Return the number of this process, from 0."""
    return int(os.environ["RANK"]) if size() > 1 else 0


def size() -> int:
    """Return the number of processes that were started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Group:
    """Processes that take each step together. Without a store, this one alone."""

    def __init__(self, store: Any = None, rank: int = 0, size: int = 1) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._steps = 0

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in order. JSON must have types for them."""
        if self._store is None:
            return [value]
        self._steps += 1
        keys = [f"{self._steps}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(value, default=str))
        return [json.loads(self._get(key)) for key in keys]

    def _get(self, key: str) -> Any:
        """Wait for a value, for a moment at a time so that signals are handled."""
        while not self._store.check([key]):
            time.sleep(0.05)
        return self._store.get(key)

    def together(self, call: Callable[[], Any]) -> Any:
        """Call a function in each process. If it fails in one, raise in all."""
        result: Any = None
        failure: Exception | None = None
        try:
            result = call()
        except Exception as error:
            failure = error
        message = None if failure is None else str(failure) or type(failure).__name__
        messages = self.gather(message)
        if failure is not None:
            raise failure
        for message in messages:
            if message is not None:
                raise CheckpointError(message)
        return result

    def first(self, call: Callable[[], Any]) -> Any:
        """Call a function in the first process, and return its result in all."""
        return self.gather(self.together(lambda: call() if self.rank == 0 else None))[0]


ALONE = Group()


@contextmanager
def group() -> Iterator[Group]:
    """Join the processes that were started together."""
    if size() == 1:
        yield ALONE
        return
    from torch.distributed.rendezvous import rendezvous

    place = os.environ.get(STORE, "env://")
    timeout = timedelta(minutes=30)
    store, _, _ = next(iter(rendezvous(place, rank(), size(), timeout=timeout)))
    try:
        yield Group(store, rank(), size())
    finally:
        with suppress(RuntimeError):  # another process was killed
            store.set(f"end/{rank()}", "")
            if rank() == 0:  # it may hold the store, so it ends last
                store.wait([f"end/{i}" for i in range(size())], timedelta(seconds=GRACE))


def workers(command: Sequence[str], number: int) -> int:
    """Run a command in processes that form a group, and return an exit code."""
    with tempfile.TemporaryDirectory() as folder:
        place = (Path(folder) / "store").as_uri()
        shared = {STORE: place, "WORLD_SIZE": str(number), "OMP_NUM_THREADS": "1"}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for i in range(number):
                environment = {**os.environ, **shared, "RANK": str(i)}
                processes.append(subprocess.Popen([sys.executable, *command], env=environment))
            codes = _wait(processes)
        finally:
            for process in processes:
                process.terminate()  # does nothing to a process that has ended
            for process in processes:
                process.wait()
    if any(code is None or code < 0 for code in codes):
        raise CheckpointError("a process was killed, perhaps because memory ran out")
    return max(code or 0 for code in codes)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Return the exit codes of processes: None for those that run on long after another failed."""
    failed_at: float | None = None
    while True:
        codes = [process.poll() for process in processes]
        if any(codes) and failed_at is None:
            failed_at = time.monotonic()
        is_late = failed_at is not None and time.monotonic() - failed_at > GRACE
        if None not in codes or is_late:
            return codes
        time.sleep(0.02)
