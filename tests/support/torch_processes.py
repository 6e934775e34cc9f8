"""Functions of test modules in processes of their own, alone or as a group."""

import importlib.util
import inspect
import multiprocessing
import queue
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import closing
from datetime import timedelta
from pathlib import Path

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


def exit_code(function, *args, seconds: float = 600) -> int | None:
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
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, path)
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return getattr(sys.modules[module], name)(*args)


class Group:
    """Processes that form a gloo group and call functions together, until they are closed."""

    def __init__(self, world: int, store: Path):
        context = other_processes()
        self.world, self.answers = world, context.Queue()
        self.calls = [context.Queue() for _ in range(world)]
        self.processes = [
            context.Process(
                target=_rank, args=(rank, world, str(store), calls, self.answers), daemon=True
            )
            for rank, calls in enumerate(self.calls)
        ]
        for process in self.processes:
            process.start()

    def __call__(self, function, *args, seconds: float = 600) -> list:
        """Call a function of a test module on every rank, and return what each returns."""
        for calls in self.calls:
            calls.put((_place(function), args))
        results, until = {}, time.monotonic() + seconds
        while len(results) < self.world:
            try:
                rank, result, error = self.answers.get(timeout=0.2)
            except queue.Empty:
                dead = [process.exitcode for process in self.processes if process.exitcode]
                assert not dead, f"a rank died with exit code {dead[0]}"
                assert time.monotonic() < until, f"no answer after {seconds} s"
                continue
            assert error is None, f"rank {rank} of {self.world}:\n{error}"
            results[rank] = result
        return [results[rank] for rank in range(self.world)]

    def close(self, wait: bool = True) -> None:
        """End the processes; do not wait for them if one has failed."""
        for calls in self.calls:
            calls.put(None)
        for process in self.processes:
            process.join(60 if wait else 0)
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for queue_ in (*self.calls, self.answers):
            queue_.close()


class Groups:
    """Groups by their number of processes. Each serves many calls, since it takes long to start."""

    def __init__(self, folder: Path):
        self.folder, self.groups, self.started = folder, {}, 0

    def __call__(self, world: int, function, *args, **options) -> list:
        """Call a function on every rank of a group, as `Group` does."""
        if world not in self.groups:
            self.started += 1
            self.groups[world] = Group(world, self.folder / f"store-{self.started}")
        try:
            return self.groups[world](function, *args, **options)
        except BaseException:
            self.groups.pop(world).close(wait=False)
            raise

    def close(self) -> None:
        for group in self.groups.values():
            group.close()


def on_ranks(world: int, function, *args, **options) -> list:
    """Call a function of a test module on every rank of a new group, as `Group` does."""
    with tempfile.TemporaryDirectory() as folder, closing(Groups(Path(folder))) as groups:
        return groups(world, function, *args, **options)


def _rank(rank, world, store, calls, answers) -> None:
    warnings.filterwarnings("error", module=r"tailavg\.")
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=300),
        )
        while (call := calls.get()) is not None:
            result = _call(*call)
            dist.barrier()  # so that no rank is still at work when the call has returned
            answers.put((rank, result, None))
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
