"""Values, sizes and profiles in JAX, against dense weights and against NumPy's."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tailavg import AnytimeWindow, Exponential, Growing, Profile, TailAverage
from tailavg.jax import tail_average, value
from tests.support.cases import anytime_windows, assert_close, of_rules, samples, windows
from tests.support.effort import some
from tests.support.jax_trees import (
    RULES,
    assert_same,
    every_rule,
    row,
    run,
    two_leaves,
    two_rules,
)
from tests.support.model import Blocks, averages, weight_matrix
from tests.support.schedule import advance

STEPS = 600
drawn_rules = st.one_of(anytime_windows, st.builds(Exponential, windows))


# Values, with x64


def run_in_float64(rule, xs, state=None):
    """Run over a bundled leaf and one that is not: one program for a rule, in all of this file."""
    return run(tail_average(rule, dtype=jnp.float64, bundle=5), two_leaves(xs), state)


def averages_of(rule, xs):
    """The averages of both leaves after each step, by the dense weights."""
    weights = weight_matrix(rule, len(xs))
    return {name: averages(weights, leaf) for name, leaf in two_leaves(xs).items()}


def assert_all_close(trees, expected, rtol):
    for name, leaf in expected.items():
        np.testing.assert_allclose(trees[name], leaf, rtol=rtol, atol=0, err_msg=name)


@every_rule
def test_values_are_those_of_the_dense_weights_and_of_numpy_at_every_step(rule):
    xs = samples()
    with jax.enable_x64(True):
        _, (values, _, sizes) = run_in_float64(rule, xs)
        assert {x.dtype for x in (sizes, *values.values())} == {np.dtype("float64")}
        assert_all_close(values, averages_of(rule, xs), 1e-12)
        assert_close(values["bundled"], TailAverage(rule).scan(xs), 1e-12)
        assert_close(sizes, [rule.size(t) for t in range(1, STEPS + 1)], 1e-15)


@given(drawn_rules)
@settings(max_examples=some(5, 50))
def test_values_of_any_rule_are_those_of_the_dense_weights(rule):
    xs = samples(150)
    with jax.enable_x64(True):
        _, (values, _, _) = run(tail_average(rule, dtype=jnp.float64), xs)
        assert_close(values, averages(weight_matrix(rule, 150), xs), 1e-12)


@of_rules([rule for rule in RULES if isinstance(rule, AnytimeWindow)])
def test_blocks_turn_on_the_very_sample_where_numpy_turns(rule):
    blocks, numpy = Blocks(rule), TailAverage(rule)
    with jax.enable_x64(True):
        _, (_, clocks, _) = run_in_float64(rule, samples())
        all_starts = np.asarray(clocks.starts)
    for starts in all_starts:
        blocks.add()
        numpy.update(1.0)
        used = sorted(set(starts.tolist()))  # blocks yet to come are empty ones at the start
        assert used == blocks.starts() == numpy.state_dict()["starts"]


@of_rules([AnytimeWindow(1.0, 2), Exponential(700)])
def test_values_hold_over_several_folds(rule):
    xs = samples(2500, (1,))
    with jax.enable_x64(True):
        _, (values, _, _) = run(tail_average(rule, dtype=jnp.float64, bundle=1), two_leaves(xs))
        for name, expected in two_leaves(TailAverage(rule).scan(xs)).items():
            np.testing.assert_allclose(values[name], expected, rtol=1e-12, err_msg=name)


@two_rules
def test_wide_accumulators_take_narrow_leaves(rule):
    xs = samples().astype(np.float32)
    with jax.enable_x64(True):
        average = tail_average(rule, dtype=jnp.float64)
        state, (values, _, _) = run(average, {"w": xs})
        assert state.sums["w"].dtype == state.bundles["float64"].means.dtype == np.float64
        assert_close(values["w"], averages(weight_matrix(rule, STEPS), xs), 1e-12)
        assert average.value(state, like={"w": jnp.asarray(xs[0])})["w"].dtype == np.float32


@two_rules
def test_narrow_accumulators_take_wide_leaves(rule):
    xs = samples()
    with jax.enable_x64(True):
        state, (values, _, _) = run(tail_average(rule), {"w": xs})
        assert state.sums["w"].dtype == values["w"].dtype == np.float32
        assert state.bundles["float32"].means.dtype == np.float32
        assert_close(values["w"], averages(weight_matrix(rule, STEPS), xs), 3e-6)


# Values, without x64


@given(drawn_rules)
@settings(max_examples=some(2, 20))
def test_single_precision_is_near_for_any_rule(rule):
    xs = samples(150, (2,)).astype(np.float32)
    _, (values, _, _) = run(tail_average(rule), {"x": xs, "one": np.ones(150, np.float32)})
    assert_close(values["one"], np.ones(150), 3e-6)
    assert_close(values["x"], averages(weight_matrix(rule, 150), xs), 1e-5)


LONG = [1, 2, 999, 2**16 + 1, 10**6, 4_999_999, 9_876_543, 10**7]


def jumped(rule, count, starts, blocks):
    """The state of an average after so many samples, with these means of its blocks."""
    saved = TailAverage(rule, dtype="float32").state_dict() | {
        "scalar": False,
        "count": count,
        "starts": starts,
        "blocks": blocks.astype(np.float32),
        "folded": count,
        "partial": np.zeros(blocks.shape[1], np.float32),
    }
    return tail_average(rule).from_state_dict(saved, jnp.zeros(blocks.shape[1]))


@of_rules(
    [
        AnytimeWindow(250_000),
        AnytimeWindow(0.999, 7),
        AnytimeWindow(0.0123456789123, 5, turns="paper"),
        AnytimeWindow(Growing(0.5, at_most=4_999_998), 4),
    ]
)
def test_single_precision_has_the_effective_size_after_ten_million_steps(rule):
    """Each block's mean is a row of the identity: the average is the weights of the blocks."""
    read = jax.jit(value)
    for t in LONG:
        starts = advance(rule, [0], t)
        weights = np.asarray(
            read(jumped(rule, t, starts, np.eye(len(starts), rule.accumulators))), np.float64
        )[: len(starts)]
        assert abs(weights.sum() - 1) < 1e-6
        effective = 1 / (weights**2 / np.diff([*starts, t])).sum()
        assert abs(effective / min(t, rule.size(t)) - 1) < 1e-5


