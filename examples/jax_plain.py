"""Average the parameters inside the jitted step of a plain JAX training loop; stop and resume it.

    python examples/jax_plain.py [--steps 1000] [--seed 0] [--folder build/jax_plain]

A small network learns scikit-learn's digits with SGD at a constant rate. The script tests the
last iterate, which varies by chance (try other seeds), and the average of the last quarter of all
steps. A second run is saved with orbax after four fifths of the steps, and restored into fresh
objects. The script fails unless it ends bit-identical to the unbroken run.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from tailavg.jax import TreeState, tail_average

AVERAGE = tail_average(0.25)  # the last quarter of all steps
RATE, DECAY, BATCH = 0.5, 0.002, 16


class Training(NamedTuple):
    """Everything that a training step changes, so everything a checkpoint must hold."""

    params: dict[str, jax.Array]
    average: TreeState
    step: jax.Array
    key: jax.Array


def start(seed: int) -> Training:
    """A network of two layers, before the first step."""
    key, first, second = jax.random.split(jax.random.key(seed), 3)
    params = {
        "w1": jax.random.normal(first, (64, 64)) / 8,
        "b1": jnp.zeros(64),
        "w2": jax.random.normal(second, (64, 10)) / 8,
        "b2": jnp.zeros(10),
    }
    return Training(params, AVERAGE.init(params), jnp.array(0), key)


def digits() -> list[jax.Array]:
    """1,000 training images and their labels, then 797 test images and theirs."""
    images, labels = load_digits(return_X_y=True)
    training, test = train_test_split(np.arange(1797), train_size=1000, random_state=0)
    return [jnp.asarray(part) for i in (training, test) for part in (images[i] / 16, labels[i])]


def outputs(params: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    """The logits."""
    hidden = jax.nn.relu(images @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def loss(params: dict[str, jax.Array], images: jax.Array, labels: jax.Array) -> jax.Array:
    """The cross-entropy."""
    chances = jax.nn.log_softmax(outputs(params, images))
    return -jnp.take_along_axis(chances, labels[:, None], axis=1).mean()


@partial(jax.jit, donate_argnums=0)  # the old arrays become the new ones
def train_step(training: Training, images: jax.Array, labels: jax.Array) -> Training:
    """One step of SGD with weight decay on a random batch; average the new parameters."""
    key, own = jax.random.split(training.key)
    batch = jax.random.randint(own, BATCH, 0, len(labels))
    gradients = jax.grad(loss)(training.params, images[batch], labels[batch])
    params = jax.tree.map(lambda p, g: p - RATE * (g + DECAY * p), training.params, gradients)
    average = AVERAGE.update(training.average, params)
    return Training(params, average, training.step + 1, key)


def train(training: Training, steps: int, images: jax.Array, labels: jax.Array) -> Training:
    """Train until `steps` steps are done in all."""
    for _ in range(int(training.step), steps):
        training = train_step(training, images, labels)
    return training


def bits(training: Training) -> list[bytes]:
    """The bytes of every array, to compare two runs."""
    arrays = training._replace(key=jax.random.key_data(training.key))
    return [np.asarray(array).tobytes() for array in jax.tree.leaves(arrays)]


def main() -> None:
    """Train, test, and train again with a stop in between."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("build/jax_plain"))
    options = parser.parse_args()
    steps, stop = (
        options.steps,
        options.steps * 4 // 5,
    )  # the average is over steps before and after
    images, labels, *test = digits()

    done = train(start(options.seed), steps, images, labels)
    averaged = AVERAGE.value(done.average, like=done.params)
    print(f"after {steps} steps   test loss   accuracy, %")
    for name, params in {"last iterate": done.params, "average": averaged}.items():
        right = outputs(params, test[0]).argmax(axis=1) == test[1]
        print(f"{name:16}{loss(params, *test):12.4f}{100 * right.mean():14.2f}")

    path = options.folder.resolve() / "checkpoint"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, train(start(options.seed), stop, images, labels), force=True)
        checkpointer.wait_until_finished()  # saves in the background
        fresh = checkpointer.restore(path, start(options.seed + 1))  # all of it is replaced
    resumed = train(fresh, steps, images, labels)
    if bits(resumed) != bits(done):
        sys.exit("The resumed run is not the unbroken one.")
    print(f"\nThe run resumed from step {stop} is bit-identical to the unbroken one.")


if __name__ == "__main__":
    main()
