"""Tail averages of pandas objects, and standard deviations and variances, after each row.

df["smooth"] = tail_mean(df["loss"], 0.25)          # the last quarter of the rows so far
tail_mean(df, Exponential(100), by="run")           # of each run, and each column
tail_std(df["loss"], 0.25)                          # the standard deviation of these rows
tail_mean(df, "10min", on="time", by="run")         # the last ten minutes of each run
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypedDict, Unpack, overload

import numpy as np

from tailavg.extras import needs

with needs("pandas"):
    import pandas as pd
    from pandas.api.typing import DataFrameGroupBy, SeriesGroupBy

from tailavg.core.readings import Reading
from tailavg.core.rules import AnyRule, is_timed
from tailavg.core.windows import short_repr
from tailavg.numpy.arithmetic import MEAN, Array, Statistic
from tailavg.numpy.average import NanPolicy
from tailavg.numpy.keyed import TailAverages, averages_for, keys_of_column

__all__ = ["tail_mean", "tail_std", "tail_var"]

_MASKED = (pd.arrays.FloatingArray, pd.arrays.IntegerArray, pd.arrays.BooleanArray)


class _Options(TypedDict, total=False):
    window: Reading | None
    by: Any
    on: Any
    nan_policy: NanPolicy
    state: TailAverages | None
    numeric_only: bool


@overload
def tail_mean(
    data: pd.Series | SeriesGroupBy, rule: AnyRule, **options: Unpack[_Options]
) -> pd.Series: ...
@overload
def tail_mean(  # type: ignore[overload-cannot-match]  # without pandas-stubs, all are Any
    data: pd.DataFrame | DataFrameGroupBy, rule: AnyRule, **options: Unpack[_Options]
) -> pd.DataFrame: ...
def tail_mean(
    data: Any,
    rule: AnyRule,
    *,
    window: Reading | None = None,
    by: Any = None,
    on: Any = None,
    nan_policy: NanPolicy = "omit",
    state: TailAverages | None = None,
    numeric_only: bool = False,
) -> Any:
    """Return the tail average after each row: a Series for a Series, a DataFrame for a DataFrame.

    The result has the index, names and kinds of columns of the data: float32 gives float32, Arrow
    gives Arrow, `Int64` gives `Float64`. Integers and bools become float64. Averages are computed
    in float64.

    Args:
        data: A Series, a DataFrame, or a `groupby` of one. As with `transform`, the result of a
            `groupby` has the index of the data, without the columns of the keys.
        rule: How many samples to average, and how: a number (an int n for the last n, a float in
            (0, 1] for the last fraction), a period of time (`"10min"`, a timedelta), a window or a
            rule, as for `TailAverage`.
        window: What to read an `AnyTail` with: a window, a `Freshest` or a `Decay`.
        by: What to group by: anything that `groupby` takes. Rows with a missing key have a missing
            average.
        on: For a period of time: the name of the column, or of the level of the index, with the
            times. The column is not averaged. By default, the index has the times. Within a group,
            times do not go back.
        nan_policy: How to treat missing values. `"omit"` skips them, as `mean` and `ewm` do in
            pandas: the row is not counted and repeats the previous average. `"propagate"`: an
            average is missing while its window has a missing value. `"raise"` raises an error.
        state: For data in several parts: the averages to continue and to update. The keys of the
            state are the keys of the groups; the names of the columns if nothing is grouped; or
            (column, key) for a DataFrame with groups.
        numeric_only: Leave out the columns of a DataFrame that are not numeric. By default they
            raise an error.

    Examples:
        >>> df = pd.DataFrame({"run": ["a", "b", "a", "a"], "loss": [4.0, 9.0, 2.0, 1.0]})
        >>> tail_mean(df["loss"], 2)
        0    4.0
        1    6.5
        2    5.5
        3    1.5
        Name: loss, dtype: float64
        >>> tail_mean(df, 2, by="run")
           loss
        0   4.0
        1   9.0
        2   3.0
        3   1.5
        >>> hours = pd.date_range("2026-01-01", periods=3, freq="h")
        >>> tail_mean(pd.Series([4.0, 9.0, 2.0], index=hours), "2h").tolist()
        [4.0, 6.5, 5.5]
    """
    return _scan(
        Statistic(),
        data,
        rule,
        window=window,
        by=by,
        on=on,
        nan_policy=nan_policy,
        state=state,
        numeric_only=numeric_only,
    )


@overload
def tail_std(
    data: pd.Series | SeriesGroupBy,
    rule: AnyRule,
    *,
    ddof: int = 1,
    **options: Unpack[_Options],
) -> pd.Series: ...
@overload
def tail_std(  # type: ignore[overload-cannot-match]
    data: pd.DataFrame | DataFrameGroupBy,
    rule: AnyRule,
    *,
    ddof: int = 1,
    **options: Unpack[_Options],
) -> pd.DataFrame: ...
def tail_std(data: Any, rule: AnyRule, *, ddof: int = 1, **options: Unpack[_Options]) -> Any:
    """Return the standard deviation of the samples of the tail average, after each row.

    The samples have the weights α that they have in `tail_mean`: see `TailAverage.variance`. As in
    `rolling().std()` of pandas, the result is missing while the window has one sample.

    Args:
        data: As for `tail_mean`.
        rule: As for `tail_mean`.
        ddof: 1 divides the variance by 1 - Σ α², so that it is unbiased for independent samples; 0
            does not.
        options: `window`, `by`, `on`, `nan_policy`, `state` and `numeric_only`, as for `tail_mean`.
            A `state` needs `TailAverages(..., variance=True)`.

    Examples:
        >>> tail_std(pd.Series([1.0, 3.0, 3.0, 7.0]), 2, ddof=0).tolist()
        [0.0, 1.0, 0.0, 2.0]
    """
    return _scan(Statistic.named("std", ddof), data, rule, **options)


@overload
def tail_var(
    data: pd.Series | SeriesGroupBy,
    rule: AnyRule,
    *,
    ddof: int = 1,
    **options: Unpack[_Options],
) -> pd.Series: ...
@overload
def tail_var(  # type: ignore[overload-cannot-match]
    data: pd.DataFrame | DataFrameGroupBy,
    rule: AnyRule,
    *,
    ddof: int = 1,
    **options: Unpack[_Options],
) -> pd.DataFrame: ...
def tail_var(data: Any, rule: AnyRule, *, ddof: int = 1, **options: Unpack[_Options]) -> Any:
    """Return the variance of the samples of the tail average, after each row.

    This is the square of `tail_std`, with the same arguments.

    Examples:
        >>> tail_var(pd.Series([1.0, 3.0, 3.0, 7.0]), 2).tolist()
        [nan, 2.0, 0.0, 8.0]
    """
    return _scan(Statistic.named("variance", ddof), data, rule, **options)


def _scan(
    statistic: Statistic,
    data: Any,
    rule: AnyRule,
    *,
    window: Reading | None = None,
    by: Any = None,
    on: Any = None,
    nan_policy: NanPolicy = "omit",
    state: TailAverages | None = None,
    numeric_only: bool = False,
) -> Any:
    """Return a statistic after each row. The arguments are those of `tail_mean`."""
    variance, keep = statistic.of != MEAN, state is not None
    averages = averages_for(rule, window, nan_policy, state, variance, on)
    groups = None
    if isinstance(data, SeriesGroupBy | DataFrameGroupBy):
        if by is not None:
            raise TypeError("by: the data is already grouped; leave out by")
        groups = data
    elif not isinstance(data, pd.Series | pd.DataFrame):
        raise TypeError(
            f"data: expected a Series, a DataFrame or groups of one, got {type(data).__name__}"
        )
    elif by is not None:
        groups = data.groupby(by, sort=False, observed=True)
    source = data if groups is None else groups.obj
    times = _times(source, on) if is_timed(averages.rule) else None
    if groups is not None:
        data = groups._obj_with_exclusions  # the selected columns, without the keys
    is_frame = isinstance(data, pd.DataFrame)
    if is_frame and on is not None:
        data = data.drop(columns=on, errors="ignore")
    if is_frame and numeric_only:
        data = data.loc[:, [_is_numeric(column) for _, column in data.items()]]
    columns = [column for _, column in data.items()] if is_frame else [data]
    for column in columns:
        if not _is_numeric(column):
            advice = "convert or drop it, or pass numeric_only=True" if is_frame else "convert it"
            raise TypeError(
                f"data: expected real numbers, got column {column.name!r} of {column.dtype}; "
                f"{advice}"
            )
    if keep and len({column.name for column in columns}) < len(columns):
        raise ValueError(
            "state: expected columns of different names, which are the keys of the averages, got "
            f"{list(data.columns)}; rename them"
        )
    codes, keys = (None, None) if groups is None else _groups(groups, keep)
    parts = [
        (codes, keys_of_column(column.name, keys, is_frame and keep), _numbers(column))
        for column in columns
    ]
    scanned = averages.scan_parts(parts, [window], keep=keep, statistic=statistic, times=times)
    results = [_like(column, values[0]) for column, values in zip(columns, scanned, strict=True)]
    if not is_frame:
        return pd.Series(results[0], index=data.index, name=data.name, copy=False)
    frame = pd.DataFrame(dict(enumerate(results)), index=data.index, copy=False)
    frame.columns = data.columns
    return frame


def _groups(groups: Any, keep: bool) -> tuple[Array, Sequence[Any]]:
    """Return the group number of each row, -1 if its key is missing, and the keys of the groups.

    Unless `keep` is set, numbers serve as keys. A missing value in a key is None.
    """
    codes = groups.ngroup().fillna(-1).to_numpy(np.int64)
    number = int(codes.max(initial=-1)) + 1
    if not keep:
        return codes, range(number)
    index = groups._grouper.result_index
    if len(index) != number:  # `ngroup` does not count groups without rows
        raise ValueError(
            f"state: only {number} of {len(index)} groups have rows; pass observed=True to groupby"
        )
    if index.nlevels == 1:
        return codes, [None if pd.isna(key) else key for key in index.tolist()]
    keys = [tuple(None if pd.isna(x) else x for x in key) for key in index.tolist()]
    return codes, keys


def _times(data: Any, on: Any) -> Array:
    """Return the times of the rows: of a column, of a level of the index, or of the index."""
    columns = data.columns if isinstance(data, pd.DataFrame) else ()
    if on is None:
        times = data.index
        if not pd.api.types.is_datetime64_any_dtype(times.dtype):
            raise ValueError(
                "a window of time needs the time of each row: pass on=, the name of a column of "
                "datetimes, or data with a DatetimeIndex"
            )
    elif not isinstance(on, Hashable) or on not in [*columns, *data.index.names]:
        given = short_repr(on) if isinstance(on, Hashable) else f"a {type(on).__name__}"
        raise ValueError(
            f"on: expected the name of a column or of a level of the index, got {given}"
            + ("" if len(columns) else "; a Series has no columns: pass its DataFrame")
        )
    else:
        times = data[on] if on in columns else data.index.get_level_values(on)
        if not pd.api.types.is_datetime64_any_dtype(times.dtype):
            raise TypeError(
                f"on: expected datetimes, got {on!r} of {times.dtype}; convert it with "
                "pd.to_datetime"
            )
    index = pd.DatetimeIndex(times)
    if index.hasnans:
        raise ValueError("times: expected one in each row, got NaT; drop the rows without a time")
    in_utc: Array = index.as_unit("ns").to_numpy("datetime64[ns]")
    return in_utc


def _is_numeric(column: Any) -> bool:
    """Return whether a column has real numbers."""
    dtype = column.dtype
    return pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_complex_dtype(dtype)


def _numbers(column: Any) -> Array:
    """Return a column as an array of floats, with NaN where a value is missing."""
    if isinstance(column.dtype, np.dtype):
        values: Array = column.to_numpy()
        return values if values.dtype.kind == "f" else values.astype(np.float64)
    numbers: Array = column.to_numpy(dtype=np.float64, na_value=np.nan)
    return numbers


def _like(column: Any, averages: Array) -> Any:
    """Return averages as an array of the same kind as a column: NumPy, Arrow or masked."""
    dtype = column.dtype
    if isinstance(dtype, np.dtype):
        return averages.astype(dtype, copy=False) if dtype.kind == "f" else averages
    if isinstance(dtype, pd.ArrowDtype):
        import pyarrow as pa

        kind = dtype.pyarrow_dtype
        kind = kind if pa.types.is_floating(kind) else pa.float64()
        return pd.array(pa.array(averages, mask=np.isnan(averages)).cast(kind), pd.ArrowDtype(kind))
    if isinstance(column.array, _MASKED):
        kind = np.float32 if dtype == pd.Float32Dtype() else np.float64
        return pd.arrays.FloatingArray(averages.astype(kind), np.isnan(averages))
    return averages
