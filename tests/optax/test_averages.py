"""Tail averages as an optax transformation, against parameters collected by hand."""

import operator
import sys
from functools import partial
from types import SimpleNamespace

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from model import averages, weight_matrix
from tailavg import AnytimeWindow, Exponential, Growing, TailAverage
from tailavg.jax import TreeState
from tailavg.optax import averaged_params, tail_average, with_tail_average

STEPS = 23
TARGETS = 1 + np.random.default_rng(0).random(100)
RULES = [
    5,
    0.3,
    AnytimeWindow(0.5, 4, turns="paper"),
    AnytimeWindow(Growing(0.5, at_most=6), 2),
    Exponential(5),
    Exponential(0.3),
]
KERNEL = {"dense": {"kernel": True, "bias": False}, "scale": False}
REST = jax.tree.map(operator.not_, KERNEL)
LABELS = {"dense": {"kernel": "matrix", "bias": "vector"}, "scale": "vector"}


def start():
    """Parameters of three shapes; new ones each time, since some are donated."""
    return {
        "dense": {"kernel": jnp.arange(1.0, 7.0).reshape(3, 2), "bias": jnp.array([2.0, 3.0])},
        "scale": jnp.array(4.0, jnp.float32),
    }


def gradients(params, target):
    """Of half the squared distance to noise; a NaN wherever that is one."""
    return jax.tree.map(lambda x: (x - target).astype(x.dtype), params)


def gradient_step(tx, carry, target, **extra):
    params, state = carry
    tx = optax.with_extra_args_support(tx)
    updates, state = tx.update(gradients(params, target), state, params, **extra)
    return optax.apply_updates(params, updates), state


def train(tx, params=None, targets=TARGETS[:STEPS], **extra):
    """All of training in one scan; parameters and state, then the parameters after each step."""

    def one(carry, target):
        carry = gradient_step(tx, carry, target, **extra)
        return carry, carry[0]

    def whole(params):
        return jax.lax.scan(one, (params, tx.init(params)), jnp.asarray(targets, jnp.float32))

    (params, state), history = jax.jit(whole)(start() if params is None else params)
    return params, state, jax.tree.map(np.asarray, history)


def expected(history, rule):
    """The average of NumPy, in double precision."""

    def last(xs):
        average = TailAverage(rule)
        average.update_many(xs.astype(np.float64))
        return average.value()

    return jax.tree.map(last, history)


def every(history, k):
    """Each k-th of the parameters: those after an update that was one."""
    return jax.tree.map(lambda xs: xs[k - 1 :: k], history)


def assert_close(got, wanted, rtol=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol), got, wanted)


