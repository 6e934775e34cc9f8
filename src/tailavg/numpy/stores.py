"""Stores of numbers, of arrays, and of samples that are kept: what a `TailAverage` becomes."""

from __future__ import annotations

from abc import abstractmethod
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from tailavg.core.clock import SUM, BlockClock, DecayClock, SampleClock, Store
from tailavg.core.decay import Decay, Reading
from tailavg.core.rules import AnyTail, window_of
from tailavg.core.windows import Window
from tailavg.numpy import loops
from tailavg.numpy import scan as scans
from tailavg.numpy.arithmetic import Array, aligned_zeros, joined, sum_in_order, sum_rows, wide
from tailavg.numpy.average import TailAverage
from tailavg.numpy.loops import split_weights

__all__ = ["Arrays", "DecayingArrays", "DecayingNumbers", "Folding", "Numbers", "Samples"]

Look = tuple[Any, ...]
"""How an average is read until the step that comes first: the function that gives the size of its
window; the oldest block that has a weight, as its size and mean; the step since which all samples
weigh alike, how many of those are in means, and their mean."""

_multiply, _ndarray = np.multiply, np.ndarray  # a look-up less in each update


class Folding(TailAverage, Store):
    """A sum, and a mean for each of the clock's blocks: 0.0 where nothing is folded."""

    __slots__ = ()

    _dtype: np.dtype[Any]
    _clock: Any  # a BlockClock or a DecayClock
    _means: list[Any]
    _sum: Any
    _factors: Any  # of the samples that are left, the last one first
    _split: Look  # of numbers
    _scratch: Any

    _held_in = "_means", "_sum"

    def _make_room(self) -> None:
        self._means = [0.0] * len(self._clock.blocks)
        self._scratch = None
        self._set_sum(0.0)

    def _commit(self) -> None:
        clock = self._clock
        t, due = clock.count, clock.next
        if due < t or self._nan_policy != "propagate":  # the next sample needs a look
            due = t
        self._due, self._factors, self._split = due, clock.factors, (-1,)
        self._left = due - t

    def _add(self, sample: Array) -> None:
        clock, left = self._now, self._left
        if clock.count >= clock.next:
            self._wholly(self._add_due, sample)
            return
        term, due = self._term(sample, clock.factor), self._due
        self._left = None
        self._sum += term
        if left:
            self._left = left - 1
        else:
            self._due = due + 1
            self._left = 0

    def _add_due(self, sample: Array) -> None:
        self._clock.prepare(self)
        self._sum += self._term(sample, self._clock.factor)
        self._clock.count += 1

    def fold(self, total: float, weight: float, carry: float) -> None:
        mean, lost = joined(self._means[-1], self._sum, total, weight, carry)
        self._means = [*self._means[:-1], self._as_mean(mean)]
        self._set_sum(lost)

    def turn(self, gone: int, weight: float) -> None:
        means = self._means
        if weight:
            with np.errstate(all="ignore"):
                merged = means[gone - 1] * (1.0 - weight) + means[gone] * weight
            means = [*means[: gone - 1], merged, *means[gone:]]
        self._means = [*means[:gone], *means[gone + 1 :], 0.0]
        self._set_sum(0.0)

    def _average(self, window: Reading | None) -> Any:
        clock = self._clock
        asked = window_of(clock.rule, window, clock.count)
        if isinstance(clock, BlockClock) and not isinstance(asked, Decay):
            return self._read(clock.count, self._look(asked))
        value: Any = np.zeros(self._shape, self._dtype) if self._shape else 0.0
        for weight, block in clock.terms(window):
            value += weight * (self._sum if block == SUM else self._means[block])
        return value

    def _look(self, window: Window) -> Look:
        """How the average is read until a step, unless something is due before."""
        clock = self._clock
        oldest, since, until = clock.split(window)
        old, old_mean = 0, 0.0
        if oldest >= 0:
            old, old_mean = since - clock.blocks[oldest], self._means[oldest]
        newer = scans.newer_part(clock, self._means, oldest)
        return until, window.size, old, old_mean, since, *newer

    def _read(self, t: int, look: Look) -> Any:
        """The average at step t."""
        _, size, old, old_mean, since, folded, mean = look
        newer = t - since
        if not old:
            return self._sum / newer + folded / newer * mean
        each, of_old = split_weights(old, newer, size(t))
        return each * self._sum + each * folded * mean + of_old * old_mean

    def _held(self) -> tuple[list[Any], int, Any]:
        clock = self._clock
        return self._means[len(self._means) - len(clock.starts) :], clock.folded, self._sum

    def _restore(self, blocks: Array, partial: Array) -> None:
        empty = len(self._means) - len(blocks)
        self._means = [*[0.0] * empty, *map(self._as_mean, map(self._shaped, blocks))]
        self._set_sum(self._shaped(partial))

    # How samples are held.

    @abstractmethod
    def _term(self, sample: Array, factor: float) -> Any:
        """A sample times a factor, as it is added to the sum."""

    @abstractmethod
    def _shaped(self, row: Array) -> Any:
        """The row of a matrix as a number, or as an array of the samples' shape."""

    @abstractmethod
    def _as_mean(self, mean: Any) -> Any:
        """What is to be a mean, in the accumulators' dtype."""

    @abstractmethod
    def _set_sum(self, total: Any) -> None:
        """Begin a new sum; the old one stays as it is."""

    # Many samples at a time.

    def _add_rows(self, rows: Array) -> None:
        if isinstance(self._clock, DecayClock):
            if loops.compiles(self._dtype):
                xs = np.ascontiguousarray(rows, self._dtype)
                self._walk_loops(loops.fastest(rows.size), xs, None)
            else:
                self._walk(rows, None)
        elif isinstance(self._clock.rule, AnyTail):
            done = 0
            while done < len(rows):
                done += self._take(self._run(rows[done:]))
        else:
            self._skip(rows)

    def _scan_rows(self, rows: Array, windows: list[Reading | None], out: Array) -> None:
        clock, rule = self._clock, self._clock.rule
        if not loops.compiles(self._dtype):
            self._scan_chunks(rows, windows, out)
            return
        each, xs = loops.fastest(rows.size), np.ascontiguousarray(rows, self._dtype)
        if isinstance(clock, DecayClock):
            self._walk_loops(each, xs, out[0])
            return
        now, held = (clock.count, clock.blocks, clock.folded), (self._means, self._sum)
        asked = [window_of(rule, window, clock.count + len(rows)) for window in windows]
        # the last one leaves what the average then holds: better a plain window
        for i in sorted(range(len(asked)), key=lambda i: not isinstance(asked[i], Decay)):
            clock.resume(*now)
            self._means, self._sum = held
            window = asked[i]
            if isinstance(window, Decay):
                self._scan_chunks(rows, [window], out[i : i + 1])
            else:
                means, sums = self._flat()
                with np.errstate(all="ignore"):
                    loops.scan_blocks(each, clock, means, sums, xs, out[i], window)
                self._unflatten(means, sums)

    @np.errstate(all="ignore")
    def _walk_loops(self, each: SimpleNamespace, xs: Array, out: Array | None) -> None:
        """As `_walk`."""
        clock = self._clock
        means, sums = self._flat()
        count = clock.count + len(xs)
        rest = loops.scan_exponential(each, clock, means, sums, xs, out)
        clock.resume(count, [0], count - rest)
        self._unflatten(means, sums)

    def _flat(self) -> tuple[Array, Array]:
        """Copies of the means, as rows of a matrix, and of the sum."""
        sums = np.array(self._sum, self._dtype).reshape(-1)
        means = np.empty((len(self._means), len(sums)), self._dtype)
        for row, mean in zip(means, self._means, strict=True):
            row[:] = np.reshape(mean, -1)
        return means, sums

    def _unflatten(self, means: Array, sums: Array) -> None:
        """Hold what `_flat` gave, as it is now."""
        self._means = [self._shaped(mean) for mean in means]
        self._set_sum(self._shaped(sums))

    def _scan_chunks(self, rows: Array, windows: list[Reading | None], out: Array) -> None:
        """Without numba."""
        if isinstance(self._clock, DecayClock):
            self._walk(rows, out[0])
            return
        done = 0
        while (done := done + self._scan_alike(rows[done:], out[0, done:])) < len(rows):
            run = self._run(rows[done:])
            for window, averages in zip(windows, out[:, done : done + len(run)], strict=True):
                scans.open_block(self._clock, self._means, self._sum, run, window, averages)
            done += self._take(run)

    def _run(self, rows: Array) -> Array:
        """The first of these rows, those that go into the open block."""
        self._clock.prepare(self)
        return rows[: self._clock.closes - self._clock.count]

    def _take(self, run: Array) -> int:
        """Take samples that go into the open block; how many they are."""
        self._clock.count += len(run)
        self._settle(self._sum + self._shaped(sum_rows(run, self._dtype)))
        return len(run)

    def _settle(self, total: Any) -> None:
        """Hold this sum of the samples that are not folded, which are perhaps many."""
        if self._clock.overfull:  # in double precision, until it is folded
            mean, total = joined(self._means[-1], total, *self._clock.fold())
            self._means = [*self._means[:-1], self._as_mean(mean)]
        self._set_sum(total)

    def _skip(self, rows: Array) -> None:
        """Take samples, but look only at those whose blocks will not be given up."""
        clock = self._clock
        clock.prepare(self)
        before, folded, opened = clock.count, clock.folded, clock.blocks[-1]
        held = dict(zip(clock.blocks, self._means, strict=True))
        clock.advance(before + len(rows))
        self._means, total = [], 0.0
        for start, end in pairwise([*clock.blocks, clock.count]):
            mean: Any = held.get(start, 0.0) if start < end else 0.0
            if end > before:
                fresh = sum_rows(rows[max(0, start - before) : end - before], self._dtype)
                total, rest = self._shaped(fresh), end - start
                if start == opened:
                    total, rest = total + self._sum, end - folded
                if end < clock.count:
                    joint, _ = joined(mean, total, rest, rest / (end - start), end - start)
                    mean = self._as_mean(joint)
            self._means.append(mean)
        self._settle(total)

    def _scan_alike(self, rows: Array, out: Array) -> int:
        """Scan whole blocks at once, if that is possible from here on; the number of rows done."""
        clock = self._clock
        if clock.count < clock.closes or isinstance(clock.rule, AnyTail):
            return 0
        if clock.count > clock.folded:
            self.fold(*clock.fold())
        done, means = scans.alike_blocks(clock, self._means, rows, out)
        if done:
            self._means = [self._as_mean(self._shaped(mean)) for mean in means]
            self._set_sum(0.0)
            clock.advance(clock.count + done)
            clock.fold()  # all are in means
        return done

    def _walk(self, rows: Array, out: Array | None) -> None:
        """Take samples into an exponential average, and write the average after each if asked."""
        clock, dtype = self._clock, wide(self._dtype)
        of_mean, of_sum = clock.weights()
        if clock.count == clock.folded and clock.decay:
            of_sum = 1.0 / clock.decay  # of what the last fold rounded off
        mean = np.zeros(rows.shape[1], dtype)
        for weight, part in ((of_mean, self._means[0]), (of_sum, self._sum)):
            if weight:  # 0 times a NaN would be a NaN
                mean += weight * np.reshape(part, -1).astype(dtype)
        mean = self._shaped(scans.decaying(clock.rule, clock.count, mean, rows, out))
        count = clock.count + len(rows)
        clock.restore(count, [0], count)
        self._means = [self._as_mean(mean)]
        with np.errstate(invalid="ignore"):
            lost = (mean - self._means[0]) * clock.decay
        self._set_sum(np.where(np.isfinite(lost), lost, 0.0).astype(self._dtype)[()])


