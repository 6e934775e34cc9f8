"""`tailavg stream`: average numbers from a pipe or a file, line by line.

Input is read in blocks of the lines that have arrived: one line if they come slowly, thousands if
they come fast. A block of many lines is averaged as arrays, other blocks row by row. Read `stream`
first, then `Session.answer`.
"""

from __future__ import annotations

import json
import os
import select
import time as clock
from collections.abc import Iterable
from contextlib import ExitStack
from enum import StrEnum
from functools import cached_property
from itertools import chain, compress, repeat
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import typer

from tailavg.cli import options, signals
from tailavg.cli.averages import Averages
from tailavg.cli.blocks import Blocks
from tailavg.cli.cells import Array, csv_line, datetimes, decode, encode, format_numbers
from tailavg.cli.common import FAILED, fail, say
from tailavg.cli.lines import PlainInput, Row, Rows, choose_input, has_many_lines
from tailavg.cli.options import Method, Reads, parse_reads, parse_windows, window_name
from tailavg.cli.records import has_records, record_lines
from tailavg.cli.signals import WAITING, Act, Stopped
from tailavg.core.elapsed import Elapsed
from tailavg.core.windows import NEVER, Growing
from tailavg.io.files import InUseError, check_writable, locked, whole_file
from tailavg.io.state import STREAM, STREAM_VERSION, plain
from tailavg.numpy.average import NanPolicy


class Format(StrEnum):
    """The form of the output: averages alone, or after the columns of the input."""

    plain = "plain"
    csv = "csv"
    jsonl = "jsonl"


def stream(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The file to read; - is standard input.")
    ] = "-",
    window: Annotated[str | None, options.WINDOW] = None,
    windows: Annotated[str | None, options.WINDOWS] = None,
    column: Annotated[list[str] | None, options.COLUMN] = None,
    fields: Annotated[list[str] | None, options.FIELD] = None,
    match: Annotated[list[str] | None, options.MATCH] = None,
    regex: Annotated[str | None, options.REGEX] = None,
    delimiter: Annotated[str | None, options.DELIMITER] = None,
    time: Annotated[str | None, options.TIME] = None,
    by: Annotated[str | None, options.BY] = None,
    method: Annotated[Method, options.METHOD] = Method.anytime,
    accumulators: Annotated[
        int | None,
        typer.Option(
            max=10_000,
            metavar="N",
            help="How many accumulators to keep: by default 3; with --windows or the freshest "
            "method, 12 for all fractions together, and at least 6.",
        ),
    ] = None,
    at_most: Annotated[int | None, options.AT_MOST] = None,
    std: Annotated[
        bool, typer.Option("--std", help="Write a standard deviation after each average.")
    ] = False,
    every: Annotated[
        int, typer.Option(min=1, metavar="N", help="Write an average only after every N-th number.")
    ] = 1,
    output_format: Annotated[
        Format,
        typer.Option(
            "--format",
            help="Averages alone, or CSV or JSON lines with the columns of the input.",
        ),
    ] = Format.plain,
    nan: Annotated[NanPolicy, options.NAN] = "propagate",
    state: Annotated[
        Path | None, typer.Option(help="Resume from this file if it exists, and save to it.")
    ] = None,
    skip_bad: Annotated[bool, options.SKIP_BAD] = False,
) -> None:
    """Average numbers as they arrive: one line in, one average out.

    Reads one number per line, CSV (--column), JSON lines (--field) or any text
    (--match, --regex); --column, --field and --match may be repeated. Also
    reads trainer_state.json of Hugging Face and TensorBoard's event files.
    Writes averages with 12 significant digits. The window is 0.25 unless one
    is given.

    Examples: tail -f train.log | tailavg stream --match loss --window 1000

    tailavg stream --windows 0.1,0.25,0.5,1.0 --column loss --format csv log.csv

    Exit codes: 0 at the end of the input, 1 for bad data or files, 2 for a
    wrong command line; 130 after Ctrl-C, 143 after SIGTERM and 129 after
    SIGHUP, all with the state saved.
    """
    parsed = parse_windows(window, windows, at_most, options.DEFAULT_WINDOW, times=True)
    _check_time(time, parsed, [*(column or ()), *(fields or ()), *(match or ())])
    is_log = has_records(file)
    if is_log:
        column, fields = None, [*(column or ()), *(fields or ())]
    source = choose_input(column, fields, by, match, regex, delimiter, time, times=True)
    if windows is None:
        reads = parse_reads(parsed, method, accumulators)
    else:
        reads = _share(parsed, method, accumulators)
        source.suffixes = [f"_{window_name(each)}" for each in parsed]
    if std:
        source.statistics = "average", "std"
    if every > NEVER:  # not `max` of the option: help would show its 19 digits
        raise typer.BadParameter("--every: expected at most 2^63 - 1")
    if nan == "omit" and every > 1:
        raise typer.BadParameter("--every counts all numbers: use it without --nan omit")
    session = Session(reads, source, output_format, every, skip_bad, nan, std)
    with ExitStack() as stack:
        blocks: Iterable[bytes]
        if is_log:
            signals.act(Act.stop)
            blocks = [record_lines(file, fields and source.columns)]
        else:
            blocks = opened = Blocks(file, text=source.kind == "text")  # before any other file
            stack.callback(opened.close)
        if state is not None:
            _reserve(state, stack)
            signals.act(Act.stop)
            session.load(state)
        failure = _answer(session, blocks)
        if state is not None:
            _save(session, state)
        signals.act(Act.note)
    _finish(session, failure, state)


