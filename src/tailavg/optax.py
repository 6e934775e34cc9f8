"""Tail averages of parameters as an optax transformation, the last one of a chain.

tx = with_tail_average(optax.adam(1e-3), 0.25)      # the last quarter of all updates
...
averaged_params(opt_state, params)                  # for evaluation
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any, Literal

from tailavg.core.extras import needs

with needs("optax"):
    import jax
    import jax.numpy as jnp
    import optax

from tailavg.core.rules import Rule
from tailavg.core.windows import AnyWindow
from tailavg.jax import TreeState, value
from tailavg.jax import tail_average as tree_average

_WRAPPERS = (optax.MaskedState, optax.transforms.PartitionState)
_CHANGERS = {
    "LookaheadState",
    "MechanicState",
    "ScheduleFreeState",
    "SplitRealAndImaginaryState",
}  # wrappers that change updates or parameters, from optax and optax.contrib

__all__ = ["averaged_params", "tail_average", "with_tail_average"]


def tail_average(
    rule: AnyWindow | Rule, *, dtype: Any = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """A transformation that leaves updates alone and averages the updated parameters.

    It must come last in its chain, since it cannot see what later transformations change.
    `with_tail_average` puts it last, and `averaged_params` raises if it is elsewhere.

    Args:
        rule: As for `tailavg.jax.tail_average`.
        dtype: The dtype of the accumulators.

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
    average = tree_average(rule, dtype=dtype)

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
    tx: Any, rule: AnyWindow | Rule, *, dtype: Any = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that also averages the parameters it produces, for `averaged_params`.

    Args:
        tx: The complete optimizer, including learning rate and weight decay.
        rule: As for `tailavg.jax.tail_average`.
        dtype: The dtype of the accumulators.
    """
    return optax.chain(tx, tail_average(rule, dtype=dtype))


def averaged_params(opt_state: Any, params: Any = None) -> Any:
    """Find the averaged parameters anywhere in the state of an optimizer; may be jitted.

    Tails of different parameters, as under `optax.multi_transform`, are merged into one tree.

    Args:
        opt_state: The state of the optimizer, or the part of it that has the tail you want. The
            state of an `nnx.Optimizer` is accepted too.
        params: The parameters. They give the dtypes of the result, and the values where there is no
            tail, as under `optax.masked`. Without them, dtypes are those of the accumulators.

    Raises:
        ValueError: If the state has no tail, a misplaced one, or two of the same parameter.
    """
    if nnx := sys.modules.get("flax.nnx"):  # its optimizers keep arrays in variables
        as_pure = getattr(nnx, "as_pure", None) or nnx.pure  # its name before flax 0.12.7
        opt_state, params = as_pure((opt_state, params))
    states = _tails(opt_state)
    if not states:
        raise ValueError(
            "opt_state: expected a state of tail_average in it, got none; "
            "make the optimizer with with_tail_average(tx, rule)"
        )
    averaged: Any = optax.MaskedNode()
    for state in states:
        averaged = _merged(averaged, value(state))
    if params is not None:
        averaged = _merged(averaged, params, "params")
        return jax.tree.map(_like, averaged, params)
    if any(map(_masked, jax.tree.leaves(averaged, is_leaf=_masked))):
        raise ValueError(
            "params: expected the parameters, since only a part of them has a tail, got none; "
            "call averaged_params(opt_state, params)"
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
            if tails and not all(map(_only_tails, children[place + 1 :])):
                raise ValueError(
                    f"opt_state: expected tail_average last in its chain, got it in place "
                    f"{place + 1} of {len(found)}: what comes after it changes the updates, so it "
                    "would average parameters that never existed; use with_tail_average(tx, rule)"
                )
    if type(node).__name__ in _CHANGERS and any(found):
        raise ValueError(
            f"opt_state: expected tail_average around what has a {type(node).__name__}, got it "
            "inside, where it averages parameters that never existed; use "
            "with_tail_average(tx, rule) with all of it as tx"
        )
    return [state for tails in found for state in tails]


def _only_tails(node: Any) -> bool:
    """Whether this state is of nothing but tails, which leave updates alone."""
    if isinstance(node, TreeState):
        return True
    children, _ = _children(node)
    wrapped = type(node) in (tuple, dict) or isinstance(node, _WRAPPERS)
    return wrapped and bool(children) and all(map(_only_tails, children))


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
