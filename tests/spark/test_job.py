"""What the workers of Spark do, without Spark: rows in Arrow, batch by batch, states in a dict."""

import datetime as dt
import json
import math
from decimal import Decimal
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailavg import AnyTail, AnytimeWindow, Elapsed, Exponential, Growing, RawTail, TailAverage
from tailavg.core.clock import clock_for
from tailavg.numpy import kernel
from tailavg.spark import job as jobs
from tailavg.spark.job import COLUMN, KEPT, LATE, STATE, TIE, Job
from tests.support.model import variances, weight_matrix

SHARED = AnyTail(12, 0.1)
RULES = {
    "fraction": [(AnytimeWindow(0.25), None)],
    "count": [(AnytimeWindow(7), None)],
    "exponential": [(Exponential(0.25), None)],
    "raw tail": [(RawTail(0.5, 60), None)],
    "time": [(AnytimeWindow("7s"), None)],
    "exponential time": [(Exponential(Elapsed(7)), None)],
    "windows of both": [(AnytimeWindow("7s"), None), (SHARED, Growing(0.5))],
    "windows": [(SHARED, Growing(0.1)), (AnytimeWindow(20), None), (SHARED, Growing(0.5))],
}


@pytest.fixture(params=["compiled", "without numba"], autouse=True)
def way(request, monkeypatch):
    if request.param == "compiled":
        pytest.importorskip("numba")
        monkeypatch.setattr(kernel, "LONG", 0)
        monkeypatch.setattr(kernel, "SHORT", 0)
    else:
        monkeypatch.setattr(kernel, "installed", lambda: False)


def has_times(rule):
    return isinstance(getattr(rule, "window", None), Elapsed)


def job(reads=RULES["fraction"], columns=("x",), order_by="t", **options):
    rules = list(dict.fromkeys(rule for rule, _ in reads))
    kinds = ["", "_std"] if options.get("std") else [""]
    names = [
        f"{column}{i}{kind}" for column in columns for i in range(len(reads)) for kind in kinds
    ]
    given = {"by": ("key",), "nan_policy": "omit", "buckets": 4, "order_type": "long"} | options
    return Job(
        columns=tuple(columns),
        rules=tuple(rules),
        order_by=order_by,
        reads=tuple(reads),
        names=tuple(names),
        **given,
    )


def tied(rows):
    """With the column by which ties are broken: here by value, missing ones last."""
    ties = [100 if x is None or x != x else int(8 * x) for x in rows["x"].to_pylist()]
    return rows.append_column(TIE, pa.array(ties, pa.int64()))


def run(one, batches):
    """The results of batches of rows, one after another."""
    held = {}
    results = []
    for batch in batches:
        batch = batch if one.order_by is None else tied(batch)
        result, states = one.average(batch, lambda keys: [held.get(key) for key in keys])
        held.update(states)
        results.append(result)
    return results, held


def table(rows):
    """Rows of key, t, x."""
    key, t, x = zip(*rows, strict=True)
    return pa.table(
        {"key": pa.array(key), "t": pa.array(t, pa.int64()), "x": pa.array(x, pa.float64())}
    )


def expected(batches, reads, late="include", nan_policy="omit"):
    """The same, slow and obvious: rows with their averages, by key and one by one."""
    averages, last, found = {}, {}, []
    timed = [has_times(rule) for rule, _ in reads]
    for batch in batches:
        before = dict(last)
        rows = list(batch)
        least = -math.inf
        rows.sort(
            key=lambda row: (str(row[0]), row[1] is not None, row[1] or 0, row[2] is None or row[2])
        )
        for key, t, x in rows:
            known = before.get(key)
            is_late = known is not None and (t is None or t < known)
            if t is not None:
                last[key] = max(t, last.get(key, least))
            has_no_time = any(timed) and t is None and known is None
            if (is_late and late == "drop") or has_no_time:
                found.append((key, t, x, None, True))
                continue
            own = averages.setdefault(key, [TailAverage(rule, dtype=float) for rule, _ in reads])
            if not (x is None and nan_policy == "omit"):
                for average, needs_time in zip(own, timed, strict=True):
                    when = (known if is_late else t) if needs_time else None
                    average.update(math.nan if x is None else x, when)
            values = [
                average.value(window) if average.count else None
                for average, (_, window) in zip(own, reads, strict=True)
            ]
            found.append((key, t, x, values, is_late))
    return found


