"""The weights of a model put aside while it holds others, and put back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tailavg.torch.memory import LINE, Place, round_up
from tailavg.torch.tracking import Tracking, local

__all__ = ["Aside"]


class Aside:
    """Copies of a model's tensors, and of where its modules hold them, to put back later.

    Nothing is copied until `keep`. A swap makes a new one, and forgets it when all is back: so
    whatever is interrupted can be put back again.

    Args:
        tracking: The model.
        tensors: Its tensors to put back, by the names of `tracking`.
        where: The place for the copies.
    """

    def __init__(self, tracking: Tracking, tensors: Mapping[str, Tensor], where: Place) -> None:
        self._tracking = tracking
        self._slots = [(slots, dict(slots)) for slots in tracking.slots()]
        self.memory = {name: local(tensor).detach() for name, tensor in tensors.items()}
        twins = [(name, twin) for name, twin in tracking.twins if name in tensors]
        self._tensors = [(tensor, self.memory[name]) for name, tensor in (*tensors.items(), *twins)]
        self._kept: list[tuple[Tensor, Any]] = []
        sizes: dict[torch.device, int] = {}
        for tensor in self.memory.values():
            size = round_up(tensor.numel() * tensor.itemsize, LINE)
            sizes[tensor.device] = sizes.get(tensor.device, 0) + size
        self._spool = where.spool(sizes)

    def keep(self, tensors: list[Tensor]) -> None:
        """Copy tensors, complete or in parts; all parts but the last must fill cache lines.

        Only finished copies are ever put back.
        """
        if len({(tensor.dtype, tensor.device, tensor.dim() == 1) for tensor in tensors}) > 1:
            for tensor in tensors:
                self.keep([tensor])
            return
        self._kept += zip(tensors, self._spool.put(tensors), strict=True)

    def put_back(self) -> None:
        """Restore what every tensor held, and the tensors that were replaced."""
        for tensor, kept in self._kept:
            self._spool.get(kept, tensor)
        self._tracking.reshard()
        for slots, held in self._slots:
            for name, tensor in held.items():
                if slots.get(name) is not tensor:  # it was replaced meanwhile
                    slots[name] = tensor
        for tensor, memory in self._tensors:
            now = local(tensor)
            if now.shape != memory.shape:
                now.data = memory
            elif now.data_ptr() != memory.data_ptr() or now.stride() != memory.stride():
                now.copy_(memory)  # it moved to another device or dtype, and stays there
