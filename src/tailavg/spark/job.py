"""`Job`: the work of Spark's Python processes. Rows are in Arrow, and states are bytes.

`frames` calls `pack` and `unpack` around the shuffle of a stream, `average` for a bucket of keys,
`average_sorted` for a table, and `to_json` and `from_json` for saved states.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from tailavg.extras import needs

with needs("spark"):
    import pyarrow as pa
    import pyarrow.compute as pc

from tailavg.core.elapsed import LONGEST, SECOND
from tailavg.core.rules import Rule, is_timed
from tailavg.core.windows import Window, short_repr
from tailavg.io import state as layout
from tailavg.numpy import TailAverage
from tailavg.numpy.arithmetic import Array, Statistic
from tailavg.numpy.average import NanPolicy
from tailavg.numpy.keyed import as_row, from_row, scan_groups
from tailavg.numpy.table import Table, record_type

__all__ = ["Job", "Late", "Output", "from_bytes", "to_bytes"]

Output = Literal["rows", "latest"]
Late = Literal["include", "drop", "error"]

VERSION = 1
"""The version of the bytes of a state."""

CHECK = -1
"""A bucket without keys, in every micro-batch, for which the checkpoint is checked."""

ROWS = 50_000
"""The maximum number of rows in a bundle of results."""

# Internal columns, beside the columns of the user.
BUCKET, KEY = "__tailavg_bucket", "__tailavg_key"
LATE, KEPT = "__tailavg_late", "__tailavg_kept"
COLUMN, STATE, TIE = "__tailavg_column", "__tailavg_state", "__tailavg_tie"

ORDERS = {
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
"""The types that rows can be ordered by: their names in Spark, and the types in Arrow."""

NANOSECONDS = {"date": 86400 * SECOND, "timestamp": 1000, "timestamp_ntz": 1000}
"""The nanoseconds in one of these orders, if it is a time. Numbers are in seconds."""

Load = Callable[[list[Any]], list[Any]]
"""A function that takes keys and returns the state of each, as bytes, or None if it is new."""

_FIXED = ("columns", "rules", "by", "order_by", "order_type", "nan_policy", "buckets", "std")
"""The fields that states depend on. They must not change when a query resumes."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The arguments of `tail_mean`, and the functions that run in the processes of Spark."""

    columns: tuple[str, ...]
    rules: tuple[Rule, ...]
    by: tuple[str, ...]
    order_by: str | None
    order_type: str | None
    nan_policy: NanPolicy
    buckets: int
    std: bool = False
    # these may change when a query resumes:
    reads: tuple[tuple[Rule, Window | None], ...] = ()
    names: tuple[str, ...] = ()
    output: Output = "rows"
    late: Late = "include"

    @property
    def key_and_order(self) -> tuple[str, ...]:
        """The columns of the key, and the one that orders rows."""
        return self.by if self.order_by is None else (*self.by, self.order_by)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """What is read from each average: the mean, and perhaps the standard deviation."""
        return (Statistic(), Statistic.named("std", 1)) if self.std else (Statistic(),)

    @property
    def is_timed(self) -> bool:
        """Whether a window is a period of time; `order_by` is then the time of each row."""
        return any(map(is_timed, self.rules))

    # The description of the job in a checkpoint.

    def text(self) -> str:
        """Return the fields that must not change, as JSON."""
        fixed = {name: getattr(self, name) for name in _FIXED}
        fixed["rules"] = [layout.plain(rule) for rule in self.rules]
        return json.dumps({"format": "tailavg spark", "version": VERSION, **fixed})

    @classmethod
    def from_text(cls, text: str) -> Job:
        """Return the job that `text` describes."""
        saved: dict[str, Any] = json.loads(text)
        version = saved.pop("format", None), saved.pop("version", None)
        if version != ("tailavg spark", VERSION):
            raise ValueError(
                f"checkpoint: expected version {VERSION} of tailavg's states, got {version}"
            )
        saved["rules"] = map(layout.rule_from, saved["rules"])
        return cls(**saved | {name: tuple(saved[name]) for name in ("columns", "rules", "by")})

    def check(self, text: str) -> None:
        """Raise a ValueError if the job of a checkpoint, as `text`, has other averages."""
        before = Job.from_text(text)
        for name in _FIXED:
            was, now = getattr(before, name), getattr(self, name)
            if was != now:
                raise ValueError(
                    f"{'rule' if name == 'rules' else name}: the checkpoint was made with "
                    f"{_listed(was)}, got {_listed(now)}; start with a new checkpoint"
                )

    # Bundles of rows.

    def pack(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Pack rows into bundles, by bucket."""
        ids = _spread(self.buckets)
        yield _bundles([CHECK], [b""])
        for batch in batches:
            places = batch.column(BUCKET).to_numpy().astype(np.uint16)
            rows = batch.drop_columns([BUCKET]).take(pa.array(np.argsort(places, kind="stable")))
            sizes = np.bincount(places, minlength=self.buckets)
            used = np.flatnonzero(sizes)
            starts = np.cumsum(sizes) - sizes
            bundles = [to_bytes(rows.slice(starts[i], sizes[i])) for i in used]
            yield _bundles(ids[used], bundles)

    def unpack(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return the rows in bundles."""
        for batch in batches:
            for bundle in batch.column("rows"):
                yield from pa.ipc.open_stream(bundle.as_buffer())

    # States as bytes: the version, the latest order, and a record for each column and rule.

    @cached_property
    def _record(self) -> np.dtype[Any]:
        order = "<f8" if self.order_type in ("float", "double") else "<i8"
        averages = [record_type(rule, self.std) for _ in self.columns for rule in self.rules]
        fields = [(str(i), kind) for i, kind in enumerate(averages)]
        return np.dtype([("version", "u1"), ("ordered", "?"), ("order", order), *fields])

    def _records(self, states: Iterable[Any]) -> Array:
        """Return the states of several keys as a writable array. The state of a new key is None."""
        new = np.zeros(1, self._record)
        new["version"] = VERSION
        empty = new.tobytes()
        known = [empty if state is None else bytes(state) for state in states]
        for state in known:
            if len(state) != len(empty) or state[0] != VERSION:
                raise ValueError(
                    f"corrupt state: expected {len(empty)} bytes, starting with {VERSION}, got "
                    f"{len(state)} bytes: {short_repr(state)}"
                )
        return np.frombuffer(b"".join(known), self._record).copy()

    def _tables(self, records: Array) -> dict[tuple[str, Rule], Table]:
        """Return the averages in records, by column and rule."""
        averages = [(column, rule) for column in self.columns for rule in self.rules]
        return {
            (column, rule): Table.from_records(rule, records[str(i)])
            for i, (column, rule) in enumerate(averages)
        }

    def _to_bytes(self, records: Array, tables: Mapping[Any, Table]) -> list[bytes]:
        """Put the averages into the records, and return each record as bytes."""
        for i, table in enumerate(tables.values()):
            records[str(i)] = table.records()
        return [record.tobytes() for record in records]

    def to_json(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Convert states to JSON: a row for each column and rule."""
        for batch in batches:
            records = self._records(batch.column("state").to_pylist())
            keys = batch.drop_columns(["state"])
            if self.order_by is not None:
                keys = keys.append_column(self.order_by, self._orders(records))
            for (column, rule), table in self._tables(records).items():
                empty = TailAverage(
                    rule, dtype=np.float64, nan_policy=self.nan_policy, variance=self.std
                )
                averages = [from_row(table, row, empty) for row in range(len(table))]
                states = [json.dumps(average.state_dict()) for average in averages]
                named = keys.append_column("column", pa.array([column] * len(states)))
                yield named.append_column("state", pa.array(states))

    def _orders(self, records: Array) -> pa.Array:
        """Return the latest order in each record, as a column."""
        kind = ORDERS[str(self.order_type)]
        numbers = pa.array(records["order"], mask=~records["ordered"])
        if pa.types.is_date32(kind):
            numbers = numbers.cast(pa.int32())
        return numbers.cast(kind)

    def from_json(self, rows: pa.Table, load: Load) -> Iterator[tuple[Any, bytes]]:
        """Return the keys in rows of JSON states, and the state of each key as bytes."""
        codes, keys = _codes(rows, self.by)
        records = self._records(load(keys))
        tables = self._tables(records)
        for row, column, text in zip(
            codes.tolist(), rows[COLUMN].to_pylist(), rows[STATE].to_pylist(), strict=True
        ):
            state = json.loads(text)
            average = TailAverage.from_state_dict(state)
            if not state["scalar"] or average.dtype != np.float64:
                raise ValueError(
                    f"initial_state: expected averages of numbers in float64, got {average}"
                )
            if ("variances" in state) != self.std:
                raise ValueError(
                    f"initial_state: the averages were saved {'without' if self.std else 'with'} "
                    f"standard deviations; pass std={not self.std}"
                )
            if (column, average.rule) not in tables:
                raise ValueError(
                    f"initial_state: expected averages of {_listed(self.columns)} with "
                    f"{_listed(self.rules)}, got an average of {column!r} with {average.rule}"
                )
            if average.count:
                tables[column, average.rule].put(np.array([row]), as_row(average))
        if self.order_by is not None:
            records["ordered"][codes], records["order"][codes] = _ranks(rows[self.order_by])
        return zip(keys, self._to_bytes(records, tables), strict=True)

    # Averages.

    def average(self, rows: pa.Table, load: Load) -> tuple[pa.Table, Iterator[tuple[Any, bytes]]]:
        """Average rows of several keys: return the result, and the new state of each key."""
        codes, keys = _codes(rows, self.by)
        records = self._records(load(keys))
        xs = [_floats(rows[column]) for column in self.columns]
        late, ranks = np.zeros(len(codes), bool), tuple[Array, ...]()
        kept, times = np.ones(len(codes), bool), None
        if self.order_by is not None:
            known, numbers = _ranks(rows[self.order_by])
            ranks = known, numbers, rows[TIE].to_numpy()
            rows = rows.drop_columns([TIE])
            last = records[codes]
            late = last["ordered"] & (~known | (numbers < last["order"]))
            if self.is_timed:  # late rows arrive at the newest time of their key
                times = self._times(np.where(late, last["order"], numbers))
                kept = known | last["ordered"]
                late |= ~kept
            if self.late == "error" and late.any():
                raise self._late_row(rows, codes, late, records)
        order = np.lexsort((*ranks[::-1], codes))
        rows, codes, late = rows.take(pa.array(order)), codes[order], late[order]
        kept = ~late if self.late == "drop" else kept[order]
        times = None if times is None else times[order]
        ends = np.cumsum(np.bincount(codes, minlength=len(keys))) - 1
        tables = self._tables(records)
        rows_of_tables = codes if kept.all() else np.where(kept, codes, -1)
        averages = [
            average
            for column, x in zip(self.columns, xs, strict=True)
            for average in self._scan(tables, column, x[order], rows_of_tables, times)
        ]
        if self.order_by is not None:
            newest, known = numbers[order][ends], known[order][ends]
            newer = known & (~records["ordered"] | (newest > records["order"]))
            records["order"] = np.where(newer, newest, records["order"])
            records["ordered"] |= known
        late = late.astype(np.int32)
        if self.output == "latest":
            rows = rows.select(self.key_and_order).take(pa.array(ends))
            averages = [average.take(pa.array(ends)) for average in averages]
            late, kept = np.bincount(codes, late).astype(np.int32), kept[ends]
        new_columns = [*averages, pa.array(late), pa.array(kept)]
        for name, column in zip((*self.names, LATE, KEPT), new_columns, strict=True):
            rows = rows.append_column(name, column)
        return rows, zip(keys, self._to_bytes(records, tables), strict=True)

    def _times(self, orders: Array) -> Array:
        """Return orders as times in nanoseconds."""
        unit = NANOSECONDS.get(str(self.order_type), SECOND)
        if ((orders > LONGEST / unit) | (orders < -LONGEST / unit)).any():
            raise ValueError(f"{self.order_by}: expected times within 146 years of 1970")
        times: Array = orders * unit
        return np.rint(times).astype(np.int64) if times.dtype.kind == "f" else times

    def _scan(
        self, tables: dict[Any, Table], column: str, x: Array, codes: Array, times: Array | None
    ) -> list[pa.Array]:
        """Return the statistics of one column after each row, for each window."""
        out = dict[Any, Array]()
        for rule in self.rules:
            reads = [read for read in self.reads if read[0] == rule]
            windows, before = [window for _, window in reads], tables[column, rule]
            for statistic in self.statistics:  # each scan takes the same rows
                table = tables[column, rule] = before.take(np.arange(len(before)))
                how = windows, self.nan_policy, statistic, times if is_timed(rule) else None
                results = scan_groups(table, codes, x, *how, name=column)
                out |= zip(((*read, statistic) for read in reads), results, strict=True)
        # if NaNs are omitted, a result that is NaN has too few samples yet
        no_nan = self.nan_policy == "omit"
        return [
            pa.array(out[*read, statistic], from_pandas=no_nan)
            for read in self.reads
            for statistic in self.statistics
        ]

    def _late_row(self, rows: pa.Table, codes: Array, late: Array, records: Array) -> ValueError:
        row = int(late.argmax())
        key = {name: rows[name][row].as_py() for name in self.by if name != KEY}
        last = self._orders(records[codes[row : row + 1]])[0].as_py()
        expected = "a time" if last is None else f"at least {last}, the latest so far"
        return ValueError(
            f"{self.order_by}: expected {expected}, got "
            f"{rows[self.order_by][row].as_py()} in a row of {key} ({int(late.sum())} rows are "
            "late); pass late='include' or late='drop' to accept late rows"
        )

    def average_sorted(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Average rows that are sorted by key; the states of a key come before its other rows.

        Only the state of the last key is kept from batch to batch.
        """
        states: dict[Any, bytes] = {}
        latest = None  # with output="latest", the row of a key that the next batch may continue

        def load(keys: list[Any]) -> list[Any]:
            return [states.get(key) for key in keys]

        for batch in batches:
            rows = pa.Table.from_batches([batch])
            if not len(rows):
                continue
            (last,) = _keys(rows[-1:], self.by)
            if STATE in rows.schema.names:
                states.update(self.from_json(rows.filter(rows[STATE].is_valid()), load))
                rows = rows.filter(rows[STATE].is_null()).drop_columns([COLUMN, STATE])
            if len(rows):
                rows, new = self.average(rows, load)
                states.update(new)
                if self.output == "latest":
                    if latest is not None and _keys(latest, self.by) != _keys(rows[:1], self.by):
                        yield from latest.to_batches()
                    latest, rows = rows[-1:], rows[:-1]
                yield from rows.to_batches()
            states = {last: states[last]} if last in states else {}
        if latest is not None:
            yield from latest.to_batches()


def _spread(buckets: int) -> Array:
    """Return a number for each bucket, so that Spark spreads buckets evenly over its partitions.

    Spark puts a number into partition hash(number) mod n. Here, the number of bucket i has
    hash(number) mod `buckets` = i, so buckets are spread evenly for every n that divides `buckets`.
    """
    numbers: dict[int, int] = {}
    number = 0
    while len(numbers) < buckets:
        numbers.setdefault(_hash(number) % buckets, number)
        number += 1
    return np.array([numbers[bucket] for bucket in range(buckets)], np.int32)


def _hash(number: int) -> int:
    """Return Spark's hash of an int: Murmur3 of its 32 bits, with the seed 42."""
    mask = 0xFFFFFFFF

    def rotated(x: int, bits: int) -> int:
        return (x << bits | x >> (32 - bits)) & mask

    k = rotated(number * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
    h = (rotated(42 ^ k, 13) * 5 + 0xE6546B64 & mask) ^ 4
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    h ^= h >> 16
    return h - (h >> 31 << 32)


def _bundles(buckets: Any, rows: list[bytes]) -> pa.RecordBatch:
    arrays = [pa.array(buckets, pa.int32()), pa.array(rows, pa.binary())]
    return pa.RecordBatch.from_arrays(arrays, ["bucket", "rows"])


def to_bytes(rows: pa.Table | pa.RecordBatch) -> bytes:
    """Return rows as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write(rows)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream


def from_bytes(bundles: Iterable[bytes]) -> pa.Table:
    """Return the rows of several bundles."""
    tables = [pa.ipc.open_stream(bundle).read_all() for bundle in bundles]
    return pa.concat_tables(tables).combine_chunks()


def _codes(rows: pa.Table, by: Sequence[str]) -> tuple[Array, list[Any]]:
    """Return the key number of each row, in order of appearance, and the keys as tuples."""
    codes = np.zeros(len(rows), np.int64)
    for name in by:
        values = _key_column(rows, name).dictionary_encode(null_encoding="encode")
        codes = codes * len(values.dictionary) + values.indices.to_numpy()
        _, first, codes = np.unique(codes, return_index=True, return_inverse=True)
        order = np.argsort(first)
        codes, first = np.argsort(order)[codes], first[order]
    return codes, _keys(rows.take(pa.array(first)), by)


def _keys(rows: pa.Table, by: Sequence[str]) -> list[Any]:
    """Return the key of each row. All NaNs are one object: NaN is not equal to NaN."""
    columns = [_key_column(rows, name).to_pylist() for name in by]
    columns = [[math.nan if value != value else value for value in column] for column in columns]
    return list(zip(*columns, strict=True))


def _key_column(rows: pa.Table, name: str) -> pa.Array:
    """Return a column of a key, with 0.0 for -0.0: both are one key."""
    column = rows[name].combine_chunks()
    return pc.add(column, 0.0) if pa.types.is_floating(column.type) else column


def _floats(column: pa.ChunkedArray) -> Array:
    """Return a column as floats, with NaN for null."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    floats: Array = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return floats


def _ranks(column: pa.ChunkedArray) -> tuple[Array, Array]:
    """Return where an order is known, neither null nor NaN, and its numbers, 0 where unknown."""
    if pa.types.is_date32(column.type):
        column = column.cast(pa.int32())
    kind = pa.float64() if pa.types.is_floating(column.type) else pa.int64()
    known: Array = ~column.is_null(nan_is_null=True).to_numpy()
    numbers: Array = column.cast(kind).fill_null(0).to_numpy()
    return known, np.where(known, numbers, 0)


def _listed(values: Any) -> str:
    """Return a value as text for an error message."""
    return ", ".join(map(str, values)) if isinstance(values, tuple) else repr(values)
