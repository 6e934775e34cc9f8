"""Tail averages in JAX, against dense weights, against NumPy's, and in compiled programs."""

import math
import re
import subprocess
import sys
from collections import namedtuple
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import cases
from cases import CAPPED, anytime_windows, assert_close, short, windows
from model import Blocks, averages, weight_matrix
from tailavg import (
    AnyTail,
    AnytimeWindow,
    ExactWindow,
    Exponential,
    Fixed,
    Growing,
    Profile,
    RawTail,
    TailAverage,
)
from tailavg.core.schedule import advance
from tailavg.jax import BlockClock, DecayClock, TreeState, tail_average, value

STEPS = 600
RULES = [rule for rule in cases.RULES if isinstance(rule, AnytimeWindow | Exponential)]
FEW = [
    AnytimeWindow(10),
    AnytimeWindow(0.3, 2),
    AnytimeWindow(CAPPED, 5, turns="paper"),
    Exponential(10),
    Exponential(0.3),
]
TWO = [AnytimeWindow(0.3), Exponential(10)]
Pair = namedtuple("Pair", "first second")

every_rule = pytest.mark.parametrize("rule", RULES, ids=short)
few_rules = pytest.mark.parametrize("rule", FEW, ids=short)
two_rules = pytest.mark.parametrize("rule", TWO, ids=short)
drawn_rules = st.one_of(anytime_windows, st.builds(Exponential, windows))


def samples(steps=STEPS, shape=(5,), seed=0):
    """Samples of about 1 to 2, whose averages are never near 0."""
    return 1 + np.random.default_rng(seed).random((steps, *shape))


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


def updated(average, trees, state):
    """The state after each of the stacked trees, one call after another."""
    for i in range(len(jax.tree.leaves(trees)[0])):
        state = average.update(state, row(trees, i))
    return state


