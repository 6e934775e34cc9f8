"""States of JAX: for one rule only, and through files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tailavg import AnyTail, AnytimeWindow, Exponential
from tailavg.jax import TreeState, tail_average, value
from tests.support.cases import of_rules, samples, short
from tests.support.corrupt_states import mutants, within
from tests.support.jax_trees import (
    Pair,
    assert_same,
    row,
    rules_and_tails,
    saved_by_orbax,
    window_for,
)


@pytest.mark.parametrize("other", [AnytimeWindow(10, 4), Exponential(10)], ids=short)
def test_a_state_of_another_rule_is_refused(other):
    state = tail_average(10).init(1.0)
    with pytest.raises(ValueError, match=r"state: made with another rule than "):
        tail_average(other).update(state, 1.0)
    with pytest.raises(ValueError, match=r"state: made with another rule than AnytimeWindow"):
        tail_average(10).update(tail_average(Exponential(10)).init(1.0), 1.0)


@pytest.mark.parametrize(
    ("rule", "other"),
    [
        (AnytimeWindow(0.25), AnytimeWindow(0.25, turns="paper")),
        (Exponential(10), Exponential(0.5)),
    ],
    ids=short,
)
def test_another_rule_with_as_many_accumulators_is_refused(rule, other):
    """Outside jit at once. Inside, the value is NaN from then on, and a read outside raises."""
    average, wrong = tail_average(rule), tail_average(other)
    update, read = jax.jit(average.update), jax.jit(value)
    state = average.init({"w": jnp.zeros(3), "n": 1})
    for i in range(5):
        state = update(state, {"w": jnp.full(3, i, jnp.float32), "n": i})
    with pytest.raises(ValueError, match=r"state: made with another rule than "):
        wrong.update(state, {"w": jnp.ones(3), "n": 7})
    refused = jax.jit(wrong.update)(state, {"w": jnp.ones(3), "n": 7})
    for broken in (refused, update(refused, {"w": jnp.full(3, 5.0), "n": 5})):
        assert np.isnan(read(broken)["w"]).all()
        with pytest.raises(ValueError, match="state: invalid, since another rule has updated it"):
            value(broken)


def saved_by_numpy(state, path):
    leaves, structure = jax.tree.flatten(state)
    np.savez(path / "state.npz", *leaves)
    with np.load(path / "state.npz") as file:
        return structure.unflatten([file[name] for name in file.files])


@rules_and_tails
def test_a_restored_run_is_the_unbroken_one_to_the_bit(rule, tmp_path):
    average, window = tail_average(rule, bundle=5), window_for(rule)
    trees = {
        "w": samples(80, (2, 3)).astype(np.float32),
        "pair": Pair(samples(80, ()).astype(np.float32), np.arange(80)),
        "none": None,
    }
    update = jax.jit(average.update)
    unbroken = average.init(row(trees, 0))
    for i in range(37):
        unbroken = update(unbroken, row(trees, i))
    resumed = [save(unbroken, tmp_path) for save in (saved_by_orbax, saved_by_numpy)]
    for state in resumed:
        assert isinstance(state, TreeState)
        assert_same(state, unbroken)
    for i in range(37, 80):
        unbroken, *resumed = (update(state, row(trees, i)) for state in (unbroken, *resumed))
    for state in resumed:
        assert_same(state, unbroken)
        assert_same(average.value(state, window=window), average.value(unbroken, window=window))


@of_rules([Exponential(0.25), AnyTail(6)])
def test_a_mutated_state_is_refused_or_works(rule):
    average, tree = tail_average(rule), {"a": jnp.zeros(2), "b": jnp.zeros(())}
    state = average.init(tree)
    for step in range(20):
        state = average.update(state, jax.tree.map(lambda x, step=step: x + step, tree))
    refused = 0
    for mutant in mutants(average.state_dict(state), 100, seed=rule.accumulators):
        try:
            with np.errstate(all="ignore"):
                loaded = within(lambda: average.from_state_dict(mutant, tree), 5)  # noqa: B023
        except ValueError:
            refused += 1
        else:
            read = lambda: average.value(average.update(loaded, tree), window=window_for(rule))  # noqa: B023, E731
            within(read, seconds=10)
    assert refused > 30
