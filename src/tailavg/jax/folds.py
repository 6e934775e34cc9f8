"""How sums are folded into means, in arrays, in place.

A large leaf has a sum and a stack of means, sharded like the leaf. The means of small leaves lie
side by side in one array for each dtype, a `Bundle`: a program takes as long to compile, and to
call, as it has arrays, and a fold of a bundle is one operation, however many leaves it has.

XLA works in place only if an array that changes is read in its own shape, and a slice of it with
its first axis, where it is written. So a fold changes the means first, and the sums from the means
as they are then: the barrier between the two keeps the order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tailavg.jax.clock import Merge, Step

__all__ = [
    "Bundle",
    "Held",
    "combined",
    "cut",
    "flat",
    "folded",
    "hosted",
    "near",
    "starts_of",
    "times",
    "weighed",
]


class Bundle(NamedTuple):
    """The means of small leaves, side by side."""

    means: Array
    """Of each block, the means of all leaves."""
    errors: Array
    """What the last fold rounded off the mean of the open block."""


class Held(NamedTuple):
    """What is folded: large leaves one by one, and bundles of small ones."""

    means: list[Array]
    sums: list[Array]
    bundles: dict[str, Bundle]
    small: dict[str, list[Array]]
    """The sums of the leaves in each bundle."""


def folded(step: Step, held: Held) -> Held:
    """Fold the sums into the means if that is due, and begin new sums."""
    merge, weight = step.merge, step.weight
    into = step.slot, 1.0 / step.total, jnp.asarray(weight)
    # the joint mean is m + w (own - m), so that is w / (1 - w) (own - joint mean) more than m
    ratio = weight / jnp.where(step.carries, 1.0 - weight, 1.0)
    carry = jnp.where(step.carries, step.carry, 0)

    def fold(means: Any, sums: Any, bundles: Any, small: Any) -> Any:
        means = [_joint(*pair, *into) for pair in _pairs(means, sums)]
        means, sums = _then(means, sums)
        sums = [_begun(*pair, *into, ratio, carry, merge) for pair in _pairs(means, sums)]
        bundles = {name: bundled(bundles[name], flat(small[name])) for name in bundles}
        return means, sums, bundles, jnp.array(True)

    def bundled(bundle: Bundle, total: Array) -> Bundle:
        error = near(bundle.errors)
        means = _joint(bundle.means, total, *into, error)
        means, total, error = _then(means, total, error)
        rest = _rest(means, total, *into, ratio, error)
        return Bundle(means, _as(bundle.errors, _finite(_unless(~step.carries, rest))))

    # The flag is known only when all is read: what waits for it may change the small sums in place.
    means, sums, bundles, done = lax.cond(
        step.folds,
        fold,
        lambda means, sums, bundles, _: (means, sums, bundles, jnp.array(False)),
        *held,
    )
    small = {
        name: [_unless(done, total) for total in totals] for name, totals in held.small.items()
    }
    if merge is not None:

        def merged(means: Any, sums: Any, bundles: Any) -> Any:
            one = merge.merges.astype(float)  # not a constant, which XLA would do without
            into = merge.target, one, merge.weight
            means = [_joint(*pair, *into) for pair in _pairs(means, sums)]
            # zeros, from both: they wait for the means, and are written where the sums are
            sums = [
                _unless(merge.merges, lax.add(total, _mean(mean, merge.target)))
                for mean, total in _pairs(means, sums)
            ]
            bundles = {
                name: bundle._replace(
                    means=_joint(bundle.means, _mean(bundle.means, merge.source), *into)
                )
                for name, bundle in bundles.items()
            }
            return means, sums, bundles

        means, sums, bundles = lax.cond(
            merge.merges & done, merged, lambda *held: held, means, sums, bundles
        )
    return Held(means, sums, bundles, small)


# These two are traced once for all leaves of a shape.


@functools.partial(jax.jit, inline=True)
def _joint(
    means: Array, total: Array, slot: Any, scale: Any, weight: Any, error: Array | None = None
) -> Array:
    """The means, with a sum joined to one of them; a weight of 1 forgets that one.

    Its error is what it lacks.
    """
    mean = _unless(weight >= 1.0, _row(means, slot))
    own = lax.expand_dims(times(scale, total), (0,))
    change = times(weight, lax.sub(own, _finite(mean)))
    if error is not None:
        change = lax.add(times(1.0 - weight, lax.expand_dims(error, (0,))), change)
    return _updated(means, lax.add(change, mean), slot)


@functools.partial(jax.jit, inline=True)
def _begun(
    means: Array,
    total: Array,
    slot: Any,
    scale: Any,
    weight: Any,
    ratio: Any,
    carry: Any,
    merge: Merge | None,
) -> Array:
    """The new sum: what the fold rounded off, times `carry`.

    If blocks are to be merged, the mean that goes: it needs a place, and the sum is empty.
    """
    begun = _finite(times(carry, _rest(means, total, slot, scale, weight, ratio)))
    if merge is None:
        return begun
    return lax.select(merge.merges, _mean(means, merge.source), begun)


def _rest(
    means: Array,
    total: Array,
    slot: Any,
    scale: Any,
    _: Any,
    ratio: Any,
    error: Array | None = None,
) -> Array:
    """What a joint mean lacks, since it is rounded."""
    mean = _mean(means, slot)
    change = times(ratio, lax.sub(times(scale, total), mean))
    if error is not None:
        change = lax.add(error, change)
    old = lax.sub(mean, change)
    return lax.sub(change, lax.sub(mean, old))


def _pairs(means: list[Array], sums: list[Array]) -> Iterable[tuple[Array, Array]]:
    return zip(means, sums, strict=True)


def _then(*arrays: Any) -> Any:
    """The same; what is computed from them waits until all are known."""
    return lax.optimization_barrier(arrays)  # type: ignore[no-untyped-call]


def combined(
    of_means: Array, means: Array, of_sum: Array | None = None, total: Array | None = None
) -> Array:
    """The weighted sum of means, and of a sum if there is one."""
    terms = [weighed(of_means[place], near(means[place])) for place in range(len(means))]
    if of_sum is not None and total is not None:
        terms.append(weighed(of_sum, total))
    return functools.reduce(lax.add, terms)


def weighed(weight: Array, part: Array) -> Array:
    """A part times its weight. One without weight may be NaN, and is not read."""
    return times(weight, _unless(weight == 0, part))


def flat(arrays: Sequence[Array]) -> Array:
    """Arrays one after another, gathered: XLA would rather shard them like one of their leaves."""
    rows = []
    for array in arrays:
        sharding = jax.typeof(array).sharding
        spec = PartitionSpec(*[None] * array.ndim)  # type: ignore[no-untyped-call]
        whole = NamedSharding(sharding.mesh, spec)
        if any(axis is not None for axis in sharding.spec):  # it is part of the type
            array = jax.sharding.reshard(array, whole)  # type: ignore[no-untyped-call]
        elif {*sharding.mesh.axis_types} == {AxisType.Auto}:
            array = lax.with_sharding_constraint(array, whole)  # type: ignore[no-untyped-call]
        rows.append(lax.reshape(array, (array.size,)))
    return lax.concatenate(rows, 0) if len(rows) > 1 else rows[0]


def starts_of(shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Where each of the arrays begins that `flat` puts one after another."""
    sizes = map(math.prod, shapes)
    return [jnp.uint32(start) for start in [*accumulate(sizes, initial=0)][:-1]]


