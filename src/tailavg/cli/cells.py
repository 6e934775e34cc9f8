"""Text to numbers and back: what the inputs of `lines` read, and what `stream` writes.

Numbers are read as `float` reads them and written as `"%.12g"`, on every path through this module.
pyarrow, if it is installed, reads long inputs, but only where its results cannot differ: rows
without quotes, and cells that consist of digits, signs, points and exponents.
"""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tailavg.core.elapsed import LONGEST

NUMBER = "%.12g"
"""The format of numbers in the output."""

LONG = 4 << 20
"""How many bytes Python reads before pyarrow is imported. The import takes about as long."""

LARGE, HUGE = 1 << 14, 1 << 30
"""The sizes of blocks that pyarrow reads. It is slow on smaller blocks and refuses larger ones."""

BLANKS = " "
"""The delimiter of columns that are aligned with spaces or tabs."""

Array = npt.NDArray[Any]

_DELIMITERS = ("\t", ",", ";")  # and `BLANKS`
_DECIMAL = b"0123456789+-.eE"  # of cells with these bytes, pyarrow reads the same numbers as float
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MICRO = 10**6
"""The microseconds in a second."""

_LATEST = LONGEST / 10**9  # seconds
_CHUNK = 2000  # numbers to format at once: few enough for the cache


class BlockReader:
    """Read numbers from blocks of complete lines. Its methods raise a ValueError at an odd line.

    The caller then parses the block line by line, to skip the odd line or to report what is wrong.
    """

    def __init__(self) -> None:
        self._read = 0  # the bytes of all large blocks so far

    def numbers(self, block: bytes) -> Array:
        r"""Return the number on each line.

        Examples:
            >>> BlockReader().numbers(b"1.5\n-20\n1e3\n")
            array([   1.5,  -20. , 1000. ])
        """
        columns = self._arrow_columns(block, 1, [0])
        if columns is None:
            return _floats(decode(block).split("\n")[:-1])
        return _arrow_floats(columns[0])

    def table(
        self,
        block: bytes,
        width: int,
        places: list[int],
        key: int | None,
        delimiter: str = ",",
        times: bool = False,
    ) -> tuple[Array, list[str]]:
        r"""Return the numbers in some columns of CSV, one row per line, and the cells of the key.

        Args:
            block: Rows of CSV, without the header.
            width: The number of cells in each row.
            places: The indices of the columns with numbers.
            key: The index of the column with keys, if there is one.
            delimiter: See `split_cells`.
            times: Whether the first of the columns has times, which `parse_time` reads.

        Examples:
            >>> BlockReader().table(b"1,0.5,a\n2,0.25,b\n", width=3, places=[1], key=2)
            (array([[0.5 ],
                   [0.25]]), ['a', 'b'])
        """
        wanted = places if key is None else [*places, key]
        columns = self._arrow_columns(block, width, wanted, delimiter)
        if columns is not None:
            numbers = [_arrow_floats(column) for column in columns[times : len(places)]]
            if times:
                numbers.insert(0, parse_times(_texts(columns[0])))
            return np.stack(numbers, axis=1), [] if key is None else _texts(columns[-1])
        lines = decode(block).split("\n")[:-1]
        rows = (cells for line in lines if len(cells := split_cells(line, delimiter)) == width)
        texts = [cells[place] for cells in rows for place in wanted]
        if len(texts) != len(lines) * len(wanted):
            raise ValueError("expected rows with as many cells as the header")
        numbers = [
            (parse_times if times and i == 0 else _floats)(texts[i :: len(wanted)])
            for i in range(len(places))
        ]
        return np.stack(numbers, axis=1), [] if key is None else texts[len(places) :: len(wanted)]

    def _arrow_columns(
        self, block: bytes, width: int, places: list[int], delimiter: str = ","
    ) -> list[Any] | None:
        """Return columns as Arrow arrays of bytes, or None if Python should read this block."""
        if not LARGE <= len(block) < HUGE or delimiter == BLANKS:
            return None
        self._read += len(block)
        if (
            self._read < LONG
            or b'"' in block
            or b"\r" in block  # a line end to pyarrow
            or block.startswith(_BYTE_ORDER_MARK)  # which pyarrow would skip
        ):
            return None
        arrow = _pyarrow()
        if arrow is None:
            return None
        names = [str(place) for place in range(width)]
        wanted = [names[place] for place in places]
        table = arrow.csv.read_csv(
            arrow.BufferReader(block),
            arrow.csv.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=names),
            arrow.csv.ParseOptions(
                delimiter=delimiter, quote_char=False, double_quote=False, ignore_empty_lines=False
            ),
            arrow.csv.ConvertOptions(
                column_types=dict.fromkeys(wanted, arrow.binary()),
                include_columns=list(dict.fromkeys(wanted)),
            ),
        )
        return [table.column(name).combine_chunks() for name in wanted]


@cache
def _pyarrow() -> Any:
    """Return pyarrow, or None if it is not installed or does not work with the installed NumPy."""
    try:
        import pyarrow.csv
    except ImportError:
        return None
    pyarrow.enable_signal_handlers(False)  # cli.signals handles them
    return pyarrow


