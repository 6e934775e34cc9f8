"""The style of all figures: colours, matplotlib's settings, and reproducible files.

Commands and experiments use it. It does not import matplotlib itself, which is slow to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, VERMILION, GREEN, PINK = "#0083cc", "#d55e00", "#009e73", "#cc79a7"
ORANGE, SKY, PURPLE, BROWN = "#e69f00", "#56b4e9", "#8b2f8f", "#8c6d31"
COLOURS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, PURPLE, BROWN)
"""The palette of Okabe and Ito, slightly darker, and two more colours. Use them in this order."""

GREY = "#8a8f98"
INK, PAPER = "#1b1b1c", "#fefeff"
"""Unlike all other colours, so that a page can replace them with its own."""

LOOK: dict[Any, Any] = {
    "svg.hashsalt": "tailavg",  # identical files for identical data
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
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
"""Settings for `matplotlib.rc_context`."""

_UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}


def write_figure(figure: Figure, file: BinaryIO, kind: str) -> None:
    """Write a figure as "svg", "png" or another format, with the same bytes every time."""
    figure.savefig(file, format=kind, metadata=_UNDATED.get(kind), dpi=150)