def assert_same(got, expected):
    """Trees that are equal to the bit, and of the same dtypes."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


def buffers(tree):
    """Where the arrays are in memory; those on several devices in several places."""
    arrays = [shard.data for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return {array.unsafe_buffer_pointer() for array in arrays if array.size}


# Values, with x64


@every_rule
def test_values_are_those_of_the_dense_weights_and_of_numpy_at_every_step(rule):
    xs = samples()
    with jax.enable_x64(True):
        _, (values, _, sizes) = run(tail_average(rule, dtype=jnp.float64), xs)
        assert values.dtype == sizes.dtype == np.float64
        assert_close(values, averages(weight_matrix(rule, STEPS), xs), 1e-12)
        assert_close(values, TailAverage(rule).scan(xs), 1e-12)
        assert_close(sizes, [rule.size(t) for t in range(1, STEPS + 1)], 1e-15)


@given(drawn_rules)
@settings(max_examples=10)
def test_values_of_any_rule_are_those_of_the_dense_weights(rule):
    xs = samples(150)
    with jax.enable_x64(True):
        _, (values, _, _) = run(tail_average(rule, dtype=jnp.float64), xs)
        assert_close(values, averages(weight_matrix(rule, 150), xs), 1e-12)


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if isinstance(rule, AnytimeWindow)], ids=short
)
def test_blocks_turn_on_the_very_sample_where_numpy_turns(rule):
    blocks, numpy = Blocks(rule), TailAverage(rule)
    with jax.enable_x64(True):
        _, (_, clocks, _) = run(tail_average(rule, dtype=jnp.float64), samples())
        all_starts = np.asarray(clocks.starts)
    for starts in all_starts:
        blocks.add()
        numpy.update(1.0)
        held = sorted(set(starts.tolist()))  # blocks yet to come are empty ones at the start
        assert held == blocks.starts() == numpy.state_dict()["starts"]


@pytest.mark.parametrize(
    "rule",
    [AnytimeWindow(700, 4), AnytimeWindow(1.0, 2), AnytimeWindow(0.9), Exponential(700)],
    ids=short,
)
def test_values_hold_over_several_folds(rule):
    xs = samples(2500, ())
    with jax.enable_x64(True):
        _, (values, _, _) = run(tail_average(rule, dtype=jnp.float64), xs)
        assert_close(values, TailAverage(rule).scan(xs), 1e-12)


@few_rules
def test_wide_accumulators_take_narrow_leaves(rule):
    xs = samples().astype(np.float32)
    with jax.enable_x64(True):
        average = tail_average(rule, dtype=jnp.float64)
        state, (values, _, _) = run(average, {"w": xs})
        assert state.sums["w"].dtype == state.means["w"].dtype == np.float64
        assert_close(values["w"], averages(weight_matrix(rule, STEPS), xs), 1e-12)
        assert average.value(state, like={"w": jnp.asarray(xs[0])})["w"].dtype == np.float32


@few_rules
def test_narrow_accumulators_take_wide_leaves(rule):
    xs = samples()
    with jax.enable_x64(True):
        state, (values, _, _) = run(tail_average(rule), {"w": xs})
        assert state.sums["w"].dtype == state.means["w"].dtype == values["w"].dtype == np.float32
        assert_close(values["w"], averages(weight_matrix(rule, STEPS), xs), 3e-6)


# Values, without x64


@every_rule
def test_single_precision_weighs_samples_as_the_dense_weights_do(rule):
    """The samples are the rows of the identity: the average is the weights themselves."""
    _, (weights, _, sizes) = run(tail_average(rule), np.eye(STEPS, dtype=np.float32))
    assert weights.dtype == sizes.dtype == np.float32
    weights = np.asarray(weights, np.float64)
    expected = weight_matrix(rule, STEPS)
    assert_close(weights.sum(axis=1), np.ones(STEPS), 3e-6)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=2e-7)
    assert_close(1 / (weights**2).sum(axis=1), 1 / (expected**2).sum(axis=1), 1e-5)
    assert_close(sizes, [rule.size(t) for t in range(1, STEPS + 1)], 1e-6)


@given(drawn_rules)
@settings(max_examples=4)
def test_single_precision_is_near_for_any_rule(rule):
    xs = samples(150, (2,)).astype(np.float32)
    _, (values, _, _) = run(tail_average(rule), {"x": xs, "one": np.ones(150, np.float32)})
    assert_close(values["one"], np.ones(150), 3e-6)
    assert_close(values["x"], averages(weight_matrix(rule, 150), xs), 1e-5)


LONG = [1, 2, 999, 2**16 + 1, 10**6, 4_999_999, 9_876_543, 10**7]


@pytest.mark.parametrize(
    "rule",
    [
        AnytimeWindow(250_000),
        AnytimeWindow(9_000_000, 2),
        AnytimeWindow(0.25),
        AnytimeWindow(0.999, 7),
        AnytimeWindow(0.0123456789123, 5, turns="paper"),
        AnytimeWindow(Growing(0.5, at_most=4_999_998), 4),
    ],
    ids=short,
)
def test_single_precision_has_the_effective_size_after_ten_million_steps(rule):
    """Each block's mean is a row of the identity: the average is the weights of the blocks."""
    average = tail_average(rule)
    for t in LONG:
        starts = advance(rule, [0], t)
        saved = TailAverage(rule, dtype="float32").state_dict() | {
            "scalar": False,
            "count": t,
            "starts": starts,
            "blocks": np.eye(len(starts), dtype=np.float32),
            "folded": t,
            "partial": np.zeros(len(starts), np.float32),
        }
        state = average.from_state_dict(saved, jnp.zeros(len(starts)))
        weights = np.asarray(average.value(state), np.float64)
        assert abs(weights.sum() - 1) < 1e-6
        effective = 1 / (weights**2 / np.diff([*starts, t])).sum()
        assert abs(effective / min(t, rule.size(t)) - 1) < 1e-5


@pytest.mark.parametrize("window", [10, 250_000, 0.25, 1.0, Growing(0.5, 3_000_000)], ids=str)
def test_single_precision_has_the_decay_after_ten_million_steps(window):
    """The mean so far is (1, 0), the next sample (0, 1): the average is their weights."""
    rule = Exponential(window)
    average = tail_average(rule)
    for t in LONG[1:]:
        saved = TailAverage(rule, dtype="float32").state_dict() | {
            "scalar": False,
            "count": t - 1,
            "starts": [0],
            "blocks": np.array([[1, 0]], np.float32),
            "folded": t - 1,
            "partial": np.zeros(2, np.float32),
        }
        state = average.from_state_dict(saved, jnp.zeros(2))
        old, new = np.asarray(average.value(average.update(state, jnp.array([0.0, 1.0]))), float)
        assert abs(old + new - 1) < 1e-6
        before, after = min(t - 1, rule.size(t - 1)), min(t, rule.size(t))
        assert abs(new / (1 - rule.decay(t)) - 1) < 1e-5
        assert abs(1 / (old**2 / before + new**2) / after - 1) < 1e-5


