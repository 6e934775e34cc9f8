"""What is not installed with tailavg itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["needs"]


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Imports that may fail: Python's own error then also says which extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        error.add_note(f"It comes with an extra of tailavg: pip install 'tailavg[{extra}]'")
        raise
