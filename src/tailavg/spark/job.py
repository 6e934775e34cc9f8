"""What is done to rows, in every process of Spark: Arrow in, Arrow out, and states as bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from tailavg.extras import needs

with needs("spark"):
    import pyarrow as pa
    import pyarrow.compute as pc

from tailavg.core.rules import Rule
from tailavg.core.windows import Window, shown
from tailavg.io import state as layout
from tailavg.numpy import TailAverage
from tailavg.numpy.arithmetic import Array
from tailavg.numpy.average import NanPolicy
from tailavg.numpy.kernel import kernel
from tailavg.numpy.keyed import as_row, from_row
from tailavg.numpy.table import Table, record_type

__all__ = [
    "BUCKET",
    "COLUMN",
    "EVERY",
    "KEPT",
    "KEY",
    "LATE",
    "ROWS",
    "STATE",
    "TIE",
    "Job",
    "Late",
    "Output",
    "from_bytes",
    "to_bytes",
]

Output = Literal["rows", "latest"]
Late = Literal["include", "drop", "error"]

VERSION = 1
"""Of the bytes that the state of a key is."""

EVERY = -1
"""A bucket that every batch has, and no key."""

ROWS = 50_000
"""At most so many are in a bundle that is given back."""

# Columns of ours beside those of the user.
BUCKET, KEY = "__tailavg_bucket", "__tailavg_key"
LATE, KEPT = "__tailavg_late", "__tailavg_kept"
COLUMN, STATE, TIE = "__tailavg_column", "__tailavg_state", "__tailavg_tie"

ORDERS = {
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
"""What rows can be ordered by: Spark's names, and the types in Arrow."""

Load = Callable[[list[Any]], list[Any]]
"""What gives the state of each of some keys, as bytes, or None."""

