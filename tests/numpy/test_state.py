"""States: resumed is as never stopped, to the bit; and nothing corrupted is taken in."""

import io
import json
import math
import os
import pickle
import zipfile
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailavg import AnytimeWindow, ExactWindow, Exponential, Growing, RawTail, TailAverage
from tailavg.core.rules import as_rule
from tailavg.io import state as layout
from tests.support.cases import (
    KINDS,
    METHODS,
    RULES,
    WAYS,
    bits,
    chunks,
    of_cases,
    of_rules,
    rules,
    short,
    take,
    ways_for,
)
from tests.support.effort import some

KEYS = [
    "format", "version", "rule", "nan_policy", "dtype", "scalar", "count", "starts", "blocks",
    "folded", "partial",
]  # fmt: skip


def a_state(rule=10, steps=50, shape=(), **options):
    average = TailAverage(rule, **options)
    average.update_many(np.sin(np.arange(steps * math.prod(shape))).reshape(steps, *shape))
    for x in np.full((3, *shape), 0.5):
        average.update(x)
    return average.state_dict()


@of_cases
def test_a_resumed_run_is_as_one_that_never_stopped_to_the_bit(rule, kind):
    """Each way is gone on from once."""
    xs, ways = kind.draw(560), ways_for(kind)
    average = TailAverage(rule)
    stops = [(1, 4), (4, 37), (37, 255), (255, 258), (258, 400), (400, 560)]
    for (stop, after), chosen in zip(stops, cycle(ways), strict=False):
        half = (stop + after) // 2
        take(average, kind, xs[average.count : stop], "update")
        resumed = ways[chosen](average)
        assert bits(resumed) == bits(average), chosen
        for run in (average, resumed):
            take(run, kind, xs[stop:half], "update")
            run.update_many(xs[half:after])
        assert bits(resumed) == bits(average), chosen
        assert np.asarray(resumed.value()).tobytes() == np.asarray(average.value()).tobytes()
        average = resumed


@settings(max_examples=some(40, 200))
@given(
    rules,
    st.sampled_from(["float", "0-d float32", "float32 (3,)", "complex128 (2, 3)"]),
    st.data(),
    chunks(600),
)
def test_a_run_resumed_after_every_chunk_is_as_one_that_never_was(rule, kind, data, parts):
    kind = KINDS[kind]
    way = data.draw(st.sampled_from(sorted(ways_for(kind))))
    xs = kind.draw(600)
    average = stopped = TailAverage(rule)
    for start, end, method in parts:
        stopped = WAYS[way](stopped)
        values = take(average, kind, xs[start:end], method)
        again = take(stopped, kind, xs[start:end], method)
        assert np.asarray(values).tobytes() == np.asarray(again).tobytes()
        assert bits(average) == bits(stopped)


@pytest.mark.parametrize("way", WAYS)
def test_nan_and_infinity_are_resumed_too(way):
    for rule in RULES:
        average = TailAverage(rule)
        for x in [1.0, math.nan, 2.0, math.inf, 3.0]:
            average.update(x)
        resumed = WAYS[way](average)
        assert resumed == average, rule
        for run in (average, resumed):
            run.update_many(np.ones(50))
        np.testing.assert_equal(resumed.value(), average.value(), str(rule))


@pytest.mark.parametrize("shape", [(), (2,)])
@of_rules(RULES)
def test_a_state_is_plain_data_in_the_documented_layout(rule, shape):
    def is_plain(x):
        if isinstance(x, dict):
            return all(type(key) is str and is_plain(value) for key, value in x.items())
        if isinstance(x, list):
            return all(map(is_plain, x))
        return x is None or type(x) in (str, int, float, bool)

    for steps in (0, 1, 30, 600):
        average = TailAverage(rule)
        for x in np.ones((steps, *shape)) if shape else [1.0] * steps:
            average.update(x)
        state = average.state_dict()
        assert list(state) == KEYS
        assert (state["format"], state["version"]) == ("tailavg", 1)
        arrays = [state.pop(key) for key in ("blocks", "partial")] if shape and steps else []
        assert all(type(array) is np.ndarray for array in arrays)
        assert is_plain(state)
        assert (state["count"], state["scalar"]) == (steps, not (shape and steps))
        if not shape:
            assert json.loads(json.dumps(state)) == state


