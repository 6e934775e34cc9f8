"""Weighted means of pieces of tensors: summed in float64, rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np

from tailavg.checkpoints.checkpoint import Piece

__all__ = ["Mean", "widened"]


class Mean:
    """The weighted mean of pieces that have one dtype, of at most `size` numbers.

    Numbers with the same bits in all pieces keep these bits: those of a NaN, too, and a float64
    that a sum of its parts would round to another. One mean after another uses the same memory.
    """

    def __init__(self, size: int) -> None:
        self._sums, self._terms = np.empty(size), np.empty(size)
        self._same, self._equal = np.empty(size, bool), np.empty(size, bool)
        self._memory = np.empty(8 * size, np.uint8)
        self._first: Piece | None = None

    def add(self, piece: Piece, numbers: Piece, weight: float) -> None:
        """Add a piece, which `widened` turned into numbers, with a weight that is not 0."""
        size = len(piece)
        if self._first is None:
            self._first = self._memory[: piece.nbytes].view(piece.dtype)
            self._first[:] = piece
            self._same[:size] = True
            self._sums[:size] = numbers
            self._sums[:size] *= weight
            return
        terms, equal = self._terms[:size], self._equal[:size]
        terms[:] = numbers
        terms *= weight
        self._sums[:size] += terms
        np.equal(_bits(piece), _bits(self._first), out=equal)
        self._same[:size] &= equal

    def rounded(self, dtype: np.dtype[Any]) -> Piece:
        """Return the mean in a dtype, and start anew."""
        first, self._first = self._first, None
        assert first is not None, "a mean of no pieces"
        sums, same = self._sums[: len(first)], self._same[: len(first)]
        if dtype != first.dtype:
            np.copyto(sums, widened(first), where=same)
            return _rounded(sums, dtype)
        mean = _rounded(sums, dtype)
        np.copyto(_bits(mean), _bits(first), where=same)
        return mean


def widened(piece: Piece) -> Piece:
    """Return numbers in a dtype that NumPy is quick to add: their own, or float32."""
    return piece if piece.dtype.kind == "f" else piece.astype(np.float32)


def _rounded(numbers: Piece, dtype: np.dtype[Any]) -> Piece:
    """Round float64 to a dtype, once. ml_dtypes goes through float32, which would round twice.

    So float32 is rounded to odd: truncated, and made odd if that changed the number. Then it is
    never halfway between two numbers of a coarser dtype.
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
