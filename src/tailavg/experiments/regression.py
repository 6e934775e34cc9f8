"""The paper's problem, least squares by SGD with a constant step, and the error of each average."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tailavg import (
    AnyTail,
    AnytimeWindow,
    ExactWindow,
    Exponential,
    Freshest,
    RawTail,
    TailAverage,
)
from tailavg.core.rules import Rule, WindowRule

Reals = npt.NDArray[np.float64]
Point = float | Literal["normal"]

KINDS: tuple[Literal["paper", "balanced"], ...] = ("paper", "balanced")

EVERY_TAIL = AnyTail(16, shortest=0.05)
FRACTIONS = (0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
"""The tails to read from `EVERY_TAIL`."""

CHUNK = 250_000
"""The numbers that averages take at once, few enough for the cache."""


@dataclass(frozen=True)
class Problem:
    """The options of the experiment. `step`, `start`, `optimum` and `seed` are not in the paper.

    `step` multiplies the gradient 2x(xᵀw - y); None is half of `guaranteed_step`. `start` (w₀) and
    `optimum` (w*) are a number for all coordinates, or "normal": a draw from N(0, I) for each run.
    """

    step: float | None = None
    start: Point = 0.0
    optimum: Point = "normal"
    seed: int = 0
    runs: int = 100
    batches: int = 1000
    batch_size: int = 11
    dimension: int = 50
    noise: float = 0.01  # ε², the variance of y given x

    def __post_init__(self) -> None:
        for name in ("step", "noise"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}: expected a number above 0, got {value!r}")
        for name in ("start", "optimum"):
            value = getattr(self, name)
            if value != "normal" and not math.isfinite(value):
                raise ValueError(f'{name}: expected a finite number or "normal", got {value!r}')
        least = {"seed": 0, "runs": 2, "batches": 10, "batch_size": 1, "dimension": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name}: expected {bound} or more, got {getattr(self, name)!r}")

    @property
    def curvature(self) -> Reals:
        """The diagonal of H: 1, 1/2, 1/3, …"""
        curvature: Reals = 1.0 / np.arange(1, self.dimension + 1)
        return curvature

    @property
    def guaranteed_step(self) -> float:
        """The bound below which E‖w - w*‖² falls at every step: b / (tr H + (b + 1) ‖H‖)."""
        h, b = self.curvature, self.batch_size
        return float(b / (h.sum() + (b + 1) * h.max()))

    @property
    def default_step(self) -> float:
        """Half of the guaranteed step."""
        return self.guaranteed_step / 2

    @property
    def used_step(self) -> float:
        """The step of SGD: the given one, or the default."""
        return self.default_step if self.step is None else self.step


class DivergedError(ArithmeticError):
    """The step is too large: the error of an iterate is not finite."""


class Regression:
    """SGD on E(xᵀw - y)² for x ~ N(0, H), H = diag(1/i), y ~ N(xᵀw*, ε), all runs at once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.curvature = problem.curvature
        self._random = np.random.default_rng(problem.seed)
        self.optimum = self._point(problem.optimum)
        self.start = self._point(problem.start)

    def _point(self, point: Point) -> Reals:
        shape = (self.problem.runs, self.problem.dimension)
        if point == "normal":
            return self._random.standard_normal(shape)
        return np.full(shape, float(point))

    def excess(self, w: Reals) -> Reals:
        """Return the loss of w, of shape (…, runs, d), above the minimum: (w-w*)ᵀH(w-w*)."""
        excess: Reals = np.square(w - self.optimum) @ self.curvature
        return excess

    def batches(self) -> Iterator[tuple[Reals, Reals]]:
        """Yield batches: x of shape (runs, batch, d), and y of shape (runs, batch).

        The same seed gives the same batches for every step size.
        """
        shape = (self.problem.runs, self.problem.batch_size)
        for _ in range(self.problem.batches):
            x = self._random.standard_normal((*shape, self.problem.dimension))
            x *= np.sqrt(self.curvature)
            y = (x @ self.optimum[..., None])[..., 0]
            y += math.sqrt(self.problem.noise) * self._random.standard_normal(shape)
            yield x, y

    def iterates(self) -> Iterator[Reals]:
        """Yield w₁, w₂, …, the iterate after each batch, in chunks of shape (steps, runs, d)."""
        w, batches = self.start, self.batches()
        size = max(1, CHUNK // w.size)
        while chunk := [w := self._step(w, x, y) for x, y in islice(batches, size)]:
            yield np.stack(chunk)

    def _step(self, w: Reals, x: Reals, y: Reals) -> Reals:
        """Return the iterate after a batch."""
        residual = x @ w[..., None] - y[..., None]
        gradient = 2.0 * (residual.swapaxes(1, 2) @ x)[:, 0] / self.problem.batch_size
        following: Reals = w - self.problem.used_step * gradient
        return following


class Curve(NamedTuple):
    """A method and its window, such as "awa3" on "c = 0.5"."""

    window: str
    method: str


Errors = Mapping[Curve, Reals]
"""The excess error of each curve, of shape (batches, runs)."""

Means = Mapping[Curve, Reals]
"""The mean over runs of the excess error of each curve, of shape (batches,)."""


FRESHEST = "freshest"
"""The name of our curve in the paper's second figure."""


def methods(total: int) -> dict[Curve, Rule]:
    """Return the averages in the paper's two figures, with the paper's names, and `FRESHEST`."""
    rules: dict[Curve, Rule] = {}
    for k in (10, 100):
        rules[Curve(f"k = {k}", "expk")] = Exponential(k)
        rules[Curve(f"k = {k}", "awak")] = AnytimeWindow(k, 2, turns="paper")
        rules[Curve(f"k = {k}", "truek")] = ExactWindow(k)
    for c in (0.25, 0.5):
        rules[Curve(f"c = {c}", "raw")] = RawTail(c, total)
        rules[Curve(f"c = {c}", "exp")] = Exponential(c)
        rules[Curve(f"c = {c}", "awa")] = AnytimeWindow(c, 2, turns="paper")
        rules[Curve(f"c = {c}", "awa3")] = AnytimeWindow(c, 3, turns="paper")
        rules[Curve(f"c = {c}", "true")] = ExactWindow(c)
        rules[Curve(f"c = {c}", FRESHEST)] = AnyTail()
    return rules


def reading(curve: Curve) -> Freshest | None:
    """Return how to read the average of a curve; None if its rule has a window."""
    is_freshest = curve.method == FRESHEST
    return Freshest(float(curve.window.removeprefix("c = "))) if is_freshest else None


def turns() -> dict[Curve, WindowRule]:
    """Return averages with both kinds of turns, for 2 to 6 accumulators."""
    return {
        Curve(f"c = {c}", f"{kind} {accumulators}"): AnytimeWindow(c, accumulators, turns=kind)
        for c in (0.25, 0.5)
        for kind in KINDS
        for accumulators in range(2, 7)
    }


def measure(
    problem: Problem,
    rules: Mapping[Curve, Rule],
    advance: Callable[[int], Any] = lambda _: None,
) -> dict[Curve, Reals]:
    """Return the excess error of each average at every step of every run, on the same iterates.

    `advance` is called with the number of batches done since its last call.
    """
    regression = Regression(problem)
    averages = {curve: TailAverage(rule) for curve, rule in rules.items()}
    errors: dict[Curve, list[Reals]] = {curve: [] for curve in rules}
    with np.errstate(over="ignore", invalid="ignore"):
        for iterates in regression.iterates():
            if not np.isfinite(regression.excess(iterates[-1])).all():
                raise DivergedError(
                    f"step {problem.used_step:g} is too large: the iterates diverge"
                )
            for curve, average in averages.items():
                averaged = average.scan(iterates, reading(curve))
                errors[curve].append(regression.excess(averaged))
            advance(len(iterates))
    return {curve: np.concatenate(chunks) for curve, chunks in errors.items()}


@dataclass(frozen=True)
class Tails:
    """The excess error of each tail in `FRACTIONS`, all read from one set of blocks.

    Means over runs and their standard errors, of shape (fractions, batches).
    """

    error: Reals
    standard_error: Reals

    @property
    def best(self) -> npt.NDArray[np.intp]:
        """The index of the tail with the least mean error at each step, known only in hindsight."""
        best: npt.NDArray[np.intp] = self.error.argmin(axis=0)
        return best

    @property
    def least(self) -> Reals:
        """The error of the best tail at each step."""
        least: Reals = self.error.min(axis=0)
        return least


def measure_tails(problem: Problem, advance: Callable[[int], Any] = lambda _: None) -> Tails:
    """Read all tails at every step from one average, on the same iterates as `measure`."""
    regression = Regression(problem)
    average = TailAverage(EVERY_TAIL)
    chunks = []
    for iterates in regression.iterates():
        errors = regression.excess(average.scan(iterates, FRACTIONS))
        chunks.append((errors.mean(axis=-1), errors.std(axis=-1, ddof=1)))
        advance(len(iterates))
    error, deviation = (np.concatenate(rows, axis=1) for rows in zip(*chunks, strict=True))
    return Tails(error, deviation / math.sqrt(problem.runs))
