"""One mean that decays: the storage of `Exponential`.

In the plain recurrence, mean = g mean + (1-g) x, each step rounds the mean, and over a long window
the samples drown in that. Here the mean M stays as it was at the last fold, and samples are summed
beside it in a scaled sum P, so that at step t, with G the product of the decays since the fold,

    average = G (M + P),    P = Σ (1 - g_i) / G_i x_i

until a few hundred samples have come or G has become small.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from tailavg.numpy.average import Array, TailAverage
from tailavg.core.rules import Exponential, WindowRule
from tailavg.numpy.arithmetic import CHUNK, FOLD, aligned_zeros, wide
from tailavg.core.windows import NEVER

__all__ = ["DecayedStorage", "plan"]

_ndarray = np.ndarray
_SMALLEST = 2.0**-32  # of G, far from the ends of float32


def plan(rule: Exponential, start: int, steps: int) -> tuple[Array, Array, Array]:
    """For up to so many steps after `start`: the factors of x in P, of M, and of P.

    The same for all once the decay is constant.
    """
    limit = rule.window.limit
    if limit is not None and start >= limit == rule.size(start):
        start = NEVER // 2
    return _plan(rule, start, steps)


@lru_cache(maxsize=8)
def _plan(rule: Exponential, start: int, steps: int) -> tuple[Array, Array, Array]:
    """See `plan`.

    A step whose own decay is tiny (0, while a growing window holds one sample) has a plan of its
    own, without a scale: average = g M + P.
    """
    decays = rule.decay(np.arange(start + 1, start + steps + 1))
    scale = np.cumprod(decays)
    n = int(np.argmax(scale < _SMALLEST)) if scale[-1] < _SMALLEST else steps
    if n == 0:
        return 1.0 - decays[:1], decays[:1], np.ones(1)
    return (1.0 - decays[:n]) / scale[:n], scale[:n], scale[:n]


class DecayedStorage(TailAverage, rules=(Exponential,)):
    """See `TailAverage`."""

    __slots__ = (
        "_arrays_until",
        "_factors",
        "_floats_until",
        "_folded",
        "_mean",
        "_of_mean",
        "_of_sum",
        "_plan",
        "_scratch",
        "_sum",
    )

    _rule: Exponential

    def _reset(self) -> None:
        self._mean: Any = 0.0
        self._sum: Any = 0.0
        self._scratch: Any = None
        self._folded = 0
        self._arrays_until = self._floats_until = -1
        self._factors: list[float] = []
        self._of_mean: list[float] = []
        self._of_sum: list[float] = []
        self._plan: Any = None

    def _start(self) -> None:
        if not self._plain:
            assert self._dtype is not None
            self._mean = np.zeros(self._shape, self._dtype)
            self._sum = aligned_zeros(self._shape, self._dtype)
            self._scratch = aligned_zeros(self._shape, self._dtype)
        self._schedule()

    def _schedule(self) -> None:
        """Look up the factors of the samples up to the next fold, after the last one."""
        steps = plan(self._rule, self._folded, 4 * FOLD if self._plain else FOLD)
        if steps is not self._plan:
            self._plan = steps
            self._factors, self._of_mean, self._of_sum = (part.tolist() for part in steps)
        due = self._folded + len(self._factors) if self._nan_policy == "propagate" else -1
        self._floats_until = due if self._floats else -1
        self._arrays_until = -1 if self._plain else due

    def update(self, x: Any) -> None:
        t = self._count
        if x.__class__ is float:
            if t < self._floats_until:
                self._sum += x * self._factors[t - self._folded]
                self._count = t + 1
                return
            if self._floats_until > 0:  # a fold is due, and nothing needs a check
                self._add(x)
                return
        elif (
            t < self._arrays_until
            and x.__class__ is _ndarray
            and x.shape == self._shape
            and x.dtype is self._dtype
        ):
            np.multiply(x, self._factors[t - self._folded], self._scratch)
            np.add(self._sum, self._scratch, self._sum)
            self._count = t + 1
            return
        elif t < self._floats_until and isinstance(x, float | int):
            self._sum += float(x) * self._factors[t - self._folded]
            self._count = t + 1
            return
        TailAverage.update(self, x)

    def _add(self, x: Any) -> None:
        if self._count - self._folded == len(self._factors):
            self._fold(self._now())
        factor = self._factors[self._count - self._folded]
        if self._plain:
            self._sum += x * factor
        else:
            np.multiply(x, factor, self._scratch, dtype=self._dtype, casting="same_kind")
            np.add(self._sum, self._scratch, self._sum)
        self._count += 1

    def _now(self) -> Any:
        """The average, in the precision of the accumulators."""
        rest = self._count - self._folded
        if not rest:
            return self._mean
        value = self._of_sum[rest - 1] * self._sum
        kept = self._of_mean[rest - 1]
        return value + kept * self._mean if kept else value  # 0 times a NaN would be a NaN

    def _fold(self, mean: Any) -> None:
        """Go on from the average, with nothing left to fold."""
        if self._plain:
            self._mean, self._sum = mean, 0.0
        else:
            self._mean = np.array(mean, self._dtype).reshape(self._shape)
            self._sum.fill(0)
        self._folded = self._count
        self._schedule()

    def _read(self, rule: WindowRule) -> Any:
        return self._now() if self._plain else np.array(self._now())

    def _add_rows(self, rows: Array) -> None:
        self._walk(rows, None)

    def _scan_rows(self, rows: Array, out: Array) -> None:
        self._walk(rows, out)

    def _walk(self, rows: Array, out: Array | None) -> None:
        """Take samples a chunk at a time, and write the average after each if asked to."""
        assert self._dtype is not None
        width = rows.shape[1]
        mean = np.reshape(self._now(), width).astype(wide(self._dtype))
        t, done = self._count, 0
        while done < len(rows):
            most = min(len(rows) - done, max(1, CHUNK // max(1, width)))
            if self._rule.size(t + 1) == 1.0:  # a window of one sample: the average is the sample
                ones = np.ravel(self._rule.size(np.arange(t + 1, t + most + 1)) == 1.0)
                n = most if ones.all() else int(ones.argmin())
                chunk = rows[done : done + n]
                averages = chunk if out is not None else chunk[-1:]
            else:
                steps = plan(self._rule, t, most)
                n = len(steps[0])
                chunk = rows[done : done + n]
                factors, of_mean, of_sum = (part[:, None] for part in steps)
                if out is not None:
                    sums = np.cumsum(factors * chunk, axis=0)
                else:
                    sums, of_mean, of_sum = factors.T @ chunk, of_mean[-1:], of_sum[-1:]
                averages = of_mean * mean + of_sum * sums
            if out is not None:
                out[done : done + n] = averages
            mean = averages[-1].astype(mean.dtype)
            t, done = t + n, done + n
        self._count = t
        self._fold(mean.item() if self._plain else mean)

    def _starts_now(self) -> list[int]:
        return [0] if self._count else []

    def _save(self) -> tuple[list[Any], int, Any]:
        return [self._mean] if self._count else [], self._folded, self._sum

    def _restore(self, starts: list[int], blocks: list[Any], folded: int, partial: Any) -> None:
        self._folded = folded
        self._schedule()
        if starts != [0] or self._count - folded > len(self._factors):
            raise ValueError(
                f"state: starts {starts}, folded {folded} and count {self._count} cannot be those "
                f"of {self._rule}"
            )
        self._mean = blocks[0]
        if self._plain:
            self._sum = partial
        else:
            self._sum[...] = partial
