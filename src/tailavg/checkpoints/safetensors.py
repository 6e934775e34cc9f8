"""`.safetensors` files, which the format's own library opens and validates.

Numbers are read and written a piece at a time, so that memory does not grow with the file. The
library can do neither: its slices are whole rows in a memory map, and it writes whole files.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tailavg.checkpoints.checkpoint import (
    BUFFER,
    PARTS,
    Averages,
    Checkpoint,
    CheckpointError,
    Piece,
    Tensor,
    flowing,
    read_at,
    stamp_of,
)
from tailavg.io.tensors import NAMES, Entry, header

__all__ = ["Safetensors"]

DTYPES = {code: dtype for dtype, code in NAMES.items()}
WIDE_FIRST = list(NAMES)


class Safetensors(Checkpoint):
    """A `.safetensors` file. The key of a tensor is its name."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        self.stamps = {path: stamp_of(path)}
        try:
            with safe_open(path, "np") as file:
                self._metadata = file.metadata() or {}
                slices = {name: file.get_slice(name) for name in file.offset_keys()}
                kinds = {name: (x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path}: not a complete .safetensors file: {error}; save or copy it again"
            ) from None
        self.tensors = {}
        self._sizes: dict[Hashable, int] = {}
        for name, (code, shape) in kinds.items():
            dtype = DTYPES.get(code, code)
            self.check_dtype(name, dtype)
            if dtype in PARTS:
                tensor = Tensor.averaged(name, dtype, shape, math.prod(shape))
                self._sizes[name] = tensor.numbers * tensor.part.itemsize
            else:
                tensor = Tensor(name, dtype, shape)
                self._sizes[name] = math.prod(shape) * np.dtype(dtype).itemsize
            self.tensors[name] = tensor
        # tensors fill all of a valid file behind its header
        self._header_size = path.stat().st_size - sum(self._sizes.values())
        ends = accumulate(self._sizes.values(), initial=self._header_size)
        self._places = dict(zip(self._sizes, ends, strict=False))
        self._new_header = b""

    def read(self, key: Hashable, start: int, stop: int, out: Piece) -> None:
        tensor = self.tensors[key]
        read_at(self.path, self._places[key] + start * tensor.part.itemsize, out)

    def arrange(self) -> None:
        changed = {key: t.to.name for key, t in self.tensors.items() if t.to != t.part}
        if not changed:
            return
        dtypes = {key: changed.get(key, tensor.dtype) for key, tensor in self.tensors.items()}
        keys = sorted(self.tensors, key=lambda key: WIDE_FIRST.index(dtypes[key]))
        self.tensors = {key: self.tensors[key] for key in keys}
        entries = []
        for key, tensor in self.tensors.items():
            size = tensor.numbers * tensor.to.itemsize or self._sizes[key]
            entries.append(Entry(tensor.name, NAMES[dtypes[key]], tensor.shape, size))
        self._new_header = header(entries, metadata=self._metadata)

    def write(self, outputs: Sequence[BinaryIO], averages: Averages) -> None:
        with ExitStack() as stack:
            writes = [stack.enter_context(flowing(output)) for output in outputs]
            for head in (
                [self._new_header] if self._new_header else self._copied(0, self._header_size)
            ):
                for write in writes:
                    write(head)
            for key, tensor in self.tensors.items():
                if not tensor.numbers:
                    for piece in self._copied(self._places[key], self._sizes[key]):
                        for write in writes:
                            write(piece)
                written = 0
                while written < tensor.numbers:
                    means = next(averages)
                    for write, mean in zip(writes, means, strict=True):
                        write(mean.view(np.uint8))
                    written += len(means[0])

    def _copied(self, place: int, size: int) -> Iterator[Piece]:
        """Read bytes of the file, a buffer at a time."""
        for start in range(place, place + size, BUFFER):
            piece = np.empty(min(BUFFER, place + size - start), np.uint8)
            read_at(self.path, start, piece)
            yield piece
