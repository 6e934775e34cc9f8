"""Read a pipe or a file in blocks of the complete lines that have arrived."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator

from tailavg.cli import signals
from tailavg.cli.common import fail

BLOCK = 1 << 20  # the most bytes in a block


class Blocks:
    """The input in blocks of complete lines, until it ends or a signal arrives.

    A block consists of the lines that have arrived. A signal takes effect between blocks. If
    nothing arrives for `pause` seconds, iteration yields an empty block. With `text`, a carriage
    return also ends a line, since progress bars write no other line ends.
    """

    def __init__(self, file: str, pause: float | None = None, text: bool = False) -> None:
        self.name = "standard input" if file == "-" else file
        self._pause, self._text = pause, text
        self._opened = file != "-"
        try:
            self._input = os.open(file, os.O_RDONLY) if self._opened else 0
            os.fstat(self._input)  # fails if standard input is closed and its number free
        except OSError as error:
            fail(f"{self.name}: {error.strerror}")
        if os.name == "posix":
            self._wake, self._waker = os.pipe()
            os.set_blocking(self._waker, False)
            signal.set_wakeup_fd(self._waker)

    def __iter__(self) -> Iterator[bytes]:
        """Yield the blocks. Add a missing line end to the last line, unless a signal cut it off."""
        unfinished: list[bytes] = []
        while (chunk := self._read()) != b"":
            if chunk is None:
                yield b""
                continue
            if self._text:
                chunk = chunk.replace(b"\r", b"\n")
            lines, end, tail = chunk.rpartition(b"\n")
            if end:
                yield b"".join([*unfinished, lines, end])
                unfinished = []
            unfinished.append(tail)
        last = b"".join(unfinished)
        if last and signals.arrived() is None:
            yield last + b"\n"

    def close(self) -> None:
        """Close the file and the pipe for signals."""
        if self._opened:
            os.close(self._input)
        if os.name == "posix":
            signal.set_wakeup_fd(-1)
            os.close(self._wake)
            os.close(self._waker)

    def _read(self) -> bytes | None:
        """Return the bytes that have arrived: b"" at the end of the input, None after a pause."""
        chunks: list[bytes] = []
        size = 0
        try:
            while size < BLOCK and (ready := self._ready(0 if chunks else self._pause)):
                chunk = os.read(self._input, BLOCK - size)
                if not chunk:
                    break
                chunks.append(chunk)
                size += len(chunk)
            if not chunks and not ready and signals.arrived() is None:
                return None
        except OSError as error:
            if not chunks:  # otherwise the next read will fail again
                error.filename = self.name
                raise
        return b"".join(chunks)

    def _ready(self, timeout: float | None) -> bool:
        """Return whether input can be read before the timeout and before a signal."""
        if os.name != "posix":  # select cannot wait for a pipe there
            return timeout != 0
        while signals.arrived() is None:
            ready, _, _ = select.select([self._input, self._wake], [], [], timeout)
            if self._wake not in ready:
                return bool(ready)
            os.read(self._wake, BLOCK)
        return False
