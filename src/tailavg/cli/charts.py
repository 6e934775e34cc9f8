"""Charts of curves, independent of how they are drawn: lines, names, colours, limits and ticks.

`plot.py` builds a `Chart`; `pictures.py`, `page.py` and `terminal.py` draw it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from tailavg.cli.common import fail
from tailavg.cli.curves import Line
from tailavg.style import COLOURS, GREY

LISTED = 20
"""The most lines that a legend names."""


@dataclass
class Panel:
    """The curves of one column: samples first, then averages."""

    name: str
    lines: list[Line]


@dataclass
class Chart:
    """A chart: a title, the x axis, and a panel for each column."""

    title: str
    x_name: str
    log_x: bool
    log_y: bool
    panels: list[Panel] = field(default_factory=list)

    def check(self) -> None:
        """Fail if there is no number to draw."""
        for line in (line for panel in self.panels for line in panel.lines):
            xs, ys = line.points()
            positive = ((ys > 0) | (not self.log_y)) & ((xs > 0) | (not self.log_x))
            if np.any(np.isfinite(ys) & positive):
                return
        positive_only = " above 0, for a logarithmic axis" if self.log_x or self.log_y else ""
        fail(f"expected at least one number{positive_only} to draw, got none")


def styled(line: Line, run: int, runs: Sequence[str], windows: Sequence[str]) -> Line:
    """Return a line with its style: one colour per window for a single run, else one per run.

    The legend names the averages, and the samples of a single run.
    """
    samples = line.window < 0
    window = "samples" if samples else windows[line.window]
    if len(runs) == 1:
        colour = GREY if samples else COLOURS[line.window % len(COLOURS)]
        return replace(line, name=window, colour=colour)
    name = runs[run] if len(windows) == 1 and not samples else f"{runs[run]}, {window}"
    colour = COLOURS[run % len(COLOURS)]
    return replace(line, name=name, colour=colour, dashes=line.window % 4, listed=not samples)


def printable(name: str) -> str:
    """Replace control characters and lone surrogates, which terminals and files cannot show.

    Examples:
        >>> printable("loss\\x1b[2J")
        'loss�[2J'
    """
    return "".join(each if each.isprintable() else "\ufffd" for each in name)


def limits(values: Sequence[Any], log: bool) -> tuple[float, float]:
    """Return the smallest and the largest value that can be drawn, or a default range if none."""
    least, greatest = np.inf, -np.inf
    for array in values:
        usable = array[np.isfinite(array) & ((array > 0) if log else True)]
        usable = usable.clip(1e-300) if log else usable
        if len(usable):
            least, greatest = min(least, usable.min()), max(greatest, usable.max())
    if least > greatest:
        return (1.0, 10.0) if log else (0.0, 1.0)
    size = max(abs(least), abs(greatest))
    if greatest - least <= 1e-12 * size:  # equal up to rounding
        margin = max(0.5, 1e-3 * size)
        return (least / 2, greatest * 2) if log else (least - margin, greatest + margin)
    return float(least), float(greatest)


def ticks(least: float, greatest: float, most: int, log: bool) -> list[float]:
    """Return at most `most` round numbers; on a logarithmic axis decades, perhaps with 2s and 5s.

    Examples:
        >>> ticks(0.03, 1.12, 6, log=False), ticks(3, 20_000, 6, log=True)
        ([0.2, 0.4, 0.6, 0.8, 1.0], [10.0, 100.0, 1000.0, 10000.0])
    """
    if log:
        powers = range(math.floor(math.log10(least)), math.ceil(math.log10(greatest)) + 1)
        for digits in ((1, 2, 5), (1,)):
            candidates = [float(f"{digit}e{power}") for power in powers for digit in digits]
            candidates = [tick for tick in candidates if least <= tick <= greatest]
            if len(candidates) <= most:
                break
        if len(candidates) > 1:
            return candidates[:: math.ceil(len(candidates) / most)]
    rough = (greatest - least) / max(1, most)
    if not 1e-15 * max(abs(least), abs(greatest)) < rough < math.inf:
        return [least, greatest]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in (1, 2, 5, 10) if nice * power >= rough * (1 - 1e-9))
    multiples = range(math.ceil(least / step - 1e-9), math.floor(greatest / step + 1e-9) + 1)
    return [float(f"{multiple * step:.15g}") for multiple in multiples]


def number(value: float, digits: int = 4) -> str:
    """Format a number for a legend.

    Examples:
        >>> number(2_500_000), number(0.00012345), number(0.25)
        ('2,500,000', '0.0001234', '0.25')
    """
    if math.isfinite(value) and value == round(value) and abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def with_error(value: float, error: float, sign: str = "±") -> str:
    """Format a value with as many digits as its error warrants.

    Examples:
        >>> with_error(1700000000.53, 0.12), with_error(0.25, float("nan"))
        ('1700000000.53 ± 0.12', '0.25')
    """
    if not math.isfinite(error):
        return number(value)
    digits = 4
    if error and value:
        digits = max(digits, math.floor(math.log10(abs(value) / error)) + 2)
    return f"{number(value, min(digits, 15))} {sign} {error:.2g}"


def labels(values: Sequence[float]) -> list[str]:
    """Format ticks with as many digits as they need.

    Examples:
        >>> labels([10000.5, 10001.0, 10001.5])
        ['10000.5', '10,001', '10001.5']
    """
    near = 1e-3 * min((b - a for a, b in pairwise(values)), default=0.0)
    digits = 4
    while digits < 16 and any(abs(float(f"{tick:.{digits}g}") - tick) > near for tick in values):
        digits += 1
    return [number(tick, digits) for tick in values]
