"""Help on a terminal of 80 columns, and options that mean the same in every command."""

import re
from pathlib import Path
from typing import get_type_hints

import pytest
import typer.main

from tailavg.cli.main import app
from tests.support import commands

COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_is_broken(name):
    text = commands.done(name, "--help", COLUMNS="80")
    lines = [line.rstrip() for line in text.splitlines()]
    for line in COMMANDS[name].callback.__doc__.splitlines():
        assert not line.strip() or f" {line.strip()}" in lines
    for line in lines:
        assert len(line) <= 80
        bare = line.replace("<=", "").replace(">=", "")
        assert bare.count("<") == bare.count(">"), line
    assert not re.search(r"\d{9}", text)


@pytest.mark.parametrize("name", COMMANDS)
def test_options_mean_the_same(name):
    options = {option.opts[0]: option for option in COMMANDS[name].params}
    types = get_type_hints(COMMANDS[name].callback)
    if "--window" in options:
        assert options["--window"].opts == ["--window", "-w"]
    if "--output" in options:
        assert options["--output"].opts == ["--output", "-o"]
        assert types[options["--output"].name] in (Path, Path | None)
    if "--format" in options:
        assert types[options["--format"].name].__name__ in ("Format", "Literal")
