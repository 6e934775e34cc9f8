"""Fixtures of the tests of JAX."""

from tests.support.jax_trees import release_programs  # noqa: F401
