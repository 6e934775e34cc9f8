"""Signals at any instant of any command."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tailavg.cli import _outcome
from tailavg.core import signals
from tests.support.commands import COMMANDS, TAILAVG, run_folder

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
    script = [sys.executable, "-c", "from tailavg.__main__ import main; main()"]  # as installed
    command = [*(script if name == "profile" else TAILAVG), *COMMANDS[name]]
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


def python(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_signals_are_handled_before_anything_large_is_imported():
    program = "import sys, tailavg.__main__; print({'numpy', 'typer', 'typing'} & {*sys.modules})"
    assert python(program).stdout == "set()\n"


def test_a_signal_in_a_finaliser():
    """Python cannot raise there: it is done a moment later."""
    process = python(
        "import signal, time\n"
        "from tailavg.core import signals\n"
        "class Last:\n"
        "    def __del__(self):\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "signals.begin()\n"
        "signals.act(signals.Act.stop)\n"
        "Last()\n"
        "time.sleep(60)\n"
    )
    assert (process.returncode, process.stderr) == (143, "")


def test_a_signal_that_a_library_makes_an_error_of(monkeypatch, capsys):
    """As matplotlib does, whose code in C++ asks Python for numbers."""
    monkeypatch.setattr(signals, "_arrived", signal.SIGTERM)
    monkeypatch.setattr(signals, "_stopped", None)

    def library():
        try:
            signals.act(signals.Act.stop)
        except signals.Stopped:
            raise ValueError("Invalid bounding box") from None

    monkeypatch.setattr(signals, "_act", signals.Act.leave)
    assert _outcome(library) == 143
    assert capsys.readouterr().err == ""
