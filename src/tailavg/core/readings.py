"""Readings: what an `AnyTail` can be read with, besides a plain window.

A `Freshest` has the least mean age for its variance. A `Decay` stands for a learning-rate decay:
iterates that start at w_0 and take steps -η g_i have the average Σ_j c_j w_j = w_0 - η Σ_i W_i g_i,
where W_i = Σ_{j≥i} c_j. So averaging multiplies the learning rate of step i by W_i. The equal
weights of a plain window are a linear decay; another decay has the differences of W as weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np

from tailavg.core.equation import freshest
from tailavg.core.windows import AnyWindow, Reals, Window, as_window

__all__ = ["ByAge", "Decay", "Freshest", "Reading"]

Shape = Literal["linear", "cosine", "1-sqrt"] | Callable[[float], float]

_YOUNGER: dict[str, Callable[[Any, Any], Any]] = {  # D(1 - x), with the digits of a small x
    "linear": lambda x, _: x,
    "cosine": lambda x, xp: xp.sin(np.pi / 2 * x) ** 2,
    "1-sqrt": lambda x, xp: x / (1.0 + xp.sqrt(1.0 - x)),
}
_GRID = 1024  # points at which a function is checked


class ByAge(ABC):
    """A reading that weighs blocks by the ages at which they begin."""

    window: Window

    def size(self, t: Any) -> Any:
        """Return the size of the window, k_t. Raise if the window is an array of JAX."""
        return as_window(self.window).size(t)

    def weights(self, t: int) -> Reals:
        """Return the weight of each of t samples, oldest first, if all of them are kept.

        Examples:
            >>> Decay(4, "cosine").weights(5).round(3)
            array([0.   , 0.146, 0.354, 0.354, 0.146])
            >>> Freshest(3).weights(5).round(3)
            array([0.   , 0.056, 0.185, 0.315, 0.444])
        """
        weights: Reals = self.of_ages(np.arange(t, -1.0, -1.0), min(t, self.size(t)))
        return weights

    def read(self, sizes: Sequence[int], t: int) -> list[float]:
        """Return the weights of the means of blocks of `sizes` samples, oldest first."""
        ages = np.array([*accumulate(reversed(sizes), initial=0)], float)[::-1]
        weights: list[float] = self.of_ages(ages, min(t, self.size(t))).tolist()
        return weights

    @abstractmethod
    def of_ages(self, ages: Any, k: Any, xp: Any = np) -> Any:
        """Return the weights of the samples between consecutive ages in a window of k samples.

        Args:
            ages: Ages that fall along the first axis, to 0.
            k: The size of the window, at most the oldest age.
            xp: `jax.numpy`, if ages may be traced.
        """


@dataclass(frozen=True)
class Freshest(ByAge):
    """Read an `AnyTail` with the freshest weights that have the variance of a window.

    No weights with that variance have a lower mean age. If every sample is kept, they fall in a
    straight line to 0 at an age of 4/3 of the window, and their mean age is 4/9 of the window; that
    of the exact window is 1/2.

    Args:
        window: The window whose variance the average has: the last fraction, or the last k. In JAX
            it may also be an array, as for `tailavg.jax.value`.

    Examples:
        >>> from tailavg import AnyTail, TailAverage
        >>> average = TailAverage(AnyTail())
        >>> average.update_many(range(1000))
        >>> round(average.value(0.25), 1), round(average.value(Freshest(0.25)), 1)
        (877.0, 887.7)
    """

    window: Window

    def __init__(self, window: AnyWindow) -> None:
        is_traceable = hasattr(window, "aval")  # an array of JAX
        object.__setattr__(self, "window", window if is_traceable else as_window(window))

    def of_ages(self, ages: Any, k: Any, xp: Any = np) -> Any:
        """See `ByAge`."""
        return freshest(ages, k, xp)


@dataclass(frozen=True)
class Decay(ByAge):
    """Read an `AnyTail` as if the learning rate had decayed over a window.

    The result is exact for SGD on a given sequence of gradients. Otherwise it is an approximation,
    since a run with a decayed rate sees other gradients.

    Args:
        window: The steps over which the rate falls to 0: the last fraction, or the last k.
        shape: `"linear"` (the plain window), `"cosine"`, `"1-sqrt"`, or a function that maps the
            fraction of the window that has passed to the fraction of the rate that is left. It
            falls from 1 at 0 to 0 at 1.

    Examples:
        >>> from tailavg import AnyTail, TailAverage
        >>> average = TailAverage(AnyTail())
        >>> average.update_many(range(1000))
        >>> [round(average.value(Decay(0.2, shape)), 1) for shape in ("linear", "cosine", "1-sqrt")]
        [900.5, 899.6, 865.1]
    """

    window: Window
    shape: Shape

    def __init__(self, window: AnyWindow, shape: Shape) -> None:
        object.__setattr__(self, "window", as_window(window))
        if isinstance(shape, str) and shape in _YOUNGER:
            object.__setattr__(self, "shape", shape)
        elif callable(shape):
            object.__setattr__(self, "shape", shape)
            self._check(shape)
        else:
            kind = ValueError if isinstance(shape, str) else TypeError
            raise kind(
                f"shape: expected one of {list(_YOUNGER)}, or a function that falls from 1 at 0 to "
                f"0 at 1, got {shape!r}"
            )

    def _check(self, shape: Callable[[float], float]) -> None:
        values = []
        for i in range(_GRID + 1):
            try:
                value = float(shape(i / _GRID))
            except (TypeError, ValueError, ArithmeticError) as error:
                raise ValueError(
                    f"shape: expected a number for {i / _GRID:g}, got {type(error).__name__}: "
                    f"{error}"
                ) from error
            values.append(value)
        for at, expected in ((0, 1.0), (1, 0.0)):
            if not math.isclose(values[at * _GRID], expected, abs_tol=1e-9):
                raise ValueError(
                    f"shape: expected {expected:g} at {at}, got {values[at * _GRID]!r}; a shape "
                    "maps the fraction of the window that has passed to the fraction of the rate "
                    "that is left"
                )
        for i, (one, other) in enumerate(pairwise(values)):
            if not one >= other - 1e-9:  # NaN, too
                raise ValueError(
                    f"shape: expected a function that never rises, got {one!r} at {i / _GRID:g} "
                    f"and {other!r} at {(i + 1) / _GRID:g}"
                )

    def of_ages(self, ages: Any, k: Any, xp: Any = np) -> Any:
        """Return the weights of the samples between consecutive ages in a window of k samples.

        The samples younger than `a` and not younger than `b` have the weight
        D(1 - a/k) - D(1 - b/k): how much the rate falls while they arrive.

        Between the points at which it was checked, a function may still rise, leave [0, 1] or be
        NaN. The rate at an age is therefore clipped to [0, 1], and at least the rate at every
        younger age; NaN is left out. So no weight is negative or NaN, and all add up to 1.

        Examples:
            >>> Decay(100, "cosine").of_ages(np.array([100, 75, 50, 0]), 100).round(3)
            array([0.146, 0.354, 0.5  ])
        """
        x = xp.minimum(1.0, xp.divide(ages, k))
        younger = self._younger(x, xp)
        younger = xp.where(younger > 0.0, xp.minimum(younger, 1.0), 0.0)  # NaN becomes 0
        younger = xp.where(x < 1.0, xp.where(x > 0.0, younger, 0.0), 1.0)
        younger = xp.maximum.accumulate(younger[::-1], axis=0)[::-1]
        return younger[:-1] - younger[1:]

    def _younger(self, x: Any, xp: Any) -> Any:
        """Return the weight of all samples younger than x times the window."""
        if isinstance(self.shape, str):
            return _YOUNGER[self.shape](x, xp)
        passed = xp.ravel(1.0 - x)
        values = [self.shape(u) for u in (passed.tolist() if xp is np else passed)]
        return xp.reshape(xp.asarray(values, x.dtype), xp.shape(x))


Reading = AnyWindow | ByAge
"""What an `AnyTail` may be read with."""
