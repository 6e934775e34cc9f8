"""Memory for accumulators and for what is put aside during a swap."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

__all__ = ["Aside", "empty"]

_LINE = 64  # bytes; accumulators start on a cache line


def empty(size: int, dtype: torch.dtype, device: torch.device, *, pinned: bool = False) -> Tensor:
    """A flat tensor, uninitialised.

    In main memory it comes from NumPy, which asks for huge pages: on Linux the first write to
    100 MB of new memory is then several times faster.
    """
    if device.type != "cpu" or pinned:
        return torch.empty(size, dtype=dtype, device=device, pin_memory=pinned)
    room = torch.from_numpy(np.empty(size * dtype.itemsize + _LINE, np.uint8))
    start = -room.data_ptr() % _LINE
    return room[start : start + size * dtype.itemsize].view(dtype)


class Aside:
    """Copies of tensors, or of parts of them, and the way back."""

    def __init__(self, tensors: list[Tensor], device: torch.device | None) -> None:
        sizes: dict[torch.device, int] = {}
        for tensor in tensors:
            place = device or tensor.device
            sizes[place] = sizes.get(place, 0) + _padded(tensor.numel() * tensor.itemsize)
        self._rooms = {place: empty(size, torch.uint8, place) for place, size in sizes.items()}
        self._used = dict.fromkeys(self._rooms, 0)
        self._device = device
        self._kept: list[tuple[Tensor, Tensor]] = []

    def keep(self, tensor: Tensor) -> None:
        """Put a copy aside: a tensor, or its parts one by one, all but the last of whole lines.

        Only what was copied to its end is ever put back.
        """
        place = self._device or tensor.device
        size = tensor.numel() * tensor.itemsize
        start = self._used[place]
        room = self._rooms[place][start : start + size].view(tensor.dtype).view(tensor.shape)
        room.copy_(tensor)
        self._used[place] = start + _padded(size)
        self._kept.append((tensor, room))

    def put_back(self) -> None:
        """Give every tensor back what it held."""
        for tensor, room in self._kept:
            tensor.copy_(room)


def _padded(size: int) -> int:
    return math.ceil(size / _LINE) * _LINE
