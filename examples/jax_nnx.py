"""Average the parameters of a flax nnx model in its optimizer; stop and resume the training.

    python examples/jax_nnx.py [--steps 1000] [--seed 0] [--folder build/jax_nnx]

A small network learns scikit-learn's digits with AdamW at a constant rate. The script tests the
last iterate, which varies by chance (try other seeds), and the average of the last quarter of all
steps. A second run is saved with orbax after four fifths of the steps, and restored into fresh
objects. The script fails unless it ends bit-identical to the unbroken run.
"""

import argparse
import sys
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from tailavg.optax import averaged_params, with_tail_average

TX = with_tail_average(optax.adamw(0.02, weight_decay=0.1), 0.25)  # the last quarter of all steps
BATCH = 16


class Network(nnx.Module):
    """Two layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.output = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """The logits."""
        return self.output(nnx.relu(self.hidden(images)))


# everything that a training step changes, so everything a checkpoint must hold
Training: TypeAlias = tuple[Network, nnx.Optimizer[Network], nnx.Rngs]


def start(seed: int) -> Training:
    """Everything before the first step."""
    rngs = nnx.Rngs(seed)
    model = Network(rngs)
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param), rngs


def digits() -> list[jax.Array]:
    """1,000 training images and their labels, then 797 test images and theirs."""
    images, labels = load_digits(return_X_y=True)
    training, test = train_test_split(np.arange(1797), train_size=1000, random_state=0)
    return [jnp.asarray(part) for i in (training, test) for part in (images[i] / 16, labels[i])]


def loss(model: Network, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


@nnx.jit(donate_argnames="training")  # the old arrays become the new ones
def train_step(training: Training, images: jax.Array, labels: jax.Array) -> None:
    """One step on a random batch; the optimizer averages the new parameters."""
    model, optimizer, rngs = training
    batch = jax.random.randint(rngs(), BATCH, 0, len(labels))
    optimizer.update(model, nnx.grad(loss)(model, images[batch], labels[batch]))


def train(training: Training, steps: int, images: jax.Array, labels: jax.Array) -> Training:
    """Train until `steps` steps are done in all."""
    _, optimizer, _ = training
    for _ in range(int(optimizer.step[...]), steps):
        train_step(training, images, labels)
    return training


def averaged_model(training: Training) -> Network:
    """A copy of the model with the averaged parameters."""
    model, optimizer, _ = training
    copy = nnx.clone(model)
    nnx.update(copy, averaged_params(optimizer.opt_state, nnx.state(model, nnx.Param)))
    return copy


def bits(training: Training) -> list[bytes]:
    """The bytes of every array, to compare two runs."""
    arrays = (
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for leaf in jax.tree.leaves(nnx.as_pure(nnx.state(training)))
    )
    return [np.asarray(array).tobytes() for array in arrays]


def main() -> None:
    """Train, test, and train again with a stop in between."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("build/jax_nnx"))
    options = parser.parse_args()
    steps, stop = (
        options.steps,
        options.steps * 4 // 5,
    )  # the average is over steps before and after
    images, labels, *test = digits()

    done = train(start(options.seed), steps, images, labels)
    print(f"after {steps} steps   test loss   accuracy, %")
    for name, model in {"last iterate": done[0], "average": averaged_model(done)}.items():
        right = model(test[0]).argmax(axis=1) == test[1]
        print(f"{name:16}{loss(model, *test):12.4f}{100 * right.mean():14.2f}")

    path = options.folder.resolve() / "checkpoint"
    fresh = start(options.seed + 1)  # all of it will be replaced
    with ocp.StandardCheckpointer() as checkpointer:
        stopped = train(start(options.seed), stop, images, labels)
        checkpointer.save(path, nnx.state(stopped), force=True)
        checkpointer.wait_until_finished()  # saves in the background
        nnx.update(fresh, checkpointer.restore(path, nnx.state(fresh)))
    resumed = train(fresh, steps, images, labels)
    if bits(resumed) != bits(done):
        sys.exit("The resumed run is not the unbroken one.")
    print(f"\nThe run resumed from step {stop} is bit-identical to the unbroken one.")


if __name__ == "__main__":
    main()
