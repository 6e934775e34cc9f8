"""`TreeAverage`: averages of pytrees, as pure functions.

Most updates add the tree to a sum and touch no other array. Every few hundred updates, and when a
block closes, the sum is merged into the mean of its block: see `tailavg.jax.folds`.

Read `states` first, then this file, `clock` (when to fold), `folds` (arrays) and `reads`.
"""

from __future__ import annotations

import functools
import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from tailavg.core.clock import clock_for
from tailavg.core.profile import Profile, dense_weights, profile
from tailavg.core.readings import Reading
from tailavg.core.rules import Exponential, Rule, as_training_rule, refuses_decay
from tailavg.core.windows import AnyWindow, Reals, positive_int
from tailavg.io import state as layout
from tailavg.jax.clock import TracedRule, blocks_at, first_clock, restored, serves, size_at
from tailavg.jax.folds import concatenated, fold_if_due, on_host, times
from tailavg.jax.reads import size_read, value
from tailavg.jax.states import (
    Bundle,
    Like,
    Tree,
    TreeReading,
    TreeState,
    aligned,
    is_averaged,
    name_of,
    overflowed,
    split_leaves,
)

__all__ = ["BUNDLE", "TreeAverage", "tail_average"]

BUNDLE = 65_536
"""The default of `bundle`: leaves of up to this many numbers share an array for their means."""


