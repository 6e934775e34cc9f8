"""Averages of saved checkpoints: files and folders of several formats.

Read `merge.py` first: it cuts tensors into pieces and averages them. A `Checkpoint` reads and
writes the pieces in one format. The weights are known before any file is read. Numbers with the
same bits in all checkpoints, and all that is no real or complex number, come from the newest.
"""

from tailavg.checkpoints.checkpoint import CheckpointError
from tailavg.checkpoints.merge import SAFETENSORS, TORCH, Merge, average_checkpoints
from tailavg.checkpoints.weights import natural, read_weights, steps_of, weights

__all__ = [
    "SAFETENSORS",
    "TORCH",
    "CheckpointError",
    "Merge",
    "average_checkpoints",
    "natural",
    "read_weights",
    "steps_of",
    "weights",
]
