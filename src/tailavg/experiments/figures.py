"""The figures of the report: two from the paper and three of ours.

`make` describes them, `save` draws them, and `inline` embeds them in the page. `report.py` and
`docs/figures.py` call these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator, ScalarFormatter

from tailavg import ExactWindow, TailAverage
from tailavg.core.rules import WindowRule
from tailavg.experiments.claims import MARGIN, exact, first_step, gap
from tailavg.experiments.regression import (
    EVERY_TAIL,
    FRACTIONS,
    FRESHEST,
    KINDS,
    Curve,
    Errors,
    Means,
    Reals,
    Tails,
    methods,
    reading,
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

STYLES: dict[str, dict[str, Any]] = {
    "true": {"color": INK, "linewidth": 4.5, "alpha": 0.3},
    "raw": {"color": ORANGE, "linestyle": (0, (1, 1))},
    "exp": {"color": VERMILION, "linestyle": "--", "zorder": 3},
    "awa": {"color": BLUE, "linestyle": "-"},
    "awa3": {"color": GREEN, "linestyle": "-."},
    FRESHEST: {"color": PINK, "linestyle": "--", "zorder": 3},
}
TURNS = {"paper": "the paper's turns", "balanced": "balanced turns"}
MEMORY_COLOURS = {2: ORANGE, 3: VERMILION, 4: PINK, 5: BLUE, 6: GREEN}
TAIL_COLOURS = {0.05: VERMILION, 0.1: ORANGE, 0.25: GREEN, 0.5: BLUE, 1.0: PINK}
"""The tails drawn in colour; the others are grey."""

Grid = np.ndarray[Any, np.dtype[np.object_]]
"""The axes of a figure, by row and column."""

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Figure:
    """A grid of panels with a caption: `heights` of the rows in inches; `draw` fills the axes."""

    name: str
    title: str
    caption: str
    heights: tuple[float, ...]
    columns: int
    draw: Callable[[Grid], None]


def make(result: Result) -> list[Figure]:
    """Return the figures: the two of the paper, then ours."""
    caption = (
        "Above: the excess error of {methods}, as the mean over runs with a band of one standard "
        "error. Below: the gap to {true}, which is the ratio of the means, averaged over a tenth "
        f"of a decade. Thin lines are {len(result.by_seed) - 1} more seeds; dotted lines are the "
        "margin of 10 %."
    )
    total = result.plan.problem.batches
    return [
        _comparison(
            "figure1",
            "Figure 1: a fixed window",
            caption.format(methods="expk, awak and truek", true="truek"),
            result,
            ("k = 10", "k = 100"),
        ),
        _comparison(
            "figure2",
            "Figure 2: a growing window",
            caption.format(methods="raw, exp, awa, awa3 and true", true="true")
            + " The dashed freshest is ours: an AnyTail read as Freshest(c). Before its tail "
            "begins, raw is the latest iterate, and its gap is off the panel.",
            result,
            ("c = 0.25", "c = 0.5"),
        ),
        _turns(result.errors),
        _weights(total, result.plan.at),
        _tails(result.tails, (first_step(total), total)),
    ]


def mean(errors: Reals) -> tuple[Reals, Reals]:
    """Return the mean over runs and its standard error, at every step."""
    return errors.mean(axis=1), errors.std(axis=1, ddof=1) / np.sqrt(errors.shape[1])


def _log_spaced(first: int, last: int, most: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return at most `most` steps, evenly spaced on a log scale."""
    return np.unique(np.geomspace(first, last, most).round().astype(np.int64))


def _decades(axis: Axis) -> None:
    """Label a log axis with powers of ten in plain text, since math text is slow to draw."""
    axis.set_major_locator(LogLocator())
    axis.set_major_formatter(
        FuncFormatter(lambda x, _: "10" + str(round(math.log10(x))).translate(RAISED))
    )
    axis.set_minor_locator(NullLocator())


def _steps_axis(axes: Axes) -> None:
    """Label a log axis of a few decades with plain numbers."""
    axes.set(xscale="log", xlabel="batches t")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())


def _names(window: str) -> list[str]:
    """Return the paper's methods for a window, the exact one first so that it is drawn below."""
    names = [curve.method for curve in methods(1) if curve.window == window]
    return sorted(names, key=lambda name: not name.startswith("true"))


def _style(method: str) -> dict[str, Any]:
    return STYLES[method.removesuffix("k")]


def _label(method: str) -> str:
    return f"{method} (ours)" if method == FRESHEST else method


def _comparison(
    name: str, title: str, caption: str, result: Result, windows: tuple[str, ...]
) -> Figure:
    def draw(grid: Grid) -> None:
        for window, above, below in zip(windows, *grid, strict=True):
            _draw_errors(above, result.errors, window)
            _draw_gaps(below, result.by_seed, window)

    return Figure(name, title, caption, (3.8, 2.6), len(windows), draw)


