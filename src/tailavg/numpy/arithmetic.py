"""Arithmetic that storages share: sums and means that keep their digits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["CHUNK", "FOLD", "aligned_zeros", "fold", "running_sums", "sum_rows", "wide"]

Array = npt.NDArray[Any]

FOLD = 256
"""How many samples are summed before the sum is folded into a mean: a float32 keeps 5 digits."""

CHUNK = 15000
"""How many numbers a scan takes at once: few enough for the cache, and for one thread of BLAS."""

_PIECE = 15
_ONES = np.ones(_PIECE + 1)
_TRIANGLE = np.triu(np.ones((_PIECE + 1, _PIECE)), k=-1)


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Zeros that start on a cache line, which an in-place add is a quarter faster on."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(size + 64, np.uint8)
    offset = -memory.ctypes.data % 64
    return memory[offset : offset + size].view(dtype).reshape(shape)


def fold(mean: Any, count: int, total: Any, rest: int) -> tuple[Any, Any]:
    """Fold the sum of `rest` samples into the mean of `count` others: the joint mean, and a rest.

    That rest is what the joint mean lost to rounding, as a part of a sum: it goes into the next
    one, so that a thousand folds round no more than one.
    """
    fresh = total / rest
    if not count:
        return fresh, 0.0
    weight = rest / (count + rest)
    if not isinstance(total, np.ndarray):
        step = (fresh - mean) * weight
        joint = mean + step
        lost = (step - (joint - mean)) * (count + rest)
        # there is no difference of infinities
        return (joint, lost) if lost - lost == 0 else (mean * (1 - weight) + fresh * weight, 0.0)
    with np.errstate(invalid="ignore"):
        step = (fresh - mean) * weight
        joint = (mean + step).astype(mean.dtype, copy=False)  # a sum may come in more precision
        lost = (step - (joint - mean)) * (count + rest)
        if not np.isfinite(lost).all():
            finite = np.isfinite(lost)
            joint = np.where(finite, joint, mean * (1 - weight) + fresh * weight)
            lost = np.where(finite, lost, 0)
    return joint, lost


def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of sums over many samples: at least double precision."""
    return np.result_type(dtype, np.float64)


def sum_rows(rows: Array, dtype: np.dtype[Any]) -> Array:
    """The sum over the first axis, by halves or in groups: never a long chain of additions."""
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


def running_sums(x: Array, start: float = 0.0) -> Array:
    """The sums of `start` and the first 1, 2, … of each row of a matrix of real numbers.

    `np.cumsum` waits for each addition before the next. Here pieces of numbers are summed at
    once, by a product with a triangle of ones, which also rounds less.
    """
    n, size = x.shape
    whole = size // _PIECE
    pieces = np.empty((n, whole + 1, _PIECE + 1))
    pieces[:, :, 0] = 0.0
    pieces[:, :whole, 1:] = x[:, : whole * _PIECE].reshape(n, whole, _PIECE)
    pieces[:, whole, 1:] = 0.0
    pieces[:, whole, 1 : 1 + size - whole * _PIECE] = x[:, whole * _PIECE :]
    rows = pieces.reshape(-1, _PIECE + 1)
    with np.errstate(invalid="ignore", over="ignore"):
        totals = (rows @ _ONES).reshape(n, -1)
    if not (
        np.isfinite(totals).all() and math.isfinite(start)
    ):  # a zero of the triangle must not meet an infinity
        return start + np.cumsum(x, axis=1, dtype=np.float64)
    totals[:, 0] += start
    pieces[:, 0, 0] = start
    np.add.accumulate(totals[:, :-1], axis=1, out=pieces[:, 1:, 0])
    sums = np.empty((len(rows), _PIECE))
    for first in range(0, len(rows), 1024):  # one that is larger would be shared out to threads
        part = slice(first, first + 1024)
        np.matmul(rows[part], _TRIANGLE, sums[part])
    return sums.reshape(n, -1)[:, :size]