def _check_time(time: str | None, windows: list[Any], names: list[str]) -> None:
    """Fail if --time is of no use, or has no column."""
    if time is None:
        return
    if not any(isinstance(window, Elapsed) for window in windows):
        raise typer.BadParameter("--time goes with a window of time, such as --window 10m")
    if not names:
        raise typer.BadParameter("--time needs --column, --field or --match")
    if time in names:
        raise typer.BadParameter(f"--time: expected another column than the averaged, got {time!r}")


def _share(windows: list[Any], method: Method, accumulators: int | None) -> Reads:
    """Return the rules and windows of several averages; all fractions share one `AnyTail`."""
    if method is Method.freshest:
        return parse_reads(windows, method, accumulators)
    if method is not Method.anytime:
        raise typer.BadParameter(f"--method {method} goes with --window, not with --windows")
    if accumulators is not None and not any(isinstance(each, Growing) for each in windows):
        raise typer.BadParameter("--accumulators goes with fractions in --windows, got counts only")
    return options.share(windows, accumulators)


def _reserve(state: Path, stack: ExitStack) -> None:
    """Lock the file of the state against other processes. Fail if it cannot be written."""
    signals.act(Act.note)
    try:
        check_writable(state)
        stack.enter_context(locked(state))
    except InUseError:
        fail(f"{state}: in use by another process; wait until it ends, or use another file")
    except OSError as error:
        fail(f"{state}: no state can be saved there: {error.strerror}")


def _answer(session: Session, blocks: Iterable[bytes]) -> str | None:
    """Write averages until the input ends or a signal arrives. Return an error message, or None.

    The message is "" if the program that reads the output has ended.
    """
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
        say(f"interrupted twice: state not saved; {state} is unchanged")
        raise
    except OSError as error:
        fail(f"{state}: state not saved, the file is unchanged: {error.strerror}")


def _finish(session: Session, failure: str | None, state: Path | None) -> None:
    """Report skipped rows and errors, and exit with the matching code."""
    saved = "" if state is None else f"; the state so far is in {state}"
    stopped = f"stopped after line {session.lines}{saved}"
    number = signals.arrived()
    for note in session.notes():
        say(note)
    if session.error:
        fail(f"{session.error}{saved}")
    if failure:
        fail(f"{failure}; {stopped}" if state else failure)
    if number is not None or (failure is not None and state):
        say(stopped)
    if number is not None:
        raise typer.Exit(128 + number)
    if (session.bad or session.empty) and not session.good:
        raise typer.Exit(FAILED)


def _write(data: bytes) -> None:
    """Write all data to standard output."""
    unwritten = memoryview(data)
    while unwritten:
        try:
            unwritten = unwritten[os.write(1, unwritten) :]
        except BlockingIOError:  # another process made the pipe non-blocking
            select.select([], [1], [])


def _newest(average: dict[str, Any]) -> list[int]:
    """Return the time of the newest sample in the state of an average, if it has a time."""
    last: Any = average.get("elapsed", {}).get("last", [])
    return last[-1:] if isinstance(last, list) else [last]


