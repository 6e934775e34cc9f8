"""`.safetensors` files, which the `safetensors` package opens and validates.

Numbers are read and written piece by piece, so that memory does not grow with the file. The package
can do neither: it reads whole rows through a memory map, and writes whole files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tailavg.checkpoints.checkpoint import (
    REAL_DTYPES,
    Averages,
    Checkpoint,
    Piece,
    Tensor,
    read_at,
    reading,
    stamp_of,
)
from tailavg.io.files import sync
from tailavg.io.tensors import NAMES, Entry, header

__all__ = ["Safetensors"]

DTYPES = {code: dtype for dtype, code in NAMES.items()}
WIDE_FIRST = list(NAMES)

BUFFER = 2**20
"""How many bytes to copy at once."""

WRITEBACK = 2**26
"""After how many bytes the disk begins to write, rather than when the file is synced."""


class Safetensors(Checkpoint):
    """A `.safetensors` file. The key of a tensor is its name."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self.path = path
        self.stamps = {path: stamp_of(path)}
        problem = f"{path}: not a complete .safetensors file; save or copy it again"
        with reading(problem), safe_open(path, "np") as file:
            # sorted, since the package returns the metadata in random order
            self._metadata = dict(sorted((file.metadata() or {}).items()))
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            types = {name: (x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}
        self.tensors = {}
        self._sizes: dict[Hashable, int] = {}
        for name, (code, shape) in types.items():
            dtype, elements = DTYPES.get(code, code), math.prod(shape)
            tensor = self.tensors[name] = self.describe(name, dtype, shape, elements)
            self._sizes[name] = tensor.numbers * tensor.number_dtype.itemsize
            if dtype not in REAL_DTYPES:
                self._sizes[name] = elements * np.dtype(dtype).itemsize
        # in a valid file, the tensors fill all bytes after the header
        first = path.stat().st_size - sum(self._sizes.values())
        ends = accumulate(self._sizes.values(), initial=first)
        self._positions = dict(zip(self._sizes, ends, strict=False))

    def read(self, key: Hashable, start: int, stop: int, out: Piece) -> None:
        tensor = self.tensors[key]
        read_at(self.path, self._positions[key] + start * tensor.number_dtype.itemsize, out)

    def arrange(self) -> None:
        by_width = sorted(self.tensors.items(), key=lambda item: WIDE_FIRST.index(_dtype(item[1])))
        self.tensors = dict(by_width)

    def write(self, outputs: Sequence[BinaryIO], averages: Averages) -> None:
        entries = []
        for key, tensor in self.tensors.items():
            size = tensor.numbers * tensor.mean_dtype.itemsize or self._sizes[key]
            entries.append(Entry(tensor.name, NAMES[_dtype(tensor)], tensor.shape, size))
        for output in outputs:
            output.write(header(entries, metadata=self._metadata))
        for key, tensor in self.tensors.items():
            if not tensor.numbers:
                self._copy(key, outputs)
            for means in tensor.means(averages):
                for output, mean in zip(outputs, means, strict=True):
                    _write(output, mean.view(np.uint8))
        for output in outputs:
            sync(output)

    def each(self, averages: Averages) -> Iterator[tuple[str, Piece]]:
        for key, tensor in self.tensors.items():
            size = tensor.numbers * tensor.mean_dtype.itemsize or self._sizes[key]
            memory = np.empty(size, np.uint8)
            if not tensor.numbers:
                read_at(self.path, self._positions[key], memory)
            start = 0
            for (mean,) in tensor.means(averages):
                memory[start : start + mean.nbytes] = mean.view(np.uint8)
                start += mean.nbytes
            is_real = REAL_DTYPES.get(tensor.dtype) == tensor.dtype
            dtype = tensor.mean_dtype if is_real else np.dtype(tensor.dtype)
            yield tensor.name, memory.view(dtype).reshape(tensor.shape)

    def _copy(self, key: Hashable, outputs: Sequence[BinaryIO]) -> None:
        """Copy a tensor unchanged."""
        position, end = self._positions[key], self._positions[key] + self._sizes[key]
        for start in range(position, end, BUFFER):
            piece = np.empty(min(BUFFER, end - start), np.uint8)
            read_at(self.path, start, piece)
            for output in outputs:
                _write(output, piece)


def _dtype(tensor: Tensor) -> str:
    """Return the dtype in which a tensor is written."""
    return tensor.dtype if tensor.mean_dtype == tensor.number_dtype else tensor.mean_dtype.name


def _write(output: BinaryIO, data: Piece) -> None:
    """Write bytes, and let the disk begin with each 64 MiB when they are complete."""
    before = output.tell() // WRITEBACK
    output.write(data.data)
    after = output.tell() // WRITEBACK
    if after > before and hasattr(os, "posix_fadvise"):
        start, size = before * WRITEBACK, (after - before) * WRITEBACK
        os.posix_fadvise(output.fileno(), start, size, os.POSIX_FADV_DONTNEED)