class Numbers(Folding, clock=BlockClock, numbers=True):
    """Floats, in blocks."""

    __slots__ = ()

    def _term(self, sample: Array, factor: float) -> Any:
        return float(sample) * factor

    def _shaped(self, row: Array) -> Any:
        return row.item()

    def _as_mean(self, mean: Any) -> Any:
        return mean

    def _set_sum(self, total: Any) -> None:
        self._sum = total

    def fold(self, total: float, weight: float, carry: float) -> None:
        means = self._means.copy()
        means[-1], self._sum = joined(means[-1], self._sum, total, weight, carry)
        self._means = means

    def _update_due(self, x: float) -> None:
        """As `_wholly(self._add_due, x)`, which takes longer."""
        clock = self._clock
        clock.count = t = self._due
        time, held = (t, clock.blocks, clock.folded), (self._means, self._sum)
        try:
            self._left = None
            clock.prepare(self)
            self._sum += x * clock.factor if clock.factors else x
            clock.count = t + 1
            self._commit()
        except BaseException:
            self._bring_back(self.__class__, held, time)
            raise

    def update(self, x: Any) -> None:
        left = self._left
        if left:
            if x.__class__ is not float:
                if not isinstance(x, float | int):
                    TailAverage.update(self, x)
                    return
                x = float(x)
            self._left = None
            self._sum += x
            self._left = left - 1
            return
        if left == 0 and x.__class__ is float and self._nan_policy == "propagate":
            self._update_due(x)
            return
        TailAverage.update(self, x)

    def value(self, window: Reading | None = None) -> Any:
        left, look = self._left, self._split
        t = self.count if left is None else self._due - left
        if t >= look[0] or window is not None:
            self._clock.count = t
            if window is not None or isinstance(self._clock.rule, AnyTail):
                return self._average(window)
            self._split = look = self._look(self._clock.rule.window)
        return self._read(t, look)


