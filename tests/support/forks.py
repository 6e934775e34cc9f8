"""Forked processes: a fresh program imports a framework once and forks every run from there.

A fixture starts the program with a folder. Its children leave what they find in that folder, and
their tracebacks are in its output.
"""

import multiprocessing
import os
import signal
from datetime import timedelta

import torch.distributed as dist

FORK = multiprocessing.get_context("fork")


def exit_code(function, *args) -> int | None:
    """Call a function in a process of its own; -9 if the process is killed."""
    process = FORK.Process(target=function, args=args)
    process.start()
    process.join()
    return process.exitcode


def kill() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def on_ranks(world: int, function, folder) -> None:
    """Call a function with a folder in each process of a gloo group."""
    ranks = [
        FORK.Process(target=_rank, args=(rank, world, function, folder)) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * world


def _rank(rank: int, world: int, function, folder) -> None:
    # what torchrun sets; Lightning and accelerate then use the group that is there
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "tests"}
    os.environ |= {"OMP_NUM_THREADS": "1"}  # or accelerate asks for more
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=5),
    )
    function(folder)
    dist.barrier()
    dist.destroy_process_group()
