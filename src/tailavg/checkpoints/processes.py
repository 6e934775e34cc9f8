"""Processes that average together: one, or those that `torchrun` or `--workers` started.

`Merge.run` calls a `Group`. `workers` starts processes on this machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from tailavg.checkpoints.checkpoint import CheckpointError

__all__ = ["ALONE", "Group", "group", "rank", "size", "workers"]

T = TypeVar("T")

STORE = "TAILAVG_STORE"
"""The environment variable with the URL at which the processes of `workers` meet."""
TIMEOUT = timedelta(days=7)
"""The longest wait for the slowest process. One that dies is noticed at once."""


def rank() -> int:
    """Return the number of this process, from 0."""
    return int(os.environ.get("RANK", "0")) if size() > 1 else 0


def size() -> int:
    """Return the number of processes that were started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Group:
    """Processes that take each step together. By default this one alone."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in order."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value)
        except RuntimeError as error:
            raise CheckpointError("another process has ended") from error
        return values

    def together(self, call: Callable[[], T]) -> T:
        """Call a function in each process. If it fails in one, raise in all."""
        result: Any = None
        failure: Exception | None = None
        try:
            result = call()
        except Exception as error:
            failure = error
        messages = self.gather(None if failure is None else str(failure) or type(failure).__name__)
        if failure is not None:
            raise failure
        for message in messages:
            if message is not None:
                raise CheckpointError(message)
        return result  # type: ignore[no-any-return]

    def first(self, call: Callable[[], T]) -> T:
        """Call a function in the first process, and return its result in all."""
        result = self.together(lambda: call() if self.rank == 0 else None)
        return self.gather(result)[0]  # type: ignore[return-value]


ALONE = Group()


@contextmanager
def group() -> Iterator[Group]:
    """Join the processes that were started together."""
    if size() == 1:
        yield ALONE
        return
    import torch.distributed as dist

    place = os.environ.get(STORE, "env://")
    dist.init_process_group("gloo", place, TIMEOUT, size(), rank())
    try:
        yield Group(rank(), size())
    finally:
        with suppress(RuntimeError):  # another process has ended
            dist.destroy_process_group()


def workers(command: Sequence[str], number: int) -> int:
    """Run a command in processes that form a group, and return the first exit code but 0."""
    with tempfile.TemporaryDirectory() as folder:
        place = (Path(folder) / "store").as_uri()
        shared = {STORE: place, "WORLD_SIZE": str(number), "OMP_NUM_THREADS": "1"}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for i in range(number):
                environment = {**os.environ, **shared, "RANK": str(i)}
                processes.append(subprocess.Popen([sys.executable, *command], env=environment))
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.terminate()  # after an interrupt; does nothing to one that has ended
            for process in processes:
                process.wait()
    return next((code for code in codes if code), 0)
