"""Rules: the averages of the paper, as decisions about weights. No sample is ever seen here.

Every weight in the project comes from one equation, `root`, and from `join`, which makes it total:

- `AnytimeWindow` (the paper's *awa*): blocks of consecutive samples, whose means `read` joins;
- `Exponential` (*exp*): one mean, to which each sample is joined with a decay that follows t;
- `ExactWindow` (*true*) and `RawTail` (*raw*), whose samples all weigh alike, are in `baselines`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tailavg.core.anytail import AnyTail
from tailavg.core.baselines import ExactWindow, RawTail
from tailavg.core.windows import NEVER, AnyWindow, Fixed, OfWindow, Window, smaller, whole

__all__ = ["AnytimeWindow", "ExactWindow", "Exponential", "RawTail", "as_rule", "join", "read"]

Turns = Literal["balanced", "paper"]


def root(old: Any, new: Any, excess: Any) -> Any:
    """The smaller root g of g²/old + (1-g)²/new = 1/k, where k = old + new - excess.

    With this weight on a mean of `old` samples, beside a mean of `new` fresher ones, the variance
    is that of k samples, and the old ones weigh as little as that allows.
    """
    total = old + new
    return (old - (old * new * excess / (total - excess)) ** 0.5) / total


def join(old: Any, new: Any, k: Any) -> Any:
    """The weight of a mean of `old` samples beside a mean of `new` fresher ones, for any counts.

    Where there are no k samples yet, k is what there is (all weigh the same); where the new ones
    suffice, the old ones weigh nothing. Numbers or arrays: plain arithmetic, no branch.

    Examples:
        >>> join(100, 50, 100), join(30, 10, 100), join(100, 100, 100)
        (0.3333333333333333, 0.75, 0.0)
    """
    excess = old + new - k
    return abs((new < k) * root(old, new, (excess > 0) * excess))  # 0.0, not -0.0


def read(sizes: Sequence[Any], k: Any) -> list[Any]:
    """The weights of the means of consecutive blocks of `sizes` samples, oldest first.

    A fold of `join`, newest first. Blocks count in full while they total less than k; the one
    that completes k gets what the variance asks; anything older gets 0.

    Examples:
        >>> read([100, 40, 10], k=100)
        [0.3333333333333333, 0.5333333333333334, 0.13333333333333333]
    """
    weights: list[Any] = []
    newer = 0
    for size in reversed(sizes):
        g = join(size, newer, k)
        weights = [g, *(weight * (1.0 - g) for weight in weights)]
        newer += size
    return weights


@dataclass(frozen=True, init=False)
class AnytimeWindow(OfWindow):
    """The paper's anytime window average, for any window and number of accumulators.

    A block is known by its start, the number of samples before it; the last one is open. It is
    closed when it has its share of the window *and* the blocks after the oldest, which makes room,
    hold the whole window. `turns="paper"` does not wait for the share when the window grows: that
    is the paper's rule, and it spends accumulators on small blocks.
    """

    window: Window
    accumulators: int = 3
    turns: Turns = "balanced"

    def __init__(self, window: AnyWindow, accumulators: int = 3, turns: Turns = "balanced") -> None:
        super().__init__(window)
        if turns not in ("balanced", "paper"):
            raise ValueError(f'turns: expected "balanced" or "paper", got {turns!r}')
        object.__setattr__(self, "accumulators", whole(accumulators, "accumulators", least=2))
        object.__setattr__(self, "turns", turns)

    @property
    def _shared(self) -> bool:
        """Whether a block waits for its share of the window."""
        return self.turns == "balanced" or isinstance(self.window, Fixed)

    def closes(self, starts: Sequence[int]) -> int:
        """The step after which the open block takes no more samples."""
        z = self.accumulators - 1
        end = self.window.filled_at(starts[-1], z) if self._shared else starts[-1] + 1
        return max(end, self.window.filled_at(starts[1])) if len(starts) > z else end

    def closed(self, starts: Sequence[Any], t: Any) -> Any:
        """Whether it takes none after step t, also for traced integers; empty blocks come first.

        Examples:
            >>> [AnytimeWindow(100).closed([0, 0, 50], t) for t in (99, 100)]
            [False, True]
        """
        spare = (starts[0] == starts[1]) | self.window.filled(starts[1], t)
        if not self._shared:
            return spare & (t > starts[-1])
        return spare & self.window.filled(starts[-1], t, self.accumulators - 1)

    def uniform_until(self, t: int) -> int:
        """The step until which, from step t on, a turn depends on the blocks' sizes alone."""
        return NEVER if self.window.size(t) == self.window.limit else 0


@dataclass(frozen=True, init=False)
class Exponential(OfWindow):
    """An exponential average that has the variance of k_t samples at every step.

    Its effective size is n_t = min(n_{t-1} + 1, k_t): the plain mean at first, then k_t. A fixed
    window's decay is then the paper's (k-1)/(k+1).
    """

    window: Window
    accumulators = 1

    def decay(self, t: Any) -> Any:
        """The weight of the average so far when sample t = 1, 2, … comes; a function of t alone.

        Drives the averages of other libraries: average = decay(t) * average + (1 - decay(t)) * x.

        Examples:
            >>> [round(Exponential(0.5).decay(t), 3) for t in (1, 2, 10, 100, 1000)]
            [0.0, 0.0, 0.696, 0.966, 0.997]
        """
        return abs(root(*self._joined(t)))

    def weight(self, t: Any) -> Any:
        """The weight of sample t when it comes, 1 - decay(t), with its digits in float32, too.

        Examples:
            >>> [round(Exponential(0.5).weight(t), 3) for t in (1, 2, 10, 100, 1000)]
            [1.0, 1.0, 0.304, 0.034, 0.003]
        """
        old, new, excess = self._joined(t)
        # the larger root for the new mean: the two add up to 2 new / (old + new)
        return 2.0 * new / (old + new) - root(new, old, excess)

    def _joined(self, t: Any) -> tuple[Any, float, Any]:
        """What `root` takes: n_{t-1}, 1, and their excess over n_t, in which n_t would cancel."""
        before = self.window.size(t - 1)
        return smaller(t - 1, before), 1.0, (t - 1 >= before) * (1.0 - self.window.growth(t))


BlockRule = AnytimeWindow | RawTail
WindowRule = BlockRule | Exponential | ExactWindow
Rule = WindowRule | AnyTail


def as_rule(rule: AnyWindow | Rule) -> Rule:
    """A rule, or the window or number that stands for an `AnytimeWindow` over it."""
    return rule if isinstance(rule, Rule) else AnytimeWindow(rule)
