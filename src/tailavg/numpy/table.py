"""`Table`: the states of many averages with the same rule, as arrays, and their scans.

A `TailAverage` is scanned as a table of one row, a `TailAverages` is a table with a row for each
key, and Spark stores rows as bytes. The loops of `kernel` scan the rows; without numba, the array
operations of `fallback` do. Read `Table.scan` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from tailavg.core.clock import (
    FOLD,
    SUM,
    BlockClock,
    Clock,
    DecayClock,
    ElapsedClock,
    ElapsedDecayClock,
    clock_for,
    time_error,
)
from tailavg.core.profile import effective_size
from tailavg.core.readings import ByAge
from tailavg.core.rules import AnyTail, Exponential, Rule, is_timed
from tailavg.core.windows import Fixed, Window
from tailavg.numpy import fallback
from tailavg.numpy.arithmetic import MEAN, Array, Statistic, spread, wide
from tailavg.numpy.kernel import GIVEN, plain_loops, window_numbers

__all__ = ["Table", "record_type"]

LONGEST = 1 << 20
"""The most steps of a plan that rows share. A row with more samples gets its own plan."""

SMALL = 256
"""Repeating blocks of at most this many samples are scanned side by side."""

_ADDED = 1 << 14  # how many samples are added at a time without reading averages
_PLANNED = 1 << 16  # how many samples with times are planned at once
_WEIGHTS = 1 << 16  # the most weights to keep for repeating blocks; more do not fit into the cache
_FLOAT64 = np.dtype(np.float64)
_FIELDS = ("counts", "folded", "starts", "means", "sums", "variances", "squares")
_TIMES = ("firsts", "lasts", "decays")
_NOTHING = np.empty((2, FOLD))  # where a compiled scan writes the weights of a few steps
_AVERAGE = Statistic()


class Table:
    """Averages with the same rule, one in each row. The rule cannot be an `ExactWindow`.

    Args:
        rule: The rule of every row.
        rows: The number of rows. They have no samples yet.
        width: How many numbers a sample consists of.
        dtype: The dtype of means and sums.
        variance: Whether the rows have variances.

    Examples:
        >>> from tailavg import AnytimeWindow
        >>> table = Table(AnytimeWindow(2), 2)
        >>> table.scan(np.array([[1.0], [3.0], [5.0], [10.0]]), np.array([0, 3, 4]))[0, :, 0]
        array([ 1.,  2.,  4., 10.])
        >>> table.counts
        array([3, 1])
    """

    counts: Array
    """The number of samples of each row."""
    folded: Array
    """For each row, the step up to which samples are in means."""
    starts: Array
    """The start of each block, oldest first. Empty blocks come first and start at 0."""
    means: Array
    """The means of the blocks."""
    sums: Array
    """The sums of the samples since step `folded`."""
    variances: Array
    """The variances of the blocks; no blocks without `variance`."""
    squares: Array
    """The sums of squared deviations since step `folded`; without `variance`, no columns."""
    firsts: Array
    """The times of the first samples of blocks, if samples have times; otherwise no columns."""
    lasts: Array
    """The times of the last samples."""
    decays: Array
    """The last three of `ElapsedDecayClock.times`."""

    def __init__(
        self,
        rule: Rule,
        rows: int = 0,
        width: int = 1,
        dtype: np.dtype[Any] = _FLOAT64,
        variance: bool = False,
    ) -> None:
        self.rule = rule
        blocks = len(_first_clock(rule).blocks)
        self.counts, self.folded = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self.starts = np.zeros((rows, blocks), np.int64)
        self.means = np.zeros((rows, blocks, width), dtype)
        self.sums = np.zeros((rows, width), dtype)
        self.variances = np.zeros((rows, blocks if variance else 0, width), dtype)
        self.squares = np.zeros((rows, width if variance else 0), dtype)
        timed = is_timed(rule)
        self.firsts, self.lasts = np.zeros((2, rows, blocks if timed else 0), np.int64)
        self.decays = np.zeros((rows, 3 if timed and isinstance(rule, Exponential) else 0))

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def variance(self) -> bool:
        """Whether the rows have variances."""
        return bool(self.squares.shape[1])

    def take(self, rows: Array) -> Table:
        """Return a copy of some rows."""
        taken = object.__new__(Table)
        taken.rule = self.rule
        for name in (*_FIELDS, *_TIMES):
            setattr(taken, name, getattr(self, name)[rows])
        return taken

    def put(self, rows: Array, other: Table) -> None:
        """Overwrite rows with those of another table."""
        for name in (*_FIELDS, *_TIMES):
            getattr(self, name)[rows] = getattr(other, name)

    def grow(self, rows: int) -> None:
        """Add empty rows, so that the table has `rows` rows."""
        for name in (*_FIELDS, *_TIMES):
            field = getattr(self, name)
            larger = np.zeros((rows, *field.shape[1:]), field.dtype)
            larger[: len(field)] = field
            setattr(self, name, larger)

    def clock(self, row: int) -> Clock:
        """Return the clock of a row."""
        clock = _first_clock(self.rule).copy()
        if self.counts[row]:
            starts, times = self.starts[row].tolist(), tuple[Any, ...]()
            if isinstance(clock, ElapsedClock):
                times = ((self.firsts[row].tolist(), self.lasts[row].tolist()),)
            elif isinstance(clock, ElapsedDecayClock):
                first, last = int(self.firsts[row, 0]), int(self.lasts[row, 0])
                times = ((first, last, *self.decays[row].tolist()),)
            clock.resume(int(self.counts[row]), starts, int(self.folded[row]), *times)
        return clock

    def hold_clock(self, row: int, clock: Clock) -> None:
        """Store the integers of a clock."""
        self.counts[row], self.folded[row] = clock.count, clock.folded
        self.starts[row] = clock.blocks
        if isinstance(clock, ElapsedClock):
            self.firsts[row], self.lasts[row] = clock.times
        elif isinstance(clock, ElapsedDecayClock):
            self.firsts[row], self.lasts[row], *self.decays[row] = clock.times

    def records(self) -> Array:
        """Return the rows as records: see `record_type`."""
        rows = np.zeros(len(self), record_type(self.rule, self.variance))
        rows["count"], rows["folded"], rows["starts"] = self.counts, self.folded, self.starts
        rows["blocks"], rows["partial"] = self.means[:, :, 0], self.sums[:, 0]
        if self.variance:
            rows["variances"], rows["squares"] = self.variances[:, :, 0], self.squares[:, 0]
        for name in _TIMES if is_timed(self.rule) else ():
            rows[name] = getattr(self, name)
        return rows

    @classmethod
    def from_records(cls, rule: Rule, records: Array) -> Table:
        """Return the table that `records` came from."""
        variance = "squares" in (records.dtype.names or ())
        table = cls(rule, len(records), variance=variance)
        table.counts[:], table.folded[:] = records["count"], records["folded"]
        table.starts[:] = records["starts"]
        table.means[:, :, 0], table.sums[:, 0] = records["blocks"], records["partial"]
        if variance:
            table.variances[:, :, 0] = records["variances"]
            table.squares[:, 0] = records["squares"]
        for name in _TIMES if is_timed(rule) else ():
            getattr(table, name)[:] = records[name]
        return table

    def read(self, row: int, window: Any = None, statistic: Statistic = _AVERAGE) -> float:
        """Return the average of a row of numbers, or another statistic."""
        value, means, total = 0.0, self.means[row, :, 0].tolist(), float(self.sums[row, 0])
        clock = self.clock(row)
        if isinstance(clock, ElapsedClock | ElapsedDecayClock):
            window = clock.samples()
        if statistic.of != MEAN:
            terms, squares = clock.terms(window), float(self.squares[row, 0])
            variance = spread(terms, means, self.variances[row, :, 0].tolist(), total, squares)
            size = effective_size(self.rule, clock.starts, clock.count, window)
            return float(statistic.of_spread(variance, 1.0 / size))
        for weight, block in clock.terms(window):
            value += weight * (total if block == SUM else means[block])
        return value

    # Scans.

    def scan_groups(
        self,
        codes: Array | None,
        xs: Array,
        counted: Array | None = None,
        windows: Sequence[Any] = (None,),
        kernel: SimpleNamespace | None = None,
        statistic: Statistic = _AVERAGE,
        times: Array | None = None,
    ) -> Array:
        """Take numbers of several rows. Return after each number the average of its row.

        Args:
            codes: The row of each number, in ascending order; None if there is only one row.
            xs: The numbers.
            counted: Which numbers to take; None takes all. The others repeat the last average.
            windows: As for `scan`.
            kernel: As for `scan`.
            statistic: As for `scan`.
            times: As for `scan`.

        Returns:
            An array of averages for each window. An average without samples is NaN.
        """
        if counted is None or counted.all():
            sizes = [len(xs)] if codes is None else np.bincount(codes, minlength=len(self))
            bounds = np.concatenate([[0], np.cumsum(sizes)])
            return self.scan(xs[:, None], bounds, windows, kernel, statistic, times)[:, :, 0]
        codes = np.zeros(len(xs), np.int64) if codes is None else codes
        sizes = np.bincount(codes[counted], minlength=len(self))
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        latest = np.cumsum(counted) - 1  # the last number that was taken, up to each number
        own = latest >= bounds[codes]  # whether that number belongs to the same row
        before = np.full((len(windows), len(self)), np.nan)
        for row in np.unique(codes[~own]).tolist():
            if self.counts[row]:
                before[:, row] = [self.read(row, window, statistic) for window in windows]
        kept = None if times is None else times[counted]
        how = windows, kernel, statistic, kept
        averages = self.scan(xs[counted][:, None], bounds, *how)[:, :, 0]
        out = before[:, codes]
        out[:, own] = averages[:, latest[own]]
        return out

    def scan(
        self,
        xs: Array,
        bounds: Array,
        windows: Sequence[Window | ByAge | None] = (None,),
        kernel: SimpleNamespace | None = None,
        statistic: Statistic = _AVERAGE,
        times: Array | None = None,
    ) -> Array:
        """Take samples. Return the average after each sample, for each window.

        Args:
            xs: The samples, as rows of a matrix, sorted by the row of the table.
            bounds: The index of each row's first sample, and at the end the number of samples.
            windows: The windows to read, if the rule is an `AnyTail`; otherwise [None].
            kernel: The loops to scan with; None for array operations.
            statistic: What to return in place of averages.
            times: The times of the samples in nanoseconds, if the rule has a window of time. They
                do not go back in a row.
        """
        if times is not None:
            return self._scan_elapsed(xs, times, bounds, kernel, statistic)
        out = np.empty((len(windows), *xs.shape), self.means.dtype)
        before = self.take(np.arange(len(self))) if len(windows) > 1 else self
        # the last scan leaves its state in the table: a compiled scan, if there is one
        order = sorted(range(len(windows)), key=lambda i: not isinstance(windows[i], ByAge))
        for number, i in enumerate(order):
            if number:
                self.put(np.arange(len(self)), before)
            self._scan(xs, out[i], bounds, windows[i], kernel, statistic)
        return out

    def _scan(
        self,
        xs: Array,
        out: Array,
        bounds: Array,
        window: Any,
        kernel: SimpleNamespace | None,
        statistic: Statistic,
    ) -> None:
        window = getattr(self.rule, "window", None) if window is None else window
        if isinstance(self.rule, Exponential):
            self._scan_decaying(xs, out, bounds, kernel, statistic)
            return
        rows, spans = np.flatnonzero(np.diff(bounds)), np.stack([bounds[:-1], bounds[1:]], axis=1)
        if kernel is None or isinstance(window, ByAge):
            for row in rows.tolist():
                span = slice(*spans[row])
                self._scan_by_arrays(row, xs[span], out[span], window, statistic)
            return
        ends = self.counts[rows] + np.diff(bounds)[rows]
        together = (ends <= LONGEST) & (len(rows) > 1)
        if together.any():
            plan, until = _plan(
                self.rule, window, 1 << (int(ends[together].max()) - 1).bit_length()
            )
            how = spans[rows[together]], *self._fields(), plan, until, window_numbers(window)
            kernel.scan_blocks(xs, out, rows[together], *how, False, *_NOTHING, statistic)
        for row in rows[~together].tolist():
            span = slice(*spans[row])
            self._scan_row(row, xs[span], out[span], window, kernel, statistic)

    def _scan_elapsed(
        self, xs: Array, times: Array, bounds: Array, kernel: Any, statistic: Statistic
    ) -> Array:
        out, window = np.empty((1, *xs.shape), self.means.dtype), Fixed(1)  # any window will do
        length = self.rule.window.length  # type: ignore[union-attr]
        for row in np.flatnonzero(np.diff(bounds)).tolist():
            begin, end = int(bounds[row]), int(bounds[row + 1])
            _check_times(times[begin:end], self.lasts[row, -1] if self.counts[row] else None)
        if isinstance(self.rule, Exponential):
            state = self.counts, self.folded, *self._fields()[3:], *self._times()
            loops, xs = kernel or plain_loops(), xs.astype(self.means.dtype, copy=False)
            loops.scan_elapsed_decay(xs, out[0], times, bounds, *state, length, statistic)
            return out
        plan = np.empty((_PLANNED, 3), np.int64)
        weights = np.empty((2, _PLANNED))
        for row in np.flatnonzero(np.diff(bounds)).tolist():
            begin, end = int(bounds[row]), int(bounds[row + 1])
            if kernel is None:
                now = slice(begin, end)
                self._scan_by_arrays(row, xs[now], out[0, now], times[now], statistic)
                continue
            for at in range(begin, end, _PLANNED):
                stop, t = min(at + _PLANNED, end), int(self.counts[row])
                clock = self.starts[row], t, self.firsts[row], self.lasts[row], length
                runs = plan[: kernel.plan_elapsed(times[at:stop], *clock, plan, *weights)]
                span, until = np.array([[at, stop]]), t + np.cumsum(runs[:, 0])
                how = span, *self._fields(), runs, until, window_numbers(window), GIVEN, *weights
                kernel.scan_blocks(xs, out[0], np.array([row]), *how, statistic)
        return out

    def _scan_row(
        self, row: int, xs: Array, out: Array, window: Window, kernel: Any, statistic: Statistic
    ) -> None:
        """Scan the samples of one row with compiled loops."""
        clock, begin, numbers = self.clock(row), 0, window_numbers(window)
        assert isinstance(clock, BlockClock)
        t, is_number = clock.count, xs.shape[1] == 1
        for runs, repeats in clock.runs(t + len(xs), window):
            plan = np.array(runs)
            size = int(plan[:, 0].sum())
            n = repeats * size
            steady = repeats > 1 and window.size(t + 1) == window.size(t + n) and size <= _WEIGHTS
            weights = np.empty((2, size if steady else FOLD))
            if steady and size <= SMALL and is_number:
                samples, averages = xs[begin : begin + n, 0], out[begin : begin + n, 0]
                state = [self.means[row], self.sums[row]]
                small: list[Any] = [t - int(self.folded[row]), t, plan, numbers, *weights]
                if self.variance:
                    copies = [array.copy() for array in state]  # for the averages
                    moments = [*state, self.variances[row], self.squares[row]]
                    deviations = averages if statistic.of != MEAN else np.empty_like(averages)
                    kernel.scan_small_spread(samples, deviations, *moments, *small, statistic)
                    state = copies
                if statistic.of == MEAN:
                    kernel.scan_small_blocks(samples, averages, *state, *small)
                self.counts[row], self.folded[row] = t + n, t + n - size
                self.starts[row] += n
            else:
                span, until = np.array([[begin, begin + n]]), t + np.cumsum(plan[:, 0])
                how = span, *self._fields(), plan, until, numbers, steady, *weights
                kernel.scan_blocks(xs, out, np.array([row]), *how, statistic)
            begin, t = begin + n, t + n

    def _scan_by_arrays(
        self, row: int, xs: Array, out: Array, window: Any, statistic: Statistic
    ) -> None:
        clock = self.clock(row)
        assert isinstance(clock, BlockClock)
        state = self.means[row], self.sums[row], self.variances[row], self.squares[row]
        fallback.scan_blocks(clock, state, xs, out, window, statistic)
        self.hold_clock(row, clock)

    def _times(self) -> tuple[Array, ...]:
        return tuple(getattr(self, name) for name in _TIMES)

    def _fields(self) -> tuple[Array, ...]:
        return tuple(getattr(self, name) for name in _FIELDS)

    def _scan_decaying(
        self, xs: Array, out: Array, bounds: Array, kernel: Any, statistic: Statistic
    ) -> None:
        rule = self.rule
        assert isinstance(rule, Exponential)
        if kernel is not None:
            state = self.counts, self.folded, *self._fields()[3:]
            how = rule.window.steady_from, window_numbers(rule.window), statistic
            kernel.scan_decaying(xs, out, bounds, *state, *how)
            return
        for row in np.flatnonzero(np.diff(bounds)).tolist():
            span = slice(bounds[row], bounds[row + 1])
            clock, dtype = self.clock(row), wide(self.means.dtype)
            assert isinstance(clock, DecayClock)
            of_mean, of_sum = clock.weights()
            if clock.count == clock.folded and clock.decay:
                of_sum = 1.0 / clock.decay  # the sum is the rounding error of the last fold
            mean = np.zeros(xs.shape[1], dtype)
            for weight, values in ((of_mean, self.means[row, 0]), (of_sum, self.sums[row])):
                if weight:  # 0 times NaN is NaN
                    mean += weight * values.astype(dtype)
            variance = self.squares[row].astype(dtype)
            if len(variance) and clock.count:
                moments = self.means[row], self.variances[row], self.sums[row], variance
                variance = spread(clock.terms(), *moments)
            averages = out[span] if len(out) else None
            mean, variance = fallback.scan_decaying(
                clock, mean, variance, xs[span], averages, statistic, self.means.dtype
            )
            if self.variance:
                self.variances[row, 0], self.squares[row] = variance, 0.0
            count = clock.count + len(xs[span])
            clock.resume(count, [0], count)
            self.counts[row] = self.folded[row] = count
            self.means[row, 0] = mean
            with np.errstate(invalid="ignore"):
                lost = (mean - self.means[row, 0]) * clock.decay
            self.sums[row] = np.where(np.isfinite(lost), lost, 0.0)

    def add(self, xs: Array, kernel: SimpleNamespace | None, times: Array | None = None) -> None:
        """Take samples into a table of one row, without reading averages."""
        if isinstance(self.rule, Exponential) and times is None:
            nothing = np.empty((0, xs.shape[1]), xs.dtype)
            self._scan_decaying(xs, nothing, np.array([0, len(xs)]), kernel, _AVERAGE)
            return
        window = Fixed(1) if isinstance(self.rule, AnyTail) else None  # any window will do
        for start in range(0, len(xs), _ADDED):
            rows = xs[start : start + _ADDED]
            now = None if times is None else times[start : start + _ADDED]
            self.scan(rows, np.array([0, len(rows)]), [window], kernel, times=now)


def _check_times(times: Array, last: int | None) -> None:
    """Raise a ValueError if times go back, or begin before the `last` of the samples before."""
    back = times[1:] < times[:-1]
    if back.any() or (last is not None and times[0] < last):
        place = int(back.argmax()) + 1 if back.any() else 0
        before: Any = times[place - 1] if back.any() else last
        raise time_error(int(times[place]), int(before))


def record_type(rule: Rule, variance: bool = False) -> np.dtype[Any]:
    """Return the dtype of a record with the state of an average of numbers.

    The fields are those of `tailavg.io.state`, little-endian. An empty block starts at 0. A window
    of time adds the times in a `Table`.

    Examples:
        >>> from tailavg import AnytimeWindow
        >>> record_type(AnytimeWindow(0.25)).itemsize
        72
    """
    blocks = len(_first_clock(rule).blocks)
    fields: list[Any] = [
        ("count", "<i8"),
        ("folded", "<i8"),
        ("starts", "<i8", (blocks,)),
        ("blocks", "<f8", (blocks,)),
        ("partial", "<f8"),
    ]
    spread = [("variances", "<f8", (blocks,)), ("squares", "<f8")]
    times = [("firsts", "<i8", (blocks,)), ("lasts", "<i8", (blocks,))]
    times.append(("decays", "<f8", (3 if isinstance(rule, Exponential) else 0,)))
    return np.dtype(fields + spread * variance + times * is_timed(rule))


@lru_cache(maxsize=64)
def _first_clock(rule: Rule) -> Clock:
    """Return the clock of a rule before the first sample, to be copied."""
    return clock_for(rule)


@lru_cache(maxsize=16)
def _plan(rule: Rule, window: Window, end: int) -> tuple[Array, Array]:
    """Return the runs of `BlockClock.runs` up to step `end`, and the steps at which they end."""
    clock = clock_for(rule)
    assert isinstance(clock, BlockClock)
    parts = [np.tile(runs, (repeats, 1)) for runs, repeats in clock.runs(end, window)]
    plan = np.concatenate(parts)
    return plan, np.cumsum(plan[:, 0])
