"""Logs other than text lines: TensorBoard's event files, and trainer_state.json of Hugging Face.

`stream` and `plot` read them through `record_lines`, as JSON lines. A line is a record: a step, and
the tags or fields that were logged at that step.
"""

from __future__ import annotations

import json
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import typer

from tailavg.cli.common import fail
from tailavg.cli.lines import nearest, short

STEP = "step"
"""The field with the step of a record."""

TRAINER_STATE = "trainer_state.json"
TEXTS = (".csv", ".jsonl", ".json", ".txt", ".log")
"""Endings of names that are not event files, even with "tfevents" in the name."""


def has_records(file: str) -> bool:
    """Return whether `file` is a folder, an event file, or a trainer_state.json."""
    path = Path(file)
    is_events = "tfevents" in path.name and path.suffix not in TEXTS
    is_folder = file != "" and path.is_dir()  # Path("") is the current folder
    return is_events or path.name.endswith(TRAINER_STATE) or is_folder


def record_lines(file: str, names: list[str] | None) -> bytes:
    """Return the records of a file or folder as JSON lines. Fail if one of the names is missing."""
    path = Path(file)
    state = path / TRAINER_STATE if path.is_dir() else path
    if state.name.endswith(TRAINER_STATE) and state.exists():
        kind, option, records = "field", "--field", _trainer_records(state)
    else:
        kind, option, records = "tag", "--column", _event_records(file)
    known = list(dict.fromkeys(chain.from_iterable(records)))
    if not names:
        choices = ", ".join(name for name in known if name != STEP)
        raise typer.BadParameter(f"{file}: choose a {kind} with {option} (found: {choices})")
    for name in names:
        if name not in known:
            fail(f"{file}: no {kind} {short(name)}; {nearest(name, known[1:])}")
    return "".join(f"{json.dumps(record)}\n" for record in records).encode()


def _trainer_records(path: Path) -> list[dict[str, Any]]:
    """Return the records that a Trainer of Hugging Face has logged."""
    try:
        history = json.loads(path.read_text())["log_history"]
        return [{STEP: record[STEP]} | record for record in history]
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    except (ValueError, LookupError, TypeError) as error:
        fail(f"{path}: expected a trainer_state.json with a log_history, got {error!r:.200}")


def _event_records(file: str) -> list[dict[str, Any]]:
    """Return the scalars of event files, in the order in which they were logged."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        fail(
            f"{file}: event files are read by TensorBoard; install it with: "
            "pip install 'tailavg[tensorboard]'"
        )
    log = EventAccumulator(file, size_guidance={"scalars": 0, "tensors": 0})
    log.Reload()
    tags = log.Tags()
    events = [
        (event.wall_time, event.step, tag, event.value)
        for tag in tags["scalars"]
        for event in log.Scalars(tag)
    ]
    for tag in tags["tensors"]:
        for event in log.Tensors(tag):
            value = make_ndarray(event.tensor_proto)
            if np.ndim(value) == 0 and value.dtype.kind in "biuf":
                events.append((event.wall_time, event.step, tag, float(value)))
    if not events:
        fail(
            f"{file}: expected event files with scalars, got none; to read a folder of runs, "
            "pass each run, as in runs/*"
        )
    records: list[dict[str, Any]] = []
    for _, step, tag, value in sorted(events, key=itemgetter(0)):
        if not records or records[-1][STEP] != step or tag in records[-1]:
            records.append({STEP: step})
        records[-1][tag] = value
    return records
