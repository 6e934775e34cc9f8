"""The figures: two from the paper and three of ours, as panels for files and the report."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator, ScalarFormatter

from tailavg import TailAverage
from tailavg.core.rules import WindowRule
from tailavg.experiments.claims import FIRST, MARGIN, ratios
from tailavg.experiments.regression import (
    EVERY_TAIL,
    FRACTIONS,
    KINDS,
    Curve,
    Errors,
    Reals,
    Tails,
    methods,
    turns,
)

__all__ = ["Figure", "exact", "inline", "make", "mean", "samples_touched", "save"]

INK, PAPER = "#1b1b1c", "#fefeff"
"""Distinct from all other colours, so that the report can replace them by the page's own."""

STYLES: dict[str, dict[str, Any]] = {  # Okabe and Ito's colours, and different dashes
    "true": {"color": INK, "linewidth": 4.5, "alpha": 0.3},
    "raw": {"color": "#e69f00", "linestyle": (0, (1, 1))},
    "exp": {"color": "#d55e00", "linestyle": "--", "zorder": 3},
    "awa": {"color": "#0083cc", "linestyle": "-"},
    "awa3": {"color": "#009e73", "linestyle": "-."},
}
TURNS = {"paper": "the paper's turns", "balanced": "balanced turns"}
MEMORY_COLOURS = {2: "#e69f00", 3: "#d55e00", 4: "#cc79a7", 5: "#0083cc", 6: "#009e73"}

TAIL_COLOURS = {
    0.05: "#d55e00",
    0.1: "#e69f00",
    0.25: "#009e73",
    0.5: "#0083cc",
    1.0: "#cc79a7",
}
"""The tails drawn in colour; the others are grey."""

LOOK: dict[Any, Any] = {
    "svg.hashsalt": "tailavg",  # the same file from the same data
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#8888884d",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), PAPER),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
}


@dataclass(frozen=True)
class Panel:
    """One pair of axes: its title, and the function that draws it."""

    title: str
    draw: Callable[[Axes], None]


@dataclass(frozen=True)
class Figure:
    """Rows of panels, with a caption."""

    name: str
    title: str
    caption: str
    rows: tuple[tuple[Panel, ...], ...]
    heights: tuple[float, ...]


def make(errors: Errors, tails: Tails, at: int) -> list[Figure]:
    """The figures for these measurements; the figure of weights shows step `at`."""
    total = len(next(iter(errors.values())))
    return [
        _comparison(
            "figure1",
            "Figure 1: a fixed window",
            "Excess error of expk, awak and truek, mean over runs with a band of one standard "
            "error, and its ratio to that of truek, run by run. Dotted: the margin of verdicts.",
            errors,
            ("k = 10", "k = 100"),
        ),
        _comparison(
            "figure2",
            "Figure 2: a growing window",
            "Excess error of raw, exp, awa, awa3 and true, mean over runs with a band of one "
            "standard error, and its ratio to that of true, run by run; awa and awa3 have the "
            "paper's turns. Before its tail begins, raw is the latest iterate, and its ratio may "
            "leave the panel.",
            errors,
            ("c = 0.25", "c = 0.5"),
        ),
        _turns(errors),
        _weights(total, at),
        _tails(tails, _span(errors)),
    ]


def mean(errors: Reals) -> tuple[Reals, Reals]:
    """The mean over runs and its standard error, at every step."""
    return errors.mean(axis=1), errors.std(axis=1, ddof=1) / np.sqrt(errors.shape[1])


def _some(first: int, last: int, most: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """At most `most` steps, evenly spread on a log scale."""
    return np.unique(np.geomspace(first, last, most).round().astype(np.int64))


def _line(axes: Axes, t: Any, middle: Reals, half: Reals | None, label: str, **style: Any) -> None:
    axes.plot(t, middle, label=label, **style)
    if half is not None:
        band = (middle - half, middle + half)
        axes.fill_between(t, *band, color=style["color"], alpha=0.18, linewidth=0)


def _margins(axes: Axes) -> None:
    for level in (1 / MARGIN, MARGIN):
        axes.axhline(level, color=INK, linestyle=":", linewidth=0.8)
    axes.axhline(1.0, **STYLES["true"])


def _span(errors: Errors) -> tuple[int, int]:
    """The first and last step that claims consider."""
    total = len(next(iter(errors.values())))
    return max(1, math.ceil(FIRST * total)), total


def _steps_axis(axes: Axes) -> None:
    """Format a log axis over few decades with plain numbers."""
    axes.set(xscale="log", xlabel="batches t")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())


def exact(window: str) -> Curve:
    """The curve of the exact average of a window."""
    return Curve(window, "truek" if window.startswith("k") else "true")


def _of(errors: Errors, window: str) -> list[tuple[str, dict[str, Any], Reals]]:
    """The paper's curves for a window: name, style, errors; the exact one first, at the bottom."""
    found = [
        (curve.method, STYLES[curve.method.removesuffix("k")], values)
        for curve, values in errors.items()
        if curve.window == window and curve.method.removesuffix("k") in STYLES
    ]
    return sorted(found, key=lambda line: not line[0].startswith("true"))


