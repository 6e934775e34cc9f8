"""The clock of `tailavg.core.clock`, with traced fields.

Windows and rules decide as everywhere; only their arithmetic differs. Steps are integers, of 32
bits without x64, and turns fall on the same samples as in NumPy. Everything else is float32 without
x64, so the weights of an exponential are computed from its excess.
"""

from __future__ import annotations

import math
from copy import copy
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

from tailavg.core import clock as core
from tailavg.core.clock import FOLD, SMALLEST
from tailavg.core.decay import Decay
from tailavg.core.equation import join
from tailavg.core.rules import AnyTail, AnytimeWindow, Exponential
from tailavg.core.windows import BITS, TIE, Fixed, Growing, Steps, Window, fraction

__all__ = [
    "Merge",
    "Step",
    "TracedBlocks",
    "TracedDecay",
    "TracedRule",
    "TracedTails",
    "first_clock",
    "restored",
    "size_at",
    "traced",
    "traced_decay",
    "traced_size",
    "traced_window",
]

TracedRule = AnytimeWindow | Exponential | AnyTail
"""The rules that can be followed inside `jax.jit`."""

_MOST_TURNS = 50_000  # of an AnyTail, in all the steps that an integer can count


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
        """k_t, for traced steps."""
        over, under, exact = self.ratio
        k = jnp.asarray(over * t / under)
        return _whole(k, exact).clip(1.0, self.most)

    def growth(self, t: Any) -> Any:
        """k_t - k_{t-1}, for traced steps.

        Once single precision cannot tell the two sizes apart, only the step knows: the window grows
        by c until it has its cap, and by what is left to the cap at that step.
        """
        k, before = self.size(t), self.size(t - 1)
        growth = jnp.where(before > 1.0, self.c, k - before)
        if self.at_most is None or self._capped_from > _last():
            return growth
        capped = self._capped_from
        before_it = max(Fraction(1), fraction(self.c) * (capped - 1))
        left = float(max(Fraction(0), self.at_most - before_it))
        return jnp.where(t < capped, growth, jnp.where(t == capped, left, 0.0))


def _whole(k: Array, exact: bool = False) -> Array:
    """A size, or the whole number that it misses by rounding.

    XLA may multiply by 1 / q instead of dividing by q, and miss an integer by the last digit.
    Single precision misses it by more.
    """
    tie = 4e-7 if k.dtype == np.float32 else 2.0**-52 if exact else float(TIE)
    off = k.round() - k
    return k + (abs(off) <= tie * k) * off


@lru_cache
def traced_window(window: Window) -> Window:
    """The same window, for traced steps."""
    if isinstance(window, Fixed):
        return _TracedFixed(window.k)
    return _TracedGrowing(window.c, window.at_most)


@lru_cache
def traced_decay(decay: Decay) -> Decay:
    """The same decay, for traced steps."""
    found = copy(decay)  # not made anew: its function was checked, which cannot be done inside jit
    object.__setattr__(found, "window", traced_window(decay.window))
    return found


def traced_size(window: Any, t: Array) -> Array:
    """k_t of a window that is an array: the last so many, or the last fraction; NaN for others."""
    window = jnp.asarray(window)
    real: Any = jnp.result_type(float)
    if jnp.issubdtype(window.dtype, jnp.integer):
        return jnp.where(window >= 1, window, jnp.nan).astype(real)
    if not jnp.issubdtype(window.dtype, jnp.floating):
        raise TypeError(f"window: expected an array of whole or real numbers, got {window.dtype}")
    c = window.astype(real)
    return jnp.where((c > 0) & (c <= 1), jnp.maximum(_whole(c * t), 1.0), jnp.nan)


class _TracedTail(AnyTail):
    """An `AnyTail` that looks up what it would have to search for, since steps are traced.

    When blocks are closed, and which are merged, follows from the count alone: the clock of core
    goes through all steps once. There are a few hundred turns, since blocks grow with the stream.
    """

    def closes(self, starts: Any) -> Any:
        """The step after which the open block takes no more samples."""
        ends, _ = _turns(self, _last())
        return jnp.asarray(ends)[self._turn(starts[-1])]

    def gone(self, starts: Any) -> Any:
        """The block that makes room when the open one is closed; if it is not 0, it is merged."""
        _, gone = _turns(self, _last())
        return jnp.asarray(gone)[self._turn(starts[-1])]

    def _turn(self, start: Any) -> Any:
        """How many blocks were closed before the one with this start."""
        ends, _ = _turns(self, _last())
        return (jnp.asarray(ends) <= start).sum()


