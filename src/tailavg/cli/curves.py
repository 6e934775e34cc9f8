"""Curves of any length in little memory, for `tailavg plot`.

Rows are grouped in bins, and a curve keeps the least and the greatest value of each bin. A bin is
about as narrow as a pixel, so more values would not be visible. Bins are made wide enough that a
few thousand of them hold the curve; on a logarithmic axis, later bins are wider.

Read `Track` first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tailavg.cli.options import Reads
from tailavg.core.rules import is_timed
from tailavg.numpy import TailAverage
from tailavg.numpy.arithmetic import Array
from tailavg.numpy.average import NanPolicy

LARGEST = 1e300
"""Larger values are drawn here, since the largest floats would overflow in a picture."""

BANDED = 256
"""The most rows at which the width of the band is computed."""


class BandKind(StrEnum):
    """What the band around an average shows: its standard error, or the spread of the samples."""

    error = "error"
    std = "std"
    none = "none"


class Grid:
    """The rows at which bins end: multiples of a width, or powers on a logarithmic axis."""

    def __init__(self, most: int, log: bool) -> None:
        self.most, self.log = most, log
        self.width = 1
        self.each = most // 16  # bins while the row doubles

    def ends(self, start: int, stop: int) -> Array:
        """Return the ends after `start`, up to `stop`.

        Examples:
            >>> Grid(64, log=True).ends(5, 20)
            array([ 6,  7,  8, 10, 12, 14, 16, 20])
        """
        if not self.log:
            return np.arange(start // self.width + 1, stop // self.width + 1) * self.width
        first, last = (math.floor(self.each * math.log2(max(row, 1))) for row in (start, stop))
        ends = np.ceil(2.0 ** (np.arange(first, last + 2) / self.each) - 1e-9).astype(np.int64)
        return np.unique(ends[(ends > start) & (ends <= stop)])

    def widen(self, bins: int) -> bool:
        """Make bins twice as wide if there are too many. Return whether there were too many."""
        too_many = not self.log and bins > self.most
        self.width *= 1 + too_many
        return too_many


class Bins(NamedTuple):
    """Consecutive bins. `low`, `high` and `rising` may have several curves as first axis."""

    end: Array
    """The row at which each bin ends."""
    first: Array
    """The first x in each bin."""
    last: Array
    """The last x in each bin."""
    low: Array
    """The least value of a curve in each bin; infinity if no value is finite."""
    high: Array
    """The greatest value of a curve in each bin; -infinity if no value is finite."""
    rising: Array
    """Whether the least value comes before the greatest."""

    @classmethod
    def of(cls, xs: Array, curves: Array, before: int, cuts: Array) -> Bins:
        """Return bins of the rows after row `before`. They end at `cuts` and at the last row."""
        stop = before + len(xs)
        ends = cuts if len(cuts) and cuts[-1] == stop else np.append(cuts, stop)
        starts = np.concatenate([[0], ends[:-1] - before])
        finite = np.isfinite(curves)
        if finite.all():
            low, high = (each.reduceat(curves, starts, axis=1) for each in (np.minimum, np.maximum))
        else:
            low = np.minimum.reduceat(np.where(finite, curves, np.inf), starts, axis=1)
            high = np.maximum.reduceat(np.where(finite, curves, -np.inf), starts, axis=1)
        lasts = ends - before - 1
        rising = curves[:, starts] <= curves[:, lasts]  # exact enough for a narrow bin
        return cls(ends, xs[starts], xs[lasts], low, high, rising)

    def joined(self, starts: Array) -> Bins:
        """Return merged bins: each has one or two bins, from an index in `starts` to the next."""
        left, right = starts, np.append(starts[1:], len(self.end)) - 1
        later_low = self.low[:, right] < self.low[:, left]
        later_high = self.high[:, right] > self.high[:, left]
        rising = np.where(later_low, self.rising[:, right], self.rising[:, left])
        return Bins(
            self.end[right],
            self.first[left],
            self.last[right],
            np.minimum(self.low[:, left], self.low[:, right]),
            np.maximum(self.high[:, left], self.high[:, right]),
            np.where(later_low == later_high, rising, later_high),
        )

    def followed(self, other: Bins) -> Bins:
        """Return these bins followed by other bins."""
        return Bins(*(np.concatenate(pair, axis=-1) for pair in zip(self, other, strict=True)))


class Band(NamedTuple):
    """One standard error, or one standard deviation, around a curve."""

    x: Array
    low: Array
    high: Array


@dataclass(frozen=True, eq=False)
class Line:
    """A curve to draw."""

    window: int
    """The index of the window of the average; -1 for the curve of the samples."""
    bins: Bins
    band: Band | None
    now: float
    """The last value."""
    error: float
    """Half the width of the band at the last value; NaN if it is unknown."""
    name: str = ""
    colour: str = ""
    dashes: int = 0
    listed: bool = True
    """Whether the legend names it."""

    def points(self) -> tuple[Array, Array]:
        """Return the points to connect, at most two for each bin; NaN at a gap, or if x falls."""
        bins = self.bins
        low, high = (np.where(np.isfinite(each), each, np.nan) for each in (bins.low, bins.high))
        xs = np.stack([bins.first, bins.last], axis=1)
        ys = np.stack([np.where(bins.rising, low, high), np.where(bins.rising, high, low)], axis=1)
        two = (low < high) | (xs[:, 0] != xs[:, 1])
        kept = np.stack([np.full(len(low), True), two], axis=1)
        xs, ys = xs[kept], ys[kept].clip(-LARGEST, LARGEST)
        back = np.flatnonzero(np.diff(xs) < 0) + 1
        return np.insert(xs, back, xs[back]), np.insert(ys, back, np.nan)


class Track:
    """The curves of one column of a run: the samples and their averages."""

    def __init__(
        self,
        reads: Reads,
        most: int,
        log: bool,
        band: BandKind,
        after: int = 0,
        nan: NanPolicy = "propagate",
    ) -> None:
        self._std = band is BandKind.std
        self.averages = [
            (TailAverage(rule, nan_policy=nan, variance=self._std), reading)
            for rule, reading in reads
        ]
        self.count = 0
        self._after = after  # only later rows are drawn
        self._grid = Grid(most, log)
        self._bins: Bins | None = None
        self._banded = None if band is BandKind.none else Grid(BANDED, log)
        self._noted: list[tuple[int, float, list[float], list[float]]] = []
        """The row, x, and the values and errors of the averages, at some rows."""
        self._last = math.nan

    def take(self, xs: Array, ys: Array, times: Array | None = None) -> None:
        """Take samples `ys` and their positions `xs` on the horizontal axis.

        Windows of time need their `times` as datetime64s.
        """
        if not len(ys):
            return
        curves = np.vstack([ys, self._scan(xs, ys, times)])
        before, self.count = self.count, self.count + len(ys)
        self._last = float(ys[-1])
        if before < self._after:
            early = self._after - before
            xs, curves, before = xs[early:], curves[:, early:], self._after
            if not len(xs):
                return
        bins = Bins.of(xs, curves, before, self._grid.ends(before, self.count))
        if self._bins is not None:
            before_these, bins = len(self._bins.end), self._bins.followed(bins)
            if not len(self._grid.ends(before - 1, before)):  # the last bin goes on
                bins = bins.joined(np.delete(np.arange(len(bins.end)), before_these))
        while self._grid.widen(len(bins.end)):
            starts = np.flatnonzero(np.append(True, bins.end[:-1] % self._grid.width == 0))
            bins = bins.joined(starts)
        self._bins = bins

    def _scan(self, xs: Array, ys: Array, times: Array | None) -> Array:
        """Return the averages after each sample. Note errors at some samples."""
        averages = np.empty((len(self.averages), len(ys)))
        stops = self._stops(len(ys))
        for start, stop in pairwise(sorted({0, *stops, len(ys)})):
            for (average, reading), curve in zip(self.averages, averages, strict=True):
                ts = times[start:stop] if times is not None and is_timed(average.rule) else None
                curve[start:stop] = average.scan(ys[start:stop], reading, ts=ts)
            if stop in stops and self.count + stop > self._after:
                values = averages[:, stop - 1].tolist()
                errors = [self._error(*each) for each in self.averages]
                self._noted.append((self.count + stop, float(xs[stop - 1]), values, errors))
        return averages

    def _stops(self, samples: int) -> set[int]:
        """Return the numbers of the next samples after which to note errors."""
        if self._banded is None:
            return set()
        while self._banded.widen((self.count + samples) // self._banded.width):
            self._noted = [noted for noted in self._noted if noted[0] % self._banded.width == 0]
        return set((self._banded.ends(self.count, self.count + samples) - self.count).tolist())

    def _error(self, average: TailAverage, reading: Any) -> float:
        """Return half the width of the band; NaN before the first sample."""
        if not average.count:
            return math.nan
        error: float = average.std(reading) if self._std else average.standard_error(reading)
        return error

    def lines(self) -> list[Line]:
        """Return the curve of the samples, and then the curves of the averages."""
        if self._bins is None:
            return []
        end, first, last, low, high, rising = self._bins
        bins = [Bins(end, first, last, *curve) for curve in zip(low, high, rising, strict=True)]
        lines = [Line(-1, bins[0], None, self._last, math.nan)]
        for i, (average, reading) in enumerate(self.averages):
            now = average.value(reading) if average.count else math.nan
            error, band = math.nan, None
            if self._banded is not None:
                error = self._error(average, reading)
                band = self._band(i, now, error)
            lines.append(Line(i, bins[i + 1], band, now, error))
        return lines

    def _band(self, i: int, now: float, error: float) -> Band | None:
        """Return the band of an average up to the last row; None without two known errors."""
        assert self._bins is not None
        noted = [
            (x, values[i], errors[i]) for row, x, values, errors in self._noted if row < self.count
        ]
        x, value, spread = np.array([*noted, (self._bins.last[-1], now, error)]).T
        if np.isfinite(spread).sum() < 2:
            return None
        spread[1:][np.diff(x) < 0] = np.nan  # a gap where x falls
        low, high = ((value + sign * spread).clip(-LARGEST, LARGEST) for sign in (-1, 1))
        return Band(x, low, high)
