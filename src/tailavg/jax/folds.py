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
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from tailavg.jax.clock import Step

__all__ = ["Bundle", "Held", "combined", "flat", "folded", "hosted", "times", "weighed"]


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
    merge = step.merge
    scale = 1.0 / step.total

    def fold(means: Any, sums: Any, bundles: Any, small: Any) -> Any:
        means = [_joint(*pair, step.slot, scale, step.weight) for pair in _pairs(means, sums)]
        means, sums = _then(means, sums)
        sums = [_begun(step, *pair) for pair in _pairs(means, sums)]
        bundles = {name: _bundled(step, bundles[name], flat(small[name])) for name in bundles}
        return means, sums, bundles, jnp.array(True)

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
            how = merge.target, one, merge.weight
            means = [_joint(*pair, *how) for pair in _pairs(means, sums)]
            # zeros, from both: they wait for the means, and are written where the sums are
            sums = [
                _unless(merge.merges, total + _mean(mean, merge.target))
                for mean, total in _pairs(means, sums)
            ]
            bundles = {
                name: bundle._replace(
                    means=_joint(bundle.means, _mean(bundle.means, merge.source), *how)
                )
                for name, bundle in bundles.items()
            }
            return means, sums, bundles

        means, sums, bundles = lax.cond(
            merge.merges & done, merged, lambda *held: held, means, sums, bundles
        )
    return Held(means, sums, bundles, small)


def _joint(means: Array, total: Array, slot: Any, scale: Any, weight: Any) -> Array:
    """The means, with a sum joined to one of them; a weight of 1 forgets that one."""
    mean = _row(means, slot)
    mean = _unless(weight >= 1.0, mean)
    own = lax.expand_dims(times(scale, total), (0,))
    return _updated(means, times(weight, own - _finite(mean)) + mean, slot)


def _begun(step: Step, means: Array, total: Array) -> Array:
    """The new sum: what the fold rounded off, if that is to be carried.

    If blocks are to be merged, the mean that goes: it needs a place, and the sum is empty.
    """
    mean = _mean(means, step.slot)
    # the joint mean is m + w (own - m), so that is w / (1 - w) (own - joint mean) more than m
    ratio = step.weight / jnp.where(step.carries, 1.0 - step.weight, 1.0)
    change = times(ratio, times(1.0 / step.total, total) - mean)
    rest = change - (mean - (mean - change))  # the inner difference is the old mean
    begun = _finite(times(jnp.where(step.carries, step.carry, 0), rest))
    if step.merge is None:
        return begun
    return lax.select(step.merge.merges, _mean(means, step.merge.source), begun)


def _bundled(step: Step, bundle: Bundle, total: Array) -> Bundle:
    """The bundle, with the sums of its leaves joined to one of its means."""
    means, error = bundle.means, lax.expand_dims(_near(bundle.errors), (0,))
    own = lax.expand_dims(times(1.0 / step.total, total), (0,))

    def changed(means: Array) -> tuple[Array, Array]:
        mean = _unless(step.weight >= 1.0, _row(means, step.slot))
        change = times(step.weight, own - _finite(mean))
        return mean, times(1.0 - step.weight, error) + change

    mean, change = changed(means)
    rest = _finite(_unless(~step.carries, change - ((mean + change) - mean)))
    rest, means = _then(rest, means)
    mean, change = changed(means)
    return Bundle(
        _updated(means, mean + change, step.slot),
        _as(bundle.errors, lax.squeeze(rest, (0,))),
    )


def _pairs(means: list[Array], sums: list[Array]) -> Iterable[tuple[Array, Array]]:
    return zip(means, sums, strict=True)


def _then(first: Any, then: Any) -> tuple[Any, Any]:
    """The same; what is computed from the second waits until the first is known."""
    both: tuple[Any, Any] = lax.optimization_barrier((first, then))  # type: ignore[no-untyped-call]
    return both


def combined(
    of_means: Array, means: Array, of_sum: Array | None = None, total: Array | None = None
) -> Array:
    """The weighted sum of means, and of a sum if there is one."""
    terms = [weighed(of_means[place], _near(means[place])) for place in range(len(means))]
    if of_sum is not None and total is not None:
        terms.append(weighed(of_sum, total))
    return functools.reduce(operator.add, terms)


def weighed(weight: Array, part: Array) -> Array:
    """A part times its weight; without one it may be NaN, and is not read."""
    return lax.select(weight == 0, lax.full_like(part, 0), times(weight, part))


def flat(arrays: Sequence[Array]) -> Array:
    """Arrays one after another. If their shardings are part of their types, they are gathered."""
    rows = []
    for array in arrays:
        sharding = jax.typeof(array).sharding
        if any(axis is not None for axis in sharding.spec):
            spec = PartitionSpec(*[None] * array.ndim)  # type: ignore[no-untyped-call]
            whole = NamedSharding(sharding.mesh, spec)
            array = jax.sharding.reshard(array, whole)  # type: ignore[no-untyped-call]
        rows.append(lax.reshape(array, (array.size,)))
    return lax.concatenate(rows, 0) if len(rows) > 1 else rows[0]


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


def _near(array: Array) -> Array:
    """An array in the memory of its device."""
    return jax.device_put(array, jax.memory.Space.Device) if _on_host(array) else array


def _as(held: Array, array: Array) -> Array:
    """An array in the memory in which another is."""
    return jax.device_put(array, jax.memory.Space.Host) if _on_host(held) else array


def _row(means: Array, slot: Any) -> Array:
    """One of the means, with its first axis."""
    start = _start(means, slot)
    return _near(lax.dynamic_slice(means, start, (1, *means.shape[1:])))


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
    return lax.select(lax.eq(zeros, array - array), array, zeros)
