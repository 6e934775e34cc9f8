"""The order, the steps and the weights of checkpoints, for `merge.py` and the command line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np

from tailavg.checkpoints.checkpoint import CheckpointError, reading
from tailavg.core.clock import starts_at
from tailavg.core.elapsed import Elapsed
from tailavg.core.profile import dense_weights
from tailavg.core.readings import ByAge, Decay
from tailavg.core.rules import ExactWindow, WindowRule
from tailavg.core.windows import AnyWindow, Fixed, Growing, Reals

__all__ = ["Weighing", "chosen", "natural", "read_weights", "steps_of", "weights"]

Weighing = AnyWindow | WindowRule | ByAge | Sequence[float] | Reals
"""A window, which stands for its exact mean; a rule; or a weight for each checkpoint."""


def natural(path: Path) -> tuple[list[int], str]:
    """Return a key that sorts paths by the numbers in them: step-9 before step-10.

    Examples:
        >>> sorted([Path("step-10.pt"), Path("step-9.pt")], key=natural)[0].name
        'step-9.pt'
    """
    return [int(number) for number in re.findall(r"\d+", str(path))], str(path)


def weights(rule: Weighing, files: int, steps: Sequence[int] | None = None) -> Reals:
    """Return the weight of each checkpoint, oldest first.

    With `steps`, the window is in steps, and a checkpoint counts for the steps since the last one.

    Examples:
        >>> weights(0.5, 4)
        array([0. , 0. , 0.5, 0.5])
        >>> weights(0.5, 4, steps=[100, 200, 300, 1000])
        array([0., 0., 0., 1.])
    """
    if isinstance(rule, int | float | str | timedelta | Elapsed | Fixed | Growing):
        rule = ExactWindow(rule)
    if not isinstance(rule, WindowRule | ByAge):
        given = np.asarray(rule, np.float64)
        if given.shape != (files,):
            raise ValueError(
                f"weights: expected {files} numbers, one per checkpoint, oldest first; got an "
                f"array of shape {given.shape}"
            )
        if not abs(given.sum() - 1.0) <= 1e-6:
            raise ValueError(f"weights: expected a sum of 1, got {given.sum():.9g}")
        return given
    if steps is not None:
        if isinstance(rule, ExactWindow):
            rule = Decay(rule.window, "linear")
        if not isinstance(rule, ByAge):
            raise ValueError(f"steps: expected an ExactWindow, a Decay or a Freshest, got {rule}")
        ages = steps[-1] - np.array([0, *steps], np.float64)
        shares: Reals = rule.of_ages(ages, min(steps[-1], rule.size(steps[-1])))
        return shares
    if isinstance(rule, ByAge):
        return rule.weights(files)
    return dense_weights(rule, starts_at(rule, files), files)


def steps_of(paths: Sequence[Path]) -> list[int]:
    """Return the step of each checkpoint, oldest first: the last number in its name.

    If checkpoints have the same name, the step is the last number in the names of their folders.

    Examples:
        >>> steps_of([Path("run-7/checkpoint-500"), Path("run-7/checkpoint-1500")])
        [500, 1500]
        >>> steps_of([Path("2/checkpoint-5/model.bin"), Path("2/checkpoint-10/model.bin")])
        [5, 10]
    """
    reversed_parts = [path.absolute().with_suffix("").parts[::-1] for path in paths]
    columns = list(zip(*reversed_parts, strict=False))
    names = next((names for names in columns if len({*names}) == len(names)), columns[0])
    steps: list[int] = []
    for path, name in zip(paths, names, strict=True):
        numbers = re.findall(r"\d+", name)
        if not numbers:
            raise CheckpointError(f"{path}: no step in its name; rename it, as in checkpoint-500")
        steps.append(int(numbers[-1]))
    for (older, a), (newer, b) in pairwise(zip(paths, steps, strict=True)):
        if a >= b:
            raise CheckpointError(
                f"{newer}: its step {b} does not come after step {a} of {older}; leave out one of "
                "them"
            )
    if steps[-1] < 1:
        raise CheckpointError(f"{paths[-1]}: the last step is {steps[-1]}, but must be at least 1")
    return steps


def chosen(
    paths: Sequence[Path],
    *,
    start: int | None = None,
    end: int | None = None,
    every: int | None = None,
    last: int | None = None,
) -> list[Path]:
    """Return some of these checkpoints, which are in order.

    Args:
        paths: The checkpoints, oldest first.
        start: The first step.
        end: The last step.
        every: The least number of steps between two of them, counted back from the newest.
        last: How many of the newest.

    Examples:
        >>> paths = [Path(f"iter_{step}") for step in (100, 200, 250, 300, 400)]
        >>> [path.name for path in chosen(paths, start=200, every=100)]
        ['iter_200', 'iter_300', 'iter_400']
        >>> [path.name for path in chosen(paths, end=300, last=2)]
        ['iter_250', 'iter_300']
    """
    kept = list(paths)
    if paths and not (start is None and end is None and every is None):
        kept, next_step = [], None
        for path, step in reversed(list(zip(paths, steps_of(paths), strict=True))):
            is_in = (start is None or step >= start) and (end is None or step <= end)
            if is_in and (next_step is None or next_step - step >= (every or 0)):
                kept.insert(0, path)
                next_step = step
    return kept if last is None else kept[-last:]


def read_weights(path: Path, files: int) -> Reals:
    """Read the weights in a JSON file: a list with one number per checkpoint, oldest first."""
    with reading(f"{path}: expected a list of numbers in JSON"):
        numbers = json.loads(path.read_text())
    if not isinstance(numbers, list) or len(numbers) != files:
        raise CheckpointError(
            f"{path}: expected a list of {files} numbers, one per checkpoint, oldest first"
        )
    for number in numbers:
        if type(number) not in (int, float) or not math.isfinite(number):
            raise CheckpointError(f"{path}: expected finite numbers, got {number!r}")
    total = math.fsum(numbers)
    if abs(total - 1.0) > 1e-6:
        raise CheckpointError(
            f"{path}: expected weights that sum to 1, got a sum of {total:.9g}; divide each by the "
            "sum"
        )
    return np.array(numbers, np.float64)