@pytest.mark.parametrize("other", [AnytimeWindow(10, 4), Exponential(10)], ids=short)
def test_a_state_of_another_rule_is_refused(other):
    state = tail_average(10).init(1.0)
    with pytest.raises(ValueError, match=r"state: expected one of .*, got a BlockClock of another"):
        tail_average(other).update(state, 1.0)
    with pytest.raises(ValueError, match=r"state: expected one of Anytime"):
        tail_average(10).update(tail_average(Exponential(10)).init(1.0), 1.0)


# Ways to call it


@two_rules
def test_calls_one_by_one_jitted_and_scanned_give_the_same(rule):
    xs = {"a": samples(40).astype(np.float32), "n": np.arange(40)}
    average = tail_average(rule)
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


@few_rules
def test_a_loop_in_the_program_counts_on(rule):
    average = tail_average(rule)
    body = lambda i, state: average.update(state, i.astype(jnp.float32))  # noqa: E731
    state = jax.jit(lambda state: lax.fori_loop(0, 50, body, state))(average.init(0.0))
    assert state.updates == 50
    assert_close(value(state), weight_matrix(rule, 50)[-1] @ np.arange(50.0), 1e-5)


@few_rules
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


@few_rules
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
def test_a_batch_of_averages_is_one_average_each(rule):
    batch = samples(60, (4, 3)).astype(np.float32)  # of steps, of averages
    average = tail_average(rule)

    def step(states, trees):
        states = jax.vmap(average.update)(states, trees)
        return states, jax.vmap(value)(states)

    states = jax.vmap(average.init)(jnp.asarray(batch[0]))
    states, values = jax.jit(lambda *a: lax.scan(step, *a))(states, jnp.asarray(batch))
    assert_close(values, averages(weight_matrix(rule, 60), batch), 3e-6)
    assert states.updates.tolist() == [60] * 4


@two_rules
def test_averages_of_a_batch_may_be_at_different_steps(rule):
    """Some turn or fold while others do not."""
    average = tail_average(rule)
    ages = [0, 1, 9, 230]
    trees = [samples(age + 40, seed=age).astype(np.float32) for age in ages]
    states = [average.init(jnp.full(5, math.nan))] * 4
    for i, age in enumerate(ages):
        if age:
            states[i], _ = run(average, trees[i][:age], states[i])
    states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)

    def step(states, trees):
        states = jax.vmap(average.update)(states, trees)
        return states, jax.vmap(value)(states)

    batch = np.stack([xs[-40:] for xs in trees], axis=1)
    states, values = jax.jit(lambda *a: lax.scan(step, *a))(states, jnp.asarray(batch))
    assert states.updates.tolist() == [age + 40 for age in ages]
    for i, age in enumerate(ages):
        expected = averages(weight_matrix(rule, age + 40), trees[i])[age:]
        assert_close(values[:, i], expected, 3e-6)


@few_rules
def test_the_gradient_of_a_value_is_the_weights(rule):
    average = tail_average(rule, dtype=jnp.float64)

    def last(xs):
        state, _ = lax.scan(lambda s, x: (average.update(s, x), None), average.init(xs[0]), xs)
        return value(state)

    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(last))(jnp.asarray(samples(280, ())))
        np.testing.assert_allclose(gradient, weight_matrix(rule, 280)[-1], rtol=1e-9, atol=1e-14)


@two_rules
def test_a_value_is_differentiable_in_a_later_tree(rule):
    average = tail_average(rule)
    state, _ = run(average, samples(50).astype(np.float32))
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


@few_rules
def test_a_donated_state_is_used_up_and_nothing_else(rule):
    average = tail_average(rule)
    tree = {"w": jnp.ones((20, 30)), "n": jnp.arange(7), "k": jax.random.key(3)}
    update = jax.jit(average.update, donate_argnums=0)
    state = average.init(tree)
    old = average.value(state)
    kept = jax.tree.map(jnp.copy, old)
    for _ in range(3):
        before, state = state, update(state, tree)
        assert before.sums["w"].is_deleted()
        assert before.means["w"].is_deleted()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((tree, old)))
    assert_same(old, kept)
    assert_same(average.value(state), kept)
    assert state.updates == 3


