"""A slow and obvious model of every average: which samples it holds, and what each weighs.

It is written from the paper and shares no code with the library; of a rule and its window it only
reads the fields. Samples are numbered from 0, so sample t - 1 is the newest at step t.
"""

import math
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

TIE = 1e-12


def reaches(count: int, goal: float) -> bool:
    return count >= goal * (1 - TIE)


def ceiling(x: float) -> int:
    return round(x) if abs(x - round(x)) <= TIE * x else math.ceil(x)


class Window(NamedTuple):
    """A growing window of fraction `c` and at most `most` samples; a fixed one has no `c`."""

    c: float | None
    most: float

    @classmethod
    def of(cls, window):
        if hasattr(window, "k"):
            return cls(None, window.k)
        return cls(window.c, math.inf if window.at_most is None else window.at_most)

    def size(self, t: int) -> float:
        k = self.most if self.c is None else min(max(1.0, self.c * t), self.most)
        return round(k) if abs(k - round(k)) <= TIE * k else k

    def samples(self, t: int) -> int:
        return min(t, ceiling(self.size(t)))

    def share(self, t: int, z: int) -> float:
        if self.size(t) == self.most:
            return self.most / z
        return (1 - (1 - self.c) ** (1 / z)) * t


def smaller_root(old: float, new: float, k: float) -> float:
    """Of g²/old + (1-g)²/new = 1/k, in exact arithmetic but for the square root."""
    old, new, k = Fraction(old), Fraction(new), Fraction(k)
    a, half_b, c = 1 / old + 1 / new, -1 / new, 1 / new - 1 / k
    return float((-half_b - Fraction(math.sqrt(half_b**2 - a * c))) / a)


class Blocks:
    """An anytime window: the oldest list of samples first, the one that takes new samples last."""

    def __init__(self, rule):
        self.window = Window.of(rule.window)
        self.z = rule.accumulators - 1
        self.paper = rule.turns == "paper"
        self.blocks: list[list[int]] = [[]]
        self.t = 0

    def add(self) -> None:
        if self._is_full():
            self.blocks = [*self.blocks, []][-(self.z + 1) :]
        self.blocks[-1].append(self.t)
        self.t += 1

    def _is_full(self) -> bool:
        """Whether the blocks turn before the next sample comes."""
        if not self.t:
            return False
        has_share = reaches(len(self.blocks[-1]), self.window.share(self.t, self.z))
        if self.paper and self.window.c is None:
            return has_share
        newer = sum(len(block) for block in self.blocks[1:])
        spare = len(self.blocks) <= self.z or reaches(newer, self.window.size(self.t))
        return spare if self.paper else spare and has_share

    def starts(self) -> list[int]:
        return [block[0] for block in self.blocks]

    def alpha(self) -> np.ndarray:
        k = self.window.size(self.t)
        alpha = np.zeros(self.t)
        newer: list[int] = []
        for block in reversed(self.blocks):
            if len(newer) >= k:
                break
            if len(newer) + len(block) > k and newer:
                g = smaller_root(len(block), len(newer), k)
                alpha[block] = g / len(block)
                alpha[newer] = (1 - g) / len(newer)
                return alpha
            newer = block + newer
        alpha[newer] = 1 / len(newer)
        return alpha


def alphas(rule) -> Iterator[np.ndarray]:
    """The weights of all samples at step 1, 2, …"""
    window = Window.of(rule.window)
    kind = type(rule).__name__
    alpha, n = np.zeros(0), 0.0
    blocks = Blocks(rule) if kind == "AnytimeWindow" else None
    first = rule.total - window.samples(rule.total) if kind == "RawTail" else 0
    t = 0
    while True:
        t += 1
        if blocks:
            blocks.add()
            alpha = blocks.alpha()
        elif kind == "Exponential":
            before, n = n, min(n + 1, window.size(t))
            g = smaller_root(before, 1, n) if n > 1 else 0.0
            alpha = np.append(g * alpha, 1 - g)
        else:
            held = window.samples(t) if kind == "ExactWindow" else max(1, t - first)
            alpha = np.repeat([0.0, 1 / held], [t - held, held])
        yield alpha


@lru_cache(maxsize=64)
def weight_matrix(rule, steps: int) -> np.ndarray:
    """Row t - 1 has the weights at step t; the samples still to come weigh 0."""
    matrix = np.zeros((steps, steps))
    for row, alpha in zip(matrix, alphas(rule), strict=False):
        row[: len(alpha)] = alpha
    return matrix


