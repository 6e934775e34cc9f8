"""The loops of merges: plain Python, compiled by numba if it is installed. `sums.py` calls them.

They do what `sums.py` does with NumPy, with the same operations in the same order, so results are
bit-identical; but they go through memory once, without the GIL.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from tailavg.numpy.kernel import compiled, installed

__all__ = ["LONG", "merge_loops"]

LONG = 2**31
"""From this many numbers on, numba saves more time than its import takes."""

BLOCK = 1024  # numbers to convert at once, so that they stay in the L1 cache


def add(sums: Any, changed: Any, first: Any, bits: Any, numbers: Any, weight: Any) -> None:
    """Add numbers times a weight to the sums, and mark those whose bits are not `first`."""
    for i in range(len(sums)):
        sums[i] += numbers[i] * weight
        changed[i] |= bits[i] != first[i]


def add_bfloat16(sums: Any, changed: Any, first: Any, bits: Any, weight: Any) -> None:
    """Do the same with numbers of bfloat16, which are the upper halves of float32."""
    wide = np.empty(BLOCK, np.uint32)
    numbers = wide.view(np.float32)
    for start in range(0, len(sums), BLOCK):
        block = slice(start, min(start + BLOCK, len(sums)))
        upper = bits[block]
        for i in range(len(upper)):
            wide[i] = np.uint32(upper[i]) << np.uint32(16)
        add(sums[block], changed[block], first[block], upper, numbers, weight)


def round_bfloat16(sums: Any, rounded: Any) -> None:
    """Round float64 to the bits of bfloat16, once."""
    bits = np.empty(BLOCK, np.uint32)
    single = bits.view(np.float32)
    low, half, one, upper = np.uint32(0xFFFF), np.uint32(0x8000), np.uint32(1), np.uint32(16)
    for start in range(0, len(sums), BLOCK):
        numbers, out = sums[start : start + BLOCK], rounded[start : start + BLOCK]
        wrong = False
        for i in range(len(numbers)):
            single[i] = numbers[i]
        for i in range(len(numbers)):
            wrong |= ((bits[i] & low) == half) & (single[i] != numbers[i])
        for i in range(len(numbers) if wrong else 0):
            # halfway between two numbers of bfloat16, the float64 says which is nearer
            if (bits[i] & low) == half:
                exact, near = abs(numbers[i]), abs(single[i])
                if exact > near:
                    bits[i] += one
                elif exact < near:
                    bits[i] -= one
        for i in range(len(numbers)):
            to_even = np.uint32(0x7FFF) + ((bits[i] >> upper) & one)
            nan = bits[i] & np.uint32(0x80000000) | np.uint32(0x7FC00000)
            out[i] = np.uint32(nan if single[i] != single[i] else bits[i] + to_even) >> upper


def keep_unchanged(rounded: Any, changed: Any, first: Any) -> None:
    """Replace the bits of means by those of the first numbers, where all have the same."""
    for i in range(len(rounded)):
        mean, same = rounded[i], first[i]  # loaded without a branch, so that LLVM makes vectors
        rounded[i] = mean if changed[i] else same


_LOOPS: list[Any] = [add, add_bfloat16, round_bfloat16, keep_unchanged]


@lru_cache
def _compiled() -> SimpleNamespace | None:
    return compiled(_LOOPS, globals(), nogil=True)


def merge_loops(numbers: int) -> SimpleNamespace | None:
    """Return the compiled loops to add this many numbers with; None to use NumPy."""
    if not installed() or (numbers < LONG and "numba" not in sys.modules):
        return None
    return _compiled()
