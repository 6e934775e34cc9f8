"""Which kind of checkpoint a name stands for."""

from __future__ import annotations

from pathlib import Path

from tailavg.checkpoints.distributed import Distributed
from tailavg.checkpoints.folders import Folder
from tailavg.checkpoints.safetensors import Safetensors
from tailavg.checkpoints.tensors import Checkpoint
from tailavg.checkpoints.torchfiles import TorchFile

__all__ = ["SAFETENSORS", "TORCH", "opened"]

SAFETENSORS = frozenset({".safetensors"})
TORCH = frozenset({".pt", ".pth", ".ckpt", ".bin"})


def opened(path: Path) -> Checkpoint:
    """The checkpoint at a path."""
    if (path / ".metadata").is_file():
        return Distributed(path)
    if path.is_dir():
        return Folder(path)
    return Safetensors(path) if path.suffix in SAFETENSORS else TorchFile(path)
