"""The figures: two from the paper and three of ours, as panels for files and the report."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator, ScalarFormatter

from tailavg import TailAverage
from tailavg.core.rules import WindowRule
from tailavg.experiments.claims import MARGIN, exact, first_step, gap
from tailavg.experiments.regression import (
    EVERY_TAIL,
    FRACTIONS,
    KINDS,
    Curve,
    Errors,
    Means,
    Reals,
    Tails,
    methods,
    turns,
)
from tailavg.experiments.run import Result
from tailavg.style import (
    BLUE,
    GREEN,
    INK,
    LOOK,
    ORANGE,
    PAPER,
    PINK,
    VERMILION,
    write_figure,
)

__all__ = ["Figure", "inline", "make", "mean", "samples_touched", "save"]

STYLES: dict[str, dict[str, Any]] = {
    "true": {"color": INK, "linewidth": 4.5, "alpha": 0.3},
    "raw": {"color": ORANGE, "linestyle": (0, (1, 1))},
    "exp": {"color": VERMILION, "linestyle": "--", "zorder": 3},
    "awa": {"color": BLUE, "linestyle": "-"},
    "awa3": {"color": GREEN, "linestyle": "-."},
}
TURNS = {"paper": "the paper's turns", "balanced": "balanced turns"}
MEMORY_COLOURS = {2: ORANGE, 3: VERMILION, 4: PINK, 5: BLUE, 6: GREEN}
TAIL_COLOURS = {0.05: VERMILION, 0.1: ORANGE, 0.25: GREEN, 0.5: BLUE, 1.0: PINK}
"""The tails drawn in colour; the others are grey."""

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


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


def make(result: Result) -> list[Figure]:
    """The figures: the paper's two, then ours."""
    errors, seeds = result.errors, len(result.by_seed)
    total = result.plan.problem.batches
    below = (
        "below, its gap to {true}: the ratio of the means, averaged over a tenth of a decade. "
        f"Thin: the same for {seeds - 1} more seeds. Dotted: the margin of 10 %."
    )
    return [
        _comparison(
            "figure1",
            "Figure 1: a fixed window",
            "Above, the excess error of expk, awak and truek, mean over runs with a band of one "
            "standard error; " + below.format(true="truek"),
            result,
            ("k = 10", "k = 100"),
        ),
        _comparison(
            "figure2",
            "Figure 2: a growing window",
            "Above, the excess error of raw, exp, awa, awa3 and true, mean over runs with a band "
            "of one standard error; "
            + below.format(true="true")
            + " Until its tail begins, raw is the latest iterate, and its gap is off the panel.",
            result,
            ("c = 0.25", "c = 0.5"),
        ),
        _turns(errors),
        _weights(total, result.plan.at),
        _tails(result.tails, (first_step(total), total)),
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


def _decades(axis: Axis) -> None:
    """Format a log axis with powers of ten, in plain text: mathematical text is slow to draw."""
    axis.set_major_locator(LogLocator())
    axis.set_major_formatter(
        FuncFormatter(lambda x, _: "10" + str(round(math.log10(x))).translate(RAISED))
    )
    axis.set_minor_locator(NullLocator())


def _steps_axis(axes: Axes) -> None:
    """Format a log axis over few decades with plain numbers."""
    axes.set(xscale="log", xlabel="batches t")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())


def _names(window: str) -> list[str]:
    """The paper's methods for a window; the exact one first, at the bottom."""
    names = [curve.method for curve in methods(1) if curve.window == window]
    return sorted(names, key=lambda name: not name.startswith("true"))


def _style(method: str) -> dict[str, Any]:
    return STYLES[method.removesuffix("k")]


def _comparison(
    name: str, title: str, caption: str, result: Result, windows: tuple[str, ...]
) -> Figure:
    total = result.plan.problem.batches

    def excess(window: str) -> Panel:
        def draw(axes: Axes) -> None:
            t = _some(1, total, 220)
            for method in _names(window):
                middle, half = mean(result.errors[Curve(window, method)][t - 1])
                _line(axes, t, middle, half, method, **_style(method))
            axes.set(xscale="log", yscale="log", xlabel="batches t", ylabel="excess error")
            for axis in (axes.xaxis, axes.yaxis):
                _decades(axis)
            axes.legend(loc="lower left")

        return Panel(f"{window}: excess error", draw)

    def relative(window: str) -> Panel:
        def draw(axes: Axes) -> None:
            _margins(axes)
            t = _some(first_step(total), total, 120)
            low, high = 1 / MARGIN, MARGIN
            for method in _names(window)[1:]:
                colour = _style(method)["color"]
                gaps = [_gap(means, window, method)[t - 1] for means in result.by_seed]
                for other in gaps[1:]:
                    axes.plot(t, other, color=colour, linewidth=0.5, alpha=0.35)
                axes.plot(t, gaps[0], label=method, **_style(method))
                if method != "raw":
                    low, high = min(low, *map(np.min, gaps)), max(high, *map(np.max, gaps))
            _steps_axis(axes)
            axes.set_ylabel(f"gap to {exact(window).method}")
            axes.set_ylim(low - 0.02, high + 0.02)

        return Panel(f"{window}: gap to {exact(window).method}", draw)

    rows = tuple(tuple(map(panel, windows)) for panel in (excess, relative))
    return Figure(name, title, caption, rows, (3.8, 2.6))


