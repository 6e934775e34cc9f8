"""One contract for every rule and every kind of sample."""

import copy
import math
import pickle
from functools import cache
from itertools import cycle, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailavg import AnytimeWindow, ExactWindow, Exponential, Growing, Profile, RawTail, TailAverage
from tailavg.numpy import fallback
from tests.support.cases import (
    CAPPED,
    CASES,
    EVERY_KIND,
    EVERY_RULE,
    FLOAT,
    ROW,
    RULES,
    assert_close,
    chunks,
    every_method,
    of_bad_samples,
    of_cases,
    of_kinds,
    of_pairs,
    of_rules,
    rules,
    short,
    take,
)
from tests.support.effort import some
from tests.support.model import Window, averages, weight_matrix


@cache
def one_by_one(rule, kind, steps):
    """The averages after each sample, and that average."""
    average, values = TailAverage(rule), []
    for x in kind.each(kind.draw(steps)):
        average.update(x)
        values.append(average.value())
    return average, np.array(values)


@of_cases
def test_updates_give_the_averages_of_the_model(rule, kind):
    average, values = one_by_one(rule, kind, 300)
    assert_close(values, averages(weight_matrix(rule, 300), kind.draw(300)), kind.rtol)
    assert values.dtype == kind.held
    assert average.dtype == kind.held
    if kind.shape is None:
        assert type(average.value()) is (complex if kind.dtype == "complex128" else float)
    else:
        assert isinstance(average.value(), np.ndarray)
        assert average.value().shape == kind.shape


@of_rules(RULES)
@settings(max_examples=some(12, 60))
@given(st.sampled_from(list(EVERY_KIND.values())), chunks(300))
def test_any_chunks_by_any_method_give_the_same_averages(rule, kind, parts):
    xs, (whole, values) = kind.draw(300), one_by_one(rule, kind, 300)
    average = TailAverage(rule)
    for start, end, method in parts:
        got = take(average, kind, xs[start:end], method)
        assert_close(got, values[start:end] if method == "scan" else values[end - 1], kind.rtol)
        assert_close(average.value(), values[end - 1], kind.rtol)
        assert average.count == end
        if method == "scan" and kind.shape:
            assert got.dtype == kind.held
    assert average.profile() == whole.profile()
    assert average.state_dict()["starts"] == whole.state_dict()["starts"]


@of_kinds("float", "float64 (3,)")
@of_rules(
    [
        *RULES,
        AnytimeWindow(1000),
        AnytimeWindow(1499, 2),
        AnytimeWindow(30_000),
        AnytimeWindow(0.25, 4, turns="paper"),
        AnytimeWindow(Growing(0.25, at_most=900)),
        Exponential(3000),
        Exponential(Growing(0.25, at_most=900)),
        ExactWindow(1000),
        RawTail(0.25, total=2500),
    ]
)
def test_long_chunks_give_the_same_averages(rule, kind, scanner, monkeypatch):
    """Chunks that span many turns and folds, and more numbers than are taken at once."""
    monkeypatch.setattr(fallback, "CHUNK", 600)
    steps = 3000
    xs, (_, values) = kind.draw(steps), one_by_one(rule, kind, steps)
    for cuts in ([], [1, 777, 2001]):
        scanned, added = TailAverage(rule), TailAverage(rule)
        for start, end in pairwise([0, *cuts, steps]):
            assert_close(scanned.scan(xs[start:end]), values[start:end], 1e-12)
            added.update_many(xs[start:end])
            assert_close(scanned.value(), values[end - 1], 1e-12)
            assert_close(added.value(), values[end - 1], 1e-12)


@settings(max_examples=some(40, 200))
@given(rules, st.sampled_from([FLOAT, ROW]), chunks(300))
def test_any_rule_in_any_chunks_follows_the_model(rule, kind, parts):
    xs = kind.draw(300)
    expected = averages(weight_matrix(rule, 300), xs)
    average = TailAverage(rule)
    for start, end, method in parts:
        got = take(average, kind, xs[start:end], method)
        assert_close(got, expected[start:end] if method == "scan" else expected[end - 1], 1e-12)


@of_rules(EVERY_RULE)
def test_profile_sums_up_the_weights_at_every_step(rule):
    average, matrix = TailAverage(rule), weight_matrix(rule, 300)
    for t, alpha in enumerate(matrix, start=1):
        average.update(1.0)
        got = average.profile()
        ages = t - 1 - np.arange(len(alpha))
        assert (got.count, got.size) == (average.count, average.size) == (t, average.size)
        assert math.isclose(got.effective_size, 1 / (alpha @ alpha), rel_tol=1e-9)
        assert math.isclose(got.mean_age, alpha @ ages, rel_tol=1e-9, abs_tol=1e-9)
        assert got.oldest_age == ages[np.argmax(alpha > 0)]
        held = Window.of(rule.window).samples(t)
        assert got.accumulators == (held if isinstance(rule, ExactWindow) else rule.accumulators)
        if not isinstance(rule, RawTail):
            assert math.isclose(got.size, Window.of(rule.window).size(t), rel_tol=1e-15)


