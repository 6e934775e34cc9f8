"""Averages of saved checkpoints, piece by piece, so that memory does not grow with their number.

The weights are known before any file is read. Real and complex numbers are averaged. Those
with the same bits in all checkpoints, and everything else, come from the newest as they are.
"""

from tailavg.checkpoints.average import Plan, average_checkpoints
from tailavg.checkpoints.kinds import SAFETENSORS, TORCH
from tailavg.checkpoints.tensors import CheckpointError
from tailavg.checkpoints.weights import natural, read_weights, steps_of, weights

__all__ = [
    "SAFETENSORS",
    "TORCH",
    "CheckpointError",
    "Plan",
    "average_checkpoints",
    "natural",
    "read_weights",
    "steps_of",
    "weights",
]
