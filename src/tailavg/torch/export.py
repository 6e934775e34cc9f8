"""Tensors in a `.safetensors` file, which is written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tailavg.core.files import whole_file
from tailavg.core.tensors import NAMES, Entry, header

__all__ = ["write_safetensors"]

_ORDER = list(NAMES)
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
        if _dtype(tensor) not in NAMES:
            raise TypeError(_refusal(name, "a dtype of the format", str(tensor.dtype)))
    names = sorted(tensors, key=lambda name: (_ORDER.index(_dtype(tensors[name])), name.encode()))
    with whole_file(path) as file:
        file.write(header(_entry(name, tensors[name]) for name in names))
        for name in names:
            tensor = tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
            array = tensor.view(-1).view(_WHOLE[tensor.real.itemsize]).numpy()
            file.write(array.astype(array.dtype.newbyteorder("<"), copy=False).data)


def _entry(name: str, tensor: Tensor) -> Entry:
    shape, dtype = list(tensor.shape), NAMES[_dtype(tensor)]
    if dtype == "F4":  # two to a byte
        shape[-1] *= 2
    return Entry(name, dtype, shape, tensor.numel() * tensor.itemsize)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _refusal(name: str, expected: str, got: str) -> str:
    return (
        f"save_averaged: {name}: expected {expected}, as safetensors holds nothing else, got "
        f"{got}; save averaged_state_dict() with torch.save"
    )
