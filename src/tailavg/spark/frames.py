"""`tail_mean`: tail averages in Spark, for each key of an endless stream or of a table.

tail_mean(events, "loss", 0.25, by="run", order_by="step")   # the last quarter of each run
tail_mean(events, "loss", 0.25, by="run", order_by="step", std=True)    # and its spread

This file makes the query; `job` does the work in the Python processes of Spark. Read it second.

In a stream, rows travel in bundles. Spark passes rows to a stateful Python function one by one and
calls it once for each key; both cost more than the averages. So the rows of a bucket of keys are
packed into Arrow bytes before the shuffle and unpacked at the end:

    rows ─▶ pack ─▶ shuffle by bucket ─▶ the state of each key: read, average, write ─▶ unpack

Columns that are not averaged stay in Arrow: no value is rounded, and no null becomes a NaN.
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

from tailavg.core.elapsed import Elapsed
from tailavg.core.rules import (
    AnyTail,
    ExactWindow,
    Rule,
    as_rule,
    is_timed,
    no_window_error,
    shared_rules,
)
from tailavg.core.windows import (
    AnyWindow,
    Fixed,
    Window,
    as_elapsed,
    as_window,
    is_elapsed,
    short_repr,
)
from tailavg.numpy.average import NanPolicy
from tailavg.spark import job as jobs
from tailavg.spark.job import COLUMN, KEPT, KEY, LATE, STATE, TIE, Job, Late, Output

__all__ = ["saved_states", "tail_mean"]

BUCKETS = 64
"""The default number of buckets that keys are divided into."""

_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_BUNDLE = "bucket int, rows binary"

_NUMERIC = kinds.NumericType, kinds.BooleanType
_PLAIN = kinds.AtomicType, kinds.NullType
_ORDERED = tuple(type(kinds.StructType().add("", name)[0].dataType) for name in jobs.ORDERS)


def tail_mean(
    df: DataFrame,
    columns: str | Sequence[str],
    rule: AnyWindow | Elapsed | str | Rule | Sequence[AnyWindow | Elapsed | str],
    *,
    by: str | Sequence[str] = (),
    order_by: str | None = None,
    std: bool = False,
    output: Output = "rows",
    late: Late = "include",
    nan_policy: NanPolicy = "omit",
    ttl: timedelta | None = None,
    initial_state: DataFrame | None = None,
    buckets: int = BUCKETS,
) -> DataFrame:
    """Return the tail average of each key, after each row of a stream or a table.

    The averages of `"loss"` are in a column `loss_tail`; with several windows, each has a column,
    such as `loss_tail_0_25`. A streaming query needs the RocksDB state store, append mode (the
    default) and a checkpoint. Each row is then averaged exactly once, even if processes are killed.

    Args:
        df: A DataFrame, streaming or not, of Spark or Spark Connect.
        columns: The names of the columns to average, which must be numeric.
        rule: How many samples to average, and how: a number (an int n for the last n, a float in
            (0, 1] for the last fraction), a window or a rule, as for `TailAverage`. Or several
            numbers or windows: one `AnyTail` serves all fractions. `"10min"` or an `Elapsed` is a
            window of time.
        by: The columns of the key. Without any, all rows share one average.
        order_by: The column that puts the rows of a key in order: numbers, dates or timestamps.
            Spark does not keep rows in order, so a table needs `order_by`. A stream without it
            takes the rows of a micro-batch as they arrive. A window of time needs `order_by`, the
            time of each row; numbers are seconds. Rows with equal keys and equal `order_by` are
            ordered by a hash of their samples: arbitrary, but reproducible.
        std: Whether to add the standard deviations of the averaged samples too, in columns such as
            `loss_tail_std`. Like Spark's `stddev`, they are unbiased (`ddof=1`, see
            `TailAverage.variance`), and null while the window has one sample.
        output: `"rows"` adds columns to the rows. `"latest"` has one row for each key (in a stream,
            for each key and micro-batch): the key, `order_by` and the averages.
        late: How to treat late rows. A row is late if its `order_by` is null, or less than the
            latest of its key in earlier micro-batches. `"include"` averages it as the next row,
            `"drop"` drops it, `"error"` ends the query. The query's progress has the number of late
            rows in `observedMetrics`, under `"tailavg loss_tail"`. A window of time gives a late
            row the latest time of its key, and drops a row without a time before the first time.
        nan_policy: How to treat nulls and NaNs in `columns`. `"omit"` skips them: the row is not
            counted and repeats the previous average, or is null if there is none yet.
            `"propagate"`: an average is NaN while its window has a null or NaN. `"raise"` ends the
            query.
        ttl: Forget a key that has had no row for this long in processing time. Streams only.
        initial_state: The states to continue, as returned by `saved_states`. A streaming query
            reads them at its very first start only.
        buckets: The number of buckets that the keys of a stream are divided into, which limits the
            number of parallel tasks. It must stay the same for a checkpoint.
    """
    columns, by = _names(columns, "columns"), _names(by, "by")
    for name, value, allowed in (
        ("output", output, Output),
        ("late", late, Late),
        ("nan_policy", nan_policy, NanPolicy),
    ):
        if value not in get_args(allowed):
            raise ValueError(f"{name}: expected one of {get_args(allowed)}, got {value!r}")
    if type(std) is not bool:
        raise TypeError(f"std: expected True or False, got {short_repr(std)}")
    if type(buckets) is not int or not 1 <= buckets <= 4096:
        raise ValueError(f"buckets: expected an int from 1 to 4096, got {short_repr(buckets)}")
    reads, suffixes = _reads(rule)
    endings = [f"{suffix}{kind}" for suffix in suffixes for kind in ("", "_std")[: 1 + std]]
    names = [f"{column}_tail{ending}" for column in columns for ending in endings]
    _check_columns(df.schema, columns, by, order_by, names)
    if order_by is None and any(is_timed(rule) for rule, _ in reads):
        raise ValueError("order_by: a window of time needs the column with the time of each row")
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
        std=std,
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
            raise ValueError("ttl: it applies to streams only; leave it out for a table")
        if order_by is None:
            raise ValueError("order_by: a table has no order; name a column to order by")
        averaged = _of_table(job, df, states)
    return averaged.where(KEPT).drop(LATE, KEPT, KEY)


def saved_states(spark: SparkSession, checkpoint: str, operator: int = 0) -> DataFrame:
    """Return the states in the checkpoint of a streaming query, one row for each average.

    The columns are the columns of the key; `order_by`, with the latest value of the key; `column`,
    with the name of the averaged column; and `state`, with the `state_dict` of a `TailAverage` as
    JSON. The result can be the `initial_state` of `tail_mean`.

    Args:
        spark: The session.
        checkpoint: The folder of the query's checkpoint.
        operator: The number of the stateful operator, if the query has several.
    """
    reader = spark.read.format("statestore").option("operatorId", operator)
    described = reader.option("stateVarName", "description").load(checkpoint).collect()
    if not described:
        raise ValueError(f"{checkpoint}: no states; pass the checkpoint of a query that has run")
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
        raise ValueError(f"{option}: expected different names of columns, got {names!r}")
    if not listed and option == "columns":
        raise ValueError("columns: expected at least one to average, got none")
    return listed


def _reads(rule: Any) -> tuple[list[tuple[Rule, Window | None]], list[str]]:
    """Return the averages of a column: each one's rule and window to read, and name suffix."""
    if isinstance(rule, list | tuple):
        windows: list[Any] = [
            window if is_elapsed(window) else as_window(window, "rule")
            for window in map(as_elapsed, rule)
        ]
        if not windows or len(set(windows)) < len(windows):
            raise ValueError(f"rule: expected one or more different windows, got {rule!r}")
        return shared_rules(windows), [f"_{_text(window)}" for window in windows]
    rule = as_rule(rule)
    if isinstance(rule, AnyTail):
        raise no_window_error("pass its windows instead, as in [0.1, 0.25, 0.5]")
    if isinstance(rule, ExactWindow):
        raise ValueError(
            f"rule: expected a rule that stores no samples, got {rule}; pass its window instead"
        )
    return [(rule, None)], [""]


