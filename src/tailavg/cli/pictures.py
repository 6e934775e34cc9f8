"""Pictures in files: curves drawn by matplotlib, and how any figure is saved."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tailavg.cli.charts import LISTED, Chart, Panel, colour_of
from tailavg.cli.common import fail
from tailavg.core.files import check_writable, whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check", "draw", "save", "write"]

DASHES = ["-", "--", ":", "-."]


def check(path: Path, option: str) -> None:
    """Fail if a picture of this name could not be drawn or written: it may be long until then."""
    if path.suffix.lower() != ".html":
        try:
            from matplotlib.figure import Figure
        except ImportError:
            fail(f"{option} needs matplotlib; install it with: pip install 'tailavg[plot]'")
        _check_kind(Figure(), path, option)
    try:
        check_writable(path)
    except OSError as error:
        fail(f"{path}: cannot write the plot: {error.strerror}")


def _check_kind(figure: Figure, path: Path, option: str) -> str:
    kind = path.suffix.removeprefix(".").lower()
    kinds = figure.canvas.get_supported_filetypes()
    if kind not in kinds:
        raise typer.BadParameter(
            f"expected a file name that ends in one of {', '.join(sorted([*kinds, 'html']))}, "
            f"got {path.name!r}",
            param_hint=option,
        )
    return kind


def draw(chart: Chart, path: Path) -> None:
    """Draw curves to a file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from tailavg.experiments.figures import LOOK

    # samples are everywhere: the legend has paper of its own; names may have a $
    style = LOOK | {"legend.frameon": True, "legend.edgecolor": "none", "legend.framealpha": 0.85}
    with rc_context(style | {"text.parse_math": False}):
        figure = Figure(figsize=(9, 0.8 + 3.6 * len(chart.panels)), layout="constrained")
        every = figure.subplots(len(chart.panels), sharex=True, squeeze=False)[:, 0]
        for axes, panel in zip(every, chart.panels, strict=True):
            _draw_panel(chart, panel, axes)
        every[0].set_title(chart.title)
        every[-1].set_xlabel(chart.x_name)
        save(figure, path, "--output")


def _draw_panel(chart: Chart, panel: Panel, axes: Axes) -> None:
    if chart.log_x:
        axes.set_xscale("log")
    if chart.log_y:
        axes.set_yscale("log", nonpositive="mask")
    listed = chart.listed(panel)
    for line in chart.drawn(panel):
        colour, shown = colour_of(chart, line), line in listed[:LISTED]
        label = chart.name_of(line) if shown else None
        if label and label.startswith("_"):  # which would hide it
            label = f" {label}"
        if line.window < 0:
            several = len(chart.runs) > 1
            thin: dict[str, Any] = {"linewidth": 0.5, "alpha": 0.3 if several else 0.55}
            axes.plot(*line.points(), color=colour, label=label, zorder=1, **thin)
            continue
        dashes = DASHES[line.window % len(DASHES)] if len(chart.runs) > 1 else "-"
        axes.plot(*line.points(), dashes, color=colour, label=label, zorder=3)
        if line.band is not None:
            axes.fill_between(*line.band, color=colour, alpha=0.2, linewidth=0, zorder=2)
    if not chart.log_x:
        axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.set_ylabel(panel.name)
    if listed:
        left = len(listed) - LISTED
        axes.legend(title=f"and {left} more" if left > 0 else None)


def save(figure: Figure, path: Path, option: str) -> None:
    """Write a figure whole; fail if its kind is not known."""
    kind = _check_kind(figure, path, option)
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    image = BytesIO()
    figure.savefig(image, format=kind, metadata=undated, dpi=150)
    write(image.getvalue(), path)


def write(data: bytes, path: Path) -> None:
    """Write a picture, whole or not at all."""
    try:
        with whole_file(path) as file:
            file.write(data)
    except OSError as error:
        fail(f"{path}: cannot write the plot: {error.strerror}")
