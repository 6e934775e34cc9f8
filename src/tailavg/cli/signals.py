"""Signals end a command with an exit code that tells which, and never with a traceback."""

from __future__ import annotations

import os
import signal
import sys
from enum import Enum
from time import monotonic

SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]

AGAIN = 1.0
"""Seconds within which another signal is the same one: a closed terminal sends two or three."""


class Stopped(SystemExit):
    """A signal has arrived; what is temporary is removed on the way out."""


class Act(Enum):
    """What a signal does."""

    leave = "end the process at once: there is nothing to clean up"
    stop = "raise Stopped"
    note = "nothing now: who asks for `arrived` will stop"
    insist = "as note, and raise Stopped if it comes again"


WAITING = Act.insist if os.name == "posix" else Act.stop
"""What a signal does to a read or write that waits."""

_act = Act.leave
_arrived: int | None = None
_last = -AGAIN
_stopped: int | None = None


def begin() -> None:
    """Handle signals, except those that are ignored, as under nohup."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, lambda *_: _raise())
        sys.unraisablehook = _again


def end() -> None:
    """Ignore signals from now on: while Python ends, none can change the exit code."""
    for number in SIGNALS:
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_IGN)


def act(how: Act) -> None:
    """Say what a signal does from now on."""
    global _act
    _act = how
    if how is Act.stop and _arrived is not None:
        _raise()


def arrived() -> int | None:
    """The first signal that has arrived."""
    return _arrived


def stopped() -> int | None:
    """The exit code if `Stopped` was raised, which a library may have made another exception of."""
    return _stopped


def _handle(number: int, _: object) -> None:
    global _arrived, _last
    now = monotonic()
    if now - _last < AGAIN:
        return
    before, _arrived, _last = _arrived, _arrived or number, now
    if _act is Act.leave:
        os._exit(128 + number)
    if _act is Act.stop or (_act is Act.insist and before is not None):
        _raise()


def _raise() -> None:
    global _stopped
    assert _arrived is not None
    _stopped = 128 + _arrived
    raise Stopped(_stopped)


def _again(unraisable: sys.UnraisableHookArgs) -> None:
    """In a finaliser nothing can be raised: do it a moment later."""
    if isinstance(unraisable.exc_value, Stopped):
        signal.setitimer(signal.ITIMER_REAL, 0.001)
    else:
        sys.__unraisablehook__(unraisable)
