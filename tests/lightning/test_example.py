"""The example runs, in its reduced form, and shows what it claims to show."""

import re
import subprocess
import sys

from tests.support.paths import EXAMPLES


def test_digits():
    script = EXAMPLES / "lightning_digits.py"
    run = subprocess.run([sys.executable, script, "--quick"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("500 steps; test loss of\n")
    found = re.findall(r"^(.*?) +([\d.]+)$", run.stdout, re.MULTILINE)
    losses = {name: float(value) for name, value in found}
    *averages, last = losses.values()
    assert next(iter(losses)) == "the last quarter"
    assert list(losses)[-1] == "training weights"
    assert len(averages) == 3
    assert all(0 < loss < last for loss in averages)
