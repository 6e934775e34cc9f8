"""Signals at any instant of any command."""

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from commands import COMMANDS, TAILAVG, run_folder

__all__ = ["run_folder"]

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def handled(process):
    """Wait until the process handles signals: before, Python itself starts."""
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        caught = int(status.read_text().split("SigCgt:")[1].split()[0], 16)
        if caught >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.001)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "times"), [("profile", 8), ("stream", 8), ("checkpoints", 8), ("reproduce", 3)]
)
def test_signals_at_any_instant(run_folder, name, times):
    """While it starts, works or ends: the exit code tells which, and nothing is left behind."""
    before = {path.name for path in run_folder.iterdir()}
    command = [*TAILAVG, *COMMANDS[name]]
    start = time.monotonic()
    subprocess.run(command, cwd=run_folder, capture_output=True, check=True)
    took = time.monotonic() - start
    made = {path.name for path in run_folder.iterdir()} - before
    random_ = random.Random(name)
    ended = set()
    for _ in range(times):
        number = random_.choice(list(CODES))
        process = subprocess.Popen(
            command, cwd=run_folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        handled(process)
        time.sleep(took * random_.random())
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
        assert process.returncode in (0, CODES[number]), told.decode()
        assert b"Traceback" not in told, told.decode()
        assert b"Exception ignored" not in told, told.decode()
        ended.add(process.returncode)
        assert {path.name for path in run_folder.iterdir()} - before <= made
        if "out" in made:
            assert not [path for path in (run_folder / "out").iterdir() if path.name[0] == "."]
    assert ended - {0}
