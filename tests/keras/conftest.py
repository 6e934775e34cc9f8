import signal
from pathlib import Path
from typing import NamedTuple

import keras
import pytest

from tests.support.paths import ROOT
from tests.support.processes import python, user_environment

JAX = keras.backend.backend() == "jax"


class FreshProcess(NamedTuple):
    folder: Path
    printed: str


PROGRAM = """
import sys
from pathlib import Path
from tests.support.programs import example

folder = Path(sys.argv[1])
print(example("keras_digits.py", "--quick", "--folder", folder / "example"), flush=True)

from tests.support.keras_training import train_and_be_killed  # after the example chose a backend

train_and_be_killed(folder / "killed")
"""


@pytest.fixture(scope="session")
def fresh_process(tmp_path_factory):
    """A process that imports Keras once, runs the example, and is killed while it trains.

    KERAS_BACKEND is not set, as for most users, unless these tests run on JAX.
    """
    folder = tmp_path_factory.mktemp("fresh")
    environment = user_environment(OMP_NUM_THREADS="1", **({"KERAS_BACKEND": "jax"} if JAX else {}))
    done = python("-c", PROGRAM, folder, cwd=ROOT, env=environment, code=-signal.SIGKILL)
    return FreshProcess(folder, done.stdout)
