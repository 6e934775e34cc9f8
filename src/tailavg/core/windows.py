"""Windows: how many samples an average is over, k_t, as the stream goes on.

A window knows two things: its size at step t, and when a run of consecutive samples will fill
it, or fill a block's share of it. Everything an average decides follows from these two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["NEVER", "TIE", "AnyWindow", "Fixed", "Growing", "OfWindow", "Window", "as_window"]

Reals = npt.NDArray[np.float64]

NEVER = 2**63 - 1
"""A step that no stream reaches: when something that will not happen is due."""

TIE = 1e-12
"""A count reaches a real number that it misses by this much of it: 7 reaches 0.07 * 100."""

NUMBER = (int, float, np.number)
"""One number, for which there are branches; else many, or a tensor whose value is unknown yet.

Those have the methods `clip` and `round`, of NumPy, PyTorch and JAX alike.
"""


@dataclass(frozen=True)
class Fixed:
    """The last `k` samples.

    Examples:
        >>> Fixed(100).size(5000)
        100.0
    """

    k: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", whole(self.k, "k"))

    @property
    def limit(self) -> int:
        """The size that is never exceeded."""
        return self.k

    def size(self, t: Any) -> Any:
        """k_t, the same for every step."""
        return np.full(t.shape, float(self.k)) if isinstance(t, np.ndarray) else float(self.k)

    def growth(self, t: Any) -> Any:
        """k_t - k_{t-1}: none."""
        return 0.0

    def filled(self, start: Any, t: Any, parts: int = 1) -> Any:
        """Whether the samples after step `start`, up to step t, make a `parts`-th of the window."""
        return t - start >= comparable(-(-self.k // parts))

    def filled_at(self, start: int, parts: int = 1) -> int:
        """The first step t at which they do.

        Examples:
            >>> Fixed(100).filled_at(5000, parts=3)
            5034
        """
        return start + -(-self.k // parts)


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
        if not 0 < c <= 1:
            raise ValueError(f"c: expected a fraction in (0, 1], got {c!r}")
        object.__setattr__(self, "c", float(c))
        if self.at_most is not None:
            object.__setattr__(self, "at_most", whole(self.at_most, "at_most"))
        _ = self._ratio, self._most  # looked up now: a compiler that traces `size` could not

    @property
    def limit(self) -> int | None:
        """The size that is never exceeded, if there is one."""
        return self.at_most

    def size(self, t: Any) -> Any:
        """k_t = ct, at least 1 and at most the cap: a real number, without the paper's ceiling.

        What misses a whole number by rounding is that number.

        Examples:
            >>> 0.07 * 100, Growing(0.07).size(100)
            (7.000000000000001, 7.0)
        """
        over, under, exact = self._ratio
        k = over * t
        k /= under
        number = isinstance(k, NUMBER)
        # a compiler may multiply by 1 / under instead, and miss a whole number by the last digit
        compiled = not (number or isinstance(k, np.ndarray))
        if compiled or not exact:
            off = (round(k) if number else k.round()) - k
            tie = 2.0**-52 if exact else TIE
            tie = 4e-7 if is_single(k) else tie
            k = k + (abs(off) <= tie * k) * off
        if number:
            return 1.0 if k < 1.0 else self._most if k > self._most else float(k)
        if isinstance(k, np.ndarray):
            return k.clip(1.0, self._most, out=k)  # in place: a new array costs more
        return k.clip(1.0, self._most)

    @cached_property
    def _most(self) -> float:
        return math.inf if self.at_most is None else float(self.at_most)

    @cached_property
    def _ratio(self) -> tuple[float, float, bool]:
        """c as a ratio of whole numbers, 7 / 100 for 0.07: 7 * 100 / 100 is 7, without rounding.

        If none below a million give c to the last digit, c / 1, inexact: then a size that misses
        a whole number by a `TIE` is taken for it.
        """
        ratio = Fraction(self.c).limit_denominator(10**6)
        if abs(float(ratio) - self.c) <= 2.0**-52 * self.c:
            return float(ratio.numerator), float(ratio.denominator), True
        return self.c, 1.0, False

    def growth(self, t: Any) -> Any:
        """k_t - k_{t-1}, also where single precision cannot tell the two apart.

        Examples:
            >>> [round(Growing(0.3, at_most=2).growth(t), 3) for t in (3, 4, 5, 6, 7, 8)]
            [0.0, 0.2, 0.3, 0.3, 0.2, 0.0]
        """
        before, k = self.size(t - 1), self.size(t)
        between = (before > 1.0) & (k < self._most)
        growth = k - before
        return growth + between * (self.c - growth)

    def filled(self, start: Any, t: Any, parts: int = 1) -> Any:
        """Whether the samples after step `start`, up to step t, make a `parts`-th of the window.

        A growing window is shared out in equal *ratios*, not sizes: when each block is the
        share (1 - (1-c)^(1/parts)) of the stream as it is closed, `parts` of them cover c.
        """
        share, rest = _shares(self.c, parts)
        if is_single(share * t):  # which has too few digits
            reached = t - start > whole_part(share, t)
        elif share < 0.5:
            reached = t - start >= share * t
        else:  # the same, with the digits that share t would lose
            reached = t * rest >= start
        if self.at_most is None:
            return reached
        capped = comparable(self._capped_from)
        full = Fixed(self.at_most).filled(start, t, parts)
        return (t < capped) & reached | (t >= capped) & full

    def filled_at(self, start: int, parts: int = 1) -> int:
        """The first step t at which they do.

        Examples:
            >>> Growing(0.25).filled_at(3000), Growing(0.25).filled_at(3000, parts=2)
            (4000, 3465)
        """
        _, rest = _shares(self.c, parts)
        t = NEVER if start >= NEVER * rest else max(start + 1, math.floor(start / rest) - 1)
        if self.at_most is not None and t > self._capped_from:
            t = max(self._capped_from, Fixed(self.at_most).filled_at(start, parts))
        while t < NEVER and not self.filled(start, t, parts):
            t += 1
        return t

    @cached_property
    def _capped_from(self) -> int:
        """The first step at which the window has reached its cap: it is a fixed one from there."""
        t = max(1, math.floor(self._most / self.c) - 1)
        while self.size(t) < self._most:
            t += 1
        return t


@lru_cache
def _shares(c: float, parts: int) -> tuple[float, float]:
    """A `parts`-th of the window, as a fraction of the stream, and what that leaves of it.

    Ties are forgiven.
    """
    share, rest = c, 1.0 - c
    if parts > 1:
        rest **= 1.0 / parts
        share = -math.expm1(math.log1p(-share) / parts) if share < 1.0 else 1.0
    return share * (1.0 - TIE), rest + share * TIE


Window = Fixed | Growing
AnyWindow = Window | int | float


def as_window(window: AnyWindow) -> Window:
    """A window, or the number that stands for one: 100 the last hundred, 0.25 the last quarter.

    Examples:
        >>> as_window(1), as_window(1.0)
        (Fixed(k=1), Growing(c=1.0, at_most=None))
    """
    if isinstance(window, Fixed | Growing):
        return window
    expected = "expected an int >= 1 (the last that many) or a float in (0, 1] (the last fraction)"
    if isinstance(window, bool | np.bool_) or not isinstance(window, Real):
        raise TypeError(f"window: {expected}, got {window!r} of type {type(window).__name__}")
    if isinstance(window, Integral) and window >= 1:
        return Fixed(int(window))
    if not isinstance(window, Integral) and 0 < window <= 1:
        return Growing(float(window))
    raise ValueError(f"window: {expected}, got {window!r}")


def is_single(x: Any) -> bool:
    """Whether these are numbers of JAX in single precision; PyTorch counts in double."""
    dtype = getattr(x, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype == np.float32


def comparable(n: int) -> int | float:
    """A whole number that integers of 32 bits can be compared with."""
    return n if n < 2**31 else float(n)


def whole_part(share: float, t: Any) -> Any:
    """The whole part of share t, for a share below 1, where single precision would not do.

    A long multiplication to the base 2¹², in integers of 32 bits.

    Examples:
        >>> whole_part(0.25, 10**9), whole_part(1 / 3, 10**9)
        (250000000, 333333333)
    """
    digits = [int(share * 4096**place) % 4096 for place in range(5, 0, -1)]  # smallest first
    places = [t & 4095, t >> 12 & 4095, t >> 24]
    columns = [
        sum(digit * places[at - i] for i, digit in enumerate(digits) if 0 <= at - i < 3)
        for at in range(7)
    ]
    carry = 0
    for column in columns[:5]:
        carry = (carry + column) >> 12
    return carry + columns[5] + (columns[6] << 12)


class OfWindow:
    """What rules share: a window, in the place of which a number will do."""

    window: Window

    def __init__(self, window: AnyWindow) -> None:
        object.__setattr__(self, "window", as_window(window))

    def size(self, t: Any) -> Any:
        """k_t."""
        return self.window.size(t)


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two numbers, or of each two in arrays or tensors."""
    return min(a, b) if isinstance(a, NUMBER) else a.clip(None, b)


def whole(value: object, name: str, least: int = 1) -> int:
    """`value` as an int, if it is a whole number of at least `least`."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
        raise TypeError(
            f"{name}: expected an int >= {least}, got {value!r} of type {type(value).__name__}"
        )
    if value < least:
        raise ValueError(f"{name}: expected an int >= {least}, got {value!r}")
    return int(value)
