"""Clocks: what is to be done at each step of an average, for storages that hold few arrays.

A clock holds the scalar state of one average and makes every decision; a storage holds a sum and
the means of blocks, and does as it is told: before a sample, if `due`, fold the sum into the newest
mean and perhaps turn; then add the sample, times `factor`, to the sum; then `tick`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from tailavg.core.anytail import AnyTail
from tailavg.core.profile import reading
from tailavg.core.rules import AnytimeWindow, BlockRule, ExactWindow, Exponential, RawTail, Rule
from tailavg.core.schedule import SUM, check_starts, makes_room, terms, turn
from tailavg.numpy.arithmetic import FOLD
from tailavg.numpy.decayed import plan
from tailavg.core.windows import AnyWindow

__all__ = ["BlockClock", "Clock", "DecayClock", "Turn", "clock_for"]


class Turn(NamedTuple):
    """What happens to the means when a block is begun."""

    gone: int | None
    """The block whose place is taken; None if there is room."""
    weight: float
    """That of its mean in the mean of the block before it, with which it is merged; 0 if not."""


class Clock(ABC):
    """The scalar state of an average: how many samples, in which blocks, folded up to where."""

    carries = False
    """Whether what a fold rounds off stays in the sum."""

    count: int
    folded: int
    _starts: list[int]
    _next: int  # the step before which something is due

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.restore(0, [], 0)

    @property
    def starts(self) -> list[int]:
        """The start of each block, oldest first."""
        return list(self._starts) if self.count else []

    @property
    def due(self) -> bool:
        """Whether a fold is to be done before the next sample, and perhaps a turn."""
        return self.count >= self._next

    @property
    @abstractmethod
    def factor(self) -> float:
        """What the next sample is multiplied by in the sum."""

    def tick(self) -> None:
        """A sample was added."""
        self.count += 1

    @abstractmethod
    def fold(self) -> tuple[float, float]:
        """The weights of the newest mean and of the sum in the mean of both."""

    @abstractmethod
    def turn(self) -> Turn | None:
        """If the newest block is closed, and the sum begins a new one: where its mean will be."""

    @abstractmethod
    def terms(self, window: AnyWindow | None = None) -> list[tuple[float, int]]:
        """The average now: weights, and the blocks that they are of, or `SUM`."""

    @abstractmethod
    def restore(self, count: int, starts: Sequence[int], folded: int) -> None:
        """Go on from there; a ValueError if the rule never comes there."""


class BlockClock(Clock):
    """The clock of a rule that keeps blocks."""

    carries = True
    factor = 1.0
    rule: BlockRule | AnyTail

    def restore(self, count: int, starts: Sequence[int], folded: int) -> None:
        check_starts(self.rule, starts, count)
        self._starts, self.count, self.folded = list(starts) or [0], count, folded
        self._schedule()

    def _schedule(self) -> None:
        self._closes = self.rule.closes(self._starts)
        self._next = min(self._closes, self.folded + FOLD)

    def fold(self) -> tuple[float, float]:
        n = self.count - self._starts[-1]
        of_mean, of_sum = (self.folded - self._starts[-1]) / n, 1.0 / n
        self.folded = self.count
        self._next = min(self._closes, self.folded + FOLD)
        return of_mean, of_sum

    def turn(self) -> Turn | None:
        if self.count < self._closes:
            return None
        gone, weight = makes_room(self.rule, self._starts, self.count)
        self._starts = turn(self.rule, self._starts, self.count)
        self._schedule()
        return Turn(gone, weight)

    def terms(self, window: AnyWindow | None = None) -> list[tuple[float, int]]:
        size = reading(self.rule, window, self.count).size(self.count)
        return terms(self._starts, self.folded, self.count, size)


class DecayClock(Clock):
    """The clock of an `Exponential`."""

    rule: Exponential

    def restore(self, count: int, starts: Sequence[int], folded: int) -> None:
        factors, of_mean, of_sum = plan(self.rule, folded, max(FOLD, count - folded))
        if list(starts) != ([0] if count else []) or not 0 <= count - folded <= len(factors):
            raise ValueError(
                f"state: starts {list(starts)}, folded {folded} and count {count} cannot be those "
                f"of {self.rule}"
            )
        self._starts, self.count, self.folded = [0], count, folded
        self._factors, self._of_mean, self._of_sum = (
            part.tolist() for part in (factors, of_mean, of_sum)
        )
        self._next = folded + len(factors)

    @property
    def factor(self) -> float:
        """See `Clock`."""
        factor: float = self._factors[self.count - self.folded]
        return factor

    def fold(self) -> tuple[float, float]:
        last = self.count - self.folded - 1
        weights = self._of_mean[last], self._of_sum[last]
        self.restore(self.count, [0], self.count)
        return weights

    def turn(self) -> None:
        return None

    def terms(self, window: AnyWindow | None = None) -> list[tuple[float, int]]:
        reading(self.rule, window, self.count)
        last = self.count - self.folded - 1
        if last < 0:
            return [(1.0, 0)]
        both = [(self._of_mean[last], 0), (self._of_sum[last], SUM)]
        return [(weight, block) for weight, block in both if weight]


def clock_for(rule: Rule) -> Clock:
    """The clock of a rule."""
    if isinstance(rule, AnytimeWindow | RawTail | AnyTail):
        return BlockClock(rule)
    if isinstance(rule, Exponential):
        return DecayClock(rule)
    assert isinstance(rule, ExactWindow)
    raise TypeError(
        f"rule: expected one that holds a few averages, got {rule}, which holds every sample; "
        "AnytimeWindow has the same variance"
    )
