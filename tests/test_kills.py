"""A process that is killed at any opcode of a write leaves what was there or what is new.

Slow: `make test-all` kills hundreds of processes.
"""

from __future__ import annotations

import json

import pytest

from tests.support.paths import ROOT
from tests.support.processes import python

WRITES = [
    "save",
    "save_keys",
    "save_averaged",
    "save_folder",
    "checkpoints",
    "torch_checkpoints",
    "checkpoint_folders",
    "distributed_checkpoints",
    "stream",
]


@pytest.fixture(scope="module")
def tracebacks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Kill all writes, in one process, since it takes seconds to import torch."""
    folder = tmp_path_factory.mktemp("kills")
    done = python("-m", "tests.support.kills", folder, *WRITES, cwd=ROOT, timeout=3000)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("write", WRITES)
def test_a_killed_write_leaves_the_old_file_or_the_new_one(
    write: str, tracebacks: dict[str, str]
) -> None:
    assert not tracebacks[write], tracebacks[write]
