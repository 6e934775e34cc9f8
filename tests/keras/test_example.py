"""The example of `tailavg.keras` runs, in its reduced form, and shows what it claims to show."""

import os
import re
import subprocess
import sys

import keras
import pytest

from tests.support.paths import EXAMPLES


def rows(text, title):
    """Numbers by name, under the line that starts with the title."""
    (block,) = (block for block in text.split("\n\n") if block.startswith(title))
    table = (re.split(r"\s{2,}", line) for line in block.splitlines()[1:])
    return {name: [float(value) for value in values] for name, *values in table}


def test_digits(tmp_path):
    run = subprocess.run(
        [sys.executable, EXAMPLES / "keras_digits.py", "--quick", "--folder", tmp_path / "new"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert f"on {keras.backend.backend()}; 189 steps\n" in run.stdout
    epochs, after = rows(run.stdout, "validation loss"), rows(run.stdout, "after fit")
    assert len(epochs) == 3
    assert all(average < last for last, average in epochs.values())
    assert after["last iterate"][0] == pytest.approx(epochs["epoch 3"][0], abs=2e-4)
    assert after["last 25 %"][0] == pytest.approx(epochs["epoch 3"][1], abs=2e-4)
    best = min(average for _, average in epochs.values())
    assert after["best checkpoint"][0] == pytest.approx(best, abs=2e-4)
    assert len(after) == 7
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["average", "best.keras"]
