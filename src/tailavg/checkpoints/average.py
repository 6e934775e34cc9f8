"""The pass over checkpoints: numbers are read once, and added in float64.

Tensors are cut into pieces. A thread takes one, reads it from each checkpoint with a weight, the
newest first, adds it up, and rounds the sum. The averages are written in the order of the newest
checkpoint while others are computed. Memory is that of a few pieces.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tailavg.checkpoints.kinds import opened
from tailavg.checkpoints.tensors import Checkpoint, Piece, Tensor
from tailavg.checkpoints.weights import Weighing, weights
from tailavg.core.windows import Reals

__all__ = ["Plan", "average_checkpoints"]

Span = tuple[Hashable, int, int]
Term = tuple[Checkpoint, Sequence[float]]

PIECE = 2**18
"""How many numbers a thread reads at once, for all outputs together."""

BLOCK = 2**15
"""How many of them it adds at once: few enough for the cache."""

THREADS = 4
"""The most threads: more would wait for memory."""

UINT = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


class Plan:
    """What to average: which checkpoints, with which weights.

    Args:
        paths: The checkpoints, oldest first: files, or folders.
        outputs: What to write, each with a rule, or with a weight for each checkpoint.
        dtype: The dtype of the averages; that of the checkpoints by default.
        include: Patterns of the tensors to average, such as `model.*`; all by default.
        exclude: Patterns of the tensors to leave as they are in the newest.
        steps: The step of each checkpoint, if windows are in steps.

    Raises:
        CheckpointError: If a file cannot be read, or differs in tensors, shapes or dtypes.
        OSError: If a file cannot be opened.
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
        self.outputs = outputs
        checkpoints = [opened(path) for path in paths]
        self.newest = newest = checkpoints[-1]
        newest.choose(include, exclude, dtype)
        for checkpoint in checkpoints[:-1]:
            checkpoint.check_like(newest)
        self.shares: dict[Path, Reals] = {
            output: weights(rule, len(paths), steps) for output, rule in outputs.items()
        }
        every = np.transpose(list(self.shares.values())).tolist()
        self.terms = [
            (checkpoint, its)
            for checkpoint, its in zip(checkpoints, every, strict=True)
            if any(its)
        ]
        self._threads = newest.threads(max(1, min(THREADS, os.cpu_count() or 1)))
        self._most = max(BLOCK, PIECE // len(outputs))

    def used(self, output: Path) -> list[Path]:
        """The checkpoints with a weight, oldest first."""
        place = list(self.outputs).index(output)
        return [checkpoint.path for checkpoint, its in self.terms if its[place]]

    @property
    def reads(self) -> int:
        """How many bytes of numbers will be read."""
        return len(self.terms) * self._numbers()

    @property
    def writes(self) -> int:
        """How many bytes will be written, to all outputs."""
        return self.newest.sizes()[0] * len(self.outputs)

    @property
    def holds(self) -> int:
        """How many bytes of numbers will be in memory at most."""
        tensors = self.newest.tensors.values()
        piece = max((b - a for t in tensors for a, b in _cut(t, self._most)), default=0)
        one = piece * (2 * 8 + len(self.outputs) * (8 + 1) + 8 * len(self.outputs))
        waiting = piece * 8 * len(self.outputs)
        return self._threads * one + waiting + self.newest.sizes()[1] * len(self.outputs)

    def _numbers(self) -> int:
        return sum(t.numbers * t.part.itemsize for t in self.newest.tensors.values())

    def run(self, progress: Callable[[int, int], object] | None = None) -> None:
        """Write the outputs. None appears before all are whole.

        Args:
            progress: Called with how many bytes have been read, and how many there are.

        Raises:
            CheckpointError: If a file changes meanwhile.
            OSError: If a file cannot be opened or written.
        """
        newest = self.newest
        with ExitStack() as stack:
            targets = [stack.enter_context(newest.whole(output)) for output in self.outputs]
            pool = ThreadPoolExecutor(self._threads)
            stack.callback(pool.shutdown, cancel_futures=True)
            every = range(len(targets))
            for places in [every] if newest.together else [[place] for place in every]:
                averages = self._averages(pool, progress, places)
                newest.write([targets[place] for place in places], averages)
            for checkpoint in [newest, *(one for one, _ in self.terms)]:
                checkpoint.check_unchanged()

    def _averages(
        self,
        pool: ThreadPoolExecutor,
        progress: Callable[[int, int], object] | None,
        places: Sequence[int],
    ) -> Iterator[Sequence[Piece]]:
        """The averages for some of the outputs."""
        terms = [(one, [its[place] for place in places]) for one, its in reversed(self.terms)]
        terms = [(one, its) for one, its in terms if any(its)]
        done, total = 0, len(terms) * self._numbers()
        waiting: deque[tuple[int, Future[list[list[Piece]]]]] = deque()
        scratch = threading.local()
        groups = self._groups()
        while True:
            while len(waiting) <= self._threads and (group := next(groups, None)):
                size = sum(
                    (stop - start) * self.newest.tensors[key].part.itemsize
                    for key, start, stop in group
                )
                waiting.append((size, pool.submit(self._computed, terms, group, scratch)))
            if not waiting:
                return
            size, future = waiting.popleft()
            found = future.result()
            done += size * len(terms)
            if progress is not None:
                progress(done, total)
            yield from found

    def _groups(self) -> Iterator[list[Span]]:
        """Cut tensors into pieces (key, start, stop), and put small ones together."""
        group: list[Span] = []
        held = 0
        for key, tensor in self.newest.tensors.items():
            for start, stop in _cut(tensor, self._most):
                if group and held + stop - start > self._most:
                    yield group
                    group, held = [], 0
                group.append((key, start, stop))
                held += stop - start
        if group:
            yield group

    def _computed(
        self, terms: Sequence[Term], group: list[Span], scratch: threading.local
    ) -> list[list[Piece]]:
        """The averages of pieces, for each output."""
        with np.errstate(all="ignore"):  # the NaN of two infinities is a result, and no mistake
            return [self._average(terms, span, scratch) for span in group]

    def _average(self, terms: Sequence[Term], span: Span, scratch: threading.local) -> list[Piece]:
        key, start, stop = span
        tensor = self.newest.tensors[key]
        size = (stop - start) * tensor.part.itemsize
        if getattr(scratch, "size", 0) < size:
            scratch.size = size
            scratch.bytes = np.empty(size, np.uint8), np.empty(size, np.uint8)
        first = scratch.bytes[0][:size].view(tensor.part)
        other = scratch.bytes[1][:size].view(tensor.part)
        means = [
            _Mean(first, [weight for weight in its if weight])
            for its in zip(*(its for _, its in terms), strict=True)
        ]
        wide = _Wide(tensor.part)
        for n, (checkpoint, its) in enumerate(terms):
            piece = other if n else first
            checkpoint.read(key, start, stop, piece.view(np.uint8))
            for begin in range(0, len(piece), BLOCK):
                block = slice(begin, begin + BLOCK)
                numbers = wide(piece[block])
                for mean, weight in zip(means, its, strict=True):
                    if weight:
                        mean.add(weight, block, piece, numbers)
        return [mean.rounded(tensor.to, wide) for mean in means]


def _cut(tensor: Tensor, most: int) -> Iterator[tuple[int, int]]:
    """Where the pieces of a tensor start and stop."""
    return pairwise(tensor.cuts or (*range(0, tensor.numbers, most), tensor.numbers))


class _Wide:
    """Numbers in a dtype that NumPy is quick to add: themselves, or in float32."""

    def __init__(self, part: np.dtype[Any]) -> None:
        self._part = part
        self._bits = UINT[part.itemsize]
        if part.name == "bfloat16" or part.itemsize == 1:
            self._buffer = np.empty(BLOCK, np.float32)
        if part.itemsize == 1:
            self._table = np.arange(256, dtype=np.uint8).view(part).astype(np.float32)

    def __call__(self, block: Piece) -> Piece:
        if self._part.itemsize == 1:
            return np.take(self._table, block.view(np.uint8), out=self._buffer[: len(block)])
        if self._part.name != "bfloat16":
            return block
        # a bfloat16 is the upper half of a float32
        buffer = self._buffer[: len(block)]
        bits = buffer.view(np.uint32)
        bits[...] = block.view(np.uint16)
        np.left_shift(bits, 16, out=bits)
        return buffer


class _Mean:
    """The weighted mean of pieces, in float64."""

    def __init__(self, first: Piece, its: Sequence[float]) -> None:
        self._first = first
        self._bits = first.view(UINT[first.dtype.itemsize])
        self._sum = np.empty(len(first))
        self._same = np.empty(len(first), bool)
        self._alike = [True] * -(-len(first) // BLOCK)
        self._seen = [0] * len(self._alike)
        # with even weights one factor at the end will do, unless sums may overflow
        even = len(set(its)) == 1 and first.dtype != np.float64
        self._factor = its[0] if even else None

    def add(self, weight: float, block: slice, piece: Piece, numbers: Piece) -> None:
        """Add a block of a piece, which comes also in a dtype that is quick to add."""
        place = block.start // BLOCK
        total = self._sum[block]
        seen = self._seen[place]
        self._seen[place] += 1
        if not seen:
            total[...] = numbers
            if self._factor is None:
                total *= weight
            return
        if self._factor is None:
            wide = numbers.astype(np.float64)
            wide *= weight
            total += wide
        else:
            total += numbers
        if self._alike[place]:
            same = self._same[block]
            bits = piece[block].view(self._bits.dtype)
            if seen == 1:
                np.equal(bits, self._bits[block], out=same)
            else:
                same &= bits == self._bits[block]
            self._alike[place] = bool(same.any())

    def rounded(self, to: np.dtype[Any], wide: _Wide) -> Piece:
        """The mean in a dtype; numbers whose bits never changed have them still."""
        mean = np.empty(len(self._first), to)
        for place, seen in enumerate(self._seen):
            block = slice(place * BLOCK, (place + 1) * BLOCK)
            first = self._first[block]
            if seen == 1 and to == first.dtype:
                mean[block] = first
                continue
            total = self._sum[block]
            if self._factor is not None and seen > 1:
                total *= self._factor
            same: Any = np.True_ if seen == 1 else self._same[block]
            if to == first.dtype:
                _round(total, mean[block])
                if self._alike[place]:
                    bits = mean[block].view(self._bits.dtype)
                    np.copyto(bits, self._bits[block], where=same)
            else:
                if self._alike[place]:
                    np.copyto(total, wide(first), where=same)
                _round(total, mean[block])
        return mean


def _round(numbers: Reals, out: Piece) -> None:
    """Round float64 to another dtype, once."""
    if out.dtype.kind == "f":
        out[...] = numbers
        return
    # dtypes that NumPy lacks, by way of float32, whose last bit then tells that there was more
    single = numbers.astype(np.float32)
    if out.itemsize == 1:
        _tell(numbers, single)
        out[...] = single
        return
    bits = single.view(np.uint32)
    unclear = (bits & 0xFFFF) == 0x8000  # halfway between two bfloat16
    if unclear.any():
        some = single[unclear]
        _tell(numbers[unclear], some)
        single[unclear] = some
    nan = np.isnan(single)
    bits += 0x7FFF + ((bits >> 16) & 1)
    np.right_shift(bits, 16, out=bits)
    out.view(np.uint16)[...] = bits
    if nan.any():
        out.view(np.uint16)[nan] = 0x7FC0


def _tell(numbers: Reals, single: Piece) -> None:
    """Round to odd: what is not exact is cut, and gets an odd last bit."""
    more = (single != numbers) & np.isfinite(single)
    bits = single.view(np.uint32)
    bits -= more & (np.abs(single) > np.abs(numbers))
    bits |= more


def average_checkpoints(
    paths: Sequence[Path],
    outputs: Mapping[Path, Weighing],
    progress: Callable[[int, int], object] | None = None,
    **options: Any,
) -> list[list[Path]]:
    """Average checkpoints in one pass, and write an output for each rule.

    No output appears before all are whole.

    Args:
        paths: The checkpoints, oldest first: files, or folders.
        outputs: What to write, each with a rule, or with a weight for each checkpoint.
        progress: Called with how many bytes have been read, and how many there are.
        **options: Those of `Plan`: `dtype`, `include`, `exclude`, `steps`.

    Returns:
        For each output, the checkpoints that have a weight.

    Raises:
        CheckpointError: If a file cannot be read, changes meanwhile, or differs in tensors, shapes
            or dtypes.
        OSError: If a file cannot be opened or written.
    """
    plan = Plan(paths, outputs, **options)
    plan.run(progress)
    return [plan.used(output) for output in outputs]