def _gap(means: Means, window: str, method: str) -> Reals:
    return gap(means[Curve(window, method)], means[exact(window)])


def samples_touched(rule: WindowRule, steps: Iterable[int]) -> Reals:
    """How many samples back the average reaches, at each of `steps`."""
    average, touched = TailAverage(rule), []
    for t in steps:
        average.update_many(np.zeros(t - average.count))
        touched.append(average.profile().oldest_age + 1)
    return np.array(touched, dtype=float)


def _turns(errors: Errors) -> Figure:
    rules = turns()
    means = {curve: values.mean(axis=1) for curve, values in errors.items()}
    total = len(next(iter(means.values())))
    t = _some(first_step(total), total, 300)
    lines = {
        curve: (
            _gap(means, *curve)[t - 1],
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
            room = 0.05 if row else 0.3  # for the legend
            axes.set_ylim(low - 0.05 * (high - low), high + room * (high - low))
            _steps_axis(axes)
            axes.set_ylabel(("gap to true", "samples touched / ct")[row])
            if row == 0:
                axes.legend(title="accumulators", ncols=5, columnspacing=1, handlelength=1.2)

        what = ("gap to true", "samples touched")[row]
        return Panel(f"{window}, {TURNS[kind]}: {what}", draw)

    rows = [
        (window, row) for window in dict.fromkeys(curve.window for curve in rules) for row in (0, 1)
    ]
    return Figure(
        "figure3",
        "Figure 3: the paper's turns and balanced turns, at equal memory",
        "Not in the paper. With 2 to 6 accumulators: the gap to the exact window, as above; and "
        "how far back the average reaches, in windows. Grey: the exact window. "
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
        f"Not in the paper. The weights of every method at t = {at}, newest sample on the left.",
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
        _decades(axes.yaxis)
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
        f"Not in the paper. {len(FRACTIONS)} tails from the last {FRACTIONS[0]:.0%} to all, "
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


WIDTH = 9.6
"""Of a figure, in inches."""
LEFT, RIGHT, BELOW, ABOVE = 0.65, 0.1, 0.5, 0.3
"""The room around the axes of a panel, in inches."""


def save(figure: Figure, folder: Path) -> list[Path]:
    """Write a figure as SVG and PNG."""
    paths = [folder / f"{figure.name}.{kind}" for kind in ("svg", "png")]
    with mpl.rc_context(LOOK):
        canvas = _draw(figure)
        for path in paths:
            with path.open("wb") as file:
                write_figure(canvas, file, path.suffix[1:])
    return paths


def _draw(figure: Figure) -> Canvas:
    """Draw the panels, with fixed room around each: a layout engine is slow."""
    tall, rows, columns = sum(figure.heights), len(figure.rows), len(figure.rows[0])
    grid = {
        "left": LEFT / WIDTH,
        "right": 1 - RIGHT / WIDTH,
        "bottom": BELOW / tall,
        "top": 1 - ABOVE / tall,
        "wspace": (LEFT + RIGHT) / (WIDTH / columns - LEFT - RIGHT),
        "hspace": (BELOW + ABOVE) / (tall / rows - BELOW - ABOVE),
        "height_ratios": figure.heights,
    }
    canvas = Canvas(figsize=(WIDTH, tall))
    every = canvas.subplots(rows, columns, squeeze=False, gridspec_kw=grid)
    for panel, axes in zip(chain(*figure.rows), every.flat, strict=True):
        panel.draw(axes)
        axes.set_title(panel.title, y=1.0)  # a place for the title is slow to find
    return canvas


def inline(figure: Figure, svg: str) -> str:
    """A saved figure for a page, in the page's own ink and paper."""
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor").replace(PAPER, "none")
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return f'<div class=wide role="img" aria-label="{escape(figure.title)}">{svg}</div>'
