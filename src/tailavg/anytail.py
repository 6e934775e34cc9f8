"""`AnyTail`: one set of blocks for every window, so that the window is chosen after the run.

Blocks of consecutive samples cover the whole stream. A window is read from the newest of them that
hold it: all samples of the block that completes it are touched, so the fewer they are beyond the
window, the better. Blocks are therefore merged so that their ages stay close to a geometric
series, and every decision is made in whole numbers: all storages merge alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from numbers import Real

import numpy as np

from tailavg.windows import TIE, AnyWindow, Window, as_window, whole

__all__ = ["AnyTail"]


@dataclass(frozen=True)
class AnyTail:
    """Every tail at once: any window from the fraction `shortest` of the stream to all of it.

    Read with a window: `value(0.3)`, `value(5000)`. More accumulators, fewer samples beyond it.

    Examples:
        >>> from tailavg import TailAverage
        >>> average = TailAverage(AnyTail())
        >>> average.update_many(range(1000))
        >>> average.value(0.25), average.value(0.5), average.value(1.0)
        (874.5, 749.5, 499.5)
    """

    accumulators: int = 12
    shortest: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "accumulators", whole(self.accumulators, "accumulators", least=6))
        shortest = self.shortest
        if isinstance(shortest, bool | np.bool_) or not isinstance(shortest, Real):
            raise TypeError(f"shortest: expected a fraction in (0, 1), got {shortest!r}")
        if not 0 < shortest < 1:
            raise ValueError(f"shortest: expected a fraction in (0, 1), got {shortest!r}")
        object.__setattr__(self, "shortest", float(shortest))

    @cached_property
    def _rest(self) -> Fraction:
        """1 - shortest, as a ratio of whole numbers."""
        return 1 - Fraction(self.shortest).limit_denominator(10**6)

    @cached_property
    def _kept(self) -> Fraction:
        """What the open block leaves of the stream when it is closed: it stays below `shortest`."""
        share = min(
            1.0,
            (0.5 + 2 * math.log(1 / self.shortest) / (1 - self.shortest)) / (self.accumulators - 1),
        )
        return 1 - Fraction(share).limit_denominator(100) * (1 - self._rest)

    def closes(self, starts: Sequence[int]) -> int:
        """The step after which the open block takes no more samples."""
        return max(starts[-1] + 1, math.ceil(starts[-1] / self._kept))

    def merged(self, starts: Sequence[int], t: int) -> int:
        """The block that is merged with the one before it when a block is opened at step t.

        The one that leaves the least gap. A gap, a block from s to e, is at its worst for a window
        of a little more than the samples since e, for which all since s are touched, at the
        first step τ from which on those since e are a window that is allowed: (τ - s) / (τ - e).
        """
        edges = [*starts, t]
        rest = self._rest

        def worst(block: int) -> Fraction:
            start, end = edges[block - 1], edges[block + 1]
            # τ = max(t, end / rest), in whole numbers
            step = max(t * rest.numerator, end * rest.denominator)
            return Fraction(step - start * rest.numerator, max(1, step - end * rest.numerator))

        return min(range(len(starts) - 1, 0, -1), key=worst)

    def uniform_until(self, t: int) -> int:
        """As in `AnytimeWindow`."""
        return 0

    def window(self, window: AnyWindow | None, t: int) -> Window:
        """The window that is asked for, if it can be read at step t."""
        expected = (
            f"expected a window of at least {self.shortest:g} of the samples so far, "
            f"{self.shortest * t:g} of {t}"
        )
        if window is None:
            raise ValueError(f"window: {expected}, since AnyTail has none of its own; got none")
        found = as_window(window)
        if found.size(t) < self.shortest * t * (1 - TIE):
            raise ValueError(f"window: {expected}, got {window!r}")
        return found
