"""Tail averages in Spark: of keys in a stream that never ends, and of rows in a table.

tail_mean(events, "loss", 0.25, by="run", order_by="step")   # the last quarter of each run

In a stream, rows travel in bundles. Spark hands rows to a stateful Python function one by one, and
calls it once for each key: both cost more than the averages. So rows are packed into Arrow bytes
before they are shuffled, each with those of the same bucket of keys, and unpacked at the end:

    rows ─▶ pack ─▶ shuffle by bucket ─▶ the state of each key: read, average, write ─▶ unpack

What is not averaged passes through as Arrow has it: nothing is rounded, and no null becomes a NaN.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from tailavg.core.extras import needs

with needs("spark"):
    import pandas as pd
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql import functions as sql
    from pyspark.sql import types as kinds
    from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from tailavg.core import state as layout
from tailavg.core.rules import AnyTail, ExactWindow, Rule, as_rule, shared_rules
from tailavg.core.windows import AnyWindow, Fixed, Growing, Window, as_window, shown
from tailavg.numpy import TailAverage, compiling, loops
from tailavg.numpy.arithmetic import Array
from tailavg.numpy.average import NanPolicy
from tailavg.numpy.packed import Packed, record

__all__ = ["saved_states", "tail_mean"]

Output = Literal["rows", "latest"]
Late = Literal["include", "drop", "error"]

VERSION = 1
"""Of the bytes that the state of a key is."""

BUCKETS = 64
"""Into how many parts keys are divided."""

_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_BUNDLE = "bucket int, rows binary"
_EVERY = -1  # a bucket that every batch has, and no key
_ROWS = 50_000  # at most, in a bundle that is given back

# Columns of ours beside those of the user.
_BUCKET, _KEY = "__tailavg_bucket", "__tailavg_key"
_LATE, _KEPT = "__tailavg_late", "__tailavg_kept"
_COLUMN, _STATE = "__tailavg_column", "__tailavg_state"

_ORDERS = {  # what rows can be ordered by: its name, and in Arrow
    "tinyint": (kinds.ByteType(), pa.int8()),
    "smallint": (kinds.ShortType(), pa.int16()),
    "int": (kinds.IntegerType(), pa.int32()),
    "bigint": (kinds.LongType(), pa.int64()),
    "float": (kinds.FloatType(), pa.float32()),
    "double": (kinds.DoubleType(), pa.float64()),
    "date": (kinds.DateType(), pa.date32()),
    "timestamp": (kinds.TimestampType(), pa.timestamp("us", "UTC")),
    "timestamp_ntz": (kinds.TimestampNTZType(), pa.timestamp("us")),
}
_NESTED = (kinds.ArrayType, kinds.MapType, kinds.StructType, kinds.VariantType)


def tail_mean(
    df: DataFrame,
    columns: str | Sequence[str],
    window: AnyWindow | Rule | Sequence[AnyWindow],
    *,
    by: str | Sequence[str] = (),
    order_by: str | None = None,
    output: Output = "rows",
    late: Late = "include",
    nan_policy: NanPolicy = "omit",
    ttl: timedelta | None = None,
    initial_state: DataFrame | None = None,
    buckets: int = BUCKETS,
) -> DataFrame:
    """The average of the tail of each key, after each row: of a stream or a table.

    The averages of `"loss"` are in a column `loss_tail`; with several windows there is one for each,
    as `loss_tail_0_25`. A streaming query needs the RocksDB state store, append mode (the default)
    and a checkpoint; with those, each row is averaged exactly once, whatever is killed.

    Args:
        df: A DataFrame, streaming or not, of Spark or Spark Connect.
        columns: What to average: the names of columns of numbers.
        window: How many samples are averaged, and how: a number (an int for the last that many, a
            float in (0, 1] for the last fraction), a window or a rule, as for `TailAverage`. Or
            several numbers or windows: one `AnyTail` serves all fractions.
        by: The columns of the key. Without any, there is one average of all.
        order_by: The column that puts the rows of a key in order: numbers, dates or timestamps.
            Spark keeps no order of its own, so a table needs it. A stream without it takes the rows
            of a micro-batch as they arrive. Rows of the same key and order are taken in the order
            of their values.
        output: `"rows"` adds columns to the rows. `"latest"` has one row for each key (in a stream,
            for each key and micro-batch): the key, `order_by` and the averages.
        late: What is done with a row whose `order_by` is less than that of one averaged in an
            earlier micro-batch, or null: `"include"` averages it as if it were next, `"drop"` drops
            it, `"error"` ends the query. Their number is in the query's progress, in
            `observedMetrics`, under `"tailavg loss_tail"`.
        nan_policy: What is done with a null or NaN in `columns`. `"omit"`: it is not counted, and
            the row has the average as it was, or null if there is none yet. `"propagate"`: averages
            are NaN while they have it in their window. `"raise"` ends the query.
        ttl: Forget a key that has had no row for so long, of the clock on the wall. Streams only.
        initial_state: States to go on from, as `saved_states` gives them. In a stream they are
            taken at its very first start only.
        buckets: Into how many parts the keys of a stream are divided: the most tasks that work side
            by side. It stays the same for a checkpoint.
    """
    columns, by = _names(columns, "columns"), _names(by, "by")
    for name, value, allowed in (("output", output, Output), ("late", late, Late)):
        if value not in get_args(allowed):
            raise ValueError(f"{name}: expected one of {get_args(allowed)}, got {value!r}")
    if nan_policy not in get_args(NanPolicy):
        raise ValueError(f"nan_policy: expected one of {get_args(NanPolicy)}, got {nan_policy!r}")
    if type(buckets) is not int or not 1 <= buckets <= 4096:
        raise ValueError(f"buckets: expected an int from 1 to 4096, got {shown(buckets)}")
    reads, suffixes = _reads(window)
    schema = df.schema
    _check_columns(schema, columns, by, order_by)
    names = [f"{column}_tail{suffix}" for column in columns for suffix in suffixes]
    if taken := [name for name in names if name in schema.names]:
        raise ValueError(
            f"df: expected no column {taken[0]!r}, where the averages go; rename or drop it"
        )
    if not by:
        df, by = df.withColumn(_KEY, sql.lit("")), (_KEY,)
    if output == "latest":
        df = df.select(*dict.fromkeys([*by, *_listed(order_by), *columns]))
    rules = list(dict.fromkeys(rule for rule, _ in reads))
    job = _Job(
        columns=columns,
        rules=tuple(rules),
        by=by,
        order_by=order_by,
        order_type=None if order_by is None else schema[order_by].dataType.simpleString(),
        nan_policy=nan_policy,
        buckets=buckets,
        reads=tuple((rules.index(rule), asked) for rule, asked in reads),
        names=tuple(names),
        output=output,
        late=late,
    )
    states = None
    if initial_state is not None:
        states = _initial(initial_state, df, by, order_by)
    if df.isStreaming:
        averaged = _of_stream(job, df, states, ttl)
        late_rows = sql.coalesce(sql.sum(_LATE), sql.lit(0)).alias("late")
        averaged = averaged.observe(f"tailavg {names[0]}", late_rows)
    else:
        if ttl is not None:
            raise ValueError("ttl: expected none for a table, which has no clock, got one")
        if order_by is None:
            raise ValueError("order_by: expected a column, since a table has no order, got none")
        averaged = _of_table(job, df, states)
    return averaged.where(_KEPT).drop(_LATE, _KEPT, _KEY)


def saved_states(spark: SparkSession, checkpoint: str, operator: int = 0) -> DataFrame:
    """The states that a streaming query has in its checkpoint, one row for each average.

    The columns are those of the key, `order_by` with the latest it has seen, `column`, the name of
    the column averaged, and `state`, JSON that `TailAverage.from_state_dict` takes. `tail_mean`
    takes all of it as `initial_state`.

    Args:
        spark: The session.
        checkpoint: The folder of the query's checkpoint.
        operator: The number of the stateful operation, if the query has several.
    """
    reader = spark.read.format("statestore").option("operatorId", operator)
    described = reader.option("stateVarName", "description").load(checkpoint).collect()
    if not described:
        raise ValueError(f"{checkpoint}: expected a checkpoint of a query that has run, got none")
    job = _Job.from_text(described[0]["value"]["text"])
    saved = reader.option("stateVarName", "averages").load(checkpoint)
    found = [field for field in saved.schema["user_map_key"].dataType if field.name != _KEY]
    chosen = [f"user_map_key.`{field.name}`" for field in found] + ["user_map_value.state"]
    if job.order_by is not None:
        found.append(kinds.StructField(job.order_by, _ORDERS[str(job.order_type)][0]))
    found += [kinds.StructField(name, kinds.StringType()) for name in ("column", "state")]
    return saved.select(*chosen).mapInArrow(job.spell, kinds.StructType(found))


def _names(names: str | Sequence[str], what: str) -> tuple[str, ...]:
    found = (names,) if isinstance(names, str) else tuple(names)
    if not all(isinstance(name, str) for name in found) or len(set(found)) < len(found):
        raise ValueError(f"{what}: expected names of columns, each once, got {names!r}")
    if not found and what == "columns":
        raise ValueError("columns: expected at least one to average, got none")
    return found


def _listed(name: str | None) -> list[str]:
    return [] if name is None else [name]


def _reads(window: Any) -> tuple[list[tuple[Rule, Window | None]], list[str]]:
    """For each average of a column its rule, and the window to read if it has none; its name."""
    if isinstance(window, list | tuple):
        windows = [as_window(one) for one in window]
        if not windows or len(set(windows)) < len(windows):
            raise ValueError(f"window: expected at least one, each once, got {window!r}")
        return shared_rules(windows), [f"_{_text(one)}" for one in windows]
    rule = as_rule(window)
    if isinstance(rule, AnyTail):
        raise ValueError(
            "window: expected windows to read, such as [0.1, 0.25, 0.5], which share one AnyTail; "
            f"got {rule}"
        )
    if isinstance(rule, ExactWindow):
        raise ValueError(
            f"window: expected a rule with a small state, got {rule}, which keeps its samples; "
            "use Spark's avg over a Window with rowsBetween"
        )
    return [(rule, None)], [""]


def _text(window: Window) -> str:
    """A window in the name of a column, without the dot that would need quotes in SQL."""
    if isinstance(window, Fixed):
        return str(window.k)
    most = "" if window.at_most is None else f"_{window.at_most}"
    return str(window.c).replace(".", "_") + most


def _check_columns(
    schema: Any, columns: Sequence[str], by: Sequence[str], order_by: str | None
) -> None:
    def kind(name: str, what: str) -> Any:
        if name not in schema.names:
            raise ValueError(f"{what}: expected one of {schema.names}, got {name!r}")
        return schema[name].dataType

    for name in columns:
        if not isinstance(kind(name, "columns"), kinds.NumericType | kinds.BooleanType):
            got = kind(name, "columns").simpleString()
            raise TypeError(f"columns: expected numbers, got {name!r} of {got}; cast it")
    for name in by:
        if isinstance(kind(name, "by"), _NESTED):
            got = kind(name, "by").simpleString()
            raise TypeError(f"by: expected plain values, got {name!r} of {got}; select its parts")
    for name in _listed(order_by):
        got = kind(name, "order_by").simpleString()
        if got not in _ORDERS:
            raise TypeError(
                f"order_by: expected numbers, dates or timestamps, got {name!r} of {got}; cast it"
            )


def _initial(
    states: DataFrame, df: DataFrame, by: Sequence[str], order_by: str | None
) -> DataFrame:
    """Initial states, with the columns of the key as the data has them."""
    if by == (_KEY,):
        states = states.withColumn(_KEY, sql.lit(""))
    for name in (*by, "column", "state"):
        if name not in states.columns:
            raise ValueError(
                f"initial_state: expected a column {name!r}, as of saved_states, got "
                f"{states.columns}"
            )
    typed = [sql.col(name).cast(df.schema[name].dataType).alias(name) for name in by]
    for name in _listed(order_by):
        known = sql.col(name) if name in states.columns else sql.lit(None)
        typed.append(known.cast(df.schema[name].dataType).alias(name))
    return states.select(*typed, sql.col("column").alias(_COLUMN), sql.col("state").alias(_STATE))


def _of_stream(
    job: _Job, df: DataFrame, states: DataFrame | None, ttl: timedelta | None
) -> DataFrame:
    """Averages by a stateful operation."""
    spark = df.sparkSession
    if "RocksDB" not in (spark.conf.get(_PROVIDER, "") or ""):
        raise ValueError(
            "df: expected a session with the RocksDB state store, which streaming averages need; "
            f'call spark.conf.set("{_PROVIDER}", "{_ROCKSDB}") first'
        )
    if ttl is not None and not (isinstance(ttl, timedelta) and ttl > timedelta(0)):
        raise ValueError(f"ttl: expected a positive timedelta, got {ttl!r}")
    part = sql.pmod(sql.hash(*job.by), sql.lit(job.buckets)).alias(_BUCKET)

    def packed(rows: DataFrame) -> Any:
        return rows.select("*", part).mapInArrow(job.pack, _BUNDLE).groupBy("bucket")

    key = kinds.StructType([df.schema[name] for name in job.by])
    bundles = packed(df).transformWithStateInPandas(
        _Processor(job, key, ttl),
        "rows binary",
        "Append",
        "None" if ttl is None else "ProcessingTime",
        None if states is None else packed(states),
    )
    averaged: DataFrame = bundles.mapInArrow(job.unpack, _schema(job, df))
    return averaged


def _of_table(job: _Job, df: DataFrame, states: DataFrame | None) -> DataFrame:
    """Averages of partitions whose rows are sorted by key: of one key after another.

    The states come as rows before all others of their key.
    """
    schema, order = _schema(job, df), [*job.by]
    if states is not None:
        df = df.unionByName(states, allowMissingColumns=True)
        order.append(sql.col(_STATE).isNull())
    first = sql.col(str(job.order_by))
    if job.order_type in ("float", "double"):  # in order, a NaN is as a null
        first = sql.nanvl(first, sql.lit(None))
    order += [first, *job.columns]
    rows = df.repartition(*job.by).sortWithinPartitions(*order)
    return rows.mapInArrow(job.walk, schema)


def _schema(job: _Job, df: DataFrame) -> Any:
    """The columns of the result, and two of ours."""
    kept = df.schema.fields
    if job.output == "latest":
        kept = [df.schema[name] for name in (*job.by, *_listed(job.order_by))]
    averages = [kinds.StructField(name, kinds.DoubleType()) for name in job.names]
    ours = [
        kinds.StructField(_LATE, kinds.IntegerType()),
        kinds.StructField(_KEPT, kinds.BooleanType()),
    ]
    return kinds.StructType([*kept, *averages, *ours])


Load = Callable[[list[Any]], list[Any]]
"""What gives the state of each of some keys, as bytes, or None."""

_FIXED = ("columns", "rules", "by", "order_by", "order_type", "nan_policy", "buckets")
"""What must stay the same when a query goes on: all that states depend on."""


@dataclass(frozen=True, kw_only=True)
class _Job:
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
    def from_text(cls, text: str) -> _Job:
        """What `text` says."""
        said = json.loads(text)
        version = said.pop("format", None), said.pop("version", None)
        if version != ("tailavg spark", VERSION):
            raise ValueError(
                f"checkpoint: expected version {VERSION} of tailavg's states, got {version}"
            )
        rules = tuple(map(layout.rule_from, said.pop("rules")))
        names = {name: tuple(said.pop(name)) for name in ("columns", "by")}
        return cls(rules=rules, **names, **said)

    def check(self, text: str) -> None:
        """Raise a ValueError unless a checkpoint is of averages as these."""
        before = _Job.from_text(text)
        for name in _FIXED:
            was, now = getattr(before, name), getattr(self, name)
            if was != now:
                raise ValueError(
                    f"{'window' if name == 'rules' else name}: expected {_said(was)}, with which this checkpoint was made, got "
                    f"{_said(now)}; start with a new checkpoint"
                )

    # Bundles of rows.

    def pack(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows as bundles, by bucket."""
        ids = _spread(self.buckets)
        yield _bundles([_EVERY], [b""])
        for batch in batches:
            places = batch.column(_BUCKET).to_numpy().astype(np.uint16)
            order = np.argsort(places, kind="stable")
            rows = batch.drop_columns([_BUCKET]).take(pa.array(order))
            sizes = np.bincount(places, minlength=self.buckets)
            used = np.flatnonzero(sizes)
            starts = (np.cumsum(sizes) - sizes)[used].tolist()
            cut = zip(starts, sizes[used].tolist(), strict=True)
            yield _bundles(ids[used], [_to_bytes(rows.slice(*piece)) for piece in cut])

    def unpack(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows in bundles."""
        for batch in batches:
            for bundle in batch.column("rows"):
                yield from pa.ipc.open_stream(bundle.as_buffer())

    # States as bytes: the version, the latest order, and a record for each column and rule.

    @cached_property
    def _record(self) -> np.dtype[Any]:
        order = "<f8" if self.order_type in ("float", "double") else "<i8"
        parts = [(str(i), record(rule)) for i, rule in enumerate(self.rules * len(self.columns))]
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

    def _packed(self, records: Array) -> list[Packed]:
        """The averages in records, for each column and rule."""
        rules = self.rules * len(self.columns)
        return [Packed.from_records(rule, records[str(i)]) for i, rule in enumerate(rules)]

    def _stored(self, records: Array, packed: Sequence[Packed]) -> list[bytes]:
        """Records of these averages, as bytes."""
        for i, one in enumerate(packed):
            records[str(i)] = one.records()
        return [one.tobytes() for one in records]

    def spell(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """States as JSON, in rows for each column and rule."""
        for batch in batches:
            records = self._records(batch.column("state").to_pylist())
            rest = batch.drop_columns(["state"])
            if self.order_by is not None:
                rest = rest.append_column(self.order_by, self._orders(records))
            for i, packed in enumerate(self._packed(records)):
                states = []
                for average in packed.averages(np.arange(len(packed))):
                    state = average.state_dict() | {"nan_policy": self.nan_policy}
                    states.append(json.dumps(state))
                column = pa.array([self.columns[i // len(self.rules)]] * len(states))
                yield rest.append_column("column", column).append_column("state", pa.array(states))

    def _orders(self, records: Array) -> pa.Array:
        """The latest order in each record, as a column."""
        _, kind = _ORDERS[str(self.order_type)]
        numbers = pa.array(records["order"], mask=~records["ordered"])
        if pa.types.is_date32(kind):
            numbers = numbers.cast(pa.int32())
        return numbers.cast(kind)

    def read(self, rows: pa.Table, load: Load) -> Iterator[tuple[Any, bytes]]:
        """From rows of states in JSON: the keys, and the state of each as bytes."""
        codes, keys = _codes(rows, self.by)
        records = self._records(load(keys))
        packed = self._packed(records)
        found = zip(rows[_COLUMN].to_pylist(), rows[_STATE].to_pylist(), strict=True)
        for code, (column, text) in zip(codes.tolist(), found, strict=True):
            average = TailAverage.from_state_dict(json.loads(text))
            if column not in self.columns or average.rule not in self.rules:
                raise ValueError(
                    f"initial_state: expected averages of {_said(self.columns)} by "
                    f"{_said(self.rules)}, got one of {column!r} by {average.rule}"
                )
            place = self.columns.index(column) * len(self.rules) + self.rules.index(average.rule)
            if average.count:
                packed[place].hold(code, average)
        if self.order_by is not None:
            known, numbers = _ranks(rows[self.order_by])
            records["ordered"][codes], records["order"][codes] = known, numbers
        return zip(keys, self._stored(records, packed), strict=True)

    # Averages.

    def average(self, rows: pa.Table, load: Load) -> tuple[pa.Table, Iterator[tuple[Any, bytes]]]:
        """Average rows of several keys: the result, and what is then the state of each key."""
        codes, keys = _codes(rows, self.by)
        records = self._records(load(keys))
        xs = [_floats(rows[column]) for column in self.columns]
        late, ranks = np.zeros(len(codes), bool), ()
        if self.order_by is not None:
            known, numbers = ranks = _ranks(rows[self.order_by])
            last = records[codes]
            late = last["ordered"] & (~known | (numbers < last["order"]))
            if self.late == "error" and late.any():
                raise self._late_row(rows, codes, late, records)
        order = np.lexsort((*xs[::-1], *ranks[::-1], codes))
        rows, codes, late = rows.take(pa.array(order)), codes[order], late[order]
        kept = ~late if self.late == "drop" else np.ones(len(codes), bool)
        ends = np.cumsum(np.bincount(codes, minlength=len(keys))) - 1
        packed = self._packed(records)
        averages = [
            average
            for i, x in enumerate(xs)
            for average in self._scan(packed, i, x[order], codes, kept)
        ]
        if self.order_by is not None:
            newest, known = numbers[order][ends], known[order][ends]
            newer = known & (~records["ordered"] | (newest > records["order"]))
            records["order"] = np.where(newer, newest, records["order"])
            records["ordered"] |= known
        late = late.astype(np.int32)
        if self.output == "latest":
            rows = rows.select([*self.by, *_listed(self.order_by)]).take(pa.array(ends))
            averages = [average.take(pa.array(ends)) for average in averages]
            late, kept = np.bincount(codes, late).astype(np.int32), kept[ends]
        for name, column in zip(
            (*self.names, _LATE, _KEPT), (*averages, pa.array(late), pa.array(kept)), strict=True
        ):
            rows = rows.append_column(name, column)
        return rows, zip(keys, self._stored(records, packed), strict=True)

    def _scan(
        self, packed: list[Packed], column: int, x: Array, codes: Array, kept: Array
    ) -> list[pa.Array]:
        """The averages of one column after each row, for each window."""
        missing = np.isnan(x) & kept
        if self.nan_policy == "raise" and missing.any():
            raise ValueError(
                f"{self.columns[column]}: expected no null or NaN (nan_policy='raise'), got "
                f"{int(missing.sum())} in {len(x)} rows"
            )
        counted = kept & ~missing if self.nan_policy == "omit" else kept
        sizes = np.bincount(codes[counted], minlength=len(packed[0]))
        starts = np.concatenate([[0], np.cumsum(sizes)])
        latest = np.cumsum(counted) - 1  # that was counted, up to each row
        own = latest >= starts[codes]  # it is of the same key
        numbers, out = x[counted], dict[int, pa.Array]()
        fastest = loops.fastest(len(numbers)) if compiling.installed() else loops.plain
        for its, one in enumerate(packed[column * len(self.rules) :][: len(self.rules)]):
            places = [place for place, (rule, _) in enumerate(self.reads) if rule == its]
            windows = [self.reads[place][1] for place in places]
            before = None if own.all() else one.take(np.arange(len(one)))
            compiled = None if fastest is loops.plain else fastest
            found = one.scan(numbers, starts, windows, compiled)
            for place, window, averages in zip(places, windows, found, strict=True):
                if before is None:
                    out[place] = pa.array(averages[latest])
                    continue
                held = np.full(len(one), np.nan)
                for key in np.unique(codes[~own]).tolist():
                    if before.counts[key]:
                        held[key] = before.average(key).value(window)
                values = held[codes]
                values[own] = averages[latest[own]]
                out[place] = pa.array(values, mask=~own & (before.counts[codes] == 0))
        return [out[place] for place in range(len(self.reads))]

    def _late_row(self, rows: pa.Table, codes: Array, late: Array, records: Array) -> ValueError:
        row = int(late.argmax())
        key = {name: rows[name][row].as_py() for name in self.by if name != _KEY}
        last = self._orders(records[codes[row : row + 1]])[0].as_py()
        return ValueError(
            f"{self.order_by}: expected at least {last}, the latest so far (late='error'), got "
            f"{rows[self.order_by][row].as_py()} in a row of {key}, and {int(late.sum())} late rows "
            "in all"
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
            if _STATE in rows.schema.names:
                states = rows.filter(rows[_STATE].is_valid())
                held.update(self.read(states, load))
                rows = rows.filter(rows[_STATE].is_null()).drop_columns([_COLUMN, _STATE])
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


class _Processor(StatefulProcessor):
    """Holds the state of each key of a stream, in a map for each bucket."""

    def __init__(self, job: _Job, key: Any, ttl: timedelta | None) -> None:
        self._job, self._key, self._ttl = job, key, ttl

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Name what is held."""
        ttl = None if self._ttl is None else max(1, round(self._ttl / timedelta(milliseconds=1)))
        self._states = handle.getMapState("averages", self._key, "state binary", ttl)
        self._description = handle.getValueState("description", "text string")

    def handleInputRows(  # noqa: N802
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: Any,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        """Average the rows of a bucket."""
        bundles = [bundle for frame in rows for bundle in frame.iloc[:, -1]]
        if key[0] == _EVERY:
            self._check()
            return
        result, states = self._job.average(_from_bytes(bundles), self._load)
        self._save(states)
        for start in range(0, len(result), _ROWS):
            yield pd.DataFrame({"rows": [_to_bytes(result.slice(start, _ROWS))]})

    def handleInitialState(  # noqa: N802
        self,
        key: Any,
        initialState: pd.DataFrame,
        timerValues: Any,  # noqa: N803
    ) -> None:
        """Take the states of a bucket."""
        if key[0] != _EVERY:
            rows = _from_bytes(initialState.iloc[:, -1])
            self._save(self._job.read(rows, self._load))

    def close(self) -> None:
        """Nothing is left open."""

    def _check(self) -> None:
        """Every batch sees this once: the checkpoint is of averages as asked for."""
        said = self._description.get()
        if said is None:
            self._description.update((self._job.text(),))
        else:
            self._job.check(said[0])

    def _load(self, keys: list[Any]) -> list[Any]:
        found = map(self._states.getValue, keys)
        return [None if value is None else value[0] for value in found]

    def _save(self, states: Iterable[tuple[Any, bytes]]) -> None:
        for key, state in states:
            self._states.updateValue(key, (state,))


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


def _to_bytes(rows: pa.Table | pa.RecordBatch) -> bytes:
    """Rows as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write(rows)
    found: bytes = sink.getvalue().to_pybytes()
    return found


def _from_bytes(bundles: Iterable[bytes]) -> pa.Table:
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
