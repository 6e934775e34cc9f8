"""All commands, and a folder to run them in."""

import os
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

TAILAVG = [sys.executable, "-m", "tailavg"]
PROFILE = ["profile", "--window", "0.25", "--count", "1e7"]


@pytest.fixture
def run_folder(tmp_path):
    """Checkpoints that take a while to average, and numbers to draw."""
    (tmp_path / "numbers.txt").write_text("1\n2\n3\n")
    for step in range(4):
        save_file({"x": np.full(3_000_000, step, np.float32)}, tmp_path / f"{step}.safetensors")
    return tmp_path


CHECKPOINTS = ["checkpoints", *(f"{i}.safetensors" for i in range(4)), "--window", "1.0"]
CHECKPOINTS += ["-o", "average.safetensors"]
REPRODUCE = ["reproduce", "--quick", "--runs", "2", "--batches", "10", "-o", "out"]
COMMANDS = {
    "profile": PROFILE,
    "profile json": [*PROFILE, "--output", "json"],
    "checkpoints": CHECKPOINTS,
    "reproduce": REPRODUCE,
    "help": ["--help"],
    "version": ["--version"],
    "plot": ["plot", "numbers.txt"],
    "stream": ["stream", "-w", "2", os.devnull],
}
