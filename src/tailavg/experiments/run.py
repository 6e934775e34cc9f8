"""The measurements of `tailavg reproduce`, in parallel threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cached_property
from threading import Event
from typing import Any

from tailavg.experiments.claims import CLAIMS, STREAM_CLAIMS, Finding, Outcome, find
from tailavg.experiments.noise import variances
from tailavg.experiments.regression import (
    DivergedError,
    Errors,
    Means,
    Problem,
    Tails,
    measure,
    measure_tails,
    methods,
    turns,
)

THREADS = min(8, os.cpu_count() or 1)
"""NumPy releases the GIL while it computes."""


@dataclass(frozen=True)
class Plan:
    """What to run: a problem, and from it the seeds and the other step sizes."""

    problem: Problem
    at: int  # the step of Figure 4, the weights
    quick: bool = False

    @property
    def seeds(self) -> int:
        """The number of seeds that decide the claims, starting with the problem's."""
        return 2 if self.quick else 10

    @property
    def other_steps(self) -> list[float]:
        """Multiples of the default step, up to the largest step that is guaranteed to be stable."""
        factors = (0.3, 1.0) if self.quick else (0.1, 0.3, 0.6, 1.0, 1.5, 2.0)
        steps = (factor * self.problem.default_step for factor in factors)
        return [step for step in steps if step != self.problem.used_step]

    @property
    def command(self) -> str:
        """The command that reproduces the numbers."""
        given = {
            field.name: getattr(self.problem, field.name)
            for field in fields(Problem)
            if getattr(self.problem, field.name) != field.default
        }
        options = [f"--{name.replace('_', '-')} {value}" for name, value in given.items()]
        quick = ["--quick"] if self.quick else []
        return " ".join(["tailavg reproduce", *quick, *options, f"--at {self.at}"])


@dataclass(frozen=True)
class Result:
    """The measurements: errors and tails of the problem, means by seed and step, and on noise."""

    plan: Plan
    errors: Errors
    tails: Tails
    by_seed: list[Means]  # the problem's seed first
    by_step: Mapping[float, list[Outcome] | None]  # None if the iterates diverged
    variances: Means

    @cached_property
    def findings(self) -> list[Finding]:
        """The findings on SGD, then those on any stream."""
        problem = self.plan.problem
        of_streams = find(STREAM_CLAIMS, problem, [self.variances])
        return find(CLAIMS, problem, self.by_seed) + of_streams


def run(
    plan: Plan,
    seeds_advance: Callable[[int], Any] = lambda _: None,
    steps_advance: Callable[[int], Any] = lambda _: None,
) -> Result:
    """Measure everything. Each `advance` is called with the number of batches done."""
    problem, stop = plan.problem, Event()

    def unless_stopped(advance: Callable[[int], Any]) -> Callable[[int], None]:
        def checked(done: int) -> None:
            if stop.is_set():
                raise CancelledError
            advance(done)

        return checked

    by_seeds, by_steps, silent = map(unless_stopped, (seeds_advance, steps_advance, lambda _: None))
    rules = methods(problem.batches)

    def of_seed(seed: int) -> Means:
        return _means(measure(replace(problem, seed=seed), rules, by_seeds))

    def at_step(step: float) -> list[Outcome] | None:
        changed = replace(problem, step=step)
        try:
            means = _means(measure(changed, rules, by_steps))
        except DivergedError:
            return None
        return [claim.judge(changed, means) for claim in CLAIMS]

    with ThreadPoolExecutor(THREADS) as pool:
        try:
            main = pool.submit(measure, problem, rules | turns(), by_seeds)
            tails = pool.submit(measure_tails, problem, silent)
            noise = pool.submit(variances, problem.seed, problem.batches, advance=silent)
            other_seeds = range(problem.seed + 1, problem.seed + plan.seeds)
            seeds = [pool.submit(of_seed, seed) for seed in other_seeds]
            steps = {step: pool.submit(at_step, step) for step in plan.other_steps}
            errors = main.result()
            own = _means({curve: errors[curve] for curve in rules})
            by_step = {step: future.result() for step, future in steps.items()}
            by_step[problem.used_step] = [claim.judge(problem, own) for claim in CLAIMS]
            return Result(
                plan,
                errors,
                tails.result(),
                [own, *(future.result() for future in seeds)],
                dict(sorted(by_step.items())),
                noise.result(),
            )
        finally:
            stop.set()  # after an interrupt, the threads end at their next chunk
            pool.shutdown(cancel_futures=True)


def _means(errors: Errors) -> Means:
    return {curve: values.mean(axis=1) for curve, values in errors.items()}
