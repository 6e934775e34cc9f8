"""The example of `tailavg.keras` runs, in its reduced form, and shows what it claims to show."""

import re

import keras
import pytest


def rows(text, title):
    """Numbers by name, under the line that starts with the title."""
    (block,) = (block for block in text.split("\n\n") if block.startswith(title))
    table = (re.split(r"\s{2,}", line) for line in block.strip().splitlines()[1:])
    return {name: [float(value) for value in values] for name, *values in table}


def test_digits(fresh_process):
    folder, printed = fresh_process
    assert f"on {keras.backend.backend()}; 189 steps\n" in printed
    epochs, after = rows(printed, "validation loss"), rows(printed, "after fit")
    assert len(epochs) == 3
    assert all(average < last for last, average in epochs.values())
    assert after["last iterate"][0] == pytest.approx(epochs["epoch 3"][0], abs=2e-4)
    assert after["last 25 %"][0] == pytest.approx(epochs["epoch 3"][1], abs=2e-4)
    best = min(average for _, average in epochs.values())
    assert after["best checkpoint"][0] == pytest.approx(best, abs=2e-4)
    assert len(after) == 7
    written = sorted(path.name for path in (folder / "example").iterdir())
    assert written == ["average", "best.keras"]
