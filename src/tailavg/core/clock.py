"""The clock: what is to be done at each step of an average, and what the average is made of.

This is the one mechanism of the library. A clock holds a few integers and makes every decision; a
store holds a sum and the means of blocks, and does as it is told:

    sample ─▶ clock.prepare(store): if due, fold the sum into the newest mean, and perhaps turn
           ─▶ store: add the sample, times the clock's factor, to the sum; count it
    read   ─▶ clock.terms(): weights, and the means that they are of

The weights never depend on the samples, so stores of numbers, arrays, tensors and pytrees all
follow it. JAX holds the same fields traced, in `tailavg.jax.clock`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tailavg.core.equation import join
from tailavg.core.rules import (
    AnyTail,
    BlockRule,
    ExactWindow,
    Exponential,
    Rule,
    window_of,
)
from tailavg.core.windows import NEVER, AnyWindow, Window

__all__ = [
    "FOLD",
    "SMALLEST",
    "SUM",
    "BlockClock",
    "Clock",
    "DecayClock",
    "Factors",
    "FoldingClock",
    "SampleClock",
    "Store",
    "clock_for",
    "factors",
    "folding_clock_for",
    "starts_at",
]

FOLD = 256
"""How many samples are summed before the sum is folded into a mean: a float32 keeps 5 digits."""

SMALLEST = 2.0**-11
"""How far an `Exponential` may decay before its sum is folded: float32 keeps its digits."""

_REPLAYED = 1000  # blocks: they take a millisecond

SUM = -1
"""Stands for the sum of the samples that are in no mean yet, in place of a block."""


class Store(ABC):
    """What holds the samples of one average: a sum, and a mean for each block, oldest first.

    A store decides nothing: `FoldingClock.prepare` calls these two.
    """

    __slots__ = ()

    @abstractmethod
    def fold(self, total: float, weight: float, carry: float) -> None:
        """Fold the sum into the newest mean, and begin it anew.

        Args:
            total: What makes the sum a mean, divided by this: its number of samples, or the sum of
                their factors.
            weight: The weight of that in the joint mean; 1 if nothing was folded before.
            carry: What the joint mean rounds off begins the next sum, multiplied by this.
        """

    @abstractmethod
    def turn(self, gone: int, weight: float) -> None:
        """Open a block: its mean comes last, and the sum is 0.

        Args:
            gone: The block that makes room.
            weight: The weight of its mean in that of the block before, with which it is merged; 0
                if it is given up.
        """


class Clock(ABC):
    """The scalar state of an average: how many samples, and in which blocks."""

    __slots__ = ("count", "rule")

    rule: Rule
    count: int
    """The number of samples so far, t."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.restore(0, [], 0)

    @property
    @abstractmethod
    def starts(self) -> list[int]:
        """The start of each block that has samples, oldest first."""

    @abstractmethod
    def terms(self, window: AnyWindow | None = None) -> list[tuple[float, int]]:
        """The average now: weights, and the blocks whose means they are of, or `SUM`.

        What has no weight is left out: a zero times a NaN would be a NaN.
        """

    @abstractmethod
    def restore(self, count: int, starts: Sequence[int], folded: int) -> None:
        """Go on from there. A ValueError, and no change, if the rule cannot come there.

        The time it takes does not depend on `count`.
        """

    def _refuse(self, count: int, starts: Sequence[int], folded: int) -> ValueError:
        return ValueError(
            f"state: sizes do not add up: {self.rule} cannot have blocks that start at "
            f"{list(starts)}, folded up to {folded}, after {count} samples"
        )


class FoldingClock(Clock):
    """The clock of an average that holds a sum and means, and so has something to do."""

    __slots__ = ("blocks", "folded", "next")

    blocks: list[int]
    """The start of each block, oldest first; empty ones come before them, and start at 0."""
    folded: int
    """The step up to which the samples are in means."""
    next: int
    """The step after which something is due."""

    @property
    def starts(self) -> list[int]:
        return [start for start, end in pairwise([*self.blocks, self.count]) if start < end]

    def prepare(self, store: Store) -> None:
        """Do what is due before the next sample."""
        if self.count >= self.next:
            if self.count > self.folded:
                store.fold(*self.fold())
            turn = self.turn()
            if turn is not None:
                store.turn(*turn)

    @property
    @abstractmethod
    def factor(self) -> float:
        """What the next sample is multiplied by in the sum."""

    @abstractmethod
    def fold(self) -> tuple[float, float, float]:
        """Count the sum as folded, and say how: see `Store.fold`."""

    @abstractmethod
    def turn(self) -> tuple[int, float] | None:
        """If the open block is closed: open the next, and say how: see `Store.turn`."""