def _arrow_floats(cells: Any) -> Array:
    """Return the numbers in an Arrow array of cells."""
    if bytes(cells.buffers()[2]).translate(None, _DECIMAL):
        return _floats(_texts(cells))
    numbers = cells.view("string").cast("float64")
    return np.array(np.from_dlpack(numbers))  # to_numpy would import pandas


def _texts(cells: Any) -> list[str]:
    """Return an Arrow array of cells as strings."""
    return decode(b"\n".join(cells.to_pylist())).split("\n")


def _floats(texts: list[str]) -> Array:
    """Return texts as numbers; raise a ValueError if a text is not a number."""
    if "_" in "".join(texts):
        raise ValueError("expected a number, got an underscore")
    return np.fromiter(map(float, texts), np.float64, len(texts))


def parse_number(text: str, expected: str = "a number") -> float:
    """Return `float(text)`; raise a ValueError at an underscore, which `float` allows."""
    try:
        if "_" not in text:
            return float(text)
    except ValueError:
        pass
    raise ValueError(f"expected {expected}")


def parse_times(texts: list[str]) -> Array:
    """Return times as `parse_time` does; raise a ValueError if a text is not a time."""
    try:
        seconds = _floats(texts)
    except ValueError:
        return np.array([parse_time(text) for text in texts])
    if not (np.abs(seconds) <= _LATEST).all():
        raise ValueError("expected times")
    microseconds: Array = np.rint(seconds * MICRO)
    return microseconds


def datetimes(microseconds: Any) -> Array:
    """Return times that `parse_time` returned as datetime64s in nanoseconds."""
    return (np.array(microseconds, np.int64) * 1000).view("datetime64[ns]")


def parse_time(text: str) -> float:
    """Return a time in whole microseconds since 1970: exact for six decimals.

    A number is in seconds. Other texts are in ISO 8601, in UTC unless they have a time zone.

    Examples:
        >>> parse_time("0.25"), parse_time("1970-01-01T00:00:01Z"), parse_time("1970-01-02")
        (250000.0, 1000000.0, 86400000000.0)
    """
    try:
        if abs(seconds := parse_number(text)) <= _LATEST:
            return float(round(seconds * MICRO))
    except ValueError:
        try:
            time = datetime.fromisoformat(text.strip())
        except ValueError:
            pass
        else:
            time = time if time.tzinfo else time.replace(tzinfo=UTC)
            since = time - datetime(1970, 1, 1, tzinfo=UTC)
            if abs(since.total_seconds()) <= _LATEST:
                return float((since.days * 86400 + since.seconds) * MICRO + since.microseconds)
    raise ValueError(
        "expected a time within 146 years of 1970: epoch seconds, or ISO 8601 such as "
        "2026-05-01T12:30:00Z"
    )


def split_cells(line: str, delimiter: str = ",") -> list[str]:
    """Return the cells of a line; raise a ValueError if it has stray quotes.

    Args:
        line: A line of CSV.
        delimiter: The character between cells; a space stands for any number of spaces and tabs.
    """
    if delimiter == BLANKS:
        return line.split()
    if '"' not in line:
        return line.split(delimiter)
    csv.field_size_limit(2**31 - 1)
    try:
        return next(csv.reader([line], strict=True, delimiter=delimiter))
    except csv.Error as error:
        raise ValueError(f"expected CSV ({error})") from error


def guess_delimiter(line: str, names: list[str]) -> str:
    """Return the delimiter of a header that should have these names.

    Examples:
        >>> guess_delimiter("step;train loss", ["train loss"]), guess_delimiter("1 0.5", ["2"])
        (';', ' ')
    """
    for delimiter in _DELIMITERS:
        if {*names} <= {cell.strip() for cell in line.split(delimiter)}:
            return delimiter
    return next((each for each in _DELIMITERS if each in line), BLANKS if " " in line else ",")


def csv_line(cells: list[str], delimiter: str = ",") -> str:
    """Return a line of CSV, without its line end."""
    text = io.StringIO()
    csv.writer(text, lineterminator="", delimiter=delimiter).writerow(cells)
    return text.getvalue()


def format_numbers(numbers: Array, separator: str = "\t") -> bytes:
    r"""Return a text with one number per line, or with one row of a matrix per line.

    Examples:
        >>> format_numbers(np.array([1.5, -20, 1 / 3, 1e-9]))
        b'1.5\n-20\n0.333333333333\n1e-09\n'
        >>> format_numbers(np.array([[1.5, -20], [1 / 3, 1e-9]]), ",")
        b'1.5,-20\n0.333333333333,1e-09\n'
    """
    width = max(1, numbers[:1].size)
    line = separator.join([NUMBER] * width).encode() + b"\n"
    step = max(1, _CHUNK // width)
    chunks = (numbers[start : start + step] for start in range(0, len(numbers), step))
    return b"".join([line * len(chunk) % tuple(chunk.ravel().tolist()) for chunk in chunks])


def decode(text: bytes) -> str:
    """Return bytes as text; `encode` restores bytes that are not valid UTF-8."""
    return text.decode(errors="surrogateescape")


def encode(text: str) -> bytes:
    """Return text as bytes: reverse `decode`. Lone surrogates, as in JSON, become escapes."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace")
