"""The `.metadata` file of torch.distributed.checkpoint, a pickle, read without running any code.

`distributed.py` calls it. Only the classes that torch and Megatron put into this file are loaded;
any other name in the pickle is an error. Megatron's own classes become those of torch, with the
same attributes, so Megatron need not be installed.
"""

from __future__ import annotations

import pickle
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed._shard import sharded_tensor
from torch.distributed.checkpoint import filesystem, metadata, planner

__all__ = ["read_metadata"]

CLASSES: dict[Any, tuple[str, ...]] = {
    metadata: (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    filesystem: ("_StorageInfo", "_StoragePrefix"),
    planner: ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    sharded_tensor.metadata: ("MEM_FORMAT_ENCODING", "TensorProperties"),  # before torch 2.3
    torch.serialization: ("_get_layout",),
}
MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (module.__name__, name): getattr(module, name)
        for module in CLASSES
        for name in CLASSES[module]
    },
    **{
        ("torch", name): value
        for name, value in vars(torch).items()
        if value is torch.Size or isinstance(value, torch.dtype)
    },
    (MEGATRON, "MCoreMetadata"): metadata.Metadata,
    (MEGATRON, "MCoreSavePlan"): planner.SavePlan,
    **{(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")},
    **{(module, "WindowsPath"): PureWindowsPath for module in ("pathlib", "pathlib._local")},
}


def read_metadata(path: Path) -> Any:
    """Read a `.metadata` file."""
    with path.open("rb") as file:
        found = _Unpickler(file).load()
    if not isinstance(found, metadata.Metadata):
        raise TypeError(f"expected Metadata, got {type(found).__name__}")
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not a class of metadata") from None