@lru_cache
def _turns(rule: AnyTail, last: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The steps at which blocks are closed, and the block that then makes room."""
    rule = AnyTail(rule.accumulators, rule.shortest)
    clock = core.BlockClock(rule)
    ends, gone = [], []
    while clock.closes < last:
        clock.count = clock.closes
        ends.append(clock.count)
        room = clock.turn()
        gone.append(room[0] if room else 0)
        if len(ends) > _MOST_TURNS:
            raise ValueError(
                f"rule: expected an AnyTail that merges at most {_MOST_TURNS} times in {last} "
                f"steps, got {rule}; make shortest larger, or take fewer accumulators"
            )
    return np.array([*ends, last]), np.array([*gone, 0])


@lru_cache
def traced(rule: Any) -> Any:
    """The same rule, for traced steps."""
    if isinstance(rule, AnyTail):
        return _TracedTail(rule.accumulators, rule.shortest)
    if isinstance(rule, Exponential):
        return Exponential(traced_window(rule.window))
    return AnytimeWindow(traced_window(rule.window), rule.accumulators, rule.turns)


def size_at(rule: TracedRule, t: Any) -> Any:
    """k_t; of an `AnyTail`, which has no window, that of the shortest it may be read with."""
    return rule.shortest * t if isinstance(rule, AnyTail) else rule.size(t)


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
    factor: Array
    """The factor of the sample in the sum."""
    merge: Merge | None
    """What to do after the fold, if the rule merges blocks."""


class Merge(NamedTuple):
    """How two blocks become one, to make room."""

    merges: Array
    """Whether they do."""
    source: Array
    """The place of the mean that goes."""
    target: Array
    """The place of the mean that it joins."""
    weight: Array
    """Its weight in the joint mean."""


class TracedBlocks(NamedTuple):
    """The fields of a `tailavg.core.clock.BlockClock`."""

    folded: Array
    """The step up to which samples are in means; later ones are in the sum."""
    starts: Array
    """How many samples came before each block, oldest first; unused blocks come first, at 0."""
    places: Array
    """Where the mean of each block is held."""

    def serves(self, rule: TracedRule) -> bool:
        """Whether a rule of this kind, with as many accumulators, may use this clock."""
        return isinstance(rule, AnytimeWindow) and rule.accumulators == len(self.starts)

    def step(self, rule: Any, t: Array) -> tuple[Step, TracedBlocks]:
        """What to do with the sample after step t, and the clock after it."""
        starts, places = self.starts, self.places
        closed = t >= rule.closes(list(starts))
        rest, size = t - self.folded, t - starts[-1]
        folds = (t == 0) | (rest >= FOLD) | closed
        gone: Any = 0  # the block that makes room
        merge = None
        if isinstance(rule, _TracedTail):
            gone = rule.gone(starts)
            before, start, end = (
                jnp.append(starts, t)[jnp.maximum(gone, 1) + step] for step in (-1, 0, 1)
            )
            merge = Merge(
                merges=closed & (gone > 0),
                source=places[gone],
                target=places[gone - 1],
                weight=(end - start) / jnp.maximum(end - before, 1),
            )
        step = Step(
            folds,
            carries=folds & (rest < size) & ~closed,
            slot=places[-1],
            total=jnp.maximum(rest, 1),
            weight=rest / jnp.maximum(size, 1),
            carry=size,
            # not a constant: XLA multiplies and adds four times faster than it adds two arrays
            factor=(t >= 0).astype(jnp.result_type(float)),
            merge=merge,
        )
        shifted = closed & (jnp.arange(len(starts)) >= gone)  # those after what makes room
        clock = type(self)(
            folded=jnp.where(folds, t, self.folded),
            starts=jnp.where(shifted, jnp.append(starts[1:], t), starts),
            places=jnp.where(shifted, jnp.append(places[1:], places[gone]), places),
        )
        return step, clock

    def weights(self, t: Array, k: Array | Decay) -> tuple[Array, Array]:
        """The weights of the means, each in its place, and of the sum, at step t.

        k is the size of the window, or a decay over one.
        """
        starts, places = self.starts, self.places
        t = jnp.maximum(t, 1)  # at step 0 the sum is the tree given to `init`, as one sample
        ends = jnp.append(starts[1:], t)
        real: Any = jnp.result_type(float)
        if isinstance(k, Decay):
            most = jnp.minimum(t, k.size(t))
            weights = k.of_ages(
                (t - ends).astype(real), (t - starts).astype(real), most.astype(real), jnp
            )
        else:  # `tailavg.core.equation.read`, of all blocks at once
            # the product of two integer counts could overflow
            old = join((ends - starts).astype(real), (t - ends).astype(real), k)
            weights = old * jnp.append(1.0, jnp.cumprod(1.0 - old)[:-1])
        of_sum = weights[-1] / (t - starts[-1])
        weights = jnp.append(weights[:-1], of_sum * (self.folded - starts[-1]))
        in_place = places[:, None] == jnp.arange(len(starts))
        return jnp.where(in_place, weights[:, None], 0.0).sum(axis=0), of_sum

    def carry(self, rule: TracedRule) -> Any:
        """What an error of the open block's mean is multiplied by in the sum."""
        return int(self.folded - self.starts[-1])

    def blocks(self, t: int) -> tuple[list[int], list[int]]:
        """The starts of the blocks at step t, oldest first, and the places of their means."""
        starts = [int(start) for start in self.starts]
        held = [i for i, (start, end) in enumerate(pairwise([*starts, t])) if start < end]
        return [starts[i] for i in held], [int(self.places[i]) for i in held]


class TracedTails(TracedBlocks):
    """The same fields of an `AnyTail`, which is read with any window."""

    __slots__ = ()

    def serves(self, rule: TracedRule) -> bool:
        """Whether a rule of this kind, with as many accumulators, may use this clock."""
        return isinstance(rule, AnyTail) and rule.accumulators == len(self.starts)


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

    def serves(self, rule: TracedRule) -> bool:
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
            merge=None,
        )
        return step, clock

    def weights(self, t: Array, k: Array) -> tuple[Array, Array]:
        """The weights of the mean and of the sum."""
        return (1.0 - self.share)[None], self.share / self.total

    def carry(self, rule: TracedRule) -> Any:
        """What an error of the mean is multiplied by in the sum."""
        assert isinstance(rule, Exponential)
        return float(rule.decay(int(self.folded) + 1))

    def blocks(self, t: int) -> tuple[list[int], list[int]]:
        """The start of the one block, and the place of its mean."""
        return ([0], [0]) if t else ([], [])


def first_clock(rule: TracedRule) -> TracedBlocks | TracedDecay:
    """The clock before the first sample: the sum is the tree given to `init`."""
    integer: Any = jnp.result_type(int)
    real: Any = jnp.result_type(float)
    if isinstance(rule, Exponential):
        return TracedDecay(
            folded=jnp.zeros((), integer),
            share=jnp.ones((), real),
            total=jnp.ones((), real),
            decayed=jnp.zeros((), real),
        )
    kind = TracedTails if isinstance(rule, AnyTail) else TracedBlocks
    return kind(
        folded=jnp.zeros((), integer),
        starts=jnp.zeros(rule.accumulators, integer),
        places=jnp.arange(rule.accumulators, dtype=integer),
    )


def restored(clock: core.Clock) -> dict[str, Any]:
    """The fields of a traced clock at the same step, with means in the places of `first_clock`."""
    if not isinstance(clock, core.DecayClock):
        return {"folded": clock.folded, "starts": clock.blocks}
    of_mean, of_sum = clock.weights()
    found: dict[str, Any] = {"folded": clock.folded, "share": 1.0 - of_mean}
    if of_sum:
        found |= {"total": (1.0 - of_mean) / of_sum, "decayed": math.log(of_sum)}
    return found