def _text(window: Window | Elapsed) -> str:
    """Return a window for the name of a column, without dots, which need quotes in SQL."""
    if isinstance(window, Elapsed):
        return f"{window.period:.9g}s".replace(".", "_").replace("-", "_")
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
                f"df: column {name!r} has a dot or a backtick in its name, which Spark misreads "
                "when it passes rows to Python; rename it"
            )
        if name in new:
            raise ValueError(
                f"df: column {name!r} exists, but its name is that of an average; rename or drop it"
            )
    if order_by in by:
        raise ValueError(f"order_by: expected a column that is not in by, got {order_by!r}")

    order = [] if order_by is None else [order_by]
    for option, names, allowed, expected in (
        ("columns", columns, _NUMERIC, "numbers; cast it"),
        ("by", by, _PLAIN, "plain values; select its fields"),
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
    """Return initial states, with the columns of the key in the types of the data."""
    if job.by == (KEY,):
        states = states.withColumn(KEY, sql.lit(""))
    if job.order_by is not None and job.order_by not in states.columns and not job.is_timed:
        states = states.withColumn(job.order_by, sql.lit(None))
    for name in (*job.key_and_order, "column", "state"):
        if name not in states.columns:
            raise ValueError(
                f"initial_state: expected a column {name!r}, as in saved_states, got "
                f"{states.columns}"
            )
    typed = [sql.col(name).cast(schema[name].dataType).alias(name) for name in job.key_and_order]
    return states.select(*typed, sql.col("column").alias(COLUMN), sql.col("state").alias(STATE))


def _of_stream(
    job: Job, df: DataFrame, states: DataFrame | None, ttl: timedelta | None
) -> DataFrame:
    """Average a stream with a stateful operator."""
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
    """Average a table: sort the rows of each partition by key, states first, then scan them."""
    schema = _schema(job, df)
    order: list[Any] = [*job.by]
    if states is not None:
        df = df.unionByName(states, allowMissingColumns=True)
        order.append(sql.col(STATE).isNull())
    order_by = sql.col(str(job.order_by))
    if job.order_type in ("float", "double"):  # NaNs come first, as nulls do
        order_by = sql.nanvl(order_by, sql.lit(None))
    rows = df.repartition(*job.by).sortWithinPartitions(*order, order_by, TIE)
    return rows.mapInArrow(job.average_sorted, schema)


def _schema(job: Job, df: DataFrame) -> Any:
    """Return the columns of the result, and the internal columns LATE and KEPT."""
    names = df.columns if job.output == "rows" else job.key_and_order
    schema = kinds.StructType([df.schema[name] for name in names if name != TIE])
    for name in job.names:
        schema = schema.add(name, "double")
    return schema.add(LATE, "integer").add(KEPT, "boolean")


class _Processor(StatefulProcessor):
    """The stateful operator: a map for each bucket holds the states of its keys."""

    def __init__(self, job: Job, key: Any, ttl: timedelta | None) -> None:
        self._job, self._key, self._ttl = job, key, ttl

    def init(self, handle: Any) -> None:
        """Create the state variables."""
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
        """Save the initial states of a bucket."""
        if key[0] != jobs.CHECK:
            rows = jobs.from_bytes(initialState.iloc[:, -1])
            self._save(self._job.from_json(rows, self._load))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _check(self) -> None:
        """Describe the averages in a new checkpoint; raise if an old one has other averages."""
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