def _draw_errors(axes: Axes, errors: Errors, window: str) -> None:
    t = _log_spaced(1, len(errors[exact(window)]), 220)
    for method in _names(window):
        middle, half = mean(errors[Curve(window, method)][t - 1])
        axes.plot(t, middle, label=_label(method), **_style(method))
        band = (middle - half, middle + half)
        axes.fill_between(t, *band, color=_style(method)["color"], alpha=0.18, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="batches t", ylabel="excess error")
    for axis in (axes.xaxis, axes.yaxis):
        _decades(axis)
    axes.legend(loc="lower left")
    axes.set_title(f"{window}: excess error", y=TITLE)


def _draw_gaps(axes: Axes, by_seed: list[Means], window: str) -> None:
    for level in (1 / MARGIN, MARGIN):
        axes.axhline(level, color=INK, linestyle=":", linewidth=0.8)
    axes.axhline(1.0, **STYLES["true"])
    total = len(by_seed[0][exact(window)])
    t = _log_spaced(first_step(total), total, 120)
    low, high = 1 / MARGIN, MARGIN
    for method in _names(window)[1:]:
        gaps = [_gap(means, window, method)[t - 1] for means in by_seed]
        for other_seed in gaps[1:]:
            axes.plot(t, other_seed, color=_style(method)["color"], linewidth=0.5, alpha=0.35)
        axes.plot(t, gaps[0], label=_label(method), **_style(method))
        if method != "raw":
            low, high = min(low, *map(np.min, gaps)), max(high, *map(np.max, gaps))
    _steps_axis(axes)
    axes.set(ylabel=f"gap to {exact(window).method}", ylim=(low - 0.02, high + 0.02))
    axes.set_title(f"{window}: gap to {exact(window).method}", y=TITLE)


def _gap(means: Means, window: str, method: str) -> Reals:
    return gap(means[Curve(window, method)], means[exact(window)])


def samples_touched(rule: WindowRule, steps: Iterable[int]) -> Reals:
    """Return how many samples back the average reaches at each step."""
    average, touched = TailAverage(rule), []
    for t in steps:
        average.update_many(np.zeros(t - average.count))
        touched.append(average.profile().oldest_age + 1)
    return np.array(touched, dtype=float)


def _turns(errors: Errors) -> Figure:
    rules = turns()
    means = {curve: values.mean(axis=1) for curve, values in errors.items()}
    total = len(next(iter(means.values())))
    t = _log_spaced(first_step(total), total, 300)
    windows = list(dict.fromkeys(curve.window for curve in rules))
    rows = [(window, what) for window in windows for what in ("gap to true", "samples touched")]

    def line(curve: Curve, what: str) -> Any:
        if what == "gap to true":
            return _gap(means, *curve)[t - 1]
        return samples_touched(rules[curve], t) / rules[curve].size(t)

    def draw(grid: Grid) -> None:
        for row, (window, what) in zip(grid, rows, strict=True):
            lines = {curve: line(curve, what) for curve in rules if curve.window == window}
            low = min(1.0, *(values.min() for values in lines.values()))
            high = max(values.max() for values in lines.values())
            for axes, kind in zip(row, KINDS, strict=True):
                for accumulators, colour in MEMORY_COLOURS.items():
                    values = lines[Curve(window, f"{kind} {accumulators}")]
                    axes.plot(t, values, color=colour, linewidth=1.2, label=f"{accumulators}")
                axes.axhline(1.0, **STYLES["true"])
                _steps_axis(axes)
                axes.set_title(f"{window}, {TURNS[kind]}: {what}", y=TITLE)
                room = 0.05
                if what == "gap to true":
                    room = 0.3
                    axes.legend(title="accumulators", ncols=5, columnspacing=1, handlelength=1.2)
                axes.set_ylim(low - 0.05 * (high - low), high + room * (high - low))
                axes.set_ylabel(what if what == "gap to true" else f"{what} / ct")

    return Figure(
        "figure3",
        "Figure 3: the paper's turns and balanced turns, at equal memory",
        "Not in the paper. For 2 to 6 accumulators: the gap to the exact window, as above, and "
        "how far back the average reaches, in windows. The grey line is the exact window. "
        "With 2 accumulators, both kinds of turns are the same.",
        (2.8,) * len(rows),
        len(KINDS),
        draw,
    )


def _weights(total: int, at: int) -> Figure:
    windows = ("k = 100", "c = 0.25", "c = 0.5")

    def draw(grid: Grid) -> None:
        for axes, window in zip(grid[0], windows, strict=True):
            _draw_weights(axes, window, total, at)

    return Figure(
        "figure4",
        "Figure 4: the weight of each sample",
        f"Not in the paper. The weights of all methods at t = {at}, newest sample on the left.",
        (3.3,),
        len(windows),
        draw,
    )


