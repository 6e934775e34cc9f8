"""Packages that come with the extras of tailavg."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["needs"]


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Add to the error of a failed import which extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        error.add_note(f"It comes with an extra of tailavg: pip install 'tailavg[{extra}]'")
        raise
