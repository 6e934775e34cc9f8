"""Windows of time: against the model, which keeps all samples and times, on irregular streams."""

import copy
import json
import pickle
import time
from datetime import datetime, timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailavg import AnyTail, AnytimeWindow, Elapsed, Exponential, TailAverage, TailAverages
from tailavg.numpy import kernel
from tests.support.cases import FLOAT, WAYS, assert_close, of_kinds, of_rules
from tests.support.corrupt_states import mutants, within
from tests.support.effort import some
from tests.support.interrupts import interrupted
from tests.support.model import averages, elapsed_weights, variances

STEPS = 300
SECOND = 10**9


def _streams():
    """By name, the times of samples in whole nanoseconds, over some 100 s."""
    rng = np.random.default_rng(0)
    silent = rng.random(STEPS) < 0.02
    found = {
        "poisson": np.cumsum(rng.exponential(0.2, STEPS)),
        "bursts": np.repeat(rng.uniform(0, 100, STEPS // 10), 10) + rng.exponential(0.05, STEPS),
        "gaps": np.cumsum(np.where(silent, 30, rng.exponential(0.1, STEPS))),
        "ties": rng.integers(0, 100, STEPS),
        "regular": np.arange(STEPS) * 0.2,
        "at once": np.full(STEPS, 7.5),
    }
    return {name: np.rint(np.sort(ts) * SECOND).astype(np.int64) for name, ts in found.items()}


STREAMS = _streams()
every_stream = pytest.mark.parametrize("times", STREAMS.values(), ids=STREAMS)

BLOCKS = [
    AnytimeWindow(Elapsed(10)),
    AnytimeWindow(Elapsed(3.3), 13),
    AnytimeWindow(Elapsed(40), 2),
]
DECAYS = [Exponential(Elapsed(10)), Exponential(Elapsed(0.7))]
RULES = [*BLOCKS, AnytimeWindow(Elapsed(1e-9), 3), AnytimeWindow(Elapsed(1e6), 3), *DECAYS]
FEW = [BLOCKS[0], DECAYS[0]]


@pytest.fixture(params=["numpy", "plain", "compiled"])
def way(request, monkeypatch):
    """Scan with NumPy alone, with plain loops, and with compiled ones."""
    if request.param == "compiled":
        pytest.importorskip("numba", reason="numba is not installed: nothing can be compiled")
    monkeypatch.setattr(kernel, "installed", lambda: request.param != "numpy")
    for name in ("LONG", "SHORT"):
        monkeypatch.setattr(kernel, name, 0 if request.param == "compiled" else 10**9)
    return request.param


def dates(times):
    return np.asarray(times).view("datetime64[ns]")


def matrix_of(rule, times):
    z = None if isinstance(rule, Exponential) else rule.accumulators - 1
    return elapsed_weights(rule.window.length, z, tuple(times.tolist()))


def updated(rule, xs, times, **options):
    average = TailAverage(rule, **options)
    for x, t in zip(xs.tolist(), dates(times), strict=True):
        average.update(x, t)
    return average


# The definition


@every_stream
@of_rules(RULES)
def test_is_the_model(rule, times):
    xs, average, found = FLOAT.draw(STEPS), TailAverage(rule, variance=True), []
    for x, t in zip(xs.tolist(), dates(times), strict=True):
        average.update(x, t)
        found.append((average.value(), average.variance(), average.std(ddof=0), average.size))
    values, ours, stds, sizes = np.transpose(found)
    matrix = matrix_of(rule, times)
    assert_close(values, averages(matrix, xs), 1e-12)
    np.testing.assert_allclose(ours, variances(matrix, xs, 1), rtol=1e-8, atol=1e-14)
    np.testing.assert_allclose(stds**2, variances(matrix, xs, 0), rtol=1e-8, atol=1e-14)
    if isinstance(rule, Exponential):
        assert_close(sizes, 1 / (matrix**2).sum(axis=1), 1e-9)
        with pytest.raises(ValueError, match="depend on all times, which are not kept"):
            average.weights()
    else:
        np.testing.assert_allclose(average.weights(), matrix[-1], rtol=1e-9, atol=1e-15)
        assert average.profile().accumulators == rule.accumulators


@every_stream
@of_rules([*BLOCKS[:2], RULES[3], *DECAYS])
def test_a_scan_is_the_model(rule, times, way):
    xs, matrix = FLOAT.draw(STEPS), matrix_of(rule, times)
    assert_close(TailAverage(rule).scan(xs, dates(times)), averages(matrix, xs), 1e-12)
    for ddof in (0, 1):
        average = TailAverage(rule, variance=True)
        parts = [
            average.scan(part, ts=ts, of="variance", ddof=ddof)
            for part, ts in zip(
                np.split(xs, [1, 2, 200]), np.split(dates(times), [1, 2, 200]), strict=True
            )
        ]
        expected = variances(matrix, xs, ddof)
        np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-8, atol=1e-14)


@of_kinds("complex", "float16 (3,)", "float32 (3,)", "complex128 (2, 3)", "int32 (2,)")
@of_rules(FEW)
def test_samples_of_every_kind(rule, kind, way):
    xs, times = kind.draw(STEPS), STREAMS["poisson"]
    expected = averages(matrix_of(rule, times), xs)
    scans, single, many = TailAverage(rule), TailAverage(rule), TailAverage(rule)
    got = np.concatenate(
        [scans.scan(xs[:99], dates(times[:99])), scans.scan(xs[99:], dates(times[99:]))]
    )
    assert_close(got, expected, kind.rtol)
    many.update_many(xs, dates(times))
    for x, t in zip(kind.each(xs), dates(times), strict=True):
        single.update(x, t)
    for average in (many, single):
        assert_close(average.value(), expected[-1], kind.rtol)
        assert np.asarray(average.value()).dtype == kind.held


@of_rules(FEW)
@pytest.mark.parametrize("k", [100, 12, 1])
def test_a_regular_stream_is_one_of_k_samples(rule, k, way):
    """To the bit if no block is cut: if the parts of the window are whole numbers of samples."""
    xs, ts = FLOAT.draw(2000), np.arange(2000) * 0.25
    kind = type(rule)
    timed, fixed = TailAverage(kind(Elapsed(k * 0.25))), TailAverage(kind(k))
    got, expected = timed.scan(xs, ts), fixed.scan(xs)
    timed.update(1.0, 500.0)
    fixed.update(1.0)
    if isinstance(rule, Exponential):
        assert_close(got, expected, 1e-12)
        assert_close(timed.value(), fixed.value(), 1e-12)
    else:
        assert_close(got, expected, 0 if way != "numpy" and k > 1 else 1e-12)
        assert timed.value() == fixed.value()


# Updates, update_many and scans


@settings(max_examples=some(40, 400), deadline=None)
@given(
    rule=st.sampled_from(RULES),
    stream=st.sampled_from(sorted(STREAMS)),
    cuts=st.lists(st.integers(1, STEPS - 1), max_size=5, unique=True).map(sorted),
    methods=st.lists(st.sampled_from(["update", "update_many", "scan"]), min_size=6, max_size=6),
    way=st.sampled_from(["numpy", "plain", *(["compiled"] if kernel.installed() else [])]),
)
def test_in_any_chunks_by_any_method(rule, stream, cuts, methods, way):
    xs, times = FLOAT.draw(STEPS), STREAMS[stream]
    single, mixed = updated(rule, xs, times), TailAverage(rule)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "installed", lambda: way != "numpy")
        for name in ("LONG", "SHORT"):
            patch.setattr(kernel, name, 0 if way == "compiled" else 10**9)
        for start, end, method in zip([0, *cuts], [*cuts, STEPS], methods, strict=False):
            part, ts = xs[start:end], dates(times[start:end])
            if method == "update":
                for x, t in zip(part.tolist(), ts, strict=True):
                    mixed.update(x, t)
            else:
                getattr(mixed, method)(part, ts)
    if way != "numpy":
        assert mixed == single
    assert_close(mixed.value(), single.value(), 1e-12)
    assert mixed._clock.elapsed() == single._clock.elapsed()
    single.update(3.0, dates(times)[-1])
    mixed.update(3.0, dates(times)[-1])
    assert_close(mixed.value(), single.value(), 1e-12)