def assert_equal(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def tails(state):
    """The states of all tails, in order."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, TreeState))
    return [node for node in nodes if isinstance(node, TreeState)]


def counts(state):
    return [int(tail.updates) for tail in tails(state)]


CLIPPED = optax.chain(
    optax.clip_by_global_norm(0.7),
    optax.scale_by_adam(),
    optax.scale_by_schedule(optax.cosine_decay_schedule(-0.3, STEPS)),
)
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1, weight_decay=0.01),
    "clipped, with a schedule": CLIPPED,
    "masked decay": optax.chain(
        optax.sgd(0.1), optax.masked(optax.add_decayed_weights(-0.1), REST)
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


@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_any_optimizer_can_have_a_tail(tx):
    params, state, history = train(with_tail_average(tx, 0.3))
    assert counts(state) == [STEPS]
    assert_close(averaged_params(state), expected(history, 0.3))
    assert_close(averaged_params(state, params), expected(history, 0.3))


@pytest.mark.parametrize("name", ["sgd", "adamw", "clipped, with a schedule", "schedule-free"])
def test_a_tail_leaves_the_updates_alone(name):
    tx = OPTIMIZERS[name]
    plain = optax.with_extra_args_support(tx)
    with_tail = with_tail_average(tx, 3)
    params = start()
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
    params, state, history = train(with_tail_average(tx, 5), {"w": jnp.ones(2)}, value=2.0)
    assert_close(averaged_params(state, params), expected(history, 5))


def test_a_tail_takes_any_extra_argument():
    tx, params = tail_average(2), start()
    updates, _ = tx.update(gradients(params, 1.0), tx.init(params), params, value=1.0, any="thing")
    assert_equal(updates, gradients(params, 1.0))


def test_an_exponential_is_an_ema_by_hand():
    rule = Exponential(8)
    _, state, history = train(with_tail_average(optax.sgd(0.2), rule))
    ema = None
    for t in range(1, STEPS + 1):
        params = jax.tree.map(lambda xs, t=t: xs[t - 1].astype(np.float64), history)
        ema = params if t == 1 else optax.incremental_update(params, ema, 1 - rule.decay(t))
    assert_close(averaged_params(state), ema)


def test_with_x64_the_average_is_that_of_numpy_to_the_last_digits():
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: x.astype(jnp.float64), start())
        tx = with_tail_average(optax.adam(0.1), 0.25, dtype=jnp.float64)
        _, state, history = train(tx, params, TARGETS)
        got = jax.tree.map(np.asarray, averaged_params(state))
    assert got["scale"].dtype == history["scale"].dtype == np.float64
    assert_close(got, expected(history, 0.25), 1e-12)


def test_before_the_first_update_the_average_is_the_parameters():
    state = with_tail_average(optax.adam(0.1), 0.25).init(start())
    assert_equal(averaged_params(state), start())


# --- how many updates are counted ---


def test_a_tail_after_gradient_accumulation_counts_every_small_step():
    tx = with_tail_average(optax.MultiSteps(optax.adam(0.1), 3), 0.3)
    params, state, history = train(tx)
    assert counts(state) == [STEPS]
    for later in (3, 4):  # small steps leave the parameters as they are
        np.testing.assert_array_equal(history["scale"][later::3], history["scale"][2:-2:3])
    assert_close(averaged_params(state, params), expected(history, 0.3))


def test_a_tail_inside_gradient_accumulation_counts_updates_only():
    tx = optax.MultiSteps(with_tail_average(optax.adam(0.1), 0.3), 3)
    params, state, history = train(tx)
    assert counts(state) == [STEPS // 3] == [int(state.gradient_step)]
    assert_close(averaged_params(state, params), expected(every(history, 3), 0.3))


def test_a_tail_inside_gradient_accumulation_does_not_count_what_is_skipped():
    tx = optax.MultiSteps(
        with_tail_average(optax.adam(0.1), 4), 2, should_skip_update_fn=optax.skip_not_finite
    )
    targets = np.array([1, np.nan, 2, 1, np.nan, np.nan, 3, 2, 1])
    params, state, history = train(tx, targets=targets)
    assert counts(state) == [3]
    updated = jax.tree.map(lambda xs: xs[[2, 6, 8]], history)
    assert_close(averaged_params(state, params), expected(updated, 4))


def test_small_steps_of_a_changing_number_are_counted_as_they_are_made():
    tx = optax.MultiSteps(with_tail_average(optax.sgd(0.1), 0.5), lambda step: step + 1)
    params, state, history = train(tx, targets=TARGETS[:15])
    assert counts(state) == [5]
    updated = jax.tree.map(lambda xs: xs[[0, 2, 5, 9, 14]], history)
    assert_close(averaged_params(state, params), expected(updated, 0.5))


BROKEN = np.array([1.5, 1.2, np.nan, np.inf, 1.7, 1.1, np.nan, 1.9, 1.3, 1.4])
FINE = np.isfinite(BROKEN)


def test_a_tail_inside_a_guard_does_not_count_rejected_updates():
    tx = optax.apply_if_finite(with_tail_average(optax.adam(0.1), 0.5), 5)
    params, state, history = train(tx, targets=BROKEN)
    assert counts(state) == [FINE.sum()]
    assert int(state.total_notfinite) == (~FINE).sum()
    accepted = jax.tree.map(lambda xs: xs[FINE], history)
    assert_close(averaged_params(state, params), expected(accepted, 0.5))


def test_a_tail_after_a_guard_counts_rejected_updates_as_the_parameters_they_leave():
    tx = optax.chain(optax.apply_if_finite(optax.adam(0.1), 5), tail_average(0.5))
    params, state, history = train(tx, targets=BROKEN)
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
    _, state, history = train(tx, targets=targets)
    np.testing.assert_array_equal(np.isnan(history["scale"]), [False, False, False, True])
    assert counts(state) == [2 if outside else 4]
    assert np.isnan(averaged_params(state)["scale"])


def test_without_a_guard_nan_is_in_the_average():
    tx = with_tail_average(optax.sgd(0.1), 2)
    _, state, _ = train(tx, targets=BROKEN)
    assert np.isnan(averaged_params(state)["scale"])


def test_a_guard_around_accumulation_around_a_tail_counts_updates_only():
    inner = optax.MultiSteps(with_tail_average(optax.adam(0.1), 4), 2).gradient_transformation()
    params, state, history = train(optax.apply_if_finite(inner, 5), targets=BROKEN)
    assert counts(state) == [3]
    accepted = jax.tree.map(lambda xs: xs[FINE][1::2], history)
    assert_close(averaged_params(state, params), expected(accepted, 4))


def test_steps_left_out_by_a_condition_are_not_counted():
    tx = optax.conditionally_mask(with_tail_average(optax.adam(0.1), 4), lambda step: step % 3 != 0)
    params, state, history = train(tx)
    made = np.arange(STEPS) % 3 != 0
    assert counts(state) == [made.sum()]
    updated = jax.tree.map(lambda xs: xs[made], history)
    assert_close(averaged_params(state, params), expected(updated, 4))


def test_steps_of_an_adversary_are_not_counted():
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    tx = optax.contrib.sam(with_tail_average(optax.sgd(0.1), 3), adversary, sync_period=2)
    _, state, history = train(tx)
    assert counts(state) == [STEPS // 2]
    assert_close(averaged_params(state), expected(every(history, 2), 3))


# --- parts of the parameters ---


def test_a_masked_tail_needs_the_parameters_for_the_rest():
    tx = optax.chain(optax.adam(0.1), optax.masked(tail_average(4), KERNEL))
    params, state, history = train(tx)
    wanted = jax.tree.map(np.asarray, params)
    wanted["dense"]["kernel"] = expected(history, 4)["dense"]["kernel"]
    assert_close(averaged_params(state, params), wanted)
    np.testing.assert_array_equal(averaged_params(state, params)["scale"], params["scale"])
    with pytest.raises(ValueError, match="params: expected the parameters"):
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
    with pytest.raises(ValueError, match="params: expected the parameters"):
        averaged_params(state)


def test_two_tails_of_different_parameters_come_in_one_tree():
    tx = optax.multi_transform(
        {
            "matrix": with_tail_average(optax.adam(0.1), 4),
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
        {"matrix": with_tail_average(optax.adam(0.1), 4), "vector": optax.sgd(0.1)}, LABELS
    )
    params, state, history = train(tx)
    got = averaged_params(state, params)
    assert_close(got["dense"]["kernel"], expected(history, 4)["dense"]["kernel"])
    np.testing.assert_array_equal(got["dense"]["bias"], params["dense"]["bias"])
    with pytest.raises(ValueError, match="params: expected the parameters"):
        averaged_params(state)


def test_a_tail_after_all_branches_is_of_all_parameters():
    branches = optax.multi_transform({"matrix": optax.adam(0.1), "vector": optax.sgd(0.1)}, LABELS)
    _, state, history = train(with_tail_average(branches, 0.3))
    assert_close(averaged_params(state), expected(history, 0.3))


def test_frozen_parameters_need_no_tail():
    tx = optax.selective_transform(with_tail_average(optax.adam(0.1), 4), freeze_mask=REST)
    params, state, history = train(tx)
    assert_close(averaged_params(state, params), expected(history, 4))


def test_branches_may_be_guarded_and_accumulated():
    guarded = optax.apply_if_finite(with_tail_average(optax.adam(0.1), 0.5), 5)
    slow = optax.MultiSteps(with_tail_average(optax.sgd(0.1), 3), 2).gradient_transformation()
    tx = optax.multi_transform({"matrix": guarded, "vector": slow}, LABELS)
    _, state, history = train(tx)
    assert sorted(counts(state)) == [STEPS // 2, STEPS]
    wanted = expected(every(history, 2), 3)
    wanted["dense"]["kernel"] = expected(history, 0.5)["dense"]["kernel"]
    assert_close(averaged_params(state), wanted)


def test_masked_tails_in_one_chain_come_in_one_tree():
    tx = optax.chain(
        optax.adam(0.1),
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
    _, state, history = train(build(tail_average(4)), {"w": jnp.ones(2)}, TARGETS[:9])
    assert counts(state) == [9]
    assert_close(averaged_params(state), expected(history, 4))


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
}


@pytest.mark.parametrize("build", MISPLACED.values(), ids=MISPLACED)
def test_a_tail_that_is_not_last_in_its_chain_is_reported_before_any_step(build):
    state = build(tail_average(4)).init(start())
    for read in (averaged_params, jax.jit(averaged_params)):
        with pytest.raises(ValueError, match="expected tail_average last in its chain"):
            read(state, start())


def test_a_tail_that_is_not_last_in_a_named_chain_is_reported():
    tx = optax.named_chain(("tail", tail_average(4)), ("adam", optax.adam(0.1)))
    with pytest.raises(ValueError, match="expected tail_average last in its chain"):
        averaged_params(tx.init(start()))


def test_two_tails_of_the_same_parameters_are_read_one_by_one():
    tx = optax.chain(optax.adam(0.1), tail_average(4), tail_average(Exponential(0.5)))
    _, state, history = train(tx)
    assert_close(averaged_params(state[1]), expected(history, 4))
    assert_close(averaged_params(state[2]), expected(history, Exponential(0.5)))
    with pytest.raises(ValueError, match="expected one tail of each parameter, got several"):
        averaged_params(state)


def test_an_optimizer_with_a_tail_can_be_given_another():
    tx = with_tail_average(with_tail_average(optax.adam(0.1), 4), 0.5)
    _, state, history = train(tx)
    assert_close(averaged_params(state[0]), expected(history, 4))
    assert_close(averaged_params(state[-1]), expected(history, 0.5))


@pytest.mark.parametrize("tx", [optax.adam(0.1), optax.identity(), CLIPPED])
def test_a_state_without_a_tail_is_refused(tx):
    with pytest.raises(ValueError, match="expected a state of tail_average in it, got none"):
        averaged_params(tx.init(start()), start())


def test_updates_without_parameters_are_refused():
    tx = with_tail_average(optax.adam(0.1), 4)
    state = tx.init(start())
    with pytest.raises(ValueError, match="tail_average: expected the parameters"):
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
    params, state, history = train(tx)
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
    with pytest.raises(ValueError, match="expected tail_average around"):
        averaged_params(state)


def as_lookahead(params):
    return optax.LookaheadParams.init_synced(params)


def test_a_flat_average_does_not_pass_for_the_parameters():
    state = optax.flatten(with_tail_average(optax.sgd(0.1), 4)).init(start())
    with pytest.raises(ValueError, match="params: expected the structure of the average"):
        averaged_params(state, start())


def test_lookahead_is_averaged_from_outside():
    tx = with_tail_average(optax.lookahead(optax.sgd(0.1), 3, 0.5), 4)
    params = as_lookahead(start())
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
    arrays = jax.tree.leaves((tail.sums, tail.means))
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
    "tuple": (jnp.ones(2), (jnp.zeros(3), jnp.ones(()))),
    "array": jnp.ones(2),
    "nothing": {},
    "module": equinox.filter(equinox.nn.Linear(2, 3, key=jax.random.key(0)), equinox.is_array),
}


@pytest.mark.parametrize("params", CONTAINERS.values(), ids=CONTAINERS)
def test_parameters_may_be_any_tree(params):
    last, state, history = train(with_tail_average(optax.adam(0.1), 4), params)
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


# --- jit, donation, vmap ---


def test_a_donated_step_trains_and_averages():
    tx = with_tail_average(optax.adam(0.1), 0.3)
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
        arrays = old[0], old[1][0], old[1][1].sums, old[1][1].means
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
    tx = with_tail_average(optax.adam(0.1), 0.3)
    params = start()
    carry = params, tx.init(params)
    for target in TARGETS[:7]:
        carry = gradient_step(tx, carry, target)
    params, state, _ = train(tx, targets=TARGETS[:7])
    assert counts(carry[1]) == counts(state)
    assert_close(averaged_params(carry[1]), averaged_params(state))


def test_models_in_a_batch_are_averaged_each():
    tx = with_tail_average(optax.adam(0.1), 4)
    params = jax.tree.map(lambda x: jnp.stack([x, x + 1]), start())
    state = jax.vmap(tx.init)(params)
    step = jax.jit(jax.vmap(partial(gradient_step, tx)))
    history = []
    for target in TARGETS[:9]:
        params, state = step((params, state), jnp.array([target, 3 * target]))
        history.append(jax.tree.map(np.asarray, params))
    got = jax.vmap(averaged_params)(state, params)
    history = jax.tree.map(lambda *xs: np.array(xs), *history)
    assert_close(got, expected(history, 4))


def test_shapes_are_known_without_arrays():
    tx = with_tail_average(optax.adam(0.1), AnytimeWindow(4, 5))
    shapes = jax.eval_shape(tx.init, start())
    state = tx.init(start())
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    for shape, array in zip(*map(jax.tree.leaves, (shapes, state)), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
    assert [x.shape for x in jax.tree.leaves(shapes[1].means)] == [(5, 2), (5, 3, 2), (5,)]
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


# --- what else is done with an optimizer's state ---


def test_optax_finds_what_it_looks_for():
    tx = with_tail_average(optax.inject_hyperparams(optax.adam)(learning_rate=0.1), 4)
    state = tx.init(start())
    assert float(optax.tree_utils.tree_get(state, "learning_rate")) == pytest.approx(0.1)
    state = optax.tree_utils.tree_set(state, learning_rate=0.5)
    assert float(optax.tree_utils.tree_get(state, "learning_rate")) == 0.5
    assert_equal(optax.tree_utils.tree_get(state, "mu"), jax.tree.map(jnp.zeros_like, start()))
    assert_equal(optax.tree_utils.tree_get(state, "sums"), start())


def test_optax_still_finds_the_count_of_others():
    _, state, _ = train(with_tail_average(optax.adam(0.1), 4))
    assert int(optax.tree_utils.tree_get(state, "count")) == STEPS
    assert int(optax.tree_utils.tree_get(state, "updates")) == STEPS


def test_optax_maps_over_what_is_shaped_as_the_parameters():
    tx = with_tail_average(optax.adam(0.1), 4)
    state = tx.init(start())
    mapped = optax.tree_utils.tree_map_params(
        tx, lambda _, label: label, state, LABELS, transform_non_params=lambda _: None
    )
    assert mapped[0][0].mu == mapped[1].sums == mapped[1].means == LABELS
    assert mapped[1].updates is None


def test_a_train_state_trains_with_a_tail():
    tx = with_tail_average(optax.adam(0.1), 0.3)
    state = TrainState.create(apply_fn=lambda: None, params=start(), tx=tx)

    @jax.jit
    def step(state, target):
        return state.apply_gradients(grads=gradients(state.params, target))

    history = []
    for target in TARGETS[:STEPS]:
        state = step(state, target)
        history.append(state.params)
    history = jax.tree.map(lambda *xs: np.array(xs), *history)
    assert_close(averaged_params(state.opt_state, state.params), expected(history, 0.3))


def test_a_run_resumed_from_a_checkpoint_is_the_unbroken_one_to_the_bit(tmp_path):
    tx = optax.multi_transform(
        {
            "matrix": optax.apply_if_finite(with_tail_average(optax.adam(0.1), 0.3), 3),
            "vector": with_tail_average(optax.sgd(0.1), Exponential(5)),
        },
        LABELS,
    )
    step = jax.jit(lambda carry, target: gradient_step(tx, carry, target))
    carry = start(), tx.init(start())
    for target in TARGETS[:STEPS]:
        carry = step(carry, target)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", carry)
        checkpointer.wait_until_finished()
        blank = jax.eval_shape(lambda: (start(), tx.init(start())))
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        blank = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), blank
        )
        resumed = checkpointer.restore(tmp_path / "state", blank)
    assert_equal(resumed, carry)
    for target in TARGETS[STEPS:50]:
        carry, resumed = step(carry, target), step(resumed, target)
    assert counts(resumed[1]) == [50, 50]
    assert_equal(resumed, carry)
    assert_equal(averaged_params(resumed[1], resumed[0]), averaged_params(carry[1], carry[0]))


@pytest.mark.parametrize(
    ("rule", "compiled", "axis"),
    [
        (4, False, AxisType.Auto),
        (Exponential(0.5), True, AxisType.Auto),
        (0.5, False, AxisType.Explicit),
    ],
)
def test_everything_is_sharded_as_the_parameters(rule, compiled, axis):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis,))
    spec = {"kernel": PartitionSpec("x", None), "bias": PartitionSpec("x")}
    shardings = jax.tree.map(partial(NamedSharding, mesh), spec)
    params = {"kernel": jnp.arange(24.0).reshape(8, 3) + 1, "bias": jnp.arange(4.0) + 1}
    params = jax.device_put(params, shardings)
    tx = with_tail_average(optax.adam(0.1), rule)
    state = (jax.jit(tx.init) if compiled else tx.init)(params)

    def check(params, state):
        def same(array, spec, leading=()):
            wanted = NamedSharding(mesh, PartitionSpec(*leading, *spec))
            assert array.sharding.is_equivalent_to(wanted, array.ndim), array.sharding

        [tail] = tails(state)
        trees = params, tail.sums, averaged_params(state), averaged_params(state, params)
        part = optax.masked(tail_average(4), {"kernel": False, "bias": True}).init(params)
        same(averaged_params(part, params)["kernel"], spec["kernel"])
        for name in spec:
            for tree in trees:
                same(tree[name], spec[name])
            same(tail.means[name], spec[name], [None])

    check(params, state)
    step = jax.jit(lambda *carry: gradient_step(tx, carry, 1.5), donate_argnums=(0, 1))
    history = []
    for _ in range(9):
        params, state = step(params, state)
        history.append(jax.tree.map(np.array, params))
    check(params, state)
    history = jax.tree.map(lambda *xs: np.array(xs), *history)
    assert_close(averaged_params(state, params), expected(history, rule))


@pytest.mark.parametrize("name", ["as_pure", "pure"])
def test_an_optimizer_of_nnx_is_read_as_it_is(monkeypatch, name):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, with_tail_average(optax.adam(0.1), 4), wrt=nnx.Param)
    monkeypatch.setitem(sys.modules, "flax.nnx", SimpleNamespace(**{name: nnx.as_pure}))
    for params in (None, nnx.state(model, nnx.Param)):
        averaged = averaged_params(optimizer.opt_state, params)
        assert_equal(averaged["kernel"], model.kernel[...])
