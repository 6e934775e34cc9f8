"""The equation of the paper: the weight of old samples beside new ones. All weights come from here.

`weights` solves it for two groups of samples. Numbers, arrays, traced values and compiled loops all
call it, and differ only in the square root they pass. `split` and `read` apply it to blocks.
`freshest` solves it for all blocks at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["freshest", "read", "split", "square_root", "weights"]


def weights(old: Any, new: Any, excess: Any, sqrt: Callable[[Any], Any] = math.sqrt) -> Any:
    """Return the weight of each of `new` samples, and of the mean of `old` samples before them.

    The result has the variance of k = old + new - excess samples, with as little weight g on the
    old mean as possible: g is the smaller root of g²/old + (1-g)²/new = 1/k. An excess of 0 weighs
    all samples the same. There is at least one new sample, and `new` is below k unless `old` is 0.

    With q² = old excess / (k new), g is (old - q new) / (old + new), and each new sample has the
    weight (1 + q) / (old + new). In the latter nothing cancels, so single precision is enough.

    Examples:
        >>> each, of_old = weights(100, 50, excess=50)
        >>> round(each * 50, 6), round(of_old, 6)
        (0.666667, 0.333333)
        >>> weights(2, 2, excess=0)
        (0.25, 0.5)
    """
    total = old + new
    q = sqrt(old * excess / ((total - excess) * new))
    inverse = 1.0 / total
    return (1.0 + q) * inverse, (old - q * new) * inverse


def square_root(x: Any) -> Any:
    """Return the square root of a number, an array, a tensor or a traced value."""
    return math.sqrt(x) if isinstance(x, int | float) else x**0.5


def split(sizes: Sequence[int], k: float) -> tuple[int, float, float]:
    """Return how to read the mean of k samples from consecutive blocks of `sizes`, oldest first.

    The newest blocks count in full while they hold fewer than k samples. The block before them gets
    what the variance asks for. Older blocks have no weight. Empty blocks come first.

    Returns:
        The index of the first block that counts in full, the weight of each sample from there on,
        and the weight of the mean of the block before it, which is 0 if it is not needed.

    Examples:
        >>> first, each, of_old = split([100, 40, 10], k=100)
        >>> first, round(each * 50, 6), round(of_old, 6)
        (1, 0.666667, 0.333333)
    """
    first = len(sizes) - 1
    old, new = 0, sizes[first]
    while first and sizes[first - 1] and new < k:
        old = sizes[first - 1]
        if old + new >= k:
            break
        first, old, new = first - 1, 0, old + new
    each, of_old = weights(old, new, max(0.0, old + new - k))
    return first, each, of_old


def read(sizes: Sequence[int], k: float) -> list[float]:
    """Return the weights of the means of consecutive blocks of `sizes` samples, oldest first.

    Examples:
        >>> [round(weight, 6) for weight in read([100, 40, 10], k=100)]
        [0.333333, 0.533333, 0.133333]
    """
    first, each, of_old = split(sizes, k)
    older = [0.0] * (first - 1) + [of_old] if first else []
    return older + [each * size for size in sizes[first:]]


def freshest(ages: Any, k: Any, xp: Any) -> Any:
    """Return the weights of blocks whose mean has the variance of k samples and is the freshest.

    Block b has n_b samples, whose mean age is a_b. Among all weights w_b with Σ w_b = 1 and
    Σ w_b²/n_b = 1/k, the mean age Σ w_b a_b is least for

        w_b = n_b / N · (1 + (ā - a_b) · sqrt((N - k) / (k V)))

    where N, ā and V are the number of samples, their mean age and the variance of the a_b. The
    oldest blocks are left out, one by one, while their weight would be negative. For two blocks,
    this is `weights`.

    The blocks are consecutive, and the newest begins at age 0. So N is the age at which the oldest
    begins, ā is N / 2, and V is (N³ - Σ n_b³) / 12N. That difference is the sum of
    3 n_b N_b (N_b - n_b), where N_b samples are in block b and newer ones: nothing cancels.

    Args:
        ages: The ages at which blocks begin, oldest first, and the 0 at which the newest ends. They
            lie along the first axis. Empty blocks come first.
        k: The number of samples, at most all of them.
        xp: The module of the arrays, `numpy` or `jax.numpy`.

    Examples:
        >>> import numpy as np
        >>> freshest(np.array([150.0, 50, 0]), 100, np).round(6)
        array([0.333333, 0.666667])
        >>> freshest(np.arange(8.0, -1, -1), 6, np).round(3)
        array([0.015, 0.046, 0.078, 0.109, 0.141, 0.172, 0.204, 0.235])
    """
    older, newer = ages[:-1], ages[1:]
    spreads = xp.cumsum((3.0 * older * newer * (older - newer))[::-1], axis=0)[::-1]

    def slope(samples: Any, spread: Any) -> Any:  # without a second block, the spread is 0
        excess = xp.maximum(0.0, samples - k)
        return xp.sqrt(3.0 * samples / xp.maximum(spread, 1.0) * (excess / k))

    kept = newer * slope(older, spreads) <= 1.0  # the oldest of these has a weight of at least 0
    samples = xp.max(xp.where(kept, older, 0.0), axis=0)
    spread = xp.max(xp.where(kept, spreads, 0.0), axis=0)
    tilted = 1.0 + (samples - older - newer) * slope(samples, spread)
    return xp.where(older <= samples, xp.maximum(0.0, (older - newer) / samples * tilted), 0.0)
