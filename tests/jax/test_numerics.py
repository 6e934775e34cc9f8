"""Single precision in JAX: weights, sizes and averages, against float64."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tailavg import AnytimeWindow, Exponential, Growing, TailAverage
from tailavg.core.clock import starts_at
from tailavg.io.state import state as layout
from tailavg.jax import tail_average
from tests.support.cases import of_rules
from tests.support.effort import some
from tests.support.jax_trees import row, run, two_leaves
from tests.support.model import weight_matrix

CAPPED = Growing(0.25, at_most=250_000)

BLOCKS = [
    AnytimeWindow(1000, 2),
    AnytimeWindow(2_500_000, 5),
    AnytimeWindow(0.25),
    AnytimeWindow(0.25, 5, "paper"),
    AnytimeWindow(0.07, 5),
    AnytimeWindow(CAPPED, 2),
    AnytimeWindow(CAPPED, 5, "paper"),
    *some([], [AnytimeWindow(250_000), AnytimeWindow(1.0)]),
]
DECAYS = [
    Exponential(1000),
    Exponential(250_000),
    Exponential(2_500_000),
    Exponential(0.25),
    Exponential(1.0),
    Exponential(CAPPED),
    *some([], [Exponential(0.07), Exponential(0.5)]),
]


# Sizes


def sizes_wanted(rule, t):
    """The effective size that a rule promises: k_t samples, or all while there are fewer."""
    return np.minimum(t, rule.size(np.asarray(t, float)))


def state_at(rule, t):
    """The state after t updates with nothing: all decisions were made, and no leaf averaged."""
    average = tail_average(rule)
    if t == 0:
        return average.init({})
    starts = starts_at(rule, t)
    saved = layout(
        rule,
        dtype="float32",
        count=t,
        starts=starts,
        blocks=[{}] * len(starts),
        folded=t,
        partial={},
    )
    return average.from_state_dict(saved, {})


@cache
def program(rule, steps):
    average = tail_average(rule)

    def look(state, _):
        step, _ = state.clock.step(rule, state.updates)
        state = average.update(state, {})
        weights = state.clock.weights(state.updates, state.size)
        return state, (state.updates, state.clock, step, weights)

    return jax.jit(lambda state: lax.scan(look, state, length=steps))


def watched(rule, state, steps=3000):
    """The state after so many steps, and the scalars after each of them as arrays."""
    state, seen = program(rule, steps)(state)
    return state, jax.tree.map(np.asarray, seen)


def places_of(rule):
    """Where to look at 3000 steps: at the start, around some steps, and around the turns before.

    From 2²⁴ on float32 has not all whole numbers. Two thousand million steps are near the end of
    int32, and far beyond it if multiplied.
    """
    middles = [5000, 10**4, 5 * 10**4, 10**5, 5 * 10**5, 10**6, 5 * 10**6, 10**7, 2**24, 2 * 10**7]
    if not (isinstance(rule, AnytimeWindow) and rule.window == CAPPED and rule.turns == "paper"):
        middles += [2**30, 2 * 10**9]  # no formula tells the blocks of that one
    turns = [starts_at(rule, t)[-1] for t in middles]
    return [0, *(t - 1500 for t in sorted({*middles, *turns}) if t > 1500)]


def check_blocks(rule, seen):
    """From the weights as they are: that they add up to 1, and to the promised size."""
    t, clock, _, (of_means, of_sum) = seen
    starts = clock.starts.astype(np.int64)
    mean_sizes = np.diff(np.c_[starts, clock.folded])  # of the open block, the folded part
    of_means = np.take_along_axis(of_means.astype(float), clock.places, axis=1)
    in_sum, of_sum = t - clock.folded, of_sum.astype(float)
    assert (mean_sizes >= 0).all()
    assert (in_sum > 0).all()
    assert (of_means >= 0).all()
    assert (of_means[mean_sizes == 0] == 0).all()
    total = of_means.sum(axis=1) + of_sum * in_sum
    squares = (of_means**2 / np.maximum(mean_sizes, 1)).sum(axis=1) + of_sum**2 * in_sum
    np.testing.assert_allclose(total, 1, rtol=0, atol=1e-6)
    # a block that is just full may have part of a sample too many
    wanted, newest = sizes_wanted(rule, t), t - starts[:, -1]
    assert (newest < wanted + 1).all()
    np.testing.assert_allclose(1 / squares, np.maximum(wanted, newest), rtol=1e-5)


@of_rules(BLOCKS)
def test_blocks_have_the_size_that_they_promise(rule):
    for start in places_of(rule):
        state, seen = watched(rule, state_at(rule, start))
        end = start + 3000
        assert int(state.updates) == end
        np.testing.assert_allclose(float(state.size), rule.size(end), rtol=1e-6)
        starts = starts_at(rule, end)
        np.testing.assert_array_equal(state.clock.starts[-len(starts) :], starts)
        check_blocks(rule, seen)


@of_rules([AnytimeWindow(0.25), AnytimeWindow(250_000)])
def test_blocks_have_the_size_that_they_promise_at_every_step(rule):
    state = state_at(rule, 0)
    for _ in range(some(3, 100)):
        state, seen = watched(rule, state, 100_000)
        check_blocks(rule, seen)


class Tally:
    """Σα and Σα² of the samples in the mean of an exponential, and of those in the sum."""

    def __init__(self, rule, t):
        self.mean = np.array([1, 1 / sizes_wanted(rule, t)]) if t else np.zeros(2)
        self.sum = np.zeros(2)

    def follow(self, seen):
        """Return Σα and 1 / Σα² at each step, from the scalars as they are."""
        t, _, step, (of_mean, of_sum) = seen
        of_mean, of_sum, factor = (np.float64(x) for x in (of_mean[:, 0], of_sum, step.factor))
        folds = np.flatnonzero(step.folds)
        run = np.cumsum(step.folds)  # of samples between two folds, at most 256
        place = np.arange(len(t)) - np.r_[0, folds][run]
        grid = np.zeros((2, len(folds) + 1, 256))
        grid[:, run, place] = [factor, factor**2]
        grid[:, 0, 0] += self.sum  # that run goes on
        sums = np.cumsum(grid, axis=2)
        means = [self.mean]
        weights = np.float64(step.weight[folds]), 1 / np.float64(step.total[folds])
        for weight, scale, total in zip(*weights, sums[:, :, -1].T, strict=False):
            share = weight * scale
            kept = np.array([1 - weight, (1 - weight) ** 2]) * means[-1]
            means.append(kept + np.array([share, share**2]) * total)
        self.mean = means[-1]
        means, sums = np.array(means).T[:, run], sums[:, run, place]
        self.sum = sums[:, -1]
        size = 1 / (of_mean**2 * means[1] + of_sum**2 * sums[1])
        return of_mean * means[0] + of_sum * sums[0], size


def check_decay(rule, tally, seen):
    """That the weights add up to 1 and to the promised size, and that of the newest sample."""
    t, clock, step, (_, of_sum) = seen
    total, size = tally.follow(seen)
    # a sum of 256 factors is rounded as often
    np.testing.assert_allclose(total, 1, rtol=0, atol=2e-6)
    np.testing.assert_allclose(size, sizes_wanted(rule, t), rtol=1e-5)
    newest, factor = rule.weight(t.astype(float)), step.factor.astype(float)
    np.testing.assert_allclose(factor * of_sum, newest, rtol=1e-5)
    np.testing.assert_allclose(factor * np.exp(clock.decayed), newest, rtol=1e-5)


@of_rules(DECAYS)
def test_an_exponential_has_the_size_that_it_promises(rule):
    for start in places_of(rule):
        state, seen = watched(rule, state_at(rule, start))
        assert int(state.updates) == start + 3000
        np.testing.assert_allclose(float(state.size), rule.size(start + 3000), rtol=1e-6)
        check_decay(rule, Tally(rule, start), seen)


@of_rules(DECAYS)
def test_an_exponential_has_the_size_that_it_promises_at_every_step(rule):
    state, tally = state_at(rule, 0), Tally(rule, 0)
    for _ in range(some(3, 100)):
        state, seen = watched(rule, state, 100_000)
        check_decay(rule, tally, seen)


@of_rules(
    [
        AnytimeWindow(300),
        AnytimeWindow(1.0, 2),
        AnytimeWindow(0.25, 5, "paper"),
        AnytimeWindow(Growing(0.5, at_most=400), 4),
        Exponential(700),
        Exponential(0.25),
        Exponential(Growing(0.5, at_most=400)),
    ]
)
def test_the_weight_of_every_sample_is_that_of_the_model(rule):
    """The samples are the rows of the identity: the average is the weights themselves."""
    steps = 1200
    average = tail_average(rule, bundle=steps)
    _, (values, _, sizes) = run(average, two_leaves(np.eye(steps, dtype=np.float32)))
    np.testing.assert_allclose(sizes, [rule.size(t) for t in range(1, steps + 1)], rtol=1e-6)
    expected = weight_matrix(rule, steps)
    for name, weights in values.items():
        assert weights.dtype == np.float32
        weights = np.asarray(weights, float)[:, :steps]
        np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=2e-7, err_msg=name)
        some_rows = slice(59, None, 60)
        np.testing.assert_allclose(weights[some_rows], expected[some_rows], rtol=3e-6, atol=2e-8)
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=0, atol=2e-6)
        effective = 1 / (expected**2).sum(axis=1)
        np.testing.assert_allclose(1 / (weights**2).sum(axis=1), effective, rtol=1e-5)


# Values


STEPS, EVERY = some(300_000, 1_000_000), 500


@pytest.fixture(scope="module")
def streams():
    """Samples of many kinds as columns, of float32 and of 16 bits, and the names of the columns."""
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
    names = {np.float32: list(columns), np.float16: list(of_16), jnp.bfloat16: list(of_16)}
    return {
        kind: (names, (half if len(names) == 3 else single).astype(kind))
        for kind, names in names.items()
    }


@of_rules(
    [
        AnytimeWindow(250_000, 2),
        AnytimeWindow(1.0, 8),
        Exponential(250_000),
        *some([], [Exponential(0.25)]),  # whose window is shorter
    ]
)
def test_averages_of_a_long_window_are_those_of_float64(rule, streams):
    bundle = 11
    average = tail_average(rule, bundle=bundle)
    trees = {kind.__name__: two_leaves(xs, bundle) for kind, (_, xs) in streams.items()}

    def some_steps(state, trees):
        state, _ = lax.scan(lambda state, tree: (average.update(state, tree), None), state, trees)
        return state, average.value(state)

    chunks = jax.tree.map(lambda xs: xs.reshape(-1, EVERY, xs.shape[1]), trees)
    state = average.init(row(trees, 0))
    _, values = jax.jit(lambda state, chunks: lax.scan(some_steps, state, chunks))(state, chunks)
    for kind, (names, xs) in streams.items():
        expected = TailAverage(rule, dtype=np.float64).scan(xs.astype(float))[EVERY - 1 :: EVERY]
        for leaf, averages in values[kind.__name__].items():
            assert averages.dtype == jnp.float32
            for name, column, wanted in zip(names, averages.T, expected.T, strict=False):
                message = f"{kind.__name__} {leaf} {name}"
                np.testing.assert_allclose(column, wanted, rtol=1e-5, err_msg=message)


@of_rules([AnytimeWindow(0.25), Exponential(0.25)])
def test_beyond_its_count_an_average_is_nan(rule):
    """A wrong number would not be noticed: 2³¹ - 2 updates without x64 are the last."""
    average = tail_average(rule)
    most = np.iinfo(jnp.result_type(int)).max - 1
    if most > 2**31:
        pytest.skip("with x64 there is no such limit")
    starts = starts_at(rule, most - 1)
    saved = TailAverage(rule).state_dict() | {
        "dtype": "float32",
        "count": most - 1,
        "starts": starts,
        "blocks": np.full(len(starts), 3.0, np.float32),
        "folded": most - 1,
        "partial": np.float32(0.0),
    }

    @jax.jit
    def updated(state):
        state = average.update(state, jnp.float32(3.0))
        return state, average.value(state)

    state = average.from_state_dict(saved, jnp.float32(0.0))
    for updates, expected in [(most, 3.0), (most + 1, np.nan), (most + 1, np.nan)]:
        state, value = updated(state)
        assert int(average.count(state)) == updates
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    with pytest.raises(ValueError, match="count of at most"):
        average.from_state_dict(saved | {"count": most + 1, "folded": most + 1}, jnp.float32(0.0))
