"""`python -m tailavg` does what `tests.support.commands.run` does in the process of the tests."""

import os

import pytest

from tests.support import commands, processes
from tests.support.commands import CHECKPOINTS, TAILAVG, WIDE

CASES = {
    "stream": (["stream", "-w", "2"], b"1\n3\n"),
    "bad data": (["stream", "-w", "2"], b"1\nx\n"),
    "a wrong command line": (["stream"], b""),
    "checkpoints": (CHECKPOINTS, b""),
    "plot": (["plot", "numbers.txt"], b""),
}


@pytest.mark.parametrize("name", CASES)
def test_a_process_does_the_same(run_folder, name):
    arguments, text = CASES[name]
    process = processes.run(
        *[*TAILAVG, *arguments],
        cwd=run_folder,
        input=text,
        text=False,
        env=os.environ | WIDE | {"PYTHONIOENCODING": "utf-8"},
        code=None,
    )
    files = {path: path.read_bytes() for path in run_folder.iterdir()}
    ended = commands.run(*arguments, text=text, folder=run_folder, code=None)
    assert ended == (process.returncode, process.stdout, process.stderr)
    assert {path: path.read_bytes() for path in run_folder.iterdir()} == files
