"""`tailavg stream`: numbers from a pipe or a file, and their average at every line.

Input comes in blocks of the lines that have arrived: one line when it is slow, thousands when it
is fast. A block of nothing but numbers is handled as arrays; any other, a row at a time.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tailavg import ExactWindow, TailAverage
from tailavg.cli.common import Method, fail, parse_rule, parse_window
from tailavg.cli.lines import (
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
from tailavg.files import whole_file
from tailavg.rules import Rule
from tailavg.state import plain

__all__ = ["Output", "stream"]

BLOCK = 1 << 20  # the most bytes that are read before they are answered
CUT = 15_000  # what a scan takes at once; see `Series`
STATE = {"format": "tailavg stream", "version": 1}


class Output(StrEnum):
    """What is written: averages alone, or beside the columns of the input."""

    plain = "plain"
    csv = "csv"
    jsonl = "jsonl"


def stream(
    window: Annotated[
        str,
        typer.Option(
            "--window",
            "-w",
            help="How much to average: 100 is the last hundred, 0.25 the last quarter.",
        ),
    ],
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="What to read; - is standard input.")
    ] = "-",
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
        int | None, typer.Option(help="How many the anytime method keeps; 3 if not said.")
    ] = None,
    at_most: Annotated[
        int | None, typer.Option(help="The most samples that a fraction grows to.")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Answer every N-th number only.")] = 1,
    output: Annotated[
        Output,
        typer.Option(help="Averages alone, or CSV or JSON lines beside the input's columns."),
    ] = Output.plain,
    state: Annotated[
        Path | None, typer.Option(help="Go on from this file if it is there, and save to it.")
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out rows that cannot be read, and count them.")
    ] = False,
) -> None:
    """Average numbers as they come: one line in, one average out.

    A number to a line, or CSV with a header (--column), or JSON lines (--field); both options may
    be repeated. Averages are written with 12 significant digits.

    Example: tail -f train.log | tailavg stream --window 0.25

    Exit codes: 0 at the end of the input, 1 for bad data or files, 2 for a wrong command line,
    130 after Ctrl-C and 143 after SIGTERM, both with the state saved.
    """
    rule = parse_rule(parse_window(window, at_most), method, accumulators)
    if column and fields:
        raise typer.BadParameter("--column reads CSV, --field reads JSON lines: give one of them")
    if by is not None and not (column or fields):
        raise typer.BadParameter("--by goes with --column or --field")
    kind = CsvInput if column else JsonInput if fields else PlainInput
    source = kind(list(dict.fromkeys(column or fields or ["value"])), by)
    try:
        os.fstat(1)  # if it is closed, the next file to be opened would take its place
    except OSError as error:
        fail(f"standard output: {error.strerror}")
    blocks = Blocks(file)
    session = Session(rule, source, output, every, skip_bad)
    if state is not None:
        session.load(state)
    try:
        for block in blocks:
            _write(session.answer(block))
            if session.error:
                break
    except BrokenPipeError:  # nobody reads on, as in `| head`
        blocks.signal = None
    except OSError as error:
        fail(f"standard output: {error.strerror}")
    if state is not None:
        session.save(state)
    _finish(session, blocks.signal, state)


def _finish(session: Session, stopped: int | None, state: Path | None) -> None:
    """Say what has to be said, and end with the exit code that goes with it."""
    saved = "" if state is None else f"; the state up to there is in {state}"
    if session.bad:
        rows = "1 row" if session.bad == 1 else f"{session.bad} rows"
        typer.echo(f"tailavg: skipped {rows}, the first is {session.first_bad}", err=True)
    if session.error:
        fail(f"{session.error}; mend it, or leave such rows out with --skip-bad{saved}")
    if stopped is not None:
        typer.echo(f"tailavg: stopped after line {session.lines}{saved}", err=True)
        raise typer.Exit(128 + stopped)


def _write(data: bytes) -> None:
    """Write all of it to standard output, now."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(1, rest) :]
        except BlockingIOError:  # it was left so by whoever shares it
            select.select([], [1], [])