class Session(Rows):
    """A run of `tailavg stream`: its averages, and how far it has read the input."""

    def __init__(
        self,
        reads: Reads,
        source: PlainInput,
        output_format: Format,
        every: int,
        skip_bad: bool,
        nan: NanPolicy = "propagate",
        std: bool = False,
    ) -> None:
        super().__init__(source, skip_bad, refuse_nan=nan == "raise", need_all=every > 1)
        self.reads, self.format, self.nan = reads, output_format, nan
        self.headed = False  # whether the header was written, now or before a resume
        columns = len(source.columns) - source.has_times
        self.averages = Averages(reads, columns, every, nan, std)
        self._arrived = 0  # the newest time of an arrival in nanoseconds

    def answer(self, block: bytes) -> bytes:
        """Take a block of lines, and return the output for it."""
        text = self._answer_rows(self.body(block))
        if self.format is Format.csv and self.source.names and not self.headed:
            self.headed = True
            names = [*self.source.names, *self.source.averages]
            header = csv_line(names, self.source.delimiter)
            text = encode(header) + b"\n" + text
        return text

    def _answer_rows(self, block: bytes) -> bytes:
        """Return the output for rows: average many rows as arrays, and few rows one by one."""
        many = has_many_lines(block)
        if (
            many
            and self.format in (Format.plain, self.source.carries)
            and (taken := self.take(block))
        ):
            averages, answered = self._scan(*taken)
            if self.format is Format.plain:
                return self._format(compress(taken[1], answered), averages)
            lines = compress(decode(block).split("\n")[:-1], answered)
            return self._format(map(self.source.head, lines), averages)
        rows = self.parse(block)
        if many and rows and not any(None in row.numbers for row in rows):
            averages, answered = self._scan(*self.arrays(rows))
            return self._format(map(self._head, compress(rows, answered)), averages)
        step, first = self.averages.step, self.source.has_times
        times = self._times([row.numbers[0] for row in rows])
        answers = [
            (row, now)
            for row, time in zip(rows, repeat(None) if times is None else times, strict=False)
            if (now := step(row.key, row.numbers[first:], time))
        ]
        heads = (self._head(row) for row, _ in answers)
        return self._format(heads, np.array([averages for _, averages in answers]))

    def _scan(self, rows: Array, keys: list[str]) -> tuple[Array, Iterable[bool]]:
        """Return the averages after rows, and which rows are answered."""
        first = self.source.has_times
        return self.averages.scan(rows[:, first:], keys, self._times(rows[:, 0]))

    def _times(self, column: Any) -> Array | None:
        """Return the times of rows: those of their first column, or of their arrival."""
        if not self.averages.is_timed:
            return None
        if self.source.has_times:
            return datetimes(column)
        self._arrived = max(self._arrived, clock.time_ns())  # the clock may be set back
        return np.full(len(column), self._arrived, "datetime64[ns]")

    def _head(self, row: Row) -> str:
        """Return the part of an output line before its averages."""
        if self.format is Format.plain:
            return row.key
        if self.format == self.source.carries:
            return self.source.head(row.line)
        return self.source.converted_head(row)

    def _format(self, heads: Iterable[str], averages: Array) -> bytes:
        """Return output lines, each with its head and then its averages."""
        if self.format is Format.plain and self.source.by is None:
            return format_numbers(averages)
        if self.format is Format.jsonl:
            numbers = format_numbers(averages).decode().split()
            if not np.isfinite(averages).all():  # JSON has no NaN and no infinity
                numbers = ["null" if number[-1] in "nf" else number for number in numbers]
            joint, endings = ", ", self._json_ending * len(averages) % tuple(numbers)
        else:
            joint = self.source.delimiter if self.format is Format.csv else "\t"
            endings = format_numbers(averages, joint).decode()
        lines = zip(heads, endings.split("\n"), strict=False)
        return encode("".join([f"{head}{joint}{ending}\n" for head, ending in lines]))

    @cached_property
    def _json_ending(self) -> str:
        """The format of the averages at the end of a JSON object."""
        names = (json.dumps(name, ensure_ascii=False) for name in self.source.averages)
        return ", ".join([f"{name.replace('%', '%%')}: %s" for name in names]) + "}\n"

    def _options(self) -> dict[str, Any]:
        """Return the options that must be the same when a state is loaded."""
        return {
            "rule": [plain(rule) for rule in self.averages.rules],
            "input": self.source.kind,
            "columns": self.source.columns,
            "by": self.source.by,
            "format": str(self.format),
            "std": self.averages.std,
            "averages": self.source.averages,
            "nan": self.nan,
            **({"times": self.source.has_times} if self.averages.is_timed else {}),
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
        except Exception as error:  # a damaged file can raise any exception
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
                    f"{saved['options'][name]}, is {value}; use the same options, or another file"
                )
        if not all(isinstance(name, str) for name in saved["names"]):
            raise ValueError("names: expected texts")
        if saved["names"]:
            self.source.names = list(saved["names"])
            self.source.delimiter = str(saved["delimiter"])[:1]
            self.source.check_names()
        self.headed = bool(saved["headed"])
        for key, averages in map(json.loads, file):
            self.averages.restore(key, averages)
            if times := list(chain.from_iterable(map(_newest, averages))):
                self.newest[key] = max(times) / 1000  # microseconds
                self._arrived = max(self._arrived, *times)
        if len(self.averages) != saved["keys"]:
            raise ValueError(f"expected {saved['keys']} keys, got {len(self.averages)}")

    def save(self, path: Path) -> None:
        """Write the state atomically: a line of JSON about all keys, then a line for each key."""
        state = {
            "format": STREAM,
            "version": STREAM_VERSION,
            "options": self._options(),
            "names": self.source.names,
            "delimiter": self.source.delimiter,
            "headed": self.headed,
            "keys": len(self.averages),
        }
        with whole_file(path) as file:
            for line in chain([state], self.averages.saved()):
                file.write(json.dumps(line).encode() + b"\n")
