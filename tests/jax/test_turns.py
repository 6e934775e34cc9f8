"""What windows and rules tell of traced steps: sizes, growth, weights, and when blocks turn."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tailavg import AnytimeWindow, Exponential, Fixed, Growing
from tailavg.core.windows import NEVER
from tailavg.jax import tail_average
from tailavg.jax.clock import first_clock, size_at, traced_window
from tests.support.cases import anytime_windows, of_rules, windows
from tests.support.effort import some
from tests.support.schedule import advance, closes, turn

CAPPED = Growing(0.25, at_most=250_000)

# 0.15, 0.18, 0.3 and the share of 0.36 with two blocks, 0.2, are a little larger in float32, and a
# turn of 0.04 is nearly a tie
TURNING = [
    AnytimeWindow(0.07),
    AnytimeWindow(0.25, 2),
    AnytimeWindow(0.9, 3, "paper"),
    AnytimeWindow(1.0),
    AnytimeWindow(0.123456789123),
    AnytimeWindow(0.123456789123, 3, "paper"),
    AnytimeWindow(Growing(0.07, 40_000)),
    AnytimeWindow(0.04),
    AnytimeWindow(0.55, 5),
    AnytimeWindow(0.15, 2),
    AnytimeWindow(0.36, 3),
    AnytimeWindow(0.3, 3, "paper"),
    AnytimeWindow(0.18, 5, "paper"),
    AnytimeWindow(Growing(0.3, 70_000), 4, "paper"),
    AnytimeWindow(999, 3),
    AnytimeWindow(CAPPED, 2),
    AnytimeWindow(2_500_000),
]


def padded(rule, starts):
    return [0] * (rule.accumulators - len(starts)) + starts


def turns_after(rule, t, steps):
    """The starts of blocks before each turn in so many steps, those after it, and its step."""
    starts = advance(rule, [0], t) if t else [0]
    while (end := closes(rule, starts)) <= t + steps:
        after = turn(rule, starts, end)[-rule.accumulators :]
        yield padded(rule, starts), padded(rule, after), end
        starts = after


def all_turns(rule):
    """Every turn of two million steps, and some late ones."""
    yield from turns_after(rule, 0, 2 * 10**6)
    late = [2**24 + 1, 10**8]
    if rule.turns == "balanced" or rule.window.steady_from == NEVER:
        late.append(10**9)  # no formula tells the blocks of the others then
    for t in late:
        yield from turns_after(rule, t, 10**6 if rule.window.steady_from < NEVER else t)


@of_rules(TURNING)
def test_blocks_turn_on_the_very_sample(rule):
    starts, after, ends = map(np.array, zip(*all_turns(rule), strict=True))

    def stepped(starts, t):
        return first_clock(rule)._replace(starts=starts).step(rule, t)[1].starts

    for x64 in (False, True):
        with jax.enable_x64(x64):
            steps = np.r_[ends - 1, ends]
            blocks = jax.jit(jax.vmap(stepped))(
                jnp.asarray(np.r_[starts, starts], int), jnp.asarray(steps, int)
            )
        assert blocks.dtype == (np.int64 if x64 else np.int32)
        np.testing.assert_array_equal(blocks, np.r_[starts, after])


@given(anytime_windows, st.integers(1, 10**9))
@settings(max_examples=some(10, 200))
def test_any_block_is_closed_at_the_step_where_it_is_elsewhere(rule, t):
    """Operation by operation, since a program for each example would take long to compile."""
    assume(isinstance(rule.window, Fixed) or rule.window.c > 0.01)  # others need a long table
    if rule.turns == "paper":
        t %= 3000  # no formula tells the blocks of a capped one
    starts = padded(rule, advance(rule, [0], t + 1))
    end = rule.closes(starts)
    for x64, last in ((False, 2**31 - 1), (True, NEVER)):
        with jax.enable_x64(x64):
            clock = first_clock(rule)._replace(starts=jnp.asarray(starts, int))
            for step in {min(end, last) - 1, min(end, last - 1)}:
                after = clock.step(rule, jnp.asarray(step, int))[1].starts.tolist()
                assert (after != starts) == (step == end)


def test_a_block_near_the_last_step_does_not_overflow():
    rule = AnytimeWindow(10**9)
    for start, t, is_full in [(15 * 10**8, 2**31 - 2, True), (2 * 10**9, 2**31 - 2, False)]:
        clock = first_clock(rule)._replace(starts=jnp.array([5 * 10**8, 10**9, start], jnp.int32))
        assert (clock.step(rule, jnp.int32(t))[1].starts[-1] == t) == is_full


def test_a_fraction_whose_table_would_be_too_long_is_refused():
    average = tail_average(1e-6)
    with pytest.raises(ValueError, match=r"rule: the blocks of .* larger fraction"):
        average.update(average.init(1.0), 1.0)


# Weights and growth


STEPS_ASKED = np.unique(
    np.r_[1:3000, np.geomspace(3000, 3e7, 3000).astype(int), 2**24 - 5 : 2**24 + 5]
)


def in_float32(functions, steps=STEPS_ASKED):
    """Functions of a traced integer by name, at many steps, in one program."""
    program = jax.jit(jax.vmap(lambda t: {name: f(t) + 0.0 * t for name, f in functions.items()}))
    arrays = program(jnp.asarray(steps, jnp.int32))
    assert {x.dtype.name for x in arrays.values()} == {"float32"}
    return {name: np.asarray(x, float) for name, x in arrays.items()}


def test_the_weight_of_a_sample_keeps_its_digits_in_single_precision():
    fractions = 0.01, 0.07, 0.25, 0.3, 0.5, 0.9, 0.999, 0.123456789123, 1.0
    rules = [Exponential(w) for w in (1000, 250_000, 2_500_000, *fractions, CAPPED)]
    steps = STEPS_ASKED.astype(float)
    got = in_float32({str(rule): Exponential(traced_window(rule.window)).weight for rule in rules})
    for rule in rules:
        fresh, name = rule.weight(steps), str(rule)
        expected = 1 - rule.decay(steps)
        np.testing.assert_allclose(fresh, expected, rtol=2e-15 * steps.max(), err_msg=name)
        np.testing.assert_allclose(got[name], fresh, rtol=2e-6, err_msg=name)


@given(windows, st.integers(1, 10**6))
def test_the_weight_of_a_sample_is_1_less_the_decay(window, t):
    rule = Exponential(window)
    assert rule.weight(t) == pytest.approx(1 - rule.decay(t), rel=1e-9, abs=1e-13)
    steps = np.arange(t, t + 50)
    expected = [rule.weight(step) for step in steps.tolist()]
    np.testing.assert_allclose(rule.weight(steps), expected, rtol=1e-13)
    tensor = torch.as_tensor(rule.weight(torch.tensor(steps, dtype=torch.float64)))
    np.testing.assert_allclose(tensor, expected, rtol=1e-13)


@given(windows, st.integers(2, 10**6))
def test_growth_is_the_difference_of_two_sizes(window, t):
    steps = np.arange(t, t + 50)
    expected = [window.size(s) - window.size(s - 1) for s in steps.tolist()]
    np.testing.assert_allclose([window.growth(s) for s in steps.tolist()], expected, atol=1e-9)
    np.testing.assert_allclose(np.broadcast_to(window.growth(steps), 50), expected, atol=1e-9)
    tensor = torch.as_tensor(window.growth(torch.tensor(steps, dtype=torch.float64)))
    np.testing.assert_allclose(np.broadcast_to(tensor, 50), expected, atol=1e-9)


def test_growth_keeps_its_digits_in_single_precision():
    asked = [Growing(0.07), Growing(0.25), Growing(1.0), CAPPED, Fixed(9)]
    got = in_float32({str(window): traced_window(window).growth for window in asked})
    for window in asked:
        growth = got[str(window)]
        expected = np.broadcast_to(window.growth(STEPS_ASKED.astype(float)), growth.shape)
        capped = getattr(window, "at_most", None)
        sure = np.abs(window.size(STEPS_ASKED.astype(float)) - (capped or 0)) > 1
        np.testing.assert_allclose(
            growth[sure], expected[sure], rtol=1e-6, atol=1e-6, err_msg=str(window)
        )


def test_growth_keeps_its_digits_beyond_what_single_precision_can_count():
    asked = [Growing(0.07), Growing(0.3), Growing(1.0), Growing(0.3, 30_000_001)]
    asked.append(Growing(0.25, 2**27))
    caps = [math.ceil(w.at_most / Fraction(str(w.c))) for w in asked if w.at_most]
    middles = [2**24 + 50, 10**8, 10**9, *caps]
    steps = np.r_[*(slice(t - 50, t + 50) for t in middles), 2**31 - 50 : 2**31 - 1]
    got = in_float32({str(window): traced_window(window).growth for window in asked}, steps)
    for window in asked:

        def size(t, window=window):
            return min(Fraction(str(window.c)) * t, window.at_most or t)

        expected = [float(size(t) - size(t - 1)) for t in steps.tolist()]
        np.testing.assert_allclose(
            got[str(window)], expected, rtol=1e-6, atol=1e-7, err_msg=str(window)
        )


def test_sizes_that_are_whole_are_whole_in_a_compiled_program():
    """Else a block without weight has one, and a NaN in it stays."""
    steps = np.arange(1, 10_001)
    fractions = [0.07, 0.1, 0.3, 0.55, 0.9]
    with jax.enable_x64(True):
        program = jax.jit(lambda t: [size_at(Exponential(c), t) for c in fractions])
        sizes = [np.asarray(x) for x in program(jnp.asarray(steps))]
    for c, got in zip(fractions, sizes, strict=True):
        expected = Growing(c).size(steps)
        np.testing.assert_allclose(got, expected, rtol=1e-15, err_msg=str(c))
        whole = expected == np.round(expected)
        assert whole.sum() > 90
        np.testing.assert_array_equal(got[whole], expected[whole], err_msg=str(c))
