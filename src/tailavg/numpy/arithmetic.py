"""Sums and means with small rounding errors, for the modules of this folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tailavg.core.clock import FOLD, SUM

__all__ = [
    "MEAN",
    "NOISE",
    "STD",
    "Array",
    "Of",
    "Statistic",
    "aligned_zeros",
    "centred",
    "joined",
    "joined_variance",
    "merged_variance",
    "spread",
    "sum_in_order",
    "sum_rows",
    "wide",
]

Array = npt.NDArray[Any]
Of = Literal["mean", "variance", "std"]
MEAN, STD = 0, 2
_NAMES: tuple[Of, ...] = ("mean", "variance", "std")

NOISE = FOLD / 2
"""A sum of equal samples is off by at most this many relative rounding errors."""

_SMALL = 4096  # bytes: alignment does not pay for less


class Statistic(NamedTuple):
    """What to read: the average, or the variance or standard deviation of its samples."""

    of: int = MEAN
    """`MEAN`, 1 for the variance, or `STD`."""
    ddof: int = 1

    @classmethod
    def named(cls, of: Of, ddof: int) -> Statistic:
        """Return a statistic by its name. Raise a ValueError if there is none."""
        if of not in _NAMES:
            raise ValueError(f"of: expected one of {_NAMES}, got {of!r}")
        if type(ddof) is not int or ddof not in (0, 1):
            raise ValueError(f"ddof: expected 0 or 1, got {ddof!r}")
        return cls(_NAMES.index(of), ddof)

    @property
    def name(self) -> Of:
        """The name of the statistic."""
        return _NAMES[self.of]

    def of_spread(self, spread: Any, weights_squared: Any) -> Any:
        """Return the statistic, given the weighted mean squared deviation and Σ α²."""
        # one sample has no rounding errors, but it may be NaN
        spread = spread * (weights_squared < 1.0)
        if self.ddof:
            spread = np.divide(spread, 1.0 - weights_squared)  # one sample has no variance: NaN
        return np.sqrt(spread) if self.of == STD else spread


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return zeros that start on a cache line: an in-place add is then a quarter faster."""
    size = math.prod(shape) * dtype.itemsize
    if size <= _SMALL:
        return np.zeros(shape, dtype)
    memory = np.zeros(size + 64, np.uint8)
    offset = -memory.ctypes.data % 64
    return memory[offset : offset + size].view(dtype).reshape(shape)


def joined(mean: Any, summed: Any, total: float, weight: float, carry: float) -> tuple[Any, Any]:
    """Return a mean merged with a sum, and the rounding error, which starts the next sum.

    A thousand folds then lose no more digits than one. See `tailavg.core.clock.Store.fold`.
    """
    if not isinstance(summed, np.ndarray):
        fresh = summed / total
        if weight == 1.0:
            return fresh, 0.0
        step = (fresh - mean) * weight
        joint = mean + step
        lost = (step - (joint - mean)) * carry
        # inf - inf is NaN
        return (joint, lost) if lost - lost == 0 else (mean * (1 - weight) + fresh * weight, 0.0)
    with np.errstate(all="ignore"):
        fresh = summed / total
        if weight == 1.0:
            return fresh, 0.0
        step = (fresh - mean) * weight
        joint = (mean + step).astype(mean.dtype, copy=False)  # a sum may have more precision
        lost = (step - (joint - mean)) * carry
        if not np.isfinite(lost).all():
            finite = np.isfinite(lost)
            joint = np.where(finite, joint, mean * (1 - weight) + fresh * weight)
            lost = np.where(finite, lost, 0)
    return joint, lost


def joined_variance(
    mean: Any, variance: Any, summed: Any, squares: Any, total: float, weight: float, carry: float
) -> tuple[Any, Any]:
    """Return the variance that goes with the mean of `joined`, and the rounding error.

    `squares` is like `summed`, for the squared deviations from `mean`. With a weight of 1, `mean`
    is only the shift of these deviations.
    """
    with np.errstate(all="ignore"):
        moved = summed / total - mean
        centred = squares - (total * weight) * moved * moved
    joint, lost = joined(variance, centred, total, weight, carry)
    if isinstance(joint, np.ndarray):
        return np.maximum(joint, 0.0, dtype=joint.dtype), lost
    return (0.0 if joint < 0.0 else joint), lost


def merged_variance(mean: Any, variance: Any, other: Any, of_other: Any, weight: float) -> Any:
    """Return the variance of two merged blocks; `weight` is the weight of the other block's mean.

    Chan, Golub and LeVeque (1983), "Algorithms for computing the sample variance".
    """
    apart = other - mean
    return variance * (1.0 - weight) + of_other * weight + weight * (1.0 - weight) * apart * apart


def spread(
    terms: Sequence[tuple[float, int]], means: Any, variances: Any, total: Any, squares: Any
) -> Any:
    """Return the weighted mean squared deviation from the average that `terms` describe.

    Deviations are first taken from the newest of the means; that is the shift of `squares`.
    """
    newest = means[terms[-1][1]]  # SUM is the index of the last mean
    dtype = np.result_type(newest)
    shift = newest if isinstance(newest, float) else np.asarray(newest, wide(dtype))
    first, second, in_sum = 0.0, 0.0, 1.0
    for weight, block in terms:
        if block == SUM:  # the last term; what is left of 1 is the weight of its samples
            first = first + (weight * total - in_sum * shift)
            second = second + weight * squares
        else:
            apart, in_sum = means[block] - shift, in_sum - weight
            first = first + weight * apart
            second = second + weight * (variances[block] + apart * apart)
    return centred(first, second, shift, dtype)


def centred(first: Any, second: Any, shift: Any, dtype: np.dtype[Any]) -> Any:
    """Return a variance, given the mean and the mean square of deviations from the `shift`.

    It is 0 where it may be a rounding error of sums in this dtype.
    """
    eps, squared = np.finfo(dtype).eps, first * first
    limit = NOISE * eps * (shift + first)
    variance, noise = second - squared, limit * limit + 4.0 * eps * squared
    if isinstance(variance, float):  # faster than arrays
        return 0.0 if variance <= noise else variance
    return np.where(variance <= noise, 0.0, variance)


def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype for sums over many samples: at least double precision."""
    return np.result_type(dtype, np.float64)


def sum_in_order(rows: Array, dtype: np.dtype[Any]) -> Array:
    """Return the sum over the first axis, added one row after another."""
    if rows.shape[1] == 1 and len(rows):  # NumPy would add one column pairwise
        total: Array = np.add.accumulate(rows[:, 0], dtype=wide(dtype))[-1:]
    else:
        total = np.add.reduce(rows, axis=0, dtype=wide(dtype))
    return total


def sum_rows(rows: Array, dtype: np.dtype[Any]) -> Array:
    """Return the sum over the first axis, added pairwise or in groups for small rounding errors."""
    if rows.shape[1] == 1:
        total: Array = np.add.reduce(rows[:, 0], keepdims=True, dtype=wide(dtype))
        return total
    groups = len(rows) // FOLD
    sums: Array = np.add.reduce(rows[groups * FOLD :], axis=0, dtype=wide(dtype))
    if groups:
        grouped = rows[: groups * FOLD].reshape(groups, FOLD, rows.shape[1])
        partial = np.add.reduce(grouped, axis=1, dtype=np.result_type(rows.dtype, dtype))
        sums += sum_rows(partial, dtype)
    return sums
