"""Blocks of consecutive samples: the storage of `AnytimeWindow` and `RawTail`.

Of each block it holds the mean. The open block is a mean of what has been folded and a sum of
what has not: each sample is added to that sum, and nothing else happens until the next event, the
fold of the sum or the turn of the blocks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from tailavg.numpy.average import Array, TailAverage
from tailavg.core.rules import AnytimeWindow, BlockRule, RawTail, WindowRule, read, root
from tailavg.core.schedule import SUM, advance, check_starts, oldest_needed, period, terms, turn
from tailavg.numpy.arithmetic import (
    CHUNK,
    FOLD,
    aligned_zeros,
    fold,
    running_sums,
    sum_rows,
    wide,
)
from tailavg.core.windows import AnyWindow

__all__ = ["BlockStorage"]


_STEPS = np.arange(1.0, CHUNK + 1.0)
_add, _ndarray = np.add, np.ndarray  # a look-up less in each update


class BlockStorage(TailAverage, rules=(AnytimeWindow, RawTail)):
    """See `TailAverage`."""

    __slots__ = (
        "_arrays_until",
        "_closes",
        "_floats_until",
        "_folded",
        "_means",
        "_plan",
        "_starts",
        "_sum",
    )

    _rule: BlockRule

    def _reset(self) -> None:
        self._starts: list[int] = []
        self._means: list[Any] = []  # 0.0 where the open block has nothing folded
        self._folded = 0
        self._sum: Any = 0.0
        self._closes = 0
        self._arrays_until = self._floats_until = -1
        self._plan: tuple[Any, ...] = (-1,)

    def _start(self) -> None:
        if not self._plain:
            assert self._dtype is not None
            self._sum = aligned_zeros(self._shape, self._dtype)
        self._arrange([0], [0.0])
        self._schedule()

    def _schedule(self) -> None:
        """Look up when the next event is due, after the last one."""
        due = min(self._closes, self._folded + FOLD) if self._nan_policy == "propagate" else -1
        self._floats_until = due if self._floats else -1
        self._arrays_until = -1 if self._plain else due
        self._plan = (-1,)

    def _arrange(self, starts: list[int], means: list[Any]) -> None:
        """Hold these blocks."""
        self._starts, self._means = starts, means
        self._closes = self._rule.closes(starts)

    def update(self, x: Any) -> None:
        t = self._count
        if x.__class__ is float:
            if t < self._floats_until:
                self._sum += x
                self._count = t + 1
                return
            if self._floats_until > 0:  # an event is due, and nothing needs a check
                self._add(x)
                return
        elif (
            t < self._arrays_until
            and x.__class__ is _ndarray
            and x.shape == self._shape
            and x.dtype is self._dtype
        ):
            _add(self._sum, x, self._sum)
            self._count = t + 1
            return
        elif t < self._floats_until and isinstance(x, float | int):
            self._sum += float(x)
            self._count = t + 1
            return
        TailAverage.update(self, x)

    def _add(self, x: Any) -> None:
        if self._count == self._closes:
            self._turn()
        elif self._count >= self._folded + FOLD:
            self._fold()
            self._schedule()
        if self._plain:
            self._sum += x
        else:
            np.add(self._sum, x, self._sum, casting="same_kind")
        self._count += 1

    def _fold(self) -> None:
        """Fold the sum into the mean of the open block."""
        folded, rest = self._folded - self._starts[-1], self._count - self._folded
        if rest:
            mean, lost = fold(self._means[-1], folded, self._sum, rest)
            self._means[-1] = mean if self._plain else np.asarray(mean, self._dtype)
            self._set_sum(lost)
            self._folded = self._count

    def _held(self, row: Array) -> Any:
        """A row of a matrix of samples, as it is held."""
        return row.item() if self._plain else row.reshape(self._shape).astype(self._dtype)

    def _set_sum(self, total: Any) -> None:
        """Overwrite the sum (a sum that was multiplied by 0 would keep a NaN)."""
        if self._plain:
            self._sum = total
        else:
            self._sum[...] = total

    def _turn(self) -> None:
        """Close the open block and open the next."""
        self._fold()
        starts = turn(self._rule, self._starts, self._count)
        self._arrange(starts, [*self._means, 0.0][-len(starts) :])
        self._set_sum(0.0)
        self._schedule()

    def value(self, window: AnyWindow | None = None) -> Any:
        t = self._count
        plan = self._plan
        if t >= plan[0] or window is not None:
            if window is not None or not (self._plain and t):
                return TailAverage.value(self, window)
            self._plan = plan = self._split(t)
        _, old, old_mean, since, folded, folded_mean = plan
        newer = t - since
        excess = newer + old - self._rule.size(t)
        g = root(old, newer, excess if excess > 0.0 else 0.0)
        return (1.0 - g) * (folded_mean * (folded / newer) + self._sum / newer) + g * old_mean

    def _read(self, rule: WindowRule) -> Any:
        """The average of arrays: the means of the blocks that have a weight."""
        t = self._count
        value = np.zeros(self._shape, self._dtype)
        for weight, block in terms(self._starts, self._folded, t, rule.size(t)):
            value += weight * (self._sum if block == SUM else self._means[block])
        return value

    def _split(self, t: int) -> tuple[Any, ...]:
        """How the average is read from step t on, until the step that comes first.

        The oldest block still needed (its size and mean) is joined to all the newer samples:
        those since a step, of which some are folded (how many, and their mean). Until the step
        that comes first, the newer samples alone do not suffice.
        """
        oldest, until = oldest_needed(self._rule, self._starts, t)
        last = len(self._starts) - 1
        if oldest == last:
            old, old_mean, since = 0, 0.0, self._starts[-1]
        else:
            since = self._starts[oldest + 1]
            old, old_mean = since - self._starts[oldest], self._means[oldest]
        folded = self._folded - since
        folded_mean = 0.0
        if folded:
            ends = [*self._starts[1:], self._folded]
            for block in range(min(oldest + 1, last), last + 1):
                if share := (ends[block] - self._starts[block]) / folded:
                    folded_mean = folded_mean + self._means[block] * share
        return until, old, old_mean, since, folded, folded_mean

    def _add_rows(self, rows: Array) -> None:
        assert self._dtype is not None
        before, after = self._count, self._count + len(rows)
        if before == self._closes:
            self._turn()
        starts = advance(self._rule, self._starts, after)
        held = dict(zip(self._starts, self._means, strict=True))
        means = []
        for start, end in pairwise([*starts, after]):
            mean = held.get(start, 0.0)
            if end > before:
                total: Any = sum_rows(rows[max(0, start - before) : end - before], self._dtype)
                total = total.item() if self._plain else total.reshape(self._shape)
                folded = start
                if start in held:
                    folded = self._folded
                    total = total + self._sum
                if end < after or end - folded >= FOLD:
                    mean, total = fold(mean, folded - start, total, end - folded)
                    mean = mean if self._plain else np.asarray(mean, self._dtype)
                    folded = end
            means.append(mean)
        self._arrange(starts, means)
        self._folded, self._count = folded, after
        self._set_sum(total)
        self._schedule()

    def _scan_rows(self, rows: Array, out: Array) -> None:
        done = 0
        while done < len(rows):
            if self._count == self._closes:
                done += self._scan_blocks(rows[done:], out[done:])
                if done == len(rows):
                    break
                self._turn()
            n = min(self._closes - self._count, len(rows) - done)
            self._scan_open(rows[done : done + n], out[done : done + n])
            done += n

    def _scan_open(self, rows: Array, out: Array) -> None:
        """Scan samples of the open block: their running sums, by weights that follow t."""
        assert self._dtype is not None
        t, width, dtype = self._count, rows.shape[1], wide(self._dtype)
        chunk = max(1, CHUNK // max(1, width))
        real_numbers = width == 1 and dtype == np.float64
        done = until = 0
        while done < len(rows):
            if t + done + 1 >= until:
                until, old, old_mean, since, folded, folded_mean = self._split(t + done + 1)
                total = np.reshape(self._sum + folded_mean * folded, width)
                total = total + sum_rows(rows[:done], self._dtype)
            part = slice(done, min(done + chunk, len(rows), until - 1 - t))
            steps = _STEPS[: part.stop - done] + (t + done)
            newer = steps - since
            if real_numbers:
                sums = running_sums(rows[part].T, total[0]).T
            else:
                sums = total + np.cumsum(rows[part], axis=0, dtype=dtype)
            total = sums[-1].copy()
            if old:
                excess = newer + old
                excess -= self._rule.size(steps)
                if excess[0] < 0.0:
                    excess *= excess > 0.0
                g = root(float(old), newer, excess)
                np.divide(1.0 - g, newer, newer)
                sums *= newer[:, None]
                if real_numbers:
                    g *= old_mean
                    np.add(sums, g[:, None], out[part])
                else:
                    np.add(sums, g[:, None] * np.reshape(old_mean, width), out[part])
            else:
                np.divide(sums, newer[:, None], out[part])
            done = part.stop
        self._count = t + len(rows)
        self._set_sum(self._sum + self._held(sum_rows(rows, self._dtype)))
        if self._count - self._folded >= FOLD:
            self._fold()
        self._schedule()

    def _scan_blocks(self, rows: Array, out: Array) -> int:
        """Scan whole blocks at once, if from here on all are alike: their weights repeat.

        The number of rows done.
        """
        assert self._dtype is not None
        size, until = period(self._rule, self._starts)
        width, dtype = rows.shape[1], wide(self._dtype)
        done, end = 0, min(until - self._count, len(rows)) // size * size if size else 0
        numbers, small = width == 1 and dtype == np.float64, size * width <= CHUNK
        if end < 2 * size or not size or not (numbers or small):
            return 0
        z = self._rule.accumulators - 1
        sizes = np.arange(1.0, size + 1.0)
        *closed, opened = read([*[size] * z, sizes], self._rule.size(self._count))
        weights, each = np.reshape(closed, (z, size)), opened / sizes
        shares = np.full(size, 1.0 / size)
        self._fold()
        means = np.reshape(self._means, (z + 1, width)).astype(dtype)
        blocks = max(1, 8 * CHUNK // (size * max(1, width)))
        while done < end:
            part = slice(done, min(end, done + blocks * size))
            n = (part.stop - done) // size
            x = rows[part].reshape(n, size, width).astype(dtype, copy=False)
            with np.errstate(invalid="ignore", over="ignore"):
                latest = x[:, :, 0] @ shares if numbers else x.sum(axis=1) / size
            means = np.concatenate([means[len(means) - z :], latest.reshape(n, width)])
            averages = out[part].reshape(x.shape)
            if numbers and np.isfinite(means).all():
                _scan_finite_blocks(x[:, :, 0], means[:, 0], weights, each, averages[:, :, 0])
            elif small:
                sums = np.cumsum(x, axis=1)
                sums *= each[:, None]
                for block, weight in enumerate(weights):
                    needed = np.count_nonzero(weight)  # a zero must not meet an infinity
                    old = means[block : block + n, None]
                    sums[:, :needed] += old * weight[:needed, None]
                averages[...] = sums
            else:
                break
            self._means = [self._held(mean) for mean in means[-1 - z :]]
            done = part.stop
        if done:
            self._count += done
            starts = [self._count - i * size for i in range(z + 1, 0, -1)]
            self._arrange(starts, self._means)
            self._folded = self._count
            self._set_sum(0.0)
            self._schedule()
        return done

    def _starts_now(self) -> list[int]:
        return list(self._starts)

    def _save(self) -> tuple[list[Any], int, Any]:
        if self._plain:
            return list(self._means), self._folded, self._sum
        blocks = [np.broadcast_to(mean, self._shape) for mean in self._means]
        return blocks, self._folded, self._sum

    def _restore(self, starts: list[int], blocks: list[Any], folded: int, partial: Any) -> None:
        check_starts(self._rule, starts, self._count)
        self._arrange(starts, blocks)
        self._folded = folded
        self._set_sum(partial)
        self._schedule()


def _scan_finite_blocks(x: Array, means: Array, weights: Array, each: Array, out: Array) -> None:
    """The averages in blocks of finite numbers, the rows of x, by products of matrices.

    `means` are those of the blocks before the first and of all up to the last, `weights` those of
    the blocks before and `each` that of a sample of the open block, by the size of the open block.
    """
    n, size = x.shape
    before = np.reshape([means[i : i + n] for i in range(len(weights))], (len(weights), n)).T.copy()
    total = 0.0
    for first in range(0, size, 2 * CHUNK):
        columns = slice(first, first + 2 * CHUNK)
        if size <= 16:
            sums = x @ (np.triu(np.ones((size, size))) * each)
        else:
            sums = running_sums(x[:, columns], total)
            total = sums[-1, -1]
            sums *= each[columns]
        np.matmul(before, weights[:, columns], out[:, columns])
        out[:, columns] += sums
