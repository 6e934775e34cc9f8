"""Average checkpoints in one pass: every number is read once.

Tensors are cut into pieces. A thread takes a piece, reads it from each checkpoint with a weight,
the newest first, and adds it up. The averages are written in the order of the newest checkpoint
while the next ones are computed, so memory is that of a few pieces.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np

from tailavg.checkpoints.checkpoint import Averages, Checkpoint, Piece, Tensor
from tailavg.checkpoints.folders import Folder, open_file
from tailavg.checkpoints.sums import Mean, widened
from tailavg.checkpoints.weights import Weighing, weights
from tailavg.core.windows import Reals

__all__ = ["SAFETENSORS", "TORCH", "Merge", "average_checkpoints"]

SAFETENSORS = frozenset({".safetensors"})
TORCH = frozenset({".pt", ".pth", ".ckpt", ".bin"})
"""The suffixes of files."""

AnyPath = str | os.PathLike[str]
Progress = Callable[[int, int], object]

Term = tuple[Checkpoint, Sequence[float]]
"""A checkpoint, and its weight for each output."""

PIECE = 2**17
"""How many numbers to add at once: enough that threads do not wait for Python's lock."""


class Merge:
    """The two steps of `average_checkpoints`: this opens and compares them, `run` averages them.

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
        self._checkpoints = [_opened(path) for path in paths]
        self.newest = self._checkpoints[-1]
        self.newest.choose(include, exclude, dtype)
        for checkpoint in self._checkpoints[:-1]:
            checkpoint.check_like(self.newest)
        self.weights: dict[Path, Reals] = {
            output: weights(rule, len(paths), steps) for output, rule in outputs.items()
        }

    def used(self, output: Path) -> list[Path]:
        """Return the checkpoints with a weight, oldest first."""
        return [checkpoint.path for checkpoint, _ in self._terms([output])]

    def run(self, progress: Progress | None = None) -> None:
        """Write the outputs. None appears before all are complete."""
        newest, outputs = self.newest, list(self.weights)
        with ExitStack() as stack:
            targets = {output: stack.enter_context(newest.replacing(output)) for output in outputs}
            pool = self._pool(stack)
            for some in [outputs] if newest.together else [[output] for output in outputs]:
                averages = self._averages(pool, self._terms(some), progress)
                newest.write([targets[output] for output in some], averages)
            self._check_unchanged()

    def in_memory(self, progress: Progress | None = None) -> Any:
        """Return what the only output would hold, and write nothing."""
        with ExitStack() as stack:
            averages = self._averages(self._pool(stack), self._terms([*self.weights]), progress)
            state = self.newest.averaged(averages)
            self._check_unchanged()
        return state

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
        """Return the checkpoints with a weight in one of these outputs, oldest first."""
        rows = np.transpose([self.weights[output] for output in outputs]).tolist()
        return [(c, row) for c, row in zip(self._checkpoints, rows, strict=True) if any(row)]

    def _averages(
        self,
        pool: ThreadPoolExecutor,
        terms: Sequence[Term],
        progress: Progress | None,
    ) -> Averages:
        """Compute the averages for the outputs that `terms` have weights for."""
        tensors = self.newest.tensors
        largest = max((stop - start for _, start, stop in _pieces(tensors)), default=0)
        memory = _Memory(largest, len(terms[0][1]))
        submitted = (pool.submit(self._means, terms, *p, memory) for p in _pieces(tensors))
        futures = deque(islice(submitted, 1 + self.newest.threads))
        done, total = 0, sum(t.numbers * t.part.itemsize for t in tensors.values())
        for key, start, stop in _pieces(tensors):
            means = futures.popleft().result()
            futures.extend(islice(submitted, 1))
            done += (stop - start) * tensors[key].part.itemsize
            if progress is not None:
                progress(done * len(terms), total * len(terms))
            yield means

    def _means(
        self, terms: Sequence[Term], key: Hashable, start: int, stop: int, memory: _Memory
    ) -> list[Piece]:
        """Return the average of a piece for every output."""
        tensor = self.newest.tensors[key]
        piece = memory.piece[: (stop - start) * tensor.part.itemsize]
        with np.errstate(all="ignore"):  # two infinities may have NaN as their mean
            for checkpoint, row in reversed(terms):
                checkpoint.read(key, start, stop, piece)
                numbers = widened(piece.view(tensor.part))
                for mean, weight in zip(memory.means, row, strict=True):
                    if weight:
                        mean.add(piece.view(tensor.part), numbers, weight)
            return [mean.rounded(tensor.to) for mean in memory.means]


class _Memory(threading.local):
    """What a thread uses for every piece: new memory would take as long as the sums."""

    def __init__(self, size: int, outputs: int) -> None:
        self.piece = np.empty(8 * size, np.uint8)
        self.means = [Mean(size) for _ in range(outputs)]


def _opened(path: Path) -> Checkpoint:
    if (path / ".metadata").is_file():
        from tailavg.checkpoints.distributed import Distributed  # needs torch

        return Distributed(path)
    return Folder(path) if path.is_dir() else open_file(path)


def _pieces(tensors: Mapping[Hashable, Tensor]) -> Iterator[tuple[Hashable, int, int]]:
    """Cut tensors into pieces: the key of a tensor, and where a piece of it starts and stops."""
    for key, tensor in tensors.items():
        for cut in pairwise(tensor.cuts or (*range(0, tensor.numbers, PIECE), tensor.numbers)):
            yield key, *cut


@overload
def average_checkpoints(
    paths: Sequence[AnyPath],
    rule: Mapping[Path, Weighing] | Mapping[str, Weighing],
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
    rule: Weighing,
    progress: Progress | None = None,
    *,
    dtype: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    steps: Sequence[int] | None = None,
) -> dict[str, Any]: ...


def average_checkpoints(
    paths: Sequence[AnyPath],
    rule: Weighing | Mapping[Path, Weighing] | Mapping[str, Weighing],
    progress: Progress | None = None,
    *,
    dtype: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    steps: Sequence[int] | None = None,
) -> dict[str, Any] | list[list[Path]]:
    """Average checkpoints in one pass: return the average, or write one output for each rule.

    Without outputs, nothing is written, and the average is in memory as a whole. With outputs, none
    of them appears before all are complete.

    Args:
        paths: The checkpoints, oldest first: files, or folders.
        rule: How to average: 0.25 is the mean of the last quarter of the checkpoints, 10 of the
            last ten. It may be another rule, or a list with a weight for each checkpoint. To write
            outputs, pass a dict of paths, each with its rule.
        progress: Called with the number of bytes that have been read, and of all bytes.
        dtype: The dtype of the averages; by default the dtype of the checkpoints.
        include: Patterns of the tensors to average, such as `model.*`; all by default.
        exclude: Patterns of the tensors to leave as they are in the newest.
        steps: The step of each checkpoint, if windows are in steps.

    Returns:
        Without outputs, a dict of tensors by name. They are NumPy arrays for `.safetensors` (with
            the dtypes of `ml_dtypes`, such as bfloat16) and tensors of torch for
            `torch.distributed.checkpoint`. For a file of `torch.save`, it is what `torch.load`
            gives for the newest, with averaged tensors. With outputs, it is the list of the
            checkpoints that have a weight, for each output.

    Raises:
        CheckpointError: If a file cannot be read, changes meanwhile, or differs in tensors, shapes
            or dtypes.
        OSError: If a file cannot be opened or written.
    """
    in_memory = not isinstance(rule, Mapping)
    rules: Any = {"": rule} if in_memory else rule
    outputs: dict[Path, Weighing] = {Path(output): each for output, each in rules.items()}
    files = [Path(path) for path in paths]
    merge = Merge(files, outputs, dtype=dtype, include=include, exclude=exclude, steps=steps)
    if in_memory:
        state: dict[str, Any] = merge.in_memory(progress)
        return state
    merge.run(progress)
    return [merge.used(output) for output in outputs]
