"""Weighted means of pieces of tensors, summed in float64 and rounded once. `merge.py` uses them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tailavg.checkpoints.checkpoint import Piece

__all__ = ["Mean", "widened"]


class Mean:
    """The weighted mean of pieces of one dtype and at most `size` numbers.

    A number that is bit-identical in all pieces is bit-identical in the mean: a NaN keeps its
    payload, and a float64 is not rounded. The memory is reused for the next mean.
    """

    def __init__(self, size: int) -> None:
        self._sums, self._terms = np.empty(size), np.empty(size)
        self._all_equal, self._equal = np.empty(size, bool), np.empty(size, bool)
        self._memory = np.empty(8 * size, np.uint8)
        self._first: Piece | None = None

    def add(self, piece: Piece, numbers: Piece, weight: float) -> None:
        """Add a piece with a weight that is not 0; `numbers` is `widened(piece)`."""
        size = len(piece)
        if self._first is None:
            self._first = self._memory[: piece.nbytes].view(piece.dtype)
            self._first[:] = piece
            self._all_equal[:size] = True
            self._sums[:size] = numbers
            self._sums[:size] *= weight
            return
        terms, equal = self._terms[:size], self._equal[:size]
        terms[:] = numbers
        terms *= weight
        self._sums[:size] += terms
        np.equal(_bits(piece), _bits(self._first), out=equal)
        self._all_equal[:size] &= equal

    def rounded(self, dtype: np.dtype[Any]) -> Piece:
        """Return the mean in a dtype, and reset it."""
        first, self._first = self._first, None
        assert first is not None, "a mean of no pieces"
        sums, all_equal = self._sums[: len(first)], self._all_equal[: len(first)]
        if dtype != first.dtype:
            np.copyto(sums, widened(first), where=all_equal)
            return _rounded(sums, dtype)
        mean = _rounded(sums, dtype)
        np.copyto(_bits(mean), _bits(first), where=all_equal)
        return mean


def widened(piece: Piece) -> Piece:
    """Return numbers in a dtype that NumPy adds fast: those of ml_dtypes become float32."""
    return piece if piece.dtype.kind == "f" else piece.astype(np.float32)


def _rounded(numbers: Piece, dtype: np.dtype[Any]) -> Piece:
    """Round float64 to a dtype, once.

    The casts of ml_dtypes go through float32, which would round twice. Therefore the float32 is
    rounded to odd: truncated, with the last bit set if the number is inexact. Then it is never
    halfway between two numbers of a coarser dtype.
    """
    if dtype.kind == "f":
        return numbers.astype(dtype)
    single = numbers.astype(np.float32)
    inexact = (single != numbers) & np.isfinite(single)
    bits = single.view(np.uint32)
    bits -= inexact & (np.abs(single) > np.abs(numbers))
    bits |= inexact
    return single.astype(dtype)


def _bits(piece: Piece) -> Piece:
    return piece.view(f"u{piece.itemsize}")