@few_rules
@pytest.mark.parametrize("jitted", [False, True])
def test_no_array_is_shared_between_a_tree_a_state_and_a_value(rule, jitted):
    average = tail_average(rule)
    init, update = (jax.jit(f) if jitted else f for f in (average.init, average.update))
    read = jax.jit(value) if jitted else value
    tree = {"w": jnp.ones((20, 30)), "n": jnp.arange(7), "b": jnp.array(True), "s": jnp.array(1.0)}
    first = init(tree)
    second = update(first, tree)
    values = [read(first), read(second), read(second, tree)]
    parts = [buffers(part) for part in (tree, first, second, *values)]
    assert len(set.union(*parts)) == sum(map(len, parts))
    assert len(buffers(first)) == len(jax.tree.leaves(first))


@few_rules
def test_a_state_outlives_the_tree_it_was_made_of(rule):
    average = tail_average(rule)
    tree = {"w": jnp.ones((20, 30)), "n": jnp.arange(7)}
    state = average.init(tree)
    later = average.update(state, tree)
    used = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(tree)
    assert tree["w"].is_deleted()
    assert tree["n"].is_deleted()
    for read in (average.value(state), average.value(later)):
        np.testing.assert_array_equal(read["w"], used["w"] - 1)
        np.testing.assert_array_equal(read["n"], used["n"] - 1)


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


# Trees


def tree_at(i):
    """A tree of all kinds of leaves and nodes; its averaged leaves are about i."""
    return {
        "list": [jnp.full((2, 3), i, jnp.float32), None],
        "tuple": (np.full(2, i, np.float64), jnp.full((), i, jnp.bfloat16)),
        "named": Pair(first=jnp.full(3, i, jnp.float16), second=float(i)),
        "complex": jnp.full(2, i + 2j * i, jnp.complex64),
        "int": jnp.full(2, 10 * i, jnp.int32),
        "byte": np.full((), i % 256, np.uint8),
        "number": 3 * i,
        "bool": jnp.array([i % 2 == 0]),
        "key": jax.random.key(i),
        "keys": jax.random.split(jax.random.key(i), 2),
        "none": None,
        "empty": jnp.zeros((0, 4)),
        "nothing": {},
    }


@two_rules
def test_trees_may_have_any_nodes_and_leaves(rule):
    average = tail_average(rule)
    update = jax.jit(average.update, donate_argnums=0)
    state = average.init(tree_at(0))
    for i in range(1, 31):
        tree = tree_at(i)
        state = update(state, tree)
    assert isinstance(state, TreeState)
    got = average.value(state)
    assert jax.tree.structure(got) == jax.tree.structure(state.sums) == jax.tree.structure(tree)
    mean = weight_matrix(rule, 30)[-1] @ np.arange(1.0, 31)
    averaged = [got["list"][0], *got["tuple"], *got["named"]]
    assert [x.dtype for x in averaged] == [np.float32] * 5
    assert [x.shape for x in averaged] == [(2, 3), (2,), (), (3,), ()]
    for x in averaged:
        assert_close(x, np.full(x.shape, mean), 3e-6)
    assert got["complex"].dtype == np.complex64
    assert_close(got["complex"], np.full(2, mean * (1 + 2j)), 3e-6)
    for name in ("int", "byte", "number", "bool", "key", "keys", "none", "nothing"):
        assert_same(got[name], jax.tree.map(jnp.asarray, tree[name]))
        assert jax.tree.leaves(state.means[name]) == []
    assert got["empty"].shape == (0, 4)
    places = rule.accumulators
    assert state.means["list"][0].shape == (places, 2, 3)
    assert state.means["empty"].shape == (places, 0, 4)


