"""`TailAverages` against one `TailAverage` per key, and against the dense weights of the model."""

import copy
import json
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailavg import (
    AnyTail,
    AnytimeWindow,
    Decay,
    Elapsed,
    ExactWindow,
    Exponential,
    TailAverage,
    TailAverages,
)
from tailavg.numpy import kernel
from tailavg.numpy.keyed import LIVE
from tests.support.cases import FEW_RULES, RULES, assert_close, bits, of_rules
from tests.support.effort import some
from tests.support.interrupts import interrupted
from tests.support.model import averages as weighted
from tests.support.model import weight_matrix

SOME = [*FEW_RULES, AnytimeWindow(0.3, turns="paper"), AnyTail(6)]


@pytest.fixture(params=["compiled", "plain_loops", "without_numba"])
def way(request):
    """How samples are scanned."""
    request.getfixturevalue(request.param)
    return request.param


def drawn(rows: int, keys: int, seed: int = 0, nans: float = 0.0):
    rng = np.random.default_rng(seed)
    xs = 1 + rng.random(rows)
    xs[rng.random(rows) < nans] = np.nan
    return rng.integers(0, keys, rows), xs


def window_for(rule):
    return 0.5 if isinstance(rule, AnyTail) else None


def one_by_one(rule, keys, xs, nan_policy="propagate"):
    """A `TailAverage` for each key: the averages after each row, and the averages themselves."""
    found, out = {}, np.full(len(xs), np.nan)
    for key in np.unique(keys).tolist():
        found[key] = TailAverage(rule, dtype="float64", nan_policy=nan_policy)
        out[keys == key] = found[key].scan(xs[keys == key], window_for(rule))
    return out, {key: average for key, average in found.items() if average.count}


def assert_same(got, expected):
    """The same bits; any NaN is a NaN."""
    np.testing.assert_array_equal(got, expected)


@of_rules(RULES)
def test_a_scan_weighs_each_key_as_the_model_does(rule, way):
    keys, xs = drawn(350, 3)
    got = TailAverages(rule).scan(keys, xs)
    for key in range(3):
        rows = keys == key
        matrix = weight_matrix(rule, 150)[: rows.sum(), : rows.sum()]
        assert_close(got[rows], weighted(matrix, xs[rows]), 1e-12)


@of_rules(SOME)
@pytest.mark.parametrize(
    ("nan_policy", "order"), [("propagate", "shuffled"), ("omit", "shuffled"), ("omit", "sorted")]
)
def test_a_scan_is_that_of_each_key_to_the_bit(rule, nan_policy, order, way):
    keys, xs = drawn(500, 9, nans=0.1 if nan_policy == "omit" else 0.001)
    keys[:3] = 20, 21, 20  # with few samples
    if nan_policy == "omit":
        xs[1] = np.nan  # and none
    if order == "sorted":
        keys.sort()
    expected, each = one_by_one(rule, keys, xs, nan_policy)
    averages = TailAverages(rule, nan_policy=nan_policy)
    got = averages.scan(keys, xs, window_for(rule))
    if way == "without_numba":  # of many samples, equal up to rounding
        assert_close(got, expected, 1e-12)
        assert {k: a.count for k, a in averages.items()} == {k: a.count for k, a in each.items()}
    else:
        assert_same(got, expected)
        assert dict(averages) == each
        assert {key: bits(average) for key, average in averages.items()} == {
            key: bits(average) for key, average in each.items()
        }


@of_rules(SOME)
@settings(max_examples=some(10, 100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_parts_give_what_the_whole_gives_to_the_bit(rule, compiled, data):
    rows = data.draw(st.integers(1, 300))
    keys, xs = drawn(rows, data.draw(st.integers(1, 12)), rows, 0.1)
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=5)))
    nan_policy = data.draw(st.sampled_from(["propagate", "omit"]))
    whole = TailAverages(rule, nan_policy=nan_policy)
    expected = whole.scan(keys, xs, window_for(rule))
    averages = TailAverages(rule, nan_policy=nan_policy)
    got = []
    for keys_of_part, part in zip(np.split(keys, cuts), np.split(xs, cuts), strict=True):
        if data.draw(st.booleans()):
            got.append(averages.scan(keys_of_part, part, window_for(rule)))
        else:
            got.append(np.full(len(part), np.nan))
            for i, (key, x) in enumerate(zip(keys_of_part.tolist(), part.tolist(), strict=True)):
                averages.update(key, x)
                if key in averages:
                    got[-1][i] = averages.value(key, window_for(rule))
    if not isinstance(rule, ExactWindow):  # whose sums are not
        assert_same(np.concatenate(got), expected)
        assert averages == whole
    else:
        assert_close(np.concatenate(got), expected, 1e-12)


