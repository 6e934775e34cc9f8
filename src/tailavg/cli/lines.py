"""Lines of text: the three kinds of input, and fast conversion of numbers.

A block of nothing but numbers is converted many lines at a time, with exactly Python's results:
numbers are read as by `float` and written as by `%.12g`. Where the fast conversion might be wrong,
Python converts the line. Once there are many, and if numba is installed, compiled loops do it.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from tailavg.cli import loops
from tailavg.cli.common import fail
from tailavg.numpy import compiling

__all__ = [
    "NUMBER",
    "CsvInput",
    "JsonInput",
    "PlainInput",
    "Row",
    "column",
    "csv_line",
    "decode",
    "encode",
    "format_numbers",
    "nearest",
    "parse_column",
    "parse_numbers",
    "short",
]

DIGITS = 12
"""The significant digits of numbers in the output."""

NEAREST = 10
"""How many columns are named when one is missing."""

NUMBER = f"%.{DIGITS}g"
"""The format of numbers in the output."""

Array = npt.NDArray[Any]

_NEWLINE, _TAB, _COMMA, _MINUS, _DOT, _ZERO = b"\n\t,-.0"
_SLICE = 1 << 17  # bytes handled at once: their arrays fit the cache
_POWERS = 10.0 ** np.arange(23)  # the powers that a float64 holds exactly
_LONGEST = 19 if np.finfo(np.longdouble).nmant >= 63 else 15  # the most digits converted exactly
_DECODER = json.JSONDecoder()
_SCAN: Any = _DECODER.scan_once  # type: ignore[attr-defined]  # what raw_decode calls
_HALF = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # the rest stand for invalid bytes
_FOUR = np.frombuffer(b"".join(b"%04d" % i for i in range(10_000)), np.uint32)  # "0000" … "9999"


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
        return parse_numbers(block)[:, None], []

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
            names = [name.strip() for name in _cells(decode(line))]
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
        width = len(self.names)
        columns = [parse_column(block, place, width) for place in self._places]
        keys: list[str] = []
        if self.by is not None:
            keys = decode(_cells_of(block, self._key_place, width)).split("\n")[:-1]
        return np.stack(columns, axis=1), keys

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
        cells = _cells(line)
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


def decode(text: bytes) -> str:
    """Decode text, keeping invalid bytes for the output."""
    return text.decode(errors="surrogateescape")


def encode(text: str) -> bytes:
    """The bytes that `decode` was given; halves of characters, which JSON may have, as escapes."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        whole = _HALF.sub(lambda half: f"\\u{ord(half[0]):x}", text)
        return whole.encode(errors="surrogateescape")


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
        if "_" not in text:  # which float allows
            return float(text)
    except ValueError:
        pass
    raise ValueError(f"expected {expected}")


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


def _cells(line: str) -> list[str]:
    """The cells of a line of CSV."""
    if '"' not in line:
        return line.split(",")
    csv.field_size_limit(2**31 - 1)
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise ValueError(f"expected CSV ({error})") from error