def _draw_weights(axes: Axes, window: str, total: int, at: int) -> None:
    reach, rules = 0, methods(total)
    for method in _names(window):
        curve = Curve(window, method)
        average = TailAverage(rules[curve])
        average.update_many(np.zeros(at))
        weights = average.weights(reading(curve))[::-1]
        weighted = np.flatnonzero(weights)
        ages = np.append(weighted, weighted[-1] + 1)
        heights = 1000 * np.append(weights[weighted], 0.0)
        exponential = method.startswith("exp")
        if not exponential:
            reach = max(reach, int(ages[-1]))
        steps = "default" if exponential else "steps-post"
        axes.plot(ages, heights, drawstyle=steps, label=_label(method), **_style(method))
    true = rules[exact(window)]
    assert isinstance(true, ExactWindow)
    axes.set(xlabel="age of the sample", ylabel="weight, thousandths")
    axes.set_xlim(-0.03 * reach, 1.25 * reach)
    # raw before its tail gives one sample nearly all the weight, which would flatten the others
    axes.set_ylim(0, 1000 * 3.0 / true.size(at))
    axes.legend(loc="upper right")
    axes.set_title(f"{window}: weights at t = {at}", y=TITLE)


def _tails(tails: Tails, span: tuple[int, int]) -> Figure:
    t = _log_spaced(*span, 300)
    ratio = (tails.error / tails.least)[:, span[0] - 1 :].max(axis=1)
    safest = int(ratio.argmin())

    def lines(axes: Axes, values: Reals) -> None:
        for c, row in zip(FRACTIONS, values, strict=True):
            if c not in TAIL_COLOURS:
                axes.plot(t, row[t - 1], color="#888888", linewidth=0.6, alpha=0.6)
        for c, colour in TAIL_COLOURS.items():
            row = values[FRACTIONS.index(c)]
            axes.plot(t, row[t - 1], color=colour, linewidth=1.3, label=f"c = {c}")
        _steps_axis(axes)

    def draw(grid: Grid) -> None:
        excess, relative, best = grid[0]
        excess.plot(t, tails.least[t - 1], label="best", **STYLES["true"])
        lines(excess, tails.error)
        excess.set(yscale="log", ylabel="excess error")
        _decades(excess.yaxis)
        excess.legend(loc="lower left", fontsize=8, labelspacing=0.25)
        excess.set_title("every tail: excess error", y=TITLE)
        relative.axhline(1.0, **STYLES["true"])
        lines(relative, tails.error / tails.least)
        relative.set(ylabel="ratio to the best", ylim=(0.95, 2.5))
        relative.set_title("every tail: ratio to the best", y=TITLE)
        best.step(t, np.array(FRACTIONS)[tails.best[t - 1]], where="post", color=INK, linewidth=1.3)
        _steps_axis(best)
        best.set(yscale="log", ylabel="best fraction c", ylim=(0.9 * FRACTIONS[0], 1.1))
        best.yaxis.set_major_locator(FixedLocator([*TAIL_COLOURS]))
        best.yaxis.set_major_formatter(FuncFormatter(lambda c, _: f"{c}"))
        best.yaxis.set_minor_locator(NullLocator())
        best.set_title("the best tail in hindsight", y=TITLE)

    return Figure(
        "figure5",
        "Figure 5: every tail, and the best in hindsight",
        f"Not in the paper. {len(FRACTIONS)} tails from the last {FRACTIONS[0]:.0%} to all, "
        f"read from one set of {EVERY_TAIL.accumulators} accumulators in one pass, mean over runs. "
        "Thin lines are the fractions in between. The best tail is chosen by the true error, so it "
        "is known only in hindsight. Here it goes "
        f"from c = {FRACTIONS[tails.best[span[0] - 1]]} at t = {span[0]} to "
        f"c = {FRACTIONS[tails.best[-1]]} at the end. The safest fixed choice is "
        f"c = {FRACTIONS[safest]}, never more than {ratio[safest]:.2f} times the best.",
        (3.3,),
        3,
        draw,
    )


WIDTH = 9.6
"""The width of a figure, in inches."""
LEFT, RIGHT, BELOW, ABOVE = 0.65, 0.1, 0.5, 0.3
"""The margins around the axes of a panel, in inches."""
TITLE = 1.0
"""The height of a panel's title. Matplotlib is slow to choose a height itself."""


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
    """Draw the panels with fixed margins, since a layout engine is slow."""
    height, rows, columns = sum(figure.heights), len(figure.heights), figure.columns
    margins = {
        "left": LEFT / WIDTH,
        "right": 1 - RIGHT / WIDTH,
        "bottom": BELOW / height,
        "top": 1 - ABOVE / height,
        "wspace": (LEFT + RIGHT) / (WIDTH / columns - LEFT - RIGHT),
        "hspace": (BELOW + ABOVE) / (height / rows - BELOW - ABOVE),
    }
    canvas = Canvas(figsize=(WIDTH, height))
    heights = {"height_ratios": figure.heights}
    figure.draw(canvas.subplots(rows, columns, squeeze=False, gridspec_kw=heights | margins))
    return canvas


def inline(figure: Figure, svg: str) -> str:
    """Return the HTML of a saved figure, with the colours of the page."""
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor").replace(PAPER, "none")
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return f'<div class=wide role="img" aria-label="{escape(figure.title)}">{svg}</div>'
