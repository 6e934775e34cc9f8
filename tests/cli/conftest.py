"""A folder to run commands in; and tests with pyarrow and numba, and without."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from tailavg.cli import cells
from tailavg.numpy import kernel


@pytest.fixture
def run_folder(tmp_path):
    """Checkpoints that take a while to average, and numbers to draw."""
    (tmp_path / "numbers.txt").write_text("1\n2\n3\n")
    for step in range(4):
        save_file({"x": np.full(3_000_000, step, np.float32)}, tmp_path / f"{step}.safetensors")
    return tmp_path


def install(monkeypatch, there, after=0):
    """Let numba and pyarrow be there or not; they are used after so many numbers or bytes."""
    monkeypatch.setattr(kernel, "installed", lambda: there)
    monkeypatch.setattr(kernel, "LONG", after)
    monkeypatch.setattr(kernel, "SHORT", after)
    monkeypatch.setattr(cells, "LONG", after)
    monkeypatch.setattr(cells, "LARGE", 0)
    if not there:
        monkeypatch.setattr(cells, "_pyarrow", lambda: None)


@pytest.fixture(params=[True, False], ids=["pyarrow", "without pyarrow"], scope="module")
def pyarrow(request):
    """A module that is run both ways; whether pyarrow is there."""
    if request.param:
        pytest.importorskip("pyarrow")
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch, request.param)
        yield request.param


@pytest.fixture
def without_numba(monkeypatch):
    """A test in which neither numba nor pyarrow is there."""
    install(monkeypatch, False)


@pytest.fixture(params=[0, 600, None], ids=["at once", "later", "never"])
def switched(request, monkeypatch):
    """A test in which numba and pyarrow come in at some time, or never."""
    if request.param is None:
        install(monkeypatch, False)
        return
    pytest.importorskip("numba")
    install(monkeypatch, True, request.param)
