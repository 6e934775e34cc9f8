"""`TailAverages`: an average of numbers for each key.

pandas, polars and `tailavg stream --by` use it. Spark keeps the states itself, so it calls
`scan_groups`, and `from_row` and `as_row` for states that it stores as JSON. Read
`TailAverages.scan_parts` first, then `scan_groups`.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Self

import numpy as np

from tailavg.core.clock import clock_for
from tailavg.core.elapsed import now, times_in
from tailavg.core.readings import Reading
from tailavg.core.rules import (
    AnyRule,
    AnyTail,
    ExactWindow,
    Rule,
    is_timed,
    no_window_error,
    window_of,
)
from tailavg.core.windows import short_repr
from tailavg.io import state as layout
from tailavg.numpy.arithmetic import MEAN, Array, Of, Statistic
from tailavg.numpy.average import (
    NanPolicy,
    TailAverage,
    has_nan,
    no_variance_error,
    numbers,
)
from tailavg.numpy.kernel import kernel
from tailavg.numpy.table import Table

__all__ = [
    "TailAverages",
    "as_row",
    "averages_for",
    "from_row",
    "keys_of_column",
    "part_of",
    "scan_groups",
]

LIVE = 1024
"""The most averages that are cached as a `TailAverage` for single updates."""

_FLOAT64 = np.dtype(np.float64)
_AVERAGE = Statistic()
_STEPS = ("count", "starts", "blocks", "folded", "partial")  # the state of a key
_SPREAD = ("variances", "squares")  # and of one with variance=True
_LISTS = ("keys", "counts", *_STEPS[1:])

Part = tuple[Array | None, Sequence[Hashable], Array]
"""The samples of a column, as a tuple (codes, keys, samples).