_FIXED = ("columns", "rules", "by", "order_by", "order_type", "nan_policy", "buckets")
"""What must stay the same when a query goes on: all that states depend on."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be done, in every process that does it."""

    columns: tuple[str, ...]
    rules: tuple[Rule, ...]
    by: tuple[str, ...]
    order_by: str | None
    order_type: str | None
    nan_policy: NanPolicy
    buckets: int
    # what may change when a query goes on:
    reads: tuple[tuple[int, Window | None], ...] = ()
    names: tuple[str, ...] = ()
    output: Output = "rows"
    late: Late = "include"

    # What a checkpoint says of itself.

    def text(self) -> str:
        """What must stay the same, as JSON."""
        kept = {name: getattr(self, name) for name in _FIXED}
        kept["rules"] = [layout.plain(rule) for rule in self.rules]
        return json.dumps({"format": "tailavg spark", "version": VERSION, **kept})

    @classmethod
    def from_text(cls, text: str) -> Job:
        """What `text` says."""
        said: dict[str, Any] = json.loads(text)
        version = said.pop("format", None), said.pop("version", None)
        if version != ("tailavg spark", VERSION):
            raise ValueError(
                f"checkpoint: expected version {VERSION} of tailavg's states, got {version}"
            )
        rules = tuple(map(layout.rule_from, said.pop("rules")))
        return cls(
            rules=rules, columns=tuple(said.pop("columns")), by=tuple(said.pop("by")), **said
        )

    def check(self, text: str) -> None:
        """Raise a ValueError unless a checkpoint is of averages as these."""
        before = Job.from_text(text)
        for name in _FIXED:
            was, now = getattr(before, name), getattr(self, name)
            if was != now:
                raise ValueError(
                    f"{'window' if name == 'rules' else name}: expected {_said(was)}, with which "
                    f"this checkpoint was made, got {_said(now)}; start with a new checkpoint"
                )

    # Bundles of rows.

    def pack(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows as bundles, by bucket."""
        ids = _spread(self.buckets)
        yield _bundles([EVERY], [b""])
        for batch in batches:
            places = batch.column(BUCKET).to_numpy().astype(np.uint16)
            order = np.argsort(places, kind="stable")
            rows = batch.drop_columns([BUCKET]).take(pa.array(order))
            sizes = np.bincount(places, minlength=self.buckets)
            used = np.flatnonzero(sizes)
            starts = (np.cumsum(sizes) - sizes)[used].tolist()
            cut = zip(starts, sizes[used].tolist(), strict=True)
            yield _bundles(ids[used], [to_bytes(rows.slice(*piece)) for piece in cut])

    def unpack(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows in bundles."""
        for batch in batches:
            for bundle in batch.column("rows"):
                yield from pa.ipc.open_stream(bundle.as_buffer())

    # States as bytes: the version, the latest order, and a record for each column and rule.

    @cached_property
    def _record(self) -> np.dtype[Any]:
        order = "<f8" if self.order_type in ("float", "double") else "<i8"
        rules = self.rules * len(self.columns)
        parts = [(str(i), record_type(rule)) for i, rule in enumerate(rules)]
        return np.dtype([("version", "u1"), ("ordered", "?"), ("order", order), *parts])

    def _records(self, states: Iterable[Any]) -> Array:
        """The states of several keys as records that can be changed; None is a new key."""
        none = np.zeros(1, self._record)
        none["version"] = VERSION
        empty = none.tobytes()
        held = [empty if state is None else bytes(state) for state in states]
        for state in held:
            if len(state) != len(empty) or state[0] != VERSION:
                raise ValueError(
                    f"state: expected {len(empty)} bytes, the first of them {VERSION}, got "
                    f"{len(state)}, {shown(state)}"
                )
        return np.frombuffer(b"".join(held), self._record).copy()

    def _tables(self, records: Array) -> list[Table]:
        """The averages in records, for each column and rule."""
        rules = self.rules * len(self.columns)
        return [Table.from_records(rule, records[str(i)]) for i, rule in enumerate(rules)]

    def _stored(self, records: Array, tables: Sequence[Table]) -> list[bytes]:
        """Records of these averages, as bytes."""
        for i, table in enumerate(tables):
            records[str(i)] = table.records()
        return [record.tobytes() for record in records]

    def spell(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """States as JSON, in rows for each column and rule."""
        for batch in batches:
            records = self._records(batch.column("state").to_pylist())
            rest = batch.drop_columns(["state"])
            if self.order_by is not None:
                rest = rest.append_column(self.order_by, self._orders(records))
            for i, table in enumerate(self._tables(records)):
                empty = TailAverage(table.rule, dtype=np.float64, nan_policy=self.nan_policy)
                averages = [from_row(table, row, empty) for row in range(len(table))]
                states = [json.dumps(average.state_dict()) for average in averages]
                column = pa.array([self.columns[i // len(self.rules)]] * len(states))
                yield rest.append_column("column", column).append_column("state", pa.array(states))

    def _orders(self, records: Array) -> pa.Array:
        """The latest order in each record, as a column."""
        kind = ORDERS[str(self.order_type)]
        numbers = pa.array(records["order"], mask=~records["ordered"])
        if pa.types.is_date32(kind):
            numbers = numbers.cast(pa.int32())
        return numbers.cast(kind)

    def read(self, rows: pa.Table, load: Load) -> Iterator[tuple[Any, bytes]]:
        """From rows of states in JSON: the keys, and the state of each as bytes."""
        codes, keys = _codes(rows, self.by)
        records = self._records(load(keys))
        tables = self._tables(records)
        found = zip(rows[COLUMN].to_pylist(), rows[STATE].to_pylist(), strict=True)
        for code, (column, text) in zip(codes.tolist(), found, strict=True):
            state = json.loads(text)
            average = TailAverage.from_state_dict(state)
            if not state["scalar"] or average.dtype != np.float64:
                raise ValueError(
                    f"initial_state: expected averages of numbers in float64, got {average}"
                )
            if column not in self.columns or average.rule not in self.rules:
                raise ValueError(
                    f"initial_state: expected averages of {_said(self.columns)} by "
                    f"{_said(self.rules)}, got one of {column!r} by {average.rule}"
                )
            place = self.columns.index(column) * len(self.rules) + self.rules.index(average.rule)
            if average.count:
                tables[place].put(np.array([code]), as_row(average))
        if self.order_by is not None:
            known, numbers = _ranks(rows[self.order_by])
            records["ordered"][codes], records["order"][codes] = known, numbers
        return zip(keys, self._stored(records, tables), strict=True)

    # Averages.

    def average(self, rows: pa.Table, load: Load) -> tuple[pa.Table, Iterator[tuple[Any, bytes]]]:
        """Average rows of several keys: the result, and what is then the state of each key."""
        codes, keys = _codes(rows, self.by)
        records = self._records(load(keys))
        xs = [_floats(rows[column]) for column in self.columns]
        late, ranks = np.zeros(len(codes), bool), tuple[Array, ...]()
        if self.order_by is not None:
            known, numbers = _ranks(rows[self.order_by])
            ranks = known, numbers, rows[TIE].to_numpy()
            rows = rows.drop_columns([TIE])
            last = records[codes]
            late = last["ordered"] & (~known | (numbers < last["order"]))
            if self.late == "error" and late.any():
                raise self._late_row(rows, codes, late, records)
        order = np.lexsort((*ranks[::-1], codes))
        rows, codes, late = rows.take(pa.array(order)), codes[order], late[order]
        kept = ~late if self.late == "drop" else np.ones(len(codes), bool)
        ends = np.cumsum(np.bincount(codes, minlength=len(keys))) - 1
        tables = self._tables(records)
        averages = [
            average
            for i, x in enumerate(xs)
            for average in self._scan(tables, i, x[order], codes, kept)
        ]
        if self.order_by is not None:
            newest, known = numbers[order][ends], known[order][ends]
            newer = known & (~records["ordered"] | (newest > records["order"]))
            records["order"] = np.where(newer, newest, records["order"])
            records["ordered"] |= known
        late = late.astype(np.int32)
        if self.output == "latest":
            named = self.by if self.order_by is None else (*self.by, self.order_by)
            rows = rows.select(named).take(pa.array(ends))
            averages = [average.take(pa.array(ends)) for average in averages]
            late, kept = np.bincount(codes, late).astype(np.int32), kept[ends]
        for name, column in zip(
            (*self.names, LATE, KEPT), (*averages, pa.array(late), pa.array(kept)), strict=True
        ):
            rows = rows.append_column(name, column)
        return rows, zip(keys, self._stored(records, tables), strict=True)

    def _scan(
        self, tables: list[Table], column: int, x: Array, codes: Array, kept: Array
    ) -> list[pa.Array]:
        """The averages of one column after each row, for each window."""
        missing = np.isnan(x) & kept
        if self.nan_policy == "raise" and missing.any():
            raise ValueError(
                f"{self.columns[column]}: expected no null or NaN (nan_policy='raise'), got "
                f"{int(missing.sum())} in {len(x)} rows"
            )
        counted = kept & ~missing if self.nan_policy == "omit" else kept
        out, loops = dict[int, pa.Array](), kernel(len(x), max(1, len(tables[0])))
        for number, table in enumerate(tables[column * len(self.rules) :][: len(self.rules)]):
            places = [place for place, (rule, _) in enumerate(self.reads) if rule == number]
            windows = [self.reads[place][1] for place in places]
            before = table.counts.copy()
            with np.errstate(all="ignore"):
                found = table.scan_groups(codes, x, counted, windows, loops)
            mask = None
            if not counted.all():  # a key has no average before its first sample
                taken = np.cumsum(counted)
                first = np.concatenate([[0], np.cumsum(np.bincount(codes, minlength=len(table)))])
                start = np.concatenate([[0], taken])[first[:-1]]
                mask = (before[codes] == 0) & (taken == start[codes])
            for place, averages in zip(places, found, strict=True):
                out[place] = pa.array(averages, mask=mask)
        return [out[place] for place in range(len(self.reads))]

    def _late_row(self, rows: pa.Table, codes: Array, late: Array, records: Array) -> ValueError:
        row = int(late.argmax())
        key = {name: rows[name][row].as_py() for name in self.by if name != KEY}
        last = self._orders(records[codes[row : row + 1]])[0].as_py()
        return ValueError(
            f"{self.order_by}: expected at least {last}, the latest so far (late='error'), got "
            f"{rows[self.order_by][row].as_py()} in a row of {key}; {int(late.sum())} rows are late"
        )

    def walk(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Average rows that are sorted by key, those of states first; of few keys at a time."""
        held: dict[Any, bytes] = {}
        waiting = None  # the latest row of a key that may go on

        def load(keys: list[Any]) -> list[Any]:
            return [held.get(key) for key in keys]

        for batch in batches:
            rows = pa.Table.from_batches([batch])
            if not len(rows):
                continue
            _, (last,) = _codes(rows.slice(len(rows) - 1), self.by)
            if STATE in rows.schema.names:
                states = rows.filter(rows[STATE].is_valid())
                held.update(self.read(states, load))
                rows = rows.filter(rows[STATE].is_null()).drop_columns([COLUMN, STATE])
            if len(rows):
                rows, states = self.average(rows, load)
                held.update(states)
                if self.output == "latest":
                    if (
                        waiting is not None
                        and _keys(waiting, self.by)[0] != _keys(rows, self.by)[0]
                    ):
                        yield from waiting.to_batches()
                    waiting = rows.slice(len(rows) - 1)
                    rows = rows.slice(0, len(rows) - 1)
                yield from rows.to_batches()
            held = {last: held[last]} if last in held else {}
        if waiting is not None:
            yield from waiting.to_batches()


def _spread(buckets: int) -> Array:
    """A number for each bucket, so that Spark spreads them evenly over its partitions.

    It puts what has the number i into partition hash(i) mod n. Where that is i mod n for `buckets`
    partitions, it is so for each number of them that divides it, too.
    """
    found: dict[int, int] = {}
    number = 0
    while len(found) < buckets:
        found.setdefault(_hash(number) % buckets, number)
        number += 1
    return np.array([found[bucket] for bucket in range(buckets)], np.int32)


def _hash(number: int) -> int:
    """Spark's hash of an int: Murmur3 of its 32 bits, with the seed 42."""
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
    """Rows as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write(rows)
    found: bytes = sink.getvalue().to_pybytes()
    return found


def from_bytes(bundles: Iterable[bytes]) -> pa.Table:
    """The rows of several bundles."""
    tables = [pa.ipc.open_stream(bundle).read_all() for bundle in bundles]
    return pa.concat_tables(tables).combine_chunks()


def _codes(rows: pa.Table, by: Sequence[str]) -> tuple[Array, list[Any]]:
    """The number of each row's key, in the order in which they appear, and the keys as tuples."""
    codes = np.zeros(len(rows), np.int64)
    for name in by:
        column = rows[name].combine_chunks()
        if pa.types.is_floating(column.type):
            column = pc.add(column, 0.0)  # -0.0 and 0.0 are one key
        found = column.dictionary_encode(null_encoding="encode")
        codes = codes * len(found.dictionary) + found.indices.to_numpy()
        _, first, codes = np.unique(codes, return_index=True, return_inverse=True)
        order = np.argsort(first)  # those of the first rows first
        codes, first = np.argsort(order)[codes], first[order]
    return codes, _keys(rows.take(pa.array(first)), by)


def _keys(rows: pa.Table, by: Sequence[str]) -> list[Any]:
    """The key of each row."""
    return list(zip(*(map(_key, rows[name].to_pylist()) for name in by), strict=True))


def _key(value: Any) -> Any:
    """A value in a key: the same object for every NaN, which does not equal itself."""
    if isinstance(value, float):
        return math.nan if value != value else value + 0.0
    return value


def _floats(column: pa.ChunkedArray) -> Array:
    """A column as floats, with NaN for null."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    found: Array = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return found


def _ranks(column: pa.ChunkedArray) -> tuple[Array, Array]:
    """A column to order by: where it is known, and as numbers, with 0 where it is not."""
    if pa.types.is_date32(column.type):
        column = column.cast(pa.int32())
    kind = pa.float64() if pa.types.is_floating(column.type) else pa.int64()
    known: Array = ~column.is_null(nan_is_null=True).to_numpy()
    numbers: Array = column.cast(kind).fill_null(0).to_numpy()
    return known, np.where(known, numbers, 0)


def _said(values: Any) -> str:
    """As in a message."""
    return ", ".join(map(str, values)) if isinstance(values, tuple) else repr(values)
