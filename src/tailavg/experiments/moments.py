"""The mean square of w - w* in each coordinate, computed without simulation.

For x ~ N(0, H), E xxᵀAxxᵀ = 2HAH + tr(HA)H. If the error of the iterate has the second moments
diag(m), the next one has diag(m'), for batches of b and a step γ on the gradient x(xᵀw - y):

    m' = (1 - 2γh + γ²h²(b+1)/b) m + γ²/b (hᵀm + ε²) h,    h the diagonal of H.

The step of `Problem` multiplies the gradient 2x(xᵀw - y), so γ is twice that step.
"""

from __future__ import annotations

import numpy as np

from tailavg.experiments.regression import Problem, Reals


def transition(problem: Problem, step: float | None = None) -> tuple[Reals, Reals]:
    """Return the matrix and the vector of m' = matrix @ m + vector, by default at the used step."""
    h, b = problem.curvature, problem.batch_size
    gamma = 2 * (problem.used_step if step is None else step)
    matrix = np.diag(1 - 2 * gamma * h + gamma**2 * h**2 * (b + 1) / b)
    matrix += gamma**2 / b * np.outer(h, h)
    return matrix, gamma**2 / b * problem.noise * h


def spectral_radius(problem: Problem, step: float | None = None) -> float:
    """Return the spectral radius of the transition. Below 1, SGD is stable in the mean square."""
    matrix, _ = transition(problem, step)  # symmetric
    return float(np.abs(np.linalg.eigvalsh(matrix)).max())


def largest_stable_step(problem: Problem) -> float:
    """Return the step at which the spectral radius reaches 1, found by bisection."""
    low, high = problem.guaranteed_step, 1 / problem.curvature.max()
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if spectral_radius(problem, middle) < 1 else (low, middle)
    return low


def expected_errors(problem: Problem) -> Reals:
    """Return the expected excess error of the iterate after each batch."""
    matrix, vector = transition(problem)
    start, optimum = problem.start, problem.optimum
    variance = (start == "normal") + (optimum == "normal")
    distance = (0.0 if start == "normal" else start) - (0.0 if optimum == "normal" else optimum)
    m = np.full(problem.dimension, variance + distance**2)
    errors = np.empty(problem.batches)
    for t in range(problem.batches):
        m = matrix @ m + vector
        errors[t] = problem.curvature @ m
    return errors


def noise_ball(problem: Problem, within: float) -> int | None:
    """Return the first step whose expected error is at most `within` times its limit, or None."""
    if spectral_radius(problem) >= 1:
        return None
    matrix, vector = transition(problem)
    limit = problem.curvature @ np.linalg.solve(np.eye(len(vector)) - matrix, vector)
    inside = np.flatnonzero(expected_errors(problem) <= within * limit)
    return int(inside[0]) + 1 if inside.size else None
