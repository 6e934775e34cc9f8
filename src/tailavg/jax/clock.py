"""The clock of `tailavg.core.clock`, with traced fields.

Windows and rules decide as everywhere; only their arithmetic differs. Steps are integers, of 32
bits without x64, and turns fall on the same samples as in NumPy. Everything else is float32 without
x64, so the weights of an exponential are computed from its excess.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from tailavg.core import clock as core
from tailavg.core.clock import FOLD, SMALLEST
from tailavg.core.equation import read
from tailavg.core.rules import AnytimeWindow, Exponential
from tailavg.core.windows import BITS, TIE, Fixed, Growing, Steps, Window

__all__ = ["Step", "TracedBlocks", "TracedDecay", "first_clock", "restored", "traced"]


def _last() -> int:
    return int(np.iinfo(jnp.result_type(int)).max)


def _later(step: Array, n: int) -> Array:
    """Add to a step; steps stop at the largest integer."""
    n = min(n, _last())
    return jnp.where(step > _last() - n, _last(), step + n)


def _stretched(step: Array, ratio: int) -> Array:
    """Long multiplication, in digits whose products fit an integer."""
    last = _last()
    if ratio >> BITS >= last:
        return jnp.where(step > 0, last, 0)
    bits, places = (12, 3) if last < 2**31 else (20, 4)
    base = (1 << bits) - 1
    digits = [ratio >> at & base for at in range(0, ratio.bit_length(), bits)]
    steps = [step >> at & base for at in range(0, bits * places, bits)]
    carry: Any = 0
    product = []
    for at in range(len(digits) + places):
        carry = carry + sum(
            digit * steps[at - i] for i, digit in enumerate(digits) if 0 <= at - i < places
        )
        product.append(carry & base)
        carry = carry >> bits
    fraction, integer = product[: BITS // bits], product[BITS // bits :]
    most = last >> bits * (places - 1)  # the first digit of the last step
    beyond = (integer[places - 1] > most) | (sum(integer[places:]) > 0)
    found = sum(digit << bits * i for i, digit in enumerate(integer[: places - 1]))
    found = found + ((integer[places - 1] & most) << bits * (places - 1))
    return jnp.where(beyond, last, jnp.where(sum(fraction) > 0, _later(found, 1), found))


TRACED = Steps(_last, _later, jnp.maximum, jnp.where, _stretched)


class _TracedFixed(Fixed):
    steps: ClassVar[Steps] = TRACED


class _TracedGrowing(Growing):
    steps: ClassVar[Steps] = TRACED

    def size(self, t: Any) -> Any:
        """k_t, for traced steps.

        XLA may multiply by 1 / q instead of dividing by q, and miss an integer by the last digit.
        Single precision misses it by more.
        """
        over, under, exact = self.ratio
        k = jnp.asarray(over * t / under)
        tie = 4e-7 if k.dtype == np.float32 else 2.0**-52 if exact else float(TIE)
        off = k.round() - k
        return (k + (abs(off) <= tie * k) * off).clip(1.0, self.most)


@lru_cache
def traced(rule: Any) -> Any:
    """The same rule, for traced steps."""
    window: Window = rule.window
    if isinstance(window, Fixed):
        window = _TracedFixed(window.k)
    else:
        window = _TracedGrowing(window.c, window.at_most)
    if isinstance(rule, Exponential):
        return Exponential(window)
    return AnytimeWindow(window, rule.accumulators, rule.turns)


class Step(NamedTuple):
    """What to do with a sample: fold if due, then add the sample to the sum."""

    folds: Array
    """Whether to fold the sum into a mean first, and start a new sum."""
    carries: Array
    """Whether the rounding error of the fold starts the new sum."""
    slot: Array | int
    """The place of the mean."""
    total: Array
    """The divisor of the sum; this and the next two are the arguments of `Store.fold`."""
    weight: Array
    """The weight of the folded sum in the joint mean. A weight of 1 forgets the old mean."""
    carry: Array
    """The factor of the rounding error in the new sum."""
    factor: Array | float
    """The factor of the sample in the sum."""


class TracedBlocks(NamedTuple):
    """The fields of a `tailavg.core.clock.BlockClock`."""

    folded: Array
    """The step up to which samples are in means; later ones are in the sum."""
    starts: Array
    """How many samples came before each block, oldest first; unused blocks come first, at 0."""
    newest: Array
    """The place of the newest mean; older means precede it, in a ring."""

    def serves(self, rule: AnytimeWindow | Exponential) -> bool:
        """Whether a rule of this kind, with as many accumulators, may use this clock."""
        return isinstance(rule, AnytimeWindow) and rule.accumulators == len(self.starts)

    def step(self, rule: AnytimeWindow, t: Array) -> tuple[Step, TracedBlocks]:
        """What to do with the sample after step t, and the clock after it."""
        starts = list(self.starts)
        closed = t >= rule.closes(starts)
        rest, size = t - self.folded, t - starts[-1]
        folds = (t == 0) | (rest >= FOLD) | closed
        step = Step(
            folds,
            carries=folds & (rest < size) & ~closed,
            slot=self.newest,
            total=jnp.maximum(rest, 1),
            weight=rest / jnp.maximum(size, 1),
            carry=size,
            factor=1.0,
        )
        clock = TracedBlocks(
            folded=jnp.where(folds, t, self.folded),
            starts=jnp.where(closed, jnp.stack([*starts[1:], t]), self.starts),
            newest=jnp.where(closed, (self.newest + 1) % len(starts), self.newest),
        )
        return step, clock

    def weights(self, t: Array, k: Array) -> tuple[Array, Array]:
        """The weights of the means, each in its place, and of the sum, at step t."""
        starts, places = list(self.starts), len(self.starts)
        # at step 0 the sum is the tree given to `init`, which counts as one sample
        ends = [*starts[1:], jnp.maximum(t, 1)]
        # the product of two integer counts could overflow
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


class TracedDecay(NamedTuple):
    """The fields of a `tailavg.core.clock.DecayClock`, with running totals for its tables."""

    folded: Array
    """The step up to which samples are in the mean; later ones are in the sum."""
    share: Array
    """The total weight of the samples in the sum."""
    total: Array
    """The sum of their factors."""
    decayed: Array
    """The logarithm of G at the last of them."""

    def serves(self, rule: AnytimeWindow | Exponential) -> bool:
        """Whether a rule of this kind, with as many accumulators, may use this clock."""
        return isinstance(rule, Exponential)

    def step(self, rule: Exponential, t: Array) -> tuple[Step, TracedDecay]:
        """What to do with the sample after step t, and the clock after it."""
        weight = jnp.asarray(rule.weight(t + 1))
        decayed = self.decayed + jnp.log1p(-weight)
        rest = t - self.folded
        folds = (rest == 0) | (rest >= FOLD) | (decayed < math.log(SMALLEST))
        decayed = jnp.where(folds, 0.0, decayed)
        factor = weight * jnp.exp(-decayed)
        clock = TracedDecay(
            folded=jnp.where(folds, t, self.folded),
            share=jnp.where(folds, weight, self.share + weight * (1.0 - self.share)),
            total=jnp.where(folds, factor, self.total + factor),
            decayed=decayed,
        )
        step = Step(
            folds,
            carries=folds & (self.share < 1.0),
            slot=0,
            total=self.total,
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


def first_clock(rule: AnytimeWindow | Exponential) -> TracedBlocks | TracedDecay:
    """The clock before the first sample: the sum is the tree given to `init`."""
    integer: Any = jnp.result_type(int)
    real: Any = jnp.result_type(float)
    if isinstance(rule, AnytimeWindow):
        return TracedBlocks(
            folded=jnp.zeros((), integer),
            starts=jnp.zeros(rule.accumulators, integer),
            newest=jnp.full((), rule.accumulators - 1, integer),
        )
    return TracedDecay(
        folded=jnp.zeros((), integer),
        share=jnp.ones((), real),
        total=jnp.ones((), real),
        decayed=jnp.zeros((), real),
    )


def restored(clock: core.Clock) -> dict[str, Any]:
    """The fields of a traced clock at the same step; its `newest` is the last place."""
    if not isinstance(clock, core.DecayClock):
        return {"folded": clock.folded, "starts": clock.blocks}
    of_mean, of_sum = clock.weights()
    found: dict[str, Any] = {"folded": clock.folded, "share": 1.0 - of_mean}
    if of_sum:
        found |= {"total": (1.0 - of_mean) / of_sum, "decayed": math.log(of_sum)}
    return found
