"""`tailavg stream`: average numbers from a pipe or a file, line by line.

Input is read in blocks of the lines that have arrived: one line if it is slow, thousands if it is
fast. Many lines of plain numbers are handled as arrays, any others row by row.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Iterable
from contextlib import ExitStack
from enum import StrEnum
from functools import cached_property
from itertools import chain, compress
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import typer

from tailavg.cli import signals
from tailavg.cli.averages import Averages, Reads
from tailavg.cli.cells import NUMBER, Array, csv_line, decode, encode, format_numbers
from tailavg.cli.common import Method, fail, parse_rule, parse_windows, say, window_name
from tailavg.cli.lines import PlainInput, Row
from tailavg.cli.rows import Blocks, Rows, check_input, has_many_lines, source_of
from tailavg.cli.signals import Act, Stopped
from tailavg.core.rules import shared_rules
from tailavg.core.windows import NEVER, Growing, Window
from tailavg.io.files import InUseError, check_writable, locked, whole_file
from tailavg.io.state import STREAM, STREAM_VERSION, plain

__all__ = ["Output", "stream"]

Shown = slice | list[bool]  # of many lines, those that are answered
WAITING = Act.insist if os.name == "posix" else Act.stop  # what a signal does to a read or write


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
            max=10_000,
            help="How many accumulators the anytime method keeps: by default 3; "
            "with --windows, 12 for all fractions together, and at least 6.",
        ),
    ] = None,
    at_most: Annotated[
        int | None, typer.Option(help="The largest window that a fraction grows to.")
    ] = None,
    every: Annotated[
        int, typer.Option(min=1, max=NEVER, help="Answer only every N-th number.")
    ] = 1,
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
    130 after Ctrl-C, 143 after SIGTERM and 129 after SIGHUP, all with the state saved.
    """
    chosen = parse_windows(window, windows, at_most)
    if windows is None:
        reads: Reads = [(parse_rule(chosen[0], method, accumulators), None)]
    else:
        reads = _share(chosen, method, accumulators)
    source = source_of(column, fields, by)
    if windows is not None:
        source.suffixes = [f"_{window_name(one)}" for one in chosen]
    if file == "-":
        check_input()
    session = Session(reads, source, output, every, skip_bad)
    with ExitStack() as stack:
        if state is not None:
            _take(state, stack)
        signals.act(Act.stop)
        blocks = Blocks(file)
        stack.callback(blocks.close)
        if state is not None:
            session.load(state)
        failure = _answer(session, blocks)
        if state is not None:
            _save(session, state)
        signals.act(Act.note)
    _finish(session, failure, state)


def _take(state: Path, stack: ExitStack) -> None:
    """Keep other processes away from a state, or fail if it could not be saved."""
    signals.act(Act.note)
    try:
        check_writable(state)
        stack.enter_context(locked(state))
    except InUseError:
        fail(f"{state}: in use by another process; wait until it ends, or use another file")
    except OSError as error:
        fail(f"{state}: no state can be saved there: {error.strerror}")


def _answer(session: Session, blocks: Blocks) -> str | None:
    """Answer until the input ends; return what else ended it, "" if the reader has gone."""
    try:
        with np.errstate(all="ignore"):
            signals.act(WAITING)
            for block in blocks:
                signals.act(Act.note)
                text = session.answer(block)
                signals.act(WAITING)
                _write(text)
                if session.error:
                    break
    except Stopped:
        pass
    except BrokenPipeError:  # as in `| head`
        return ""
    except OSError as error:
        return f"{error.filename or 'standard output'}: {error.strerror}"
    return None


def _save(session: Session, state: Path) -> None:
    try:
        session.save(state)
    except Stopped:
        say(f"stopped again: the state is not saved, and {state} is as it was")
        raise
    except OSError as error:
        fail(f"{state}: cannot save the state, which is as it was: {error.strerror}")


def _share(windows: list[Window], method: Method, accumulators: int | None) -> Reads:
    """Read several windows, all fractions from one set of blocks."""
    if method is not Method.anytime:
        raise typer.BadParameter(f"--method {method} goes with --window, not with --windows")
    fractions = [window.c for window in windows if isinstance(window, Growing)]
    if accumulators is not None and not fractions:
        raise typer.BadParameter("--accumulators goes with fractions in --windows, got counts only")
    try:
        return shared_rules(windows, 12 if accumulators is None else accumulators)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _finish(session: Session, failure: str | None, state: Path | None) -> None:
    """Report skipped rows and errors, and exit with the matching code."""
    saved = "" if state is None else f"; the state so far is in {state}"
    stopped = f"stopped after line {session.lines}{saved}"
    number = signals.arrived()
    if session.bad:
        say(session.told_bad())
    if session.error:
        fail(f"{session.error}; fix it, or skip such rows with --skip-bad{saved}")
    if failure:
        fail(f"{failure}; {stopped}" if state else failure)
    if number is not None or (failure is not None and state):
        say(stopped)
    if number is not None:
        raise typer.Exit(128 + number)