@two_rules
def test_like_gives_the_dtypes_of_a_tree(rule):
    average = tail_average(rule)
    tree = tree_at(7)
    state = average.update(average.init(tree), tree)
    for got in (average.value(state, like=tree), value(state, tree), jax.jit(value)(state, tree)):
        assert_same(got, jax.tree.map(jnp.asarray, tree))
    narrow = jax.tree.map(lambda x: x.astype(jnp.float16), {"w": jnp.ones(2)})
    state = average.init({"w": jnp.full(2, 1 / 3)})
    assert average.value(state, like=narrow)["w"].tolist() == [np.float16(1 / 3)] * 2


@two_rules
def test_before_the_first_update_the_value_is_what_was_given_to_init(rule):
    average = tail_average(rule)
    tree = tree_at(5) | {"w": jnp.array([math.nan, math.inf, -2.5, 1e30])}
    wide = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32) if np.ndim(x) < 2 else x, tree["named"]
    )
    for state in (average.init(tree), jax.jit(average.init)(tree)):
        assert_same(average.value(state, like=tree), jax.tree.map(jnp.asarray, tree))
        got = average.value(state)
        assert_same(got["named"], wide)
        np.testing.assert_array_equal(got["w"], tree["w"])
        assert state.updates == 0
        assert average.size(state) == rule.size(1)


@pytest.mark.parametrize("tree", [{}, None, [], {"a": None}, {"n": 3}], ids=repr)
@two_rules
def test_a_tree_without_anything_to_average_is_counted(rule, tree):
    average = tail_average(rule)
    state = average.init(tree)
    for _ in range(4):
        state = jax.jit(average.update, donate_argnums=0)(state, tree)
    assert state.updates == 4
    assert average.value(state) == average.value(state, like=tree) == tree
    assert average.profile(state).count == 4


@two_rules
def test_whole_numbers_and_narrow_floats_are_taken_for_a_floating_leaf(rule):
    average = tail_average(rule)
    state = average.init({"w": jnp.zeros(2), "s": 0.0})
    for x in (jnp.array([1, 3]), jnp.array([1, 3], jnp.bfloat16), np.array([1, 3], np.uint8)):
        state = average.update(state, {"w": x, "s": 2})
    assert_close(average.value(state)["w"], [1, 3], 1e-6)
    assert_close(average.value(state)["s"], 2, 1e-6)


def test_parts_of_a_state_are_named():
    state = tail_average(10).init(1.0)
    assert state._fields == ("updates", "size", "clock", "sums", "means")
    assert isinstance(state.clock, BlockClock)
    assert isinstance(tail_average(Exponential(10)).init(1.0).clock, DecayClock)


# Refusals


@pytest.mark.parametrize(
    "rule",
    [AnyTail(), ExactWindow(10), RawTail(0.25, total=100)],
    ids=lambda rule: type(rule).__name__,
)
def test_other_rules_are_refused(rule):
    message = rf"rule: expected an AnytimeWindow or an Exponential, got {type(rule).__name__}"
    with pytest.raises(TypeError, match=message):
        tail_average(rule)


@pytest.mark.parametrize("bad", [0, 1.5, True, "0.5", None], ids=repr)
def test_a_bad_window_is_refused(bad):
    with pytest.raises((ValueError, TypeError), match=r"window: expected .*, got"):
        tail_average(bad)


@pytest.mark.parametrize("dtype", ["float16", jnp.bfloat16, "int32", "complex64", bool], ids=str)
def test_accumulators_of_another_dtype_are_refused(dtype):
    message = rf"dtype: expected float32 or float64, got .*{np.dtype(dtype)}"
    with pytest.raises(TypeError, match=message):
        tail_average(10, dtype=dtype)


def test_double_precision_without_x64_is_refused_when_a_state_is_made():
    average = tail_average(10, dtype=jnp.float64)
    with pytest.raises(ValueError, match=r"dtype: expected float32, since x64 is off, got float64"):
        average.init(1.0)


