"""The weight of every sample in an average, and a summary of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile, pairwise

import numpy as np

from tailavg.core.equation import read
from tailavg.core.readings import ByAge, Reading
from tailavg.core.rules import ExactWindow, Exponential, Rule, size_of, window_of
from tailavg.core.windows import Reals

__all__ = [
    "Profile",
    "block_weights",
    "dense_weights",
    "effective_size",
    "newest_first",
    "profile",
]

_CHUNK = 65536


@dataclass(frozen=True)
class Profile:
    """How an average weighs its samples at one step. Ages count from 0, the newest sample."""

    count: int
    """The number of samples so far, t."""
    size: float
    """The size of the requested window, k_t."""
    effective_size: float
    """1 / Σα², the number of equally weighted samples with the same variance."""
    mean_age: float
    """The weighted mean of the ages of the samples."""
    oldest_age: int
    """The age of the oldest sample that has a weight."""
    accumulators: int
    """The number of means in memory; for an `ExactWindow`, the number of stored samples."""


def dense_weights(
    rule: Rule, starts: Sequence[int], t: int, window: Reading | None = None
) -> Reals:
    """Return the weight of each of t samples, oldest first, given the `starts` of the blocks."""
    weights = np.zeros(t)
    end = t
    for size, run in newest_first(rule, starts, t, window):
        weights[end - size : end] = run[::-1] if isinstance(run, np.ndarray) else run
        end -= size
    return weights


def profile(rule: Rule, starts: Sequence[int], t: int, window: Reading | None = None) -> Profile:
    """Return a summary of the weights, in constant memory."""
    squares = ages = 0.0
    age = 0
    for size, run in newest_first(rule, starts, t, window):
        if isinstance(run, np.ndarray):
            squares += float(run @ run)
            ages += float(run @ np.arange(age, age + size))
        else:
            squares += size * run**2
            ages += size * run * (age + (size - 1) / 2)
        age += size
    accumulators = rule.samples(t) if isinstance(rule, ExactWindow) else rule.accumulators
    return Profile(t, size_of(rule, window, t), 1.0 / squares, ages, age - 1, accumulators)


def effective_size(
    rule: Rule, starts: Sequence[int], t: int, window: Reading | None = None
) -> float:
    """Return 1 / Σα², as `profile` does, in a time that does not depend on t."""
    if isinstance(rule, Exponential | ExactWindow):
        window_of(rule, window, t)
        return float(min(t, rule.size(t) if isinstance(rule, Exponential) else rule.samples(t)))
    sizes, weights = block_weights(rule, starts, t, window)
    return 1.0 / sum(w * w / size for size, w in zip(sizes, weights, strict=True) if w)


def newest_first(
    rule: Rule, starts: Sequence[int], t: int, window: Reading | None = None
) -> Iterator[tuple[int, float | Reals]]:
    """Yield runs of samples, newest first: their number, and their weights (or a common weight)."""
    window_of(rule, window, t)
    if not t:
        return
    if isinstance(rule, Exponential):
        kept = 1.0  # the weight of all samples up to step t
        while t > 0 and kept > 0.0:
            decays = rule.decay(np.arange(t, max(0, t - _CHUNK), -1))
            left = kept * np.cumprod(decays)
            run = (1.0 - decays) * np.concatenate([[kept], left[:-1]])
            weighted = np.flatnonzero(run)
            if not len(weighted):  # the remaining weights underflow
                return
            run = run[: weighted[-1] + 1]
            yield len(run), run
            kept = float(left[-1])
            t -= len(decays)
    elif isinstance(rule, ExactWindow):
        samples = rule.samples(t)
        yield samples, 1.0 / samples
    else:
        runs = zip(*block_weights(rule, starts, t, window), strict=True)
        for size, weight in reversed(list(dropwhile(lambda run: run[1] <= 0.0, runs))):
            yield size, weight / size


def block_weights(
    rule: Rule, starts: Sequence[int], t: int, window: Reading | None = None
) -> tuple[list[int], list[float]]:
    """Return the size of each block, and the weight of its mean, oldest first."""
    sizes = [end - start for start, end in pairwise([*starts, t])]
    reading = window_of(rule, window, t)
    if isinstance(rule, ExactWindow):
        return sizes, [1.0 / len(sizes)] * len(sizes)
    if isinstance(reading, ByAge):
        return sizes, reading.read(sizes, t)
    return sizes, read(sizes, size_of(rule, window, t))
