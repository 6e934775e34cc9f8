"""Tensors in a `.safetensors` file, which is written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tailavg.core.files import whole_file

__all__ = ["write_safetensors"]

# the format's names, in the order in which its library writes them: wide numbers first, so that
# all are aligned
_NAMES = {
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
_ORDER = list(_NAMES)
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def write_safetensors(path: str | os.PathLike[str], tensors: Mapping[str, Any]) -> None:
    """Write tensors to a file, one by one. A tensor with several names is written for each.

    The same bytes as those of `safetensors.torch.save`, of which no second copy is made.

    Raises:
        TypeError: If anything is not a tensor that the format has; nothing is written.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(_refusal(name, "a tensor", type(tensor).__name__))
        if tensor.layout is not torch.strided or tensor.is_meta:
            kind = tensor.device if tensor.is_meta else tensor.layout
            raise TypeError(_refusal(name, "a dense tensor with values", f"one of {kind}"))
        if _dtype(tensor) not in _NAMES:
            raise TypeError(_refusal(name, "a dtype of the format", str(tensor.dtype)))
    names = sorted(tensors, key=lambda name: (_ORDER.index(_dtype(tensors[name])), name.encode()))
    with whole_file(path) as file:
        file.write(_header({name: tensors[name] for name in names}))
        for name in names:
            tensor = tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
            array = tensor.view(-1).view(_WHOLE[tensor.real.itemsize]).numpy()
            file.write(array.astype(array.dtype.newbyteorder("<"), copy=False).data)


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.itemsize
        shape, dtype = list(tensor.shape), _NAMES[_dtype(tensor)]
        if dtype == "F4":  # two to a byte
            shape[-1] *= 2
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _refusal(name: str, expected: str, got: str) -> str:
    return (
        f"save_averaged: {name}: expected {expected}, as safetensors holds nothing else, got "
        f"{got}; save averaged_state_dict() with torch.save"
    )