WHOLE = {"a": {"b": jnp.ones(2)}, "n": jnp.arange(3), "z": jnp.ones((), jnp.complex64)}
WRONG = [
    (WHOLE | {"more": 1.0}, ValueError, r"expected the structure .*'n'.*got .*'more'"),
    (WHOLE | {"a": jnp.ones(2)}, ValueError, r"expected the structure .*'b'.*got "),
    (WHOLE | {"z": None}, ValueError, r"expected the structure .*, got .*None"),
    ([1.0], ValueError, r"expected the structure .*, got .*\[\*\]"),
    (WHOLE | {"a": {"b": jnp.ones(3)}}, ValueError, r"a\.b: expected shape \(2,\), got \(3,\)"),
    (WHOLE | {"a": {"b": 1.0}}, ValueError, r"a\.b: expected shape \(2,\), got \(\)"),
    (WHOLE | {"n": jnp.arange(2)}, ValueError, r"n: expected shape \(3,\), got \(2,\)"),
    (WHOLE | {"a": {"b": jnp.ones(2) * 1j}}, TypeError, r"a\.b: expected .*float32.*got complex64"),
    (WHOLE | {"n": jnp.ones(3)}, TypeError, r"n: expected .*int32.*got float32"),
    (WHOLE | {"n": jnp.ones(3, bool)}, TypeError, r"n: expected .*int32.*got bool"),
    (WHOLE | {"n": jax.random.split(jax.random.key(0), 3)}, TypeError, r"n: expected .*int32.*key"),
]


@pytest.mark.parametrize(("tree", "error", "message"), WRONG, ids=[w[2] for w in WRONG])
def test_a_tree_that_does_not_fit_is_refused_and_the_state_is_as_it_was(tree, error, message):
    average = tail_average(10)
    state = average.update(average.init(WHOLE), WHOLE)
    expected = jax.tree.map(np.array, state)
    calls = [
        average.update,
        jax.jit(average.update, donate_argnums=0),
        average.value,
        jax.jit(value),
    ]
    for call in calls:
        with pytest.raises(error, match=message):
            call(state, tree)
    assert_same(state, expected)
    assert average.update(state, WHOLE).updates == 2


def test_a_bare_array_that_does_not_fit_is_refused():
    average = tail_average(10)
    with pytest.raises(ValueError, match=r"^tree: expected shape \(2,\), got \(3,\)"):
        average.update(average.init(jnp.ones(2)), jnp.ones(3))


# NaN and infinities


@every_rule
def test_nan_and_infinity_last_as_long_as_they_have_a_weight(rule):
    """And no longer: a place in memory is overwritten when it is used again."""
    xs = samples()
    xs[[3, 47, 330], 0] = math.nan
    xs[[3, 47, 330], 1] = math.inf
    xs[[3, 47, 330], 2] = -math.inf
    xs[[20, 22], 3] = math.inf, -math.inf
    xs[[300, 302], 4] = math.inf, math.nan
    with np.errstate(invalid="ignore"):
        expected = averages(weight_matrix(rule, STEPS), xs)
        numpy = TailAverage(rule).scan(xs)
    with jax.enable_x64(True):
        average = tail_average(rule, dtype=jnp.float64)
        _, (values, _, _) = run(average, xs, average.init(jnp.zeros(5)))
        assert_close(values, expected, 1e-12)
        assert_close(values, numpy, 1e-12)


@few_rules
def test_nan_and_infinity_leave_a_batch_and_single_precision_too(rule):
    xs = samples(300, (4,)).astype(np.float32)
    xs[[3, 47, 160], 0] = math.nan
    xs[[3, 47, 160], 1] = math.inf
    xs[[20, 22], 2] = math.inf, -math.inf
    with np.errstate(invalid="ignore"):
        expected = averages(weight_matrix(rule, 300), xs)
    average = tail_average(rule)

    def step(states, trees):
        states = jax.vmap(average.update)(states, trees)
        return states, jax.vmap(value)(states)

    states = jax.vmap(average.init)(jnp.zeros(4))
    _, values = jax.jit(lambda *a: lax.scan(step, *a))(states, jnp.asarray(xs))
    assert_close(values, expected, 3e-6)


@few_rules
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_was_given_to_init_is_forgotten_at_the_first_update(rule, bad):
    average = tail_average(rule)
    xs = samples().astype(np.float32)
    clean, (expected, _, _) = run(average, xs, average.init(jnp.zeros(5)))
    dirty, (values, _, _) = run(average, xs, average.init(jnp.full(5, bad)))
    assert_same(values, expected)
    assert_same(dirty.sums, clean.sums)


@few_rules
def test_an_average_makes_no_nan_of_its_own(rule):
    average = tail_average(rule)
    state = average.init(jnp.ones(2))
    with jax.debug_nans(True):
        for _ in range(12):
            state = average.update(state, jnp.ones(2))
            assert_close(average.value(state), [1, 1], 1e-6)


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
    "w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32),
}
TINY = 10_000  # bytes; the smallest large leaf has two million


