"""Where the means of blocks are kept, and weights during a swap: in memory, or in files.

An update touches only the sum, which is always beside the model. Merges and reads touch the means
of blocks, so these may be elsewhere: in main memory while the model is on an accelerator, or in
files (`tailavg.torch.folder`). They are computed by the same operations everywhere, so results are
bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Layout", "MemoryBlock", "MemoryStorage", "Slice", "dtype_name"]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, which is NumPy's name, too."""
    return str(dtype).removeprefix("torch.")


class Slice(NamedTuple):
    """Where a tensor lies in a flat tensor, with its axes in this order, the slowest first."""

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
    """A flat tensor: its dtype and device, and the tensors that lie in it side by side."""

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
        """Yield the block to `store` another mean in: this one, or a new one in its place."""
        yield self

    def store(self, layout: int, start: int, values: Tensor) -> None:
        """Write values into a flat tensor."""
        self._flats[layout][start : start + len(values)].copy_(values)

    def clear(self) -> None:
        """Give up the values."""


class MemoryStorage:
    """Blocks in memory: on one device, or where the sums are."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device

    def new_block(self, layouts: Sequence[Layout]) -> MemoryBlock:
        """Return a block without values."""
        return MemoryBlock([self._zeros(layout) for layout in layouts])

    def _zeros(self, layout: Layout) -> Tensor:
        device = self._device or layout.device
        # an accelerator copies faster to and from pinned memory
        pinned = device.type == "cpu" != layout.device.type
        return torch.zeros(layout.size, dtype=layout.dtype, device=device, pin_memory=pinned)

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of tensors."""
        return [tensor.to(self._device or tensor.device, copy=True) for tensor in tensors]
