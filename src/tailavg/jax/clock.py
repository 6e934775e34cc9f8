"""The clock of `tailavg.core.clock`, with traced fields: it decides when to fold and to turn.

A turn closes a block and opens the next one. The steps of the turns do not depend on the samples,
so the clock of core computes them once, while an update is traced, and the traced clock looks them
up in a table (`_Turns`). Blocks thus close at the same samples as in NumPy. Without x64, steps are
int32 and weights are float32.

`trees` calls `step` at each update; `reads` calls `weights`. See `folds` for what a fold is.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

from tailavg.core import clock as core
from tailavg.core import equation
from tailavg.core.clock import FOLD, SMALLEST
from tailavg.core.readings import ByAge
from tailavg.core.rules import AnyTail, AnytimeWindow, Exponential
from tailavg.core.windows import NEVER, TIE, Growing, Window

__all__ = [
    "Merge",
    "Step",
    "TracedBlocks",
    "TracedDecay",
    "TracedRule",
    "TracedTails",
    "array_size",
    "blocks_at",
    "first_clock",
    "restored",
    "serves",
    "size_at",
    "traced_window",
]

TracedRule = AnytimeWindow | Exponential | AnyTail
"""The rules that can run inside `jax.jit`."""

_MOST_TURNS = 400_000  # per table: it then takes 3 MB, and a second to compute


def _last() -> int:
    """Return the largest step that an integer can hold, which depends on x64."""
    return int(np.iinfo(jnp.result_type(int)).max)


class _TracedGrowing(Growing):
    def size(self, t: Any) -> Any:
        """Return the window size k_t."""
        numerator, denominator, exact = self.ratio
        k = jnp.asarray(numerator * t / denominator)
        return _near_integer(k, exact).clip(1.0, self.most)

    def growth(self, t: Any) -> Any:
        """Return k_t - k_{t-1}.

        In single precision, the difference of two large sizes is too inaccurate. So the growth is
        computed from the step: it is c before the window reaches its cap, the remainder at the
        step where the window reaches it, and 0 afterwards.
        """
        k, before = self.size(t), self.size(t - 1)
        growth = jnp.where(before > 1.0, self.c, k - before)
        capped = self.steady_from
        if capped > _last():
            return growth
        remainder = Growing(self.c, self.at_most).growth(capped)
        return jnp.where(t < capped, growth, jnp.where(t == capped, remainder, 0.0))


def _near_integer(k: Array, exact: bool = False) -> Array:
    """Round k if it differs from an integer by a rounding error only; else return k.

    XLA may multiply by 1 / q instead of dividing by q, which can miss an integer by the last digit.
    """
    tie = 4e-7 if k.dtype == np.float32 else 2.0**-52 if exact else float(TIE)
    off = k.round() - k
    return k + (abs(off) <= tie * k) * off


@lru_cache
def traced_window(window: Window) -> Window:
    """Return an equal window with a `size` and a `growth` that take traced steps."""
    return _TracedGrowing(window.c, window.at_most) if isinstance(window, Growing) else window


def size_at(rule: TracedRule, t: Any) -> Any:
    """Return the window size k_t; for an `AnyTail`, the size of its shortest window."""
    return rule.shortest * t if isinstance(rule, AnyTail) else traced_window(rule.window).size(t)


def array_size(window: Any, t: Array) -> Array:
    """Return k_t for a count or a fraction given as an array; NaN if it is out of range."""
    window = jnp.asarray(window)
    real: Any = jnp.result_type(float)
    if jnp.issubdtype(window.dtype, jnp.integer):
        return jnp.where(window >= 1, window, jnp.nan).astype(real)
    if not jnp.issubdtype(window.dtype, jnp.floating):
        raise TypeError(f"window: expected an array of integers or floats, got {window.dtype}")
    c = window.astype(real)
    return jnp.where((c > 0) & (c <= 1), jnp.maximum(_near_integer(c * t), 1.0), jnp.nan)


class _Turns(NamedTuple):
    """The table of a rule's turns. Once the window is constant, turns repeat with a period."""

    ends: npt.NDArray[Any]
    """The steps at which blocks close. Those after `repeat_from` repeat."""
    gone: npt.NDArray[Any]
    """For each of `ends`, the block to remove: it is merged into the block before it. Block 0, the
    oldest, is dropped."""
    repeat_from: int
    """The step from which turns repeat."""
    period: int

    def at(self, t: Array, start: Array) -> tuple[Array, Any]:
        """Return whether the block that began at `start` closes at step t, and which to remove.

        Both steps are shifted back to the first period, since the end of the block may overflow.
        """
        ends = jnp.asarray(self.ends)
        periods = jnp.maximum(start - self.repeat_from, 0) // self.period * self.period
        turn = (ends <= start - periods).sum()
        gone = jnp.asarray(self.gone)[turn] if self.gone.any() else 0
        return t - periods >= ends[turn], gone


