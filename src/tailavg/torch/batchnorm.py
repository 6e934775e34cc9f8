"""BatchNorm whose running statistics are tail averages, or recomputed from data.

A network is evaluated with statistics averaged over its training batches. With a momentum of 0.1,
that is about the last nineteen batches, however long the training. Here it is the growing
exponential: a fraction of the batches so far, at every step.
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

from tailavg.core.rules import Exponential, Rule
from tailavg.core.windows import AnyWindow, Fixed, Window, as_window

__all__ = ["convert_tail_batchnorm", "recompute_batchnorm", "revert_batchnorm"]


def convert_tail_batchnorm(model: nn.Module, rule: AnyWindow | Exponential) -> nn.Module:
    """Make the running statistics of every BatchNorm in `model` average a window of batches.

    They follow the growing exponential, `Exponential(rule)`: over the last quarter of all batches
    so far for `rule=0.25`, over the last hundred for `rule=100`. An empty batch is not counted.

    Training outputs and the keys of the state dict do not change, so checkpoints load both ways:
    the step is the existing buffer `num_batches_tracked`. Keep the statistics in float32, as
    autocast does: in 16 bits, an average over hundreds of batches stops moving. A `momentum` that
    is a number is ignored; `None` keeps torch's meaning, the plain mean, as `update_bn` needs it.

    The modules remain the same objects; only their class changes. Converting a converted model
    changes the rule. Modules that track no statistics are left alone, and so are, with a warning,
    subclasses that are not torch's own and lazy modules that have not seen a batch. Call
    `SyncBatchNorm.convert_sync_batchnorm` before, if you need it.

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
    unknown = []
    for name, module in model.named_modules():
        if not _has_statistics(module):
            continue
        tail = _TAIL.get(type(module))
        if tail is None:
            unknown.append(f"{name or 'model'} ({type(module).__name__})")
            continue
        converted = cast("_TailBatchNorm", module)
        converted._tail_rule, converted._tail_steps = rule, _steps(rule.window)
        converted.__class__ = tail
    if unknown:
        warnings.warn(
            "convert_tail_batchnorm: expected an initialised BatchNorm1d, 2d, 3d or SyncBatchNorm; "
            f"these keep their own statistics: {', '.join(unknown)}",
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

    Averaged weights need statistics of their own. This is torch's `update_bn` for more kinds of
    batches and without its traps. Call it inside `average_parameters()`, while the model holds the
    averages. If anything raises, the statistics are restored; each module's momentum and training
    flag and torch's random state always are.

    Batches that are empty do not count, and a BatchNorm that no batch reaches in training mode
    keeps its statistics.

    Args:
        model: The model. As with `update_bn`, it runs as it trains, Dropout included (to leave that
            out, switch it off in `call`), but without gradients and uncompiled. If it has no
            BatchNorm, nothing is loaded and nothing happens.
        loader: Batches, which are moved to the device of the statistics. A dict is passed to the
            model by keyword; of a tuple or list, the first element; anything else as it is.
        call: Runs the model on a batch, as `call(model, batch)`, in place of the above.
        weighted: Whether every element counts the same: the mean and the (unbiased) variance of all
            batches as if they were one. Otherwise every batch does, as in `update_bn`: the mean of
            their means and of their variances, which are what the network normalises with.

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
            got = f"{batches} that brought none to a BatchNorm in training mode"
            raise ValueError(
                "loader: expected at least one batch with data, got "
                f"{got if batches else 'none (is it an exhausted iterator?)'}; "
                "the statistics are unchanged"
            )
        for norm in norms:
            norm.write()
    except BaseException:
        for norm in norms:
            norm.restore()
        raise
    finally:
        for norm in norms:
            norm.stop()
        for each, flag in training:
            each.training = flag


class _Statistics:
    """The statistics of the batches that a BatchNorm gets, from a forward hook."""

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
        """Let the module compute the statistics of the last batch alone, and add them up."""
        self.module.reset_running_stats()
        self.module.momentum = 1.0
        self._hook = self.module.register_forward_hook(self._add, prepend=True)

    def _add(self, module: _WithStatistics, _: object, output: Tensor) -> None:
        """Add the statistics of the batch, which are now those of the module."""
        if not module.training:
            return
        module.num_batches_tracked.zero_()  # so that a tail takes the next batch alone, too
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
        before, new = self._total, elements if self._weighted else 1
        self._total += new
        self.batches += 1
        apart = mean - self._mean
        self._mean = self._mean + apart * (new / self._total)
        if self._weighted:  # Chan's formula: within this batch, and between it and those before
            var = var * (new - 1) + apart.square() * (before * new / self._total)
        self._squares = self._squares + var

    def write(self) -> None:
        """Give the module the statistics of all batches; its own if none reached it."""
        if not self.batches:
            self.restore()
            return
        self.module.running_mean.copy_(self._mean)
        self.module.running_var.copy_(self._squares / (self._total - self._weighted))
        self.module.num_batches_tracked.fill_(self.batches)

    def restore(self) -> None:
        """Give the module its own statistics back."""
        torch._foreach_copy_(self._buffers, self._saved)

    def stop(self) -> None:
        """Remove the hook, and give the module its momentum back."""
        if self._hook is not None:
            self._hook.remove()
        self.module.momentum = self._momentum


@contextmanager
def _random_state(model: nn.Module) -> Iterator[None]:
    """Put torch's random state back at the end: that of the CPU and of the model's devices."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    with torch.random.fork_rng([]):
        states = []
        for device in devices:
            if device.type not in ("cpu", "meta"):
                generators = torch.get_device_module(device)
                number = () if device.type == "mps" else (device,)
                states.append((generators, generators.get_rng_state(*number), number))
        try:
            yield
        finally:
            for generators, state, number in states:
                generators.set_rng_state(state, *number)


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
        return rule
    if isinstance(rule, Rule):
        raise TypeError(
            f"rule: a BatchNorm has room for an Exponential only, got {rule}; pass a number, a "
            "window or Exponential(0.25)"
        )
    return Exponential(as_window(rule, "rule"))


def _steps(window: Window) -> tuple[float, float, float]:
    """c, and the steps between which the window is ct; a fixed one is all until it is full."""
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
    """Whether the statistics of a batch are those of several processes."""
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

    TorchScript compiles it, too: so there are no annotations here that it does not know.
    """

    if TYPE_CHECKING:
        _tail_rule: Exponential
        _tail_steps: tuple[float, float, float]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise; in training, also add the batch to the running statistics."""
        if not _scripting():  # noqa: SIM102
            if isinstance(input, fx.Proxy) and input.tracer.root is not self:
                # one call in the graph, as of torch's own
                name = input.tracer.path_of_module(self)
                return input.tracer.create_proxy("call_module", name, (input,), {})
        mean, var, count = self.running_mean, self.running_var, self.num_batches_tracked
        if not self.training:
            return self._normalise(input, mean, var)
        if not self.track_running_stats or mean is None or var is None or count is None:
            return self._normalise(input, None, None)
        if _scripting():  # torch's own update, which it does not see: it freezes nothing written to
            output = self._normalise(input, mean, var, float(self._weight(count)))
            count.add_(int(self._has_data(input)))
            return output
        new_mean, new_var = torch.zeros_like(mean), torch.zeros_like(var)
        output = self._normalise(input, new_mean, new_var)
        if self._has_data(input):
            weight = self._weight(count).to(mean.dtype)
            new = [mean.lerp(new_mean, weight), var.lerp(new_var, weight), count + 1]
            # one call, so that an interrupt comes before it or after it
            torch._foreach_copy_([mean, var, count], new)
        return output

    def _weight(self, count: Tensor) -> Tensor:
        """The weight of a batch after `count` others, `rule.weight(count + 1)`.

        Tensor arithmetic, so that nothing waits for the device and compilers see one graph; and
        little of it: k_t = c u_t, where u_t is t, but at least 1/c and at most what the cap allows.
        """
        before = count.to(torch.float32 if count.is_mps else torch.float64)
        if self.momentum is None:
            return 1.0 / (before + 1.0)
        c, first, last = self._tail_steps
        if count.is_mps:
            last = min(last, 2.0**24)  # where float32 stops counting: a fixed window from there
        old, new = before.clamp(first, last), (before + 1.0).clamp(first, last)
        excess = 1.0 - c * (new - old)  # over k_t, of the k_{t-1} before and this one
        return (1.0 + (old * excess / new).sqrt()) / (1.0 + c * old)

    def _normalise(
        self, x: Tensor, mean: Tensor | None, var: Tensor | None, weight: float = 1.0
    ) -> Tensor:
        """The output. In training, adds the statistics of this batch to `mean` and `var`."""
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        batch = self.training or mean is None
        return F.batch_norm(x, mean, var, self.weight, self.bias, batch, weight, self.eps)

    def _has_data(self, x: Tensor) -> bool:
        return x.numel() > 0

    def extra_repr(self) -> str:
        """Show the rule, too."""
        plain = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{plain}, rule={self._tail_rule}"


class TailBatchNorm1d(_TailBatchNorm, nn.BatchNorm1d):
    """What `convert_tail_batchnorm` makes of a `BatchNorm1d`."""


class TailBatchNorm2d(_TailBatchNorm, nn.BatchNorm2d):
    """What `convert_tail_batchnorm` makes of a `BatchNorm2d`."""


class TailBatchNorm3d(_TailBatchNorm, nn.BatchNorm3d):
    """What `convert_tail_batchnorm` makes of a `BatchNorm3d`."""


class TailSyncBatchNorm(_TailBatchNorm, nn.SyncBatchNorm):
    """What `convert_tail_batchnorm` makes of a `SyncBatchNorm`."""

    def _normalise(
        self, x: Tensor, mean: Tensor | None, var: Tensor | None, weight: float = 1.0
    ) -> Tensor:
        """Use torch's own forward, which knows when and how to synchronise."""
        twin = object.__new__(nn.SyncBatchNorm)  # which shares all else: this one stays as it is
        count = torch.zeros((), dtype=torch.long)
        buffers = {"running_mean": mean, "running_var": var, "num_batches_tracked": count}
        twin.__dict__ = self.__dict__ | {"_buffers": self._buffers | buffers, "momentum": weight}
        return nn.SyncBatchNorm.forward(twin, x)

    def _has_data(self, x: Tensor) -> bool:
        return x.numel() > 0 or _synchronises(self)  # another process has, then


_TAIL: dict[type[nn.Module], type[_TailBatchNorm]] = {
    nn.BatchNorm1d: TailBatchNorm1d,
    nn.BatchNorm2d: TailBatchNorm2d,
    nn.BatchNorm3d: TailBatchNorm3d,
    nn.SyncBatchNorm: TailSyncBatchNorm,
}
_PLAIN = {tail: plain for plain, tail in _TAIL.items()}
_TAIL |= {tail: tail for tail in _TAIL.values()}
