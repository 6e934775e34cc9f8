"""A JAX scalar, such as the loss of a step, is a sample of a `TailAverage`."""

import jax
import jax.numpy as jnp
import pytest

from tailavg import TailAverage, TailAverages


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
def test_a_jax_scalar_is_a_number(dtype):
    double = jax.jit(lambda x: 2 * x)
    numbers, scalars, by_key = TailAverage(3), TailAverage(3), TailAverages(3)
    for i in range(10):
        numbers.update(2.0 * i)
        scalars.update(double(jnp.asarray(i, dtype)))
        by_key.update("loss", double(jnp.asarray(i, dtype)))
    assert type(scalars.value()) is float
    assert scalars.value() == by_key["loss"].value() == numbers.value()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_jax_arrays_are_samples_and_chunks(dtype):
    xs = jnp.arange(24).reshape(8, 3).astype(dtype)
    one, many = TailAverage(4), TailAverage(4)
    for x in xs:
        one.update(x)
    many.update_many(xs)
    assert one.value().tolist() == many.value().tolist()
    assert one.value() == pytest.approx([16.5, 17.5, 18.5])