@of_rules([AnytimeWindow(10), AnytimeWindow(0.25), Exponential(100), AnyTail(6)])
def test_long_groups_among_short_ones(rule, compiled):
    keys, xs = drawn(20_000, 30, nans=0.05)
    keys[: len(keys) // 2] = 3
    expected, each = one_by_one(rule, keys, xs, "omit")
    averages = TailAverages(rule, nan_policy="omit")
    cuts = [4000, 9000, 9100]
    parts = zip(np.split(keys, cuts), np.split(xs, cuts), strict=True)
    got = [averages.scan(k, x, window_for(rule)) for k, x in parts]
    assert_same(np.concatenate(got), expected)
    assert dict(averages) == each


@of_rules(SOME)
def test_update_many_is_update_with_each(rule, way):
    keys, xs = drawn(1500, 10, nans=0.1)
    averages, each = (TailAverages(rule, nan_policy="omit") for _ in range(2))
    for part in np.split(np.arange(1500), [1, 700]):
        averages.update_many(keys[part], xs[part])
    for key, x in zip(keys.tolist(), xs.tolist(), strict=True):
        each.update(key, x)
    for key in each:
        assert averages[key].count == each[key].count
        window = window_for(rule)
        assert_close(averages.value(key, window), each.value(key, window), 1e-12)


def test_a_window_or_a_decay_of_any_tail(way):
    keys, xs = drawn(500, 9)
    for window in (0.25, Decay(0.5, "cosine")):
        got = TailAverages(AnyTail(6)).scan(keys, xs, window)
        for key in range(9):
            assert_same(got[keys == key], TailAverage(AnyTail(6)).scan(xs[keys == key], window))


@pytest.mark.parametrize("kind", [list, tuple, iter, np.array])
def test_keys_of_many_kinds(kind, way):
    averages = TailAverages(2)
    assert averages.scan(kind(["a", "b", "a", "a"]), [1.0, 5.0, 3.0, 5.0]).tolist() == [1, 5, 2, 4]
    assert list(averages) == ["a", "b"]
    mixed = TailAverages(2)
    mixed.update_many([None, ("x", 1), 2.5, True, "a"], range(5))
    assert [mixed.value(key) for key in (None, ("x", 1), 2.5, 1, "a")] == [0, 1, 2, 3, 4]


def test_a_mapping():
    averages = TailAverages(2)
    assert not averages
    assert len(averages) == 0
    averages.update("a", 1)
    averages.update("b", np.float32(2.0))
    assert "a" in averages
    assert "c" not in averages
    assert averages["a"] == TailAverage.from_state_dict(averages["a"].state_dict())
    assert averages.get("c") is None
    assert [(key, average.value()) for key, average in averages.items()] == [("a", 1), ("b", 2)]
    held = averages["a"]
    averages.scan(["a", "b"], [3.0, 4.0])
    assert held.value() == 1.0  # it is a copy
    assert averages["a"].value() == 2.0
    for x in range(3 * LIVE):  # more than are held by themselves
        averages.update(x, float(x))
    assert [averages.value(x) for x in (0, LIVE, 3 * LIVE - 1)] == [0, LIVE, 3 * LIVE - 1]
    for x in range(3 * LIVE):
        del averages[x]
    averages.update("new", 5.0)  # in the place of one that was deleted
    averages.update_many(["new", "newer"], [7.0, 8.0])
    assert (averages.value("new"), averages.value("newer")) == (6.0, 8.0)
    del averages["new"], averages["newer"]
    del averages["a"]
    assert list(averages) == ["b"]
    for missing in (lambda: averages["a"], lambda: averages.value("a")):
        with pytest.raises(KeyError, match="expected a key that has had a sample, got 'a'"):
            missing()
    with pytest.raises(KeyError, match="expected a key that has had a sample"):
        del averages["a"]
    assert repr(averages) == f"<TailAverages({averages.rule!r}): 1 keys>"
    assert "nan_policy='omit'): no keys" in repr(TailAverages(2, nan_policy="omit"))
    assert averages.rule == AnytimeWindow(2)
    assert averages.nan_policy == "propagate"
    with pytest.raises(TypeError, match="unhashable"):
        hash(averages)


@pytest.mark.parametrize("rule", [AnytimeWindow(3), ExactWindow(3)])
def test_a_subset_is_independent(rule):
    averages = TailAverages(rule)
    averages.update_many(["a", "b", "c"] * 4, np.arange(12.0))
    averages.update("c", 12.0)  # kept apart from the table
    whole = averages.copy()
    some = averages.subset(["c", "x", "a"])
    assert list(some) == ["c", "a"]
    assert some["c"] == averages["c"]
    assert some["a"] == averages["a"]
    some.scan(["a", "new", "c"], [100.0, 200.0, 300.0])
    assert averages == whole
    assert some.value("new") == 200.0
    alone = whole["a"]
    alone.update(100.0)
    assert some["a"] == alone


def test_equality():
    one, other = TailAverages(2), TailAverages(2)
    one.update_many(["a", "b"], [1.0, np.nan])
    other.update_many(["b", "a"], [np.nan, 1.0])
    assert one == other
    other.update("a", 2.0)
    assert one != other
    assert TailAverages(2) != TailAverages(3)
    assert TailAverages(2) != TailAverages(2, nan_policy="omit")
    assert TailAverages(2) != {}


def through_file(averages, tmp_path):
    averages.save(tmp_path / "averages")
    return TailAverages.load(tmp_path / "averages")


MOVES = {
    "state_dict": lambda averages, _: TailAverages.from_state_dict(averages.state_dict()),
    "json": lambda averages, _: TailAverages.from_state_dict(
        json.loads(json.dumps(averages.state_dict()))
    ),
    "file": through_file,
    "pickle": lambda averages, _: pickle.loads(pickle.dumps(averages)),
    "copy": lambda averages, _: averages.copy(),
    "deepcopy": lambda averages, _: copy.deepcopy(averages),
}
KEYS = ["a", "", "ü\ud800", 0, -(10**30), 0.5, float("inf"), None, ("x", (1, None)), ()]


@of_rules(SOME)
def test_a_state_that_moved_goes_on_as_if_it_had_not(rule, tmp_path):
    averages, window = TailAverages(rule, nan_policy="omit"), window_for(rule)
    places, xs = drawn(900, len(KEYS), nans=0.01)
    keys = [KEYS[place] for place in places]
    averages.update_many(keys[:400], xs[:400])
    averages.update(True, 3.0)
    moved = {name: move(averages, tmp_path) for name, move in MOVES.items()}
    before = averages.copy()
    expected = averages.scan(keys[400:], xs[400:], window)
    for name, other in moved.items():
        assert other == before, name
        assert list(other) == list(before), name
        assert [type(key) for key in other] == [type(key) for key in before], name
        np.testing.assert_array_equal(other.scan(keys[400:], xs[400:], window), expected, name)
        assert other == averages, name


def test_nothing_is_saved_and_loaded(tmp_path):
    for averages in (TailAverages(0.25), TailAverages(Exponential(3), nan_policy="raise")):
        assert through_file(averages, tmp_path) == averages


def test_numpy_keys_are_saved_as_plain_ones(tmp_path):
    averages = TailAverages(2)
    for key in (np.int64(3), np.str_("a"), np.bool_(True), np.float32(0.5)):
        averages.update(key, 1.0)
    assert [type(key) for key in through_file(averages, tmp_path)] == [int, str, bool, float]


@pytest.mark.parametrize("key", [b"a", frozenset(), 1j, ("a", b"b"), np.datetime64("2020-01-01")])
def test_other_keys_are_refused_by_save(key, tmp_path):
    averages = TailAverages(2)
    averages.update(key, 1.0)
    with pytest.raises(TypeError, match="save: keys: expected str, int, float, bool, None"):
        averages.save(tmp_path / "averages")
    assert not list(tmp_path.iterdir())
    assert averages.copy() == averages


BAD = {
    "shape": (lambda a: a.scan(["a", "n"], [[1.0], [2.0]]), ValueError, "sequence of numbers"),
    "a number": (lambda a: a.scan(["a"], 1.0), ValueError, "expected a sequence"),
    "lengths": (
        lambda a: a.scan(["a", "n", "b"], [1.0, 2.0]),
        ValueError,
        "as many keys as samples, 2",
    ),
    "text": (lambda a: a.scan(["a", "n"], ["1", "2"]), TypeError, "real or complex numbers"),
    "complex": (lambda a: a.scan(["a", "n"], [1j, 2.0]), TypeError, "expected real numbers"),
    "nan": (lambda a: a.scan(["a", "n"], [1.0, np.nan]), ValueError, "NaN .* first at index 1"),
    "nans": (lambda a: a.update_many(["n", "a"], [1.0, np.nan]), ValueError, "expected no NaN"),
    "window": (lambda a: a.scan(["a", "n"], [1.0, 2.0], 0.5), ValueError, "has its own window"),
    "windows": (lambda a: a.scan(["a"], [1.0], [None]), ValueError, "has its own window"),
    "update": (lambda a: a.update("n", np.nan), ValueError, "expected no NaN"),
    "array": (lambda a: a.update("n", [1.0]), ValueError, "expected a number"),
    "array before": (lambda a: a.update("a", [1.0]), ValueError, "expected shape"),
    "complex number": (lambda a: a.update("n", 1j), TypeError, "expected real numbers"),
    "nan key": (
        lambda a: a.update(float("nan"), 1.0),
        ValueError,
        "key: expected a key that equals",
    ),
    "nan keys": (
        lambda a: a.scan(["a", ("n", float("nan"))], [1.0, 2.0]),
        ValueError,
        "key: expected a key that equals",
    ),
    "unhashable": (lambda a: a.scan(["a", []], [1.0, 2.0]), TypeError, "unhashable"),
}


@pytest.mark.parametrize(("change", "error", "match"), BAD.values(), ids=BAD)
def test_a_refused_call_changes_no_key(change, error, match, way):
    for rule in (AnytimeWindow(3), Exponential(3), ExactWindow(3)):
        averages = TailAverages(rule, nan_policy="raise")
        averages.update_many(["a", "b", "a"], [1.0, 2.0, 3.0])
        before = averages.copy()
        with pytest.raises(error, match=match):
            change(averages)
        assert averages == before, rule
        assert averages.value("a") == 2.0


def test_a_window_that_some_key_cannot_be_read_with_changes_none(way):
    averages = TailAverages(AnyTail(6, shortest=0.5))
    averages.update_many(["a", "b"], [1.0, 2.0])
    before = averages.copy()
    keys = ["a"] * 3 + ["b"] * 300
    with pytest.raises(ValueError, match="window"):
        averages.scan(keys, np.ones(303), 4)
    assert averages == before


@pytest.mark.parametrize("xs", [[], np.empty(0), np.empty(0, np.float32)])
def test_no_rows(xs, way):
    averages = TailAverages(2)
    assert averages.scan([], xs).shape == (0,)
    averages.update_many([], xs)
    assert len(averages) == 0


def test_a_nan_that_is_omitted_makes_no_key(way):
    averages = TailAverages(2, nan_policy="omit")
    averages.update("a", np.nan)
    assert_same(averages.scan(["a", "b", "b"], [np.nan, 1.0, np.nan]), [np.nan, 1.0, 1.0])
    assert list(averages) == ["b"]


@of_rules([AnytimeWindow(4), Exponential(4), ExactWindow(4)])
def test_an_interrupted_scan_happened_wholly_or_not_at_all(rule, way):
    keys, xs = drawn(30, 4)
    before = TailAverages(rule)
    before.update_many([0, 1, 9], [1.0, 2.0, 3.0])
    after = before.copy()
    after.scan(keys, xs)
    seen = set()
    for _, averages in interrupted(before.copy, lambda a: a.scan(keys, xs), 30, 30):
        assert averages in (before, after)
        seen.add(averages == after)
    assert False in seen


def damaged(change):
    averages = TailAverages(AnytimeWindow(4))
    averages.update_many([0, 1, 0], [1.0, 2.0, 3.0])
    state = averages.state_dict()
    change(state)
    return state


DAMAGES = [
    lambda s: s.update(format="tailavg"),
    lambda s: s.update(version=2),
    lambda s: s.pop("counts"),
    lambda s: s.update(more=1),
    lambda s: s["keys"].append(2),
    lambda s: s["keys"].__setitem__(1, 0),
    lambda s: s["keys"].__setitem__(1, float("nan")),
    lambda s: s["counts"].__setitem__(0, 3),
    lambda s: s["counts"].__setitem__(0, 0),
    lambda s: s["counts"].__setitem__(0, True),
    lambda s: s["counts"].__setitem__(0, 2**63),
    lambda s: s["folded"].__setitem__(0, 9),
    lambda s: s["starts"].__setitem__(0, [0, 1]),
    lambda s: s["starts"].__setitem__(0, []),
    lambda s: s["starts"].__setitem__(0, 0),
    lambda s: s["blocks"].__setitem__(0, [1.0, 2.0]),
    lambda s: s["blocks"].__setitem__(0, ["1"]),
    lambda s: s["partial"].__setitem__(0, None),
    lambda s: s["partial"].__setitem__(0, [1.0]),
    lambda s: s.update(nan_policy="drop"),
    lambda s: s.update(rule={"type": "Fixed", "k": 3}),
]


@pytest.mark.parametrize("change", DAMAGES)
def test_a_damaged_state_is_refused(change):
    with pytest.raises(ValueError, match=r"state|nan_policy|key"):
        TailAverages.from_state_dict(damaged(change))


def test_a_damaged_file_is_refused(tmp_path):
    path, averages = tmp_path / "averages", TailAverages(0.25)
    averages.update_many([0, 1, 0, "x"], [1.0, 2.0, 3.0, 4.0])
    averages.save(path)
    whole = path.read_bytes()
    with pytest.raises(ValueError, match="expected format 'tailavg', got 'tailavg by key'"):
        TailAverage.load(path)
    single = TailAverage(2)
    single.update(1.0)
    single.save(tmp_path / "single")
    with pytest.raises(ValueError, match="damaged, or not saved by tailavg"):
        TailAverages.load(tmp_path / "single")
    for end in range(0, len(whole), 97):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="damaged, or not saved by tailavg"):
            TailAverages.load(path)
    rng, refused = np.random.default_rng(0), 0
    for _ in range(150):
        data = bytearray(whole)
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        path.write_bytes(data)
        try:
            TailAverages.load(path)
        except ValueError:
            refused += 1
    assert refused > 50  # the rest hits what nobody reads
    np.savez(path.with_suffix(".npz"), header="{}", keys=np.zeros(2))
    with pytest.raises(ValueError, match="damaged, or not saved by tailavg"):
        TailAverages.load(path.with_suffix(".npz"))


