"""`tailavg stream` as a process, and what it is given."""

import json
import math
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest

from tailavg import TailAverage
from tests.support.model import weight_matrix

COMMAND = [sys.executable, "-m", "tailavg", "stream"]
ENVIRONMENT = os.environ | {"COLUMNS": "400"}
RANDOM = np.random.default_rng(5)
NUMBERS = [f"{x:.4f}" for x in RANDOM.normal(3, 2, 300)]


def run(*arguments, text=""):
    data = text if isinstance(text, bytes) else text.encode()
    process = subprocess.run(
        [*COMMAND, *map(str, arguments)], input=data, capture_output=True, env=ENVIRONMENT
    )
    process.stdout, process.stderr = process.stdout.decode(), process.stderr.decode()
    assert "Traceback" not in process.stderr
    assert "Warning" not in process.stderr
    return process


def done(*arguments, text=""):
    process = run(*arguments, text=text)
    assert process.returncode == 0, process.stderr
    assert not process.stderr
    return process.stdout


def failed(*arguments, text="", code=1):
    process = run(*arguments, text=text)
    assert process.returncode == code, process.stderr
    return process.stdout, " ".join(process.stderr.replace("│", " ").split())


class Live:
    """A process that is given a line at a time."""

    def __init__(self, *arguments, **options):
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            **options,
        )
        self.limit = threading.Timer(120, self.process.kill)  # a missing answer fails, not hangs
        self.limit.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.limit.cancel()
        self.process.kill()
        self.process.communicate()

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
        code = self.process.wait(timeout=60)
        return code, self.process.stdout.read(), self.process.stderr.read()


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
    assert text.count("\n") == other.count("\n")
    cells = zip(re.split(r"([\s,:{}]+)", text), re.split(r"([\s,:{}]+)", other), strict=True)
    for one, its in cells:
        if one != its:
            x, y = float(one), float(its)
            assert math.isfinite(x - y), (one, its)
            unit = 10.0 ** (math.floor(math.log10(max(abs(x), abs(y)))) - 11)
            assert abs(x - y) < 1.5 * unit, (one, its)
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
LONG = [f"{x:.5f}" for x in RANDOM.normal(1, 1, 40_000)]
