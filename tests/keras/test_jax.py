"""The tests of this folder, on the JAX backend: Keras has one backend in a process."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_all_of_it_on_jax(tmp_path):
    environment = os.environ | {
        "KERAS_BACKEND": "jax",
        # each model compiles the same programs: once is enough
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    files = [path for path in sorted(HERE.glob("test_*.py")) if path.name != Path(__file__).name]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=HERE.parent.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout
