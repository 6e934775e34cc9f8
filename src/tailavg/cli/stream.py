"""`tailavg stream`: average numbers from a pipe or a file, line by line.

Input is read in blocks of the lines that have arrived: one line if it is slow, thousands if it is
fast. Many lines of plain numbers are handled as arrays, any others row by row.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tailavg import AnyTail, AnytimeWindow, TailAverage
from tailavg.cli.common import Method, fail, parse_rule, parse_windows, window_name
from tailavg.cli.lines import (
    NUMBER,
    Array,
    CsvInput,
    JsonInput,
    PlainInput,
    Row,
    csv_line,
    decode,
    format_numbers,
    short,
)
from tailavg.core.files import whole_file
from tailavg.core.rules import Rule
from tailavg.core.state import plain
from tailavg.core.windows import Growing, Window

__all__ = ["Output", "stream"]

BLOCK = 1 << 20  # the most bytes to read before answering
MANY = 30  # from this many lines on, arrays are faster
STATE = {"format": "tailavg stream", "version": 2}

Reads = list[tuple[Rule, Window | None]]
"""For each average of a column: its rule, and the window to read if the rule has none."""


class Output(StrEnum):
    """What to write: averages alone, or after the columns of the input."""

    plain = "plain"
    csv = "csv"
    jsonl = "jsonl"


def stream(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The file to read; - is standard input.")
    ] = "-",
    window: Annotated[
        str | None,
        typer.Option(
            "--window",
            "-w",
            help="How much to average: 100 is the last hundred, 0.25 the last quarter; "
            "1 is the last number, 1.0 all of them.",
        ),
    ] = None,
    windows: Annotated[
        str | None,
        typer.Option(help="Several windows at once, such as 0.1,0.25,1.0; replaces --window."),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option("--column", "-c", help="Read CSV with a header, and average this column."),
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option("--field", "-f", help="Read JSON lines, and average this field."),
    ] = None,
    by: Annotated[
        str | None, typer.Option(help="Keep one average for each value of this column or field.")
    ] = None,
    method: Annotated[Method, typer.Option(help="How to average.")] = Method.anytime,
    accumulators: Annotated[
        int | None,
        typer.Option(
            help="How many accumulators the anytime method keeps: by default 3; "
            "with --windows, 12 for all fractions together, and at least 6."
        ),
    ] = None,
    at_most: Annotated[
        int | None, typer.Option(help="The largest window that a fraction grows to.")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Answer only every N-th number.")] = 1,
    output: Annotated[
        Output,
        typer.Option(help="Averages alone, or CSV or JSON lines with the columns of the input."),
    ] = Output.plain,
    state: Annotated[
        Path | None, typer.Option(help="Resume from this file if it exists, and save to it.")
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip rows that cannot be read, and report how many.")
    ] = False,
) -> None:
    """Average numbers as they arrive: one line in, one average out.

    Reads one number per line, CSV with a header (--column) or JSON lines (--field); both options
    may be repeated. Writes averages with 12 significant digits.

    Examples: tail -f train.log | tailavg stream --window 0.25

    tailavg stream --windows 0.1,0.25,0.5,1.0 --column loss --output csv log.csv

    Exit codes: 0 at the end of the input, 1 for bad data or files, 2 for a wrong command line,
    130 after Ctrl-C and 143 after SIGTERM, both with the state saved.
    """
    chosen = parse_windows(window, windows, at_most)
    if windows is None:
        reads: Reads = [(parse_rule(chosen[0], method, accumulators), None)]
    else:
        reads = _share(chosen, method, accumulators)
    if column and fields:
        raise typer.BadParameter(
            "--column reads CSV, --field reads JSON lines: use only one of them"
        )
    if by is not None and not (column or fields):
        raise typer.BadParameter("--by needs --column or --field")
    kind = CsvInput if column else JsonInput if fields else PlainInput
    source = kind(list(dict.fromkeys(column or fields or ["value"])), by)
    if windows is not None:
        source.suffixes = [f"_{window_name(one)}" for one in chosen]
    try:
        os.fstat(1)  # if it is closed, the next open file would take its number
    except OSError as error:
        fail(f"standard output: {error.strerror}")
    blocks = Blocks(file)
    session = Session(reads, source, output, every, skip_bad)
    if state is not None:
        session.load(state)
    try:
        with np.errstate(all="ignore"):
            for block in blocks:
                _write(session.answer(block))
                if session.error:
                    break
    except BrokenPipeError:  # the reader has gone, as in `| head`
        blocks.signal = None
    except OSError as error:
        fail(f"standard output: {error.strerror}")
    if state is not None:
        session.save(state)
    _finish(session, blocks.signal, state)


def _share(windows: list[Window], method: Method, accumulators: int | None) -> Reads:
    """Read several windows, all fractions from one set of blocks."""
    if method is not Method.anytime:
        raise typer.BadParameter(f"--method {method} goes with --window, not with --windows")
    fractions = [window.c for window in windows if isinstance(window, Growing)]
    if accumulators is not None and not fractions:
        raise typer.BadParameter("--accumulators goes with fractions in --windows, got counts only")
    shortest = min(fractions, default=1.0)
    try:
        shared = AnyTail(
            12 if accumulators is None else accumulators, shortest if shortest < 1.0 else 0.5
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    # a count would become a fraction that is too short
    return [
        (shared, window) if isinstance(window, Growing) else (AnytimeWindow(window), None)
        for window in windows
    ]


def _finish(session: Session, stopped: int | None, state: Path | None) -> None:
    """Report skipped rows and errors, and exit with the matching code."""
    saved = "" if state is None else f"; the state so far is in {state}"
    if session.bad:
        rows = "1 row" if session.bad == 1 else f"{session.bad} rows"
        typer.echo(f"tailavg: skipped {rows}, the first is {session.first_bad}", err=True)
    if session.error:
        fail(f"{session.error}; fix it, or skip such rows with --skip-bad{saved}")
    if stopped is not None:
        typer.echo(f"tailavg: stopped after line {session.lines}{saved}", err=True)
        raise typer.Exit(128 + stopped)


def _write(data: bytes) -> None:
    """Write all data to standard output at once."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(1, rest) :]
        except BlockingIOError:  # another process made the pipe non-blocking
            select.select([], [1], [])