@every_stream
@of_rules(FEW)
def test_loops_leave_the_bits_of_updates(rule, times, plain_loops):
    xs = FLOAT.draw(STEPS)
    for options in ({}, {"variance": True}):
        scans, many = TailAverage(rule, **options), TailAverage(rule, **options)
        got = scans.scan(xs, dates(times))
        many.update_many(xs, dates(times))
        single = updated(rule, xs, times, **options)
        assert scans == many == single
        assert got[-1] == single.value()


@of_rules(FEW)
def test_long_streams_in_many_plans(rule, compiled):
    """Plans are of 16,384 samples, sums of 256."""
    rng = np.random.default_rng(3)
    xs, times = rng.random(40_000), np.cumsum(rng.integers(0, SECOND // 50, 40_000))
    scans, single = TailAverage(rule), TailAverage(rule)
    got = scans.scan(xs, dates(times))
    for i, (x, t) in enumerate(zip(xs.tolist(), dates(times), strict=True)):
        single.update(x, t)
        if i % 997 == 0:
            assert_close(got[i], single.value(), 1e-14)
    assert scans == single


# Times


@of_rules(FEW)
def test_times_of_every_kind(rule):
    start = datetime(2024, 5, 1)
    seconds = [0.0, 0.5, 0.5, 3.0, 14.0]
    kinds = [
        seconds,
        np.array(seconds),
        [start + timedelta(seconds=t) for t in seconds],
        np.array([np.datetime64(start + timedelta(seconds=t), "ms") for t in seconds]),
    ]
    values = []
    for ts in kinds:
        many, single = TailAverage(rule), TailAverage(rule)
        values.append(many.scan([1.0, 2.0, 3.0, 4.0, 5.0], ts).tolist())
        for x, t in zip([1.0, 2.0, 3.0, 4.0, 5.0], ts, strict=True):
            single.update(x, t)
        assert single == many
    assert values == [values[0]] * 4


@of_rules(FEW)
def test_without_times_samples_come_now(rule):
    before, average = time.monotonic_ns(), TailAverage(rule)
    average.update(1.0)
    average.update_many([2.0, 3.0])
    average.scan([4.0])
    assert before <= average._clock.time <= time.monotonic_ns()
    assert average.value() == 2.5
    assert average.value(at=time.monotonic() + 60) != average.value()  # NaN


@of_rules(RULES)
def test_times_that_go_back_change_nothing(rule, way):
    xs, times = FLOAT.draw(60), STREAMS["poisson"][:60] + SECOND
    average = TailAverage(rule)
    average.scan(xs, dates(times))
    before, last = average.copy(), int(times[-1])
    late = dates(np.array([last - 1]))[0]
    for call in (
        lambda: average.update(1.0, late),
        lambda: average.update_many([1.0, 2.0], [late, late + 5]),
        lambda: average.scan([1.0, 2.0], [late + 2, late]),
        lambda: average.scan([1.0, 2.0, 3.0], ts=dates(np.array([last, last + 9, last + 8]))),
        lambda: average.value(at=late),
    ):
        with pytest.raises(ValueError, match="expected times that do not go back, got one"):
            call()
        assert average == before
    average.update(1.0, late + 1)  # an equal time
    assert average.count == 61


@of_rules(FEW)
def test_bad_times_change_nothing(rule):
    average = updated(rule, FLOAT.draw(9), STREAMS["poisson"][:9])
    before = average.copy()
    for error, call in (
        (ValueError, lambda: average.update(1.0, np.datetime64("NaT"))),
        (ValueError, lambda: average.update(1.0, float("inf"))),
        (ValueError, lambda: average.update_many([1.0, 2.0], [50.0, float("nan")])),
        (ValueError, lambda: average.scan([1.0], dates([np.iinfo("i8").min]))),
        (ValueError, lambda: average.scan([1.0, 2.0], [50.0])),
        (ValueError, lambda: average.scan([1.0, 2.0], 50.0)),
        (ValueError, lambda: average.update_many([1.0], [50.0, 60.0])),
        (ValueError, lambda: average.value(at=float("nan"))),
        (TypeError, lambda: average.update(1.0, "12:00")),
        (TypeError, lambda: average.scan([1.0], ["12:00"])),
        (ValueError, lambda: average.value(0.25)),
        (ValueError, lambda: average.scan([1.0], 0.25)),
    ):
        with pytest.raises(error, match=r"^(ts?|window): "):
            call()
        assert average == before


def test_other_windows_take_no_times():
    for rule in (10, 0.25, Exponential(10), AnyTail()):
        average, keyed = TailAverage(rule), TailAverages(rule)
        for one, key in ((average, ()), (keyed, ("a",))):
            one.update(*key, 1.0)
        window = [0.5] if isinstance(rule, AnyTail) else []
        for call in (
            lambda: average.update(1.0, 3.0),  # noqa: B023
            lambda: average.update_many([1.0], [3.0]),  # noqa: B023
            lambda: average.scan([1.0], *window, ts=[3.0]),  # noqa: B023
            lambda: average.value(*window, at=3.0),  # noqa: B023
            lambda: keyed.update("a", 1.0, 3.0),  # noqa: B023
            lambda: keyed.update_many(["a"], [1.0], [3.0]),  # noqa: B023
            lambda: keyed.scan(["a"], [1.0], *window, ts=[3.0]),  # noqa: B023
            lambda: keyed.value("a", *window, at=3.0),  # noqa: B023
        ):
            with pytest.raises(TypeError, match="samples have times only with an Elapsed window"):
                call()
        assert average.count == keyed["a"].count == 1


# Silence


@of_rules([*BLOCKS, DECAYS[0]])
def test_silence(rule):
    """The window shrinks to nothing; then the next sample is alone."""
    average = updated(rule, FLOAT.draw(200), STREAMS["poisson"][:200])
    before, last = average.copy(), STREAMS["poisson"][199] / SECOND
    period = rule.window.period
    assert average.value(at=last) == average.value()
    assert np.isfinite(average.value(at=last + 0.999 * period))
    for later in (1.001, 2, 50):
        assert np.isnan(average.value(at=last + later * period))
    assert average == before
    average.update(7.0, last + 1.001 * period)
    assert average.value() == 7.0
    assert average.size == 1.0


def test_silence_of_arrays():
    average = TailAverage(Elapsed(10))
    average.update(np.ones((2, 3), np.float32), 0)
    nothing = average.value(at=11)
    assert nothing.shape == (2, 3)
    assert nothing.dtype == np.float32
    assert np.isnan(nothing).all()


@of_rules(RULES)
def test_one_sample_and_none(rule):
    average = TailAverage(rule)
    for read in (average.value, lambda: average.value(at=1), average.profile):
        with pytest.raises(ValueError, match="expected at least one sample"):
            read()
    assert average.scan([], []).tolist() == []
    assert average.size == average.count == 0
    assert TailAverage.from_state_dict(average.state_dict()) == average
    average.update(5.0, 100)
    assert (average.value(), average.size) == (5.0, 1.0)


# NaN policies


@of_rules(FEW)
def test_a_skipped_sample_has_no_time(rule, way):
    xs, times = FLOAT.draw(STEPS), STREAMS["gaps"].copy()
    bad = np.arange(STEPS) % 7 == 3
    xs[bad] = np.nan
    clean, holes = TailAverage(rule), TailAverage(rule, nan_policy="omit")
    expected = clean.scan(xs[~bad], dates(times[~bad]))
    times[bad] -= 1000 * SECOND  # skipped samples may come late
    got = np.concatenate(
        [holes.scan(xs[:50], dates(times[:50])), holes.scan(xs[50:], dates(times[50:]))]
    )
    assert_close(got[~bad], expected, 1e-14)
    np.testing.assert_array_equal(got[bad][1:], got[np.flatnonzero(bad)[1:] - 1])
    many = TailAverage(rule, nan_policy="omit")
    many.update_many(xs, dates(times))
    single = updated(rule, xs, times, nan_policy="omit")
    for one in (holes, many, single):
        assert one._clock.elapsed() == clean._clock.elapsed()
        assert_close(one.value(), clean.value(), 1e-12)
    strict = TailAverage(rule, nan_policy="raise")
    for call in (lambda: strict.scan(xs, dates(times)), lambda: strict.update(np.nan, 3.0)):
        with pytest.raises(ValueError, match="nan_policy='raise'"):
            call()
        assert strict.count == 0


@of_rules(BLOCKS[:2])
def test_a_nan_leaves_with_its_block(rule):
    xs, times = FLOAT.draw(STEPS), STREAMS["regular"]
    xs[3] = np.nan
    got = TailAverage(rule).scan(xs, dates(times))
    expected = averages(matrix_of(rule, times), xs)
    assert_close(got, expected, 1e-12)
    assert np.isnan(got).any()
    assert np.isfinite(got[-1])


# States


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@of_rules([BLOCKS[1], RULES[3], DECAYS[0]])
def test_states_move(rule, way):
    xs, times = FLOAT.draw(STEPS), STREAMS["poisson"]
    for options in ({}, {"variance": True}):
        for count in (0, 1, 2, 200):
            average = updated(rule, xs[:count], times[:count], **options)
            moved = way(average)
            assert moved == average
            assert moved.state_dict()["elapsed"] == average.state_dict()["elapsed"]
            for one in (moved, average):
                one.update_many(xs[count:], dates(times[count:]))
            assert moved == average
            assert moved.value() == average.value()


@of_rules(FEW)
def test_averages_with_other_times_are_not_equal(rule):
    xs, times = FLOAT.draw(20), STREAMS["poisson"][:20].copy()
    average = updated(rule, xs, times)
    assert average == updated(rule, xs, times)
    times[-1] += 1
    assert average != updated(rule, xs, times)


@of_rules([*BLOCKS, *DECAYS])
def test_corrupt_times_are_refused(rule):
    average = updated(rule, FLOAT.draw(200), STREAMS["poisson"][:200])
    state = json.loads(json.dumps(average.state_dict()))
    times = state["elapsed"]
    blocks = isinstance(times["first"], list)
    swapped = {"first": times["last"], "last": times["first"]}
    bad = [{}, {"first": times["first"]}, {"first": 5, "last": 5}, {"first": "ab", "last": "ab"}]
    for name, value in times.items():
        others = [None, "x", float("nan"), float("inf"), True, -1.0, 2**63, -(10**400), [0]]
        bad += [times | {name: other} for other in others]
        if blocks:
            bad += [
                times | {name: value[1:]},
                times | {name: [*value[:-1], float(value[-1])]},
                times | {name: [*value[:-1], value[0] - 1]},
                times | {name: [*value[:-1], 2**62 + 1]},
                times | {name: value[::-1]},
            ]
    if blocks:
        bad += [times | {"last": [*times["last"][:-1], times["first"][-1] + 10**12]}, swapped]
    else:
        bad += [swapped, times | {"size": 201.0}, times | {"scale": 0.0}, times | {"decay": 2.0}]
    keyed = TailAverages(rule)
    keyed.restore([("a", *(state[name] for name in KEYED), times)])
    for each in bad:
        with pytest.raises(ValueError, match=r"state: elapsed: "):
            TailAverage.from_state_dict(state | {"elapsed": each})
        with pytest.raises(ValueError, match=r"state: elapsed: "):
            TailAverages(rule).restore([("a", *(state[name] for name in KEYED), each)])
    for each in (None, 5, [], "x"):
        with pytest.raises(ValueError, match=r"state: elapsed: "):
            TailAverage.from_state_dict(state | {"elapsed": each})
    without = {name: value for name, value in state.items() if name != "elapsed"}
    with pytest.raises(ValueError, match="expected the times of an Elapsed window, got none"):
        TailAverage.from_state_dict(without)
    counted = TailAverage(10)
    counted.update(1.0)
    with pytest.raises(ValueError, match="expected an Elapsed window, since the state has times"):
        TailAverage.from_state_dict(counted.state_dict() | {"elapsed": times})


KEYED = ["count", "starts", "blocks", "folded", "partial"]


@of_rules([BLOCKS[0], DECAYS[0]])
def test_mutants_of_states_are_refused_or_work(rule):
    state = updated(rule, FLOAT.draw(200), STREAMS["poisson"][:200]).state_dict()
    state = json.loads(json.dumps(state))
    keyed = TailAverages(rule)
    keyed.scan(list("abab"), [1.0, 2.0, 3.0, 4.0], ts=[1.0, 1.0, 2.0, 9.0])
    refused = 0
    for kind, one in ((TailAverage, state), (TailAverages, keyed.state_dict())):
        for mutant in mutants(one, some(250, 5000), 0):
            try:
                loaded = within(lambda: kind.from_state_dict(mutant))  # noqa: B023
            except (ValueError, TypeError):
                refused += 1
                continue
            assert kind.from_state_dict(loaded.state_dict()) == loaded
    assert refused > 100


def test_an_exponential_forgets_all_in_a_silence_of_a_period(way):
    xs, ts = FLOAT.draw(700), np.arange(700.0)
    xs[5], ts[100:] = np.nan, np.arange(600.0) + 200
    rule = Exponential(Elapsed(100))
    got = TailAverage(rule).scan(xs, ts)
    assert np.isnan(got[5:100]).all()
    assert_close(got[100:], TailAverage(rule).scan(np.nan_to_num(xs), ts)[100:], 1e-12)
    single = TailAverage(rule)
    for x, t in zip(xs.tolist(), ts.tolist(), strict=True):
        single.update(x, t)
    assert_close(got[-1], single.value(), 1e-14)


# Averages by key


def test_keys_have_times_of_their_own(way):
    rng = np.random.default_rng(5)
    keys, xs, times = rng.integers(0, 5, STEPS), FLOAT.draw(STEPS), STREAMS["gaps"].copy()
    times[keys == 3] -= 10**12  # the clock of a key may be slow
    for rule in FEW:
        for of in ("mean", "std"):
            keyed = TailAverages(rule, variance=True)
            parts = [slice(0, 200), slice(200, 210), slice(210, STEPS)]
            got = np.concatenate(
                [keyed.scan(keys[p], xs[p], ts=dates(times[p]), of=of) for p in parts]
            )
            for key in range(5):
                mine = keys == key
                single = TailAverage(rule, variance=True)
                expected = single.scan(xs[mine], dates(times[mine]), of=of)
                np.testing.assert_allclose(got[mine], expected, rtol=1e-9)
                assert_close(keyed.value(key), single.value(), 1e-12)
                late = dates(times[mine])[-1] + np.timedelta64(4, "s")
                assert_close(keyed.value(key, at=late), single.value(at=late), 1e-12)
                assert keyed[key]._clock.elapsed() == single._clock.elapsed()


@of_rules(FEW)
def test_keys_go_into_files_and_on(rule, tmp_path):
    keyed = TailAverages(rule)
    keyed.update_many(list("abcab" * 30), FLOAT.draw(150), dates(STREAMS["poisson"][:150]))
    keyed.update("d", 1.0, 1e6)
    keyed.save(tmp_path / "keyed.npz")
    others = [
        TailAverages.load(tmp_path / "keyed.npz"),
        TailAverages.from_state_dict(json.loads(json.dumps(keyed.state_dict()))),
        keyed.copy(),
        pickle.loads(pickle.dumps(keyed)),
        copy.deepcopy(keyed),
    ]
    assert others == [keyed] * 5
    for one in [keyed, *others]:
        one.update("a", 2.0, 1e6)
        one.update_many(["b", "e"], [3.0, 4.0], [1e6, 5.0])
    assert others == [keyed] * 5
    before = keyed.copy()
    for call in (
        lambda: keyed.update("a", 2.0, 1e6 - 1),
        lambda: keyed.update_many(["e", "a"], [1.0, 1.0], [9.0, 10.0]),
        lambda: keyed.scan(["e", "e", "f"], [1.0, 1.0, 1.0], ts=[9.0, 8.0, 1.0]),
    ):
        with pytest.raises(ValueError, match="expected times that do not go back"):
            call()
        assert keyed == before
    for ts in ([1e6], [[1e6, 1e6]], [1e6, float("nan")]):
        with pytest.raises(ValueError, match=r"ts?: expected"):
            keyed.scan(["a", "b"], [1.0, 1.0], ts=ts)
        assert keyed == before


# Interrupts


@of_rules(FEW)
@pytest.mark.parametrize("call", ["update", "update_many", "scan"])
def test_an_interrupted_call_is_whole(rule, call, plain_loops):
    times, count = STREAMS["poisson"], 256
    before = updated(rule, FLOAT.draw(count), times[:count])
    xs, ts = FLOAT.draw(40), dates(times[count : count + 40])
    if call == "update":
        xs, ts = 1.5, ts[0] + np.timedelta64(6, "s")  # closes a block

    def change(average):
        getattr(average, call)(xs, ts)

    after, refused = before.copy(), 0
    change(after)
    for at, average in interrupted(before.copy, change, 40, 40):
        if "incomplete" in repr(average):
            refused += 1
            continue
        assert average in (before, after), f"opcode {at}"
        if average == before:
            change(average)
            assert average == after, f"opcode {at}"
    assert refused <= 20


# Memory


def test_memory_does_not_depend_on_the_number_of_samples():
    sizes = []
    for count in (1000, 30_000):
        average = TailAverage("10min")
        average.update_many(np.ones(count), np.linspace(0, 600, count))
        sizes.append(len(json.dumps(average.state_dict())))
    assert abs(sizes[0] - sizes[1]) < 60


def test_other_libraries_refuse_a_window_of_time():
    from tailavg.checkpoints.weights import weights

    for rule in ("10min", Elapsed(5), AnytimeWindow("10min"), Exponential("10min")):
        with pytest.raises(TypeError, match=r"a window of time works in|depend on the times of"):
            weights(rule, 10)
