"""The averages of `tailavg stream`, of each key and column.

A key often has only a few samples: these are kept as they are, in a quarter of the memory of an
average. Weights do not depend on samples, so all keys with equally many are read with the same.
If numba is installed, and rows come in large blocks, keys are soon held in arrays: see `packed`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from operator import mul
from typing import Any

import numpy as np

from tailavg.cli.packed import OWN, PackedKeys
from tailavg.core.rules import AnyTail, Rule
from tailavg.core.windows import Window
from tailavg.numpy import TailAverage, compiling, loops
from tailavg.numpy.arithmetic import Array
from tailavg.numpy.packed import Packed

__all__ = ["Averages", "Reads"]

FEW = 32  # rows of a key that are kept
SINGLE = 10_000  # keys that are held by themselves, beside those in arrays

Reads = list[tuple[Rule, Window | None]]
"""For each average of a column: its rule, and the window to read if the rule has none."""


class Averages:
    """The averages of all keys; with `keep`, of samples that are kept while they are few."""

    def __init__(self, reads: Reads, columns: int, keep: bool) -> None:
        self.rules = list(dict.fromkeys(rule for rule, _ in reads))
        self._places = [(self.rules.index(rule), window) for rule, window in reads]
        self._columns = columns
        self._most = FEW * columns if keep else 0
        self._packs = keep and compiling.installed() and all(map(Packed.holds, self.rules))
        self._packed: PackedKeys | None = None
        self._taken = 0  # rows that came in blocks
        # of each key, the averages by each rule of each column; or the samples, row by row
        self._held: dict[str, list[TailAverage] | array[float]] = {}
        self._model = [TailAverage(rule) for rule in self.rules]  # of as many samples as looked up
        self._weights: list[list[list[float]]] = [[]]  # for each number of samples, of each read
        self._alike = []  # what all averages of a rule have in common, in a state
        for rule in self.rules:
            average = TailAverage(rule)
            average.update(0.0)
            self._alike.append(average.state_dict())

    def __len__(self) -> int:
        return len(self._held if self._packed is None else self._pack())

    def step(self, key: str, row: list[float], every: int) -> list[float]:
        """Take a row, and return the averages after it; none unless it is an `every`-th."""
        if self._packed is not None and key not in self._held:
            self._unpack(key)
        held = self._held.get(key)
        if not isinstance(held, list):
            if held is None:
                held = self._held[key] = array("d")
            if len(held) < self._most:
                held.extend(row)
                count = len(held) // self._columns
                return [] if count % every else self._read(held, count)
            held = self._held[key] = self._replayed(held)
        return self._update(held, row, every)

    def _update(self, held: list[TailAverage], row: list[float], every: int) -> list[float]:
        """Take a row into averages, and return what they are, as `step` does."""
        if len(self.rules) > 1:
            row = [x for x in row for _ in self.rules]
        for average, x in zip(held, row, strict=True):
            average.update(x)
        return [] if held[0].count % every else self._values(held)

    def scan_keys(self, keys: list[str], rows: Array, every: int) -> tuple[Array, list[bool]]:
        """Take rows, each of a key; the averages after every `every`-th, and which those are."""
        self._taken += len(rows)
        # a row takes five times as long as a number that is scanned
        if self._packed is not None or (self._packs and 5 * self._taken >= loops.LONG):
            self._packed = self._pack()
            averages, counts = self._packed.scan(keys, rows)
            shown = counts % every == 0
            return averages[shown], shown.tolist()
        pairs = zip(keys, rows.tolist(), strict=True)
        if self._packs:
            steps = self._steps(list(pairs), every)
        else:
            steps = [self.step(key, row, every) for key, row in pairs]
        return np.array([now for now in steps if now]), [bool(now) for now in steps]

    def _steps(self, rows: list[tuple[str, list[float]]], every: int) -> list[list[float]]:
        """As `step` with each, but what is kept is replayed only once for each key."""
        live: dict[str, list[TailAverage]] = {}
        found = []
        for key, row in rows:
            averages = live.get(key)
            if averages is None:
                held = self._held.setdefault(key, array("d"))
                averages = live[key] = held if isinstance(held, list) else self._replayed(held)
            found.append(self._update(averages, row, every))
            held = self._held[key]
            if not isinstance(held, list):
                held.extend(row)
                if len(held) > self._most:
                    self._held[key] = averages
        return found

    def _pack(self) -> PackedKeys:
        """Hold all keys in arrays."""
        packed = self._packed
        if packed is None:
            fastest = loops.fastest(loops.LONG)
            packed = PackedKeys(self.rules, self._places, self._columns, fastest)
        for key, held in self._held.items():
            averages = held if isinstance(held, list) else self._replayed(held)
            packed.put(key, averages)
        self._held = {}
        return packed

    def _unpack(self, key: str) -> None:
        """Hold a key by itself: rows that come one by one are then taken faster."""
        assert self._packed is not None
        if len(self._held) >= SINGLE:
            self._pack()
        if averages := self._packed.averages_of(key):
            self._held[key] = averages

    def scan(self, key: str, rows: Array) -> tuple[Array, int]:
        """Take rows, and return the averages after each; and how many rows came before."""
        held = self._held.get(key)
        if not isinstance(held, list):
            held = self._held[key] = self._replayed(held or array("d"))
        before, several = held[0].count, len(self._places)
        out = np.empty((len(rows), self._columns * several))
        for i, average in enumerate(held):
            column, its = divmod(i, len(self.rules))
            reads = [j for j, (rule, _) in enumerate(self._places) if rule == its]
            windows: Any = [self._places[j][1] for j in reads]
            shared = isinstance(average.rule, AnyTail)
            found = np.atleast_2d(average.scan(rows[:, column], windows if shared else None))
            out[:, [column * several + j for j in reads]] = found.T
        return out, before

    def _replayed(self, samples: array[float]) -> list[TailAverage]:
        """The averages of samples that were kept."""
        held = [TailAverage(rule) for _ in range(self._columns) for rule in self.rules]
        for i, average in enumerate(held):
            for x in samples[i // len(self.rules) :: self._columns]:
                average.update(x)
        return held

    def _values(self, held: list[TailAverage]) -> list[float]:
        starts = range(0, len(held), len(self.rules))
        return [held[i + place].value(window) for i in starts for place, window in self._places]

    def _read(self, samples: array[float], count: int) -> list[float]:
        """The averages of samples that are kept, `count` of each column."""
        if self._packs:  # to the bit what they will be in arrays
            return self._values(self._replayed(samples))
        while len(self._weights) <= count:
            for average in self._model:
                average.update(0.0)
            found = [self._model[place].weights(window) for place, window in self._places]
            # the oldest often have no weight; 0 times a NaN would be a NaN
            self._weights.append([np.trim_zeros(weights, "f").tolist() for weights in found])
        width = self._columns
        return [
            sum(map(mul, weights, samples[(count - len(weights)) * width + column :: width]))
            for column in range(width)
            for weights in self._weights[count]
        ]

    def saved(self) -> Iterator[tuple[str, list[Any]]]:
        """Each key, with its samples or averages as plain data."""
        if self._packed is not None:
            yield from self._pack().states()
        for key, held in self._held.items():
            if isinstance(held, list):
                states = [average.state_dict() for average in held]
                yield key, [{name: state[name] for name in OWN} for state in states]
            else:
                yield key, held.tolist()

    def restore(self, key: Any, saved: Any) -> None:
        """Hold what was saved of a key; raise an exception of whatever kind if it is not valid."""
        if not isinstance(key, str) or key in self._held or not isinstance(saved, list):
            raise ValueError(f"expected a new key and a list, got {key!r}")
        if saved and isinstance(saved[0], float):
            _check_floats(saved)
            if len(saved) > self._most or len(saved) % self._columns:
                raise ValueError(f"expected at most {FEW} samples of each column, got {len(saved)}")
            self._held[key] = array("d", saved)
            return
        if len(saved) != self._columns * len(self.rules):
            raise ValueError(f"expected averages of {self._columns} columns, got {len(saved)}")
        held = []
        for i, one in enumerate(saved):
            alike = self._alike[i % len(self.rules)]
            state = {**alike, **one}
            if other := [name for name in alike if name not in OWN and state[name] != alike[name]]:
                raise ValueError(f"{other[0]}: expected {alike[other[0]]}, got {state[other[0]]}")
            _check_floats([*state["blocks"], state["partial"]])
            held.append(TailAverage.from_state_dict(state))
        if len({average.count for average in held}) > 1 or not held[0].count:
            raise ValueError(f"expected averages of equally many numbers, got {held}")
        self._values(held)  # which fails if a number is out of range
        self._held[key] = held


def _check_floats(found: list[Any]) -> None:
    for x in found:
        if x.__class__ is not float:
            raise ValueError(f"expected a number, got {x!r}")
