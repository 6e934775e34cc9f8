"""What the tests of `tailavg.jax` share: rules, and ways to run an average over trees."""

from collections import namedtuple
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import lax

from tailavg import AnyTail, AnytimeWindow, Exponential
from tests.support import cases
from tests.support.cases import of_rules
from tests.support.effort import some

RULES = [
    rule
    for rule in some(cases.RULES, cases.EVERY_RULE)
    if isinstance(rule, AnytimeWindow | Exponential)
]
TWO = [AnytimeWindow(0.3), Exponential(10)]
Pair = namedtuple("Pair", "first second")
every_rule = of_rules(RULES)
two_rules = of_rules(TWO)
rules_and_tails = of_rules([*TWO, AnyTail(6, 0.3)])


def window_for(rule):
    """What to read an average of this rule with."""
    return 0.5 if isinstance(rule, AnyTail) else None


def two_leaves(xs, bundle=None):
    """The samples in a leaf that a bundle of its size takes, and repeated in a larger one."""
    bundle = xs.shape[-1] if bundle is None else bundle
    return {"bundled": xs, "alone": xs[..., np.arange(bundle + 1) % xs.shape[-1]]}


def row(trees, i):
    return jax.tree.map(lambda x: x[i], trees)


def run(average, trees, state=None):
    """Update with each of the stacked trees: the last state, and all values, clocks and sizes."""
    trees = jax.tree.map(jnp.asarray, trees)
    return scanned(average, average.init(row(trees, 0)) if state is None else state, trees)


@partial(jax.jit, static_argnums=0)
def scanned(average, state, trees):
    """Compiled once for all tests that have the same average and shapes."""

    def step(state, tree):
        state = average.update(state, tree)
        return state, (average.value(state), state.clock, average.size(state))

    return lax.scan(step, state, trees)


def assert_same(got, expected):
    """Trees that are equal to the bit, and of the same dtypes."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


def saved_by_orbax(state, path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", state)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        return checkpointer.restore(path / "state", abstract)
