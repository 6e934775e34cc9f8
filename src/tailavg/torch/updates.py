"""What `ParameterAverage` and `AveragedModel` share: which updates count, and their weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tailavg.core import profile as profiles
from tailavg.core.readings import Reading
from tailavg.core.rules import Rule, size_of
from tailavg.core.windows import Reals, positive_int
from tailavg.io.state import no_samples_error
from tailavg.torch.accumulators import Accumulators
from tailavg.torch.tracking import is_sharded, outside_autograd

__all__ = ["CountedUpdates", "has_trained"]


def has_trained(optimizer: Optimizer) -> bool:
    """Return whether the step that the optimizer has just taken counts.

    Two kinds of steps do not count. With a gradient scaler, a fused optimizer skips steps itself.
    And `torch.distributed.checkpoint.state_dict` creates the state of an optimizer with a step in
    which all learning rates and gradients are 0.
    """
    skipped = getattr(optimizer, "found_inf", None)
    if skipped is not None and skipped.item():
        return False
    # a container of optimizers, such as torchtitan's, has no learning rates itself
    optimizers = getattr(optimizer, "optimizers", [optimizer])
    groups = [group for inner in optimizers for group in inner.param_groups]
    if any(group.get("lr", 0.0) != 0 for group in groups):  # not every group has a learning rate
        return True
    return any(_is_nonzero(p.grad) for group in groups for p in group["params"])


@outside_autograd
def _is_nonzero(gradient: Tensor | None) -> bool:
    """Return whether a gradient has a nonzero element; for a DTensor, in any process."""
    if gradient is None:
        return False
    total: Any = gradient.abs().sum()  # NaN is nonzero
    return bool((total.full_tensor() if is_sharded(total) else total) != 0)


class CountedUpdates:
    """The counted updates of an average, and the weight of each."""

    _accumulators: Accumulators
    _update_call = ""  # what to call, for error messages

    def _count_calls(self, update_every: int, start_after: int = 0) -> None:
        """Count every `update_every`-th call, after `start_after` calls that are ignored."""
        self._every = positive_int(update_every, "update_every")
        self._start = positive_int(start_after, "start_after", least=0)

    def _skips_call(self) -> bool:
        """Return whether this call does not count; if so, add it to the skipped calls."""
        accumulators = self._accumulators
        # before the first sample, `calls` includes the calls that `start_after` ignores
        due = self._every if accumulators.clock.count else self._start + self._every
        if accumulators.calls + 1 < due:
            accumulators.calls += 1
            return True
        return False

    def _require_an_update(self, call: str) -> None:
        self._accumulators.require_complete()
        if not self.count:
            due = self._start + self._every
            waits = f" ({self._accumulators.calls} of {due} calls)" if due > 1 else ""
            raise no_samples_error(call, f"{waits}; call {self._update_call}")

    @property
    def rule(self) -> Rule:
        """The rule, with its window."""
        return self._accumulators.clock.rule

    @property
    def count(self) -> int:
        """The number of counted updates, t."""
        return self._accumulators.clock.count

    @property
    def size(self) -> float:
        """The size of the window, k_t. `profile` has the effective size."""
        return size_of(self.rule, None, self.count)

    def weights(self, window: Reading | None = None) -> Reals:
        """Return the weight of each of the `count` updates, oldest first."""
        self._accumulators.require_complete()
        clock = self._accumulators.clock
        return profiles.dense_weights(clock.rule, clock.starts, clock.count, window)

    def profile(self, window: Reading | None = None) -> profiles.Profile:
        """Return a summary of the weights: effective size, mean age, oldest age."""
        self._require_an_update("profile")
        clock = self._accumulators.clock
        return profiles.profile(clock.rule, clock.starts, clock.count, window)
