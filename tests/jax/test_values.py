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
from tailavg.jax.clock import traced
from tests.support import cases
from tests.support.cases import CAPPED, anytime_windows, assert_close, samples, short, windows
from tests.support.jax_trees import assert_same, both_ways, few_rules, run
from tests.support.model import Blocks, averages, weight_matrix
from tests.support.schedule import advance

STEPS = 600
RULES = [rule for rule in cases.RULES if isinstance(rule, AnytimeWindow | Exponential)]
every_rule = pytest.mark.parametrize("rule", RULES, ids=short)
drawn_rules = st.one_of(anytime_windows, st.builds(Exponential, windows))


# Values, with x64


@every_rule
@both_ways
def test_values_are_those_of_the_dense_weights_and_of_numpy_at_every_step(rule, bundle):
    xs = samples()
    with jax.enable_x64(True):
        _, (values, _, sizes) = run(tail_average(rule, dtype=jnp.float64, bundle=bundle), xs)
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
@both_ways
def test_values_hold_over_several_folds(rule, bundle):
    xs = samples(2500, ())
    with jax.enable_x64(True):
        _, (values, _, _) = run(tail_average(rule, dtype=jnp.float64, bundle=bundle), xs)
        assert_close(values, TailAverage(rule).scan(xs), 1e-12)


@few_rules
def test_wide_accumulators_take_narrow_leaves(rule):
    xs = samples().astype(np.float32)
    with jax.enable_x64(True):
        average = tail_average(rule, dtype=jnp.float64)
        state, (values, _, _) = run(average, {"w": xs})
        assert state.sums["w"].dtype == state.bundles["float64"].means.dtype == np.float64
        assert_close(values["w"], averages(weight_matrix(rule, STEPS), xs), 1e-12)
        assert average.value(state, like={"w": jnp.asarray(xs[0])})["w"].dtype == np.float32


@few_rules
def test_narrow_accumulators_take_wide_leaves(rule):
    xs = samples()
    with jax.enable_x64(True):
        state, (values, _, _) = run(tail_average(rule), {"w": xs})
        assert state.sums["w"].dtype == values["w"].dtype == np.float32
        assert state.bundles["float32"].means.dtype == np.float32
        assert_close(values["w"], averages(weight_matrix(rule, STEPS), xs), 3e-6)


# Values, without x64


@every_rule
@both_ways
def test_single_precision_weighs_samples_as_the_dense_weights_do(rule, bundle):
    """The samples are the rows of the identity: the average is the weights themselves."""
    average = tail_average(rule, bundle=bundle)
    _, (weights, _, sizes) = run(average, np.eye(STEPS, dtype=np.float32))
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


# NaN and infinities


@every_rule
@both_ways
def test_nan_and_infinity_last_as_long_as_they_have_a_weight(rule, bundle):
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
        average = tail_average(rule, dtype=jnp.float64, bundle=bundle)
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
@both_ways
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_was_given_to_init_is_forgotten_at_the_first_update(rule, bundle, bad):
    average = tail_average(rule, bundle=bundle)
    xs = samples().astype(np.float32)
    clean, (expected, _, _) = run(average, xs, average.init(jnp.zeros(5)))
    dirty, (values, _, _) = run(average, xs, average.init(jnp.full(5, bad)))
    assert_same(values, expected)
    assert_same(dirty.sums, clean.sums)


@few_rules
@both_ways
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
        average, numpy = tail_average(rule, dtype=jnp.float64), TailAverage(rule)
        state = average.init(jnp.asarray(xs[0]))
        for _ in range(2):
            state, _ = run(average, xs, state)
            numpy.update_many(xs)
            got = average.profile(state)
            assert isinstance(got, Profile)
            assert got == numpy.profile()
            np.testing.assert_array_equal(average.weights(state), numpy.weights())
            assert average.count(state) == numpy.count
            assert average.size(state) == pytest.approx(numpy.size, rel=1e-15)
            assert jax.jit(average.size)(state) == average.size(state)


@pytest.mark.parametrize("c", [0.07, 0.1, 0.3, 0.55, 0.9])
def test_sizes_that_are_whole_are_whole_in_a_compiled_program(c):
    """Else a block without weight has one, and a NaN in it stays."""
    steps = np.arange(1, 10_001)
    expected = Growing(c).size(steps)
    with jax.enable_x64(True):
        got = np.asarray(jax.jit(traced(Exponential(c)).size)(jnp.asarray(steps)))
        assert_close(got, expected, 1e-15)
    whole = expected == np.round(expected)
    assert whole.sum() > 90
    np.testing.assert_array_equal(got[whole], expected[whole])


@few_rules
def test_profile_before_the_first_update_is_refused(rule):
    average = tail_average(rule)
    with pytest.raises(ValueError, match=r"profile: expected at least one sample .*, got none"):
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
