"""The script of `make release` works here too; the heavy extras are left to it.

It imports frameworks in a process of its own.
"""

from pathlib import Path

from tests.support.effort import some
from tests.support.processes import python, user_environment

EXTRAS = "cli plot fast pandas polars river jax optax"
EXTRAS += some("", " tensorboard keras torch lightning transformers")


def test_light_extras_work(tmp_path):
    smoke = Path(__file__).with_name("smoke.py")
    ended = python(smoke, "core", *EXTRAS.split(), cwd=tmp_path, env=user_environment())
    assert Path(ended.stdout.splitlines()[-1]).name == "__init__.py"
