"""Run programs as a user does, and show what they printed when they fail."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# What tests/conftest.py sets, and a user does not.
SET_BY_TESTS = ("XLA_FLAGS", "JAX_PLATFORMS", "KERAS_BACKEND", "HF_HUB_OFFLINE")


def user_environment(**more: str) -> dict[str, str]:
    """Return the environment variables without those that only tests set, and with `more`."""
    kept = {name: value for name, value in os.environ.items() if name not in SET_BY_TESTS}
    return kept | more


def run(
    *command: Any, code: int | None = 0, timeout: float = 600, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a command to its end. Fail with its output unless it exits with `code`; None is any."""
    options = {"capture_output": True, "text": True} | options
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, timeout=timeout, check=False, **options)
    except subprocess.TimeoutExpired as error:
        error.add_note(_report(words, "no end", error.stdout, error.stderr))
        raise
    message = _report(words, f"exit code {done.returncode}", done.stdout, done.stderr)
    assert code is None or done.returncode == code, message
    return done


def python(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run this Python with these arguments, as `run` does."""
    return run(sys.executable, *arguments, **options)


@contextmanager
def started(*command: Any, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a process, and end it with the block. If the block raises, show the output.

    Output that `options` does not redirect goes to a file, so that the process never waits for
    a reader.
    """
    words = [str(word) for word in command]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(words, **{"stdout": output, "stderr": output} | options)
        try:
            yield process
        except BaseException as error:
            process.kill()
            process.wait()
            output.seek(0)
            error.add_note(_report(words, f"exit code {process.returncode}", output.read(), None))
            raise
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def _report(words: list[str], outcome: str, stdout: Any, stderr: Any) -> str:
    printed = "".join(
        text.decode(errors="replace") if isinstance(text, bytes) else text or ""
        for text in (stdout, stderr)
    )
    return f"{' '.join(words)}: {outcome}\n{printed[-20_000:]}"
