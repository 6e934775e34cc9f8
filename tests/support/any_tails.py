"""A slow model of `AnyTail`, and the tails that the tests share."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from tailavg import AnyTail
from tailavg.core.windows import as_window
from tests.support.cases import short
from tests.support.model import Blocks, Window

TAILS = [
    AnyTail(),
    AnyTail(6, 0.5),
    AnyTail(7, 0.9),  # a fraction near 1
    AnyTail(8, 0.01),  # blocks that close only when they hold the shortest window
    AnyTail(30, 1 / 3),  # many blocks, and a fraction that no float is
]
every_tail = pytest.mark.parametrize("rule", TAILS, ids=short)


class Tails(Blocks):
    """The policy in words, on lists of samples.

    Every sample is a block until all accumulators are used. Then a block is closed when it has its
    share, and two neighbours make room: those whose joint size is least against the samples since
    their end, or against as many as there will be when the shortest window ends there, if it does
    not yet; of equals, the oldest.
    """

    def __init__(self, rule):
        self.m, self.c = rule.accumulators, rule.shortest
        simple = Fraction(self.c).limit_denominator(10**6)  # 1/10, not what stands for it
        self.exact = simple if float(simple) == self.c else Fraction(self.c)
        best = (0.3 + 2 * math.log(1 / self.c) / (1 - self.c)) / (self.m - 1)
        self.part = Fraction(round(1000 * min(1, best)), 1000) * self.exact
        self.blocks: list[list[int]] = [[]]
        self.t = 0

    def _is_full(self) -> bool:
        newest = len(self.blocks[-1])
        if len(self.blocks) < self.m:
            return newest > 0
        return newest * self.part.denominator >= self.part.numerator * self.t

    def add(self) -> None:
        if self._is_full():
            if len(self.blocks) == self.m:
                self._merge()
            self.blocks.append([])
        self.blocks[-1].append(self.t)
        self.t += 1

    def _merge(self) -> None:
        costs = []
        since = self.t
        for older, newer in reversed(list(pairwise(self.blocks))):
            end = newer[-1] + 1
            since = self.t - end
            at_first = self.exact * end / (1 - self.exact)
            costs.append((len(older) + len(newer)) / Fraction(max(since, at_first)))
        costs.reverse()
        i = costs.index(min(costs))
        self.blocks[i : i + 2] = [self.blocks[i] + self.blocks[i + 1]]

    def of(self, window) -> np.ndarray:
        """The weights of all samples in the average of this window."""
        self.window = Window.of(as_window(window))
        return self.alpha()
