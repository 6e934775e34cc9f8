"""Average the parameters of an equinox model in its optimizer; stop and resume the training.

    python examples/jax_equinox.py [--steps 1000] [--seed 0] [--folder build/jax_equinox]

A small network learns scikit-learn's digits with AdamW at a constant rate. The script tests the
last iterate, which varies by chance (try other seeds), and the average of the last quarter of all
steps. A second run is saved after four fifths of the steps and restored into fresh objects.
The script fails unless it ends bit-identical to the unbroken run.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from tailavg.optax import averaged_params, with_tail_average

TX = with_tail_average(optax.adamw(0.02, weight_decay=0.1), 0.25)  # the last quarter of all steps
BATCH = 16


class Training(eqx.Module):
    """Everything that a training step changes, so everything a checkpoint must hold."""

    model: eqx.nn.MLP
    opt_state: Any
    step: jax.Array
    key: jax.Array


def start(seed: int) -> Training:
    """A network of two layers, before the first step."""
    key, own = jax.random.split(jax.random.PRNGKey(seed))  # equinox saves no jax.random.key
    model = eqx.nn.MLP(64, 10, width_size=64, depth=1, key=own)
    return Training(model, TX.init(eqx.filter(model, eqx.is_inexact_array)), jnp.array(0), key)


def digits() -> list[jax.Array]:
    """1,000 training images and their labels, then 797 test images and theirs."""
    images, labels = load_digits(return_X_y=True)
    training, test = train_test_split(np.arange(1797), train_size=1000, random_state=0)
    return [jnp.asarray(part) for i in (training, test) for part in (images[i] / 16, labels[i])]


def loss(model: eqx.nn.MLP, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The cross-entropy."""
    outputs = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()


@eqx.filter_jit(donate="all-except-first")  # the old arrays become the new ones
def train_step(data: tuple[jax.Array, jax.Array], training: Training) -> Training:
    """One step on a random batch; the optimizer averages the new parameters."""
    images, labels = data
    key, own = jax.random.split(training.key)
    batch = jax.random.randint(own, BATCH, 0, len(labels))
    gradients = eqx.filter_grad(loss)(training.model, images[batch], labels[batch])
    params = eqx.filter(training.model, eqx.is_inexact_array)
    updates, opt_state = TX.update(gradients, training.opt_state, params)
    model = eqx.apply_updates(training.model, updates)
    return Training(model, opt_state, training.step + 1, key)


def train(training: Training, steps: int, images: jax.Array, labels: jax.Array) -> Training:
    """Train until `steps` steps are done in all."""
    for _ in range(int(training.step), steps):
        training = train_step((images, labels), training)
    return training


def averaged_model(training: Training) -> eqx.nn.MLP:
    """The model with the averaged parameters."""
    params, rest = eqx.partition(training.model, eqx.is_inexact_array)
    return eqx.combine(averaged_params(training.opt_state, params), rest)


def bits(training: Training) -> list[bytes]:
    """The bytes of every array, to compare two runs."""
    arrays = jax.tree.leaves(eqx.filter(training, eqx.is_array))
    return [np.asarray(array).tobytes() for array in arrays]


def main() -> None:
    """Train, test, and train again with a stop in between."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("build/jax_equinox"))
    options = parser.parse_args()
    steps, stop = (
        options.steps,
        options.steps * 4 // 5,
    )  # the average is over steps before and after
    images, labels, *test = digits()

    done = train(start(options.seed), steps, images, labels)
    print(f"after {steps} steps   test loss   accuracy, %")
    for name, model in {"last iterate": done.model, "average": averaged_model(done)}.items():
        right = jax.vmap(model)(test[0]).argmax(axis=1) == test[1]
        print(f"{name:16}{loss(model, *test):12.4f}{100 * right.mean():14.2f}")

    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "checkpoint.eqx"
    eqx.tree_serialise_leaves(path, train(start(options.seed), stop, images, labels))
    fresh = eqx.tree_deserialise_leaves(path, start(options.seed + 1))  # all of it is replaced
    resumed = train(fresh, steps, images, labels)
    if bits(resumed) != bits(done):
        sys.exit("The resumed run is not the unbroken one.")
    print(f"\nThe run resumed from step {stop} is bit-identical to the unbroken one.")


if __name__ == "__main__":
    main()
