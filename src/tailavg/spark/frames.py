"""Tail averages in Spark: of keys in a stream that never ends, and of rows in a table.

tail_mean(events, "loss", 0.25, by="run", order_by="step")   # the last quarter of each run

In a stream, rows travel in bundles. Spark hands rows to a stateful Python function one by one, and
calls it once for each key: both cost more than the averages. So rows are packed into Arrow bytes
before they are shuffled, each with those of the same bucket of keys, and unpacked at the end:

    rows ─▶ pack ─▶ shuffle by bucket ─▶ the state of each key: read, average, write ─▶ unpack

What is not averaged passes through as Arrow has it: nothing is rounded, and no null becomes a NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, get_args

from tailavg.extras import needs

with needs("spark"):
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql import functions as sql
    from pyspark.sql import types as kinds
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from tailavg.core.rules import (
    AnyTail,
    ExactWindow,
    Rule,
    as_rule,
    no_window_error,
    shared_rules,
)
from tailavg.core.windows import AnyWindow, Fixed, Window, as_window, short_repr
from tailavg.numpy.average import NanPolicy
from tailavg.spark import job as jobs
from tailavg.spark.job import COLUMN, KEPT, KEY, LATE, STATE, TIE, Job, Late, Output

__all__ = ["saved_states", "tail_mean"]

BUCKETS = 64
"""Into how many parts keys are divided."""

_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_BUNDLE = "bucket int, rows binary"

_NUMERIC = kinds.NumericType, kinds.BooleanType
_PLAIN = kinds.AtomicType, kinds.NullType
_ORDERED = tuple(type(kinds.StructType().add("", name)[0].dataType) for name in jobs.ORDERS)


def tail_mean(
    df: DataFrame,
    columns: str | Sequence[str],
    rule: AnyWindow | Rule | Sequence[AnyWindow],
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
    """Average the tail of each key, after each row of a stream or a table.

    The averages of `"loss"` are in a column `loss_tail`; of several windows there is one for each,
    such as `loss_tail_0_25`. A streaming query needs the RocksDB state store, append mode (the
    default) and a checkpoint. Then each row is averaged exactly once, whatever is killed.

    Args:
        df: A DataFrame, streaming or not, of Spark or Spark Connect.
        columns: What to average: the names of columns of numbers.
        rule: How many samples are averaged, and how: a number (an int for the last that many, a
            float in (0, 1] for the last fraction), a window or a rule, as for `TailAverage`. Or
            several numbers or windows: one `AnyTail` serves all fractions.
        by: The columns of the key. Without any, there is one average of all.
        order_by: The column that puts the rows of a key in order: numbers, dates or timestamps.
            Spark keeps no order of its own, so a table needs it. A stream without it takes the rows
            of a micro-batch as they arrive. Rows of the same key and order are taken in that of a
            hash of their values: as good as random, and always the same.
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
    for name, value, allowed in (
        ("output", output, Output),
        ("late", late, Late),
        ("nan_policy", nan_policy, NanPolicy),
    ):
        if value not in get_args(allowed):
            raise ValueError(f"{name}: expected one of {get_args(allowed)}, got {value!r}")
    if type(buckets) is not int or not 1 <= buckets <= 4096:
        raise ValueError(f"buckets: expected an int from 1 to 4096, got {short_repr(buckets)}")
    reads, suffixes = _reads(rule)
    names = [f"{column}_tail{suffix}" for column in columns for suffix in suffixes]
    _check_columns(df.schema, columns, by, order_by, names)
    if not by:
        df, by = df.withColumn(KEY, sql.lit("")), (KEY,)
    job = Job(
        columns=columns,
        rules=tuple(dict.fromkeys(rule for rule, _ in reads)),
        by=by,
        order_by=order_by,
        order_type=None if order_by is None else df.schema[order_by].dataType.typeName(),
        nan_policy=nan_policy,
        buckets=buckets,
        reads=tuple(reads),
        names=tuple(names),
        output=output,
        late=late,
    )
    if output == "latest":
        df = df.select(*dict.fromkeys([*job.key_and_order, *columns]))
    if order_by is not None:
        df = df.withColumn(TIE, sql.xxhash64(*columns))
    states = None if initial_state is None else _initial(job, initial_state, df.schema)
    if df.isStreaming:
        averaged = _of_stream(job, df, states, ttl)
        late_rows = sql.coalesce(sql.sum(LATE), sql.lit(0)).alias("late")
        averaged = averaged.observe(f"tailavg {names[0]}", late_rows)
    else:
        if ttl is not None:
            raise ValueError("ttl: expected none for a table, which has no clock, got one")
        if order_by is None:
            raise ValueError("order_by: expected a column, since a table has no order, got none")
        averaged = _of_table(job, df, states)
    return averaged.where(KEPT).drop(LATE, KEPT, KEY)


