"""BatchNorm whose running statistics are tail averages, or recomputed from data.

A network is evaluated with statistics averaged over its training batches. With a momentum of 0.1,
these are about the last nineteen batches, however long the training. After `convert_tail_batchnorm`
the average is the growing exponential, over a fraction of the batches so far at every step.
`recompute_batchnorm` computes the statistics of averaged weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from tailavg.core.rules import Exponential, Rule, as_training_rule
from tailavg.core.windows import AnyWindow, Fixed, Window, as_window

__all__ = ["convert_tail_batchnorm", "recompute_batchnorm", "revert_batchnorm"]


def convert_tail_batchnorm(model: nn.Module, rule: AnyWindow | Exponential) -> nn.Module:
    """Make the running statistics of every BatchNorm in `model` average a window of batches.

    They follow the growing exponential, `Exponential(rule)`: over the last quarter of all batches
    so far for `rule=0.25`, over the last hundred for `rule=100`. Empty batches do not count.

    Training outputs and the keys of the state dict do not change, so checkpoints load both ways:
    the step is the existing buffer `num_batches_tracked`. Keep the statistics in float32, as
    autocast does: in 16 bits, an average over hundreds of batches stops changing. A `momentum` that
    is a number is ignored; `None` keeps torch's meaning, the plain mean, which `update_bn` needs.

    The modules remain the same objects; only their class changes. Converting a converted model
    changes the rule. Modules that track no statistics do not change. Subclasses of torch's classes
    and lazy modules that have not seen a batch do not change either, and a warning names them. If
    you need `SyncBatchNorm.convert_sync_batchnorm`, call it before.

    Returns:
        The same model.

    Examples:
        >>> convert_tail_batchnorm(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), rule=0.25)
        Sequential(
          (0): Linear(in_features=2, out_features=3, bias=True)
          (1): TailBatchNorm1d(3, eps=1e-05, ..., rule=Exponential(window=Growing(c=0.25, ...)))
        )
    """
    rule = _exponential(rule)
    unsupported = []
    for name, module in model.named_modules():
        if not _has_statistics(module):
            continue
        tail = _TAIL.get(type(module))
        if tail is None:
            unsupported.append(f"{name or 'model'} ({type(module).__name__})")
            continue
        converted = cast("_TailBatchNorm", module)
        converted._tail_rule, converted._tail_steps = rule, _steps(rule.window)
        converted.__class__ = tail
    if unsupported:
        warnings.warn(
            "convert_tail_batchnorm: only an initialised BatchNorm1d, 2d, 3d or SyncBatchNorm can "
            f"be converted; these keep torch's statistics: {', '.join(unsupported)}",
            UserWarning,
            stacklevel=2,
        )
    return model


def revert_batchnorm(model: nn.Module) -> nn.Module:
    """Undo `convert_tail_batchnorm`: the same modules and statistics, with torch's own classes.

    A converted model can be traced, scripted, exported and compiled. Revert it, or a copy, for
    tools that know only torch's own classes, such as `torch.ao.quantization.fuse_modules`, and to
    pickle it for a process without this library.

    Returns:
        The same model.

    Examples:
        >>> revert_batchnorm(convert_tail_batchnorm(nn.BatchNorm1d(3, momentum=0.3), rule=0.25))
        BatchNorm1d(3, eps=1e-05, momentum=0.3, affine=True, ...track_running_stats=True)
    """
    for module in model.modules():
        if isinstance(module, _TailBatchNorm):
            module.__class__ = _PLAIN[type(module)]  # type: ignore[assignment]
            del module._tail_rule, module._tail_steps
    return model


def recompute_batchnorm(
    model: nn.Module,
    loader: Iterable[Any],
    call: Callable[[nn.Module, Any], object] | None = None,
    *,
    weighted: bool = False,
) -> None:
    """Replace the running statistics of every BatchNorm in `model` by their mean over `loader`.

    Averaged weights need their own statistics: call this inside `average_parameters()`, while the
    model holds the averages. It replaces torch's `update_bn` and takes more kinds of batches. If
    anything raises, the statistics are restored. The momentum and training flag of each module and
    torch's random state are always restored.

    Empty batches do not count, and a BatchNorm that no batch reaches in training mode keeps its
    statistics.

    Args:
        model: The model. As with `update_bn`, it runs in training mode, with Dropout (which `call`
            can switch off), but without gradients and uncompiled. If it has no BatchNorm, nothing
            is loaded.
        loader: Batches, which are moved to the device of the statistics. The model gets the values
            of a dict by keyword, the first element of a tuple or list, and anything else unchanged.
        call: A function that runs the model on a batch, as `call(model, batch)`. It gets the batch
            as the loader returns it.
        weighted: If True, every element has the same weight: the result is the mean and the
            (unbiased) variance of all batches as if they were one. If False, every batch has the
            same weight, as in `update_bn`: the result is the mean of the means and variances with
            which the network normalises the batches.

    Raises:
        ValueError: If the loader has no data.

    Examples:
        >>> model = nn.BatchNorm1d(1)
        >>> batches = [torch.tensor([[1.0], [3.0]]), torch.tensor([[3.0], [5.0]])]
        >>> recompute_batchnorm(model, batches)
        >>> model.running_mean, model.running_var
        (tensor([3.]), tensor([2.]))
        >>> recompute_batchnorm(model, batches, weighted=True)
        >>> model.running_mean, model.running_var
        (tensor([3.]), tensor([2.6667]))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model: expected a torch.nn.Module, got {type(model).__name__}; the model comes "
            "first, recompute_batchnorm(model, loader), unlike in torch's update_bn(loader, model)"
        )
    norms = [_Statistics(module, weighted) for module in model.modules() if _has_statistics(module)]
    if not norms:
        return
    device = norms[0].module.running_mean.device
    training = [(module, module.training) for module in model.modules()]
    batches = 0
    try:
        model.train()
        for norm in norms:
            norm.start()
        # uncompiled, since compiled code would not call the hooks
        with _random_state(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for batch in loader:
                if call is None:
                    _run(model, batch, device)
                else:
                    call(model, batch)
                batches += 1
        if not any(norm.batches for norm in norms):
            problem = "expected at least one batch with data, got none (an exhausted iterator?)"
            if batches:
                problem = f"none of {batches} batches brought data to a BatchNorm in training mode"
            raise ValueError(f"loader: {problem}; the statistics are unchanged")
        for norm in norms:
            norm.write()
    except BaseException:
        for norm in norms:
            norm.restore()
        raise
    finally:
        for norm in norms:
            norm.stop()
        for module, was_training in training:
            module.training = was_training


class _Statistics:
    """The statistics of the batches that reach a BatchNorm, collected by a forward hook."""

    def __init__(self, module: _WithStatistics, weighted: bool) -> None:
        self.module = module
        self.batches = 0
        self._weighted = weighted
        self._total = 0  # of elements if weighted, otherwise of batches
        self._mean: Any = 0.0
        self._squares: Any = 0.0
        self._buffers = list(module.buffers(recurse=False))
        self._saved = [buffer.clone() for buffer in self._buffers]
        self._momentum = module.momentum
        self._hook: RemovableHandle | None = None

    def start(self) -> None:
        """Make the module compute the statistics of each batch alone, and add them up."""
        self.module.reset_running_stats()
        self.module.momentum = 1.0
        self._hook = self.module.register_forward_hook(self._add, prepend=True)

    def _add(self, module: _WithStatistics, _: object, output: Tensor) -> None:
        """Add the statistics of the batch, which the module has just computed."""
        if not module.training:
            return
        module.num_batches_tracked.zero_()  # so that a tail BatchNorm takes the next batch alone
        elements = output.numel() // output.size(1)
        if _synchronises(module):
            everywhere = torch.tensor(elements, device=output.device)
            torch.distributed.all_reduce(everywhere, group=module.process_group)
            elements = int(everywhere)
        if not elements:
            return
        # in double precision, where the device has it
        wide = torch.float32 if output.is_mps else torch.float64
        mean, var = module.running_mean.to(wide), module.running_var.to(wide)
        before, added = self._total, elements if self._weighted else 1
        self._total += added
        self.batches += 1
        difference = mean - self._mean
        self._mean = self._mean + difference * (added / self._total)
        if self._weighted:  # Chan's formula: variance within this batch and between the batches
            var = var * (added - 1) + difference.square() * (before * added / self._total)
        self._squares = self._squares + var

    def write(self) -> None:
        """Write the statistics of all batches, or restore the module's own if there are none."""
        if not self.batches:
            self.restore()
            return
        self.module.running_mean.copy_(self._mean)
        self.module.running_var.copy_(self._squares / (self._total - self._weighted))
        self.module.num_batches_tracked.fill_(self.batches)

    def restore(self) -> None:
        """Restore the module's own statistics."""
        torch._foreach_copy_(self._buffers, self._saved)

    def stop(self) -> None:
        """Remove the hook, and restore the module's momentum."""
        if self._hook is not None:
            self._hook.remove()
        self.module.momentum = self._momentum


@contextmanager
def _random_state(model: nn.Module) -> Iterator[None]:
    """Restore torch's random state on exit, for the CPU and the model's devices."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    with torch.random.fork_rng([]):
        states = []
        for device in devices:
            if device.type not in ("cpu", "meta"):
                backend = torch.get_device_module(device)
                index = () if device.type == "mps" else (device,)
                states.append((backend, backend.get_rng_state(*index), index))
        try:
            yield
        finally:
            for backend, state, index in states:
                backend.set_rng_state(state, *index)


def _run(model: nn.Module, batch: Any, device: torch.device) -> None:
    def moved(value: Any) -> Any:
        return value.to(device) if hasattr(value, "to") else value

    if isinstance(batch, Mapping):
        model(**{name: moved(value) for name, value in batch.items()})
    else:
        model(moved(batch[0] if isinstance(batch, tuple | list) else batch))


def _exponential(rule: AnyWindow | Rule) -> Exponential:
    """Return the rule of the statistics. A number stands for its window."""
    if isinstance(rule, Exponential):
        as_training_rule(rule)  # refuses windows of time
        return rule
    if isinstance(rule, Rule):
        raise TypeError(
            f"rule: a BatchNorm supports only Exponential, got {rule}; pass a number, a window or "
            "Exponential(0.25)"
        )
    return Exponential(as_window(rule, "rule"))


def _steps(window: Window) -> tuple[float, float, float]:
    """Return c, and the first and the last step at which the window is c t.

    A fixed window has c = 1 until it is full.
    """
    c, most = (1.0, float(window.k)) if isinstance(window, Fixed) else (window.c, window.most)
    return c, 1.0 / c, most / c


def _has_statistics(module: nn.Module) -> TypeGuard[_WithStatistics]:
    return (
        isinstance(module, _BatchNorm)
        and module.track_running_stats
        and module.running_mean is not None
        and module.running_var is not None
        and module.num_batches_tracked is not None
    )


def _synchronises(module: nn.Module) -> TypeGuard[nn.SyncBatchNorm]:
    """Return whether the statistics of a batch come from several processes."""
    return (
        isinstance(module, nn.SyncBatchNorm)
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size(module.process_group) > 1
    )


class _WithStatistics(_BatchNorm):
    """For type checkers: the buffers of a BatchNorm that tracks statistics."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor


_scripting = torch.jit.is_scripting  # type: ignore[attr-defined]


class _TailBatchNorm(_BatchNorm):
    """A BatchNorm whose running statistics follow the growing exponential.

    TorchScript compiles this class too, so it has only annotations that TorchScript knows.
    """

    if TYPE_CHECKING:
        _tail_rule: Exponential
        _tail_steps: tuple[float, float, float]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise; in training, also add the batch to the running statistics."""
        if not _scripting():  # noqa: SIM102
            if isinstance(input, fx.Proxy) and input.tracer.root is not self:
                # one call in the graph, as for torch's own classes
                name = input.tracer.path_of_module(self)
                return input.tracer.create_proxy("call_module", name, (input,), {})
        mean, var, count = self.running_mean, self.running_var, self.num_batches_tracked
        if not self.training:
            return self._normalise(input, mean, var)
        if not self.track_running_stats or mean is None or var is None or count is None:
            return self._normalise(input, None, None)
        if _scripting():
            # batch_norm updates the statistics: TorchScript does not see that write, and freezes
            # only tensors to which it sees no write
            output = self._normalise(input, mean, var, float(self._weight(count)))
            count.add_(int(self._has_data(input)))
            return output
        new_mean, new_var = torch.zeros_like(mean), torch.zeros_like(var)
        output = self._normalise(input, new_mean, new_var)
        if self._has_data(input):
            weight = self._weight(count).to(mean.dtype)
            new = [mean.lerp(new_mean, weight), var.lerp(new_var, weight), count + 1]
            # one call, so that an interrupt comes before or after all of it
            torch._foreach_copy_([mean, var, count], new)
        return output

    def _weight(self, count: Tensor) -> Tensor:
        """Return the weight of a batch after `count` others, `rule.weight(count + 1)`.

        This is tensor arithmetic, so that nothing waits for the device and compilers see one graph.
        The window is k_t = c u_t, where u_t is t, but at least 1/c and at most cap/c.
        """
        before = count.to(torch.float32 if count.is_mps else torch.float64)
        if self.momentum is None:
            return 1.0 / (before + 1.0)
        c, first, last = self._tail_steps
        if count.is_mps:
            last = min(last, 2.0**24)  # float32 counts no further: a fixed window from there
        old, new = before.clamp(first, last), (before + 1.0).clamp(first, last)
        excess = 1.0 - c * (new - old)  # k_{t-1} + 1 - k_t, the samples that leave the window
        return (1.0 + (old * excess / new).sqrt()) / (1.0 + c * old)

    def _normalise(
        self, x: Tensor, mean: Tensor | None, var: Tensor | None, weight: float = 1.0
    ) -> Tensor:
        """Return the output. In training, add this batch to `mean` and `var` with `weight`."""
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        batch = self.training or mean is None
        return F.batch_norm(x, mean, var, self.weight, self.bias, batch, weight, self.eps)

    def _has_data(self, x: Tensor) -> bool:
        return x.numel() > 0

    def extra_repr(self) -> str:
        """Return the arguments that torch shows, and the rule."""
        plain = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{plain}, rule={self._tail_rule}"


class TailBatchNorm1d(_TailBatchNorm, nn.BatchNorm1d):
    """A `BatchNorm1d` after `convert_tail_batchnorm`."""


class TailBatchNorm2d(_TailBatchNorm, nn.BatchNorm2d):
    """A `BatchNorm2d` after `convert_tail_batchnorm`."""


class TailBatchNorm3d(_TailBatchNorm, nn.BatchNorm3d):
    """A `BatchNorm3d` after `convert_tail_batchnorm`."""


class TailSyncBatchNorm(_TailBatchNorm, nn.SyncBatchNorm):
    """A `SyncBatchNorm` after `convert_tail_batchnorm`."""

    def _normalise(
        self, x: Tensor, mean: Tensor | None, var: Tensor | None, weight: float = 1.0
    ) -> Tensor:
        """Use torch's own forward, which knows when and how to synchronise."""
        twin = object.__new__(nn.SyncBatchNorm)  # shares everything else; `self` does not change
        count = torch.zeros((), dtype=torch.long)
        buffers = {"running_mean": mean, "running_var": var, "num_batches_tracked": count}
        twin.__dict__ = self.__dict__ | {"_buffers": self._buffers | buffers, "momentum": weight}
        return nn.SyncBatchNorm.forward(twin, x)

    def _has_data(self, x: Tensor) -> bool:
        return x.numel() > 0 or _synchronises(self)  # if so, another process has data


_TAIL: dict[type[nn.Module], type[_TailBatchNorm]] = {
    nn.BatchNorm1d: TailBatchNorm1d,
    nn.BatchNorm2d: TailBatchNorm2d,
    nn.BatchNorm3d: TailBatchNorm3d,
    nn.SyncBatchNorm: TailSyncBatchNorm,
}
_PLAIN = {tail: plain for plain, tail in _TAIL.items()}
_TAIL |= {tail: tail for tail in _TAIL.values()}