@dataclass(frozen=True)
class TreeAverage:
    """The pure functions of a tail average, made by `tail_average`."""

    rule: TracedRule
    dtype: np.dtype[Any]
    bundle: int
    offload: Literal["cpu"] | None

    def init(self, tree: Tree) -> TreeState:
        """Return the state before the first update, whose value is the tree itself.

        Floating and complex leaves are averaged; others are passed through. Sums, and the means
        of leaves that are not bundled, are sharded like their leaves. A `jax.ShapeDtypeStruct`
        is treated as an array of zeros, as in optax.
        """
        if self.dtype == np.float64 and jnp.result_type(float) != np.float64:
            raise ValueError(
                f"dtype: expected float32, since x64 is off, got {self.dtype}; to turn x64 on, "
                'call jax.config.update("jax_enable_x64", True) before anything else'
            )
        clock = first_clock(self.rule)
        leaves, structure = jax.tree.flatten(tree)
        sums = [self._accumulator(leaf) for leaf in leaves]
        means = [self._means(x) if self._has_own_means(x) else None for x in sums]
        _, small = split_leaves(sums, means)
        return TreeState(
            updates=jnp.zeros_like(clock.folded),
            size=jnp.asarray(size_at(self.rule, 1), jnp.result_type(float)),
            rule=jnp.asarray(_checksum(self.rule)),
            clock=clock,
            sums=jax.tree.unflatten(structure, sums),
            means=jax.tree.unflatten(structure, means),
            bundles={name: self._bundle([sums[i] for i in group]) for name, group in small.items()},
        )

    def _accumulator(self, leaf: Any) -> Array:
        """Return a copy, since the state may be donated, in the dtype of the accumulators."""
        if isinstance(leaf, jax.ShapeDtypeStruct):
            leaf = jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        if not is_averaged(leaf):
            return jnp.array(leaf, copy=True)
        wide = jnp.complex64 if jnp.iscomplexobj(leaf) else self.dtype
        return jnp.array(leaf, jnp.promote_types(self.dtype, wide), copy=True)

    def _has_own_means(self, leaf: Array) -> bool:
        return is_averaged(leaf) and not 0 < self.bundle >= leaf.size

    def _means(self, leaf: Array) -> Array:
        """Return placeholder means, broadcast from the leaf so that they inherit its sharding."""
        return self._placed(jnp.broadcast_to(leaf, (self.rule.accumulators, *leaf.shape)))

    def _bundle(self, leaves: list[Array]) -> Bundle:
        """Return placeholder means of small leaves, replicated on all devices of the leaves."""
        row = concatenated(leaves)
        if not isinstance(row, jax.core.Tracer) and isinstance(leaves[0].sharding, NamedSharding):
            everywhere = PartitionSpec()  # type: ignore[no-untyped-call]
            row = jax.device_put(row, NamedSharding(leaves[0].sharding.mesh, everywhere))
        return Bundle(self._means(row), self._placed(jnp.copy(row)))

    def _placed(self, array: Array) -> Array:
        return on_host(array) if self.offload else array

    def update(self, state: TreeState, tree: Tree) -> TreeState:
        """Add a tree with the structure and shapes given to `init`, and return the new state.

        Inside `jax.jit`, with the old state donated, no array is copied. The time to compile grows
        with the number of leaves, and faster with the number of leaves larger than `bundle`.
        """
        is_concrete = not isinstance(state.rule, jax.core.Tracer)
        if not serves(state.clock, self.rule) or (
            is_concrete and int(state.rule) != _checksum(self.rule)
        ):
            raise ValueError(
                f"state: made with another rule than {self.rule}; update it with the average "
                "whose init made it"
            )
        updated: TreeState = self._update(state, tree)
        # copied here: if it were an output of `_update`, the check of the next call would wait
        return updated._replace(rule=jnp.copy(state.rule))

    # jitted: outside jax.jit, each call would otherwise compile the conditionals
    @functools.partial(jax.jit, static_argnames="self", inline=True)
    def _update(self, state: TreeState, tree: Tree) -> TreeState:
        leaves, sums, means, structure = aligned(tree, state)
        clock: Any = state.clock
        step, clock = clock.step(self.rule, state.updates)
        sums, means, bundles = fold_if_due(step, sums, means, state.bundles)
        new_sums = list(leaves)  # leaves that are not averaged pass through
        for i, (leaf, total) in enumerate(zip(leaves, sums, strict=True)):
            if is_averaged(total):
                new_sums[i] = lax.add(total, times(step.factor, _widened(leaf, total)))
        # an update with another rule sets the count to the largest integer: the value is then NaN
        is_valid = ~overflowed(state.updates) & (state.rule == _checksum(self.rule))
        updates = jnp.where(is_valid, state.updates + 1, np.iinfo(state.updates.dtype).max)
        return TreeState(
            updates=updates,
            size=jnp.asarray(size_at(self.rule, updates), state.size.dtype),
            rule=state.rule,
            clock=jax.tree.map(lambda new, old: new.astype(old.dtype), clock, state.clock),
            sums=structure.unflatten(new_sums),
            means=structure.unflatten(means),
            bundles=bundles,
        )

    @overload
    def value(
        self, state: TreeState, like: None = None, window: TreeReading | None = None
    ) -> Tree: ...
    @overload
    def value(self, state: TreeState, like: Like, window: TreeReading | None = None) -> Like: ...
    def value(self, state: TreeState, like: Tree = None, window: TreeReading | None = None) -> Tree:
        """Return the average, as a new tree. See `tailavg.jax.value`."""
        return value(state, like, window)

    def count(self, state: TreeState) -> Array:
        """Return the number of updates so far, t."""
        return state.updates

    def size(self, state: TreeState, window: Reading | None = None) -> Array:
        """Return the size of the window, k_t. `profile` has the effective size.

        Without a window, the size of an `AnyTail` is the number of updates so far.
        """
        return size_read(state, window)

    def weights(self, state: TreeState, window: Reading | None = None) -> Reals:
        """Return the weight of each of the `count` updates, oldest first. Not inside `jax.jit`."""
        count = int(state.updates)
        starts, _ = blocks_at(state.clock, count)
        return dense_weights(self.rule, starts, count, window)

    def profile(self, state: TreeState, window: Reading | None = None) -> Profile:
        """Summarize the weights: effective size, mean age, oldest age. Not inside `jax.jit`."""
        count = int(state.updates)
        if not count:
            raise layout.no_samples_error("profile")
        starts, _ = blocks_at(state.clock, count)
        return profile(self.rule, starts, count, window)

    def state_dict(self, state: TreeState) -> dict[str, Any]:
        """Return the state in the layout of `tailavg.io.state`, for any framework.

        Not inside `jax.jit`. Leaves are named by their paths, such as "layer.weight". Leaves that
        are not averaged are left out. To resume within JAX, save the state itself, which is a
        pytree: the resumed run is then bit-identical.
        """
        count, folded = int(state.updates), int(state.clock.folded)
        starts, places = blocks_at(state.clock, count)
        # `carry` is the factor, in the sum, of the rounding error of the open block's mean
        if isinstance(self.rule, Exponential):
            carry = float(self.rule.decay(folded + 1))
        else:
            carry = folded - starts[-1] if starts else 0
        names = list(_named(state.sums))
        _, sums, means, _ = aligned(state.sums, state)
        partial = {names[i]: np.array(sums[i]) for i, leaf in enumerate(sums) if is_averaged(leaf)}
        stacks = {names[i]: np.asarray(mean) for i, mean in enumerate(means) if mean is not None}
        for name, group in split_leaves(sums, means)[1].items():
            shapes = [sums[i].shape for i in group]
            rows, errors = (_cut(np.asarray(array), shapes) for array in state.bundles[name])
            for i, row, error in zip(group, rows, errors, strict=True):
                stacks[names[i]] = row
                partial[names[i]] += error * carry
        zeros = {name: np.zeros_like(total) for name, total in partial.items()}
        blocks = [{name: np.array(stacks[name][place]) for name in partial} for place in places]
        if starts and folded == starts[-1]:  # the place still has the mean of an older block
            blocks[-1] = zeros
        return layout.state(
            self.rule,
            dtype=self.dtype.name,
            count=count,
            starts=starts,
            blocks=blocks,
            folded=folded,
            partial=partial if count else zeros,
        )

    def from_state_dict(
        self, saved: Mapping[str, Any] | str | os.PathLike[str], tree: Tree
    ) -> TreeState:
        """Return a state that any framework saved in the layout of `tailavg.io.state`.

        Not inside `jax.jit`.

        Args:
            saved: A state, or the path of a file or folder with one. Arrays and leaves are matched
                by name, except a single array without a name, or a tree that is a bare array.
            tree: As for `init`; gives the structure, the shardings, and the leaves that are not
                averaged.

        Raises:
            ValueError: If the rule, names or shapes differ, or the count needs x64.
        """
        saved = layout.check(saved if isinstance(saved, Mapping) else layout.read(saved))
        layout.check_model_state(saved)
        rule = layout.rule_from(saved["rule"])
        if rule != self.rule:
            raise ValueError(
                f"state: expected {self.rule}, got {rule}; create the average with the saved rule"
            )
        count, starts, folded = saved["count"], list(saved["starts"]), saved["folded"]
        layout.check_steps(count, starts, folded)
        clock = clock_for(self.rule)
        clock.restore(count, starts, folded)
        state = self.init(tree)
        most = np.iinfo(state.updates.dtype).max - 1
        if count > most:
            raise ValueError(
                f"state: expected a count of at most {most}, since x64 is off, got {count}; "
                "turn x64 on"
            )
        if not count and not isinstance(saved["partial"], Mapping):
            return state  # saved before the first sample, so without shapes
        named = _named(state.sums)
        shapes = {name: total.shape for name, total in named.items() if is_averaged(total)}
        blocks, partial = layout.by_name(saved, shapes)
        if not count:
            return state
        zeros = {name: np.zeros(shape, partial[name].dtype) for name, shape in shapes.items()}
        blocks = [*[zeros] * (self.rule.accumulators - len(starts)), *blocks]

        def put(values: Any, like: Array) -> Array:
            array = np.asarray(values)
            if not np.can_cast(array.dtype, like.dtype, "same_kind"):
                raise ValueError(f"state: expected {like.dtype}, got {array.dtype}")
            new = jnp.asarray(array.astype(like.dtype))
            # an uncommitted array stays uncommitted: JAX may move it to any device
            placed: Array = jax.device_put(new, like.sharding) if like.committed else new
            return placed

        def stack(group: list[int], like: Array) -> Array:
            rows = [np.concatenate([block[names[i]].ravel() for i in group]) for block in blocks]
            return put(np.reshape(rows, like.shape), like)

        fields = {name: put(x, getattr(state.clock, name)) for name, x in restored(clock).items()}
        _, sums, means, structure = aligned(state.sums, state)
        names = list(named)
        large, small = split_leaves(sums, means)
        bundles = {}
        for dtype, group in small.items():
            like = state.bundles[dtype]
            errors = put(np.zeros(like.errors.shape), like.errors)
            bundles[dtype] = Bundle(stack(group, like.means), errors)
        for i in large:
            means[i] = stack([i], means[i])
        for i, name in enumerate(names):
            if name in partial:
                sums[i] = put(partial[name], sums[i])
        return state._replace(
            updates=put(count, state.updates),
            size=put(size_at(self.rule, count), state.size),
            clock=state.clock._replace(**fields),
            sums=structure.unflatten(sums),
            means=structure.unflatten(means),
            bundles=bundles,
        )


