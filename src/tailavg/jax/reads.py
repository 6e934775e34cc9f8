"""Read the average of a pytree: with the window of its rule, or an `AnyTail` with any window.

`weights_of` turns a window into weights, and `averages` turns weights into an average. `value` and
`evaluate_tails` do both for one state; `tailavg.optax` does the same for several.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tailavg.core.readings import ByAge, Decay, Freshest, Reading
from tailavg.core.rules import no_window_error
from tailavg.core.windows import TIE, as_window
from tailavg.jax.clock import TracedBlocks, TracedDecay, TracedTails, array_size, traced_window
from tailavg.jax.folds import combined, cut, on_device, starts_of, weighted
from tailavg.jax.states import (
    Like,
    Tree,
    TreeReading,
    TreeState,
    aligned,
    overflowed,
    split_leaves,
)

__all__ = [
    "Weights",
    "averages",
    "each_weights",
    "evaluate_tails",
    "evaluated",
    "size_read",
    "value",
    "weights_of",
]

Weights = tuple[Array, Array]
"""The weights of the means, in the order of the stack, and the weight of the sum."""


@overload
def value(state: TreeState, like: None = None, window: TreeReading | None = None) -> Tree: ...
@overload
def value(state: TreeState, like: Like, window: TreeReading | None = None) -> Like: ...
def value(state: TreeState, like: Tree = None, window: TreeReading | None = None) -> Tree:
    """Return the average, as a new tree; before the first update, the tree given to `init`.

    Args:
        state: The state.
        like: A tree with the dtypes of the result, such as the parameters; by default the result
            has the dtypes of the accumulators.
        window: The window to read an `AnyTail` with: a number, a window, a `Freshest`, a `Decay`,
            or an array without dimensions, which may be traced. An integer is a count, a float a
            fraction. A `Freshest` may have such an array, too. Inside `jax.jit` nothing can raise,
            so a window that is too short gives NaN.

    Examples:
        >>> from tailavg import AnyTail
        >>> from tailavg.jax import tail_average
        >>> average = tail_average(AnyTail())
        >>> state = average.init(0.0)
        >>> update = jax.jit(average.update)
        >>> for x in range(1000):
        ...     state = update(state, x)
        >>> [round(float(value(state, window=c)), 1) for c in (0.25, 0.5, 1.0)]
        [877.0, 751.1, 499.5]
    """
    return averages(state, like, weights_of(state, window))


def evaluate_tails(
    function: Callable[..., Any],
    state: TreeState,
    windows: Sequence[Reading] | Array,
    *args: Any,
    like: Tree = None,
) -> Any:
    """Call a function with the average over each window, one after another in one program.

    Only one average is in memory at a time.

    Args:
        function: Called as `function(average, *args)`; returns arrays. It is traced again when
            the number of windows changes.
        state: The state of an `AnyTail`.
        windows: The windows to read the state with, each as for `value`; or an array of counts or
            of fractions.
        *args: Further arguments of the function, such as validation data.
        like: As for `value`.

    Returns:
        The results of the function, stacked along a new first axis.
    """
    return evaluated(averages, function, state, like, each_weights(state, windows), args)


@functools.partial(jax.jit, static_argnames=("assemble", "function"))
def evaluated(
    assemble: Callable[..., Tree],
    function: Callable[..., Any],
    state: Any,
    like: Tree,
    weights: Any,
    args: Any,
) -> Any:
    """Call a function with the average that `assemble` returns for each of the stacked weights."""
    return lax.map(lambda row: function(assemble(state, like, row), *args), weights)


def each_weights(state: TreeState, windows: Sequence[Reading] | Array) -> Weights:
    """Return the weights of several windows, stacked."""
    if _is_array(windows):
        return jax.vmap(lambda window: weights_of(state, window))(windows)
    if not windows:
        raise ValueError("windows: expected at least one, got none")
    weights = [weights_of(state, window) for window in windows]
    stacked: Weights = jax.tree.map(lambda *rows: jnp.stack(rows), *weights)
    return stacked


def weights_of(state: TreeState, window: TreeReading | None) -> Weights:
    """Return the weights of the means and of the sum in the average."""
    reading = _reading(state, window)
    # the weights of a Freshest depend on its window only by k, which may be traced
    by_age = Freshest(1.0) if isinstance(reading, Freshest) else reading
    by_age = by_age if isinstance(by_age, ByAge) else None
    k = _size(state, reading)
    weights: Weights = _weights(state.clock, state.updates, state.size, k, by_age)
    return weights


def size_read(state: TreeState, window: TreeReading | None) -> Array:
    """Return the size k_t of the window that reads the state, as `tailavg.core.rules.size_of`."""
    if window is None and isinstance(state.clock, TracedTails):
        return state.updates.astype(state.size.dtype)
    return _size(state, _reading(state, window))


def _reading(state: TreeState, window: Any) -> Any:
    """Return the reading of an `AnyTail`: a window, a `ByAge` or an array; None for other rules.

    Raise if the state is not traced and the window is too short or the state is invalid.
    """
    is_concrete = not isinstance(state.updates, jax.core.Tracer)
    if is_concrete and np.any(overflowed(state.updates)):
        raise ValueError(
            "state: invalid, since another rule has updated it inside jax.jit, or since the count "
            "of updates has overflowed; resume from an earlier state"
        )
    if not isinstance(state.clock, TracedTails):
        if window is not None:
            raise ValueError(
                f"window: this average has its own window, got {window!r}; average with AnyTail() "
                "to choose the window when you read"
            )
        return None
    if window is None:
        raise no_window_error()
    if _is_array(window) or (isinstance(window, Freshest) and _is_array(window.window)):
        return window
    reading = window if isinstance(window, ByAge) else as_window(window)
    if isinstance(reading, Decay) and reading.shape == "linear":
        reading = reading.window
    if is_concrete and not np.ndim(state.updates):
        t, shortest = int(state.updates), float(state.size)
        if t and reading.size(t) < shortest * (1 - _tie(state.size.dtype)):
            raise ValueError(
                f"window: expected at least {shortest:g} of the {t} samples so far, "
                f"got {window!r}; create the AnyTail with a smaller `shortest` to read shorter "
                "windows"
            )
    return reading


def _is_array(window: Any) -> bool:
    return isinstance(window, jax.Array | np.ndarray)


def _tie(dtype: Any) -> float:
    """Return the relative error with which sizes are compared."""
    return float(TIE) if dtype == np.float64 else 1e-6


def _size(state: TreeState, reading: Any) -> Array:
    """Return the window size k_t of a reading, as returned by `_reading`."""
    t = jnp.maximum(state.updates, 1)
    if reading is None:
        return state.size
    window: Any = reading.window if isinstance(reading, ByAge) else reading
    if _is_array(window):
        return array_size(window, t)
    return jnp.asarray(traced_window(window).size(t), jnp.result_type(float))


@functools.partial(jax.jit, static_argnames="by_age", inline=True)
def _weights(
    clock: TracedBlocks | TracedDecay, updates: Array, size: Array, k: Array, by_age: ByAge | None
) -> Weights:
    of_means, of_sum = clock.weights(updates, k, by_age)
    # NaN if the window is too short, after an update with another rule, or if the count overflowed
    read = (k >= size * (1 - _tie(size.dtype))) & ~overflowed(updates)
    return of_means, jnp.where(read, of_sum, jnp.nan)


@functools.partial(jax.jit, inline=True)
def averages(state: TreeState, like: Tree, weights: Weights) -> Tree:
    """Return the average with these weights, in the dtypes of `like`."""
    likes, sums, means, structure = aligned(state.sums if like is None else like, state, "like")
    of_means, of_sum = weights
    large, small = split_leaves(sums, means)
    shapes = [[sums[i].shape for i in group] for group in small.values()]

    def average() -> tuple[list[Array], list[Array], list[list[Array]]]:
        """Return averages of large leaves, averages of bundles without their sums, and starts."""
        averaged = [
            combined(of_means, means[i], of_sum, sums[i]).astype(likes[i].dtype) for i in large
        ]
        rows = [combined(of_means, state.bundles[name].means) for name in small]
        return averaged, rows, [starts_of(group_shapes) for group_shapes in shapes]

    def all_nan() -> tuple[list[Array], list[Array], list[list[Array]]]:
        averaged = [lax.full_like(sums[i], jnp.nan, likes[i].dtype) for i in large]
        errors = [on_device(state.bundles[name].errors) for name in small]
        rows = [lax.full_like(row, jnp.nan) for row in errors]
        return averaged, rows, [[jnp.uint32(0) for _ in group_shapes] for group_shapes in shapes]

    # XLA compiles a branch separately. On a CPU, if it fused this code with the code that uses the
    # average, it would store each term in an array of its own, and take up to 20 times as long.
    averaged, rows, starts = lax.cond(jnp.isnan(of_sum), all_nan, average)
    leaves = [jnp.copy(total) for total in sums]  # leaves that are not averaged stay copies
    for i, x in zip(large, averaged, strict=True):
        leaves[i] = x
    for group, *bundle in zip(small.values(), rows, starts, shapes, strict=True):
        for i, x in zip(group, cut(*bundle), strict=True):
            leaves[i] = lax.add(x, weighted(of_sum, sums[i])).astype(likes[i].dtype)
    return structure.unflatten(leaves)
