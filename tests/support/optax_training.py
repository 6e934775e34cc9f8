"""Training with optax that the tests share, and the averages that it should have."""

import operator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tailavg import AnytimeWindow, Exponential, Growing, TailAverage
from tailavg.jax import TreeState

STEPS = 23
TARGETS = 1 + np.random.default_rng(0).random(100)
RULES = [
    0.3,
    AnytimeWindow(Growing(0.5, at_most=6), 4, turns="paper"),
    Exponential(0.3),
]
KERNEL = {"dense": {"kernel": True, "bias": False}, "scale": False}
REST = jax.tree.map(operator.not_, KERNEL)
LABELS = {"dense": {"kernel": "matrix", "bias": "vector"}, "scale": "vector"}


SMALL = {"scale": jnp.array(4.0, jnp.float32)}  # compiled much faster than `start`


def start():
    """Parameters of three shapes; new ones each time, since some are donated."""
    return {
        "dense": {"kernel": jnp.arange(1.0, 7.0).reshape(3, 2), "bias": jnp.array([2.0, 3.0])},
        "scale": jnp.array(4.0, jnp.float32),
    }


def gradients(params, target):
    """Of half the squared distance to noise; a NaN wherever that is one."""
    return jax.tree.map(lambda x: (x - target).astype(x.dtype), params)


def gradient_step(tx, carry, target, **extra):
    params, state = carry
    tx = optax.with_extra_args_support(tx)
    updates, state = tx.update(gradients(params, target), state, params, **extra)
    return optax.apply_updates(params, updates), state


def train(tx, params=None, targets=TARGETS[:STEPS], **extra):
    """All of training in one scan; parameters and state, then the parameters after each step."""

    def one(carry, target):
        carry = gradient_step(tx, carry, target, **extra)
        return carry, carry[0]

    def all_steps(params):
        return jax.lax.scan(one, (params, tx.init(params)), jnp.asarray(targets, jnp.float32))

    (params, state), history = jax.jit(all_steps)(start() if params is None else params)
    return params, state, jax.tree.map(np.asarray, history)


def expected(history, rule):
    """The average of NumPy, in double precision."""

    def last(xs):
        average = TailAverage(rule)
        average.update_many(xs.astype(np.float64))
        return average.value()

    return jax.tree.map(last, history)


def every(history, k):
    """Each k-th of the parameters: those after an update that was one."""
    return jax.tree.map(lambda xs: xs[k - 1 :: k], history)


def assert_close(got, wanted, rtol=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol), got, wanted)


def assert_equal(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def tails(state):
    """The states of all tails, in order."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, TreeState))
    return [node for node in nodes if isinstance(node, TreeState)]


def counts(state):
    return [int(tail.updates) for tail in tails(state)]


CLIPPED = optax.chain(
    optax.clip_by_global_norm(0.7),
    optax.scale_by_adam(),
    optax.scale_by_schedule(optax.cosine_decay_schedule(-0.3, STEPS)),
)
