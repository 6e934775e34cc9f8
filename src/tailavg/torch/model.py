"""`AveragedModel`: a module that holds the averaged weights, like torch's own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from tailavg.core.rules import AnyTail, Rule, as_training_rule, refuses_decay
from tailavg.core.windows import AnyWindow
from tailavg.torch.accumulators import Accumulators, Offload
from tailavg.torch.storage import MemoryStorage
from tailavg.torch.swap import SavedWeights
from tailavg.torch.tracking import Buffers, Tracking, is_sharded, outside_autograd, unwrap
from tailavg.torch.updates import CountedUpdates

__all__ = ["AveragedModel"]


class AveragedModel(CountedUpdates, Module):
    """A drop-in for `torch.optim.swa_utils.AveragedModel`: a copy of a model with tail averages.

    Call `update_parameters(model)` after each step of the optimizer, then call this like the model.
    The average is computed on demand: by `module`, `forward`, `parameters()` and `state_dict()`. A
    module that you took from `averaged.module` before an update is stale after it: ask
    `averaged.module` again. Before the first update the copy has the weights of the original.

    Args:
        model: The model to copy. Sharded models cannot be copied: use `ParameterAverage`.
        rule: A number, a window or a rule with a window, as in `ParameterAverage`.
        device: Where to keep the copy and the accumulators; by default with the model.
        use_buffers: Torch's name for `buffers="average"`, and if False, for not doing so.
        buffers: `"copy"`: the copy has the buffers of the model at the last update; `"average"`:
            floating point buffers are averaged as well; `"skip"`: it keeps those that it has.
        update_every: Count only every n-th call of `update_parameters`.
        offload: Where to keep all of the average but its sum, as in `ParameterAverage`.
        avg_fn, multi_avg_fn: Torch's functions, which the rule replaces: an error says by which.

    Examples:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> averaged = AveragedModel(model, 0.5)
        >>> for step in range(10):
        ...     _ = torch.nn.init.constant_(model.weight, step)  # stands for optimizer.step()
        ...     averaged.update_parameters(model)
        >>> averaged.module.weight.item(), averaged.n_averaged.item()
        (7.0, 10)
    """

    n_averaged: Tensor
    module: Module
    _update_call = "update_parameters(model) after each step"

    @refuses_decay
    @outside_autograd
    def __init__(
        self,
        model: Module,
        rule: AnyWindow | Rule | None = None,
        device: torch.device | str | int | None = None,
        use_buffers: bool | None = None,
        *,
        buffers: Buffers | None = None,
        update_every: int = 1,
        offload: Offload = None,
        avg_fn: None = None,
        multi_avg_fn: None = None,
    ) -> None:
        super().__init__()
        if rule is None or avg_fn is not None or multi_avg_fn is not None:
            raise TypeError(
                "AveragedModel needs a rule in place of torch's functions, as in "
                "AveragedModel(model, 0.25): for get_ema_avg_fn(decay), "
                "rule=Exponential.from_decay(decay); for the equal average of get_swa_avg_fn(), "
                "rule=1.0"
            )
        rule = as_training_rule(rule, stacklevel=6)
        if isinstance(rule, AnyTail):
            raise TypeError(
                "rule: expected one with a window, since a module has one set of weights, got "
                f"{rule}; use ParameterAverage to read any window"
            )
        if any(map(is_sharded, model.parameters())):
            raise TypeError(
                "model: expected one that can be copied, got a sharded one; use ParameterAverage, "
                "which makes no copy"
            )
        if buffers is None:
            buffers = "average" if use_buffers else "copy"
        elif use_buffers is not None and use_buffers != (buffers == "average"):
            raise ValueError(
                "use_buffers: expected True with buffers='average' and False otherwise, got "
                f"{use_buffers!r} with buffers={buffers!r}; leave use_buffers out"
            )
        self.use_buffers = buffers == "average"
        self._count_calls(update_every)
        Tracking(model, buffers=buffers)  # refuses shared memory, which a copy does not show
        module = deepcopy(unwrap(model))
        if device is not None:
            module.to(device)
        self._target = Tracking(module, buffers=buffers)
        self._accumulators = Accumulators(rule, self._target.locals, torch.float32, device, offload)
        self._source: Tracking | None = None
        self._shown = 0  # the count at which the module got the average
        self._not_averaged: dict[str, Tensor] = {}  # values to copy into the module then
        self.module = module
        self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.long, device=device))

    @outside_autograd
    def update_parameters(self, model: Module) -> None:
        """Take the model's current parameters as one sample.

        The model may come in a wrapper without tensors of its own, under which it has the same
        names.
        """
        if self._skips_call():
            return
        source = self._source
        if source is None or source.module is not unwrap(model) or not source.is_current():
            source = self._bind(model)
        copied = source.parameters | source.output_buffers

        def finish() -> None:
            self._not_averaged = {name: tensor.clone() for name, tensor in copied.items()}
            self.n_averaged.fill_(self.count)

        self._accumulators.add(finish)

    def _bind(self, model: Module) -> Tracking:
        """Take samples from this model from now on."""
        self._target.refresh(self._move)
        source = self._target.of(model)
        if source.apart:
            alias, name, _ = source.apart[0]
            raise ValueError(
                f"model: {alias}: expected the same tensor as {name}, as in the averaged "
                "model, got another one"
            )
        self._source = None  # until all tensors are bound
        self._accumulators.bind(source.locals)
        self._source = source
        return source

    @outside_autograd
    def _catch_up(self) -> None:
        """Write the average and the buffers into the module, unless it has them."""
        self._accumulators.require_whole()
        if self._shown == self.count:
            return
        source = self._source
        frozen = source.frozen() if source is not None and source.is_current() else {}
        self._target.refresh(self._move)
        self._accumulators.write(self._accumulators.clock.terms(), self._target.locals, frozen)
        mine = self._target.tensors
        for name, value in self._not_averaged.items():
            mine[name].copy_(value)
        self._shown = self.count
        self._not_averaged = {}

    # Every way to read the module.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The averaged model's output."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            self._catch_up()
        return super().__getattr__(name)

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """As in `torch.nn.Module`; `children`, `apply` and `train` call this."""
        self._catch_up()
        return super().named_children()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Module]]:
        """As in `torch.nn.Module`; `modules`, `parameters` and `buffers` call this."""
        self._catch_up()
        modules: Iterator[tuple[str, Module]] = super().named_modules(*args, **kwargs)
        return modules

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The averaged model under `module.`, `n_averaged`, and all that a resume needs."""
        self._catch_up()
        return super().state_dict(*args, **kwargs)

    def get_extra_state(self) -> dict[str, Any]:
        """The state of the average, in the layout of `tailavg.io.state`."""
        return self._accumulators.state_dict(self._target.averaged)

    @outside_autograd
    def set_extra_state(self, state: Any) -> None:
        """Resume from a state of the average; None stands for one that is loaded later."""
        try:
            if state is not None:
                self._accumulators.loaded(state, self._target)()
                self._shown = self.count
        finally:
            self.n_averaged.fill_(self.count)  # torch may have loaded another one

    @outside_autograd
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Resume from what `state_dict` saved, or change nothing and say why.

        Raises:
            ValueError: If another class saved it, or with another rule.
            RuntimeError: As in `torch.nn.Module.load_state_dict`.
        """
        if state_dict.get("_extra_state") is None:
            raise ValueError(
                "state_dict: it has no state of an average, as if torch's own AveragedModel saved "
                "it; expected one from tailavg.torch.AveragedModel. To start a new average from "
                "these weights, load them into the model and call update_parameters"
            )
        if self._accumulators.whole:
            self._catch_up()  # so that all that may have to be put back is in the module
        self._target.refresh()
        resume = self._accumulators.loaded(
            state_dict["_extra_state"], self._target, self._show_loaded
        )
        before = self._accumulators.clock
        weights = OrderedDict(state_dict)
        weights["_extra_state"] = None  # later
        if "n_averaged" in weights:
            weights["n_averaged"] = self.n_averaged.clone()
        if hasattr(state_dict, "_metadata"):  # the versions of modules
            weights._metadata = state_dict._metadata  # type: ignore[attr-defined]
        saved = SavedWeights(self._target, self._target.tensors, MemoryStorage(None))
        try:
            keys = super().load_state_dict(weights, strict, assign)
            self._target.refresh()
            resume()
        except BaseException:
            if self._accumulators.clock is before:  # otherwise all is loaded, or broken
                saved.restore()
            raise
        return keys

    def _show_loaded(self) -> None:
        """Note that the module has the weights of the state that was loaded."""
        self._shown = self.count
        self.n_averaged.fill_(self.count)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module: this itself would be compiled again after every update."""
        self.module.compile(*args, **kwargs)

    @outside_autograd
    def _apply(self, fn: Any, recurse: bool = True) -> AveragedModel:
        self._catch_up()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._target.refresh(self._move)
        return self

    def _move(self, tensors: Mapping[str, Tensor]) -> None:
        """Let the accumulators follow the module to another device or dtype."""
        self._accumulators = self._accumulators.to(None, tensors)
        self._source = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the model of the last update out of copies and pickles."""
        self._catch_up()
        return self.__dict__ | {"_source": None}
