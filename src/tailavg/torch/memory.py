"""Memory for accumulators, and for the weights put aside during a swap."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

__all__ = ["Aside", "empty"]

_LINE = 64  # bytes: a cache line


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
        return mmap.mmap(-1, _round_up(size))
    pages = mmap.mmap(-1, _round_up(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _round_up(size: int, unit: int = mmap.PAGESIZE) -> int:
    """Round a size in bytes up to a multiple of `unit`, at least one."""
    return max(1, math.ceil(size / unit)) * unit


class Aside:
    """Copies of tensors, or of parts of them, to put back later."""

    def __init__(self) -> None:
        self.close()

    def close(self) -> None:
        """Forget the copies, and free their memory."""
        self.holds = False
        self._rooms: dict[torch.device, Tensor] = {}
        self._used: dict[torch.device, int] = {}
        self._kept: list[tuple[Tensor, Tensor]] = []

    def open(self, tensors: list[Tensor], device: torch.device | None) -> None:
        """Make room for these tensors: on `device`, or where they are if it is None."""
        sizes: dict[torch.device, int] = {}
        for tensor in tensors:
            place = device or tensor.device
            sizes[place] = sizes.get(place, 0) + _round_up(tensor.numel() * tensor.itemsize, _LINE)
        self._device = device
        for place, size in sizes.items():
            pinned = place.type == "cpu" and any(t.device.type != "cpu" for t in tensors)
            self._rooms[place] = empty(size, torch.uint8, place, pinned=pinned)
        self._used = dict.fromkeys(self._rooms, 0)
        self.holds = True

    def keep(self, tensors: list[Tensor]) -> None:
        """Copy tensors, complete or in parts; all parts but the last must fill cache lines.

        Only finished copies are ever put back.
        """
        if len({(tensor.dtype, tensor.device, tensor.dim() == 1) for tensor in tensors}) > 1:
            for tensor in tensors:
                self.keep([tensor])
            return
        place, dtype = self._device or tensors[0].device, tensors[0].dtype
        sizes = [tensor.numel() for tensor in tensors]
        start, size = self._used[place], sum(sizes) * dtype.itemsize
        room = self._rooms[place][start : start + size].view(dtype)
        parts: tuple[Tensor, ...] = room.split(sizes)  # type: ignore[no-untyped-call]
        if len(tensors) > 1 and tensors[0].dim() == 1:
            torch.cat(tensors, out=room)
        else:
            parts = tuple(part.view(t.shape) for part, t in zip(parts, tensors, strict=True))
            torch._foreach_copy_(parts, tensors)
        self._used[place] += _round_up(size, _LINE)
        self._kept += zip(tensors, parts, strict=True)

    def put_back(self) -> None:
        """Restore what every tensor held."""
        for tensor, room in self._kept:
            tensor.copy_(room)