class DecayingNumbers(Numbers, clock=DecayClock, numbers=True):
    """Floats, in an exponential average."""

    __slots__ = ()

    def update(self, x: Any) -> None:
        left = self._left
        if left and x.__class__ is float:
            left -= 1
            self._left = None
            self._sum += x * self._factors[left]
            self._left = left
            return
        if left == 0 and x.__class__ is float and self._nan_policy == "propagate":
            self._update_due(x)
            return
        TailAverage.update(self, x)

    def value(self, window: Reading | None = None) -> Any:
        clock = self._clock
        left = self._left
        t = self.count if left is None else self._due - left
        rest = t - clock.folded
        if not rest or window is not None:
            clock.count = t
            return self._average(window)
        scale = clock.scales[rest - 1]
        value = scale * self._sum
        kept = clock.decay * scale
        return value + kept * self._means[0] if kept else value  # 0 times a NaN would be a NaN


class Arrays(Folding, clock=BlockClock):
    """Arrays, in blocks; a sample is added in place."""

    __slots__ = ()

    def _term(self, sample: Array, factor: float) -> Any:
        term = sample.astype(self._dtype, copy=False)
        return term if factor == 1.0 else term * factor

    def _shaped(self, row: Array) -> Any:
        return row.reshape(self._shape or ())

    def _as_mean(self, mean: Any) -> Any:
        return np.asarray(mean, self._dtype)

    def _set_sum(self, total: Any) -> None:
        fresh = aligned_zeros(self._shape or (), self._dtype)
        fresh[...] = total
        self._sum = fresh

    def _average(self, window: Reading | None) -> Any:
        return np.asarray(super()._average(window), self._dtype)

    def update(self, x: Any) -> None:
        left = self._left
        if x.__class__ is _ndarray and x.shape == self._shape and x.dtype is self._dtype:
            if left:
                self._left = None
                self._sum += x
                self._left = left - 1
                return
            if left == 0 and self._nan_policy == "propagate":
                self._wholly(self._add_due, x)
                return
        TailAverage.update(self, x)