rows = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", None]),
        st.one_of(st.none(), st.integers(0, 30)),
        st.one_of(st.none(), st.integers(-4, 4).map(lambda n: n / 8)),
    ),
    min_size=1,
    max_size=40,
)


def told(result, reads):
    """A result as rows, in an order of its own."""
    values = zip(*(result[f"x{i}"].to_pylist() for i in range(len(reads))), strict=True)
    columns = (result[name].to_pylist() for name in ("key", "t", "x"))
    kept = result[KEPT].to_pylist()
    every = zip(*columns, values, result[LATE].to_pylist(), kept, strict=True)
    return [(*row, list(own) if keep else None, bool(late)) for *row, own, late, keep in every]


def ordered(found):
    return sorted(map(repr, found))


@pytest.mark.parametrize("method", RULES)
@given(
    batches=st.lists(rows, min_size=1, max_size=4),
    late=st.sampled_from(["include", "drop"]),
    nan_policy=st.sampled_from(["omit", "propagate"]),
)
def test_batches_of_rows_are_averaged_as_one_by_one(method, batches, late, nan_policy):
    reads = RULES[method]
    results, _ = run(job(reads, late=late, nan_policy=nan_policy), map(table, batches))
    got = [row for result in results for row in told(result, reads)]
    assert ordered(got) == ordered(expected(batches, reads, late, nan_policy))


@pytest.mark.parametrize("kind", jobs.ORDERS)
def test_times_of_every_kind(kind):
    unit = {"date": 86400, "timestamp": 1e-6, "timestamp_ntz": 1e-6}.get(kind, 1)
    numbers, xs = [3, 5, 9, 20, 100], [1.0, 2.0, 4.0, 8.0, 16.0]
    kinds = jobs.ORDERS[kind]
    whole = pa.array(numbers, pa.int32() if kind == "date" else pa.int64())
    rows = pa.table({"key": ["a"] * 5, "t": whole.cast(kinds), "x": xs})
    rule = AnytimeWindow(Elapsed(12 * unit))
    (result,), _ = run(job([(rule, None)], order_type=kind), [rows])
    expected = TailAverage("12s").scan(xs, numbers)
    assert result["x0"].to_pylist() == expected.tolist()


def test_times_out_of_range():
    with pytest.raises(ValueError, match="t: expected times within 146 years of 1970"):
        run(job(RULES["time"]), [table([("a", 10**10, 1.0)])])


def test_late_rows_of_a_window_of_time_end_the_query():
    one = job(RULES["time"], late="error")
    with pytest.raises(ValueError, match="t: expected at least 5, the latest so far, got 4"):
        run(one, map(table, [[("a", 5, 1.0)], [("a", 4, 1.0)]]))
    with pytest.raises(ValueError, match="t: expected a time, got None"):
        run(one, [table([("a", None, 1.0)])])


