"""Rows from a pipe or a file: in blocks as they arrive, parsed, with bad ones told or skipped."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator

import numpy as np
import typer

from tailavg.cli import signals
from tailavg.cli.cells import Array, decode
from tailavg.cli.common import fail
from tailavg.cli.lines import CsvInput, JsonInput, PlainInput, Row, short

__all__ = ["Blocks", "Rows", "check_input", "has_many_lines", "source_of"]

BLOCK = 1 << 20  # the most bytes to read before answering
MANY = 30  # from this many lines on, arrays are faster


def source_of(columns: list[str] | None, fields: list[str] | None, by: str | None) -> PlainInput:
    """The kind of input that --column, --field and --by ask for."""
    if columns and fields:
        raise typer.BadParameter(
            "--column reads CSV, --field reads JSON lines: use only one of them"
        )
    if by is not None and not (columns or fields):
        raise typer.BadParameter("--by needs --column or --field")
    kind = CsvInput if columns else JsonInput if fields else PlainInput
    return kind(list(dict.fromkeys(columns or fields or ["value"])), by)


def has_many_lines(block: bytes) -> bool:
    """Whether a block has so many lines that arrays are faster; counting all would take longer."""
    return len(block.split(b"\n", MANY)) > MANY


def check_input() -> None:
    """Fail if standard input is closed: the next open file would take its number."""
    try:
        os.fstat(0)
    except OSError as error:
        fail(f"standard input: {error.strerror}")


class Blocks:
    """The input in blocks of complete lines, until it ends or a signal arrives.

    A block is what has arrived. A signal takes effect between blocks. With a `pause`, there is an
    empty block whenever nothing has arrived for so many seconds.
    """

    def __init__(self, file: str, pause: float | None = None) -> None:
        self.name = "standard input" if file == "-" else file
        self._pause = pause
        try:
            self._input = 0 if file == "-" else os.open(file, os.O_RDONLY)
        except OSError as error:
            fail(f"{self.name}: {error.strerror}")
        if os.name == "posix":
            self._wake, self._waker = os.pipe()
            os.set_blocking(self._waker, False)
            signal.set_wakeup_fd(self._waker)

    def __iter__(self) -> Iterator[bytes]:
        """The blocks. A last line without a line end gets one, unless a signal cut it short."""
        rest: list[bytes] = []
        while (chunk := self._read()) != b"":
            head, end, tail = (b"", b"", b"") if chunk is None else chunk.rpartition(b"\n")
            if end:
                yield b"".join([*rest, head, end])
                rest = []
            elif chunk is None:
                yield b""
            rest.append(tail)
        last = b"".join(rest)
        if last and signals.arrived() is None:
            yield last + b"\n"

    def close(self) -> None:
        """Close what was opened."""
        if self._input:
            os.close(self._input)
        if os.name == "posix":
            signal.set_wakeup_fd(-1)
            os.close(self._wake)
            os.close(self._waker)

    def _read(self) -> bytes | None:
        """What has arrived, at least one byte; nothing at the end of the input, None in a pause."""
        parts: list[bytes] = []
        size = 0
        try:
            while size < BLOCK and (ready := self._ready(0 if parts else self._pause)):
                part = os.read(self._input, BLOCK - size)
                if not part:
                    break
                parts.append(part)
                size += len(part)
            if not parts and not ready and signals.arrived() is None:
                return None
        except OSError as error:
            if not parts:  # otherwise it will come again
                error.filename = self.name
                raise
        return b"".join(parts)

    def _ready(self, timeout: float | None) -> bool:
        """Whether there is something to read before the timeout, and no signal has arrived."""
        if os.name != "posix":  # where select cannot wait for a pipe
            return timeout != 0
        while signals.arrived() is None:
            ready, _, _ = select.select([self._input, self._wake], [], [], timeout)
            if self._wake not in ready:
                return bool(ready)
            os.read(self._wake, BLOCK)
        return False


class Rows:
    """What a source says, and how far it has been read."""

    def __init__(self, source: PlainInput, skip_bad: bool) -> None:
        self.source = source
        self.skip_bad = skip_bad
        self.lines = 0  # read so far
        self.opened = False  # whether any input has been read
        self.bad = 0  # skipped rows
        self.first_bad = ""
        self.error = ""  # why reading cannot go on

    def body(self, block: bytes) -> bytes:
        """A block without the header, if it has one, and with plain line ends."""
        if b"\r" in block:
            block = block.replace(b"\r\n", b"\n")
        if self.opened:
            return block
        rows = self.source.take_header(block.removeprefix(b"\xef\xbb\xbf"))
        self.opened = True
        self.lines = block.count(b"\n") - rows.count(b"\n")
        return rows

    def take(self, block: bytes) -> tuple[Array, list[str]] | None:
        """The numbers of all rows, and their keys, if any; None if a line is odd."""
        try:
            numbers, keys = self.source.take(block)
        except ValueError:
            return None
        self.lines += len(numbers)
        return numbers, keys

    def parse(self, block: bytes) -> list[Row]:
        """The rows of a block; without --skip-bad, up to the first bad one."""
        rows, parse = [], self.source.parse
        for line in decode(block).split("\n")[:-1]:
            self.lines += 1
            if not line or line.isspace():
                continue
            try:
                rows.append(parse(line))
            except ValueError as error:
                told = f"line {self.lines}: {short(line)}: {error}"
                if not self.skip_bad:
                    self.error = told
                    break
                self.bad += 1
                self.first_bad = self.first_bad or told
        return rows

    def arrays(self, rows: list[Row]) -> tuple[Array, list[str]]:
        """Rows as `take` gives them."""
        keys = [] if self.source.by is None else [row.key for row in rows]
        return np.array([row.numbers for row in rows]), keys

    def told_bad(self) -> str:
        """What was skipped."""
        rows = "1 row" if self.bad == 1 else f"{self.bad} rows"
        return f"skipped {rows}, the first is {self.first_bad}"