def test_profile_is_a_frozen_record():
    average = TailAverage(10)
    average.update(1.0)
    assert average.profile() == Profile(1, 10.0, 1.0, 0.0, 0, 3)
    with pytest.raises(AttributeError):
        average.profile().count = 2


@pytest.mark.parametrize("rule", [AnytimeWindow(0.25), AnytimeWindow(1000, 7), Exponential(0.25)])
def test_profile_of_a_long_stream_needs_no_dense_weights(rule):
    average = TailAverage(rule)
    average.update_many(np.ones(10**5))
    got = average.profile()
    assert math.isclose(got.effective_size, average.size, rel_tol=1e-9)
    assert got.oldest_age < 10**5


@every_method
@of_kinds("0-d float64", "float32 (3,)", "int32 (2,)")
def test_samples_values_and_states_are_not_shared_with_the_caller(kind, method):
    for rule in RULES:
        average, twin, xs = TailAverage(rule), TailAverage(rule), kind.draw(60)
        for each in (average, twin):
            each.update(np.array(xs[0]))
        for start in range(1, 60, 20):
            part = xs[start : start + 20].copy()
            take(twin, kind, part, method)
            if method == "update":
                for x in part:
                    sample = np.array(x)
                    average.update(sample)
                    sample[...] = 0
            else:
                take(average, kind, part, method)[...] = 0
            part[...] = 0
            average.value()[...] = 0
            state = average.state_dict()
            state["blocks"][...] = 0
            state["partial"][...] = 0
            state["starts"].clear()
        assert average == twin, rule
        assert_close(average.value(), twin.value(), 0)


def test_values_are_those_of_one_step_however_late_they_are_looked_at():
    average, values = TailAverage(10), []
    for t in range(50):
        average.update(np.full(2, float(t)))
        values.append(average.value())
    assert_close(
        np.array(values), TailAverage(10).scan(np.repeat(np.arange(50.0), 2).reshape(50, 2)), 1e-12
    )


@of_pairs([*zip(cycle(RULES), EVERY_KIND), *((rule, "float") for rule in RULES)])
def test_a_copy_is_equal_and_goes_its_own_way(rule, kind):
    average = TailAverage(rule, nan_policy="omit")
    xs = kind.draw(300)
    average.update_many(xs[:150])
    for twin in (
        average.copy(),
        copy.copy(average),
        copy.deepcopy(average),
        pickle.loads(pickle.dumps(average)),
        TailAverage.from_state_dict(average.state_dict()),
    ):
        assert type(twin) is type(average)
        assert twin == average
        assert (twin.rule, twin.dtype, twin.nan_policy) == (rule, average.dtype, "omit")
        assert repr(twin) == repr(average)
        before = average.value()
        twin.update_many(xs[150:])
        assert twin != average
        assert average.count == 150
        assert_close(average.value(), before, 0)


@of_rules(RULES)
def test_a_fresh_average_can_be_copied_too(rule):
    average = TailAverage(rule, dtype="float32", nan_policy="raise")
    for twin in (average.copy(), pickle.loads(pickle.dumps(average))):
        assert twin == average
        assert (twin.count, twin.dtype, twin.nan_policy) == (0, np.float32, "raise")
        assert twin.weights().shape == (0,)


def test_averages_are_equal_when_their_states_are():
    def average(rule=10, xs=(1.0, 2.0, 3.0), **options):
        made = TailAverage(rule, **options)
        made.update_many(xs)
        return made

    others = [
        average(11),
        average(xs=(1.0, 2.0)),
        average(xs=(1.0, 2.0, 3.5)),
        average(xs=[(1.0,), (2.0,), (3.0,)]),
        average(dtype="float32"),
        average(nan_policy="omit"),
        average(Exponential(10)),
        TailAverage(10),
    ]
    assert average() == average(rule=AnytimeWindow(10))
    assert all(average() != other for other in others)
    assert average(xs=[math.nan, 1.0]) == average(xs=[math.nan, 1.0])
    assert average() != 2.0
    with pytest.raises(TypeError, match="unhashable"):
        hash(average())


@of_rules(RULES)
def test_repr_tells_the_rule_and_the_samples(rule):
    average = TailAverage(rule, nan_policy="omit")
    assert repr(rule) in repr(average)
    assert "no samples" in repr(average)
    average.update_many(np.ones((7, 2, 3), "f4"))
    for part in (repr(rule), "7 samples", "(2, 3)", "float32", "omit"):
        assert part in repr(average)