def saved_states(spark: SparkSession, checkpoint: str, operator: int = 0) -> DataFrame:
    """Return the states in the checkpoint of a streaming query, one row for each average.

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
    job = Job.from_text(described[0]["value"]["text"])
    saved = reader.option("stateVarName", "averages").load(checkpoint)
    key: Any = saved.schema["user_map_key"].dataType
    schema = kinds.StructType([field for field in key if field.name != KEY])
    columns = [f"user_map_key.{name}" for name in schema.names] + ["user_map_value.state"]
    if job.order_by is not None:
        schema = schema.add(job.order_by, str(job.order_type))
    schema = schema.add("column", "string").add("state", "string")
    return saved.select(*columns).mapInArrow(job.to_json, schema)


def _names(names: str | Sequence[str], option: str) -> tuple[str, ...]:
    listed = (names,) if isinstance(names, str) else tuple(names)
    if not all(isinstance(name, str) for name in listed) or len(set(listed)) < len(listed):
        raise ValueError(f"{option}: expected names of columns, each once, got {names!r}")
    if not listed and option == "columns":
        raise ValueError("columns: expected at least one to average, got none")
    return listed


def _reads(rule: Any) -> tuple[list[tuple[Rule, Window | None]], list[str]]:
    """Return, for each average of a column, its rule and the window to read; and its suffix."""
    if isinstance(rule, list | tuple):
        windows = [as_window(window, "rule") for window in rule]
        if not windows or len(set(windows)) < len(windows):
            raise ValueError(f"rule: expected at least one window, each once, got {rule!r}")
        return shared_rules(windows), [f"_{_text(window)}" for window in windows]
    rule = as_rule(rule)
    if isinstance(rule, AnyTail):
        raise no_window_error("pass its windows instead, as in [0.1, 0.25, 0.5]")
    if isinstance(rule, ExactWindow):
        raise ValueError(
            f"rule: expected a rule that stores no samples, got {rule}; pass its window alone"
        )
    return [(rule, None)], [""]


def _text(window: Window) -> str:
    """Return a window for the name of a column: without a dot, which would need quotes in SQL."""
    if isinstance(window, Fixed):
        return str(window.k)
    most = "" if window.at_most is None else f"_{window.at_most}"
    return str(window.c).replace(".", "_") + most


def _check_columns(
    schema: Any,
    columns: Sequence[str],
    by: Sequence[str],
    order_by: str | None,
    new: Sequence[str],
) -> None:
    """Raise unless the data has these columns, of the right types, and none of the new ones."""
    for name in schema.names:
        if "." in name or "`" in name:
            raise ValueError(
                f"df: expected columns without dots or backticks in their names, which Spark takes "
                f"for parts of columns on the way to Python, got {name!r}; rename it"
            )
        if name in new:
            raise ValueError(
                f"df: expected no column {name!r}, where the averages go; rename or drop it"
            )
    if order_by in by:
        raise ValueError(f"order_by: expected a column that is not in by, got {order_by!r}")

    order = [] if order_by is None else [order_by]
    for option, names, allowed, expected in (
        ("columns", columns, _NUMERIC, "numbers; cast it"),
        ("by", by, _PLAIN, "plain values; select its parts"),
        ("order_by", order, _ORDERED, "numbers, dates or timestamps; cast it"),
    ):
        for name in names:
            if name not in schema.names:
                raise ValueError(f"{option}: expected one of {schema.names}, got {name!r}")
            kind = schema[name].dataType
            if not isinstance(kind, allowed):
                got = kind.simpleString()
                raise TypeError(f"{option}: {name!r} is of type {got}, expected {expected}")


def _initial(job: Job, states: DataFrame, schema: Any) -> DataFrame:
    """Return initial states, with the columns of the key as the data has them."""
    if job.by == (KEY,):
        states = states.withColumn(KEY, sql.lit(""))
    if job.order_by is not None and job.order_by not in states.columns:
        states = states.withColumn(job.order_by, sql.lit(None))
    for name in (*job.by, "column", "state"):
        if name not in states.columns:
            raise ValueError(
                f"initial_state: expected a column {name!r}, as of saved_states, got "
                f"{states.columns}"
            )
    typed = [sql.col(name).cast(schema[name].dataType).alias(name) for name in job.key_and_order]
    return states.select(*typed, sql.col("column").alias(COLUMN), sql.col("state").alias(STATE))


def _of_stream(
    job: Job, df: DataFrame, states: DataFrame | None, ttl: timedelta | None
) -> DataFrame:
    """Average a stream by a stateful operation."""
    spark = df.sparkSession
    if "RocksDB" not in (spark.conf.get(_PROVIDER, "") or ""):
        raise ValueError(
            "df: expected a session with the RocksDB state store, which streaming averages need; "
            f'call spark.conf.set("{_PROVIDER}", "{_ROCKSDB}") first'
        )
    if ttl is not None and not (isinstance(ttl, timedelta) and ttl > timedelta(0)):
        raise ValueError(f"ttl: expected a positive timedelta, got {ttl!r}")
    bucket = sql.pmod(sql.hash(*job.by), sql.lit(job.buckets)).alias(jobs.BUCKET)

    def packed(rows: DataFrame) -> Any:
        return rows.select("*", bucket).mapInArrow(job.pack, _BUNDLE).groupBy("bucket")

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


def _of_table(job: Job, df: DataFrame, states: DataFrame | None) -> DataFrame:
    """Average partitions whose rows are sorted by key, states first: one key after another."""
    schema = _schema(job, df)
    order: list[Any] = [*job.by]
    if states is not None:
        df = df.unionByName(states, allowMissingColumns=True)
        order.append(sql.col(STATE).isNull())
    first = sql.col(str(job.order_by))
    if job.order_type in ("float", "double"):  # in order, a NaN is as a null
        first = sql.nanvl(first, sql.lit(None))
    rows = df.repartition(*job.by).sortWithinPartitions(*order, first, TIE)
    return rows.mapInArrow(job.average_sorted, schema)


def _schema(job: Job, df: DataFrame) -> Any:
    """Return the columns of the result, and two of ours."""
    names = df.columns if job.output == "rows" else job.key_and_order
    schema = kinds.StructType([df.schema[name] for name in names if name != TIE])
    for name in job.names:
        schema = schema.add(name, "double")
    return schema.add(LATE, "integer").add(KEPT, "boolean")


class _Processor(StatefulProcessor):
    """Holds the state of each key of a stream, in a map for each bucket."""

    def __init__(self, job: Job, key: Any, ttl: timedelta | None) -> None:
        self._job, self._key, self._ttl = job, key, ttl

    def init(self, handle: Any) -> None:
        """Name what is held."""
        ttl = None if self._ttl is None else max(1, round(self._ttl / timedelta(milliseconds=1)))
        self._states = handle.getMapState("averages", self._key, "state binary", ttl)
        self._description = handle.getValueState("description", "text string")

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any
    ) -> Iterator[pd.DataFrame]:
        """Average the rows of a bucket."""
        bundles = [bundle for frame in rows for bundle in frame.iloc[:, -1]]
        if key[0] == jobs.CHECK:
            self._check()
            return
        result, states = self._job.average(jobs.from_bytes(bundles), self._load)
        self._save(states)
        for start in range(0, len(result), jobs.ROWS):
            yield pd.DataFrame({"rows": [jobs.to_bytes(result.slice(start, jobs.ROWS))]})

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: Any) -> None:
        """Take the states of a bucket."""
        if key[0] != jobs.CHECK:
            rows = jobs.from_bytes(initialState.iloc[:, -1])
            self._save(self._job.from_json(rows, self._load))

    def close(self) -> None:
        """Do nothing: nothing is left open."""

    def _check(self) -> None:
        """Raise if the checkpoint is of other averages."""
        described = self._description.get()
        if described is None:
            self._description.update((self._job.text(),))
        else:
            self._job.check(described[0])

    def _load(self, keys: list[Any]) -> list[Any]:
        values = map(self._states.getValue, keys)
        return [None if value is None else value[0] for value in values]

    def _save(self, states: Iterable[tuple[Any, bytes]]) -> None:
        for key, state in states:
            self._states.updateValue(key, (state,))
