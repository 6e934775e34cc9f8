"""The arithmetic on arrays: fold sums into means, in-place, and weight sums and means.

A fold merges a sum into the mean of its block and starts a new sum. A large leaf has a sum and a
stack of means, sharded like the leaf. The means of small leaves share one array for each dtype, a
`Bundle`: the time to compile and to call a program grows with its number of arrays, and one
operation folds a bundle of any number of leaves.

XLA updates an array in-place only if the array is read in its own shape, and slices of it are read
with their first axis and at the index that is written. So a fold changes the means first and then
computes the new sums from the new means; an optimization barrier keeps this order.

`trees` calls `fold_if_due` and `on_host`; `reads` calls `combined`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tailavg.jax.clock import Merge, Step
from tailavg.jax.states import Bundle, split_leaves

__all__ = [
    "combined",
    "concatenated",
    "cut",
    "fold_if_due",
    "on_device",
    "on_host",
    "starts_of",
    "times",
    "weighted",
]


def fold_if_due(
    step: Step, sums: list[Any], means: list[Any], bundles: dict[str, Bundle]
) -> tuple[list[Any], list[Any], dict[str, Bundle]]:
    """Fold the sums into the means if a fold is due, and merge two blocks if that is due."""
    large, small = split_leaves(sums, means)
    merge, weight = step.merge, jnp.asarray(step.weight)
    slot, scale = jnp.uint32(step.slot), 1.0 / step.total
    # joint = mean + w (mean_of_sum - mean), hence joint - mean = w / (1 - w) (mean_of_sum - joint)
    ratio = weight / jnp.where(step.carries, 1.0 - weight, 1.0)
    carry = jnp.where(step.carries, step.carry, 0)

    def fold(means: Any, sums: Any, bundles: Any, small_sums: Any) -> Any:
        means = [_joint(*pair, slot, scale, weight) for pair in zip(means, sums, strict=True)]
        means, sums = _in_order(means, sums)
        pairs = zip(means, sums, strict=True)
        sums = [_new_sum(*pair, slot, scale, ratio, carry, merge) for pair in pairs]
        bundles = {name: bundled(bundles[name], concatenated(small_sums[name])) for name in bundles}
        return means, sums, bundles, jnp.array(True)

    def bundled(bundle: Bundle, total: Array) -> Bundle:
        error = on_device(bundle.errors)
        means = _joint(bundle.means, total, slot, scale, weight, error)
        means, total, error = _in_order(means, total, error)
        new_error = _rounding_error(means, total, slot, scale, ratio, error)
        new_error = _finite(_zero_if(~step.carries, new_error))
        return Bundle(means, _placed_like(bundle.errors, new_error))

    def merged(merge: Merge, means: Any, sums: Any, bundles: Any) -> Any:
        one = merge.merges.astype(float)  # traced: XLA would optimize a constant away
        into = merge.target, one, merge.weight
        means = [_joint(*pair, *into) for pair in zip(means, sums, strict=True)]
        # zeros, computed from means and sums: so after the means, and in-place of the sums
        sums = [
            _zero_if(merge.merges, lax.add(total, _mean(mean, merge.target)))
            for mean, total in zip(means, sums, strict=True)
        ]
        joint = {
            name: _joint(bundle.means, _mean(bundle.means, merge.source), *into)
            for name, bundle in bundles.items()
        }
        return means, sums, {name: bundles[name]._replace(means=joint[name]) for name in joint}

    # `done` is known only after all sums are read, so the small sums can change in-place.
    large_means, large_sums, bundles, done = lax.cond(
        step.folds,
        fold,
        lambda means, sums, bundles, _: (means, sums, bundles, jnp.array(False)),
        [means[i] for i in large],
        [sums[i] for i in large],
        bundles,
        {name: [sums[i] for i in group] for name, group in small.items()},
    )
    if merge is not None:
        large_means, large_sums, bundles = lax.cond(
            merge.merges & done,
            functools.partial(merged, merge),
            lambda *arrays: arrays,
            large_means,
            large_sums,
            bundles,
        )
    sums, means = list(sums), list(means)
    for i, mean, total in zip(large, large_means, large_sums, strict=True):
        means[i], sums[i] = mean, total
    for i in itertools.chain(*small.values()):
        sums[i] = _zero_if(done, sums[i])
    return sums, means, bundles


# The next two are jitted to be traced once per shape instead of once per leaf.


@functools.partial(jax.jit, inline=True)
def _joint(
    means: Array, total: Array, slot: Any, scale: Any, weight: Any, error: Array | None = None
) -> Array:
    """Return the means, with a sum merged into the mean at `slot`; a weight of 1 replaces the mean.

    `error` is the rounding error of the mean.
    """
    mean = _zero_if(weight >= 1.0, _row(means, slot))
    mean_of_sum = lax.expand_dims(times(scale, total), (0,))
    change = times(weight, lax.sub(mean_of_sum, _finite(mean)))
    if error is not None:
        change = lax.add(times(1.0 - weight, lax.expand_dims(error, (0,))), change)
    joint = _placed_like(means, lax.add(change, mean))
    return lax.dynamic_update_slice_in_dim(means, joint, slot, 0)


@functools.partial(jax.jit, inline=True)
def _new_sum(
    means: Array, total: Array, slot: Any, scale: Any, ratio: Any, carry: Any, merge: Merge | None
) -> Array:
    """Return the new sum: the rounding error of the fold, times `carry`.

    If two blocks are merged next, the new sum is empty. Until the merge, it then holds the mean of
    the newer of the two blocks.
    """
    error = _finite(times(carry, _rounding_error(means, total, slot, scale, ratio)))
    if merge is None:
        return error
    return lax.select(merge.merges, _mean(means, merge.source), error)


def _rounding_error(
    means: Array, total: Array, slot: Any, scale: Any, ratio: Any, error: Array | None = None
) -> Array:
    """Return the rounding error of a joint mean."""
    mean = _mean(means, slot)
    change = times(ratio, lax.sub(times(scale, total), mean))
    if error is not None:
        change = lax.add(error, change)
    old = lax.sub(mean, change)
    return lax.sub(change, lax.sub(mean, old))


def _in_order(*arrays: Any) -> Any:
    """Return the arrays. What is computed from them waits until all of them are computed."""
    return lax.optimization_barrier(arrays)  # type: ignore[no-untyped-call]


def combined(
    of_means: Array, means: Array, of_sum: Array | None = None, total: Array | None = None
) -> Array:
    """Return the weighted sum of the means, and of the sum if there is one."""
    terms = [weighted(of_means[place], on_device(means[place])) for place in range(len(means))]
    if of_sum is not None and total is not None:
        terms.append(weighted(of_sum, total))
    return functools.reduce(lax.add, terms)


def weighted(weight: Array, array: Array) -> Array:
    """Return an array times its weight: zeros if the weight is 0, even if the array has NaNs."""
    return times(weight, _zero_if(weight == 0, array))


def concatenated(arrays: Sequence[Array]) -> Array:
    """Return the arrays in a replicated row. By default, XLA would shard it like one of them."""
    rows = []
    for array in arrays:
        sharding = jax.typeof(array).sharding
        spec = PartitionSpec(*[None] * array.ndim)  # type: ignore[no-untyped-call]
        replicated = NamedSharding(sharding.mesh, spec)
        if any(axis is not None for axis in sharding.spec):  # the sharding is part of the type
            array = jax.sharding.reshard(array, replicated)  # type: ignore[no-untyped-call]
        elif {*sharding.mesh.axis_types} == {AxisType.Auto}:
            array = lax.with_sharding_constraint(array, replicated)  # type: ignore[no-untyped-call]
        rows.append(lax.reshape(array, (array.size,)))
    return lax.concatenate(rows, 0) if len(rows) > 1 else rows[0]


def starts_of(shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Return where each array begins in the result of `concatenated`."""
    sizes = map(math.prod, shapes)
    return [jnp.uint32(start) for start in [*itertools.accumulate(sizes, initial=0)][:-1]]


