"""Interrupts and kills at every opcode: what Ctrl-C, a signal or a power cut may do to a call."""

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

OURS = str(Path(tailavg.__file__).parent)


class Interrupt(BaseException):
    """Raised in the middle of a call."""


def opcodes(call: Callable[[], Any]) -> int:
    """How many opcodes of ours a call runs."""
    count, _ = _traced(call, -1)
    return count


def interrupted(call: Callable[[], Any], at: int) -> bool:
    """Interrupt a call before one of its opcodes; False if it ended before that."""
    return _traced(call, at)[1]


def points(call: Callable[[], Any], most: int = 400) -> Iterator[int]:
    """The opcodes of a call, or as many of them, evenly spaced."""
    total = opcodes(call)
    return iter(range(0, total, max(1, -(-total // most))))


def killed(call: Callable[[], Any], at: int) -> bool:
    """Kill a process before an opcode of a call; False if the call ended before that."""

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        code = 1
        try:
            _traced(call, at, kill)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


def kills(call: Callable[[], Any], most: int, among: int | None = None) -> Iterator[int]:
    """Kill a process at evenly spaced opcodes of a call, or of the last ones `among` them."""
    reader, writer = os.pipe()
    assert not killed(lambda: os.write(writer, b"%d" % opcodes(call)), -1)
    os.close(writer)
    with os.fdopen(reader) as told:
        total = int(told.read())
    span = min(total, among or total)
    for at in range(total - 1, total - 1 - span, -max(1, -(-span // most))):
        assert killed(call, at)
        yield at


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
