"""A state of arrays by name as a folder of safetensors files; `tailavg.io.state` calls it.

- `state.json`: the state without its arrays
- `block-<start>-<end>.safetensors`: the mean of a closed block. It never changes, so folders on one
  file system can share the file by links.
- `open.safetensors`: `sum.<name>`, the partial sums, and `mean.<name>`, the mean of the open block
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tailavg.io.files import saved_folder, sync, whole_folder
from tailavg.io.tensors import mapped, write_arrays

__all__ = ["read", "write"]

_STATE, _OPEN = "state.json", "open.safetensors"
_FILES = re.compile(r"state\.json|open\.safetensors|block-\d+-\d+\.safetensors")


def write(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    as_array: Callable[[Any], npt.NDArray[Any]],
    written: Mapping[int, Path],
) -> None:
    """Write a state to a folder, completely or not at all. An older state is replaced.

    Args:
        path: The folder.
        state: The state.
        as_array: Converts what the state holds to arrays.
        written: Files of closed blocks that exist already, by the place of the block.
    """
    starts, blocks, partial = state["starts"], state["blocks"], state["partial"]
    others = {key: value for key, value in state.items() if key not in ("blocks", "partial")}
    with whole_folder(path, lambda old: _holds_state(old, state["format"])) as folder:
        for i, name in enumerate(_block_files(starts)):
            if i not in written or not _linked(written[i], folder / name):
                write_arrays(folder / name, blocks[i], as_array)
        arrays = {f"sum.{name}": value for name, value in partial.items()}
        if starts and state["folded"] > starts[-1]:
            mean = blocks[len(starts) - 1]
            arrays |= {f"mean.{name}": value for name, value in mean.items()}
        write_arrays(folder / _OPEN, arrays, as_array)
        with (folder / _STATE).open("xb") as file:
            file.write(json.dumps(others, indent=1).encode())
            sync(file)


def read(path: str | os.PathLike[str], check: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Read the state in a folder. Arrays are read on access.

    Raises:
        ValueError: If a file is missing or damaged, or `check` refuses the state.
    """
    folder = saved_folder(path)
    try:
        state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        starts = check({**state, "blocks": [], "partial": {}})["starts"]
        blocks = [mapped(folder / name) for name in _block_files(starts)]
        arrays = mapped(folder / _OPEN)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path}: expected a folder saved by tailavg, got one without {error.filename}"
        ) from error
    except (TypeError, RecursionError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{folder / _STATE}: expected a file saved by tailavg, got: {error}"
        ) from error
    partial, mean = (
        {name.removeprefix(kind): array for name, array in arrays.items() if name.startswith(kind)}
        for kind in ("sum.", "mean.")
    )
    if starts:
        blocks.append(mean or {name: np.zeros_like(array) for name, array in partial.items()})
    return {**state, "blocks": blocks, "partial": partial}


def _block_files(starts: Sequence[int]) -> list[str]:
    """Return the names of the files of closed blocks."""
    return [f"block-{start}-{end}.safetensors" for start, end in pairwise(starts)]


def _holds_state(folder: Path, form: str) -> bool:
    """Whether a folder holds a state of this format, and nothing else."""
    if not all(_FILES.fullmatch(file.name) for file in folder.iterdir()):
        return False
    try:
        state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(state, dict) and state.get("format") == form


def _linked(source: Path, path: Path) -> bool:
    """Link a file to a second name. Return False where links are not possible."""
    try:
        os.link(source, path)
    except OSError:
        return False
    with path.open("rb") as file:
        sync(file)
    return True