class DecayingArrays(Arrays, clock=DecayClock):
    """Arrays, in an exponential average."""

    __slots__ = ()

    def update(self, x: Any) -> None:
        left = self._left
        if left and x.__class__ is _ndarray and x.shape == self._shape and x.dtype is self._dtype:
            if self._scratch is None:
                self._scratch = aligned_zeros(x.shape, x.dtype)
            left -= 1
            _multiply(x, self._factors[left], self._scratch)
            self._left = None
            self._sum += self._scratch
            self._left = left
            return
        TailAverage.update(self, x)


class Samples(TailAverage):
    """The last samples themselves, in order; the newest stands just before `_end`."""

    __slots__ = ()

    _dtype: np.dtype[Any]
    _clock: SampleClock
    _buffer: Array
    _end: int

    _held_in = "_buffer", "_end"

    def _make_room(self) -> None:
        self._hold(np.empty((0, int(np.prod(self._shape or ()))), self._dtype), 0)

    def _hold(self, samples: Array, room: int) -> None:
        """Hold these samples, with room for more."""
        self._buffer = np.empty((len(samples) + room, samples.shape[1]), self._dtype)
        self._buffer[: len(samples)] = samples
        self._end = len(samples)

    @property
    def _kept(self) -> Array:
        """The samples that are averaged."""
        return self._buffer[self._end - self._clock.kept : self._end]

    def _add(self, sample: Array) -> None:
        self._wholly(self._add_due, sample)

    def _add_due(self, sample: Array) -> None:
        self._add_rows(sample.reshape(1, sample.size))

    def _add_rows(self, rows: Array) -> None:
        after = self._clock.count + len(rows)
        needed = self._clock.rule.samples(after)
        rows = rows[-needed:]
        if self._end + len(rows) > len(self._buffer):
            kept = self._buffer[self._end - (needed - len(rows)) : self._end]
            self._hold(kept, needed + len(rows) + 16)
        self._buffer[self._end : self._end + len(rows)] = rows  # behind all that is held
        self._end += len(rows)
        self._clock.count = after

    def _average(self, window: Reading | None) -> Any:
        window_of(self.rule, window, self._clock.count)
        kept = self._kept
        # cut as in `tailavg.numpy.loops.scan_exact`, which sums in the same order
        power = 1 << (len(kept).bit_length() - 1)
        cut = len(kept) - self._clock.count % power
        total = sum_in_order(kept[:cut][::-1], self._dtype) + sum_in_order(kept[cut:], self._dtype)
        return (total / len(kept)).astype(self._dtype).reshape(self._shape or ())

    def _scan_rows(self, rows: Array, windows: list[Reading | None], out: Array) -> None:
        clock, kept = self._clock, self._kept
        if loops.compiles(self._dtype):
            loops.scan_samples(loops.fastest(rows.size), clock, kept, rows, out[0])
        else:
            scans.exact(clock, kept, rows, out[0])
        self._add_rows(rows)

    def _held(self) -> tuple[Any, int, float]:
        kept = self._kept
        return kept.reshape(len(kept), *(self._shape or ())), self._clock.count, 0.0

    def _restore(self, blocks: Array, partial: Array) -> None:
        if partial.any():
            raise ValueError("state: partial: expected nothing beside the samples, got a sum")
        self._hold(blocks.reshape(len(blocks), partial.size), 0)


TailAverage._stores |= {(SampleClock, False): Samples, (SampleClock, True): Samples}
