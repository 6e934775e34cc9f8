"""The equation of the paper: the weight of old samples beside new ones. All weights come from here.

`root` solves it, `join` makes it total, `read` folds it over blocks of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["join", "read", "root"]


def root(old: Any, new: Any, excess: Any) -> Any:
    """The smaller root g of g²/old + (1-g)²/new = 1/k, where k = old + new - excess.

    With this weight on a mean of `old` samples, beside a mean of `new` fresher ones, the variance
    is that of k samples, and the old ones weigh as little as that allows.
    """
    total = old + new
    return (old - (old * new * excess / (total - excess)) ** 0.5) / total


def join(old: Any, new: Any, k: Any) -> Any:
    """The weight of a mean of `old` samples beside a mean of `new` fresher ones, for any counts.

    Where there are no k samples yet, k is what there is (all weigh the same); where the new ones
    suffice, the old ones weigh nothing. Numbers or arrays: plain arithmetic, no branch.

    Examples:
        >>> join(100, 50, 100), join(30, 10, 100), join(100, 100, 100)
        (0.3333333333333333, 0.75, 0.0)
    """
    excess = old + new - k
    return abs((new < k) * root(old, new, (excess > 0) * excess))  # 0.0, not -0.0


def read(sizes: Sequence[Any], k: Any) -> list[Any]:
    """The weights of the means of consecutive blocks of `sizes` samples, oldest first.

    A fold of `join`, newest first. Blocks count in full while they total less than k; the one
    that completes k gets what the variance asks; anything older gets 0.

    Examples:
        >>> read([100, 40, 10], k=100)
        [0.3333333333333333, 0.5333333333333334, 0.13333333333333333]
    """
    weights: list[Any] = []
    newer = 0
    for size in reversed(sizes):
        g = join(size, newer, k)
        weights = [g, *(weight * (1.0 - g) for weight in weights)]
        newer += size
    return weights