The key of samples[i] is keys[codes[i]]. The code of a sample without a key is -1. If there is only
one key, `codes` may be None."""


class TailAverages(Mapping[Any, TailAverage]):
    """An average of numbers for each key. All averages have the same rule.

    It is a mapping: `averages[key]` is a copy of the average of a key, as a `TailAverage`. A key
    exists from its first sample on, and `del averages[key]` removes it. Any hashable value except
    NaN can be a key.

    Args:
        rule: As for `TailAverage`.
        nan_policy: `"propagate"`, `"raise"`, or `"omit"`: a NaN is left out and not counted.
        variance: As for `TailAverage`.

    Examples:
        >>> averages = TailAverages(2)
        >>> averages.update("a", 1.0)
        >>> averages.scan(["a", "b", "a"], [3.0, 10.0, 5.0])
        array([ 2., 10.,  4.])
        >>> averages.value("a"), averages["a"].count, list(averages)
        (4.0, 3, ['a', 'b'])
    """

    # Each average is a row of `_table`. A scan writes its results to free rows; then one update of
    # `_rows` assigns these rows to the keys. So an interrupted scan changes nothing.
    #
    # `_live` caches rows as `TailAverage`s, which makes single updates 50 times as fast. `_settle`
    # writes the cache back before another method reads the table.

    def __init__(
        self,
        rule: AnyRule,
        *,
        nan_policy: NanPolicy = "propagate",
        variance: bool = False,
    ) -> None:
        self._variance = variance
        self._empty = TailAverage(rule, dtype=_FLOAT64, nan_policy=nan_policy, variance=variance)
        self._table = self._new_table(0)
        self._rows: dict[Any, int] = {}
        self._free: list[int] = []  # rows of the table that have no key
        self._live: dict[Any, TailAverage] = {}

    @property
    def rule(self) -> Rule:
        """The rule of every average, with its window."""
        return self._empty.rule

    @property
    def nan_policy(self) -> NanPolicy:
        """The policy for samples that are NaN."""
        return self._empty.nan_policy

    def update(self, key: Hashable, x: Any, t: Any = None) -> None:
        """Take one sample of a key. With an `Elapsed` window, `t` is its time."""
        if key in self._rows:
            self._average(key).update(x, t)
            return
        sample = numbers(x, "sample")
        if sample.ndim:
            raise ValueError(f"sample: expected a number, got an array of shape {sample.shape}")
        average = self._empty.copy()
        average.update(sample.item(), t)
        if average.count:
            self._hold([([key], np.array([-1]), as_row(average))])

    def value(self, key: Hashable, window: Reading | None = None, *, at: Any = None) -> float:
        """Return the average of a key. An `AnyTail` needs a `window`. For `at`, see `TailAverage`.

        Examples:
            >>> TailAverages(100).value("loss")
            Traceback (most recent call last):
            KeyError: "key: expected a key that has had a sample, got 'loss'"
        """
        value: float = self._average(key).value(window, at=at)
        return value

    def std(self, key: Hashable, window: Reading | None = None, ddof: int = 1) -> float:
        """Return the standard deviation of the samples of a key: see `TailAverage.std`."""
        std: float = self._average(key).std(window, ddof)
        return std

    def variance(self, key: Hashable, window: Reading | None = None, ddof: int = 1) -> float:
        """Return the variance of the samples of a key: see `TailAverage.variance`."""
        variance: float = self._average(key).variance(window, ddof)
        return variance

    def update_many(self, keys: Any, xs: Any, ts: Any = None) -> None:
        """Take many samples. The key of xs[i] is keys[i]. After an error, nothing has changed.

        With an `Elapsed` window, `ts` has the times. They do not go back within a key.

        This is faster than `update` if each key has dozens of samples.

        Examples:
            >>> averages = TailAverages(2)
            >>> averages.update_many(["a", "b", "a"], [3.0, 10.0, 5.0])
            >>> averages.value("a")
            4.0
        """
        window = 1.0 if isinstance(self.rule, AnyTail) else None  # any window will do
        self.scan_parts([part_of(keys, xs)], [window], times=ts)

    def scan(
        self,
        keys: Any,
        xs: Any,
        window: Reading | None = None,
        *,
        ts: Any = None,
        of: Of = "mean",
        ddof: int = 1,
    ) -> Array:
        """Take many samples. Return after each sample the average of its key.

        Keys may come in any order. An `AnyTail` needs a `window`. With `of="variance"` or
        `of="std"`, return these instead of averages. With an `Elapsed` window, `ts` has the times.

        Examples:
            >>> TailAverages(0.5).scan([1, 2, 1, 2], [1.0, 10.0, 2.0, 20.0])
            array([ 1., 10.,  2., 20.])
        """
        statistic = Statistic.named(of, ddof)
        parts = [part_of(keys, xs)]
        averages: Array = self.scan_parts(parts, [window], statistic=statistic, times=ts)[0][0]
        return averages

    def scan_parts(
        self,
        parts: Sequence[Part],
        windows: Sequence[Reading | None] = (None,),
        *,
        keep: bool = True,
        same_bits: bool = False,
        statistic: Statistic = _AVERAGE,
        times: Any = None,
    ) -> list[Array]:
        """Take samples of several columns, which share no key. Return the averages of each column.

        These are an array for each column, with a row for each window. After an error, nothing has
        changed. Without `keep`, all averages begin anew and are not stored. For `same_bits` and
        `statistic`, see `scan_groups`. All columns share the `times` of an `Elapsed` window.
        """
        if keep:
            self._settle()
        if times is not None and is_timed(self.rule):
            times = times_in(times)
        out, changes = [], []
        for codes, keys, xs in parts:
            table, rows = self._new_table(len(keys)), np.full(len(keys), -1)
            if keep and self._rows:
                rows = np.array([self._rows.get(key, -1) for key in keys], np.int64)
                table.put(np.flatnonzero(rows >= 0), self._table.take(rows[rows >= 0]))
            changes.append((keys, rows, table))
            how = windows, self.nan_policy, statistic, times
            out.append(scan_groups(table, codes, xs, *how, same_bits=same_bits))
        if keep:
            self._hold(changes)
        return out

    def __getitem__(self, key: Hashable) -> TailAverage:
        return self._average(key).copy()

    def __delitem__(self, key: Hashable) -> None:
        row = self._row(key)
        self._live.pop(key, None)
        del self._rows[key]
        self._free.append(row)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same keys, in any order, and each key has the same state."""
        if not isinstance(other, TailAverages):
            return NotImplemented
        if self._empty != other._empty or self._rows.keys() != other._rows.keys():
            return False
        return all(self[key] == other[key] for key in self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self._as_call()}: {len(self) or 'no'} keys>"

    def _as_call(self) -> str:
        """Return the call that makes such averages, without keys."""
        options = repr(self.rule)
        if self.nan_policy != "propagate":
            options += f", nan_policy={self.nan_policy!r}"
        if self._variance:
            options += ", variance=True"
        return f"TailAverages({options})"

    def copy(self) -> Self:
        """Return an independent copy."""
        return self.subset(self)

    def subset(self, keys: Iterable[Any]) -> Self:
        """Return an independent copy with only these keys. Unknown keys are left out.

        Examples:
            >>> averages = TailAverages(2)
            >>> averages.update_many(["a", "b"], [1.0, 2.0])
            >>> list(averages.subset(["b", "c"]))
            ['b']
        """
        self._settle()
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        known = {key: self._rows[key] for key in keys if key in self._rows}
        copy._table = self._table.take(np.array(list(known.values()), np.int64))
        copy._rows, copy._free, copy._live = {key: row for row, key in enumerate(known)}, [], {}
        return copy

    __copy__ = copy

    # States.

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain data: lists with an entry for each key.

        Examples:
            >>> averages = TailAverages(2)
            >>> averages.update("a", 1.0)
            >>> TailAverages.from_state_dict(averages.state_dict()) == averages
            True
        """
        names = (*_LISTS, *(_SPREAD if self._variance else ()))
        names += ("elapsed",) if is_timed(self.rule) else ()
        lists: dict[str, list[Any]] = {name: [] for name in names}
        for key in self:
            for name, entry in zip(names, (key, *self.steps_of(key)), strict=True):
                lists[name].append(entry)
        return layout.keyed_state(self.rule, nan_policy=self.nan_policy, **lists)

    def steps_of(self, key: Any) -> tuple[Any, ...]:
        """Return the state of a key: count, starts, blocks, folded, partial.

        With `variance=True`, the variances and squares follow; with an `Elapsed` window, the times.
        """
        self._settle()
        table, row = self._table, self._rows[key]
        if isinstance(table, _ExactTable):
            state = table.averages[row].state_dict()
            return tuple(state[name] for name in (*_STEPS, *_SPREAD) if name in state)
        count, starts = int(table.counts[row]), table.starts[row].tolist()
        empty = sum(start == end for start, end in pairwise([*starts, count]))
        means, total = table.means[row, empty:, 0].tolist(), float(table.sums[row, 0])
        steps: Any = count, starts[empty:], means, int(table.folded[row]), total
        if self._variance:
            steps += table.variances[row, empty:, 0].tolist(), float(table.squares[row, 0])
        if is_timed(self.rule):
            steps += (table.clock(row).elapsed(),)
        return steps  # type: ignore[no-any-return]

    def restore(self, entries: Iterable[tuple[Any, ...]]) -> None:
        """Add keys with their states. Raise a ValueError if a state is impossible.

        Each entry is a tuple of a key and what `steps_of` returns for the key.
        """
        self._settle()
        for each, count, starts, blocks, folded, partial, *others in entries:
            key = _tuples(each)
            _check_key(key)
            try:
                known = key in self._rows
            except TypeError as error:  # the key is not hashable, as an object of JSON
                raise ValueError(f"state: keys: {error}") from error
            if known:
                raise ValueError(f"state: keys: expected each once, got {short_repr(key)} again")
            spread = others[:2] if self._variance else []
            variances, squares = spread or (blocks, 0.0)
            if not count or not len(blocks) == len(variances) == len(starts):
                raise ValueError(
                    f"corrupt state: {count} samples, {len(starts)} block starts, {len(blocks)} "
                    "blocks"
                )
            if self._variance and any(variance < 0.0 for variance in variances):
                raise ValueError("corrupt state: negative variances")
            (row,), table = self._free_rows(1), self._table
            if isinstance(table, _ExactTable):
                steps = dict(zip(_STEPS, (count, starts, blocks, folded, partial), strict=True))
                steps |= dict(zip(_SPREAD, spread, strict=False))
                state = self._empty.state_dict() | steps
                table.averages[row] = TailAverage.from_state_dict(state)
            else:
                if is_timed(self.rule):
                    layout.check_steps(count, starts, folded)
                    clock: Any = clock_for(self.rule)
                    clock.restore_elapsed(count, starts, folded, others[-1])
                    table.hold_clock(row, clock)
                else:
                    _check_steps(self.rule, count, tuple(starts), folded)
                table.counts[row], table.folded[row], table.sums[row] = count, folded, partial
                table.starts[row], table.means[row] = 0, 0.0
                first = table.starts.shape[1] - len(starts)
                table.starts[row, first:], table.means[row, first:, 0] = starts, blocks
                if self._variance:
                    table.variances[row], table.squares[row] = 0.0, squares
                    table.variances[row, first:, 0] = variances
            del self._free[-1]
            self._rows[key] = row

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the averages that `state_dict` saved. A resumed run is bit-identical.

        A key that is a list, since JSON has no tuples, becomes a tuple.
        """
        state = layout.check_keyed(state)
        try:
            averages = cls(
                layout.rule_from(state["rule"]),
                nan_policy=state["nan_policy"],
                variance="variances" in state,
            )
        except TypeError as error:
            raise ValueError(f"state: {error}") from error
        layout.check_elapsed(state, is_timed(averages.rule))
        names = [name for name in (*_LISTS, *_SPREAD, "elapsed") if name in state]
        averages.restore(zip(*(state[name] for name in names), strict=True))
        return averages

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to one file (npz, no pickle), atomically.

        Raises:
            TypeError: If a key is not a str, int, float, bool, None, or a tuple of these.
        """
        try:
            layout.write_keyed(path, self.state_dict())
        except (TypeError, AttributeError) as error:
            raise TypeError(
                "save: keys: expected str, int, float, bool, None, or tuples of these; use other "
                f"keys, or pickle the averages: {error}"
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TailAverages:
        """Return the averages that `save` wrote.

        Examples:
            >>> import tempfile
            >>> averages = TailAverages(0.25)
            >>> averages.update_many(["a", "b"], [1.0, 2.0])
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     averages.save(f"{folder}/averages.npz")
            ...     TailAverages.load(f"{folder}/averages.npz") == averages
            True
        """
        return cls.from_state_dict(layout.read_keyed(path))

    def counts(self, keys: Sequence[Any]) -> Array:
        """Return the number of samples of each of these keys; 0 for an unknown key."""
        self._settle()
        rows = np.array([self._rows.get(key, -1) for key in keys], np.int64)
        counts: Array = np.append(self._table.counts, 0)[rows]
        return counts

    # The table.

    def _new_table(self, rows: int) -> Any:
        exact = isinstance(self.rule, ExactWindow)
        if exact:
            return _ExactTable(self._empty, rows)
        return Table(self.rule, rows, variance=self._variance)

    def _row(self, key: Hashable) -> int:
        if key not in self._rows:
            raise KeyError(f"key: expected a key that has had a sample, got {short_repr(key)}")
        return self._rows[key]

    def _average(self, key: Hashable) -> TailAverage:
        """Return the average of a key, to be updated or read."""
        average = self._live.get(key)
        if average is None:
            row = self._row(key)
            if len(self._live) >= LIVE:
                self._settle()
            average = self._live[key] = from_row(self._table, row, self._empty)
        return average

    def _settle(self) -> None:
        """Write the cached averages back to the table."""
        for key, average in self._live.items():
            self._table.put(np.array([self._rows[key]]), as_row(average))
        self._live = {}

    def _free_rows(self, number: int) -> list[int]:
        """Return `number` rows without a key, which the caller is to remove from `_free`."""
        size = len(self._table)
        if len(self._free) < number:
            self._table.grow(size + number + size // 4 + 16)
            self._free.extend(range(size, len(self._table)))
        return self._free[len(self._free) - number :]

    def _hold(self, changes: Sequence[tuple[Sequence[Hashable], Array, Any]]) -> None:
        """Store averages. Leave out keys without samples.

        Each change is a tuple of keys, the present row of each key (-1 for a new key), and a table
        of the new averages.
        """
        kept = [np.flatnonzero(table.counts) for _, _, table in changes]
        free = self._free_rows(sum(map(len, kept)))
        new, old, start = dict[Any, int](), list[int](), 0
        for (keys, rows, table), places in zip(changes, kept, strict=True):
            for place in places[rows[places] < 0].tolist():
                _check_key(keys[place])
            into = free[start : start + len(places)]
            self._table.put(np.array(into, np.int64), table.take(places))
            new.update(zip([keys[place] for place in places.tolist()], into, strict=True))
            old += rows[rows >= 0].tolist()
            start += len(places)
        # an interrupt between these lines only leaves rows that are neither free nor used
        del self._free[len(self._free) - len(free) :]
        self._rows.update(new)
        self._free += old


class _ExactTable:
    """Averages that store samples, with the methods of `Table` that this module uses.

    A changed average is a new object in its row, so several tables may share an average.
    """

    def __init__(self, empty: TailAverage, rows: int) -> None:
        self.rule, self._empty = empty.rule, empty
        self.averages = np.full(rows, empty, object)

    def __len__(self) -> int:
        return len(self.averages)

    @property
    def variance(self) -> bool:
        return self._empty._variances is not None

    @property
    def counts(self) -> Array:
        return np.array([average.count for average in self.averages], np.int64)

    def take(self, rows: Array) -> _ExactTable:
        taken = _ExactTable(self._empty, 0)
        taken.averages = self.averages[rows]
        return taken

    def put(self, rows: Array, other: _ExactTable) -> None:
        self.averages[rows] = other.averages

    def grow(self, rows: int) -> None:
        more = np.full(rows - len(self), self._empty, object)
        self.averages = np.append(self.averages, more)

    def scan_groups(
        self,
        codes: Array | None,
        xs: Array,
        counted: Any,
        windows: Any,
        loops: Any,
        statistic: Statistic,
        times: None,
    ) -> Array:
        sizes = [len(xs)] if codes is None else np.bincount(codes, minlength=len(self))
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        out = np.full((1, len(xs)), np.nan)
        for row in np.flatnonzero(sizes):
            average = self.averages[row] = self.averages[row].copy()
            group = slice(bounds[row], bounds[row + 1])
            if loops is not None and kernel(int(sizes[row])) is None:
                for i in range(group.start, group.stop):  # a scan would not give the same bits
                    average.update(xs[i])
                    out[0, i] = average._read(None, statistic) if average.count else np.nan
            else:
                out[0, group] = average.scan(xs[group], of=statistic.name, ddof=statistic.ddof)
        return out


def scan_groups(
    table: Any,
    codes: Array | None,
    xs: Array,
    windows: Sequence[Reading | None],
    nan_policy: NanPolicy,
    statistic: Statistic = _AVERAGE,
    times: Array | None = None,
    *,
    same_bits: bool = False,
    name: str = "samples",
) -> Array:
    """Take numbers of several rows of a table. Return after each number the average of its row.

    This function checks the arguments, sorts the numbers by row, and calls `Table.scan_groups`. The
    code of a number without a row is -1. The averages are NaN before the first sample. With
    `same_bits`, they are bit-identical to those of single updates, which takes longer without
    numba. A `statistic` replaces the averages. With an `Elapsed` window, `times` are nanoseconds,
    by default now. Error messages call the numbers `name`. An error may leave the table changed.
    """
    if statistic.of != MEAN and not table.variance:
        raise no_variance_error(statistic.name)
    if xs.ndim != 1:
        raise ValueError(f"{name}: expected a sequence of numbers, got shape {xs.shape}")
    if xs.dtype.kind == "c":
        raise TypeError(f"{name}: expected real numbers, got {xs.dtype}")
    if codes is not None and len(codes) != len(xs):
        raise ValueError(f"keys: expected as many keys as samples, {len(xs)}, got {len(codes)}")
    timed = is_timed(table.rule)
    if times is not None and not timed:
        raise TypeError(f"t: samples have times only with an Elapsed window, not {table.rule}")
    if times is not None and len(times) != len(xs):
        raise ValueError(f"ts: expected {len(xs)} times, one per sample, got {len(times)}")
    if timed and times is None:
        times = np.full(len(xs), now())
    loops = kernel(len(xs), max(1, len(table)), same_bits=same_bits)
    order, codes = _sorted_by_group(codes, len(table), loops)
    samples = np.asarray(xs if order is None else xs[order], np.float64)
    counted = None
    if nan_policy != "propagate" and has_nan(samples):
        missing = np.isnan(samples)
        if nan_policy == "raise":
            first = missing.argmax() if order is None else order[missing].min()
            raise ValueError(
                f"{name}: expected no NaN (nan_policy='raise'), got {int(missing.sum())}, the "
                f"first at index {first}"
            )
        counted = ~missing
    if isinstance(table.rule, AnyTail):
        sizes = len(xs) if codes is None else np.bincount(codes, minlength=len(table))
        # a window that can be read at the last step can be read before
        last = int(np.max(table.counts + sizes, initial=1))
        windows = [window_of(table.rule, window, last) for window in windows]
    else:
        for window in windows:
            window_of(table.rule, window, 1)  # raises unless it is None
    with np.errstate(all="ignore"):
        times = times if order is None or times is None else times[order]
        how = windows, loops, statistic, times
        averages: Array = table.scan_groups(codes, samples, counted, *how)
    if order is None:
        return averages
    out = np.full((len(windows), len(xs)), np.nan)
    out[:, order] = averages
    return out


def _sorted_by_group(
    codes: Array | None, number: int, loops: Any
) -> tuple[Array | None, Array | None]:
    """Return the order that puts samples of a group together, and their codes in that order.

    Samples without a group are left out. The order is None if the codes are sorted already.
    """
    if codes is None:
        return None, None
    codes = np.asarray(codes, np.int64)
    if not len(codes) or (codes[0] >= 0 and (codes[1:] >= codes[:-1]).all()):
        return None, codes
    if loops is None:
        small = number < 2**16 - 1  # NumPy sorts 16-bit integers much faster
        order = np.argsort((codes + 1).astype(np.uint16 if small else np.int64), kind="stable")
        order = order[np.count_nonzero(codes < 0) :]
    else:
        sizes = np.bincount(codes + 1, minlength=number + 1)
        order = np.empty(len(codes), np.int64)
        loops.sort_groups(codes + 1, np.cumsum(sizes) - sizes, order)
        order = order[sizes[0] :]
    return order, codes[order]


def as_row(average: TailAverage) -> Any:
    """Return an average of numbers as a table of one row."""
    if isinstance(average.rule, ExactWindow):
        return _ExactTable(average, 1)
    _ = average._now
    return average._table()


def from_row(table: Any, row: int, empty: TailAverage) -> TailAverage:
    """Return the average in a row of a table of numbers; `empty` is an average without samples."""
    if isinstance(table, _ExactTable):
        average: TailAverage = table.averages[row].copy()
        return average
    average = empty.copy()
    if table.counts[row]:
        average._begin(None, _FLOAT64)
        average._hold(table, row)
        average._commit()
    return average


def averages_for(
    rule: AnyRule,
    window: Reading | None,
    nan_policy: NanPolicy,
    state: TailAverages | None,
    variance: bool = False,
    on: Any = None,
) -> TailAverages:
    """Return `state`, or new averages if it is None. Raise if its rule or nan_policy differs.

    Also raise if the rule needs a `window` to be read with and there is none, or the reverse, or if
    there are times, `on`, without a window of time.
    """
    new = TailAverages(rule, nan_policy=nan_policy, variance=variance)
    if on is not None and not is_timed(new.rule):
        raise TypeError(
            f"on: {new.rule} counts samples and needs no times; leave out on, or pass a window of "
            "time, such as '10min'"
        )
    if isinstance(new.rule, AnyTail) and window is None:
        raise no_window_error("pass window=0.25")
    window_of(new.rule, window, 1)
    if state is None:
        return new
    if not isinstance(state, TailAverages):
        raise TypeError(f"state: expected TailAverages, got {type(state).__name__}")
    if state._empty != new._empty:
        raise ValueError(
            f"state: expected {new._as_call()}, like the arguments, got {state._as_call()}"
        )
    return state


def keys_of_column(
    name: Hashable, keys: Sequence[Hashable] | None, named: bool
) -> Sequence[Hashable]:
    """Return the keys under which a state stores a column: its name, if there are no groups.

    Otherwise, return the keys of the groups, or, if `named`, tuples (name, key).
    """
    if keys is None:
        return [name]
    return [(name, key) for key in keys] if named else keys


def part_of(keys: Any, xs: Any) -> Part:
    """Return samples as a `Part`. The key of xs[i] is keys[i]."""
    samples = numbers(xs, "samples") if np.size(xs) else np.empty(np.shape(xs))
    if samples.ndim == 0:
        raise ValueError(f"samples: expected a sequence, got the number {samples}")
    if isinstance(keys, np.ndarray) and keys.dtype.kind in "iu" and keys.ndim == 1:
        unique, codes = np.unique(keys, return_inverse=True)
        return codes, unique.tolist(), samples
    each = keys.tolist() if hasattr(keys, "tolist") else list(keys)
    places = {key: place for place, key in enumerate(dict.fromkeys(each))}
    return np.fromiter(map(places.__getitem__, each), np.int64, len(each)), list(places), samples


@lru_cache(maxsize=4096)
def _check_steps(rule: Rule, count: int, starts: tuple[int, ...], folded: int) -> None:
    """Raise a ValueError if a state is impossible. Cached, since many keys have equal steps."""
    layout.check_steps(count, starts, folded)
    clock_for(rule).restore(count, starts, folded)


def _check_key(key: Hashable) -> None:
    """Raise a ValueError if a key contains a NaN: a dict would never find such a key again."""
    if isinstance(key, tuple):
        for item in key:
            _check_key(item)
    elif key != key:
        raise ValueError(f"key: expected a key that equals itself, got {short_repr(key)}")


def _tuples(key: Any) -> Any:
    """Return a key from JSON, with its lists turned into tuples."""
    return tuple(map(_tuples, key)) if isinstance(key, list | tuple) else key
