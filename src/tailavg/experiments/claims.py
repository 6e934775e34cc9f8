"""The claims of the paper's section "Experiments", each decided by measured errors.

Curves are compared run by run, on the same iterates. The ratio of their errors is the geometric
mean over runs of each run's ratio; its standard error is that of the paired logarithms. It is taken
at the step where the curves are furthest apart. They count as apart if they differ by more than
`MARGIN`, which is about what one can see on a log-log figure of four decades. A verdict needs the
ratio to be two standard errors on one side of the margin; otherwise it is "undecided". The margin
is a choice, so there are verdicts at `OTHER_MARGINS` too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from tailavg.experiments.regression import (
    Curve,
    DivergedError,
    Errors,
    Problem,
    Reals,
    measure,
    methods,
)

__all__ = [
    "CLAIMS",
    "MARGIN",
    "OTHER_MARGINS",
    "STEPS",
    "Claim",
    "Finding",
    "Kind",
    "Ratio",
    "Verdict",
    "judge",
    "judge_all",
    "ratios",
    "sweep",
]

MARGIN = 1.1
OTHER_MARGINS = (1.05, 1.2)
FIRST = 0.02
"""Claims ignore steps before this fraction of the run: they average only a few samples."""


class Kind(StrEnum):
    """What a claim says about a ratio of errors, over all steps."""

    alike = "never apart"
    apart = "apart somewhere"
    behind = "above somewhere"
    level = "never above"


class Verdict(StrEnum):
    """What the numbers say about a claim."""

    holds = "holds"
    fails = "does not hold"
    undecided = "undecided"
    diverged = "diverged"


@dataclass(frozen=True)
class Claim:
    """A sentence, and the ratio of errors that decides it: all of `over` / all of `under`."""

    name: str
    sentence: str
    kind: Kind
    over: tuple[Curve, ...]
    under: tuple[Curve, ...]
    since: float = FIRST
    against_end: bool = False  # divide by the same ratio at the last step

    @property
    def quantity(self) -> str:
        """The ratio in words."""
        parts = (
            " · ".join(f"{curve.method} at {curve.window}" for curve in curves)
            for curves in (self.over, self.under)
        )
        by = " / ".join(f"({part})" if " · " in part else part for part in parts)
        return f"{by}, divided by its value at the end" if self.against_end else by


@dataclass(frozen=True)
class Ratio:
    """A geometric mean over runs, with its standard error, at step t."""

    t: int
    ratio: float
    standard_error: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ± {self.standard_error:.3f} at t = {self.t}"


@dataclass(frozen=True)
class Finding:
    """A claim with the figure that decides it, or None if SGD diverged."""

    claim: Claim
    figure: Ratio | None

    @property
    def verdict(self) -> Verdict:
        """The verdict at `MARGIN`."""
        return self.verdict_at(MARGIN)

    def verdict_at(self, margin: float) -> Verdict:
        """Whether the ratio is on the claim's side of a margin, by two standard errors."""
        if self.figure is None:
            return Verdict.diverged
        two_sided = self.claim.kind in (Kind.alike, Kind.apart)
        log, error = math.log(self.figure.ratio), self.figure.standard_error / self.figure.ratio
        gap = abs(log) if two_sided else log
        if abs(gap - math.log(margin)) <= 2 * error:
            return Verdict.undecided
        beyond = gap > math.log(margin)
        claimed = self.claim.kind in (Kind.apart, Kind.behind)
        return Verdict.holds if beyond == claimed else Verdict.fails


def ratios(logs: Reals) -> tuple[Reals, Reals]:
    """The geometric means over runs, and standard errors, of log ratios (steps, runs)."""
    ratio = np.exp(logs.mean(axis=1))
    return ratio, ratio * logs.std(axis=1, ddof=1) / math.sqrt(logs.shape[1])