@refuses_decay
def tail_average(
    rule: AnyWindow | Rule,
    *,
    dtype: Any = jnp.float32,
    bundle: int = BUNDLE,
    offload: Literal["cpu"] | None = None,
) -> TreeAverage:
    """Make a tail average of pytrees: `init`, `update`, `value`, `size` and `profile`, all pure.

    Args:
        rule: An `AnytimeWindow`, an `Exponential` or an `AnyTail`; a window or a number means an
            `AnytimeWindow`.
        dtype: The dtype of the accumulators: `jnp.float32` or `jnp.float64`.
        bundle: Leaves of up to this many numbers share one array for their means. With many small
            leaves, the update then compiles and runs faster. If such leaves are sharded, one in 256
            updates gathers them. With 0, each leaf has its own means, sharded like the leaf.
        offload: `"cpu"` keeps the means in host memory; the backend needs `pinned_host`. On the
            device, the average then takes only the sum, as large as the parameters. Means are moved
            when they change or are read.

    Examples:
        >>> average = tail_average(100)
        >>> state = average.init({"w": jnp.zeros(2)})
        >>> update = jax.jit(average.update, donate_argnums=0)
        >>> for x in range(1000):
        ...     state = update(state, {"w": jnp.full(2, x, jnp.float32)})
        >>> average.value(state)
        {'w': Array([949.5, 949.5], dtype=float32)}
    """
    rule = as_training_rule(rule)
    if not isinstance(rule, TracedRule):
        raise TypeError(
            f"rule: expected an AnytimeWindow, an Exponential or an AnyTail, got {rule}, which "
            "cannot run inside jax.jit; AnytimeWindow(window) has the same variance"
        )
    if offload not in (None, "cpu"):
        raise ValueError(f'offload: expected "cpu" or None, got {offload!r}')
    bundle = positive_int(bundle, "bundle", least=0)
    for kind in map(np.dtype, (np.float32, np.float64)):
        if dtype is not None and kind == dtype:
            return TreeAverage(rule, kind, bundle, offload)
    raise TypeError(f"dtype: expected float32 or float64, got {dtype!r}")


