"""Run the commands of `tailavg` in this process, as `python -m tailavg` runs them in its own.

Most tests use `run`, `done` and `failed`: a process of its own takes half a second to start. Tests
of signals, kills, limits and closed pipes start `TAILAVG` with `tests.support.processes`. That both
ways agree is shown by tests/cli/test_process.py.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple
from unittest import mock

import typer.main

import tailavg.__main__
from tailavg.cli import signals

TAILAVG = [sys.executable, "-m", "tailavg"]
GET_COMMAND = cache(typer.main.get_command)  # it takes most of the time of a short command
WIDE = {"COLUMNS": "400"}  # so that messages are not wrapped


class Ended(NamedTuple):
    """How a command ended: its exit code, and the bytes that it wrote."""

    code: int
    output: bytes
    messages: bytes

    @property
    def stdout(self) -> str:
        return self.output.decode()

    @property
    def stderr(self) -> str:
        return self.messages.decode()

    @property
    def told(self) -> str:
        """The messages in one line, without the frame that is drawn around some."""
        return " ".join(self.stderr.replace("│", " ").split())


def run(
    *arguments: Any,
    text: str | bytes = "",
    code: int | None = 0,
    folder: Path | str = ".",
    encoding: str = "utf-8",
    output: IO[bytes] | None = None,
    **environment: str,
) -> Ended:
    """Run a command to its end. Fail unless it exits with `code`; None is any.

    Args:
        arguments: The command line, without the name of the program.
        text: What comes through the pipe that is the standard input.
        code: The exit code that is expected.
        folder: The working directory.
        encoding: That of the standard streams.
        output: The file to be the standard output, instead of a temporary one.
        environment: Environment variables to set.
    """
    with ExitStack() as stack:
        written = output or stack.enter_context(tempfile.TemporaryFile())
        messages = stack.enter_context(tempfile.TemporaryFile())
        with ExitStack() as program:
            program.enter_context(chdir(folder))
            program.enter_context(mock.patch.dict(os.environ, WIDE | environment))
            program.enter_context(_standard_streams(text, written, messages, encoding))
            program.enter_context(_as_at_the_start())
            program.enter_context(_as_a_program(arguments))
            try:
                tailavg.__main__.main()
            except SystemExit as end:
                exit_code = end.code
        ended = Ended(exit_code, b"" if output else _content(written), _content(messages))
    assert code in (None, ended.code), f"exit code {ended.code}: {ended.messages!r}"
    assert b"Traceback" not in ended.messages, ended.stderr
    assert b"Warning" not in ended.messages, ended.stderr
    return ended


def done(*arguments: Any, **options: Any) -> str:
    """Run a command that has nothing to tell, and return what it wrote."""
    ended = run(*arguments, **options)
    assert not ended.stderr
    return ended.stdout


def failed(*arguments: Any, code: int = 1, **options: Any) -> tuple[str, str]:
    """Run a command that fails, and return what it wrote and told."""
    ended = run(*arguments, code=code, **options)
    return ended.stdout, ended.told


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


@contextmanager
def _as_a_program(arguments: tuple[Any, ...]) -> Iterator[None]:
    """Set the command line, and the name of the program that messages show."""
    command_line = [tailavg.__main__.__file__, *map(str, arguments)]
    with (
        mock.patch.object(sys, "argv", command_line),
        mock.patch.object(sys.modules["__main__"], "__package__", "tailavg"),
    ):
        yield


@contextmanager
def _as_at_the_start() -> Iterator[None]:
    """Let a command find what it finds in a new process, and put back what it changes."""
    handled = [*signals.SIGNALS, signal.SIGALRM]
    handlers = {number: signal.getsignal(number) for number in handled}
    with (
        mock.patch.multiple(
            signals, _act=signals.Act.leave, _arrived=None, _last=-signals.AGAIN, _stopped=None
        ),
        mock.patch.object(typer.main, "get_command", GET_COMMAND),
        mock.patch.object(sys, "unraisablehook", sys.unraisablehook),
    ):
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextmanager
def _standard_streams(
    text: str | bytes, output: IO[bytes], messages: IO[bytes], encoding: str
) -> Iterator[None]:
    """Replace the three standard streams: the descriptors, and the files in `sys`."""
    reader, writer = os.pipe()
    data = text.encode() if isinstance(text, str) else text
    feeder = threading.Thread(target=_feed, args=(writer, data))
    feeder.start()
    before = [os.dup(number) for number in range(3)]
    for number, descriptor in enumerate([reader, output.fileno(), messages.fileno()]):
        os.dup2(descriptor, number)
    os.close(reader)
    try:
        with (
            open(0, encoding=encoding, closefd=False) as stdin,
            open(1, "w", encoding=encoding, closefd=False) as stdout,
            open(2, "w", 1, encoding, "backslashreplace", closefd=False) as stderr,
            mock.patch.multiple(sys, stdin=stdin, stdout=stdout, stderr=stderr),
        ):
            yield
    finally:
        for number, descriptor in enumerate(before):
            os.dup2(descriptor, number)
            os.close(descriptor)
        feeder.join()


def _feed(writer: int, data: bytes) -> None:
    with suppress(BrokenPipeError):  # a command need not read all of its input
        unwritten = memoryview(data)
        while unwritten:
            unwritten = unwritten[os.write(writer, unwritten) :]
    os.close(writer)


PROFILE = ["profile", "--window", "0.25", "--count", "1e7"]
CHECKPOINTS = ["checkpoints", *(f"{i}.safetensors" for i in range(4)), "--window", "1.0"]
CHECKPOINTS += ["-o", "average.safetensors"]
REPRODUCE = ["reproduce", "--quick", "--runs", "2", "--batches", "10", "-o", "out"]
COMMANDS = {
    "profile": PROFILE,
    "profile json": [*PROFILE, "--format", "json"],
    "checkpoints": CHECKPOINTS,
    "reproduce": REPRODUCE,
    "help": ["--help"],
    "version": ["--version"],
    "plot": ["plot", "numbers.txt"],
    "stream": ["stream", "-w", "2", os.devnull],
}
