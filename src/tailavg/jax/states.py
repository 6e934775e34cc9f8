"""`TreeState`: the state of an average of a pytree, with the sum and the means of each leaf.

The other modules of `tailavg.jax` share its helpers; read this file first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tailavg.core.readings import Reading
from tailavg.jax.clock import TracedBlocks, TracedDecay

__all__ = [
    "Bundle",
    "Like",
    "Tree",
    "TreeReading",
    "TreeState",
    "aligned",
    "is_averaged",
    "name_of",
    "overflowed",
    "split_leaves",
]

Tree: TypeAlias = Any
Like = TypeVar("Like")  # a tree of the same kind
TreeReading = Reading | Array
"""A window, `Freshest` or `Decay` to read an `AnyTail` with; an array may be traced."""


class Bundle(NamedTuple):
    """The means of the small leaves of one dtype, concatenated."""

    means: Array
    """A row for each block, with the means of all leaves."""
    errors: Array
    """The rounding error of the last fold into the mean of the open block."""


class TreeState(NamedTuple):
    """The state of a tail average of a pytree."""

    updates: Array
    """The number of updates so far, t."""
    size: Array
    """The size of the window, k_t; for an `AnyTail`, the size of its shortest window."""
    rule: Array
    """A checksum of the rule. After an update with another rule, the value is NaN."""
    clock: TracedBlocks | TracedDecay
    """Which samples are in the sum, and which in each mean."""
    sums: Tree
    """The sum of the samples that are in no mean yet; the last value of leaves not averaged."""
    means: Tree
    """The means of blocks, stacked along a first axis; None for leaves that are not averaged and
    for leaves in a bundle."""
    bundles: dict[str, Bundle]
    """The means of small leaves, by dtype."""

    @property
    def count(self) -> Array:  # type: ignore[override]  # hides tuple.count
        """The number of updates so far, t.

        The field is called `updates`, since optax looks up `"count"` in optimizer states by name.
        """
        return self.updates


def split_leaves(
    sums: Sequence[Any], means: Sequence[Any]
) -> tuple[list[int], dict[str, list[int]]]:
    """Return the indices of leaves with their own means, and of bundled leaves by dtype."""
    large = [i for i, mean in enumerate(means) if mean is not None]
    small: dict[str, list[int]] = {}
    for i, (total, mean) in enumerate(zip(sums, means, strict=True)):
        if mean is None and is_averaged(total):
            small.setdefault(total.dtype.name, []).append(i)
    return large, small


def is_averaged(leaf: Any) -> bool:
    """Return whether a leaf is averaged; other leaves are passed through."""
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def aligned(
    tree: Tree, state: TreeState, what: str = "tree"
) -> tuple[list[Array], list[Any], list[Any], Any]:
    """Return the leaves of the tree, the sums and the means, and their common structure.

    Raise if the tree does not match the state.
    """
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
        if not is_averaged(old):
            fits = new.dtype == old.dtype
        elif what == "like":
            fits = is_averaged(new) and jnp.iscomplexobj(new) == jnp.iscomplexobj(old)
        else:
            is_key = jnp.issubdtype(new.dtype, jax.dtypes.prng_key)
            fits = not is_key and (jnp.iscomplexobj(old) or not jnp.iscomplexobj(new))
        if not fits:
            raise TypeError(
                f"{where}: expected a dtype that fits {old.dtype} of the state, got {new.dtype}"
            )
    return leaves, [old for _, old in sums], structure.flatten_up_to(state.means), structure


def name_of(path: Any) -> str:
    """Return the name of a leaf: its path, such as "layer.weight"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def overflowed(updates: Array) -> Array:
    """Return whether the count is at the largest integer; it then stays, and the value is NaN."""
    return updates == np.iinfo(updates.dtype).max
