"""The programs of the pages and the examples, run as they are printed.

A complete program of a page runs in a process whose environment is a user's: see `run_fresh`.
"""

import contextlib
import io
import json
import os
import re
import runpy
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.support.paths import DOCS, EXAMPLES, ROOT
from tests.support.processes import python, user_environment

BLOCK = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language, what else its fence says, its text, and the text before it."""

    language: str
    options: str
    text: str
    before: str


def blocks(page):
    """Return all fenced blocks of a page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found, last = [], 0
    for match in BLOCK.finditer(text):
        code = textwrap.dedent(match[4])
        found.append(Block(match[2], match[3].strip(), code, text[last : match.start()]))
        last = match.end()
    return found


def run(code, names, where):
    """Run a program, and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, where, "exec"), names)
    return printed.getvalue()


def example(name, *arguments):
    """Run a program of examples/ in this process, and return what it prints."""
    printed = io.StringIO()
    words = [name, *map(str, arguments)]
    with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


class Program(NamedTuple):
    """Blocks of code that share their names, and an expression to evaluate at the end."""

    blocks: list[str]
    question: str


class Outcome(NamedTuple):
    """What each block of a program printed, the answer, and the folder that it ran in."""

    printed: list[str]
    answer: Any
    folder: Path


def run_fresh(programs, folder) -> dict[str, Outcome]:
    """Run programs, by name, one after the other in one fresh process.

    No variable that only tests set is in its environment. Each program has its own names, folder
    and random numbers.
    """
    command = ("-W", "ignore", "-m", __name__, folder)
    environment = user_environment(OMP_NUM_THREADS="1")
    process = python(*command, cwd=ROOT, env=environment, input=json.dumps(programs))
    outcomes = json.loads(process.stdout.splitlines()[-1])
    return {name: Outcome(*outcome, folder / name) for name, outcome in outcomes.items()}


def _run_all() -> None:
    import random

    import numpy as np
    import torch

    top, outcomes = sys.argv[1], {}
    for name, (code, question) in json.load(sys.stdin).items():
        folder = Path(top, name)
        folder.mkdir()
        os.chdir(folder)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        names: dict[str, Any] = {"__name__": "__main__"}
        printed = [run(block, names, name) for block in code]
        outcomes[name] = printed, eval(question, names)
    sys.stdout.write(f"\n{json.dumps(outcomes)}\n")


if __name__ == "__main__":
    _run_all()
