"""Trees of any nodes and leaves in JAX, and those that do not fit."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tailavg import AnyTail, AnytimeWindow, ExactWindow, Exponential, RawTail
from tailavg.jax import TreeState, tail_average, value
from tailavg.jax.clock import TracedBlocks, TracedDecay, TracedTails
from tests.support.cases import assert_close
from tests.support.jax_trees import Pair, assert_same, two_rules
from tests.support.model import weight_matrix

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


@pytest.mark.parametrize(
    ("rule", "bundle"), [(AnytimeWindow(0.3), 3), (Exponential(10), 0)], ids=str
)
def test_trees_may_have_any_nodes_and_leaves(rule, bundle):
    average = tail_average(rule, bundle=bundle)
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
    if bundle:
        assert len(jax.tree.leaves(state.means)) == 1
        shapes = {name: stack.means.shape for name, stack in state.bundles.items()}
        assert shapes == {"float32": (places, 2 + 1 + 3 + 1), "complex64": (places, 2)}
    else:
        assert state.means["empty"].shape == (places, 0, 4)
        assert state.bundles == {}


@two_rules
def test_leaves_of_up_to_so_many_numbers_are_bundled(rule):
    average = tail_average(rule, bundle=6)
    tree = {"six": jnp.ones((2, 3)), "seven": jnp.ones(7), "one": 1.0, "n": jnp.arange(3)}
    state = average.init(tree)
    places = rule.accumulators
    means = {"n": None, "one": None, "seven": (places, 7), "six": None}
    assert {name: x if x is None else x.shape for name, x in state.means.items()} == means
    assert state.bundles["float32"].means.shape == (places, 7)
    assert state.bundles["float32"].errors.shape == (7,)


def test_like_gives_the_dtypes_of_a_tree():
    average = tail_average(10)
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
        assert state.count == 0
        assert average.size(state) == rule.size(1)


@pytest.mark.parametrize(
    ("rule", "tree"),
    [(AnytimeWindow(0.3), {"n": 3}), (Exponential(10), {"a": None}), (Exponential(10), None)],
    ids=str,
)
def test_a_tree_without_anything_to_average_is_counted(rule, tree):
    average = tail_average(rule)
    state = average.init(tree)
    for _ in range(4):
        state = jax.jit(average.update, donate_argnums=0)(state, tree)
    assert state.count == 4
    assert average.value(state) == average.value(state, like=tree) == tree
    assert average.profile(state).count == 4


def test_whole_numbers_and_narrow_floats_are_taken_for_a_floating_leaf():
    average = tail_average(10)
    state = average.init({"w": jnp.zeros(2), "s": 0.0})
    for x in (jnp.array([1, 3]), jnp.array([1, 3], jnp.bfloat16), np.array([1, 3], np.uint8)):
        state = average.update(state, {"w": x, "s": 2})
    assert_close(average.value(state)["w"], [1, 3], 1e-6)
    assert_close(average.value(state)["s"], 2, 1e-6)


def test_parts_of_a_state_are_named():
    state = tail_average(10).init(1.0)
    assert state._fields == ("updates", "size", "rule", "clock", "sums", "means", "bundles")
    assert isinstance(state.clock, TracedBlocks)
    assert isinstance(tail_average(Exponential(10)).init(1.0).clock, TracedDecay)
    assert isinstance(tail_average(AnyTail()).init(1.0).clock, TracedTails)


# Refusals


@pytest.mark.parametrize(
    "rule",
    [ExactWindow(10), RawTail(0.25, total=100)],
    ids=lambda rule: type(rule).__name__,
)
def test_other_rules_are_refused(rule):
    with pytest.raises(
        TypeError, match=rf"rule: .*{type(rule).__name__}.*use AnytimeWindow|got RawTail"
    ):
        tail_average(rule)


@pytest.mark.parametrize("bad", [-1, 1.5, True, None], ids=repr)
def test_a_bad_bundle_is_refused(bad):
    with pytest.raises((ValueError, TypeError), match=r"bundle: expected an int >= 0, got"):
        tail_average(10, bundle=bad)


@pytest.mark.parametrize("bad", [0, 1.5, True, "0.5", None], ids=repr)
def test_a_bad_rule_is_refused(bad):
    with pytest.raises((ValueError, TypeError), match=r"rule: expected .*, got"):
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
