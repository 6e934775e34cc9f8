"""Every tail at once in JAX, against the slow model and against NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tailavg import AnyTail, Decay, Fixed, Freshest, Growing, TailAverage
from tailavg.core.clock import BlockClock, starts_at
from tailavg.jax import evaluate_tails, tail_average, value
from tailavg.jax.clock import size_at
from tailavg.jax.reads import weights_of
from tests.support.any_tails import TAILS, Tails, every_tail
from tests.support.cases import assert_close, of_rules, samples
from tests.support.effort import some
from tests.support.jax_trees import assert_same, row, two_leaves

STEPS = 600


def run(average, trees, windows):
    """The clocks after each sample, and what was read then with each window."""

    def step(state, tree):
        state = average.update(state, tree)
        return state, (state.clock, [value(state, window=window) for window in windows])

    state = average.init(row(trees, 0))
    return jax.jit(lambda state, trees: lax.scan(step, state, trees))(state, trees)


def updated(average, trees, state=None):
    """The state after each of the stacked trees, in one call."""
    state = average.init(row(trees, 0)) if state is None else state
    step = lambda state, tree: (average.update(state, tree), None)  # noqa: E731
    return jax.jit(lambda state, trees: lax.scan(step, state, trees)[0])(state, trees)


@every_tail
def test_every_window_is_that_of_the_slow_model_and_of_numpy_at_every_step(rule):
    xs, windows = samples(STEPS, (3,)), [rule.shortest, max(rule.shortest, 0.7)]
    with jax.enable_x64(True):
        average = tail_average(rule, dtype=jnp.float64, bundle=3)
        _, (clocks, values) = run(average, two_leaves(xs), windows)
        starts = np.asarray(clocks.starts)
    slow, numpy = Tails(rule), TailAverage(rule)
    for t in range(STEPS):
        slow.add()
        numpy.update(xs[t])
        assert sorted(set(starts[t].tolist())) == slow.starts() == numpy.state_dict()["starts"]
        if t % 7 == 0 or t > STEPS - 5:
            for leaves, window in zip(values, windows, strict=True):
                assert_close(leaves["bundled"][t], slow.of(window) @ xs[: t + 1], 1e-12)
    for leaves, window in zip(values, windows, strict=True):
        for name, expected in two_leaves(TailAverage(rule).scan(xs, [window])[0]).items():
            np.testing.assert_allclose(leaves[name], expected, rtol=1e-12, err_msg=name)


def turns_of(rule, steps):
    """When blocks are opened, and what they are then, from the scalars alone."""
    average = tail_average(rule)

    def step(state, _):
        state = average.update(state, {})
        return state, state.clock.starts

    _, starts = jax.jit(lambda s: lax.scan(step, s, None, length=steps))(average.init({}))
    starts = np.asarray(starts)
    return starts[np.r_[True, np.diff(starts[:, -1]) > 0]]


@of_rules([*TAILS[:2], AnyTail(6, 0.0123456789), *some([], [AnyTail(25, 0.1)])])
def test_blocks_are_merged_where_numpy_merges_them(rule):
    steps = 300_000
    core = BlockClock(rule)
    for starts in turns_of(rule, steps):
        core.advance(int(starts[-1]) + 1)
        assert starts.tolist() == core.blocks


@pytest.mark.parametrize("x64", [False, True])
def test_blocks_are_merged_late_in_a_stream_as_well(x64):
    """Near the last step that 32 bits can count, and beyond with 64."""
    rule = AnyTail(8)
    with jax.enable_x64(x64):
        average = tail_average(rule, dtype="float64" if x64 else "float32")
        step = lambda _, state: average.update(state, jnp.ones(2))  # noqa: E731
        run_on = jax.jit(lambda state, steps: lax.fori_loop(0, steps, step, state))
        for t in (10**6, 2**24 + 3, 10**9, 2**31 - 5000):
            t *= 1000 if x64 else 1
            core = BlockClock(rule)
            core.advance(t)
            starts = starts_at(rule, t)
            saved = TailAverage(rule, dtype=average.dtype.name).state_dict() | {
                "scalar": False,
                "count": t,
                "starts": starts,
                "blocks": np.arange(len(starts) * 2, dtype=average.dtype).reshape(-1, 2),
                "folded": t,
                "partial": np.zeros(2, average.dtype),
            }
            steps = min(core.closes - t + 3, 3000)
            state = run_on(average.from_state_dict(saved, jnp.zeros(2)), steps)
            core.advance(t + steps)
            assert state.clock.starts.tolist() == core.blocks
            assert int(state.updates) == t + steps
            assert np.isfinite(average.value(state, window=0.4)).all()


@of_rules(some([AnyTail(6, 0.5)], [AnyTail(), AnyTail(6, 0.5)]))
def test_single_precision_weighs_samples_as_the_slow_model_does(rule):
    """The samples are the rows of the identity: the average is the weights themselves."""
    windows = [0.5, 1.0]
    trees = two_leaves(np.eye(STEPS, dtype=np.float32))
    _, (_, values) = run(tail_average(rule, bundle=STEPS), trees, windows)
    slow = Tails(rule)
    expected = np.zeros((2, STEPS, STEPS))
    for t in range(STEPS):
        slow.add()
        for i, window in enumerate(windows):
            expected[i, t, : t + 1] = slow.of(window)
    for weights, leaves in zip(expected, values, strict=True):
        for name, leaf in leaves.items():
            np.testing.assert_allclose(leaf[:, :STEPS], weights, rtol=1e-5, atol=2e-7, err_msg=name)
            assert not np.triu(leaf[:, :STEPS], 1).any()


def test_a_long_run_in_single_precision_is_near_that_of_float64():
    rule, steps = AnyTail(), 200_000
    rng = np.random.default_rng(0)
    xs = np.stack([1 + np.arange(steps) / steps, 1 + rng.random(steps)], axis=1)
    xs = xs.astype(np.float32)
    state = updated(tail_average(rule, bundle=2), two_leaves(xs))
    numpy = TailAverage(rule)
    numpy.update_many(xs.astype(float))
    for window in (0.1, 0.25, 1.0):
        for name, expected in two_leaves(numpy.value(window)).items():
            averages = value(state, window=window)[name]
            np.testing.assert_allclose(averages, expected, rtol=3e-6, err_msg=name)


# Windows


@pytest.fixture(scope="module")
def filled():
    """An average of a thousand samples, in JAX and in NumPy."""
    xs = samples(1000, (4,)).astype(np.float32)
    average, numpy = tail_average(AnyTail(8)), TailAverage(AnyTail(8))
    numpy.update_many(xs.astype(float))
    return average, updated(average, xs), numpy


read = jax.jit(lambda state, window: value(state, window=window))
read_freshest = jax.jit(lambda state, window: value(state, window=Freshest(window)))
READINGS = [
    0.1,
    1.0,
    250,
    5000,
    Fixed(300),
    Growing(0.9, at_most=400),
    Decay(0.5, "linear"),
    Decay(0.3, "cosine"),
    Decay(700, "1-sqrt"),
    Decay(0.4, lambda u: (1 - u) ** 2),
    Decay(0.4, lambda u: 1 - jnp.sqrt(u)),
    Freshest(0.1),
    Freshest(0.3),
    Freshest(1.0),
    Freshest(700),
]


def test_windows_and_decays_are_read_as_numpy_reads_them(filled):
    average, state, numpy = filled
    for window in READINGS:
        expected = numpy.value(window)
        for got in (average.value(state, window=window), value(state, None, window)):
            np.testing.assert_allclose(got, expected, rtol=3e-6, err_msg=str(window))
        np.testing.assert_array_equal(average.weights(state, window), numpy.weights(window))
        assert average.profile(state, window) == numpy.profile(window)
        assert average.size(state, window) == pytest.approx(numpy.profile(window).size, rel=1e-6)


def test_windows_and_decays_are_read_inside_a_program(filled):
    _, state, numpy = filled
    windows = [0.3, 250, Growing(0.9, at_most=400), Decay(0.3, "cosine"), Freshest(0.3)]
    values = jax.jit(lambda state: [value(state, window=window) for window in windows])(state)
    np.testing.assert_allclose(values, [numpy.value(window) for window in windows], rtol=3e-6)


@pytest.mark.parametrize("window", [0.1, 0.3, 0.07 * 10, 1.0, 250, 1000, 5000], ids=str)
def test_a_window_may_be_traced(filled, window):
    average, state, numpy = filled
    expected = numpy.value(window)
    for asked in (jnp.asarray(window), np.array(window)):
        assert_close(read(state, asked), expected, 3e-6)
        assert_close(average.value(state, window=asked), expected, 3e-6)
        fresh = numpy.value(Freshest(window))
        assert_close(read_freshest(state, asked), fresh, 3e-6)
        assert_close(average.value(state, window=Freshest(jnp.asarray(asked))), fresh, 3e-6)


@pytest.mark.parametrize("x64", [False, True])
def test_the_shortest_window_is_read_at_every_step(x64):
    """However its size is rounded, and whether the window is traced or not."""

    def weights_at(t, c):
        rule = AnyTail(6, c)
        state = tail_average(rule).init({})
        state = state._replace(updates=t, size=size_at(rule, t))
        return [weights_of(state, window) for window in (c, jnp.asarray(c))]

    fractions = [0.07, 0.3, 1 / 3]
    with jax.enable_x64(x64):
        program = jax.jit(jax.vmap(lambda t: [weights_at(t, c) for c in fractions]))
        for c, weights in zip(fractions, program(jnp.arange(1, 10_001)), strict=True):
            assert not any(np.isnan(x).any() for x in jax.tree.leaves(weights)), c


@pytest.mark.parametrize("window", [0.05, 0.0, -1.0, 1.5, math.nan, 99, 0, -3], ids=str)
def test_a_traced_window_that_is_not_allowed_is_nan(filled, window):
    _, state, _ = filled
    assert np.isnan(read(state, jnp.asarray(window))).all()
    assert np.isnan(read_freshest(state, jnp.asarray(window))).all()


def test_windows_that_are_not_allowed_are_refused_where_that_is_known(filled):
    average, state, _ = filled
    for window in (0.05, 99, Decay(0.05, "cosine"), Freshest(0.05)):
        with pytest.raises(ValueError, match=r"window: expected at least 100 of the 1000 "):
            average.value(state, window=window)
    for window in (0, 1.5, "0.3"):
        with pytest.raises((ValueError, TypeError), match="window: expected"):
            average.value(state, window=window)
    with pytest.raises(TypeError, match="window: expected an array of integers or floats"):
        average.value(state, window=jnp.array(True))
    assert average.size(state) == 1000
    for method in (average.value, jax.jit(value)):
        with pytest.raises(ValueError, match="AnyTail has no window of its own"):
            method(state)
    for method in (average.weights, average.profile):
        with pytest.raises(ValueError, match="AnyTail has no window of its own"):
            method(state)
    own = tail_average(10)
    with pytest.raises(ValueError, match="this average has its own window"):
        own.value(own.init(1.0), window=0.5)


def test_a_decay_that_cannot_be_traced_says_so(filled):
    _, state, _ = filled
    decay = Decay(0.4, lambda u: 1 - math.sqrt(u))
    with pytest.raises((jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError)):
        value(state, window=decay)


def test_a_decay_that_misbehaves_between_the_points_checked_has_weights_that_add_up():
    def waves(u):
        return 1 - u + 0.5 * ((1024 * u) % 1)

    def spikes(bad):
        return lambda u: jnp.where((1024 * u) % 1 == 0, 1 - u, bad)

    average = tail_average(AnyTail(8))
    state = updated(average, np.full(130, 7.0, np.float32))
    shapes = {"waves": waves} | {str(bad): spikes(bad) for bad in (math.nan, math.inf, -5.0)}
    for name, shape in shapes.items():
        for window in (0.3, 1.0, 170):
            got = float(value(state, window=Decay(window, shape)))
            assert got == pytest.approx(7.0, rel=1e-6), f"{name}, {window}"


def test_a_tail_that_would_turn_too_often_is_refused():
    average = tail_average(AnyTail(6, 1e-6))
    with pytest.raises(ValueError, match=r"rule: the blocks of .* close too often for JAX"):
        average.update(average.init(1.0), 1.0)


# Several windows in one program


@pytest.mark.parametrize(
    "windows",
    [
        [0.1, 0.5, Decay(0.3, "cosine"), Freshest(0.3), 700],
        np.array([0.1, 0.5, 1.0]),
        jnp.array([200, 300]),
    ],
    ids=["mixed", "fractions", "counts"],
)
def test_a_function_is_evaluated_on_each_tail(filled, windows):
    _, state, numpy = filled
    target = np.arange(4.0)

    def loss(mean, target, power):
        assert mean.dtype == jnp.float16
        return {"loss": (abs(mean - target) ** power).sum(), "first": mean[0]}

    like = jnp.zeros(4, jnp.float16)
    got = evaluate_tails(loss, state, windows, target, 2, like=like)
    plain = windows.tolist() if not isinstance(windows, list) else windows
    means = np.array([numpy.value(window) for window in plain])
    np.testing.assert_allclose(got["first"], means[:, 0], atol=2e-3)
    np.testing.assert_allclose(got["loss"], ((means - target) ** 2).sum(axis=1), rtol=5e-3)


def test_no_more_than_one_average_is_held():
    average = tail_average(AnyTail(6), bundle=0)
    tree = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
    state = jax.eval_shape(average.init, tree)

    def loss(mean, x):
        return (jnp.tanh(x @ mean["w"]) ** 2).sum()

    def many(state, x):
        return evaluate_tails(loss, state, [0.1 * i for i in range(1, 11)], x)

    memory = jax.jit(many).lower(state, jnp.ones((5, 1000))).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.5 * 4e6
    assert memory.output_size_in_bytes == 40


def test_a_function_is_traced_once(filled):
    _, state, _ = filled
    calls = []

    def loss(mean):
        calls.append(1)
        return mean.sum()

    for windows in ([0.1, 0.5], [0.3, Decay(0.5, "cosine")], jnp.array([0.2, 1.0])):
        evaluate_tails(loss, state, windows)
    assert len(calls) == 1
    with pytest.raises(ValueError, match="windows: expected at least one, got none"):
        evaluate_tails(loss, state, [])


# Batches and gradients


def test_tails_of_a_batch_may_be_at_different_steps():
    average = tail_average(AnyTail(6))
    ages, steps = [3, 90, 400], 60
    streams = [samples(age + steps, (2,), seed=age).astype(np.float32) for age in ages]
    update, states = jax.jit(average.update), []
    for xs, age in zip(streams, ages, strict=True):
        state = average.init(xs[0])
        for x in xs[:age]:
            state = update(state, x)
        states.append(state)
    states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    batch = jnp.asarray(np.stack([xs[-steps:] for xs in streams], axis=1))
    states, _ = jax.jit(
        lambda s, xs: lax.scan(lambda s, x: (jax.vmap(average.update)(s, x), None), s, xs)
    )(states, batch)
    got = jax.vmap(lambda state: value(state, window=0.5))(states)
    for xs, averages in zip(streams, got, strict=True):
        numpy = TailAverage(AnyTail(6))
        numpy.update_many(xs.astype(float))
        assert_close(averages, numpy.value(0.5), 3e-6)


def test_the_gradient_of_a_value_is_the_weights():
    average = tail_average(AnyTail(6), dtype=jnp.float64, bundle=1)

    def last(trees):
        leaves = value(updated(average, trees), window=0.3)
        return sum(leaf.sum() for leaf in leaves.values())

    slow = Tails(AnyTail(6))
    for _ in range(280):
        slow.add()
    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(last))(two_leaves(jnp.asarray(samples(280, (1,)))))
        for name, of_columns in gradient.items():
            for weights in of_columns.T:
                np.testing.assert_allclose(
                    weights, slow.of(0.3), rtol=1e-9, atol=1e-14, err_msg=name
                )


def test_nan_leaves_a_window_with_its_block():
    xs = samples(STEPS, (2,))
    xs[100] = math.nan, math.inf
    rule = AnyTail(8)
    with jax.enable_x64(True):
        average = tail_average(rule, dtype=jnp.float64)
        _, (_, [values]) = run(average, jnp.asarray(xs), [0.3])
    with np.errstate(invalid="ignore"):
        expected = TailAverage(rule).scan(xs, [0.3])[0]
    assert np.isnan(expected[:, 0]).any()
    assert np.isfinite(expected[-1]).all()
    assert_close(values, expected, 1e-12)


def test_nan_in_the_sum_is_not_read_by_a_decay_that_gives_it_no_weight():
    """A rate that is 0 before the end: the newest samples are in the sum, and weigh nothing."""
    decay = Decay(1.0, lambda u: jnp.clip(1 - 2 * u, 0.0, 1.0))
    xs = samples(STEPS, (2,)).astype(np.float32)
    xs[-1] = math.nan, math.inf
    state, numpy = (
        updated(tail_average(AnyTail(8), bundle=2), two_leaves(xs)),
        TailAverage(AnyTail(8)),
    )
    numpy.update_many(xs.astype(float))
    expected = numpy.value(decay)
    assert np.isfinite(expected).all()
    assert np.isnan(value(state, window=0.5)["alone"]).any()
    for name, leaf in two_leaves(expected).items():
        np.testing.assert_allclose(value(state, window=decay)[name], leaf, rtol=3e-6, err_msg=name)


def test_before_the_first_update_every_window_is_the_tree():
    average = tail_average(AnyTail(8))
    tree = {"w": jnp.arange(3.0)}
    state = average.init(tree)
    assert_same(average.value(state, window=0.5), tree)  # before the first update
    assert state.size == pytest.approx(0.1)


def test_other_averages_refuse_a_window_that_is_an_array(filled):
    _, _, numpy = filled
    with pytest.raises(TypeError, match=r"window: expected an int .* got Array\(0\.3"):
        numpy.value(Freshest(jnp.asarray(0.3)))
