"""Blocks that cover the whole stream: the storage of `AnyTail`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tailavg.core.anytail import AnyTail
from tailavg.numpy.average import Array, TailAverage, numbers
from tailavg.core.profile import reading
from tailavg.core.rules import WindowRule, read
from tailavg.core.schedule import SUM, makes_room, terms, turn
from tailavg.numpy.arithmetic import CHUNK, FOLD, fold, sum_rows, wide
from tailavg.numpy.blocks import BlockStorage
from tailavg.core.windows import AnyWindow

__all__ = ["AnyTailStorage"]


class AnyTailStorage(BlockStorage, rules=(AnyTail,)):
    """See `TailAverage`. As `BlockStorage`, but no block is given up: two neighbours are merged."""

    __slots__ = ()

    _rule: AnyTail  # type: ignore[assignment]

    def _turn(self) -> None:
        self._fold()
        starts, means, t = self._starts, list(self._means), self._count
        gone, weight = makes_room(self._rule, starts, t)
        if gone:
            with np.errstate(invalid="ignore"):
                means[gone - 1] = means[gone - 1] * (1.0 - weight) + means.pop(gone) * weight
        self._arrange(turn(self._rule, starts, t), [*means, 0.0])
        self._set_sum(0.0)
        self._schedule()

    def value(self, window: AnyWindow | None = None) -> Any:
        return TailAverage.value(self, window)

    def _read(self, rule: WindowRule) -> Any:
        if not self._plain:
            return super()._read(rule)
        t = self._count
        return sum(
            weight * (self._sum if block == SUM else self._means[block])
            for weight, block in terms(self._starts, self._folded, t, rule.size(t))
        )

    def _add_rows(self, rows: Array) -> None:
        for part in self._runs(rows):
            self._take_run(part)

    def _runs(self, rows: Array) -> Any:
        """The rows in runs that end where a block is closed; the turn is made before the next."""
        done = 0
        while done < len(rows):
            if self._count == self._closes:
                self._turn()
            end = min(len(rows), done + self._closes - self._count)
            yield rows[done:end]
            done = end

    def _take_run(self, rows: Array) -> None:
        assert self._dtype is not None
        total: Any = sum_rows(rows, self._dtype)  # in double precision, until it is folded
        total = self._sum + (total.item() if self._plain else total.reshape(self._shape))
        self._count += len(rows)
        if (rest := self._count - self._folded) >= FOLD:
            mean, total = fold(self._means[-1], self._folded - self._starts[-1], total, rest)
            self._means[-1] = mean if self._plain else np.asarray(mean, self._dtype)
            self._folded = self._count
        self._set_sum(total)
        self._schedule()

    def scan(self, xs: Any, window: AnyWindow | Sequence[AnyWindow] | None = None) -> Array:
        several = isinstance(window, list | tuple)
        windows: Sequence[Any] = window if several else [window]  # type: ignore[assignment]
        if not windows:
            raise ValueError("window: expected at least one, got none")
        samples = numbers(xs, "samples")
        last = self._count + (len(samples) if samples.ndim else 0)
        if self._nan_policy == "omit" and samples.size:
            last -= int(np.isnan(samples).reshape(len(np.atleast_1d(samples)), -1).any(1).sum())
        rules = [reading(self._rule, one, last) for one in windows]
        before = [self.value(one) if self._count else np.nan for one in windows]
        rows, kept = self._take_rows(samples)
        if not len(rows):
            every = np.array([np.broadcast_to(value, np.shape(xs)) for value in before])
            return every if several else every[0]
        out: Array = np.empty((len(rules), len(rows), rows.shape[1]), self._dtype)
        done = 0
        for run in self._runs(rows):
            for rule, averages in zip(rules, out[:, done : done + len(run)], strict=True):
                self._scan_run(run, rule, averages)
            self._take_run(run)
            done += len(run)
        every = out.reshape(len(rules), len(rows), *self._shape)
        if kept is not None:  # a sample that is left out leaves the average as it was
            latest = np.cumsum(kept) - 1
            every = every[:, latest]
            for averages, value in zip(every, before, strict=True):
                averages[latest < 0] = value
        return every if several else every[0]

    def _scan_run(self, rows: Array, rule: WindowRule, out: Array) -> None:
        """The averages after each of the rows, all of which go into the open block."""
        assert self._dtype is not None
        t, width, dtype = self._count, rows.shape[1], wide(self._dtype)
        *closed, opened = pairwise([*self._starts, t])
        sizes = [end - start for start, end in closed]
        folded = self._folded - opened[0]
        total = np.reshape(self._sum + self._means[-1] * folded, width).astype(dtype)
        chunk = max(1, CHUNK // max(1, width))
        for first in range(0, len(rows), chunk):
            part = rows[first : first + chunk]
            steps = np.arange(t + first + 1.0, t + first + len(part) + 1.0)
            newest = steps - opened[0]
            *weights, weight = read([*sizes, newest], rule.size(steps))
            sums = total + np.cumsum(part, axis=0, dtype=dtype)
            total = sums[-1].copy()
            averages = sums * (weight / newest)[:, None]
            for mean, old in zip(self._means, weights, strict=False):
                needed = np.flatnonzero(old)  # a zero must not meet an infinity
                if len(needed) == len(part):
                    averages += old[:, None] * np.reshape(mean, width)
                elif len(needed):
                    averages[needed] += old[needed, None] * np.reshape(mean, width)
            out[first : first + len(part)] = averages
