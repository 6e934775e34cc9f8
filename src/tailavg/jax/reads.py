"""Reads of an average of a pytree: with its own window, or of an `AnyTail` with any."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tailavg.core.decay import Decay, Reading
from tailavg.core.windows import TIE, as_window
from tailavg.jax.clock import (
    TracedBlocks,
    TracedDecay,
    TracedTails,
    traced_decay,
    traced_size,
    traced_window,
)
from tailavg.jax.folds import combined, cut, near, starts_of, weighed
from tailavg.jax.states import Like, Tree, TreeState, aligned, beyond, parted

__all__ = [
    "Weights",
    "averages",
    "each_weights",
    "evaluate_tails",
    "size_read",
    "value",
    "weights_of",
]

Weights = tuple[Array, Array]
"""The weights of the means, each in its place, and of the sum."""


@overload
def value(state: TreeState, like: None = None, window: Reading | Array | None = None) -> Tree: ...
@overload
def value(state: TreeState, like: Like, window: Reading | Array | None = None) -> Like: ...
def value(state: TreeState, like: Tree = None, window: Reading | Array | None = None) -> Tree:
    """The average, as a new tree; before the first update, the tree given to `init`.

    It needs no rule: the state is enough.

    Args:
        state: The state.
        like: A tree with the dtypes of the result, such as the parameters; by default the result
            has the dtypes of the accumulators.
        window: What to read an `AnyTail` with: a number, a window or a `Decay`; or an array of no
            dimensions, which may be traced: whole numbers stand for the last so many, others
            for the last fraction. Inside `jax.jit` nothing can raise, so a window that is too
            short gives NaN.

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
    """What a function makes of the average over each window, one after another in one program.

    No more than one average is held at a time.

    Args:
        function: It is called with an average and `args`, and returns arrays. It is traced once
            for a number of windows, and again if it is another function.
        state: The state of an `AnyTail`.
        windows: What to read it with: see `value`. An array has one for each entry.
        *args: More for the function, such as the data for a validation.
        like: As for `value`.

    Returns:
        What the function returned, stacked along a first axis.

    Examples:
        >>> from tailavg import AnyTail
        >>> from tailavg.jax import tail_average
        >>> average = tail_average(AnyTail())
        >>> state = average.init(0.0)
        >>> update = jax.jit(average.update)
        >>> for x in range(1000):
        ...     state = update(state, x)
        >>> distance = lambda mean, target: abs(mean - target)
        >>> evaluate_tails(distance, state, [0.25, 0.5, 1.0], 700.2).round()
        Array([177.,  51., 201.], dtype=float32)
    """
    return _evaluated(function, state, each_weights(state, windows), args, like)


def each_weights(state: TreeState, windows: Sequence[Reading] | Array) -> Weights:
    """The weights of several windows, stacked."""
    found: Weights
    if isinstance(windows, jax.Array | np.ndarray):
        found = jax.vmap(lambda window: weights_of(state, window))(windows)
    elif windows:
        each = [weights_of(state, window) for window in windows]
        found = jax.tree.map(lambda *rows: jnp.stack(rows), *each)
    else:
        raise ValueError("windows: expected at least one, got none")
    return found


@functools.partial(jax.jit, static_argnames="function")
def _evaluated(
    function: Callable[..., Any], state: TreeState, weights: Weights, args: Any, like: Tree
) -> Any:
    return lax.map(lambda row: function(averages(state, like, row), *args), weights)


def weights_of(state: TreeState, window: Reading | Array | None) -> Weights:
    """The weights of the means and of the sum in the average."""
    asked = _asked(state, window)
    traced = isinstance(asked, jax.Array | np.ndarray)
    found: Weights = _weights(
        state.clock, state.updates, state.size, *((asked, None) if traced else (None, asked))
    )
    return found


