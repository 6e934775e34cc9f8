"""The safetensors format: the length of a header, the header in JSON, and the numbers side by side.

Its own library reads what is written here. Here it takes NumPy alone, and reads no more than asked.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["NAMES", "Entry", "header", "mapped"]

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
"""The format's names of dtypes, in the order in which its library writes them: wide ones first, so
that all are aligned."""

_READ = {"F64": np.float64, "C64": np.complex64, "F32": np.float32}  # what accumulators are made of
_ORDERS = "tailavg.orders"
_LONGEST = 10**8  # bytes of a header, as in the format's own library


class Entry(NamedTuple):
    """A tensor in a file: its name, the format's name of its dtype, its shape and bytes.

    If its elements come in another order, `order` has its axes from the slowest to the fastest. The
    file then says that shape, and in its metadata that order.
    """

    name: str
    dtype: str
    shape: Sequence[int]
    size: int
    order: Sequence[int] = ()


def header(entries: Iterable[Entry], unit: int = 8) -> bytes:
    """What comes before the numbers of these tensors. Its length is a multiple of `unit`."""
    metadata = {"format": "pt"}
    rows: dict[str, Any] = {"__metadata__": metadata}
    orders: dict[str, list[int]] = {}
    end = 0
    for name, dtype, shape, size, order in entries:
        start, end = end, end + size
        if order:
            orders[name] = list(order)
            shape = [shape[axis] for axis in order]
        rows[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    if orders:
        metadata[_ORDERS] = json.dumps(orders)
    text = json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % unit)
    return len(text).to_bytes(8, "little") + text


def mapped(path: str | os.PathLike[str]) -> dict[str, npt.NDArray[Any]]:
    """The tensors in a file of real or complex numbers, read when they are looked at.

    They may be written to; the file stays as it is.

    Raises:
        ValueError: If it is not such a file, or not a complete one.
    """
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        try:
            if size < 8 or length > min(size - 8, _LONGEST):
                raise ValueError(f"{size} bytes with a header of {length}")
            rows = json.loads(file.read(length))
            orders = json.loads(rows.pop("__metadata__", {}).get(_ORDERS, "{}"))
            axes = {name: np.argsort(order).tolist() for name, order in orders.items()}
            found = {name: _placed(row) for name, row in rows.items()}
            for name, order in orders.items():
                if sorted(order) != list(range(len(found[name][1]))):
                    raise ValueError(f"axes {order} of {name}")
            end = 0
            for _, _, start, stop in sorted(found.values(), key=lambda row: row[2:]):
                if start != end:
                    raise ValueError(f"numbers from byte {start} on, where {end} was expected")
                end = stop
            if 8 + length + end != size:
                raise ValueError(f"{size} bytes, where {8 + length + end} were expected")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path}: expected a complete safetensors file, got: {error}"
            ) from error
        if not end:
            data = np.empty(0, np.uint8)
        else:
            data = np.memmap(file, np.uint8, "c", 8 + length).view(np.ndarray)
    return {
        name: data[start:stop]
        .view(dtype)
        .reshape(shape)
        .transpose(axes.get(name, range(len(shape))))
        for name, (dtype, shape, start, stop) in found.items()
    }


def _placed(row: Any) -> tuple[Any, tuple[int, ...], int, int]:
    """The dtype, shape, start and stop of a tensor in a header, if they fit together."""
    dtype, shape, (start, stop) = _READ[row["dtype"]], row["shape"], row["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(f"a shape of {shape} from {start} to {stop}")
    if math.prod(shape) * np.dtype(dtype).itemsize != stop - start:
        raise ValueError(f"{stop - start} bytes for {shape} numbers of {row['dtype']}")
    return dtype, tuple(shape), start, stop
