"""The weights of a model put aside while it holds others, and put back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tailavg.torch.memory import empty, round_up
from tailavg.torch.tracking import Tracking, local

__all__ = ["Aside"]

_LINE = 64  # bytes: a cache line


class Aside:
    """Copies of a model's tensors, and of where its modules hold them, to put back later.

    Nothing is copied until `keep`. A swap makes a new one, and forgets it when all is back: so
    whatever is interrupted can be put back again.

    Args:
        tracking: The model.
        tensors: Its tensors to put back, by the names of `tracking`.
        device: Where to keep the copies; None stands for where the tensors are.
    """

    def __init__(
        self, tracking: Tracking, tensors: Mapping[str, Tensor], device: torch.device | None
    ) -> None:
        self._tracking = tracking
        self._device = device
        self._slots = [(slots, dict(slots)) for slots in tracking.slots()]
        self.memory = {name: local(tensor).detach() for name, tensor in tensors.items()}
        twins = [(name, twin) for name, twin in tracking.twins if name in tensors]
        self._tensors = [(tensor, self.memory[name]) for name, tensor in (*tensors.items(), *twins)]
        self._kept: list[tuple[Tensor, Tensor]] = []
        sizes: dict[torch.device, int] = {}
        for tensor in self.memory.values():
            place = device or tensor.device
            sizes[place] = sizes.get(place, 0) + round_up(tensor.numel() * tensor.itemsize, _LINE)
        elsewhere = any(tensor.device.type != "cpu" for tensor in self.memory.values())
        self._rooms = {
            place: empty(size, torch.uint8, place, pinned=place.type == "cpu" and elsewhere)
            for place, size in sizes.items()
        }
        self._used = dict.fromkeys(self._rooms, 0)

    def keep(self, tensors: list[Tensor]) -> None:
        """Copy tensors, complete or in parts; all parts but the last must fill cache lines.

        Only finished copies are ever put back.
        """
        if len({(tensor.dtype, tensor.device, tensor.dim() == 1) for tensor in tensors}) > 1:
            for tensor in tensors:
                self.keep([tensor])
            return
        place, dtype = self._device or tensors[0].device, tensors[0].dtype
        sizes = [tensor.numel() for tensor in tensors]
        start, size = self._used[place], sum(sizes) * dtype.itemsize
        room = self._rooms[place][start : start + size].view(dtype)
        parts: tuple[Tensor, ...] = room.split(sizes)  # type: ignore[no-untyped-call]
        if len(tensors) > 1 and tensors[0].dim() == 1:
            torch.cat(tensors, out=room)
        else:
            parts = tuple(part.view(t.shape) for part, t in zip(parts, tensors, strict=True))
            torch._foreach_copy_(parts, tensors)
        self._used[place] += round_up(size, _LINE)
        self._kept += zip(tensors, parts, strict=True)

    def put_back(self) -> None:
        """Restore what every tensor held, and the tensors that were replaced."""
        for tensor, room in self._kept:
            tensor.copy_(room)
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
