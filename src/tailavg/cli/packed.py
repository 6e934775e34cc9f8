"""The averages of many keys in arrays, scanned by compiled loops: see `tailavg.numpy.packed`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from tailavg.core.rules import Rule
from tailavg.core.windows import Window
from tailavg.numpy import TailAverage
from tailavg.numpy.arithmetic import Array
from tailavg.numpy.packed import Packed

__all__ = ["OWN", "PackedKeys"]

OWN = ("count", "starts", "blocks", "folded", "partial")
"""What differs between the states of averages of a rule."""

_SOME = 10_000  # keys that are looked at together


class PackedKeys:
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
        self._reads, self._columns = reads, columns
        self._compiled = compiled
        self._slots: dict[str, int] = {}
        self._held = [Packed(rule) for _ in range(columns) for rule in rules]

    def __len__(self) -> int:
        return len(self._slots)

    def scan(self, keys: list[str], rows: Array) -> tuple[Array, Array]:
        """Take rows, each of a key; the averages after each, and how many rows its key then has."""
        places = dict.fromkeys(keys)
        slots = self._slots_of(list(places))
        codes_of = dict(zip(places, range(len(places)), strict=True))
        codes = np.fromiter(map(codes_of.__getitem__, keys), np.int64, len(keys))
        counts = self._held[0].counts[slots]
        starts, order = np.empty(len(slots) + 1, np.int64), np.empty(len(keys), np.int64)
        grouped = np.empty(len(keys))
        out = np.empty((len(keys), self._columns * len(self._reads)))
        rules = len(self._held) // self._columns
        for i, packed in enumerate(self._held):
            column, its = divmod(i, rules)
            if its == 0:
                starts[:] = 0
                numbers = np.ascontiguousarray(rows[:, column])
                self._compiled.group_rows(codes, numbers, False, starts, order, grouped)
            held = packed.take(slots)
            places_of = [place for place, (rule, _) in enumerate(self._reads) if rule == its]
            windows = [self._reads[place][1] for place in places_of]
            found = held.scan(grouped, starts, windows, self._compiled)
            for place, averages in zip(places_of, found, strict=True):
                out[:, column * len(self._reads) + place] = averages[order]
            packed.put(slots, held)
        return out, counts[codes] + (order - starts[codes]) + 1

    def _slots_of(self, keys: list[str]) -> Array:
        """The slots of keys, which are made for those that have none."""
        slots = self._slots
        found = np.array([slots.setdefault(key, len(slots)) for key in keys])
        if len(slots) > len(self._held[0]):
            for packed in self._held:
                packed.grow(len(slots) + len(slots) // 4 + 16)
        return found

    def put(self, key: str, averages: list[TailAverage]) -> None:
        """Hold what these averages hold."""
        (slot,) = self._slots_of([key]).tolist()
        for packed, average in zip(self._held, averages, strict=True):
            packed.hold(slot, average)

    def averages_of(self, key: str) -> list[TailAverage]:
        """The averages of a key; none if it is new."""
        slot = self._slots.get(key)
        return [] if slot is None else [packed.average(slot) for packed in self._held]

    def states(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Each key, with the states of its averages, of each what is in `OWN`."""
        keys = list(self._slots)
        for first in range(0, len(keys), _SOME):
            which = np.arange(first, min(first + _SOME, len(keys)))
            averages = zip(*(packed.averages(which) for packed in self._held), strict=True)
            for key, held in zip(keys[first:], averages, strict=False):
                states = [average.state_dict() for average in held]
                yield key, [{name: state[name] for name in OWN} for state in states]
