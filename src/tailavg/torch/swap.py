"""`SavedWeights`: a model's weights, saved while the model holds other weights.

`ParameterAverage` uses it for swaps, `AveragedModel` to undo a load that failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from tailavg.torch.folder import FolderStorage
from tailavg.torch.storage import MemoryStorage
from tailavg.torch.tracking import Tracking, local

__all__ = ["SavedWeights", "forked_rng"]


class SavedWeights:
    """Copies of a model's tensors, and of the dicts in which its modules hold them.

    Created per swap and dropped once everything is restored, so an interrupted restore can be
    repeated.

    Args:
        tracking: The model.
        tensors: The tensors to restore, by the names of `tracking`.
        storage: Where to keep the copies.
    """

    def __init__(
        self,
        tracking: Tracking,
        tensors: Mapping[str, Tensor],
        storage: MemoryStorage | FolderStorage,
    ) -> None:
        self._tracking = tracking
        self._slots = [(slots, dict(slots)) for slots in tracking.slots if slots]
        memory = {name: local(tensor).detach() for name, tensor in tensors.items()}
        self._tensors = [
            (tensor, memory[name]) for name in memory for tensor in tracking.objects[name]
        ]
        self._memory = list(memory.values())
        self._copies = storage.copies(self._memory)

    def restore(self) -> None:
        """Write all values back, also if tensors were replaced or moved meanwhile."""
        if self._memory:
            torch._foreach_copy_(self._memory, self._copies)
        self._tracking.reshard()
        for slots, saved in self._slots:
            for name, tensor in saved.items():
                if slots.get(name) is not tensor:  # it was replaced meanwhile
                    slots[name] = tensor
        for tensor, memory in self._tensors:
            current = local(tensor)
            if current.shape != memory.shape:
                current.data = memory
            elif current.data_ptr() != memory.data_ptr() or current.stride() != memory.stride():
                current.copy_(memory)  # it was moved to another device or dtype, and stays there


def forked_rng(device: torch.device) -> AbstractContextManager[None]:
    """Return a context at whose end torch's random state is as it was, here and on the device."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)