def averages(matrix: np.ndarray, xs: np.ndarray) -> np.ndarray:
    """The weighted sums; a sample without weight does not count, be it NaN or infinite."""
    flat = xs.reshape(len(xs), -1).astype(np.result_type(xs, np.float64))
    finite = np.isfinite(flat)
    sums = matrix @ np.where(finite, flat, 0)
    for row, column in zip(*np.nonzero(~finite), strict=True):
        sums[matrix[:, row] > 0, column] += flat[row, column]
    return sums.reshape(len(matrix), *xs.shape[1:])


def variances(matrix: np.ndarray, xs: np.ndarray, ddof: int) -> np.ndarray:
    """The weighted mean squared deviations of numbers from their averages, divided for ddof=1.

    One sample has no variance for ddof=1: NaN.
    """
    apart = xs - (matrix @ xs)[:, None]
    spread = np.sum(matrix * apart**2, axis=1)
    rest = 1 - ddof * np.sum(matrix**2, axis=1)
    return np.where(rest < TIE, np.nan, spread / np.where(rest < TIE, 1, rest))


def freshest(sizes, k: float) -> np.ndarray:
    """The weights of blocks, oldest first, with the least mean age at the variance of k samples.

    They are proportional to n (L - age), where that is above 0; L is found by halving.
    """
    sizes = np.array(sizes, np.longdouble)
    ages = np.cumsum(sizes[::-1])[::-1] - sizes / 2
    if sizes.sum() <= k:
        return sizes / sizes.sum()

    def weights(limit):
        below = sizes * np.maximum(0, limit - ages)
        return below / below.sum()

    low, high = ages.min(), ages.max()  # with the newest block alone, and with more than k
    while 1 / (weights(high) ** 2 / sizes).sum() < k:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (
            (middle, high) if 1 / (weights(middle) ** 2 / sizes).sum() < k else (low, middle)
        )
    return weights(high)


class ElapsedBlocks:
    """An anytime window of time: lists of (time, number) of samples, with whole numbers as times.

    A block takes samples for a z-th part of the period. The window is the samples after
    `at - period`; samples of the block that it cuts are taken as evenly spaced.
    """

    def __init__(self, period: int, z: int):
        self.period, self.z = period, z
        self.blocks: list[list[tuple[int, int]]] = []
        self.times: list[int] = []

    def add(self, time: int) -> None:
        if not self.blocks or (time - self.blocks[-1][0][0]) * self.z >= self.period:
            self.blocks = [*self.blocks, []][-(self.z + 1) :]
        self.blocks[-1].append((time, len(self.times)))
        self.times.append(time)

    def samples(self, at: int | None = None) -> Fraction:
        """The number of samples in the window."""
        start = (self.times[-1] if at is None else at) - self.period
        k = Fraction(0)
        for block in self.blocks:
            first, last = block[0][0], block[-1][0]
            if first > start:
                k += len(block)
            elif last > start:
                k += Fraction((len(block) - 1) * (last - start), last - first)
        return k

    def alpha(self, at: int | None = None) -> np.ndarray | None:
        """The weights of all samples; None if no sample is in the window."""
        k = self.samples(at)
        alpha = np.zeros(len(self.times))
        newer: list[int] = []
        for block in reversed(self.blocks):
            if newer and len(newer) >= k:
                break
            numbers = [number for _, number in block]
            if newer and len(newer) + len(block) > k:
                g = smaller_root(len(block), len(newer), k)
                alpha[numbers] = g / len(block)
                alpha[newer] = (1 - g) / len(newer)
                return alpha
            newer = numbers + newer
        alpha[newer] = 1 / len(newer)
        return alpha if k else None


@lru_cache(maxsize=64)
def elapsed_weights(period: int, z: int | None, times: tuple[int, ...]) -> np.ndarray:
    """The weights at each step, as `weight_matrix`; without z, those of an `Exponential`."""
    matrix = np.zeros((len(times), len(times)))
    if z is None:
        return _decaying_weights(period, times, matrix)
    blocks = ElapsedBlocks(period, z)
    for row, time in zip(matrix, times, strict=True):
        blocks.add(time)
        row[: len(blocks.times)] = blocks.alpha()
    return matrix


def _decaying_weights(period: int, times, matrix: np.ndarray) -> np.ndarray:
    """Of n samples, n dt / period leave in the time dt, once a period has passed."""
    n, alpha = 0.0, np.zeros(len(times))
    for t, time in enumerate(times):
        leaving = 0.0
        if t and time - times[0] >= period:
            leaving = n * min(1.0, (time - times[t - 1]) / period)
        g = smaller_root(n, 1, n - leaving + 1) if leaving else n / (n + 1)
        alpha *= g
        alpha[t] = 1 - g
        matrix[t], n = alpha, n - leaving + 1
    return matrix
