"""Arrays in JAX that lie on several devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tailavg.jax import tail_average, value
from tests.support.cases import assert_close, samples
from tests.support.jax_trees import (
    assert_same,
    row,
    rules_and_tails,
    run,
    saved_by_orbax,
    two_rules,
    window_for,
)
from tests.support.model import averages, weight_matrix


def updated(average, trees, state):
    """The state after each of the stacked trees, one call after another."""
    for i in range(len(jax.tree.leaves(trees)[0])):
        state = average.update(state, row(trees, i))
    return state


COLLECTIVES = r"all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter"
SPECS = {
    "row": PartitionSpec("x"),
    "column": PartitionSpec(None, "x"),
    "whole": PartitionSpec(),
    "n": PartitionSpec("x"),
}


def sharded(axis_type, tree):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,))
    return {name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in tree.items()}


def plain_tree(i=1):
    return {
        "row": i * jnp.arange(8.0),
        "column": i + jnp.arange(24.0).reshape(3, 8),
        "whole": jnp.full(3, i, jnp.float32),
        "n": i + jnp.arange(8),
    }


def assert_sharded_alike(got, tree, stacked=0):
    for name, leaf in got.items():
        if leaf is not None:
            spec = PartitionSpec(*[None] * stacked, *SPECS[name])
            wanted = NamedSharding(tree[name].sharding.mesh, spec)
            assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), name


axis_types = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)


@two_rules
@axis_types
@pytest.mark.parametrize("jitted", [False, True])
def test_accumulators_and_values_are_sharded_as_their_leaves(rule, axis_type, jitted):
    average = tail_average(rule, bundle=0)
    init, update, read = (
        jax.jit(f) if jitted else f for f in (average.init, average.update, average.value)
    )
    tree, plain = sharded(axis_type, plain_tree()), plain_tree()
    state, unsharded = init(tree), init(plain)
    for i in range(1, 13):
        for part, stacked in ((state.sums, 0), (state.means, 1), (read(state), 0)):
            assert_sharded_alike(part, tree, stacked)
        state = update(state, sharded(axis_type, plain_tree(i)))
        unsharded = update(unsharded, plain_tree(i))
    assert_sharded_alike(read(state, tree), tree)
    assert_same(jax.device_get(read(state)), jax.device_get(read(unsharded)))


@rules_and_tails
@axis_types
@pytest.mark.parametrize("jitted", [False, True])
def test_sums_and_values_of_bundled_leaves_are_sharded_as_their_leaves(rule, axis_type, jitted):
    average, window = tail_average(rule), window_for(rule)
    init = jax.jit(average.init) if jitted else average.init
    update = jax.jit(average.update, donate_argnums=0) if jitted else average.update
    tree = sharded(axis_type, plain_tree())
    state = init(tree)
    history = []
    for i in range(1, 30):
        assert_sharded_alike(state.sums, tree)
        state = update(state, sharded(axis_type, plain_tree(i)))
        history.append(plain_tree(i))
        got = average.value(state, window=window)
        assert_sharded_alike(got, tree)
    assert set(state.bundles) == {"float32"}
    assert state.bundles["float32"].means.shape == (rule.accumulators, 8 + 24 + 3)
    weights = average.weights(state, window)
    for name in ("row", "column", "whole"):
        assert_close(got[name], averages([weights], np.array([x[name] for x in history]))[0], 1e-6)
    assert got["n"].tolist() == history[-1]["n"].tolist()


@two_rules
@axis_types
def test_a_sharded_update_and_value_do_not_communicate(rule, axis_type):
    average = tail_average(rule, bundle=0)
    tree = sharded(axis_type, plain_tree())
    state = average.update(average.init(tree), tree)
    update = jax.jit(average.update, donate_argnums=0).lower(state, tree).compile()
    for program in (update, jax.jit(value).lower(state, tree).compile()):
        assert "num_partitions=4" in program.as_text()
        assert not re.search(COLLECTIVES, program.as_text())


@rules_and_tails
@axis_types
@pytest.mark.parametrize("jitted", [False, True])
def test_bundled_leaves_communicate_only_when_they_are_folded(rule, axis_type, jitted):
    average = tail_average(rule)
    tree = sharded(axis_type, plain_tree())
    state = (jax.jit(average.init) if jitted else average.init)(tree)
    state = average.update(state, tree)
    text = jax.jit(average.update, donate_argnums=0).lower(state, tree).compile().as_text()
    always = text[text.index("\nENTRY") :]
    assert re.search(COLLECTIVES, text)  # in a branch
    assert not re.search(COLLECTIVES, always)
    assert "conditional(" in always


@two_rules
@pytest.mark.parametrize("bundle", [0, 100])
def test_a_state_is_sharded_inside_a_mesh_that_is_set_and_in_shard_map(rule, bundle):
    average = tail_average(rule, bundle=bundle)
    xs = samples(40, (8,)).astype(np.float32)
    expected = averages(weight_matrix(rule, 40), xs)[-1]
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        trees = jax.device_put(xs, NamedSharding(mesh, PartitionSpec(None, "x")))
        state, _ = run(average, trees)
        assert state.sums.sharding.spec == PartitionSpec("x")
        if not bundle:
            assert state.means.sharding.spec == PartitionSpec(None, "x")
        assert_close(value(state), expected, 3e-6)
    mapped = jax.shard_map(
        lambda trees: value(run(average, trees)[0]),
        mesh=mesh,
        in_specs=PartitionSpec(None, "x"),
        out_specs=PartitionSpec("x"),
    )
    assert_close(jax.jit(mapped)(trees), expected, 3e-6)


@two_rules
@pytest.mark.parametrize("count", [0, 5])
def test_a_loaded_state_goes_on_where_its_leaves_are(rule, count):
    """Sharded over four devices, or on another one than the first."""
    average = tail_average(rule)
    saved = updated(average, jnp.ones((count, 8)), average.init(jnp.zeros(8))) if count else None
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    for place in (NamedSharding(mesh, PartitionSpec("x")), jax.devices()[2]):
        tree = jax.device_put(jnp.full(8, 3.0), place)
        state = average.init(tree)
        if count:
            state = average.from_state_dict(average.state_dict(saved), tree)
        state = average.update(state, tree)
        assert state.updates == count + 1
        assert state.sums.sharding.is_equivalent_to(tree.sharding, 1)
        assert value(state).sharding.is_equivalent_to(tree.sharding, 1)


@two_rules
def test_a_sharded_state_is_restored_sharded(rule, tmp_path):
    average = tail_average(rule, bundle=0)
    tree = sharded(AxisType.Auto, plain_tree())
    state = average.update(average.init(tree), tree)
    restored = saved_by_orbax(state, tmp_path)
    assert_sharded_alike(restored.sums, tree)
    assert_sharded_alike(restored.means, tree, stacked=1)
    assert_same(average.update(restored, tree), average.update(state, tree))