def judge(claim: Claim, errors: Errors) -> Finding:
    """The step that tests the claim hardest, and the ratio there."""
    over, under = (
        np.log(np.stack([errors[curve] for curve in curves])).sum(axis=0)
        for curves in (claim.over, claim.under)
    )
    logs: Reals = over - under
    if claim.against_end:
        logs = logs - logs[-1]
    first = max(0, math.ceil(claim.since * len(logs)) - 1)
    ratio, error = ratios(logs[first:])
    two_sided = claim.kind in (Kind.alike, Kind.apart)
    at = int(np.argmax(np.abs(np.log(ratio)) if two_sided else ratio))
    figure = Ratio(first + at + 1, float(ratio[at]), float(error[at]))
    return Finding(claim, figure)


def _claim(
    name: str, kind: Kind, window: str, method: str, sentence: str, against: str = "true"
) -> Claim:
    against += "k" if window.startswith("k") else ""
    return Claim(name, sentence, kind, (Curve(window, method),), (Curve(window, against),))


CLAIMS = (
    _claim(
        "exp10", Kind.alike, "k = 10", "expk", "For a small window, k = 10, expk is like truek."
    ),
    _claim(
        "awa10", Kind.alike, "k = 10", "awak", "For a small window, k = 10, awak is like truek."
    ),
    _claim("exp100", Kind.behind, "k = 100", "expk", "At k = 100, expk falls behind truek."),
    _claim("awa100", Kind.level, "k = 100", "awak", "At k = 100, awak does not fall behind truek."),
    Claim(
        "faster",
        "From k = 10 to k = 100, expk loses more than awak does.",
        Kind.behind,
        (Curve("k = 100", "expk"), Curve("k = 10", "awak")),
        (Curve("k = 100", "awak"), Curve("k = 10", "expk")),
    ),
    Claim(
        "early",
        "At k = 100, expk suffers most while the iterates still move fast, not at the end.",
        Kind.behind,
        (Curve("k = 100", "expk"),),
        (Curve("k = 100", "truek"),),
        against_end=True,
    ),
    _claim("raw25", Kind.apart, "c = 0.25", "raw", "At c = 0.25, raw is unlike true."),
    _claim("exp25", Kind.alike, "c = 0.25", "exp", "At c = 0.25, exp is like true."),
    _claim("awa25", Kind.alike, "c = 0.25", "awa", "At c = 0.25, awa is like true."),
    _claim("awa3_25", Kind.alike, "c = 0.25", "awa3", "At c = 0.25, awa3 is like true."),
    _claim("exp50", Kind.behind, "c = 0.5", "exp", "At c = 0.5, exp falls behind true."),
    _claim("awa50", Kind.behind, "c = 0.5", "awa", "At c = 0.5, awa falls behind true."),
    _claim("awa3_50", Kind.level, "c = 0.5", "awa3", "At c = 0.5, awa3 does as well as true."),
    Claim(
        "rate50",
        "At c = 0.5, awa3 falls at the rate of true: in the second half, their ratio stays.",
        Kind.alike,
        (Curve("c = 0.5", "awa3"),),
        (Curve("c = 0.5", "true"),),
        since=0.5,
        against_end=True,
    ),
    Claim(
        "stale",
        "Old iterates cost exp more at c = 0.5 than at c = 0.25.",
        Kind.behind,
        (Curve("c = 0.5", "exp"), Curve("c = 0.25", "true")),
        (Curve("c = 0.5", "true"), Curve("c = 0.25", "exp")),
    ),
)
"""Every claim of the section, in the paper's order."""


def judge_all(errors: Errors) -> list[Finding]:
    """Judge every claim on the errors of `methods`."""
    return [judge(claim, errors) for claim in CLAIMS]


STEPS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
"""The step sizes: from far too small to reach the noise ball to nearly divergent."""


def sweep(
    problem: Problem, steps: Iterable[float], advance: Callable[[int], Any] = lambda _: None
) -> dict[float, list[Finding]]:
    """Judge every claim at every step size, on the same batches."""
    found: dict[float, list[Finding]] = {}
    for step in steps:
        try:
            errors = measure(replace(problem, step=step), methods(problem.batches), advance)
        except DivergedError:
            found[step] = [Finding(claim, None) for claim in CLAIMS]
        else:
            found[step] = judge_all(errors)
    return found
