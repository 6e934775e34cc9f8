"""Signals in the middle of an average of folders leave nothing behind."""

import json
import os
import signal
import subprocess
import time
import warnings
from pathlib import Path

import pytest

from tests.support.commands import TAILAVG
from tests.support.effort import exhaustive
from tests.support.processes import started

SIZE = 2 * 10**8


def models(folder):
    """Folders of a model that is a hole, which takes no room."""
    entry = {"dtype": "F32", "shape": [SIZE // 4], "data_offsets": [0, SIZE]}
    head = json.dumps({"zeros": entry}).encode()
    for step in range(8):
        (folder / f"checkpoint-{step}").mkdir()
        with (folder / f"checkpoint-{step}" / "model.safetensors").open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            file.truncate(8 + len(head) + SIZE)


def distributed(folder):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        state = {str(i): torch.zeros(10**6) for i in range(10)}
        dcp.save(state, checkpoint_id=folder / "checkpoint-0", no_dist=True)
    for step in range(1, 8):
        (folder / f"checkpoint-{step}").mkdir()
        for file in (folder / "checkpoint-0").iterdir():
            os.link(file, folder / f"checkpoint-{step}" / file.name)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("make", "number"),
    [
        (models, signal.SIGINT),
        (distributed, signal.SIGTERM),
        pytest.param(models, signal.SIGTERM, marks=exhaustive("as with SIGINT")),
        pytest.param(distributed, signal.SIGINT, marks=exhaustive("as with SIGTERM")),
    ],
)
def test_a_signal_leaves_nothing(tmp_path, make, number):
    make(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    command = [*TAILAVG, "checkpoints", *names, "--window", "1.0", "-o", "averaged"]
    with started(*command, cwd=tmp_path, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not list(tmp_path.glob(".averaged*/*")):
            time.sleep(0.001)
        process.send_signal(number)
        told = process.communicate(timeout=300)[1]
        assert process.returncode == 128 + number, told.decode()
    assert b"Traceback" not in told, told.decode()
    assert sorted(path.name for path in tmp_path.iterdir()) == names
