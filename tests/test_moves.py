"""A state moves between NumPy, PyTorch and JAX, and the average goes on as if it had not."""

import copy
import math
from contextlib import nullcontext
from functools import cache
from itertools import cycle, pairwise, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import nn

from tailavg import AnyTail, AnytimeWindow, ExactWindow, Exponential, Growing, RawTail, TailAverage
from tailavg.io.state import state as layout
from tailavg.jax import tail_average
from tailavg.torch import ParameterAverage
from tests.support.cases import CAPPED, RULES, of_rules, samples, turns_of
from tests.support.effort import some
from tests.support.schedule import advance

# Those that every framework has.
MOVING = [rule for rule in RULES if not isinstance(rule, ExactWindow | RawTail)] + [AnyTail(6)]


def window_for(rule):
    """What to read an average of this rule with."""
    return {"window": 0.5} if isinstance(rule, AnyTail) else {}


class One(nn.Module):
    """A module of one parameter."""

    def __init__(self, shape, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype)))


def x64(dtype):
    return jax.enable_x64(True) if dtype == "float64" else nullcontext()


# Each of these goes on from a state, if there is one, with more samples: a state and the average.


def in_numpy(rule, dtype, saved, xs):
    average = (
        TailAverage(rule, dtype=dtype) if saved is None else TailAverage.from_state_dict(saved)
    )
    for x in xs:
        average.update(x)
    return average.state_dict(), average.value(**window_for(rule)) if average.count else None


def in_torch(rule, dtype, saved, xs):
    model = One(xs.shape[1:], dtype)
    average = ParameterAverage(model, rule, dtype=getattr(torch, dtype))
    if saved is not None:
        average.load_state_dict(saved)
    for x in xs:
        with torch.no_grad():
            model.weight.copy_(torch.as_tensor(x))
        average.update()
    if not average.count:
        return average.state_dict(), None
    return average.state_dict(), average.averaged_state_dict(**window_for(rule))["weight"].numpy()


def average_of(rule, dtype):
    """Half of the rules with the means of each leaf alone."""
    return tail_average(rule, dtype=dtype, bundle=100 * (rule.accumulators % 2))


@cache
def jitted(rule, dtype):
    """Updates with some of the rows of an array."""
    average = average_of(rule, dtype)
    return jax.jit(
        lambda state, xs, start, end: lax.fori_loop(
            start,
            end,
            lambda i, state: average.update(state, jax.tree.map(lambda x: x[i], xs)),
            state,
        )
    )


def in_jax(rule, dtype, saved, xs):
    average = average_of(rule, dtype)
    zeros = jnp.zeros(xs.shape[1:], dtype)
    state = average.init(zeros) if saved is None else average.from_state_dict(saved, zeros)
    padded = np.zeros((1024, *xs.shape[1:]), dtype)  # one shape, to be compiled once
    padded[: len(xs)] = xs
    state = jitted(rule, dtype)(state, padded, 0, len(xs))
    if not int(state.updates):
        return average.state_dict(state), None
    return average.state_dict(state), np.asarray(average.value(state, **window_for(rule)))


FRAMEWORKS = {"numpy": in_numpy, "torch": in_torch, "jax": in_jax}
ORDERS = [("numpy", "torch", "jax"), ("jax", "torch", "numpy")]  # go round: from each to each


def awkward(rule, steps):
    """Before and after some turns and folds; with one sample."""
    turns = turns_of(rule, steps - 1)
    near = [t + i for t in [*turns[3:5], *turns[-2:]] for i in (-1, 0, 1)]
    return sorted({1, 2, *near, 255, 256, 257, 258, 512, 513, 514, steps})


@pytest.mark.parametrize(
    ("rule", "dtype", "order"),
    [*product(MOVING, ["float64"], ORDERS), *product(MOVING[::3], ["float32"], ORDERS[1:])],
    ids=str,
)
def test_an_average_that_moves_is_the_one_that_stayed(rule, order, dtype):
    """At each of those moments to the next in the order, which goes round and round."""
    steps = 700
    xs = samples(steps, (3,), dtype)
    windows = [[window] for window in window_for(rule).values()]
    expected = TailAverage(rule, dtype=np.float64).scan(xs.astype(float), *windows)
    expected = expected.reshape(steps, 3)  # of one window
    saved = None
    stops = awkward(rule, steps)
    with x64(dtype):
        for (start, end), name in zip(pairwise([0, *stops]), cycle(order), strict=False):
            saved, value = FRAMEWORKS[name](rule, dtype, saved, xs[start:end])
            assert saved["count"] == end
            rtol = 1e-12 if dtype == "float64" else 1e-5
            np.testing.assert_allclose(value, expected[end - 1], rtol, err_msg=f"{name} at {end}")


