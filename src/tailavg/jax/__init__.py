"""Tail averages for JAX: pure functions on a state that is a pytree. See `tail_average`.

from tailavg.jax import tail_average

average = tail_average(0.25)             # the last quarter of all updates
state = average.init(params)
state = average.update(state, params)    # in the jitted step
average.value(state, like=params)        # for evaluation
"""

from tailavg.extras import needs

with needs("jax"):
    from tailavg.jax.reads import evaluate_tails, value
    from tailavg.jax.states import TreeState
    from tailavg.jax.trees import TreeAverage, tail_average

__all__ = [
    "TreeAverage",
    "TreeState",
    "evaluate_tails",
    "tail_average",
    "value",
]
