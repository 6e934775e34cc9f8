"""The clock: it decides at each step what an average does, and how it weighs its blocks.

This is the one mechanism of the library. A clock holds a few integers and makes every decision. A
store holds a sum and the means of blocks, and does what the clock says:

    sample ─▶ clock.prepare(store): if due, fold the sum into the newest mean, and perhaps turn
           ─▶ store: add the sample, times the clock's factor, to the sum; count it
    read   ─▶ clock.terms(): weights of the means and of the sum

To fold is to merge the sum into the newest mean. To turn is to close the open block, to drop or
merge an older block, and to open the next block. Read `Store` first, then `Clock.prepare` and
`BlockClock`.

The weights never depend on the samples, so one clock serves stores of numbers, arrays, tensors and
pytrees. `tailavg.jax.clock` has the same fields as traced values.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, Self

import numpy as np

from tailavg.core.elapsed import LONGEST, Counted, samples_since
from tailavg.core.equation import split, weights
from tailavg.core.readings import ByAge, Reading
from tailavg.core.rules import (
    AnyTail,
    AnytimeWindow,
    BlockRule,
    ExactWindow,
    Exponential,
    Rule,
    is_timed,
    window_of,
)
from tailavg.core.windows import NEVER, Fixed, Reals, Window, short_repr

__all__ = [
    "FOLD",
    "SMALLEST",
    "SUM",
    "BlockClock",
    "Clock",
    "DecayClock",
    "ElapsedClock",
    "ElapsedDecayClock",
    "SampleClock",
    "Store",
    "clock_for",
    "factors",
    "starts_at",
    "time_error",
]

FOLD = 256
"""The sum is folded into a mean after this many samples, so that float32 keeps 5 digits."""

SMALLEST = math.exp(-8.0)
"""An `Exponential` folds before its scale falls below this, so that float32 keeps 5 digits."""

SUM = -1
"""The number that stands, in place of a block, for the sum of the samples that are in no mean."""

_SHARED = 8 * FOLD  # steps whose decays are computed at once
_TURNS, _MERGES = 300, 100  # the most turns that a check of a state replays: about 1 ms


Run = tuple[int, int, int]
"""Consecutive samples that are averaged with the same blocks: see `BlockClock.runs`."""


class Store(ABC):
    """The numbers of one average: a sum, and a mean for each block, oldest first.

    A store decides nothing: `Clock.prepare` calls these two methods.
    """

    __slots__ = ()

    @abstractmethod
    def fold(self, total: float, weight: float, carry: float) -> None:
        """Fold the sum into the newest mean, and begin a new sum.

        Args:
            total: The mean of the sum is the sum divided by `total`.
            weight: The weight of the mean of the sum in the merged mean. It is 1 if the newest
                block has no mean yet.
            carry: The new sum begins with the rounding error of the merged mean times `carry`.
        """

    @abstractmethod
    def turn(self, gone: int, weight: float) -> None:
        """Open a block: append a mean without samples, and begin a new sum with 0.

        Args:
            gone: The index of the block to remove.
            weight: The weight of the removed mean when it is merged into the mean before it; 0 to
                drop it.
        """


class Clock(ABC):
    """The integers of an average: the number of samples, where blocks start, and the last fold."""

    __slots__ = ("blocks", "count", "folded", "next", "rule")

    rule: Rule
    factors: Sequence[float] = ()
    """The factors with which samples are added to the sum, from the sample at step `next` back to
    the first sample after the fold. Empty if all factors are 1."""
    count: int
    """The number of samples so far, t."""
    blocks: list[int]
    """The start of each block, oldest first. Empty blocks come first and start at 0. The list is
    never changed in place."""
    folded: int
    """The step up to which samples are in means. Later samples are in the sum."""
    next: int
    """The step after which a fold or a turn is due."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.restore(0, [], 0)

    def copy(self) -> Self:
        """Return a clock at the same step."""
        copy = object.__new__(type(self))
        for kind in type(self).__mro__[:-2]:  # but ABC and object
            for name in kind.__slots__:  # type: ignore[attr-defined]
                if hasattr(self, name):
                    setattr(copy, name, getattr(self, name))
        return copy

    @property
    def starts(self) -> list[int]:
        """The start of each block that has samples, oldest first."""
        return [start for start, end in pairwise([*self.blocks, self.count]) if start < end]

    @property
    def factor(self) -> float:
        """The factor of the next sample in the sum."""
        return 1.0

    def prepare(self, store: Store) -> None:
        """Fold the sum and turn, if that is due before the next sample."""
        if self.count >= self.next:
            if self.count > self.folded:
                store.fold(*self.fold())
            turn = self.turn()
            if turn is not None:
                store.turn(*turn)

    @abstractmethod
    def fold(self) -> tuple[float, float, float]:
        """Mark the sum as folded. Return the arguments of `Store.fold`."""

    def turn(self) -> tuple[int, float] | None:
        """Open the next block if the open block is full. Return the arguments of `Store.turn`."""
        return None

    @abstractmethod
    def terms(self, window: Reading | None = None) -> list[tuple[float, int]]:
        """Return the terms of the average: pairs of a weight and a block, or `SUM`.

        Blocks without a weight are left out, since 0 times NaN is NaN.
        """

    def restore(self, count: int, starts: Sequence[int], folded: int, *times: Any) -> None:
        """Resume from a state. Raise a ValueError, and change nothing, if the state is impossible.

        The time that this takes does not depend on `count`.
        """
        blocks = self._possible(count, list(starts), folded)
        if blocks is None:
            raise ValueError(
                f"corrupt state: {self.rule} cannot have blocks that start at {list(starts)[:20]}, "
                f"folded up to {folded}, after {count} samples"
            )
        self.resume(count, blocks, folded, *times)

    @abstractmethod
    def resume(self, count: int, blocks: list[int], folded: int, *times: Any) -> None:
        """Resume from a state that is known to be possible.

        A clock whose samples have times also needs its `times`.
        """

    @property
    def step(self) -> tuple[Any, ...]:
        """What `resume` needs to return to this step."""
        return self.count, self.blocks, self.folded

    @abstractmethod
    def _possible(self, count: int, starts: list[int], folded: int) -> list[int] | None:
        """Return the blocks with these starts, or None if they are impossible."""


