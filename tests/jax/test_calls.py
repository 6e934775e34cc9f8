"""Ways to call an average in JAX: jitted, scanned, batched, donated; and what is compiled."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tailavg import AnyTail, AnytimeWindow, Exponential, Fixed, Growing
from tailavg.jax import tail_average, value
from tests.support.cases import assert_close, of_rules, samples
from tests.support.jax_trees import assert_same, row, run, two_leaves, two_rules, window_for
from tests.support.model import averages, weight_matrix


def buffers(tree):
    """Where the arrays are in memory; those on several devices in several places."""
    arrays = [shard.data for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return {array.unsafe_buffer_pointer() for array in arrays if array.size}


# Ways to call it


def test_calls_one_by_one_jitted_and_scanned_give_the_same():
    xs = {"a": samples(40).astype(np.float32), "n": np.arange(40)}
    average = tail_average(0.3)
    expected, (values, _, _) = run(average, xs)
    jitted = jax.jit(average.update)
    eager = compiled = average.init(row(xs, 0))
    for i in range(40):
        eager = average.update(eager, row(xs, i))
        compiled = jitted(compiled, row(xs, i))
        for state in (eager, compiled):
            assert_close(average.value(state)["a"], values["a"][i], 1e-6)
    assert_same(eager, compiled)
    for got, wanted in zip(jax.tree.leaves(eager), jax.tree.leaves(expected), strict=True):
        assert_close(got, wanted, 1e-6)


@two_rules
def test_a_loop_in_the_program_counts_on(rule):
    average = tail_average(rule)
    body = lambda i, state: average.update(state, i.astype(jnp.float32))  # noqa: E731
    state = jax.jit(lambda state: lax.fori_loop(0, 50, body, state))(average.init(0.0))
    assert state.count == 50
    assert_close(value(state), weight_matrix(rule, 50)[-1] @ np.arange(50.0), 1e-5)


@two_rules
def test_a_state_keeps_its_types_so_that_nothing_compiles_twice(rule):
    average = tail_average(rule)
    tree = {"w": jnp.ones(3, jnp.bfloat16), "f": 1.0, "n": np.int32(2), "c": 1j, "b": True}
    update = jax.jit(average.update)
    state = average.init(tree)
    for _ in range(5):
        state = update(state, tree)
    assert update._cache_size() == 1
    typed = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert typed(state) == typed(average.init(tree))


@two_rules
def test_shapes_are_known_without_computing(rule):
    average = tail_average(rule)
    tree = {"w": jnp.ones((2, 3), jnp.float16), "n": jnp.arange(4), "k": jax.random.key(0)}
    typed = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    state = average.init(tree)
    abstract = jax.eval_shape(average.init, tree)
    assert typed(abstract) == typed(state)
    assert typed(jax.eval_shape(average.update, abstract, tree)) == typed(state)
    assert typed(jax.eval_shape(value, abstract)) == typed(average.value(state))
    assert typed(jax.eval_shape(value, abstract, tree)) == typed(tree)


@two_rules
def test_averages_of_a_batch_may_be_at_different_steps(rule):
    """Some turn or fold while others do not."""
    average = tail_average(rule, bundle=5)
    update = jax.jit(average.update)
    ages = [0, 1, 9, 230]
    streams = [two_leaves(samples(age + 40, seed=age).astype(np.float32)) for age in ages]
    states = []
    for age, trees in zip(ages, streams, strict=True):
        state = average.init(jax.tree.map(lambda xs: np.full_like(xs[0], math.nan), trees))
        for i in range(age):
            state = update(state, row(trees, i))
        states.append(state)
    states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)

    def step(states, trees):
        states = jax.vmap(average.update)(states, trees)
        return states, jax.vmap(value)(states)

    latest = [jax.tree.map(lambda xs: xs[-40:], trees) for trees in streams]
    batch = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *latest)
    states, values = jax.jit(lambda *a: lax.scan(step, *a))(states, batch)
    assert states.updates.tolist() == [age + 40 for age in ages]
    for i, (age, trees) in enumerate(zip(ages, streams, strict=True)):
        weights = weight_matrix(rule, age + 40)[age:]
        for name, xs in trees.items():
            expected = averages(weights, xs)
            np.testing.assert_allclose(values[name][:, i], expected, rtol=3e-6, err_msg=name)


def test_a_batch_of_averages_begins_as_one_average_each():
    average, trees = tail_average(10), samples(4, (3,)).astype(np.float32)
    states = jax.vmap(average.init)(trees)
    assert states.updates.tolist() == [0] * 4
    assert_same(jax.vmap(value)(states), jnp.asarray(trees))
    for i in range(4):
        assert_same(row(states, i), average.init(trees[i]))


@of_rules([AnytimeWindow(0.9), Exponential(0.3)])
def test_the_gradient_of_a_value_is_the_weights(rule):
    average = tail_average(rule, dtype=jnp.float64, bundle=1)

    def last(trees):
        state = average.init(row(trees, 0))
        state, _ = lax.scan(lambda s, tree: (average.update(s, tree), None), state, trees)
        return sum(leaf.sum() for leaf in value(state).values())

    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(last))(two_leaves(jnp.asarray(samples(280, (1,)))))
        for name, of_columns in gradient.items():
            for weights in of_columns.T:
                expected = weight_matrix(rule, 280)[-1]
                np.testing.assert_allclose(weights, expected, rtol=1e-9, atol=1e-14, err_msg=name)


def test_a_value_is_differentiable_in_a_later_tree():
    average = tail_average(0.3)
    state = average.update(average.init(jnp.zeros(5)), jnp.ones(5))
    loss = lambda tree: (average.value(average.update(state, tree)) ** 2).sum()  # noqa: E731
    gradient = jax.grad(loss)(jnp.ones(5))
    assert np.isfinite(gradient).all()
    assert (np.asarray(gradient) > 0).all()


def test_an_average_is_hashed_and_compared_by_what_it_does():
    assert tail_average(10) == tail_average(AnytimeWindow(10), dtype="float32")
    assert hash(tail_average(10)) == hash(tail_average(Fixed(10)))
    assert tail_average(10) != tail_average(10, dtype=jnp.float64)
    assert tail_average(0.5).rule == AnytimeWindow(Growing(0.5))
    assert tail_average(0.5).dtype == np.float32


# Donation


def new_tree():
    """A leaf that a bundle of 100 does not take, and others."""
    return {"w": jnp.ones((20, 30)), "s": jnp.array(1.0), "n": jnp.arange(7), "b": jnp.array(True)}


@two_rules
def test_a_donated_state_is_used_up_and_nothing_else(rule):
    average = tail_average(rule, bundle=100)
    tree = new_tree() | {"k": jax.random.key(3)}
    update = jax.jit(average.update, donate_argnums=0)
    state = average.init(tree)
    old = average.value(state)
    kept = jax.tree.map(jnp.copy, old)
    for _ in range(3):
        before, state = state, update(state, tree)
        assert before.sums["w"].is_deleted()
        assert all(x.is_deleted() for x in jax.tree.leaves((before.means, before.bundles)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((tree, old)))
    assert_same(old, kept)
    assert_same(average.value(state), kept)
    assert state.count == 3


@two_rules
@pytest.mark.parametrize("jitted", [False, True])
def test_no_array_is_shared_between_a_tree_a_state_and_a_value(rule, jitted):
    average = tail_average(rule, bundle=100)
    init, update = (jax.jit(f) if jitted else f for f in (average.init, average.update))
    read = jax.jit(value) if jitted else value
    tree = new_tree()
    first = init(tree)
    second = update(first, tree)
    values = [read(first), read(second), read(second, tree)]
    parts = [buffers(part) for part in (tree, first, second, *values)]
    assert len(set.union(*parts)) == sum(map(len, parts))
    assert len(buffers(first)) == len(jax.tree.leaves(first))


@two_rules
def test_a_state_outlives_the_tree_it_was_made_of(rule):
    average = tail_average(rule)
    tree = new_tree()
    state = average.init(tree)
    later = average.update(state, tree)
    jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(tree)
    assert tree["w"].is_deleted()
    assert tree["n"].is_deleted()
    for read in (average.value(state), average.value(later)):
        assert_same(read, new_tree())


@two_rules
def test_a_step_may_donate_parameters_and_state(rule):
    average = tail_average(rule)

    def step(tree, state):
        tree = {"w": tree["w"] + 1, "fixed": tree["fixed"], "n": tree["n"]}
        return tree, average.update(state, tree)

    step = jax.jit(step, donate_argnums=(0, 1))
    tree = {"w": jnp.zeros(3), "fixed": jnp.ones(2), "n": jnp.arange(2)}
    state = average.init(tree)
    for _ in range(30):
        tree, state = step(tree, state)
    got = average.value(state)
    assert_close(got["w"], np.full(3, weight_matrix(rule, 30)[-1] @ np.arange(1.0, 31)), 1e-5)
    assert_close(got["fixed"], [1, 1], 1e-6)
    assert got["n"].tolist() == [0, 1]


# The compiled program

LARGE = {
    "a": jax.ShapeDtypeStruct((1000, 1000), jnp.float32),
    "b": [jax.ShapeDtypeStruct((10**6,), jnp.float32)],
    "c": jax.ShapeDtypeStruct((10, 100, 1000), jnp.float32),
    "s": jax.ShapeDtypeStruct((), jnp.float32),
}
MIXED = {
    "half": jax.ShapeDtypeStruct((1000, 1000), jnp.bfloat16),
    "complex": jax.ShapeDtypeStruct((10**6,), jnp.complex64),
    "n": jax.ShapeDtypeStruct((10**6,), jnp.int32),
}
TINY = 10_000  # bytes; the smallest large leaf has two million


def temporary(function, *args):
    """The bytes that a compiled function needs besides its arguments, the first donated."""
    program = jax.jit(function, donate_argnums=0).lower(*args).compile()
    return program.memory_analysis().temp_size_in_bytes


large_rules = of_rules([AnytimeWindow(10, 5), Exponential(0.25), AnyTail(6)])


@large_rules
def test_an_update_and_a_value_need_no_temporary_of_the_size_of_the_parameters(rule):
    average, window = tail_average(rule), window_for(rule)
    tree = LARGE | MIXED
    state = jax.eval_shape(average.init, tree)
    assert temporary(average.update, state, tree) < TINY
    read = jax.jit(lambda *args: value(*args, window)).lower(state, tree).compile()
    assert read.memory_analysis().temp_size_in_bytes < TINY


@large_rules
def test_an_update_in_a_scan_needs_no_temporary_of_the_size_of_the_parameters(rule):
    average = tail_average(rule)
    state = jax.eval_shape(average.init, LARGE)
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), LARGE)

    def scan(state, trees):
        return lax.scan(lambda state, tree: (average.update(state, tree), None), state, trees)[0]

    assert temporary(scan, state, stacked) < TINY


@pytest.mark.parametrize("rule", ["10min", AnytimeWindow("10min"), Exponential("10min")], ids=str)
def test_a_window_of_time_is_refused(rule):
    with pytest.raises(TypeError, match=r"a window of time works in|a model have none"):
        tail_average(rule)
