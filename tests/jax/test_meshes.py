"""States that are saved on one mesh of eight devices and restored on another, bit for bit."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tailavg import AnyTail, AnytimeWindow, Exponential
from tailavg.jax import tail_average, value
from tests.support.cases import samples
from tests.support.jax_trees import assert_same, row, window_for

SPECS = {
    "both": PartitionSpec("data", "model"),
    "vector": PartitionSpec("model"),
    "whole": PartitionSpec(),
}
SHAPES = {"both": (8, 16), "vector": (16,), "whole": (5,)}
BUNDLE = 16  # takes all but the first
TREES = {
    name: samples(60, shape, seed=i).astype(np.float32)
    for i, (name, shape) in enumerate(SHAPES.items())
}


def mesh_of(data, model):
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def placed(tree, mesh):
    return {name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in tree.items()}


def stepped(update, state, mesh, start, end):
    for i in range(start, end):
        state = update(state, placed(row(TREES, i), mesh))
    return state


def template_on(mesh, average):
    """The shapes and shardings of a state on a mesh, where all devices have its scalars."""

    def described(x):
        sharding = x.sharding if x.committed else NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(described, average.init(placed(row(TREES, 0), mesh)))


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        (AnytimeWindow(0.3), (2, 4)),
        (Exponential(10), (8, 1)),
        (AnyTail(6, 0.3), (1, 1)),
    ],
    ids=str,
)
def test_a_state_saved_on_one_mesh_is_restored_on_another_to_the_bit(rule, shape, tmp_path):
    assert jax.device_count() == 8
    average, window = tail_average(rule, bundle=BUNDLE), window_for(rule)
    update = jax.jit(average.update, donate_argnums=0)
    before = mesh_of(4, 2)
    state = average.init(placed(row(TREES, 0), before))
    state = stepped(update, state, before, 0, 40)
    saved, same = jax.device_get(state), jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
    state = jax.device_get(stepped(update, state, before, 40, 60))
    other = mesh_of(*shape)
    for mesh, template in ((before, same), (other, template_on(other, average))):
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / "state", template)
        assert_same(jax.device_get(restored), saved)
        for name, spec in SPECS.items():
            wanted = NamedSharding(mesh, spec)
            assert restored.sums[name].sharding.is_equivalent_to(wanted, len(SHAPES[name]))
            means = restored.means[name]
            assert (means is None) == (math.prod(SHAPES[name]) <= BUNDLE)
            if means is not None:
                stacked = NamedSharding(mesh, PartitionSpec(None, *spec))
                assert means.sharding.is_equivalent_to(stacked, means.ndim)
        restored = stepped(update, restored, mesh, 40, 60)
        assert_goes_on_alike(jax.device_get(restored), state)
        values = [jax.device_get(value(s, window=window)) for s in (restored, state)]
        for name in SPECS:
            np.testing.assert_allclose(values[0][name], values[1][name], rtol=3e-7)
    assert update._cache_size() <= 2 * 2  # programs for each mesh, not for each step


def assert_goes_on_alike(got, expected):
    """Parts of other shapes are other kernels, which may round the last bit in another way."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_shardings_of_a_state_are_a_template(tmp_path):
    """As a program does it that was started anew: nothing is computed before the restore."""
    average = tail_average(0.3, bundle=0)
    mesh = mesh_of(2, 4)
    tree = placed({name: TREES[name][0] for name in ("both", "vector")}, mesh)
    state = average.update(average.init(tree), tree)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        init = jax.jit(average.init).lower(tree).compile()
        shapes = jax.eval_shape(average.init, tree)
        template = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            init.output_shardings,
        )
        restored = checkpointer.restore(tmp_path / "state", template)
    assert_same(restored, state)
    assert_same(average.update(restored, tree), average.update(state, tree))
    assert jnp.isfinite(value(restored)["both"]).all()
