"""`tailavg plot`: curves and their tail averages, in a file or in the terminal, live if asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import numpy as np
import typer

from tailavg.cli import options, signals
from tailavg.cli.blocks import Blocks
from tailavg.cli.charts import Chart, Panel, printable, styled
from tailavg.cli.common import fail, say
from tailavg.cli.curves import Track
from tailavg.cli.events import has_events, read_events
from tailavg.cli.lines import Rows, choose_input, has_many_lines
from tailavg.cli.options import Method, parse_rule, parse_windows
from tailavg.cli.page import page
from tailavg.cli.pictures import check, draw, write
from tailavg.cli.signals import WAITING, Act
from tailavg.core.windows import Growing, Window
from tailavg.numpy.arithmetic import Array
from tailavg.numpy.keyed import part_of

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
    window: Annotated[str | None, options.WINDOW] = None,
    windows: Annotated[str | None, options.WINDOWS] = None,
    column: Annotated[list[str] | None, options.COLUMN] = None,
    fields: Annotated[list[str] | None, options.FIELD] = None,
    by: Annotated[str | None, options.BY] = None,
    x: Annotated[
        str | None,
        typer.Option(
            help="The column or field of the horizontal axis; otherwise rows are counted."
        ),
    ] = None,
    method: Annotated[Method, options.METHOD] = Method.anytime,
    accumulators: Annotated[
        int | None,
        typer.Option(
            max=10_000,
            metavar="N",
            help="How many accumulators the anytime method keeps; by default 12.",
        ),
    ] = None,
    at_most: Annotated[int | None, options.AT_MOST] = None,
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
    skip_bad: Annotated[bool, options.SKIP_BAD] = False,
) -> None:
    """Draw curves and their tail averages.

    Reads what `tailavg stream` reads: one number per line, CSV (--column) or
    JSON lines (--field), of any length, in little memory; and TensorBoard's
    event files or their folders (--column is then a tag). Several columns are
    drawn below one another. The window is 0.25 unless one is given.

    Examples: tailavg plot train.csv --column loss --windows 0.1,1000 -o loss.svg

    tail -f train.log | tailavg plot --live

    After Ctrl-C, what has arrived is drawn, and the exit code is 130.
    """
    parsed = parse_windows(window, windows, at_most, options.DEFAULT_WINDOW)
    if accumulators is None and method is Method.anytime:
        accumulators = ACCUMULATORS
    rules = [parse_rule(each, method, accumulators) for each in parsed]
    names = choose_input(column, fields, by).columns
    inputs = files or ["-"]
    has_steps = any(map(has_events, inputs))
    if live and output is not None:
        raise typer.BadParameter("--live draws in the terminal: use it without --output")
    if x is not None and not (column or fields):
        raise typer.BadParameter("--x needs --column or --field")
    if x in names:
        raise typer.BadParameter(f"--x: expected another column than those to draw, got {x!r}")
    if len(names) > PANELS:
        raise typer.BadParameter(f"expected at most {PANELS} columns to draw, got {len(names)}")
    if has_steps and (not column or by is not None or x is not None):
        raise typer.BadParameter(
            "choose a tag of event files with --column; --by and --x do not apply to them"
        )
    if output is not None:
        check(output, "--output", "html")
    bins = BINS if output is None else DETAIL.get(output.suffix.lower(), BINS)
    banded = band and method is Method.anytime
    titles = [window_title(each) for each in parsed]
    curves = Curves(names, x, titles, raw, partial(Track, rules, bins, log_x, banded, after))
    counted = "step" if has_steps else "row" if column or fields else "sample"
    chart = Chart(
        title=printable(_title(files or []) if title is None else title),
        x_name=printable(x or "") or counted,
        log_x=log_x,
        log_y=log_y,
    )
    screen = Screen(chart, curves) if output is None else None
    with screen.live() if screen and live else nullcontext():
        for file, label in zip(inputs, _labels(inputs), strict=True):
            if has_events(file):
                curves.take_events(label, file)
                continue
            columns = names if x is None else [x, *names]
            source = choose_input(column and columns, fields and columns, by)
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
            if output is None:
                assert screen is not None
                screen.finish()
            elif output.suffix.lower() == ".html":
                write(page(chart).encode(), output)
            else:
                draw(chart, output)
    if number is not None:
        raise typer.Exit(128 + number)


def window_title(window: Window) -> str:
    """Describe a window in words.

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
    """Name each file: without its folder, unless another has the same name."""
    if len(files) == 1:
        return [""]
    names = [Path(_name(file)).name for file in files]
    if len(set(names)) < len(files):
        names = [_name(file) for file in files]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})"
        for i, name in enumerate(names)
    ]


def _read(file: str, rows: Rows, pause: float | None) -> Iterator[tuple[Array, list[str]]]:
    """Yield the numbers and keys of each block of a file; none in a pause."""
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
        windows: list[str],
        raw: bool,
        new_track: Callable[[], Track],
    ) -> None:
        self.names, self._x, self._windows, self._raw = names, x, windows, raw
        self._new_track = new_track
        self.runs: dict[tuple[str, str], list[Track]] = {}

    def take_events(self, label: str, file: str) -> None:
        """Take all of an event file; each of its columns has steps of its own."""
        curves = read_events(file, self.names)
        for track, (steps, values) in zip(self._tracks(label, ""), curves, strict=True):
            track.take(steps, values)

    @np.errstate(all="ignore")
    def take(self, file: str, numbers: Array, keys: list[str]) -> None:
        """Take rows of a file; with keys, each for its own run."""
        if not len(numbers):
            return
        if not keys:
            self._extend(self._tracks(file, ""), numbers)
            return
        codes, names, _ = part_of(keys, numbers[:, 0])
        for code, key in enumerate(names):
            self._extend(self._tracks(file, str(key)), numbers[codes == code])

    def _extend(self, tracks: list[Track], numbers: Array) -> None:
        if self._x is None:
            xs: Array = tracks[0].count + np.arange(1.0, len(numbers) + 1)
        else:
            xs, numbers = numbers[:, 0], numbers[:, 1:]
        for track, ys in zip(tracks, numbers.T, strict=True):
            track.take(xs, ys)

    def _tracks(self, file: str, key: str) -> list[Track]:
        tracks = self.runs.get((file, key))
        if tracks is None:
            if len(self.runs) == RUNS:
                fail(f"expected at most {RUNS} runs to draw, got more; draw fewer")
            tracks = self.runs[file, key] = [self._new_track() for _ in self.names]
        return tracks

    def drawn_in(self, chart: Chart) -> Chart:
        """Return the chart, with the curves as they are now."""
        runs = [printable(": ".join(filter(None, run))) or "(no name)" for run in self.runs]
        chart.panels = [Panel(printable(name), []) for name in self.names]
        for run, tracks in enumerate(self.runs.values()):
            for panel, track in zip(chart.panels, tracks, strict=True):
                lines = track.lines() if self._raw else track.lines()[1:]
                panel.lines += [styled(line, run, runs, self._windows) for line in lines]
        for panel in chart.panels:
            panel.lines.sort(key=lambda line: line.window >= 0)  # averages cover samples
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
        """Return a context in which each picture replaces the one before."""
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
