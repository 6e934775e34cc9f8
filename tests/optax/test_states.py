"""What else is done with an optimizer's state: found, mapped, saved, sharded."""

import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tailavg import AnyTail, Exponential
from tailavg.optax import averaged_params, evaluate_tails, tail_average, with_tail_average
from tests.support.optax_training import (
    LABELS,
    SMALL,
    STEPS,
    TARGETS,
    assert_close,
    assert_equal,
    counts,
    expected,
    gradient_step,
    gradients,
    start,
    tails,
    train,
)


def test_optax_finds_what_it_looks_for():
    tx = with_tail_average(optax.inject_hyperparams(optax.adam)(learning_rate=0.1), 4)
    state = tx.init(start())
    assert float(optax.tree_utils.tree_get(state, "learning_rate")) == pytest.approx(0.1)
    state = optax.tree_utils.tree_set(state, learning_rate=0.5)
    assert float(optax.tree_utils.tree_get(state, "learning_rate")) == 0.5
    assert_equal(optax.tree_utils.tree_get(state, "mu"), jax.tree.map(jnp.zeros_like, start()))
    assert_equal(optax.tree_utils.tree_get(state, "sums"), start())


def test_optax_still_finds_the_count_of_others():
    _, state, _ = train(with_tail_average(optax.adam(0.1), 4), SMALL)
    assert int(optax.tree_utils.tree_get(state, "count")) == STEPS
    assert int(optax.tree_utils.tree_get(state, "updates")) == STEPS


def test_optax_maps_over_what_is_shaped_as_the_parameters():
    tx = with_tail_average(optax.adam(0.1), 4, bundle=0)
    state = tx.init(start())
    mapped = optax.tree_utils.tree_map_params(
        tx, lambda _, label: label, state, LABELS, transform_non_params=lambda _: None
    )
    assert mapped[0][0].mu == mapped[1].sums == mapped[1].means == LABELS
    assert mapped[1].updates is None


def test_a_train_state_trains_with_a_tail():
    tx = with_tail_average(optax.adam(0.1), 0.3)
    state = TrainState.create(apply_fn=lambda: None, params=SMALL, tx=tx)

    @jax.jit
    def step(state, target):
        return state.apply_gradients(grads=gradients(state.params, target))

    history = []
    for target in TARGETS[:STEPS]:
        state = step(state, target)
        history.append(state.params)
    history = jax.tree.map(lambda *xs: np.array(xs), *history)
    assert_close(averaged_params(state.opt_state, state.params), expected(history, 0.3))


def test_a_run_resumed_from_a_checkpoint_is_the_unbroken_one_to_the_bit(tmp_path):
    tx = optax.multi_transform(
        {
            "matrix": optax.apply_if_finite(with_tail_average(optax.sgd(0.1), 0.3), 3),
            "vector": with_tail_average(optax.sgd(0.1), Exponential(5)),
        },
        LABELS,
    )
    step = jax.jit(lambda carry, target: gradient_step(tx, carry, target))
    carry = start(), tx.init(start())
    for target in TARGETS[:STEPS]:
        carry = step(carry, target)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", carry)
        checkpointer.wait_until_finished()
        blank = jax.eval_shape(lambda: (start(), tx.init(start())))
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        blank = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), blank
        )
        resumed = checkpointer.restore(tmp_path / "state", blank)
    assert_equal(resumed, carry)
    for target in TARGETS[STEPS:50]:
        carry, resumed = step(carry, target), step(resumed, target)
    assert counts(resumed[1]) == [50, 50]
    assert_equal(resumed, carry)
    assert_equal(averaged_params(resumed[1], resumed[0]), averaged_params(carry[1], carry[0]))


@pytest.mark.parametrize(
    ("rule", "compiled", "axis", "bundle"),
    [
        (Exponential(0.5), True, AxisType.Auto, 0),
        (0.5, False, AxisType.Explicit, 0),
        (4, False, AxisType.Auto, 100),
    ],
)
def test_everything_is_sharded_as_the_parameters(rule, compiled, axis, bundle):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis,))
    spec = {"kernel": PartitionSpec("x", None), "bias": PartitionSpec("x")}
    shardings = jax.tree.map(partial(NamedSharding, mesh), spec)
    params = {"kernel": jnp.arange(24.0).reshape(8, 3) + 1, "bias": jnp.arange(4.0) + 1}
    params = jax.device_put(params, shardings)
    tx = with_tail_average(optax.sgd(0.1), rule, bundle=bundle)
    state = (jax.jit(tx.init) if compiled else tx.init)(params)

    def check(params, state):
        def same(array, spec, leading=()):
            wanted = NamedSharding(mesh, PartitionSpec(*leading, *spec))
            assert array.sharding.is_equivalent_to(wanted, array.ndim), array.sharding

        [tail] = tails(state)
        trees = params, tail.sums, averaged_params(state), averaged_params(state, params)
        part = tail_average(4, bundle=bundle)
        part = optax.masked(part, {"kernel": False, "bias": True}).init(params)
        same(averaged_params(part, params)["kernel"], spec["kernel"])
        for name in spec:
            for tree in trees:
                same(tree[name], spec[name])
            if bundle:  # in one array, whole on every device
                assert tail.means[name] is None
            else:
                same(tail.means[name], spec[name], [None])

    check(params, state)
    step = jax.jit(lambda *carry: gradient_step(tx, carry, 1.5), donate_argnums=(0, 1))
    history = []
    for _ in range(9):
        params, state = step(params, state)
        history.append(jax.tree.map(np.array, params))
    check(params, state)
    history = jax.tree.map(lambda *xs: np.array(xs), *history)
    assert_close(averaged_params(state, params), expected(history, rule))


@pytest.mark.parametrize("name", ["as_pure", "pure"])
def test_an_optimizer_of_nnx_is_read_as_it_is(monkeypatch, name):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, with_tail_average(optax.adam(0.1), 4), wrt=nnx.Param)
    monkeypatch.setitem(sys.modules, "flax.nnx", SimpleNamespace(**{name: nnx.as_pure}))
    for params in (None, nnx.state(model, nnx.Param)):
        averaged = averaged_params(optimizer.opt_state, params)
        assert_equal(averaged["kernel"], model.kernel[...])


def test_tails_in_an_optimizer_of_nnx_are_evaluated():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    tx = with_tail_average(optax.adam(0.1), AnyTail())
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    inputs = jnp.arange(10.0).reshape(5, 2)

    @nnx.jit(donate_argnames=("model", "optimizer"))
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda model: (model(inputs) ** 2).mean())(model))

    def outputs(params, inputs):
        return nnx.merge(graph, params)(inputs)

    for _ in range(STEPS):
        step(model, optimizer)
    graph, params = nnx.split(model, nnx.Param)
    got = evaluate_tails(outputs, optimizer.opt_state, [0.25, 1.0], inputs, params=params)
    for window, output in zip([0.25, 1.0], got, strict=True):
        averaged = nnx.clone(model)
        nnx.update(averaged, averaged_params(optimizer.opt_state, params, window))
        np.testing.assert_allclose(output, averaged(inputs), rtol=1e-5)
    assert abs(got[0] - got[1]).max() > 0.1
