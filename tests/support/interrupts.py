"""Interrupts at every opcode: what Ctrl-C, a timeout or a failing callback may do to a call."""

from __future__ import annotations

import sys
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


def _traced(call: Callable[[], Any], at: int) -> tuple[int, bool]:
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
                raise Interrupt
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
