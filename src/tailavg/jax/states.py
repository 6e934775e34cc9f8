"""What an average of a pytree holds: `TreeState`, and how its parts belong to the leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tailavg.jax.clock import TracedBlocks, TracedDecay
from tailavg.jax.folds import Bundle

__all__ = ["Like", "Tree", "TreeState", "aligned", "averaged", "beyond", "name_of", "parted"]

Tree: TypeAlias = Any
Like = TypeVar("Like")  # a tree of the same kind


class TreeState(NamedTuple):
    """A tail average of a pytree, after some step."""

    updates: Array
    """The number of updates so far, t."""
    size: Array
    """The size of the window, k_t; of an `AnyTail`, that of the shortest it can be read with."""
    rule: Array
    """A checksum of the rule. Another rule adds nothing to the state."""
    clock: TracedBlocks | TracedDecay
    """Which samples are where."""
    sums: Tree
    """The sum of the samples in no mean yet; leaves that are not averaged, as last seen."""
    means: Tree
    """The means of blocks, stacked along a first axis; None for leaves that are not averaged, and
    for those in a bundle."""
    bundles: dict[str, Bundle]
    """The means of small leaves, by dtype."""


def parted(sums: Sequence[Any], means: Sequence[Any]) -> tuple[list[int], dict[str, list[int]]]:
    """Which leaves have means of their own, and which are in the bundle of each dtype."""
    large = [i for i, mean in enumerate(means) if mean is not None]
    small: dict[str, list[int]] = {}
    for i, (total, mean) in enumerate(zip(sums, means, strict=True)):
        if mean is None and averaged(total):
            small.setdefault(total.dtype.name, []).append(i)
    return large, small


def averaged(leaf: Any) -> bool:
    """Whether a leaf is averaged, not passed through."""
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def aligned(
    tree: Tree, state: TreeState, what: str = "tree"
) -> tuple[list[Array], list[Any], list[Any], Any]:
    """The leaves of the tree, of the sums and of the means, and their common structure."""
    structure: Any = jax.tree.structure(state.sums)
    got: Any = jax.tree.structure(tree)
    if structure != got:
        raise ValueError(f"{what}: expected the structure given to init, {structure}, got {got}")
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    sums = jax.tree.leaves_with_path(state.sums)
    for new, (path, old) in zip(leaves, sums, strict=True):
        where = f"{what}: {name_of(path)}" if path else what
        if new.shape != old.shape:
            raise ValueError(f"{where}: expected shape {old.shape}, got {new.shape}")
        if not averaged(old):
            fits = new.dtype == old.dtype
        elif what == "like":
            fits = averaged(new) and jnp.iscomplexobj(new) == jnp.iscomplexobj(old)
        else:
            key = jnp.issubdtype(new.dtype, jax.dtypes.prng_key)
            fits = not key and (jnp.iscomplexobj(old) or not jnp.iscomplexobj(new))
        if not fits:
            raise TypeError(
                f"{where}: expected the kind of {old.dtype}, as given to init, got {new.dtype}"
            )
    return leaves, [old for _, old in sums], structure.flatten_up_to(state.means), structure


def name_of(path: Any) -> str:
    """The name of a leaf: its path, such as "layer.weight"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def beyond(updates: Array) -> Array:
    """Whether there were more updates than the count can tell: it stays, and the value is NaN."""
    return updates == np.iinfo(updates.dtype).max