def test_rows_of_a_batch_may_come_in_any_order():
    rng = np.random.default_rng(0)
    batch = [(f"k{i % 7}", i // 7 // 2, x / 8) for i, x in enumerate(rng.permutation(300))]
    (first,), states = run(job(), [table(batch)])
    for _ in range(3):
        (again,), its = run(job(), [table([batch[i] for i in rng.permutation(300)])])
        assert ordered(told(again, [0])) == ordered(told(first, [0]))
        assert its == states


def test_many_rows_of_a_key_and_a_state_beyond_any_plan(monkeypatch):
    monkeypatch.setattr("tailavg.numpy.table.LONGEST", 64)
    xs = np.random.default_rng(1).normal(size=2000)
    batches = []
    for part in np.split(xs, 8):  # of one key many, of another few: it stays within the plan
        rows = [("a", t, x) for t, x in enumerate(part)]
        batches.append(table([*rows, *(("b", t, x) for _, t, x in rows[:5])]))
    results, _ = run(job(late="include"), batches)
    for key, its in (("a", xs), ("b", np.reshape(xs, (8, -1))[:, :5].reshape(-1))):
        average, one_by_one = TailAverage(0.25), []
        for x in its.tolist():
            average.update(x)
            one_by_one.append(average.value())
        rows = [row for result in results for row in result.to_pylist()]
        got = [row["x0"] for row in rows if row["key"] == key]
        assert got == (one_by_one if kernel.installed() else pytest.approx(one_by_one, rel=1e-12))


@pytest.mark.parametrize("method", RULES)
@pytest.mark.parametrize("nan_policy", ["omit", "propagate"])
def test_standard_deviations_of_each_key_beside_its_averages(method, nan_policy):
    reads, rng = RULES[method], np.random.default_rng(5)
    missing = rng.random(240) < 0.1 if nan_policy == "omit" else np.zeros(240, bool)
    rows = [
        (f"k{i % 3}", i, None if gone else float(x))
        for i, (x, gone) in enumerate(zip(rng.normal(9, 1, 240), missing, strict=True))
    ]
    batches = [table(rows[:1]), table(rows[1:100]), table(rows[100:])]
    results, held = run(job(reads, nan_policy=nan_policy, std=True), batches)
    alone, without = run(job(reads, nan_policy=nan_policy), batches)
    got = pa.concat_tables(results)
    names = [f"x{i}" for i in range(len(reads))]
    assert got.select(names) == pa.concat_tables(alone).select(names)
    for key in ("k0", "k1", "k2"):
        of_key = got.filter(pc.equal(got["key"], key))
        known = of_key["x"].is_valid().to_numpy()
        xs = of_key["x"].drop_null().to_numpy()
        for i, (rule, window) in enumerate(reads):
            if isinstance(rule, AnyTail) or has_times(rule):
                average, expected = TailAverage(rule, variance=True), []
                times = of_key["t"].to_numpy()[known] if has_times(rule) else [None] * len(xs)
                for x, t in zip(xs.tolist(), times, strict=True):
                    average.update(x, t)
                    expected.append(average.std(window))
            else:
                expected = np.sqrt(variances(weight_matrix(rule, len(xs)), xs, ddof=1))
            expected = np.concatenate([[np.nan], expected])[np.cumsum(known)]
            stds = of_key[f"x{i}_std"]
            nulls = np.isnan(expected) if nan_policy == "omit" else np.zeros(len(expected), bool)
            assert stds.is_null().to_pylist() == nulls.tolist()
            np.testing.assert_allclose(stds.to_numpy(), expected, rtol=1e-10)
    more = 8 * sum(1 + len(clock_for(rule).blocks) for rule in dict.fromkeys(r for r, _ in reads))
    sizes = {len(state) for state in held.values()} | {len(s) + more for s in without.values()}
    assert len(sizes) == 1  # two fields more: `variances` and `squares`


def test_latest():
    batches = [[("a", 1, 1.0), ("a", 2, 3.0), ("b", 5, None)], [("a", 3, 5.0), ("a", 0, 9.0)]]
    one = job([(AnytimeWindow(2), None)], output="latest", late="drop")
    first, second = run(one, map(table, batches))[0]
    assert first.to_pylist() == [
        {"key": "a", "t": 2, "x0": 2.0, LATE: 0, KEPT: True},
        {"key": "b", "t": 5, "x0": None, LATE: 0, KEPT: True},
    ]
    assert second.to_pylist() == [{"key": "a", "t": 3, "x0": 4.0, LATE: 1, KEPT: True}]


def test_a_key_of_which_all_rows_are_dropped_is_told_but_not_kept():
    one = job(output="latest", late="drop")
    _, second = run(one, map(table, [[("a", 5, 1.0)], [("a", 4, 2.0), ("a", None, 2.0)]]))[0]
    (row,) = second.to_pylist()
    assert (row[LATE], row[KEPT]) == (2, False)


def test_several_columns_count_their_own_samples():
    rows = pa.table({"key": ["a"] * 4, "x": [1.0, None, 3.0, 5.0], "y": [True, None, None, False]})
    one = job([(AnytimeWindow(2), None)], columns=("x", "y"), order_by=None, order_type=None)
    ((result,), _) = run(one, [rows])  # without an order, rows stay as they come
    assert result["x0"].to_pylist() == [1.0, 1.0, 2.0, 4.0]
    assert result["y0"].to_pylist() == [1.0, 1.0, 1.0, 0.5]


def test_a_late_row_raises():
    batches = map(table, [[("a", 5, 1.0)], [("b", 1, 0.0), ("a", 4, 2.0)]])
    with pytest.raises(
        ValueError, match=r"t: expected at least 5, .* got 4 in a row of \{'key': 'a'\}"
    ):
        run(job(late="error"), batches)


def test_a_missing_value_raises_if_asked_to():
    with pytest.raises(ValueError, match=r"x: expected no NaN .*, got 1, the first at index 1"):
        run(job(nan_policy="raise"), [table([("a", 5, 1.0), ("a", 6, None)])])


KEYS = {
    "string": ["", "a", None],
    "long": [1, 2**62, None],
    "double": [0.0, math.nan, None],
    "bool": [True, False, None],
    "date": [dt.date(2020, 1, 1), dt.date(1900, 1, 1), None],
    "timestamp": [dt.datetime(2020, 1, 1), dt.datetime(2020, 1, 1, 0, 0, 0, 1), None],
    "decimal": [Decimal("1.10"), Decimal("2.20"), None],
    "binary": [b"", b"\0", None],
}


@pytest.mark.parametrize("kind", KEYS)
def test_keys_of_every_kind(kind):
    values = KEYS[kind]
    batch = pa.table(
        {"key": pa.array(values * 3), "t": range(9), "x": [float(i) for i in range(9)]}
    )
    results, held = run(job([(AnytimeWindow(2), None)]), [batch, batch])
    assert len(held) == 3
    for code in range(3):
        its = [float(i) for i in range(code, 9, 3)] * 2
        want = [its[0], *((a + b) / 2 for a, b in pairwise(its))]
        rows = [row for result in results for row in result.to_pylist()]
        got = [row["x0"] for row in rows if row["x"] in its]
        assert got == want


def test_zeros_of_either_sign_are_one_key():
    batch = pa.table({"key": [0.0, -0.0], "t": [0, 1], "x": [1.0, 3.0]})
    (result,), held = run(job([(AnytimeWindow(2), None)]), [batch])
    assert (result["x0"].to_pylist(), len(held)) == ([1.0, 2.0], 1)


def test_keys_of_several_columns():
    batch = pa.table(
        {"a": ["x", "x", "y", "y"], "b": [1, 2, 1, 1], "t": [0, 1, 2, 3], "x": [1.0, 2.0, 3.0, 5.0]}
    )
    (result,), held = run(job([(AnytimeWindow(2), None)], by=("a", "b")), [batch])
    assert list(held) == [("x", 1), ("x", 2), ("y", 1)]
    assert result["x0"].to_pylist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("method", RULES)
@pytest.mark.parametrize("std", [False, True])
def test_states_leave_as_json_and_come_back(method, std):
    reads = RULES[method]
    one = job(reads, nan_policy="propagate", std=std)
    rng = np.random.default_rng(2)
    batch = table([(f"k{i % 3}", i, float(x)) for i, x in enumerate(rng.normal(size=200))])
    _, held = run(one, [batch])
    rows = pa.RecordBatch.from_pydict(
        {"key": [key for (key,) in held], "state": list(held.values())}
    )
    spelled = pa.Table.from_batches(one.to_json([rows]))
    assert spelled.schema.names == ["key", "t", "column", "state"]
    for row in spelled.to_pylist():
        average = TailAverage.from_state_dict(json.loads(row["state"]))
        again = TailAverage(average.rule, variance=std)
        for each in batch.to_pylist():
            if each["key"] == row["key"]:
                again.update(each["x"], each["t"] if has_times(again.rule) else None)
        if kernel.installed():
            assert average == again
        window = {"window": 0.5} if isinstance(average.rule, AnyTail) else {}
        assert average.value(**window) == pytest.approx(again.value(**window), rel=1e-12)
        assert row["t"] == 197 + int(row["key"][1]) + (1 if row["key"] < "k2" else -2)
    back = dict(
        one.from_json(
            spelled.rename_columns(["key", "t", COLUMN, STATE]), lambda keys: [None] * len(keys)
        )
    )
    assert back == held


@pytest.mark.parametrize("kind", jobs.ORDERS)
def test_an_order_of_every_kind_leaves_and_comes_back(kind):
    one = job(order_type=kind)
    numbers = pa.array([3, 1, None, 2])
    order = (
        numbers.cast(pa.int32()).cast(jobs.ORDERS[kind])
        if kind == "date"
        else numbers.cast(jobs.ORDERS[kind])
    )
    batch = pa.table({"key": ["a", "a", "a", "b"], "t": order, "x": [1.0, 2.0, 3.0, 4.0]})
    (result,), held = run(one, [batch])
    assert result["x"].to_pylist() == [3.0, 2.0, 1.0, 4.0]
    rows = pa.RecordBatch.from_pydict({"key": ["a", "b"], "state": list(held.values())})
    (spelled,) = one.to_json([rows])
    assert spelled.column("t").equals(order.take(pa.array([0, 3])))


def test_a_nan_in_the_order_is_a_null():
    one = job(order_type="double", late="drop")
    first = pa.table({"key": ["a", "a"], "t": [math.nan, 1.0], "x": [1.0, 3.0]})
    second = pa.table({"key": ["a", "a"], "t": [math.nan, 1.5], "x": [7.0, 5.0]})
    results, _ = run(one, [first, second])
    assert results[0]["x"].to_pylist() == [1.0, 3.0]
    assert results[1][KEPT].to_pylist() == [False, True]


def test_a_state_of_another_average_is_refused():
    other = TailAverage(0.5)
    other.update(1.0)
    rows = pa.table(
        {"key": ["a"], "t": [1], COLUMN: ["x"], STATE: [json.dumps(other.state_dict())]}
    )
    with pytest.raises(
        ValueError,
        match=r"initial_state: expected averages of x with .*0.25.* of 'x' with .*0.5",
    ):
        job().from_json(rows, lambda _: [None])


@pytest.mark.parametrize("std", [False, True])
def test_a_state_with_or_without_deviations_is_refused(std):
    other = TailAverage(0.25, variance=not std)
    other.update(1.0)
    state = json.dumps(other.state_dict())
    rows = pa.table({"key": ["a"], "t": [1], COLUMN: ["x"], STATE: [state]})
    which = "without" if std else "with"
    message = f"initial_state: the averages were saved {which} standard .*; pass std={not std}$"
    with pytest.raises(ValueError, match=message):
        job(std=std).from_json(rows, lambda _: [None])


@pytest.mark.parametrize("sample", [np.ones(2), np.ones(1), np.float32(1)], ids=repr)
def test_a_state_of_something_else_than_numbers_is_refused(sample):
    other = TailAverage(0.25, dtype=sample.dtype)
    other.update(sample)
    state = other.state_dict()
    blocks, partial = np.asarray(state["blocks"]).tolist(), np.asarray(state["partial"]).tolist()
    text = json.dumps(state | {"blocks": blocks, "partial": partial})
    rows = pa.table({"key": ["a"], "t": [1], COLUMN: ["x"], STATE: [text]})
    with pytest.raises(ValueError, match="initial_state: expected averages of numbers in float64"):
        job().from_json(rows, lambda _: [None])


@pytest.mark.parametrize("state", [b"", b"\2" + b"\0" * 81, b"\1" + b"\0" * 80])
def test_bytes_that_are_no_state_are_refused(state):
    with pytest.raises(ValueError, match="corrupt state: expected 82 bytes, starting with 1, got"):
        job().average(tied(table([("a", 1, 1.0)])), lambda _: [state])


def test_a_checkpoint_says_what_it_is_of():
    one = job(RULES["windows"], columns=("x", "y"), by=("a", "b"))
    again = Job.from_text(one.text())
    assert again.text() == one.text()
    one.check(job(RULES["windows"], columns=("x", "y"), by=("a", "b"), late="drop").text())
    with pytest.raises(
        ValueError, match=r"rule: the checkpoint .*AnytimeWindow.*0.25.* got .*AnyTail"
    ):
        one.check(job(columns=("x", "y"), by=("a", "b")).text())
    assert Job.from_text(one.text().replace(', "std": false', "")) == Job.from_text(one.text())
    with pytest.raises(ValueError, match="version 1"):
        one.check(one.text().replace('"version": 1', '"version": 2'))


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [
        ("columns", ("x",), ("y",)),
        ("by", ("key",), ("key", "x")),
        ("order_by", "t", "x"),
        ("order_type", "long", "integer"),
        ("nan_policy", "omit", "propagate"),
        ("buckets", 64, 8),
        ("std", False, True),
    ],
)
def test_a_checkpoint_refuses_another_job(name, before, now):
    message = f"{name}: the checkpoint was made with .*, got .*; start with a new checkpoint"
    with pytest.raises(ValueError, match=message):
        job(**{name: now}).check(job(**{name: before}).text())


def test_rows_are_packed_by_bucket_and_unpacked():
    one = job(buckets=3)
    batch = pa.RecordBatch.from_pydict(
        {"x": list(range(10)), jobs.BUCKET: [i % 3 for i in range(10)]}
    )
    first, bundles = one.pack([batch])
    assert first.to_pylist() == [{"bucket": jobs.CHECK, "rows": b""}]
    assert bundles.column("bucket").to_pylist() == jobs._spread(3).tolist()
    assert [row["x"] for part in one.unpack([bundles]) for row in part.to_pylist()] == [
        0, 3, 6, 9, 1, 4, 7, 2, 5, 8,
    ]  # fmt: skip


def batches_of(rows, size):
    return [
        tied(pa.RecordBatch.from_pylist(rows[i : i + size], sort_schema))
        for i in range(0, len(rows), size)
    ]


sort_schema = pa.schema([("key", pa.string()), ("t", pa.int64()), ("x", pa.float64())])


@pytest.mark.parametrize("output", ["rows", "latest"])
@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_sorted_rows_are_averaged_in_whatever_batches(size, output):
    rng = np.random.default_rng(3)
    rows = [
        {"key": key, "t": t, "x": float(rng.normal())}
        for key, n in ((None, 3), ("a", 20), ("b", 1), ("c", 30))
        for t in range(n)
    ]
    one = job(output=output)
    got = pa.Table.from_batches(one.average_sorted(batches_of(rows, size))).to_pylist()
    (want,), _ = run(one, [pa.Table.from_pylist(rows, sort_schema)])
    assert got == want.to_pylist()


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_states_come_before_the_rows_of_their_key(size):
    average = TailAverage(0.25)
    average.update_many([1.0, 2.0, 3.0])
    saved = json.dumps(average.state_dict())
    rows = []
    for key in "abc":
        rows.append({"key": key, "t": 2, "x": None, COLUMN: "x", STATE: saved})
        if key != "b":
            rows += [
                {"key": key, "t": t, "x": float(t), COLUMN: None, STATE: None} for t in (1, 3, 4)
            ]
    schema = pa.schema([*sort_schema, (COLUMN, pa.string()), (STATE, pa.string())])
    parts = [
        tied(pa.RecordBatch.from_pylist(rows[i : i + size], schema))
        for i in range(0, len(rows), size)
    ]
    got = pa.Table.from_batches(job(late="drop").average_sorted(parts)).to_pylist()
    want = []
    for x in (3.0, 4.0):
        average.update(x)
        want.append(average.value())
    assert [row["x0"] for row in got if row[KEPT]] == want * 2
    assert sum(row[LATE] for row in got) == 2