@lru_cache
def _turns(rule: AnytimeWindow | AnyTail, last: int) -> _Turns:
    """Return the turns up to the step `last`, or until they repeat."""
    clock = core.BlockClock(rule)
    steady = NEVER if isinstance(rule, AnyTail) else rule.window.steady_from
    ends: list[int] = []
    gone: list[int] = []
    opened_at: dict[tuple[int, ...], int] = {}  # by the sizes of the closed blocks
    while clock.closes < last:
        if clock.blocks[1] >= steady:  # from now on, the turns depend on the sizes alone
            sizes = tuple(end - start for start, end in pairwise(clock.blocks))
            start = opened_at.setdefault(sizes, clock.blocks[-1])
            if start < clock.blocks[-1]:
                period = clock.blocks[-1] - start
                return _Turns(np.array(ends), np.array(gone), start, period)
        clock.count = clock.closes
        ends.append(clock.count)
        removed = clock.turn()
        gone.append(removed[0] if removed else 0)
        if len(ends) > _MOST_TURNS:
            raise ValueError(
                f"rule: the blocks of {rule} close too often for JAX, more than {_MOST_TURNS:,} "
                f"times in {last:,} steps; take a larger fraction or fewer accumulators"
            )
    return _Turns(np.array([*ends, last]), np.array([*gone, 0]), last, 1)


class Step(NamedTuple):
    """What to do with a sample: fold if due, then add the sample to the sum."""

    folds: Array
    """Whether to fold the sum into a mean first, and start a new sum."""
    carries: Array
    """Whether the new sum starts with the rounding error of the fold."""
    slot: Array | int
    """The index, in the stack of means, of the mean that the sum is folded into."""
    total: Array
    """The divisor of the sum. `total`, `weight` and `carry` are the arguments of `Store.fold`."""
    weight: Array
    """The weight of the folded sum in the joint mean. A weight of 1 replaces the old mean."""
    carry: Array
    """The factor of the rounding error in the new sum."""
    factor: Array
    """The factor of the sample in the sum."""
    merge: Merge | None
    """The merge of two blocks after the fold; None if the rule never merges blocks."""


class Merge(NamedTuple):
    """How to merge two blocks, to make room for a new block."""

    merges: Array
    """Whether to merge."""
    source: Array
    """The index of the newer mean, whose place becomes free."""
    target: Array
    """The index of the older mean, which becomes the joint mean."""
    weight: Array
    """The weight of the newer mean in the joint mean."""


class TracedBlocks(NamedTuple):
    """The fields of a `tailavg.core.clock.BlockClock`, as arrays."""

    folded: Array
    """The step up to which samples are in means; later ones are in the sum."""
    starts: Array
    """How many samples came before each block, oldest first; unused blocks come first, at 0."""
    places: Array
    """The index, in the stack of means, of the mean of each block."""

    def step(self, rule: AnytimeWindow | AnyTail, t: Array) -> tuple[Step, TracedBlocks]:
        """Return what to do with the sample after step t, and the clock after that sample."""
        starts, places = self.starts, self.places
        closed, gone = _turns(rule, _last()).at(t, starts[-1])
        in_sum, in_block = t - self.folded, t - starts[-1]
        folds = (t == 0) | (in_sum >= FOLD) | closed
        merge = None
        if isinstance(rule, AnyTail):
            before, start, end = (
                jnp.append(starts, t)[jnp.maximum(gone, 1) + step] for step in (-1, 0, 1)
            )
            merge = Merge(
                merges=closed & (gone > 0),
                source=places[gone].astype(jnp.uint32),
                target=places[gone - 1].astype(jnp.uint32),
                weight=(end - start) / jnp.maximum(end - before, 1),
            )
        step = Step(
            folds,
            carries=folds & (in_sum < in_block) & ~closed,
            slot=places[-1],
            total=jnp.maximum(in_sum, 1),
            weight=in_sum / jnp.maximum(in_block, 1),
            carry=in_block,
            # a traced 1: XLA multiplies and adds four times faster than it adds two arrays
            factor=(t >= 0).astype(jnp.result_type(float)),
            merge=merge,
        )
        shifted = closed & (jnp.arange(len(starts)) >= gone)  # from the removed block on
        clock = type(self)(
            folded=jnp.where(folds, t, self.folded),
            starts=jnp.where(shifted, jnp.append(starts[1:], t), starts),
            places=jnp.where(shifted, jnp.append(places[1:], places[gone]), places),
        )
        return step, clock

    def weights(self, t: Array, k: Array, by_age: ByAge | None = None) -> tuple[Array, Array]:
        """Return the weights of the means, by place, and of the sum, for a window of k samples."""
        starts, places = self.starts, self.places
        t = jnp.maximum(t, 1)  # at step 0 the sum holds the tree given to `init`: one sample
        real: Any = jnp.result_type(float)
        ends = jnp.append(starts[1:], t)
        newer = (t - ends).astype(real)
        if by_age is None:
            weights = _read((ends - starts).astype(real), newer, k)
        else:
            ages = jnp.append((t - starts).astype(real), 0.0)
            weights = by_age.of_ages(ages, jnp.minimum(t, k), jnp)
        of_sum = weights[-1] / (t - starts[-1])
        weights = jnp.append(weights[:-1], of_sum * (self.folded - starts[-1]))
        in_place = places[:, None] == jnp.arange(len(starts))
        return jnp.where(in_place, weights[:, None], 0.0).sum(axis=0), of_sum