def _asked(state: TreeState, window: Any) -> Any:
    """What an `AnyTail` is to be read with; None if the state has a window of its own."""
    known = not isinstance(state.size, jax.core.Tracer)
    if known and np.isnan(state.size).any():
        raise ValueError(
            "state: expected one that was updated by the rule it was made with, got one that "
            "another rule has tried to update; use the same rule, and the average goes on"
        )
    if not isinstance(state.clock, TracedTails):
        if window is not None:
            raise ValueError(
                "window: expected none, since this average has its own, "
                f"got {window!r}; an AnyTail reads any window"
            )
        return None
    if window is None:
        raise ValueError("window: expected one, since AnyTail has none of its own; got none")
    if isinstance(window, jax.Array | np.ndarray):
        return window
    asked = window if isinstance(window, Decay) else as_window(window)
    if isinstance(asked, Decay) and asked.shape == "linear":
        asked = asked.window
    if known and not isinstance(state.updates, jax.core.Tracer) and not np.ndim(state.updates):
        t, least = int(state.updates), float(state.size)
        if t and asked.size(t) < least * (1 - _tie(state.size.dtype)):
            raise ValueError(
                f"window: expected a window of at least {least:g} of the {t} samples so far, "
                f"got {window!r}"
            )
    return asked


def size_read(state: TreeState, window: Reading | None) -> Array:
    """k_t of what the state is read with."""
    asked = _asked(state, window)
    if asked is None:
        return state.size
    size: Any = _size(state.updates, None, asked)
    found: Array = size.size(state.updates) if isinstance(size, Decay) else size
    return found


def _tie(dtype: Any) -> float:
    return float(TIE) if dtype == np.float64 else 1e-6


@functools.partial(jax.jit, static_argnames="asked", inline=True)
def _weights(
    clock: TracedBlocks | TracedDecay, updates: Array, size: Array, window: Array | None, asked: Any
) -> Weights:
    reading = size if asked is window is None else _size(updates, window, asked)
    of_means, of_sum = clock.weights(updates, reading)
    if isinstance(reading, Decay):
        reading = reading.size(jnp.maximum(updates, 1))
    # else a window that is too short, another rule, or more updates than the count can tell
    read = (reading >= size * (1 - _tie(size.dtype))) & ~beyond(updates)
    return of_means, jnp.where(read, of_sum, jnp.nan)


def _size(updates: Array, window: Array | None, asked: Any) -> Any:
    """The size at this step of what an `AnyTail` is read with, or the decay over it."""
    t = jnp.maximum(updates, 1)
    if window is not None:
        return traced_size(window, t)
    if isinstance(asked, Decay):
        return traced_decay(asked)
    return jnp.asarray(traced_window(asked).size(t), jnp.result_type(float))


@functools.partial(jax.jit, inline=True)
def averages(state: TreeState, like: Tree, weights: Weights) -> Tree:
    """The average with these weights, in the dtypes of `like`."""
    wanted, sums, means, structure = aligned(state.sums if like is None else like, state, "like")
    of_means, of_sum = weights
    large, small = parted(sums, means)

    shapes = {name: [sums[i].shape for i in group] for name, group in small.items()}

    def average() -> tuple[list[Array], list[tuple[Array, list[Array]]]]:
        found = [combined(of_means, means[i], of_sum, sums[i]) for i in large]
        return (
            [x.astype(wanted[i].dtype) for i, x in zip(large, found, strict=True)],
            [
                (combined(of_means, state.bundles[name].means), starts_of(shapes[name]))
                for name in small
            ],
        )

    def nothing() -> tuple[list[Array], list[tuple[Array, list[Array]]]]:
        return (
            [lax.full_like(sums[i], jnp.nan, wanted[i].dtype) for i in large],
            [
                (
                    lax.full_like(near(state.bundles[name].errors), jnp.nan),
                    [jnp.uint32(0) for _ in group],
                )
                for name, group in small.items()
            ],
        )

    # As a branch, it is computed by itself. Within what is done with it, XLA on a CPU would hold
    # each term of an average in an array of its own, and take up to 20 times as long.
    found, rows = lax.cond(jnp.isnan(of_sum), nothing, average)
    new = [jnp.copy(total) for total in sums]  # those that are not averaged
    for i, x in zip(large, found, strict=True):
        new[i] = x
    for (row, starts), (name, group) in zip(rows, small.items(), strict=True):
        for i, part in zip(group, cut(row, starts, shapes[name]), strict=True):
            new[i] = lax.add(part, weighed(of_sum, sums[i])).astype(wanted[i].dtype)
    return structure.unflatten(new)
