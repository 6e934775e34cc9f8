"""The clock of `tailavg.core.clock`, with traced fields.

The windows and rules of core decide; only their arithmetic on traced steps is defined here. Steps
are integers, of 32 bits without x64, and blocks turn at the same samples as in NumPy. An `AnyTail`
looks its turns up in a table. A table would be too long for an `AnytimeWindow`: with three
accumulators and a fraction c, it turns 2 / c times while the stream grows by a factor of e. Weights
are float32 without x64.
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
from tailavg.core import equation
from tailavg.core.clock import FOLD, SMALLEST
from tailavg.core.decay import Decay
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

_MOST_TURNS = 50_000  # of an AnyTail, until the last step


def _last() -> int:
    """Return the last step that can be counted, which depends on x64."""
    return int(np.iinfo(jnp.result_type(int)).max)


def _later(step: Array, n: int) -> Array:
    """Return step + n, or the last step."""
    n = min(n, _last())
    return jnp.where(step > _last() - n, _last(), step + n)


def _stretched(step: Array, ratio: int) -> Array:
    """Return the first step that is not before `step` times `ratio` / 2⁶⁰, or the last step.

    The product does not fit an integer, so each byte of `step` is multiplied separately: by the
    whole part of the ratio at that byte, and by three digits of 20 bits of its fraction.
    """
    last = _last()
    whole: Any = 0
    digits: list[Any] = [0, 0, 0]
    for at in range(0, last.bit_length(), 8):
        byte, shifted = step >> at & 255, ratio << at
        whole = whole + byte * min(shifted >> BITS, last)
        digits = [
            digit + byte * (shifted >> 20 * place & (1 << 20) - 1)
            for place, digit in enumerate(digits)
        ]
    carry = 0
    for digit in digits:  # the lowest first; each is rounded up
        carry = -(-(digit + carry) >> 20)
    return jnp.where(step > (last << BITS) // ratio, last, whole + carry)


TRACED = Steps(_last, _later, jnp.maximum, jnp.where, _stretched)


class _TracedFixed(Fixed):
    steps: ClassVar[Steps] = TRACED


class _TracedGrowing(Growing):
    steps: ClassVar[Steps] = TRACED

    def size(self, t: Any) -> Any:
        """Return k_t."""
        over, under, exact = self.ratio
        k = jnp.asarray(over * t / under)
        return _near_integer(k, exact).clip(1.0, self.most)

    def growth(self, t: Any) -> Any:
        """Return k_t - k_{t-1}.

        Single precision cannot tell large sizes apart, so the growth follows from the step: it is c
        before the window reaches its cap, and the remainder at the step where it does.
        """
        k, before = self.size(t), self.size(t - 1)
        growth = jnp.where(before > 1.0, self.c, k - before)
        if self.at_most is None or self._capped_from > _last():
            return growth
        capped = self._capped_from
        before_it = max(Fraction(1), fraction(self.c) * (capped - 1))
        left = float(max(Fraction(0), self.at_most - before_it))
        return jnp.where(t < capped, growth, jnp.where(t == capped, left, 0.0))


def _near_integer(k: Array, exact: bool = False) -> Array:
    """Return the integer next to k if k misses it by rounding only, else k.

    XLA may multiply by 1 / q instead of dividing by q, and so miss an integer by the last digit.
    """
    tie = 4e-7 if k.dtype == np.float32 else 2.0**-52 if exact else float(TIE)
    off = k.round() - k
    return k + (abs(off) <= tie * k) * off


@lru_cache
def traced_window(window: Window) -> Window:
    """Return the same window, for traced steps."""
    if isinstance(window, Fixed):
        return _TracedFixed(window.k)
    return _TracedGrowing(window.c, window.at_most)


@lru_cache
def traced_decay(decay: Decay) -> Decay:
    """Return the same decay, for traced steps."""
    traced = copy(decay)  # the constructor checks the function, which is impossible inside jit
    object.__setattr__(traced, "window", traced_window(decay.window))
    return traced


def traced_size(window: Any, t: Array) -> Array:
    """Return k_t of a count or a fraction that is an array; NaN if it is out of range."""
    window = jnp.asarray(window)
    real: Any = jnp.result_type(float)
    if jnp.issubdtype(window.dtype, jnp.integer):
        return jnp.where(window >= 1, window, jnp.nan).astype(real)
    if not jnp.issubdtype(window.dtype, jnp.floating):
        raise TypeError(f"window: expected an array of whole or real numbers, got {window.dtype}")
    c = window.astype(real)
    return jnp.where((c > 0) & (c <= 1), jnp.maximum(_near_integer(c * t), 1.0), jnp.nan)


class _TracedTail(AnyTail):
    """An `AnyTail` that looks up its turns, which depend on the step alone."""

    def closes(self, starts: Any) -> Any:
        """Return the step after which the open block takes no more samples."""
        return self._turn(starts)[0]

    def gone(self, starts: Any) -> Any:
        """Return the block that makes room when the open one is closed; 0 if none is merged."""
        return self._turn(starts)[1]

    def _turn(self, starts: Any) -> tuple[Array, Array]:
        ends, gone = map(jnp.asarray, _turns(AnyTail(self.accumulators, self.shortest), _last()))
        closed = (ends <= starts[-1]).sum()
        return ends[closed], gone[closed]


@lru_cache
def _turns(rule: AnyTail, last: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the steps at which blocks are closed, and the block that then makes room.

    There are a few hundred turns, since blocks grow with the stream.
    """
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
    """Return the same rule, for traced steps."""
    if isinstance(rule, AnyTail):
        return _TracedTail(rule.accumulators, rule.shortest)
    if isinstance(rule, Exponential):
        return Exponential(traced_window(rule.window))
    return AnytimeWindow(traced_window(rule.window), rule.accumulators, rule.turns)


