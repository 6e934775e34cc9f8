"""A process that is killed at any opcode of a write leaves what was there or what is new."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "support" / "kills.py"


@pytest.mark.parametrize(
    "write",
    [
        "save",
        "save_keys",
        "save_averaged",
        "save_folder",
        "checkpoints",
        "torch_checkpoints",
        "checkpoint_folders",
        "distributed_checkpoints",
        "stream",
    ],
)
def test_a_killed_write_leaves_the_old_file_or_the_new_one(write: str, tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, write, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