class BlockClock(Clock):
    """The clock of a rule that keeps blocks."""

    __slots__ = ("closes",)

    rule: BlockRule | AnyTail
    closes: int
    """The step after which the open block takes no more samples."""

    def resume(self, count: int, blocks: list[int], folded: int, *times: Any) -> None:
        self.blocks, self.count, self.folded = blocks, count, folded
        self._schedule()

    def _possible(self, count: int, starts: list[int], folded: int) -> list[int] | None:
        blocks = [0] * (self.rule.accumulators - len(starts)) + starts
        fits = self._fit(blocks, count) and blocks[-1] <= folded <= count
        return blocks if fits else None

    def _fit(self, blocks: list[int], count: int) -> bool:
        """Return whether the rule has these blocks after `count` samples.

        If there are too many turns to replay, only necessary conditions are checked.
        """
        rule, places = self.rule, self.rule.accumulators
        if not count or len(blocks) != places:
            return not count and blocks == [0] * places
        clock = BlockClock(rule)
        if clock.advance(count, most=_MERGES if isinstance(rule, AnyTail) else _TURNS):
            return blocks == clock.blocks
        rising = blocks[0] >= 0 and all(a < b for a, b in pairwise([*blocks, count]))
        if not rising or count > rule.closes(blocks):
            return False
        if isinstance(rule, AnyTail):  # the blocks of an AnyTail cover the whole stream
            return blocks[0] == 0
        # the last block was opened when the block before it was closed
        return rule.closes([-1, *blocks[:-1]]) == blocks[-1]

    def _schedule(self) -> None:
        self.closes = self.rule.closes(self.blocks)
        self._look_ahead()

    def _look_ahead(self) -> None:
        self.next = min(self.closes, self.folded + FOLD)

    @property
    def overfull(self) -> bool:
        """Whether the sum has enough samples to be folded."""
        return self.count >= self.folded + FOLD

    def fold(self) -> tuple[float, float, float]:
        count, size, in_sum = self.count, self.count - self.blocks[-1], self.count - self.folded
        self.folded = count
        self._look_ahead()
        return in_sum, in_sum / size, size

    def turn(self) -> tuple[int, float] | None:
        if self.count < self.closes:
            return None
        turn = self._open(self.count)
        self.folded = self.count
        self._schedule()
        return turn

    def _open(self, t: int) -> tuple[int, float]:
        """Open a block at step t. Drop the oldest block; an `AnyTail` merges two blocks instead."""
        blocks, gone, weight = self.blocks, 0, 0.0
        if isinstance(self.rule, AnyTail) and blocks[0] != blocks[1]:
            gone = self.rule.merged(blocks, t)
            before, start, end = [*blocks, t][gone - 1 : gone + 2]
            weight = (end - start) / (end - before)
        self.blocks = [*blocks[:gone], *blocks[gone + 1 :], t]
        return gone, weight

    def split(self, window: Window, ahead: int = 0) -> tuple[int, int, int]:
        """Return which blocks have a weight now, or `ahead` steps later.

        Returns:
            The oldest block that has a weight (-1 if that is the open block), the step after which
            all samples have the same weight, and the first step at which the two numbers change.
        """
        return _split(self.blocks, self.count + ahead, window)

    def runs(self, end: int, window: Window) -> Iterator[tuple[list[Run], int]]:
        """Go to step `end`. Yield lists of runs of samples, and how often each list repeats.

        A run is a tuple of the number of samples, the oldest block that has a weight (see `split`),
        and the block that is removed before the run, or -1. The caller decides when to fold.

        Examples:
            >>> from tailavg import AnytimeWindow
            >>> clock = BlockClock(AnytimeWindow(4))
            >>> list(clock.runs(1000, clock.rule.window))
            [([(2, 0, -1), (1, 0, 0), (1, 1, -1), (1, 0, 0), (1, 1, -1)], 1),
             ([(1, 0, 0), (1, 1, -1)], 497)]
        """
        runs: list[Run] = []
        while self.count < end:
            gone = -1
            if self.count >= self.closes:
                if repeated := self._repeated_blocks(end, window):
                    yield from [(runs, 1), repeated] if runs else [repeated]
                    runs = []
                    continue
                gone, _ = self._open(self.count)
                self.closes = self.rule.closes(self.blocks)
            until = min(self.closes, end)
            runs += _runs(self.blocks, self.count, until, window, gone)
            self.count = until
        if runs:
            yield runs, 1

    def _repeated_blocks(self, end: int, window: Window) -> tuple[list[Run], int] | None:
        """Skip blocks that have the same runs. Return these runs, and the number of blocks.

        Return None unless two blocks of the same size come next.
        """
        (size, until), t = self.alike(), self.count
        most = min((until - t) // size + 1, (end - t) // size) if size else 0
        if most < 2:
            return None

        def runs(number: int) -> list[Run]:
            starts = [start + number * size for start in [*self.blocks[1:], t]]
            return _runs(starts, starts[-1], starts[-1] + size, window, 0)

        first = runs(0)
        # a growing window needs ever older blocks: once its runs differ, they stay different
        repeats = bisect_left(range(1, most), True, key=lambda number: runs(number) != first) + 1
        self.blocks = [start + repeats * size for start in self.blocks]
        self.closes = self.rule.closes(self.blocks)
        self.count += repeats * size
        return first, repeats

    def terms(self, window: Reading | None = None) -> list[tuple[float, int]]:
        """See `Clock`.

        Examples:
            >>> from tailavg import AnytimeWindow
            >>> clock = BlockClock(AnytimeWindow(100))
            >>> clock.restore(110, [0, 50, 100], folded=100)
            >>> [(round(weight, 6), block) for weight, block in clock.terms()]
            [(0.297086, 0), (0.585761, 1), (0.011715, -1)]
        """
        t, blocks = self.count, self.blocks
        reading = window_of(self.rule, window, t)
        if isinstance(reading, ByAge):
            return self._terms_by_age(reading)
        ends = [*blocks[1:], t]
        sizes = [end - start for start, end in zip(blocks, ends, strict=True)]
        first, each, of_old = split(sizes, reading.size(t))
        sizes[-1] -= t - self.folded  # the samples in the mean of the open block
        terms = [(of_old, first - 1)] if of_old else []
        terms += [(each * sizes[i], i) for i in range(first, len(sizes)) if sizes[i]]
        return [*terms, (each, SUM)] if t > self.folded else terms

    def _terms_by_age(self, reading: ByAge) -> list[tuple[float, int]]:
        """Return the terms of a reading that weighs blocks by age: see `terms`."""
        t, blocks, last = self.count, self.blocks, len(self.blocks) - 1
        sizes = [end - start for start, end in pairwise([*blocks, t])]
        weights = reading.read(sizes, t)
        in_sum = t - self.folded
        each = weights[last] / sizes[last]  # the weight of a sample of the open block
        weights[last] = each * (sizes[last] - in_sum)
        terms = [(weight, block) for block, weight in enumerate(weights) if weight]
        return [*terms, (each, SUM)] if in_sum and each else terms

    def alike(self) -> tuple[int, int]:
        """Return the size of the next blocks, and the last step at which such a block starts.

        Return (0, 0) if the present blocks differ in size.

        Examples:
            >>> from tailavg import AnytimeWindow
            >>> clock = BlockClock(AnytimeWindow(100))
            >>> clock.restore(170, [50, 100, 150], folded=150)
            >>> clock.alike()[0]
            50
        """
        blocks, size = self.blocks, self.closes - self.blocks[-1]
        if isinstance(self.rule, AnyTail) or any(b - a != size for a, b in pairwise(blocks)):
            return 0, 0
        return size, self.rule.alike_until(blocks, size)

    def _cycle(self) -> tuple[int, int]:
        """Return how far a round of the paper's turns moves all starts, and until which step.

        In a round, each closed block is replaced once. With the paper's turns, a growing window
        closes a block when the blocks after the oldest hold the window. For a while, that is every
        `shift` samples. Return (0, 0) for other rules.
        """
        rule, blocks = self.rule, self.blocks
        if not isinstance(rule, AnytimeWindow) or rule.turns == "balanced":
            return 0, 0
        window, shift = rule.window, rule.window.filled_at(blocks[1]) - blocks[1]
        if isinstance(window, Fixed) or blocks[0] == blocks[1] or blocks[-1] - blocks[0] != shift:
            return 0, 0
        return shift, NEVER if blocks[1] >= window.steady_from else window.filled_until(shift)

    def advance(self, t: int, most: int = NEVER) -> bool:
        """Advance to step t. Return False if that takes more than `most` turns.

        Examples:
            >>> from tailavg import AnytimeWindow
            >>> clock = BlockClock(AnytimeWindow(100))
            >>> clock.advance(10**9)
            True
            >>> clock.blocks
            [999999850, 999999900, 999999950]
        """
        while self.closes < t:
            if (most := most - 1) < 0:
                return False
            for shift, until in (self.alike(), self._cycle()):
                if shift and (turns := (min(t - 1, until + shift) - self.blocks[-1]) // shift) > 0:
                    self.blocks = [start + turns * shift for start in self.blocks]
                    break
            else:
                self._open(self.closes)
            self.closes = self.rule.closes(self.blocks)
        self.count, self.folded = t, max(self.folded, self.blocks[-1])
        self._look_ahead()
        return True


class DecayClock(Clock):
    """The clock of an `Exponential`.

    The plain recurrence, mean = g mean + w x with w = 1 - g, rounds the mean at every step. Over a
    long window, the rounding errors become larger than the terms w x. Here the mean M changes only
    when the sum is folded. After a fold at step f, samples are added to a sum, and at step t

        average = G_t (g_{f+1} M + sum),    sum = Σ w_i / G_i x_i,    G_i = g_{f+2} ⋯ g_i

    The next fold comes after a few hundred samples, or when G_t has become small. G_{f+1} is 1, so
    the first sample after a fold is never divided by a decay of 0, as of a window of one sample.
    """

    __slots__ = ("_scales", "_steady_from", "decay", "factors")

    rule: Exponential
    decay: float
    """The decay of the first sample after the fold, g_{f+1}."""
    factors: list[float]
    _scales: list[float] | Reals

    @property
    def scales(self) -> list[float]:
        """The scale G_i of each sample after the fold."""
        scales = self._scales
        if not isinstance(scales, list):  # converted at the first read after a fold
            self._scales = scales = scales.tolist()
        return scales

    def resume(self, count: int, blocks: list[int], folded: int, *times: Any) -> None:
        self.blocks, self.count, self.folded = blocks, count, folded
        self._steady_from = self.rule.window.steady_from
        self._use(self._factors(count, folded))

    def _possible(self, count: int, starts: list[int], folded: int) -> list[int] | None:
        if not (0 <= folded <= count <= folded + FOLD and starts == [0][:count]):
            return None
        return [0] if self._factors(count, folded)[2][-1] >= SMALLEST**2 else None

    def _factors(self, count: int, folded: int) -> tuple[float, Reals, Reals]:
        with np.errstate(divide="ignore"):  # in single precision a fold may come a step later
            return factors(self.rule, folded, FOLD, SMALLEST, max(1, count - folded))

    def _use(self, decay_factors_scales: tuple[float, Reals, Reals]) -> None:
        self.decay, factors, self._scales = decay_factors_scales
        self.factors = factors[::-1].tolist()
        self.next = self.folded + len(self.factors)

    @property
    def factor(self) -> float:
        return self.factors[self.next - self.count - 1]

    def fold(self) -> tuple[float, float, float]:
        of_mean, of_sum = self.weights()
        steady = self.folded >= self._steady_from
        self.folded = self.count
        if steady:  # the decay is constant, so the factors stay the same
            self.next = self.folded + len(self.factors)
        else:
            self._use(factors(self.rule, self.folded, FOLD, SMALLEST))
        return (1.0 - of_mean) / of_sum, 1.0 - of_mean, self.decay

    def weights(self) -> tuple[float, float]:
        """Return the weights of the mean and of the sum in the average."""
        if self.count == self.folded:
            return 1.0, 0.0
        scale = self.scales[self.count - self.folded - 1]
        return self.decay * scale, scale

    def terms(self, window: Reading | None = None) -> list[tuple[float, int]]:
        window_of(self.rule, window, self.count)
        of_mean, of_sum = self.weights()
        return [(weight, block) for weight, block in ((of_mean, 0), (of_sum, SUM)) if weight]


def _split(blocks: list[int], t: int, window: Window) -> tuple[int, int, int]:
    for block, start in enumerate(blocks[1:]):
        if t < (enough := window.filled_at(start)):
            return block, start, enough
    return -1, blocks[-1], NEVER


def _runs(blocks: list[int], t: int, end: int, window: Window, gone: int) -> list[Run]:
    """Return the runs from t to `end`, which lie in the open block: see `BlockClock.runs`."""
    runs = []
    while t < end:
        oldest, _, until = _split(blocks, t + 1, window)
        step = min(end, until - 1)
        runs.append((step - t, oldest, gone))
        t, gone = step, -1
    return runs


def factors(
    rule: Exponential, folded: int, most: int, smallest: float, least: int = 1
) -> tuple[float, Reals, Reals]:
    """Return g_{f+1}, the factors w_i / G_i and the scales G_i of a `DecayClock` after a fold.

    They cover the samples whose scale is at least `smallest`, but no fewer than `least` and no more
    than `most`. Once the decay is constant, they are the same after every fold.
    """
    if folded >= rule.window.steady_from:
        return _steady_factors(rule, most, smallest, least)
    return _factors(rule, folded, most, smallest, least)


@lru_cache(maxsize=8)
def _steady_factors(
    rule: Exponential, most: int, smallest: float, least: int
) -> tuple[float, Reals, Reals]:
    return _factors(rule, NEVER // 2, most, smallest, least)


def _factors(
    rule: Exponential, folded: int, most: int, smallest: float, least: int
) -> tuple[float, Reals, Reals]:
    if most > FOLD:
        decays = rule.decay(np.arange(folded + 1, folded + most + 1))
    else:  # many folds share the same decays
        first = folded % _SHARED
        decays = _decays(rule, folded - first)[first : first + most]
    scales = np.ones(most)
    np.cumprod(decays[1:], out=scales[1:])
    n = most if scales[-1] >= smallest else max(least, int((scales < smallest).argmax()))
    return float(decays[0]), (1.0 - decays[:n]) / scales[:n], scales[:n]


@lru_cache(maxsize=8)
def _decays(rule: Exponential, start: int) -> Reals:
    decays: Reals = rule.decay(np.arange(start + 1, start + _SHARED + FOLD + 1))
    return decays


class ElapsedClock(BlockClock):
    """The clock of an `AnytimeWindow` over a period of time.

    A block is closed when the next sample comes at least period / z after its first sample, where z
    is the number of closed blocks. So the closed blocks always cover the period. For each sample,
    call `arrive`, then `prepare`, then add it.
    """

    __slots__ = ("_arriving", "firsts", "lasts")

    rule: AnytimeWindow
    firsts: list[int]
    """The time of the first sample of each block. Empty blocks come first and have 0."""
    lasts: list[int]
    """The time of the last sample of each block."""

    @property
    def times(self) -> tuple[list[int], list[int]]:
        """The times that `resume` needs."""
        return self.firsts, self.lasts

    @property
    def time(self) -> int:
        """The time of the newest sample."""
        return self.lasts[-1]

    @property
    def length(self) -> int:
        """The period in nanoseconds."""
        elapsed: Any = self.rule.window
        return int(elapsed.length)

    @property
    def until(self) -> int:
        """The time from which samples do not join the open block."""
        return self.firsts[-1] - (-self.length // (len(self.firsts) - 1))

    def arrive(self, time: int) -> None:
        """Say at which time the next sample comes. Raise a ValueError if time goes back."""
        if self.count and time < self.time:
            raise time_error(time, self.time)
        self._arriving = time
        if not self.count:
            self.firsts = [*self.firsts[:-1], time]
        elif time >= self.until:
            self.closes = self.next = self.count
            return
        self.lasts = [*self.lasts[:-1], time]

    def admit(self) -> float:
        """Return the factor of the next sample, which is 1."""
        return 1.0

    def elapsed(self) -> dict[str, Any]:
        """Return the times of the blocks that have samples as plain data, for a state."""
        number = len(self.starts)
        first = len(self.blocks) - number
        return {"first": self.firsts[first:], "last": self.lasts[first:]} if number else {}

    def restore_elapsed(self, count: int, starts: list[int], folded: int, times: Any) -> None:
        """Do what `restore` does, with the times that `elapsed` returned."""
        firsts, lasts = (_times_of(times, name) for name in ("first", "last"))
        if not (len(firsts) == len(lasts) == len(starts) and self._fit_times(firsts, lasts)):
            raise ValueError(
                f"corrupt state: elapsed: expected the times of {len(starts)} blocks for "
                f"{self.rule}, got {short_repr(times)}"
            )
        empty = [0] * (len(self.blocks) - len(starts))
        self.restore(count, starts, folded, ([*empty, *firsts], [*empty, *lasts]))

    def _fit_times(self, firsts: list[int], lasts: list[int]) -> bool:
        """Return whether blocks with samples can have these times."""
        in_order = list(chain.from_iterable(zip(firsts, lasts, strict=True)))
        z, length = len(self.blocks) - 1, self.length
        return (
            in_order == sorted(in_order)
            and all((last - first) * z < length for first, last in zip(firsts, lasts, strict=True))
            and all((after - first) * z >= length for first, after in pairwise(firsts))
        )

    def _open(self, t: int) -> tuple[int, float]:
        time = self._arriving
        self.firsts, self.lasts = [*self.firsts[1:], time], [*self.lasts[1:], time]
        return super()._open(t)

    def counts(self, times: Any) -> Any:
        """Return what `samples` does at times whose samples join the open block, as an array."""
        starts = np.asarray(times) - self.length
        k: Any = np.arange(self.count + 1.0, self.count + 1.0 + len(starts)) - self.blocks[-1]
        for block, (start, end) in enumerate(pairwise(self.blocks)):
            if start < end:
                first, last = self.firsts[block], self.lasts[block]
                cut = (end - start - 1) * ((last - starts) / max(1, last - first))
                inside = np.where(first > starts, end - start, np.where(last > starts, cut, 0.0))
                k = k + inside
        return k

    def samples(self, at: int | None = None) -> Counted:
        """Return the number of samples in the period before a time, by default the newest's."""
        ends = [*self.blocks[1:], self.count]
        held = [end - start for start, end in zip(self.blocks, ends, strict=True)]
        used = held.index(next(filter(None, held), 0))  # empty blocks come first
        start = (self.time if at is None else at) - self.length
        return Counted(samples_since(start, held[used:], self.firsts[used:], self.lasts[used:]))

    def terms(self, window: Reading | None = None) -> list[tuple[float, int]]:
        if window is None:
            window = self.samples()  # type: ignore[assignment]
        return super().terms(window) if window.k else []  # type: ignore[union-attr]

    @property
    def step(self) -> tuple[Any, ...]:
        return *super().step, self.times

    def resume(self, count: int, blocks: list[int], folded: int, *times: Any) -> None:
        none = [0] * len(blocks)
        self.firsts, self.lasts = times[0] if times else (none, none)
        self._arriving = 0
        super().resume(count, blocks, folded)

    def _schedule(self) -> None:
        self.closes = NEVER
        self._look_ahead()

    def _fit(self, blocks: list[int], count: int) -> bool:
        if not count:
            return blocks == [0] * self.rule.accumulators
        return blocks[0] >= 0 and all(a < b or a == b == 0 for a, b in pairwise([*blocks, count]))


def _times_of(times: Any, name: str) -> list[int]:
    """Return a list of times from a state, or an empty list if it has none."""
    values = times.get(name) if isinstance(times, Mapping) else None
    fits = isinstance(values, list) and all(type(t) is int and abs(t) <= LONGEST for t in values)
    return values if values and fits else []


_ELAPSED = ("first", "last", "size", "decay", "scale")


class ElapsedDecayClock(DecayClock):
    """The clock of an `Exponential` over a period of time. See `ElapsedClock` for the calls.

    `size` is the effective size n. Once a period has passed since the first sample, n dt / period
    samples leave when a sample comes dt after the one before. While samples are evenly spaced, that
    is one sample, as in a window that counts samples.
    """

    __slots__ = ("_arriving", "first", "scale", "size", "time")

    first: int
    """The time of the first sample."""
    time: int
    """The time of the newest sample."""
    size: float
    scale: float
    """The product of the decays since the first sample after the last fold, G_t."""

    @property
    def times(self) -> tuple[int, int, float, float, float]:
        """What `resume` needs."""
        return self.first, self.time, self.size, self.decay, self.scale

    def arrive(self, time: int) -> None:
        """Say at which time the next sample comes. Raise a ValueError if time goes back."""
        if self.count and time < self.time:
            raise time_error(time, self.time)
        elapsed: Any = self.rule.window
        weight, decay, leaving = 1.0, 0.0, 0.0
        if self.count:
            if time - self.first >= elapsed.length:
                leaving = self.size * min(1.0, (time - self.time) / elapsed.length)
            if leaving < self.size:  # otherwise, nothing is left after a silence of a period
                weight, decay = weights(self.size, 1.0, leaving)
        self._arriving = time, 1.0 + (self.size - leaving), weight, abs(decay)
        in_sum = self.count - self.folded
        due = in_sum and (in_sum >= FOLD or self.scale * abs(decay) < SMALLEST)
        self.next = self.count if due else NEVER

    def elapsed(self) -> dict[str, Any]:
        """Return the times as plain data, for a state."""
        return dict(zip(_ELAPSED, self.times, strict=True)) if self.count else {}

    def restore_elapsed(self, count: int, starts: list[int], folded: int, times: Any) -> None:
        """Do what `restore` does, with the times that `elapsed` returned."""
        if not count and times == {}:
            self.restore(count, starts, folded)
            return
        values: list[Any] = (
            [times.get(name) for name in _ELAPSED] if isinstance(times, Mapping) else []
        )
        kinds = [type(value) for value in values]
        fits = kinds == [int, int, float, float, float]
        fits = fits and -LONGEST <= values[0] <= values[1] <= LONGEST and 1.0 <= values[2] <= count
        if not (fits and 0.0 <= values[3] <= 1.0 and 0.0 < values[4] <= 1.0):
            raise ValueError(
                f"corrupt state: elapsed: expected {', '.join(_ELAPSED)}, got {short_repr(times)}"
            )
        self.restore(count, starts, folded, tuple(values))

    def admit(self) -> float:
        """Take the sample that arrives, after `prepare`. Return its factor in the sum."""
        time, self.size, weight, decay = self._arriving
        self.first = self.first if self.count else time
        self.time = time
        if self.count == self.folded:
            self.decay, self.scale = decay, 1.0
        else:
            self.scale *= decay
        return weight / self.scale

    def samples(self, at: int | None = None) -> Counted:
        """Return the effective size, or 0 a period after the newest sample."""
        elapsed: Any = self.rule.window
        return Counted(0.0 if at is not None and at - self.time >= elapsed.length else self.size)

    def fold(self) -> tuple[float, float, float]:
        of_mean, of_sum = self.weights()
        self.folded = self.count
        return (1.0 - of_mean) / of_sum, 1.0 - of_mean, self._arriving[3]

    def weights(self) -> tuple[float, float]:
        if self.count == self.folded:
            return 1.0, 0.0
        return self.decay * self.scale, self.scale

    def terms(self, window: Reading | None = None) -> list[tuple[float, int]]:
        of_mean, of_sum = self.weights()
        terms = [(weight, block) for weight, block in ((of_mean, 0), (of_sum, SUM)) if weight]
        return [] if window is not None and not window.k else terms  # type: ignore[union-attr]

    @property
    def step(self) -> tuple[Any, ...]:
        return *super().step, self.times

    def resume(self, count: int, blocks: list[int], folded: int, *times: Any) -> None:
        none = 0, 0, 0.0, 0.0, 1.0
        self.blocks, self.count, self.folded, self.next = blocks, count, folded, NEVER
        self.factors = []
        self._arriving = 0, 0.0, 0.0, 0.0
        self.first, self.time, self.size, self.decay, self.scale = times[0] if times else none

    def _possible(self, count: int, starts: list[int], folded: int) -> list[int] | None:
        return [0] if 0 <= folded <= count and starts == [0][:count] else None


def time_error(time: int, before: int) -> ValueError:
    """Return the error for a time before that of the sample before."""
    back = (before - time) / 1e9
    return ValueError(
        f"t: expected times that do not go back, got one {back:.9g} s before the last; sort the "
        "samples by time"
    )


class SampleClock(Clock):
    """The clock of an `ExactWindow`: each sample is a block; there are no folds and no turns."""

    __slots__ = ()

    rule: ExactWindow

    @property
    def kept(self) -> int:
        """The number of samples in the average."""
        return int(self.rule.samples(self.count))

    @property
    def starts(self) -> list[int]:
        return list(range(self.count - self.kept, self.count))

    def fold(self) -> tuple[float, float, float]:
        return 1.0, 1.0, 0.0

    def terms(self, window: Reading | None = None) -> list[tuple[float, int]]:
        window_of(self.rule, window, self.count)
        return [(1.0 / self.kept, block) for block in range(self.kept)]

    def resume(self, count: int, blocks: list[int], folded: int, *times: Any) -> None:
        self.blocks, self.count, self.folded, self.next = blocks, count, count, NEVER

    def _possible(self, count: int, starts: list[int], folded: int) -> list[int] | None:
        kept = int(self.rule.samples(count))
        fits = folded == count and len(starts) == kept
        return [] if fits and starts == list(range(count - kept, count)) else None


def clock_for(rule: Rule) -> Clock:
    """Return a new clock for a rule."""
    if is_timed(rule):
        timed: Any = ElapsedDecayClock if isinstance(rule, Exponential) else ElapsedClock
        return timed(rule)  # type: ignore[no-any-return]
    if isinstance(rule, Exponential):
        return DecayClock(rule)
    return SampleClock(rule) if isinstance(rule, ExactWindow) else BlockClock(rule)


def starts_at(rule: Rule, t: int) -> list[int]:
    """Return the start of each block of a rule after t samples, oldest first.

    Examples:
        >>> from tailavg import AnytimeWindow
        >>> starts_at(AnytimeWindow(0.25), 1000)
        [685, 791, 914]
    """
    clock = clock_for(rule)
    if is_timed(rule):
        raise TypeError(f"rule: the blocks of {rule} depend on the times of samples")
    if isinstance(clock, BlockClock):
        clock.advance(t)
    clock.count = t
    return clock.starts
