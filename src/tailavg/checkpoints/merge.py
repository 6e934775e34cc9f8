"""Average checkpoints in one pass: each number is read once.

Tensors are cut into pieces. A thread reads a piece from each checkpoint that has a weight, the
newest first, and averages it. The averages are written in the order of the newest checkpoint while
the next pieces are computed, so only a few pieces are in memory.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle, islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, overload

import numpy as np

from tailavg.checkpoints.checkpoint import (
    PIECE,
    Averages,
    Checkpoint,
    CheckpointError,
    Piece,
    Tensor,
)
from tailavg.checkpoints.folders import Folder, open_file
from tailavg.checkpoints.loops import merge_loops
from tailavg.checkpoints.processes import ALONE, Group
from tailavg.checkpoints.runs import unfinished
from tailavg.checkpoints.sums import Mean
from tailavg.checkpoints.weights import Weighing, weights
from tailavg.core.windows import Reals

__all__ = ["SAFETENSORS", "TORCH", "Merge", "average_checkpoints"]

SAFETENSORS = frozenset({".safetensors"})
TORCH = frozenset({".pt", ".pth", ".ckpt", ".bin"})
"""The suffixes of files that `torch.save` writes."""

AnyPath = str | os.PathLike[str]
Progress = Callable[[int, int], object]

Term = tuple[Checkpoint, Sequence[float]]
"""A checkpoint, and its weight for each output."""


class Merge:
    """Opened checkpoints, which are known to match, and the weights of each output.

    Attributes:
        weights: For each output, the weight of each checkpoint.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        outputs: Mapping[Path, Weighing],
        *,
        dtype: str | None = None,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        steps: Sequence[int] | None = None,
    ) -> None:
        if not paths:
            raise ValueError("paths: expected at least one checkpoint, got none")
        self._checkpoints = [_open(path) for path in paths]
        self.newest = self._checkpoints[-1]
        self.newest.choose(include, exclude, dtype)
        for checkpoint in self._checkpoints[:-1]:
            checkpoint.check_like(self.newest)
        self.weights: dict[Path, Reals] = {
            output: weights(rule, len(paths), steps) for output, rule in outputs.items()
        }

    def used(self, output: Path) -> list[Path]:
        """Return the paths of the checkpoints that have a weight in an output, oldest first."""
        return [checkpoint.path for checkpoint, _ in self._terms([output])]

    def run(self, progress: Progress | None = None, group: Group = ALONE) -> None:
        """Write the outputs. No output appears before all are complete.

        Each process of a group writes its share, into the folder that the first one opens.
        """
        newest, outputs = self.newest, list(self.weights)
        for checkpoint in self._checkpoints:
            for output in outputs:
                if checkpoint.path.resolve() in output.resolve().parents:
                    raise CheckpointError(
                        f"{output} is inside the checkpoint {checkpoint.path}; choose another path"
                    )
        group.together(lambda: newest.share(group.rank, group.size))
        with ExitStack() as stack:
            targets = group.first(
                lambda: [stack.enter_context(newest.replacing(output)) for output in outputs]
            )

            def write() -> Any:
                averages = self._averages(self._pool(stack), self._terms(outputs), progress)
                part = newest.write(targets, averages)
                self._check_unchanged()
                return part

            parts = group.gather(group.together(write))
            group.first(lambda: newest.finish(targets, parts))

    def in_memory(self, progress: Progress | None = None) -> Any:
        """Return the average for the only output in memory, and write nothing."""
        with ExitStack() as stack:
            averages = self._averages(self._pool(stack), self._terms([*self.weights]), progress)
            state = self.newest.averaged(averages)
            self._check_unchanged()
        return state

    def each(self, progress: Progress | None = None) -> Iterator[tuple[str, Any]]:
        """Yield the average of each tensor for the only output, and write nothing."""
        with ExitStack() as stack:
            averages = self._averages(self._pool(stack), self._terms([*self.weights]), progress)
            yield from self.newest.each(averages)
            self._check_unchanged()

    def _pool(self, stack: ExitStack) -> ThreadPoolExecutor:
        """Start the threads that average; they stop when the stack closes."""
        pool = ThreadPoolExecutor(self.newest.threads)
        stack.callback(pool.shutdown, cancel_futures=True)
        return pool

    def _check_unchanged(self) -> None:
        """Raise if a file that was read has changed."""
        used = [checkpoint for checkpoint, _ in self._terms([*self.weights])]
        for checkpoint in [self.newest, *used]:
            checkpoint.check_unchanged()

    def _terms(self, outputs: Sequence[Path]) -> list[Term]:
        """Return the checkpoints that have a weight in one of these outputs, oldest first."""
        rows = np.transpose([self.weights[output] for output in outputs]).tolist()
        return [(c, row) for c, row in zip(self._checkpoints, rows, strict=True) if any(row)]

    def _averages(
        self,
        pool: ThreadPoolExecutor,
        terms: Sequence[Term],
        progress: Progress | None,
    ) -> Averages:
        """Yield the averages of each piece, one per weight in `terms`."""
        tensors, threads, outputs = self.newest.tensors, self.newest.threads, len(terms[0][1])
        largest = max((stop - start for _, start, stop in _pieces(tensors)), default=0)
        loops = merge_loops(outputs * len(terms) * sum(t.numbers for t in tensors.values()))
        memory = _Memory(largest, outputs, loops)
        # one piece is written while each thread computes one, and one more waits
        outs = cycle([np.empty((outputs, 8 * largest), np.uint8) for _ in range(threads + 2)])
        submitted = (
            pool.submit(self._means, terms, *piece, memory, out)
            for piece, out in zip(_pieces(tensors), outs, strict=False)
        )
        futures = deque(islice(submitted, 1 + threads))
        done, total = 0, sum(t.numbers * t.number_dtype.itemsize for t in tensors.values())
        for key, start, stop in _pieces(tensors):
            means = futures.popleft().result()
            futures.extend(islice(submitted, 1))
            done += (stop - start) * tensors[key].number_dtype.itemsize
            if progress is not None:
                progress(done * len(terms), total * len(terms))
            yield means

    def _means(
        self,
        terms: Sequence[Term],
        key: Hashable,
        start: int,
        stop: int,
        memory: _Memory,
        out: Piece,
    ) -> list[Piece]:
        """Return the averages of a piece, one per output, in the memory `out`."""
        tensor = self.newest.tensors[key]
        piece = memory.piece[: (stop - start) * tensor.number_dtype.itemsize]
        size = (stop - start) * tensor.mean_dtype.itemsize
        averages = [row[:size].view(tensor.mean_dtype) for row in out]
        with np.errstate(all="ignore"):  # the mean of infinities may be NaN
            for checkpoint, row in reversed(terms):
                checkpoint.read(key, start, stop, piece)
                for mean, weight in zip(memory.means, row, strict=True):
                    if weight:
                        mean.add(piece.view(tensor.number_dtype), weight)
            for mean, average in zip(memory.means, averages, strict=True):
                mean.round_into(average, tensor.number_dtype)
        return averages