def cut(row: Array, starts: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """The arrays that `flat` put one after another.

    If `starts` come out of a branch they are no constants, and XLA compiles one kernel for all
    arrays of a shape.
    """
    return [
        lax.reshape(lax.dynamic_slice(row, (start,), (math.prod(shape),)), shape)
        for start, shape in zip(starts, shapes, strict=True)
    ]


def times(factor: Any, array: Array) -> Array:
    """The product, in the array's precision.

    The factor comes first, here as in all of this file: XLA compiles kernels anew whose operands
    are the same in another order, and it sees a factor of several arrays first with the first.
    """
    return lax.mul(lax.full_like(array, factor), array)


def hosted(array: Array) -> Array:
    """An array in the memory of the host; an error if the backend has none."""
    device = jax.devices()[0] if isinstance(array, jax.core.Tracer) else next(iter(array.devices()))
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds or not hasattr(jax, "memory"):
        raise ValueError(
            f"offload: expected a backend with memory of the kind pinned_host, got {kinds} of "
            f"{device.platform} with JAX {jax.__version__}; leave out offload"
        )
    found: Array = jax.device_put(array, jax.memory.Space.Host)
    return found


def _on_host(array: Any) -> bool:
    space = getattr(jax.typeof(array), "memory_space", None)
    return space is not None and bool(space == jax.memory.Space.Host)


def near(array: Array) -> Array:
    """An array in the memory of its device."""
    return jax.device_put(array, jax.memory.Space.Device) if _on_host(array) else array


def _as(held: Array, array: Array) -> Array:
    """An array in the memory in which another is."""
    return jax.device_put(array, jax.memory.Space.Host) if _on_host(held) else array


def _row(means: Array, slot: Any) -> Array:
    """One of the means, with its first axis."""
    start = _start(means, slot)
    return near(lax.dynamic_slice(means, start, (1, *means.shape[1:])))


def _mean(means: Array, slot: Any) -> Array:
    """One of the means."""
    return lax.squeeze(_row(means, slot), (0,))


def _updated(means: Array, mean: Array, slot: Any) -> Array:
    return lax.dynamic_update_slice(means, _as(means, mean), _start(means, slot))


def _start(means: Array, slot: Any) -> list[Any]:
    """Where a mean begins. JAX asks of every signed index whether it is negative."""
    return [lax.convert_element_type(slot, np.uint32), *[np.uint32(0)] * (means.ndim - 1)]


def _unless(flag: Array, array: Array) -> Array:
    """Zeros if the flag is set, otherwise the array."""
    return lax.select(flag, lax.full_like(array, 0), array)


def _finite(array: Array) -> Array:
    """The array, with 0 for what is not finite: inf - inf is NaN."""
    zeros = lax.full_like(array, 0)
    return lax.select(lax.eq(zeros, lax.sub(array, array)), array, zeros)
