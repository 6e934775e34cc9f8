"""Where the means of blocks are kept, and weights during a swap: in memory, or in files.

An update touches only the sum, which is always beside the model. Folds, turns and reads touch the
means of blocks, so these may be elsewhere: in main memory while the model is on an accelerator, or
in files (`tailavg.torch.folder`). They are worked on in chunks, by the same operations everywhere,
so results are bit-identical.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tailavg.torch.folder import FileBlock, FolderStorage
from tailavg.torch.layout import Layout

__all__ = ["Block", "MemoryStorage", "Offload", "Storage", "storage_for"]

Offload = str | os.PathLike[str] | None


class MemoryBlock:
    """The mean of a block of samples in memory: one flat tensor for each layout."""

    def __init__(self, storage: MemoryStorage, layouts: Sequence[Layout]) -> None:
        self._layouts = layouts
        self._elsewhere = [storage.is_elsewhere(layout.device) for layout in layouts]
        self._flats = [
            torch.zeros(
                layout.size,
                dtype=layout.dtype,
                device=storage.device or layout.device,
                # an accelerator copies to and from pinned memory without waiting
                pin_memory=elsewhere and layout.device.type != "cpu",
            )
            for layout, elsewhere in zip(layouts, self._elsewhere, strict=True)
        ]

    def load(self, layout: int, start: int, stop: int) -> Tensor:
        """Return numbers [start, stop) of a flat tensor on its device: a view, or a copy."""
        part = self._flats[layout][start:stop]
        if not self._elsewhere[layout]:
            return part
        return part.to(self._layouts[layout].device, non_blocking=True, copy=True)

    def store(self, layout: int, start: int, values: Tensor) -> None:
        """Write numbers into a flat tensor."""
        part = self._flats[layout][start : start + len(values)]
        part.copy_(values, non_blocking=self._elsewhere[layout])  # `views` waits for it

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Write all tensors, by name."""
        for name, view in self.views().items():
            view.copy_(values[name])

    def views(self) -> dict[str, Tensor]:
        """Return all tensors, by name, to read them."""
        for layout, elsewhere in zip(self._layouts, self._elsewhere, strict=True):
            if elsewhere and layout.device.type != "cpu":
                torch.accelerator.current_stream(layout.device).synchronize()
        return {
            name: where.of(flat)
            for layout, flat in zip(self._layouts, self._flats, strict=True)
            for name, where in layout.slices.items()
        }

    @contextmanager
    def rewritten(self) -> Iterator[MemoryBlock]:
        """Yield the block to write another mean into: this one, or a new one in its place."""
        yield self

    def emptied(self) -> MemoryBlock:
        """Give up the values, and return a block without values in its place."""
        return self

    def file(self) -> None:
        """Return the file of this block, if it has one."""


class MemoryStorage:
    """Blocks in memory: on one device, or where the sums are."""

    in_place = True
    """Whether a block is overwritten when it changes, instead of replaced."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device

    def is_elsewhere(self, device: torch.device) -> bool:
        """Whether blocks have to be copied to a device to be used there."""
        return self.device is not None and self.device.type != device.type

    def new_block(self, layouts: Sequence[Layout]) -> MemoryBlock:
        """Return a block without values."""
        return MemoryBlock(self, layouts)

    def save(self, tensors: list[Tensor]) -> Callable[[], None]:
        """Copy tensors. Return a function that writes the copies back; it may be called again."""
        copies = [tensor.to(self.device or tensor.device, copy=True) for tensor in tensors]

        def write_back() -> None:
            if copies:
                torch._foreach_copy_(tensors, copies)

        return write_back


Block = MemoryBlock | FileBlock
Storage = MemoryStorage | FolderStorage


def storage_for(offload: Offload | FolderStorage, device: torch.device | None) -> Storage:
    """Return the storage that is asked for; `device` is that of the accumulators, if given."""
    if isinstance(offload, FolderStorage):  # of an average that moves
        return offload
    if offload is None or offload == "cpu":
        return MemoryStorage(device if offload is None else torch.device("cpu"))
    if not isinstance(offload, str | os.PathLike):
        raise TypeError(f'offload: expected None, "cpu" or a folder, got {offload!r}')
    if isinstance(offload, str) and (not offload or _is_device(offload)):
        raise ValueError(
            f'offload: expected None, "cpu" or a folder, got {offload!r}; a folder of that name '
            f'is "./{offload}"'
        )
    return FolderStorage(offload)


def _is_device(name: str) -> bool:
    try:
        torch.device(name.lower())
    except RuntimeError:
        return False
    return True
