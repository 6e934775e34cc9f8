"""`tail_mean`, `tail_std` and `tail_var` of `tailavg.polars`.

They are compared with `TailAverage.scan` of each group, and with the model's weights.
"""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal, assert_series_equal

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
from tailavg.polars import tail_mean, tail_std, tail_var
from tests.support.cases import FEW_RULES, assert_close, of_rules
from tests.support.model import averages as weighted
from tests.support.model import variances, weight_matrix


@pytest.fixture(params=["compiled", "without numba"], autouse=True)
def way(request, monkeypatch):
    if request.param == "compiled":
        pytest.importorskip("numba")
        monkeypatch.setattr(kernel, "LONG", 0)
        monkeypatch.setattr(kernel, "SHORT", 0)
    else:
        monkeypatch.setattr(kernel, "installed", lambda: False)


def frame(rows: int = 400, runs: int = 7, seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    return pl.DataFrame(
        {
            "run": [f"run {run}" for run in rng.integers(0, runs, rows)],
            "loss": 1 + rng.random(rows),
            "hits": rng.integers(1, 9, rows),
        }
    )


def expected_by(rule, keys, column) -> list[float]:
    out = np.full(len(column), np.nan)
    keys, xs = np.array(keys.to_list(), object), column.to_numpy().astype(float)
    for key in set(keys):
        of_key = keys == key
        out[of_key] = TailAverage(rule, nan_policy="omit").scan(xs[of_key])
    return out.tolist()


@of_rules(FEW_RULES)
def test_a_series(rule):
    series = frame()["loss"]
    got = tail_mean(series, rule)
    assert got.name == "loss"
    np.testing.assert_array_equal(got, TailAverage(rule).scan(series.to_numpy()))
    assert_close(got, weighted(weight_matrix(rule, len(series)), series.to_numpy()), 1e-12)


@of_rules(FEW_RULES)
def test_groups(rule):
    df = frame()
    got = df.with_columns(tail_mean(pl.col("loss", "hits"), rule, by="run"))
    for name in ("loss", "hits"):
        assert got[name].to_list() == expected_by(rule, df["run"], df[name])
    assert got["run"].to_list() == df["run"].to_list()
    for run in set(df["run"]):
        of_run = (df["run"] == run).to_numpy()
        weights = weight_matrix(rule, int(of_run.sum()))
        assert_close(
            got["loss"].to_numpy()[of_run], weighted(weights, df["loss"].to_numpy()[of_run]), 1e-12
        )


def test_every_way_to_group_gives_the_same():
    df = frame().with_columns(number=pl.col("run").str.tail(1).cast(pl.Int8))
    expected = expected_by(0.25, df["run"], df["loss"])
    ways = [
        pl.col("loss").pipe(tail_mean, 0.25).over("run"),
        tail_mean(pl.col("loss"), 0.25, by="run"),
        tail_mean(pl.col("loss"), 0.25, by=["run", pl.col("run").str.len_chars()]),
        tail_mean(pl.col("loss"), 0.25, by=pl.col("run").cast(pl.Categorical)),
        tail_mean(pl.col("loss"), 0.25, by="number"),
        tail_mean(pl.col("loss"), 0.25, by=pl.col("number").cast(pl.Int64) * 10**12),
        tail_mean(pl.col("loss"), 0.25, by=pl.col("number").cast(pl.UInt64) + 2**63),
    ]
    for one in ways:
        assert df.select(one)["loss"].to_list() == expected
        assert df.with_columns(one)["loss"].to_list() == expected
        for engine in ("in-memory", "streaming"):
            lazy = df.lazy().with_columns(one).filter(pl.col("hits") > 4)
            assert lazy.collect_schema()["loss"] == pl.Float64
            assert_frame_equal(
                lazy.collect(engine=engine), df.with_columns(one).filter(pl.col("hits") > 4)
            )
    assert tail_mean(df["loss"], 0.25, by=df["run"]).to_list() == expected
    assert tail_mean(df["loss"], 0.25, by=[df["run"], df["number"]]).to_list() == expected
    assert tail_mean(df["loss"], 0.25, by=df["run"].to_list()).to_list() == expected
    got = tail_mean(df, 0.25, by=["run", "number"])
    assert got.columns == df.columns
    assert got["loss"].to_list() == expected
    assert got["number"].equals(df["number"])
    lists = df.group_by("run").agg(tail_mean(pl.col("loss"), 0.25))
    for run, averages in lists.iter_rows():
        losses = df.filter(run=run)["loss"].to_numpy()
        assert averages == TailAverage(0.25).scan(losses).tolist()
    streamed = df.lazy().group_by("run").agg(tail_mean(pl.col("loss"), 0.25))
    assert_frame_equal(streamed.collect(engine="streaming"), lists, check_row_order=False)


def test_an_expression_is_not_cut_into_batches():
    series = pl.Series("x", np.random.default_rng(0).random(300_000))
    expected = TailAverage(0.25).scan(series.to_numpy())
    chunked = pl.concat([series[:1000], series[1000:100_000], series[100_000:]], rechunk=False)
    lazy = chunked.to_frame().lazy().with_columns(tail_mean(pl.col("x"), 0.25))
    for engine in ("in-memory", "streaming"):
        np.testing.assert_array_equal(lazy.collect(engine=engine)["x"], expected)
        np.testing.assert_array_equal(lazy.tail(5).collect(engine=engine)["x"], expected[-5:])
    np.testing.assert_array_equal(tail_mean(chunked, 0.25), expected)


DTYPES = {
    pl.Float64: pl.Float64,
    pl.Float32: pl.Float32,
    pl.Int64: pl.Float64,
    pl.UInt8: pl.Float64,
    pl.Int16: pl.Float64,
    pl.Boolean: pl.Float64,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", [None, "run"])
def test_dtypes(dtype, by):
    df = pl.DataFrame({"run": [0, 1, 0, 0, 1], "x": pl.Series([1, 0, 1, 1, 0]).cast(dtype)})
    exact = df.select(tail_mean(pl.col("x").cast(pl.Float64), 2, by=by))["x"].to_list()
    expr = tail_mean(pl.col("x"), 2, by=by)
    assert df.lazy().select(expr).collect_schema()["x"] == DTYPES[dtype]
    keys = None if by is None else df["run"]
    data = df if by else df.select("x")
    for got in (
        df.select(expr)["x"],
        tail_mean(df["x"], 2, by=keys),
        tail_mean(data, 2, by=by)["x"],
    ):
        assert got.dtype == DTYPES[dtype]
        assert got.to_list() == exact
    assert df.head(0).select(expr).schema == {"x": DTYPES[dtype]}
    over = df.select(tail_mean(pl.col("x"), 2).over("run"))["x"]
    assert_series_equal(over, df.select(tail_mean(pl.col("x"), 2, by="run"))["x"])


@pytest.mark.parametrize(
    ("dtype", "missing"),
    [
        (pl.Float64, None),
        (pl.Float64, float("nan")),
        (pl.Float32, None),
        (pl.Float32, float("nan")),
        (pl.Int64, None),
    ],
)
def test_nulls_and_nans(dtype, missing):
    series = pl.Series("x", [missing, 1, missing, 3, 5], dtype=dtype, strict=False)
    df = series.to_frame().with_columns(run=pl.Series(["a", "b", "a", "a", "b"]))
    for got in (tail_mean(series, 2), df.select(tail_mean(pl.col("x"), 2))["x"]):
        assert got.to_list() == [None, 1, 1, 2, 4]
    for by in (tail_mean(pl.col("x"), 2, by="run"), tail_mean(pl.col("x"), 2).over("run")):
        assert df.select(by)["x"].to_list() == [None, 1, None, 3, 3]
    got = tail_mean(series, 2, nan_policy="propagate")
    assert got.is_nan().to_list() == [True, True, True, True, False]
    with pytest.raises(ValueError, match=r"expected no NaN \(nan_policy='raise'\), got 2"):
        tail_mean(series, 2, nan_policy="raise")
    with pytest.raises((ValueError, pl.exceptions.PolarsError), match="expected no NaN"):
        df.select(tail_mean(pl.col("x"), 2, nan_policy="raise"))


def test_a_null_key_is_a_group_as_in_over():
    df = pl.DataFrame({"run": ["a", None, "a", None], "n": [1, None, 1, None], "x": [1.0, 2, 3, 4]})
    for key in ("run", "n"):
        for expr in (tail_mean(pl.col("x"), 2, by=key), tail_mean(pl.col("x"), 2).over(key)):
            assert df.select(expr)["x"].to_list() == [1, 2, 2, 3]


@pytest.mark.parametrize("rows", [0, 1])
def test_empty_and_one_row(rows):
    df = frame().head(rows)
    for got in (
        tail_mean(df, 0.25, by="run"),
        df.with_columns(tail_mean(pl.col("loss", "hits"), 0.25)),
        df.with_columns(tail_mean(pl.col("loss", "hits"), 0.25).over("run")),
        df.with_columns(tail_mean(pl.col("loss", "hits"), 0.25, by="run")),
    ):
        assert got.columns == df.columns
        assert got["loss"].to_list() == df["loss"].to_list()
        assert got["hits"].dtype == pl.Float64
    assert len(tail_mean(df["loss"], 2)) == rows
    assert tail_mean(pl.DataFrame(), 2).shape == (0, 0)


def test_what_is_refused():
    df = frame()
    with pytest.raises(TypeError, match="got column 'run' of String; cast or drop it"):
        tail_mean(df, 2)
    with pytest.raises(TypeError, match="expected numbers, got column"):
        tail_mean(df["run"], 2)
    with pytest.raises(pl.exceptions.PolarsError):
        df.select(tail_mean(pl.col("run"), 2))
    with pytest.raises((TypeError, pl.exceptions.PolarsError), match="expected numbers, got col"):
        df.select(tail_mean(pl.col("hits").cast(pl.Duration("us")), 2))
    with pytest.raises(TypeError, match="LazyFrame; pass an expression to its with_columns"):
        tail_mean(df.lazy(), 2)
    with pytest.raises(
        TypeError, match="expected an expression, a Series or a DataFrame, got list"
    ):
        tail_mean([1.0], 2)
    with pytest.raises(TypeError, match="by: expected a Series"):
        tail_mean(df["loss"], 2, by="run")
    with pytest.raises(ValueError, match="as many keys as samples, 400, got 2"):
        tail_mean(df["loss"], 2, by=pl.Series([1, 2]))
    with pytest.raises(TypeError, match="state: an expression takes no state"):
        tail_mean(pl.col("loss"), 2, state=TailAverages(2, nan_policy="omit"))
    with pytest.raises(ValueError, match="state: expected TailAverages"):
        tail_mean(df["loss"], 2, state=TailAverages(2))
    for data in (df["loss"], pl.col("loss")):  # not only when polars runs the expression
        with pytest.raises(ValueError, match=r"^AnyTail has no window of its own: pass window="):
            tail_mean(data, AnyTail())
        with pytest.raises(
            ValueError, match=r"window: AnytimeWindow.* has its own window, got 0\.5"
        ):
            tail_mean(data, 2, window=0.5)
        with pytest.raises(TypeError, match=r"window: expected an int.* of type list"):
            tail_mean(data, AnyTail(), window=[0.25, 0.5])
    with pytest.raises(ValueError, match="rule: expected an int"):
        tail_mean(pl.col("loss"), 1.5)


@pytest.mark.parametrize("window", [0.25, 1.0, Decay(0.5, "cosine"), Freshest(0.3)], ids=str)
def test_an_any_tail_is_read_with_a_window(window):
    df = frame()
    expected = TailAverage(AnyTail()).scan(df["loss"].to_numpy(), window)
    by_run = TailAverages(AnyTail()).scan(df["run"].to_list(), df["loss"].to_numpy(), window)
    for data in (df["loss"], df.select("loss"), pl.col("loss")):
        got = tail_mean(data, AnyTail(), window=window)
        column = got if isinstance(got, pl.Series) else df.select("loss").with_columns(got)["loss"]
        assert_close(column.to_numpy(), expected, 1e-12)
    got = df.select(tail_mean(pl.col("loss"), AnyTail(), window=window, by="run"))["loss"]
    assert_close(got.to_numpy(), by_run, 1e-12)


def test_a_window_that_is_too_short_changes_no_state():
    series, state = frame()["loss"], TailAverages(AnyTail(), nan_policy="omit")
    tail_mean(series[:200], AnyTail(), window=0.25, state=state)
    for window in (0.05, None):
        with pytest.raises(ValueError, match="window"):
            tail_mean(series[200:], AnyTail(), window=window, state=state)
    assert state["loss"].count == 200
    got = tail_mean(series[200:], AnyTail(), window=0.5, state=state)
    assert_close(got.to_numpy(), tail_mean(series, AnyTail(), window=0.5)[200:].to_numpy(), 1e-12)


@given(
    rows=st.integers(1, 120),
    cuts=st.lists(st.integers(0, 120), max_size=4).map(sorted),
    rule=st.sampled_from([AnytimeWindow(6), AnytimeWindow(0.3), Exponential(0.3)]),
    nan_policy=st.sampled_from(["omit", "propagate"]),
)
def test_parts_give_what_the_whole_gives(rows, cuts, rule, nan_policy):
    bad = pl.Series(np.random.default_rng(rows).random(rows) < 0.2)
    df = frame(rows, 4, rows).with_columns(loss=pl.when(~bad).then(pl.col("loss")))
    whole = tail_mean(df, rule, by="run", nan_policy=nan_policy)
    state, parts, start = TailAverages(rule, nan_policy=nan_policy), [], 0
    for end in [*(cut for cut in cuts if cut < rows), rows]:
        part = df[start:end]
        parts.append(tail_mean(part, rule, by="run", nan_policy=nan_policy, state=state))
        start = end
    assert_frame_equal(pl.concat(parts), whole, check_exact=kernel.installed(), rel_tol=1e-12)


def test_the_keys_of_a_state(tmp_path):
    df = pl.DataFrame({"run": ["a", "b", None], "fold": [0, 0, 1], "x": [1.0, 2.0, 3.0]})

    def keys(data, by=None):
        state = TailAverages(2, nan_policy="omit")
        tail_mean(data, 2, by=by, state=state)
        state.save(tmp_path / "state")
        assert TailAverages.load(tmp_path / "state") == state
        return list(state)

    assert keys(df["x"]) == ["x"]
    assert keys(df[["fold", "x"]]) == ["fold", "x"]
    assert keys(df["x"], df["run"]) == ["a", "b", None]
    assert keys(df["x"], df["fold"] * 3) == [0, 3]
    assert keys(df[["run", "x"]], "run") == [("x", "a"), ("x", "b"), ("x", None)]
    assert keys(df[["fold", "x"]], "fold") == [("x", 0), ("x", 1)]
    assert keys(df, ["run", "fold"]) == [("x", ("a", 0)), ("x", ("b", 0)), ("x", (None, 1))]


# Standard deviations and variances.


def expected_std(rule, keys, column, ddof) -> np.ndarray:
    """The standard deviations of each group by definition; a missing sample repeats the last."""
    out, keys = np.full(len(column), np.nan), np.array(keys, object)
    xs = column.to_numpy().astype(float)
    for key in set(keys):
        of_key = np.flatnonzero(keys == key)
        counted = ~np.isnan(xs[of_key])
        known = xs[of_key][counted]
        stds = np.sqrt(variances(weight_matrix(rule, len(known)), known, ddof))
        out[of_key] = np.concatenate([[np.nan], stds])[np.cumsum(counted)]
    return out


def assert_like(got: pl.Series, expected: np.ndarray) -> None:
    """The same numbers, with null for NaN."""
    assert got.is_null().to_list() == np.isnan(expected).tolist()
    assert_close(got.to_numpy(), expected, 1e-11)


@of_rules(FEW_RULES)
@pytest.mark.parametrize("ddof", [0, 1])
def test_deviations_are_those_of_the_definition(rule, ddof):
    missing = pl.Series(np.random.default_rng(0).random(400) < 0.1)
    df = frame().with_columns(loss=pl.when(~missing).then(pl.col("loss")))
    one = expected_std(rule, [0] * len(df), df["loss"], ddof)
    of_runs = expected_std(rule, df["run"], df["loss"], ddof)
    assert_like(tail_std(df["loss"], rule, ddof=ddof), one)
    assert_like(tail_var(df["loss"], rule, ddof=ddof), one**2)
    loss = pl.col("loss")
    for expr, expected in (
        (tail_std(loss, rule, ddof=ddof), one),
        (tail_std(loss, rule, by="run", ddof=ddof), of_runs),
        (tail_var(loss, rule, by="run", ddof=ddof), of_runs**2),
        (loss.pipe(tail_std, rule, ddof=ddof).over("run"), of_runs),
    ):
        for got in (df.select(expr), df.lazy().select(expr).collect(engine="streaming")):
            assert_like(got["loss"], expected)
    frames = tail_std(df, rule, by="run", ddof=ddof)
    assert frames.columns == df.columns
    assert_like(frames["hits"], expected_std(rule, df["run"], df["hits"], ddof))


def test_deviations_of_a_window_are_those_of_polars():
    series = frame()["loss"]
    for ddof in (0, 1):
        exact = ExactWindow(9)
        assert_series_equal(
            tail_std(series, exact, ddof=ddof)[1:],
            series.rolling_std(9, min_samples=1, ddof=ddof)[1:],
            rel_tol=1e-9,
        )
        assert_series_equal(
            tail_var(series, exact, ddof=ddof)[1:],
            series.rolling_var(9, min_samples=1, ddof=ddof)[1:],
            rel_tol=1e-9,
        )
    assert tail_std(series, 9)[0] is series.rolling_std(9, min_samples=1)[0] is None


def test_deviations_of_an_any_tail():
    df = frame()
    average = TailAverage(AnyTail(), variance=True)
    expected = average.scan(df["loss"].to_numpy(), 0.25, of="std", ddof=0)
    got = df.select(tail_std(pl.col("loss"), AnyTail(), window=0.25, ddof=0))["loss"]
    assert_close(got.to_numpy(), expected, 1e-12)
    with pytest.raises(ValueError, match=r"^AnyTail has no window of its own: pass window="):
        tail_std(pl.col("loss"), AnyTail())


@pytest.mark.parametrize("dtype", [pl.Float64, pl.Float32, pl.Int64])
def test_nan_policies_and_dtypes_of_deviations(dtype):
    df = pl.DataFrame({"x": pl.Series([1, None, 3, 7, 7], dtype=dtype), "run": [0, 0, 1, 1, 1]})
    for got in (tail_var(df["x"], 2), df.select(tail_var(pl.col("x"), 2))["x"]):
        assert got.to_list() == [None, None, 2, 8, 0]
        assert got.dtype == DTYPES[dtype]
    by_run = tail_var(pl.col("x"), 2, by="run")
    assert df.select(by_run)["x"].to_list() == [None, None, None, 8, 0]
    got = tail_var(df["x"], 2, nan_policy="propagate")
    np.testing.assert_array_equal(got, [np.nan, np.nan, np.nan, 8, 0])
    assert got.null_count() == 0
    with pytest.raises(ValueError, match="expected no NaN"):
        tail_std(df["x"], 2, nan_policy="raise")


def test_deviations_in_parts(tmp_path):
    missing = pl.Series(np.random.default_rng(0).random(400) < 0.1)
    df, rule = frame().with_columns(loss=pl.when(~missing).then(pl.col("loss"))), Exponential(0.3)
    state, parts = TailAverages(rule, nan_policy="omit", variance=True), []
    for part in (df[:1], df[1:150], df[150:]):
        parts.append(tail_std(part, rule, by="run", state=state))
        state.save(tmp_path / "state")
        state = TailAverages.load(tmp_path / "state")
    assert_frame_equal(pl.concat(parts), tail_std(df, rule, by="run"), rel_tol=1e-11)


@pytest.mark.parametrize("call", [tail_std, tail_var])
@pytest.mark.parametrize("ddof", [-1, 2, 0.5, None, True, "1"])
def test_a_bad_ddof_is_refused_at_once(call, ddof):
    state = TailAverages(2, nan_policy="omit", variance=True)
    message = rf"^ddof: expected 0 or 1, got {ddof!r}$"
    with pytest.raises(ValueError, match=message):
        call(pl.col("x"), 2, ddof=ddof)
    with pytest.raises(ValueError, match=message):
        call(pl.Series([1.0, 2.0]), 2, ddof=ddof, state=state)
    assert not state


def test_deviations_need_a_state_with_variances():
    series = pl.Series([1.0, 2.0])
    of_means, of_both = (
        TailAverages(2, nan_policy="omit", variance=variance) for variance in (False, True)
    )
    with pytest.raises(
        ValueError, match=r"^state: expected TailAverages\(.*, variance=True\), like"
    ):
        tail_std(series, 2, state=of_means)
    with pytest.raises(ValueError, match=r"got TailAverages\(.*, variance=True\)$"):
        tail_mean(series, 2, state=of_both)
    assert not of_means
    assert not of_both
