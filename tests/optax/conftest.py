"""Fixtures of the tests of optax."""

from tests.support.jax_trees import release_programs  # noqa: F401
