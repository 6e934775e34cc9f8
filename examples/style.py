"""One look for the figures of examples and docs: that of the report, and colours by meaning."""

from pathlib import Path

from matplotlib import pyplot as plt

from tailavg.experiments.figures import LOOK

ANYTIME, ANYTAIL, EXPONENTIAL = "#0083cc", "#8b2f8f", "#d55e00"
LIGHT = {ANYTIME: "#8cc8ee", EXPONENTIAL: "#f5b488"}  # a shorter window of the same kind
DARK = {ANYTIME: "#00507d", EXPONENTIAL: "#8f3f00"}  # a longer one
EXACT = "#8a8a8a"
RAW = "#bdbdbd"  # no average: the last iterate
OTHERS = "#009e73", "#e69f00", "#cc79a7"  # for what has no colour of its own

plt.switch_backend("Agg")
plt.rcParams.update(LOOK)


def save(figure: plt.Figure, path: Path) -> None:
    """Write a figure as SVG or PNG, with no date in it: the same data give the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nameless = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(path, dpi=150, metadata=nameless)
    plt.close(figure)
