"""Averages of pytrees, as pure functions.

Each step touches the arrays once, to add a sample to the sum. Every few hundred steps, and when a
block closes, the sum is folded into the mean of its block.

The code is written so that XLA does this in place, without copying parameters. Each conditional
changes either the sums or the means, never both, and returns a flag. The next conditional changes
what the last one read, and depends on its flag, so XLA knows that the reading is over.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tailavg.core import state as layout
from tailavg.core.clock import clock_for
from tailavg.core.profile import Profile, dense_weights, profile
from tailavg.core.rules import AnytimeWindow, Exponential, Rule, as_rule
from tailavg.core.windows import AnyWindow, Reals
from tailavg.jax.clock import Step, TracedBlocks, TracedDecay, first_clock, restored, traced

__all__ = ["TreeAverage", "TreeState", "tail_average", "value"]

Tree: TypeAlias = Any


class TreeState(NamedTuple):
    """A tail average of a pytree, after some step."""

    updates: Array
    """The number of updates so far, t."""
    size: Array
    """The size of the window, k_t."""
    clock: TracedBlocks | TracedDecay
    """Which samples are where."""
    sums: Tree
    """The sum of the samples in no mean yet; leaves that are not averaged, as last seen."""
    means: Tree
    """The means of blocks, stacked along a first axis; None for leaves that are not averaged."""


@dataclass(frozen=True)
class TreeAverage:
    """The pure functions of a tail average, made by `tail_average`."""

    rule: AnytimeWindow | Exponential
    dtype: np.dtype[Any]

    def init(self, tree: Tree) -> TreeState:
        """The state before the first update, whose value is the tree itself.

        Floating and complex leaves will be averaged; others are passed through. Accumulators are
        sharded like their leaves. A `jax.ShapeDtypeStruct` stands for zeros, as in optax.
        """
        if self.dtype == np.float64 and jnp.result_type(float) != np.float64:
            raise ValueError(
                f"dtype: expected float32, since x64 is off, got {self.dtype}; to turn x64 on, "
                'call jax.config.update("jax_enable_x64", True) before anything else'
            )
        clock, places = first_clock(self.rule), self.rule.accumulators
        sums = jax.tree.map(self._accumulator, tree)
        return TreeState(
            updates=jnp.zeros_like(clock.folded),
            size=jnp.asarray(self.rule.size(1), jnp.result_type(float)),
            clock=clock,
            sums=sums,
            # not zeros, which would not be sharded like the tree
            means=jax.tree.map(
                lambda x: jnp.broadcast_to(x, (places, *x.shape)) if _averaged(x) else None, sums
            ),
        )

    def _accumulator(self, leaf: Any) -> Array:
        """A leaf in the dtype of its accumulators, always a copy: the state may be donated."""
        if isinstance(leaf, jax.ShapeDtypeStruct):
            leaf = jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        if not _averaged(leaf):
            return jnp.array(leaf, copy=True)
        wide = jnp.complex64 if jnp.iscomplexobj(leaf) else self.dtype
        return jnp.array(leaf, jnp.promote_types(self.dtype, wide), copy=True)

    # jitted here, since outside jax.jit each call would compile the conditionals
    @functools.partial(jax.jit, static_argnames="self", inline=True)
    def update(self, state: TreeState, tree: Tree) -> TreeState:
        """The state after one more tree, with the structure and shapes of the one given to `init`.

        Inside `jax.jit`, with the old state donated, no array is copied.
        """
        leaves, sums, means, structure = _aligned(tree, state)
        clock: Any = state.clock
        if not clock.serves(self.rule):
            raise ValueError(
                f"state: expected one of {self.rule}, got a {type(clock).__name__} of another rule "
                "or number of accumulators; use the average whose init made it"
            )
        rule = traced(self.rule)
        step, clock = clock.step(rule, state.updates)
        averaged = [i for i, mean in enumerate(means) if mean is not None]
        held, totals = _fold(step, [means[i] for i in averaged], [sums[i] for i in averaged])
        new = list(leaves)  # leaves that are not averaged pass through
        for i, mean, total in zip(averaged, held, totals, strict=True):
            means[i], new[i] = mean, total + _times(step.factor, _widened(leaves[i], total))
        updates = jnp.where(_beyond(state), state.updates, state.updates + 1)
        return TreeState(
            updates=updates,
            size=jnp.asarray(rule.size(updates), state.size.dtype),
            clock=jax.tree.map(lambda new, old: new.astype(old.dtype), clock, state.clock),
            sums=structure.unflatten(new),
            means=structure.unflatten(means),
        )

    def value(self, state: TreeState, like: Tree = None) -> Tree:
        """The average, as a new tree. See `value`."""
        return value(state, like)

    def count(self, state: TreeState) -> Array:
        """The number of updates so far, t."""
        return state.updates

    def size(self, state: TreeState) -> Array:
        """The size of the window, k_t. `profile` has the effective size."""
        return state.size

    def weights(self, state: TreeState) -> Reals:
        """The weight of each of the `count` updates, oldest first. Not inside `jax.jit`.

        Examples:
            >>> average = tail_average(2)
            >>> state = average.init(0.0)
            >>> for x in range(3):
            ...     state = average.update(state, x)
            >>> average.weights(state)
            array([0. , 0.5, 0.5])
        """
        count = int(state.updates)
        starts, _ = state.clock.blocks(count)
        return dense_weights(self.rule, starts, count)

    def profile(self, state: TreeState) -> Profile:
        """A summary of the weights: effective size, mean age, oldest age. Not inside `jax.jit`.

        Examples:
            >>> average = tail_average(100)
            >>> state = average.init(0.0)
            >>> for x in range(1000):
            ...     state = average.update(state, x)
            >>> average.profile(state)
            Profile(count=1000, size=100.0, effective_size=100.0, mean_age=49.5,
                    oldest_age=99, accumulators=3)
        """
        count = int(state.updates)
        if not count:
            raise layout.nothing_yet("profile")
        starts, _ = state.clock.blocks(count)
        return profile(self.rule, starts, count)

    def state_dict(self, state: TreeState) -> dict[str, Any]:
        """The state in the layout of `tailavg.core.state`, for any framework. Not inside `jax.jit`.

        Leaves are named by their paths, such as "layer.weight". Leaves that are not averaged are
        left out. To stop and resume within JAX, save the state itself, a pytree: the resumed run is
        then the same to the bit.
        """
        count, folded = int(state.updates), int(state.clock.folded)
        starts, places = state.clock.blocks(count)
        means = _named(state.means)
        partial = {
            name: np.array(total) for name, total in _named(state.sums).items() if name in means
        }
        nothing = {name: np.zeros_like(total) for name, total in partial.items()}
        blocks = [{name: np.array(mean[place]) for name, mean in means.items()} for place in places]
        if starts and folded == starts[-1]:  # an older block is still in that place
            blocks[-1] = nothing
        return layout.state(
            self.rule,
            dtype=self.dtype.name,
            count=count,
            starts=starts,
            blocks=blocks,
            folded=folded,
            partial=partial if count else nothing,
        )

    def from_state_dict(
        self, saved: Mapping[str, Any] | str | os.PathLike[str], tree: Tree
    ) -> TreeState:
        """The state that resumes what any framework saved in the layout of `tailavg.core.state`.

        Not inside `jax.jit`.

        Args:
            saved: A state, or the path of a file or folder with one. Its arrays go to the leaves of
                the same names; a single array without a name, or a tree that is a bare array, needs
                none.
            tree: As for `init`: it gives the structure, the shardings, and the leaves that are not
                averaged.

        Raises:
            ValueError: If the rule, names or shapes differ, or the count needs x64.
        """
        saved = layout.check(saved if isinstance(saved, Mapping) else layout.read(saved))
        layout.check_nan_policy(saved)
        rule = layout.rule_from(saved["rule"])
        if rule != self.rule:
            raise ValueError(
                f"state: expected {self.rule}, got {rule}; create the average with that rule"
            )
        count, starts, folded = saved["count"], list(saved["starts"]), saved["folded"]
        layout.check_steps(count, starts, folded)
        clock = clock_for(self.rule)
        clock.restore(count, starts, folded)
        state = self.init(tree)
        most = np.iinfo(state.updates.dtype).max - 1
        if count > most:
            raise ValueError(
                f"state: expected a count of at most {most}, since x64 is off, got {count}"
            )
        if not count and not isinstance(saved["partial"], Mapping):
            return state  # an average without samples knows no shape
        shapes = {name: mean.shape[1:] for name, mean in _named(state.means).items()}
        blocks, partial = layout.by_name(saved, shapes)
        if not count:
            return state
        nothing = {name: np.zeros(shape) for name, shape in shapes.items()}
        blocks = [*[nothing] * (self.rule.accumulators - len(starts)), *blocks]

        def put(values: Any, like: Array) -> Array:
            array = np.asarray(values)
            if not np.can_cast(array.dtype, like.dtype, "same_kind"):
                raise ValueError(f"state: expected {like.dtype}, got {array.dtype}")
            made = jnp.asarray(array.astype(like.dtype))
            # uncommitted arrays may go to any device
            placed: Array = jax.device_put(made, like.sharding) if like.committed else made
            return placed

        fields = {name: put(x, getattr(state.clock, name)) for name, x in restored(clock).items()}
        return TreeState(
            updates=put(count, state.updates),
            size=put(self.rule.size(count), state.size),
            clock=state.clock._replace(**fields),
            sums=jax.tree.map_with_path(
                lambda path, total: put(partial[_name(path)], total) if _averaged(total) else total,
                state.sums,
            ),
            means=jax.tree.map_with_path(
                lambda path, means: put([block[_name(path)] for block in blocks], means),
                state.means,
            ),
        )


def tail_average(rule: AnyWindow | Rule, *, dtype: Any = jnp.float32) -> TreeAverage:
    """The tail average of pytrees: `init`, `update`, `value`, `size` and `profile`, all pure.

    Args:
        rule: An `AnytimeWindow` or an `Exponential`; a window or a number means an `AnytimeWindow`.
        dtype: The dtype of the accumulators: `jnp.float32` or `jnp.float64`.

    Examples:
        >>> average = tail_average(100)
        >>> state = average.init({"w": jnp.zeros(2)})
        >>> update = jax.jit(average.update, donate_argnums=0)
        >>> for x in range(1000):
        ...     state = update(state, {"w": jnp.full(2, x, jnp.float32)})
        >>> average.value(state)
        {'w': Array([949.5, 949.5], dtype=float32)}
    """
    rule = as_rule(rule)
    if not isinstance(rule, AnytimeWindow | Exponential):
        raise TypeError(
            f"rule: expected an AnytimeWindow or an Exponential, got {rule}, which cannot be kept "
            "inside jax.jit; AnytimeWindow(window) has the variance of any window"
        )
    for kind in map(np.dtype, (np.float32, np.float64)):
        if dtype is not None and kind == dtype:
            return TreeAverage(rule, kind)
    raise TypeError(f"dtype: expected float32 or float64, got {dtype!r}")


def _beyond(state: TreeState) -> Array:
    """Whether there were more updates than the count can tell: it stays, and the value is NaN."""
    return state.updates == np.iinfo(state.updates.dtype).max


@jax.jit
def value(state: TreeState, like: Tree = None) -> Tree:
    """The average, as a new tree; before the first update, the tree given to `init`.

    It needs no rule: the state is enough.

    Args:
        state: The state.
        like: A tree with the dtypes of the result, such as the parameters; by default the result
            has the dtypes of the accumulators.
    """
    wanted, sums, means, structure = _aligned(state.sums if like is None else like, state, "like")
    of_means, of_sum = state.clock.weights(state.updates, state.size)
    of_sum = jnp.where(_beyond(state), jnp.nan, of_sum)

    def average(total: Array, means: Array | None, like: Array) -> Array:
        if means is None:
            return jnp.copy(total)
        parts = [(of_sum, total), *((of_means[place], means[place]) for place in range(len(means)))]
        # a part without weight may be NaN
        terms = [jnp.where(weight == 0, 0, _times(weight, part)) for weight, part in parts]
        return jnp.asarray(sum(terms)).astype(like.dtype)

    return structure.unflatten(list(map(average, sums, means, wanted)))


def _fold(step: Step, means: list[Array], sums: list[Array]) -> tuple[list[Array], list[Array]]:
    """Fold the sums into the means, if due; return the means and the new sums.

    As in `tailavg.numpy.arithmetic.joined`, the rounding error starts the new sum. XLA works in
    place only if an array that changes is read in its own shape, and a slice with its first axis.
    """
    scale, weight = 1.0 / step.total, step.weight

    def held(means: Array) -> Array:
        mean: Array = lax.dynamic_slice_in_dim(means, step.slot, 1)
        return mean

    def difference(mean: Array, own: Array) -> Array:
        # inf - inf is NaN
        return _times(weight, own - jnp.where(jnp.isfinite(mean), mean, 0))

    def change(total: Array, means: Array) -> Array:
        return difference(held(means)[0], _times(scale, total))

    def joint(means: Array, total: Array) -> Array:
        mean, own = held(means), _times(scale, total[None])
        # if the step carries, the sum already holds the change
        made = jnp.where(step.carries, total[None], difference(mean, own))
        mean = jnp.where(weight < 1.0, mean + made, own)
        updated: Array = lax.dynamic_update_slice_in_dim(means, mean, step.slot, 0)
        return updated

    def lost(change: Array, means: Array) -> Array:
        mean = held(means)[0]
        rest = change - (mean - (mean - change))  # the inner difference is the old mean
        return jnp.where(jnp.isfinite(rest), _times(step.carry, rest), 0)

    # each sum becomes the change of its mean, the mean changes, the sum becomes the rounding error
    sums, changed = _changed(step.carries, change, sums, means)
    means, joined = _changed(step.folds | changed, joint, means, sums)
    sums, carried = _changed(step.carries & joined, lost, sums, means)
    kept = carried | ~joined
    return means, [jnp.where(kept, total, 0) for total in sums]


def _changed(
    flag: Array,
    function: Callable[[Array, Array], Array],
    arrays: list[Array],
    others: list[Array],
) -> tuple[list[Array], Array]:
    """If the flag is set, apply a function to arrays and others; return the arrays and the flag.

    The returned flag is known only afterwards: code that waits for it may change `others` in place.
    """
    changed: tuple[list[Array], Array] = lax.cond(
        flag,
        lambda arrays, others: (list(map(function, arrays, others)), jnp.array(True)),
        lambda arrays, _: (arrays, jnp.array(False)),
        arrays,
        others,
    )
    return changed


def _widened(leaf: Array, total: Array) -> Array:
    """A leaf in the dtype of its sum.

    It is rounded to its own dtype first, which XLA may skip if the same program made the leaf.
    """
    wide = leaf.astype(total.dtype)
    if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < wide.dtype.itemsize:
        narrow: Any = jnp.finfo(leaf.dtype)  # type: ignore[no-untyped-call]
        wide = lax.reduce_precision(wide, narrow.nexp, narrow.nmant)
    return wide


def _times(factor: Any, array: Array) -> Array:
    """The product, in the array's precision."""
    return array * jnp.asarray(factor, array.real.dtype)


