"""A chart as one HTML file that can be zoomed, with nothing to fetch."""

from __future__ import annotations

import base64
import json
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from tailavg.cli.charts import Chart, Panel, colour_of
from tailavg.cli.curves import Line
from tailavg.numpy.arithmetic import Array

__all__ = ["page"]


def page(chart: Chart) -> str:
    """The text of the page."""
    template = (files("tailavg.cli") / "page.html").read_text(encoding="utf-8")
    data = {
        "title": chart.title,
        "x": chart.x_name,
        "logX": chart.log_x,
        "logY": chart.log_y,
        "panels": [{"name": panel.name, "lines": _lines(chart, panel)} for panel in chart.panels],
    }
    told = json.dumps(data).replace("<", "\\u003c")
    name = escape(chart.title or ", ".join(panel.name for panel in chart.panels))
    return template.replace("{{title}}", name).replace("{{data}}", told)


def _lines(chart: Chart, panel: Panel) -> list[dict[str, Any]]:
    several = len(chart.runs) > 1
    return [
        {
            "name": chart.name_of(line),
            "colour": colour_of(chart, line),
            "raw": line.window < 0,
            "alpha": 1 if line.window >= 0 else 0.2 if several else 0.5,
            "dashes": line.window % 4 if several and line.window > 0 else 0,
            "now": _number(line.now),
            "error": _number(line.error),
            **_points(line),
        }
        for line in chart.drawn(panel)
    ]


def _points(line: Line) -> dict[str, Any]:
    xs, ys = line.points()
    told: dict[str, Any] = {"xs": _packed(xs, "<f8"), "ys": _packed(ys, "<f4")}
    if line.band is not None:
        x, low, high = line.band
        told["band"] = [_packed(x, "<f8"), _packed(low, "<f4"), _packed(high, "<f4")]
    return told


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _packed(values: Array, dtype: str) -> str:
    with np.errstate(over="ignore"):
        return base64.b64encode(values.astype(dtype).tobytes()).decode()
