"""The blocks of a rule, by its clock."""

from tailavg.core.clock import BlockClock


def _clock(rule, starts) -> BlockClock:
    clock = BlockClock(rule)
    clock.blocks = [0] * (rule.accumulators - len(starts)) + list(starts)
    clock.closes = rule.closes(clock.blocks)
    return clock


def advance(rule, starts, t: int) -> list[int]:
    """The starts of the blocks at step t, from those at an earlier step."""
    clock = _clock(rule, starts)
    clock.advance(t)
    return clock.starts


def closes(rule, starts) -> int:
    """The step after which the open block takes no more samples."""
    return _clock(rule, starts).closes


def turn(rule, starts, t: int) -> list[int]:
    """The starts of the blocks after the open one was closed at step t."""
    clock = _clock(rule, starts)
    assert t == clock.closes
    clock.count = t
    clock.turn()
    return [*clock.starts, t]
