"""The averages that the paper compares with: they need all the samples, or the end in advance.

- `ExactWindow` (*true*): the last samples themselves;
- `RawTail` (*raw*): one block, begun at a step that is fixed in advance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tailavg.core.windows import NEVER, AnyWindow, OfWindow, Window, whole

__all__ = ["ExactWindow", "RawTail"]


@dataclass(frozen=True, init=False)
class ExactWindow(OfWindow):
    """The true average of the last ⌈k_t⌉ samples, which it stores."""

    window: Window

    def samples(self, t: Any) -> Any:
        """How many samples are averaged at step t: the ceiling of k_t, or all there are.

        Examples:
            >>> ExactWindow(0.07).samples(100), ExactWindow(0.07).samples(101)
            (7, 8)
        """
        if isinstance(t, np.ndarray):
            return np.minimum(t, np.ceil(self.window.size(t))).astype(np.int64)
        return min(t, math.ceil(self.window.size(t)))


@dataclass(frozen=True, init=False)
class RawTail(OfWindow):
    """The standard tail average: the mean of the last k_T of `total` samples, begun when they come.

    Before that its value is the latest sample; past `total` it is the mean of all since its start.
    """

    window: Window
    total: int
    accumulators = 1

    def __init__(self, window: AnyWindow, total: int) -> None:
        super().__init__(window)
        object.__setattr__(self, "total", whole(total, "total"))

    @property
    def first(self) -> int:
        """How many samples come before the tail."""
        return self.total - int(min(self.total, math.ceil(self.window.size(self.total))))

    def size(self, t: Any) -> Any:
        """How many samples are averaged at step t."""
        most = np.maximum if isinstance(t, np.ndarray) else max
        return most(1.0, t - self.first)

    def closes(self, starts: Sequence[int]) -> int:
        """As in `AnytimeWindow`: every sample is a block until the tail, which is one for good."""
        return starts[-1] + 1 if starts[-1] < self.first else NEVER

    def uniform_until(self, t: int) -> int:
        """As in `AnytimeWindow`."""
        return self.first if t < self.first else 0
