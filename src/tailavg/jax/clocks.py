"""The scalar half of a state: which samples are where, and what is to be done at a step.

The decisions are those of `tailavg.core.rules` and `tailavg.core.windows`, which take traced integers. Counts
stay integers. Without x64 all else is float32, so an exponential's weights come from its excess.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from tailavg.core.rules import AnytimeWindow, Exponential, read
from tailavg.numpy.arithmetic import FOLD

__all__ = ["BlockClock", "DecayClock", "Step", "first_clock"]

_SMALLEST = -8.0  # of the logarithm of a product of decays: beyond it, float32 loses digits


class Step(NamedTuple):
    """What is to be done when a sample comes: perhaps a fold, then it is added to the sum."""

    folds: Array
    """Whether the sum is first folded into a mean, and begun anew."""
    carries: Array
    """Whether what that rounds off begins the next sum."""
    slot: Array | int
    """The place of the mean."""
    scale: Array
    """What makes the sum a mean of its own."""
    weight: Array
    """The weight of that in the joint mean; 1 if what was in the place is to be forgotten."""
    carry: Array
    """What is rounded off is multiplied by this in the next sum."""
    factor: Array | float
    """What the sample is multiplied by in the sum."""


class BlockClock(NamedTuple):
    """The scalars of an `AnytimeWindow`."""

    folded: Array
    """The step up to which the samples are in the means of blocks; later ones are in the sum."""
    starts: Array
    """How many samples came before each block, oldest first; those yet to come are empty ones."""
    newest: Array
    """The place of the newest block's mean; those of older ones are before it, in a ring."""

    def serves(self, rule: AnytimeWindow | Exponential) -> bool:
        """Whether this is a clock of such a rule."""
        return isinstance(rule, AnytimeWindow) and rule.accumulators == len(self.starts)

    def step(self, rule: AnytimeWindow, t: Array) -> tuple[Step, BlockClock]:
        """What is to be done with the sample that follows step t, and the clock after that."""
        starts = list(self.starts)
        closed = rule.closed(starts, t)
        rest, size = t - self.folded, t - starts[-1]
        folds = (t == 0) | (rest >= FOLD) | closed
        step = Step(
            folds,
            carries=folds & (rest < size) & ~closed,
            slot=self.newest,
            scale=1.0 / jnp.maximum(rest, 1),
            weight=rest / jnp.maximum(size, 1),
            carry=size,
            factor=1.0,
        )
        clock = BlockClock(
            folded=jnp.where(folds, t, self.folded),
            starts=jnp.where(closed, jnp.stack([*starts[1:], t]), self.starts),
            newest=jnp.where(closed, (self.newest + 1) % len(starts), self.newest),
        )
        return step, clock

    def weights(self, t: Array, k: Array) -> tuple[Array, Array]:
        """The weights of the means, each in its place, and of the sum, at step t."""
        starts, places = list(self.starts), len(self.starts)
        # what was given to `init` is in the sum, as if it were the one sample
        ends = [*starts[1:], jnp.maximum(t, 1)]
        # a product of two counts would overflow
        sizes = [(end - start).astype(k.dtype) for start, end in zip(starts, ends, strict=True)]
        weights = read(sizes, k)
        of_sum = weights[-1] / sizes[-1]
        weights[-1] = of_sum * (self.folded - starts[-1])
        return jnp.stack(weights)[(jnp.arange(places) - self.newest - 1) % places], of_sum

    def blocks(self, t: int) -> tuple[list[int], list[int]]:
        """The starts of the blocks at step t, oldest first, and the places of their means."""
        starts, places = [int(start) for start in self.starts], len(self.starts)
        held = [i for i, (start, end) in enumerate(pairwise([*starts, t])) if start < end]
        return (
            [starts[i] for i in held],
            [(int(self.newest) + 1 + i) % places for i in held],
        )


class DecayClock(NamedTuple):
    """The scalars of an `Exponential`.

    In the sum is sample i times w_i / ((1 - w_j) ⋯ (1 - w_i)), where w_i is its weight when it
    comes, and j the second sample after the last fold.
    """

    folded: Array
    """The step up to which the samples are in the mean; later ones are in the sum."""
    share: Array
    """The weight of these later ones, all together."""
    total: Array
    """The sum of their factors."""
    decayed: Array
    """The logarithm of the denominator above, for the last of them."""

    def serves(self, rule: AnytimeWindow | Exponential) -> bool:
        """Whether this is a clock of such a rule."""
        return isinstance(rule, Exponential)

    def step(self, rule: Exponential, t: Array) -> tuple[Step, DecayClock]:
        """What is to be done with the sample that follows step t, and the clock after that."""
        weight = jnp.asarray(rule.weight(t + 1))
        decayed = self.decayed + jnp.log1p(-weight)
        rest = t - self.folded
        folds = (rest == 0) | (rest >= FOLD) | (decayed < _SMALLEST)
        decayed = jnp.where(folds, 0.0, decayed)
        factor = weight * jnp.exp(-decayed)
        clock = DecayClock(
            folded=jnp.where(folds, t, self.folded),
            share=jnp.where(folds, weight, self.share + weight * (1.0 - self.share)),
            total=jnp.where(folds, factor, self.total + factor),
            decayed=decayed,
        )
        step = Step(
            folds,
            carries=folds & (self.share < 1.0),
            slot=0,
            scale=1.0 / self.total,
            weight=self.share,
            carry=1.0 - weight,
            factor=factor,
        )
        return step, clock

    def weights(self, t: Array, k: Array) -> tuple[Array, Array]:
        """The weights of the mean and of the sum."""
        return (1.0 - self.share)[None], self.share / self.total

    def blocks(self, t: int) -> tuple[list[int], list[int]]:
        """The start of the one block, and the place of its mean."""
        return ([0], [0]) if t else ([], [])


def first_clock(rule: AnytimeWindow | Exponential) -> BlockClock | DecayClock:
    """The clock before the first sample: the tree given to `init` is all there is, in the sum."""
    whole: Any = jnp.result_type(int)
    real: Any = jnp.result_type(float)
    if isinstance(rule, AnytimeWindow):
        return BlockClock(
            folded=jnp.zeros((), whole),
            starts=jnp.zeros(rule.accumulators, whole),
            newest=jnp.full((), rule.accumulators - 1, whole),
        )
    return DecayClock(
        folded=jnp.zeros((), whole),
        share=jnp.ones((), real),
        total=jnp.ones((), real),
        decayed=jnp.zeros((), real),
    )
