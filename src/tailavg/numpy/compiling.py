"""Loops in plain Python, compiled by numba if it is installed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from types import FunctionType, SimpleNamespace
from typing import Any

__all__ = ["compiled", "installed", "together"]

_broken: list[ImportError] = []  # why numba cannot be imported


@lru_cache
def installed() -> bool:
    """Whether numba is there, and works."""
    return find_spec("numba") is not None and not _broken


def together(loops: Sequence[Callable[..., Any]]) -> SimpleNamespace:
    """The loops as they are, by name."""
    return SimpleNamespace(**{loop.__name__: loop for loop in loops})


def compiled(
    loops: Sequence[Callable[..., Any]], names: Mapping[str, Any]
) -> SimpleNamespace | None:
    """The loops, compiled, by name; None if numba does not work. A loop may call those before it.

    Each is compiled when it is first called, or read from numba's cache on disk. That is renewed
    when the file of the loop changes, not when another one does: loops call none of other files.

    Args:
        loops: Plain functions.
        names: What they find: the `globals()` of their module.
    """
    try:
        from numba import njit
    except ImportError as error:  # as of another version of NumPy
        _broken.append(error)
        installed.cache_clear()
        warnings.warn(f"numba cannot be imported, so scans are slower: {error}", stacklevel=3)
        return None
    found = dict(names)
    for loop in loops:  # a copy that finds the compiled ones under the names of the plain ones
        assert isinstance(loop, FunctionType)
        copy = FunctionType(loop.__code__, found, loop.__name__)
        try:
            found[loop.__name__] = njit(cache=True, error_model="numpy")(copy)
        except RuntimeError:  # there is no folder that a cache could be written to
            found[loop.__name__] = njit(error_model="numpy")(copy)
    return SimpleNamespace(**{loop.__name__: found[loop.__name__] for loop in loops})