class Blocks:
    """The input in blocks of whole lines, until it ends or a signal asks to stop.

    A block is what has arrived. A signal takes effect between two blocks; a second one, at once.
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
        """The blocks; a last line without an end gets one, unless a signal cut it short."""
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
        """What has arrived, at least a byte; nothing at the end."""
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
        """Whether there is something to read before the time is out and no signal has come."""
        if os.name != "posix":  # where a pipe cannot be waited for
            return timeout is None
        if self.signal is not None:
            return False
        ready, _, _ = select.select([self._input, self._wake], [], [], timeout)
        if self._wake in ready:
            self.signal = os.read(self._wake, 1)[0]
        return self.signal is None and bool(ready)


class Series:
    """One average, to the bit the same however its samples arrive.

    A scan rounds a little differently where it begins and ends. So scans begin at multiples of
    `cut` samples; those since the last multiple are kept, and scanned again with what follows.
    """

    def __init__(self, average: TailAverage, samples: Array, cut: int | None) -> None:
        self.average = average  # without the samples
        self.samples = samples
        self.cut = cut  # None: this rule does not round differently

    @property
    def count(self) -> int:
        """The number of samples so far."""
        return self.average.count + len(self.samples)

    def scan(self, xs: Array) -> Array:
        """Take samples, at least one, and return the average after each."""
        if self.cut is None:
            return self.average.scan(xs)
        parts = []
        while len(xs):
            known = len(self.samples)
            xs, self.samples = (
                xs[self.cut - known :],
                np.concatenate([self.samples, xs[: self.cut - known]]),
            )
            parts.append(self._scan_samples()[known:])
        return np.concatenate(parts)

    def _scan_samples(self) -> Array:
        """The averages over the samples since the last cut, which moves when they are enough."""
        n, finite = len(self.samples), np.isfinite(self.samples)
        if n == self.cut and finite.all():
            averages = self.average.scan(self.samples)
            self.samples = self.samples[:0]
            return averages
        # always scan as many, since the last digit of a sum can depend on how many follow, and
        # one by one from an infinity or NaN on, which would change the sums before it
        usual = n if finite.all() else int(finite.argmin())
        padded = np.zeros(self.cut or n)
        padded[:usual] = self.samples[:usual]
        averages = self.average.copy().scan(padded)[:n]
        if usual < n:
            average = self.average.copy()
            stepped = [_step(average, x) for x in self.samples.tolist()]
            averages[usual:] = stepped[usual:]
            if n == self.cut:
                self.average, self.samples = average, self.samples[:0]
        return averages


def _step(average: TailAverage, x: float) -> float:
    average.update(x)
    value: float = average.value()
    return value


@dataclass
class Session:
    """What goes on between input and output: the averages, and where things stand."""

    rule: Rule
    source: PlainInput
    output: Output
    every: int
    skip_bad: bool
    series: dict[str, list[Series]] = field(default_factory=dict)  # by key
    lines: int = 0  # read so far
    opened: bool = False  # whether the input has begun
    headed: bool = False  # whether the header was written, now or before the state was saved
    bad: int = 0  # rows that were skipped
    first_bad: str = ""
    error: str = ""  # why the session cannot go on

    def answer(self, block: bytes) -> bytes:
        """Take a block of lines, and return what is to be written."""
        if b"\r" in block:
            block = block.replace(b"\r\n", b"\n")
        if not self.opened:
            rows = self.source.take_header(block.removeprefix(b"\xef\xbb\xbf"))
            self.opened = True
            self.lines = block.count(b"\n") - rows.count(b"\n")
            block = rows
        with np.errstate(all="ignore"):
            text = self._answer_rows(block) if block else b""
        if self.output is Output.csv and self.source.names and not self.headed:
            self.headed = True
            header = csv_line([*self.source.names, *self.source.averages])
            text = header.encode(errors="surrogateescape") + b"\n" + text
        return text

    def _answer_rows(self, block: bytes) -> bytes:
        """The answer to rows: as arrays if all are as they should be, otherwise one by one."""
        if self.source.by is None and self.output is not Output.jsonl:
            try:
                numbers = self.source.numbers(block)
            except ValueError:
                pass
            else:
                self.lines += len(numbers)
                carried = [] if self.output is Output.plain else decode(block).split("\n")[:-1]
                return self._text(*self._scan(numbers), carried)
        rows = self._rows(block)
        if not rows:
            return b""
        carried = []
        if self.output is Output.csv:
            carried = [self.source.csv_cells(row) for row in rows]
        elif self.output is Output.jsonl:
            carried = [self.source.json_object(row) for row in rows]
        if self.source.by is None:
            return self._text(*self._scan(np.array([row.numbers for row in rows])), carried)
        averages, counts = [], []
        for row in rows:
            series = self._series(row.key)
            averages.append(
                [_step(one.average, x) for one, x in zip(series, row.numbers, strict=True)]
            )
            counts.append(series[0].count)
        if self.output is Output.plain:
            carried = [row.key for row in rows]
        return self._text(np.array(averages), np.array(counts), carried)

    def _rows(self, block: bytes) -> list[Row]:
        """The rows of a block, up to the first bad one if that is not to be skipped."""
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
        """The averages of a key, one to a column."""
        if key not in self.series:
            self.series[key] = [
                Series(TailAverage(self.rule), np.empty(0), self._cut())
                for _ in self.source.columns
            ]
        return self.series[key]

    def _cut(self) -> int | None:
        return None if isinstance(self.rule, ExactWindow) else CUT

    def _scan(self, numbers: Array) -> tuple[Array, Array]:
        """The averages after each row of numbers, and how many there were."""
        series = self._series("")
        counts = series[0].count + np.arange(1, len(numbers) + 1)
        columns = [one.scan(numbers[:, i]) for i, one in enumerate(series)]
        return np.stack(columns, axis=1), counts

    def _text(self, averages: Array, counts: Array, carried: list[str]) -> bytes:
        """Averages, beside what is carried through; of every N-th row only."""
        if self.every > 1:
            shown = np.flatnonzero(counts % self.every == 0)
            averages = averages[shown]
            carried = [carried[i] for i in shown.tolist()] if carried else []
        columns = [format_numbers(column) for column in averages.T]
        if len(columns) == 1 and not carried:
            return columns[0]
        texts = [decode(column).split("\n")[:-1] for column in columns]
        if self.output is Output.jsonl:
            names = [json.dumps(name, ensure_ascii=False) for name in self.source.averages]
            rows = [
                f"{start[:-1].rstrip()}, "
                + ", ".join(
                    f"{name}: {_json_text(text)}" for name, text in zip(names, row, strict=True)
                )
                + "}"
                for start, *row in zip(carried, *texts, strict=True)
            ]
        else:
            separator = "," if self.output is Output.csv else "\t"
            cells = [carried, *texts] if carried else texts
            rows = [separator.join(row) for row in zip(*cells, strict=True)]
        return "".join([f"{row}\n" for row in rows]).encode(errors="surrogateescape")

    def _options(self) -> dict[str, Any]:
        """What a state has to have been made with."""
        return {
            "rule": plain(self.rule),
            "input": self.source.kind,
            "columns": self.source.columns,
            "by": self.source.by,
            "output": str(self.output),
        }

    def load(self, path: Path) -> None:
        """Go on from a state, if there is one."""
        if not os.access(path.parent, os.W_OK):
            fail(f"{path}: expected a folder to save the state in, got {path.parent}")
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
                "move it away to begin anew"
            )

    def _restored(self, saved: dict[str, Any]) -> Series:
        """A series as it was saved; a ValueError or TypeError if it is not one."""
        average = TailAverage.from_state_dict(saved["average"])
        samples = np.array(saved["samples"], np.float64)
        if average.rule != self.rule or samples.ndim != 1 or len(samples) >= CUT:
            raise ValueError(f"{len(samples)} samples for {average.rule}")
        if average.count:
            float(average.value())
        return Series(average, samples, self._cut())

    def save(self, path: Path) -> None:
        """Write the state, whole or not at all."""
        series = {
            key: [
                {"average": one.average.state_dict(), "samples": one.samples.tolist()}
                for one in series
            ]
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