def test_kinds_of_numbers_may_be_mixed():
    xs = [1, 2.5, True, np.float32(0.5), np.int8(3), np.array(4.0), np.uint64(5), np.float16(6)]
    for rule in EVERY_RULE:
        average = TailAverage(rule)
        for x in xs:
            average.update(x)
        expected = averages(weight_matrix(rule, len(xs)), np.array(xs, float))[-1]
        assert_close(average.value(), expected, 1e-12)
        assert type(average.value()) is float


@of_kinds("float", "0-d float32", "float16 (3,)", "int32 (2,)")
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_dtype_is_that_of_the_accumulators(dtype, kind):
    xs = kind.draw(40)
    rtol = 1e-12 if dtype in ("float64", "complex128") else 4e-6
    for rule in RULES:
        average, scanned = TailAverage(rule, dtype=dtype), TailAverage(rule, dtype=dtype)
        values = scanned.scan(xs)
        for t, x in enumerate(kind.each(xs)):
            average.update(x)
            assert_close(values[t], average.value(), rtol)
        assert average.dtype == scanned.dtype == values.dtype == dtype, rule
        assert np.asarray(average.value()).dtype.kind == np.dtype(dtype).kind
        assert_close(average.value(), averages(weight_matrix(rule, 40), xs)[-1], rtol)


@of_rules(RULES)
def test_samples_may_have_any_memory_layout(rule):
    xs = ROW.draw(60).reshape(30, 2, 3)
    expected = TailAverage(rule).scan(xs)
    frozen = xs.copy()
    frozen.flags.writeable = False
    layouts = [
        np.asfortranarray(xs),
        np.repeat(xs, 2, axis=2)[..., ::2],
        xs[::-1].copy()[::-1],
        xs.astype(">f8"),
        frozen,
        xs.tolist(),
        tuple(map(tuple, xs.tolist())),
    ]
    for layout in layouts:
        average = TailAverage(rule)
        for t, x in enumerate(layout):
            average.update(x)
            assert_close(average.value(), expected[t], 1e-12)
        assert_close(TailAverage(rule).scan(layout), expected, 1e-12)
        added = TailAverage(rule)
        added.update_many(layout)
        assert_close(added.value(), expected[-1], 1e-12)


@every_method
@of_rules(RULES)
def test_arrays_without_elements_are_averaged_to_the_like(rule, method):
    average = TailAverage(rule)
    take(average, ROW, np.ones((40, 2, 0)), method)
    assert average.count == 40
    assert average.value().shape == (2, 0)


# NaN and infinities


@every_method
@of_rules([*RULES, AnytimeWindow(1), Exponential(1)])
@of_bad_samples
def test_nan_and_infinity_last_as_long_as_they_have_a_weight(rule, kind, bad, method):
    """And no longer: an anytime window is clean again once the bad block has left."""
    xs = kind.draw(180)
    xs[[3, 47, 100]] = bad
    expected = averages(weight_matrix(rule, 180), xs)
    average = TailAverage(rule)
    size = {"update": 1, "update_many": 5, "scan": 45}[method]
    for start in range(0, 180, size):
        got = take(average, kind, xs[start : start + size], method)
        wanted = expected[start : start + size]
        assert_close(got, wanted if method == "scan" else wanted[-1], 1e-12)
    if isinstance(rule, AnytimeWindow) and rule.size(180) <= 60:
        assert np.isfinite(average.value()).all()


@of_rules([*RULES, Exponential(1)])
def test_a_bad_sample_lasts_as_long_in_a_chunk_after_single_ones(rule, without_numba):
    for single in range(2, 10):
        xs = FLOAT.draw(20)
        xs[single - 2] = math.nan
        expected = averages(weight_matrix(rule, 20), xs)
        average = TailAverage(rule)
        take(average, FLOAT, xs[:single], "update")
        added = average.copy()
        added.update_many(xs[single:])
        assert_close(average.scan(xs[single:]), expected[single:], 1e-12)
        assert_close(added.value(), expected[-1], 1e-12)


@of_kinds("float", "float64 (3,)", "float32 (3,)")
@of_rules([AnytimeWindow(10), AnytimeWindow(500, 4), AnytimeWindow(CAPPED), ExactWindow(10)])
def test_a_window_is_clean_after_a_bad_sample_in_one_long_chunk(rule, kind):
    xs = kind.draw(3000)
    xs.reshape(3000, -1)[[5, 1000], 0] = math.nan, math.inf
    scanned, added = TailAverage(rule), TailAverage(rule)
    values = scanned.scan(xs)
    added.update_many(xs)
    clean = np.where(np.isfinite(xs), xs, 1.5)
    expected = TailAverage(rule).scan(clean)[-1000:]
    assert_close(values[-1000:], expected, kind.rtol)
    assert_close(added.value(), expected[-1], kind.rtol)


