"""`TailAverage`: the average of the tail of a stream, at every step.

Read `_add` and `_prepare` first: they take one sample. `update` is a fast path to them. To take
many samples at once, `update_many` calls `_pool`, and `scan` calls `tailavg.numpy.table`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from tailavg.core.clock import SUM, BlockClock, DecayClock, SampleClock, clock_for, time_error
from tailavg.core.elapsed import nanoseconds, now, times_in
from tailavg.core.equation import weights
from tailavg.core.profile import Profile, block_weights, dense_weights, effective_size, profile
from tailavg.core.readings import Reading
from tailavg.core.rules import AnyRule, AnyTail, Rule, as_rule, is_timed, size_of, window_of
from tailavg.core.windows import Fixed, Reals, short_repr
from tailavg.io import state as layout
from tailavg.numpy import fallback
from tailavg.numpy.arithmetic import (
    MEAN,
    Array,
    Of,
    Statistic,
    aligned_zeros,
    joined,
    joined_variance,
    merged_variance,
    spread,
    sum_rows,
)
from tailavg.numpy.kernel import kernel, window_numbers
from tailavg.numpy.samples import Samples
from tailavg.numpy.table import Table

__all__ = ["TailAverage", "Windows", "has_nan", "no_variance_error", "numbers"]

SPREAD = 4
"""The least number of blocks from which a standard error is estimated."""

_AVERAGE = Statistic()

BATCHES = 12
"""An `ExactWindow` divides its samples into this many blocks to estimate a standard error."""

NanPolicy = Literal["propagate", "raise", "omit"]
Windows = Reading | list[Reading] | tuple[Reading, ...] | None


class TailAverage:
    """The average of the last samples of a stream of numbers, or of arrays of one shape.

    Args:
        rule: How many samples to average, and how. A number (an int n is the last n samples, a
            float in (0, 1] the last fraction), a window (`Fixed`, `Growing`) or a rule
            (`AnytimeWindow`, `Exponential`, `AnyTail`, `ExactWindow`, `RawTail`).
        dtype: The dtype of the accumulators. By default float64 for numbers and integers, and the
            dtype of the samples for arrays, but at least float32. A float32 average keeps 5 digits
            over a million samples, since sums are merged into means every few hundred samples.
        nan_policy: `"propagate"`, `"raise"`, or `"omit"`, which skips a sample that contains a NaN
            and does not count it. Infinities are data.
        variance: Whether to keep what `variance`, `std` and `standard_error(iid=True)` need. Each
            accumulator then holds a second array. `update` and `scan` give bit-identical averages.

    Examples:
        >>> average = TailAverage(0.5)
        >>> for x in [1.0, 2.0, 3.0, 4.0]:
        ...     average.update(x)
        ...     print(average.value())
        1.0
        2.0
        2.7886751345948126
        3.5
    """

    # An interrupted call takes full effect or none, with one exception: while an update only adds a
    # sample to the sum, `_left` is None. If it is interrupted then, the average is broken, and
    # `count` raises an error from then on. `_atomically` makes every other change, and restores the
    # state before the call if the change fails.

    __slots__ = (
        "__weakref__",
        "_clock",
        "_dtype",
        "_due",
        "_factors",
        "_left",
        "_means",
        "_nan_policy",
        "_number",
        "_plain",
        "_reader",
        "_samples",
        "_scratch",
        "_shape",
        "_squares",
        "_sum",
        "_variances",
    )

    _clock: Any
    _left: int | None
    """How many more samples are only added to the sum; None while a sample is being added."""
    _due: int
    """The count at which a fold or a turn is due, after `_left` more samples."""
    _dtype: np.dtype[Any] | None
    _nan_policy: NanPolicy
    _shape: tuple[int, ...] | None  # None for numbers
    _number: bool  # whether means and sum are floats
    _means: list[Any]  # means of the clock's blocks, 0.0 before a fold; never changed in place
    _sum: Any  # sum of the samples that are in no mean; an array is changed in place
    _variances: list[Any] | None  # variances of the blocks; None unless variance=True
    _squares: Any  # sum of (x - mean of the newest block)² over the samples in the sum
    _samples: Samples | None  # samples of an ExactWindow, which has no means and no sum
    _plain: Any  # the type of samples that `update` adds without a check
    _factors: list[float] | None  # factors of the next `_left` samples, last sample first
    _reader: Any  # function that quickly computes values of numbers: see `_reader` below
    _scratch: Any  # a buffer for a sample times its factor

    def __init__(
        self,
        rule: AnyRule,
        *,
        dtype: npt.DTypeLike | None = None,
        nan_policy: NanPolicy = "propagate",
        variance: bool = False,
    ) -> None:
        if nan_policy not in get_args(NanPolicy):
            raise ValueError(
                f"nan_policy: expected one of {get_args(NanPolicy)}, got {nan_policy!r}"
            )
        self._clock = clock_for(as_rule(rule))
        self._nan_policy = nan_policy
        self._dtype = None if dtype is None else _accumulator_dtype(dtype)
        self._shape, self._number, self._plain = None, False, None
        self._means, self._sum, self._samples = [], 0.0, None
        self._variances, self._squares = [] if variance else None, 0.0
        self._factors = self._reader = self._scratch = None
        self._due = self._left = 0
        self._check_real()

    def update(self, x: Any, t: Any = None) -> None:
        """Take one sample: a number, or an array of the shape of the samples before.

        With an `Elapsed` window, `t` is the time of the sample: seconds, a datetime or a
        datetime64; by default now, on a clock that never goes back.

        Examples:
            >>> average = TailAverage(2)
            >>> average.update([1.0, 10.0])
            >>> average.update([3.0, 30.0])
            >>> average.value()
            array([ 2., 20.])
        """
        left, kind = self._left, x.__class__
        if kind is self._plain and t is None:
            if kind is float:
                if left:
                    factors = self._factors
                    self._left = None
                    self._sum += x if factors is None else x * factors[left - 1]
                    self._left = left - 1
                    return
                self._atomically(self._add, x, None)
                return
            if x.dtype is self._dtype and x.shape == self._shape:
                if left:
                    if self._factors is not None:
                        x = np.multiply(x, self._factors[left - 1], out=self._scratch)
                    self._left = None
                    try:
                        self._sum += x
                        self._left = left - 1
                    except RuntimeWarning:  # inf - inf under -W error: the sum is complete
                        self._left = left - 1
                    return
                self._atomically(self._add, x, x.shape)
                return
        self._update(x, t)

    def _update(self, x: Any, t: Any) -> None:
        """Take a sample that `update` has no fast path for."""
        time = self._time_of(t)
        left = self._left
        if left and self._variances and x.__class__ is float and self._number and x == x:
            factor = 1.0 if self._factors is None else self._factors[left - 1]
            apart = x - self._means[-1]
            self._left = None
            self._sum += x * factor
            self._squares += apart * apart * factor
            self._left = left - 1
            return
        sample = self._checked(x)
        if sample is None:
            return
        if left:
            factor = 1.0 if self._factors is None else self._factors[left - 1]
            term = sample.astype(self._dtype, copy=False)
            if self._factors is not None:
                term = term * factor
            if self._number:
                term = term.item()
            self._left = None
            with np.errstate(all="ignore"):
                self._sum += term
                if self._variances:
                    self._squares += self._square(sample, factor)
            self._left = left - 1
            return
        number = not (sample.shape or isinstance(x, np.ndarray))
        self._atomically(self._add, sample, None if number else sample.shape, time)

    def _time_of(self, t: Any) -> int | None:
        """Return a time in nanoseconds; None if the window does not measure time."""
        if is_timed(self.rule):
            return now() if t is None else nanoseconds(t)
        if t is not None:
            raise TypeError(f"t: samples have times only with an Elapsed window, not {self.rule}")
        return None

    def value(self, window: Reading | None = None, *, at: Any = None) -> Any:
        """Return the average: a float, or a new array. An `AnyTail` needs a `window`.

        With an `Elapsed` window, it ends at the newest sample, or at the time `at`. If no sample is
        in the window, the average is NaN.

        Examples:
            >>> TailAverage(100).value()
            Traceback (most recent call last):
            ValueError: value: expected at least one sample before the first read, got none
        """
        reader, left = self._reader, self._left
        if reader is not None and left is not None and window is None and at is None:
            value = reader(self._due - left, self._sum)
            if value is not None:
                return value
        clock = self._now
        if not clock.count:
            raise layout.no_samples_error("value")
        window = self._at(window, at)
        if window is None and self._number:
            self._reader = reader = _reader(clock, self._means)
            value = None if reader is None else reader(clock.count, self._sum)
            if value is not None:
                return value
        average = self._average(window)
        return average.item() if self._shape is None and not self._number else average

    def _at(self, window: Any, at: Any = None) -> Any:
        """Return a reading; for an `Elapsed` window, the number of samples in it."""
        time = None if at is None else self._time_of(at)
        if not is_timed(self.rule):
            return window
        if window is not None:
            window_of(self.rule, window, self.count)  # raises an error
        clock = self._now
        if time is not None and clock.count and time < clock.time:
            raise time_error(time, clock.time)
        return clock.samples(time)

    @np.errstate(all="ignore")  # infinities are data
    def _average(self, window: Reading | None, statistic: Statistic = _AVERAGE) -> Any:
        """Return the average over a window, or another statistic: a float, or a new array."""
        clock = self._clock
        if statistic.of != MEAN:
            size = effective_size(self.rule, clock.starts, clock.count, window)
            if self._samples is not None:
                apart = self._samples.last(clock.kept)
                apart = (apart - apart[0]).astype(np.float64)
                variance = np.mean((apart - apart.mean(axis=0)) ** 2, axis=0)
            else:
                terms = clock.terms(window)
                variance = spread(terms, self._means, self._variances, self._sum, self._squares)
            result: Array = np.asarray(statistic.of_spread(variance, 1.0 / size))
            return result.reshape(self._shape or ()).astype(self._dtype)
        if self._samples is not None:
            window_of(self.rule, window, clock.count)
            mean = self._samples.mean(clock.rule, clock.count)
            return mean.item() if self._number else mean.reshape(self._shape or ())
        value: Any = 0.0 if self._number else np.zeros(self._shape or (), self._dtype)
        terms = clock.terms(window)
        if not terms:  # no sample is in the window
            return value + np.nan
        for weight, block in terms:
            value += weight * (self._sum if block == SUM else self._means[block])
        return value

    def variance(self, window: Reading | None = None, ddof: int = 1) -> Any:
        """Return the variance of the samples, with the weights α of the average x̄.

        This is Σ α (x - x̄)², and with `ddof=1` divided by 1 - Σ α², so that it is unbiased for
        independent samples. With `ddof=1`, the variance of one sample is NaN.

        Squares are never subtracted from each other over more than a block, so the result is never
        negative, and a huge sample leaves no trace. A standard deviation below 1.5e-5 of the mean
        in float32, or 3e-14 in float64, is 0, since rounding could cause as much.

        Examples:
            >>> average = TailAverage(4, variance=True)
            >>> average.update_many([1e9, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
            >>> average.variance()
            1.6666666666666667
        """
        return self._statistic("variance", window, ddof)

    def std(self, window: Reading | None = None, ddof: int = 1) -> Any:
        """Return the standard deviation of the samples, the square root of `variance`."""
        return self._statistic("std", window, ddof)

    def _statistic(self, name: Of, window: Reading | None, ddof: int) -> Any:
        statistic = Statistic.named(name, ddof)
        if self._variances is None:
            raise no_variance_error(name)
        return self._read(window, statistic)

    def _read(self, window: Reading | None, statistic: Statistic) -> Any:
        """Return a statistic."""
        if not self._now.count:
            raise layout.no_samples_error(statistic.name)
        result = self._average(self._at(window), statistic)
        return result if self._shape is not None or isinstance(result, float) else result.item()

    def update_many(self, xs: Any, ts: Any = None) -> None:
        """Take many samples, along the first axis. This is much faster than many updates.

        With an `Elapsed` window, `ts` has the time of each, as in `update`.

        Examples:
            >>> average = TailAverage(100)
            >>> average.update_many(range(1000))
            >>> average.value()
            949.5
        """
        samples = numbers(xs, "samples")
        times = self._times_of(ts, samples)
        rows, kept = self._checked_rows(samples)
        if len(rows):  # otherwise there is nothing to do
            times = times if kept is None or times is None else times[kept]
            self._atomically(self._take_many, samples, rows, times)

    @np.errstate(all="ignore")
    def _take_many(self, samples: Array, rows: Array, times: Array | None = None) -> None:
        self._begin_with(samples)
        clock = self._clock
        if isinstance(clock, BlockClock) and self._variances is None and times is None:
            self._pool(rows)
        elif self._samples is not None:
            clock.count += len(rows)
            self._samples = self._samples.added(rows, clock.kept)
        else:
            table, loops = self._table(), self._loops(rows)
            xs = rows if loops is None else np.ascontiguousarray(rows, self._dtype)
            table.add(xs, loops, times)
            self._hold(table)

    def _times_of(self, ts: Any, samples: Array) -> Array | None:
        """Return the times of samples in nanoseconds; None if the window does not measure time."""
        if not is_timed(self.rule):
            self._time_of(ts)  # raises an error unless it is None
            return None
        if samples.ndim == 0:
            return None
        times = np.full(len(samples), now()) if ts is None else times_in(ts)
        if len(times) != len(samples):
            raise ValueError(f"ts: expected {len(samples)} times, one per sample, got {len(times)}")
        return times

    def scan(
        self, xs: Any, window: Any = None, *, ts: Any = None, of: Of = "mean", ddof: int = 1
    ) -> Array:
        """Take many samples, and return the average after each.

        An `AnyTail` needs a window. With a list of windows, the result has a first axis of windows.
        With an `Elapsed` window, `ts`, or the second argument, has the times of the samples.
        With `of="variance"` or `of="std"`, return these instead of averages.

        Examples:
            >>> TailAverage(2).scan([1.0, 3.0, 5.0, 7.0])
            array([1., 2., 4., 6.])
        """
        statistic = Statistic.named(of, ddof)
        if statistic.of != MEAN and self._variances is None:
            raise no_variance_error(of)
        if is_timed(self.rule) and ts is None:
            window, ts = None, window
        samples = numbers(xs, "samples")
        times = self._times_of(ts, samples)
        rows, kept = self._checked_rows(samples)
        times = times if kept is None or times is None else times[kept]
        several = isinstance(window, list | tuple)
        windows: list[Any] = list(window) if isinstance(window, list | tuple) else [window]
        if not windows:
            raise ValueError("window: expected a window or a list of windows, got an empty list")
        for each in windows if isinstance(self.rule, AnyTail) else [window]:
            window_of(self.rule, each, self.count + len(rows))
        if len(samples):
            how = samples, rows, kept, windows, statistic, times
            averages: Array = self._atomically(self._scan, *how)
        else:
            shape = (self._shape or ()) if self.count else samples.shape[1:]
            averages = np.empty((len(windows), 0, *shape), self._dtype or np.float64)
        return averages if several else averages[0]

    @np.errstate(all="ignore")
    def _scan(
        self,
        samples: Array,
        rows: Array,
        kept: Array | None,
        windows: list[Any],
        statistic: Statistic,
        times: Array | None,
    ) -> Array:
        before: list[Any] = [np.nan] * len(windows)
        if self._clock.count and kept is not None:
            reads = [self._clock.samples()] if is_timed(self.rule) else windows
            before = [self._average(window, statistic) for window in reads]
        shape = samples.shape[1:]
        if len(rows):
            self._begin_with(samples)
            out = self._scan_rows(samples, rows, windows, statistic, times)
        else:
            out = np.empty((len(windows), 0), self._dtype)
        every = out.reshape(len(windows), len(rows), *shape)
        if kept is None:
            return every
        # after a skipped sample, the average is that before it
        first = np.empty((len(windows), 1, *shape), every.dtype)
        for averages, value in zip(first, before, strict=True):
            averages[0] = value
        return np.concatenate([first, every], axis=1)[:, np.cumsum(kept)]

    def _scan_rows(
        self,
        samples: Array,
        rows: Array,
        windows: list[Any],
        statistic: Statistic,
        times: Array | None,
    ) -> Array:
        """Take rows, and return the averages after each row, for each window."""
        clock, loops = self._clock, self._loops(rows)
        readings = [window_of(self.rule, window, clock.count + len(rows)) for window in windows]
        if self._samples is None:
            table = self._table()
            xs = rows if loops is None else np.ascontiguousarray(rows, self._dtype)
            out = table.scan(xs, np.array([0, len(xs)]), readings, loops, statistic, times)
            self._hold(table)
            return out
        kept, out = self._samples.last(clock.kept), np.empty((1, *rows.shape), self._dtype)
        if statistic.of != MEAN:
            fallback.scan_exact_spread(clock, kept, rows, out[0], statistic)
        elif loops is None:
            fallback.scan_exact(clock, kept, rows, out[0])
        else:
            most = clock.rule.samples(clock.count + len(rows))
            how = clock.count, window_numbers(clock.rule.window), most
            xs = np.concatenate([kept, rows], dtype=np.float64)
            for column, averages in zip(np.ascontiguousarray(xs.T), out[0].T, strict=True):
                loops.scan_exact(column, len(kept), averages, *how)
        self._take_many(samples, rows)
        return out

    def _loops(self, rows: Array) -> Any:
        """Return the loops of `tailavg.numpy.kernel` for these samples, or None."""
        return kernel(rows.size) if self._dtype in (np.float32, np.float64) else None

    @property
    def rule(self) -> Rule:
        """The rule."""
        rule: Rule = self._clock.rule
        return rule

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The dtype of the accumulators; None before the first sample, unless it was given."""
        return self._dtype

    @property
    def nan_policy(self) -> NanPolicy:
        """The policy for samples that contain a NaN."""
        return self._nan_policy

    @property
    def count(self) -> int:
        """The number of samples so far, t."""
        left = self._left
        if left is None:
            raise RuntimeError(
                "the average is incomplete: a call was interrupted in the middle; load a saved "
                "state, or create a new average"
            )
        return self._due - left

    @property
    def size(self) -> float:
        """The size of the window, k_t; the number of samples for an `AnyTail`, which has no window.

        Examples:
            >>> average = TailAverage(0.25)
            >>> average.update_many(range(1000))
            >>> average.size
            250.0
        """
        return size_of(self.rule, self._at(None), self.count)

    def weights(self, window: Reading | None = None) -> Reals:
        """Return the weight of each of the `count` samples, oldest first.

        Examples:
            >>> average = TailAverage(2)
            >>> average.update_many([1.0, 3.0, 5.0])
            >>> average.weights()
            array([0. , 0.5, 0.5])
        """
        clock, window = self._now, self._at(window)
        return dense_weights(self.rule, clock.starts, clock.count, window)

    def profile(self, window: Reading | None = None) -> Profile:
        """Return a summary of the weights: effective size, mean age, oldest age.

        Examples:
            >>> average = TailAverage(100)
            >>> average.update_many(range(1000))
            >>> average.profile()  # doctest: +NORMALIZE_WHITESPACE
            Profile(count=1000, size=100.0, effective_size=100.0, mean_age=49.5,
                    oldest_age=99, accumulators=3)
        """
        clock = self._now
        if not clock.count:
            raise layout.no_samples_error("profile")
        return profile(self.rule, clock.starts, clock.count, self._at(window))

    @np.errstate(all="ignore")
    def standard_error(self, window: Reading | None = None, *, iid: bool = False) -> Any:
        """Return the standard error of `value`, estimated from the spread of the block means.

        With `iid=True`, it is estimated from `std` instead, for independent samples: the standard
        deviation times sqrt(Σ α²), which is s / √k for a window of k samples.

        Otherwise the estimate allows for autocorrelated samples; a trend within the window makes it
        larger. With more blocks, the estimate is less noisy: use twelve accumulators. The samples
        of an `ExactWindow` are divided into twelve blocks. The result is NaN if fewer than four
        blocks have a weight, as with an `Exponential` or with three accumulators.

        Examples:
            >>> from tailavg import AnytimeWindow
            >>> average = TailAverage(AnytimeWindow(1000, accumulators=12))
            >>> average.update_many(np.random.default_rng(0).normal(size=5000))
            >>> float(round(average.standard_error(), 3))  # 1000 samples of variance 1: about 0.032
            0.037
        """
        clock = self._now
        t, starts = clock.count, clock.starts
        if not t:
            raise layout.no_samples_error("standard_error")
        window = self._at(window)
        if iid:
            return self.std(window) / math.sqrt(effective_size(self.rule, starts, t, window))
        sizes, weights = (np.array(each) for each in block_weights(self.rule, starts, t, window))
        means, folded, total = self._arrays()[:3]
        if self._samples is None:
            means[-1:] += (total - (t - folded) * means[-1:]) / sizes[-1]  # add the sum
        else:
            batches = np.array_split(means, min(BATCHES, len(means) // SPREAD) or 1)
            sizes = np.array([len(batch) for batch in batches])
            means, weights = np.array([batch.mean(axis=0) for batch in batches]), sizes / len(means)
        used = weights > 0.0
        sizes, weights, means = sizes[used], weights[used], means[used]
        if len(sizes) < SPREAD:
            return np.nan if self._shape is None else np.full(self._shape, np.nan, self._dtype)
        apart = np.abs(means - np.tensordot(sizes / sizes.sum(), means, 1))
        scale = np.max(apart, axis=0)  # the squares of the largest floats would be infinite
        scaled = apart / np.where(scale > 0, scale, 1.0)
        variance = np.tensordot(sizes, scaled**2, 1) / (len(sizes) - 1)  # the variance of a sample
        error = scale * np.sqrt(variance * np.sum(weights**2 / sizes))
        return error.item() if self._shape is None else error.astype(self._dtype)

    def autocorrelation_time(self, window: Reading | None = None) -> Any:
        """Return how many samples carry as much information as one independent sample.

        This is the squared ratio of `standard_error()` and `standard_error(iid=True)`: about 1 for
        independent samples, and (1 + ρ) / (1 - ρ) for an AR(1) stream with correlation ρ.

        Examples:
            >>> from tailavg import AnytimeWindow
            >>> average = TailAverage(AnytimeWindow(0.5, accumulators=50), variance=True)
            >>> noise, x = np.random.default_rng(0).normal(size=200_000), 0.0
            >>> for e in noise.tolist():
            ...     x = 0.8 * x + e
            ...     average.update(x)
            >>> round(average.autocorrelation_time(), 1)  # within 20 % of 9, with 50 blocks
            8.0
        """
        blocks, iid = self.standard_error(window), self.standard_error(window, iid=True)
        with np.errstate(all="ignore"):
            ratio = np.divide(blocks, iid) ** 2
        return ratio.item() if self._shape is None else ratio

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain data, in the layout of `tailavg.io.state`.

        Examples:
            >>> average = TailAverage(4)
            >>> average.update_many([1.0, 2.0, 3.0, 4.0, 5.0])
            >>> resumed = TailAverage.from_state_dict(average.state_dict())
            >>> resumed.update(6.0)
            >>> resumed.value()
            4.5
        """
        blocks, folded, partial, *others = self._arrays()
        clock, number = self._clock, self._shape is None
        as_data = layout.as_json if number else lambda array: array
        return layout.state(
            self.rule,
            nan_policy=self._nan_policy,
            dtype=None if self._dtype is None else self._dtype.name,
            scalar=number,
            count=clock.count,
            starts=clock.starts,
            blocks=as_data(blocks),
            folded=folded,
            partial=as_data(partial),
            **dict(zip(("variances", "squares"), map(as_data, others), strict=False)),
            **({"elapsed": clock.elapsed()} if is_timed(self.rule) else {}),
        )

    def _arrays(self) -> tuple[Any, ...]:
        """Return a copy of the means, the step of the last fold, and a copy of the sum since.

        With variances, these and the sum of squares follow.
        """
        clock = self._now
        means, folded, total = self._means, clock.folded, self._sum
        if self._samples is not None:
            means, folded, total = list(self._samples.last(clock.kept)), clock.count, 0.0
        arrays = self._stacked(means), folded, self._spread_out(total)
        if self._variances is None:
            return arrays
        variances = self._variances if self._samples is None else [0.0] * clock.kept
        return *arrays, self._stacked(variances), self._spread_out(self._squares)

    def _stacked(self, blocks: list[Any]) -> Array:
        """Return the arrays of all blocks that have samples as one array."""
        blocks, shape = blocks[len(blocks) - len(self._clock.starts) :], self._shape or ()
        stacked = np.empty((len(blocks), *shape), self._dtype)
        for block, array in enumerate(blocks):
            stacked[block] = np.reshape(array, shape) if np.ndim(array) else array
        return stacked

    def _spread_out(self, array: Any) -> Array:
        return np.array(np.broadcast_to(array, self._shape or ()), self._dtype)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the average that `state_dict` saved. A resumed run is bit-identical.

        A state that another framework saved is accepted if it has one array.
        """
        state = layout.check(state)
        if isinstance(state["partial"], Mapping):
            state = layout.unnamed(state)
        try:
            average = cls(
                layout.rule_from(state["rule"]),
                dtype=state["dtype"],
                nan_policy=state["nan_policy"],
                variance="variances" in state,
            )
        except TypeError as error:
            raise ValueError(f"state: {error}") from error
        count, starts, folded = state["count"], list(state["starts"]), state["folded"]
        empty = not (starts or folded or np.any(state["partial"]))
        if count < 0 or len(starts) != len(state["blocks"]) or (count == 0) != empty:
            raise ValueError(
                f"corrupt state: count {count}, {len(starts)} block starts, "
                f"{len(state['blocks'])} blocks"
            )
        if count:
            if average._dtype is None:
                raise ValueError(f"state: dtype: expected the dtype of {count} samples, got None")
            layout.check_steps(count, starts, folded)
            names = ["blocks", "partial"]
            if average._variances is not None:
                names += ["variances", "squares"]
            try:
                arrays = [numbers(state[name], f"state: {name}") for name in names]
            except TypeError as error:
                raise ValueError(*error.args) from error
            blocks, partial = arrays[:2]
            shape = blocks.shape[1:]
            if partial.shape != shape or (state["scalar"] and shape):
                raise ValueError(
                    f"state: expected a partial sum of the blocks' shape {shape}, "
                    f"got {partial.shape}"
                )
            if [array.shape for array in arrays[2:]] not in ([], [blocks.shape, shape]):
                raise ValueError("state: variances or squares differ in shape from the blocks")
            if not np.can_cast(np.result_type(*arrays), average._dtype, "same_kind"):
                raise ValueError(f"state: blocks are not of dtype {average._dtype}")
            if any((variances < 0.0).any() for variances in arrays[2:3]):
                raise ValueError("corrupt state: negative variances")
            layout.check_elapsed(state, is_timed(average.rule))
            if is_timed(average.rule):
                average._clock.restore_elapsed(count, starts, folded, state["elapsed"])
            else:
                average._clock.restore(count, starts, folded)
            average._begin(None if state["scalar"] else shape, average._dtype)
            average._restore(*(array.astype(average._dtype) for array in arrays))
            average._commit()
        return average

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a file (npz without pickle), atomically."""
        layout.write_file(path, self.state_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return the average that `save` wrote.

        `path` may also be a file that `ParameterAverage.save` wrote for a single tensor, or that
        `tailavg stream --state` wrote for one column and one window, without `--by`.

        Examples:
            >>> import tempfile
            >>> average = TailAverage(3)
            >>> average.update(1.0)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     average.save(f"{folder}/average.npz")
            ...     TailAverage.load(f"{folder}/average.npz") == average
            True
        """
        return cls.from_state_dict(layout.read(path))

    def copy(self) -> Self:
        """Return an independent copy."""
        _ = self.count  # raises if the average is broken
        copy = object.__new__(type(self))
        for name in TailAverage.__slots__[1:]:
            setattr(copy, name, getattr(self, name))
        copy._clock = self._clock.copy()
        if isinstance(self._sum, np.ndarray):
            copy._sum = self._begun(self._sum)
            if self._variances is not None:
                copy._squares = self._begun(self._squares)
        if self._samples is not None:
            copy._samples = self._samples.copy()
        if extra := getattr(self, "__dict__", None):  # attributes of a subclass
            copy.__dict__.update(extra)
        return copy

    __copy__ = copy

    def __getstate__(self) -> Any:
        _ = self.count  # raises if the average is broken
        self._reader = None  # a function cannot be pickled
        return object.__getstate__(self)

    def __eq__(self, other: object) -> bool:
        """Return whether both averages have the same state. A NaN equals a NaN."""
        if not isinstance(other, TailAverage):
            return NotImplemented
        (mine, *arrays), (theirs, *others) = self._described(), other._described()
        return mine == theirs and all(
            np.array_equal(*pair, equal_nan=True) for pair in zip(arrays, others, strict=True)
        )

    def _described(self) -> tuple[Any, ...]:
        """Return the state as a tuple that can be compared with ==, and arrays."""
        blocks, folded, *arrays = self._arrays()
        clock = self._clock
        times = clock.elapsed() if is_timed(self.rule) else None
        described = self.rule, self._nan_policy, self._dtype, self._shape, len(arrays), times
        return (*described, clock.count, clock.starts, folded), blocks, *arrays

    def __repr__(self) -> str:
        options = [repr(self.rule)]
        if self._dtype is not None:
            options.append(f"dtype={self._dtype.name!r}")
        if self._nan_policy != "propagate":
            options.append(f"nan_policy={self._nan_policy!r}")
        if self._variances is not None:
            options.append("variance=True")
        samples = "incomplete" if self._left is None else f"{self.count or 'no'} samples"
        shape = f" of shape {self._shape}" if self._shape else ""
        return f"<TailAverage({', '.join(options)}): {samples}{shape}>"

    # Changes.

    def _atomically(self, change: Callable[..., Any], *arguments: Any) -> Any:
        """Call `change` and commit it. If that fails, restore the state before the call."""
        clock = self._now
        step = clock.step
        kind = self._dtype, self._shape, self._number, self._scratch
        numbers = self._means, self._sum, self._variances, self._squares, self._samples
        self._left = None
        try:
            result = change(*arguments)
            self._commit()
        except BaseException:
            self._left = None  # if this is interrupted, too, the average is broken
            self._dtype, self._shape, self._number, self._scratch = kind
            self._means, self._sum, self._variances, self._squares, self._samples = numbers
            self._clock = clock
            clock.resume(*step)
            self._commit()
            raise
        return result

    def _commit(self) -> None:
        """Set the attributes that the next updates need, from the state of the clock."""
        clock = self._clock
        t, self._reader = clock.count, None
        quick = t and self._samples is None and not is_timed(self.rule)
        self._plain = None
        if quick and self._nan_policy == "propagate" and self._variances is None:
            self._plain = float if self._number else np.ndarray
        self._factors = clock.factors or None
        self._due = max(t, clock.next) if quick else t
        self._left = self._due - t

    @property
    def _now(self) -> Any:
        """The clock, with its count brought up to date: fast updates do not change the clock."""
        self._clock.count = self.count
        return self._clock

    def _begin(self, shape: tuple[int, ...] | None, dtype: np.dtype[Any]) -> None:
        """Fix the shape and dtype of the samples, and allocate the sum."""
        if self._dtype is None:
            exact = dtype.kind in "biu" or shape is None
            self._dtype = np.result_type(dtype, np.float64 if exact else np.float32)
        self._shape = shape
        self._number = shape is None and self._dtype == np.float64
        self._check_real()
        if isinstance(self._clock, SampleClock):
            self._samples = Samples(np.empty((0, math.prod(shape or ())), self._dtype))
            return
        self._means = [0.0] * len(self._clock.blocks)
        self._sum = self._begun(0.0)
        if self._variances is not None:
            self._variances, self._squares = self._means.copy(), self._begun(0.0)
        if isinstance(self._clock, DecayClock) and not self._number:
            self._scratch = aligned_zeros(shape or (), self._dtype)

    def _check_real(self) -> None:
        if self._variances is not None and self._dtype is not None and self._dtype.kind == "c":
            raise TypeError(f"variance=True needs real numbers, got {self._dtype}")

    def _begin_with(self, samples: Array) -> None:
        """Call `_begin` if these are the first samples."""
        if not self._clock.count:
            self._begin(samples.shape[1:] if samples.ndim > 1 else None, samples.dtype)

    def _begun(self, total: Any) -> Any:
        """Return a new sum that begins with `total`; the old sum stays unchanged in memory."""
        if self._number:
            return float(total)
        fresh = aligned_zeros(self._shape or (), self._dtype)  # type: ignore[arg-type]
        fresh[...] = total
        return fresh

    def _square(self, sample: Array, factor: float) -> Any:
        """Return the squared deviation of a sample from the newest mean, times its factor."""
        if self._number:
            apart = float(sample) - self._means[-1]
            return apart * apart * factor
        square = sample.astype(self._dtype, copy=False) - self._means[-1]
        square *= square  # in-place, since a large new array takes longer than the arithmetic
        if factor != 1.0:
            square *= factor
        return square

    @np.errstate(all="ignore")
    def _add(self, sample: Array, shape: tuple[int, ...] | None, time: int | None = None) -> None:
        """Fold the sum and turn, if that is due, and take one sample."""
        clock = self._clock
        if not clock.count:
            self._begin(shape, sample.dtype)
        if self._samples is not None:
            clock.count += 1
            self._samples = self._samples.added(sample.reshape(1, sample.size), clock.kept)
            return
        if time is not None:
            clock.arrive(time)
        self._prepare()
        factor = clock.factor if time is None else clock.admit()
        if self._variances is not None:
            if clock.count == clock.blocks[-1]:  # the first sample of a block is its shift
                self._means = [*self._means[:-1], self._begun(sample)]  # a copy
            self._squares = self._squares + self._square(sample, factor)
        if self._number:
            self._sum += float(sample) * factor
        else:
            term = sample.astype(self._dtype, copy=False)
            self._sum = self._sum + (term if factor == 1.0 else term * factor)
        clock.count += 1

    def _prepare(self) -> None:
        """Fold the sum and turn, if that is due: see `tailavg.core.clock.Clock.prepare`."""
        clock = self._clock
        if clock.count < clock.next:
            return
        if clock.count > clock.folded:
            how, mean, variances = clock.fold(), self._means[-1], self._variances
            if variances is not None:
                moments = mean, variances[-1], self._sum, self._squares
                variance, lost = joined_variance(*moments, *how)
                self._variances = [*variances[:-1], self._as_mean(variance)]
                self._squares = self._begun(lost)
            mean, lost = joined(mean, self._sum, *how)
            self._means = [*self._means[:-1], self._as_mean(mean)]
            self._sum = self._begun(lost)
        turn = clock.turn()
        if turn is not None:
            (gone, weight), means, variances = turn, self._means, self._variances
            if variances is not None:
                if weight:
                    pair = means[gone - 1], variances[gone - 1], means[gone], variances[gone]
                    merged = self._as_mean(merged_variance(*pair, weight))
                    variances = [*variances[: gone - 1], merged, *variances[gone:]]
                self._variances = [*variances[:gone], *variances[gone + 1 :], 0.0]
                self._squares = self._begun(0.0)
            if weight:
                merged = means[gone - 1] * (1.0 - weight) + means[gone] * weight
                means = [*means[: gone - 1], merged, *means[gone:]]
            self._means = [*means[:gone], *means[gone + 1 :], 0.0]
            self._sum = self._begun(0.0)

    def _as_mean(self, mean: Any) -> Any:
        return float(mean) if self._number else np.asarray(mean, self._dtype)

    def _shaped(self, row: Array) -> Any:
        return row.item() if self._number else row.reshape(self._shape or ())

    def _pool(self, rows: Array) -> None:
        """Take many samples, block by block. Skip the samples of blocks that are dropped meanwhile.

        A block after these samples may contain several blocks from before, if they were merged.
        """
        clock = self._clock
        self._prepare()
        before, opened, in_sum = clock.count, clock.blocks[-1], clock.count - clock.folded
        blocks = list(zip(pairwise([*clock.blocks, clock.folded]), self._means, strict=True))
        summed = self._sum
        clock.advance(before + len(rows))
        self._means, total = [], 0.0
        for start, end in pairwise([*clock.blocks, clock.count]):
            mean, size = 0.0, 0
            for (first, last), old_mean in blocks:
                if start <= first < last <= end:
                    size += last - first
                    w = (last - first) / size
                    mean = old_mean if w == 1.0 else mean * (1.0 - w) + old_mean * w
            new = rows[max(0, start - before) : max(0, end - before)]
            total, fresh = 0.0, len(new)
            if fresh:
                total = self._shaped(sum_rows(new, self._dtype))  # type: ignore[arg-type]
            if start <= opened < end:
                total, fresh = total + summed, fresh + in_sum
            if fresh and end < clock.count:
                mean, _ = joined(mean, total, fresh, fresh / (end - start), end - start)
            self._means.append(self._as_mean(mean) if size or fresh else 0.0)
        if clock.overfull:  # the total is in double precision until it is folded
            mean, total = joined(self._means[-1], total, *clock.fold())
            self._means[-1] = self._as_mean(mean)
        self._sum = self._begun(total)

    def _table(self) -> Table:
        """Return the state as a table of one row."""
        clock, width = self._clock, math.prod(self._shape or ())
        variances = self._variances
        kind: Any = self._dtype
        table = Table(self.rule, 1, width, kind, variances is not None)
        table.hold_clock(0, clock)
        for row, mean in zip(table.means[0], self._means, strict=True):
            row[:] = np.reshape(mean, -1)
        table.sums[0] = np.reshape(self._sum, -1)
        if variances is not None:
            table.squares[0] = np.reshape(self._squares, -1)
            for row, variance in zip(table.variances[0], variances, strict=True):
                row[:] = np.reshape(variance, -1)
        return table

    def _restore(self, blocks: Array, partial: Array, *spread: Array) -> None:
        """Set what `_arrays` returned, after the clock has been restored."""
        if self._samples is not None:
            if partial.any():
                raise ValueError("corrupt state: an ExactWindow has no partial sum")
            self._samples = Samples(blocks.reshape(len(blocks), partial.size))
            return
        empty = [0.0] * (len(self._means) - len(blocks))
        self._means, self._sum = [*empty, *map(self._as_mean, blocks)], self._begun(partial)
        if spread:
            variances, squares = spread
            self._variances = [*empty, *map(self._as_mean, variances)]
            self._squares = self._begun(squares)

    def _hold(self, table: Table, row: int = 0) -> None:
        """Replace the state by a row of a table."""
        self._clock = table.clock(row)
        self._means = self._shaped_blocks(table.means[row])
        self._sum = self._begun(self._shaped(table.sums[row]))
        if self._variances is not None:
            self._variances = self._shaped_blocks(table.variances[row])
            self._squares = self._begun(self._shaped(table.squares[row]))

    def _shaped_blocks(self, rows: Array) -> list[Any]:
        if self._number:
            return rows[:, 0].tolist()  # type: ignore[no-any-return]
        return [row.reshape(self._shape or ()) for row in rows]

    # Checks.

    def _checked(self, x: Any) -> Array | None:
        """Return a sample as an array, or None if it is skipped."""
        sample = numbers(x, "sample")
        self._check_kind(sample.shape, sample.dtype)
        if self._nan_policy != "propagate" and np.isnan(sample).any():
            if self._nan_policy == "raise":
                raise ValueError(f"sample: expected no NaN (nan_policy='raise'), got {x!r}")
            return None
        return sample

    def _checked_rows(self, xs: Array) -> tuple[Array, npt.NDArray[np.bool_] | None]:
        """Return the samples that are not skipped, as rows of a matrix, and which samples are kept.

        The second result is None if no sample is skipped.
        """
        if xs.ndim == 0:
            raise ValueError(f"samples: expected a sequence, got the number {xs}")
        if len(xs):
            self._check_kind(xs.shape[1:], xs.dtype)
        rows: Array = xs.reshape(len(xs), math.prod(xs.shape[1:]))
        kept = None
        if self._nan_policy != "propagate" and has_nan(rows):
            bad = np.isnan(rows).any(axis=1)
            if self._nan_policy == "raise":
                raise ValueError(
                    f"samples: expected no NaN (nan_policy='raise'), got {int(bad.sum())} samples "
                    f"with NaN, the first at index {int(bad.argmax())}"
                )
            kept = np.logical_not(bad)
            rows = rows[kept]
        return rows, kept

    def _check_kind(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if self.count and shape != (self._shape or ()):
            raise ValueError(
                f"sample: expected shape {self._shape or ()}, as the first sample, got {shape}"
            )
        if self._dtype is not None and dtype.kind == "c" and self._dtype.kind != "c":
            raise TypeError(f"sample: expected real numbers for {self._dtype}, got {dtype}")


def _reader(clock: Any, means: list[float]) -> Callable[[int, float], float | None] | None:
    """Return a function that computes the average of numbers from the step and the sum.

    It may be called until the next fold or turn, and returns None at steps that it does not cover.
    Its results are bit-identical to the sum of the clock's `terms`. There is no such function for
    an `ExactWindow` or an `AnyTail`.
    """
    if is_timed(clock.rule):
        return None
    if isinstance(clock, DecayClock):
        folded, decay, scales, mean = clock.folded, clock.decay, clock.scales, means[0]

        def read_decaying(t: int, total: float) -> float | None:
            if t == folded:
                return None
            scale = scales[t - folded - 1]
            return decay * scale * mean + scale * total if decay else scale * total

        return read_decaying
    if not isinstance(clock, BlockClock) or isinstance(clock.rule, AnyTail):
        return None
    window, blocks, folded = clock.rule.window, clock.blocks, clock.folded
    oldest, since, until = clock.split(window)
    first = oldest + 1 if oldest >= 0 else len(blocks) - 1
    start = float(since)  # adding floats is faster than adding floats and integers
    old, old_mean = (start - blocks[oldest], means[oldest]) if oldest >= 0 else (0.0, 0.0)
    starts = [*blocks[first:], folded]
    newer = [
        (float(starts[i + 1] - starts[i]), means[first + i])
        for i in range(len(starts) - 1)
        if starts[i + 1] > starts[i]
    ]
    fixed = float(window.k) if isinstance(window, Fixed) else None
    size = window.size

    def read_blocks(t: int, total: float) -> float | None:
        if t >= until:
            return None
        new = t - start
        excess = old + new - (fixed or size(t))
        each, of_old = weights(old, new, excess if excess > 0.0 else 0.0)
        value: float = of_old * old_mean if of_old else 0.0
        for count, mean in newer:
            value += each * count * mean
        return value + each * total if t > folded else value

    return read_blocks


def no_variance_error(call: str) -> ValueError:
    """Return the error for a call that needs variance=True."""
    return ValueError(f"{call}: the average keeps no variance; create it with variance=True")


def has_nan(xs: Array) -> bool:
    """Return whether an array contains a NaN. The sum is checked first, which is faster."""
    with np.errstate(all="ignore"):
        return bool(np.isnan(xs.sum()) and np.isnan(xs).any())


def numbers(x: Any, what: str) -> Array:
    """Return `x` as an array of real or complex numbers."""
    if _is_masked(x):
        raise TypeError(
            f"{what}: expected numbers, got a masked array; fill it with NaN and see nan_policy"
        )
    if hasattr(x, "detach"):  # a torch tensor, which may require gradients or be on a GPU
        x = x.detach().cpu()
        x = x.float() if x.dtype.itemsize == 2 else x  # NumPy has no bfloat16
    try:
        array = np.asarray(float(x) if isinstance(x, int) else x)
        if array.dtype.name == "bfloat16":  # as JAX's arrays may be
            array = array.astype(np.float32)
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"{what}: expected arrays of one shape, got {type(x).__name__}: {error}"
        ) from error
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"{what}: expected real or complex numbers, got {type(x).__name__} of {array.dtype}"
        )
    return array


def _is_masked(x: Any) -> bool:
    """Return whether `x`, or anything in a list, is a masked array, whose mask would be lost."""
    if not isinstance(x, list | tuple):
        return isinstance(x, np.ma.MaskedArray)
    kinds = set(map(type, x))
    if any(issubclass(kind, np.ma.MaskedArray) for kind in kinds):
        return True
    return any(issubclass(kind, list | tuple) for kind in kinds) and any(map(_is_masked, x))


def _accumulator_dtype(given: npt.DTypeLike) -> np.dtype[Any]:
    try:
        dtype = np.dtype(np.dtype(given).type)  # NumPy's own object: `update` compares with `is`
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.kind not in "fc" or np.finfo(dtype).bits < 32:
        raise TypeError(
            f"dtype: expected float32, float64 or a complex one, got {short_repr(given)}"
        )
    return dtype