@of_rules([AnytimeWindow(10), AnytimeWindow(0.25), Exponential(0.25)])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_a_number_moves_too(rule, order):
    xs = samples(600, (), "float64")
    saved = None
    with x64("float64"):
        for (start, end), name in zip(
            pairwise([0, 1, 100, 257, 400, 600]), cycle(order), strict=False
        ):
            saved, value = FRAMEWORKS[name](rule, "float64", saved, xs[start:end])
            assert np.shape(value) == ()
            stayed = TailAverage(rule)
            stayed.update_many(xs[:end])
            np.testing.assert_allclose(value, stayed.value(), 1e-12)


@of_rules([AnytimeWindow(10), Exponential(0.25)])
@pytest.mark.parametrize("source", FRAMEWORKS)
@pytest.mark.parametrize("target", FRAMEWORKS)
def test_an_average_of_nothing_moves(rule, source, target):
    xs = samples(20, (3,), "float32")
    saved, _ = FRAMEWORKS[source](rule, "float32", None, xs[:0])
    assert saved["count"] == 0
    again, value = FRAMEWORKS[target](rule, "float32", saved, xs)
    assert again["count"] == 20
    stayed = TailAverage(rule)
    stayed.update_many(xs.astype(float))
    np.testing.assert_allclose(value, stayed.value(), 1e-5)