@of_rules([*RULES, Exponential(400)])
def test_the_blocks_of_a_state_make_the_average(rule):
    """What another library needs in order to read a state: means by starts, and a partial sum."""
    xs = np.sin(np.arange(700.0))
    average = TailAverage(rule)
    for t, x in enumerate(xs.tolist(), start=1):
        average.update(x)
        if t % 41 == 0:
            state = average.state_dict()
            ends = [*state["starts"][1:], state["folded"]]
            if isinstance(rule, Exponential):
                before = TailAverage(rule)
                before.update_many(xs[: state["folded"]]) if state["folded"] else None
                expected = [before.value() if state["folded"] else 0.0]
                after = np.arange(state["folded"] + 1, t + 1)
                decays = rule.decay(after)
                # the mean has decayed by the first of them, the sum only by those that follow
                products = np.cumprod(np.append(1.0, decays[1:]))[: len(after)]
                fresh = ((1 - decays) / products) @ xs[state["folded"] : t]
            else:
                expected = [
                    xs[start:end].mean() if end > start else 0.0
                    for start, end in zip(state["starts"], ends, strict=True)
                ]
                fresh = xs[state["folded"] : t].sum()
            np.testing.assert_allclose(state["blocks"], expected, rtol=0, atol=1e-12)
            assert math.isclose(state["partial"], fresh, rel_tol=1e-9, abs_tol=1e-9)


def test_a_state_is_not_shared_with_the_average_that_is_made_of_it():
    state = a_state(shape=(2,))
    average = TailAverage.from_state_dict(state)
    before = average.copy()
    state["blocks"][...] = 0
    state["partial"][...] = 0
    state["starts"].clear()
    assert average == before


# corrupted states


@of_rules([10, Exponential(0.5), ExactWindow(5), RawTail(0.5, 40)])
@pytest.mark.parametrize("key", KEYS)
def test_a_state_without_one_of_its_keys_is_refused_by_name(rule, key):
    state = a_state(rule)
    del state[key]
    with pytest.raises(ValueError, match=f"state: .*{key}"):
        TailAverage.from_state_dict(state)


WRONG = {
    "format": ["other", None, 1, b"tailavg"],
    "version": [0, 2, -1, "1", None, True, 1.0],
    "rule": [
        None, 10, "AnytimeWindow", [], {}, {"type": "Fixed", "k": 3}, {"type": "AnyRule"},
        {"type": "AnytimeWindow"}, {"type": "AnytimeWindow", "window": {"type": "Fixed", "k": 0}},
        {"type": "AnytimeWindow", "window": {"type": "Fixed"}}, {"type": ["AnytimeWindow"]},
        {"type": "Exponential", "window": "10"}, {"type": "Exponential", "window": 10, "x": 1},
        {"type": None}, {"type": "AnytimeWindow", "window": {"k": 10}},
    ],
    "nan_policy": ["ignore", None, 1, ""],
    "dtype": ["int64", "float16", "nonsense", None, 8, "object", "", "float32, float32"],
    "scalar": [None, 1, "yes"],
    "count": [-1, 0, 10**6, 49, "53", 53.0, None, True],
    "starts": [
        None, 0, "0", [], [0], [40, 45], [40, 50, 45], [40, 45, 99], [-5, 45, 50],
        [45.0, 46.0, 50.0], ["a", "b", "c"], [True, 45, 50], {}, [40, 40, 50],
    ],
    "blocks": [
        None, 0.5, [], [1.0], [1.0] * 4, ["a", "b", "c"], [None] * 3, [[1.0], [1.0], [1.0]],
        [1.0, [2.0], 3.0], [1j, 2j, 3j], {}, "abc", np.zeros((3, 2)), np.array(1.0),
    ],
    "folded": [-1, 49, 54, None, "50", 50.5, True],
    "partial": [None, "0", [0.5], [], np.zeros(2), np.zeros((1, 1)), 1j, np.array("a")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key, values in WRONG.items() for value in values],
    ids=lambda value: repr(value)[:40],
)
def test_a_state_with_a_wrong_value_is_refused_with_what_is_wrong(key, value):
    state = a_state()
    assert (state["count"], state["starts"], state["folded"]) == (53, [40, 45, 50], 50)
    with pytest.raises(ValueError, match=r"state: .+|nan_policy: expected"):
        TailAverage.from_state_dict({**state, key: value})
    TailAverage.from_state_dict(state)


@pytest.mark.parametrize("bad", [None, 3, [], "state", b"", {}, [("format", "tailavg")]], ids=repr)
def test_what_is_not_a_state_is_refused(bad):
    with pytest.raises(ValueError, match="state: expected"):
        TailAverage.from_state_dict(bad)