class Blocks:
    """The input in blocks of complete lines, until it ends or a signal arrives.

    A block is what has arrived. A signal takes effect between blocks; a second one, immediately.
    """

    def __init__(self, file: str) -> None:
        self.name = "standard input" if file == "-" else file
        try:
            self._input = 0 if file == "-" else os.open(file, os.O_RDONLY)
            os.fstat(self._input)
        except OSError as error:
            fail(f"{self.name}: {error.strerror}")
        self.signal: int | None = None
        if os.name == "posix":
            self._wake, write_end = os.pipe()
            os.set_blocking(write_end, False)
            signal.set_wakeup_fd(write_end)
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, lambda number, _: signal.signal(number, signal.SIG_DFL))

    def __iter__(self) -> Iterator[bytes]:
        """The blocks. A last line without a line end gets one, unless a signal cut it short."""
        rest: list[bytes] = []
        while chunk := self._read():
            head, end, tail = chunk.rpartition(b"\n")
            if end:
                yield b"".join([*rest, head, end])
                rest = []
            rest.append(tail)
        last = b"".join(rest)
        if last and self.signal is None:
            yield last + b"\n"

    def _read(self) -> bytes:
        """What has arrived, at least one byte; nothing at the end of the input."""
        parts: list[bytes] = []
        size = 0
        try:
            while size < BLOCK and self._ready(0 if parts else None):
                part = os.read(self._input, BLOCK - size)
                if not part:
                    break
                parts.append(part)
                size += len(part)
        except OSError as error:
            fail(f"{self.name}: {error.strerror}")
        return b"".join(parts)

    def _ready(self, timeout: float | None) -> bool:
        """Whether there is something to read before the timeout, and no signal has arrived."""
        if os.name != "posix":  # where select cannot wait for a pipe
            return timeout is None
        if self.signal is not None:
            return False
        ready, _, _ = select.select([self._input, self._wake], [], [], timeout)
        if self._wake in ready:
            self.signal = os.read(self._wake, 1)[0]
        return self.signal is None and bool(ready)


