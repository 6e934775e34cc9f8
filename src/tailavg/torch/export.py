"""Write tensors to a `.safetensors` file: `ParameterAverage.save_averaged`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from tailavg.io.files import whole_file
from tailavg.io.tensors import NAMES
from tailavg.torch.storage import dtype_name

__all__ = ["write_safetensors"]


def write_safetensors(path: str | os.PathLike[str], tensors: Mapping[str, Any]) -> None:
    """Write tensors to a file, atomically. A tensor is written once for each of its names.

    During the call, main memory holds the bytes of the file as well as the tensors.

    Raises:
        TypeError: If the format does not support a value; nothing is written.
    """
    written: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        _check(name, tensor)
        value = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        storage = value.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory
        written[name] = value.clone() if storage in storages else value
        storages.add(storage)
    with whole_file(path) as file:
        file.write(save(written, {"format": "pt"}))


def _check(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        problem = f"is of type {type(tensor).__name__}"
    elif tensor.is_meta:
        problem = "is on the meta device"
    elif tensor.layout is not torch.strided:
        problem = f"has layout {tensor.layout}"
    elif dtype_name(tensor.dtype) not in NAMES:
        problem = f"has dtype {tensor.dtype}"
    else:
        return
    raise TypeError(
        f"save_averaged: {name} {problem}, which safetensors does not support; save "
        "averaged_state_dict() with torch.save instead"
    )
