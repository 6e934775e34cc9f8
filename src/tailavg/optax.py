"""Tail averages of parameters as an optax transformation, the last one of a chain.

tx = with_tail_average(optax.adam(1e-3), 0.25)      # the last quarter of all updates
...
averaged_params(opt_state, params)                  # for evaluation
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, overload

from tailavg.extras import needs

with needs("optax"):
    import jax
    import jax.numpy as jnp
    import optax
    from jax import Array

from tailavg.core.readings import Reading
from tailavg.core.rules import Rule, refuses_decay
from tailavg.core.windows import AnyWindow
from tailavg.jax import TreeState
from tailavg.jax import tail_average as tree_average
from tailavg.jax.reads import Weights, averages, each_weights, evaluated, weights_of
from tailavg.jax.states import TreeReading
from tailavg.jax.trees import BUNDLE

_WRAPPERS = (optax.MaskedState, optax.transforms.PartitionState)
_OBSERVERS = tuple(
    getattr(optax.transforms, name, ()) for name in ("MonitorState", "SnapshotState")
)  # states of transformations that do not change updates; not in every version of optax
_CHANGERS = {
    "LookaheadState",
    "MechanicState",
    "ScheduleFreeState",
    "SplitRealAndImaginaryState",
}  # states of wrappers in optax and optax.contrib that change updates or parameters
_FLAT = (
    "; inside optax.flatten, the average is one flat vector: put the tail outside, as in "
    "with_tail_average(optax.flatten(tx), rule)"
)

Params = TypeVar("Params")

__all__ = ["averaged_params", "evaluate_tails", "tail_average", "with_tail_average"]


@refuses_decay
def tail_average(
    rule: AnyWindow | Rule,
    *,
    dtype: Any = jnp.float32,
    bundle: int = BUNDLE,
    offload: Literal["cpu"] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Make a transformation that averages the updated parameters and does not change updates.

    It must come last in its chain, since it cannot see what later transformations change.
    `with_tail_average` puts it last, and `averaged_params` raises if it is elsewhere.

    For the arguments see `tailavg.jax.tail_average`; `optax.tree_map_params` needs `bundle=0`.

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
                "tail_average: the parameters are missing; pass them, as in "
                "tx.update(updates, state, params)"
            )
        return updates, average.update(state, optax.apply_updates(params, updates))

    return optax.GradientTransformationExtraArgs(average.init, update)


@refuses_decay
def with_tail_average(
    tx: Any,
    rule: AnyWindow | Rule,
    *,
    dtype: Any = jnp.float32,
    bundle: int = BUNDLE,
    offload: Literal["cpu"] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Make an optimizer average the parameters that it produces, for `averaged_params`.

    `tx` is the complete optimizer, including learning rate and weight decay. For the other
    arguments see `tailavg.jax.tail_average`; `optax.tree_map_params` needs `bundle=0`.
    """
    return optax.chain(tx, tail_average(rule, dtype=dtype, bundle=bundle, offload=offload))


@overload
def averaged_params(
    opt_state: Any, params: None = None, window: TreeReading | None = None
) -> Any: ...
@overload
def averaged_params(
    opt_state: Any, params: Params, window: TreeReading | None = None
) -> Params: ...
def averaged_params(opt_state: Any, params: Any = None, window: TreeReading | None = None) -> Any:
    """Return the averaged parameters from the state of an optimizer. May be jitted.

    The tail may be anywhere in the state. Tails of different parameters, as under
    `optax.multi_transform`, are merged into one tree.

    Args:
        opt_state: The state of the optimizer, or the part of it that has the tail you want. The
            state of an `nnx.Optimizer` is accepted too.
        params: The parameters. The result has their dtypes, and their values where there is no
            tail, as under `optax.masked`. By default it has the dtypes of the accumulators.
        window: The window to read every `AnyTail` with, as for `tailavg.jax.value`.

    Raises:
        ValueError: If the state has no tail, a misplaced tail, or two tails of one parameter.
    """
    states, params = _tails_and_params(opt_state, params)
    return _assembled(states, params, [weights_of(state, window) for state in states])


def evaluate_tails(
    function: Callable[..., Any],
    opt_state: Any,
    windows: Sequence[Reading] | Array,
    *args: Any,
    params: Any = None,
) -> Any:
    """Call a function with the parameters averaged over each window, in one program.

    Like `tailavg.jax.evaluate_tails`, but with the state of an optimizer. `params` is as for
    `averaged_params`.
    """
    states, params = _tails_and_params(opt_state, params)
    weights = [each_weights(state, windows) for state in states]
    return evaluated(_assembled, function, states, params, weights, args)


