"""Sums and means with small rounding errors, for the modules of this folder."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from tailavg.core.clock import FOLD

__all__ = ["Array", "aligned_zeros", "joined", "sum_in_order", "sum_rows", "wide"]

Array = npt.NDArray[Any]

_SMALL = 4096  # bytes: alignment does not pay for less


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
