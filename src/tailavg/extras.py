"""Errors for missing packages. The adapters import optional packages inside `needs`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["needs"]


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Add a note to the error of a failed import: which extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        error.add_note(f"{error.name} comes with an extra: pip install 'tailavg[{extra}]'")
        raise
