"""End a command on a signal with the exit code 128 + signal, never with a traceback.

`tailavg.__main__` calls `begin` first. Commands choose with `act` what a signal does.
"""

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
"""Seconds within which signals count as one: a closed terminal sends two or three."""


class Stopped(SystemExit):
    """A signal arrived. Like any exception, this one lets temporary files be removed."""


class Act(Enum):
    """The effect of a signal."""

    leave = "end the process at once: there is nothing to clean up"
    stop = "raise Stopped"
    note = "record the signal: the command checks `arrived` and stops"
    insist = "record the signal, and raise Stopped if another one arrives"


WAITING = Act.insist if os.name == "posix" else Act.stop
"""The effect of a signal while a read or write blocks."""

_act = Act.leave
_arrived: int | None = None
_last = -AGAIN
_stopped: int | None = None


def begin() -> None:
    """Handle signals, except ignored ones, such as SIGHUP under nohup."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, lambda *_: _raise())
        sys.unraisablehook = _raise_later


def end() -> None:
    """Ignore signals from now on, so that they cannot change the exit code while Python ends."""
    for number in SIGNALS:
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_IGN)


def act(how: Act) -> None:
    """Set the effect of signals from now on."""
    global _act
    _act = how
    if how is Act.stop and _arrived is not None:
        _raise()


def arrived() -> int | None:
    """Return the first signal that arrived, or None."""
    return _arrived


def stopped() -> int | None:
    """Return the exit code if `Stopped` was raised, even if a library replaced the exception."""
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


def _raise_later(unraisable: sys.UnraisableHookArgs) -> None:
    """Raise `Stopped` a moment later if it was raised in a finaliser, which Python ignores."""
    if isinstance(unraisable.exc_value, Stopped):
        signal.setitimer(signal.ITIMER_REAL, 0.001)
    else:
        sys.__unraisablehook__(unraisable)
