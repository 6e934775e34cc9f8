"""`Samples`: the samples that an `ExactWindow` keeps."""

from __future__ import annotations

import numpy as np

from tailavg.core.rules import ExactWindow
from tailavg.numpy.arithmetic import Array, sum_in_order

__all__ = ["Samples"]


class Samples:
    """The last samples, in order, as the rows of a matrix. The newest is in row `_end` - 1.

    `added` writes only to rows from `_end` on, and returns a new object. The old object, therefore,
    still has its own samples.
    """

    __slots__ = ("_buffer", "_end")

    def __init__(self, rows: Array, room: int = 0) -> None:
        self._buffer: Array = np.empty((len(rows) + room, rows.shape[1]), rows.dtype)
        self._buffer[: len(rows)] = rows
        self._end = len(rows)

    def copy(self) -> Samples:
        """Return a copy that shares no memory."""
        return Samples(self._buffer[: self._end])

    def last(self, n: int) -> Array:
        """Return the last n samples."""
        return self._buffer[self._end - n : self._end]

    def added(self, rows: Array, needed: int) -> Samples:
        """Return the last `needed` samples of these samples followed by `rows`."""
        rows = rows[-needed:]
        base = self
        if self._end + len(rows) > len(self._buffer):
            base = Samples(self.last(needed - len(rows)), needed + 2 * len(rows) + 16)
        after = object.__new__(Samples)
        after._buffer, after._end = base._buffer, base._end + len(rows)
        after._buffer[base._end : after._end] = rows
        return after

    def mean(self, rule: ExactWindow, t: int) -> Array:
        """Return the mean of the window at step t, as a row."""
        kept = self.last(rule.samples(t))
        # cut as in `tailavg.numpy.kernel.scan_exact`, which adds in the same order
        power = 1 << (len(kept).bit_length() - 1)
        cut, dtype = len(kept) - t % power, kept.dtype
        total = sum_in_order(kept[:cut][::-1], dtype) + sum_in_order(kept[cut:], dtype)
        mean: Array = (total / len(kept)).astype(dtype)
        return mean
