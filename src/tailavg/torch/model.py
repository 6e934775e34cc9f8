"""`AveragedModel`: a module that holds the averaged weights, like torch's own.

`update_parameters` only adds to the accumulators. The average is written into the module when the
module is read: see `_catch_up`.
"""

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

    Call `update_parameters(model)` after each step of the optimizer. Call the averaged model like
    the model itself. The average is computed on demand: by `module`, `forward`, `parameters()` and
    `state_dict()`. A reference to `averaged.module` is stale after the next update: read
    `averaged.module` again. Before the first update, the copy has the weights of the model.

    Args:
        model: The model to copy. Sharded models cannot be copied: use `ParameterAverage`.
        rule: A number, a window or a rule with a window, as in `ParameterAverage`.
        device: Where to keep the copy and the accumulators; by default with the model.
        use_buffers: Torch's option: True means `buffers="average"`, False any other `buffers`.
        buffers: `"copy"`: the copy has the buffers of the model at the last update; `"average"`:
            floating point buffers are averaged as well; `"skip"`: the copy keeps its own.
        update_every: Count only every n-th call of `update_parameters`.
        offload: Where to keep the means, as in `ParameterAverage`.
        avg_fn, multi_avg_fn: Torch's options, replaced by `rule`. An error names the rule to use.

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
                "AveragedModel needs a rule instead of avg_fn or multi_avg_fn, as in "
                "AveragedModel(model, 0.25); rule=Exponential.from_decay(decay) replaces "
                "get_ema_avg_fn(decay), and rule=1.0 replaces get_swa_avg_fn()"
            )
        if not isinstance(model, Module):
            raise TypeError(
                f"model: AveragedModel copies one module, got a {type(model).__name__}; average a "
                "list of modules with ParameterAverage, which makes no copy"
            )
        rule = as_training_rule(rule, stacklevel=6)
        if isinstance(rule, AnyTail):
            raise TypeError(
                f"rule: {rule} has no window of its own, but a module has only one set of weights; "
                "pass a rule with a window, or read any window with ParameterAverage"
            )
        if any(map(is_sharded, model.parameters())):
            raise TypeError(
                "model: a sharded model cannot be copied; use ParameterAverage, which makes no copy"
            )
        if buffers is None:
            buffers = "average" if use_buffers else "copy"
        elif use_buffers is not None and use_buffers != (buffers == "average"):
            raise ValueError(
                f"use_buffers={use_buffers!r} contradicts buffers={buffers!r}; leave out "
                "use_buffers"
            )
        self.use_buffers = buffers == "average"
        self._count_calls(update_every)
        Tracking(model, buffers=buffers)  # raises on shared memory, which a copy separates
        module = deepcopy(unwrap(model))
        if device is not None:
            module.to(device)
        self._target = Tracking(module, buffers=buffers)
        self._accumulators = Accumulators(rule, self._target.locals, torch.float32, device, offload)
        self._source: Tracking | None = None
        self._written_count = 0  # the count when the average was last written into the module
        self._not_averaged: dict[str, Tensor] = {}  # values to copy into the module
        self.module = module
        self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.long, device=device))

    @outside_autograd
    def update_parameters(self, model: Module) -> None:
        """Take the model's current parameters as one sample.

        The model may be inside a wrapper, such as DDP, that has no tensors of its own.
        """
        if self._skips_call():
            return
        source = self._source
        if source is None or source.modules != [unwrap(model)] or not source.is_current():
            source = self._bind(model)
        copied = source.parameters | source.output_buffers

        def finish() -> None:
            self._not_averaged = {name: tensor.clone() for name, tensor in copied.items()}
            self.n_averaged.fill_(self.count)

        self._accumulators.add(finish)

    def _bind(self, model: Module) -> Tracking:
        """Take samples from this model from now on: the source model."""
        self._target.refresh(self._move)
        source = self._target.of(model)
        if source.untied:
            alias, name, _ = source.untied[0]
            raise ValueError(
                f"model: {alias} and {name} are tied in the averaged model, but not in this one; "
                "tie them again, or create a new AveragedModel"
            )
        self._source = None  # in case binding is interrupted
        self._accumulators.bind(source.locals)
        self._source = source
        return source

    @outside_autograd
    def _catch_up(self) -> None:
        """Write the average and the buffers into the module, unless it has them already."""
        self._accumulators.require_complete()
        if self._written_count == self.count:
            return
        source = self._source
        frozen = source.frozen() if source is not None and source.is_current() else {}
        self._target.refresh(self._move)
        self._accumulators.write(self._accumulators.clock.terms(), self._target.locals, frozen)
        targets = self._target.tensors
        for name, value in self._not_averaged.items():
            targets[name].copy_(value)
        self._written_count = self.count
        self._not_averaged = {}

    # Every way to read the module calls `_catch_up`.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the averaged model."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            self._catch_up()
        return super().__getattr__(name)

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield the children by name; `children`, `apply` and `train` call this."""
        self._catch_up()
        return super().named_children()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Module]]:
        """Yield the modules by name; `modules`, `parameters` and `buffers` call this."""
        self._catch_up()
        modules: Iterator[tuple[str, Module]] = super().named_modules(*args, **kwargs)
        return modules

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the averaged model under `module.`, `n_averaged`, and the state to resume from."""
        self._catch_up()
        return super().state_dict(*args, **kwargs)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the state of the average, in the layout of `tailavg.io.state`."""
        return self._accumulators.state_dict(self._target.averaged)

    @outside_autograd
    def set_extra_state(self, state: Any) -> None:
        """Resume from a state of the average. None is ignored: the state is loaded later."""
        try:
            if state is not None:
                self._accumulators.loaded(state, self._target)()
                self._written_count = self.count
        finally:
            self.n_averaged.fill_(self.count)  # torch may have overwritten it

    @outside_autograd
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Resume from a state that `state_dict` returned. If it does not fit, nothing changes.

        Raises:
            ValueError: If another class returned the state, or if its rule differs.
            RuntimeError: As in `torch.nn.Module.load_state_dict`.
        """
        if state_dict.get("_extra_state") is None:
            raise ValueError(
                "state_dict: no state of an average found; was it saved by torch's own "
                "AveragedModel? Load one that tailavg.torch.AveragedModel saved. To start a new "
                "average from these weights, load them into the model and call update_parameters"
            )
        if self._accumulators.complete:
            self._catch_up()  # a failed load restores the module to what it holds now
        self._target.refresh()
        resume = self._accumulators.loaded(
            state_dict["_extra_state"], self._target, self._mark_loaded
        )
        clock_before = self._accumulators.clock
        weights = OrderedDict(state_dict)
        weights["_extra_state"] = None  # `resume` loads it
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
            if self._accumulators.clock is clock_before:  # otherwise it is loaded, or incomplete
                saved.restore()
            raise
        return keys

    def _mark_loaded(self) -> None:
        """Record that the module has the weights of the loaded state."""
        self._written_count = self.count
        self.n_averaged.fill_(self.count)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile `module`; the averaged model would be compiled again after every update."""
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
        """Leave the source model out of copies and pickles."""
        self._catch_up()
        return self.__dict__ | {"_source": None}