class _Memory(threading.local):
    """The buffers of a thread, reused since allocating them would take as long as the sums."""

    def __init__(self, size: int, outputs: int, loops: SimpleNamespace | None) -> None:
        self.piece = np.empty(8 * size, np.uint8)
        self.means = [Mean(size, loops) for _ in range(outputs)]


def _open(path: Path) -> Checkpoint:
    if reason := unfinished(path):
        raise CheckpointError(f"{path}: unfinished, since {reason}; leave it out")
    if (path / ".metadata").is_file():
        from tailavg.checkpoints.distributed import Distributed  # needs torch

        return Distributed(path)
    return Folder(path) if path.is_dir() else open_file(path)


def _pieces(tensors: Mapping[Hashable, Tensor]) -> Iterator[tuple[Hashable, int, int]]:
    """Cut tensors into pieces: yield the tensor's key, and the start and stop of each piece."""
    for key, tensor in tensors.items():
        for cut in pairwise(tensor.cuts or (*range(0, tensor.numbers, PIECE), tensor.numbers)):
            yield key, *cut


Outputs = Mapping[Path, Weighing] | Mapping[str, Weighing]


@overload
def average_checkpoints(
    paths: Sequence[AnyPath],
    window: Outputs,
    progress: Progress | None = None,
    *,
    dtype: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    steps: Sequence[int] | None = None,
) -> list[list[Path]]: ...


