"""Whatever goes wrong in a command is told in a line, never with a traceback."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest

from tests.support import commands, processes
from tests.support.commands import COMMANDS, PROFILE, TAILAVG
from tests.support.streams import done, failed, lines, run


def tailavg(*arguments, to="", folder=None, **environment):
    """A command as a process, with its standard streams redirected by the shell."""
    words = " ".join(f"'{word}'" for word in [*TAILAVG, *arguments])
    environment = os.environ | {"PYTHONUNBUFFERED": ""} | environment
    process = processes.run(
        "bash", "-c", f"{words} {to}", env=environment, cwd=folder, code=None, text=False
    )
    assert b"Traceback" not in process.stderr, process.stderr.decode()
    assert b"Exception ignored" not in process.stderr, process.stderr.decode()
    return process


# Output


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "stream"])
def test_a_full_disk(run_folder, name):
    with (
        mock.patch("tailavg.experiments.report.write"),  # figures, which take long
        Path("/dev/full").open("wb") as full,
    ):
        ended = commands.run(*COMMANDS[name], output=full, folder=run_folder, code=1)
    assert ended.stderr == "tailavg: standard output: No space left on device\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_of_a_process(unbuffered):
    """Python, too, tries to write when it ends."""
    process = tailavg("--version", to="> /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert process.stderr == b"tailavg: standard output: No space left on device\n"
    assert process.returncode == 1


@pytest.mark.parametrize("name", ["checkpoints", "reproduce", "stream", "version"])
def test_a_closed_output(run_folder, name):
    """Otherwise the next file that is opened would be the standard output."""
    process = tailavg(*COMMANDS[name], to=">&-", folder=run_folder)
    assert process.stderr == b"tailavg: standard output: Bad file descriptor\n"
    assert process.returncode == 1


def test_messages_that_cannot_be_written():
    for to in ("2> /dev/full", "2>&-"):
        assert tailavg("stream", "-w", "2", "absent", to=to).returncode == 1


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_an_encoding_without_our_characters(encoding):
    usual = commands.done(*PROFILE)
    assert "≈" in usual
    ended = commands.run(*PROFILE, encoding=encoding)
    written = ended.output.decode(encoding)
    assert written.split("method")[1].split() != []
    assert [word for word in written.split() if "," in word][:9] == [
        word.replace("≈", "?") for word in usual.split() if "," in word
    ][:9]
    assert not ended.stderr


def test_the_c_locale():
    process = tailavg(*PROFILE, LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    assert (process.returncode, process.stderr) == (0, b"")


# Input


HALVES = r'{"k": "\ud800", "x": 1}' + "\n" + r'{"k": "\udfffa", "x": 3, "\udfff": "\ud83d"}' + "\n"


@pytest.mark.parametrize("many", [1, 40])
@pytest.mark.parametrize("output", ["plain", "csv", "jsonl"])
def test_halves_of_characters(tmp_path, output, many):
    """JSON may have them, no encoding does."""
    options = ["-w", "2", "-f", "x", "--by", "k", "--format", output]
    options += ["--state", tmp_path / "state"]
    text = done(*options, text=HALVES * many)
    assert text.count("\n") == 2 * many + (output == "csv")
    if output == "jsonl":
        assert json.loads(text.splitlines()[0]) == {"k": "\ud800", "x": 1, "x_average": 1}
    else:
        assert r"\ud800" in text
    done(*options, text=HALVES)


def test_half_a_character_in_an_error():
    _, told = failed("-w", "2", "-f", "x", text=r'{"x": "\ud800"}' + "\n")
    assert r'got "\ud800"' in told
    _, told = failed("-w", "2", "-f", "x", text=r'{"\ud800": 1}' + "\n")
    assert "no line has a number for 'x'" in told


LARGE, HUGE = "1" * 400, "1" * 5000


@pytest.mark.parametrize(
    "options",
    [
        ["-w", HUGE],
        ["-w", "0.5", "--at-most", LARGE],
        ["-w", "0.5", "--at-most", HUGE],
        ["--windows", f"0.5,{HUGE}"],
        ["-w", "2", "--every", str(2**63)],
        ["-w", "2", "--every", LARGE],
        ["-w", "2", "--every", HUGE],
        ["-w", "1e-400"],
        ["-w", "1e400"],
    ],
    ids=lambda options: " ".join(options)[:30],
)
def test_numbers_out_of_range(options):
    output, told = failed(*options, text="1\n", code=2)
    assert not output
    assert "internal error" not in told


@pytest.mark.parametrize("window", [LARGE, "5e-324", "1e-300"])
def test_extreme_windows(window):
    """Each is a window, or a wrong command line."""
    for options in ([], ["--at-most", "7"]):
        assert run("-w", window, *options, text=lines(range(40)), code=None).code in (0, 2)


def test_the_largest_every():
    assert done("-w", "2", "--every", str(2**63 - 1), text=lines(range(40))) == ""
    assert done("-w", "2", "--every", str(2**63 - 1), text="1\n") == ""


def test_a_missing_column_among_many():
    names = [f"column_{i}" for i in range(10_000)]
    _, told = failed("-w", "2", "-c", "colum_77", text=",".join(names) + "\n")
    assert told.startswith(
        "tailavg: no column 'colum_77' in the header; of 10000, the nearest are: "
    )
    near = told.split(": ")[-1].split(", ")
    assert near[0] == "column_77"
    assert len(near) == 10
    _, told = failed("-w", "2", "-c", "x" * 10_000, text=",".join(["y" * 10_000] * 20) + "\n")
    assert len(told) < 1000
