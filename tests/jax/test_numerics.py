"""Single precision in JAX: weights, sizes and averages, against float64."""

import math
from fractions import Fraction
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from jax import lax

from tailavg import AnytimeWindow, Exponential, Fixed, Growing, TailAverage
from tailavg.core.clock import starts_at
from tailavg.core.profile import dense_weights
from tailavg.core.state import state as layout
from tailavg.core.windows import INTEGERS, NEVER
from tailavg.jax import tail_average
from tailavg.jax.clock import traced
from tests.support.cases import anytime_windows, of_rules, turns_of, windows
from tests.support.jax_trees import both_ways
from tests.support.schedule import advance

CAPPED = Growing(0.25, at_most=250_000)

BLOCKS = [
    AnytimeWindow(1000),
    AnytimeWindow(1000, 2),
    AnytimeWindow(250_000, 2),
    AnytimeWindow(250_000),
    AnytimeWindow(250_000, 5),
    AnytimeWindow(2_500_000),
    AnytimeWindow(0.25),
    AnytimeWindow(0.25, 2),
    AnytimeWindow(0.25, 3, "paper"),
    AnytimeWindow(0.25, 5, "paper"),
    AnytimeWindow(0.07),
    AnytimeWindow(0.07, 5),
    AnytimeWindow(0.3, 3, "paper"),
    AnytimeWindow(0.5, 2),
    AnytimeWindow(0.5, 5),
    AnytimeWindow(1.0),
    AnytimeWindow(CAPPED, 2),
    AnytimeWindow(CAPPED),
    AnytimeWindow(CAPPED, 5, "paper"),
]
DECAYS = [
    Exponential(1000),
    Exponential(250_000),
    Exponential(2_500_000),
    Exponential(0.07),
    Exponential(0.25),
    Exponential(0.5),
    Exponential(1.0),
    Exponential(CAPPED),
]
LONG = 10_000_000


def sizes_wanted(rule, t):
    """The effective size that a rule promises: k_t samples, or all while there are fewer."""
    return np.minimum(t, rule.size(t.astype(float)))


@cache
def machine(rule):
    """The program on its scalars alone: no leaf is averaged, and all decisions are made."""
    average = tail_average(rule)

    def look(state, _):
        step, _ = state.clock.step(traced(rule), state.updates)
        state = average.update(state, {})
        weights = state.clock.weights(state.updates, state.size)
        return state, (state.updates, state.clock, step, weights)

    skip = jax.jit(
        lambda state, steps: lax.fori_loop(0, steps, lambda _, s: average.update(s, {}), state)
    )
    watch = jax.jit(lambda state, steps: lax.scan(look, state, steps))
    return average, skip, watch


def watched(rule, steps, state=None):
    """The scalars after each of so many steps, as arrays; and the state then."""
    average, _, watch = machine(rule)
    state, seen = watch(average.init({}) if state is None else state, jnp.zeros(steps))
    return state, jax.tree.map(np.asarray, seen)


def check_blocks(rule, seen):
    """From the weights as they are: that they add up to 1, and to the promised size."""
    t, clock, _, (of_means, of_sum) = seen
    starts = clock.starts.astype(np.int64)
    mean_sizes = np.diff(np.c_[starts, clock.folded])  # of the open block, the folded part
    of_means = np.take_along_axis(of_means.astype(float), clock.places, axis=1)
    rest, of_sum = t - clock.folded, of_sum.astype(float)
    assert (mean_sizes >= 0).all()
    assert (rest > 0).all()
    assert (of_means >= 0).all()
    assert (of_means[mean_sizes == 0] == 0).all()
    total = of_means.sum(axis=1) + of_sum * rest
    squares = (of_means**2 / np.maximum(mean_sizes, 1)).sum(axis=1) + of_sum**2 * rest
    np.testing.assert_allclose(total, 1, rtol=0, atol=1e-6)
    # a block that is just full may have part of a sample too many
    wanted, newest = sizes_wanted(rule, t), t - starts[:, -1]
    assert (newest < wanted + 1).all()
    np.testing.assert_allclose(1 / squares, np.maximum(wanted, newest), rtol=1e-5)


