"""Memory for the means of blocks, and for the weights that a swap saves.

`Accumulators` and `SavedWeights` use it, or `tailavg.torch.folder`, which keeps the same in files.
An update changes only the sum, which is not kept here. Only merges and reads need the means, so
the means may be in main memory while the model is on an accelerator, or in files. The operations
are the same everywhere, so results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Layout", "MemoryBlock", "MemoryStorage", "Slice", "dtype_name"]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, as in NumPy."""
    return str(dtype).removeprefix("torch.")


class Slice(NamedTuple):
    """The place of a tensor in a flat tensor, and its axes in memory order, slowest first."""

    start: int
    stop: int
    shape: torch.Size
    axes: list[int]

    def ordered(self, tensor: Tensor) -> Tensor:
        """Return the tensor with its axes in the order of the flat tensor."""
        return tensor.permute(self.axes)

    def of(self, flat: Tensor) -> Tensor:
        """Return the tensor at this slice of a flat tensor."""
        values = flat[self.start : self.stop].view([self.shape[axis] for axis in self.axes])
        return values.permute([self.axes.index(axis) for axis in range(len(self.axes))])


class Layout(NamedTuple):
    """The layout of a flat tensor: its dtype and device, and the places of tensors in it."""

    size: int
    dtype: torch.dtype
    device: torch.device
    slices: Mapping[str, Slice]


class MemoryBlock:
    """The mean of a block of samples in memory: one flat tensor for each layout."""

    path = None
    """The file of the block, if it has one."""

    def __init__(self, flats: list[Tensor]) -> None:
        self._flats = flats

    def flats(self) -> list[Tensor]:
        """Return the flat tensors."""
        return self._flats

    @contextmanager
    def rewritten(self) -> Iterator[MemoryBlock]:
        """Yield the block in which to `store` a new mean: this block, or one that replaces it."""
        yield self

    def store(self, layout: int, start: int, values: Tensor) -> None:
        """Write values into a flat tensor."""
        self._flats[layout][start : start + len(values)].copy_(values)

    def clear(self) -> None:
        """Discard the values."""


class MemoryStorage:
    """Blocks in memory: on `device`, or by default on the device of the sums."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device

    def new_block(self, layouts: Sequence[Layout]) -> MemoryBlock:
        """Return a block without values."""
        return MemoryBlock([self._zeros(layout) for layout in layouts])

    def _zeros(self, layout: Layout) -> Tensor:
        device = self._device or layout.device
        # copies between pinned memory and an accelerator are faster
        pinned = device.type == "cpu" != layout.device.type
        return torch.zeros(layout.size, dtype=layout.dtype, device=device, pin_memory=pinned)

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of tensors."""
        return [tensor.to(self._device or tensor.device, copy=True) for tensor in tensors]