def test_a_state_with_an_unknown_key_is_refused():
    with pytest.raises(ValueError, match=r"unexpected.*colour"):
        TailAverage.from_state_dict({**a_state(), "colour": "red"})


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize(
    ("rule", "other"),
    [
        (AnytimeWindow(10), Exponential(10)),
        (AnytimeWindow(10), ExactWindow(10)),
        (AnytimeWindow(10), RawTail(10, total=100)),
        (AnytimeWindow(10), AnytimeWindow(10, accumulators=5)),
        (AnytimeWindow(10), AnytimeWindow(10, accumulators=2)),
        (AnytimeWindow(10), AnytimeWindow(3)),
        (AnytimeWindow(10), AnytimeWindow(40)),
        (AnytimeWindow(10), AnytimeWindow(0.9)),
        (AnytimeWindow(0.3), AnytimeWindow(0.1)),
        (AnytimeWindow(0.25, turns="paper"), AnytimeWindow(0.25)),
        (Exponential(10), AnytimeWindow(10)),
        (Exponential(10), ExactWindow(10)),
        (Exponential(10), RawTail(10, total=20)),
        (ExactWindow(10), AnytimeWindow(10)),
        (ExactWindow(10), Exponential(10)),
        (ExactWindow(10), ExactWindow(11)),
        (ExactWindow(10), ExactWindow(9)),
        (RawTail(10, total=20), AnytimeWindow(10)),
        (RawTail(10, total=20), Exponential(10)),
        (RawTail(10, total=20), RawTail(20, total=40)),
        (RawTail(10, total=20), RawTail(5, total=20)),
        (RawTail(10, total=20), RawTail(15, total=20)),
    ],
    ids=short,
)  # fmt: skip
def test_a_state_of_another_rule_is_refused(rule, other, shape):
    state = a_state(rule, shape=shape)
    with pytest.raises(ValueError, match="state: "):
        TailAverage.from_state_dict({**state, "rule": a_state(other)["rule"]})


@of_rules([10, 0.3, Exponential(10), ExactWindow(5), RawTail(10, 20)])
@pytest.mark.parametrize(
    "change",
    [
        {"count": 1},
        {"count": 0},
        {"folded": 0},
        {"folded": 10**6},
        {"starts": [0, 1]},
        {"starts": []},
        {"blocks": []},
        {"blocks": np.zeros((9, 2))},
        {"partial": np.zeros(3)},
    ],
    ids=str,
)
def test_a_state_whose_sizes_do_not_add_up_is_refused(rule, change):
    state = a_state(rule, steps=600, shape=(2,))
    with pytest.raises(ValueError, match="state: "):
        TailAverage.from_state_dict({**state, **change})


@pytest.mark.parametrize("key", ["starts", "blocks", "folded"])
def test_a_state_without_samples_has_nothing_else(key):
    state = TailAverage(10).state_dict()
    other = {"starts": [0], "blocks": [1.0], "folded": 3}
    with pytest.raises(ValueError, match="state: "):
        TailAverage.from_state_dict({**state, key: other[key]})


# files


@pytest.fixture
def average():
    made = TailAverage(10)
    made.update_many(np.ones((50, 3)))
    return made


def files(folder):
    return [path.name for path in folder.iterdir()]


def npz(path, **arrays):
    with path.open("wb") as file:
        np.savez(file, **arrays)


def test_a_file_is_one_npz_at_the_very_path_without_pickle(average, tmp_path):
    for name in ("average.npz", "average", ".hidden", "two words.state"):
        average.save(tmp_path / name)
        average.save(str(tmp_path / name))
        assert (
            TailAverage.load(tmp_path / name) == TailAverage.load(str(tmp_path / name)) == average
        )
    assert len(files(tmp_path)) == 4
    with np.load(tmp_path / "average", allow_pickle=False) as file:
        assert all(file[key].dtype.kind in "Uiuf" for key in file)


