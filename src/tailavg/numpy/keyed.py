"""`TailAverages`: an average of numbers for each key."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tailavg.core import state as layout
from tailavg.core.clock import Clock
from tailavg.core.decay import Decay, Reading
from tailavg.core.rules import AnyTail, ExactWindow, Rule, window_of
from tailavg.core.windows import AnyWindow, Growing, shown
from tailavg.numpy import compiling, loops
from tailavg.numpy.arithmetic import Array
from tailavg.numpy.average import NanPolicy, TailAverage, has_nan, numbers
from tailavg.numpy.packed import Packed, follow, fresh

__all__ = ["Part", "TailAverages", "averages_for"]

LONG = 4096
"""A single group of more rows is better scanned by itself."""

FEW = 4
"""So many rows of each key are scanned one by one: what a key holds need not become an array."""

_FLOAT64 = np.dtype(np.float64)
_LISTS = ("keys", "counts", "starts", "blocks", "folded", "partial")

Part = tuple[Array | None, Sequence[Hashable], Array]
"""Samples of groups: the group of each, as its place among the keys, or -1 if it has none; the
keys; the samples. There may be one key only, and no codes."""


class TailAverages(Mapping[Any, TailAverage]):
    """An average of numbers for each key; the same rule for all.

    It is a mapping: `averages[key]` is the `TailAverage` of a key. A key is there once it has had a
    sample, and `del averages[key]` forgets it. Whatever dict takes can be a key, but a NaN.

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

    __slots__ = ("_averages", "_empty")

    def __init__(self, rule: AnyWindow | Rule, *, nan_policy: NanPolicy = "propagate") -> None:
        self._empty = TailAverage(rule, dtype=_FLOAT64, nan_policy=nan_policy)
        self._averages: dict[Any, TailAverage] = {}

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
        average = self._averages.get(key)
        if average is not None:
            average.update(x)
            return
        sample = numbers(x, "sample")
        if sample.ndim:
            raise ValueError(f"sample: expected a number, got an array of shape {sample.shape}")
        _check_key(key)
        average = self._new()
        average.update(sample.item())
        if average.count:
            self._averages[key] = average

    def value(self, key: Hashable, window: Reading | None = None) -> float:
        """The average of a key now. An `AnyTail` is asked for a window or `Decay`.

        Examples:
            >>> TailAverages(100).value("loss")
            Traceback (most recent call last):
            KeyError: "key: expected one that has had a sample, got 'loss'"
        """
        average: float = self[key].value(window)
        return average

    def update_many(self, keys: Any, xs: Any) -> None:
        """Take many samples, each of the key in the same place: all of them, or none.

        It is faster than `update` where there are dozens of each key.

        Examples:
            >>> averages = TailAverages(2)
            >>> averages.update_many(["a", "b", "a"], [3.0, 10.0, 5.0])
            >>> averages.value("a")
            4.0
        """
        self.scan_parts([_part(keys, xs)], None, write=False)

    def scan(self, keys: Any, xs: Any, window: Reading | None = None) -> Array:
        """Take many samples, and return the average of its key after each.

        Keys may come in any order. An `AnyTail` is asked for a window or `Decay`.

        Examples:
            >>> TailAverages(0.5).scan([1, 2, 1, 2], [1.0, 10.0, 2.0, 20.0])
            array([ 1., 10.,  2., 20.])
        """
        (averages,) = self.scan_parts([_part(keys, xs)], window)
        return averages

    def __getitem__(self, key: Hashable) -> TailAverage:
        try:
            return self._averages[key]
        except KeyError:
            raise KeyError(f"key: expected one that has had a sample, got {shown(key)}") from None

    def __delitem__(self, key: Hashable) -> None:
        if key not in self:
            self[key]  # which says what is wrong
        del self._averages[key]

    def __contains__(self, key: object) -> bool:
        return key in self._averages

    def __iter__(self) -> Iterator[Any]:
        return iter(self._averages)

    def __len__(self) -> int:
        return len(self._averages)

    def __eq__(self, other: object) -> bool:
        """Whether both have the same keys, in the same states; their order does not matter."""
        if not isinstance(other, TailAverages):
            return NotImplemented
        return self._empty == other._empty and self._averages == other._averages

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
        for key, average in self._averages.items():
            clock = average._now
            means, folded, partial = average._held()
            found = key, clock.count, clock.starts, _floats(means), folded, float(partial)
            for entries, entry in zip(lists.values(), found, strict=True):
                entries.append(entry)
        return layout.keyed_state(self.rule, nan_policy=self.nan_policy, **lists)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> TailAverages:
        """The averages that `state_dict` saved; they go on as if they had never stopped.

        A list among the keys, as JSON has them, becomes a tuple.
        """
        state = layout.check_keyed(state)
        try:
            averages = cls(layout.rule_from(state["rule"]), nan_policy=state["nan_policy"])
        except TypeError as error:
            raise ValueError(f"state: {error}") from error
        held = averages._averages
        known: dict[Any, Clock] = {}
        for entry in zip(*(state[name] for name in _LISTS), strict=True):
            key = _tuples(entry[0])
            _check_key(key)
            if key in held:
                raise ValueError(f"state: keys: expected each once, got {shown(key)} again")
            held[key] = averages._restored(known, *entry[1:])
        return averages

    def _restored(
        self,
        known: dict[Any, Clock],
        count: int,
        starts: Any,
        blocks: Any,
        folded: int,
        partial: float,
    ) -> TailAverage:
        """An average in this state, if it is possible."""
        average, steps = self._new(), (count, tuple(starts), folded)
        if steps in known:  # which takes a millisecond to check, and keys are often alike
            follow(average._clock, known[steps])
        else:
            layout.check_steps(count, starts, folded)
            if not count:
                raise ValueError("state: counts: expected at least one sample of each key, got 0")
            average._clock.restore(count, starts, folded)
            known[steps] = average._clock
        means = np.array(blocks, np.float64)
        if len(means) != len(starts):
            raise ValueError(
                f"state: sizes do not add up: {len(starts)} starts, {len(means)} blocks"
            )
        average._begin(None, _FLOAT64)
        average._restore(means, np.array(partial, np.float64))
        average._commit()
        return average

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

    def copy(self) -> TailAverages:
        """Averages in the same states, that go their own ways from here."""
        return self.from_state_dict(self.state_dict())

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return TailAverages.from_state_dict, (self.state_dict(),)

    # Many samples at a time.

    def scan_parts(
        self,
        parts: Sequence[Part],
        window: Reading | None = None,
        *,
        write: bool = True,
        keep: bool = True,
    ) -> list[Array]:
        """As `scan`, for parts whose keys differ: all of them are taken, or none.

        For adapters. Without `write`, nothing is returned; without `keep`, nothing is taken: the
        averages are those of new keys.
        """
        for _, _, xs in parts:
            self._check(xs)
        if isinstance(window, list | tuple):
            raise ValueError(f"window: expected one, got {shown(window)}")
        if write:
            window_of(self.rule, window, 1)
        if not keep:
            return [self._scan_part(part, None, window, write) for part in parts]
        held = [
            average
            for _, keys, _ in parts
            for key in keys
            if (average := self._averages.get(key)) is not None
        ]
        new: dict[Any, TailAverage] = {}
        found: list[Array] = self._wholly(
            held, new, lambda: [self._scan_part(part, new, window, write) for part in parts]
        )
        return found

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

    def _wholly(
        self, held: list[TailAverage], new: dict[Any, TailAverage], change: Callable[[], Any]
    ) -> Any:
        """Change averages that are held, and hold those that are new: wholly, or not at all."""
        before = []
        for average in held:
            clock, kind = average._now, average.__class__
            steps = clock.count, clock.blocks, clock.folded
            before.append((average, kind, kind._held_now(average), steps))
        try:
            result = change()
            for key in new:
                _check_key(key)
            self._averages.update(new)
        except BaseException:
            for average in held:  # if this is interrupted, too, those that are left say so
                average._left = None
            for key in new:
                self._averages.pop(key, None)
            for average, kind, was, steps in before:
                average._bring_back(kind, was, steps)
            raise
        return result

    def _new(self) -> TailAverage:
        return fresh(self._empty)

    def _scan_part(
        self, part: Part, new: dict[Any, TailAverage] | None, window: Reading | None, write: bool
    ) -> Array:
        """The averages of the groups of one part. Those of new keys are put into `new`."""
        codes, keys, xs = part
        groups = _Groups(codes, len(keys), xs)
        held = [None if new is None else self._averages.get(key) for key in keys]
        fastest = loops.plain
        several = len(keys) > 1 or len(xs) <= LONG
        if several and len(xs) and compiling.installed() and not self._apart(window):
            fastest = loops.fastest(len(xs))
        few = len(keys) > 1 and len(xs) <= len(keys) * (FEW if write else 4 * FEW)
        if few and new is not None and not isinstance(self.rule, ExactWindow):
            averages = held.copy()
            out = self._scan_few(groups, averages, window, write)
        elif fastest is loops.plain:
            averages = held.copy()
            out = self._scan_apart(groups, averages, window, write)
        else:
            averages = [] if new is None else held.copy()
            out = self._scan_together(fastest, groups, held, averages, window, write)
        if new is not None:
            for key, was, now in zip(keys, held, averages, strict=True):
                if was is None and now is not None and now.count:
                    new[key] = now
        return out

    def _apart(self, window: Reading | None) -> bool:
        """Whether each group has to be scanned on its own."""
        return isinstance(self.rule, ExactWindow) or isinstance(window, Decay)

    def _scan_few(
        self,
        groups: _Groups,
        averages: list[TailAverage | None],
        window: Reading | None,
        write: bool,
    ) -> Array:
        """As `_scan_apart`, row by row."""
        out = np.full(len(groups.xs) if write else 0, np.nan)
        rows = zip(groups.codes.tolist(), groups.xs.astype(np.float64).tolist(), strict=True)
        for i, (group, x) in enumerate(rows):
            if group < 0:
                continue
            average = averages[group]
            if average is None:
                average = averages[group] = self._new()
            average.update(x)
            if write and average.count:
                out[i] = average.value(window)
        return out

    def _scan_apart(
        self,
        groups: _Groups,
        averages: list[TailAverage | None],
        window: Reading | None,
        write: bool,
    ) -> Array:
        """Scan the groups one by one; new averages are put into the list."""
        if groups.number == 1 and groups.sorted and len(groups.xs) and write:  # no copy is needed
            averages[0] = average = averages[0] or self._new()
            return average.scan(groups.xs, window)
        rows = groups.sort()
        out = np.full(len(rows) if write else 0, np.nan)
        for group in np.flatnonzero(np.diff(groups.starts)).tolist():
            self._scan_one(groups, group, rows, out, averages, window)
        return groups.unsort(out) if write else out

    def _scan_one(
        self,
        groups: _Groups,
        group: int,
        rows: Array,
        out: Array,
        averages: list[TailAverage | None],
        window: Reading | None,
    ) -> None:
        its = slice(groups.starts[group], groups.starts[group + 1])
        average = (averages[group] if averages else None) or self._new()
        if len(out):
            out[its] = average.scan(rows[its], window)
        else:
            average.update_many(rows[its])
        if averages:
            averages[group] = average

    def _scan_together(
        self,
        compiled: SimpleNamespace,
        groups: _Groups,
        held: list[TailAverage | None],
        averages: list[TailAverage | None],
        window: Reading | None,
        write: bool,
    ) -> Array:
        """As `_scan_apart`, by compiled loops; without a list of averages none is made."""
        latest = np.full(len(held), np.nan)
        rows = groups.sort_compiled(compiled, self.nan_policy == "omit")
        if write and groups.omitted:
            for group, average in enumerate(held):
                if average is not None:
                    latest[group] = average.value(window)
        packed = Packed.of(self.rule, held)
        if not write and isinstance(self.rule, AnyTail):
            window = Growing(1.0)  # any one will do
        (out,) = packed.scan(rows, groups.starts, [window], compiled)
        if averages:
            which = np.flatnonzero(np.diff(groups.starts))
            into = [averages[group] or self._new() for group in which.tolist()]
            for group, average in zip(which.tolist(), packed.averages(which, into), strict=True):
                averages[group] = average
        return groups.unsort_compiled(compiled, out, latest) if write else out


