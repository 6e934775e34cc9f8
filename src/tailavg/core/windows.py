"""Windows: k_t, the number of samples to average at step t.

A window answers two questions. How large is it at step t? At which step do the samples since a
given step fill it, or a block's share of it? Every decision follows from these two answers. The
second answer is computed with integers, so that every framework turns at the same sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from functools import cached_property, lru_cache
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from tailavg.core.elapsed import Elapsed

__all__ = [
    "BITS",
    "MOST",
    "NEVER",
    "TIE",
    "AnyWindow",
    "Fixed",
    "Growing",
    "OfAnyWindow",
    "OfWindow",
    "Window",
    "as_elapsed",
    "as_window",
    "fraction",
    "is_elapsed",
    "positive_int",
    "short_repr",
    "smaller",
]

Reals = npt.NDArray[np.float64]

NEVER = 2**63 - 1
"""The step of an event that never happens."""

MOST = 2**62
"""The most samples that a window, a stream or a state may have."""

TIE = Fraction(1, 10**12)
"""Numbers within this relative distance count as equal: 7 samples fill a window of 0.07 * 100."""

_TIE = float(TIE)
BITS = 60
"""The number of fractional bits of `Growing.stretch`."""


@dataclass(frozen=True)
class Fixed:
    """The last `k` samples.

    Examples:
        >>> Fixed(100).size(5000)
        100.0
    """

    k: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", positive_int(self.k, "k"))

    @property
    def steady_from(self) -> int:
        """The first step at which the window has its final size, and that many samples exist."""
        return self.k

    def size(self, t: Any) -> Any:
        """Return k_t, which is the same at every step."""
        return np.full(t.shape, float(self.k)) if isinstance(t, np.ndarray) else float(self.k)

    def growth(self, t: Any) -> Any:
        """Return k_t - k_{t-1}, which is 0."""
        return 0.0

    def filled_at(self, start: int, parts: int = 1) -> int:
        """Return the first step at which the samples after `start` fill a `parts`-th of the window.

        Examples:
            >>> Fixed(100).filled_at(5000, parts=3)
            5034
        """
        return start - (-self.k // parts)


@dataclass(frozen=True)
class Growing:
    """The last fraction `c` of all samples so far, but no more than `at_most` of them.

    Examples:
        >>> Growing(0.25).size(5000), Growing(0.25, at_most=1000).size(5000)
        (1250.0, 1000.0)
    """

    c: float
    at_most: int | None = None

    def __post_init__(self) -> None:
        c = self.c
        if isinstance(c, bool | np.bool_) or not isinstance(c, Real):
            raise TypeError(f"c: expected a fraction in (0, 1], got {c!r} of {type(c).__name__}")
        if not (0 < c <= 1 and float(c) > 0):
            raise ValueError(f"c: expected a fraction in (0, 1], got {short_repr(c)}")
        object.__setattr__(self, "c", float(c))
        if self.at_most is not None:
            object.__setattr__(self, "at_most", positive_int(self.at_most, "at_most"))
        _ = self.ratio, self.most  # cached now: a compiler that traces `size` could not cache them

    @property
    def steady_from(self) -> int:
        """The first step at which the window has its final size, and that many samples exist."""
        return NEVER if self.at_most is None else self._capped_from

    def size(self, t: Any) -> Any:
        """Return k_t = ct, at least 1 and at most the cap, without the paper's ceiling.

        A size that misses a whole number by a rounding error is rounded to it.

        Examples:
            >>> 0.07 * 100, Growing(0.07).size(100)
            (7.000000000000001, 7.0)
        """
        over, under, exact = self.ratio
        k = over * t
        k /= under
        if isinstance(k, float):
            if not exact and abs(round(k) - k) <= _TIE * k:
                k = float(round(k))
            return 1.0 if k < 1.0 else self.most if k > self.most else k
        if not exact:
            off = k.round() - k
            k += (abs(off) <= _TIE * k) * off
        # in place where that is possible: a new array costs more
        return k.clip(1.0, self.most, **({"out": k} if isinstance(k, np.ndarray) else {}))

    @cached_property
    def most(self) -> float:
        """The cap as a float, or infinity."""
        return math.inf if self.at_most is None else float(self.at_most)

    @cached_property
    def ratio(self) -> tuple[float, float, bool]:
        """c as a numerator and a denominator, and whether this ratio is exact.

        0.07 is 7 / 100, so that 7 * 100 / 100 is 7 without a rounding error. If no small integers
        give c to the last digit, the ratio is c / 1 and inexact: `size` then rounds to a whole
        number within a `TIE`.
        """
        ratio = fraction(self.c)
        exact = ratio.denominator <= 10**6
        return (
            (float(ratio.numerator), float(ratio.denominator), True)
            if exact
            else (self.c, 1.0, False)
        )

    def growth(self, t: Any) -> Any:
        """Return k_t - k_{t-1}, also where both are equal in single precision.

        Examples:
            >>> [round(Growing(0.3, at_most=2).growth(t), 3) for t in (3, 4, 5, 6, 7, 8)]
            [0.0, 0.2, 0.3, 0.3, 0.2, 0.0]
        """
        before, k = self.size(t - 1), self.size(t)
        between = (before > 1.0) & (k < self.most)
        growth = k - before
        return growth + between * (self.c - growth)

    def filled_at(self, start: int, parts: int = 1) -> int:
        """Return the first step at which the samples after `start` fill a `parts`-th of the window.

        A growing window is divided in equal ratios, not sizes: each block is the same share of the
        stream when it is closed, 1 - (1-c)^(1/parts), so `parts` blocks cover the fraction c.

        Examples:
            >>> Growing(0.25).filled_at(3000), Growing(0.25).filled_at(3000, parts=2)
            (4000, 3465)
        """
        growing = min(NEVER, max(start + 1, -(-start * self.stretch(parts) >> BITS)))
        if self.at_most is None:
            return growing
        capped = min(self._capped_from, NEVER)
        return growing if growing < capped else max(start - (-self.at_most // parts), capped)

    def filled_until(self, size: int, parts: int = 1) -> int:
        """Return the last step after which `size` samples fill a `parts`-th of the window.

        Examples:
            >>> Growing(0.25).filled_until(1000), Growing(0.25).filled_at(3000)
            (3000, 4000)
        """
        growing = (size << BITS) // max(1, self.stretch(parts) - (1 << BITS))
        return growing if self.at_most is None else min(growing, self._capped_from - 1 - size)

    def stretch(self, parts: int) -> int:
        """Return 2⁶⁰ t / start, where samples `start` to t fill a `parts`-th of the window."""
        return _stretch(self.c, parts)

    @cached_property
    def _capped_from(self) -> int:
        """The first step at which the window has reached its cap."""
        assert self.at_most is not None
        exact = self.ratio[2]
        return max(1, math.ceil(self.at_most * (1 if exact else 1 - TIE) / fraction(self.c)))


@lru_cache
def fraction(c: float) -> Fraction:
    """Return c as a fraction, with a small denominator if that gives c to the last digit.

    Examples:
        >>> fraction(0.07), fraction(1 / 3)
        (Fraction(7, 100), Fraction(1, 3))
    """
    ratio = Fraction(c).limit_denominator(10**6)
    alike = abs(float(ratio) - c) <= 2.0**-52 * c and (ratio < 1 or c == 1)
    return ratio if alike else Fraction(c)


@lru_cache
def _stretch(c: float, parts: int) -> int:
    """Return `Growing.stretch`, rounded down so that a tie counts as filled."""
    if c == 1.0:
        return NEVER << BITS
    share = fraction(c)
    rest = 1 - share
    if parts > 1:  # irrational: the smaller number is computed first, to keep its digits
        share = Fraction(-math.expm1(math.log1p(-c) / parts))
        rest = 1 - share if share < 0.5 else Fraction(float(rest) ** (1.0 / parts))
    return math.floor((1 << BITS) / (rest + share * TIE))


Window = Fixed | Growing
AnyWindow = Window | int | float


def as_window(window: AnyWindow, name: str = "window") -> Window:
    """Return a window for a number: 100 is the last hundred samples, 0.25 the last quarter.

    Raise a TypeError for a window of time. Error messages call the argument `name`.

    Examples:
        >>> as_window(1), as_window(1.0)
        (Fixed(k=1), Growing(c=1.0, at_most=None))
    """
    if isinstance(window, Fixed | Growing):
        return window
    expected = "expected an int >= 1 (a number of samples) or a float in (0, 1] (a fraction)"
    if isinstance(window, Elapsed | str | timedelta | np.timedelta64):
        raise TypeError(
            f"{name}: {expected}, got {short_repr(window)}; a window of time "
            "works in TailAverage and TailAverages, with AnytimeWindow or Exponential"
        )
    if isinstance(window, bool | np.bool_) or not isinstance(window, Real):
        raise TypeError(f"{name}: {expected}, got {window!r} of type {type(window).__name__}")
    if isinstance(window, Integral) and window >= 1:
        return _fixed(int(window))
    if not isinstance(window, Integral) and 0 < window <= 1:
        return _growing(float(window))
    raise ValueError(f"{name}: {expected}, got {short_repr(window)}")


_fixed, _growing = lru_cache(Fixed), lru_cache(Growing)  # reads often repeat the same few windows


def as_elapsed(window: Any) -> Any:
    """Return the `Elapsed` that a text or a timedelta stands for, and anything else unchanged."""
    return Elapsed(window) if isinstance(window, str | timedelta | np.timedelta64) else window


def is_elapsed(window: Any) -> bool:
    """Return whether this is a window of time."""
    return isinstance(window, Elapsed)


class OfWindow:
    """Base of rules with a window, which may be given as a number."""

    window: Window

    def __init__(self, window: AnyWindow) -> None:
        object.__setattr__(self, "window", as_window(window))

    def size(self, t: Any) -> Any:
        """Return k_t."""
        return self.window.size(t)


class OfAnyWindow(OfWindow):
    """Base of rules whose window may also be an `Elapsed`, or text or a timedelta for one."""

    def __init__(self, window: AnyWindow | Elapsed) -> None:
        window = as_elapsed(window)
        window = window if isinstance(window, Elapsed) else as_window(window)
        object.__setattr__(self, "window", window)

    @property
    def is_timed(self) -> bool:
        """Whether samples have times."""
        return isinstance(self.window, Elapsed)


def smaller(a: Any, b: Any) -> Any:
    """Return the smaller of two numbers, or the elementwise minimum of arrays or tensors."""
    return min(a, b) if isinstance(a, int | float | np.number) else a.clip(None, b)


def positive_int(value: object, name: str, least: int = 1, most: int = MOST) -> int:
    """Return `value` as an int. Raise if it is not an integer between `least` and `most`."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
        raise TypeError(
            f"{name}: expected an int >= {least}, got {value!r} of type {type(value).__name__}"
        )
    number = int(value)
    if number < least:
        raise ValueError(f"{name}: expected an int >= {least}, got {short_repr(number)}")
    if number > most:
        raise ValueError(f"{name}: expected an int <= {most}, got {short_repr(number)}")
    return number


def short_repr(value: object) -> str:
    """Return the repr of a value for a message, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:
        text = "a number of thousands of digits"  # Python writes at most 4,300 digits
    return text if len(text) <= 100 else f"{text[:80]}… ({len(text)} characters)"
