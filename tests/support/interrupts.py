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

SHORT = int(os.environ.get("TAILAVG_INTERRUPTS", "400"))  # with 100000 it takes minutes
OURS = str(Path(tailavg.__file__).parent)


class Interrupt(BaseException):
    """Raised in the middle of a call."""


def opcodes(call: Callable[[], Any]) -> int:
    """How many opcodes of ours a call runs."""
    return _traced(call, -1)[0]


def interrupted(
    make: Callable[[], Any], call: Callable[[Any], Any], short: int = SHORT, some: int = 50
) -> Iterator[tuple[int, Any]]:
    """Call on something new, interrupted here or there: yields where, and what is left of it.

    A short call is interrupted before each of its opcodes, a longer one before some, evenly spread.
    """
    call(make())  # fills what is cached
    subject = make()
    total = opcodes(lambda: call(subject))
    for at in range(0, total, 1 if total <= short else -(-total // some)):
        subject = make()
        _, early = _traced(lambda subject=subject: call(subject), at)
        assert early, f"{total} opcodes before, fewer than {at} now"
        yield at, subject


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
