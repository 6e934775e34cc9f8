"""Arithmetic that storages share: sums and means that keep their digits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["CHUNK", "FOLD", "aligned_zeros", "lerp", "sum_rows", "wide"]

Array = npt.NDArray[Any]

FOLD = 256
"""How many samples are summed before the sum is folded into a mean.

A float32 sum of 256 samples keeps 5 digits, and so does a mean that was folded a thousand times.
"""

CHUNK = 8192
"""How many numbers a scan sums at once: few enough for the cache, and for 13 digits of float64."""


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Zeros that start on a cache line, which an in-place add is a quarter faster on."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(size + 64, np.uint8)
    offset = -memory.ctypes.data % 64
    return memory[offset : offset + size].view(dtype).reshape(shape)


def lerp(a: Any, b: Any, weight: float) -> Any:
    """a + (b - a) weight, which a constant stream leaves alone; right for infinities too."""
    with np.errstate(invalid="ignore"):
        mean = a + (b - a) * weight
        if np.isnan(mean).any():
            return a * (1.0 - weight) + b * weight
    return mean


def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of sums over many samples: at least double precision."""
    return np.result_type(dtype, np.float64)


def sum_rows(rows: Array, dtype: np.dtype[Any]) -> Array:
    """The sum over the first axis, by halves or in groups: never a long chain of additions."""
    if rows.shape[1] == 1:
        return np.add.reduce(rows[:, 0], keepdims=True, dtype=wide(dtype))
    groups = len(rows) // FOLD
    sums = np.add.reduce(rows[groups * FOLD :], axis=0, dtype=wide(dtype))
    if groups:
        grouped = rows[: groups * FOLD].reshape(groups, FOLD, rows.shape[1])
        partial = np.add.reduce(grouped, axis=1, dtype=np.result_type(rows.dtype, dtype))
        sums += sum_rows(partial, dtype)
    return sums
