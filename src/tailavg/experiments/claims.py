"""The paper's claims, quoted, each with a rule that decides it from measured errors.

A curve is the mean error over runs, as the paper draws it. The gap between two curves at t is their
ratio, with its logarithm averaged over a tenth of a decade around t: on a plot of three decades,
nothing narrower is visible. Gaps before `FIRST` of the run are ignored. Two curves are the same if
their gap never exceeds `MARGIN` in either direction, which is about the width of a line on a plot
of four decades. A curve is worse if its gap exceeds `MARGIN` somewhere. A claim holds if nearly all
seeds agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import numpy as np

from tailavg import Growing, TailAverage
from tailavg.experiments.moments import noise_ball
from tailavg.experiments.noise import STREAMS, promised, settled_share, sizes
from tailavg.experiments.regression import (
    FRESHEST,
    Curve,
    Means,
    Problem,
    Reals,
    methods,
    reading,
)

MARGIN = 1.1
FIRST = 0.02
"""Claims ignore steps before this fraction of the run, where averages have only a few samples."""
WIDTH = 0.05
"""Half of a tenth of a decade."""
AGREE = 0.9
"""The share of seeds that must agree for a verdict."""


class Verdict(StrEnum):
    """The verdict on a claim."""

    holds = "holds"
    fails = "does not hold"
    depends = "depends on the seed"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run for a claim: the deciding number, a sentence about it, and its slack.

    The slack is how far the number is inside the margin, in logarithms. Below 0, the claim fails.
    """

    value: float
    text: str
    slack: float

    @property
    def holds(self) -> bool:
        """Whether the claim holds in this run."""
        return self.slack >= 0


Judge = Callable[[Problem, Means], Outcome]


@dataclass(frozen=True)
class Claim:
    """A claim of the paper: its quotes, what is compared, and the function that judges curves.

    `quotes` maps a place in the paper to the words there. `seeds` says whether the outcome depends
    on the seed. A claim of ours is not in the paper.
    """

    name: str
    quotes: Mapping[str, str]
    compared: str
    judge: Judge
    seeds: bool = True
    ours: bool = False

    @property
    def words(self) -> str:
        """The first quote."""
        return next(iter(self.quotes.values()))


@dataclass(frozen=True)
class Finding:
    """A claim with an outcome for each seed, the chosen seed first."""

    claim: Claim
    outcomes: Sequence[Outcome]

    @property
    def agreeing(self) -> int:
        """The number of seeds for which the claim holds."""
        return sum(outcome.holds for outcome in self.outcomes)

    @property
    def verdict(self) -> Verdict:
        """The verdict of at least `AGREE` of the seeds, or that it depends on the seed."""
        enough = AGREE * len(self.outcomes)
        if self.agreeing >= enough:
            return Verdict.holds
        against = len(self.outcomes) - self.agreeing
        return Verdict.fails if against >= enough else Verdict.depends

    @property
    def span(self) -> tuple[float, float]:
        """The smallest and the largest deciding number over the seeds."""
        values = [outcome.value for outcome in self.outcomes]
        return min(values), max(values)


def exact(window: str) -> Curve:
    """Return the curve of the exact average of a window."""
    return Curve(window, "truek" if window.startswith("k") else "true")


def first_step(total: int) -> int:
    """Return the first step that claims consider."""
    return max(1, math.ceil(FIRST * total))


def gap(over: Reals, under: Reals) -> Reals:
    """Return the ratio of two curves at every t, its log averaged over a tenth of a decade.

    Each t has weight 1/t, so that the average is uniform on a logarithmic axis.
    """
    t = np.arange(1, len(over) + 1)
    low = np.ceil(t * 10**-WIDTH).astype(int) - 1
    high = np.minimum(np.floor(t * 10**WIDTH).astype(int), len(t))
    logs = np.concatenate([[0.0], np.cumsum(np.log(over / under) / t)])
    weights = np.concatenate([[0.0], np.cumsum(1 / t)])
    gaps: Reals = np.exp((logs[high] - logs[low]) / (weights[high] - weights[low]))
    return gaps


