"""Means in the memory of the host. A CPU has such memory too: arrays are placed there by kind."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tailavg import AnyTail, AnytimeWindow, Exponential, TailAverage
from tailavg.jax import evaluate_tails, tail_average, value
from tests.support.cases import assert_close, samples
from tests.support.jax_trees import (
    assert_same,
    row,
    rules_and_tails,
    saved_by_orbax,
    two_rules,
    window_for,
)

STEPS = 300


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def assert_placed(state):
    assert kinds((state.means, state.bundles)) == {"pinned_host"}
    assert kinds((state.sums, state.clock, state.updates, state.size)) == {"device"}


def trees_of(steps=STEPS):
    return {
        "large": samples(steps, (40,)).astype(np.float32),
        "small": samples(steps, (3,), seed=1).astype(np.float32),
        "wave": (samples(steps, (2,), seed=2) * (1 + 2j)).astype(np.complex64),
        "n": np.arange(steps),
    }


@pytest.mark.parametrize(
    ("rule", "jitted"), [(AnytimeWindow(0.3), False), (AnyTail(6, 0.3), True)], ids=str
)
def test_an_offloaded_average_is_the_same_to_the_bit(rule, jitted):
    trees, window = trees_of(), window_for(rule)
    here, away = (tail_average(rule, bundle=10, offload=offload) for offload in (None, "cpu"))
    inits = [jax.jit(a.init) if jitted else a.init for a in (here, away)]
    mine, theirs = (init(row(trees, 0)) for init in inits)
    updates = [jax.jit(a.update, donate_argnums=0) for a in (here, away)]
    assert_placed(theirs)
    for i in range(STEPS):
        mine, theirs = (
            update(state, row(trees, i))
            for update, state in zip(updates, (mine, theirs), strict=True)
        )
    assert_placed(theirs)
    read = jax.jit(value, static_argnames="window")
    got = read(theirs, window=window)
    assert kinds(got) == {"device"}
    assert_same(got, read(mine, window=window))
    assert_same(jax.device_get(theirs), jax.device_get(mine))
    numpy = TailAverage(rule)
    numpy.update_many(trees["large"].astype(float))
    expected = numpy.value(window) if window else numpy.value()
    outside = value(theirs, window=window)
    assert kinds(outside) == {"device"}
    assert_close(outside["large"], expected, 3e-6)


@rules_and_tails
def test_the_device_holds_one_array_for_each_parameter(rule):
    """By where the compiled program has its arguments, its results and its temporaries."""
    average = tail_average(rule, offload="cpu")
    n = 10**6
    tree = {"w": jnp.zeros(n), "b": jnp.zeros(100)}
    state = average.init(tree)
    program = jax.jit(average.update, donate_argnums=0).lower(state, tree).compile()

    def on_device(shardings, arrays):
        leaves = partial(jax.tree.leaves, is_leaf=lambda x: x is None)  # unused, or in a bundle
        pairs = zip(leaves(shardings), leaves(arrays), strict=True)
        return sum(x.nbytes for place, x in pairs if place and place.memory_kind == "device")

    (states, trees), _ = program.input_shardings
    assert on_device(trees, tree) == 4 * (n + 100)
    for shardings in (states, program.output_shardings):
        assert 4 * (n + 100) <= on_device(shardings, state) < 4 * (n + 100) + 1000
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < 10_000
    assert memory.alias_size_in_bytes >= 4 * n * (rule.accumulators + 1)  # all of it in place


def test_offloaded_tails_are_evaluated_in_one_program():
    average = tail_average(AnyTail(6), bundle=10, offload="cpu")
    state = average.init({"w": jnp.zeros(40)})
    xs = samples(100, (40,)).astype(np.float32)
    update = jax.jit(average.update, donate_argnums=0)
    numpy = TailAverage(AnyTail(6))
    for x in xs:
        state = update(state, {"w": x})
        numpy.update(x.astype(float))
    got = evaluate_tails(lambda mean: mean["w"].sum(), state, [0.2, 1.0])
    assert_close(got, [numpy.value(c).sum() for c in (0.2, 1.0)], 1e-5)


@two_rules
def test_an_offloaded_state_moves_and_is_restored_where_it_was(rule, tmp_path):
    average = tail_average(rule, bundle=10, offload="cpu")
    trees = trees_of(80)
    update = jax.jit(average.update)
    state = average.init(row(trees, 0))
    for i in range(60):
        state = update(state, row(trees, i))
    moved = average.from_state_dict(average.state_dict(state), row(trees, 59))
    restored = saved_by_orbax(state, tmp_path)
    assert_placed(moved)
    assert_placed(restored)
    assert_same(restored, state)
    for i in range(60, 80):
        state, moved, restored = (update(s, row(trees, i)) for s in (state, moved, restored))
    assert_same(jax.device_get(restored), jax.device_get(state))
    got, expected = (value(s)["large"] for s in (moved, state))
    assert_close(got, expected, 1e-6)


@pytest.mark.parametrize(
    ("rule", "axis_type"),
    [
        (AnytimeWindow(0.3), AxisType.Explicit),
        (Exponential(10), AxisType.Auto),
        (AnyTail(6, 0.3), AxisType.Auto),
    ],
    ids=str,
)
def test_means_of_sharded_leaves_are_on_the_host_and_sharded(rule, axis_type):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,))
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    xs = samples(60, (3, 8)).astype(np.float32)
    average, window = tail_average(rule, bundle=0, offload="cpu"), window_for(rule)
    update = jax.jit(average.update, donate_argnums=0)
    state = average.init(jax.device_put(xs[0], sharding))
    numpy = TailAverage(rule)
    for x in xs:
        state = update(state, jax.device_put(x, sharding))
        numpy.update(x.astype(float))
    wanted = NamedSharding(mesh, PartitionSpec(None, None, "x"), memory_kind="pinned_host")
    assert state.means.sharding.is_equivalent_to(wanted, 3)
    assert state.means.sharding.memory_kind == "pinned_host"
    expected = numpy.value(window) if window else numpy.value()
    assert_close(value(state, window=window), expected, 3e-6)


def test_another_place_is_refused():
    with pytest.raises(ValueError, match="offload: expected \"cpu\" or None, got 'disk'"):
        tail_average(10, offload="disk")


@pytest.mark.parametrize("jitted", [False, True])
def test_a_backend_without_such_memory_is_refused(monkeypatch, jitted):
    average = tail_average(10, offload="cpu")
    init = jax.jit(average.init) if jitted else average.init
    device = type(jax.devices()[0])
    monkeypatch.setattr(
        device, "addressable_memories", lambda self: [self.default_memory()], raising=False
    )
    with pytest.raises(ValueError, match=r"offload: expected .* pinned_host memory, got \['dev"):
        init(jnp.zeros(3))