def watch_until(rule, end, state):
    """Skip to 3000 steps before `end`, and watch those."""
    average, skip, _ = machine(rule)
    state = average.init({}) if state is None else state
    ahead = end - 3000 - int(state.updates)
    if ahead > 0:
        state = skip(state, ahead)
    return watched(rule, 3000, state)


@of_rules(BLOCKS)
def test_blocks_have_the_size_that_they_promise_up_to_twenty_million(rule):
    """Steps 1 to 3000, then 3000 around some, and around the turns before.

    From 2²⁴ on float32 has not all whole numbers.
    """
    state, seen = watched(rule, 3000)
    check_blocks(rule, seen)
    steps = [5000, 10**4, 5 * 10**4, 10**5, 5 * 10**5, 10**6, LONG // 2, LONG, 2**24, 2 * LONG]
    turns = [advance(rule, [0], t)[-1] for t in steps]
    for middle in sorted({*steps, *turns}):
        state, seen = watch_until(rule, middle + 1500, state)
        check_blocks(rule, seen)
    assert int(state.updates) >= 2 * LONG


@of_rules([AnytimeWindow(0.25), AnytimeWindow(250_000)])
def test_blocks_have_the_size_that_they_promise_at_every_step(rule):
    state = None
    for _ in range(20):
        state, seen = watched(rule, LONG // 20, state)
        check_blocks(rule, seen)
    assert int(state.updates) == LONG


@of_rules([*BLOCKS[:-1], *DECAYS])
def test_no_product_of_integers_overflows(rule):
    """Two thousand million steps are near the end of int32, and far beyond it if multiplied."""
    for t in (2**30, 2 * 10**9):
        starts = advance(rule, [0], t) if isinstance(rule, AnytimeWindow) else [0]
        saved = layout(
            rule,
            dtype="float32",
            count=t,
            starts=starts,
            blocks=[{}] * len(starts),
            folded=t,
            partial={},
        )
        average, _, _ = machine(rule)
        state, seen = watched(rule, 3000, average.from_state_dict(saved, {}))
        assert int(state.updates) == t + 3000
        np.testing.assert_allclose(float(state.size), rule.size(t + 3000), rtol=1e-6)
        if isinstance(rule, AnytimeWindow):
            check_blocks(rule, seen)
            ends = advance(rule, [0], t + 3000)
            np.testing.assert_array_equal(state.clock.starts[-len(ends) :], ends)
        else:
            _, _, step, _ = seen
            share = 1 - np.exp(np.log(rule.decay(np.arange(t + 1.0, t + 3001))).sum())
            kept = np.log1p(-step.factor / np.exp(-seen[1].decayed).astype(float)).sum()
            np.testing.assert_allclose(1 - np.exp(kept), share, rtol=1e-5)


def each_size_of(rule, steps):
    """Of an exponential at each step, from the scalars as they are: t, Σα and 1 / Σα²."""
    state = None
    mean, left = np.zeros(2), np.zeros(2)  # Σα and Σα² of the samples in the mean, and in the sum
    for _ in range(steps // 500_000):
        state, (t, _, step, (of_mean, of_sum)) = watched(rule, 500_000, state)
        of_mean, of_sum, factor = (np.float64(x) for x in (of_mean[:, 0], of_sum, step.factor))
        starts = np.flatnonzero(step.folds)
        run = np.cumsum(step.folds)  # of samples between two folds, at most 256
        place = np.arange(len(t)) - np.r_[0, starts][run]
        grid = np.zeros((2, len(starts) + 1, 256))
        grid[:, run, place] = [factor, factor**2]
        grid[:, 0, 0] += left  # that run goes on
        sums = np.cumsum(grid, axis=2)
        means = [mean]
        weights = np.float64(step.weight[starts]), 1 / np.float64(step.total[starts])
        for w, scale, total in zip(*weights, sums[:, :, -1].T, strict=False):
            s = w * scale
            mean = np.array([1 - w, (1 - w) ** 2]) * mean + np.array([s, s**2]) * total
            means.append(mean)
        means = np.array(means).T[:, run]
        sums = sums[:, run, place]
        left = sums[:, -1]
        size = 1 / (of_mean**2 * means[1] + of_sum**2 * sums[1])
        yield t, of_mean * means[0] + of_sum * sums[0], size


@of_rules([*DECAYS[1:5], DECAYS[6]])
def test_an_exponential_has_the_size_that_it_promises_at_every_step(rule):
    for t, total, size in each_size_of(rule, LONG):
        # a sum of 256 factors is rounded as often
        np.testing.assert_allclose(total, 1, rtol=0, atol=2e-6)
        np.testing.assert_allclose(size, sizes_wanted(rule, t), rtol=1e-5)
    assert t[-1] == LONG


@of_rules([DECAYS[0], DECAYS[5], DECAYS[7]])
def test_an_exponential_has_the_size_that_it_promises_up_to_two_million(rule):
    for t, total, size in each_size_of(rule, 2_000_000):
        np.testing.assert_allclose(total, 1, rtol=0, atol=2e-6)
        np.testing.assert_allclose(size, sizes_wanted(rule, t), rtol=1e-5)


SHORT = [
    AnytimeWindow(1),
    AnytimeWindow(7, 2),
    AnytimeWindow(300),
    AnytimeWindow(1000, 5),
    AnytimeWindow(0.01),
    AnytimeWindow(0.25, 2),
    AnytimeWindow(1.0),
    AnytimeWindow(Growing(0.5, at_most=400), 3),
    AnytimeWindow(0.25, 5, "paper"),
    AnytimeWindow(Growing(0.5, at_most=400), 4, "paper"),
    Exponential(1),
    Exponential(2),
    Exponential(20),
    Exponential(700),
    Exponential(0.01),
    Exponential(0.25),
    Exponential(1.0),
    Exponential(Growing(0.5, at_most=400)),
]


@of_rules(SHORT)
@both_ways
def test_the_weight_of_every_sample_is_that_of_numpy(rule, bundle):
    """Of unit vectors, one for each step, the average has the weights as they really are."""
    steps, every = 1200, 60
    average = tail_average(rule, bundle=bundle)

    def some(state, t):
        state, _ = lax.scan(
            lambda state, i: (average.update(state, (jnp.arange(steps) == i) * 1.0), None),
            state,
            t + jnp.arange(every),
        )
        return state, average.value(state)

    run = jax.jit(lambda state: lax.scan(some, state, jnp.arange(0, steps, every)))
    _, values = run(average.init(jnp.zeros(steps)))
    for t, weights in zip(range(every, steps + 1, every), np.asarray(values), strict=True):
        starts = advance(rule, [0], t) if isinstance(rule, AnytimeWindow) else [0]
        expected = np.zeros(steps)
        expected[:t] = dense_weights(rule, starts, t)
        np.testing.assert_allclose(weights, expected, rtol=3e-6, atol=2e-8)
        weights = weights.astype(float)
        assert weights.sum() == pytest.approx(1, abs=2e-6)
        assert weights @ weights == pytest.approx(expected @ expected, rel=1e-5)


# Values


STEPS, EVERY = 1_000_000, 500


@cache
def streams():
    """Samples of many kinds as columns, of float32 and of 16 bits."""
    rng = np.random.default_rng(0)
    i = np.arange(STEPS) / STEPS
    columns = {
        "random": 1 + rng.random(STEPS),
        "noise": 1 + rng.standard_normal(STEPS),
        "1.1": np.full(STEPS, 1.1),
        "1/3": np.full(STEPS, 1 / 3),
        "drift": 1 + i,
        "tiny drift": 1 + 1e-3 * i,
        "sine": 2 + np.sin(200 * i),
        "offset": 1000 + rng.standard_normal(STEPS),
        "huge": 1e30 * (1 + rng.random(STEPS)),
        "small": 1e-30 * (1 + rng.random(STEPS)),
        "falling": 1 / (1 + 100 * i),
    }
    of_16 = {"drift": 1 + i, "1.1": np.full(STEPS, 1.1), "hundred": 100 + 10 * i}
    single, half = (np.stack(list(each.values()), axis=1) for each in (columns, of_16))
    names = {"float32": list(columns), "float16": list(of_16), "bfloat16": list(of_16)}
    return names, {
        "float32": single.astype(np.float32),
        "float16": half.astype(np.float16),
        "bfloat16": half.astype(jnp.bfloat16),
    }


LASTING = [
    *(AnytimeWindow(window, n) for window in (250_000, 0.25) for n in (2, 3, 8)),
    Exponential(250_000),
    Exponential(0.25),
]


def check_averages(rule, bundle, kinds):
    """Each 500 steps, against float64."""
    names, samples = streams()
    samples = {kind: samples[kind] for kind in kinds}
    average = tail_average(rule, bundle=bundle)

    def some(state, xs):
        state, _ = lax.scan(lambda state, x: (average.update(state, x), None), state, xs)
        return state, average.value(state)

    run = jax.jit(lambda state, xs: lax.scan(some, state, xs))
    chunked = {kind: x.reshape(-1, EVERY, x.shape[1]) for kind, x in samples.items()}
    _, values = run(average.init({kind: jnp.asarray(x[0]) for kind, x in samples.items()}), chunked)
    for kind, x in samples.items():
        assert values[kind].dtype == jnp.float32
        expected = TailAverage(rule, dtype=np.float64).scan(x.astype(float))[EVERY - 1 :: EVERY]
        got = np.asarray(values[kind], float)
        for name, column, wanted in zip(names[kind], got.T, expected.T, strict=True):
            np.testing.assert_allclose(column, wanted, rtol=1e-5, err_msg=f"{kind} {name}")


@of_rules(LASTING)
@both_ways
def test_averages_of_a_long_window_are_those_of_float64(rule, bundle):
    check_averages(rule, bundle, ["float32"])


@of_rules([AnytimeWindow(250_000), Exponential(0.25)])
@both_ways
def test_averages_of_16_bits_are_those_of_float64(rule, bundle):
    check_averages(rule, bundle, ["float16", "bfloat16"])


# Turns


def turns_in_jax(rule, steps, dtype):
    average = tail_average(rule, dtype=dtype)

    def step(state, _):
        state = average.update(state, {})
        return state, state.clock.starts[-1]

    _, starts = jax.jit(lambda state: lax.scan(step, state, None, length=steps))(average.init({}))
    starts = np.asarray(starts)
    return np.r_[0, starts[1:][np.diff(starts) > 0]]


# 0.15, 0.18, 0.3 and the share of 0.36 with two blocks, 0.2, are a little larger in float32, and a
# turn of 0.04 is nearly a tie
TURNING = [
    *(
        AnytimeWindow(window, 3, turns)
        for window in (0.07, 0.25, 0.9, 1.0, 0.123456789123, Growing(0.07, 40_000))
        for turns in ("balanced", "paper")
    ),
    AnytimeWindow(0.04),
    AnytimeWindow(0.25, 2),
    AnytimeWindow(0.55, 5),
    AnytimeWindow(0.15, 2),
    AnytimeWindow(0.36, 3),
    AnytimeWindow(0.3, 3, "paper"),
    AnytimeWindow(0.18, 5, "paper"),
    AnytimeWindow(Growing(0.3, 70_000), 4, "paper"),
    AnytimeWindow(999, 3),
]


@of_rules(TURNING)
def test_turns_in_single_precision_are_on_the_very_sample(rule):
    got = turns_in_jax(rule, 2 * 10**6, jnp.float32)
    np.testing.assert_array_equal(got, [0, *turns_of(rule, 2 * 10**6)])


@of_rules(TURNING)
def test_turns_with_x64_are_on_the_very_sample(rule):
    with jax.enable_x64(True):
        got = turns_in_jax(rule, 10**6, jnp.float64)
    np.testing.assert_array_equal(got, [0, *turns_of(rule, 10**6)])


# What rules and windows tell of arrays and traced integers


STEPS_ASKED = np.unique(
    np.r_[1:3000, np.geomspace(3000, 3e7, 3000).astype(int), 2**24 - 5 : 2**24 + 5]
)


def in_float32(function, steps=STEPS_ASKED):
    """A function of a traced integer, at many steps."""
    return np.asarray(jax.jit(jax.vmap(function))(jnp.asarray(steps, jnp.int32)), float)


@of_rules([*DECAYS, *(Exponential(c) for c in (0.01, 0.3, 0.9, 0.999, 0.123456789123))])
def test_the_weight_of_a_sample_keeps_its_digits_in_single_precision(rule):
    expected = 1 - rule.decay(STEPS_ASKED.astype(float))
    fresh = rule.weight(STEPS_ASKED.astype(float))
    np.testing.assert_allclose(fresh, expected, rtol=2e-15 * STEPS_ASKED.max())
    np.testing.assert_allclose(
        in_float32(lambda t: jnp.asarray(traced(rule).weight(t))), fresh, rtol=2e-6
    )


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


@pytest.mark.parametrize("window", [Growing(0.07), Growing(0.25), Growing(1.0), CAPPED, Fixed(9)])
def test_growth_keeps_its_digits_in_single_precision(window):
    asked = traced(Exponential(window)).window
    growth = in_float32(lambda t: jnp.asarray(asked.growth(t)) + 0.0 * t)
    expected = np.broadcast_to(window.growth(STEPS_ASKED.astype(float)), growth.shape)
    capped = getattr(window, "at_most", None)
    sure = np.abs(window.size(STEPS_ASKED.astype(float)) - (capped or 0)) > 1
    np.testing.assert_allclose(growth[sure], expected[sure], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "window",
    [Growing(0.07), Growing(0.3), Growing(1.0), Growing(0.3, 30_000_001), Growing(0.25, 2**27)],
    ids=str,
)
def test_growth_keeps_its_digits_beyond_what_single_precision_can_count(window):
    asked = traced(Exponential(window)).window
    steps = np.r_[
        2**24 : 2**24 + 50, 10**8 - 50 : 10**8 + 50, 10**9 : 10**9 + 50, 2**31 - 50 : 2**31 - 1
    ]
    if window.at_most:
        capped = math.ceil(window.at_most / Fraction(str(window.c)))
        steps = np.r_[steps, capped - 50 : capped + 50]
    exact = [min(Fraction(str(window.c)) * t, window.at_most or t) for t in (steps - 1).tolist()]
    after = [min(Fraction(str(window.c)) * t, window.at_most or t) for t in steps.tolist()]
    expected = [float(b - a) for a, b in zip(exact, after, strict=True)]
    growth = in_float32(lambda t: jnp.asarray(asked.growth(t)) + 0.0 * t, steps)
    np.testing.assert_allclose(growth, expected, rtol=1e-6, atol=1e-7)


def in_both_widths(function, *steps):
    """What a traced function of steps gives with integers of 32 bits, and of 64."""
    for x64 in (False, True):
        with jax.enable_x64(x64):
            yield np.asarray(jax.jit(function)(*(jnp.asarray(step, int) for step in steps)))


@given(windows, st.lists(st.integers(0, 10**9), min_size=1, max_size=20), st.integers(1, 6))
def test_a_traced_window_is_filled_at_the_step_where_it_is_elsewhere(window, starts, parts):
    expected = [window.filled_at(start, parts) for start in starts]
    asked = traced(Exponential(window)).window
    for got in in_both_widths(lambda start: asked.filled_at(start, parts), np.array(starts)):
        np.testing.assert_array_equal(got, np.minimum(expected, np.iinfo(got.dtype).max))


@given(anytime_windows, st.integers(1, 3000))
def test_a_traced_block_is_closed_at_the_step_where_it_is_elsewhere(rule, t):
    starts = advance(rule, [0], t)
    padded = [0] * (rule.accumulators - len(starts)) + starts
    for got in in_both_widths(lambda *starts: traced(rule).closes(starts), *padded):
        assert got == min(rule.closes(padded), np.iinfo(got.dtype).max)


@of_rules([*TURNING, AnytimeWindow(CAPPED, 2), AnytimeWindow(2_500_000)])
def test_a_block_is_closed_at_that_step_in_single_precision(rule):
    asked = jax.jit(lambda starts: traced(rule).closes(starts))
    for t in (500, 12_345, 10**6, 2**24 + 1, 10**8, 10**9):
        if rule.window.steady_from < NEVER and rule.turns == "paper" and t > 10**8:
            continue  # no formula tells its blocks then
        starts = advance(rule, [0], t)
        padded = [0] * (rule.accumulators - len(starts)) + starts
        got = asked(jnp.asarray(padded, jnp.int32))
        assert got.dtype == jnp.int32
        assert got == min(rule.closes(padded), 2**31 - 1)


@given(st.floats(1e-9, 1), st.integers(1, 6), st.integers(0, 2**31 - 1))
@example(1 - 2**-53, 1, 2**31 - 1)
@example(1 - 1e-12, 1, 2**31 - 1)
@example(1.0, 1, 2**31 - 1)
@example(0.5, 1, 2**30 - 1)
@example(0.5, 1, 2**30)
def test_a_step_is_stretched_to_the_last_digit(c, parts, start):
    ratio = Growing(c).stretch(parts)
    exact = math.ceil(Fraction(ratio, 2**60) * start)
    assert INTEGERS.stretched(start, ratio) == min(exact, NEVER)
    steps = traced(AnytimeWindow(c)).window.steps
    for got in in_both_widths(lambda start: steps.stretched(start, ratio), start):
        assert got == min(exact, np.iinfo(got.dtype).max)


def test_a_stretched_step_does_not_overflow_in_int32():
    starts = np.unique(np.r_[:3000, np.geomspace(3000, 2**31 - 1, 20_000).astype(np.int64)])
    for c in (0.25, 1 / 3, 1e-6, 0.3 * (1 - 1e-12), 1 - 1e-12, 1 - 2**-53, 1.0):
        ratio = Growing(c).stretch(1)
        steps = traced(AnytimeWindow(c)).window.steps
        got = jax.jit(partial(steps.stretched, ratio=ratio))(jnp.asarray(starts, jnp.int32))
        assert got.dtype == jnp.int32
        expected = [INTEGERS.stretched(start, ratio) for start in starts.tolist()]
        np.testing.assert_array_equal(got, np.minimum(expected, 2**31 - 1))


@pytest.mark.parametrize("rule", [AnytimeWindow(1000), AnytimeWindow(0.25), Exponential(0.25)])
def test_beyond_its_count_an_average_is_nan(rule):
    """A wrong number would not be noticed: 2³¹ - 2 updates without x64 are the last."""
    average = tail_average(rule)
    most = np.iinfo(jnp.result_type(int)).max - 1
    if most > 2**31:
        pytest.skip("with x64 there is no such limit")
    starts = starts_at(rule, most - 1) if isinstance(rule, AnytimeWindow) else [0]
    saved = TailAverage(rule).state_dict() | {
        "dtype": "float32",
        "count": most - 1,
        "starts": starts,
        "blocks": np.full(len(starts), 3.0, np.float32),
        "folded": most - 1,
        "partial": np.float32(0.0),
    }
    state = average.from_state_dict(saved, jnp.float32(0.0))
    for updates, expected in [(most, 3.0), (most + 1, np.nan), (most + 1, np.nan)]:
        state = average.update(state, jnp.float32(3.0))
        assert int(average.count(state)) == updates
        np.testing.assert_allclose(average.value(state), expected, rtol=1e-6)
    with pytest.raises(ValueError, match="count of at most"):
        average.from_state_dict(saved | {"count": most + 1, "folded": most + 1}, jnp.float32(0.0))
