"""The paper's statements about its averages of any stream, checked on pure noise without SGD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tailavg import AnyTail, Exponential, TailAverage
from tailavg.core.rules import WindowRule
from tailavg.experiments.regression import Curve, Reals, methods

STREAMS = 5000
BLOCK = 50


def settled_share(c: float, n: float, since: int, until: int) -> float:
    """Return n / t at t = `until` if the growing exponential has effective size n at t = `since`.

    The paper's γ_t updates n by 1/n ← γ_t²/n + (1 - γ_t)². Here n need not be ct at the start.
    """
    rule = Exponential(c)
    for t in range(since + 1, until + 1):
        gamma = rule.decay(t)
        n = 1 / (gamma**2 / n + (1 - gamma) ** 2)
    return n / until


def promised(total: int) -> dict[Curve, WindowRule]:
    """Return the paper's own averages, which should have the variance 1/k_t at every t."""
    baselines = ("raw", "true", "truek")
    return {
        curve: rule
        for curve, rule in methods(total).items()
        if curve.method not in baselines and not isinstance(rule, AnyTail)
    }


def sizes(rule: WindowRule, total: int) -> Reals:
    """Return k_t at every step, or t while there are fewer samples."""
    return np.array([min(t, rule.size(t)) for t in range(1, total + 1)])


def variances(
    seed: int, total: int, streams: int = STREAMS, advance: Callable[[int], Any] = lambda _: None
) -> dict[Curve, Reals]:
    """Return the variance of each average over streams of N(0, 1), at every step."""
    random = np.random.default_rng(seed)
    averages = {curve: TailAverage(rule) for curve, rule in promised(total).items()}
    blocks: dict[Curve, list[Reals]] = {curve: [] for curve in averages}
    for start in range(0, total, BLOCK):
        samples = random.standard_normal((min(BLOCK, total - start), streams))
        for curve, average in averages.items():
            # the expectation is 0, so the mean square is the variance
            blocks[curve].append(np.square(average.scan(samples)).mean(axis=1))
        advance(len(samples))
    return {curve: np.concatenate(arrays) for curve, arrays in blocks.items()}