@of_rules(SOME)
@pytest.mark.parametrize("rows", [1, 6, 20])
def test_few_rows_of_each_key_and_many(rows, rule, way):
    """Whether a part is taken row by row or by group, it gives what each key gives."""
    rng = np.random.default_rng(rows)
    keys = rng.permutation(np.repeat(np.arange(20), rows))
    xs = 1 + rng.random(len(keys))
    xs[rng.random(len(keys)) < 0.1] = np.nan
    averages = TailAverages(rule, nan_policy="omit")
    averages.update_many(np.arange(10), np.ones(10))  # half of the keys are new
    got = averages.scan(keys, xs, window_for(rule))
    all_keys, all_xs = np.append(np.arange(10), keys), np.append(np.ones(10), xs)
    expected, each = one_by_one(rule, all_keys, all_xs, "omit")
    assert_close(got, expected[10:], 1e-12)
    assert set(averages) == set(each)
    assert {key: average.count for key, average in averages.items()} == {
        key: average.count for key, average in each.items()
    }
    if way == "compiled" and not isinstance(rule, ExactWindow):
        assert_same(got, expected[10:])
        assert dict(averages) == each


@pytest.mark.parametrize("rule", [Exponential(0.25), Exponential(Elapsed(1)), AnytimeWindow("1s")])
def test_samples_that_all_lack_a_key(rule, monkeypatch):
    monkeypatch.setattr(kernel, "LONG", 0)
    monkeypatch.setattr(kernel, "SHORT", 0)
    averages = TailAverages(rule)
    averages.update_many(np.arange(1000), np.ones(1000))
    before = averages.copy()
    none = np.full(100, -1), list(range(1000)), np.ones(100)
    (out,) = averages.scan_parts([none])
    assert np.isnan(out).all()
    assert averages == before
