"""TensorBoard's event files, read by TensorBoard itself: the steps and values of scalars."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tailavg.cli.common import fail
from tailavg.cli.lines import nearest, short
from tailavg.numpy.arithmetic import Array

TEXTS = (".csv", ".jsonl", ".json", ".txt", ".log")
"""Endings of what cannot be an event file, whatever its name."""


def has_events(file: str) -> bool:
    """Return whether this is a folder, or a file with the name of an event file."""
    path = Path(file)
    return path.is_dir() or ("tfevents" in path.name and path.suffix not in TEXTS)


def read_events(file: str, tags: list[str]) -> list[tuple[Array, Array]]:
    """Return the steps and the values of each tag."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        fail(
            f"{file}: event files are read by TensorBoard; install it with: "
            "pip install 'tailavg[tensorboard]'"
        )
    events = EventAccumulator(file, size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    scalars, tensors = events.Tags()["scalars"], events.Tags()["tensors"]
    if not scalars and not tensors:
        fail(
            f"{file}: expected event files with scalars, got none; of a folder of runs, name each "
            "run, as in runs/*"
        )
    curves = []
    for tag in tags:
        if tag in scalars:
            pairs = [(event.step, event.value) for event in events.Scalars(tag)]
        elif tag in tensors:
            pairs = [
                (event.step, make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)
            ]
        else:
            fail(f"{file}: no tag {short(tag)}; {nearest(tag, [*scalars, *tensors])}")
        if any(np.ndim(value) for _, value in pairs):
            fail(f"{file}: expected numbers under the tag {tag!r}, got arrays")
        steps, values = np.array(pairs, np.float64).T
        curves.append((steps, values))
    return curves
