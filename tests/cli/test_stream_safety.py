"""What `tailavg stream --state` promises: no sample is lost, whatever ends it."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.effort import some
from tests.support.streams import (
    COMMAND,
    ENVIRONMENT,
    LONG,
    Live,
    done,
    failed,
    lines,
    run,
    same_digits,
)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def shell(command, text=""):
    """A command of the shell, in which `stream` is the command under test."""
    stream = " ".join(f"'{word}'" for word in COMMAND)
    script = f'stream() {{ {stream} "$@"; }}; {command}'
    process = processes.run("bash", "-c", script, input=text, env=ENVIRONMENT, code=None)
    assert "Traceback" not in process.stderr
    return process


def counts(state):
    """How many samples a state holds."""
    return sum(json.loads(line)[1][0]["count"] for line in state.read_text().splitlines()[1:])


def lines_told(told):
    """The line after which a command says that it stopped."""
    return int(told.split("after line ")[1].split(";")[0])


# One process at a time


def test_a_second_process_is_refused(tmp_path):
    state = tmp_path / "state"
    with Live("-w", "1.0", "--state", state) as live:
        assert live.ask("1") == "1\n"
        output, told = failed("-w", "1.0", "--state", state, text="5\n")
        assert (output, told.count("another process")) == ("", 1)
        assert str(state) in told
        link = tmp_path / "link"
        link.symlink_to(state)
        _, told = failed("-w", "1.0", "--state", link, text="5\n")
        assert "another process" in told
        assert live.ask("2") == "1.5\n"
        assert live.stop(signal.SIGTERM)[0] == 143
    assert done("-w", "1.0", "--state", state, text="6\n") == "3\n"
    assert files(tmp_path) == ["link", "state"]


def test_a_killed_process_does_not_keep_the_state(tmp_path):
    state = tmp_path / "state"
    with Live("-w", "1.0", "--state", state) as live:
        assert live.ask("1") == "1\n"
        live.stop(signal.SIGKILL)
    assert done("-w", "1.0", "--state", state, text="6\n") == "6\n"
    assert files(tmp_path) == ["state"]


# A state that could not be saved


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("absent/state", "No such file or directory"),
        ("x" * 300, "File name too long"),
        (".", "Is a directory"),
        ("fifo", "expected a regular file"),
        ("/dev/null", "expected a regular file"),
        ("/dev/full", "expected a regular file"),
        ("loop", "Too many levels of symbolic links"),
        ("/proc/state", ""),
    ],
)
def test_a_state_that_could_not_be_saved_is_refused_at_the_start(tmp_path, name, told):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    before = files(tmp_path)
    output, said = failed("-w", "3", "--state", tmp_path / name, text="1\n")
    assert not output
    assert "no state can be saved there" in said
    assert told in said
    assert files(tmp_path) == before


def test_a_state_that_could_not_be_saved_is_refused_before_any_input(tmp_path):
    with Live("-w", "3", "--state", tmp_path / "absent" / "state") as live:
        assert live.process.wait(timeout=300) == 1
        assert live.process.stderr.read().count("\n") == 1


def test_a_file_that_may_not_be_read(tmp_path):
    state = tmp_path / "state"
    state.write_text("")
    state.chmod(0)
    if os.access(state, os.R_OK):
        pytest.skip("root may read all files")
    _, told = failed("-w", "3", "--state", state, text="1\n")
    assert told.endswith("Permission denied")


# An output that fails


@pytest.mark.parametrize(
    ("path", "mode", "told"),
    [
        ("/dev/full", "wb", "standard output: No space left on device"),
        ("/dev/null", "rb", "standard output: Bad file descriptor"),
    ],
    ids=["full", "not writable"],
)
def test_the_state_holds_all_that_was_read(tmp_path, path, mode, told):
    """Also the samples whose averages could not be written."""
    state = tmp_path / "state"
    with Path(path).open(mode) as output:
        ended = run("-w", "1.0", "--state", state, text="1\n" * 100_000, output=output, code=1)
    assert ended.told.startswith(f"tailavg: {told}; stopped after line ")
    assert f"; the state so far is in {state}" in ended.told
    assert counts(state) == lines_told(ended.told) > 0
    assert files(tmp_path) == ["state"]


def test_the_state_holds_all_that_was_read_when_the_reader_has_gone(tmp_path):
    state = tmp_path / "state"  # more is written than fits a pipe
    feed = "yes 1 | head -n 100000"
    process = shell(f"{feed} | stream -w 1.0 --state {state} | true; exit ${{PIPESTATUS[2]}}")
    assert process.returncode == 0
    assert process.stderr.startswith("tailavg: stopped after line ")
    assert f"; the state so far is in {state}" in process.stderr
    assert counts(state) == lines_told(process.stderr) > 0
    assert files(tmp_path) == ["state"]


def test_a_closed_output_is_refused_at_the_start(tmp_path):
    process = shell(f"stream -w 3 --state {tmp_path}/state >&-", text="1\n")
    assert process.returncode == 1
    assert process.stderr == "tailavg: standard output: Bad file descriptor\n"
    assert files(tmp_path) == []


def test_an_input_that_fails(tmp_path):
    """As a file does on a broken disk; here, memory that cannot be read."""
    state = tmp_path / "state"
    output, told = failed("-w", "3", "--state", state, "/proc/self/mem")
    assert output == ""
    assert "/proc/self/mem: Input/output error; stopped after line 0" in told


def test_a_state_that_does_not_fit_on_the_disk(tmp_path):
    """Then the old one stays."""
    state = tmp_path / "state"
    done("-w", "1.0", "--state", state, text="1\n")
    before = state.read_bytes()
    process = shell(
        f"ulimit -f 0; stream -w 1.0 --state {state} | cat; exit ${{PIPESTATUS[0]}}", "5\n"
    )
    assert process.returncode == 1
    assert process.stdout == "3\n"
    assert "state not saved, the file is unchanged: File too large" in process.stderr
    assert state.read_bytes() == before
    assert files(tmp_path) == ["state"]


# Signals


def test_a_signal_that_comes_twice_at_once(tmp_path):
    """As from a terminal that is closed, whose shell sends it again; either may be first."""
    state = tmp_path / "state"
    with Live("-w", "1.0", "--state", state) as live:
        assert live.ask("1") == "1\n"
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            live.process.send_signal(number)
        assert live.stop(signal.SIGHUP)[0] in (129, 143)
    assert done("-w", "1.0", "--state", state, text="2\n") == "1.5\n"


def test_ignored_signals_stay_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with Live("-w", "1.0") as live:
            assert live.ask("1") == "1\n"
            live.process.send_signal(signal.SIGHUP)
            assert live.ask("2") == "1.5\n"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_reader_that_does_not_read(tmp_path):
    """The first signal waits for it, the next does not; the state holds what was read."""
    state, feed = tmp_path / "state", tmp_path / "feed"
    feed.write_text("1\n" * 500_000)
    with Live("-w", "1.0", "--state", state, feed) as live:
        assert live.process.stdout.readline() == "1\n"
        live.process.send_signal(signal.SIGTERM)
        time.sleep(1.3)  # a signal that comes sooner is taken for the same one
        assert live.process.poll() is None
        while live.process.poll() is None:
            live.process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert live.process.returncode == 143
        told = live.process.stderr.read()
    assert counts(state) == lines_told(told)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_at_any_instant(tmp_path, number):
    """The state is whole: of the lines that were read, or of complete runs alone."""
    state, feed = tmp_path / "state", tmp_path / "feed"
    feed.write_text("1\n" * 3_000_000)
    random_ = random.Random(3)
    read = 0
    for _ in range(some(3, 7)):
        with processes.started(
            *[*COMMAND, "-w", "1.0", "--state", state, feed],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            time.sleep(0.2 + 1.3 * random_.random())
            process.send_signal(number)
            told = process.communicate(timeout=300)[1]
        assert "Traceback" not in told
        if "after line" in told:
            assert process.returncode == 143
            read += lines_told(told)
        elif process.returncode == 0:
            read += 3_000_000
    if number is signal.SIGTERM:
        assert set(files(tmp_path)) <= {"feed", "state"}
        assert read == (counts(state) if state.exists() else 0)
    done("-w", "1.0", "--state", state, text="1\n")  # which removes what was left
    assert set(files(tmp_path)) == {"feed", "state"}
    assert number is signal.SIGTERM or counts(state) % 3_000_000 == 1


def test_what_was_written_before_a_hangup_is_what_one_run_writes(tmp_path):
    state = tmp_path / "state"
    with Live("-w", "0.25", "--state", state) as live:
        before = [live.ask(x) for x in LONG[:20]]
        assert live.stop(signal.SIGHUP)[0] == 129
    after = done("-w", "0.25", "--state", state, text=lines(LONG[20:40]))
    assert same_digits("".join(before) + after, done("-w", "0.25", text=lines(LONG[:40])))