def test_a_file_is_overwritten(average, tmp_path):
    average.save(tmp_path / "average")
    average.update_many(np.zeros((5, 3)))
    average.save(tmp_path / "average")
    assert TailAverage.load(tmp_path / "average") == average
    assert files(tmp_path) == ["average"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(average, tmp_path):
    resource = pytest.importorskip("resource")
    average.save(tmp_path / "average")
    large = TailAverage(10)
    large.update(np.ones(10**5))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # as if the disk were full
    try:
        with pytest.raises(OSError, match="too large"):
            large.save(tmp_path / "average")
        with pytest.raises(OSError, match="too large"):
            large.save(tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(tmp_path) == ["average"]
    assert TailAverage.load(tmp_path / "average") == average


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_save_that_fails_at_the_end_leaves_the_old_file(average, tmp_path, monkeypatch, step):
    average.save(tmp_path / "average")
    before = (tmp_path / "average").read_bytes()

    def fail(*_, **__):
        raise OSError("no more")

    monkeypatch.setattr(os, step, fail)
    average.update(np.zeros(3))
    with pytest.raises(OSError, match="no more"):
        average.save(tmp_path / "average")
    assert files(tmp_path) == ["average"]
    assert (tmp_path / "average").read_bytes() == before


def test_a_missing_file_or_folder_is_the_error_that_python_has_for_it(average, tmp_path):
    with pytest.raises(FileNotFoundError):
        TailAverage.load(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        average.save(tmp_path / "none" / "average")
    assert files(tmp_path) == []


def test_a_truncated_file_is_refused(average, tmp_path):
    path = tmp_path / "average"
    average.save(path)
    content = path.read_bytes()
    for length in [*range(0, len(content), 97), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="average: damaged, or not saved by tailavg"):
            TailAverage.load(path)


def test_a_file_with_a_wrong_byte_is_refused_or_the_same(average, tmp_path):
    path = tmp_path / "average"
    average.save(path)
    content = path.read_bytes()
    for position in range(0, len(content), some(13, 1)):
        for flip in (0x01, 0x80, 0xFF):
            wrong = bytearray(content)
            wrong[position] ^= flip
            path.write_bytes(wrong)
            try:
                assert TailAverage.load(path) == average  # a byte that means nothing, as the date
            except ValueError as error:
                assert str(path) in str(error) or "state: " in str(error)  # noqa: PT017


def test_what_is_not_such_a_file_is_refused(average, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"")
    average.save(tmp_path / "good")
    with np.load(tmp_path / "good") as file:
        good = dict(file)
    objects = np.array([{"a": 1}], dtype=object)
    pickled, plain_npy = io.BytesIO(), io.BytesIO()
    np.save(pickled, objects, allow_pickle=True)
    np.save(plain_npy, np.ones(3))
    others = [b"", b"some text", pickled.getvalue(), plain_npy.getvalue(), pickle.dumps({"a": 1})]
    for content in others:
        path.write_bytes(content)
        with pytest.raises(ValueError, match="file: damaged, or not saved by tailavg"):
            TailAverage.load(path)
    for key in good:
        without = {name: array for name, array in good.items() if name != key}
        for arrays in (without, {**good, key: objects}, {**good, key: np.array("{}")}):
            npz(path, **arrays)
            with pytest.raises(ValueError, match=r"file: damaged|state: "):
                TailAverage.load(path)
    for header in ("[]", "3", "null", "{", '"text"', '{"format": "tailavg"}'):
        npz(path, **{**good, "header": np.array(header)})
        with pytest.raises(ValueError, match=r"file: damaged|state: "):
            TailAverage.load(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme.txt", "hello")
    with pytest.raises(ValueError, match="file: damaged"):
        TailAverage.load(path)


def test_nothing_is_unpickled(average, tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    average.save(tmp_path / "good")
    with np.load(tmp_path / "good") as file:
        good = dict(file)
    for key in good:
        npz(tmp_path / "trap", **{**good, key: np.array(Trap(), dtype=object)})
        with pytest.raises(ValueError, match="trap: damaged"):
            TailAverage.load(tmp_path / "trap")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("method", METHODS)
def test_a_growing_window_goes_on_with_its_cap_after_resuming(method):
    kind = KINDS["float"]
    rule = as_rule(Growing(0.5, at_most=30))
    average, xs = TailAverage(rule), kind.draw(200)
    take(average, kind, xs[:20], method)
    resumed = WAYS["json"](average)
    take(average, kind, xs[20:], method)
    take(resumed, kind, xs[20:], method)
    assert resumed == average
    assert resumed.size == 30


def test_a_state_whose_fold_is_overdue_is_folded_at_the_next_sample():
    average = TailAverage(1.0)
    for x in range(200):
        average.update(float(x))
    late = average.state_dict() | {"count": 1000, "partial": 1000.0}
    resumed = TailAverage.from_state_dict(late)
    assert resumed.value() == pytest.approx(1.0, rel=1e-15)
    for _ in range(3):
        resumed.update(1.0)
    assert resumed.value() == pytest.approx(1.0, rel=1e-12)
    assert (resumed.count, resumed.state_dict()["folded"]) == (1003, 1000)


@pytest.mark.parametrize("dtype", ["float32", ">f8", np.float64, "complex64"])
def test_a_dtype_is_numpys_own_object(dtype):
    """An update compares dtypes by identity: another object would take the slow way."""
    average = TailAverage(3, dtype=dtype)
    average.update(np.ones(2, average.dtype))
    for one in (average, average.copy()):
        assert one.dtype is np.ones(2, one.dtype.name).dtype


def test_objects_are_not_written(tmp_path):
    state = TailAverage(2).state_dict() | {"blocks": np.array([object()])}
    with pytest.raises(ValueError, match="blocks: expected numbers, got objects"):
        layout.write_file(tmp_path / "average", state)
    assert not files(tmp_path)
