"""Interrupt or kill a call at any of its opcodes, as Ctrl-C, a signal or a power cut may do."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import tailavg
from tests.support import effort

SHORT = effort.some(400, 100_000)  # `make test-all` interrupts long calls at every opcode, too
OURS = str(Path(tailavg.__file__).parent)


class Interrupt(BaseException):
    """Raised in the middle of a call."""


def interrupted(
    make: Callable[[], Any], call: Callable[[Any], Any], short: int = SHORT, some: int = 50
) -> Iterator[tuple[int, Any]]:
    """Interrupt calls on new objects. Yield each opcode and the object that its interrupt left.

    A call of at most `short` opcodes is interrupted before every one of them. A longer one is
    interrupted before at most `some`, evenly spread.
    """
    call(make())  # fills caches
    subject = make()
    total, _ = _traced(lambda: call(subject), -1)
    for at in range(0, total, 1 if total <= short else -(-total // some)):
        subject = make()
        _, early = _traced(lambda subject=subject: call(subject), at)
        assert early, f"{total} opcodes before, fewer than {at} now"
        yield at, subject


def killed(call: Callable[[], Any], at: int) -> bool:
    """Kill a process before an opcode of a call. Return False if the call ended before it."""

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    return _in_child(lambda: _traced(call, at, kill)) == signal.SIGKILL


def opcodes(call: Callable[[], Any]) -> int:
    """Count the opcodes of a call, in a process of its own."""
    reader, writer = os.pipe()
    _in_child(lambda: os.write(writer, b"%d" % _traced(call, -1)[0]))
    os.close(writer)
    with os.fdopen(reader) as told:
        return int(told.read())


def _in_child(call: Callable[[], Any]) -> int:
    child = os.fork()
    if not child:
        code = 1
        try:
            call()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), f"the child ended with status {status}"
    return status


def _raise() -> None:
    raise Interrupt


def _traced(
    call: Callable[[], Any], at: int, interrupt: Callable[[], None] = _raise
) -> tuple[int, bool]:
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if event == "call":
            if not frame.f_code.co_filename.startswith(OURS):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            seen += 1
            if seen == at + 1:
                sys.settrace(None)
                interrupt()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return seen, True
    finally:
        sys.settrace(before)
    return seen, False
