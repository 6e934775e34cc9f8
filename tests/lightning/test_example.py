"""The example runs, in its reduced form, and shows what it claims to show."""

import re

from tests.support.programs import example


def test_digits():
    printed = example("lightning_digits.py", "--quick")
    assert printed.startswith("500 steps; test loss of\n")
    table = re.findall(r"^(.*?) +([\d.]+)$", printed, re.MULTILINE)
    losses = {name: float(value) for name, value in table}
    *averages, last = losses.values()
    assert next(iter(losses)) == "the last quarter"
    assert list(losses)[-1] == "training weights"
    assert len(averages) == 3
    assert all(0 < loss < last for loss in averages)