def temporary(function, *args):
    """The bytes that a compiled function needs besides its arguments, the first donated."""
    program = jax.jit(function, donate_argnums=0).lower(*args).compile()
    return program.memory_analysis().temp_size_in_bytes


large_rules = pytest.mark.parametrize(
    "rule",
    [
        AnytimeWindow(0.25, 2),
        AnytimeWindow(10, 3),
        AnytimeWindow(CAPPED, 5, turns="paper"),
        Exponential(0.25),
    ],
    ids=short,
)


def assert_in_place(rule, tree):
    average = tail_average(rule)
    state = jax.eval_shape(average.init, tree)
    assert temporary(average.update, state, tree) < TINY
    read = jax.jit(value).lower(state, tree).compile().memory_analysis()
    assert read.temp_size_in_bytes < TINY


@large_rules
def test_an_update_and_a_value_need_no_temporary_of_the_size_of_the_parameters(rule):
    assert_in_place(rule, LARGE)


@two_rules
def test_nor_do_they_if_leaves_are_of_several_dtypes(rule):
    assert_in_place(rule, MIXED)


@large_rules
def test_an_update_in_a_scan_needs_no_temporary_of_the_size_of_the_parameters(rule):
    average = tail_average(rule)
    state = jax.eval_shape(average.init, LARGE)
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), LARGE)

    def scan(state, trees):
        return lax.scan(lambda state, tree: (average.update(state, tree), None), state, trees)[0]

    assert temporary(scan, state, stacked) < TINY


# Sharding


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
    average = tail_average(rule)
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


@two_rules
@axis_types
def test_a_sharded_update_and_value_do_not_communicate(rule, axis_type):
    average = tail_average(rule)
    tree = sharded(axis_type, plain_tree())
    state = average.update(average.init(tree), tree)
    update = jax.jit(average.update, donate_argnums=0).lower(state, tree).compile()
    for program in (update, jax.jit(value).lower(state, tree).compile()):
        assert "num_partitions=4" in program.as_text()
        assert not re.search(COLLECTIVES, program.as_text())


@two_rules
def test_a_state_is_sharded_inside_a_mesh_that_is_set_and_in_shard_map(rule):
    average = tail_average(rule)
    xs = samples(40, (8,)).astype(np.float32)
    expected = averages(weight_matrix(rule, 40), xs)[-1]
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        trees = jax.device_put(xs, NamedSharding(mesh, PartitionSpec(None, "x")))
        state, _ = run(average, trees)
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


# Saving


