"""`tail_mean`, `tail_std` and `tail_var` of `tailavg.pandas`.

They are compared with `TailAverage.scan` of each group, and with the model's weights.
"""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailavg import (
    AnyTail,
    AnytimeWindow,
    Decay,
    ExactWindow,
    Exponential,
    Freshest,
    TailAverage,
    TailAverages,
)
from tailavg.numpy import kernel
from tailavg.pandas import tail_mean, tail_std, tail_var
from tests.support.cases import FEW_RULES, assert_close, of_rules
from tests.support.model import averages as weighted
from tests.support.model import variances, weight_matrix

NA = np.nan


@pytest.fixture(params=["compiled", "without numba"], autouse=True)
def way(request, monkeypatch):
    if request.param == "compiled":
        pytest.importorskip("numba")
        monkeypatch.setattr(kernel, "LONG", 0)
        monkeypatch.setattr(kernel, "SHORT", 0)
    else:
        monkeypatch.setattr(kernel, "installed", lambda: False)


def frame(rows: int = 400, runs: int = 7, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    index = pd.Index(rng.integers(0, 9, rows), name="step")  # with duplicates
    runs_of_rows = [f"run {run}" for run in rng.integers(0, runs, rows)]
    columns = {"run": runs_of_rows, "loss": 1 + rng.random(rows), "hits": rng.integers(1, 9, rows)}
    return pd.DataFrame(columns, index=index)


def expected_by(rule, keys, column, nan_policy="omit") -> np.ndarray:
    """What each group is on its own; NaN where the key is missing."""
    out = np.full(len(column), np.nan)
    keys, xs = np.asarray(keys), np.asarray(column, float)
    for key in set(keys.tolist()):
        of_key = keys == key
        out[of_key] = TailAverage(rule, nan_policy=nan_policy).scan(xs[of_key])
    return out


@of_rules(FEW_RULES)
def test_a_series(rule):
    series = frame()["loss"]
    got = tail_mean(series, rule)
    assert got.name == "loss"
    pd.testing.assert_index_equal(got.index, series.index)
    np.testing.assert_array_equal(got, TailAverage(rule).scan(series.to_numpy()))
    assert_close(got, weighted(weight_matrix(rule, len(series)), series.to_numpy()), 1e-12)


@of_rules(FEW_RULES)
def test_groups(rule):
    df = frame()
    got = tail_mean(df, rule, by="run")
    assert list(got.columns) == ["loss", "hits"]
    pd.testing.assert_index_equal(got.index, df.index)
    for name in got:
        np.testing.assert_array_equal(got[name], expected_by(rule, df["run"], df[name]))
    for run in set(df["run"]):
        of_run = (df["run"] == run).to_numpy()
        weights = weight_matrix(rule, int(of_run.sum()))
        assert_close(got["loss"][of_run], weighted(weights, df["loss"].to_numpy()[of_run]), 1e-12)


@pytest.mark.parametrize("window", [0.25, 1.0, Decay(0.5, "cosine"), Freshest(0.3)], ids=str)
def test_an_any_tail_is_read_with_a_window(window):
    df = frame()
    got = tail_mean(df["loss"], AnyTail(), window=window)
    np.testing.assert_array_equal(got, TailAverage(AnyTail()).scan(df["loss"].to_numpy(), window))
    by_run, state = tail_mean(df, AnyTail(), window=window, by="run"), TailAverages(AnyTail())
    expected = state.scan(df["run"], df["loss"], window)
    assert_close(by_run["loss"], expected, 1e-12)


def test_a_window_that_is_too_short_changes_no_state():
    series, state = frame()["loss"], TailAverages(AnyTail(), nan_policy="omit")
    whole = tail_mean(series, AnyTail(), window=0.5)
    tail_mean(series[:200], AnyTail(), window=0.25, state=state)
    for window in (0.05, None):
        with pytest.raises(ValueError, match="window"):
            tail_mean(series[200:], AnyTail(), window=window, state=state)
    assert state["loss"].count == 200
    got = tail_mean(series[200:], AnyTail(), window=0.5, state=state)
    assert_close(got, whole[200:], 1e-12)


def test_every_way_to_group_gives_the_same():
    df = frame()
    expected = tail_mean(df, 0.25, by="run")["loss"]
    for got in (
        tail_mean(df.groupby("run")["loss"], 0.25),
        tail_mean(df["loss"].groupby(df["run"].to_numpy()), 0.25),
        tail_mean(df["loss"], 0.25, by=df["run"].to_numpy()),
        tail_mean(df.groupby("run")[["loss"]], 0.25)["loss"],
        tail_mean(df.groupby("run"), 0.25)["loss"],
        tail_mean(df.groupby("run", sort=False, as_index=False), 0.25)["loss"],
        tail_mean(df, 0.25, by=["run"])["loss"],
        tail_mean(df, 0.25, by=pd.Grouper(key="run"))["loss"],
        tail_mean(df.astype({"run": "category"}), 0.25, by="run")["loss"],
        tail_mean(df.astype({"run": "category"}).groupby("run", observed=False), 0.25)["loss"],
        tail_mean(df.set_index("run")["loss"], 0.25, by="run").set_axis(df.index),
        df.groupby("run")["loss"].transform(tail_mean, 0.25),
    ):
        pd.testing.assert_series_equal(got, expected)
    df["half"] = np.arange(len(df)) % 2
    keys = [f"{run} {half}" for run, half in zip(df["run"], df["half"], strict=True)]
    got = tail_mean(df, 0.25, by=["run", "half"])
    assert_close(got["loss"], expected_by(0.25, keys, df["loss"]), 1e-12)
    assert list(got.columns) == ["loss", "hits"]


DTYPES = {
    "float64": "float64",
    "float32": "float32",
    "float16": "float16",
    "int64": "float64",
    "uint8": "float64",
    "bool": "float64",
    "Float64": "Float64",
    "Float32": "Float32",
    "Int64": "Float64",
    "UInt8": "Float64",
    "boolean": "Float64",
    "double[pyarrow]": "double[pyarrow]",
    "float[pyarrow]": "float[pyarrow]",
    "int32[pyarrow]": "double[pyarrow]",
    "Sparse[float64]": "float64",
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", [None, [0, 1, 0, 0, 1]])
def test_dtypes(dtype, by):
    if "pyarrow" in dtype:
        pytest.importorskip("pyarrow")
    series = pd.Series([1, 0, 1, 1, 0], name="x").astype(dtype)
    exact = tail_mean(series.astype("float64"), 2, by=by)
    for got in (tail_mean(series, 2, by=by), tail_mean(series.to_frame(), 2, by=by)["x"]):
        assert got.dtype == pd.Series([1.0]).astype(DTYPES[dtype]).dtype
        np.testing.assert_array_equal(got.to_numpy(float), exact)


@pytest.mark.parametrize("dtype", ["float64", "float32", "Float64", "Int64", "double[pyarrow]"])
def test_missing_values(dtype):
    if "pyarrow" in dtype:
        pytest.importorskip("pyarrow")
    missing = pd.NA if dtype in ("Float64", "Int64") else None
    series = pd.Series([missing, 1, missing, 3, 5], dtype=dtype)
    got = tail_mean(series, 2)
    assert got.isna().tolist() == [True, False, False, False, False]
    assert got[1:].tolist() == [1, 1, 2, 4]
    assert (
        tail_mean(series, 2, by=[0, 1, 0, 0, 1]).isna().tolist()
        == [True, False, True] + [False] * 2
    )
    got = tail_mean(series, 2, nan_policy="propagate")
    assert got.isna().tolist() == [True, True, True, True, False]
    assert got[4] == 4
    with pytest.raises(ValueError, match=r"expected no NaN \(nan_policy='raise'\), got 2"):
        tail_mean(series, 2, nan_policy="raise")


def test_missing_keys_have_missing_averages_as_from_transform():
    df = pd.DataFrame({"run": ["a", None, "a", np.nan, "b"], "x": [1.0, 2.0, 3.0, 4.0, 5.0]})
    np.testing.assert_array_equal(tail_mean(df, 2, by="run")["x"], [1, NA, 2, NA, 5])
    got = tail_mean(df.groupby("run", dropna=False)["x"], 2)
    assert got.tolist() == [1, 2, 2, 3, 5]
    none = pd.DataFrame({"run": [None, None], "x": [1.0, 2.0]})
    assert tail_mean(none, 2, by="run")["x"].isna().all()


@pytest.mark.parametrize(
    "index",
    [
        pd.date_range("2024-03-30", periods=4, freq="D", tz="Europe/Berlin"),
        pd.MultiIndex.from_product([["a", "b"], [1, 2]], names=["run", "step"]),
        pd.Index(["x", "x", "y", "x"]),
        pd.RangeIndex(4),
    ],
    ids=lambda index: type(index).__name__,
)
@pytest.mark.parametrize("by", [None, [0, 1, 0, 1]])
def test_the_index_is_untouched(index, by):
    series = pd.Series([1.0, 2.0, 3.0, 4.0], index=index)
    got = tail_mean(series, 2, by=by)
    pd.testing.assert_index_equal(got.index, index, exact=True)
    assert got.name is None
    pd.testing.assert_index_equal(tail_mean(series.to_frame(), 2, by=by).index, index, exact=True)


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("by", [None, "run"])
def test_empty_and_one_row(rows, by):
    df = frame().head(rows)[["run", "loss", "hits"] if by else ["loss", "hits"]]
    got = tail_mean(df, 0.25, by=by)
    assert got.shape == (rows, 2)
    assert (got.dtypes == "float64").all()
    assert got["loss"].tolist() == df["loss"].tolist()
    assert len(tail_mean(df["loss"], 0.25)) == rows
    assert tail_mean(df[[]], 0.25).shape == (rows, 0)


def test_columns_keep_names_and_order():
    columns = pd.MultiIndex.from_tuples([("a", 1), ("b", 1), ("a", 2)], names=["one", "two"])
    df = pd.DataFrame(np.arange(12.0).reshape(4, 3), columns=columns)
    pd.testing.assert_index_equal(tail_mean(df, 2).columns, columns)
    same = pd.DataFrame(np.arange(8.0).reshape(4, 2), columns=["x", "x"])
    assert tail_mean(same, 2).to_numpy().tolist() == [[0, 1], [1, 2], [3, 4], [5, 6]]
    with pytest.raises(ValueError, match="columns of different names"):
        tail_mean(same, 2, state=TailAverages(2, nan_policy="omit"))


def test_columns_that_are_not_numeric():
    df = frame().assign(when=pd.Timestamp("2024-01-01"), z=1j)
    with pytest.raises(TypeError, match=r"got column 'run' of \w+; .*numeric_only=True"):
        tail_mean(df, 2)
    got = tail_mean(df, 2, numeric_only=True)
    assert list(got.columns) == ["loss", "hits"]
    assert list(tail_mean(df, 2, by="hits", numeric_only=True).columns) == ["loss"]
    for column in ("run", "when", "z"):
        with pytest.raises(TypeError, match=f"expected real numbers, got column '{column}'"):
            tail_mean(df[column], 2)
    with pytest.raises(TypeError, match="of object"):
        tail_mean(pd.Series([1.0, None], dtype=object), 2)


def test_what_is_refused():
    df = frame()
    with pytest.raises(TypeError, match="expected a Series, a DataFrame or groups of one, got nd"):
        tail_mean(np.ones(3), 2)
    with pytest.raises(TypeError, match="by: the data is already grouped"):
        tail_mean(df.groupby("run"), 2, by="run")
    with pytest.raises(ValueError, match=r"^AnyTail has no window of its own: pass window=0\.25$"):
        tail_mean(df["loss"], AnyTail())
    with pytest.raises(ValueError, match=r"window: AnytimeWindow.* has its own window, got 0\.25"):
        tail_mean(df["loss"], 2, window=0.25)
    with pytest.raises(TypeError, match=r"window: expected an int.* of type list"):
        tail_mean(df["loss"], AnyTail(), window=[0.25, 0.5])
    with pytest.raises(ValueError, match="rule: expected an int"):
        tail_mean(df["loss"], 1.5)
    with pytest.raises(TypeError, match="state: expected TailAverages, got TailAverage"):
        tail_mean(df["loss"], 2, state=TailAverage(2))
    for other in (TailAverages(2), TailAverages(3, nan_policy="omit")):
        with pytest.raises(ValueError, match="state: expected TailAverages"):
            tail_mean(df["loss"], 2, state=other)


@given(
    rows=st.integers(1, 120),
    cuts=st.lists(st.integers(0, 120), max_size=4).map(sorted),
    rule=st.sampled_from([AnytimeWindow(6), AnytimeWindow(0.3), Exponential(0.3)]),
    nan_policy=st.sampled_from(["omit", "propagate"]),
)
def test_parts_give_what_the_whole_gives(rows, cuts, rule, nan_policy):
    df = frame(rows, 4, rows)
    df.loc[np.random.default_rng(rows).random(rows) < 0.2, "loss"] = np.nan
    whole = tail_mean(df, rule, by="run", nan_policy=nan_policy)
    state, parts = TailAverages(rule, nan_policy=nan_policy), []
    for rows_of_part in np.split(np.arange(rows), [cut for cut in cuts if cut < rows]):
        part = df.iloc[rows_of_part]
        parts.append(tail_mean(part, rule, by="run", nan_policy=nan_policy, state=state))
    got = pd.concat(parts)
    if kernel.installed():
        pd.testing.assert_frame_equal(got, whole, check_exact=True)
    else:
        pd.testing.assert_frame_equal(got, whole, rtol=1e-12)


def test_the_keys_of_a_state(tmp_path):
    df = pd.DataFrame({"run": ["a", "b", "a"], "fold": [0, 0, 1], "x": [1.0, 2.0, 3.0], "y": 5.0})

    def keys(data, by=None):
        state = TailAverages(2, nan_policy="omit")
        tail_mean(data, 2, by=by, state=state)
        state.save(tmp_path / "state")
        assert TailAverages.load(tmp_path / "state") == state
        return list(state)

    assert keys(df["x"]) == ["x"]
    assert keys(df[["x", "y"]]) == ["x", "y"]
    assert keys(df["x"], df["run"]) == ["a", "b"]
    assert keys(df.groupby("run")["x"]) == ["a", "b"]
    assert keys(df[["run", "x"]], "run") == [("x", "a"), ("x", "b")]
    assert keys(df.groupby(["run", "fold"])["x"]) == [("a", 0), ("a", 1), ("b", 0)]
    missing = df.assign(run=["a", None, "a"])
    assert keys(missing.groupby("run")["x"]) == ["a"]
    assert keys(missing.groupby("run", dropna=False)["x"]) == ["a", None]
    assert keys(missing.groupby(["fold", "run"], dropna=False)["x"]) == [
        (0, "a"),
        (0, None),
        (1, "a"),
    ]
    category = df.astype({"run": pd.CategoricalDtype(["c", "b", "a"])})
    assert keys(category.groupby("run", observed=True)["x"]) == ["b", "a"]
    full = df.astype({"run": pd.CategoricalDtype(["b", "a"])})
    assert keys(full.groupby("run", observed=False)["x"]) == ["b", "a"]
    days = df.set_index(pd.to_datetime(["2024-01-01", "2024-01-03", "2024-01-01"]))["x"]
    state = TailAverages(2, nan_policy="omit")
    assert tail_mean(days.groupby(pd.Grouper(freq="D")), 2, state=state).tolist() == [1, 2, 2]
    assert [key.day for key in state] == [1, 3]
    assert keys(category["x"], category["run"]) == ["a", "b"]
    with pytest.raises(ValueError, match="pass observed=True"):
        keys(category.groupby("run", observed=False)["x"])
    both = category.groupby(["run", "fold"], observed=False)["x"]
    if int(pd.__version__.split(".")[0]) < 3:  # which names only those that are there
        assert keys(both) == [("b", 0), ("a", 0), ("a", 1)]
    else:
        with pytest.raises(ValueError, match="pass observed=True"):
            keys(both)


def test_groups_in_parts_meet_the_averages_of_their_keys():
    df = frame().astype({"run": pd.CategoricalDtype([f"run {i}" for i in (3, 1, 0, 6, 5, 4, 2)])})
    expected = tail_mean(df, 0.3, by=["run", "hits"])["loss"]
    for options in ({}, {"sort": False}, {"as_index": False}, {"dropna": False}):
        state, parts = TailAverages(0.3, nan_policy="omit"), []
        for part in (df[:150], df[150:]):
            groups = part.groupby(["run", "hits"], observed=True, **options)["loss"]
            parts.append(tail_mean(groups, 0.3, state=state))
        np.testing.assert_allclose(pd.concat(parts), expected, rtol=1e-13)


def test_a_refused_part_changes_no_column():
    state = TailAverages(2, nan_policy="raise")
    df = pd.DataFrame({"x": [1.0, 2.0], "y": [3.0, 4.0]})
    tail_mean(df, 2, nan_policy="raise", state=state)
    before = state.copy()
    with pytest.raises(ValueError, match="expected no NaN"):
        tail_mean(df.assign(y=[1.0, np.nan]), 2, nan_policy="raise", state=state)
    assert state == before


# Standard deviations and variances.


def expected_std(rule, keys, column, ddof) -> np.ndarray:
    """The standard deviations of each group by definition; a missing sample repeats the last."""
    out, keys = np.full(len(column), np.nan), np.asarray(keys)
    xs = np.asarray(column, float)
    for key in set(keys.tolist()):
        of_key = np.flatnonzero(keys == key)
        counted = ~np.isnan(xs[of_key])
        known = xs[of_key][counted]
        stds = np.sqrt(variances(weight_matrix(rule, len(known)), known, ddof))
        out[of_key] = np.concatenate([[np.nan], stds])[np.cumsum(counted)]
    return out


@of_rules(FEW_RULES)
@pytest.mark.parametrize("ddof", [0, 1])
def test_deviations_are_those_of_the_definition(rule, ddof):
    df = frame()
    df.loc[np.random.default_rng(0).random(len(df)) < 0.1, "loss"] = NA
    one = expected_std(rule, np.zeros(len(df)), df["loss"], ddof)
    got = tail_std(df["loss"], rule, ddof=ddof)
    assert_close(got, one, 1e-11)
    assert (got.name, got.dtype) == ("loss", "float64")
    assert_close(tail_var(df["loss"], rule, ddof=ddof), one**2, 1e-11)
    by_run = tail_std(df, rule, by="run", ddof=ddof)
    assert list(by_run.columns) == ["loss", "hits"]
    pd.testing.assert_index_equal(by_run.index, df.index)
    for name in by_run:
        assert_close(by_run[name], expected_std(rule, df["run"], df[name], ddof), 1e-11)
    grouped = tail_var(df.groupby("run")["loss"], rule, ddof=ddof)
    assert_close(grouped, expected_std(rule, df["run"], df["loss"], ddof) ** 2, 1e-11)


def test_deviations_of_a_window_are_those_of_pandas():
    series = frame()["loss"].reset_index(drop=True)
    for ddof in (0, 1):
        rolling, expanding = series.rolling(9, min_periods=1), series.expanding()
        exact = ExactWindow(9)
        assert_close(tail_std(series, exact, ddof=ddof), rolling.std(ddof=ddof), 1e-9)
        assert_close(tail_var(series, exact, ddof=ddof), rolling.var(ddof=ddof), 1e-9)
        assert_close(tail_std(series, 1.0, ddof=ddof), expanding.std(ddof=ddof), 1e-9)


def test_deviations_of_an_any_tail():
    df = frame()
    average = TailAverage(AnyTail(), variance=True)
    expected = average.scan(df["loss"].to_numpy(), 0.25, of="std", ddof=0)
    got = tail_std(df["loss"], AnyTail(), window=0.25, ddof=0)
    assert_close(got, expected, 1e-12)
    with pytest.raises(ValueError, match=r"^AnyTail has no window of its own: pass window=0\.25$"):
        tail_std(df["loss"], AnyTail())


@pytest.mark.parametrize("dtype", ["float32", "Int64", "double[pyarrow]"])
def test_the_first_deviation_is_missing_in_every_dtype(dtype):
    if "pyarrow" in dtype:
        pytest.importorskip("pyarrow")
    series = pd.Series([1, 3, 3, 7]).astype(dtype)
    got = tail_var(series, 2)
    assert got.dtype == pd.Series([1.0]).astype(DTYPES[dtype]).dtype
    assert got.isna().tolist() == [True, False, False, False]
    assert got[1:].tolist() == [2, 0, 8]


def test_nan_policies_of_deviations():
    series = pd.Series([1.0, NA, 3.0, 7.0, 7.0])
    np.testing.assert_allclose(tail_var(series, 2), [NA, NA, 2, 8, 0])
    got = tail_var(series, 2, nan_policy="propagate")
    np.testing.assert_allclose(got, [NA, NA, NA, 8, 0])
    np.testing.assert_allclose(tail_var(series, 2, by=[0, 0, 1, 1, 1]), [NA, NA, NA, 8, 0])
    with pytest.raises(ValueError, match="expected no NaN"):
        tail_std(series, 2, nan_policy="raise")


@pytest.mark.parametrize("nan_policy", ["omit", "propagate"])
def test_deviations_in_parts(nan_policy, tmp_path):
    df, rule = frame(), AnytimeWindow(0.3)
    df.loc[np.random.default_rng(0).random(len(df)) < 0.02, "loss"] = NA
    how = {"by": "run", "nan_policy": nan_policy}
    whole = tail_std(df, rule, **how)
    state, parts = TailAverages(rule, nan_policy=nan_policy, variance=True), []
    for part in (df[:1], df[1:150], df[150:]):
        parts.append(tail_std(part, rule, state=state, **how))
        state.save(tmp_path / "state")
        state = TailAverages.load(tmp_path / "state")
    pd.testing.assert_frame_equal(pd.concat(parts), whole, rtol=1e-11)
    key = "loss", "run 3"
    last = whole["loss"][df["run"] == "run 3"].iloc[-1]
    np.testing.assert_allclose(state.std(key), last, rtol=1e-11)


@pytest.mark.parametrize("call", [tail_std, tail_var])
@pytest.mark.parametrize("ddof", [-1, 2, 0.5, None, True, "1"])
def test_a_bad_ddof_changes_no_state(call, ddof):
    state = TailAverages(2, nan_policy="omit", variance=True)
    with pytest.raises(ValueError, match=rf"^ddof: expected 0 or 1, got {ddof!r}$"):
        call(pd.Series([1.0, 2.0]), 2, ddof=ddof, state=state)
    assert not state


def test_deviations_need_a_state_with_variances():
    series = pd.Series([1.0, 2.0])
    of_means, of_both = (
        TailAverages(2, nan_policy="omit", variance=variance) for variance in (False, True)
    )
    message = (
        r"^state: expected TailAverages\(.*'omit', variance=True\), like the arguments, got Tail"
    )
    with pytest.raises(ValueError, match=message):
        tail_std(series, 2, state=of_means)
    with pytest.raises(ValueError, match=r"got TailAverages\(.*, variance=True\)$"):
        tail_mean(series, 2, state=of_both)
    assert not of_means
    assert not of_both
