"""Tail averages as an optax transformation, against parameters collected by hand."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tailavg import AnytimeWindow, Exponential, TailAverage
from tailavg.optax import averaged_params, tail_average, with_tail_average
from tests.support.effort import EVERYTHING
from tests.support.model import averages, weight_matrix
from tests.support.optax_training import (
    CLIPPED,
    RULES,
    SMALL,
    STEPS,
    TARGETS,
    assert_close,
    assert_equal,
    counts,
    expected,
    gradient_step,
    gradients,
    start,
    tails,
    train,
)

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1, weight_decay=0.01),
    "clipped, with a schedule": CLIPPED,
    "masked decay": optax.chain(
        optax.sgd(0.1), optax.masked(optax.add_decayed_weights(-0.1), {"scale": True})
    ),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "every third": optax.chain(optax.sgd(0.1), optax.apply_every(3)),
    "schedule-free": optax.contrib.schedule_free_sgd(0.1),
    "mechanic": optax.contrib.mechanize(optax.sgd(0.1)),
    "flattened": optax.flatten(optax.adam(0.1)),
}


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_tail_averages_the_parameters_after_each_update(rule):
    tx = optax.chain(optax.adam(0.1), tail_average(rule))

    def one(carry, target):
        carry = gradient_step(tx, carry, target)
        return carry, (carry[0], averaged_params(carry[1]))

    params = {"w": jnp.arange(1.0, 4.0)}
    carry = (params, tx.init(params))
    _, (history, got) = jax.lax.scan(one, carry, jnp.asarray(TARGETS, jnp.float32))
    dense = AnytimeWindow(rule) if isinstance(rule, int | float) else rule
    matrix = weight_matrix(dense, len(TARGETS))
    assert_close(got, jax.tree.map(lambda xs: averages(matrix, np.asarray(xs)), history))


# those that differ only in the updates that reach the tail
ALIKE = [] if EVERYTHING else ["adam", "adamw", "masked decay", "every third"]


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ALIKE])
def test_any_optimizer_can_have_a_tail(name):
    tx = OPTIMIZERS[name]
    params, state, history = train(with_tail_average(tx, 0.3), SMALL)
    assert counts(state) == [STEPS]
    assert_close(averaged_params(state), expected(history, 0.3))
    assert_close(averaged_params(state, params), expected(history, 0.3))


@pytest.mark.parametrize("name", ["adamw"])
def test_a_tail_leaves_the_updates_alone(name):
    tx = OPTIMIZERS[name]
    plain = optax.with_extra_args_support(tx)
    with_tail = with_tail_average(tx, 3)
    params = SMALL
    state, other = plain.init(params), with_tail.init(params)
    for target in TARGETS[:4]:
        updates, state = plain.update(gradients(params, target), state, params)
        others, other = with_tail.update(gradients(params, target), other, params)
        assert_equal(others, updates)
        assert_equal(other[0], state)
        params = optax.apply_updates(params, updates)


EXTRA = {
    "plateau": optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, cooldown=0, factor=0.5)
    ),
    "momo": optax.contrib.momo(0.1),
    "polyak": optax.polyak_sgd(0.1),
}


@pytest.mark.parametrize("tx", EXTRA.values(), ids=EXTRA)
def test_extra_arguments_go_through(tx):
    params, state, history = train(with_tail_average(tx, 5), SMALL, value=2.0)
    assert_close(averaged_params(state, params), expected(history, 5))


def test_a_tail_takes_any_extra_argument():
    tx, params = tail_average(2), start()
    updates, _ = tx.update(gradients(params, 1.0), tx.init(params), params, value=1.0, any="thing")
    assert_equal(updates, gradients(params, 1.0))


def test_an_exponential_is_an_ema_by_hand():
    rule = Exponential(8)
    _, state, history = train(with_tail_average(optax.sgd(0.2), rule), SMALL)
    ema = None
    for t in range(1, STEPS + 1):
        params = jax.tree.map(lambda xs, t=t: xs[t - 1].astype(np.float64), history)
        ema = params if t == 1 else optax.incremental_update(params, ema, 1 - rule.decay(t))
    assert_close(averaged_params(state), ema)


def test_with_x64_the_average_is_that_of_numpy_to_the_last_digits():
    with jax.enable_x64(True):
        params = {"scale": jnp.array(4.0, jnp.float64)}
        tx = with_tail_average(optax.adam(0.1), 0.25, dtype=jnp.float64)
        _, state, history = train(tx, params, TARGETS)
        got = jax.tree.map(np.asarray, averaged_params(state))
    assert got["scale"].dtype == history["scale"].dtype == np.float64
    assert_close(got, expected(history, 0.25), 1e-12)


def test_before_the_first_update_the_average_is_the_parameters():
    state = with_tail_average(optax.adam(0.1), 0.25).init(start())
    assert_equal(averaged_params(state), start())


# --- dtypes and other leaves ---


def test_bfloat16_parameters_are_averaged_as_they_are_rounded():
    params = jnp.ones((), jnp.bfloat16)
    tx = with_tail_average(optax.identity(), 1.0)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jnp.asarray(1e-3, jnp.bfloat16), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(5):
        params, state = step(params, state)
    assert params == 1.0  # the update is too small to change it
    assert averaged_params(state) == 1.0


def test_bfloat16_parameters_are_averaged_in_float32():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), start())
    params, state, history = train(with_tail_average(optax.sgd(0.1), 0.5), params, TARGETS)
    [tail] = tails(state)
    arrays = jax.tree.leaves((tail.sums, tail.means, tail.bundles))
    assert len(arrays) > 3
    assert {x.dtype for x in arrays} == {jnp.dtype(jnp.float32)}
    wanted = expected(history, 0.5)
    assert_close(averaged_params(state), wanted)
    like = averaged_params(state, params)
    assert {x.dtype for x in jax.tree.leaves(like)} == {jnp.dtype(jnp.bfloat16)}
    assert_equal(like, jax.tree.map(lambda x: x.astype(jnp.bfloat16), averaged_params(state)))


def test_uncovered_parameters_keep_their_dtype():
    params = {"w": jnp.ones(2), "half": jnp.ones(2, jnp.float16), "n": jnp.array(3)}
    tx = optax.masked(tail_average(4), {"w": True, "half": False, "n": False})
    got = averaged_params(tx.init(params), params)
    assert [x.dtype for x in got.values()] == [params[name].dtype for name in got]
    assert_equal(got, params)


def test_integers_are_carried_as_they_are_after_the_update():
    params = {"w": jnp.array([1.0, 2.0]), "steps": jnp.array(7), "seen": jnp.array([True])}
    tx = with_tail_average(optax.identity(), 4)
    state = tx.init(params)
    average = TailAverage(4)
    for _ in range(5):
        updates = {"w": jnp.array([0.5, 1.0]), "steps": jnp.array(2), "seen": jnp.array([False])}
        updates, state = tx.update(updates, state, params)
        params = optax.apply_updates(params, updates)
        average.update(np.asarray(params["w"], np.float64))
    for got in (averaged_params(state), averaged_params(state, params)):
        assert got["steps"].dtype == params["steps"].dtype
        assert int(got["steps"]) == int(params["steps"]) == 17
        assert got["seen"].dtype == bool
        assert got["seen"].item()
        np.testing.assert_allclose(got["w"], average.value(), rtol=1e-6)


def test_complex_parameters_are_averaged():
    params = {"z": jnp.array([1 + 2j, 3 - 1j])}
    params, state, history = train(with_tail_average(optax.sgd(0.1), 4), params)
    assert averaged_params(state)["z"].dtype == jnp.complex64
    average = TailAverage(4)
    average.update_many(history["z"].astype(np.complex128))
    np.testing.assert_allclose(averaged_params(state, params)["z"], average.value(), rtol=1e-5)


def test_none_passes():
    params = {"w": jnp.array([1.0, 2.0]), "bias": None}
    params, state, history = train(with_tail_average(optax.adam(0.1), 4), params)
    assert averaged_params(state)["bias"] is None
    assert_close(averaged_params(state, params), expected(history, 4))


CONTAINERS = {
    "array": jnp.ones(2),
    "nothing": {},
    "tuple with a module": (
        jnp.ones(2),
        (equinox.filter(equinox.nn.Linear(2, 3, key=jax.random.key(0)), equinox.is_array), {}),
    ),
}


@pytest.mark.parametrize("params", CONTAINERS.values(), ids=CONTAINERS)
def test_parameters_may_be_any_tree(params):
    last, state, history = train(with_tail_average(optax.sgd(0.1), 4), params)
    assert_close(averaged_params(state, last), expected(history, 4))


@pytest.mark.parametrize(
    "tail", [tail_average(4), optax.masked(tail_average(4), {"w": True, "b": 0})]
)
def test_parameters_may_be_python_numbers(tail):
    params = {"w": 1.0, "b": 2.0}
    assert_equal(averaged_params(tail.init(params), params), jax.tree.map(jnp.asarray, params))


def test_keys_are_carried():
    params = {"w": jnp.ones(2), "key": jax.random.key(3)}
    state = tail_average(4).init(params)
    for got in (averaged_params(state), averaged_params(state, params)):
        assert got["key"].dtype == params["key"].dtype
        np.testing.assert_array_equal(
            jax.random.key_data(got["key"]), jax.random.key_data(params["key"])
        )
