"""Programs in the pages of docs/: run as they are printed, in order, in one namespace."""

import contextlib
import io
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language, what else its fence says, its text, and the text before it."""

    language: str
    options: str
    text: str
    before: str


def blocks(page):
    """All fenced blocks of a page."""
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
