"""Blocks of consecutive samples: the storage of `AnytimeWindow` and `RawTail`.

Of each block it holds the mean. The open block is a mean of what has been folded and a sum of
what has not: each sample is added to that sum, and nothing else happens until the next event, the
fold of the sum or the turn of the blocks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from tailavg.average import Array, TailAverage
from tailavg.rules import AnytimeWindow, BlockRule, RawTail, join, read
from tailavg.schedule import advance, oldest_needed, period, turn
from tailavg.storages.arithmetic import CHUNK, FOLD, aligned_zeros, lerp, sum_rows, wide

__all__ = ["BlockStorage"]


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
        self._starts, self._means = [0], [0.0]
        self._schedule()

    def _schedule(self) -> None:
        """Look up when the next event is due, after the last one."""
        self._closes = self._rule.closes(self._starts)
        due = min(self._closes, self._folded + FOLD) if self._nan_policy == "propagate" else -1
        self._floats_until = due if self._plain else -1
        self._arrays_until = due if not self._plain else -1
        self._plan = (-1,)

    def update(self, x: Any) -> None:
        t = self._count
        if x.__class__ is float:
            if t < self._floats_until:
                self._sum += x
                self._count = t + 1
                return
        elif (
            t < self._arrays_until
            and x.__class__ is np.ndarray
            and x.shape == self._shape
            and x.dtype is self._dtype
        ):
            np.add(self._sum, x, self._sum)
            self._count = t + 1
            return
        elif t < self._floats_until and isinstance(x, float | int):
            self._sum += float(x)
            self._count = t + 1
            return
        sample = self._take(x)
        if sample is not None:
            self._add(sample)

    update.__doc__ = TailAverage.update.__doc__

    def _add(self, x: Any) -> None:
        if self._count == self._closes:
            self._turn()
        elif self._count == self._folded + FOLD:
            self._fold(self._open_mean())
        if self._plain:
            self._sum += x
        else:
            np.add(self._sum, x, self._sum, casting="same_kind")
        self._count += 1

    def _open_mean(self) -> Any:
        """The mean of the open block, with the samples that have not been folded."""
        folded, rest = self._folded - self._starts[-1], self._count - self._folded
        if not rest:
            return self._means[-1]
        fresh = self._sum / rest
        return lerp(self._means[-1], fresh, rest / (folded + rest)) if folded else fresh

    def _fold(self, mean: Any) -> None:
        """Go on from the mean of the open block, with nothing left to fold."""
        self._means[-1] = mean
        self._folded = self._count
        self._set_sum(0.0)
        self._schedule()

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
        self._means[-1] = self._open_mean()
        self._starts = turn(self._rule, self._starts, self._count)
        self._means = [*self._means, 0.0][-len(self._starts) :]
        self._fold(0.0)

    def value(self) -> Any:
        t = self._count
        plan = self._plan
        if t >= plan[0]:
            self._require_a_sample("value")
            if not self._plain:
                return self._result(self._read())
            self._plan = plan = self._split(t)
        _, old, old_mean, since, folded, folded_mean = plan
        newer = t - since
        g = join(old, newer, self._rule.size(t))
        return (1.0 - g) * (folded_mean * (folded / newer) + self._sum / newer) + g * old_mean

    value.__doc__ = TailAverage.value.__doc__

    def _read(self) -> Any:
        """The average of arrays: the blocks' means by their weights; those without are not seen."""
        t = self._count
        sizes = [end - start for start, end in pairwise([*self._starts, t])]
        *weights, weight = read(sizes, self._rule.size(t))
        terms = [
            (weight, mean) for weight, mean in zip(weights, self._means, strict=False) if weight
        ]
        if self._folded > self._starts[-1]:
            terms.append((weight * (self._folded - self._starts[-1]) / sizes[-1], self._means[-1]))
        if t > self._folded:
            terms.append((weight / sizes[-1], self._sum))
        value = np.zeros(self._shape, self._dtype)
        for weight, mean in terms:
            value += weight * mean
        return value

    def _split(self, t: int) -> tuple[Any, ...]:
        """How the average is read from step t on, until the step that comes first.

        The oldest block still needed (its size and mean) is joined to all the newer samples:
        those since a step, of which some are folded (how many, and their mean).
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
        starts = advance(self._rule, self._starts, after)
        held = dict(zip(self._starts, self._means, strict=True))
        means = []
        for start, end in pairwise([*starts, after]):
            if end <= before:
                means.append(self._open_mean() if start == self._starts[-1] else held[start])
                continue
            fresh = sum_rows(rows[max(0, start - before) : end - before], self._dtype)
            fresh = fresh.item() if self._plain else fresh.reshape(self._shape)
            if start >= before:
                folded, rest, mean = 0, end - start, 0.0
            else:
                folded, rest, mean = self._folded - start, end - self._folded, held[start]
                fresh = fresh + self._sum
            if end < after or rest >= FOLD:
                mean = lerp(mean, fresh / rest, rest / (folded + rest)) if folded else fresh / rest
                folded, rest, fresh = end - start, 0, 0.0
            means.append(mean if self._plain else np.asarray(mean, self._dtype))
        self._starts, self._means = starts, means
        self._folded = after - rest
        self._set_sum(fresh)
        self._count = after
        self._schedule()

    def _scan_rows(self, rows: Array, out: Array) -> None:
        done = 0
        while done < len(rows):
            if self._count == self._closes:
                size, until = period(self._rule, self._starts)
                blocks = min(until - self._count, len(rows) - done) // size if size else 0
                if blocks > 1 and size * rows.shape[1] <= CHUNK:
                    end = done + blocks * size
                    self._scan_blocks(rows[done:end], out[done:end], size)
                    done = end
                    continue
                self._turn()
            done += self._scan_chunk(rows[done:], out[done:])

    def _scan_chunk(self, rows: Array, out: Array) -> int:
        """Scan up to the next step at which the way to read changes; the number of rows done."""
        assert self._dtype is not None
        t = self._count
        until, old, old_mean, since, folded, folded_mean = self._split(t + 1)
        most = max(1, CHUNK // max(1, rows.shape[1]))
        n = min(len(rows), most, self._closes - t, until - 1 - t)
        steps = np.arange(t + 1, t + n + 1)
        newer = (steps - since).astype(np.float64)
        g = join(float(old), newer, self._rule.size(steps))
        sums = np.cumsum(rows[:n], axis=0, dtype=wide(self._dtype))
        fresh = sums[-1].copy()
        sums += np.reshape(self._sum + folded_mean * folded, -1)
        sums *= ((1.0 - g) / newer)[:, None]
        if old:
            sums += g[:, None] * np.reshape(old_mean, -1)
        out[:n] = sums
        self._set_sum(self._sum + (fresh.item() if self._plain else fresh.reshape(self._shape)))
        self._count = t + n
        if self._count - self._folded >= FOLD:
            self._fold(self._open_mean())
        return n

    def _scan_blocks(self, rows: Array, out: Array, size: int) -> None:
        """Scan whole blocks of one size, all at once: their weights repeat."""
        assert self._dtype is not None
        z, width, k = self._rule.accumulators - 1, rows.shape[1], self._rule.size(self._count)
        blocks, group = len(rows) // size, max(1, 4 * CHUNK // (size * max(1, width)))
        open_sizes = np.arange(1.0, size + 1.0)
        *weights, weight = read([*[size] * z, open_sizes], k)
        each = (weight / open_sizes)[:, None]
        # closed blocks that always count in full weigh as the open one does, sample by sample
        alike = max(0, min(z, int(k // size) - 1))
        self._means[-1] = self._open_mean()
        means = np.reshape(self._means, (z + 1, width)).astype(wide(self._dtype))
        for first in range(0, blocks, group):
            part = slice(first * size, min(blocks, first + group) * size)
            sums = np.cumsum(rows[part].reshape(-1, size, width), axis=1, dtype=means.dtype)
            n = len(sums)
            means = np.concatenate([means[1:], sums[:, -1] / size])
            for block in range(z - alike, z):
                sums += means[block : block + n, None] * size
            sums *= each
            for block in range(z - alike):
                needed = np.count_nonzero(weights[block])
                sums[:, :needed] += means[block : block + n, None] * weights[block][:needed, None]
            out[part] = sums.reshape(-1, width)
            means = means[-1 - z :]
        self._count += blocks * size
        self._starts = [self._count - i * size for i in range(z + 1, 0, -1)]
        self._means = [self._held(mean) for mean in means]
        self._fold(self._means[-1])

    def _starts_now(self) -> list[int]:
        return list(self._starts)

    def _save(self) -> tuple[list[Any], int, Any]:
        if self._plain:
            return list(self._means), self._folded, self._sum
        blocks = [np.broadcast_to(mean, self._shape) for mean in self._means]
        return blocks, self._folded, self._sum

    def _restore(self, starts: list[int], blocks: list[Any], folded: int, partial: Any) -> None:
        full = len(starts) == self._rule.accumulators
        if len(starts) > self._rule.accumulators or (starts[0] and not full):
            raise ValueError(f"state: starts {starts} cannot be those of {self._rule}")
        if self._rule.closes(starts) < self._count:
            raise ValueError(
                f"state: sizes do not add up: {self._rule} closes the block that starts at "
                f"{starts[-1]} at {self._rule.closes(starts)}, got count {self._count}"
            )
        self._starts, self._means, self._folded = starts, blocks, folded
        self._set_sum(partial)
        self._schedule()