def csv_line(cells: list[str]) -> str:
    """A line of CSV, without its line end."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def parse_numbers(block: bytes) -> Array:
    r"""The number on each line; raise a ValueError if a line is anything else.

    Examples:
        >>> parse_numbers(b"1.5\n-20\n1e3\n")
        array([   1.5,  -20. , 1000. ])
    """
    compiled = _compiled(len(block))
    if compiled is not None:
        return _parse_compiled(compiled, block, 0, 1)
    return np.concatenate([_parse_slice(part) for part in _slices(block)])


def parse_column(block: bytes, place: int, width: int) -> Array:
    r"""The numbers in a column of CSV; raise a ValueError if a cell or a row is anything else.

    Examples:
        >>> parse_column(b"1,0.5\n2,0.25\n", place=1, width=2)
        array([0.5 , 0.25])
    """
    if b'"' not in block:
        compiled = _compiled(len(block))
        if compiled is not None:
            return _parse_compiled(compiled, block, place, width)
    return parse_numbers(_cells_of(block, place, width))


def _cells_of(block: bytes, place: int, width: int) -> bytes:
    cells = column(block, place, width)
    if cells is None:
        raise ValueError("expected rows with as many cells as the header")
    return cells


_taken = 0  # bytes that were converted while numba was not imported


def _compiled(size: int) -> SimpleNamespace | None:
    """The loops, compiled; None without numba, and while there have been few bytes."""
    global _taken
    if not compiling.installed():
        return None
    _taken += size
    return loops.compiled() if _taken >= loops.LONG else None


def _parse_compiled(compiled: SimpleNamespace, block: bytes, place: int, width: int) -> Array:
    """As `parse_column`, of a block without quotes."""
    lines = block.count(b"\n")
    numbers, odd = np.empty(lines), np.empty((lines, 3), np.int64)
    found = compiled.parse(np.frombuffer(block, np.uint8), place, width, numbers, odd)
    if found < 0:
        raise ValueError("expected a number in each row, and as many cells as the header")
    for row, start, end in odd[:found].tolist():
        cell = block[start:end]
        if b"_" in cell:  # float would read 1_000
            raise ValueError("expected a number, got an underscore")
        numbers[row] = float(cell)
    return numbers


def _slices(block: bytes) -> Iterator[bytes]:
    """Split a block at line ends."""
    start = 0
    while start < len(block):
        end = block.rfind(b"\n", start, start + _SLICE) + 1 or block.index(b"\n", start) + 1
        yield block[start:end]
        start = end


def _parse_slice(block: bytes) -> Array:
    """The number on each line."""
    numbers = _parse_decimals(block)
    if numbers is not None:
        return numbers
    if b"_" in block:  # float would read 1_000
        raise ValueError("expected a number, got an underscore")
    return np.array([float(line) for line in block.split(b"\n")[:-1]])


def _parse_decimals(block: bytes) -> Array | None:
    """The numbers, if each is a decimal such as -12.5; otherwise None."""
    text = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(text == _NEWLINE)
    starts = np.concatenate(([0], ends[:-1] + 1))
    negative = text[starts] == _MINUS
    dots = np.flatnonzero(text == _DOT)
    if len(dots) in (0, len(ends)):
        dotted: Any = slice(len(dots))
    else:
        dotted = np.searchsorted(ends, dots)
    decimals = np.zeros(len(ends), np.int64)
    decimals[dotted] = ends[dotted] - dots - 1
    has_dot = np.zeros(len(ends), np.bool_)
    has_dot[dotted] = True
    lengths = ends - starts - negative - has_dot  # in digits
    in_place = len(ends) + np.count_nonzero(negative) + np.count_nonzero(has_dot)
    if (
        in_place + np.count_nonzero(text - np.uint8(_ZERO) < 10) != len(text)
        or np.any(dots < starts[dotted])
        or np.any(dots > ends[dotted])
        or lengths.min() < 1
    ):
        return None
    digits = b"0" * 24 + block.translate(None, b".-")
    stops = np.cumsum(lengths + 1) - 1
    whole = _eight_digits(digits, stops + 16, lengths)
    longest = min(lengths.max(), _LONGEST)
    for words in range(1, (longest + 7) // 8):
        more = _eight_digits(digits, stops + 16 - 8 * words, lengths - 8 * words)
        whole += more * np.uint64(10 ** (8 * words))
    unsure = lengths > _LONGEST
    decimals = np.minimum(decimals, len(_POWERS) - 1)
    if longest <= 15:  # both are exact, so their ratio is rounded only once
        numbers: Array = whole / _POWERS[decimals]
    else:  # rounded twice, which matters half-way between two floats
        ratio = whole / _POWERS.astype(np.longdouble)[decimals]
        numbers = ratio.astype(np.float64)
        rest, gap = np.abs(ratio - numbers), np.spacing(numbers)
        unsure |= (rest == gap / 2) | (rest == gap / 4)
    for i in np.flatnonzero(unsure).tolist():
        numbers[i] = abs(float(block[starts[i] : ends[i]]))
    return np.negative(numbers, out=numbers, where=negative)


def _eight_digits(text: bytes, offsets: Array, lengths: Array) -> Array:
    """The numbers given by the last `lengths` of the 8 digits at each offset."""
    words = np.ndarray(len(text) - 7, "<u8", text, strides=(1,))[offsets]
    # the first digit is the lowest byte: shift out what precedes the number, then add up pairs
    blank = (64 - 8 * np.minimum(np.maximum(lengths, 0), 8)).astype(np.uint64)
    words ^= np.uint64(0x3030303030303030)
    words >>= blank
    words <<= blank
    for width, mask in ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0xFFFFFFFF)):
        high = words >> np.uint64(width)
        words *= np.uint64(10 ** (width // 8))
        words += high
        words &= np.uint64(mask)
    return words


def column(block: bytes, index: int, width: int) -> bytes | None:
    r"""A column of CSV, one cell per line; None if a cell is quoted or a row has another width.

    Examples:
        >>> column(b"1,0.5\n2,0.25\n", index=1, width=2)
        b'0.5\n0.25\n'
    """
    if b'"' in block:
        return None
    if width == 1:
        return None if b"," in block else block
    parts = [_column_slice(part, index, width) for part in _slices(block)]
    found = [part for part in parts if part is not None]
    return b"".join(found) if len(found) == len(parts) else None


def _column_slice(block: bytes, index: int, width: int) -> bytes | None:
    """The column of some lines; None if a row has another width."""
    text = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(text == _NEWLINE)
    starts = np.concatenate(([0], ends[:-1] + 1))
    commas: Array = np.flatnonzero(text == _COMMA)
    if len(commas) != len(ends) * (width - 1):
        return None
    commas = commas.reshape(len(ends), width - 1)
    if np.any(commas[:, 0] < starts) or np.any(commas[:, -1] > ends):
        return None
    edges = np.zeros(len(text) + 1, np.int8)
    edges[starts if index == 0 else commas[:, index - 1] + 1] = 1
    edges[1 + (ends if index == width - 1 else commas[:, index])] = -1
    cells = text[np.add.accumulate(edges[:-1], dtype=np.int8).view(np.bool_)]
    cells[cells == _COMMA] = _NEWLINE
    return cells.tobytes()


def format_numbers(numbers: Array) -> bytes:
    r"""Format one number per line, as `%.12g`; of a matrix, one row per line, with tabs.

    Examples:
        >>> format_numbers(np.array([1.5, -20, 1 / 3, 1e-9]))
        b'1.5\n-20\n0.333333333333\n1e-09\n'
        >>> format_numbers(np.array([[1.5, -20], [1 / 3, 1e-9]]))
        b'1.5\t-20\n0.333333333333\t1e-09\n'
    """
    width = numbers[:1].size
    compiled = _compiled(loops.WIDEST * numbers.size)
    if compiled is not None:
        return _format_compiled(compiled, np.ascontiguousarray(numbers).ravel(), width)
    step = max(1, _SLICE // 16 // max(1, width))
    return b"".join(
        _format_slice(numbers[start : start + step].ravel(), width)
        for start in range(0, len(numbers), step)
    )


def _format_compiled(compiled: SimpleNamespace, numbers: Array, width: int) -> bytes:
    """As `_format_slice`."""
    wholes, exponents = np.empty((2, len(numbers)), np.int64)
    found = compiled.twelve_digits(numbers, wholes, exponents)
    if 4 * found > len(numbers):
        return _format_by_python(numbers, width)
    left = [(NUMBER % number).encode() for number in numbers[wholes < 0].tolist()] if found else []
    texts = np.array(left, f"S{loops.WIDEST}").view(np.uint8).reshape(found, loops.WIDEST)
    out = np.empty(loops.WIDEST * len(numbers), np.uint8)
    size = compiled.write(numbers, wholes, exponents, width, texts, out)
    return out[:size].tobytes()


def _format_by_python(numbers: Array, width: int) -> bytes:
    line = "\t".join([NUMBER] * width) + "\n"
    return (line * (len(numbers) // width) % tuple(numbers.tolist())).encode()


def _format_slice(numbers: Array, width: int) -> bytes:
    """The lines of some numbers, `width` to a line."""
    sizes = np.abs(numbers)
    usual = (sizes >= 1e-3) & (sizes < 10.0**DIGITS)
    sizes[~usual] = 1.0
    exponents = np.floor(np.log10(sizes)).astype(np.int64)
    scaled = sizes * _POWERS[DIGITS - 1 - exponents]
    rounded = np.rint(scaled)
    # the product is off by less than 2e-4: a fraction this close to a half may round either way
    halves = np.abs(np.abs(scaled - rounded) - 0.5) < 2e-4
    misplaced = (scaled < 10.0 ** (DIGITS - 1)) | (rounded >= 10.0**DIGITS)
    unsure = np.flatnonzero(~usual | halves | misplaced)
    if 4 * len(unsure) > len(numbers):
        return _format_by_python(numbers, width)
    exponents[unsure], rounded[unsure] = 0, 10.0 ** (DIGITS - 1)  # overwritten below
    rows = np.zeros((len(numbers), 20), np.uint8)  # unused bytes stay 0
    rows[:, 0] = (numbers < 0) * np.uint8(_MINUS)
    rows[:, -1] = _TAB
    rows[width - 1 :: width, -1] = _NEWLINE
    digits = _without_zeros(rounded.astype(np.int64))
    present = np.flatnonzero(np.bincount(exponents + 3)) - 3  # -3 for 0.001
    for exponent in present.tolist():
        alike: Any = slice(None) if len(present) == 1 else np.flatnonzero(exponents == exponent)
        point = max(exponent + 1, 0)  # the number of digits before it
        row, digit = rows[alike], digits[alike]
        row[:, 1 : 1 + point] = np.maximum(digit[:, :point], _ZERO)
        after = 2 + point
        if exponent < 0:
            lead = np.frombuffer(b"0." + b"0" * (-1 - exponent), np.uint8)
            after = 1 + len(lead)
            row[:, 1:after] = lead
        elif point < DIGITS:
            row[:, 1 + point] = (digit[:, point] > 0) * np.uint8(_DOT)
        row[:, after : after + DIGITS - point] = digit[:, point:]
        rows[alike] = row
    for i in unsure.tolist():
        text = (NUMBER % numbers[i]).encode().ljust(19, b"\0")
        rows[i, :-1] = np.frombuffer(text, np.uint8)
    return rows.tobytes().translate(None, b"\0")


def _without_zeros(whole: Array) -> Array:
    """The digits of 12-digit integers, with the byte 0 for each trailing zero."""
    high, low = np.divmod(whole, 10**8)
    words = np.empty((len(whole), 3), np.uint32)
    words[:, 0] = _FOUR[high]
    high, low = np.divmod(low, 10**4)
    words[:, 1] = _FOUR[high]
    words[:, 2] = _FOUR[low]
    digits = words.view(np.uint8)
    ending = np.flatnonzero(digits[:, -1] == _ZERO)
    for place in range(DIGITS - 1, 0, -1):
        if not len(ending):
            break
        digits[ending, place] = 0
        ending = ending[digits[ending, place - 1] == _ZERO]
    return digits
