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

from tailavg.core.windows import AnyWindow, Fixed, Window, as_window

__all__ = ["convert_tail_batchnorm", "recompute_batchnorm", "revert_batchnorm"]


def convert_tail_batchnorm(model: nn.Module, window: AnyWindow) -> nn.Module:
    """Make the running statistics of every BatchNorm in `model` average a window of batches.

    They follow the growing exponential, `Exponential(window)`: over the last quarter of all batches
    so far for `window=0.25`, over the last hundred for `window=100`. An empty batch is not counted.

    Training outputs and the keys of the state dict do not change, so checkpoints load both ways:
    the step is the existing buffer `num_batches_tracked`. Keep the statistics in float32, as
    autocast does: in 16 bits, an average over hundreds of batches stops moving. A `momentum` that
    is a number is ignored; `None` keeps torch's meaning, the plain mean, as `update_bn` needs it.

    The modules remain the same objects; only their class changes, as with torch's lazy modules.
    Converting a converted model changes the window. Modules that track no statistics are left
    alone, and so are, with a warning, subclasses that are not torch's own and lazy modules that
    have not seen a batch. Call `SyncBatchNorm.convert_sync_batchnorm` before, if you need it.

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
    window = as_window(window)
    unknown = []
    for name, module in model.named_modules():
        if not _has_statistics(module):
            continue
        tail = _TAIL.get(type(module))
        if tail is None:
            unknown.append(f"{name or 'model'} ({type(module).__name__})")
            continue
        converted = cast("_TailBatchNorm", module)
        converted._tail_window, converted._tail_steps = window, _steps(window)
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

    Args:
        model: Any module, including a BatchNorm itself.

    Returns:
        The same model.

    Examples:
        >>> revert_batchnorm(convert_tail_batchnorm(nn.BatchNorm1d(3, momentum=0.3), window=0.25))
        BatchNorm1d(3, eps=1e-05, momentum=0.3, affine=True, ...track_running_stats=True)
    """
    for module in model.modules():
        if isinstance(module, _TailBatchNorm):
            module.__class__ = _PLAIN[type(module)]  # type: ignore[assignment]
            del module._tail_window, module._tail_steps
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
    norms = [module for module in model.modules() if _has_statistics(module)]
    if not norms:
        return
    device = norms[0].running_mean.device
    buffers = [list(module.buffers(recurse=False)) for module in norms]
    kept = [[buffer.clone() for buffer in own] for own in buffers]
    momenta = [module.momentum for module in norms]
    training = [(module, module.training) for module in model.modules()]
    sums = [_Sums(weighted) for _ in norms]
    hooks = []
    batches = 0
    try:
        model.train()
        for module, own_sums in zip(norms, sums, strict=True):
            module.reset_running_stats()
            module.momentum = 1.0  # its statistics are those of the last batch alone
            hooks.append(module.register_forward_hook(own_sums, prepend=True))
        # uncompiled, since compiled code would not call the hooks
        with _random_state(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for batch in loader:
                if call is None:
                    _run(model, batch, device)
                else:
                    call(model, batch)
                batches += 1
        if not any(own_sums.batches for own_sums in sums):
            got = f"{batches} that brought none to a BatchNorm in training mode"
            raise ValueError(
                "loader: expected at least one batch with data, got "
                f"{got if batches else 'none (is it an exhausted iterator?)'}; "
                "the statistics are unchanged"
            )
        for module, own, old, own_sums in zip(norms, buffers, kept, sums, strict=True):
            if own_sums.batches:
                own_sums.write(module)
            else:
                torch._foreach_copy_(own, old)
    except BaseException:
        for own, old in zip(buffers, kept, strict=True):
            torch._foreach_copy_(own, old)
        raise
    finally:
        for hook in hooks:
            hook.remove()
        for module, momentum in zip(norms, momenta, strict=True):
            module.momentum = momentum
        for each, flag in training:
            each.training = flag


class _Sums:
    """A forward hook that adds up the statistics of the batches that a BatchNorm gets."""

    def __init__(self, weighted: bool) -> None:
        self.weighted = weighted
        self.batches = 0
        self.total = 0  # of elements if weighted, otherwise of batches
        self.mean: Any = 0.0
        self.squares: Any = 0.0

    def __call__(self, module: _WithStatistics, _: object, output: Tensor) -> None:
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
        before, new = self.total, elements if self.weighted else 1
        self.total += new
        self.batches += 1
        apart = mean - self.mean
        self.mean = self.mean + apart * (new / self.total)
        if self.weighted:  # Chan's formula: within this batch, and between it and those before
            var = var * (new - 1) + apart.square() * (before * new / self.total)
        self.squares = self.squares + var

    def write(self, module: _WithStatistics) -> None:
        """Give the module the statistics of all batches."""
        module.running_mean.copy_(self.mean)
        module.running_var.copy_(self.squares / (self.total - self.weighted))
        module.num_batches_tracked.fill_(self.batches)


@contextmanager
def _random_state(model: nn.Module) -> Iterator[None]:
    """Put torch's random state back at the end: that of the CPU and of the model's devices."""
    devices = {each.device for each in (*model.parameters(), *model.buffers())}
    # the one of MPS goes by no number
    places = [
        (torch.get_device_module(at), () if at.type == "mps" else (at,))
        for at in devices
        if at.type not in ("cpu", "meta")
    ]
    with torch.random.fork_rng([]):
        states = [place.get_rng_state(*at) for place, at in places]
        try:
            yield
        finally:
            for (place, at), state in zip(places, states, strict=True):
                place.set_rng_state(state, *at)


def _run(model: nn.Module, batch: Any, device: torch.device) -> None:
    if isinstance(batch, Mapping):
        model(**{name: _moved(value, device) for name, value in batch.items()})
    else:
        model(_moved(batch[0] if isinstance(batch, tuple | list) else batch, device))


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if hasattr(value, "to") else value


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
        _tail_window: Window
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
        """The weight of a batch after `count` others, `Exponential(window).weight(count + 1)`.

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
        """Show the window, too."""
        plain = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{plain}, window={self._tail_window}"


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
