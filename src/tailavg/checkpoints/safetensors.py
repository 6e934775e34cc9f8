"""`.safetensors` files, which the format's own library opens and validates.

Numbers are read and written a piece at a time, so that memory does not grow with the file. The
library can do neither: its slices are whole rows in a memory map, and it writes whole files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tailavg.checkpoints.checkpoint import (
    PARTS,
    Averages,
    Checkpoint,
    CheckpointError,
    Piece,
    read_at,
    stamp_of,
)
from tailavg.io.files import sync
from tailavg.io.tensors import NAMES, Entry, header

__all__ = ["Safetensors"]

DTYPES = {code: dtype for dtype, code in NAMES.items()}
WIDE_FIRST = list(NAMES)

BUFFER = 2**20
"""How many bytes to copy at once."""


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
            dtype, elements = DTYPES.get(code, code), math.prod(shape)
            tensor = self.tensors[name] = self.described(name, dtype, shape, elements)
            self._sizes[name] = tensor.numbers * tensor.part.itemsize
            if dtype not in PARTS:
                self._sizes[name] = elements * np.dtype(dtype).itemsize
        # tensors fill all of a valid file behind its header
        self._header_size = path.stat().st_size - sum(self._sizes.values())
        ends = accumulate(self._sizes.values(), initial=self._header_size)
        self._positions = dict(zip(self._sizes, ends, strict=False))
        self._new_header = b""

    def read(self, key: Hashable, start: int, stop: int, out: Piece) -> None:
        tensor = self.tensors[key]
        read_at(self.path, self._positions[key] + start * tensor.part.itemsize, out)

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
        def copy(position: int, size: int) -> None:
            for start in range(position, position + size, BUFFER):
                piece = np.empty(min(BUFFER, position + size - start), np.uint8)
                read_at(self.path, start, piece)
                for output in outputs:
                    _write(output, piece)

        if self._new_header:
            for output in outputs:
                output.write(self._new_header)
        else:
            copy(0, self._header_size)
        for key, tensor in self.tensors.items():
            if not tensor.numbers:
                copy(self._positions[key], self._sizes[key])
            for means in tensor.means(averages):
                for output, mean in zip(outputs, means, strict=True):
                    _write(output, mean.view(np.uint8))
        for output in outputs:
            sync(output)


def _write(output: BinaryIO, data: Piece) -> None:
    """Write bytes, and let the system start to send them to the disk every 64 MB."""
    before = output.tell()
    output.write(data.data)
    if output.tell() // 2**26 > before // 2**26 and hasattr(os, "posix_fadvise"):
        output.flush()
        os.posix_fadvise(output.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