def _averaged(leaf: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def _aligned(
    tree: Tree, state: TreeState, what: str = "tree"
) -> tuple[list[Array], list[Any], list[Any], Any]:
    """The leaves of the tree, of the sums and of the means, and their common structure."""
    structure: Any = jax.tree.structure(state.sums)
    got: Any = jax.tree.structure(tree)
    if structure != got:
        raise ValueError(f"{what}: expected the structure given to init, {structure}, got {got}")
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    sums = jax.tree.leaves_with_path(state.sums)
    for new, (path, old) in zip(leaves, sums, strict=True):
        where = f"{what}: {_name(path)}" if path else what
        if new.shape != old.shape:
            raise ValueError(f"{where}: expected shape {old.shape}, got {new.shape}")
        if not _averaged(old):
            fits = new.dtype == old.dtype
        elif what == "like":
            fits = _averaged(new) and jnp.iscomplexobj(new) == jnp.iscomplexobj(old)
        else:
            key = jnp.issubdtype(new.dtype, jax.dtypes.prng_key)
            fits = not key and (jnp.iscomplexobj(old) or not jnp.iscomplexobj(new))
        if not fits:
            raise TypeError(
                f"{where}: expected the kind of {old.dtype}, as given to init, got {new.dtype}"
            )
    return leaves, [old for _, old in sums], structure.flatten_up_to(state.means), structure


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _named(tree: Tree) -> dict[str, Array]:
    """The leaves by their paths."""
    leaves = jax.tree.leaves_with_path(tree)
    named = {_name(path): leaf for path, leaf in leaves}
    if len(named) < len(leaves):
        raise ValueError("tree: expected a different name for each leaf, got one name for two")
    return named
