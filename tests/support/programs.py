"""The programs of the pages and the examples, run as they are printed."""

import contextlib
import io
import re
import runpy
import sys
import textwrap
from typing import NamedTuple
from unittest import mock

from tests.support.paths import DOCS, EXAMPLES

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
