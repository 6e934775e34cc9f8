"""Draw a chart as a zoomable, self-contained HTML page. `plot.py` calls `page`."""

from __future__ import annotations

import base64
import json
import re
from html import escape
from importlib.resources import files
from typing import Any

from tailavg.cli.charts import Chart, number, with_error
from tailavg.cli.curves import Line
from tailavg.numpy.arithmetic import Array


def page(chart: Chart) -> str:
    """Return the HTML of the page."""
    template = (files("tailavg.cli") / "page.html").read_text(encoding="utf-8")
    data = {
        "x": chart.x_name,
        "logX": chart.log_x,
        "logY": chart.log_y,
        "panels": [
            {"name": panel.name, "lines": list(map(_line, panel.lines))} for panel in chart.panels
        ],
    }
    values = {
        "{{title}}": escape(chart.title or ", ".join(panel.name for panel in chart.panels)),
        "{{data}}": json.dumps(data).replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{\w+\}\}", lambda name: values[name[0]], template)


def _line(line: Line) -> dict[str, Any]:
    samples = line.window < 0
    xs, ys = line.points()
    data = {
        "name": line.name,
        "colour": line.colour,
        "raw": samples,
        "alpha": 1 if not samples else 0.5 if line.listed else 0.2,
        "dashes": 0 if samples else line.dashes,
        "now": number(line.now) if samples else with_error(line.now, line.error),
        "xs": _packed(xs),
        "ys": _packed(ys),
    }
    return data if line.band is None else {**data, "band": list(map(_packed, line.band))}


def _packed(values: Array) -> str:
    return base64.b64encode(values.astype("<f8").tobytes()).decode()
