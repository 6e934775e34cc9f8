"""Kill processes at any opcode of a write: `python -m tests.support.kills FOLDER WRITE...`.

It prints a JSON object: the traceback of each write that was not as it should be, or "". It is a
process of its own, since children of a process with threads may hang.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tailavg import AnyTail, TailAverage, TailAverages
from tailavg.checkpoints import average_checkpoints
from tailavg.cli.main import app
from tailavg.core.rules import ExactWindow
from tailavg.io.files import saved_folder
from tailavg.torch import ParameterAverage
from tests.support.effort import some
from tests.support.interrupts import killed, opcodes

KILLS = some(10, 300)  # of each write


def check(write: Callable[[], Any], path: Path, among: int | None = None) -> None:
    """Kill processes that replace a file or a folder with another.

    They die at evenly spaced opcodes (of the last `among`, if given), and then ever closer to the
    opcode with which the old contents become the new ones.
    """
    old = contents(path)
    assert not killed(write, at=-1)
    new = contents(path)
    assert new != old
    put(path, old)
    total = opcodes(write)

    def replaced(at: int) -> bool:
        put(path, old)
        assert killed(write, at), f"{total} opcodes before, fewer than {at} now"
        now = contents(saved_folder(path))
        assert now in (old, new), f"killed at opcode {at}"
        return now == new

    first = total - min(total, among or total)
    outcomes = {at: replaced(at) for at in np.linspace(first, total - 1, KILLS, dtype=int)}
    assert set(outcomes.values()) == {False, True}, outcomes
    after = min(at for at in outcomes if outcomes[at])
    before = max(at for at in outcomes if at < after)
    while after - before > 1:
        middle = (before + after) // 2
        before, after = (before, middle) if replaced(middle) else (middle, after)
    assert not replaced(before)
    assert not killed(write, at=-1)  # what the killed ones left is no hindrance
    assert contents(path) == new


def contents(path: Path) -> Any:
    if not path.is_dir():
        return path.read_bytes() if path.exists() else None
    return {file.name: file.read_bytes() for file in path.iterdir()}


def put(path: Path, data: Any) -> None:
    """Write a file, or a folder of files, in place of what is there; None writes nothing."""
    for leftover in path.parent.glob(f".{path.name}.*.tailavg"):
        put(leftover, None)
    if path.is_dir():
        rmtree(path)
    path.unlink(missing_ok=True)
    if isinstance(data, bytes):
        path.write_bytes(data)
    elif data is not None:
        path.mkdir()
        for name, content in data.items():
            (path / name).write_bytes(content)


def save(tmp_path: Path) -> None:
    path, average = tmp_path / "average.npz", TailAverage(AnyTail(6))
    average.update(1.0)
    average.save(path)
    average.update_many(np.arange(100.0))
    check(lambda: average.save(path), path)


def save_keys(tmp_path: Path) -> None:
    path, averages = tmp_path / "averages.npz", TailAverages(0.25)
    averages.update("a", 1.0)
    averages.save(path)
    averages.update_many(["a", "b"] * 50, np.arange(100.0))
    check(lambda: averages.save(path), path)


def save_averaged(tmp_path: Path) -> None:
    path, model = tmp_path / "model.safetensors", torch.nn.Linear(3, 2)
    average = ParameterAverage(model, 3)
    average.update()
    average.save_averaged(path)
    torch.nn.init.zeros_(model.weight)
    average.update()
    check(lambda: average.save_averaged(path), path)


def save_folder(tmp_path: Path) -> None:
    """Replace a folder, and make a new one."""
    path, model = tmp_path / "state", torch.nn.Linear(3, 2)
    average = ParameterAverage(model, AnyTail(6), offload=tmp_path / "cold")
    for step in range(60):
        torch.nn.init.constant_(model.weight, step)
        average.update()
        if step == 50:
            average.save(path)
    check(lambda: average.save(path), path)
    put(path, None)
    check(lambda: average.save(path), path)


def checkpoints(tmp_path: Path, suffix: str = ".safetensors") -> None:
    (tmp_path / "run").mkdir()
    files = [tmp_path / "run" / f"{step}{suffix}" for step in range(3)]
    for step, file in enumerate(files):
        state = {"weight": torch.full((4,), float(step)), "steps": torch.tensor(step)}
        if suffix == ".pt":
            torch.save(state, file)
        else:
            save_file(state, file)
    path = tmp_path / f"average{suffix}"
    average_checkpoints(files, {path: ExactWindow(1)})
    check(lambda: average_checkpoints(files, {path: ExactWindow(3)}), path)


def torch_checkpoints(tmp_path: Path) -> None:
    checkpoints(tmp_path, ".pt")


def checkpoint_folders(tmp_path: Path) -> None:
    folders = [tmp_path / "run" / f"checkpoint-{step}" for step in range(3)]
    for step, folder in enumerate(folders):
        folder.mkdir(parents=True)
        save_file({"weight": torch.full((4,), float(step))}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
    check_folder(tmp_path / "averaged", folders)


def distributed_checkpoints(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")  # that there is no process group
    folders = [tmp_path / "run" / f"step-{step}" for step in range(3)]
    for step, folder in enumerate(folders):
        state = {"weight": torch.full((4,), float(step)), "step": step}
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    check_folder(tmp_path / "averaged", folders)


def check_folder(path: Path, folders: list[Path]) -> None:
    def write() -> None:
        rmtree(path, ignore_errors=True)
        average_checkpoints(folders, {path: ExactWindow(3)})

    check(write, path)


def stream(tmp_path: Path) -> None:
    path, numbers = tmp_path / "state", tmp_path / "numbers"
    numbers.write_text("1\n2\n3\n")

    def run() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        app(["stream", str(numbers), "--window", "2", "--state", str(path)], standalone_mode=False)

    assert not killed(run, at=-1)
    check(run, path, among=1500)  # the state is written last


WRITES = {
    write.__name__: write
    for write in (
        save,
        save_keys,
        save_averaged,
        save_folder,
        checkpoints,
        torch_checkpoints,
        checkpoint_folders,
        distributed_checkpoints,
        stream,
    )
}


def main(folder: Path, *names: str) -> None:
    tracebacks = dict.fromkeys(names, "")
    for name in names:
        (folder / name).mkdir()
        try:
            WRITES[name](folder / name)
        except Exception:
            tracebacks[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(tracebacks))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
