"""How many updates a tail counts inside and outside of what accumulates, guards or skips."""

import jax
import numpy as np
import optax
import pytest

from tailavg.optax import averaged_params, tail_average, with_tail_average
from tests.support.optax_training import (
    SMALL,
    STEPS,
    TARGETS,
    assert_close,
    counts,
    every,
    expected,
    gradient_step,
    train,
)


def test_a_tail_after_gradient_accumulation_counts_every_small_step():
    tx = with_tail_average(optax.MultiSteps(optax.adam(0.1), 3), 0.3)
    params, state, history = train(tx, SMALL)
    assert counts(state) == [STEPS]
    for later in (3, 4):  # small steps leave the parameters as they are
        np.testing.assert_array_equal(history["scale"][later::3], history["scale"][2:-2:3])
    assert_close(averaged_params(state, params), expected(history, 0.3))


def test_a_tail_inside_gradient_accumulation_counts_updates_only():
    tx = optax.MultiSteps(with_tail_average(optax.adam(0.1), 0.3), 3)
    params, state, history = train(tx, SMALL)
    assert counts(state) == [STEPS // 3] == [int(state.gradient_step)]
    assert_close(averaged_params(state, params), expected(every(history, 3), 0.3))


def test_a_tail_inside_gradient_accumulation_does_not_count_what_is_skipped():
    tx = optax.MultiSteps(
        with_tail_average(optax.adam(0.1), 4), 2, should_skip_update_fn=optax.skip_not_finite
    )
    targets = np.array([1, np.nan, 2, 1, np.nan, np.nan, 3, 2, 1])
    params, state, history = train(tx, SMALL, targets=targets)
    assert counts(state) == [3]
    updated = jax.tree.map(lambda xs: xs[[2, 6, 8]], history)
    assert_close(averaged_params(state, params), expected(updated, 4))


def test_small_steps_of_a_changing_number_are_counted_as_they_are_made():
    tx = optax.MultiSteps(with_tail_average(optax.sgd(0.1), 0.5), lambda step: step + 1)
    params, state, history = train(tx, SMALL, targets=TARGETS[:15])
    assert counts(state) == [5]
    updated = jax.tree.map(lambda xs: xs[[0, 2, 5, 9, 14]], history)
    assert_close(averaged_params(state, params), expected(updated, 0.5))


BROKEN = np.array([1.5, 1.2, np.nan, np.inf, 1.7, 1.1, np.nan, 1.9, 1.3, 1.4])
FINE = np.isfinite(BROKEN)


def test_a_tail_inside_a_guard_does_not_count_rejected_updates():
    tx = optax.apply_if_finite(with_tail_average(optax.adam(0.1), 0.5), 5)
    params, state, history = train(tx, SMALL, targets=BROKEN)
    assert counts(state) == [FINE.sum()]
    assert int(state.total_notfinite) == (~FINE).sum()
    accepted = jax.tree.map(lambda xs: xs[FINE], history)
    assert_close(averaged_params(state, params), expected(accepted, 0.5))


def test_a_guard_works_outside_of_jit_as_well():
    """There the state is known, and the condition is traced nevertheless."""
    tx = optax.apply_if_finite(with_tail_average(optax.sgd(0.1), 2), 5)
    carry = SMALL, tx.init(SMALL)
    for target in (np.nan, 1.5):
        carry = gradient_step(tx, carry, target)
    params, state = carry
    assert counts(state) == [1]
    assert_close(averaged_params(state), params)


def test_a_tail_after_a_guard_counts_rejected_updates_as_the_parameters_they_leave():
    tx = optax.chain(optax.apply_if_finite(optax.adam(0.1), 5), tail_average(0.5))
    params, state, history = train(tx, SMALL, targets=BROKEN)
    assert counts(state) == [len(BROKEN)]
    assert np.isfinite(history["scale"]).all()
    np.testing.assert_array_equal(history["scale"][2], history["scale"][1])
    assert_close(averaged_params(state, params), expected(history, 0.5))


@pytest.mark.parametrize("outside", [True, False])
def test_a_guard_that_gives_up_lets_nan_into_the_average(outside):
    targets = np.array([1.5, np.nan, np.nan, np.nan])
    tail = tail_average(2)
    if outside:
        tx = optax.apply_if_finite(optax.chain(optax.sgd(0.1), tail), 2)
    else:
        tx = optax.chain(optax.apply_if_finite(optax.sgd(0.1), 2), tail)
    _, state, history = train(tx, SMALL, targets=targets)
    np.testing.assert_array_equal(np.isnan(history["scale"]), [False, False, False, True])
    assert counts(state) == [2 if outside else 4]
    assert np.isnan(averaged_params(state)["scale"])


def test_without_a_guard_nan_is_in_the_average():
    tx = with_tail_average(optax.sgd(0.1), 2)
    _, state, _ = train(tx, SMALL, targets=BROKEN)
    assert np.isnan(averaged_params(state)["scale"])


def test_a_guard_around_accumulation_around_a_tail_counts_updates_only():
    inner = optax.MultiSteps(with_tail_average(optax.adam(0.1), 4), 2).gradient_transformation()
    params, state, history = train(optax.apply_if_finite(inner, 5), SMALL, BROKEN)
    assert counts(state) == [3]
    accepted = jax.tree.map(lambda xs: xs[FINE][1::2], history)
    assert_close(averaged_params(state, params), expected(accepted, 4))


def test_steps_left_out_by_a_condition_are_not_counted():
    tx = optax.conditionally_mask(with_tail_average(optax.adam(0.1), 4), lambda step: step % 3 != 0)
    params, state, history = train(tx, SMALL)
    made = np.arange(STEPS) % 3 != 0
    assert counts(state) == [made.sum()]
    updated = jax.tree.map(lambda xs: xs[made], history)
    assert_close(averaged_params(state, params), expected(updated, 4))


def test_steps_of_an_adversary_are_not_counted():
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    tx = optax.contrib.sam(with_tail_average(optax.sgd(0.1), 3), adversary, sync_period=2)
    _, state, history = train(tx, SMALL)
    assert counts(state) == [STEPS // 2]
    assert_close(averaged_params(state), expected(every(history, 2), 3))