def _gaps(means: Means, over: Curve, under: Curve) -> Reals:
    return gap(means[over], means[under])[first_step(len(means[over])) - 1 :]


def extent(means: Means, window: str, *names: str) -> tuple[float, float]:
    """Return the smallest and the largest gap of several curves to the exact one."""
    gaps = [_gaps(means, Curve(window, name), exact(window)) for name in names]
    return float(np.min(gaps)), float(np.max(gaps))


def _far(means: Means, over: Curve, under: Curve, both: bool = False) -> tuple[float, int]:
    """Return the largest gap (or, with `both`, the gap furthest from 1) and its t."""
    gaps = _gaps(means, over, under)
    at = int(np.argmax(np.abs(np.log(gaps)) if both else gaps))
    return float(gaps[at]), first_step(len(means[over])) + at


def _sentence(over: Curve, under: Curve, value: float, t: int) -> str:
    percent = f"{100 * abs(value - 1):.0f} % {'above' if value > 1 else 'below'}"
    ratio = f"{value:.1f} times" if value > 2 else percent
    return f"{over.method} {ratio} {under.method} at t = {t}"


def _same(window: str, *names: str, apart: bool = False) -> Judge:
    """Judge that all curves stay within the margin of the exact one, or with `apart` that not."""

    def judge(_: Problem, means: Means) -> Outcome:
        outcomes = []
        for curve in (Curve(window, name) for name in names):
            value, t = _far(means, curve, exact(window), both=True)
            slack = math.log(MARGIN) - abs(math.log(value))
            text = _sentence(curve, exact(window), value, t)
            outcomes.append(Outcome(value, text, -slack if apart else slack))
        return min(outcomes, key=lambda outcome: outcome.slack)

    return judge


def _worse(window: str, name: str, under: str | None = None) -> Judge:
    """Judge that the curve exceeds the other one by more than the margin somewhere."""

    def judge(_: Problem, means: Means) -> Outcome:
        curve = Curve(window, name)
        against = exact(window) if under is None else Curve(window, under)
        value, t = _far(means, curve, against)
        return Outcome(value, _sentence(curve, against, value, t), math.log(value / MARGIN))

    return judge


def _degrades_faster(_: Problem, means: Means) -> Outcome:
    """Judge that the largest gap to truek grows more for expk than for awak, from k = 10 to 100."""
    growth = {}
    for name in ("expk", "awak"):
        small, large = (
            _far(means, Curve(window, name), exact(window))[0] for window in ("k = 10", "k = 100")
        )
        growth[name] = large / small
    value = growth["expk"] / growth["awak"]
    text = f"gap of expk × {growth['expk']:.2f}, of awak × {growth['awak']:.2f}"
    return Outcome(value, text, math.log(value / MARGIN))


def _early(_: Problem, means: Means) -> Outcome:
    """Judge that expk is worse than truek at k = 100 for some time, but not at the end."""
    over, under = Curve("k = 100", "expk"), exact("k = 100")
    value, t = _far(means, over, under)
    end = float(gap(means[over], means[under])[-1])
    text = f"{_sentence(over, under, value, t)}, {end:.2f} times at the end"
    return Outcome(value, text, min(math.log(value / MARGIN), math.log(MARGIN / end)))


def _many_before_the_noise_ball(problem: Problem, _: Means) -> Outcome:
    """Judge that the expected error nears its limit during the run, but only after 10 % of it."""
    ball, total = noise_ball(problem, MARGIN), problem.batches
    if ball is None:
        return Outcome(1.0, f"it is not reached in {total} batches", -math.inf)
    value = ball / total
    text = f"reached at t = {ball}, after {100 * value:.0f} % of the run"
    return Outcome(value, text, math.log(value / (MARGIN - 1)))


