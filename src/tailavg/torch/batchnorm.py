"""BatchNorm whose running statistics are tail averages, or recomputed from data.

A network is evaluated with statistics averaged over its training batches. With a momentum of 0.1,
that is about the last nineteen batches, however long the training. Here it is the growing
exponential: a fraction of the batches so far, at every step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.batchnorm import _BatchNorm

from tailavg.core.rules import Exponential
from tailavg.core.windows import AnyWindow

__all__ = ["convert_tail_batchnorm", "recompute_batchnorm"]


def convert_tail_batchnorm(model: nn.Module, window: AnyWindow) -> nn.Module:
    """Make the running statistics of every BatchNorm in `model` average a window of batches.

    They follow the growing exponential, `Exponential(window)`: over the last quarter of all batches
    so far for `window=0.25`, over the last hundred for `window=100`. After every batch they have
    the variance of an average of that many. `momentum` is ignored, with one exception: `None`
    still gives the plain mean of all batches, so torch's `update_bn` keeps working.

    Training outputs do not change. Neither does the state dict: the step is the existing buffer
    `num_batches_tracked`. So a converted model can load a checkpoint of the plain one, and the
    other way round. The first batch after `num_batches_tracked == 0` replaces the statistics. Keep
    them in float32, as autocast does: in 16 bits, an average over hundreds of batches stops moving.

    The modules remain the same objects, with their parameters, buffers, hooks and flags; only their
    class changes, as with torch's lazy modules. Converting a converted model changes the window.
    Modules that track no statistics are left alone. So are, with a warning, subclasses that are not
    torch's own and lazy modules that have not seen a batch. To synchronise the statistics across
    processes, call `SyncBatchNorm.convert_sync_batchnorm` first.

    Args:
        model: Any module, including a BatchNorm itself.
        window: A window or a number, as in `tailavg.TailAverage`.

    Returns:
        The same model.

    Examples:
        >>> convert_tail_batchnorm(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), window=0.25)
        Sequential(
          (0): Linear(in_features=2, out_features=3, bias=True)
          (1): TailBatchNorm1d(3, eps=1e-05, ..., window=Growing(c=0.25, at_most=None))
        )
    """
    rule = Exponential(window)
    unknown = []
    for name, module in model.named_modules():
        if not _has_statistics(module):
            continue
        tail = _TAIL.get(type(module))
        if tail is None:
            unknown.append(f"{name or 'model'} ({type(module).__name__})")
            continue
        cast("_TailStatistics", module)._tail_rule = rule
        module.__class__ = tail
        if module.momentum is None:
            module.momentum = 0.1
    if unknown:
        warnings.warn(
            "convert_tail_batchnorm: expected an initialised BatchNorm1d, 2d, 3d or SyncBatchNorm; "
            f"these keep their own statistics: {', '.join(unknown)}",
            UserWarning,
            stacklevel=2,
        )
    return model


def recompute_batchnorm(
    model: nn.Module,
    loader: Iterable[Any],
    call: Callable[[nn.Module, Any], object] | None = None,
) -> None:
    """Replace the running statistics of every BatchNorm in `model` by their mean over `loader`.

    Averaged weights need statistics of their own. This is torch's `update_bn` for more kinds of
    batches and without its traps. Call it inside `average_parameters()`, while the model holds the
    averages. If anything raises, the statistics are restored; each module's momentum and training
    flag always are.

    Args:
        model: The model. It runs on the batches in training mode, without gradients. If it has no
            BatchNorm, nothing is loaded and nothing happens.
        loader: Batches, which are moved to the device of the statistics. A dict is passed to the
            model by keyword; of a tuple or list, the first element; anything else as it is.
        call: Runs the model on a batch, as `call(model, batch)`, in place of the above.

    Raises:
        ValueError: If the loader is empty.

    Examples:
        >>> model = nn.BatchNorm1d(1)
        >>> recompute_batchnorm(model, [torch.tensor([[1.0], [3.0]]), torch.tensor([[3.0], [5.0]])])
        >>> model.running_mean, model.running_var
        (tensor([3.]), tensor([2.]))
    """
    norms = [module for module in model.modules() if _has_statistics(module)]
    if not norms:
        return
    device = norms[0].running_mean.device
    kept = [
        (buffer, buffer.clone()) for module in norms for buffer in module.buffers(recurse=False)
    ]
    momenta = [module.momentum for module in norms]
    training = [(module, module.training) for module in model.modules()]
    batches = 0
    try:
        model.train()
        for module in norms:
            module.reset_running_stats()
            module.momentum = None  # the mean of all batches
        with torch.no_grad():
            for batch in loader:
                if call is None:
                    _run(model, batch, device)
                else:
                    call(model, batch)
                batches += 1
        if not batches:
            raise ValueError(
                "loader: expected at least one batch, got none (is it an exhausted iterator?); "
                "the statistics are unchanged"
            )
    except BaseException:
        for buffer, old in kept:
            buffer.copy_(old)
        raise
    finally:
        for module, momentum in zip(norms, momenta, strict=True):
            module.momentum = momentum
        for each, flag in training:
            each.training = flag


def _run(model: nn.Module, batch: Any, device: torch.device) -> None:
    if isinstance(batch, Mapping):
        model(**{name: _moved(value, device) for name, value in batch.items()})
    else:
        model(_moved(batch[0] if isinstance(batch, tuple | list) else batch, device))


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if hasattr(value, "to") else value


def _has_statistics(module: nn.Module) -> TypeGuard[_WithStatistics]:
    return (
        isinstance(module, _BatchNorm)
        and module.track_running_stats
        and module.running_mean is not None
        and module.running_var is not None
        and module.num_batches_tracked is not None
    )


class _WithStatistics(_BatchNorm):
    """For type checkers: the buffers of a BatchNorm that tracks statistics."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor


