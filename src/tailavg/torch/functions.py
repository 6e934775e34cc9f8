"""The growing exponential as a function, for torch's own `AveragedModel`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tailavg.core.rules import Exponential
from tailavg.core.windows import AnyWindow, as_window

__all__ = ["growing_avg_fn", "growing_multi_avg_fn"]

Tensors = tuple[Tensor, ...] | list[Tensor]


@dataclass(frozen=True)
class GrowingMultiAvgFn:
    """A class, since a closure cannot be pickled."""

    rule: Exponential

    @torch.no_grad()
    def __call__(self, averaged: Tensors, current: Tensors, updates: Tensor | int) -> None:
        if _is_averaged(averaged[0]):  # torch groups the tensors by dtype
            torch._foreach_lerp_(averaged, current, self.rule.weight(int(updates) + 1))
        else:
            torch._foreach_copy_(averaged, current)


@dataclass(frozen=True)
class GrowingAvgFn:
    rule: Exponential

    @torch.no_grad()
    def __call__(self, averaged: Tensor, current: Tensor, updates: Tensor | int) -> Tensor:
        if not _is_averaged(averaged):
            return current
        return averaged.lerp(current.to(averaged.dtype), self.rule.weight(int(updates) + 1))


def growing_multi_avg_fn(window: AnyWindow) -> Callable[[Tensors, Tensors, Tensor | int], None]:
    """Return a `multi_avg_fn` for `torch.optim.swa_utils.AveragedModel`.

    The average is `Exponential(window)`: after every update, it has the variance of a mean over the
    window. With `use_buffers=True`, integer buffers are copied. The function can be copied and
    pickled, as `ddp_spawn` requires.

    Examples:
        >>> from torch.optim.swa_utils import AveragedModel
        >>> model = torch.nn.Linear(1, 1)
        >>> averaged = AveragedModel(model, multi_avg_fn=growing_multi_avg_fn(0.25))
        >>> averaged.update_parameters(model)
    """
    return GrowingMultiAvgFn(Exponential(as_window(window)))


def growing_avg_fn(window: AnyWindow) -> Callable[[Tensor, Tensor, Tensor | int], Tensor]:
    """Return an `avg_fn`: the same as `growing_multi_avg_fn`, but for one tensor at a time.

    Examples:
        >>> average = growing_avg_fn(1.0)  # all updates: three so far, and this one
        >>> average(torch.tensor([1.0]), torch.tensor([5.0]), 3)
        tensor([2.])
    """
    return GrowingAvgFn(Exponential(as_window(window)))


def _is_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
