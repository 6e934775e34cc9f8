"""A chart of curves, by whatever means it is drawn: its lines, names, colours, limits and ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    """The curves of one column."""

    name: str
    lines: list[Line]


@dataclass
class Chart:
    """What is drawn, by whatever means."""

    title: str
    x_name: str
    runs: list[str]
    windows: list[str]
    log_x: bool
    log_y: bool
    raw: bool
    panels: list[Panel] = field(default_factory=list)

    def check(self) -> None:
        """Fail if there is nothing to draw."""
        for panel in self.panels:
            for xs, ys in (line.points() for line in self.drawn(panel)):
                seen = (
                    np.isfinite(ys) & ((ys > 0) | (not self.log_y)) & ((xs > 0) | (not self.log_x))
                )
                if seen.any():
                    return
        above = " above 0, for a logarithmic axis" if self.log_x or self.log_y else ""
        fail(f"expected at least one number{above} to draw, got none")

    def name_of(self, line: Line) -> str:
        """What a legend calls a line."""
        window = "samples" if line.window < 0 else self.windows[line.window]
        if len(self.runs) == 1:
            return window
        if len(self.windows) == 1 and line.window >= 0:
            return self.runs[line.run]
        return f"{self.runs[line.run]}, {window}"

    def drawn(self, panel: Panel) -> list[Line]:
        """The lines to draw: samples first, then averages."""
        return sorted(
            (line for line in panel.lines if self.raw or line.window >= 0),
            key=lambda line: line.window >= 0,
        )

    def listed(self, panel: Panel) -> list[Line]:
        """The lines of the legend: the averages, and of a single run the samples too."""
        lines = self.drawn(panel)
        return lines if len(self.runs) == 1 else [line for line in lines if line.window >= 0]


def printable(name: str) -> str:
    """A name without what would confuse a terminal or a file: controls, and halves of characters.

    Examples:
        >>> printable("loss\\x1b[2J")
        'loss�[2J'
    """
    return "".join(each if each.isprintable() else "\ufffd" for each in name)


def colour_of(chart: Chart, line: Line) -> str:
    """Return a colour for each window of a single run, or for each run of several."""
    if len(chart.runs) > 1:
        return COLOURS[line.run % len(COLOURS)]
    return GREY if line.window < 0 else COLOURS[line.window % len(COLOURS)]


def limits(values: Sequence[Any], log: bool) -> tuple[float, float]:
    """The least and the greatest of arrays that can be drawn; some range if there is none."""
    least, greatest = np.inf, -np.inf
    for each in values:
        usable = each[np.isfinite(each) & ((each > 0) if log else True)]
        usable = usable.clip(1e-300) if log else usable
        if len(usable):
            least, greatest = min(least, usable.min()), max(greatest, usable.max())
    if least > greatest:
        return (1.0, 10.0) if log else (0.0, 1.0)
    size = max(abs(least), abs(greatest))
    if greatest - least <= 1e-12 * size:  # the same, but for rounding
        margin = max(0.5, 1e-3 * size)
        return (least / 2, greatest * 2) if log else (least - margin, greatest + margin)
    return float(least), float(greatest)


def ticks(least: float, greatest: float, most: int, log: bool) -> list[float]:
    """At most so many round numbers between two; on a logarithmic axis decades, and 2s and 5s.

    Examples:
        >>> ticks(0.03, 1.12, 6, log=False), ticks(3, 20_000, 6, log=True)
        ([0.2, 0.4, 0.6, 0.8, 1.0], [10.0, 100.0, 1000.0, 10000.0])
    """
    if log:
        low, high = math.floor(math.log10(least)), math.ceil(math.log10(greatest))
        decades = [((1,), stride) for stride in range(1, high - low + 2)]
        for steps, stride in [((1, 2, 5), 1), *decades]:  # ever fewer
            powers = range(stride * math.ceil(low / stride), high + 1, stride)
            found = [float(f"{step}e{power}") for power in powers for step in steps]
            found = [each for each in found if least <= each <= greatest]
            if len(found) <= most:
                break
        if len(found) > 1:
            return found
    rough = (greatest - least) / max(1, most)
    if not 1e-15 * max(abs(least), abs(greatest)) < rough < math.inf:
        return [least, greatest]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in (1, 2, 5, 10) if nice * power >= rough * (1 - 1e-9))
    wholes = range(math.ceil(least / step - 1e-9), math.floor(greatest / step + 1e-9) + 1)
    return [float(f"{whole * step:.15g}") for whole in wholes]


def number(value: float, digits: int = 4) -> str:
    """A number as a legend shows it.

    Examples:
        >>> number(2_500_000), number(0.00012345), number(0.25)
        ('2,500,000', '0.0001234', '0.25')
    """
    if math.isfinite(value) and value == round(value) and abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def with_error(value: float, error: float, sign: str = "±") -> str:
    """A value with as many digits as its error leaves.

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


def labels(found: Sequence[float]) -> list[str]:
    """Ticks as an axis shows them: with as many digits as they have.

    Examples:
        >>> labels([10000.5, 10001.0, 10001.5])
        ['10000.5', '10,001', '10001.5']
    """
    near = 1e-3 * min((b - a for a, b in pairwise(found)), default=0.0)
    digits = 4
    while digits < 16 and any(abs(float(f"{each:.{digits}g}") - each) > near for each in found):
        digits += 1
    return [number(tick, digits) for tick in found]
