"""Signals at any instant of any command."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tailavg.cli import signals
from tailavg.cli.main import _outcome
from tests.support import processes
from tests.support.commands import COMMANDS, TAILAVG
from tests.support.effort import some

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
MADE = {"checkpoints": "average.safetensors", "reproduce": "out"}


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
    ("name", "times"),
    [
        ("profile", some(2, 8)),
        ("stream", some(2, 8)),
        ("checkpoints", some(3, 8)),
        ("reproduce", some(1, 3)),
    ],
)
def test_signals_at_any_instant(run_folder, name, times):
    """While it starts, works or ends: the exit code tells which, and nothing is left behind."""
    before = {path.name for path in run_folder.iterdir()}
    script = [sys.executable, "-c", "from tailavg.__main__ import main; main()"]  # as installed
    command = [*(script if name == "profile" else TAILAVG), *COMMANDS[name]]
    random_ = random.Random(name)
    took = 0.0
    for i in range(times):
        number = random_.choice(list(CODES))
        with processes.started(
            *command, cwd=run_folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            handled(process)
            time.sleep(took * random_.random())
            process.send_signal(number)
            _, told = process.communicate(timeout=300)
            # the first signal comes before the command begins, others at any time
            assert process.returncode in ((CODES[number],) if i == 0 else (0, CODES[number])), told
        assert b"Traceback" not in told, told.decode()
        assert b"Exception ignored" not in told, told.decode()
        assert {path.name for path in run_folder.iterdir()} - before <= {MADE.get(name)}
        if (folder := run_folder / "out").exists():
            assert not [path for path in folder.iterdir() if path.name[0] == "."]
        if i == 0 and times > 1:
            start = time.monotonic()
            processes.run(*command, cwd=run_folder)
            took = time.monotonic() - start


def python(program):
    return processes.python("-c", program, code=None)


def test_signals_are_handled_before_anything_large_is_imported():
    program = "import sys, tailavg.__main__; print({'numpy', 'typer', 'typing'} & {*sys.modules})"
    assert python(program).stdout == "set()\n"


def test_a_signal_in_a_finaliser():
    """Python cannot raise there: it is done a moment later."""
    process = python(
        "import signal, time\n"
        "from tailavg.cli import signals\n"
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
