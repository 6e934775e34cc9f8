"""Draw a chart in the terminal, with braille characters of eight dots. `plot.py` calls `text`."""

from __future__ import annotations

import math
from itertools import groupby
from operator import itemgetter

import numpy as np
from rich.text import Text

from tailavg.cli.charts import LISTED, Chart, Panel, labels, limits, ticks, with_error
from tailavg.numpy.arithmetic import Array

HEIGHT = 8
"""The minimum number of rows per panel."""

_BITS = np.array([[1, 8], [2, 16], [4, 32], [64, 128]])  # of the dots in a braille character


def text(chart: Chart, width: int, height: int, unicode: bool = True) -> Text:
    """Return the chart as text, with a total width and height in characters for all panels."""
    rows = max(HEIGHT, height // max(1, len(chart.panels)))
    panels = [_panel(chart, panel, max(40, width), rows, unicode) for panel in chart.panels]
    title = [Text().append(chart.title, style="bold")] if chart.title else []
    return Text("\n").join([*title, *panels])


def _panel(chart: Chart, panel: Panel, width: int, height: int, unicode: bool) -> Text:
    lines = panel.lines
    points = [line.points() for line in lines]
    x_limits = limits([xs for xs, _ in points], chart.log_x)
    y_limits = limits([ys for _, ys in points], chart.log_y)
    legend = _legend(panel, width, unicode)
    rows = max(4, height - 3 - legend.plain.count("\n"))
    y_ticks = ticks(*y_limits, max(3, rows // 3), chart.log_y)
    y_labels = labels(y_ticks)
    margin = max(map(len, y_labels)) + 1
    columns = width - margin - 1
    bits, owners = np.zeros((rows, columns), np.int64), np.full((rows, columns), -1)
    for i, (xs, ys) in enumerate(points):
        across = _placed(xs, x_limits, chart.log_x) * (2 * columns - 1)
        down = (1 - _placed(ys, y_limits, chart.log_y)) * (4 * rows - 1)
        drawn = _dots(across, down, 2 * columns, 4 * rows)
        # later lines, the averages, hide the samples
        bits, owners = np.where(drawn, drawn, bits), np.where(drawn, i, owners)
    down = (1 - _placed(np.array(y_ticks), y_limits, chart.log_y)) * (4 * rows - 1)
    label_of_row = dict(zip((np.rint(down) // 4).tolist(), y_labels, strict=True))
    edge, tick, corner, bar = "│┤└─" if unicode else "|++-"
    out = Text().append(f"{panel.name}  ", style="bold").append_text(legend).append("\n")
    for row in range(rows):
        label = label_of_row.get(row, "")
        out.append(f"{label:>{margin}}{tick if label else edge}", style="dim")
        cells = zip(owners[row].tolist(), bits[row].tolist(), strict=True)
        for owner, run in groupby(cells, key=itemgetter(0)):
            dots = [cell for _, cell in run]
            if owner < 0:
                out.append(" " * len(dots))
            elif unicode:
                out.append("".join(chr(0x2800 + cell) for cell in dots), style=lines[owner].colour)
            else:
                mark = "." if lines[owner].window < 0 else "*"
                out.append(mark * len(dots), style=lines[owner].colour)
        out.append("\n")
    out.append(" " * margin + corner + bar * columns + "\n", style="dim")
    x_ticks = ticks(*x_limits, max(2, columns // 14), chart.log_x)
    return out.append(_x_labels(chart, x_ticks, x_limits, margin + 1, columns), style="dim")


def _legend(panel: Panel, width: int, unicode: bool) -> Text:
    """Return the legend: the names of lines, and the latest values and errors of averages."""
    listed = [line for line in panel.lines if line.listed]
    out, used = Text(), len(panel.name) + 2
    for line in listed[:LISTED]:
        name = line.name
        if line.window >= 0:
            name += f" {with_error(line.now, line.error, '±' if unicode else '+-')}"
        if used + len(name) + 5 > width:
            out.append("\n")
            used = 0
        out.append("━━ " if unicode else "-- ", style=line.colour).append(f"{name}  ")
        used += len(name) + 5
    if len(listed) > LISTED:
        out.append(f"and {len(listed) - LISTED} more")
    return out


def _x_labels(
    chart: Chart, x_ticks: list[float], x_limits: tuple[float, float], left: int, columns: int
) -> str:
    """Return the line of tick labels below a chart, with the name of the axis at the end."""
    cells = [" "] * (left + columns)
    name = f" {chart.x_name}"
    end = len(cells) - len(name)
    cells[end:] = name
    free = 0
    for tick, label in zip(x_ticks, labels(x_ticks), strict=True):
        share = float(_placed(np.array(tick), x_limits, chart.log_x))
        place = left + round(share * (columns - 1))
        start = max(0, place - len(label) // 2)
        if free <= start and start + len(label) < end:
            cells[start : start + len(label)] = label
            free = start + len(label) + 1
    return "".join(cells)


def _placed(values: Array, span: tuple[float, float], log: bool) -> Array:
    """Return the positions of values between the limits, from 0 to 1; NaN if not drawable."""
    if log:
        with np.errstate(all="ignore"):
            values = np.log(np.where(values > 0, values, np.nan))
        span = math.log(span[0]), math.log(span[1])
    placed: Array = (values - span[0]) / (span[1] - span[0])
    return placed.clip(0.0, 1.0).round(9)  # numbers that are equal up to rounding share a dot


def _dots(across: Array, down: Array, width: int, height: int) -> Array:
    """Return the braille bits of a line through these points, for each character."""
    drawn = np.zeros((height, width), np.bool_)
    known = np.isfinite(across) & np.isfinite(down)
    points = np.rint(np.stack([across, down], axis=1)[known]).astype(np.int64)
    drawn[points[:, 1], points[:, 0]] = True
    linked = np.diff(np.flatnonzero(known)) == 1  # points without a gap in between
    starts, steps = points[:-1][linked], np.diff(points, axis=0)[linked]
    if len(starts):
        sizes = np.abs(steps).max(axis=1) + 1  # in dots
        which = np.repeat(np.arange(len(starts)), sizes)
        place = np.arange(len(which)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        share = place / np.maximum(sizes - 1, 1)[which]
        dots = np.rint(starts[which] + steps[which] * share[:, None]).astype(np.int64)
        drawn[dots[:, 1], dots[:, 0]] = True
    cells = drawn.reshape(height // 4, 4, width // 2, 2)
    bits: Array = np.einsum("rych,yh->rc", cells, _BITS)
    return bits
