"""The averages of many keys side by side in arrays, scanned by compiled loops.

What happens at a step depends on its number alone, so all keys of a rule share one plan. A key
takes some hundred bytes, and a row a fraction of a microsecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from tailavg.core.clock import BlockClock, clock_for
from tailavg.core.rules import ExactWindow, Exponential, RawTail, Rule
from tailavg.core.windows import Window
from tailavg.numpy import TailAverage
from tailavg.numpy.arithmetic import Array
from tailavg.numpy.loops import described

__all__ = ["OWN", "Packed"]

OWN = ("count", "starts", "blocks", "folded", "partial")
"""What differs between the states of averages of a rule."""

LONGEST = 1 << 20
"""The steps of a shared plan; a key with more rows than that has its own."""


class Packed:
    """The averages of all keys: of each column, one by each rule.

    Args:
        rules: The rules.
        reads: What to read of each column: the place of a rule, and a window if it has none.
        columns: The number of columns.
        compiled: The loops of `tailavg.numpy.loops`.
    """

    def __init__(
        self,
        rules: list[Rule],
        reads: list[tuple[int, Window | None]],
        columns: int,
        compiled: SimpleNamespace,
    ) -> None:
        self._rules, self._reads, self._columns = rules, reads, columns
        self._compiled = compiled
        self._slots: dict[str, int] = {}
        self._counts = np.zeros(0, np.int64)
        self._held = [_empty(rule) for _ in range(columns) for rule in rules]
        self._plans: dict[tuple[Rule, Window | None], tuple[Array, Array]] = {}

    @staticmethod
    def holds(rules: list[Rule]) -> bool:
        """Whether such averages can be held: those that keep no samples."""
        return not any(isinstance(rule, ExactWindow | RawTail) for rule in rules)

    def __len__(self) -> int:
        return len(self._slots)

    def scan(self, keys: list[str], rows: Array) -> tuple[Array, Array]:
        """Take rows, each of a key; the averages after each, and how many rows its key then has."""
        places = dict.fromkeys(keys)
        slots = self._slots_of(list(places))
        codes_of = dict(zip(places, range(len(places)), strict=True))
        codes = np.fromiter(map(codes_of.__getitem__, keys), np.int64, len(keys))
        counts = self._counts[slots]
        starts, order = np.empty(len(slots) + 1, np.int64), np.empty(len(keys), np.int64)
        grouped, averages = np.empty(len(keys)), np.empty(len(keys))
        out = np.empty((len(keys), self._columns * len(self._reads)))
        for i, parts in enumerate(self._held):
            column, its = divmod(i, len(self._rules))
            if its == 0:
                starts[:] = 0
                numbers = np.ascontiguousarray(rows[:, column])
                self._compiled.group_rows(codes, numbers, False, starts, order, grouped)
            held = [part[slots] for part in parts]
            now = held
            for place, (rule, window) in enumerate(self._reads):
                if rule == its:
                    now = [part.copy() for part in held]
                    self._scan_groups(its, window, grouped, averages, starts, now, counts)
                    out[:, column * len(self._reads) + place] = averages[order]
            for part, new in zip(parts, now, strict=True):
                part[slots] = new
        self._counts[slots] += np.diff(starts)
        return out, counts[codes] + (order - starts[codes]) + 1

    def _slots_of(self, keys: list[str]) -> Array:
        """The slots of keys, which are made for those that have none."""
        slots = self._slots
        found = np.array([slots.setdefault(key, len(slots)) for key in keys])
        if len(slots) > len(self._counts):
            room = len(slots) + len(slots) // 4 + 16
            self._counts = _grown(self._counts, room)
            self._held = [[_grown(part, room) for part in parts] for parts in self._held]
        return found

    def _scan_groups(
        self,
        its: int,
        window: Window | None,
        xs: Array,
        out: Array,
        starts: Array,
        held: list[Array],
        counts: Array,
    ) -> None:
        """Scan the rows of each group, with what it holds."""
        rule: Any = self._rules[its]
        means, _, sums, rests = held
        asked = described(rule.window if window is None else window)
        if isinstance(rule, Exponential):
            self._compiled.scan_decaying_groups(
                xs, out, starts, means, sums, rests, counts, rule.window.steady_from, asked
            )
            return
        ends = counts + np.diff(starts)
        plan, until = self._plan(rule, window, int(ends.max()))
        self._compiled.scan_groups(xs, out, starts, *held, counts, plan, until, asked)
        for group in np.flatnonzero(ends > until[-1]).tolist():
            its_rows = slice(starts[group], starts[group + 1])
            average = TailAverage(rule)
            if counts[group]:
                average.update(0.0)  # which gives its state all fields
                own = _state(rule, int(counts[group]), [part[group] for part in held])
                average = TailAverage.from_state_dict(average.state_dict() | own)
            out[its_rows] = average.scan(xs[its_rows], window)
            state = average.state_dict()
            _store([part[group] for part in held], state)
            rests[group] = state["count"] - state["folded"]

    def _plan(self, rule: Any, window: Window | None, steps: int) -> tuple[Array, Array]:
        """The runs of `BlockClock.runs` from step 0 on, and where they end."""
        found = self._plans.get((rule, window))
        if found is None or found[1][-1] < min(steps, LONGEST):
            clock = clock_for(rule)
            assert isinstance(clock, BlockClock)
            goal = min(2 * steps + 1000, LONGEST)
            asked = rule.window if window is None else window
            parts = [np.tile(runs, (repeats, 1)) for runs, repeats in clock.runs(goal, asked)]
            plan = np.concatenate(parts)
            found = self._plans[rule, window] = plan, np.cumsum(plan[:, 0])
        return found

    def put(self, key: str, states: list[dict[str, Any]]) -> None:
        """Hold averages in these states."""
        (slot,) = self._slots_of([key]).tolist()
        self._counts[slot] = states[0]["count"]
        for (means, sizes, sums, rests), state in zip(self._held, states, strict=True):
            _store([means[slot], sizes[slot], sums[slot]], state)
            rests[slot] = state["count"] - state["folded"]

    def states_of(self, key: str) -> list[dict[str, Any]]:
        """The states of the averages of a key, of each what is in `OWN`; none if it is new."""
        slot = self._slots.get(key)
        if slot is None:
            return []
        count, rules = int(self._counts[slot]), self._rules * self._columns
        return [
            _state(rule, count, [part[slot] for part in parts])
            for rule, parts in zip(rules, self._held, strict=True)
        ]

    def states(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Each key, with the states of its averages."""
        for key in self._slots:
            yield key, self.states_of(key)