def _write(data: bytes) -> None:
    """Write all data to standard output at once."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(1, rest) :]
        except BlockingIOError:  # another process made the pipe non-blocking
            select.select([], [1], [])


class Session(Rows):
    """The state between input and output: the averages, and how far the input has been read."""

    def __init__(
        self, reads: Reads, source: PlainInput, output: Output, every: int, skip_bad: bool
    ) -> None:
        super().__init__(source, skip_bad)
        self.reads, self.output, self.every = reads, output, every
        self.headed = False  # whether the header was written, now or before a resume
        self.averages = Averages(reads, len(source.columns))

    def answer(self, block: bytes) -> bytes:
        """Take a block of lines, and return the output."""
        text = self._answer_rows(self.body(block))
        if self.output is Output.csv and self.source.names and not self.headed:
            self.headed = True
            header = csv_line([*self.source.names, *self.source.averages])
            text = encode(header) + b"\n" + text
        return text

    def _answer_rows(self, block: bytes) -> bytes:
        """The output for rows: as arrays if they are many and plain, otherwise one by one."""
        many = has_many_lines(block)
        if many and self.output in (Output.plain, self.source.carries):
            taken = self.take(block)
            if taken is not None:
                averages, shown = self._scan(*taken)
                return self._answer_lines(averages, shown, taken[1], block)
        rows = self.parse(block)
        if many and rows:
            averages, shown = self._scan(*self.arrays(rows))
            return encode("".join(map(self._line, _chosen(rows, shown), averages.tolist())))
        step, every = self.averages.step, self.every
        lines = [self._line(row, now) for row in rows if (now := step(row.key, row.numbers, every))]
        return encode("".join(lines))

    def _answer_lines(self, averages: Array, shown: Shown, keys: list[str], block: bytes) -> bytes:
        """The output for lines with nothing odd: these averages, of those that are shown."""
        text = format_numbers(averages)
        if self.output is Output.plain:
            if not keys:
                return text
            pairs = zip(_chosen(keys, shown), text.decode().split("\n"), strict=False)
            return encode("".join([f"{key}\t{answer}\n" for key, answer in pairs]))
        if self.output is Output.csv:
            answers = text.replace(b"\t", b",").split(b"\n")
            heads = _chosen(block.split(b"\n")[:-1], shown)
            return b"".join([b"%b,%b\n" % pair for pair in zip(heads, answers, strict=False)])
        cells = [self._json_cells(answer.split("\t")) for answer in text.decode().split("\n")[:-1]]
        objects = _chosen(decode(block).split("\n")[:-1], shown)
        found = zip(objects, cells, strict=True)
        return encode("".join([f"{line[:-1].rstrip()}, {cell}}}\n" for line, cell in found]))

    def _scan(self, numbers: Array, keys: list[str]) -> tuple[Array, Shown]:
        """Take rows of numbers; return the averages to show, and the rows they belong to."""
        if keys:
            return self.averages.scan_keys(keys, numbers, self.every)
        averages, before = self.averages.scan("", numbers)
        shown = slice(-(before + 1) % self.every, None, self.every)
        return averages[shown], shown

    def _line(self, row: Row, averages: list[float]) -> str:
        """A line of the output: the columns that pass through, and the averages."""
        texts = [NUMBER % average for average in averages]
        if self.output is Output.csv:
            return ",".join([self.source.csv_cells(row), *texts]) + "\n"
        if self.output is Output.plain:
            return "\t".join(texts if self.source.by is None else [row.key, *texts]) + "\n"
        return f"{self.source.json_object(row)[:-1].rstrip()}, {self._json_cells(texts)}}}\n"

    def _json_cells(self, texts: list[str]) -> str:
        """Averages with their names, as in an object; JSON has no NaN and no infinities."""
        pairs = zip(self._json_names, texts, strict=True)
        return ", ".join(
            [f"{name}: {'null' if text[-1] in 'nf' else text}" for name, text in pairs]
        )

    @cached_property
    def _json_names(self) -> list[str]:
        return [json.dumps(name, ensure_ascii=False) for name in self.source.averages]

    def _options(self) -> dict[str, Any]:
        """The options that a state must have been made with."""
        return {
            "rule": [plain(rule) for rule in self.averages.rules],
            "input": self.source.kind,
            "columns": self.source.columns,
            "by": self.source.by,
            "output": str(self.output),
            "averages": self.source.averages,
        }

    @np.errstate(all="ignore")
    def load(self, path: Path) -> None:
        """Resume from a state, if the file exists."""
        try:
            with path.open("rb") as file:
                self._load(path, file)
        except FileNotFoundError:
            return
        except OSError as error:
            fail(f"{path}: {error.strerror}")
        except typer.Exit:
            raise
        except Exception as error:  # a damaged file fails in as many ways as there are
            fail(
                f"{path}: expected a state saved by tailavg stream, got: {repr(error)[:300]}; "
                "move the file away to start over"
            )

    def _load(self, path: Path, file: BinaryIO) -> None:
        saved = json.loads(file.readline())
        if (saved["format"], saved["version"]) != (STREAM, STREAM_VERSION):
            raise ValueError(f"format {saved['format']!r}, version {saved['version']!r}")
        for name, value in self._options().items():
            if saved["options"][name] != value:
                fail(
                    f"{path}: the state was made with other options: {name} was "
                    f"{saved['options'][name]}, is {value}; use the same, or another file"
                )
        names = saved["names"]
        if names is not None:
            if not all(isinstance(name, str) for name in names):
                raise ValueError("names: expected texts")
            self.source.names = list(names)
            self.source.check_names()
        self.headed = bool(saved["headed"])
        for key, averages in map(json.loads, file):
            self.averages.restore(key, averages)
        if len(self.averages) != saved["keys"]:
            raise ValueError(f"expected {saved['keys']} keys, got {len(self.averages)}")

    def save(self, path: Path) -> None:
        """Write the state, whole or not at all: a line about all keys, then one for each."""
        state = {
            "format": STREAM,
            "version": STREAM_VERSION,
            "options": self._options(),
            "names": self.source.names,
            "headed": self.headed,
            "keys": len(self.averages),
        }
        with whole_file(path) as file:
            for line in chain([state], self.averages.saved()):
                file.write(json.dumps(line).encode() + b"\n")


def _chosen(lines: list[Any], shown: Shown) -> Iterable[Any]:
    """The lines that are shown."""
    return lines[shown] if isinstance(shown, slice) else compress(lines, shown)
