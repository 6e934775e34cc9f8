"""`Elapsed`: a window of time. Times are whole nanoseconds: no decision depends on rounding.

`tailavg.core.clock` says which blocks such a window has. All other windows count samples.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Counted", "Elapsed", "nanoseconds", "now", "samples_since", "times_in"]

Period = float | str | timedelta | np.timedelta64

SECOND = 10**9
LONGEST = 2**62
"""The most nanoseconds in a period, or between 1970 and a time: 146 years."""

_UNITS = {"d": 86400 * SECOND, "h": 3600 * SECOND, "min": 60 * SECOND, "s": SECOND}
_UNITS |= {"ms": 10**6, "us": 10**3, "ns": 1}
_NAMES = {"day": "d", "days": "d", "hr": "h", "hour": "h", "hours": "h", "m": "min"}
_NAMES |= {"minute": "min", "minutes": "min", "sec": "s", "second": "s", "seconds": "s"}
_NAMES |= {name: name for name in _UNITS} | {"µs": "us"}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)?\s*([a-zµ]+)\s*", re.IGNORECASE)


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
            if part[2].lower() not in _NAMES:
                break
            total += float(part[1] or 1) * _UNITS[_NAMES[part[2].lower()]]
            at = part.end()
        if not period or at < len(period):
            raise ValueError(f"period: expected text such as '10min' or '1h30m', got {period!r}")
        return round(total)
    if isinstance(period, timedelta):
        return (period.days * 86400 + period.seconds) * SECOND + period.microseconds * 1000
    if isinstance(period, np.timedelta64):
        return 0 if np.isnat(period) else int(period.astype("timedelta64[ns]").astype(np.int64))
    if isinstance(period, bool) or not isinstance(period, Real):
        raise TypeError(
            f"period: expected seconds, a timedelta or text such as '10min', got {period!r}"
        )
    return round(float(period) * SECOND) if math.isfinite(period) else 0


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
    if isinstance(t, datetime):
        if isinstance(value := getattr(t, "value", None), int):  # of pandas
            return value
        t = t if t.tzinfo else t.replace(tzinfo=UTC)
        return _length(t - datetime(1970, 1, 1, tzinfo=UTC))
    if isinstance(t, np.datetime64 | date):
        t = np.datetime64(t)
        if not np.isnat(t):
            return int(t.astype("datetime64[ns]").astype(np.int64))
    elif isinstance(t, Real) and not isinstance(t, bool) and abs(float(t)) <= LONGEST / SECOND:
        return round(float(t) * SECOND)
    elif not isinstance(t, Real):
        raise TypeError(f"t: expected seconds, a datetime or a datetime64, got {t!r}")
    raise ValueError(f"t: expected a time within 146 years of 0, got {t!r}")


def times_in(ts: Any) -> npt.NDArray[np.int64]:
    """Return times as nanoseconds: numbers of seconds, datetimes or datetime64s."""
    times = np.asarray(ts)
    if times.dtype.kind == "O":
        times = np.array([nanoseconds(t) for t in times.ravel()], np.int64).reshape(times.shape)
    elif times.dtype.kind == "M":
        if np.isnat(times).any():
            raise ValueError("ts: expected times, got NaT")
        times = times.astype("datetime64[ns]").astype(np.int64)
    elif times.dtype.kind in "iuf":
        if not (np.abs(times) <= LONGEST / SECOND).all():
            raise ValueError("ts: expected times within 146 years of 0")
        if times.dtype.kind == "f":
            times = np.rint(times * SECOND).astype(np.int64)
        else:
            times = times.astype(np.int64) * SECOND
    else:
        raise TypeError(f"ts: expected seconds, datetimes or datetime64s, got {times.dtype}")
    if times.ndim != 1:
        raise ValueError(f"ts: expected a sequence of times, got shape {times.shape}")
    return times


def samples_since(
    start: int, sizes: Sequence[int], firsts: Sequence[int], lasts: Sequence[int]
) -> float:
    """Return how many samples came after the time `start`.

    Blocks are consecutive, oldest first. Samples of the block that `start` cuts are taken as evenly
    spaced in time.

    Examples:
        >>> samples_since(35, [6, 2], [0, 60], [50, 70])
        4.0
    """
    k = 0.0
    for size, first, last in zip(reversed(sizes), reversed(firsts), reversed(lasts), strict=True):
        if first <= start:
            return k + (size - 1) * ((last - start) / (last - first)) if last > start else k
        k += size
    return k
