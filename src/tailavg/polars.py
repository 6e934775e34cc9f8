"""Tail averages of polars expressions, Series and DataFrames, and standard deviations and
variances, after each row.

df.with_columns(tail_mean(pl.col("loss"), 0.25))            # the last quarter of the rows so far
df.with_columns(pl.col("loss").pipe(tail_mean, 0.25).over("run"))
df.with_columns(tail_mean(pl.col("loss"), 0.25, by="run"))  # the same, and faster
df.with_columns(tail_std(pl.col("loss"), 0.25).alias("std"))
df.with_columns(tail_mean(pl.col("loss"), "10min", on="time"))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, TypeVar, Unpack

import numpy as np

from tailavg.extras import needs

with needs("polars"):
    import polars as pl

from tailavg.core.readings import Reading
from tailavg.core.rules import AnyRule, is_timed
from tailavg.numpy.arithmetic import MEAN, Array, Statistic
from tailavg.numpy.average import NanPolicy, has_nan
from tailavg.numpy.keyed import TailAverages, averages_for, keys_of_column

__all__ = ["tail_mean", "tail_std", "tail_var"]

Data = TypeVar("Data", pl.Expr, pl.Series, pl.DataFrame)


class _Options(TypedDict, total=False):
    window: Reading | None
    by: Any
    on: Any
    nan_policy: NanPolicy
    state: TailAverages | None


def tail_mean(
    data: Data,
    rule: AnyRule,
    *,
    window: Reading | None = None,
    by: Any = None,
    on: Any = None,
    nan_policy: NanPolicy = "omit",
    state: TailAverages | None = None,
) -> Data:
    """Return the tail average after each row: an expression, a Series or a DataFrame, like `data`.

    Float32 gives Float32; integers and booleans become Float64. Averages are computed in Float64.

    Args:
        data: An expression, a Series or a DataFrame. Expressions work in every engine; `over`
            and `group_by` call them once per group.
        rule: How many samples to average, and how: a number (an int n for the last n, a float in
            (0, 1] for the last fraction), a period of time (`"10min"`, a timedelta), a window or a
            rule, as for `TailAverage`.
        window: What to read an `AnyTail` with: a window, a `Freshest` or a `Decay`.
        by: What to group by: names or expressions; for a Series, another Series or a list of them.
            The result is the same as with `over`, and much faster if there are many groups. A
            DataFrame keeps the columns that it is grouped by.
        on: For a period of time, the times: the name of a column of dates or datetimes, or an
            expression; for a Series, another Series. A DataFrame keeps the column. Within a group,
            times do not go back.
        nan_policy: How to treat nulls and NaNs. `"omit"` skips them: the row is not counted and
            repeats the previous average, or is null if there is none yet. `"propagate"`: an average
            is NaN while its window has a null or NaN. `"raise"` raises an error.
        state: For a Series or DataFrame in several parts: the averages to continue and to update.
            The keys of the state are the keys of the groups; the names of the columns if nothing is
            grouped; or (column, key) for a DataFrame with groups.

    Examples:
        >>> df = pl.DataFrame({"run": ["a", "b", "a", "a"], "loss": [4.0, 9.0, 2.0, 1.0]})
        >>> df.with_columns(tail_mean(pl.col("loss"), 2, by="run"))["loss"].to_list()
        [4.0, 9.0, 3.0, 1.5]
        >>> tail_mean(df["loss"], 2).to_list()
        [4.0, 6.5, 5.5, 1.5]
        >>> day = pl.Series(["2026-01-01", "2026-01-02", "2026-01-03"]).str.to_date()
        >>> tail_mean(pl.Series([4.0, 9.0, 2.0]), "2d", on=day).to_list()
        [4.0, 6.5, 5.5]
    """
    options: _Options = {"window": window, "by": by, "on": on}
    options |= {"nan_policy": nan_policy, "state": state}
    return _read(Statistic(), data, rule, **options)


def tail_std(data: Data, rule: AnyRule, *, ddof: int = 1, **options: Unpack[_Options]) -> Data:
    """Return the standard deviation of the samples of the tail average, after each row.

    The samples have the weights α that they have in `tail_mean`: see `TailAverage.variance`. As in
    `rolling_std` of polars, the result is null while the window has one sample (NaN with
    `nan_policy="propagate"`).

    Args:
        data: As for `tail_mean`.
        rule: As for `tail_mean`.
        ddof: 1 divides the variance by 1 - Σ α², so that it is unbiased for independent samples; 0
            does not.
        options: `window`, `by`, `on`, `nan_policy` and `state`, as for `tail_mean`. A `state` needs
            `TailAverages(..., variance=True)`.

    Examples:
        >>> tail_std(pl.Series([1.0, 3.0, 3.0, 7.0]), 2, ddof=0).to_list()
        [0.0, 1.0, 0.0, 2.0]
    """
    return _read(Statistic.named("std", ddof), data, rule, **options)


def tail_var(data: Data, rule: AnyRule, *, ddof: int = 1, **options: Unpack[_Options]) -> Data:
    """Return the variance of the samples of the tail average, after each row.

    This is the square of `tail_std`, with the same arguments.

    Examples:
        >>> tail_var(pl.Series([1.0, 3.0, 3.0, 7.0]), 2).to_list()
        [None, 2.0, 0.0, 8.0]
    """
    return _read(Statistic.named("variance", ddof), data, rule, **options)


def _read(
    statistic: Statistic,
    data: Data,
    rule: AnyRule,
    *,
    window: Reading | None = None,
    by: Any = None,
    on: Any = None,
    nan_policy: NanPolicy = "omit",
    state: TailAverages | None = None,
) -> Data:
    """Return a statistic after each row. The arguments are those of `tail_mean`."""
    variance, keep = statistic.of != MEAN, state is not None
    averages = averages_for(rule, window, nan_policy, state, variance, on)
    if on is None and is_timed(averages.rule):
        raise ValueError("a window of time needs the time of each row: pass on=, as in on='time'")
    read = averages, window, statistic
    if isinstance(data, pl.Expr):
        if keep:
            raise TypeError(
                "state: an expression takes no state, since polars may run it at any time and more "
                "than once; pass a Series or a DataFrame"
            )
        return _expression(data, by, on, *read)
    if isinstance(data, pl.Series):
        if isinstance(by, str | pl.Expr):
            raise TypeError(f"by: expected a Series or a list of Series, got {by!r}")
        is_list = isinstance(by, list | tuple) and all(isinstance(key, pl.Series) for key in by)
        keys = [] if by is None else [pl.Series(key) for key in (by if is_list else [by])]
        if not isinstance(on, pl.Series | None):
            raise TypeError(f"on: expected a Series of times, got {on!r}")
        return _scan([data], _unnamed(keys), on, *read, keep=keep)[0]
    if isinstance(data, pl.DataFrame):
        keyed, times = _selected(data, by), _selected(data, on)
        others = keyed.columns + times.columns
        columns = [column for column in data if column.name not in others]
        at = times.to_series() if times.width else None
        return data.with_columns(_scan(columns, keyed, at, *read, keep=keep, name_keys=True))
    raise TypeError(
        f"data: expected an expression, a Series or a DataFrame, got {type(data).__name__}"
        + ("; pass an expression to its with_columns" if isinstance(data, pl.LazyFrame) else "")
    )


def _expression(
    data: pl.Expr,
    by: Any,
    on: Any,
    averages: TailAverages,
    window: Reading | None,
    statistic: Statistic,
) -> pl.Expr:
    def scan(columns: Sequence[pl.Series]) -> pl.Series:
        times = None if on is None else columns[-1]
        keys = _unnamed(columns[1:] if on is None else columns[1:-1])
        return _scan(columns[:1], keys, times, averages, window, statistic, keep=False)[0]

    # dividing by 1 turns integers into floats and keeps Float32, so polars knows the dtype early
    dtype = pl.self_dtype()
    if by is None and on is None:
        return (data / 1.0).map_batches(lambda column: scan([column]), dtype, is_elementwise=False)
    keys = by if isinstance(by, list | tuple) else [by]
    others = [pl.col(each) if isinstance(each, str) else each for each in (*keys, on)]
    exprs = [data / 1.0, *(each for each in others if each is not None)]
    return pl.map_batches(exprs, scan, dtype)


def _scan(
    columns: Sequence[pl.Series],
    by: pl.DataFrame,
    on: pl.Series | None,
    averages: TailAverages,
    window: Reading | None,
    statistic: Statistic,
    *,
    keep: bool,
    name_keys: bool = False,
) -> list[pl.Series]:
    """Return a statistic of columns, grouped by the columns of `by` if it has any.

    With `name_keys`, the keys of the state are (column, key).
    """
    times = None if on is None else _times(on)
    codes, keys = _groups(by, keep) if by.width else (None, None)
    parts = []
    for column in columns:
        if not (column.dtype.is_numeric() or column.dtype == pl.Boolean):
            raise TypeError(
                f"data: expected numbers, got column {column.name!r} of {column.dtype}; cast or "
                "drop it"
            )
        names = keys_of_column(column.name, keys, name_keys and keep)
        floats = column if column.dtype.is_float() else column.cast(pl.Float64)
        parts.append((codes, names, floats.to_numpy()))  # with NaN for null
    results = []
    scanned = averages.scan_parts(parts, [window], keep=keep, statistic=statistic, times=times)
    for column, (values,) in zip(columns, scanned, strict=True):
        # rows before the first sample (the second, for ddof=1) come first, unless there are groups
        # or times: a window of time may have one sample again
        anywhere = by.width or times is not None
        nulls = averages.nan_policy == "omit" and has_nan(values if anywhere else values[:1])
        result = pl.Series(column.name, values, nan_to_null=nulls)
        results.append(result.cast(column.dtype) if column.dtype.is_float() else result)
    return results


def _groups(by: pl.DataFrame, keep: bool) -> tuple[Array, Sequence[Any]]:
    """Return the group number of each row, in order of appearance, and the keys of the groups.

    Unless `keep` is set, numbers may serve as keys.
    """
    if by.width == 1 and (groups := _groups_of_integers(by.to_series())) is not None:
        return groups
    numbered = _unnamed(list(by)).with_row_index("row")
    first = numbered.select(pl.col("row").first().over(numbered.columns[1:]))["row"].to_numpy()
    is_first = first == np.arange(len(first))
    codes: Array = (np.cumsum(is_first) - 1)[first]
    if not keep:
        return codes, range(int(is_first.sum()))
    rows = by.filter(pl.Series(is_first)).rows()
    return codes, rows if by.width > 1 else [key for (key,) in rows]


def _groups_of_integers(key: pl.Series) -> tuple[Array, Sequence[Any]] | None:
    """Return groups for integers in a small range, faster than `_groups`; None for other keys.

    Each integer of the range is a group, even without rows.
    """
    if not (key.dtype.is_integer() and len(key)) or key.null_count():
        return None
    least, most = int(key.min()), int(key.max())  # type: ignore[arg-type]
    if max(-least, most) > 2**62 or most - least >= max(len(key), 1024):
        return None
    return key.to_numpy().astype(np.int64) - least, range(least, most + 1)


def _selected(data: pl.DataFrame, columns: Any) -> pl.DataFrame:
    """Return columns of a frame; for None, a frame without columns."""
    return pl.DataFrame() if columns is None else data.select(columns)


def _times(on: pl.Series) -> Array:
    """Return times as an array, in UTC."""
    if on.dtype not in (pl.Date, pl.Datetime):
        raise TypeError(
            f"on: expected dates or datetimes, got {on.name!r} of {on.dtype}; convert it with "
            "str.to_datetime or pl.from_epoch"
        )
    if on.null_count():
        raise ValueError("on: expected a time in each row, got null; drop the rows without a time")
    return on.to_numpy()


def _unnamed(columns: Sequence[pl.Series]) -> pl.DataFrame:
    """Return a frame of the columns with numbers as names, since their names may be the same."""
    return pl.DataFrame([column.alias(str(i)) for i, column in enumerate(columns)])
