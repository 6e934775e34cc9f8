"""The checkpoints of a run: those in its folder, which of them to average, which are unfinished.

`merge.py`, `distributed.py` and the command line call it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tailavg.checkpoints.weights import natural, steps_of

__all__ = ["ITERATION", "TRACKER", "chosen", "of_run", "unfinished"]

FOLDER = re.compile(r"(iter|step|checkpoint|global_step|epoch)[-_]?\d+")
ITERATION = re.compile(r"iter_\d+")
"""The names of Megatron's checkpoints."""
TRACKER = "latest_checkpointed_iteration.txt"
"""The file beside Megatron's checkpoints that names the newest. It is written last."""


def of_run(folder: Path) -> list[Path]:
    """Return the checkpoints in the folder of a run, oldest first, except empty folders."""
    named = (path for path in folder.iterdir() if FOLDER.fullmatch(path.name))
    return sorted((path for path in named if path.is_dir() and any(path.iterdir())), key=natural)


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


def chosen(
    paths: Sequence[Path],
    *,
    start: int | None = None,
    end: int | None = None,
    every: int | None = None,
    last: int | None = None,
) -> list[Path]:
    """Return some of these checkpoints, which are in order.

    Args:
        paths: The checkpoints, oldest first.
        start: The first step.
        end: The last step.
        every: The least number of steps between two of them, counted back from the newest.
        last: How many of the newest.

    Examples:
        >>> paths = [Path(f"iter_{step}") for step in (100, 200, 250, 300, 400)]
        >>> [path.name for path in chosen(paths, start=200, every=100)]
        ['iter_200', 'iter_300', 'iter_400']
        >>> [path.name for path in chosen(paths, end=300, last=2)]
        ['iter_250', 'iter_300']
    """
    kept = list(paths)
    if paths and not (start is None and end is None and every is None):
        kept, next_step = [], None
        for path, step in reversed(list(zip(paths, steps_of(paths), strict=True))):
            is_in = (start is None or step >= start) and (end is None or step <= end)
            if is_in and (next_step is None or next_step - step >= (every or 0)):
                kept.insert(0, path)
                next_step = step
    return kept if last is None else kept[-last:]
