"""The pass over checkpoints: numbers are read once, and added in float64.

Tensors are cut into pieces. A thread takes one, reads it from each checkpoint with a weight, the
newest first, adds it up, and rounds the sum. The averages are written in the order of the newest
checkpoint while others are computed. Memory is that of a few pieces.
"""

from __future__ import annotations

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

BLOCK = 2**17
"""How many of them it adds at once: enough that threads do not wait for Python's lock."""

THREADS = 2
"""The most threads: one computes while another reads. More would wait for Python's lock."""

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
        self._threads = newest.threads(THREADS)
        self._most = max(BLOCK, PIECE // len(outputs))

    def used(self, output: Path) -> list[Path]:
        """The checkpoints with a weight, oldest first."""
        place = list(self.outputs).index(output)
        return [checkpoint.path for checkpoint, its in self.terms if its[place]]

    @property
    def reads(self) -> int:
        """How many bytes of numbers will be read."""
        each = [np.count_nonzero(its) for its in self.shares.values()]
        passes = len(self.terms) if self.newest.together else sum(each)
        return int(passes) * self._numbers()

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
        local = threading.local()
        groups = self._groups()
        while True:
            while len(waiting) <= self._threads and (group := next(groups, None)):
                size = sum(
                    (stop - start) * self.newest.tensors[key].part.itemsize
                    for key, start, stop in group
                )
                waiting.append((size, pool.submit(self._computed, terms, group, local)))
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
        self, terms: Sequence[Term], group: list[Span], local: threading.local
    ) -> list[list[Piece]]:
        """The averages of pieces, for each output."""
        with np.errstate(all="ignore"):  # the NaN of two infinities is a result, and no mistake
            return [self._average(terms, span, local) for span in group]

    def _average(self, terms: Sequence[Term], span: Span, local: threading.local) -> list[Piece]:
        key, start, stop = span
        tensor = self.newest.tensors[key]
        shares = list(zip(*(its for _, its in terms), strict=True))
        if getattr(local, "room", 0) < stop - start:  # new memory would cost as much as the sums
            local.room = stop - start
            local.bytes = [np.empty(8 * local.room, np.uint8) for _ in range(2)]
            local.means = [_Mean(local.room) for _ in shares]
        size = (stop - start) * tensor.part.itemsize
        first, other = (memory[:size].view(tensor.part) for memory in local.bytes)
        means: list[_Mean] = local.means
        for mean, its in zip(means, shares, strict=True):
            mean.begin(first, [weight for weight in its if weight])
        wide = _Wide(tensor.part)
        for n, (checkpoint, weights_) in enumerate(terms):
            piece = other if n else first
            checkpoint.read(key, start, stop, piece.view(np.uint8))
            bits = piece.view(UINT[piece.itemsize])
            for begin in range(0, len(piece), BLOCK):
                block = slice(begin, begin + BLOCK)
                numbers = wide(piece[block])
                for mean, weight in zip(means, weights_, strict=True):
                    if weight:
                        mean.add(weight, block, bits, numbers)
        return [mean.rounded(tensor.to, wide) for mean in means]


def _cut(tensor: Tensor, most: int) -> Iterator[tuple[int, int]]:
    """Where the pieces of a tensor start and stop."""
    return pairwise(tensor.cuts or (*range(0, tensor.numbers, most), tensor.numbers))


class _Wide:
    """Numbers in a dtype that NumPy is quick to add: themselves, or in float32."""

    def __init__(self, part: np.dtype[Any]) -> None:
        self._ready = part.kind == "f"
        self._single = np.empty(0 if self._ready else BLOCK, np.float32)
        if part.itemsize == 1:
            self._table = np.arange(256, dtype=np.uint8).view(part).astype(np.float32)

    def __call__(self, block: Piece) -> Piece:
        if self._ready:
            return block
        single = self._single[: len(block)]
        if block.itemsize == 1:
            return np.take(self._table, block.view(np.uint8), out=single)
        single[...] = block
        return single