def _empty(rule: Rule) -> list[Array]:
    """Room for no key: the means of its blocks, their sizes, the sum, how many are in it."""
    blocks = len(clock_for(rule).blocks)
    return [
        np.zeros((0, blocks, 1)),
        np.zeros((0, blocks), np.int64),
        np.zeros((0, 1)),
        np.zeros(0, np.int64),
    ]


def _grown(part: Array, room: int) -> Array:
    """The same, with room for so many keys."""
    larger = np.zeros((room, *part.shape[1:]), part.dtype)
    larger[: len(part)] = part
    return larger


def _state(rule: Rule, count: int, parts: list[Any]) -> dict[str, Any]:
    """What an average holds, as in its state."""
    means, sizes, sums, rest = parts
    used = len(sizes) - int(np.count_nonzero(sizes))
    if isinstance(rule, Exponential):
        starts, used = [0], 0
    else:
        starts = (count - np.cumsum(sizes[::-1])[::-1])[used:].tolist()
    blocks = means[used:, 0].tolist()
    values = count, starts, blocks, count - int(rest), sums[0].item()
    return dict(zip(OWN, values, strict=True))


def _store(parts: list[Any], state: dict[str, Any]) -> None:
    """The opposite of `_state`, but for the last part."""
    means, sizes, sums = parts[:3]
    means[:], sizes[:] = 0.0, 0
    held = len(state["blocks"])
    means[len(means) - held :, 0] = state["blocks"]
    sizes[len(sizes) - held :] = np.diff([*state["starts"], state["count"]])
    sums[0] = state["partial"]
