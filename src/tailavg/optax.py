"""Tail averages of parameters as an optax transformation, the last one of a chain.

tx = with_tail_average(optax.adam(1e-3), 0.25)      # the last quarter of all updates
...
averaged_params(opt_state, params)                  # for evaluation
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, overload

from tailavg.core.extras import needs

with needs("optax"):
    import jax
    import jax.numpy as jnp
    import optax
    from jax import Array, lax

from tailavg.core.decay import Reading
from tailavg.core.rules import Rule
from tailavg.core.windows import AnyWindow
from tailavg.jax import TreeState
from tailavg.jax import tail_average as tree_average
from tailavg.jax.reads import Weights, averages, each_weights, weights_of
from tailavg.jax.trees import BUNDLE

_WRAPPERS = (optax.MaskedState, optax.transforms.PartitionState)
_OBSERVERS = tuple(
    getattr(optax.transforms, name, ()) for name in ("MonitorState", "SnapshotState")
)  # they leave updates alone; not in every version of optax
_CHANGERS = {
    "LookaheadState",
    "MechanicState",
    "ScheduleFreeState",
    "SplitRealAndImaginaryState",
}  # wrappers that change updates or parameters, from optax and optax.contrib

Params = TypeVar("Params")

__all__ = ["averaged_params", "evaluate_tails", "tail_average", "with_tail_average"]


def tail_average(
    rule: AnyWindow | Rule,
    *,
    dtype: Any = jnp.float32,
    bundle: int = BUNDLE,
    offload: Literal["host"] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """A transformation that leaves updates alone and averages the updated parameters.

    It must come last in its chain, since it cannot see what later transformations change.
    `with_tail_average` puts it last, and `averaged_params` raises if it is elsewhere.

    Args:
        rule: As for `tailavg.jax.tail_average`.
        dtype: The dtype of the accumulators.
        bundle: As for `tailavg.jax.tail_average`. `optax.tree_map_params` needs 0.
        offload: As for `tailavg.jax.tail_average`.

    Examples:
        >>> tx = optax.chain(optax.sgd(0.5), tail_average(2))
        >>> params = jnp.array(0.0)
        >>> state = tx.init(params)
        >>> for _ in range(3):
        ...     updates, state = tx.update(jnp.array(-2.0), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> print(params, averaged_params(state))
        3.0 2.5
    """
    average = tree_average(rule, dtype=dtype, bundle=bundle, offload=offload)

    def update(
        updates: Any, state: TreeState, params: Any = None, **_: Any
    ) -> tuple[Any, TreeState]:
        if params is None:
            raise ValueError(
                "tail_average: expected the parameters, as in tx.update(updates, state, params), "
                "got none"
            )
        return updates, average.update(state, optax.apply_updates(params, updates))

    return optax.GradientTransformationExtraArgs(average.init, update)


def with_tail_average(
    tx: Any,
    rule: AnyWindow | Rule,
    *,
    dtype: Any = jnp.float32,
    bundle: int = BUNDLE,
    offload: Literal["host"] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that also averages the parameters it produces, for `averaged_params`.

    Args:
        tx: The complete optimizer, including learning rate and weight decay.
        rule: As for `tailavg.jax.tail_average`.
        dtype: The dtype of the accumulators.
        bundle: As for `tailavg.jax.tail_average`. `optax.tree_map_params` needs 0.
        offload: As for `tailavg.jax.tail_average`.
    """
    return optax.chain(tx, tail_average(rule, dtype=dtype, bundle=bundle, offload=offload))


@overload
def averaged_params(
    opt_state: Any, params: None = None, window: Reading | Array | None = None
) -> Any: ...
@overload
def averaged_params(
    opt_state: Any, params: Params, window: Reading | Array | None = None
) -> Params: ...
def averaged_params(
    opt_state: Any, params: Any = None, window: Reading | Array | None = None
) -> Any:
    """Find the averaged parameters anywhere in the state of an optimizer; may be jitted.

    Tails of different parameters, as under `optax.multi_transform`, are merged into one tree.

    Args:
        opt_state: The state of the optimizer, or the part of it that has the tail you want. The
            state of an `nnx.Optimizer` is accepted too.
        params: The parameters. They give the dtypes of the result, and the values where there is no
            tail, as under `optax.masked`. Without them, dtypes are those of the accumulators.
        window: What to read an `AnyTail` with: see `tailavg.jax.value`. Of several tails, each is
            read with it.

    Raises:
        ValueError: If the state has no tail, a misplaced one, or two of the same parameter.
    """
    states, params = _found(opt_state, params)
    return _assembled(states, [weights_of(state, window) for state in states], params)


def evaluate_tails(
    function: Callable[..., Any],
    opt_state: Any,
    windows: Sequence[Reading] | Array,
    *args: Any,
    params: Any = None,
) -> Any:
    """What a function makes of the parameters averaged over each window, in one program.

    No more than one average is held at a time.

    Args:
        function: It is called with averaged parameters and `args`, and returns arrays. It is traced
            once for a number of windows, and again if it is another function.
        opt_state: The state of an optimizer with an `AnyTail`, as for `averaged_params`.
        windows: What to read it with: see `tailavg.jax.value`. An array has one for each entry.
        *args: More for the function, such as the data for a validation.
        params: As for `averaged_params`.

    Returns:
        What the function returned, stacked along a first axis.

    Examples:
        >>> from tailavg import AnyTail
        >>> tx = with_tail_average(optax.sgd(0.5), AnyTail())
        >>> params = jnp.array(0.0)
        >>> state = tx.init(params)
        >>> step = jax.jit(tx.update)
        >>> for _ in range(1000):
        ...     updates, state = step(jnp.array(-4.0), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> distance = lambda mean, target: abs(mean - target)
        >>> evaluate_tails(distance, state, [0.25, 0.5, 1.0], 1500.0).round()
        Array([256.,   4., 499.], dtype=float32)
    """
    states, params = _found(opt_state, params)
    weights = [each_weights(state, windows) for state in states]
    return _evaluated(function, states, weights, params, args)


@functools.partial(jax.jit, static_argnames="function")
def _evaluated(
    function: Callable[..., Any],
    states: list[TreeState],
    weights: list[Weights],
    params: Any,
    args: Any,
) -> Any:
    return lax.map(lambda rows: function(_assembled(states, rows, params), *args), weights)


def _found(opt_state: Any, params: Any) -> tuple[list[TreeState], Any]:
    """The states of all tails, at least one, and the parameters."""
    if nnx := sys.modules.get("flax.nnx"):  # its optimizers keep arrays in variables
        as_pure = getattr(nnx, "as_pure", None) or nnx.pure  # its name before flax 0.12.7
        opt_state, params = as_pure((opt_state, params))
    states = _tails(opt_state)
    if not states:
        raise ValueError(
            "opt_state: expected a state of tail_average in it, got none; "
            "make the optimizer with with_tail_average(tx, rule)"
        )
    if params is not None:
        _check_flat(states, params)
    return states, params


def _check_flat(states: list[TreeState], params: Any) -> None:
    """Notice `optax.flatten`, which leaves no trace in a state but the shape of the average."""
    lengths = [state.sums.size for state in states if _vector(state.sums)]
    if not lengths or _vector(params):
        return
    numbers = sum(map(jnp.size, jax.tree.leaves(params)))
    if sum(lengths) == numbers:
        raise ValueError(
            "opt_state: expected an average with the structure of params, got a flat vector of "
            f"{numbers} numbers, as inside optax.flatten; put the tail around it: "
            "with_tail_average(optax.flatten(tx), rule)"
        )


def _vector(tree: Any) -> bool:
    return jax.tree_util.all_leaves([tree]) and jnp.ndim(tree) == 1


def _assembled(states: list[TreeState], weights: list[Weights], params: Any) -> Any:
    """The averages with these weights, one of each state, in one tree."""
    averaged: Any = optax.MaskedNode()
    for state, of_state in zip(states, weights, strict=True):
        averaged = _merged(averaged, averages(state, None, of_state))
    if params is not None:
        averaged = _merged(averaged, params, "params")
        return jax.tree.map(_like, averaged, params)
    if any(map(_masked, jax.tree.leaves(averaged, is_leaf=_masked))):
        raise ValueError(
            "params: expected the parameters, since only a part of them has a tail, got none; "
            "pass them as params"
        )
    return averaged


def _tails(node: Any) -> list[TreeState]:
    """The states of the tails in a state; each tail must come last in its chain."""
    if isinstance(node, TreeState):
        return [node]
    if jax.tree_util.all_leaves([node]):
        return []
    children, _ = _children(node)
    found = [_tails(child) for child in children]
    if type(node) in (tuple, OrderedDict):  # the state of a chain
        for place, tails in enumerate(found):
            if tails and not all(map(_observes, children[place + 1 :])):
                raise ValueError(
                    f"opt_state: expected tail_average last in its chain, got it in place "
                    f"{place + 1} of {len(found)}: what comes after it changes the updates, or has "
                    "the state of what does, as optax.identity has; so it would average parameters "
                    "that never existed; use with_tail_average(tx, rule)"
                )
    if type(node).__name__ in _CHANGERS and any(found):
        raise ValueError(
            f"opt_state: expected tail_average around what has a {type(node).__name__}, got it "
            "inside, where it averages parameters that never existed; use "
            "with_tail_average(tx, rule) with all of it as tx"
        )
    return [state for tails in found for state in tails]


def _observes(node: Any) -> bool:
    """Whether this state is of nothing but tails and others that leave updates alone."""
    if isinstance(node, (TreeState, *_OBSERVERS)):
        return True
    children, _ = _children(node)
    wrapped = type(node) in (tuple, dict, OrderedDict) or isinstance(node, _WRAPPERS)
    return wrapped and bool(children) and all(map(_observes, children))


def _merged(a: Any, b: Any, what: Literal["opt_state", "params"] = "opt_state") -> Any:
    """Merge two trees with masked parts. Parameters only fill the gaps."""
    if _masked(b):
        return a
    if _masked(a):  # copied, since parameters may be donated
        return b if what == "opt_state" else jax.tree.map(jnp.copy, b)
    (children, structure), (others, other) = _children(a), _children(b)
    if structure != other:
        raise ValueError(f"{what}: expected the structure of the average, {structure}, got {other}")
    if not jax.tree_util.all_leaves([a]):
        pairs = zip(children, others, strict=True)
        return structure.unflatten([_merged(*pair, what) for pair in pairs])
    if what == "opt_state":
        raise ValueError(
            "opt_state: expected one tail of each parameter, got several; pass the part of the "
            "state that has the one you want, such as opt_state[-1]"
        )
    if jnp.shape(a) != jnp.shape(b):
        raise ValueError(f"params: expected a leaf of shape {jnp.shape(a)}, got {jnp.shape(b)}")
    return a


def _like(average: Any, leaf: Any) -> Any:
    dtype = jnp.result_type(leaf)
    return average if average.dtype == dtype else average.astype(dtype)


def _children(node: Any) -> tuple[list[Any], Any]:
    """The direct children of a node of a pytree, and the structure to rebuild it."""
    return jax.tree.flatten(node, is_leaf=lambda child: child is not node)


def _masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
