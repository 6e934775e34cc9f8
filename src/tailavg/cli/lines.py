"""The three kinds of input of `stream` and `plot`: plain numbers, CSV and JSON lines.

`rows` calls them: `take` reads a block of many lines at once, `parse` a single line. `take` gives
up at any odd line; `parse` says what is wrong with it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from tailavg.cli.cells import Array, BlockReader, csv_line, decode, parse_number, split_cells
from tailavg.cli.common import fail

__all__ = ["CsvInput", "JsonInput", "PlainInput", "Row", "nearest", "short"]

NEAREST = 10
"""How many columns are named when one is missing."""

_DECODER = json.JSONDecoder()
_SCAN: Any = _DECODER.scan_once  # type: ignore[attr-defined]  # what raw_decode calls


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
    names: list[str] | None = None  # of all columns, once known
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
        """The numbers, one row per line, and the keys, if any; raise a ValueError if a line is odd.

        Its lines are then parsed one by one.
        """
        return self.reader.numbers(block)[:, None], []

    def parse(self, line: str) -> Row:
        """Parse a line; raise a ValueError that says what is wrong with it."""
        try:
            return Row(line, [_number(line, "a number")], "", [line])
        except ValueError as error:
            if line.lstrip().startswith("{"):
                raise ValueError(f"{error}, or --field NAME for JSON lines") from None
            if "," in line:
                raise ValueError(f"{error}, or --column NAME for CSV") from None
            raise

    def csv_cells(self, row: Row) -> str:
        """The columns of the input, as CSV."""
        return row.line

    def json_object(self, row: Row) -> str:
        """The columns of the input, as JSON: averaged columns as numbers, others as strings."""
        assert self.names is not None
        fields: dict[str, Any] = {}
        for name, cell in zip(self.names, row.fields, strict=True):
            fields.setdefault(name, cell)  # of columns of one name, the first
        fields |= zip(self.columns, map(_json_number, row.numbers), strict=True)
        return json.dumps(fields, ensure_ascii=False)

    def check_names(self) -> None:
        """Fail if a column is missing, or the name of an average is taken."""
        assert self.names is not None
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
        """The block without its header, which may be missing when resuming from a state."""
        line, _, rest = block.partition(b"\n")
        try:
            names = [name.strip() for name in split_cells(decode(line))]
        except ValueError as error:
            fail(f"line 1, the header: {error}")
        if self.names is not None:
            return rest if names == self.names else block
        self.names = names
        self.check_names()
        return rest

    def take(self, block: bytes) -> tuple[Array, list[str]]:
        """See `PlainInput`."""
        assert self.names is not None
        key = None if self.by is None else self._key_place
        return self.reader.table(block, len(self.names), self._places, key)

    @cached_property
    def _places(self) -> list[int]:
        """Where the averaged columns are."""
        assert self.names is not None
        return [self.names.index(name) for name in self.columns]

    @cached_property
    def _key_place(self) -> int:
        assert self.names is not None
        assert self.by is not None
        return self.names.index(self.by)

    def parse(self, line: str) -> Row:
        """Parse a line; raise a ValueError that says what is wrong with it."""
        assert self.names is not None
        cells = split_cells(line)
        if len(cells) != len(self.names):
            raise ValueError(f"expected {len(self.names)} cells, got {len(cells)}")
        pairs = zip(self._places, self.columns, strict=True)
        numbers = [_number(cells[place], f"a number in column {name!r}") for place, name in pairs]
        return Row(line, numbers, "" if self.by is None else cells[self._key_place], cells)


class JsonInput(CsvInput):
    """JSON lines: one object per line."""

    kind = "jsonl"
    carries = "jsonl"

    def take_header(self, block: bytes) -> bytes:
        """Return the block unchanged: the first row names the columns."""
        return block

    def take(self, block: bytes) -> tuple[Array, list[str]]:
        """See `PlainInput`. No object is kept: memory that is used again is faster."""
        numbers: list[float] = []
        keys: list[str] = []
        scan, columns, by, taken = _SCAN, self.columns, self.by, self._taken
        try:
            for line in decode(block).split("\n")[:-1]:
                fields, end = scan(line, 0)
                if end != len(line) or not fields.keys().isdisjoint(taken):
                    raise ValueError
                for name in columns:
                    number = fields[name]
                    if number.__class__ is not float:
                        if number.__class__ is not int:
                            raise ValueError
                        number = float(number)
                    numbers.append(number)
                if by is not None:
                    key = fields[by]
                    keys.append(key if key.__class__ is str else json.dumps(key))
                if self.names is None:
                    self.names = list(fields)
        except Exception as error:  # whatever it is, it is said of the line that it is in
            raise ValueError("expected JSON objects with these fields") from error
        return np.array(numbers).reshape(-1, len(columns)), keys

    def parse(self, line: str) -> Row:
        """Parse a line; raise a ValueError that says what is wrong with it."""
        fields = _json(line)
        if not isinstance(fields, dict):
            raise ValueError("expected a JSON object")
        numbers = []
        for name in self.columns:
            number = fields.get(name)
            if number.__class__ is float:
                numbers.append(number)
                continue
            if name not in fields:
                raise ValueError(f"expected a field {name!r}, got {list(fields)[:20]}")
            if not isinstance(number, int | float) or isinstance(number, bool):
                got = json.dumps(number)[:60]
                raise ValueError(f"expected a number in field {name!r}, got {got}")
            try:
                numbers.append(float(number))
            except OverflowError:  # as float does with as many digits
                numbers.append(math.inf if number > 0 else -math.inf)
        key: Any = ""
        if self.by is not None:
            if self.by not in fields:
                raise ValueError(f"expected a field {self.by!r}, got {list(fields)[:20]}")
            key = fields[self.by]
        if not fields.keys().isdisjoint(self._taken):
            taken = [name for name in self._taken if name in fields]
            raise ValueError(f"expected no field {taken[0]!r}, the name of the average")
        if self.names is None:
            self.names = list(fields)
        return Row(line.strip(), numbers, key if isinstance(key, str) else json.dumps(key), fields)

    @cached_property
    def _taken(self) -> list[str]:
        """The names that fields cannot have."""
        return self.averages

    def json_object(self, row: Row) -> str:
        """The line, unchanged."""
        return row.line

    def csv_cells(self, row: Row) -> str:
        """The columns that the first row has, as CSV."""
        assert self.names is not None
        values = [row.fields.get(name, "") for name in self.names]
        return csv_line([v if isinstance(v, str) else json.dumps(v) for v in values])


def short(text: str) -> str:
    """Quote a text in a message, shortened if it is long."""
    return repr(text) if len(text) <= 60 else f"{text[:50]!r}… ({len(text)} characters)"


def nearest(name: str, names: list[str]) -> str:
    """The columns there are; of many, those with the most similar names."""
    if len(names) <= NEAREST:
        return f"there are: {', '.join(map(_clipped, names))}"
    near = get_close_matches(name, names, NEAREST) or names[:NEAREST]
    return f"of {len(names)}, the nearest are: {', '.join(map(_clipped, near))}"


def _clipped(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:50]}…"


def _number(text: str, expected: str) -> float:
    try:
        return parse_number(text)
    except ValueError:
        raise ValueError(f"expected {expected}") from None


def _json(line: str) -> Any:
    """What a line of JSON says."""
    try:
        fields, end = _DECODER.raw_decode(line)
        if end == len(line):
            return fields
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(line)  # with spaces around it, or with its own error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object ({error})") from error


def _json_number(number: float) -> float | None:
    """None for infinities and NaN, which JSON lacks."""
    return number if math.isfinite(number) else None