def _comparison(
    name: str, title: str, caption: str, errors: Errors, windows: tuple[str, ...]
) -> Figure:
    def excess(window: str) -> Panel:
        def draw(axes: Axes) -> None:
            for method, style, values in _of(errors, window):
                t = _some(1, len(values), 220)
                middle, half = mean(values[t - 1])
                _line(axes, t, middle, half, method, **style)
            axes.set(xscale="log", yscale="log", xlabel="batches t", ylabel="excess error")
            axes.legend(loc="lower left")

        return Panel(f"{window}: excess error", draw)

    def relative(window: str) -> Panel:
        def draw(axes: Axes) -> None:
            _margins(axes)
            low, high = 1 / MARGIN, MARGIN
            for method, style, values in _of(errors, window)[1:]:
                t = _some(*_span(errors), 300)
                logs = np.log(values[t - 1] / errors[exact(window)][t - 1])
                middle, half = ratios(logs)
                _line(axes, t, middle, half, method, **style)
                if method != "raw":
                    low, high = min(low, *(middle - half)), max(high, *(middle + half))
            _steps_axis(axes)
            axes.set_ylabel(f"ratio to {exact(window).method}")
            axes.set_ylim(low - 0.02, high + 0.02)

        return Panel(f"{window}: ratio of errors", draw)

    rows = tuple(tuple(map(panel, windows)) for panel in (excess, relative))
    return Figure(name, title, caption, rows, (3.8, 2.6))


def samples_touched(rule: WindowRule, steps: Iterable[int]) -> Reals:
    """How many samples back the average reaches, at each of `steps`."""
    average, touched = TailAverage(rule), []
    for t in steps:
        average.update_many(np.zeros(t - average.count))
        touched.append(average.profile().oldest_age + 1)
    return np.array(touched, dtype=float)


def _turns(errors: Errors) -> Figure:
    rules = turns()
    t = _some(*_span(errors), 400)
    lines = {
        curve: (
            ratios(np.log(errors[curve][t - 1] / errors[exact(curve.window)][t - 1]))[0],
            samples_touched(rule, t) / rule.size(t),
        )
        for curve, rule in rules.items()
    }

    def panel(window: str, kind: str, row: int) -> Panel:
        def draw(axes: Axes) -> None:
            for accumulators, colour in MEMORY_COLOURS.items():
                values = lines[Curve(window, f"{kind} {accumulators}")][row]
                axes.plot(t, values, color=colour, linewidth=1.2, label=f"{accumulators}")
            axes.axhline(1.0, **STYLES["true"])
            every = np.concatenate(
                [line[row] for curve, line in lines.items() if curve[0] == window]
            )
            low, high = min(1.0, every.min()), every.max()
            axes.set_ylim(low - 0.05 * (high - low), high + 0.3 * (high - low))
            _steps_axis(axes)
            axes.set_ylabel(("ratio to true", "samples touched / ct")[row])
            axes.legend(title="accumulators", ncols=5, columnspacing=1, handlelength=1.2)

        what = ("ratio of errors", "samples touched")[row]
        return Panel(f"{window}, {TURNS[kind]}: {what}", draw)

    rows = [
        (window, row) for window in dict.fromkeys(curve.window for curve in rules) for row in (0, 1)
    ]
    return Figure(
        "figure3",
        "Figure 3: the paper's turns and balanced turns, at equal memory",
        "With 2 to 6 accumulators: the error relative to the exact window, mean over runs; "
        "and how far back the average reaches, in windows. Grey: the exact window. "
        "With 2 accumulators both kinds of turns are the same.",
        tuple(tuple(panel(window, kind, row) for kind in KINDS) for window, row in rows),
        (2.8,) * len(rows),
    )


def _weights(total: int, at: int) -> Figure:
    def panel(window: str) -> Panel:
        def draw(axes: Axes) -> None:
            reach = 0
            rules = {
                curve: rule for curve, rule in methods(total).items() if curve.window == window
            }
            truth = exact(window)
            for curve, rule in {truth: rules[truth], **rules}.items():
                average = TailAverage(rule)
                average.update_many(np.zeros(at))
                weights = average.weights()[::-1]
                method = curve.method.removesuffix("k")
                shown = np.flatnonzero(weights)
                if method != "exp":
                    reach = max(reach, int(shown[-1]) + 1)
                age = np.concatenate([shown, shown[-1:] + 1])
                heights = 1000 * np.concatenate([weights[shown], [0.0]])
                steps = "default" if method == "exp" else "steps-post"
                axes.plot(age, heights, drawstyle=steps, label=curve.method, **STYLES[method])
            axes.set(xlabel="age of the sample", ylabel="weight, thousandths")
            axes.set_xlim(-0.03 * reach, 1.25 * reach)
            # a sample with nearly all the weight, as in raw before its tail, would flatten the rest
            axes.set_ylim(0, 1000 * 3.0 / rules[truth].size(at))
            axes.legend(loc="upper right")

        return Panel(f"{window}: weights at t = {at}", draw)

    return Figure(
        "figure4",
        "Figure 4: what each sample weighs",
        f"The weight profile of every method at t = {at}, newest sample on the left.",
        (tuple(map(panel, ("k = 100", "c = 0.25", "c = 0.5"))),),
        (3.3,),
    )


