"""`tailavg stream`: how to run it, and what it is given."""

import json
import math
import os
import re
import subprocess
import threading
from functools import partial

import numpy as np
import pytest

from tailavg import TailAverage
from tests.support import commands
from tests.support.model import weight_matrix
from tests.support.processes import started

COMMAND = [*commands.TAILAVG, "stream"]
ENVIRONMENT = os.environ | commands.WIDE
RANDOM = np.random.default_rng(5)
NUMBERS = [f"{x:.4f}" for x in RANDOM.normal(3, 2, 300)]

# In this process, through a pipe: see tests/support/commands.py.
run = partial(commands.run, "stream")
done = partial(commands.done, "stream")
failed = partial(commands.failed, "stream")


class Live:
    """A process that is given a line at a time."""

    def __init__(self, *arguments, **options):
        pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
        self._started = started(*COMMAND, *arguments, text=True, env=ENVIRONMENT, **pipes | options)

    def __enter__(self):
        self.process = self._started.__enter__()
        self._limit = threading.Timer(300, self.process.kill)  # a missing answer fails, not hangs
        self._limit.start()
        return self

    def __exit__(self, *error):
        self._limit.cancel()
        self._started.__exit__(*error)

    def send(self, text):
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def ask(self, line):
        """What is answered to a line, while the input stays open."""
        self.send(f"{line}\n")
        return self.process.stdout.readline()

    def stop(self, number):
        """The exit code, the rest of the output and the messages after a signal."""
        self.process.send_signal(number)
        output, messages = self.process.communicate(timeout=300)
        return self.process.returncode, output, messages


def lines(texts):
    return "".join(f"{text}\n" for text in texts)


def expected(rule, numbers):
    """The averages, from the weights of a model that shares no code with the library."""
    numbers = np.array([float(x) for x in numbers])
    return (weight_matrix(rule, len(numbers)) @ numbers).tolist()


def close(text, averages):
    return [float(line) for line in text.split()] == pytest.approx(averages, rel=1e-11, abs=1e-11)


def same_digits(text, other):
    """Whether two outputs are the same, but for a unit in the twelfth digit of finite numbers."""
    if text == other:
        return True
    assert text.count("\n") == other.count("\n")
    cells, others = (re.split(r"([\s,:{}]+)", output) for output in (text, other))
    for cell, same in zip(cells, others, strict=True):
        if cell != same:
            x, y = float(cell), float(same)
            assert math.isfinite(x - y), (cell, same)
            unit = 10.0 ** (math.floor(math.log10(max(abs(x), abs(y)))) - 11)
            assert abs(x - y) < 1.5 * unit, (cell, same)
    return True


def any_tail(rule, windows, numbers):
    """What is read of one average after each number, a list for each window."""
    average = TailAverage(rule)
    rows = []
    for number in numbers:
        average.update(float(number))
        rows.append([average.value(window) for window in windows])
    return [list(column) for column in zip(*rows, strict=True)]


ROWS = [(i, x, "train" if i % 3 else "eval, slow") for i, x in enumerate(NUMBERS)]
CSV = "step,loss,run\n" + lines(
    f'{step},{loss},"{run}"' if "," in run else f"{step},{loss},{run}" for step, loss, run in ROWS
)
JSON = lines(
    json.dumps({"step": step, "loss": float(loss), "run": run}) for step, loss, run in ROWS
)
LONG = [f"{x:.5f}" for x in RANDOM.normal(1, 1, 12_000)]
