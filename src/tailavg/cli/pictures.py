"""Draw charts with matplotlib, and write figures to files, for `plot.py` and `profile.py`."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, simplefilter

import numpy as np
import typer

from tailavg.cli.charts import LISTED, Chart, Panel, limits
from tailavg.cli.common import fail, say
from tailavg.cli.curves import Line
from tailavg.io.files import check_writable, whole_file
from tailavg.style import LOOK, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DASHES = ["-", "--", ":", "-."]


def check(path: Path, option: str, *other_kinds: str) -> None:
    """Fail early if a picture with this name could not be drawn or written after a long run.

    `other_kinds` are file name extensions that are allowed although matplotlib does not draw them.
    """
    kind = path.suffix.removeprefix(".").lower()
    if kind not in other_kinds:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            fail(f"{option} needs matplotlib; install it with: pip install 'tailavg[plot]'")
        kinds = Figure().canvas.get_supported_filetypes()
        if kind not in kinds:
            endings = ", ".join(sorted([*kinds, *other_kinds]))
            raise typer.BadParameter(
                f"expected a file name that ends in one of {endings}, got {path.name!r}",
                param_hint=option,
            )
    try:
        check_writable(path)
    except OSError as error:
        fail(f"{path}: cannot write the plot: {error.strerror}")


def draw(chart: Chart, path: Path) -> None:
    """Draw a chart to a file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # the legend has a background, since samples may cover the whole panel
    style = LOOK | {"legend.frameon": True, "legend.edgecolor": "none", "legend.framealpha": 0.85}
    with rc_context(style), catch_warnings(record=True) as warned:
        simplefilter("always")
        figure = Figure(figsize=(9, 0.8 + 3.6 * len(chart.panels)), layout="constrained")
        column = figure.subplots(len(chart.panels), sharex=True, squeeze=False)[:, 0]
        for axes, panel in zip(column, chart.panels, strict=True):
            _draw_panel(chart, panel, axes)
        column[0].set_title(chart.title, parse_math=False)  # names may have a $
        column[-1].set_xlabel(chart.x_name, parse_math=False)
        save(figure, path)
    if any("missing from font" in str(warning.message) for warning in warned):
        say(f"{path}: the font lacks some characters of the names; a .html file can show them")


def _draw_panel(chart: Chart, panel: Panel, axes: Axes) -> None:
    if chart.log_x:
        axes.set_xscale("log", nonpositive="mask")
    else:
        axes.xaxis.set_major_formatter("{x:,.10g}")
    if chart.log_y:
        axes.set_yscale("log", nonpositive="mask")
    axes.set_ylabel(panel.name, parse_math=False)
    named = [line for line in panel.lines if line.listed]
    drawn = [line.points()[1] for line in panel.lines]
    drawn += [line.band.low for line in panel.lines if line.band is not None]
    floor = limits(drawn, log=True)[0] if chart.log_y else -np.inf  # of bands that reach below 0
    for line in panel.lines:
        style: dict[str, Any] = {"color": line.colour}
        if line in named[:LISTED]:  # a name that begins with an underscore would be hidden
            style["label"] = f" {line.name}" if line.name.startswith("_") else line.name
        if line.window < 0:
            style |= {"linewidth": 0.5, "alpha": 0.55 if line.listed else 0.3, "zorder": 1}
            _draw_line(axes, line, ".", 1, **style)
        else:
            _draw_line(axes, line, "o", 3, linestyle=DASHES[line.dashes], zorder=3, **style)
        if line.band is not None:
            x, *edges = line.band
            low, high = (np.maximum(edge, floor) for edge in edges)
            axes.fill_between(x, low, high, color=line.colour, alpha=0.2, linewidth=0, zorder=2)
    if named:
        unnamed = len(named) - LISTED
        legend = axes.legend(title=f"and {unnamed} more" if unnamed > 0 else None)
        for text in legend.get_texts():
            text.set_parse_math(False)


def _draw_line(axes: Axes, line: Line, mark: str, size: float, **style: Any) -> None:
    """Draw a line, and a mark for each point without neighbours, which a line would not show."""
    xs, ys = line.points()
    gap = np.concatenate([[True], ~np.isfinite(ys), [True]])
    alone = np.isfinite(ys) & gap[:-2] & gap[2:]
    axes.plot(xs, ys, **style)
    if alone.any():
        hidden = {"label": None, "linestyle": ""}
        axes.plot(xs[alone], ys[alone], marker=mark, markersize=size, **style | hidden)


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically, in the format that the file name says."""
    image = BytesIO()
    write_figure(figure, image, path.suffix.removeprefix(".").lower())
    write(image.getvalue(), path)


def write(data: bytes, path: Path) -> None:
    """Write a picture atomically."""
    try:
        with whole_file(path) as file:
            file.write(data)
    except OSError as error:
        fail(f"{path}: cannot write the plot: {error.strerror}")