class Series:
    """The averages of one column."""

    def __init__(self, reads: Reads, averages: list[TailAverage] | None = None) -> None:
        rules = list(dict.fromkeys(rule for rule, _ in reads))
        if averages is None:
            averages = [TailAverage(rule) for rule in rules]
        if [average.rule for average in averages] != rules:
            raise ValueError(f"expected averages of {rules}, got {averages}")
        if len({average.count for average in averages}) > 1:
            raise ValueError(f"expected averages of equally many numbers, got {averages}")
        self.averages = averages
        self.reads = [(averages[rules.index(rule)], window) for rule, window in reads]

    @property
    def count(self) -> int:
        """The number of samples so far."""
        return self.averages[0].count

    def update(self, x: float) -> None:
        """Take one sample."""
        for average in self.averages:
            average.update(x)

    def values(self) -> list[float]:
        """The current averages."""
        return [average.value(window) for average, window in self.reads]

    def scan(self, xs: Array) -> Array:
        """Take samples, and return the averages after each, one row per sample."""
        rows = np.empty((len(xs), len(self.reads)))
        for average in self.averages:
            places = [i for i, (its, _) in enumerate(self.reads) if its is average]
            windows: Any = [self.reads[i][1] for i in places]
            shared = isinstance(average.rule, AnyTail)
            rows[:, places] = np.atleast_2d(average.scan(xs, windows if shared else None)).T
        return rows


