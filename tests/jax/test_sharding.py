"""Arrays in JAX that lie on several devices."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tailavg import AnyTail, AnytimeWindow, Exponential
from tailavg.jax import tail_average, value
from tests.support.cases import samples
from tests.support.jax_trees import assert_same, run, two_rules, window_for
from tests.support.model import averages, weight_matrix

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


BLOCKS, DECAY = AnytimeWindow(0.3), Exponential(10)


# each pair of a rule, a type of axes, and whether functions are jitted
cases = pytest.mark.parametrize(
    ("rule", "axis_type", "jitted"),
    [
        (BLOCKS, AxisType.Auto, True),
        (BLOCKS, AxisType.Explicit, False),
        (DECAY, AxisType.Explicit, True),
        (AnyTail(6, 0.3), AxisType.Auto, False),
    ],
    ids=str,
)


@cases
def test_accumulators_and_values_are_sharded_as_their_leaves(rule, axis_type, jitted):
    """Means of the column are its own; those of the others lie in a bundle."""
    average, window = tail_average(rule, bundle=8), window_for(rule)
    read = partial(average.value, window=window)
    init, update, read = (jax.jit(f) if jitted else f for f in (average.init, average.update, read))
    tree = sharded(axis_type, plain_tree())
    state = init(tree)
    for i in range(1, 13):
        for leaves, stacked in ((state.sums, 0), (state.means, 1), (read(state), 0)):
            assert_sharded_alike(leaves, tree, stacked)
        state = update(state, sharded(axis_type, plain_tree(i)))
    assert state.means["column"].shape == (rule.accumulators, 3, 8)
    assert state.bundles["float32"].means.shape == (rule.accumulators, 8 + 3)
    assert_sharded_alike(read(state, tree), tree)
    values = jax.device_get(read(state))
    weights = average.weights(state, window)
    history = [plain_tree(i) for i in range(1, 13)]
    for name in ("row", "column", "whole"):
        expected = averages([weights], np.array([tree[name] for tree in history]))[0]
        np.testing.assert_allclose(values[name], expected, rtol=1e-6, err_msg=name)
    assert values["n"].tolist() == history[-1]["n"].tolist()


@pytest.mark.parametrize(
    ("rule", "axis_type"), [(BLOCKS, AxisType.Explicit), (DECAY, AxisType.Auto)], ids=str
)
def test_a_sharded_update_and_value_do_not_communicate(rule, axis_type):
    average = tail_average(rule, bundle=0)
    tree = sharded(axis_type, plain_tree())
    state = average.update(average.init(tree), tree)
    update = jax.jit(average.update, donate_argnums=0).lower(state, tree).compile()
    for program in (update, jax.jit(value).lower(state, tree).compile()):
        assert "num_partitions=4" in program.as_text()
        assert not re.search(COLLECTIVES, program.as_text())


@two_rules
def test_a_sharded_average_is_the_unsharded_one_to_the_bit(rule):
    average = tail_average(rule, bundle=8)
    update, read = jax.jit(average.update), jax.jit(value)
    place = partial(sharded, AxisType.Auto)
    state, unsharded = average.init(place(plain_tree())), average.init(plain_tree())
    for i in range(1, 13):
        state = update(state, place(plain_tree(i)))
        unsharded = update(unsharded, plain_tree(i))
    assert_same(jax.device_get(read(state)), jax.device_get(read(unsharded)))


@cases
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
def test_a_state_is_sharded_inside_a_mesh_that_is_set_and_in_shard_map(rule):
    average = tail_average(rule, bundle=8)
    xs = samples(40, (8,)).astype(np.float32)
    plain = {"bundled": xs, "alone": np.c_[xs, xs]}
    weights = weight_matrix(rule, 40)[-1:]
    expected = {name: averages(weights, leaf)[0] for name, leaf in plain.items()}
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        trees = jax.device_put(plain, NamedSharding(mesh, PartitionSpec(None, "x")))
        state, _ = run(average, trees)
        assert {leaf.sharding.spec for leaf in state.sums.values()} == {PartitionSpec("x")}
        assert state.means["alone"].sharding.spec == PartitionSpec(None, "x")
        for name, leaf in value(state).items():
            np.testing.assert_allclose(leaf, expected[name], rtol=3e-6, err_msg=name)
    mapped = jax.shard_map(
        lambda trees: value(run(average, trees)[0]),
        mesh=mesh,
        in_specs=PartitionSpec(None, "x"),
        out_specs=PartitionSpec("x"),
    )
    for name, leaf in jax.jit(mapped)(trees).items():
        np.testing.assert_allclose(leaf, expected[name], rtol=3e-6, err_msg=name)


def test_a_loaded_state_goes_on_where_its_leaves_are():
    """Sharded over four devices, or on another one than the first; before any update, or after."""
    average = tail_average(BLOCKS)
    first = average.init(jnp.zeros(8))
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    for saved in (first, average.update(first, jnp.ones(8))):
        for place in (NamedSharding(mesh, PartitionSpec("x")), jax.devices()[2]):
            tree = jax.device_put(jnp.full(8, 3.0), place)
            state = average.from_state_dict(average.state_dict(saved), tree)
            state = average.update(state, tree)
            assert state.count == saved.updates + 1
            assert state.sums.sharding.is_equivalent_to(tree.sharding, 1)
            assert value(state).sharding.is_equivalent_to(tree.sharding, 1)