def _tails(tails: Tails, span: tuple[int, int]) -> Figure:
    t = _some(*span, 300)
    shown = {i: c for i, c in enumerate(FRACTIONS) if c in TAIL_COLOURS}
    ratio = (tails.error / tails.least)[:, span[0] - 1 :].max(axis=1)
    safest = int(ratio.argmin())

    def lines(axes: Axes, values: Reals) -> None:
        for i, row in enumerate(values):
            if i not in shown:
                axes.plot(t, row[t - 1], color="#888888", linewidth=0.6, alpha=0.6)
        for i, c in shown.items():
            axes.plot(t, values[i][t - 1], color=TAIL_COLOURS[c], linewidth=1.3, label=f"c = {c}")
        _steps_axis(axes)

    def excess(axes: Axes) -> None:
        axes.plot(t, tails.least[t - 1], label="best", **STYLES["true"])
        lines(axes, tails.error)
        axes.set(yscale="log", ylabel="excess error")
        axes.legend(loc="lower left", fontsize=8, labelspacing=0.25)

    def relative(axes: Axes) -> None:
        axes.axhline(1.0, **STYLES["true"])
        lines(axes, tails.error / tails.least)
        axes.set(ylabel="ratio to the best", ylim=(0.95, 2.5))

    def best(axes: Axes) -> None:
        axes.step(t, np.array(FRACTIONS)[tails.best[t - 1]], where="post", color=INK, linewidth=1.3)
        _steps_axis(axes)
        axes.set(yscale="log", ylabel="best fraction c", ylim=(0.9 * FRACTIONS[0], 1.1))
        axes.yaxis.set_major_locator(FixedLocator([*TAIL_COLOURS]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda c, _: f"{c}"))
        axes.yaxis.set_minor_locator(NullLocator())

    return Figure(
        "figure5",
        "Figure 5: every tail, and the best in hindsight",
        f"Ours, not in the paper: {len(FRACTIONS)} tails from the last {FRACTIONS[0]:.0%} to all, "
        f"read from one set of {EVERY_TAIL.accumulators} accumulators in one pass, mean over runs. "
        "Thin lines: fractions in between. The best is chosen by the true error, so it is known "
        "only in hindsight. Here the "
        f"best goes from c = {FRACTIONS[tails.best[span[0] - 1]]} at t = {span[0]} to "
        f"c = {FRACTIONS[tails.best[-1]]} at the end. The safest fixed choice is "
        f"c = {FRACTIONS[safest]}, never more than {ratio[safest]:.2f} times the best.",
        (
            (
                Panel("every tail: excess error", excess),
                Panel("every tail: ratio to the best", relative),
                Panel("the best tail in hindsight", best),
            ),
        ),
        (3.3,),
    )


def save(figure: Figure, folder: Path) -> list[Path]:
    """Write a figure as SVG and PNG."""
    paths = [folder / f"{figure.name}.{kind}" for kind in ("svg", "png")]
    with mpl.rc_context(LOOK):
        canvas = _draw(figure.rows, figure.heights, width=9.6)
        canvas.savefig(paths[0], metadata={"Date": None})
        canvas.savefig(paths[1], metadata={"Software": None}, dpi=150)
    return paths


def _draw(rows: tuple[tuple[Panel, ...], ...], heights: tuple[float, ...], width: float) -> Canvas:
    """Draw the panels on a grid, with margins in inches: a layout engine is slow."""
    tall = sum(heights)
    canvas = Canvas(figsize=(width, tall))
    grid = canvas.subplots(len(rows), len(rows[0]), squeeze=False, height_ratios=heights)
    canvas.subplots_adjust(
        left=0.65 / width,
        right=1 - 0.1 / width,
        bottom=0.5 / tall,
        top=1 - 0.3 / tall,
        wspace=0.75 / (width / len(rows[0]) - 0.75),
        hspace=0.8 / (tall / len(rows) - 0.8),
    )
    for panel, axes in zip(chain(*rows), grid.flat, strict=True):
        panel.draw(axes)
        axes.set_title(panel.title)
    return canvas


def inline(panel: Panel, height: float) -> str:
    """A panel as SVG for a page, with the page's own colours for ink and paper."""
    with mpl.rc_context(LOOK):
        text = io.StringIO()
        canvas = _draw(((panel,),), (height,), width=4.6)
        canvas.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor").replace(PAPER, "none")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
