"""A process that is killed at any opcode of a write leaves what was there or what is new."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import python


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
    python("-m", "tests.support.kills", write, tmp_path, cwd=ROOT)
