"""A folder to run commands in; and tests with numba and without."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from tailavg.cli import lines, loops
from tailavg.numpy import compiling
from tailavg.numpy import loops as scans


@pytest.fixture
def run_folder(tmp_path):
    """Checkpoints that take a while to average, and numbers to draw."""
    (tmp_path / "numbers.txt").write_text("1\n2\n3\n")
    for step in range(4):
        save_file({"x": np.full(3_000_000, step, np.float32)}, tmp_path / f"{step}.safetensors")
    return tmp_path


def install(monkeypatch, there, after=0):
    """Let numba be there or not; if it is, it is used after so many numbers or bytes."""
    monkeypatch.setattr(compiling, "installed", lambda: there)
    for module in (loops, scans):
        monkeypatch.setattr(module, "LONG", after)
    for module in (lines, scans):
        monkeypatch.setattr(module, "_taken", 0)


@pytest.fixture(params=[True, False], ids=["numba", "without numba"], scope="module")
def numba(request):
    """A module that is run both ways; whether numba is there."""
    if request.param:
        pytest.importorskip("numba")
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch, request.param)
        yield request.param


@pytest.fixture
def without_numba(monkeypatch):
    """A test in which numba is not there."""
    install(monkeypatch, False)


@pytest.fixture(params=[0, 600], ids=["at once", "later"])
def switched(request, monkeypatch):
    """A test in which numba comes in at some time."""
    pytest.importorskip("numba")
    install(monkeypatch, True, request.param)
