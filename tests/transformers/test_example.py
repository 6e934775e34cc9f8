"""The example runs, in its reduced form, and shows what it claims to show."""

import re
import subprocess
import sys

from tests.support.paths import EXAMPLES


def test_hugging_face(tmp_path):
    command = [
        sys.executable,
        EXAMPLES / "hugging_face.py",
        "--quick",
        "--folder",
        tmp_path / "new",
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    perfect = float(re.search(r"the chain itself has (.*)", run.stdout)[1])
    rows = re.findall(r"^step +(\d+)   (\S+)   (\S+)$", run.stdout, re.MULTILINE)
    assert [int(step) for step, *_ in rows] == [50, 100, 150, 200, 150, 200]
    assert rows[4:] == rows[2:4]  # the resumed run is the same
    _, raw, averaged = rows[-1]
    assert perfect - 0.01 < float(averaged) < float(raw)
    assert f"averaged has a loss of {averaged}\n" in run.stdout
    assert "the averaged models are equal to the bit" in run.stdout
