"""`tail_mean` over Spark Connect."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import spark_streams as runs

pytestmark = runs.MARKS


@pytest.mark.usefixtures("spark_is_there")
def test_streams_and_tables_over_spark_connect(tmp_path):
    script = Path(runs.__file__).parent / "spark_connect.py"
    command = [sys.executable, "-W", "ignore", script, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