@overload
def average_checkpoints(
    paths: Sequence[AnyPath],
    window: Weighing,
    progress: Progress | None = None,
    *,
    dtype: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    steps: Sequence[int] | None = None,
    lazy: Literal[False] = False,
) -> dict[str, Any]: ...


@overload
def average_checkpoints(
    paths: Sequence[AnyPath],
    window: Weighing,
    progress: Progress | None = None,
    *,
    dtype: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    steps: Sequence[int] | None = None,
    lazy: Literal[True],
) -> Iterator[tuple[str, Any]]: ...


def average_checkpoints(
    paths: Sequence[AnyPath],
    window: Weighing | Outputs,
    progress: Progress | None = None,
    *,
    dtype: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    steps: Sequence[int] | None = None,
    lazy: bool = False,
) -> dict[str, Any] | Iterator[tuple[str, Any]] | list[list[Path]]:
    """Average checkpoints in one pass: return the average, or write one output for each window.

    If `window` is a dict of outputs, no output appears before all are complete. Otherwise nothing
    is written, and the average is held in memory: as a whole, or tensor by tensor with `lazy`.

    Args:
        paths: The checkpoints, oldest first: files, or folders.
        window: What to average: 0.25 is the mean of the last quarter of the checkpoints, 10 is the
            mean of the last ten. It may also be a rule, or a list with one weight per checkpoint.
            To write outputs, pass a dict from output paths to such windows.
        progress: Called with the number of bytes read so far, and the total number of bytes.
        dtype: The dtype of the averages; by default the dtype of the checkpoints.
        include: Patterns of the tensors to average, such as `model.*`; all by default.
        exclude: Patterns of the tensors to copy from the newest checkpoint instead.
        steps: The step of each checkpoint, to measure windows in steps.
        lazy: Return an iterator of names and averages, which computes one tensor at a time. A file
            of `torch.save` is still loaded as a whole; its pairs are those of its dict.

    Returns:
        Without outputs, a dict of tensors by name: NumPy arrays for `.safetensors` (with the dtypes
            of `ml_dtypes`, such as bfloat16), torch tensors for `torch.distributed.checkpoint`. For
            a file of `torch.save`, it is the result of `torch.load` for the newest file, with
            averaged tensors. With outputs, it is a list for each output: the paths of the
            checkpoints that have a weight.

    Raises:
        CheckpointError: If a file cannot be read, changes meanwhile, or differs from the newest in
            tensors, shapes or dtypes.
        OSError: If a file cannot be opened or written.
    """
    in_memory = not isinstance(window, Mapping)
    if lazy and not in_memory:
        raise ValueError("lazy: outputs are written, not returned; pass one window")
    windows: Any = {"": window} if in_memory else window
    outputs: dict[Path, Weighing] = {Path(output): each for output, each in windows.items()}
    files = [Path(path) for path in paths]
    merge = Merge(files, outputs, dtype=dtype, include=include, exclude=exclude, steps=steps)
    if lazy:
        return merge.each(progress)
    if in_memory:
        state: dict[str, Any] = merge.in_memory(progress)
        return state
    merge.run(progress)
    return [merge.used(output) for output in outputs]
