"""The averages of `tailavg stream`: of each key and column, one by each rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tailavg.core.rules import Rule
from tailavg.core.windows import Window
from tailavg.numpy import TailAverages
from tailavg.numpy.arithmetic import Array
from tailavg.numpy.kernel import LONG, kernel
from tailavg.numpy.keyed import part_of

__all__ = ["Averages", "Reads"]

Reads = list[tuple[Rule, Window | None]]
"""For each average of a column: its rule, and the window to read if the rule has none."""

_OWN = ("count", "starts", "blocks", "folded", "partial")  # what a state has for each key


class Averages:
    """The averages of all keys; without `--by`, the one key is "".

    Args:
        reads: What to read of each column.
        columns: The number of columns.
    """

    def __init__(self, reads: Reads, columns: int) -> None:
        self.rules = list(dict.fromkeys(rule for rule, _ in reads))
        self._reads = [(self.rules.index(rule), window) for rule, window in reads]
        self._columns = columns
        self._taken = 0  # rows that came in blocks
        self._held = [TailAverages(rule) for _ in range(columns) for rule in self.rules]

    def __len__(self) -> int:
        return len(self._held[0])

    def step(self, key: str, row: list[float], every: int) -> list[float]:
        """Take a row, and return the averages after it; none unless it is an `every`-th."""
        rules = len(self.rules)
        for i, averages in enumerate(self._held):
            averages.update(key, row[i // rules])
        if every > 1 and self._held[0][key].count % every:
            return []
        starts = range(0, len(self._held), rules)
        return [
            self._held[i + rule].value(key, window) for i in starts for rule, window in self._reads
        ]

    def scan_keys(self, keys: list[str], rows: Array, every: int) -> tuple[Array, list[bool]]:
        """Take rows, each of a key; the averages after every `every`-th, and which those are."""
        codes, names, _ = part_of(keys, rows[:, 0])
        assert codes is not None
        if every == 1:
            return self._scan(codes, names, rows), [True] * len(codes)
        order = np.argsort(codes, kind="stable")
        starts = np.searchsorted(codes, np.arange(len(names)), sorter=order)
        counts = np.empty(len(codes), np.int64)  # of each row's key, after it
        counts[order] = np.arange(1, len(codes) + 1) - starts[codes[order]]
        counts += self._held[0].counts(names)[codes]
        averages, shown = self._scan(codes, names, rows), counts % every == 0
        return averages[shown], shown.tolist()

    def scan(self, key: str, rows: Array) -> tuple[Array, int]:
        """Take rows, and return the averages after each; and how many rows came before."""
        (before,) = self._held[0].counts([key]).tolist()
        return self._scan(None, [key], rows), before

    def _scan(self, codes: Array | None, keys: Any, rows: Array) -> Array:
        """The averages after each row, a column for each read."""
        several = len(self._reads)
        self._taken += len(rows)
        if self._taken >= LONG:
            kernel(LONG)  # imports numba, which is then used for all but the smallest blocks
        out = np.empty((len(rows), self._columns * several))
        for i, averages in enumerate(self._held):
            column, rule = divmod(i, len(self.rules))
            places = [place for place, read in enumerate(self._reads) if read[0] == rule]
            part = codes, keys, np.ascontiguousarray(rows[:, column])
            windows = [self._reads[place][1] for place in places]
            (found,) = averages.scan_parts([part], windows, same_bits=True)
            out[:, [column * several + place for place in places]] = found.T
        return out

    def saved(self) -> Iterator[tuple[str, list[Any]]]:
        """Each key, with its averages as plain data."""
        for key in self._held[0]:
            own = [averages.steps_of(key) for averages in self._held]
            yield key, [dict(zip(_OWN, steps, strict=True)) for steps in own]

    def restore(self, key: Any, saved: Any) -> None:
        """Hold what was saved of a key; raise an exception of whatever kind if it is not valid."""
        if not isinstance(key, str) or not isinstance(saved, list):
            raise ValueError(f"expected a key and a list, got {key!r}")
        if len(saved) != len(self._held) or any(set(state) != set(_OWN) for state in saved):
            raise ValueError(f"expected averages of {self._columns} columns, got {len(saved)}")
        if len({state["count"] for state in saved}) > 1:
            raise ValueError("expected averages of equally many numbers")
        for averages, state in zip(self._held, saved, strict=True):
            for x in (*state["blocks"], state["partial"]):
                if x.__class__ is not float:
                    raise ValueError(f"expected a number, got {x!r}")
            averages.restore([(key, *(state[name] for name in _OWN))])
