"""`AveragedModel`: a module that holds the averaged weights, like torch's own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from tailavg.core import profile as profiles
from tailavg.core.rules import AnyTail, Rule, as_rule, windowed
from tailavg.core.state import nothing_yet
from tailavg.core.windows import AnyWindow, Reals
from tailavg.torch.accumulators import Accumulators
from tailavg.torch.swap import Aside
from tailavg.torch.tracking import Buffers, Tracking, is_sharded, outside_autograd, unwrap

__all__ = ["AveragedModel"]


class AveragedModel(Module):
    """A drop-in for `torch.optim.swa_utils.AveragedModel`: a copy of a model with tail averages.

    Call `update_parameters(model)` after each step of the optimizer, then call this like the model.
    The average is computed on demand: by `module`, `forward`, `parameters()` and `state_dict()`.
    Before the first update the copy has the weights of the original.

    Args:
        model: The model to copy. Sharded models cannot be copied: use `ParameterAverage`.
        rule: A number, a window or a rule with a window, as in `ParameterAverage`.
        device: Where to keep the copy and the accumulators; by default with the model.
        use_buffers: Average floating point buffers as well, instead of copying them at each update.

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

    @outside_autograd
    def __init__(
        self,
        model: Module,
        rule: AnyWindow | Rule,
        device: torch.device | str | int | None = None,
        use_buffers: bool = False,
    ) -> None:
        super().__init__()
        rule = as_rule(rule)
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
        self._shown = 0  # the count at which the module got the average
        self.use_buffers = use_buffers
        module = deepcopy(unwrap(model))
        if device is not None:
            module.to(device)
        self.module = module
        self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.long, device=device))
        buffers: Buffers = "average" if use_buffers else "copy"
        self._options = {"buffers": buffers}
        self._target = Tracking(module, **self._options)
        self._source: Tracking | None = None
        self._accumulators = Accumulators(as_rule(rule), self._target.locals, torch.float32, device)

    @outside_autograd
    def update_parameters(self, model: Module) -> None:
        """Take the model's current parameters as one sample."""
        if self._target.buffers:
            self._target.refresh(self._move)
        source = self._source
        if source is None or source.module is not unwrap(model) or not source.is_current():
            source = self._target.of(model, self._options)
            if source.apart:
                alias, name, _ = source.apart[0]
                raise ValueError(
                    f"model: {alias}: expected the same tensor as {name}, as in the averaged "
                    "model, got another one"
                )
            self._source = None  # until all tensors are bound
            self._accumulators.bind(source.locals)
            self._source = source
        buffers = source.buffers

        def copy_the_rest() -> None:
            for name, buffer in self._target.buffers.items():
                buffer.copy_(buffers[name])
            self.n_averaged.fill_(self.count)

        self._accumulators.add(copy_the_rest)

    @property
    def rule(self) -> Rule:
        """The rule, with its window."""
        return self._accumulators.clock.rule

    @property
    def count(self) -> int:
        """The number of updates so far, t; `n_averaged` has it as a tensor."""
        return self._accumulators.clock.count

    @property
    def size(self) -> float:
        """The size of the window, k_t. `profile` has the effective size."""
        return float(windowed(self.rule, None, self.count).size(self.count))

    def weights(self) -> Reals:
        """The weight of each of the `count` updates, oldest first."""
        self._accumulators.require_whole()
        clock = self._accumulators.clock
        return profiles.dense_weights(
            windowed(clock.rule, None, clock.count), clock.starts, clock.count
        )

    def profile(self) -> profiles.Profile:
        """A summary of the weights: effective size, mean age, oldest age."""
        self._accumulators.require_whole()
        clock = self._accumulators.clock
        if not clock.count:
            raise nothing_yet("profile", "; call update_parameters(model) after each step")
        return profiles.profile(windowed(clock.rule, None, clock.count), clock.starts, clock.count)

    @outside_autograd
    def _catch_up(self) -> None:
        """Compute the average, unless it is up to date."""
        self._accumulators.require_whole()
        if self._shown != self.count:
            source = self._source
            frozen = source.frozen() if source is not None and source.is_current() else {}
            self._target.refresh(self._move)
            self._accumulators.write(self._accumulators.clock.terms(), self._target.locals, frozen)
            self._shown = self.count

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
        """The state of the average, in the layout of `tailavg.core.state`."""
        return self._accumulators.state_dict()

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
                "state_dict: expected one from tailavg.torch.AveragedModel, got one without the "
                "state of an average, as torch's own AveragedModel saves it; to start a new "
                "average from those weights, load them into the model and call update_parameters"
            )
        self._target.refresh()
        accumulators, target = self._accumulators, self._target
        resume = accumulators.loaded(state_dict["_extra_state"], target)
        weights = OrderedDict(state_dict)
        weights["_extra_state"] = None  # later
        if "n_averaged" in weights:
            weights["n_averaged"] = self.n_averaged.clone()
        if hasattr(state_dict, "_metadata"):  # the versions of modules
            weights._metadata = state_dict._metadata  # type: ignore[attr-defined]
        aside = Aside(target, target.averaged | target.parameters | target.buffers, None)
        for memory in aside.memory.values():
            aside.keep([memory])
        whole, accumulators.whole = accumulators.whole, False
        try:
            keys = super().load_state_dict(weights, strict, assign)
            target.refresh()
        except BaseException:
            aside.put_back()
            accumulators.whole = whole
            raise
        self._shown = state_dict["_extra_state"]["count"]
        self.n_averaged.fill_(self._shown)
        resume()
        return keys

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