class BlockClock(FoldingClock):
    """The clock of a rule that keeps blocks."""

    __slots__ = ("closes",)

    factor = 1.0
    rule: BlockRule | AnyTail
    closes: int
    """The step after which the open block takes no more samples."""

    def restore(self, count: int, starts: Sequence[int], folded: int) -> None:
        blocks = [0] * (self.rule.accumulators - len(starts)) + list(starts)
        replayed = self._replayed(count)
        possible = self._possible(blocks, count) if replayed is None else blocks == replayed
        if not (possible and blocks[-1] <= folded <= count):
            raise self._refuse(count, starts, folded)
        self.blocks, self.count, self.folded = blocks, count, folded
        self._schedule()

    def _replayed(self, count: int) -> list[int] | None:
        """The blocks after so many samples, if a few turns tell; otherwise None."""
        places = self.rule.accumulators
        if not count:
            return [0] * places
        clock = BlockClock(self.rule)
        return clock.blocks if clock.advance(count, most=_REPLAYED // places) else None

    def _possible(self, blocks: list[int], count: int) -> bool:
        """Whether these can be the blocks after so many samples."""
        rule, places = self.rule, self.rule.accumulators
        if not count or len(blocks) != places:
            return not count and blocks == [0] * places
        begun = blocks.count(0) - 1 if blocks[0] == 0 else 0  # the place of the oldest
        rising = all(a < b for a, b in pairwise([*blocks[begun:], count]))
        if not rising or not blocks[-1] < count <= rule.closes(blocks):
            return False
        if isinstance(rule, AnyTail):
            return blocks[0] == 0  # no closed form says which ones were merged
        for place in range(begun + 1, places):
            # each was opened when the one before it was closed, which also depends on one that is
            # gone: the last but one that was given up, if that happened after this was opened
            known, unknown = blocks[:place], places - place
            earliest = rule.closes([0] * unknown + known)
            latest = rule.closes([-1] + [blocks[0] - 1] * (unknown - 1) + known)
            if blocks[0] == 0:
                latest = earliest
            elif unknown == 1:
                earliest = latest
            if not earliest <= blocks[place] <= latest:
                return False
        return True

    def _schedule(self) -> None:
        self.closes = self.rule.closes(self.blocks)
        self.next = min(self.closes, self.folded + FOLD)

    @property
    def overfull(self) -> bool:
        """Whether so many samples are in the sum that it should be folded now."""
        return self.count >= self.folded + FOLD

    def fold(self) -> tuple[float, float, float]:
        count, start, folded = self.count, self.blocks[-1], self.folded
        self.folded = count
        self.next = min(self.closes, count + FOLD)
        return count - folded, (count - folded) / (count - start), count - start

    def turn(self) -> tuple[int, float] | None:
        t = self.count
        if t < self.closes:
            return None
        turn = self._open(t)
        self.folded = t
        self._schedule()
        return turn

    def _open(self, t: int) -> tuple[int, float]:
        """Open a block; the oldest makes room, or of an `AnyTail` one that is merged."""
        blocks, gone, weight = self.blocks, 0, 0.0
        if isinstance(self.rule, AnyTail) and blocks[0] != blocks[1]:
            gone = self.rule.merged(blocks, t)
            before, start, end = [*blocks, t][gone - 1 : gone + 2]
            weight = (end - start) / (end - before)
        self.blocks = [*blocks[:gone], *blocks[gone + 1 :], t]
        return gone, weight

    def split(self, window: Window, ahead: int = 0) -> tuple[int, int, int]:
        """The average now, or some steps ahead in the same blocks, as two means.

        The oldest block that has a weight (-1 if that is the open one), the start of the block
        after it, since which all samples weigh alike, and the first step at which that is not so.
        """
        t = self.count + ahead
        for block, start in enumerate(self.blocks[1:]):
            if t < (enough := window.filled_at(start)):
                return block, start, enough
        return -1, self.blocks[-1], NEVER

    def terms(self, window: AnyWindow | None = None) -> list[tuple[float, int]]:
        """See `Clock`.

        Examples:
            >>> clock = BlockClock(AnytimeWindow(100))
            >>> clock.restore(110, [0, 50, 100], folded=100)
            >>> clock.terms()
            [(0.29708629022101113, 0), (0.585761424815824, 1), (0.011715228496316479, -1)]
        """
        t, blocks = self.count, self.blocks
        asked = window_of(self.rule, window, t)
        oldest, since, _ = self.split(asked)
        ends = [*blocks[1:], self.folded]
        old = since - blocks[oldest] if oldest >= 0 else 0
        g = join(old, t - since, asked.size(t)) if old else 0.0
        each = (1.0 - g) / (t - since)  # the weight of each sample since
        found = [(g, oldest)] if g else []
        newer = range(oldest + 1 if oldest >= 0 else len(blocks) - 1, len(blocks))
        sizes = [(ends[block] - blocks[block], block) for block in newer]
        found += [(each * size, block) for size, block in sizes if size]
        return [*found, (each, SUM)] if t > self.folded else found

    def alike(self) -> tuple[int, int]:
        """The size that all blocks have from here on, and the last start of one that has it.

        (0, 0) if their sizes differ. Where turns depend on the blocks' sizes alone, blocks that are
        all alike stay alike.

        Examples:
            >>> clock = BlockClock(AnytimeWindow(100))
            >>> clock.restore(170, [50, 100, 150], folded=150)
            >>> clock.alike()[0]
            50
        """
        blocks, size = self.blocks, self.closes - self.blocks[-1]
        if isinstance(self.rule, AnyTail) or any(b - a != size for a, b in pairwise(blocks)):
            return 0, 0
        return size, self.rule.alike_until(blocks, size)

    def advance(self, t: int, most: int = NEVER) -> bool:
        """Turn as often as it takes to come to step t; False if that is more than `most` times.

        Who holds means compares `blocks` with those before; of an `AnyTail`, whose blocks are
        merged on the way, there is no telling.

        Examples:
            >>> clock = BlockClock(AnytimeWindow(100))
            >>> clock.advance(10**9)
            True
            >>> clock.blocks
            [999999850, 999999900, 999999950]
        """
        while self.closes < t:
            if (most := most - 1) < 0:
                return False
            size, until = self.alike()
            if size and (turns := (min(t - 1, until + size) - self.blocks[-1]) // size) > 0:
                self.blocks = [start + turns * size for start in self.blocks]
            else:
                self._open(self.closes)
            self.closes = self.rule.closes(self.blocks)
        self.count, self.folded = t, max(self.folded, self.blocks[-1])
        self.next = min(self.closes, self.folded + FOLD)
        return True


class DecayClock(FoldingClock):
    """The clock of an `Exponential`.

    In the plain recurrence, mean = g mean + w x with w = 1 - g, each step rounds the mean, and over
    a long window the samples drown in that. Here the mean M stays as it was at the last fold, at
    step f, and samples are summed beside it, so that at step t

        average = G (g_{f+1} M + sum),    sum = Σ w_i / G_i x_i,    G_i = g_{f+2} ⋯ g_i

    until a few hundred samples have come or G has become small. The first sample after a fold has
    the factor w: a decay of 0, as of a window of one sample, divides nothing.
    """

    __slots__ = ("decay", "factors", "scales")

    rule: Exponential
    decay: float
    factors: list[float]
    scales: list[float]

    def restore(self, count: int, starts: Sequence[int], folded: int) -> None:
        rest = count - folded
        if not folded >= 0 or not 0 <= rest <= FOLD or list(starts) != [0][:count]:
            raise self._refuse(count, starts, folded)
        found = _listed(self.rule, _as_constant(self.rule, folded), max(1, rest))
        if found.scales[-1] < SMALLEST**2:  # in single precision a fold may come a step later
            raise self._refuse(count, starts, folded)
        self.blocks, self.count, self.folded = [0], count, folded
        self._use(found)

    def _use(self, found: Factors) -> None:
        self.decay, self.factors, self.scales = found
        self.next = self.folded + len(found.factors)

    @property
    def factor(self) -> float:
        """See `Clock`."""
        return self.factors[self.count - self.folded]

    def fold(self) -> tuple[float, float, float]:
        of_mean, of_sum = self.weights()
        self.folded = self.count
        self._use(_listed(self.rule, _as_constant(self.rule, self.count), 1))
        return (1.0 - of_mean) / of_sum, 1.0 - of_mean, self.decay

    def turn(self) -> None:
        return None

    def weights(self) -> tuple[float, float]:
        """The weights of the mean and of the sum in the average."""
        rest = self.count - self.folded
        if not rest:
            return 1.0, 0.0
        scale = self.scales[rest - 1]
        return self.decay * scale, scale

    def terms(self, window: AnyWindow | None = None) -> list[tuple[float, int]]:
        window_of(self.rule, window, self.count)
        of_mean, of_sum = self.weights()
        return [(weight, block) for weight, block in ((of_mean, 0), (of_sum, SUM)) if weight]


class Factors(NamedTuple):
    """What a `DecayClock` needs to know of the samples after a fold: numbers, or arrays."""

    decay: float
    """g_{f+1}, the decay of the mean by the first of them."""
    factors: Any
    """What each of them is multiplied by in the sum, w_i / G_i."""
    scales: Any
    """G_i, what makes the sum after each of them a part of the average."""


def factors(rule: Exponential, folded: int, most: int, smallest: float) -> Factors:
    """For at most so many samples after a fold, and as long as G is not too small."""
    return _factors(rule, _as_constant(rule, folded), most, smallest)


def _as_constant(rule: Exponential, folded: int) -> int:
    """A step that stands for all once the decay is constant, otherwise the same."""
    limit = rule.window.limit
    constant = limit is not None and folded >= limit == rule.size(folded)
    return NEVER // 2 if constant else folded


@lru_cache(maxsize=8)
def _factors(rule: Exponential, folded: int, most: int, smallest: float, least: int = 1) -> Factors:
    decays = rule.decay(np.arange(folded + 1, folded + most + 1))
    scales = np.ones(most)
    np.cumprod(decays[1:], out=scales[1:])
    n = most
    if scales[-1] < smallest:
        n = max(least, int((scales < smallest).argmax()))
    with np.errstate(divide="ignore"):  # where a window of one sample has forgotten all
        return Factors(float(decays[0]), (1.0 - decays[:n]) / scales[:n], scales[:n])


@lru_cache(maxsize=8)
def _listed(rule: Exponential, folded: int, least: int) -> Factors:
    decay, factors, scales = _factors(rule, folded, FOLD, SMALLEST, least)
    return Factors(decay, factors.tolist(), scales.tolist())


class SampleClock(Clock):
    """The clock of an `ExactWindow`, which keeps its samples: each is a block of its own."""

    __slots__ = ()

    rule: ExactWindow

    @property
    def kept(self) -> int:
        """How many samples there are to average."""
        return int(self.rule.samples(self.count)) if self.count else 0

    @property
    def starts(self) -> list[int]:
        return list(range(self.count - self.kept, self.count))

    def terms(self, window: AnyWindow | None = None) -> list[tuple[float, int]]:
        window_of(self.rule, window, self.count)
        return [(1.0 / self.kept, block) for block in range(self.kept)]

    def restore(self, count: int, starts: Sequence[int], folded: int) -> None:
        kept = self.rule.samples(count) if count else 0
        if (
            folded != count
            or len(starts) != kept
            or any(start != count - kept + i for i, start in enumerate(starts))
        ):
            raise self._refuse(count, starts[:1], folded)
        self.count = count


def starts_at(rule: Rule, t: int) -> list[int]:
    """The start of each block of a rule after t samples, oldest first.

    Examples:
        >>> starts_at(AnytimeWindow(0.25), 1000)
        [685, 791, 914]
    """
    clock = clock_for(rule)
    if isinstance(clock, BlockClock):
        clock.advance(t)
    clock.count = t
    return clock.starts


def clock_for(rule: Rule) -> Clock:
    """The clock of a rule."""
    return SampleClock(rule) if isinstance(rule, ExactWindow) else folding_clock_for(rule)


def folding_clock_for(rule: Rule) -> FoldingClock:
    """The clock of a rule, for stores of a few large arrays."""
    if isinstance(rule, ExactWindow):
        raise TypeError(
            f"rule: expected one that holds a few averages, got {rule}, which holds every sample; "
            "AnytimeWindow has the same variance"
        )
    return DecayClock(rule) if isinstance(rule, Exponential) else BlockClock(rule)
