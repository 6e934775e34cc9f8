"""The averages of `tailavg stream`: one for each key, column and window."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import Any

import numpy as np

from tailavg.cli.options import Reads
from tailavg.numpy import TailAverages
from tailavg.numpy.arithmetic import Array
from tailavg.numpy.average import NanPolicy
from tailavg.numpy.kernel import LONG, kernel
from tailavg.numpy.keyed import Part, part_of

_ENTRY = ("count", "starts", "blocks", "folded", "partial")  # the state of a key
_EMPTY: tuple[Any, ...] = (0, [], [], 0, 0.0)


class Averages:
    """The averages of all keys; without `--by`, the only key is "".

    Args:
        reads: The averages of each column.
        columns: The number of columns.
        every: Return averages only for every N-th row of a key.
        nan: The `nan_policy` of each average.
    """

    def __init__(
        self, reads: Reads, columns: int, every: int = 1, nan: NanPolicy = "propagate"
    ) -> None:
        self.rules = list(dict.fromkeys(rule for rule, _ in reads))
        self._reads = [(self.rules.index(rule), window) for rule, window in reads]
        self._columns, self._every = columns, every
        self._scanned = 0  # the rows that `scan` has taken
        self._tables = [
            TailAverages(rule, nan_policy=nan) for _ in range(columns) for rule in self.rules
        ]

    def __len__(self) -> int:
        return len(self._keys())

    def _keys(self) -> dict[str, None]:
        """Return the keys that have samples in any column."""
        return dict.fromkeys(chain.from_iterable(self._tables))

    def step(self, key: str, row: list[float | None]) -> list[float]:
        """Take a row, and return the averages after it, or [] if `every` does not select it.

        If the row lacks a number, its average does not change. An average without samples is NaN.
        """
        rules = len(self.rules)
        for i, table in enumerate(self._tables):
            if (number := row[i // rules]) is not None:
                table.update(key, number)
        if self._every > 1 and self._tables[0][key].count % self._every:
            return []
        columns = range(0, len(self._tables), rules)
        return [
            table.value(key, window) if key in (table := self._tables[i + rule]) else math.nan
            for i in columns
            for rule, window in self._reads
        ]

    def scan(self, rows: Array, keys: list[str]) -> tuple[Array, Iterable[bool]]:
        """Take rows. Return averages after the rows that `every` selects, and a mask of these rows.

        Without `--by`, `keys` is empty.
        """
        codes: Array | None = None
        names: Any = [""]
        if keys:
            codes, names, _ = part_of(keys, rows[:, 0])
        if self._every == 1:
            return self._scan(codes, names, rows), repeat(True)
        answered = self._counts(codes, names, len(rows)) % self._every == 0
        return self._scan(codes, names, rows)[answered], answered.tolist()

    def _counts(self, codes: Array | None, names: Any, rows: int) -> Array:
        """Return for each row how many rows its key has had up to this row."""
        before = self._tables[0].counts(names)
        if codes is None:
            codes = np.zeros(rows, np.int64)
        sizes = np.bincount(codes, minlength=len(names))
        counts = np.empty(rows, np.int64)
        starts = np.cumsum(sizes) - sizes
        counts[np.argsort(codes, kind="stable")] = np.arange(1, rows + 1) - starts.repeat(sizes)
        return counts + before[codes]

    def _scan(self, codes: Array | None, names: Any, rows: Array) -> Array:
        """Return the averages after each row, in one column for each average."""
        several = len(self._reads)
        self._scanned += len(rows)
        if self._scanned >= LONG:
            kernel(LONG)  # imports numba, which is then used for all but the smallest blocks
        out = np.empty((len(rows), self._columns * several))
        for i, table in enumerate(self._tables):
            column, rule = divmod(i, len(self.rules))
            places = [place for place, read in enumerate(self._reads) if read[0] == rule]
            part: Part = codes, names, np.ascontiguousarray(rows[:, column])
            windows = [self._reads[place][1] for place in places]
            (averages,) = table.scan_parts([part], windows, same_bits=True)
            out[:, [column * several + place for place in places]] = averages.T
        return out

    def saved(self) -> Iterator[tuple[str, list[Any]]]:
        """Yield each key, with its averages as plain data."""
        for key in self._keys():
            steps = [table.steps_of(key) if key in table else _EMPTY for table in self._tables]
            yield key, [dict(zip(_ENTRY, each, strict=True)) for each in steps]

    def restore(self, key: Any, saved: Any) -> None:
        """Add a key from `saved`. An invalid key or state may raise any exception."""
        if not isinstance(key, str) or not isinstance(saved, list):
            raise ValueError(f"expected a key and a list, got {key!r}")
        if len(saved) != len(self._tables) or any(set(entry) != set(_ENTRY) for entry in saved):
            raise ValueError(f"expected averages of {self._columns} columns, got {len(saved)}")
        for table, entry in zip(self._tables, saved, strict=True):
            for x in (*entry["blocks"], entry["partial"]):
                if x.__class__ is not float:
                    raise ValueError(f"expected a number, got {x!r}")
            steps = tuple(entry[name] for name in _ENTRY)
            if steps != _EMPTY:  # a key may have no samples in a column
                table.restore([(key, *steps)])