class _Groups:
    """Samples by group: `starts` says where each begins, when they are sorted."""

    def __init__(self, codes: Array | None, number: int, xs: Array) -> None:
        self.xs, self.number = xs, number
        self.omitted = False
        one = codes is None and number <= 1
        # of one group they are not looked at until they are counted, and take no memory
        self.codes: Array = np.broadcast_to(0, len(xs)) if one else np.asarray(codes)
        if self.codes.shape != xs.shape:
            raise ValueError(f"keys: expected as many as samples, {len(xs)}, got {len(self.codes)}")
        self.sorted = one or not (
            len(xs) and (self.codes[0] < 0 or (self.codes[1:] < self.codes[:-1]).any())
        )
        self.starts: Array = np.zeros(number + 1, np.int64)

    def _count(self) -> None:
        """Samples without a group come before all others."""
        sizes = np.bincount(self.codes + np.int64(1), minlength=self.number + 1)
        self.starts = np.cumsum(sizes)

    def sort(self) -> Array:
        """The samples, by group."""
        self._count()
        if self.sorted:
            return self.xs
        small = self.number < 2**16  # which NumPy sorts much faster
        self._order = np.argsort(
            (self.codes + 1).astype(np.uint16 if small else np.int64), kind="stable"
        )
        return self.xs[self._order]

    def unsort(self, averages: Array) -> Array:
        """What belongs to sorted samples, in the order in which they came."""
        if self.sorted:
            return averages
        out = np.empty_like(averages)
        out[self._order] = averages
        return out

    def sort_compiled(self, compiled: SimpleNamespace, omit: bool) -> Array:
        """As `sort`, without those that have no group or are to be omitted."""
        xs = np.ascontiguousarray(self.xs, np.float64)
        self.omitted = omit and has_nan(xs)
        if self.sorted and not self.omitted:
            self._count()
            return xs
        self.codes = np.ascontiguousarray(self.codes, np.int64)
        self._places = np.empty(len(xs), np.int64)
        rows = np.empty(len(xs))
        compiled.group_rows(self.codes, xs, self.omitted, self.starts, self._places, rows)
        return rows[: self.starts[-1]]

    def unsort_compiled(self, compiled: SimpleNamespace, averages: Array, latest: Array) -> Array:
        """As `unsort`; an omitted sample has the average that its group had, at first `latest`."""
        if self.sorted and not self.omitted:
            return averages
        out = np.empty(len(self.xs))
        compiled.ungroup_rows(self.codes, self._places, averages, latest, out)
        return out


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


def _part(keys: Any, xs: Any) -> Part:
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


def _floats(means: Any) -> list[float]:
    return [float(mean) for mean in means]


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
