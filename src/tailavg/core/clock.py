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
from typing import NamedTuple

import numpy as np
from tailavg.core.equation import join
from tailavg.core.rules import (
    AnyTail,
    AnytimeWindow,
    BlockRule,
    ExactWindow,
    Exponential,
    RawTail,
    Rule,
    windowed,
)
from tailavg.core.windows import NEVER, AnyWindow

__all__ = [
    "FOLD",
    "SMALLEST",
    "SUM",
    "BlockClock",
    "Clock",
    "DecayClock",
    "Fold",
    "FoldingClock",
    "SampleClock",
    "Split",
    "Store",
    "Turn",
    "clock_for",
    "decays",
    "folding_clock_for",
    "starts_at",
]

FOLD = 256
"""How many samples are summed before the sum is folded into a mean: a float32 keeps 5 digits."""

SMALLEST = 2.0**-32
"""How far the average of an `Exponential` may decay before its sum is folded."""

SUM = -1
"""Stands for the sum of the samples that are in no mean yet, in place of a block."""


class Fold(NamedTuple):
    """How the sum is folded into the newest mean, and begun anew."""

    total: float
    """What the sum is divided by, to be a mean: the number of samples in it, or of their factors."""
    weight: float
    """The weight of that mean in the joint one; 1 if nothing was folded before."""
    carry: float
    """What the joint mean rounds off begins the next sum, multiplied by this."""


class Turn(NamedTuple):
    """What happens to the means when a block is opened. It comes last."""

    gone: int
    """The block that makes room."""
    weight: float
    """The weight of its mean in that of the block before, with which it is merged; 0 if not."""


class Split(NamedTuple):
    """An average as two means: of the oldest block that has a weight, and of all since."""

    oldest: int
    """That block; -1 if there is none beside the open one."""
    since: int
    """The start of the block after it."""
    until: int
    """The first step at which `oldest` has no weight any more."""


class Store(ABC):
    """What holds the samples of one average: a sum, and a mean for each block, oldest first.

    A store decides nothing: `Clock.prepare` calls these two.
    """

    __slots__ = ()

    @abstractmethod
    def fold(self, fold: Fold) -> None:
        """Fold the sum into the newest mean, and begin the next with what that rounds off."""

    @abstractmethod
    def turn(self, turn: Turn) -> None:
        """Open a block: its mean takes the last place, and the sum is 0."""


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
                store.fold(self.fold())
            turn = self.turn()
            if turn is not None:
                store.turn(turn)

    @property
    @abstractmethod
    def factor(self) -> float:
        """What the next sample is multiplied by in the sum."""

    @abstractmethod
    def fold(self) -> Fold:
        """Count the sum as folded, and say how."""

    @abstractmethod
    def turn(self) -> Turn | None:
        """If the open block is closed: open the next, and say how."""


