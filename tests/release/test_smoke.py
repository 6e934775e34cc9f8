"""The script of `make release` works here too; the heavy extras are left to it."""

import subprocess
import sys
from pathlib import Path

EXTRAS = (
    "cli plot tensorboard fast pandas polars river jax optax keras torch lightning transformers"
)


def test_light_extras_work(tmp_path):
    smoke = [sys.executable, Path(__file__).with_name("smoke.py"), "core", *EXTRAS.split()]
    ran = subprocess.run(smoke, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert Path(ran.stdout.splitlines()[-1]).name == "__init__.py"
