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

from tailavg.core.windows import TIE, AnyWindow, Window, as_window, whole

__all__ = ["AnyTail"]


@dataclass(frozen=True)
class AnyTail:
    """Every tail at once: any window from the fraction `shortest` of the stream to all of it.

    Read with a window: `value(0.3)`, `value(5000)`. More accumulators, fewer samples beyond it.

    Examples:
        >>> from tailavg import TailAverage
        >>> average = TailAverage(AnyTail())
        >>> average.update_many(range(1000))
        >>> [round(average.value(c), 1) for c in (0.25, 0.5, 1.0)]  # of 874.5, 749.5, 499.5
        [877.0, 751.1, 499.5]
    """

    accumulators: int = 12
    shortest: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "accumulators", whole(self.accumulators, "accumulators", least=6))
        shortest = self.shortest
        if isinstance(shortest, bool | np.bool_) or not isinstance(shortest, Real):
            raise TypeError(f"shortest: expected a fraction in (0, 1), got {shortest!r}")
        if not (1e-6 <= shortest < 1 and float(shortest) < 1):
            raise ValueError(f"shortest: expected a fraction in [0.000001, 1), got {shortest!r}")
        object.__setattr__(self, "shortest", float(shortest))

    @cached_property
    def _part(self) -> tuple[int, int]:
        """`shortest` as a ratio of whole numbers."""
        ratio = Fraction(self.shortest).limit_denominator(10**6)
        exact = abs(float(ratio) - self.shortest) <= 2.0**-52 * self.shortest
        return (ratio if exact else Fraction(self.shortest)).as_integer_ratio()

    @cached_property
    def _share(self) -> Fraction:
        """The part of the stream that a block has when the next is opened: at most `shortest`.

        Larger blocks are worse as long as they are the newest, smaller ones force more merges: the
        best share was found by simulation, and this fits it.
        """
        c = self.shortest
        best = (0.3 + 2.0 * math.log(1.0 / c) / (1.0 - c)) / (self.accumulators - 1)
        thousandths = max(1, min(1000, round(1000 * best)))
        return Fraction(thousandths, 1000) * Fraction(*self._part)

    def closes(self, starts: Sequence[int]) -> int:
        """The step after which the open block takes no more samples: the first with its share."""
        if len(starts) < self.accumulators:
            return starts[-1] + 1
        share = self._share
        full = -(-starts[-1] * share.denominator // (share.denominator - share.numerator))
        return max(starts[-1] + 1, full)

    def merged(self, starts: Sequence[int], t: int) -> int:
        """The block that is merged with the one before it when a block is opened at step t.

        The two whose joint size is least against the samples since their end: that ratio is what
        a window that ends inside them touches too much. If no window that is allowed ends there
        yet, it counts as it will when the first one does.
        """
        p, q = self._part
        best, least, since = 0, 1, 0  # their size and the samples since, of the best so far
        for block, end in enumerate([*starts[2:], t], start=1):
            size, after = end - starts[block - 1], max((q - p) * (t - end), p * end)
            if size * since < least * after:  # the ratios, compared in whole numbers
                best, least, since = block, size, after
        return best

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