class BlockClock(FoldingClock):
    """The clock of a rule that keeps blocks."""

    __slots__ = ("closes",)

    factor = 1.0
    rule: BlockRule | AnyTail
    closes: int
    """The step after which the open block takes no more samples."""

    def restore(self, count: int, starts: Sequence[int], folded: int) -> None:
        blocks = [0] * (self.rule.accumulators - len(starts)) + list(starts)
        if not (self._possible(blocks, count) and blocks[-1] <= folded <= count):
            raise self._refuse(count, starts, folded)
        self.blocks, self.count, self.folded = blocks, count, folded
        self._schedule()

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
        if isinstance(rule, RawTail):
            return blocks[0] == min(count - 1, rule.first)
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

    def fold(self) -> Fold:
        count, start, folded = self.count, self.blocks[-1], self.folded
        self.folded = count
        self.next = min(self.closes, count + FOLD)
        return Fold(count - folded, (count - folded) / (count - start), count - start)

    def turn(self) -> Turn | None:
        t = self.count
        if t < self.closes:
            return None
        turn = self._open(t)
        self.folded = t
        self._schedule()
        return turn

    def _open(self, t: int) -> Turn:
        """Open a block; the oldest makes room, or of an `AnyTail` one that is merged."""
        blocks, gone, weight = self.blocks, 0, 0.0
        if isinstance(self.rule, AnyTail) and blocks[0] != blocks[1]:
            gone = self.rule.merged(blocks, t)
            before, start, end = [*blocks, t][gone - 1 : gone + 2]
            weight = (end - start) / (end - before)
        self.blocks = [*blocks[:gone], *blocks[gone + 1 :], t]
        return Turn(gone, weight)

    def split(self, window: AnyWindow | None = None, ahead: int = 0) -> Split:
        """The average now, or some steps ahead in the same blocks, as two means."""
        t = self.count + ahead
        rule = windowed(self.rule, window, t)
        for block, start in enumerate(self.blocks[1:]):
            if t < (enough := rule.window.filled_at(start)):
                return Split(block, start, enough)
        return Split(-1, self.blocks[-1], NEVER)

    def terms(self, window: AnyWindow | None = None) -> list[tuple[float, int]]:
        """See `Clock`.

        Examples:
            >>> clock = BlockClock(AnytimeWindow(100))
            >>> clock.restore(110, [0, 50, 100], folded=100)
            >>> clock.terms()
            [(0.29708629022101113, 0), (0.585761424815824, 1), (0.011715228496316479, -1)]
        """
        t, blocks = self.count, self.blocks
        oldest, since, _ = self.split(window)
        size = windowed(self.rule, window, t).size(t)
        ends = [*blocks[1:], self.folded]
        g = join(ends[oldest] - blocks[oldest], t - since, size) if oldest >= 0 else 0.0
        each = (1.0 - g) / (t - since)  # the weight of each sample since
        found = [(g, oldest)] if g else []
        for block in range(oldest + 1 if oldest >= 0 else len(blocks) - 1, len(blocks)):
            if ends[block] > blocks[block]:
                found.append((each * (ends[block] - blocks[block]), block))
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

    def advance(self, t: int) -> None:
        """Turn as often as it takes to come to step t.

        Who holds means compares `blocks` with those before; of an `AnyTail`, whose blocks are
        merged on the way, there is no telling.

        Examples:
            >>> clock = BlockClock(AnytimeWindow(100))
            >>> clock.advance(10**9)
            >>> clock.blocks
            [999999850, 999999900, 999999950]
        """
        while self.closes < t:
            size, until = self.alike()
            if size and (turns := (min(t - 1, until + size) - self.blocks[-1]) // size):
                self.blocks = [start + turns * size for start in self.blocks]
            else:
                self._open(self.closes)
            self.closes = self.rule.closes(self.blocks)
        self.count, self.folded = t, max(self.folded, self.blocks[-1])
        self.next = min(self.closes, self.folded + FOLD)


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
    """g_{f+1}, the decay of the mean by the first sample after the fold."""
    factors: list[float]
    """What each sample after the fold is multiplied by, w_i / G_i."""
    scales: list[float]
    """G_i, what makes the sum after each of them a part of the average."""

    def restore(self, count: int, starts: Sequence[int], folded: int) -> None:
        if not 0 <= folded <= count <= folded + FOLD or list(starts) != [0][:count]:
            raise self._refuse(count, starts, folded)
        # in single precision a fold may come a step later
        decay, factors, scales = decays(self.rule, folded, least=count - folded)
        if scales[-1] < SMALLEST**2:
            raise self._refuse(count, starts, folded)
        self.blocks, self.count, self.folded = [0], count, folded
        self.decay, self.factors, self.scales = decay, factors, scales
        self.next = folded + len(factors)

    @property
    def factor(self) -> float:
        """See `Clock`."""
        return self.factors[self.count - self.folded]

    def fold(self) -> Fold:
        of_mean, of_sum = self.weights()
        self.folded = self.count
        self.decay, self.factors, self.scales = decays(self.rule, self.folded)
        self.next = self.folded + len(self.factors)
        return Fold((1.0 - of_mean) / of_sum, 1.0 - of_mean, self.decay)

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
        windowed(self.rule, window, self.count)
        of_mean, of_sum = self.weights()
        return [(weight, block) for weight, block in ((of_mean, 0), (of_sum, SUM)) if weight]


def decays(
    rule: Exponential, folded: int, least: int = 1
) -> tuple[float, list[float], list[float]]:
    """What a `DecayClock` looks up after a fold, for at least so many samples.

    The same for all once the decay is constant.
    """
    limit = rule.window.limit
    if limit is not None and folded >= limit == rule.size(folded):
        folded = NEVER // 2
    return _decays(rule, folded, least)


@lru_cache(maxsize=8)
def _decays(rule: Exponential, folded: int, least: int) -> tuple[float, list[float], list[float]]:
    decays = rule.decay(np.arange(folded + 1, folded + FOLD + 1))
    scales = np.cumprod(decays[1:])
    small = scales < SMALLEST
    n = max(least - 1, int(small.argmax()) if small[-1] else FOLD - 1)
    with np.errstate(divide="ignore"):  # where a window of one sample has forgotten all
        factors = (1.0 - decays[1 : n + 1]) / scales[:n]
    first = float(decays[0])
    return first, [1.0 - first, *factors.tolist()], [1.0, *scales[:n].tolist()]


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
        windowed(self.rule, window, self.count)
        return [(1.0 / self.kept, block) for block in range(self.kept)]

    def restore(self, count: int, starts: Sequence[int], folded: int) -> None:
        kept = self.rule.samples(count) if count else 0
        if folded != count or len(starts) != kept or any(start != count - kept + i for i, start in enumerate(starts)):
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
