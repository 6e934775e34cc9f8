"""What the tests of `tailavg.keras` share: tiny models, data, and a record of every step."""

import os
import signal
from pathlib import Path

import keras
import numpy as np

from tailavg import AnyTail
from tailavg.keras import TailAveraging

if keras.backend.backend() == "torch":
    import torch

    torch.set_num_threads(1)  # models are tiny, and the bits of sums depend on the threads

BATCHES, EPOCHS = 16, 4
X = np.random.default_rng(0).normal(size=(4 * BATCHES, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True) + 0.5


def model(norm=False, **options):
    """A new model, always with the same weights."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.BatchNormalization()] if norm else []
    made = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4), *layers, keras.layers.Dense(1)]
    )
    optimizer = options.pop("optimizer", None) or keras.optimizers.SGD(0.03, momentum=0.5)
    made.compile(optimizer, "mse", **options)
    return made


def fit(made, *callbacks, epochs=3, **options):
    """Train, in a given order of the samples."""
    options = {"validation_data": (X[:8], Y[:8]), "batch_size": 4} | options
    options = {"verbose": 0, "shuffle": False} | options
    return made.fit(X, Y, epochs=epochs, callbacks=list(callbacks), **options)


def held(variables):
    return [np.array(keras.ops.convert_to_numpy(variable.value)) for variable in variables]


def weights(made):
    return held(made.trainable_variables)


def equal(one, other):
    """To the bit."""
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True)
    )


def combined(alpha, samples):
    """The weighted sum of samples, each a list of arrays."""
    columns = zip(*samples, strict=True)
    return [np.tensordot(alpha, np.array(column, float), 1) for column in columns]


def assert_close(got, expected, atol=2e-6):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one.astype(float), other, rtol=1e-5, atol=atol)


class Record(keras.callbacks.Callback):
    """The weights after every batch, in every validation, and after every epoch."""

    def __init__(self):
        super().__init__()
        self.batches, self.tests, self.epochs, self.begun, self.statistics = [], [], [], [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.begun.append(weights(self.model))

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(weights(self.model))
        self.statistics.append(held(self.model.non_trainable_variables))

    def on_test_batch_end(self, batch, logs=None):
        self.tests.append(weights(self.model))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(weights(self.model))


class At(keras.callbacks.Callback):
    """Do something at one event of one epoch."""

    def __init__(self, event, epoch, action):
        super().__init__()
        self.epoch = None
        self.asked, self.event, self.action = epoch, event, action

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def _at(self, event):
        if event == self.event and self.epoch == self.asked:
            self.action()

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 5:
            self._at("train")

    def on_test_begin(self, logs=None):
        self._at("test begin")

    def on_test_batch_begin(self, batch, logs=None):
        if batch == 1:
            self._at("test batch")

    def on_epoch_end(self, epoch, logs=None):
        self._at("epoch end")


class StopError(BaseException):
    """As abrupt as Ctrl-C."""


def stop():
    raise StopError


def walk(tail, steps, shape=(5,), seed=0):
    """Let the callback see samples without any training; the samples."""
    made = keras.Sequential([keras.Input((shape[0],)), keras.layers.Dense(1, use_bias=False)])
    made.compile("sgd", "mse")
    variable, iterations = made.trainable_variables[0], made.optimizer.iterations
    callbacks = keras.callbacks.CallbackList([tail], model=made, epochs=1)
    samples = 1 + np.random.default_rng(seed).random((steps, *shape, 1)).astype("float32")
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    for step, sample in enumerate(samples):
        variable.assign(sample)
        iterations.assign(step + 1)
        callbacks.on_train_batch_end(step)
    callbacks.on_train_end()
    return samples, held([variable])[0]


def callbacks(folder: Path, *others, swap=False, last=()):
    """An average and a backup, and others between and after them."""
    tail = TailAveraging(AnyTail(6), 0.3, swap_on_epoch=swap, path=folder / "average")
    return [tail, *others, keras.callbacks.BackupAndRestore(str(folder / "backup")), *last]


def train_and_be_killed(folder: Path) -> None:
    kill = At("train", 2, lambda: os.kill(os.getpid(), signal.SIGKILL))
    fit(model(norm=True), *callbacks(folder, last=(kill,)), epochs=EPOCHS)