def cut(row: Array, starts: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Undo `concatenated`.

    If `starts` are outputs of a branch, they are not constants, and XLA compiles one kernel for
    all arrays of a shape.
    """
    return [
        lax.reshape(lax.dynamic_slice(row, (start,), (math.prod(shape),)), shape)
        for start, shape in zip(starts, shapes, strict=True)
    ]


def times(factor: Any, array: Array) -> Array:
    """Return the product, in the array's precision.

    The factor comes first, as everywhere in this file: XLA compiles a new kernel for the same
    operands in another order.
    """
    return lax.mul(lax.full_like(array, factor), array)


def on_host(array: Array) -> Array:
    """Move an array to host memory. Raise if the backend cannot."""
    device = jax.devices()[0] if isinstance(array, jax.core.Tracer) else next(iter(array.devices()))
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds or not hasattr(jax, "memory"):
        raise ValueError(
            f"offload: expected a backend with pinned_host memory, got {kinds} on "
            f"{device.platform} with JAX {jax.__version__}; leave out offload"
        )
    moved: Array = jax.device_put(array, jax.memory.Space.Host)
    return moved


def _is_on_host(array: Any) -> bool:
    space = getattr(jax.typeof(array), "memory_space", None)
    return space is not None and bool(space == jax.memory.Space.Host)


def on_device(array: Array) -> Array:
    """Move an array to device memory."""
    return jax.device_put(array, jax.memory.Space.Device) if _is_on_host(array) else array


def _placed_like(like: Array, array: Array) -> Array:
    """Move an array to host memory if `like` is there."""
    return jax.device_put(array, jax.memory.Space.Host) if _is_on_host(like) else array


# Slots are unsigned: for a signed index, JAX would add a check for negative values.


def _row(means: Array, slot: Array) -> Array:
    """Return the mean at `slot`, with the first axis of the stack."""
    return on_device(lax.dynamic_slice_in_dim(means, slot, 1))


def _mean(means: Array, slot: Array) -> Array:
    """Return the mean at `slot`."""
    return lax.squeeze(_row(means, slot), (0,))


def _zero_if(flag: Array, array: Array) -> Array:
    """Return zeros if the flag is set, otherwise the array."""
    return lax.select(flag, lax.full_like(array, 0), array)


def _finite(array: Array) -> Array:
    """Return the array, with 0 in place of infinities and NaNs."""
    zeros = lax.full_like(array, 0)  # inf - inf is NaN, not 0
    return lax.select(lax.eq(zeros, lax.sub(array, array)), array, zeros)