@pytest.mark.parametrize("source", FRAMEWORKS)
@pytest.mark.parametrize("target", FRAMEWORKS)
def test_a_state_is_not_changed_by_whom_it_is_given_to(source, target):
    xs = samples(40, (3,), "float32")
    saved, _ = FRAMEWORKS[source](AnytimeWindow(10), "float32", None, xs)
    before = copy.deepcopy(saved)
    FRAMEWORKS[target](AnytimeWindow(10), "float32", saved, xs)
    assert saved.keys() == before.keys()
    for mine, theirs in zip(jax.tree.leaves(saved), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(mine, theirs)


# Several arrays, by name


def model_of(dtype="float32"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).to(getattr(torch, dtype))


def tree_of(arrays):
    """{"0.weight": w} as {"0": {"weight": w}}."""
    tree = {}
    for name, array in arrays.items():
        *path, last = name.split(".")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = jnp.asarray(array)
    return tree


def names_of(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def weights_of(model, steps, dtype):
    """Parameters at each step, as arrays by name with time as their first axis."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return {
        name: samples(steps, shape, dtype, seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def put(model, weights, t):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.as_tensor(weights[name][t]))


@of_rules([AnytimeWindow(0.25, 4), Exponential(0.25)])
@pytest.mark.parametrize(
    ("order", "dtype"),
    [(("torch", "jax"), "float64"), (("jax", "torch"), "float64"), (("torch", "jax"), "float32")],
    ids=str,
)
def test_a_model_moves_by_the_names_of_its_parameters(rule, order, dtype):
    model = model_of(dtype)
    weights = weights_of(model, 320, dtype)
    rtol = 1e-12 if dtype == "float64" else 1e-5
    with x64(dtype):
        average, saved = tail_average(rule, dtype=dtype), None
        zeros = tree_of({name: np.zeros_like(xs[0]) for name, xs in weights.items()})
        for (start, end), name in zip(pairwise([0, 1, 100, 257, 320]), cycle(order), strict=False):
            if name == "torch":
                held = ParameterAverage(model, rule, dtype=getattr(torch, dtype))
                if saved is not None:
                    held.load_state_dict(saved)
                for t in range(start, end):
                    put(model, weights, t)
                    held.update()
                saved = held.state_dict()
                values = {key: x.numpy() for key, x in held.averaged_state_dict().items()}
            else:
                state = average.init(zeros)
                if saved is not None:
                    state = average.from_state_dict(saved, zeros)
                state = jitted(rule, dtype)(state, tree_of(weights), start, end)
                saved = average.state_dict(state)
                values = names_of(average.value(state))
            assert values.keys() == weights.keys()
            for key, xs in weights.items():
                stayed = TailAverage(rule)
                stayed.update_many(xs[:end].astype(float))
                np.testing.assert_allclose(values[key], stayed.value(), rtol, err_msg=key)


def test_what_is_not_averaged_stays_that_of_the_tree():
    model = nn.Sequential(nn.Linear(2, 1))
    held = ParameterAverage(model, 10)
    held.update()
    average = tail_average(10)
    tree = tree_of(dict.fromkeys(["0.weight"], np.zeros((1, 2), np.float32)))
    tree["0"] |= {"bias": jnp.zeros(1), "steps": jnp.array(7), "none": None}
    state = average.from_state_dict(held.state_dict(), tree)
    value = average.value(state)
    assert value["0"]["steps"] == 7
    assert value["0"]["none"] is None
    np.testing.assert_array_equal(value["0"]["weight"], model[0].weight.detach())


# What is refused


def one_state(rule=10, shape=(3,), name="torch", dtype="float32"):
    rule = AnytimeWindow(rule) if isinstance(rule, int | float) else rule
    saved, _ = FRAMEWORKS[name](rule, dtype, None, samples(50, shape, dtype))
    return saved


def refused_by_jax(saved, tree, match, rule=10):
    with pytest.raises(ValueError, match=match) as caught:
        tail_average(rule).from_state_dict(saved, tree)
    assert caught.type is ValueError


def refused_by_torch(saved, model, match, rule=10):
    held = ParameterAverage(model, rule)
    held.update()
    before = copy.deepcopy(held.state_dict())
    with pytest.raises(ValueError, match=match):
        held.load_state_dict(saved)
    after = held.state_dict()
    assert after.keys() == before.keys()
    for mine, theirs in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    held.update()
    assert held.count == 2


@pytest.mark.parametrize("source", FRAMEWORKS)
@of_rules([AnytimeWindow(11), AnytimeWindow(10, 4), AnytimeWindow(0.5), Exponential(10)])
def test_a_state_of_another_rule_is_refused(source, rule):
    saved = one_state(rule, name=source)
    match = f"expected AnytimeWindow.*got {type(rule).__name__}"
    refused_by_jax(saved, jnp.zeros(3), match)
    refused_by_torch(saved, One((3,), "float32"), match)


def test_a_state_of_a_rule_that_jax_has_not_is_refused():
    saved = one_state(RawTail(10, total=100), name="numpy")
    refused_by_jax(saved, jnp.zeros(3), "expected AnytimeWindow.*got RawTail")


@pytest.mark.parametrize("source", FRAMEWORKS)
def test_a_wrong_shape_is_refused(source):
    saved = one_state(name=source)
    for shape in [(4,), (), (3, 1), (1, 3)]:
        refused_by_jax(saved, jnp.zeros(shape), r"expected shape .*, got \(3,\)")
        refused_by_torch(saved, One(shape, "float32"), "expected")


def of_model(names):
    """A state of torch, of some of a model's parameters."""
    held = ParameterAverage(model_of(), 10, include=names)
    for _ in range(30):
        held.update()
    return held.state_dict()


ALL = ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize("names", [ALL[:3], [*ALL[:3], "2.biases"], ["0.weight"]], ids=len)
def test_names_that_are_missing_or_not_expected_are_refused(names):
    saved = of_model(ALL)
    shapes = {name: x.shape for name, x in saved["partial"].items()}
    tree = tree_of({name: np.zeros(shapes.get(name, (1,)), np.float32) for name in names})
    refused_by_jax(saved, tree, "expected arrays of .*0.weight.*, got .*2.bias")
    average = tail_average(10)
    state = average.update(average.init(tree), tree)
    refused_by_torch(average.state_dict(state), model_of(), "2.bias")


@pytest.mark.parametrize("source", ["torch", "jax"])
def test_numpy_takes_but_one_array(source):
    saved = of_model(ALL)
    if source == "jax":
        average = tail_average(10)
        tree = tree_of({name: np.asarray(x) for name, x in saved["partial"].items()})
        saved = average.state_dict(average.from_state_dict(saved, tree))
    with pytest.raises(ValueError, match=r"takes a single array, got .*0\.weight"):
        TailAverage.from_state_dict(saved)


def test_one_of_several_names_is_not_taken_for_a_lone_one():
    saved = of_model(["0.weight"])
    refused_by_jax(saved, {"other": jnp.zeros((3, 2))}, "expected arrays of .*other.*0.weight")
    refused_by_torch(saved, One((3, 2), "float32"), "weight")


@pytest.mark.parametrize("key", ["count", "starts", "folded", "blocks", "partial", "rule"])
def test_a_damaged_state_is_refused(key):
    saved = one_state(name="jax")
    wrong = {
        "count": 49 + 10**6,
        "starts": [0, 1, 2],
        "folded": 10**6,
        "blocks": saved["blocks"][:1],
        "partial": {},
        "rule": {"type": "Nothing"},
    }
    saved[key] = wrong[key]
    refused_by_jax(saved, jnp.zeros(3), "state: ")
    refused_by_torch(saved, One((3,), "float32"), "state: ")
    with pytest.raises(ValueError, match="state: "):
        TailAverage.from_state_dict(saved)


# States of single precision


@of_rules([AnytimeWindow(0.25), AnytimeWindow(0.07, 2), AnytimeWindow(Growing(0.5, 20_000))])
@pytest.mark.parametrize("target", FRAMEWORKS)
def test_a_state_whose_turns_are_a_little_off_is_refused(rule, target):
    """Not even single precision gives such a one."""
    t = 100_000
    starts, zeros = advance(rule, [0], t), np.zeros(2, np.float32)

    def saved(shift):
        return layout(
            rule,
            dtype="float32",
            count=t,
            starts=[start + shift for start in starts],
            blocks=[{"": zeros}] * len(starts),
            folded=t,
            partial={"": zeros},
        )

    xs = samples(1, (2,), "float32")
    again, _ = FRAMEWORKS[target](rule, "float32", saved(0), xs)
    assert again["count"] == t + 1
    for shift in (-5, -1, 1, 5):
        with pytest.raises(ValueError, match="corrupt state"):
            FRAMEWORKS[target](rule, "float32", saved(shift), xs)


# ties, or nearly, that float32 arithmetic would miss: of 0.04, at 87310
@of_rules([
    AnytimeWindow(0.04),
    AnytimeWindow(0.25, 4, "paper"),
    AnytimeWindow(Growing(0.5, 20_000)),
    *some([], [AnytimeWindow(0.36), AnytimeWindow(0.15, 2), AnytimeWindow(0.3, 3, "paper")]),
])  # fmt: skip
def test_a_long_run_in_single_precision_is_taken_by_all(rule):
    xs = samples(some(121_000, 901_000), (2,), "float32")
    turn = turns_of(rule, 90_000)[-1]
    average = tail_average(rule)
    state = average.init(jnp.zeros(2))
    for start, t in pairwise([0, 200, 5001, turn - 1, turn, turn + 1, len(xs) - 1000]):
        state = jitted(rule, "float32")(state, xs, start, t)
        saved, end = average.state_dict(state), t + 600
        stayed = TailAverage(rule)
        stayed.update_many(xs[:end].astype(float))
        for go_on in FRAMEWORKS.values():
            again, value = go_on(rule, "float32", saved, xs[t:end])
            assert again["starts"] == stayed.state_dict()["starts"]
            np.testing.assert_allclose(value, stayed.value(), 1e-5)


# NaNs, shards and calls


@of_rules([AnytimeWindow(10), AnytimeWindow(0.2), AnytimeWindow(CAPPED, 4)])
def test_what_is_left_in_a_place_that_is_used_again_is_not_exported(rule):
    xs, bad = samples(200, (2,), "float32"), np.array([math.nan, math.inf], np.float32)
    xs[[2, 40, 41]] = bad
    average = tail_average(rule)
    update, state = jax.jit(average.update), average.init(jnp.asarray(bad))
    clean = turned = 0
    for t, x in enumerate(xs, start=1):
        state = update(state, x)
        saved = average.state_dict(state)
        arrays = [*(block[""] for block in saved["blocks"]), saved["partial"][""]]
        starts = [*saved["starts"], t]
        for (start, end), mean in zip(pairwise(starts), saved["blocks"], strict=True):
            assert np.isfinite(mean[""]).all() or not np.isfinite(xs[start:end]).all()
        if np.isfinite(xs[starts[0] : t]).all():
            clean += 1
            turned += saved["folded"] == starts[-2]
            assert all(np.isfinite(array).all() for array in arrays)
            for go_on in (in_numpy, in_torch):
                if t % 10 == 0:
                    _, value = go_on(rule, "float32", saved, xs[:0])
                    np.testing.assert_allclose(value, average.value(state), 1e-6)
    assert clean > 50
    assert turned > 0


def test_a_state_before_the_first_update_has_nothing_of_the_tree():
    average = tail_average(10)
    saved = average.state_dict(average.init(jnp.full(3, jnp.nan)))
    assert saved["blocks"] == []
    np.testing.assert_array_equal(saved["partial"][""], np.zeros(3))


@pytest.mark.parametrize(
    ("rule", "source"),
    [*product([AnytimeWindow(0.25)], FRAMEWORKS), (Exponential(0.25), "numpy")],
    ids=str,
)
def test_a_state_is_sharded_as_the_tree_it_is_loaded_for(rule, source):
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    xs = samples(400, (8, 2), "float32")
    saved, _ = FRAMEWORKS[source](rule, "float32", None, xs[:300])
    average = tail_average(rule)
    tree = jax.device_put(jnp.zeros((8, 2)), sharding)
    state, fresh = average.from_state_dict(saved, tree), average.init(tree)
    assert state.sums.sharding == sharding
    for mine, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True):
        assert mine.sharding == theirs.sharding
        assert mine.dtype == theirs.dtype
    state = jitted(rule, "float32")(state, jax.device_put(xs), 300, 400)
    stayed = TailAverage(rule)
    stayed.update_many(xs.astype(float))
    np.testing.assert_allclose(average.value(state), stayed.value(), 1e-5)
    _, value = in_numpy(rule, "float32", average.state_dict(state), xs[:0])
    np.testing.assert_allclose(value, stayed.value(), 1e-5)


@of_rules([AnytimeWindow(10), Exponential(0.5)])
def test_calls_between_two_samples_are_those_of_torch_alone(rule):
    xs = samples(100, (3,), "float32")
    model = One((3,), "float32")
    held = ParameterAverage(model, rule, update_every=3)
    for x in xs[:50]:
        with torch.no_grad():
            model.weight.copy_(torch.as_tensor(x))
        held.update()
    saved = held.state_dict()
    assert (saved["count"], saved["calls"]) == (16, 2)
    stayed = TailAverage(rule)
    stayed.update_many(xs[2:50:3].astype(float))
    for go_on in (in_numpy, in_jax):
        again, value = go_on(rule, "float32", saved, xs[:0])
        np.testing.assert_allclose(value, stayed.value(), 1e-5)
        assert "calls" not in again
        back = ParameterAverage(model, rule, update_every=3)
        back.load_state_dict(again)
        counts = []
        for _ in range(4):
            back.update()
            counts.append(back.count)
        assert counts == [16, 16, 17, 17]
    resumed = ParameterAverage(model, rule, update_every=3)
    resumed.load_state_dict(saved)
    resumed.update()
    assert resumed.count == 17


@pytest.mark.parametrize("policy", ["omit", "raise"])
@pytest.mark.parametrize("target", [in_torch, in_jax])
def test_a_policy_that_others_do_not_have_stays_in_numpy(policy, target):
    average = TailAverage(10, dtype="float32", nan_policy=policy)
    average.update(np.ones(2, np.float32))
    with pytest.raises(ValueError, match="nan_policy: expected 'propagate', got"):
        target(average.rule, "float32", average.state_dict(), np.ones((1, 2), np.float32))


def test_a_complex_state_does_not_go_into_a_real_leaf():
    average = TailAverage(10, dtype="complex64")
    average.update(np.ones(2) * 1j)
    with pytest.raises(ValueError, match="state: expected float32, got complex64"):
        tail_average(10).from_state_dict(average.state_dict(), jnp.zeros(2))


def test_counts_that_32_bits_do_not_hold_are_refused():
    average = TailAverage(Exponential(10), dtype="float32")
    average.update(np.ones(2, np.float32))
    saved = average.state_dict() | {"count": 3 * 10**9, "folded": 3 * 10**9}
    with pytest.raises(ValueError, match=r"count of at most 2147483646, since x64 is off, got 3"):
        tail_average(Exponential(10)).from_state_dict(saved, jnp.zeros(2))
    with jax.enable_x64(True):
        state = tail_average(Exponential(10)).from_state_dict(saved, jnp.zeros(2))
        assert int(state.updates) == 3 * 10**9


def test_names_are_checked_before_the_first_sample_too():
    average = tail_average(10)
    saved = average.state_dict(average.init({"a": jnp.zeros(2)}))
    with pytest.raises(ValueError, match=r"state: expected arrays of \['b'\], got \['a'\]"):
        average.from_state_dict(saved, {"b": jnp.zeros(2)})