def _cut(rows: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Split the last axis into arrays of these shapes."""
    *ends, _ = accumulate(map(math.prod, shapes))
    pieces = np.split(rows, ends, axis=-1)
    return [x.reshape((*x.shape[:-1], *shape)) for x, shape in zip(pieces, shapes, strict=True)]


@functools.lru_cache
def _checksum(rule: Rule) -> np.uint32:
    """Return a checksum that tells rules apart."""
    return np.uint32(zlib.crc32(json.dumps(layout.plain(rule), sort_keys=True).encode()))


def _widened(leaf: Array, total: Array) -> Array:
    """Return a leaf in the dtype of its sum.

    The leaf is rounded to its own dtype first: XLA may skip this rounding if the same program
    computed the leaf.
    """
    wide = lax.convert_element_type(leaf, total.dtype)
    if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < wide.dtype.itemsize:
        narrow: Any = jnp.finfo(leaf.dtype)  # type: ignore[no-untyped-call]
        wide = lax.reduce_precision(wide, narrow.nexp, narrow.nmant)
    return wide


def _named(tree: Tree) -> dict[str, Array]:
    """Return the leaves by name. Raise if two leaves have the same name."""
    leaves = jax.tree.leaves_with_path(tree)
    named = {name_of(path): leaf for path, leaf in leaves}
    if len(named) < len(leaves):
        raise ValueError("tree: two leaves have the same name; rename the key of one")
    return named
