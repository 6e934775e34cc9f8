"""Train a small network on scikit-learn's digits with Keras, and average its weights.

    KERAS_BACKEND=jax python examples/keras_digits.py [--quick] [--epochs 10] [--folder build/keras]

The learning rate is constant and large, so the weights jump around the answer. The same run is
made twice, without and with the callback: training is the same, but validation, the best checkpoint
and the model after `fit` are those of the averages. One run has every tail: the last table
reads other windows, and a decay, from the same average.

A run that is killed goes on where it was: start it again with the same folder.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")  # before keras is imported

import keras
import numpy as np
from sklearn.datasets import load_digits

from tailavg import AnyTail, Decay
from tailavg.keras import TailAveraging

TRAINING = 1000  # images; the others are for validation
READINGS = {
    "last 10 %": 0.1,
    "last 25 %": 0.25,
    "last 50 %": 0.5,
    "all steps": 1.0,
    "cosine decay over 50 %": Decay(0.5, "cosine"),
}


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Images and labels, to train and to validate."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    return (images[:TRAINING], labels[:TRAINING]), (images[TRAINING:], labels[TRAINING:])


def train(epochs: int, callbacks: list[keras.callbacks.Callback]) -> tuple[keras.Model, Any]:
    """A network with the same weights at first, trained, and its history."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.3, momentum=0.5), loss, metrics=["accuracy"])
    training, validation = digits()
    history = model.fit(
        *training,
        batch_size=16,
        epochs=epochs,
        validation_data=validation,
        callbacks=callbacks,
        verbose=0,
    )
    return model, history.history


def score(model: keras.Model) -> str:
    """The validation loss, and the accuracy in per cent."""
    loss, accuracy = model.evaluate(*digits()[1], verbose=0)
    return f"{loss:.4f}   {100 * accuracy:.2f}"


def main() -> None:
    """Train with and without the average, and print what validation saw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("build/keras"))
    parser.add_argument("--quick", action="store_true", help="3 epochs")
    options = parser.parse_args()
    epochs = 3 if options.quick else options.epochs
    options.folder.mkdir(parents=True, exist_ok=True)

    plain, its = train(epochs, [])
    best = str(options.folder / "best.keras")
    tail = TailAveraging(
        AnyTail(), window=0.25, swap_on_epoch=True, path=options.folder / "average"
    )
    averaged, history = train(
        epochs,
        [  # the average comes first
            tail,
            keras.callbacks.ModelCheckpoint(best, save_best_only=True),
            keras.callbacks.BackupAndRestore(str(options.folder / "backup")),
        ],
    )
    print(f"Keras {keras.__version__} on {keras.backend.backend()}; {tail.count} steps\n")
    print("validation loss   last iterate   last 25 %")
    shown = len(history["val_loss"])  # fewer if the run was resumed
    for epoch in range(epochs - shown, epochs):
        average = history["val_loss"][epoch - epochs]
        print(f"epoch {epoch + 1:<11} {its['val_loss'][epoch]:.4f}         {average:.4f}")

    print("\nafter fit   loss   accuracy, %")
    print(f"last iterate   {score(plain)}")
    for name, window in READINGS.items():
        with tail.average_parameters(window):
            print(f"{name}   {score(averaged)}")
    print(f"best checkpoint   {score(keras.saving.load_model(best))}")


if __name__ == "__main__":
    main()