class _Mean:
    """The weighted mean of pieces, in float64, in memory that serves one piece after the other."""

    def __init__(self, room: int) -> None:
        self._sum = np.empty(room)
        self._same = np.empty(room, bool)
        self._wide = np.empty(BLOCK)
        self._equal = np.empty(BLOCK, bool)

    def begin(self, first: Piece, its: Sequence[float]) -> None:
        """Start anew, with weights for all of a piece's checkpoints; `first` is the newest."""
        self._first = first
        self._bits = first.view(UINT[first.itemsize])
        self._seen = [0] * -(-len(first) // BLOCK)
        self._alike = [True] * len(self._seen)  # whether some numbers are, so far
        # with even weights one factor at the end will do, unless sums may overflow
        even = len(set(its)) == 1 and first.itemsize < 8
        self._factor = its[0] if even else None

    def add(self, weight: float, block: slice, bits: Piece, numbers: Piece) -> None:
        """Add a block of a piece, which comes also in a dtype that is quick to add."""
        place = block.start // BLOCK
        total = self._sum[block][: len(numbers)]
        seen = self._seen[place]
        self._seen[place] += 1
        if not seen:
            total[...] = numbers
            if self._factor is None:
                total *= weight
            return
        if self._factor is None:
            wide = self._wide[: len(numbers)]
            wide[...] = numbers
            wide *= weight
            total += wide
        else:
            total += numbers
        if self._alike[place]:
            same, equal = self._same[block][: len(numbers)], self._equal[: len(numbers)]
            np.equal(bits[block], self._bits[block], out=same if seen == 1 else equal)
            if seen > 1:
                same &= equal
            self._alike[place] = bool(same.any())

    def rounded(self, to: np.dtype[Any], wide: _Wide) -> Piece:
        """The mean in a dtype; numbers whose bits never changed have them still."""
        mean = np.empty(len(self._first), to)
        unchanged = to == self._first.dtype
        for place, seen in enumerate(self._seen):
            block = slice(place * BLOCK, (place + 1) * BLOCK)
            first = self._first[block]
            if seen == 1 and unchanged:
                mean[block] = first
                continue
            total = self._sum[block][: len(first)]
            if self._factor is not None:
                total *= self._factor
            same: Any = np.True_ if seen == 1 else self._same[block][: len(first)]
            if self._alike[place] and not unchanged:
                np.copyto(total, wide(first), where=same)
            _round(total, mean[block])
            if self._alike[place] and unchanged:
                np.copyto(mean[block].view(self._bits.dtype), self._bits[block], where=same)
        return mean


def _round(numbers: Reals, out: Piece) -> None:
    """Round float64 to another dtype, once."""
    if out.dtype.kind == "f":
        out[...] = numbers
        return
    # dtypes that NumPy lacks, by way of float32
    single = numbers.astype(np.float32)
    unclear: Any = slice(None)
    if out.itemsize == 2:  # halfway between two bfloat16, or close to it
        unclear = np.flatnonzero(single.view(np.uint32) & 0xFFFF == 0x8000)
    _cut_to_odd(numbers, single, unclear)
    out[...] = single


def _cut_to_odd(numbers: Reals, single: Piece, where: Any) -> None:
    """Cut what is not exact in float32, and make it odd: it is then no tie for a coarser dtype."""
    some = single[where]
    more = (some != numbers[where]) & np.isfinite(some)
    bits = some.view(np.uint32)
    bits -= more & (np.abs(some) > np.abs(numbers[where]))
    bits |= more
    single[where] = some


def average_checkpoints(
    paths: Sequence[Path],
    outputs: Mapping[Path, Weighing],
    progress: Callable[[int, int], object] | None = None,
    *,
    dtype: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    steps: Sequence[int] | None = None,
) -> list[list[Path]]:
    """Average checkpoints in one pass, and write an output for each rule.

    No output appears before all are whole.

    Args:
        paths: The checkpoints, oldest first: files, or folders.
        outputs: What to write, each with a rule, or with a weight for each checkpoint.
        progress: Called with how many bytes have been read, and how many there are.
        dtype: As in `Plan`, and so are the others.
        include: Patterns of the tensors to average.
        exclude: Patterns of the tensors to leave as they are.
        steps: The step of each checkpoint, if windows are in steps.

    Returns:
        For each output, the checkpoints that have a weight.

    Raises:
        CheckpointError: If a file cannot be read, changes meanwhile, or differs in tensors, shapes
            or dtypes.
        OSError: If a file cannot be opened or written.
    """
    plan = Plan(paths, outputs, dtype=dtype, include=include, exclude=exclude, steps=steps)
    plan.run(progress)
    return [plan.used(output) for output in outputs]
