"""`Elapsed`: a window of time. Times are whole nanoseconds: no decision depends on rounding.

`tailavg.core.clock` says which blocks such a window has. All other windows count samples.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["LONGEST", "Counted", "Elapsed", "nanoseconds", "now", "samples_since", "times_in"]

Period = float | str | timedelta | np.timedelta64

SECOND = 10**9
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LONGEST = 2**62
"""The most nanoseconds in a period, or between 1970 and a time: 146 years."""

_UNITS = {"d": 86400 * SECOND, "h": 3600 * SECOND, "min": 60 * SECOND, "s": SECOND}
_UNITS |= {"ms": 10**6, "us": 10**3, "ns": 1}
_NAMES = {"D": "d", "day": "d", "days": "d", "hr": "h", "hour": "h", "hours": "h", "m": "min"}
_NAMES |= {"minute": "min", "minutes": "min", "sec": "s", "second": "s", "seconds": "s"}
_NAMES |= {name: name for name in _UNITS} | {"µs": "us"}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)?\s*([a-zA-Zµ]+)\s*")


@dataclass(frozen=True, init=False)
class Elapsed:
    """The samples of the last `period` of time, up to the newest sample.

    It works in an `AnytimeWindow`, which is the default, and in an `Exponential`. Each sample then
    has a time: `update(x, t)`.

    Args:
        period: Seconds, a timedelta, or text such as "10min" or "1h30m".

    Examples:
        >>> Elapsed("1h30m"), Elapsed(0.5)
        (Elapsed(period=5400.0), Elapsed(period=0.5))
    """

    period: float
    """The period in seconds."""

    def __init__(self, period: Period) -> None:
        length = _length(period)
        if not 0 < length <= LONGEST:
            raise ValueError(f"period: expected between 1 nanosecond and 146 years, got {period!r}")
        object.__setattr__(self, "period", length / SECOND)

    @property
    def length(self) -> int:
        """The period in nanoseconds."""
        return round(self.period * SECOND)

    def size(self, t: Any) -> float:
        """Raise a TypeError: how many samples are in a window of time depends on their times."""
        raise TypeError(f"size: the number of samples in {self} depends on their times")


@dataclass(frozen=True)
class Counted:
    """What a window of time is when it is read: the last k samples. k may be an array."""

    k: Any

    def size(self, t: Any) -> Any:
        """Return k."""
        return self.k


def _length(period: Any) -> int:
    """Return a period in nanoseconds."""
    if isinstance(period, str):
        total, at = 0.0, 0
        while at < len(period) and (part := _PART.match(period, at)):
            if part[2] not in _NAMES:
                break
            total += float(part[1] or 1) * _UNITS[_NAMES[part[2]]]
            at = part.end()
        if not period or at < len(period):
            raise ValueError(f"period: expected text such as '10min' or '1h30m', got {period!r}")
        return round(min(total, 2.0 * LONGEST))
    if isinstance(period, timedelta):
        return (period.days * 86400 + period.seconds) * SECOND + period.microseconds * 1000
    if isinstance(period, np.timedelta64):
        if np.datetime_data(period.dtype)[0] in ("Y", "M"):
            raise ValueError(f"period: expected days or shorter units, got {period!r}")
        seconds = float(period.astype("timedelta64[s]").astype(np.int64))  # NaT is below 0
        if not 0 <= seconds <= LONGEST // SECOND:
            return 0
        return int(period.astype("timedelta64[ns]").astype(np.int64))
    if isinstance(period, bool) or not isinstance(period, Real):
        raise TypeError(
            f"period: expected seconds, a timedelta or text such as '10min', got {period!r}"
        )
    return _of_seconds(period)


def _of_seconds(x: Any) -> int:
    """Return a number of seconds in nanoseconds; if it is NaN or too large, above `LONGEST`."""
    return round(float(x) * SECOND) if abs(x) <= LONGEST // SECOND else 2 * LONGEST


def now() -> int:
    """Return the time of a clock that never goes back, in nanoseconds."""
    return time.monotonic_ns()


def nanoseconds(t: Any) -> int:
    """Return a time as nanoseconds: a number of seconds, a datetime or a datetime64.

    A datetime without a time zone is in UTC.

    Examples:
        >>> nanoseconds(0.1), nanoseconds(np.datetime64("1970-01-01T00:00:01"))
        (100000000, 1000000000)
    """
    if isinstance(t, datetime) and t == t:  # NaT of pandas is a datetime
        value = getattr(t, "value", None)  # of pandas
        if not isinstance(value, int):
            value = _length((t if t.tzinfo else t.replace(tzinfo=UTC)) - _EPOCH)
    elif isinstance(t, np.datetime64 | date):
        return int(times_in([np.datetime64("NaT") if t != t else np.datetime64(t)])[0])
    elif isinstance(t, Real) and not isinstance(t, bool | np.timedelta64):
        value = _of_seconds(t)
    else:
        raise TypeError(f"t: expected seconds, a datetime or a datetime64, got {t!r}")
    if abs(value) > LONGEST:
        raise _range_error(t)
    return value


def times_in(ts: Any) -> npt.NDArray[np.int64]:
    """Return times as nanoseconds: numbers of seconds, datetimes or datetime64s."""
    times = np.asarray(ts)
    if times.ndim != 1:
        raise ValueError(f"ts: expected a sequence of times, got shape {times.shape}")
    if times.dtype.kind == "O":
        return np.array([nanoseconds(t) for t in times], np.int64)
    if times.dtype.kind == "M":
        unit, number = np.datetime_data(times.dtype)
        exact = (unit, number) == ("ns", 1)
        counts = times.astype(f"datetime64[{'ns' if exact else 's'}]", copy=False).view(np.int64)
        _check_range(counts, LONGEST if exact else LONGEST // SECOND, times)
        return counts if exact else times.astype("datetime64[ns]").view(np.int64)
    if times.dtype.kind not in "iuf":
        raise TypeError(f"ts: expected seconds, datetimes or datetime64s, got {times.dtype}")
    _check_range(times, LONGEST // SECOND, times)
    if times.dtype.kind == "f":
        seconds = times.astype(np.float64, copy=False) * SECOND
        return np.rint(seconds, out=seconds).astype(np.int64)
    return times.astype(np.int64) * SECOND


def _check_range(counts: npt.NDArray[Any], most: int, times: npt.NDArray[Any]) -> None:
    """Raise a ValueError unless all counts are from -most to most. NaT is the lowest integer."""
    if len(counts) and not (counts.min() >= -most and counts.max() <= most):
        raise _range_error(times[~((counts >= -most) & (counts <= most))][0])


def _range_error(t: Any) -> ValueError:
    return ValueError(f"t: expected a time within 146 years of 1970 (0 seconds), got {t!r}")


def samples_since(
    start: int, sizes: Sequence[int], firsts: Sequence[int], lasts: Sequence[int]
) -> float:
    """Return how many samples came after the time `start`.

    Blocks are consecutive, oldest first. Samples of the block that `start` cuts are taken as evenly
    spaced in time.

    Examples:
        >>> samples_since(35, [6, 2], [0, 60], [50, 70])
        3.5
    """
    k = 0.0
    for size, first, last in zip(reversed(sizes), reversed(firsts), reversed(lasts), strict=True):
        if first <= start:
            return k + (size - 1) * ((last - start) / (last - first)) if last > start else k
        k += size
    return k
