"""`tailavg plot`: curves and their tail averages, in a file or in the terminal, live if asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import numpy as np
import typer

from tailavg.cli import signals
from tailavg.cli.blocks import Blocks
from tailavg.cli.charts import Chart, Panel, printable
from tailavg.cli.common import Method, fail, parse_rule, parse_windows, say
from tailavg.cli.curves import Track
from tailavg.cli.events import has_events, read_events
from tailavg.cli.lines import Rows, choose_input, has_many_lines
from tailavg.cli.page import page
from tailavg.cli.pictures import check, draw, write
from tailavg.cli.signals import WAITING, Act
from tailavg.core.rules import WindowRule
from tailavg.core.windows import Growing, Window
from tailavg.numpy.arithmetic import Array

__all__ = ["plot"]

ACCUMULATORS = 12  # for each window: closer to it, and enough for a standard error
DETAIL = {".html": 8192}  # bins of a curve that can be zoomed
BINS = 2048
REDRAWN = 0.25  # seconds between pictures
RUNS = 200
PANELS = 20


def plot(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILES", help="The files to read, one run each; - is stdin."),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option("--window", "-w", help="How much to average: 1000 samples, or a fraction."),
    ] = None,
    windows: Annotated[
        str | None,
        typer.Option(help="Several windows, such as 0.1,0.25,1000; if none is given, 0.1."),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option("--column", "-c", help="Read CSV with a header, and draw this column."),
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option("--field", "-f", help="Read JSON lines, and draw this field."),
    ] = None,
    by: Annotated[
        str | None, typer.Option(help="Draw one curve for each value of this column or field.")
    ] = None,
    x: Annotated[
        str | None,
        typer.Option(
            help="The column or field of the horizontal axis; otherwise rows are counted."
        ),
    ] = None,
    method: Annotated[Method, typer.Option(help="How to average.")] = Method.anytime,
    accumulators: Annotated[
        int | None,
        typer.Option(
            max=10_000, help="How many accumulators the anytime method keeps; by default 12."
        ),
    ] = None,
    at_most: Annotated[
        int | None, typer.Option(help="The largest window that a fraction grows to.")
    ] = None,
    log_x: Annotated[bool, typer.Option("--log-x", help="A logarithmic horizontal axis.")] = False,
    log_y: Annotated[bool, typer.Option("--log-y", help="A logarithmic vertical axis.")] = False,
    raw: Annotated[bool, typer.Option(help="Draw the samples, thin, behind the averages.")] = True,
    band: Annotated[
        bool, typer.Option(help="Draw a band of one standard error around each average.")
    ] = True,
    after: Annotated[
        int,
        typer.Option(min=0, help="Draw only what comes after so many rows; all are averaged."),
    ] = 0,
    title: Annotated[str | None, typer.Option(help="The title of the chart.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Draw to this file: .svg, .png, .pdf, or .html to zoom; otherwise the terminal.",
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Redraw in the terminal while rows arrive.")
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip rows that cannot be read, and report how many.")
    ] = False,
) -> None:
    """Draw curves and their tail averages.

    Reads what `tailavg stream` reads: one number per line, CSV (--column) or JSON lines (--field),
    of any length, in little memory; and TensorBoard's event files or their folders (--column is
    then a tag). Several columns are drawn below one another.

    Examples: tailavg plot train.csv --column loss --windows 0.1,0.25,1000 -o loss.svg

    tail -f train.log | tailavg plot --live

    After Ctrl-C, what has arrived is drawn, and the exit code is 130.
    """
    if window is None and windows is None:
        window = "0.1"
    chosen = parse_windows(window, windows, at_most)
    several = ACCUMULATORS if accumulators is None and method is Method.anytime else accumulators
    rules = [parse_rule(one, method, several) for one in chosen]
    if live and output is not None:
        raise typer.BadParameter("--live draws in the terminal: use it without --output")
    if x is not None and not (column or fields):
        raise typer.BadParameter("--x needs --column or --field")
    if x is not None and x in (column or fields or []):
        raise typer.BadParameter(f"--x: expected another column than those to draw, got {x!r}")
    choose_input(column, fields, by)  # fails if these do not go together
    if len(column or fields or []) > PANELS:
        raise typer.BadParameter(
            f"expected at most {PANELS} columns to draw, got {len(column or fields or [])}"
        )
    if output is not None:
        check(output, "--output")
    names = list(dict.fromkeys(column or fields or ["value"]))
    suffix = "" if output is None else output.suffix.lower()
    banded = band and method is Method.anytime
    curves = Curves(names, x, rules, DETAIL.get(suffix, BINS), log_x, banded, after)
    inputs = files or ["-"]
    if (logged := any(map(has_events, inputs))) and (not column or by is not None or x is not None):
        raise typer.BadParameter(
            "event files are read with --column TAG, and without --by and --x: they have steps"
        )
    chart = Chart(
        title=printable(_title(files or []) if title is None else title),
        x_name=printable(x or "")
        or ("step" if logged else "row" if column or fields else "sample"),
        runs=[],
        windows=[window_title(one) for one in chosen],
        log_x=log_x,
        log_y=log_y,
        raw=raw,
    )
    screen = Screen(chart, curves) if output is None else None
    with screen.live() if screen and live else nullcontext():
        for file, label in zip(inputs, _labels(inputs), strict=True):
            if has_events(file):
                curves.take_events(label, file)
                continue
            columns = [*([] if x is None else [x]), *names]
            source = choose_input(columns if column else None, columns if fields else None, by)
            source.suffixes = []  # no column is added, so that none is taken
            rows = Rows(source, skip_bad)
            for numbers, keys in _read(file, rows, REDRAWN if live else None):
                curves.take(label, numbers, keys)
                if screen and live:
                    screen.redraw()
            if rows.bad:
                say(f"{_name(file)}: {rows.skipped()}" if files else rows.skipped())
            if rows.error:
                fail(f"{_name(file)}: {rows.error}")
            if signals.arrived() is not None:
                break
        number = signals.arrived()
        if number is None or curves.runs:
            signals.act(Act.stop if number is None else WAITING)
            curves.drawn_in(chart).check()
            if screen:
                screen.finish()
            elif output is not None:
                _write(chart, output)
    if number is not None:
        raise typer.Exit(128 + number)


def _write(chart: Chart, output: Path) -> None:
    if output.suffix.lower() == ".html":
        write(page(chart).encode(), output)
    else:
        draw(chart, output)


def window_title(window: Window) -> str:
    """A window in words.

    Examples:
        >>> window_title(Growing(0.125, at_most=5000))
        'the last 12.5 %, at most 5,000'
    """
    if not isinstance(window, Growing):
        return f"the last {window.k:,}"
    most = "" if window.at_most is None else f", at most {window.at_most:,}"
    return f"the last {100 * window.c:.6g} %{most}" if window.c < 1 else f"all{most}"


def _name(file: str) -> str:
    return "standard input" if file == "-" else file


def _title(files: list[str]) -> str:
    return ", ".join(map(_name, files)) if len(files) <= 3 else f"{len(files)} files"


def _labels(files: list[str]) -> list[str]:
    """A name for each file: without its folder, unless another has the same."""
    short = [Path(file).name if file != "-" else "standard input" for file in files]
    if len(files) == 1:
        return [""]
    names = short if len(set(short)) == len(files) else [_name(file) for file in files]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})"
        for i, name in enumerate(names)
    ]


def _read(file: str, rows: Rows, pause: float | None) -> Iterator[tuple[Array, list[str]]]:
    """The numbers and keys of a file, in parts, and nothing for a while in a pause."""
    signals.act(Act.stop)
    blocks = Blocks(file, pause)
    try:
        signals.act(WAITING)
        for block in blocks:
            signals.act(Act.note)
            body = rows.body(block) if block else b""
            taken = rows.take(body) if has_many_lines(body) else None
            if taken is None:
                taken = rows.arrays(rows.parse(body))
            yield taken
            if rows.error:
                break
            signals.act(WAITING)
    except OSError as error:
        fail(f"{error.filename or blocks.name}: {error.strerror}")
    finally:
        signals.act(Act.note)
        blocks.close()


class Curves:
    """The tracks of all runs: of each file and key, one for each column."""

    def __init__(
        self,
        names: list[str],
        x: str | None,
        rules: list[WindowRule],
        most: int,
        log: bool,
        band: bool,
        after: int,
    ) -> None:
        self.names, self._x = names, x
        self._made = (rules, most, log, band, after)
        self.runs: dict[tuple[str, str], list[Track]] = {}

    def take_events(self, label: str, file: str) -> None:
        """Take all of an event file; each of its columns has steps of its own."""
        curves = read_events(file, self.names)
        for track, (steps, values) in zip(self._tracks(label, ""), curves, strict=True):
            track.take(steps, values)

    def take(self, file: str, numbers: Array, keys: list[str]) -> None:
        """Take rows of a file; with keys, each for its own run."""
        if not len(numbers):
            return
        if not keys:
            self._extend(file, "", numbers)
            return
        order: dict[str, int] = {}
        codes = np.array([order.setdefault(key, len(order)) for key in keys])
        together = np.argsort(codes, kind="stable")
        parts = np.split(numbers[together], np.flatnonzero(np.diff(codes[together])) + 1)
        for key, part in zip(order, parts, strict=True):
            self._extend(file, key, part)

    @np.errstate(all="ignore")
    def _extend(self, file: str, key: str, numbers: Array) -> None:
        tracks = self._tracks(file, key)
        count = tracks[0].count
        if self._x is None:
            xs: Array = np.arange(count + 1.0, count + 1.0 + len(numbers))
        else:
            xs, numbers = numbers[:, 0], numbers[:, 1:]
        for track, ys in zip(tracks, numbers.T, strict=True):
            track.take(xs, ys)

    def _tracks(self, file: str, key: str) -> list[Track]:
        tracks = self.runs.get((file, key))
        if tracks is None:
            if len(self.runs) == RUNS:
                fail(f"expected at most {RUNS} runs to draw, got more; draw fewer")
            tracks = self.runs[file, key] = [Track(*self._made) for _ in self.names]
        return tracks

    def drawn_in(self, chart: Chart) -> Chart:
        """The chart, with the curves as they are now."""
        chart.runs = [printable(": ".join(filter(None, run))) or "(no name)" for run in self.runs]
        every = list(enumerate(self.runs.values()))
        chart.panels = [
            Panel(
                printable(name),
                [line for run, tracks in every for line in tracks[place].lines(run)],
            )
            for place, name in enumerate(self.names)
        ]
        return chart


class Screen:
    """The terminal, and when it was last drawn on."""

    def __init__(self, chart: Chart, curves: Curves) -> None:
        from rich.console import Console

        self.chart, self.curves = chart, curves
        self.console = Console(highlight=False)
        self._live: Any = None
        self._due = 0.0
        self._rows = -1  # in the last picture

    def live(self) -> Any:
        """Within this context, each picture replaces the one before."""
        from rich.live import Live

        self._live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
        return self._live

    def redraw(self) -> None:
        """Draw anew, if there is something new and the last time is a while ago."""
        rows = sum(tracks[0].count for tracks in self.curves.runs.values())
        if rows != self._rows and monotonic() >= self._due:
            self._live.update(self._picture(), refresh=True)
            self._rows, self._due = rows, monotonic() + REDRAWN

    def finish(self) -> None:
        """Draw the last picture, which stays."""
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)
        else:
            self.console.print(self._picture(), no_wrap=True, crop=False)

    def _picture(self) -> Any:
        from tailavg.cli.terminal import text

        chart = self.curves.drawn_in(self.chart)
        width, height = self.console.size
        height = min(height - 2, 24 * len(chart.panels))
        unicode = self.console.encoding.lower().startswith("utf")
        return text(chart, width, height, unicode)
