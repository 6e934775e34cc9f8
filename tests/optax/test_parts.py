"""Tails of parts of the parameters."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tailavg import Exponential
from tailavg.optax import averaged_params, tail_average, with_tail_average
from tests.support.optax_training import (
    KERNEL,
    LABELS,
    REST,
    STEPS,
    assert_close,
    assert_equal,
    counts,
    every,
    expected,
    start,
    train,
)


def test_a_masked_tail_needs_the_parameters_for_the_rest():
    tx = optax.chain(optax.sgd(0.2), optax.masked(tail_average(4), KERNEL))
    params, state, history = train(tx)
    wanted = jax.tree.map(np.asarray, params)
    wanted["dense"]["kernel"] = expected(history, 4)["dense"]["kernel"]
    assert_close(averaged_params(state, params), wanted)
    np.testing.assert_array_equal(averaged_params(state, params)["scale"], params["scale"])
    with pytest.raises(ValueError, match="params: only some of the parameters have a tail"):
        averaged_params(state)


@pytest.mark.parametrize("mask", [lambda _: KERNEL, {"dense": True, "scale": False}])
def test_a_mask_may_be_a_function_or_a_prefix(mask):
    params, state, history = train(optax.masked(with_tail_average(optax.sgd(0.1), 4), mask))
    got = averaged_params(state, params)
    wanted = expected(history, 4)
    assert_close(got["dense"]["kernel"], wanted["dense"]["kernel"])
    np.testing.assert_array_equal(got["scale"], params["scale"])


def test_a_tail_of_nothing_gives_the_parameters():
    state = optax.masked(tail_average(4), False).init(start())
    assert_equal(averaged_params(state, start()), start())
    with pytest.raises(ValueError, match="params: only some of the parameters have a tail"):
        averaged_params(state)


def test_two_tails_of_different_parameters_come_in_one_tree():
    tx = optax.multi_transform(
        {
            "matrix": with_tail_average(optax.sgd(0.2), 4),
            "vector": with_tail_average(optax.sgd(0.1), Exponential(0.5)),
        },
        LABELS,
    )
    params, state, history = train(tx)
    wanted = expected(history, Exponential(0.5))
    wanted["dense"]["kernel"] = expected(history, 4)["dense"]["kernel"]
    assert counts(state) == [STEPS, STEPS]
    assert_close(averaged_params(state), wanted)
    assert_close(averaged_params(state, params), wanted)


def test_a_tail_in_one_branch_needs_the_parameters_of_the_other():
    tx = optax.multi_transform(
        {"matrix": with_tail_average(optax.sgd(0.2), 4), "vector": optax.sgd(0.1)}, LABELS
    )
    params, state, history = train(tx)
    got = averaged_params(state, params)
    assert_close(got["dense"]["kernel"], expected(history, 4)["dense"]["kernel"])
    np.testing.assert_array_equal(got["dense"]["bias"], params["dense"]["bias"])
    with pytest.raises(ValueError, match="params: only some of the parameters have a tail"):
        averaged_params(state)


def test_a_tail_after_all_branches_is_of_all_parameters():
    branches = optax.multi_transform({"matrix": optax.sgd(0.2), "vector": optax.sgd(0.1)}, LABELS)
    _, state, history = train(with_tail_average(branches, 0.3))
    assert_close(averaged_params(state), expected(history, 0.3))


def test_frozen_parameters_need_no_tail():
    tx = optax.selective_transform(with_tail_average(optax.sgd(0.2), 4), freeze_mask=REST)
    params, state, history = train(tx)
    assert_close(averaged_params(state, params), expected(history, 4))


def test_branches_may_be_guarded_and_accumulated():
    guarded = optax.apply_if_finite(with_tail_average(optax.sgd(0.2), 0.5), 5)
    slow = optax.MultiSteps(with_tail_average(optax.sgd(0.1), 3), 2).gradient_transformation()
    tx = optax.multi_transform({"matrix": guarded, "vector": slow}, LABELS)
    _, state, history = train(tx)
    assert sorted(counts(state)) == [STEPS // 2, STEPS]
    wanted = expected(every(history, 2), 3)
    wanted["dense"]["kernel"] = expected(history, 0.5)["dense"]["kernel"]
    assert_close(averaged_params(state), wanted)


def test_masked_tails_in_one_chain_come_in_one_tree():
    tx = optax.chain(
        optax.sgd(0.2),
        optax.masked(tail_average(4), KERNEL),
        optax.masked(tail_average(0.5), REST),
    )
    _, state, history = train(tx)
    wanted = expected(history, 0.5)
    wanted["dense"]["kernel"] = expected(history, 4)["dense"]["kernel"]
    assert_close(averaged_params(state), wanted)


NOTHING = {"none": None, "an empty dictionary": {}, "an empty tuple": ()}


@pytest.mark.parametrize("nothing", NOTHING.values(), ids=NOTHING)
def test_tails_are_merged_around_what_has_no_leaves(nothing):
    params = {"a": jnp.array([1.0]), "b": jnp.array([2.0]), "nothing": nothing}
    tx = optax.multi_transform(
        {name: with_tail_average(optax.sgd(0.1), 2) for name in "ab"},
        {"a": "a", "b": "b", "nothing": nothing},
    )
    assert_equal(averaged_params(tx.init(params)), params)
    assert_equal(averaged_params(tx.init(params), params), params)


def test_tails_of_parts_of_a_module_come_in_one_module():
    model = equinox.nn.MLP(2, 2, 3, 1, use_bias=False, key=jax.random.key(0))
    params = equinox.filter(model, equinox.is_inexact_array)
    labels = jax.tree.map(lambda x: "ab"[x.ndim - 1], params)
    tx = optax.multi_transform(
        {name: with_tail_average(optax.sgd(0.1), 2) for name in "ab"}, lambda _: labels
    )
    assert_equal(averaged_params(tx.init(params), params), params)
