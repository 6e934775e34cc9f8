"""Tails in steps that are jitted, donated and batched."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from tailavg import AnytimeWindow, Exponential
from tailavg.optax import averaged_params, tail_average, with_tail_average
from tests.support.optax_training import (
    KERNEL,
    LABELS,
    RULES,
    SMALL,
    TARGETS,
    assert_close,
    assert_equal,
    counts,
    expected,
    gradient_step,
    start,
    train,
)


def test_a_donated_step_trains_and_averages():
    """The kernel has means of its own, the rest is in a bundle."""
    tx = with_tail_average(optax.sgd(0.1, momentum=0.9), 0.3, bundle=2)
    step = jax.jit(lambda params, state, target: gradient_step(tx, (params, state), target))
    donated = jax.jit(step, donate_argnums=(0, 1))
    params, others = start(), start()
    state, other = tx.init(params), tx.init(others)
    read = jax.jit(averaged_params)
    history = []
    for target in TARGETS[:9]:
        params, state = step(params, state, target)
        old = others, other
        others, other = donated(others, other, target)
        history.append(jax.tree.map(np.array, others))
        arrays = old[0], old[1][0], old[1][1].sums, old[1][1].means, old[1][1].bundles
        assert all(x.is_deleted() for x in jax.tree.leaves(arrays))
        assert_equal(others, params)
        assert_equal(read(other, others), read(state, params))
    wanted = expected(jax.tree.map(lambda *xs: np.array(xs), *history), 0.3)
    assert_close(read(other), wanted)


def test_a_new_state_may_be_donated_with_its_parameters():
    params = start()
    tx = with_tail_average(optax.sgd(0.1), 4)
    step = jax.jit(lambda *carry: gradient_step(tx, carry, 1.5), donate_argnums=(0, 1))
    state = tx.init(params)
    kept = averaged_params(state, params)
    params, state = step(params, state)
    assert_equal(kept, start())
    assert counts(state) == [1]


def test_an_average_outlives_the_parameters_it_was_filled_up_with():
    params = start()
    tx = optax.chain(optax.sgd(0.1), optax.masked(tail_average(4), KERNEL))
    step = jax.jit(lambda *carry: gradient_step(tx, carry, 1.5), donate_argnums=(0, 1))
    state = tx.init(params)
    kept = averaged_params(state, params)
    step(params, state)
    assert_equal(kept, start())


def test_the_average_can_be_read_under_jit():
    tx = optax.multi_transform(
        {"matrix": with_tail_average(optax.adam(0.1), 4), "vector": optax.sgd(0.1)}, LABELS
    )
    params, state, _ = train(tx)
    assert_equal(jax.jit(averaged_params)(state, params), averaged_params(state, params))


def test_steps_one_by_one_are_those_of_a_scan():
    tx = with_tail_average(optax.sgd(0.1), 0.3)
    carry = SMALL, tx.init(SMALL)
    for target in TARGETS[:7]:
        carry = gradient_step(tx, carry, target)
    _, state, _ = train(tx, SMALL, TARGETS[:7])
    assert counts(carry[1]) == counts(state)
    assert_close(averaged_params(carry[1]), averaged_params(state))


def test_models_in_a_batch_are_averaged_each():
    tx = with_tail_average(optax.adam(0.1), 4)
    params = jax.tree.map(lambda x: jnp.stack([x, x + 1]), SMALL)
    state = jax.vmap(tx.init)(params)
    step = jax.jit(jax.vmap(partial(gradient_step, tx)))
    history = []
    for target in TARGETS[:9]:
        params, state = step((params, state), jnp.array([target, 3 * target]))
        history.append(jax.tree.map(np.asarray, params))
    got = jax.vmap(averaged_params)(state, params)
    history = jax.tree.map(lambda *xs: np.array(xs), *history)
    assert_close(got, expected(history, 4))


@pytest.mark.parametrize(
    ("options", "means", "bundles"),
    [
        ({}, [], [(5, 9), (9,)]),
        ({"bundle": 2}, [(5, 3, 2)], [(5, 3), (3,)]),
        ({"bundle": 0}, [(5, 2), (5, 3, 2), (5,)], []),
    ],
)
def test_shapes_are_known_without_arrays(options, means, bundles):
    tx = with_tail_average(optax.adam(0.1), AnytimeWindow(4, 5), **options)
    shapes = jax.eval_shape(tx.init, start())
    state = tx.init(start())
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    for shape, array in zip(*map(jax.tree.leaves, (shapes, state)), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
    assert [x.shape for x in jax.tree.leaves(shapes[1].means)] == means
    assert [x.shape for x in jax.tree.leaves(shapes[1].bundles)] == bundles
    read = jax.eval_shape(averaged_params, shapes)
    assert jax.tree.map(jnp.shape, read) == jax.tree.map(jnp.shape, start())


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_step_does_not_change_the_types_of_the_state(rule):
    tx = with_tail_average(optax.adam(0.1), rule)
    shapes = jax.eval_shape(tx.init, start())
    _, after = jax.eval_shape(lambda *carry: gradient_step(tx, carry, 1.0), start(), shapes)

    def described(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)

    assert described(after) == described(shapes)


@pytest.mark.parametrize("rule", [3, 0.25, Exponential(0.25)], ids=str)
def test_the_shapes_of_parameters_are_enough_to_begin(rule):
    """As for the optimizers of optax, whose own tests ask for it."""
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3, jnp.bfloat16), "step": jnp.zeros((), int)}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    tx = with_tail_average(optax.adam(1e-3), rule)
    state, zeros = tx.init(shapes), tx.init(jax.tree.map(jnp.zeros_like, params))
    jax.tree.map(np.testing.assert_array_equal, state, zeros)
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, zeros)
    tx.init(jax.ShapeDtypeStruct((), jnp.float32))


@pytest.mark.parametrize(("axis", "bundle"), [(AxisType.Explicit, 0), (AxisType.Auto, 100)])
def test_the_shapes_of_sharded_parameters_give_sharded_accumulators(axis, bundle):
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(axis,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    shape = jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=sharding)
    (total,) = jax.tree.leaves(tail_average(3, bundle=bundle).init(shape).sums)
    assert total.sharding.is_equivalent_to(sharding, 2)
