"""How tensors lie side by side in flat tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Layout", "Slice"]


class Slice(NamedTuple):
    """Where a tensor lies in a flat tensor, and in which order of elements."""

    start: int
    stop: int
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def axis_order(self) -> list[int]:
        """The axes from the slowest to the fastest; empty if that is their own order."""
        axes = sorted(range(len(self.shape)), key=lambda axis: -self.stride[axis])
        long = [axis for axis in axes if self.shape[axis] != 1]
        return axes if long != sorted(long) else []

    def shaped(self, elements: Tensor) -> Tensor:
        """Return the elements of this slice, which are flat, as a tensor."""
        return elements.as_strided(self.shape, self.stride)

    def of(self, flat: Tensor) -> Tensor:
        """Return the tensor at this slice of a flat tensor."""
        return self.shaped(flat[self.start : self.stop])


class Layout(NamedTuple):
    """A flat tensor: its dtype and device, and the tensors that lie in it without gaps."""

    size: int
    dtype: torch.dtype
    device: torch.device
    slices: Mapping[str, Slice]
