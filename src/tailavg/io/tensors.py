"""Write and map safetensors files: the length of a header, a header in JSON, then the tensors.

The `safetensors` package writes a whole file at once. Blocks on disk and averaged checkpoints are
written piece by piece, and the header of a block is padded to 64 bytes, so that it can be mapped.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tailavg.io.files import sync

__all__ = ["NAMES", "Entry", "header", "mapped", "write_arrays"]

NAMES = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "float4_e2m1fn_x2": "F4",
    "bool": "BOOL",
}
"""The format's names of dtypes, widest first: the order of the tensors in a file, which keeps all
of them aligned."""

_ACCUMULATED = {"F64": np.float64, "C64": np.complex64, "F32": np.float32}
_MAX_HEADER = 10**8  # bytes, as in the `safetensors` package


class Entry(NamedTuple):
    """A tensor in a file: name, dtype in the format's terms, shape, and size in bytes."""

    name: str
    dtype: str
    shape: Sequence[int]
    size: int


def header(
    entries: Iterable[Entry], unit: int = 8, metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the header of a file with these tensors, padded to a multiple of `unit` bytes."""
    metadata = {"format": "pt"} if metadata is None else dict(metadata)
    rows: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, dtype, shape, size in entries:
        start, end = end, end + size
        rows[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % unit)
    return len(text).to_bytes(8, "little") + text


def write_arrays(
    path: Path, arrays: Mapping[str, Any], as_array: Callable[[Any], npt.NDArray[Any]] = np.asarray
) -> None:
    """Write values, converted by `as_array` one by one, to a new file."""
    entries = []
    for name, value in arrays.items():
        array = as_array(value)
        if array.dtype.name not in NAMES:
            raise TypeError(
                f"save: {name}: safetensors files cannot hold {array.dtype}; save state_dict() "
                "with torch.save instead"
            )
        entries.append(Entry(name, NAMES[array.dtype.name], array.shape, array.nbytes))
    wide_first = list(NAMES.values())
    entries.sort(key=lambda entry: wide_first.index(entry.dtype))
    with path.open("xb") as file:
        file.write(header(entries, unit=64))
        for entry in entries:
            array = np.ascontiguousarray(as_array(arrays[entry.name]))
            file.write(array.astype(array.dtype.newbyteorder("<"), copy=False).data)
        sync(file)


def mapped(path: str | os.PathLike[str]) -> dict[str, npt.NDArray[Any]]:
    """Map the accumulators in a file: each is read on access.

    Writes to the arrays do not change the file.

    Raises:
        ValueError: If the file is incomplete, or has a dtype that accumulators never have.
    """
    with Path(path).open("rb") as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        try:
            if length > min(size - 8, _MAX_HEADER):
                raise ValueError(f"{size} bytes, but a header of {length}")
            rows = json.loads(file.read(length))
            rows.pop("__metadata__", None)
            data = np.empty(0, np.uint8)
            if size > 8 + length:
                data = np.memmap(file, np.uint8, "c", 8 + length).view(np.ndarray)
            arrays, end = {}, 0
            for name, row in rows.items():
                dtype, shape = np.dtype(_ACCUMULATED[row["dtype"]]), row["shape"]
                start, end = end, end + math.prod(shape) * dtype.itemsize
                if row["data_offsets"] != [start, end]:
                    raise ValueError(f"{name} is at {row['data_offsets']}, not at {[start, end]}")
                arrays[name] = data[start:end].view(dtype).reshape(shape)
            if end != len(data):
                raise ValueError(f"{len(data)} bytes of tensors instead of {end}")
        except Exception as error:  # a damaged file can raise anything
            raise ValueError(f"{path}: not a complete safetensors file: {error}") from error
    return arrays
