"""Functions of test modules in processes of their own, alone or as a group."""

import importlib.util
import inspect
import multiprocessing
import queue
import sys
import time
import traceback
import warnings
from datetime import timedelta

import torch.distributed as dist

PRELOADED = [
    "hypothesis.strategies",
    "numpy",
    "pytest",
    "safetensors.torch",
    "tailavg.torch",
    "torch._dynamo",
    "torch._inductor.config",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "torch.testing",
]


def other_processes():
    """Processes that are forked from one that has imported torch: they cost next to nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def exit_code(function, *args, seconds: float = 60) -> int | None:
    """Call a function of a test module in a process of its own."""
    process = other_processes().Process(target=_call, args=(_place(function), args), daemon=True)
    process.start()
    process.join(seconds)
    return process.exitcode


def _place(function) -> tuple[str, str, str]:
    return function.__module__, inspect.getfile(function), function.__name__


def _call(place, args):
    """Load the module from its file, under the name that pytest gave it."""
    module, path, name = place
    spec = importlib.util.spec_from_file_location(module, path)
    sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[module])
    return getattr(sys.modules[module], name)(*args)


def on_ranks(world: int, function, *args, seconds: float = 60) -> list:
    """Call a function of a test module in each process of a new gloo group; what they return."""
    context = other_processes()
    answers = context.Queue()
    store = args[0] / f"store-{function.__name__}-{world}-{time.monotonic_ns()}"
    ranks = [
        context.Process(
            target=_rank,
            args=(rank, world, str(store), _place(function), args, answers),
            daemon=True,
        )
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    results, until = {}, time.monotonic() + seconds
    try:
        while len(results) < world:
            try:
                rank, result, error = answers.get(timeout=0.2)
            except queue.Empty:
                dead = [p.exitcode for p in ranks if p.exitcode]
                assert not dead, f"a rank died with exit code {dead[0]}"
                assert time.monotonic() < until, f"no answer after {seconds} s"
                continue
            assert error is None, f"rank {rank} of {world}:\n{error}"
            results[rank] = result
        for process in ranks:
            process.join(10)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        answers.close()
    return [results[rank] for rank in range(world)]


def _rank(rank, world, store, place, args, answers) -> None:
    warnings.filterwarnings("error", module=r"tailavg\.")
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=30),
        )
        result = _call(place, args)
        answers.put((rank, result, None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
