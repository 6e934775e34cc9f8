"""A chart as one HTML file that can be zoomed, with nothing to fetch."""

from __future__ import annotations

import base64
import json
import re
from html import escape
from importlib.resources import files
from typing import Any

from tailavg.cli.charts import Chart, Panel, colour_of, number, with_error
from tailavg.cli.curves import Line
from tailavg.numpy.arithmetic import Array


def page(chart: Chart) -> str:
    """The text of the page."""
    template = (files("tailavg.cli") / "page.html").read_text(encoding="utf-8")
    data = {
        "x": chart.x_name,
        "logX": chart.log_x,
        "logY": chart.log_y,
        "panels": [{"name": panel.name, "lines": _lines(chart, panel)} for panel in chart.panels],
    }
    told = json.dumps(data).replace("<", "\\u003c")
    name = escape(chart.title or ", ".join(panel.name for panel in chart.panels))
    filled = {"{{title}}": name, "{{data}}": told}
    return re.sub(r"\{\{\w+\}\}", lambda found: filled[found[0]], template)


def _lines(chart: Chart, panel: Panel) -> list[dict[str, Any]]:
    several = len(chart.runs) > 1
    return [
        {
            "name": chart.name_of(line),
            "colour": colour_of(chart, line),
            "raw": line.window < 0,
            "alpha": 1 if line.window >= 0 else 0.2 if several else 0.5,
            "dashes": line.window % 4 if several and line.window > 0 else 0,
            "now": number(line.now) if line.window < 0 else with_error(line.now, line.error),
            **_points(line),
        }
        for line in chart.drawn(panel)
    ]


def _points(line: Line) -> dict[str, Any]:
    xs, ys = line.points()
    told: dict[str, Any] = {"xs": _packed(xs), "ys": _packed(ys)}
    if line.band is not None:
        told["band"] = [_packed(each) for each in line.band]
    return told


def _packed(values: Array) -> str:
    return base64.b64encode(values.astype("<f8").tobytes()).decode()