def _read(sizes: Array, newer: Array, k: Array) -> Array:
    """Return the weights of traced blocks, as `tailavg.core.equation.read` does.

    `newer` has the number of samples after each block.
    """
    places = jnp.arange(len(sizes))
    # the oldest block with a weight; never the newest block, which always counts in full
    oldest = jnp.minimum((newer >= k).sum(), len(sizes) - 2)
    old, new = sizes[oldest], newer[oldest]
    old = jnp.where(new < k, old, 0.0)
    per_sample, of_old = equation.weights(old, new, jnp.maximum(0.0, old + new - k), jnp.sqrt)
    return jnp.where(places > oldest, per_sample * sizes, jnp.where(places == oldest, of_old, 0.0))


class TracedTails(TracedBlocks):
    """The clock of an `AnyTail`, which can be read with any window."""

    __slots__ = ()


class TracedDecay(NamedTuple):
    """The fields of a `tailavg.core.clock.DecayClock`, with running totals for its tables."""

    folded: Array
    """The step up to which samples are in the mean; later ones are in the sum."""
    share: Array
    """The total weight of the samples in the sum."""
    total: Array
    """The sum of the factors of the samples in the sum."""
    decayed: Array
    """The logarithm of G, see `DecayClock`, at the last sample in the sum."""

    def step(self, rule: Exponential, t: Array) -> tuple[Step, TracedDecay]:
        """Return what to do with the sample after step t, and the clock after that sample."""
        weight = jnp.asarray(Exponential(traced_window(rule.window)).weight(t + 1))
        decayed = self.decayed + jnp.log1p(-weight)
        in_sum = t - self.folded
        folds = (in_sum == 0) | (in_sum >= FOLD) | (decayed < math.log(SMALLEST))
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

    def weights(self, t: Array, k: Array, by_age: ByAge | None = None) -> tuple[Array, Array]:
        """Return the weights of the mean and of the sum."""
        return (1.0 - self.share)[None], self.share / self.total


_KINDS: Any = {AnytimeWindow: TracedBlocks, AnyTail: TracedTails, Exponential: TracedDecay}


def serves(clock: TracedBlocks | TracedDecay, rule: TracedRule) -> bool:
    """Return whether the clock fits the rule: its kind and its number of accumulators."""
    means = len(clock.starts) if isinstance(clock, TracedBlocks) else 1
    return type(clock) is _KINDS[type(rule)] and means == rule.accumulators


def first_clock(rule: TracedRule) -> TracedBlocks | TracedDecay:
    """Return the clock before the first sample, when the sum holds the tree given to `init`."""
    integer: Any = jnp.result_type(int)
    folded = jnp.zeros((), integer)
    if isinstance(rule, Exponential):
        one = jnp.ones((), jnp.result_type(float))
        return TracedDecay(folded, share=one, total=jnp.copy(one), decayed=jnp.zeros_like(one))
    kind = TracedTails if isinstance(rule, AnyTail) else TracedBlocks
    places = jnp.arange(rule.accumulators, dtype=integer)
    return kind(folded, starts=jnp.zeros_like(places), places=places)


def blocks_at(clock: TracedBlocks | TracedDecay, t: int) -> tuple[list[int], list[int]]:
    """Return the starts of the blocks at step t and the places of their means, oldest first."""
    starts, places = [0], [0]
    if isinstance(clock, TracedBlocks):
        starts, places = np.asarray(clock.starts).tolist(), np.asarray(clock.places).tolist()
    used = [i for i, (start, end) in enumerate(pairwise([*starts, t])) if start < end]
    return [starts[i] for i in used], [places[i] for i in used]


def restored(clock: core.Clock) -> dict[str, Any]:
    """Return the fields that bring a traced clock from `first_clock` to the step of `clock`."""
    if not isinstance(clock, core.DecayClock):
        return {"folded": clock.folded, "starts": clock.blocks}
    of_mean, of_sum = clock.weights()
    fields: dict[str, Any] = {"folded": clock.folded, "share": 1.0 - of_mean}
    if of_sum:
        fields |= {"total": (1.0 - of_mean) / of_sum, "decayed": math.log(of_sum)}
    return fields
