"""Any tail of the parameters, chosen when it is read."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tailavg import (
    AnyTail,
    AnytimeWindow,
    Decay,
    Exponential,
    Fixed,
    Freshest,
    Growing,
    TailAverage,
)
from tailavg.optax import averaged_params, evaluate_tails, tail_average, with_tail_average
from tests.support.any_tails import Tails
from tests.support.optax_training import (
    KERNEL,
    LABELS,
    SMALL,
    TARGETS,
    assert_close,
    assert_equal,
    counts,
    expected,
    start,
    tails,
    train,
)

RULE = AnyTail(8, 0.2)
WINDOWS = [0.2, 0.5, 1.0, 30, Fixed(50), Growing(0.5, at_most=40)]


def dense(history, rule, window):
    """The average of these windows, from the weight of each sample."""
    model = Tails(rule)
    for _ in TARGETS:
        model.add()
    weights = model.of(window)
    return jax.tree.map(lambda xs: np.tensordot(weights, xs.astype(np.float64), 1), history)


@pytest.fixture(scope="module")
def trained():
    """Parameters, state and history of an optimizer with an `AnyTail`; the kernel is no bundle."""
    return train(with_tail_average(optax.sgd(0.1), RULE, bundle=2), targets=TARGETS)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_any_window_is_read_from_one_state(trained, window):
    params, state, history = trained
    assert counts(state) == [len(TARGETS)]
    wanted = dense(history, RULE, window)
    assert_close(averaged_params(state, window=window), wanted)
    assert_close(averaged_params(state, params, window), wanted)


def test_a_window_may_be_traced(trained):
    params, state, history = trained
    read = jax.jit(averaged_params)
    for window in (0.2, 0.5, 1.0, 30):
        wanted = dense(history, RULE, window)
        assert_close(read(state, params, jnp.asarray(window)), wanted)
        assert_close(averaged_params(state, window=np.asarray(window)), wanted)


@pytest.mark.parametrize(
    "decay",
    [*(Decay(0.5, shape) for shape in ("linear", "cosine", "1-sqrt")), Freshest(0.5)],
    ids=str,
)
def test_a_decay_is_read_from_the_same_state(trained, decay):
    params, state, history = trained

    def read(xs):
        average = TailAverage(RULE)
        average.update_many(xs.astype(np.float64))
        return average.value(decay)

    assert_close(averaged_params(state, params, decay), jax.tree.map(read, history))


def test_windows_are_evaluated_one_by_one(trained):
    params, state, history = trained
    traced = []

    def losses(averaged, targets, factor):
        traced.append(averaged)
        return {"loss": factor * (averaged["dense"]["kernel"].sum() - targets), "all": averaged}

    for windows, meant in (
        (WINDOWS, WINDOWS),
        ([0.3, *WINDOWS[1:]], [0.3, *WINDOWS[1:]]),
        (jnp.array([0.25, 0.5, 1.0]), [0.25, 0.5, 1.0]),
        (np.array([25, 100]), [25, 100]),
    ):
        got = evaluate_tails(losses, state, windows, jnp.arange(3.0), 2.0, params=params)
        assert got["loss"].shape == (len(meant), 3)
        for i, window in enumerate(meant):
            wanted = dense(history, RULE, window)
            assert_close(jax.tree.map(lambda xs, i=i: xs[i], got["all"]), wanted)
            total = wanted["dense"]["kernel"].sum()
            np.testing.assert_allclose(got["loss"][i], 2 * (total - np.arange(3)), rtol=1e-4)
    assert len(traced) == 3  # once for each number of windows


def test_decays_are_evaluated_too(trained):
    params, state, _ = trained
    decays = [Decay(0.5, "cosine"), Decay(30, "1-sqrt"), Freshest(0.5), 0.5]
    got = evaluate_tails(lambda averaged: averaged, state, decays, params=params)
    for i, decay in enumerate(decays):
        wanted = averaged_params(state, params, decay)
        assert_close(jax.tree.map(lambda xs, i=i: xs[i], got), wanted, 1e-6)


def test_no_more_than_one_average_is_held():
    params = {"w": jnp.ones((512, 512)), "b": jnp.ones(512)}
    state = with_tail_average(optax.sgd(0.1), RULE).init(params)

    def loss(averaged, inputs):
        return (inputs @ averaged["w"] + averaged["b"]).sum()

    def evaluate(state, inputs):
        return evaluate_tails(loss, state, jnp.linspace(0.3, 1.0, 16), inputs, params=params)

    compiled = jax.jit(evaluate).lower(state, jnp.ones((2, 512))).compile()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert 0.9 * size < compiled.memory_analysis().temp_size_in_bytes < 1.5 * size


def test_evaluations_have_the_dtypes_of_the_parameters():
    params = {"scale": jnp.array(4.0, jnp.bfloat16)}
    params, state, _ = train(with_tail_average(optax.sgd(0.1), RULE), params)
    got = evaluate_tails(lambda averaged: averaged, state, [0.5, 1.0], params=params)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.bfloat16)}
    wanted = averaged_params(state, params, 1.0)
    assert_equal(jax.tree.map(lambda xs: xs[1], got), wanted)
    got = evaluate_tails(lambda averaged: averaged, state, [0.5])
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.float32)}


BRANCHES = {
    "matrix": with_tail_average(optax.sgd(0.2), RULE),
    "vector": with_tail_average(optax.sgd(0.1), AnyTail(6, 0.5)),
}


def test_each_of_several_tails_is_read_with_the_window():
    params, state, history = train(optax.multi_transform(BRANCHES, LABELS), targets=TARGETS)
    wanted = dense(history, AnyTail(6, 0.5), 0.7)
    wanted["dense"]["kernel"] = dense(history, RULE, 0.7)["dense"]["kernel"]
    assert_close(averaged_params(state, window=0.7), wanted)
    assert_close(jax.jit(averaged_params)(state, params, 0.7), wanted)
    got = evaluate_tails(lambda averaged: averaged, state, [1.0, 0.7], params=params)
    assert_close(jax.tree.map(lambda xs: xs[1], got), wanted)


def test_parameters_without_a_tail_are_evaluated_as_they_are():
    tx = optax.chain(optax.sgd(0.1), optax.masked(tail_average(RULE), KERNEL))
    params, state, history = train(tx, targets=TARGETS)
    got = evaluate_tails(lambda averaged: averaged, state, [0.5], params=params)
    kernel = got["dense"].pop("kernel")[0]
    np.testing.assert_allclose(kernel, dense(history, RULE, 0.5)["dense"]["kernel"], rtol=1e-5)
    for name, leaf in (("bias", got["dense"]["bias"]), ("scale", got["scale"])):
        np.testing.assert_array_equal(leaf[0], {**params, **params["dense"]}[name])
    with pytest.raises(ValueError, match="params: only some of the parameters have a tail"):
        evaluate_tails(lambda averaged: averaged, state, [0.5])


def test_a_tail_with_a_window_of_its_own_takes_none():
    own = {**BRANCHES, "vector": with_tail_average(optax.sgd(0.1), 4)}
    for tx in (optax.multi_transform(own, LABELS), own["vector"]):
        state = tx.init(start())
        with pytest.raises(ValueError, match="this average has its own window"):
            averaged_params(state, window=0.5)
        with pytest.raises(ValueError, match="this average has its own window"):
            evaluate_tails(lambda averaged: averaged, state, [0.5])
    with pytest.raises(ValueError, match="AnyTail has no window of its own"):
        averaged_params(optax.multi_transform(own, LABELS).init(start()))


def test_a_window_that_is_too_short_is_refused():
    _, state, _ = train(with_tail_average(optax.sgd(0.1), RULE), SMALL, TARGETS)
    read = jax.jit(averaged_params)
    for window in (0.1, 19):
        with pytest.raises(ValueError, match=re.escape("at least 20 of the 100 samples so far")):
            averaged_params(state, window=window)
        with pytest.raises(ValueError, match=re.escape("at least 20 of the 100 samples so far")):
            evaluate_tails(lambda averaged: averaged, state, [0.5, window])
        assert np.isnan(read(state, None, jnp.asarray(window))["scale"])


def test_no_windows_are_refused():
    state = with_tail_average(optax.adam(0.1), RULE).init(start())
    with pytest.raises(ValueError, match="windows: expected at least one, got none"):
        evaluate_tails(lambda averaged: averaged, state, [])


def test_an_evaluation_needs_a_tail_that_comes_last():
    with pytest.raises(ValueError, match="opt_state: it contains no state of tail_average"):
        evaluate_tails(lambda averaged: averaged, optax.adam(0.1).init(start()), [0.5])
    state = optax.chain(tail_average(RULE), optax.scale(0.5)).init(start())
    with pytest.raises(ValueError, match="expected tail_average last in its chain"):
        evaluate_tails(lambda averaged: averaged, state, [0.5])


# --- how the tail is held ---

MAKERS = {
    "tail_average": tail_average,
    "with_tail_average": partial(with_tail_average, optax.identity()),
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@pytest.mark.parametrize(
    ("make", "options", "bundled"),
    [
        (MAKERS["tail_average"], {}, 9),
        (MAKERS["tail_average"], {"bundle": 2}, 3),
        (MAKERS["with_tail_average"], {"bundle": 0}, 0),
    ],
)
def test_small_leaves_lie_in_bundles_and_are_averaged_alike(make, options, bundled):
    _, state, history = train(optax.chain(optax.sgd(0.1), make(4, **options)))
    [tail] = tails(state)
    assert sum(bundle.errors.size for bundle in tail.bundles.values()) == bundled
    assert (tail.means["dense"]["kernel"] is None) == (bundled == 9)
    assert_close(averaged_params(state), expected(history, 4))


@every_maker
def test_means_are_kept_on_the_host(make):
    [tail] = tails(make(4, bundle=2, offload="cpu").init(start()))
    arrays = tail.means["dense"]["kernel"], tail.bundles["float32"].means
    assert {array.sharding.memory_kind for array in arrays} == {"pinned_host"}
    kinds = {array.sharding.memory_kind for array in jax.tree.leaves(tail.sums)}
    assert "pinned_host" not in kinds


@every_maker
def test_bad_options_are_refused(make):
    with pytest.raises(ValueError, match="offload: expected \"cpu\" or None, got 'disk'"):
        make(4, offload="disk")
    with pytest.raises(ValueError, match="bundle: expected"):
        make(4, bundle=-1)


@pytest.mark.parametrize("rule", ["10min", AnytimeWindow("10min"), Exponential("10min")], ids=str)
def test_a_window_of_time_is_refused(rule):
    with pytest.raises(TypeError, match=r"a window of time works in|a model have none"):
        with_tail_average(optax.sgd(0.1), rule)