@of_rules(RULES)
def test_infinities_of_both_signs_make_a_nan_while_both_have_a_weight(rule):
    xs = FLOAT.draw(300)
    xs[[20, 22]] = math.inf, -math.inf
    with np.errstate(invalid="ignore"):
        expected = averages(weight_matrix(rule, 300), xs)
        average = TailAverage(rule)
        values = []
        for x in xs.tolist():
            average.update(x)
            values.append(average.value())
        assert_close(values, expected, 1e-12)
        assert_close(TailAverage(rule).scan(xs), expected, 1e-12)


@of_pairs([(rule, name) for rule, name in CASES if "int" not in name])
def test_omit_leaves_samples_with_nan_out_whole_and_does_not_count_them(rule, kind):
    xs = kind.draw(200)
    rng = np.random.default_rng(1)
    kept = rng.random(200) < 0.7
    kept[:4] = False, False, False, True
    xs.reshape(200, -1)[~kept, -1] = math.nan
    expected = TailAverage(rule).scan(xs[kept])
    one, many, scanned = (TailAverage(rule, nan_policy="omit") for _ in range(3))
    many.update_many(xs[:120])
    many.update_many(xs[120:])
    for x in kind.each(xs):
        one.update(x)
    values = np.concatenate([scanned.scan(xs[:2]), scanned.scan(xs[2:90]), scanned.scan(xs[90:])])
    for average in (one, many, scanned):
        assert average.count == kept.sum()
        assert len(average.weights()) == kept.sum()
        assert_close(average.value(), expected[-1], kind.rtol)
    assert values.shape == xs.shape
    assert np.isnan(values[:3]).all()
    assert_close(values[3:], expected[np.cumsum(kept)[3:] - 1], kind.rtol)


def test_omit_leaves_out_a_chunk_of_nothing_but_nan():
    average = TailAverage(5, nan_policy="omit")
    average.update_many([math.nan, math.nan])
    average.update(math.nan)
    assert average == TailAverage(5, nan_policy="omit")
    average.update(2.0)
    average.update_many([math.nan])
    assert average.scan([math.nan, 4.0, math.nan]).tolist() == [2.0, 3.0, 3.0]
    assert average.scan([math.nan]).tolist() == [3.0]
    assert average.count == 2


@of_rules(RULES)
@pytest.mark.parametrize("policy", ["raise", "omit"])
def test_infinities_are_data_under_every_policy(rule, policy):
    average = TailAverage(rule, nan_policy=policy)
    average.update_many([1.0, math.inf])
    average.update(-2.0)
    assert average.count == 3


@of_rules(RULES)
@pytest.mark.parametrize("policy", ["raise", "omit"])
def test_a_policy_changes_nothing_where_there_is_no_nan(rule, policy):
    xs = ROW.draw(300)
    average, _ = one_by_one(rule, ROW, 300)
    guarded = TailAverage(rule, nan_policy=policy)
    for x in xs[:200]:
        guarded.update(x)
    guarded.update_many(xs[200:])
    assert_close(guarded.value(), average.value(), 1e-12)


@every_method
@pytest.mark.parametrize("window", [4, 0.3, Growing(0.5, at_most=6)], ids=short)
def test_exact_window_is_exact_again_after_a_huge_sample_has_left(window, method):
    average = TailAverage(ExactWindow(window))
    take(average, FLOAT, np.array([1e16, 1.0, -1e16, 3.0] + [0.1] * 60), method)
    assert average.value() == pytest.approx(0.1, rel=2e-16)
    values = TailAverage(ExactWindow(4)).scan([1e16, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert values[-2:].tolist() == [2.5, 3.5]


@pytest.mark.parametrize("t", [70_000, 100_000, 200_000])
def test_weights_too_small_for_a_float_are_left_out_of_the_profile(t):
    average = TailAverage(Exponential(100))
    average.update_many(np.zeros(t))
    profile = average.profile()
    assert profile.effective_size == pytest.approx(100, rel=1e-9)
    assert profile.mean_age == pytest.approx(49.5, rel=1e-9)
    assert average.weights().sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("rule", [AnytimeWindow(10), AnytimeWindow(0.25), Exponential(0.25)])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_sample_of_whole_weight_is_so_many_equal_samples(rule, shape):
    rng = np.random.default_rng(0)
    average, one_by_one = TailAverage(rule), TailAverage(rule)
    for x, weight in zip(rng.normal(size=(30, *shape)), rng.integers(1, 40, 30), strict=True):
        average.update_many(np.broadcast_to(x, (weight, *shape)))
        for _ in range(weight):
            one_by_one.update(x if shape else float(x))
        assert average.count == one_by_one.count
        np.testing.assert_allclose(average.value(), one_by_one.value(), rtol=1e-12, atol=1e-14)
