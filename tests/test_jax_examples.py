"""The recipes for JAX, flax nnx and equinox run, and show what they claim to show."""

import io
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from tailavg import AnytimeWindow
from tests.support import model
from tests.support.paths import EXAMPLES

RECIPES = ("jax_plain", "jax_nnx", "jax_equinox")
SAME = "The run resumed from step {} is bit-identical to the unbroken one."


class Recipe(NamedTuple):
    """A recipe that was run as a program."""

    name: str
    functions: dict[str, Any]
    printed: str
    folder: Path


@pytest.fixture(scope="module", params=RECIPES)
def run_recipe(request, tmp_path_factory):
    """Run a recipe once, and keep its functions, which are compiled then."""
    name, folder, output = request.param, tmp_path_factory.mktemp("recipe") / "new", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output):
        patch.setattr(sys, "argv", [name, "--steps", "500", "--folder", str(folder)])
        functions = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return Recipe(name, functions, output.getvalue(), folder)


@pytest.fixture
def recipe(run_recipe):
    """The name of a recipe and its functions."""
    return run_recipe.name, run_recipe.functions


def parameters(name, training):
    """The parameters, as they are."""
    if name == "jax_plain":
        return training.params
    if name == "jax_nnx":
        return nnx.as_pure(nnx.state(training[0], nnx.Param))
    return eqx.filter(training.model, eqx.is_array)


def averaged(name, functions, training):
    """The averaged parameters, as the recipe tests them."""
    if name == "jax_plain":
        return functions["AVERAGE"].value(training.average, like=training.params)
    copy = functions["averaged_model"](training)
    if name == "jax_nnx":
        return nnx.as_pure(nnx.state(copy, nnx.Param))
    return eqx.filter(copy, eqx.is_array)


def flat(tree):
    """All numbers of a tree in one array, copied, since the tree may be donated."""
    return np.concatenate([np.array(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def test_a_recipe_prints_that_the_average_is_better_and_the_resumed_run_the_same(run_recipe):
    title, last, average, empty, same = run_recipe.printed.splitlines()
    assert re.split(r"\s{2,}", title) == ["after 500 steps", "test loss", "accuracy, %"]
    rows = {}
    for line in (last, average):
        row, *numbers = re.split(r"\s{2,}", line)
        rows[row] = list(map(float, numbers))
    assert list(rows) == ["last iterate", "average"]
    assert 0 < rows["average"][0] < rows["last iterate"][0] < 1
    assert 90 < rows["average"][1] <= 100
    assert not empty
    assert same == SAME.format(400)
    assert list(run_recipe.folder.glob("checkpoint*"))


def test_a_recipe_averages_the_parameters_after_each_step(recipe):
    name, functions = recipe
    images, labels, *_ = functions["digits"]()
    training = functions["start"](0)
    before = flat(parameters(name, training))
    np.testing.assert_array_equal(flat(averaged(name, functions, training)), before)

    recorded = []
    for step, weights in zip(range(1, 174), model.alphas(AnytimeWindow(0.25)), strict=False):
        training = functions["train"](training, step, images, labels)
        recorded.append(flat(parameters(name, training)))
        if step in (1, 2, 7, 50, 173):
            expected = weights @ np.array(recorded)
            np.testing.assert_allclose(
                flat(averaged(name, functions, training)), expected, rtol=1e-6, atol=1e-6
            )
            # the model that is trained is left as it was
            np.testing.assert_array_equal(flat(parameters(name, training)), recorded[-1])
    assert abs(recorded[-1] - expected).max() > 0.01  # or it would be no test


def test_a_recipe_donates_its_arrays(recipe):
    name, functions = recipe
    images, labels, *_ = functions["digits"]()
    training = functions["train"](functions["start"](0), 1, images, labels)
    tree = nnx.as_pure(nnx.state(training)) if name == "jax_nnx" else training
    old = [leaf for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf) and leaf.size > 3]
    functions["train"](training, 2, images, labels)
    assert len(old) > 8
    assert all(leaf.is_deleted() for leaf in old)
    assert not images.is_deleted()


@pytest.mark.parametrize("forgotten", ["means", "sums", "key"])
def test_a_recipe_finds_out_what_is_not_restored(recipe, forgotten, tmp_path, monkeypatch, capsys):
    name, functions = recipe
    left = []

    def forget(path, restored, fresh):
        if forgotten not in jax.tree_util.keystr(path):
            return restored
        left.append(path)
        if getattr(restored, "committed", False):  # else another program would be compiled
            return jax.device_put(fresh, restored.sharding)
        return fresh

    def forgetful(function):
        def restore(*arguments):
            return jax.tree.map_with_path(forget, function(*arguments), arguments[-1])

        return restore

    restore = ocp.StandardCheckpointer.restore
    monkeypatch.setattr(ocp.StandardCheckpointer, "restore", forgetful(restore))
    monkeypatch.setattr(eqx, "tree_deserialise_leaves", forgetful(eqx.tree_deserialise_leaves))
    monkeypatch.setattr(sys, "argv", [name, "--steps", "40", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit, match="not the unbroken one"):
        functions["main"]()
    assert left
    assert "bit-identical" not in capsys.readouterr().out
