"""Callbacks that save see what was validated; a killed run goes on, bit for bit."""

import json

import keras
import numpy as np
import pytest

from tailavg import AnytimeWindow
from tailavg.keras import TailAveraging
from tests.support.keras_training import (
    BATCHES,
    EPOCHS,
    At,
    Record,
    StopError,
    X,
    Y,
    assert_close,
    callbacks,
    equal,
    fit,
    held,
    model,
    stop,
    weights,
)


def test_a_checkpoint_has_what_was_validated(tmp_path):
    made, tail, seen = model(), TailAveraging(0.25, swap_on_epoch=True), Record()
    every = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))
    best = keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras"), save_best_only=True)
    history = fit(made, tail, every, best, seen)
    losses = history.history["val_loss"]
    for epoch, loss in enumerate(losses):
        saved = keras.saving.load_model(tmp_path / f"{epoch + 1}.keras")
        assert equal(weights(saved), seen.epochs[epoch])
        assert equal(weights(saved), seen.tests[2 * epoch])
        assert saved.evaluate(X[:8], Y[:8], verbose=0) == pytest.approx(loss, abs=1e-6)
    saved = keras.saving.load_model(tmp_path / "best.keras")
    assert equal(weights(saved), seen.epochs[int(np.argmin(losses))])
    # each epoch begins with the training weights
    assert all(map(equal, seen.begun[1:], seen.batches[BATCHES - 1 :: BATCHES]))


def test_early_stopping_brings_back_the_best_averages():
    made, tail, seen = model(), TailAveraging(0.25, swap_on_epoch=True), Record()
    early = keras.callbacks.EarlyStopping(patience=9, restore_best_weights=True)
    history = fit(made, tail, early, seen)
    assert equal(weights(made), seen.epochs[int(np.argmin(history.history["val_loss"]))])


def test_a_checkpoint_that_fails(tmp_path):
    made, tail, seen = model(), TailAveraging(0.25, swap_on_epoch=True), Record()
    (tmp_path / "file.keras").mkdir()
    fails = keras.callbacks.ModelCheckpoint(str(tmp_path / "file.keras" / "a.weights.h5"))
    fails.filepath = str(tmp_path / "file.keras")
    fails.save_weights_only = True
    with pytest.raises((OSError, ValueError)):
        fit(made, tail, fails, seen)
    assert equal(weights(made), seen.batches[-1])


def everything(made, tail):
    """The averages, the training weights, the statistics and the optimizer."""
    averages = made.get_weights()
    tail.restore()
    return [*averages, *made.get_weights(), *held(made.optimizer.variables)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """What an unbroken run ends with."""
    made, (tail, backup) = model(norm=True), callbacks(tmp_path_factory.mktemp("unbroken"))
    fit(made, tail, backup, epochs=EPOCHS)
    return everything(made, tail)


@pytest.mark.parametrize(
    ("event", "swap", "backup"),
    [
        ("train", True, "last"),
        ("train", True, "first"),
        ("train", False, "first"),
        ("test batch", True, "last"),
        ("epoch end", False, "last"),  # the state is written, the backup is not
        ("epoch end", True, "last"),
        ("epoch end", False, "first"),
        ("epoch end", True, "first"),
    ],
)
def test_a_broken_run_goes_on_to_the_bit(tmp_path, unbroken, event, swap, backup):
    def run(made, *others):
        tail, saves = callbacks(tmp_path, swap=swap)
        first = [saves, tail, *others] if backup == "first" else [tail, *others, saves]
        fit(made, *first, epochs=EPOCHS)
        return tail

    with pytest.raises(StopError):
        run(model(norm=True), At(event, 2, stop))
    made, seen = model(norm=True), Record()
    tail = run(made, seen)
    assert len(seen.begun) == (1 if (event, backup) == ("epoch end", "first") else 2)
    assert tail.count == EPOCHS * BATCHES
    assert equal(everything(made, tail), unbroken)
    left = sorted(folder.name for folder in (tmp_path / "average").iterdir())
    assert left == ["iteration-48", "iteration-64"]


def test_a_killed_run_goes_on_to_the_bit(fresh_process, unbroken):
    made, (tail, backup) = model(norm=True), callbacks(fresh_process.folder / "killed")
    fit(made, tail, backup, epochs=EPOCHS)
    assert equal(everything(made, tail), unbroken)


def test_the_state_is_that_of_every_framework(tmp_path):
    import torch

    from tailavg.torch import ParameterAverage

    made, tail = model(), TailAveraging(AnytimeWindow(0.4), path=tmp_path)
    fit(made, tail, epochs=2)
    (folder,) = tmp_path.glob("iteration-32")
    state = json.loads((folder / "average" / "state.json").read_text())
    assert (state["format"], state["count"]) == ("tailavg", 2 * BATCHES)
    tensors = [torch.zeros(array.shape) for array in weights(made)]
    average = ParameterAverage(tensors, AnytimeWindow(0.4))
    average.load(folder / "average")
    average.copy_to()
    assert_close(weights(made), [tensor.double().numpy() for tensor in tensors])


def test_a_state_that_does_not_belong_to_the_run(tmp_path):
    fit(model(), TailAveraging(0.5, path=tmp_path), epochs=2)
    (tmp_path / "iteration-16").rename(tmp_path / "other")  # no longer there
    made = model()
    fit(made, epochs=1)
    with pytest.raises(
        ValueError, match=r"at iteration 16, but the states in .* are of \[32\]"
    ) as found:
        fit(made, TailAveraging(0.5, path=tmp_path), epochs=1)
    assert "BackupAndRestore" in str(found.value)
    made.optimizer.iterations.assign(32)
    with pytest.raises(ValueError, match="create the TailAveraging with that rule"):
        fit(made, TailAveraging(0.25, path=tmp_path), epochs=1)


def test_a_new_run_replaces_the_states_of_an_old_one(tmp_path):
    fit(model(), TailAveraging(0.5, path=tmp_path), epochs=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration-32", "iteration-48"]
    made, tail = model(), TailAveraging(0.25, path=tmp_path)
    fit(made, tail, epochs=1)
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-16"]
    assert tail.count == BATCHES


@pytest.mark.parametrize(
    "name", ["average/open.safetensors", "average/state.json", "weights.safetensors"]
)
def test_a_damaged_state(tmp_path, name):
    made = model()
    fit(made, TailAveraging(0.5, path=tmp_path), epochs=1)
    before = weights(made)
    file = tmp_path / "iteration-16" / name
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=file.name):
        fit(made, TailAveraging(0.5, path=tmp_path), epochs=2, initial_epoch=1)
    assert equal(weights(made), before)
