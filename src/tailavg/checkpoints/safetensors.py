"""`.safetensors` files: the length of a header, the header in JSON, the numbers side by side.

The format's own library validates a file. Numbers are read by their offsets, a piece at a time,
which the slices of that library cannot do for every shape.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tailavg.checkpoints.tensors import (
    BUFFER,
    Averages,
    Checkpoint,
    CheckpointError,
    Piece,
    Tensor,
    flowing,
    read_at,
    stamp_of,
)
from tailavg.core.tensors import NAMES

__all__ = ["Safetensors"]

INTEGERS = frozenset({"BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
AVERAGED: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
}


class Safetensors(Checkpoint):
    """A `.safetensors` file. The key of a tensor is its name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamps = {path: stamp_of(path)}
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            self._head = length.to_bytes(8, "little") + stream.read(min(length, 10**8))
            room = os.fstat(stream.fileno()).st_size - 8 - length
        self._check(room)
        entries = json.loads(self._head[8:])
        self._metadata = entries.pop("__metadata__", None)
        # in file order
        entries = dict(sorted(entries.items(), key=lambda item: item[1]["data_offsets"]))
        self.tensors = {}
        self._spans: dict[Hashable, tuple[int, int]] = {}
        for name, entry in entries.items():
            shape, dtype = tuple(entry["shape"]), entry["dtype"]
            start, stop = entry["data_offsets"]
            self._spans[name] = len(self._head) + start, len(self._head) + stop
            if dtype in INTEGERS:
                self.tensors[name] = Tensor(name, dtype, shape)
            elif dtype in AVERAGED:
                kind = AVERAGED[dtype]
                self.tensors[name] = Tensor.averaged(name, dtype, shape, kind, stop - start)
            else:
                raise CheckpointError(
                    f"{path}: tensor {name!r}: expected integers or one of "
                    f"{', '.join(AVERAGED)}, got {dtype}, which cannot be averaged"
                )

    def _check(self, room: int) -> None:
        """Raise unless the file is valid and complete."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, "np"):
                return
        except (SafetensorError, OSError) as error:
            problem = f"not a valid .safetensors file: {error}"
        if room < 0:
            raise CheckpointError(
                f"{self.path}: truncated in its header, before any tensor, or {problem}"
            )
        try:
            entries = json.loads(self._head[8:])
            entries.pop("__metadata__", None)
            ends = {name: entry["data_offsets"][1] for name, entry in entries.items()}
            cut = min((end, name) for name, end in ends.items() if end > room)
        except Exception:  # a damaged header can raise anything
            raise CheckpointError(f"{self.path}: {problem}") from None
        raise CheckpointError(
            f"{self.path}: truncated in tensor {cut[1]!r}: expected {max(ends.values())} bytes "
            f"of tensors, got {room}"
        )

    def read(self, key: Hashable, start: int, stop: int, out: Piece) -> None:
        tensor = self.tensors[key]
        read_at(self.path, self._spans[key][0] + start * tensor.part.itemsize, out, tensor.name)

    def arrange(self) -> None:
        if all(tensor.to == tensor.part for tensor in self.tensors.values() if tensor.numbers):
            return
        order = list(NAMES.values())
        names = {key: _name(tensor) for key, tensor in self.tensors.items()}
        # wide ones first, as the format's library wants them, so that all are aligned
        self.tensors = dict(sorted(self.tensors.items(), key=lambda i: order.index(names[i[0]])))
        rows: dict[str, Any] = {} if self._metadata is None else {"__metadata__": self._metadata}
        end = 0
        for key, tensor in self.tensors.items():
            size = tensor.numbers * tensor.to.itemsize
            if not tensor.numbers:
                size = self._spans[key][1] - self._spans[key][0]
            start, end = end, end + size
            rows[tensor.name] = {
                "dtype": names[key],
                "shape": tensor.shape,
                "data_offsets": [start, end],
            }
        text = json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text

    def write(self, outputs: Sequence[BinaryIO], averages: Averages) -> None:
        buffer = np.empty(BUFFER, np.uint8)
        with ExitStack() as stack:
            writes = [stack.enter_context(flowing(output)) for output in outputs]
            for write in writes:
                write(self._head)
            for key, tensor in self.tensors.items():
                start, stop = self._spans[key]
                for place in range(start, stop, BUFFER) if not tensor.numbers else ():
                    piece = buffer[: min(BUFFER, stop - place)]
                    read_at(self.path, place, piece, tensor.name)
                    for write in writes:
                        write(piece)
                written = 0
                while written < tensor.numbers:
                    means = next(averages)
                    for write, mean in zip(writes, means, strict=True):
                        write(mean.view(np.uint8))
                    written += len(means[0])


def _name(tensor: Tensor) -> str:
    """The format's name of the dtype that a tensor will have."""
    if tensor.numbers and tensor.to != tensor.part:
        return NAMES[tensor.to.name]
    return tensor.dtype
