"""The schedule of blocks: which there are at step t, when they turn, which are still needed.

Integers only, for any rule that keeps blocks; a block is known by its start, the number of
samples that came before it. Storages ask here and move their arrays accordingly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tailavg.core.anytail import AnyTail
from tailavg.core.rules import BlockRule, read
from tailavg.core.windows import NEVER

__all__ = [
    "SUM",
    "advance",
    "check_starts",
    "makes_room",
    "oldest_needed",
    "period",
    "terms",
    "turn",
]

SUM = -1
"""Stands for the sum of the samples that are in no mean yet, in the place of a block."""


def makes_room(
    rule: BlockRule | AnyTail, starts: Sequence[int], t: int
) -> tuple[int | None, float]:
    """The block whose place is taken when one is opened at step t; None if there is room.

    The oldest is given up; of `AnyTail`, a later one, which is merged with the one before it: with
    this weight in the mean of both.

    Examples:
        >>> makes_room(AnyTail(6), [0, 4, 6, 7, 8, 9], 10)
        (2, 0.3333333333333333)
    """
    if len(starts) < rule.accumulators:
        return None, 0.0
    if not isinstance(rule, AnyTail):
        return 0, 0.0
    gone = rule.merged(starts, t)
    before, start, end = [*starts, t][gone - 1 : gone + 2]
    return gone, (end - start) / (end - before)


def turn(rule: BlockRule | AnyTail, starts: Sequence[int], t: int) -> list[int]:
    """The blocks after the open one was closed at step t and another one makes room.

    Examples:
        >>> from tailavg import AnytimeWindow
        >>> turn(AnytimeWindow(100), [0, 50, 100], 150)
        [50, 100, 150]
    """
    gone, _ = makes_room(rule, starts, t)
    return [*(start for block, start in enumerate(starts) if block != gone), t]


def period(rule: BlockRule | AnyTail, starts: Sequence[int]) -> tuple[int, int]:
    """The size that all blocks have from here on, and the step until which; (0, 0) if none.

    Where turns depend on the blocks' sizes alone, blocks that are all alike stay alike.

    Examples:
        >>> from tailavg import AnytimeWindow
        >>> period(AnytimeWindow(100), [50, 100, 150])[0], period(AnytimeWindow(0.5), [1, 2, 3])[0]
        (50, 0)
    """
    if len(starts) == rule.accumulators and (until := rule.uniform_until(starts[-1])):
        sizes = {end - start for start, end in pairwise([*starts, rule.closes(starts)])}
        if len(sizes) == 1:
            return sizes.pop(), until
    return 0, 0


def advance(rule: BlockRule | AnyTail, starts: Sequence[int], t: int) -> list[int]:
    """The blocks at step t, from those at an earlier step.

    Examples:
        >>> from tailavg import AnytimeWindow
        >>> advance(AnytimeWindow(100), [0], 10**9)
        [999999850, 999999900, 999999950]
    """
    starts = list(starts)
    while (end := rule.closes(starts)) < t:
        size, until = period(rule, starts)
        if size and (turns := (min(t - 1, until) - starts[-1]) // size):
            starts = [start + turns * size for start in starts]
        else:
            starts = turn(rule, starts, end)
    return starts


def oldest_needed(rule: BlockRule, starts: Sequence[int], t: int) -> tuple[int, int]:
    """The oldest block that has a weight at step t, and the first step at which it has none.

    Examples:
        >>> from tailavg import AnytimeWindow
        >>> oldest_needed(AnytimeWindow(100), [50, 100, 150], 170)
        (0, 200)
    """
    for block, end in enumerate(starts[1:]):
        if t < (enough := rule.window.filled_at(end)):
            return block, enough
    return len(starts) - 1, NEVER


def terms(starts: Sequence[int], folded: int, t: int, k: float) -> list[tuple[float, int]]:
    """The average of k samples at step t: weights, each with the block whose mean it is of.

    Or with `SUM`. What has no weight is left out: a zero times a NaN would be a NaN.

    Examples:
        >>> terms([0, 50, 100], folded=100, t=110, k=100)
        [(0.29708629022101113, 0), (0.585761424815824, 1), (0.011715228496316479, -1)]
    """
    sizes = [end - start for start, end in pairwise([*starts, t])]
    weights = read(sizes, k)
    found = [(weight, block) for block, weight in enumerate(weights[:-1]) if weight]
    weight = weights[-1] / sizes[-1]  # of each sample of the open block
    if folded > starts[-1]:
        found.append((weight * (folded - starts[-1]), len(starts) - 1))
    if t > folded:
        found.append((weight, SUM))
    return found


def check_starts(rule: BlockRule | AnyTail, starts: Sequence[int], t: int) -> None:
    """Raise a ValueError unless these are the starts of the blocks at step t."""
    expected = advance(rule, [0], t) if t else []
    if list(starts) != expected:
        raise ValueError(
            f"state: sizes do not add up: {rule} has blocks that start at {expected} "
            f"after {t} samples, got {list(starts)}"
        )
