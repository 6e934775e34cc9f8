"""`Packed`: what many averages of one rule hold, side by side in arrays.

What happens at a step depends on its number alone, so all averages of a rule share one plan, and a
compiled loop goes through all of them. An average of three accumulators takes some hundred bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from tailavg.core.clock import BlockClock, Clock, clock_for
from tailavg.core.decay import Reading
from tailavg.core.rules import AnyTail, ExactWindow, Exponential, Rule, window_of
from tailavg.core.windows import Window
from tailavg.numpy.arithmetic import Array
from tailavg.numpy.average import TailAverage
from tailavg.numpy.loops import described

__all__ = ["Packed", "follow", "fresh", "record"]

LONGEST = 1 << 20
"""The steps of a shared plan; an average with more samples than that has its own."""

_PARTS = ("means", "sizes", "sums", "rests", "counts")


class Packed:
    """What averages of numbers hold, as arrays with an entry for each: see `tailavg.numpy.loops`.

    Args:
        rule: The rule of all averages. One that keeps samples (`ExactWindow`) cannot be packed.
        number: How many averages there are, all without samples.

    Examples:
        >>> from tailavg import AnytimeWindow
        >>> packed = Packed(AnytimeWindow(2), 2)
        >>> packed.scan(np.array([1.0, 3.0, 5.0, 10.0]), np.array([0, 3, 4]))
        array([[ 1.,  2.,  4., 10.]])
        >>> packed.average(0).count
        3
    """

    means: Array
    """The means of the blocks of each average, oldest first."""
    sizes: Array
    """How many samples each block has; of an `Exponential` this says nothing."""
    sums: Array
    rests: Array
    """How many samples are in each sum."""
    counts: Array

    def __init__(self, rule: Rule, number: int = 0) -> None:
        blocks = len(clock_for(rule).blocks)
        self.rule = rule
        self._empty = TailAverage(rule, dtype=np.float64)
        self.means = np.zeros((number, blocks, 1))
        self.sizes = np.zeros((number, blocks), np.int64)
        self.sums = np.zeros((number, 1))
        self.rests, self.counts = np.zeros(number, np.int64), np.zeros(number, np.int64)

    @staticmethod
    def holds(rule: Rule) -> bool:
        """Whether averages of a rule can be packed: those that keep no samples."""
        return not isinstance(rule, ExactWindow)

    @classmethod
    def of(cls, rule: Rule, averages: Sequence[TailAverage | None]) -> Packed:
        """What these averages hold; None is one without samples."""
        packed = cls(rule, len(averages))
        for i, average in enumerate(averages):
            if average is not None and average.count:
                packed.hold(i, average)
        return packed

    def __len__(self) -> int:
        return len(self.counts)

    def take(self, which: Array) -> Packed:
        """A copy of these averages."""
        taken = Packed(self.rule)
        for part in _PARTS:
            setattr(taken, part, getattr(self, part)[which])
        return taken

    def put(self, which: Array, other: Packed) -> None:
        """Let these averages hold what others hold."""
        for part in _PARTS:
            getattr(self, part)[which] = getattr(other, part)

    def grow(self, number: int) -> None:
        """Make room for more averages."""
        for part in _PARTS:
            held = getattr(self, part)
            larger = np.zeros((number, *held.shape[1:]), held.dtype)
            larger[: len(held)] = held
            setattr(self, part, larger)

    def starts(self) -> Array:
        """The start of each block of each average, empty ones first."""
        if isinstance(self.rule, Exponential):
            return np.zeros_like(self.sizes)
        since: Array = np.cumsum(self.sizes[:, ::-1], axis=1)[:, ::-1]
        return self.counts[:, None] - since

    def average(self, i: int) -> TailAverage:
        """One of the averages, to go its own way."""
        (average,) = self.averages(np.array([i]))
        return average

    def averages(self, which: Array, into: Sequence[TailAverage] = ()) -> list[TailAverage]:
        """Some of the averages: new ones, or those given, which are changed."""
        own = self.take(which)
        steps = zip(
            own.counts.tolist(),
            own.starts().tolist(),
            (own.counts - own.rests).tolist(),
            own.means[:, :, 0].tolist(),
            own.sums[:, 0].tolist(),
            strict=True,
        )
        found: list[Any] = list(into) or [fresh(self._empty) for _ in which]
        known: dict[Any, Clock] = {}  # the blocks follow from the count
        for average, (count, blocks, folded, means, total) in zip(found, steps, strict=True):
            if not count:
                continue
            if not average.count:
                average._begin(None, average._dtype)
            average._left = None
            average._means, average._sum = means, total
            if like := known.get((count, folded)):
                follow(average._clock, like)
            else:
                average._clock.resume(count, blocks, folded)
                known[count, folded] = average._clock
            average._commit()
        return found

    def hold(self, i: int, average: Any) -> None:
        """Hold what an average holds, one that has samples."""
        clock = average._now
        self.means[i, :, 0], self.sums[i] = average._means, average._sum
        self.counts[i], self.rests[i] = clock.count, clock.count - clock.folded
        self.sizes[i] = [b - a for a, b in pairwise([*clock.blocks, clock.count])]

    def scan(
        self,
        xs: Array,
        starts: Array,
        windows: Sequence[Reading | None] = (None,),
        compiled: SimpleNamespace | None = None,
    ) -> Array:
        """Take samples, and return the averages after each, for each of several windows.

        With the same bits, whether by compiled loops or one by one.

        Args:
            xs: Samples in float64; those of an average stand together, in their order.
            starts: Where those of each average begin, and where the last ones end.
            windows: What to read, if the rule is an `AnyTail`.
            compiled: The loops of `tailavg.numpy.loops`, compiled.
        """
        out = np.empty((len(windows), len(xs)))
        before = self.take(np.arange(len(self))) if len(windows) > 1 else self
        for i, (window, averages) in enumerate(zip(windows, out, strict=True)):
            if i:
                self.put(np.arange(len(self)), before)
            self._scan(compiled, xs, averages, starts, window)
        return out

    def _scan(
        self,
        compiled: SimpleNamespace | None,
        xs: Array,
        out: Array,
        starts: Array,
        window: Reading | None,
    ) -> None:
        sizes, rule = np.diff(starts), self.rule
        ends, left = self.counts + sizes, np.flatnonzero(sizes)
        if compiled is not None and isinstance(rule, Exponential):
            own = rule.window
            state = self.means, self.sums, self.rests, self.counts
            compiled.scan_decaying_groups(xs, out, starts, *state, own.steady_from, described(own))
            left = left[:0]
        elif compiled is not None and len(short := left[ends[left] <= LONGEST]):
            asked: Any = None
            for step in np.unique(ends[left] if isinstance(rule, AnyTail) else ends[left[:1]]):
                asked = window_of(rule, window, int(step))
            plan, untils = _plan(rule, asked, 1 << (int(ends[short].max()) - 1).bit_length())
            held = self.means, self.sizes, self.sums, self.rests, self.counts
            compiled.scan_groups(xs, out, starts, *held, plan, untils, described(asked))
            left = left[ends[left] > untils[-1]]
        self.counts = np.where(np.isin(np.arange(len(ends)), left), self.counts, ends)
        for i in left.tolist():
            average, its = self.average(i), slice(starts[i], starts[i + 1])
            if compiled is not None:
                out[its] = average.scan(xs[its], window)
            else:
                for at, x in enumerate(xs[its].tolist(), starts[i]):
                    average.update(x)
                    out[at] = average.value(window)
            self.hold(i, average)

    def records(self) -> Array:
        """All averages as an array of records: see `record`."""
        found = np.zeros(len(self), record(self.rule))
        found["count"], found["folded"] = self.counts, self.counts - self.rests
        found["starts"], found["blocks"] = self.starts(), self.means[:, :, 0]
        found["partial"] = self.sums[:, 0]
        return found

    @classmethod
    def from_records(cls, rule: Rule, records: Array) -> Packed:
        """The averages that `records` gave."""
        packed = cls(rule, len(records))
        packed.counts[:] = records["count"]
        packed.rests[:] = packed.counts - records["folded"]
        packed.sizes[:] = np.diff(records["starts"], append=packed.counts[:, None], axis=1)
        packed.means[:, :, 0], packed.sums[:, 0] = records["blocks"], records["partial"]
        return packed


def record(rule: Rule) -> np.dtype[Any]:
    """The state of an average of numbers as bytes, least significant first.

    Its fields are those of `tailavg.core.state`; a block that is empty starts at 0.

    Examples:
        >>> from tailavg import AnytimeWindow
        >>> record(AnytimeWindow(0.25)).itemsize
        72
    """
    blocks = len(clock_for(rule).blocks)
    return np.dtype(
        [
            ("count", "<i8"),
            ("folded", "<i8"),
            ("starts", "<i8", (blocks,)),
            ("blocks", "<f8", (blocks,)),
            ("partial", "<f8"),
        ]
    )


@lru_cache(maxsize=16)
def _plan(rule: Rule, window: Window, end: int) -> tuple[Array, Array]:
    """The runs of `BlockClock.runs` from the first step on, and the steps at which they end."""
    clock = clock_for(rule)
    assert isinstance(clock, BlockClock)
    parts = [np.tile(runs, (repeats, 1)) for runs, repeats in clock.runs(end, window)]
    plan = np.concatenate(parts)
    return plan, np.cumsum(plan[:, 0])


def fresh(empty: TailAverage) -> TailAverage:
    """A copy of an average without samples; to make one anew takes ten times as long."""
    average = TailAverage.__new__(TailAverage)
    for name in ("_dtype", "_due", "_left", "_nan_policy", "_shape"):
        setattr(average, name, getattr(empty, name))
    average._clock = clock = object.__new__(type(empty._clock))
    clock.rule = empty.rule
    follow(clock, empty._clock)
    return average


def follow(clock: Clock, like: Clock) -> None:
    """Let a clock be where another is, of the same rule, without finding out what is next."""
    for name in ("blocks", "count", "folded", "next", *type(clock).__slots__):
        setattr(clock, name, getattr(like, name))