def saved_by_orbax(state, path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", state)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        return checkpointer.restore(path / "state", abstract)


def saved_by_numpy(state, path):
    leaves, structure = jax.tree.flatten(state)
    np.savez(path / "state.npz", *leaves)
    with np.load(path / "state.npz") as file:
        return structure.unflatten([file[name] for name in file.files])


@two_rules
@pytest.mark.parametrize("save", [saved_by_orbax, saved_by_numpy])
def test_a_restored_run_is_the_unbroken_one_to_the_bit(rule, save, tmp_path):
    average = tail_average(rule)
    trees = {
        "w": samples(80, (2, 3)).astype(np.float32),
        "pair": Pair(samples(80, ()).astype(np.float32), np.arange(80)),
        "none": None,
    }
    update = jax.jit(average.update)
    whole = average.init(row(trees, 0))
    for i in range(80):
        if i == 37:
            resumed = save(whole, tmp_path)
            assert isinstance(resumed, TreeState)
            assert_same(resumed, whole)
        whole = update(whole, row(trees, i))
        if i >= 37:
            resumed = update(resumed, row(trees, i))
    assert_same(resumed, whole)
    assert_same(average.value(resumed), average.value(whole))


@two_rules
def test_a_sharded_state_is_restored_sharded(rule, tmp_path):
    average = tail_average(rule)
    tree = sharded(AxisType.Auto, plain_tree())
    state = average.update(average.init(tree), tree)
    restored = saved_by_orbax(state, tmp_path)
    assert_sharded_alike(restored.sums, tree)
    assert_sharded_alike(restored.means, tree, stacked=1)
    assert_same(average.update(restored, tree), average.update(state, tree))


# Sizes and profiles


@every_rule
def test_profile_and_size_are_those_of_numpy(rule):
    """After the 600 samples of other tests, and twice as many."""
    xs = samples()
    with jax.enable_x64(True):
        average, numpy = tail_average(rule, dtype=jnp.float64), TailAverage(rule)
        state = average.init(jnp.asarray(xs[0]))
        for _ in range(2):
            state, _ = run(average, xs, state)
            numpy.update_many(xs)
            got = average.profile(state)
            assert isinstance(got, Profile)
            assert got == numpy.profile()
            assert average.size(state) == pytest.approx(numpy.size, rel=1e-15)
            assert jax.jit(average.size)(state) == average.size(state)


@pytest.mark.parametrize("c", [0.07, 0.1, 0.3, 0.55, 0.9])
def test_sizes_that_are_whole_are_whole_in_a_compiled_program(c):
    """Else a block without weight has one, and a NaN in it stays."""
    steps = np.arange(1, 10_001)
    expected = Growing(c).size(steps)
    with jax.enable_x64(True):
        got = np.asarray(jax.jit(Growing(c).size)(jnp.asarray(steps)))
        assert_close(got, expected, 1e-15)
    whole = expected == np.round(expected)
    assert whole.sum() > 90
    np.testing.assert_array_equal(got[whole], expected[whole])


@few_rules
def test_profile_before_the_first_update_is_refused(rule):
    average = tail_average(rule)
    with pytest.raises(ValueError, match=r"profile: expected at least one update .*, got none"):
        average.profile(average.init(1.0))


# Edges


@pytest.mark.parametrize("accumulators", [2, 13])
def test_a_window_of_one_sample_is_the_last_sample(accumulators):
    xs = samples(60).astype(np.float32)
    for window in (1, Growing(0.5, at_most=1)):
        _, (values, _, _) = run(tail_average(AnytimeWindow(window, accumulators)), xs)
        np.testing.assert_array_equal(values, xs)


@pytest.mark.parametrize(
    "rule",
    [
        AnytimeWindow(5, 20),
        AnytimeWindow(CAPPED, 20, turns="paper"),
    ],
    ids=short,
)
def test_there_may_be_more_accumulators_than_samples_in_the_window(rule):
    xs = samples(120)
    with jax.enable_x64(True):
        _, (values, _, _) = run(tail_average(rule, dtype=jnp.float64), xs)
        assert_close(values, averages(weight_matrix(rule, 120), xs), 1e-12)


@pytest.mark.parametrize("turns", ["balanced", "paper"])
@pytest.mark.parametrize("window", [Growing(0.1, 7), Growing(0.9, 100), Growing(1.0, 50)], ids=str)
def test_a_window_passes_its_cap(window, turns):
    xs = samples()
    for rule in (AnytimeWindow(window, 3, turns), Exponential(window)):
        with jax.enable_x64(True):
            _, (values, _, sizes) = run(tail_average(rule, dtype=jnp.float64), xs)
            assert_close(values, averages(weight_matrix(rule, STEPS), xs), 1e-12)
            assert sizes[0] < sizes[-1] == window.at_most


# Packages that are not there


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("tailavg.jax", "jax", "jax"),
        ("tailavg.optax", "jax", "optax"),
        ("tailavg.optax", "optax", "optax"),
        ("tailavg.torch", "torch", "torch"),
    ],
)
def test_a_missing_package_names_the_extra_to_install(module, missing, extra):
    """A finder that finds nothing, as if the package had never been installed."""
    code = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] == {missing!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import tailavg\n"
        f"import {module}\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    *_, error, note = ran.stderr.strip().splitlines()
    assert error == f"ModuleNotFoundError: No module named '{missing}'"
    assert f"pip install 'tailavg[{extra}]'" in note


@pytest.mark.parametrize("name", ["jax", "torch"])
def test_a_package_that_is_blocked_is_reported_in_pythons_own_words(name):
    code = f"import sys; sys.modules[{name!r}] = None; import tailavg.{name}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    *_, error, note = ran.stderr.strip().splitlines()
    assert re.match(rf"ModuleNotFoundError: .*\b{name}\b", error)
    assert f"pip install 'tailavg[{name}]'" in note
