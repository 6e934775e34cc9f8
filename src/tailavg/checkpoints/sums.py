"""Weighted means of pieces of tensors, summed in float64 and rounded once. `merge.py` uses them.

With the compiled loops of `loops.py` or without, results are bit-identical.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from tailavg.checkpoints.checkpoint import Piece

__all__ = ["Mean"]


class Mean:
    """The weighted mean of pieces of one dtype and at most `size` numbers.

    A number that is bit-identical in all pieces is bit-identical in the mean: a NaN keeps its
    payload, and a float64 is not rounded. The memory is reused for the next mean.
    """

    def __init__(self, size: int, loops: SimpleNamespace | None) -> None:
        self._loops = loops
        self._sums, self._terms = np.empty(size), np.empty(size)
        self._first, self._changed, self._spare = (np.empty(8 * size, np.uint8) for _ in range(3))
        self._started = False

    def add(self, piece: Piece, weight: float) -> None:
        """Add a piece with a weight that is not 0."""
        bits, sums = _bits(piece), self._sums[: len(piece)]
        first, changed = _like(bits, self._first), _like(bits, self._changed)
        if not self._started:
            self._started = True
            first[:], changed[:], sums[:] = bits, 0, -0.0  # -0.0 + x is x, also if x is -0.0
        if self._loops is not None and piece.dtype.name in ("float64", "float32"):
            self._loops.add(sums, changed, first, bits, piece, weight)
        elif self._loops is not None and piece.dtype.name == "bfloat16":
            self._loops.add_bfloat16(sums, changed, first, bits, weight)
        else:
            terms, differences = self._terms[: len(piece)], _like(bits, self._spare)
            terms[:] = piece
            terms *= weight
            sums += terms
            np.bitwise_xor(bits, first, out=differences)
            changed |= differences

    def round_into(self, out: Piece, dtype: np.dtype[Any]) -> None:
        """Round the mean of pieces of a dtype into `out`, and reset it."""
        self._started = False
        sums, first = self._sums[: len(out)], self._first.view(dtype)[: len(out)]
        equal = _like(_bits(first), self._changed) == 0
        if out.dtype != dtype:
            np.copyto(sums, first, where=equal)
        if self._loops is not None and out.dtype.name == "bfloat16":
            self._loops.round_bfloat16(sums, _bits(out))
        else:
            _round(sums, out)
        if out.dtype == dtype:
            np.copyto(_bits(out), _bits(first), where=equal)


def _round(numbers: Piece, out: Piece) -> None:
    """Round float64 to the dtype of `out`, once.

    The casts of ml_dtypes go through float32, which would round twice. This matters only where the
    float32 is halfway between two numbers of the coarser dtype, so its last 15 bits are zero. There
    an inexact float32 is moved by its last bit, towards the float64.
    """
    if out.dtype.kind == "f":
        out[:] = numbers
        return
    single = numbers.astype(np.float32)
    bits = single.view(np.uint32)
    halfway = np.flatnonzero(bits & 0x7FFF == 0)
    exact, near = np.abs(numbers[halfway]), np.abs(single[halfway])
    bits[halfway] += exact > near
    bits[halfway] -= exact < near
    out[:] = single


def _bits(piece: Piece) -> Piece:
    return piece.view(f"u{piece.itemsize}")


def _like(piece: Piece, memory: Piece) -> Piece:
    """Return memory as an array of the dtype and length of a piece."""
    return memory[: piece.nbytes].view(piece.dtype)
