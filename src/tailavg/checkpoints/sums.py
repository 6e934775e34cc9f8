"""Weighted means of pieces of tensors, summed in float64 and rounded once. `merge.py` uses them.

With the compiled loops of `loops.py` or without, results are bit-identical.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from tailavg.checkpoints.checkpoint import Piece

__all__ = ["Mean"]

BLOCK = 2**16
"""The numbers to round at once, so that temporaries stay in the cache."""


class Mean:
    """The weighted mean of pieces of one dtype and at most `size` numbers.

    A number that is bit-identical in all pieces is bit-identical in the mean: a NaN keeps its
    payload, and a float64 is not rounded. The memory is reused for the next mean.
    """

    def __init__(self, size: int, loops: SimpleNamespace | None) -> None:
        self._loops = loops
        self._sums, self._terms = np.empty(size), np.empty(size)
        self._first, self._changed = np.empty(8 * size, np.uint8), np.empty(size, bool)
        self._started = False

    def add(self, piece: Piece, weight: float) -> None:
        """Add a piece with a weight that is not 0."""
        bits, sums, terms = _bits(piece), self._sums[: len(piece)], self._terms[: len(piece)]
        first, changed = self._first.view(bits.dtype)[: len(bits)], self._changed[: len(bits)]
        if not self._started:
            self._started = True
            first[:], changed[:], sums[:] = bits, False, -0.0  # -0.0 + x is x, also for -0.0
        if self._loops is not None and piece.dtype.name in ("float64", "float32"):
            self._loops.add(sums, changed, first, bits, piece, weight)
        elif self._loops is not None and piece.dtype.name == "bfloat16":
            self._loops.add_bfloat16(sums, changed, first, bits, weight)
        else:
            terms[:] = piece
            terms *= weight
            sums += terms
            changed |= np.not_equal(bits, first, out=terms.view(bool)[: len(bits)])

    def round_into(self, out: Piece, dtype: np.dtype[Any]) -> None:
        """Round the mean of pieces of a dtype into `out`, and reset it."""
        self._started = False
        sums, first = self._sums[: len(out)], self._first.view(dtype)[: len(out)]
        changed = self._changed[: len(out)]
        if out.dtype != dtype:
            np.copyto(sums, first, where=~changed)
        if self._loops is not None and out.dtype.name == "bfloat16":
            self._loops.round_bfloat16(sums, _bits(out))
        else:
            _round(sums, out)
        if out.dtype != dtype:
            return
        if self._loops is not None:
            self._loops.keep_unchanged(_bits(out), changed, _bits(first))
        else:
            np.copyto(_bits(out), _bits(first), where=~changed)


def _round(numbers: Piece, out: Piece) -> None:
    """Round float64 to the dtype of `out`, once.

    The casts of ml_dtypes go through float32, which would round twice. This matters only where the
    float32 is halfway between two numbers of the dtype, so that its last bits are zero. There, an
    inexact float32 is moved towards the float64, but not as far as another number or halfway point.
    """
    if out.dtype.isbuiltin == 1:  # of NumPy itself, whose casts round once
        out[:] = numbers
        return
    import ml_dtypes

    finfo: Any = ml_dtypes.finfo
    step = 1 << (21 - finfo(out.dtype).nmant)
    for start in range(0, len(out), BLOCK):
        block = numbers[start : start + BLOCK]
        single = block.astype(np.float32)
        bits = single.view(np.uint32)
        wrong = np.flatnonzero((bits & (2 * step - 1) == 0) & (single != block))
        farther = np.abs(block[wrong]) > np.abs(single[wrong])
        bits[wrong] = np.where(farther, bits[wrong] + step, bits[wrong] - step)
        out[start : start + BLOCK] = single


def _bits(piece: Piece) -> Piece:
    return piece.view(f"u{piece.itemsize}")
