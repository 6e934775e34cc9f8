"""The last samples themselves: the storage of `ExactWindow`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tailavg.numpy.average import Array, TailAverage
from tailavg.core.rules import ExactWindow, WindowRule
from tailavg.numpy.arithmetic import sum_rows, wide

__all__ = ["SampleStorage"]


class SampleStorage(TailAverage, rules=(ExactWindow,)):
    """See `TailAverage`. The samples stand in order in a buffer, the newest just before `_end`."""

    __slots__ = ("_buffer", "_end")

    _rule: ExactWindow

    def _reset(self) -> None:
        self._buffer: Array = np.empty((0, 0))
        self._end = 0

    def _start(self) -> None:
        self._buffer = np.empty((16, int(np.prod(self._shape))), self._dtype)
        self._end = 0

    def _add(self, x: Any) -> None:
        self._add_rows(np.reshape(x, (1, self._buffer.shape[1])))

    def _add_rows(self, rows: Array) -> None:
        after = self._count + len(rows)
        rows = rows[-self._rule.samples(after) :]
        if self._end + len(rows) > len(self._buffer):
            kept = self._held(self._rule.samples(after) - len(rows))
            room = np.empty((2 * (len(kept) + len(rows)) + 16, rows.shape[1]), self._dtype)
            room[: len(kept)] = kept
            self._buffer, self._end = room, len(kept)
        self._buffer[self._end : self._end + len(rows)] = rows
        self._end += len(rows)
        self._count = after

    def _held(self, samples: int) -> Array:
        """The last samples."""
        return self._buffer[self._end - samples : self._end]

    def _read(self, rule: WindowRule) -> Any:
        assert self._dtype is not None
        held = self._held(self._rule.samples(self._count))
        mean = (sum_rows(held, self._dtype) / len(held)).astype(self._dtype)
        return mean.item() if self._plain else mean.reshape(self._shape)

    def _scan_rows(self, rows: Array, out: Array) -> None:
        """Sums of runs of 1, 2, 4, … samples make those of any length: no difference is taken."""
        assert self._dtype is not None
        before = self._held(self._rule.samples(self._count))
        runs = np.concatenate([before, rows]).astype(wide(self._dtype))
        lengths = self._rule.samples(np.arange(self._count + 1, self._count + len(rows) + 1))
        ends = np.arange(len(before), len(runs))  # where the rest of each window ends
        sums = np.zeros((len(rows), rows.shape[1]), runs.dtype)
        run = 1
        while run <= lengths.max():
            windows = np.flatnonzero(lengths & run)
            sums[windows] += runs[ends[windows]]
            ends[windows] -= run
            runs[run:] = runs[run:] + runs[:-run]
            run *= 2
        out[...] = sums / lengths[:, None]
        self._add_rows(rows)

    def _starts_now(self) -> list[int]:
        return list(range(self._count - self._rule.samples(self._count), self._count))

    def _save(self) -> tuple[list[Any], int, Any]:
        if not self._count:
            return [], 0, 0.0
        held = self._held(self._rule.samples(self._count))
        blocks = held[:, 0].tolist() if self._plain else list(held.reshape(len(held), *self._shape))
        return blocks, self._count, 0.0

    def _restore(self, starts: list[int], blocks: list[Any], folded: int, partial: Any) -> None:
        if starts != self._starts_now() or folded != self._count or np.any(partial):
            raise ValueError(
                f"state: expected the last {self._rule.samples(self._count)} of {self._count} "
                f"samples and nothing to fold, got {len(starts)} that start at {starts[0]}"
            )
        self._buffer = np.reshape(
            np.array(blocks, self._dtype), (len(blocks), int(np.prod(self._shape)))
        )
        self._end = len(blocks)
