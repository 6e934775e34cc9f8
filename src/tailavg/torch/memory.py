"""Memory for accumulators, and for weights that are put aside."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

__all__ = ["empty", "round_up"]


def empty(size: int, dtype: torch.dtype, device: torch.device, *, pinned: bool = False) -> Tensor:
    """An uninitialised flat tensor.

    In main memory it uses huge pages where the system has them, which makes the first write to
    100 MB of new memory several times faster.
    """
    if device.type != "cpu" or pinned:
        return torch.empty(size, dtype=dtype, device=device, pin_memory=pinned)
    return torch.frombuffer(_pages(size * dtype.itemsize), dtype=torch.uint8).view(dtype)[:size]


def _pages(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, round_up(size))
    pages = mmap.mmap(-1, round_up(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def round_up(size: int, unit: int = mmap.PAGESIZE) -> int:
    """Round a size in bytes up to a multiple of `unit`, at least one."""
    return max(1, math.ceil(size / unit)) * unit
