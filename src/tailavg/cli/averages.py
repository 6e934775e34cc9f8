"""The averages of `tailavg stream`: one for each key, column and window."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import Any

import numpy as np

from tailavg.cli.options import Reads
from tailavg.core.rules import is_timed
from tailavg.io.state import stream_entry
from tailavg.numpy import TailAverages
from tailavg.numpy.arithmetic import Array, Statistic
from tailavg.numpy.average import NanPolicy
from tailavg.numpy.kernel import LONG, kernel
from tailavg.numpy.keyed import Part, part_of

_STD = Statistic.named("std", ddof=1)


class Averages:
    """The averages of all keys; without `--by`, the only key is "".

    Args:
        reads: The averages of each column.
        columns: The number of columns.
        every: Return averages only for every N-th row of a key.
        nan: The `nan_policy` of each average.
        std: Whether to return a standard deviation after each average.
    """

    def __init__(
        self,
        reads: Reads,
        columns: int,
        every: int = 1,
        nan: NanPolicy = "propagate",
        std: bool = False,
    ) -> None:
        self.std = std
        self.rules = list(dict.fromkeys(rule for rule, _ in reads))
        self._reads = [(self.rules.index(rule), window) for rule, window in reads]
        self._columns, self._every = columns, every
        self.is_timed = any(map(is_timed, self.rules))
        self._empty = [stream_entry(std, is_timed(rule)) for rule in self.rules] * columns
        self._scanned = 0  # the rows that `scan` has taken
        self._tables = [
            TailAverages(rule, nan_policy=nan, variance=std)
            for _ in range(columns)
            for rule in self.rules
        ]

    def __len__(self) -> int:
        return len(self._keys())

    def _keys(self) -> dict[str, None]:
        """Return the keys that have samples in any column."""
        return dict.fromkeys(chain.from_iterable(self._tables))

    def step(self, key: str, row: list[float | None], time: Any = None) -> list[float]:
        """Take a row, and return the averages after it, or [] if `every` does not select it.

        A window of time needs its `time` as a datetime64.
        If the row lacks a number, its average does not change. An average without samples is NaN.
        """
        rules = len(self.rules)
        for i, table in enumerate(self._tables):
            if (number := row[i // rules]) is not None:
                table.update(key, number, time if is_timed(table.rule) else None)
        if self._every > 1 and self._tables[0][key].count % self._every:
            return []
        answer = []
        for i in range(0, len(self._tables), rules):
            for rule, window in self._reads:
                table = self._tables[i + rule]
                known = key in table
                answer.append(table.value(key, window) if known else math.nan)
                if self.std:
                    answer.append(table.std(key, window) if known else math.nan)
        return answer

    def scan(
        self, rows: Array, keys: list[str], times: Array | None = None
    ) -> tuple[Array, Iterable[bool]]:
        """Take rows. Return averages after the rows that `every` selects, and a mask of these rows.

        Without `--by`, `keys` is empty. A window of time needs the `times` as datetime64s.
        """
        codes: Array | None = None
        names: Any = [""]
        if keys:
            codes, names, _ = part_of(keys, rows[:, 0])
        if self._every == 1:
            return self._scan(codes, names, rows, times), repeat(True)
        answered = self._counts(codes, names, len(rows)) % self._every == 0
        return self._scan(codes, names, rows, times)[answered], answered.tolist()

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

    def _scan(self, codes: Array | None, names: Any, rows: Array, times: Array | None) -> Array:
        """Return the averages after each row, in one column for each average.

        With `std`, a column of standard deviations follows each column of averages.
        """
        self._scanned += len(rows)
        if self._scanned >= LONG:
            kernel(LONG)  # imports numba, which is then used for all but the smallest blocks
        out = np.empty((len(rows), self._columns, len(self._reads), 1 + self.std))
        for i, table in enumerate(self._tables):
            column, rule = divmod(i, len(self.rules))
            places = [place for place, read in enumerate(self._reads) if read[0] == rule]
            part: Part = codes, names, np.ascontiguousarray(rows[:, column])
            windows = [self._reads[place][1] for place in places]
            timed = times if is_timed(table.rule) else None
            how: Any = {"same_bits": True, "times": timed}
            if self.std:  # in a second scan from the same state
                before = table.subset(names)
                (stds,) = before.scan_parts([part], windows, statistic=_STD, **how)
                out[:, column, places, 1] = stds.T
            (averages,) = table.scan_parts([part], windows, **how)
            out[:, column, places, 0] = averages.T
        return out.reshape(len(rows), -1)

    def saved(self) -> Iterator[tuple[str, list[Any]]]:
        """Yield each key, with its averages as plain data."""
        for key in self._keys():
            yield (
                key,
                [
                    dict(zip(empty, table.steps_of(key), strict=True)) if key in table else empty
                    for table, empty in zip(self._tables, self._empty, strict=True)
                ],
            )

    def restore(self, key: Any, saved: Any) -> None:
        """Add a key from `saved`. An invalid key or state may raise any exception."""
        if not isinstance(key, str) or not isinstance(saved, list):
            raise ValueError(f"expected a key and a list, got {key!r}")
        if [entry.keys() for entry in saved] != [entry.keys() for entry in self._empty]:
            raise ValueError(f"expected averages of {self._columns} columns, got {len(saved)}")
        for table, entry, empty in zip(self._tables, saved, self._empty, strict=True):
            spread = (*entry["variances"], entry["squares"]) if self.std else ()
            for x in (*entry["blocks"], entry["partial"], *spread):
                if x.__class__ is not float:
                    raise ValueError(f"expected a number, got {x!r}")
            if entry != empty:  # a key may have no samples in a column
                table.restore([(key, *(entry[name] for name in empty))])
