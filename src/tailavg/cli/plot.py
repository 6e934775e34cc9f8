"""`tailavg plot`: draw curves and their tail averages, in a file or in the terminal.

Read `plot` first. It reads blocks of rows into `Curves`, and draws them with `Chart`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import numpy as np
import typer

from tailavg.cli import options, signals
from tailavg.cli.blocks import Blocks
from tailavg.cli.cells import MICRO, datetimes
from tailavg.cli.charts import Chart, Panel, printable, styled
from tailavg.cli.common import fail, say
from tailavg.cli.curves import BandKind, Track
from tailavg.cli.lines import Block, Rows, choose_input
from tailavg.cli.options import Method, parse_reads, parse_windows, window_name
from tailavg.cli.page import page
from tailavg.cli.pictures import check, draw, write
from tailavg.cli.records import STEP, has_records, record_lines
from tailavg.cli.signals import WAITING, Act
from tailavg.core.elapsed import Elapsed
from tailavg.core.windows import Growing, Window
from tailavg.numpy.arithmetic import Array
from tailavg.numpy.average import NanPolicy
from tailavg.numpy.keyed import part_of

ACCUMULATORS = 12  # for each window: close to it, and enough blocks for a standard error
DETAIL = {".html": 8192}  # the most bins of a curve that can be zoomed
BINS = 2048  # the most bins of other curves
REDRAWN = 0.25  # seconds between pictures
RUNS = 200  # the most runs
PANELS = 20  # the most columns


def plot(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILES", help="The files to read, one run each; - is stdin."),
    ] = None,
    window: Annotated[str | None, options.WINDOW] = None,
    windows: Annotated[str | None, options.WINDOWS] = None,
    column: Annotated[list[str] | None, options.COLUMN] = None,
    fields: Annotated[list[str] | None, options.FIELD] = None,
    match: Annotated[list[str] | None, options.MATCH] = None,
    regex: Annotated[str | None, options.REGEX] = None,
    delimiter: Annotated[str | None, options.DELIMITER] = None,
    by: Annotated[str | None, options.BY] = None,
    x: Annotated[
        str | None,
        typer.Option(
            help="The column, field or name of the horizontal axis; by default, the row number."
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
        BandKind,
        typer.Option(
            metavar="KIND",
            help="The band around each average: error (one standard error), std (one standard "
            "deviation of the samples) or none.",
        ),
    ] = BandKind.error,
    after: Annotated[
        int,
        typer.Option(min=0, help="Skip this many numbers in the picture, but not in the averages."),
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
    nan: Annotated[NanPolicy, options.NAN] = "propagate",
    skip_bad: Annotated[bool, options.SKIP_BAD] = False,
) -> None:
    """Draw curves and their tail averages.

    Reads what `tailavg stream` reads, of any length, in little memory: one
    number per line, CSV (--column), JSON lines (--field), other text (--match,
    --regex), trainer_state.json, and TensorBoard's event files or their folders
    (--column is then a tag). Several columns are drawn below one another. The
    window is 0.25 unless one is given.

    Examples: tailavg plot train.csv --column loss --windows 0.1,1000 -o loss.svg

    tail -f train.log | tailavg plot --match loss --live

    After Ctrl-C, what has arrived is drawn, and the exit code is 130.
    """
    parsed = parse_windows(window, windows, at_most, options.DEFAULT_WINDOW, times=True)
    is_timed = any(isinstance(each, Elapsed) for each in parsed)
    if is_timed and x is None:
        raise typer.BadParameter("a window of time needs --x with the time of each row")
    if accumulators is None and method is Method.anytime:
        accumulators = ACCUMULATORS
    reads = parse_reads(parsed, method, accumulators)
    inputs = files or ["-"]
    logs = list(map(has_records, inputs))
    tags = [*(column or ()), *(fields or ())]
    if any(logs) and not tags:
        record_lines(inputs[logs.index(True)], None)  # fails with a list of the tags
    text_input = partial(choose_input, column, fields, by, match, regex, delimiter)
    log_input = partial(choose_input, None, tags, by, match, regex, delimiter)
    names = tags or text_input().columns
    if live and output is not None:
        raise typer.BadParameter("--live draws in the terminal: use it without --output")
    if x is not None and not (column or fields or match):
        raise typer.BadParameter("--x needs --column, --field or --match")
    if x in names:
        raise typer.BadParameter(f"--x: expected another column than those to draw, got {x!r}")
    if len(names) > PANELS:
        raise typer.BadParameter(f"expected at most {PANELS} columns to draw, got {len(names)}")
    if output is not None:
        check(output, "--output", "html")
    bins = BINS if output is None else DETAIL.get(output.suffix.lower(), BINS)
    if band is BandKind.error and method not in (Method.anytime, Method.freshest):
        band = BandKind.none  # no blocks to estimate an error from
    titles = [window_title(each) for each in parsed]
    track = partial(
        Track, reads, bins, log_x, band, after, nan="omit" if nan == "omit" else "propagate"
    )
    curves = Curves(names, titles, raw, track, has_times=is_timed)
    counted = STEP if any(logs) else "row" if column or fields or match or regex else "sample"
    chart = Chart(
        title=printable(_title(files or []) if title is None else title),
        x_name=printable(f"{x}, seconds from the first row" if is_timed else x or "") or counted,
        log_x=log_x,
        log_y=log_y,
    )
    screen = Screen(chart, curves) if output is None else None
    with screen.live() if screen and live else nullcontext():
        for file, is_log, label in zip(inputs, logs, _labels(inputs), strict=True):
            axis = STEP if is_log and x is None else x
            source = (log_input if is_log else text_input)(axis=axis, times=is_timed)
            source.suffixes = []  # no average is added to the columns, so no name is refused
            rows = Rows(source, skip_bad, refuse_nan=nan == "raise")
            for block in _read(file, is_log, rows, REDRAWN if live else None):
                curves.take(label, *block, has_axis=axis is not None)
                if screen and live:
                    screen.redraw()
            for note in rows.notes():
                say(f"{_name(file)}: {note}" if files else note)
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


def window_title(window: Window | Elapsed) -> str:
    """Return a window in words.

    Examples:
        >>> window_title(Growing(0.125, at_most=5000))
        'the last 12.5 %, at most 5,000'
    """
    if isinstance(window, Elapsed):
        return f"the last {window_name(window)}"
    if not isinstance(window, Growing):
        return f"the last {window.k:,}"
    most = "" if window.at_most is None else f", at most {window.at_most:,}"
    return f"the last {100 * window.c:.6g} %{most}" if window.c < 1 else f"all{most}"


def _name(file: str) -> str:
    return "standard input" if file == "-" else file


def _title(files: list[str]) -> str:
    return ", ".join(map(_name, files)) if len(files) <= 3 else f"{len(files)} files"


def _labels(files: list[str]) -> list[str]:
    """Return a name for each file: without its folder, unless names are then equal."""
    if len(files) == 1:
        return [""]
    names = [Path(_name(file)).name for file in files]
    if len(set(names)) < len(files):
        names = [_name(file) for file in files]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})"
        for i, name in enumerate(names)
    ]


def _read(file: str, is_log: bool, rows: Rows, pause: float | None) -> Iterator[Block]:
    """Yield each block of a file as a `Block`. Yield an empty `Block` in a pause."""
    signals.act(Act.stop)
    source = rows.source
    if is_log:
        yield rows.block(rows.body(record_lines(file, [*source.columns[1:], source.columns[0]])))
        return
    blocks = Blocks(file, pause, text=source.kind == "text")
    try:
        signals.act(WAITING)
        for block in blocks:
            signals.act(Act.note)
            yield rows.block(rows.body(block) if block else b"")
            if rows.error:
                break
            signals.act(WAITING)
    except OSError as error:
        fail(f"{error.filename or blocks.name}: {error.strerror}")
    finally:
        signals.act(Act.note)
        blocks.close()


@dataclass
class Run:
    """The tracks of a file or a key, one for each column, and the number of rows so far."""

    tracks: list[Track]
    rows: int = 0


class Curves:
    """All runs: one for each file and key."""

    def __init__(
        self,
        names: list[str],
        windows: list[str],
        raw: bool,
        new_track: Callable[[], Track],
        has_times: bool = False,
    ) -> None:
        self.names, self._windows, self._raw = names, windows, raw
        self._has_times = has_times  # whether the axis has times, in microseconds
        self._first: float | None = None  # the time of the first row
        self._new_track = new_track
        self.runs: dict[tuple[str, str], Run] = {}

    @np.errstate(all="ignore")
    def take(
        self, file: str, numbers: Array, keys: list[str], lacking: Array | None, has_axis: bool
    ) -> None:
        """Take rows of a file. With keys, each row belongs to the run of its key.

        `lacking` is a mask of missing numbers, or None if no number is missing.
        """
        if not len(numbers):
            return
        present = np.ones(numbers.shape, np.bool_) if lacking is None else ~lacking
        if not keys:
            self._extend(self._run(file, ""), numbers, present, has_axis)
            return
        codes, names, _ = part_of(keys, numbers[:, 0])
        for code, key in enumerate(names):
            mine = codes == code
            self._extend(self._run(file, str(key)), numbers[mine], present[mine], has_axis)

    def _extend(self, run: Run, numbers: Array, present: Array, has_axis: bool) -> None:
        xs = numbers[:, 0] if has_axis else run.rows + np.arange(1.0, len(numbers) + 1)
        run.rows += len(numbers)
        first, times = int(has_axis), None
        if self._has_times:
            self._first = float(xs[0]) if self._first is None else self._first
            times, xs = datetimes(xs), (xs - self._first) / MICRO
        for track, ys, there in zip(run.tracks, numbers.T[first:], present.T[first:], strict=True):
            track.take(xs[there], ys[there], None if times is None else times[there])

    def _run(self, file: str, key: str) -> Run:
        run = self.runs.get((file, key))
        if run is None:
            if len(self.runs) == RUNS:
                fail(f"expected at most {RUNS} runs to draw, got more; draw fewer")
            run = self.runs[file, key] = Run([self._new_track() for _ in self.names])
        return run

    def drawn_in(self, chart: Chart) -> Chart:
        """Return the chart with the present curves."""
        runs = [printable(": ".join(filter(None, run))) or "(no name)" for run in self.runs]
        chart.panels = [Panel(printable(name), []) for name in self.names]
        for number, run in enumerate(self.runs.values()):
            for panel, track in zip(chart.panels, run.tracks, strict=True):
                lines = track.lines() if self._raw else track.lines()[1:]
                panel.lines += [styled(line, number, runs, self._windows) for line in lines]
        for panel in chart.panels:
            panel.lines.sort(key=lambda line: line.window >= 0)  # averages are drawn over samples
        return chart


class Screen:
    """The terminal, and the time of its next picture."""

    def __init__(self, chart: Chart, curves: Curves) -> None:
        from rich.console import Console

        self.chart, self.curves = chart, curves
        self.console = Console(highlight=False)
        self._live: Any = None
        self._due = 0.0
        self._rows = -1  # the number of rows in the last picture

    def live(self) -> Any:
        """Return a context in which each picture replaces the one before."""
        from rich.live import Live

        self._live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
        return self._live

    def redraw(self) -> None:
        """Draw a new picture if rows have arrived and the last picture is old enough."""
        rows = sum(run.rows for run in self.curves.runs.values())
        if rows != self._rows and monotonic() >= self._due:
            self._live.update(self._picture(), refresh=True)
            self._rows, self._due = rows, monotonic() + REDRAWN

    def finish(self) -> None:
        """Draw the last picture, which stays on the screen."""
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