class _TailStatistics(_WithStatistics):
    """A BatchNorm whose running statistics follow the growing exponential."""

    _tail_rule: Exponential

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise; in training, also add the batch to the running statistics."""
        if not (self.training and _has_statistics(self)):
            return super().forward(input)
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        output = self._normalise(input, mean, var)
        # Tensor arithmetic throughout: nothing waits for the device, and compilers see one graph.
        count = self.num_batches_tracked + 1
        t = count.to(torch.float32 if mean.is_mps else torch.float64)
        weight = 1.0 / t if self.momentum is None else self._tail_rule.weight(t)
        mean = self.running_mean.lerp(mean, weight.to(mean.dtype))
        var = self.running_var.lerp(var, weight.to(var.dtype))
        # one call, so that an interrupt comes before it or after it
        own = [self.running_mean, self.running_var, self.num_batches_tracked]
        torch._foreach_copy_(own, [mean, var, count])
        return output

    def _normalise(self, input: Tensor, mean: Tensor, var: Tensor) -> Tensor:  # noqa: A002
        """The training output. Writes the statistics of this batch to `mean` and `var`."""
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        return F.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)

    def extra_repr(self) -> str:
        """Show the window, too."""
        plain = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{plain}, window={self._tail_rule.window}"


class TailBatchNorm1d(_TailStatistics, nn.BatchNorm1d):
    """What `convert_tail_batchnorm` makes of a `BatchNorm1d`."""


class TailBatchNorm2d(_TailStatistics, nn.BatchNorm2d):
    """What `convert_tail_batchnorm` makes of a `BatchNorm2d`."""


class TailBatchNorm3d(_TailStatistics, nn.BatchNorm3d):
    """What `convert_tail_batchnorm` makes of a `BatchNorm3d`."""


class TailSyncBatchNorm(_TailStatistics, nn.SyncBatchNorm):
    """What `convert_tail_batchnorm` makes of a `SyncBatchNorm`."""

    def _normalise(self, input: Tensor, mean: Tensor, var: Tensor) -> Tensor:  # noqa: A002
        """Use torch's own forward, which knows when and how to synchronise."""
        twin = object.__new__(nn.SyncBatchNorm)  # which shares all else: this one stays as it is
        count = torch.zeros_like(self.num_batches_tracked)
        buffers = {"running_mean": mean, "running_var": var, "num_batches_tracked": count}
        twin.__dict__ = self.__dict__ | {"_buffers": self._buffers | buffers, "momentum": 1.0}
        return nn.SyncBatchNorm.forward(twin, input)


_TAIL: dict[type[nn.Module], type[_TailStatistics]] = {
    nn.BatchNorm1d: TailBatchNorm1d,
    nn.BatchNorm2d: TailBatchNorm2d,
    nn.BatchNorm3d: TailBatchNorm3d,
    nn.SyncBatchNorm: TailSyncBatchNorm,
}
_TAIL |= {tail: tail for tail in _TAIL.values()}