def size_at(rule: TracedRule, t: Any) -> Any:
    """Return k_t; of an `AnyTail`, the size of the shortest window that it can be read with."""
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
    """How to merge two blocks, to make room for another."""

    merges: Array
    """Whether to merge."""
    source: Array
    """The place of the newer mean, which becomes free."""
    target: Array
    """The place of the older mean, which becomes the joint mean."""
    weight: Array
    """The weight of the newer mean in the joint mean."""


class TracedBlocks(NamedTuple):
    """The fields of a `tailavg.core.clock.BlockClock`."""

    folded: Array
    """The step up to which samples are in means; later ones are in the sum."""
    starts: Array
    """How many samples came before each block, oldest first; unused blocks come first, at 0."""
    places: Array
    """The place of the mean of each block."""

    def serves(self, rule: TracedRule) -> bool:
        """Return whether this is a clock of such a rule, with as many accumulators."""
        return isinstance(rule, AnytimeWindow) and rule.accumulators == len(self.starts)

    def step(self, rule: Any, t: Array) -> tuple[Step, TracedBlocks]:
        """Return what to do with the sample after step t, and the clock after that sample."""
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
        """Return the weights of the means, by place, and of the sum, at step t.

        k is the size of the window, or a decay.
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
        else:
            sizes, newer = (ends - starts).astype(real), (t - ends).astype(real)
            weights = _read(sizes, newer, k)
        of_sum = weights[-1] / (t - starts[-1])
        weights = jnp.append(weights[:-1], of_sum * (self.folded - starts[-1]))
        in_place = places[:, None] == jnp.arange(len(starts))
        return jnp.where(in_place, weights[:, None], 0.0).sum(axis=0), of_sum

    def carry(self, rule: TracedRule) -> Any:
        """Return the factor of an error of the open block's mean in the sum."""
        return int(self.folded - self.starts[-1])

    def blocks(self, t: int) -> tuple[list[int], list[int]]:
        """Return the starts of the blocks at step t and the places of their means, oldest first."""
        starts = [int(start) for start in self.starts]
        used = [i for i, (start, end) in enumerate(pairwise([*starts, t])) if start < end]
        return [starts[i] for i in used], [int(self.places[i]) for i in used]


def _read(sizes: Array, newer: Array, k: Array) -> Array:
    """Do `tailavg.core.equation.read` for traced blocks, each followed by `newer` samples."""
    places = jnp.arange(len(sizes))
    # the oldest block that has a weight; beside it, the newest block always counts in full
    oldest = jnp.minimum((newer >= k).sum(), len(sizes) - 2)
    old, new = sizes[oldest], newer[oldest]
    old = jnp.where(new < k, old, 0.0)
    each, of_old = equation.weights(old, new, jnp.maximum(0.0, old + new - k), jnp.sqrt)
    return jnp.where(places > oldest, each * sizes, jnp.where(places == oldest, of_old, 0.0))


class TracedTails(TracedBlocks):
    """The clock of an `AnyTail`, which is read with any window."""

    __slots__ = ()

    def serves(self, rule: TracedRule) -> bool:
        """Return whether this is a clock of such a rule, with as many accumulators."""
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
        """Return whether this is a clock of such a rule, with as many accumulators."""
        return isinstance(rule, Exponential)

    def step(self, rule: Exponential, t: Array) -> tuple[Step, TracedDecay]:
        """Return what to do with the sample after step t, and the clock after that sample."""
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
        """Return the weights of the mean and of the sum."""
        return (1.0 - self.share)[None], self.share / self.total

    def carry(self, rule: TracedRule) -> Any:
        """Return the factor of an error of the mean in the sum."""
        assert isinstance(rule, Exponential)
        return float(rule.decay(int(self.folded) + 1))

    def blocks(self, t: int) -> tuple[list[int], list[int]]:
        """Return the start of the only block, and the place of its mean."""
        return ([0], [0]) if t else ([], [])


def first_clock(rule: TracedRule) -> TracedBlocks | TracedDecay:
    """Return the clock before the first sample: the sum is the tree given to `init`."""
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
    """Return the fields of a traced clock at the same step, with the places of `first_clock`."""
    if not isinstance(clock, core.DecayClock):
        return {"folded": clock.folded, "starts": clock.blocks}
    of_mean, of_sum = clock.weights()
    fields: dict[str, Any] = {"folded": clock.folded, "share": 1.0 - of_mean}
    if of_sum:
        fields |= {"total": (1.0 - of_mean) / of_sum, "decayed": math.log(of_sum)}
    return fields
