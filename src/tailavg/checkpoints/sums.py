"""Weighted means of pieces of tensors: summed in float64, rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np

from tailavg.checkpoints.checkpoint import Piece
from tailavg.core.windows import Reals

__all__ = ["Mean", "widened"]


class Mean:
    """The weighted mean of pieces that have one dtype. Its memory serves one after another.

    Numbers with the same bits in all pieces keep these bits: those of a NaN, too, and a float64
    that a sum of its parts would round to another.

    Args:
        room: The most numbers in a piece.
    """

    def __init__(self, room: int) -> None:
        self._sums, self._terms = np.empty(room), np.empty(room)
        self._same, self._equal = np.empty(room, bool), np.empty(room, bool)
        self._memory = np.empty(8 * room, np.uint8)

    def start(self) -> None:
        """Forget all pieces."""
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
        """Return the mean in a dtype."""
        first = self._first
        assert first is not None, "a mean of no pieces"
        sums, same = self._sums[: len(first)], self._same[: len(first)]
        mean = np.empty(len(first), dtype)
        if dtype == first.dtype:
            _round(sums, mean)
            np.copyto(_bits(mean), _bits(first), where=same)
        else:
            np.copyto(sums, widened(first), where=same)
            _round(sums, mean)
        return mean


def widened(piece: Piece) -> Piece:
    """Return numbers in a dtype that NumPy is quick to add: their own, or float32."""
    if piece.dtype.kind == "f":
        return piece
    if piece.itemsize > 1:
        return piece.astype(np.float32)
    every = np.arange(256, dtype=np.uint8).view(piece.dtype).astype(np.float32)
    return every[piece.view(np.uint8)]


def _bits(piece: Piece) -> Piece:
    return piece.view(f"u{piece.itemsize}")


def _round(numbers: Reals, out: Piece) -> None:
    """Round float64 to another dtype, once."""
    if out.dtype.kind == "f":
        out[...] = numbers
        return
    # dtypes that NumPy lacks, by way of float32
    single = numbers.astype(np.float32)
    unclear: Any = slice(None)
    if out.itemsize == 2:  # halfway between two bfloat16, or close to it
        unclear = np.flatnonzero(single.view(np.uint32) & 0xFFFF == 0x8000)
    _cut_to_odd(numbers, single, unclear)
    out[...] = single


def _cut_to_odd(numbers: Reals, single: Piece, where: Any) -> None:
    """Cut what is not exact in float32, and make it odd: it is then no tie for a coarser dtype."""
    some = single[where]
    more = (some != numbers[where]) & np.isfinite(some)
    bits = some.view(np.uint32)
    bits -= more & (np.abs(some) > np.abs(numbers[where]))
    bits |= more
    single[where] = some
