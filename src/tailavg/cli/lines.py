"""The lines that `stream` and `plot` read: plain numbers, CSV, JSON lines or other text.

`Rows` goes through the blocks of an input. Each kind of input is a class. Its `take` reads a block
of many lines at once, and raises an error if any line is odd. Its `parse` reads a single line, and
raises an error that says what is wrong with the line. A line may lack a number: its cell is empty,
its field is absent or null, or its text has no match. A line without any number is passed over and
counted. Read `PlainInput` first, then `Rows`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from itertools import repeat
from typing import Any, ClassVar, NamedTuple

import numpy as np
import typer

from tailavg.cli.cells import (
    BLANKS,
    Array,
    BlockReader,
    csv_line,
    decode,
    guess_delimiter,
    parse_number,
    parse_time,
    split_cells,
)
from tailavg.cli.common import fail

MANY = 30  # from this many lines on, arrays are faster

# a number after its name, as in loss=0.5, loss: 0.5 or "loss": 0.5
# 1,234.5 is matched as a whole: parse_number refuses it, and it is not read as 1
_THOUSANDS = r"\d\d?\d?(?:[,_]\d\d\d)+(?!\d)(?:\.\d+)?"
_NUMBER = rf"[-+]?(?:{_THOUSANDS}|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|(?:nan|inf(?:inity)?)\b)"
_NAMED = rf"(?<![\w./-])['\"]?{{}}['\"]?\s*[=:]\s*['\"]?((?i:{_NUMBER}))"
# a time after its name: a number, or ISO 8601, in which a space may stand for the T
_DATE = r"\d\d\d\d-\d\d-\d\d(?:[T ]\d\d:[\d:]+(?:\.\d+)?(?:Z|[-+]\d\d:?\d\d)?)?"
_NAMED_TIME = _NAMED.replace(_NUMBER, rf"{_DATE}|{_NUMBER}")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # colours and styles of terminals

NEAREST = 10
"""The most existing columns that an error about a missing column lists."""

_SCAN: Any = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # called by raw_decode


Block = tuple[Array, list[str], Array | None]
"""The numbers of rows, their keys, and a mask of missing numbers, or None if none is missing."""


class Row(NamedTuple):
    """A parsed line of the input."""

    line: str
    numbers: list[float | None]  # None if the line lacks the number
    key: str
    fields: Any  # the cells of CSV, or the object of JSON


@dataclass
class PlainInput:
    """One number per line."""

    kind: ClassVar[str] = "plain"
    carries: ClassVar[str] = "csv"
    """The output format whose lines begin with the lines of the input."""

    columns: list[str]
    by: str | None
    delimiter: str = ","
    """The character between cells, in input and output; "" until it is guessed from the header."""
    has_axis: bool = False  # whether the first column is the horizontal axis of the others
    has_times: bool = False  # whether the first column, which is then the axis, has times
    sought: str = ""  # what is searched for, in messages; by default, the columns
    names: list[str] = field(default_factory=list)  # the names of all columns, once known
    suffixes: list[str] = field(default_factory=lambda: [""])  # one for each average of a column
    statistics: tuple[str, ...] = ("average",)  # the columns to write for each suffix
    reader: BlockReader = field(default_factory=BlockReader)

    @property
    def averages(self) -> list[str]:
        """The names of the averages, each followed by that of its standard deviation, if any."""
        return [f"{name}{suffix}" for suffix in self.suffixes for name in self.statistics]

    def take_header(self, block: bytes) -> bytes:
        """Return the block unchanged: there is no header."""
        self.names = ["value"]
        return block

    def take(self, block: bytes) -> tuple[Array, list[str]]:
        """Return the numbers, one row per line, and the keys, if any.

        Raise a ValueError if a line is odd. The caller then parses the lines one by one.
        """
        return self.reader.numbers(block)[:, None], []

    def parse(self, line: str) -> Row:
        """Parse a line; raise a ValueError that says what is wrong with it."""
        try:
            return Row(line, [parse_number(line)], "", [line])
        except ValueError as error:
            if line.lstrip().startswith('{"'):
                raise ValueError(f"{error}, or --field NAME for JSON lines") from None
            if "=" in line or ":" in line:
                raise ValueError(f"{error}, or --match NAME for text like NAME=0.5") from None
            if "," in line or "\t" in line:
                raise ValueError(f"{error}, or --column NAME for CSV") from None
            raise

    def missing(self, numbers: list[float | None]) -> str:
        """Return what a line lacks, for a message: its numbers, or that of the horizontal axis.

        A line that lacks nothing, or only some of several numbers to average, returns "".
        """
        if all(number is None for number in numbers[self.has_axis :]):
            return self.sought or " or ".join(map(repr, self.columns[self.has_axis :]))
        return repr(self.columns[0]) if self.has_axis and numbers[0] is None else ""

    def head(self, line: str) -> str:
        """Return the part of an output line before its averages, in the format `carries`."""
        return line

    def converted_head(self, row: Row) -> str:
        """Return that part in the other format: JSON, with numbers in averaged columns only."""
        fields: dict[str, Any] = {}
        for name, cell in zip(self.names, row.fields, strict=True):
            fields.setdefault(name, cell)  # the first column, if several have the same name
        averaged = slice(self.has_times, None)
        for name, number in zip(self.columns[averaged], row.numbers[averaged], strict=True):
            finite = number is not None and math.isfinite(number)
            fields[name] = number if finite else None  # JSON has no NaN
        return json.dumps(fields, ensure_ascii=False)[:-1]

    def check_names(self) -> None:
        """Fail if a column is missing, or the input has a column with the name of an average."""
        for name in [*self.columns, *([] if self.by is None else [self.by])]:
            if self.place(name) is None:
                fail(f"no column {short(name)} in the header; {nearest(name, self.names)}")
        for name in self.averages:
            if name in self.names:
                fail(f"the input already has a column {name!r}, as the output will; rename it")

    def place(self, name: str) -> int | None:
        """Return the index of a column that is given by its name or its number, if there is one."""
        if name in self.names:
            return self.names.index(name)
        is_number = name.isdecimal() and 1 <= int(name) <= len(self.names)
        return int(name) - 1 if is_number else None


class CsvInput(PlainInput):
    """CSV. One row per line: a quoted cell may hold commas, but no line ends.

    The first line is the header, unless columns are given by number and have numbers there.
    """

    kind = "csv"

    @property
    def averages(self) -> list[str]:
        """See `PlainInput`."""
        endings = super().averages
        columns = self.columns[self.has_times :]
        return [f"{column}_{ending}" for column in columns for ending in endings]

    def take_header(self, block: bytes) -> bytes:
        """Return the block without its header, which may be missing when resuming from a state."""
        line, _, rows = block.partition(b"\n")
        wanted = [*self.columns, *([] if self.by is None else [self.by])]
        self.delimiter = self.delimiter or guess_delimiter(decode(line), wanted)
        try:
            names = [name.strip() for name in split_cells(decode(line), self.delimiter)]
        except ValueError as error:
            fail(f"line 1, the header: {error}")
        if self.names:
            return rows if names == self.names else block
        numbered = [str(place) for place in range(1, len(names) + 1)]
        no_header = {*wanted} <= {*numbered} and all(
            _is_number(names[int(name) - 1]) for name in self.columns[self.has_times :]
        )
        self.names = numbered if no_header else names
        self.check_names()
        return block if no_header else rows

    def take(self, block: bytes) -> tuple[Array, list[str]]:
        """See `PlainInput`."""
        width = len(self.names)
        where = self._places, self._key_place, self.delimiter
        return self.reader.table(block, width, *where, self.has_times)

    def parse(self, line: str) -> Row:
        """Parse a line; raise a ValueError that says what is wrong with it."""
        cells = split_cells(line, self.delimiter)
        if len(cells) != len(self.names):
            raise ValueError(f"expected {len(self.names)} cells, got {len(cells)}")
        numbers: list[float | None] = [
            self._parse(i, cells[place], f"a number in column {name!r}")
            if cells[place].strip()
            else None
            for i, (place, name) in enumerate(zip(self._places, self.columns, strict=True))
        ]
        return Row(line, numbers, "" if self._key_place is None else cells[self._key_place], cells)

    def _parse(self, i: int, text: str, expected: str) -> float:
        """Return the number, or the time, of column i."""
        return parse_time(text) if self.has_times and i == 0 else parse_number(text, expected)

    @cached_property
    def _places(self) -> list[int]:
        """The indices of the averaged columns."""
        return [place for name in self.columns if (place := self.place(name)) is not None]

    @cached_property
    def _key_place(self) -> int | None:
        return None if self.by is None else self.place(self.by)


class TextInput(CsvInput):
    """Lines of any text, in which patterns find the numbers. The output is CSV."""

    kind = "text"

    def __init__(self, columns: list[str], patterns: list[re.Pattern[str]]) -> None:
        super().__init__(columns, None)
        self.patterns = patterns

    def take_header(self, block: bytes) -> bytes:
        """Return the block unchanged: there is no header."""
        self.names = self.columns
        return block

    def take(self, block: bytes) -> tuple[Array, list[str]]:
        """Raise a ValueError, since lines of text are only searched one by one."""
        raise ValueError("expected numbers")

    def parse(self, line: str) -> Row:
        """Find the numbers in a line; raise a ValueError if a match is not a number."""
        line = _COLOURS.sub("", line)
        matches = [pattern.search(line) for pattern in self.patterns]
        cells = [match[1] or "" if match else "" for match in matches]
        numbers = [
            self._parse(i, cell, f"a number, got {short(cell)}") if match else None
            for i, (match, cell) in enumerate(zip(matches, cells, strict=True))
        ]
        return Row(",".join(cells), numbers, "", cells)


class JsonInput(CsvInput):
    """JSON lines: one object per line."""

    kind = "jsonl"
    carries = "jsonl"

    def take_header(self, block: bytes) -> bytes:
        """Return the block unchanged: the first row names the columns."""
        return block

    def check_names(self) -> None:
        """Do nothing: each row has its own fields, and `parse` checks them."""

    def take(self, block: bytes) -> tuple[Array, list[str]]:
        """See `PlainInput`. Each object is dropped at once, since reusing its memory is faster."""
        numbers: list[float | None] = []
        keys: list[str] = []
        try:
            for line in decode(block).split("\n")[:-1]:
                fields, end = _SCAN(line, 0)
                if end != len(line):
                    raise ValueError("expected nothing after the object")
                row, key = self._read(fields)
                if None in row:
                    raise ValueError("expected a number in each field")
                numbers += row
                keys.append(key)
        except (StopIteration, RecursionError) as error:
            raise ValueError("expected JSON objects") from error
        rows = np.array(numbers, np.float64).reshape(-1, len(self.columns))
        return rows, [] if self.by is None else keys

    def parse(self, line: str) -> Row:
        """Parse a line; raise a ValueError that says what is wrong with it."""
        line = line.strip()
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"expected a JSON object ({error})") from error
        return Row(line, *self._read(fields), fields)

    def _read(self, fields: Any) -> tuple[list[float | None], str]:
        """Return the numbers and the key of an object; raise a ValueError if it is not valid."""
        if fields.__class__ is not dict:
            raise ValueError("expected a JSON object")
        numbers: list[float | None] = []
        for name in self.columns:
            number = fields.get(name)
            if self.has_times and name == self.columns[0]:
                number = None if number is None else parse_time(str(number))
            if number.__class__ is not float and number is not None:
                number = _as_float(number, name)
            numbers.append(number)
        if None in numbers and self.missing(numbers):
            return numbers, ""
        key: Any = ""
        if self.by is not None:
            if self.by not in fields:
                raise ValueError(f"expected a field {self.by!r}, got {list(fields)[:20]}")
            key = fields[self.by]
            if key.__class__ is not str:
                key = json.dumps(key)
        if not fields.keys().isdisjoint(self._taken):
            taken = min(self._taken & fields.keys())
            raise ValueError(f"expected no field {taken!r}, which the output adds")
        if not self.names:
            self.names = list(fields)
        return numbers, key

    @cached_property
    def _taken(self) -> set[str]:
        """The names that fields cannot have, since averages have them."""
        return set(self.averages)

    def head(self, line: str) -> str:
        """Return the object without its closing brace."""
        return line[:-1].rstrip()

    def converted_head(self, row: Row) -> str:
        """Return the fields that the first row has, as CSV."""
        values = [row.fields.get(name, "") for name in self.names]
        return csv_line([v if isinstance(v, str) else json.dumps(v) for v in values])


class Rows:
    """The rows of an input, with counts of the lines that were read or skipped."""

    def __init__(
        self,
        source: PlainInput,
        skip_bad: bool,
        refuse_nan: bool = False,
        need_all: bool = False,
    ) -> None:
        self.source = source
        self.skip_bad = skip_bad
        self.refuse_nan = refuse_nan  # a row with a NaN is bad
        self.need_all = need_all  # a row that lacks some of its numbers is bad
        self.lines = 0  # lines read so far
        self.opened = False  # whether any input has been read
        self.good = 0  # rows with numbers
        self.bad = 0  # skipped rows
        self.first_bad = ""
        self.empty = Counter[str]()  # lines without a number, by what they lack
        self.first_empty = ""
        self.error = ""  # why reading stopped
        self.newest: dict[str, float] = {}  # the newest time of each key, if rows have times

    def body(self, block: bytes) -> bytes:
        """Return a block without its header, if it has one, and with Unix line ends."""
        if b"\r" in block:
            block = block.replace(b"\r\n", b"\n")
        if self.opened:
            return block
        rows = self.source.take_header(block.removeprefix(b"\xef\xbb\xbf"))
        self.opened = True
        self.lines = block.count(b"\n") - rows.count(b"\n")
        return rows

    def take(self, block: bytes) -> tuple[Array, list[str]] | None:
        """Return the numbers of all rows, and their keys, if any. Return None if a line is odd."""
        try:
            numbers, keys = self.source.take(block)
        except ValueError:
            return None
        if self.refuse_nan and np.isnan(numbers).any():
            return None
        if self.source.has_times and not self._in_order(keys, numbers[:, 0].tolist()):
            return None
        self.lines += len(numbers)
        self.good += len(numbers)
        return numbers, keys

    def parse(self, block: bytes) -> list[Row]:
        """Return the rows of a block; without --skip-bad, only rows before the first bad row."""
        rows, parse = [], self.source.parse
        for line in decode(block).split("\n")[:-1]:
            self.lines += 1
            if not line or line.isspace():
                continue
            try:
                row = parse(line)
                if missing := self.source.missing(row.numbers):
                    self.empty[missing] += 1
                    self.first_empty = self.first_empty or f"line {self.lines}: {short(line)}"
                    continue
                self._check(row)
                rows.append(row)
            except ValueError as error:
                message = f"line {self.lines}: {short(line)}: {error}"
                if not self.skip_bad:
                    self.error = f"{message}; fix it, or skip such rows with --skip-bad"
                    break
                self.bad += 1
                self.first_bad = self.first_bad or message
        self.good += len(rows)
        return rows

    def _check(self, row: Row) -> None:
        numbers = row.numbers
        if self.need_all and None in numbers:
            raise ValueError("expected a number in each column, because of --every")
        if self.refuse_nan and any(map(math.isnan, filter(None, numbers))):
            raise ValueError("expected no NaN, because of --nan raise")
        if self.source.has_times and not self._in_order([row.key], [numbers[0] or 0.0]):
            raise ValueError("expected times that do not go back: sort the rows by time")

    def _in_order(self, keys: list[str], times: list[float]) -> bool:
        """Note the newest times of keys. Return False, and note nothing, if a time goes back."""
        newest: dict[str, float] = {}
        for key, time in zip(keys or repeat(""), times, strict=False):
            if time < (newest[key] if key in newest else self.newest.get(key, -math.inf)):
                return False
            newest[key] = time
        self.newest |= newest
        return True

    def arrays(self, rows: list[Row]) -> tuple[Array, list[str]]:
        """Return rows as `take` does, with NaN for a missing number."""
        keys = [] if self.source.by is None else [row.key for row in rows]
        return np.array([row.numbers for row in rows], np.float64), keys

    def block(self, block: bytes) -> Block:
        """Return the numbers and keys of a block, and which numbers are missing, as a `Block`."""
        if has_many_lines(block) and (taken := self.take(block)):
            return *taken, None
        rows = self.parse(block)
        lacking = np.array([[number is None for number in row.numbers] for row in rows])
        return *self.arrays(rows), lacking if lacking.any() else None

    def notes(self) -> list[str]:
        """Return messages about skipped and passed-over lines: their number and the first one."""
        notes = []
        if self.bad:
            rows = "1 row" if self.bad == 1 else f"{self.bad} rows"
            skipped = f"skipped {rows}, the first is {self.first_bad}"
            if not (self.good or self.empty):
                skipped = (
                    f"skipped every row, {rows}: none could be read; the first is {self.first_bad}"
                )
            notes.append(skipped)
        for names, count in self.empty.items():
            lines = "1 line" if count == 1 else f"{count} lines"
            passed = f"passed over {lines} without {names}"
            if not self.good and len(self.empty) == 1:
                passed = f"no line has a number for {names}; the first is {self.first_empty}"
            notes.append(passed)
        return notes


def choose_input(
    columns: list[str] | None,
    fields: list[str] | None,
    by: str | None,
    match: list[str] | None = None,
    regex: str | None = None,
    delimiter: str | None = None,
    axis: str | None = None,
    times: bool = False,
) -> PlainInput:
    """Return the input that the options describe.

    `axis` is the column of the horizontal axis. With `times`, it has times.
    """
    given = {"--column": columns, "--field": fields, "--match": match, "--regex": regex}
    several = [option for option, value in given.items() if value]
    if len(several) > 1:
        raise typer.BadParameter(
            f"{' and '.join(several)} read different kinds of input: use only one of them"
        )
    if by is not None and not (columns or fields):
        raise typer.BadParameter("--by needs --column or --field")
    if delimiter is not None and not columns:
        raise typer.BadParameter("--delimiter needs --column")
    names = list(dict.fromkeys(columns or fields or match or ["value"]))
    names = names if axis is None else [axis, *names]
    has_axis = axis is not None
    if regex is not None:
        source: PlainInput = TextInput(names, [_pattern(regex)])
        source.sought = f"'{regex}'"
    elif match:
        patterns = [_NAMED_TIME if times and name == axis else _NAMED for name in names]
        named = zip(names, patterns, strict=True)
        source = TextInput(
            names, [re.compile(each.format(re.escape(name))) for name, each in named]
        )
    elif columns:
        source = CsvInput(names, by, "" if delimiter is None else _parse_delimiter(delimiter))
    else:
        source = JsonInput(names, by) if fields else PlainInput(names, by)
    source.has_axis, source.has_times = has_axis, times and has_axis
    return source


def _pattern(regex: str) -> re.Pattern[str]:
    """Return the compiled pattern. Fail unless it has one group."""
    try:
        pattern = re.compile(regex)
    except re.error as error:
        raise typer.BadParameter(f"--regex: {error}: {regex!r}") from error
    if pattern.groups != 1:
        raise typer.BadParameter(
            f"--regex: expected a pattern with one group, such as 'loss (\\S+)', got "
            f"{pattern.groups} groups in {regex!r}"
        )
    return pattern


def _parse_delimiter(text: str) -> str:
    delimiter = {"tab": "\t", "\\t": "\t", "space": BLANKS}.get(text, text)
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise typer.BadParameter(
            f"--delimiter: expected one character, or tab or space, got {text!r}"
        )
    return delimiter


def has_many_lines(block: bytes) -> bool:
    """Return whether arrays are faster for a block, without counting all of its lines."""
    return len(block.split(b"\n", MANY)) > MANY


def short(text: str) -> str:
    """Return a quoted text for a message, shortened if it is long."""
    return repr(text) if len(text) <= 60 else f"{text[:50]!r}… ({len(text)} characters)"


def nearest(name: str, names: list[str]) -> str:
    """Return a list of the existing columns for a message; of many, only the most similar names."""
    listed, intro = names, "there are"
    if len(names) > NEAREST:
        listed = get_close_matches(name, names, NEAREST) or names[:NEAREST]
        intro = f"of {len(names)}, the nearest are"
    clipped = (text if len(text) <= 60 else f"{text[:50]}…" for text in listed)
    return f"{intro}: {', '.join(clipped)}"


def _is_number(text: str) -> bool:
    try:
        parse_number(text)
    except ValueError:
        return False
    return True


def _as_float(number: Any, name: str) -> float:
    """Return a number of JSON as a float."""
    if not isinstance(number, int | float) or isinstance(number, bool):
        got = json.dumps(number)[:60]
        raise ValueError(f"expected a number in field {name!r}, got {got}")
    try:
        return float(number)
    except OverflowError:  # too large: infinite, like float("1" + 400 * "0")
        return math.inf if number > 0 else -math.inf
