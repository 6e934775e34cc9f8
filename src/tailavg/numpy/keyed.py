"""`TailAverages`: an average of numbers for each key."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

import numpy as np

from tailavg.core.decay import Reading
from tailavg.core.rules import AnyTail, ExactWindow, Rule, window_of
from tailavg.core.windows import AnyWindow, shown
from tailavg.io import state as layout
from tailavg.numpy.arithmetic import Array
from tailavg.numpy.average import NanPolicy, TailAverage, has_nan, numbers
from tailavg.numpy.kernel import kernel
from tailavg.numpy.table import Table

__all__ = [
    "Part",
    "TailAverages",
    "as_row",
    "averages_for",
    "from_row",
    "part_of",
    "sorted_by_group",
]

LIVE = 1024
"""So many keys that are updated one by one are held as a `TailAverage`, which is faster."""

_FLOAT64 = np.dtype(np.float64)
_LISTS = ("keys", "counts", "starts", "blocks", "folded", "partial")

Part = tuple[Array | None, Sequence[Hashable], Array]
"""Samples of groups: the group of each, as its place among the keys, or -1 if it has none; the
keys; the samples. There may be one key only, and no codes."""


class TailAverages(Mapping[Any, TailAverage]):
    """An average of numbers for each key; the same rule for all.

    It is a mapping: `averages[key]` is a copy of the average of a key, as a `TailAverage`. A key is
    there once it has had a sample, and `del averages[key]` forgets it. Any hashable value except
    NaN can be a key.

    Args:
        rule: As for `TailAverage`.
        nan_policy: `"propagate"`, `"raise"`, or `"omit"`: a NaN is left out and not counted.

    Examples:
        >>> averages = TailAverages(2)
        >>> averages.update("a", 1.0)
        >>> averages.scan(["a", "b", "a"], [3.0, 10.0, 5.0])
        array([ 2., 10.,  4.])
        >>> averages.value("a"), averages["a"].count, list(averages)
        (4.0, 3, ['a', 'b'])
    """

    # The averages are the rows of a table. A few of them, which are updated one by one, are for a
    # while held as `TailAverage`s instead; those of an ExactWindow, which has no table, always are.

    def __init__(self, rule: AnyWindow | Rule, *, nan_policy: NanPolicy = "propagate") -> None:
        self._empty = TailAverage(rule, dtype=_FLOAT64, nan_policy=nan_policy)
        self._rows: dict[Any, int] = {}
        self._free: list[int] = []  # rows of keys that were deleted
        self._live: dict[Any, TailAverage] = {}
        self._table = None if isinstance(self.rule, ExactWindow) else Table(self.rule)

    @property
    def rule(self) -> Rule:
        """The rule of every average, with its window."""
        return self._empty.rule

    @property
    def nan_policy(self) -> NanPolicy:
        """What is done with a NaN."""
        return self._empty.nan_policy

    def update(self, key: Hashable, x: Any) -> None:
        """Take one sample of a key."""
        average = self._average(key)
        if average is not None:
            average.update(x)
            return
        sample = numbers(x, "sample")
        if sample.ndim:
            raise ValueError(f"sample: expected a number, got an array of shape {sample.shape}")
        _check_key(key)
        average = self._empty.copy()
        average.update(sample.item())
        if average.count:
            if len(self._live) >= LIVE:
                self._settle()
            self._live[key] = average
            self._rows[key] = self._free.pop() if self._free else len(self._rows)

    def value(self, key: Hashable, window: Reading | None = None) -> float:
        """The average of a key now. An `AnyTail` is asked for a window or `Decay`.

        Examples:
            >>> TailAverages(100).value("loss")
            Traceback (most recent call last):
            KeyError: "key: expected one that has had a sample, got 'loss'"
        """
        average = self._average(key)
        if average is None:
            raise _no_key(key)
        value: float = average.value(window)
        return value

    def update_many(self, keys: Any, xs: Any) -> None:
        """Take many samples, each of the key in the same place: all of them, or none.

        It is faster than `update` where there are dozens of each key.

        Examples:
            >>> averages = TailAverages(2)
            >>> averages.update_many(["a", "b", "a"], [3.0, 10.0, 5.0])
            >>> averages.value("a")
            4.0
        """
        window = 1.0 if isinstance(self.rule, AnyTail) else None  # any will do
        self.scan_parts([part_of(keys, xs)], [window])

    def scan(self, keys: Any, xs: Any, window: Reading | None = None) -> Array:
        """Take many samples, and return the average of its key after each.

        Keys may come in any order. An `AnyTail` is asked for a window or `Decay`.

        Examples:
            >>> TailAverages(0.5).scan([1, 2, 1, 2], [1.0, 10.0, 2.0, 20.0])
            array([ 1., 10.,  2., 20.])
        """
        if isinstance(window, list | tuple):
            raise ValueError(f"window: expected one, got {shown(window)}")
        (averages,) = self.scan_parts([part_of(keys, xs)], [window])
        first: Array = averages[0]
        return first

    def __getitem__(self, key: Hashable) -> TailAverage:
        average = self._average(key)
        if average is None:
            raise _no_key(key)
        return average.copy()

    def __delitem__(self, key: Hashable) -> None:
        if key not in self:
            raise _no_key(key)
        self._settle()
        row = self._rows.pop(key)
        if self._table is None:
            del self._live[key]
        else:
            self._table.put(np.array([row]), Table(self.rule, 1))
            self._free.append(row)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        """Whether both have the same keys, in the same states; their order does not matter."""
        if not isinstance(other, TailAverages):
            return NotImplemented
        if self._empty != other._empty or self._rows.keys() != other._rows.keys():
            return False
        return all(self[key] == other[key] for key in self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        options = repr(self.rule)
        if self.nan_policy != "propagate":
            options += f", nan_policy={self.nan_policy!r}"
        return f"<TailAverages({options}): {len(self) or 'no'} keys>"

    # States.

    def state_dict(self) -> dict[str, Any]:
        """All there is to know, as plain data: lists with an entry for each key.

        Examples:
            >>> averages = TailAverages(2)
            >>> averages.update("a", 1.0)
            >>> TailAverages.from_state_dict(averages.state_dict()) == averages
            True
        """
        lists: dict[str, list[Any]] = {name: [] for name in _LISTS}
        for key in self:
            for name, entry in zip(_LISTS, (key, *self.steps_of(key)), strict=True):
                lists[name].append(entry)
        return layout.keyed_state(self.rule, nan_policy=self.nan_policy, **lists)

    def steps_of(self, key: Any) -> tuple[int, list[int], list[float], int, float]:
        """What is special to a key in a state: count, starts, blocks, folded, partial."""
        self._settle()
        if self._table is None:
            state = self._live[key].state_dict()
            return tuple(state[name] for name in ("count", "starts", "blocks", "folded", "partial"))
        table, row = self._table, self._rows[key]
        count, starts = int(table.counts[row]), table.starts[row].tolist()
        empty = sum(start == end for start, end in pairwise([*starts, count]))
        means, total = table.means[row, empty:, 0].tolist(), float(table.sums[row, 0])
        return count, starts[empty:], means, int(table.folded[row]), total

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """The averages that `state_dict` saved; they go on as if they had never stopped.

        A list among the keys, as JSON has them, becomes a tuple.
        """
        state = layout.check_keyed(state)
        try:
            averages = cls(layout.rule_from(state["rule"]), nan_policy=state["nan_policy"])
        except TypeError as error:
            raise ValueError(f"state: {error}") from error
        averages.restore(zip(*(state[name] for name in _LISTS), strict=True))
        return averages

    def counts(self, keys: Sequence[Any]) -> Array:
        """The number of samples of each of some keys; 0 if a key is not there."""
        self._settle()
        if self._table is None:
            found = [self._live[key].count if key in self._live else 0 for key in keys]
            return np.array(found, np.int64)
        rows = np.array([self._rows.get(key, -1) for key in keys], np.int64)
        counts: Array = np.append(self._table.counts, 0)[rows]
        return counts

    def restore(self, entries: Any, known: set[Any] | None = None) -> None:
        """Add keys with their states: see `steps_of`. Raise a ValueError if one is impossible.

        Steps that were checked are put into `known`, to be given to the next call.
        """
        known = set() if known is None else known
        for each, count, starts, blocks, folded, partial in entries:
            key = _tuples(each)
            _check_key(key)
            if key in self._rows:
                raise ValueError(f"state: keys: expected each once, got {shown(key)} again")
            if len(blocks) != len(starts):
                raise ValueError(
                    f"state: sizes do not add up: {len(starts)} starts, {len(blocks)} blocks"
                )
            steps = count, tuple(starts), folded
            if steps not in known:  # which takes a millisecond to check, and keys are often alike
                layout.check_steps(count, starts, folded)
                if not count:
                    raise ValueError("state: counts: expected at least one sample, got 0")
                self._empty._clock.copy().restore(count, starts, folded)
                known.add(steps)
            row = self._rows[key] = len(self._rows)
            if self._table is None:
                average = self._live[key] = self._empty.copy()
                average._clock.restore(count, starts, folded)
                average._begin(None, _FLOAT64)
                average._restore(np.array(blocks, np.float64), np.array(partial, np.float64))
                average._commit()
                continue
            table = self._table
            self._grow(row + 1)
            table.counts[row], table.folded[row], table.sums[row] = count, folded, partial
            first = table.starts.shape[1] - len(starts)
            table.starts[row, first:], table.means[row, first:, 0] = starts, blocks

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all to one file (npz, no pickle), whole or not at all.

        Raises:
            TypeError: If a key is not a str, int, float, bool, None, or a tuple of such.
        """
        state = self.state_dict()
        layout.write_keyed(path, state | {"keys": list(map(_plain_key, state["keys"]))})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TailAverages:
        """The averages that `save` wrote.

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

    def copy(self) -> Self:
        """Averages in the same states, that go their own ways from here."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._rows, copy._free = self._rows.copy(), self._free.copy()
        copy._live = {key: average.copy() for key, average in self._live.items()}
        if self._table is not None:
            copy._table = self._table.take(np.arange(len(self._table)))
        return copy

    __copy__ = copy

    # Where averages are.

    def _average(self, key: Hashable) -> TailAverage | None:
        """The average of a key, to be updated or read; None if there is none."""
        average = self._live.get(key)
        if average is None and self._table is not None:
            row = self._rows.get(key)
            if row is None:
                return None
            if len(self._live) >= LIVE:
                self._settle()
            average = self._live[key] = from_row(self._table, row, self._empty)
        return average

    def _settle(self) -> None:
        """Put averages that are held by themselves back into the table."""
        if self._table is None:
            return
        for key, average in self._live.items():
            row = self._rows[key]
            self._grow(row + 1)
            self._table.put(np.array([row]), as_row(average))
        self._live = {}

    def _grow(self, rows: int) -> None:
        assert self._table is not None
        if rows > len(self._table):
            self._table.grow(rows + rows // 4 + 16)

    # Many samples at a time.

    def scan_parts(
        self,
        parts: Sequence[Part],
        windows: Sequence[Reading | None] = (None,),
        *,
        keep: bool = True,
        same_bits: bool = False,
    ) -> list[Array]:
        """As `scan`, for parts whose keys differ, and several windows: all are taken, or none.

        For adapters. Of each part, the averages by each window. Without `keep`, nothing is taken:
        the averages are those of new keys. With `same_bits`, they are those of updates one by one
        to the last bit, which takes longer without numba.
        """
        for _, _, xs in parts:
            self._check(xs)
        for window in windows:
            window_of(self.rule, window, 1)
        if keep:
            self._settle()
        found = [self._scan_part(part, windows, keep, same_bits) for part in parts]
        if keep:
            self._take(parts, [held for _, held in found])
        return [averages for averages, _ in found]

    def _check(self, xs: Array) -> None:
        if xs.ndim != 1:
            raise ValueError(f"samples: expected a sequence of numbers, got shape {xs.shape}")
        if xs.dtype.kind == "c":
            raise TypeError(f"samples: expected real numbers, got {xs.dtype}")
        if self.nan_policy == "raise" and has_nan(xs):
            bad = np.isnan(xs)
            raise ValueError(
                f"samples: expected no NaN (nan_policy='raise'), got {int(bad.sum())}, the first "
                f"at index {int(bad.argmax())}"
            )

    @np.errstate(all="ignore")
    def _scan_part(
        self, part: Part, windows: Sequence[Any], keep: bool, same_bits: bool
    ) -> tuple[Array, Any]:
        """The averages of one part, and what its keys then hold: a table, or averages."""
        codes, keys, xs = part
        if codes is not None and len(codes) != len(xs):
            raise ValueError(f"keys: expected as many as samples, {len(xs)}, got {len(codes)}")
        loops = kernel(len(xs), max(1, len(keys)), same_bits=same_bits)
        order, codes = sorted_by_group(codes, len(keys), loops)
        samples = np.asarray(xs if order is None else xs[order], np.float64)
        counted = None
        if self.nan_policy == "omit" and has_nan(samples):
            counted = ~np.isnan(samples)
        held: Any
        if self._table is None:
            averages, held = self._scan_apart(codes, keys, samples, keep, same_bits)
        else:
            held = Table(self.rule, len(keys))
            if keep and self._rows:
                rows = np.array([self._rows.get(key, -1) for key in keys], np.int64)
                held.put(np.flatnonzero(rows >= 0), self._table.take(rows[rows >= 0]))
            if isinstance(self.rule, AnyTail):
                sizes = len(xs) if codes is None else np.bincount(codes, minlength=len(keys))
                for t in np.unique(held.counts + sizes).tolist():
                    windows = [window_of(self.rule, window, t) for window in windows]
            averages = held.scan_groups(codes, samples, counted, windows, loops)
        if order is None:
            return averages, held
        out = np.full((len(windows), len(xs)), np.nan)  # also of rows that have no group
        out[:, order] = averages
        return out, held

    def _scan_apart(
        self, codes: Array | None, keys: Sequence[Any], xs: Array, keep: bool, same_bits: bool
    ) -> tuple[Array, list[TailAverage]]:
        """As `Table.scan_groups`, for averages that keep samples."""
        sizes = [len(xs)] if codes is None else np.bincount(codes, minlength=len(keys)).tolist()
        held = [
            self._live[key].copy() if keep and key in self._live else self._empty.copy()
            for key in keys
        ]
        out, at = np.full((1, len(xs)), np.nan), 0
        for average, size in zip(held, sizes, strict=True):
            if same_bits and kernel(size) is None:  # array operations have other last digits
                for i in range(at, at + size):
                    average.update(xs[i])
                    out[0, i] = average.value()
            elif size:
                out[0, at : at + size] = average.scan(xs[at : at + size])
            at += size
        return out, held

    def _take(self, parts: Sequence[Part], found: list[Any]) -> None:
        """Hold what the keys of parts hold after a scan: all of it, or nothing."""
        new, live, free = dict[Any, int](), self._live, self._free.copy()
        following = len(self._rows) + len(free)
        changes: list[tuple[Array, Table]] = []
        for (_, keys, _), held in zip(parts, found, strict=True):
            counts = [each.count for each in held] if self._table is None else held.counts.tolist()
            rows = []
            for key, count in zip(keys, counts, strict=True):
                row = self._rows.get(key, -1)
                if row < 0 and count:
                    _check_key(key)
                    row = new[key] = free.pop() if free else following
                    following += row == following
                rows.append(row)
            if self._table is None:
                averages = zip(keys, held, counts, strict=True)
                live = live | {key: average for key, average, count in averages if count}
            else:
                used = np.flatnonzero(np.array(rows, np.int64) >= 0)
                changes.append((np.array(rows, np.int64)[used], held.take(used)))
        if self._table is not None:
            self._grow(following)
        table = self._table
        before = [] if table is None else [(which, table.take(which)) for which, _ in changes]
        was = self._live, self._free
        try:
            for change in changes:
                self._table.put(*change)  # type: ignore[union-attr]
            self._rows.update(new)
            self._live, self._free = live, free
        except BaseException:
            for key in new:
                self._rows.pop(key, None)
            for change in before:
                self._table.put(*change)  # type: ignore[union-attr]
            self._live, self._free = was
            raise


def as_row(average: TailAverage) -> Table:
    """Return what an average of numbers holds, as a table of one row."""
    _ = average._now
    return average._table()


def from_row(table: Table, row: int, empty: TailAverage) -> TailAverage:
    """Return the average in a row of a table of numbers; `empty` is one without samples."""
    average = empty.copy()
    if table.counts[row]:
        average._begin(None, _FLOAT64)
        average._hold(table, row)
        average._commit()
    return average


def sorted_by_group(
    codes: Array | None, number: int, loops: Any = None
) -> tuple[Array | None, Array | None]:
    """Return the order that puts samples of a group together, and their codes in that order.

    Samples without a group, whose code is negative, are left out. There is no order if none is
    needed, and there are no codes if there is one group.
    """
    if codes is None:
        return None, None
    codes = np.asarray(codes, np.int64)
    if not len(codes) or (codes[0] >= 0 and (codes[1:] >= codes[:-1]).all()):
        return None, codes
    if loops is None:
        small = number < 2**16 - 1  # which NumPy sorts much faster
        order = np.argsort((codes + 1).astype(np.uint16 if small else np.int64), kind="stable")
        order = order[np.count_nonzero(codes < 0) :]
    else:
        sizes = np.bincount(codes + 1, minlength=number + 1)
        order = np.empty(len(codes), np.int64)
        loops.sort_groups(codes + 1, np.cumsum(sizes) - sizes, order)
        order = order[sizes[0] :]
    return order, codes[order]


def averages_for(
    rule: AnyWindow | Rule, nan_policy: NanPolicy, state: TailAverages | None
) -> TailAverages:
    """What an adapter scans with: the state that it is given, if that is as asked for."""
    asked = TailAverages(rule, nan_policy=nan_policy)
    if state is None:
        return asked
    if not isinstance(state, TailAverages):
        raise TypeError(f"state: expected TailAverages, got {type(state).__name__}")
    if (state.rule, state.nan_policy) != (asked.rule, asked.nan_policy):
        raise ValueError(
            f"state: expected TailAverages({asked.rule}, nan_policy={asked.nan_policy!r}), as "
            f"asked for, got {state}"
        )
    return state


def part_of(keys: Any, xs: Any) -> Part:
    """Return samples by key as a `Part`."""
    samples = numbers(xs, "samples") if np.size(xs) else np.empty(np.shape(xs))
    if samples.ndim == 0:
        raise ValueError(f"samples: expected a sequence of them, got the number {samples}")
    if not hasattr(keys, "__len__"):
        keys = list(keys)
    if len(keys) != len(samples):
        raise ValueError(f"keys: expected as many as samples, {len(samples)}, got {len(keys)}")
    if isinstance(keys, np.ndarray) and keys.dtype.kind in "iu" and keys.ndim == 1:
        found, codes = np.unique(keys, return_inverse=True)
        return codes, found.tolist(), samples
    each = keys.tolist() if hasattr(keys, "tolist") else list(keys)
    places: dict[Any, Any] = dict.fromkeys(each)
    places = {key: place for place, key in enumerate(places)}
    return np.fromiter(map(places.__getitem__, each), np.int64, len(each)), list(places), samples


def _no_key(key: Any) -> KeyError:
    return KeyError(f"key: expected one that has had a sample, got {shown(key)}")


def _check_key(key: Hashable) -> None:
    """Raise a ValueError if a key has a NaN in it, which would never be found again."""
    if isinstance(key, tuple):
        for part in key:
            _check_key(part)
    elif key != key:
        raise ValueError(f"key: expected one that equals itself, got {shown(key)}")


def _tuples(key: Any) -> Any:
    """A key from JSON, which has no tuples."""
    return tuple(map(_tuples, key)) if isinstance(key, list | tuple) else key


def _plain_key(key: Any) -> Any:
    """A key as JSON can hold it."""
    if type(key) is tuple:
        return [_plain_key(part) for part in key]
    if isinstance(key, np.bool_ | np.integer | np.floating | np.str_):
        key = key.item()
    if key is None or type(key) in (str, int, float, bool):
        return key
    raise TypeError(
        f"save: key: expected a str, int, float, bool, None or a tuple of these, got {shown(key)} "
        f"of type {type(key).__name__}; pickle the averages, or use other keys"
    )
