"""The folder of a run: the checkpoints in it, and which of them are unfinished.

`merge.py`, `distributed.py` and the command line call it.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["ITERATION", "TRACKER", "of_run", "unfinished"]

FOLDER = re.compile(r"(iter|step|checkpoint|global_step|epoch)[-_]?\d+")
ITERATION = re.compile(r"iter_\d+")
"""The names of Megatron's checkpoints."""
TRACKER = "latest_checkpointed_iteration.txt"
"""The file beside Megatron's checkpoints that names the newest. It is written last."""


def of_run(folder: Path) -> list[Path]:
    """Return the checkpoints in the folder of a run, in any order, except empty folders."""
    named = (path for path in folder.iterdir() if FOLDER.fullmatch(path.name))
    return [path for path in named if path.is_dir() and any(path.iterdir())]


def unfinished(path: Path) -> str | None:
    """Return why a folder must still be incomplete, or None."""
    tracker = path.absolute().parent / TRACKER
    if ITERATION.fullmatch(path.name) and tracker.is_file():
        latest = tracker.read_text().strip()
        if latest.isdecimal() and int(path.name.removeprefix("iter_")) > int(latest):
            return f"{TRACKER} beside it still says {latest}"
    if not (path / ".metadata").exists() and any(path.glob("*.distcp")):
        return "it has no .metadata yet"
    return None
