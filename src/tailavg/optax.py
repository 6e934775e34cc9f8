"""Tail averages of parameters as an optax transformation, which goes last in a chain.

tx = with_tail_average(optax.adam(1e-3), 0.25)      # the last quarter of all updates
...
averaged_params(opt_state, params)                  # for evaluation
"""

from __future__ import annotations

from typing import Any, Literal

from tailavg.extras import needs

with needs("optax"):
    import jax
    import jax.numpy as jnp
    import optax

from tailavg.jax import TreeState, value
from tailavg.jax import tail_average as tree_average
from tailavg.rules import Rule
from tailavg.windows import AnyWindow

__all__ = ["averaged_params", "tail_average", "with_tail_average"]


def tail_average(
    rule: AnyWindow | Rule, *, dtype: Any = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """A transformation that leaves updates alone and averages the parameters as they will be.

    It must be the last one in its chain, since it sees no update that is changed after it:
    `with_tail_average` puts it there, and `averaged_params` raises if it is elsewhere.

    Arguments:
        rule: As for `tailavg.jax.tail_average`.
        dtype: That of the accumulators.

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
    """An optimizer that averages the parameters as it leaves them, for `averaged_params`.

    Arguments:
        tx: The whole optimizer, learning rate and weight decay included.
        rule: As for `tailavg.jax.tail_average`.
        dtype: That of the accumulators.
    """
    return optax.chain(tx, tail_average(rule, dtype=dtype))


def averaged_params(opt_state: Any, params: Any = None) -> Any:
    """The averaged parameters, found anywhere in the state of an optimizer; pure, as all of JAX.

    Tails of different parameters, as under `optax.multi_transform`, come in one tree.

    Arguments:
        opt_state: The state of the optimizer, or the part of it that has the wanted tail.
        params: The parameters: they have the dtypes that are wanted, and are taken where no
            tail is kept, as under `optax.masked`. If there are none, accumulators' dtypes.
    """
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
        averaged = _merged(averaged, params, both="first")
        return jax.tree.map(lambda new, old: new.astype(jnp.result_type(old)), averaged, params)
    if any(map(_masked, jax.tree.leaves(averaged, is_leaf=_masked))):
        raise ValueError(
            "params: expected the parameters, since the tail is of a part of them, got none; "
            "call averaged_params(opt_state, params)"
        )
    return averaged


def _tails(node: Any) -> list[TreeState]:
    """The states of tails in a state, each of which must come last in its chain."""
    if isinstance(node, TreeState):
        return [node]
    if jax.tree_util.all_leaves([node]):
        return []
    children, _ = _children(node)
    found = [_tails(child) for child in children]
    if type(node) is tuple:  # the state of a chain
        for place, tails in enumerate(found):
            after = [child for child in children[place + 1 :] if not isinstance(child, TreeState)]
            if tails and after:
                raise ValueError(
                    f"opt_state: expected tail_average last in its chain, got it in place "
                    f"{place + 1} of {len(found)}: what comes after it changes the updates, and "
                    "it would average parameters that never were; use with_tail_average(tx, rule)"
                )
    return [state for tails in found for state in tails]


def _merged(a: Any, b: Any, both: Literal["first", "raise"] = "raise") -> Any:
    """Two trees in one, where one of them, or both, are masked here and there."""
    if _masked(a) or _masked(b):
        return b if _masked(a) else a
    if not jax.tree_util.all_leaves([a]):
        children, structure = _children(a)
        others, _ = _children(b)
        pairs = zip(children, others, strict=True)
        return structure.unflatten([_merged(*pair, both) for pair in pairs])
    if both == "raise":
        raise ValueError(
            "opt_state: expected one tail of each parameter, got several; pass the part of it "
            "that has the one you want, such as opt_state[-1]"
        )
    return a


def _children(node: Any) -> tuple[list[Any], Any]:
    """What is right under a node of a pytree, and how to put it together again."""
    return jax.tree.flatten(node, is_leaf=lambda child: child is not node)


def _masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
