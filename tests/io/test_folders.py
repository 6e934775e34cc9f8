"""A state as a folder, with NumPy alone: replaced, linked, and found after a kill."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailavg import TailAverage
from tailavg.io import state as layout


def a_state(steps: int) -> dict[str, Any]:
    average = TailAverage(20)
    average.update_many(np.sin(np.arange(3.0 * steps)).reshape(steps, 3))
    state = average.state_dict()
    blocks = [{"x": block} for block in state["blocks"]]
    return {**state, "blocks": blocks, "partial": {"x": state["partial"]}}


def value(state: dict[str, Any]) -> Any:
    return TailAverage.from_state_dict(layout.unnamed(state)).value()


def test_a_folder_is_read_and_replaced(tmp_path: Path) -> None:
    for steps in (1, 45, 300):
        layout.write_folder(tmp_path / "state", a_state(steps))
        found = layout.read(tmp_path / "state")
        assert found["count"] == steps
        np.testing.assert_array_equal(value(found), value(a_state(steps)))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_an_old_state_is_read_if_its_replacement_was_killed(tmp_path: Path) -> None:
    layout.write_folder(tmp_path / "state", a_state(45))
    (tmp_path / "state").rename(tmp_path / ".state.old.tailavg")
    assert layout.read(tmp_path / "state")["count"] == 45
    layout.write_folder(tmp_path / "state", a_state(46))
    assert layout.read(tmp_path / "state")["count"] == 46
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("possible", [True, False])
def test_closed_blocks_are_linked_if_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, possible: bool
) -> None:
    state = a_state(45)
    layout.write_folder(tmp_path / "one", state)
    (block, *others) = sorted((tmp_path / "one").glob("block-*"))
    if not possible:
        monkeypatch.setattr(os, "link", lambda *_: os.close(-1))  # raises an OSError
    layout.write_folder(tmp_path / "two", state, written={0: block})
    linked = (tmp_path / "two" / block.name).stat()
    assert os.path.samestat(linked, block.stat()) is possible
    for other in others:
        assert not os.path.samestat((tmp_path / "two" / other.name).stat(), other.stat())
    np.testing.assert_array_equal(value(layout.read(tmp_path / "two")), value(state))


@pytest.mark.parametrize("instead", ["nothing", "a folder"])
def test_a_block_that_is_no_file_is_refused(tmp_path: Path, instead: str) -> None:
    layout.write_folder(tmp_path / "state", a_state(45))
    block = next((tmp_path / "state").glob("block-*"))
    block.unlink()
    if instead == "a folder":
        block.mkdir()
    with pytest.raises(ValueError, match=r"incomplete, or not saved by tailavg: .*block-"):
        layout.read(tmp_path / "state")


def test_other_files_are_not_replaced(tmp_path: Path) -> None:
    layout.write_folder(tmp_path / "state", a_state(45))
    (tmp_path / "state" / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="choose another path"):
        layout.write_folder(tmp_path / "state", a_state(46))
    assert (tmp_path / "state" / "thesis.txt").read_text() == "mine"
    assert layout.read(tmp_path / "state")["count"] == 45