def _same_rate(_: Problem, means: Means) -> Outcome:
    """Judge that the slopes of log error over log t in the second half hardly separate curves."""
    total = len(next(iter(means.values())))
    t = np.arange(total // 2, total + 1)
    slopes = [
        float(np.polyfit(np.log(t), np.log(means[Curve("c = 0.5", name)][t - 1]), 1)[0])
        for name in ("awa3", "true")
    ]
    drift = (slopes[0] - slopes[1]) * math.log(t[-1] / t[0])
    text = f"slopes {slopes[0]:.2f} and {slopes[1]:.2f} from t = {t[0]}"
    return Outcome(math.exp(drift), text, math.log(MARGIN) - abs(drift))


@cache
def _oldest_share(window: str, total: int) -> float:
    """Return the largest ratio of the mean age of freshest to that of the exact window."""
    curve, c = Curve(window, FRESHEST), float(window.removeprefix("c = "))
    average = TailAverage(methods(total)[curve])
    ratios: list[float] = []
    for t in range(1, total + 1):
        average.update(0.0)
        exact_age = (Growing(c).size(t) - 1) / 2
        if t >= first_step(total) and exact_age > 0:
            ratios.append(average.profile(reading(curve)).mean_age / exact_age)
    return max(ratios)


def _fresher(_: Problem, means: Means) -> Outcome:
    """Judge that freshest is never older than the exact window, and never has a larger error."""
    windows = ("c = 0.25", "c = 0.5")
    far = {window: _far(means, Curve(window, FRESHEST), exact(window)) for window in windows}
    window = max(windows, key=lambda each: far[each][0])
    total = len(means[exact(window)])
    age = max(_oldest_share(each, total) for each in windows)
    sentence = _sentence(Curve(window, FRESHEST), exact(window), *far[window])
    text = f"{sentence}, {window}; its mean age is at most {age:.3f} of that of true"
    slack = min(math.log(MARGIN / far[window][0]), -math.log(age))
    return Outcome(far[window][0], text, slack)


CLAIMS = (
    Claim(
        "small",
        {"Experiments": "all methods perform the same for small values of k"},
        "Expk and awak against truek at k = 10: the same",
        _same("k = 10", "expk", "awak"),
    ),
    Claim(
        "faster",
        {
            "Figure 1": "as k grows, the performance of the exponential average degrades faster "
            "than that of the anytime window average",
            "Experiments": "the exponential average degrades faster when k increases",
        },
        "How much the largest gap to truek grows from k = 10 to k = 100, expk against awak: worse",
        _degrades_faster,
    ),
    Claim(
        "fixed",
        {
            "Section 2": "the exponential average does not perform as well as the window average "
            "in the case where k is fixed"
        },
        "Expk against awak at k = 100: worse",
        _worse("k = 100", "expk", "awak"),
    ),
    Claim(
        "early",
        {
            "Experiments": "when x evolves quickly, as is the case at the beginning of "
            "optimization, the use of old examples, even with a small weights, heavily penalizes "
            "the average"
        },
        "Expk against truek at k = 100: worse somewhere, and no longer at the end",
        _early,
    ),
    Claim(
        "close",
        {
            "Figure 2": "all proposed estimators closely match the true average for c=.25",
            "Experiments": "For c=.25, all methods except raw are indistinguishable",
            "Introduction": "a very good approximation to the true running average for low values "
            "of c",
        },
        "Exp, awa and awa3 against true at c = 0.25: the same",
        _same("c = 0.25", "exp", "awa", "awa3"),
    ),
    Claim(
        "raw",
        {"Experiments": "all methods except raw"},
        "Raw against true at c = 0.25: not the same",
        _same("c = 0.25", "raw", apart=True),
    ),
    Claim(
        "ball",
        {"Experiments": "many iterates are before the optimization reached the noise ball"},
        "When the expected error of the iterate is within 10 % of its limit: within the run, and "
        "after more than 10 % of it",
        _many_before_the_noise_ball,
        seeds=False,
    ),
    Claim(
        "exp",
        {
            "Experiments": "exp performs significantly worse than true",
            "Introduction": "For larger values of c, however, its use of old examples degrades "
            "its performance",
        },
        "Exp against true at c = 0.5: worse",
        _worse("c = 0.5", "exp"),
    ),
    Claim(
        "awa",
        {"Experiments": "awa with two accumulators also has lower performance"},
        "Awa against true at c = 0.5: worse",
        _worse("c = 0.5", "awa"),
    ),
    Claim(
        "awa3",
        {
            "Figure 2": "only awa3 performs as well as the true average for c=.5",
            "Introduction": "a performance virtually indistinguishable from the true average",
        },
        "Awa3 against true at c = 0.5: the same",
        _same("c = 0.5", "awa3"),
    ),
    Claim(
        "rate",
        {
            "Experiments": "using only three accumulators achieves the exact same rate as the "
            "true window average"
        },
        "Slopes of log error on log t over the second half at c = 0.5, awa3 against true: what "
        "they make of the ratio in that time, the same",
        _same_rate,
    ),
    Claim(
        "memory",
        {
            "Abstract": "one can improve the accuracy of that average at the cost of increased "
            "memory consumption"
        },
        "Awa against awa3 at c = 0.5: worse",
        _worse("c = 0.5", "awa", "awa3"),
    ),
    Claim(
        "freshest",
        {
            "Ours, not in the paper": "fresher than the exact window at the same variance, and no "
            "worse in excess error at any t > 20"
        },
        "Freshest against true at c = 0.25 and 0.5: not worse; and at every t of the same steps, "
        "its mean age against (ct - 1)/2: lower",
        _fresher,
        ours=True,
    ),
)
"""The claims about SGD, in the order of the paper's figures; the last is ours."""


STARTS = (1.0, 10.0, 1000.0, 1e6)
CLOSE = 1.01
MANY_ERRORS = 5.0


def _settles(problem: Problem, _: Means) -> Outcome:
    """Judge that n / t converges to c, for any n at a tenth of the run."""
    total, shares = problem.batches, []
    for c in (0.25, 0.5):
        since = max(math.ceil(1 / c), total // 10)
        shares += [settled_share(c, n, since, total) / c for n in STARTS]
    value = max(shares, key=lambda share: abs(math.log(share)))
    text = f"at t = {total}, k_t / (ct) is {min(shares):.6f} to {max(shares):.6f}"
    return Outcome(value, text, math.log(CLOSE) - abs(math.log(value)))


def _variance_kept(problem: Problem, variances: Means) -> Outcome:
    """Judge that the variance is between 1/(k_t + 1) and 1/k_t, up to sampling errors."""
    rules = promised(problem.batches)
    averages, worst = [], 0.0
    for curve, variance in variances.items():
        k = sizes(rules[curve], problem.batches)
        averages.append(float((variance * k).mean()))
        outside = np.maximum(variance * k - 1, 1 - variance * (k + 1))
        worst = max(worst, float(outside.max()) / math.sqrt(2 / STREAMS))
    text = (
        f"variance × k_t is {min(averages):.3f} to {max(averages):.3f} on average over t, "
        f"outside by at most {worst:.1f} standard errors"
    )
    return Outcome(worst, text, math.log(MANY_ERRORS / worst))


STREAM_CLAIMS = (
    Claim(
        "settles",
        {"Section 2": "k_t/t converges to c regardless of the initial conditions"},
        "1/n ← γ_t²/n + (1 − γ_t)² from n = 1 to 10⁶ at a tenth of the run, for c = 0.25 and "
        "0.5: at the end, n/t within 1 % of c",
        _settles,
        seeds=False,
    ),
    Claim(
        "variance",
        {
            "Section 2": "to maintain a variance 1/k_t for all t",
            "Section 3": "while maintaining the variance of 1/k",
        },
        f"Expk, awak, exp, awa and awa3 on {STREAMS} streams of N(0, 1): at every t, the variance "
        "is between 1/(k_t + 1) and 1/k_t, or outside by less than 5 standard errors",
        _variance_kept,
        seeds=False,
    ),
)
"""The claims about any stream, judged on the variances of pure noise."""


def find(claims: Iterable[Claim], problem: Problem, by_seed: Sequence[Means]) -> list[Finding]:
    """Judge claims on the curves of every seed, the seed of the problem first."""
    return [
        Finding(claim, [claim.judge(problem, curves) for curves in by_seed[:seeds]])
        for claim in claims
        for seeds in [None if claim.seeds else 1]
    ]