@dataclass
class Session:
    """The state between input and output: the averages, and how far the input has been read."""

    reads: Reads
    source: PlainInput
    output: Output
    every: int
    skip_bad: bool
    series: dict[str, list[Series]] = field(default_factory=dict)  # by key
    lines: int = 0  # read so far
    opened: bool = False  # whether any input has been read
    headed: bool = False  # whether the header was written, now or before a resume
    bad: int = 0  # skipped rows
    first_bad: str = ""
    error: str = ""  # why the session cannot go on

    def answer(self, block: bytes) -> bytes:
        """Take a block of lines, and return the output."""
        if b"\r" in block:
            block = block.replace(b"\r\n", b"\n")
        if not self.opened:
            rows = self.source.take_header(block.removeprefix(b"\xef\xbb\xbf"))
            self.opened = True
            self.lines = block.count(b"\n") - rows.count(b"\n")
            block = rows
        text = self._answer_rows(block)
        if self.output is Output.csv and self.source.names and not self.headed:
            self.headed = True
            header = csv_line([*self.source.names, *self.source.averages])
            text = header.encode(errors="surrogateescape") + b"\n" + text
        return text

    def _answer_rows(self, block: bytes) -> bytes:
        """The output for rows: as arrays if they are many and plain, otherwise one by one."""
        many = self.source.by is None and block.count(b"\n") >= MANY
        if many and self.output is not Output.jsonl:
            try:
                numbers = self.source.numbers(block)
            except ValueError:
                pass
            else:
                self.lines += len(numbers)
                averages, shown = self._scan(numbers)
                text = format_numbers(averages)
                if self.output is Output.plain:
                    return text
                answers = text.replace(b"\t", b",").split(b"\n")[:-1]
                pairs = zip(block.split(b"\n")[:-1][shown], answers, strict=True)
                return b"".join([b"%b,%b\n" % pair for pair in pairs])
        rows = self._rows(block)
        if many and rows:
            averages, shown = self._scan(np.array([row.numbers for row in rows]))
            lines = list(map(self._line, rows[shown], averages.tolist()))
        else:
            lines = [self._line(row, now) for row in rows if (now := self._step(row))]
        return "".join(lines).encode(errors="surrogateescape")

    def _scan(self, numbers: Array) -> tuple[Array, slice]:
        """Take rows of numbers; return the averages to show, and the rows they belong to."""
        series = self._series("")
        shown = slice(-(series[0].count + 1) % self.every, None, self.every)
        columns = [one.scan(xs) for one, xs in zip(series, numbers.T, strict=True)]
        return np.concatenate(columns, axis=1)[shown], shown

    def _step(self, row: Row) -> list[float]:
        """Take one row; return the averages after it, or none if they are not shown."""
        series = self._series(row.key)
        for one, x in zip(series, row.numbers, strict=True):
            one.update(x)
        if series[0].count % self.every:
            return []
        return [average for one in series for average in one.values()]

    def _line(self, row: Row, averages: list[float]) -> str:
        """A line of the output: the columns that pass through, and the averages."""
        texts = [NUMBER % average for average in averages]
        if self.output is Output.csv:
            return ",".join([self.source.csv_cells(row), *texts]) + "\n"
        if self.output is Output.plain:
            return "\t".join(texts if self.source.by is None else [row.key, *texts]) + "\n"
        pairs = zip(self._json_names, texts, strict=True)
        cells = ", ".join([f"{name}: {_json_text(text)}" for name, text in pairs])
        return f"{self.source.json_object(row)[:-1].rstrip()}, {cells}}}\n"

    @cached_property
    def _json_names(self) -> list[str]:
        return [json.dumps(name, ensure_ascii=False) for name in self.source.averages]

    def _rows(self, block: bytes) -> list[Row]:
        """The rows of a block; without --skip-bad, up to the first bad one."""
        rows = []
        for line in decode(block).split("\n")[:-1]:
            self.lines += 1
            if not line.strip():
                continue
            try:
                rows.append(self.source.parse(line))
            except ValueError as error:
                told = f"line {self.lines}: {short(line)}: {error}"
                if not self.skip_bad:
                    self.error = told
                    break
                self.bad += 1
                self.first_bad = self.first_bad or told
        return rows

    def _series(self, key: str) -> list[Series]:
        """The averages of a key, by column."""
        if key not in self.series:
            self.series[key] = [Series(self.reads) for _ in self.source.columns]
        return self.series[key]

    def _options(self) -> dict[str, Any]:
        """The options that a state must have been made with."""
        return {
            "rule": [plain(rule) for rule in dict.fromkeys(rule for rule, _ in self.reads)],
            "input": self.source.kind,
            "columns": self.source.columns,
            "by": self.source.by,
            "output": str(self.output),
            "averages": self.source.averages,
        }

    @np.errstate(all="ignore")
    def load(self, path: Path) -> None:
        """Resume from a state, if the file exists."""
        if not os.access(path.parent, os.W_OK):
            fail(f"{path}: expected a writable folder for the state, got {path.parent}")
        try:
            saved = json.loads(path.read_text())
            if {key: saved[key] for key in STATE} != STATE:
                raise ValueError(f"format {saved['format']!r}, version {saved['version']!r}")
            for name, value in self._options().items():
                if saved["options"][name] != value:
                    fail(
                        f"{path}: the state was made with other options: {name} was "
                        f"{saved['options'][name]}, is {value}; use the same, or another file"
                    )
            self.source.names, self.headed = saved["names"], bool(saved["headed"])
            if self.source.names is not None:
                self.source.check_names()
            for key, series in saved["series"].items():
                self.series[key] = [self._restored(one) for one in series]
                if len(series) != len(self.source.columns):
                    raise ValueError(f"{len(series)} averages of {self.source.columns}")
        except FileNotFoundError:
            return
        except OSError as error:
            fail(f"{path}: {error.strerror}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            fail(
                f"{path}: expected a state saved by tailavg stream, got: {error!r}; "
                "move the file away to start over"
            )

    def _restored(self, saved: list[dict[str, Any]]) -> Series:
        """A saved series; raise a ValueError or TypeError if it is not valid."""
        series = Series(self.reads, [TailAverage.from_state_dict(average) for average in saved])
        if not all(isinstance(average, float) for average in series.values()):
            raise ValueError(f"expected averages of numbers, got {series.averages}")
        return series

    def save(self, path: Path) -> None:
        """Write the state, whole or not at all."""
        series = {
            key: [[average.state_dict() for average in one.averages] for one in series]
            for key, series in self.series.items()
        }
        state = STATE | {
            "options": self._options(),
            "names": self.source.names,
            "headed": self.headed,
            "series": series,
        }
        try:
            with whole_file(path) as file:
                file.write(json.dumps(state).encode())
        except OSError as error:
            fail(f"{path}: cannot save the state: {error.strerror}")


def _json_text(text: str) -> str:
    return "null" if text[-1] in "nf" else text