def _tails_and_params(opt_state: Any, params: Any) -> tuple[list[TreeState], Any]:
    """Return the states of all tails, and the parameters. Raise if there is no tail."""
    if nnx := sys.modules.get("flax.nnx"):  # its optimizers keep arrays in variables
        as_pure = getattr(nnx, "as_pure", None) or nnx.pure  # its name before flax 0.12.7
        opt_state, params = as_pure((opt_state, params))
    states = _find_tails(opt_state)
    if not states:
        raise ValueError(
            "opt_state: it contains no state of tail_average; make the optimizer with "
            "with_tail_average(tx, rule)"
        )
    return states, params


def _assembled(states: list[TreeState], params: Any, weights: list[Weights]) -> Any:
    """Return the averages of all states, with these weights, in one tree."""
    averaged: Any = optax.MaskedNode()
    for state, state_weights in zip(states, weights, strict=True):
        averaged = _merged(averaged, averages(state, None, state_weights))
    if params is not None:
        averaged = _merged(averaged, params, "params")
        return jax.tree.map(_cast, averaged, params)
    if any(map(_is_masked, jax.tree.leaves(averaged, is_leaf=_is_masked))):
        raise ValueError(
            "params: only some of the parameters have a tail; pass params, which gives the values "
            "of the others"
        )
    return averaged


def _find_tails(node: Any) -> list[TreeState]:
    """Return the states of all tails in a state. Raise if a tail is misplaced."""
    if isinstance(node, TreeState):
        return [node]
    if jax.tree_util.all_leaves([node]):
        return []
    children, _ = _children(node)
    tails_of = [_find_tails(child) for child in children]
    if type(node) in (tuple, OrderedDict):  # the state of a chain
        for place, tails in enumerate(tails_of):
            if tails and not all(map(_only_observes, children[place + 1 :])):
                raise ValueError(
                    f"opt_state: expected tail_average last in its chain, got it in place "
                    f"{place + 1} of {len(children)}: a later transformation changes the updates, "
                    "or looks like one that does (as optax.identity), so the tail would average "
                    "parameters that never existed; use with_tail_average(tx, rule)"
                )
    if type(node).__name__ in _CHANGERS and any(tails_of):
        raise ValueError(
            f"opt_state: tail_average is inside the transformation with a {type(node).__name__}, "
            "where it averages parameters that never existed; put it outside, as in "
            "with_tail_average(tx, rule) with this transformation as tx"
        )
    return [state for tails in tails_of for state in tails]


def _only_observes(node: Any) -> bool:
    """Return whether the state is of tails or transformations that do not change updates."""
    if isinstance(node, (TreeState, *_OBSERVERS)):
        return True
    children, _ = _children(node)
    wrapped = type(node) in (tuple, dict, OrderedDict) or isinstance(node, _WRAPPERS)
    return wrapped and bool(children) and all(map(_only_observes, children))


def _merged(a: Any, b: Any, what: Literal["opt_state", "params"] = "opt_state") -> Any:
    """Merge two trees with masked nodes. Parameters only replace masked nodes."""
    if _is_masked(b):
        return a
    if _is_masked(a):  # copied, since parameters may be donated
        return b if what == "opt_state" else jax.tree.map(jnp.copy, b)
    (children_a, structure_a), (children_b, structure_b) = _children(a), _children(b)
    if structure_a != structure_b:
        raise ValueError(
            f"{what}: expected the structure of the average, {structure_a}, "
            f"got {structure_b}{_FLAT}"
        )
    if not jax.tree_util.all_leaves([a]):
        pairs = zip(children_a, children_b, strict=True)
        return structure_a.unflatten([_merged(*pair, what) for pair in pairs])
    if what == "opt_state":
        raise ValueError(
            "opt_state: several tails average the same parameter; pass the part of the state with "
            "the tail you want, such as opt_state[-1]"
        )
    if jnp.shape(a) != jnp.shape(b):
        shapes = f"shape {jnp.shape(a)}, got {jnp.shape(b)}"
        raise ValueError(f"params: expected a leaf of {shapes}{_FLAT}")
    return a


def _cast(average: Any, leaf: Any) -> Any:
    dtype = jnp.result_type(leaf)
    return average if average.dtype == dtype else average.astype(dtype)


def _children(node: Any) -> tuple[list[Any], Any]:
    """Return the direct children of a node of a pytree, and the structure to rebuild it."""
    return jax.tree.flatten(node, is_leaf=lambda child: child is not node)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