@pytest.mark.parametrize("window", [250_000, 0.25, Growing(0.5, 3_000_000)], ids=str)
def test_single_precision_has_the_decay_after_ten_million_steps(window):
    """The mean so far is (1, 0), the next sample (0, 1): the average is their weights."""
    rule = Exponential(window)
    average = tail_average(rule)
    next_value = jax.jit(lambda state, x: average.value(average.update(state, x)))
    for t in LONG[1:]:
        state = jumped(rule, t - 1, [0], np.array([[1, 0]]))
        old, new = np.asarray(next_value(state, jnp.array([0.0, 1.0])), float)
        assert abs(old + new - 1) < 1e-6
        before, after = min(t - 1, rule.size(t - 1)), min(t, rule.size(t))
        assert abs(new / (1 - rule.decay(t)) - 1) < 1e-5
        assert abs(1 / (old**2 / before + new**2) / after - 1) < 1e-5


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
        expected = averages_of(rule, xs)
        numpy = TailAverage(rule).scan(xs)
    with jax.enable_x64(True):
        _, (values, _, _) = run_in_float64(rule, xs)
        assert_all_close(values, expected, 1e-12)
        assert_close(values["bundled"], numpy, 1e-12)


@two_rules
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


@two_rules
def test_what_was_given_to_init_is_forgotten_at_the_first_update(rule):
    average = tail_average(rule, bundle=5)
    xs = two_leaves(samples(300).astype(np.float32))
    clean, (expected, _, _) = run(average, xs, average.init(row(xs, 0)))
    bad = two_leaves(np.array([math.nan, math.inf, -math.inf, 1e30, 1.0], np.float32))
    dirty, (values, _, _) = run(average, xs, average.init(bad))
    assert_same(values, expected)
    assert_same(dirty.sums, clean.sums)


@pytest.mark.parametrize(("rule", "bundle"), [(AnytimeWindow(0.3), 0), (Exponential(10), 5)])
def test_an_average_makes_no_nan_of_its_own(rule, bundle):
    average = tail_average(rule, bundle=bundle)
    state = average.init(jnp.ones(2))
    with jax.debug_nans(True):
        for _ in range(12):
            state = average.update(state, jnp.ones(2))
            assert_close(average.value(state), [1, 1], 1e-6)


# Sizes and profiles


@every_rule
def test_profile_and_size_are_those_of_numpy(rule):
    """After the 600 samples of other tests, and twice as many."""
    xs = samples()
    with jax.enable_x64(True):
        average, numpy = tail_average(rule, dtype=jnp.float64, bundle=5), TailAverage(rule)
        state = None
        for _ in range(2):
            state, _ = run_in_float64(rule, xs, state)
            numpy.update_many(xs)
            got = average.profile(state)
            assert isinstance(got, Profile)
            assert got == numpy.profile()
            np.testing.assert_array_equal(average.weights(state), numpy.weights())
            assert average.count(state) == numpy.count
            assert average.size(state) == pytest.approx(numpy.size, rel=1e-15)
            assert jax.jit(average.size)(state) == average.size(state)


@two_rules
def test_profile_before_the_first_update_is_refused(rule):
    average = tail_average(rule)
    with pytest.raises(ValueError, match=r"profile: expected at least one sample .*, got none"):
        average.profile(average.init(1.0))


# Edges


@of_rules([AnytimeWindow(1, 13), AnytimeWindow(Growing(0.5, at_most=1), 2)])
def test_a_window_of_one_sample_is_the_last_sample(rule):
    xs = samples(60).astype(np.float32)
    _, (values, _, _) = run(tail_average(rule), xs)
    np.testing.assert_array_equal(values, xs)


def test_there_may_be_more_accumulators_than_samples_in_the_window():
    rule = AnytimeWindow(Growing(0.5, at_most=9), 20, turns="paper")
    xs = samples(120)
    with jax.enable_x64(True):
        _, (values, _, _) = run(tail_average(rule, dtype=jnp.float64), xs)
        assert_close(values, averages(weight_matrix(rule, 120), xs), 1e-12)


def test_a_window_passes_its_cap():
    """That of an exponential; `RULES` has one of blocks."""
    rule = Exponential(Growing(1.0, 50))
    xs = samples()
    with jax.enable_x64(True):
        _, (values, _, sizes) = run(tail_average(rule, dtype=jnp.float64), xs)
        assert_close(values, averages(weight_matrix(rule, STEPS), xs), 1e-12)
        assert sizes[0] < sizes[-1] == rule.window.at_most
