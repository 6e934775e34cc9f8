"""Messages to the user, on standard error."""

from __future__ import annotations

from contextlib import suppress
from typing import NoReturn

import typer

FAILED = 1
"""The exit code for bad data or an unusable file. Typer's for a wrong command line is 2."""


def say(message: str) -> None:
    """Write a message to stderr. Ignore a closed or full stderr."""
    with suppress(OSError):
        typer.echo(f"tailavg: {message}", err=True)


def fail(message: str) -> NoReturn:
    """End the command with a message on stderr and exit code 1."""
    say(message)
    raise typer.Exit(FAILED)
