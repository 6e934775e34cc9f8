"""Where a tail is found in an optimizer, and where it must not be."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tailavg import AnyTail, Exponential
from tailavg.optax import averaged_params, evaluate_tails, tail_average, with_tail_average
from tests.support.optax_training import (
    CLIPPED,
    KERNEL,
    LABELS,
    SMALL,
    TARGETS,
    assert_close,
    assert_equal,
    counts,
    expected,
    gradient_step,
    gradients,
    start,
    train,
)

# --- where a tail is found, and where it must not be ---

FOUND = {
    "alone": lambda tail: tail,
    "chain": lambda tail: optax.chain(optax.adam(0.1), tail),
    "nested chains": lambda tail: optax.chain(
        optax.clip(1.0), optax.chain(optax.adam(0.1), optax.chain(tail))
    ),
    "named chain": lambda tail: optax.named_chain(("z", optax.adam(0.1)), ("a", tail)),
    "chain in a named one": lambda tail: optax.named_chain(
        ("clip", optax.clip(1.0)), ("rest", optax.chain(optax.adam(0.1), tail))
    ),
    "injected": lambda tail: optax.inject_hyperparams(
        lambda rate: optax.chain(optax.adam(rate), tail)
    )(rate=0.1),
    "before a snapshot": lambda tail: optax.chain(
        optax.adam(0.1), tail, optax.snapshot("norm", optax.tree.norm)
    ),
    "before all that observes": lambda tail: optax.chain(
        optax.chain(optax.adam(0.1), tail, optax.snapshot("first", optax.tree.norm)),
        optax.masked(optax.snapshot("second", lambda updates: updates), {"scale": True}),
        optax.named_chain(("third", optax.chain(optax.snapshot("nothing", lambda _: ())))),
    ),
    "guarded itself": lambda tail: optax.chain(optax.adam(0.1), optax.apply_if_finite(tail, 3)),
    "under everything": lambda tail: optax.apply_if_finite(
        optax.MultiSteps(
            optax.masked(optax.named_chain(("all", optax.chain(optax.adam(0.1), tail))), True), 1
        ).gradient_transformation(),
        3,
    ),
}


@pytest.mark.parametrize("build", FOUND.values(), ids=FOUND)
def test_a_tail_is_found_anywhere(build):
    _, state, history = train(build(tail_average(4)), SMALL, TARGETS[:9])
    assert counts(state) == [9]
    assert_close(averaged_params(state), expected(history, 4))


def test_a_tail_is_found_before_a_monitor():
    ema = optax.measure_with_ema(optax.tree.norm, 0.9)
    monitor = optax.monitor({"norm": optax.tree.norm, "ema": ema})
    tx = optax.chain(optax.sgd(0.1), tail_average(4), monitor, optax.chain(monitor))
    carry = SMALL, tx.init(SMALL)
    assert_equal(averaged_params(carry[1]), SMALL)
    history = []
    for target in TARGETS[:9]:  # not in a scan: at first its state is empty
        carry = gradient_step(tx, carry, target)
        history.append(carry[0])
    history = jax.tree.map(lambda *xs: np.array(xs), *history)
    assert_close(averaged_params(carry[1]), expected(history, 4))


MISPLACED = {
    "first": lambda tail: optax.chain(tail, optax.adam(0.1)),
    "before the rate": lambda tail: optax.chain(optax.scale_by_adam(), tail, optax.scale(-0.1)),
    "before a clip": lambda tail: optax.chain(optax.adam(0.1), tail, optax.clip(1.0)),
    "before a constraint": lambda tail: optax.chain(
        optax.adam(0.1), tail, optax.keep_params_nonnegative()
    ),
    "before a frozen part": lambda tail: optax.chain(optax.adam(0.1), tail, optax.freeze(KERNEL)),
    "up the path": lambda tail: optax.chain(optax.chain(optax.adam(0.1), tail), optax.scale(0.5)),
    "far up the path": lambda tail: optax.chain(
        optax.apply_if_finite(optax.MultiSteps(optax.chain(optax.adam(0.1), tail), 2), 3),
        optax.scale(0.5),
    ),
    "in a branch": lambda tail: optax.multi_transform(
        {"matrix": optax.chain(tail, optax.adam(0.1)), "vector": optax.sgd(0.1)}, LABELS
    ),
    "masked": lambda tail: optax.chain(optax.masked(tail, KERNEL), optax.adam(0.1)),
    "named, in a chain": lambda tail: optax.chain(
        optax.named_chain(("adam", optax.adam(0.1)), ("tail", tail)), optax.scale(0.5)
    ),
    "chain in a named chain": lambda tail: optax.named_chain(
        ("both", optax.chain(tail, optax.adam(0.1)))
    ),
    "before another tail, then more": lambda tail: optax.chain(
        optax.adam(0.1), tail, tail_average(2), optax.scale(0.5)
    ),
    "before a snapshot, then more": lambda tail: optax.chain(
        optax.adam(0.1), tail, optax.snapshot("norm", optax.tree.norm), optax.scale(0.5)
    ),
    "before a monitor, then more": lambda tail: optax.chain(
        optax.adam(0.1), tail, optax.monitor({"norm": optax.tree.norm}), optax.clip(1.0)
    ),
    "before a chain with a snapshot and more": lambda tail: optax.chain(
        optax.adam(0.1),
        tail,
        optax.chain(optax.snapshot("norm", optax.tree.norm), optax.scale(0.5)),
    ),
    "before a part that is scaled": lambda tail: optax.chain(
        optax.adam(0.1), tail, optax.masked(optax.chain(optax.scale(0.5)), KERNEL)
    ),
}


@pytest.mark.parametrize("build", MISPLACED.values(), ids=MISPLACED)
def test_a_tail_that_is_not_last_in_its_chain_is_reported_before_any_step(build):
    state = build(tail_average(4)).init(start())
    for read in (averaged_params, jax.jit(averaged_params)):
        with pytest.raises(ValueError, match="expected tail_average last in its chain"):
            read(state, start())


def test_identity_after_a_tail_is_refused_as_it_has_the_state_of_a_scale():
    state = optax.chain(tail_average(4), optax.identity()).init(start())
    assert state[1] == optax.scale(0.5).init(start())
    with pytest.raises(ValueError, match=r"or looks like one that does \(as optax\.identity\)"):
        averaged_params(state)


def test_a_tail_that_is_not_last_in_a_named_chain_is_reported():
    tx = optax.named_chain(("tail", tail_average(4)), ("adam", optax.adam(0.1)))
    with pytest.raises(ValueError, match="expected tail_average last in its chain"):
        averaged_params(tx.init(start()))


def test_two_tails_of_the_same_parameters_are_read_one_by_one():
    tx = optax.chain(optax.adam(0.1), tail_average(4), tail_average(Exponential(0.5)))
    _, state, history = train(tx, SMALL)
    assert_close(averaged_params(state[1]), expected(history, 4))
    assert_close(averaged_params(state[2]), expected(history, Exponential(0.5)))
    with pytest.raises(ValueError, match="several tails average the same parameter"):
        averaged_params(state)


def test_an_optimizer_with_a_tail_can_be_given_another():
    tx = with_tail_average(with_tail_average(optax.adam(0.1), 4), 0.5)
    _, state, history = train(tx, SMALL)
    assert_close(averaged_params(state[0]), expected(history, 4))
    assert_close(averaged_params(state[-1]), expected(history, 0.5))


@pytest.mark.parametrize("tx", [optax.adam(0.1), optax.identity(), CLIPPED])
def test_a_state_without_a_tail_is_refused(tx):
    with pytest.raises(ValueError, match="opt_state: it contains no state of tail_average"):
        averaged_params(tx.init(start()), start())


def test_updates_without_parameters_are_refused():
    tx = with_tail_average(optax.adam(0.1), 4)
    state = tx.init(start())
    with pytest.raises(ValueError, match="tail_average: the parameters are missing"):
        tx.update(start(), state)


@pytest.mark.parametrize(
    ("rule", "dtype", "error"),
    [
        (0, jnp.float32, ValueError),
        ("4", jnp.float32, TypeError),
        (4, jnp.bfloat16, TypeError),
        (4, jnp.int32, TypeError),
    ],
)
def test_a_bad_rule_or_dtype_is_refused_at_once(rule, dtype, error):
    for make in (tail_average, partial(with_tail_average, optax.adam(0.1))):
        with pytest.raises(error, match="expected"):
            make(rule, dtype=dtype)


WRONG = {
    "one less": {"dense": start()["dense"]},
    "another name": {"dense": start()["dense"], "size": jnp.array(1.0)},
    "deeper": {"dense": start()["dense"], "scale": {"of": jnp.array(1.0)}},
    "shallower": {"dense": jnp.array(1.0), "scale": jnp.array(1.0)},
    "another shape": {"dense": start()["dense"], "scale": jnp.ones(2)},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_parameters_of_another_structure_or_shape_are_refused(wrong):
    state = with_tail_average(optax.adam(0.1), 4).init(start())
    with pytest.raises(ValueError, match=r"^params: expected"):
        averaged_params(state, wrong)


# --- outside the tail: wrappers that change what there is to average ---


def test_schedule_free_points_are_averaged_from_outside():
    tx = with_tail_average(optax.contrib.schedule_free(optax.sgd(0.1), 0.1), 4)
    params, state, history = train(tx, SMALL)
    assert_close(averaged_params(state, params), expected(history, 4))


CHANGERS = {
    "schedule-free": lambda tx: optax.contrib.schedule_free(tx, 0.1),
    "mechanic": optax.contrib.mechanize,
    "lookahead": lambda tx: optax.lookahead(tx, 3, 0.5),
    "split": optax.contrib.split_real_and_imaginary,
    "in a chain": lambda tx: optax.chain(optax.clip(1.0), optax.contrib.mechanize(tx)),
}


@pytest.mark.parametrize("wrap", CHANGERS.values(), ids=CHANGERS)
def test_a_tail_inside_what_changes_its_updates_is_reported(wrap):
    state = wrap(with_tail_average(optax.sgd(0.1), 4)).init(as_lookahead(start()))
    with pytest.raises(ValueError, match="tail_average is inside the transformation with a "):
        averaged_params(state)


def as_lookahead(params):
    return optax.LookaheadParams.init_synced(params)


FLAT = {
    "tree": (start(), 9),
    "matrix": (jnp.ones((3, 2)), 6),
    "one vector in a tree": ({"w": jnp.ones(3)}, 3),
    "one number": (jnp.ones(()), 1),
}


@pytest.mark.parametrize(("params", "numbers"), FLAT.values(), ids=FLAT)
def test_a_tail_inside_flatten_is_reported(params, numbers):
    state = optax.flatten(with_tail_average(optax.sgd(0.1), AnyTail())).init(params)
    said = "inside optax.flatten, the average is one flat vector: put the tail outside"
    for read in (averaged_params, jax.jit(averaged_params, static_argnames="window")):
        with pytest.raises(ValueError, match=said):
            read(state, params, window=0.5)
    with pytest.raises(ValueError, match=said):
        evaluate_tails(lambda _: 0, state, [0.5], params=params)
    assert averaged_params(state, window=0.5).shape == (numbers,)


def test_a_vector_of_another_size_is_not_taken_for_a_flat_tree():
    state = with_tail_average(optax.sgd(0.1), 4).init(jnp.ones(8))
    with pytest.raises(ValueError, match="params: expected the structure of the average"):
        averaged_params(state, start())


@pytest.mark.parametrize("build", [optax.flatten, lambda tx: tx])
def test_parameters_that_are_one_vector_are_averaged_in_flatten_or_not(build):
    tx = build(with_tail_average(optax.sgd(0.1), 4))
    params, state, history = train(tx, jnp.arange(3.0))
    assert_close(averaged_params(state, params), expected(history, 4))


def test_lookahead_is_averaged_from_outside():
    tx = with_tail_average(optax.lookahead(optax.sgd(0.1), 3, 0.5), 4)
    params = as_lookahead(SMALL)
    state = tx.init(params)
    fast, slow = [], []
    for target in TARGETS[:8]:
        updates, state = tx.update(gradients(params.fast, target), state, params)
        params = optax.apply_updates(params, updates)
        fast.append(params.fast)
        slow.append(params.slow)
    got = averaged_params(state, params)
    for points, average in [(fast, got.fast), (slow, got.slow)]:
        history = jax.tree.map(lambda *xs: np.array(xs), *points)
        assert_close(average, expected(history, 4))
