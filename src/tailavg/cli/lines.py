"""The input of `stream` and `plot`: plain numbers, CSV or JSON lines.

`Rows` goes through the blocks of an input. For each kind of input there is a class: its `take`
reads a block of many lines at once and gives up at any odd line; its `parse` reads a single line
and says what is wrong with it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import typer

from tailavg.cli.cells import Array, BlockReader, csv_line, decode, parse_number, split_cells
from tailavg.cli.common import fail

MANY = 30  # from this many lines on, arrays are faster
NEAREST = 10
"""How many columns are named when one is missing."""

_SCAN: Any = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # what raw_decode calls


class Row(NamedTuple):
    """A parsed line of the input."""

    line: str
    numbers: list[float]
    key: str
    fields: Any  # of CSV the cells, of JSON the object


@dataclass
class PlainInput:
    """One number per line."""

    kind: ClassVar[str] = "plain"
    carries: ClassVar[str] = "csv"
    """The output whose lines begin with those of the input."""

    columns: list[str]
    by: str | None
    names: list[str] = field(default_factory=list)  # of all columns, once known
    suffixes: list[str] = field(default_factory=lambda: [""])  # one for each average of a column
    reader: BlockReader = field(default_factory=BlockReader)

    @property
    def averages(self) -> list[str]:
        """The names of the averages."""
        return [f"average{suffix}" for suffix in self.suffixes]

    def take_header(self, block: bytes) -> bytes:
        """Return the block unchanged: there is no header."""
        self.names = ["value"]
        return block

    def take(self, block: bytes) -> tuple[Array, list[str]]:
        """Return the numbers, one row per line, and the keys, if any.

        Raise a ValueError if a line is odd. The lines are then parsed one by one.
        """
        return self.reader.numbers(block)[:, None], []

    def parse(self, line: str) -> Row:
        """Parse a line; raise a ValueError that says what is wrong with it."""
        try:
            return Row(line, [parse_number(line)], "", [line])
        except ValueError as error:
            if line.lstrip().startswith("{"):
                raise ValueError(f"{error}, or --field NAME for JSON lines") from None
            if "," in line:
                raise ValueError(f"{error}, or --column NAME for CSV") from None
            raise

    def head(self, line: str) -> str:
        """Return a line of the output that the input `carries`, up to where averages are added."""
        return line

    def converted_head(self, row: Row) -> str:
        """Return the same for the other output: JSON, with numbers in averaged columns only."""
        fields: dict[str, Any] = {}
        for name, cell in zip(self.names, row.fields, strict=True):
            fields.setdefault(name, cell)  # of columns of one name, the first
        for name, number in zip(self.columns, row.numbers, strict=True):
            fields[name] = number if math.isfinite(number) else None  # JSON has no NaN
        return json.dumps(fields, ensure_ascii=False)[:-1]

    def check_names(self) -> None:
        """Fail if a column is missing, or the name of an average is taken."""
        for name in [*self.columns, *([] if self.by is None else [self.by])]:
            if name not in self.names:
                fail(f"no column {short(name)} in the header; {nearest(name, self.names)}")
        for name in self.averages:
            if name in self.names:
                fail(f"the input already has a column {name!r}, the name of the average; rename it")


class CsvInput(PlainInput):
    """CSV with a header. One row per line: a quoted cell may hold commas, but no line ends."""

    kind = "csv"

    @property
    def averages(self) -> list[str]:
        """The names of the averages."""
        return [f"{name}_average{suffix}" for name in self.columns for suffix in self.suffixes]

    def take_header(self, block: bytes) -> bytes:
        """Return the block without its header, which may be missing when resuming from a state."""
        line, _, rows = block.partition(b"\n")
        try:
            names = [name.strip() for name in split_cells(decode(line))]
        except ValueError as error:
            fail(f"line 1, the header: {error}")
        if self.names:
            return rows if names == self.names else block
        self.names = names
        self.check_names()
        return rows

    def take(self, block: bytes) -> tuple[Array, list[str]]:
        """See `PlainInput`."""
        return self.reader.table(block, len(self.names), self._places, self._key_place)

    def parse(self, line: str) -> Row:
        """Parse a line; raise a ValueError that says what is wrong with it."""
        cells = split_cells(line)
        if len(cells) != len(self.names):
            raise ValueError(f"expected {len(self.names)} cells, got {len(cells)}")
        pairs = zip(self._places, self.columns, strict=True)
        numbers = [parse_number(cells[i], f"a number in column {name!r}") for i, name in pairs]
        return Row(line, numbers, "" if self._key_place is None else cells[self._key_place], cells)

    @cached_property
    def _places(self) -> list[int]:
        """The indices of the averaged columns."""
        return [self.names.index(name) for name in self.columns]

    @cached_property
    def _key_place(self) -> int | None:
        return None if self.by is None else self.names.index(self.by)


class JsonInput(CsvInput):
    """JSON lines: one object per line."""

    kind = "jsonl"
    carries = "jsonl"

    def take_header(self, block: bytes) -> bytes:
        """Return the block unchanged: the first row names the columns."""
        return block

    def take(self, block: bytes) -> tuple[Array, list[str]]:
        """See `PlainInput`. Objects are not kept: reusing their memory is faster."""
        numbers: list[float] = []
        keys: list[str] = []
        try:
            for line in decode(block).split("\n")[:-1]:
                fields, end = _SCAN(line, 0)
                if end != len(line):
                    raise ValueError("expected nothing after the object")
                row, key = self._read(fields)
                numbers += row
                keys.append(key)
        except (StopIteration, RecursionError) as error:
            raise ValueError("expected JSON objects") from error
        rows = np.array(numbers).reshape(-1, len(self.columns))
        return rows, [] if self.by is None else keys

    def parse(self, line: str) -> Row:
        """Parse a line; raise a ValueError that says what is wrong with it."""
        line = line.strip()
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"expected a JSON object ({error})") from error
        return Row(line, *self._read(fields), fields)

    def _read(self, fields: Any) -> tuple[list[float], str]:
        """Return the numbers and the key of an object; raise a ValueError if one is missing."""
        if fields.__class__ is not dict:
            raise ValueError("expected a JSON object")
        numbers = []
        for name in self.columns:
            number = fields.get(name)
            if number.__class__ is not float:
                number = _as_float(fields, name)
            numbers.append(number)
        key: Any = ""
        if self.by is not None:
            key = _field(fields, self.by)
            if key.__class__ is not str:
                key = json.dumps(key)
        if not fields.keys().isdisjoint(self._taken):
            taken = min(self._taken & fields.keys())
            raise ValueError(f"expected no field {taken!r}, the name of the average")
        if not self.names:
            self.names = list(fields)
        return numbers, key

    @cached_property
    def _taken(self) -> set[str]:
        """The names that fields cannot have."""
        return set(self.averages)

    def head(self, line: str) -> str:
        """Return the object without its closing brace."""
        return line[:-1].rstrip()

    def converted_head(self, row: Row) -> str:
        """Return the columns that the first row has, as CSV."""
        values = [row.fields.get(name, "") for name in self.names]
        return csv_line([v if isinstance(v, str) else json.dumps(v) for v in values])


class Rows:
    """The rows of an input, and how far it has been read."""

    def __init__(self, source: PlainInput, skip_bad: bool, refuse_nan: bool = False) -> None:
        self.source = source
        self.skip_bad = skip_bad
        self.refuse_nan = refuse_nan  # a row with a NaN is bad
        self.lines = 0  # read so far
        self.opened = False  # whether any input has been read
        self.good = 0  # rows with numbers
        self.bad = 0  # skipped rows
        self.first_bad = ""
        self.error = ""  # why reading cannot go on

    def body(self, block: bytes) -> bytes:
        """Return a block without the header, if it has one, and with plain line ends."""
        if b"\r" in block:
            block = block.replace(b"\r\n", b"\n")
        if self.opened:
            return block
        rows = self.source.take_header(block.removeprefix(b"\xef\xbb\xbf"))
        self.opened = True
        self.lines = block.count(b"\n") - rows.count(b"\n")
        return rows

    def take(self, block: bytes) -> tuple[Array, list[str]] | None:
        """Return the numbers of all rows, and their keys, if any; None if a line is odd."""
        try:
            numbers, keys = self.source.take(block)
        except ValueError:
            return None
        if self.refuse_nan and np.isnan(numbers).any():
            return None
        self.lines += len(numbers)
        self.good += len(numbers)
        return numbers, keys

    def parse(self, block: bytes) -> list[Row]:
        """Return the rows of a block; without --skip-bad, up to the first bad one."""
        rows, parse = [], self.source.parse
        for line in decode(block).split("\n")[:-1]:
            self.lines += 1
            if not line or line.isspace():
                continue
            try:
                row = parse(line)
                if self.refuse_nan and any(map(math.isnan, row.numbers)):
                    raise ValueError("expected no NaN, because of --nan raise")
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

    def arrays(self, rows: list[Row]) -> tuple[Array, list[str]]:
        """Return rows in the form of `take`."""
        keys = [] if self.source.by is None else [row.key for row in rows]
        return np.array([row.numbers for row in rows]), keys

    def skipped(self) -> str:
        """Say how many rows were skipped, and why the first one was."""
        rows = "1 row" if self.bad == 1 else f"{self.bad} rows"
        if not self.good:
            return f"skipped every row, {rows}: none could be read; the first is {self.first_bad}"
        return f"skipped {rows}, the first is {self.first_bad}"


def choose_input(columns: list[str] | None, fields: list[str] | None, by: str | None) -> PlainInput:
    """Return the kind of input that --column, --field and --by ask for."""
    if columns and fields:
        raise typer.BadParameter(
            "--column reads CSV, --field reads JSON lines: use only one of them"
        )
    if by is not None and not (columns or fields):
        raise typer.BadParameter("--by needs --column or --field")
    kind = CsvInput if columns else JsonInput if fields else PlainInput
    return kind(list(dict.fromkeys(columns or fields or ["value"])), by)


def has_many_lines(block: bytes) -> bool:
    """Return whether arrays are faster for a block; counting all lines would take longer."""
    return len(block.split(b"\n", MANY)) > MANY


def short(text: str) -> str:
    """Quote a text in a message, shortened if it is long."""
    return repr(text) if len(text) <= 60 else f"{text[:50]!r}… ({len(text)} characters)"


def nearest(name: str, names: list[str]) -> str:
    """Name the columns there are; of many, those with the most similar names."""
    shown, intro = names, "there are"
    if len(names) > NEAREST:
        shown = get_close_matches(name, names, NEAREST) or names[:NEAREST]
        intro = f"of {len(names)}, the nearest are"
    clipped = (text if len(text) <= 60 else f"{text[:50]}…" for text in shown)
    return f"{intro}: {', '.join(clipped)}"


def _field(fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise ValueError(f"expected a field {name!r}, got {list(fields)[:20]}")
    return fields[name]


def _as_float(fields: dict[str, Any], name: str) -> float:
    """Return the number in a field."""
    number = _field(fields, name)
    if not isinstance(number, int | float) or isinstance(number, bool):
        got = json.dumps(number)[:60]
        raise ValueError(f"expected a number in field {name!r}, got {got}")
    try:
        return float(number)
    except OverflowError:  # infinite, as float("1" + 400 * "0") is
        return math.inf if number > 0 else -math.inf
