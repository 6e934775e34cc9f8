"""AnyTail: every window of its averages against dense weights."""

import math
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailavg import AnyTail, Fixed, Growing, Profile, TailAverage
from tailavg.core.windows import as_window
from tailavg.numpy import fallback
from tests.support.any_tails import TAILS, Tails, every_tail
from tests.support.cases import (
    EVERY_KIND,
    FLOAT,
    KINDS,
    ROW,
    assert_close,
    chunks,
    every_method,
    of_bad_samples,
    of_kinds,
    of_pairs,
    of_rules,
    take,
)
from tests.support.effort import some
from tests.support.model import Window, averages
from tests.support.schedule import advance

STEPS = 100


def windows_of(rule):
    """Windows that can be read at every step."""
    least = math.ceil(rule.shortest * STEPS)
    fractions = [rule.shortest, (1 + 2 * rule.shortest) / 3, 0.95, 1.0]
    return [*fractions, least, 2 * least, 10 * STEPS, Growing(1.0, at_most=least + 3)]


@cache
def weight_matrices(rule):
    """For each window, row t - 1 has the weights at step t."""
    tails, windows = Tails(rule), windows_of(rule)
    matrices = np.zeros((len(windows), STEPS, STEPS))
    for t in range(1, STEPS + 1):
        tails.add()
        for matrix, window in zip(matrices, windows, strict=True):
            matrix[t - 1, :t] = tails.of(window)
    return list(zip(windows, matrices, strict=True))


# The averages


@every_tail
def test_weights_and_profiles_are_those_of_the_model(rule):
    average, matrices = TailAverage(rule), weight_matrices(rule)
    for t in range(1, STEPS + 1):
        average.update(1.0)
        if t > 40 and t % 3:
            continue
        for window, matrix in matrices:
            alpha = matrix[t - 1, :t]
            np.testing.assert_allclose(average.weights(window), alpha, rtol=1e-9, atol=1e-15)
            got, ages = average.profile(window), t - 1 - np.arange(t)
            assert isinstance(got, Profile)
            assert math.isclose(got.size, Window.of(as_window(window)).size(t), rel_tol=1e-15)
            assert math.isclose(got.effective_size, 1 / (alpha @ alpha), rel_tol=1e-9)
            assert math.isclose(got.mean_age, alpha @ ages, rel_tol=1e-9, abs_tol=1e-9)
            assert got.oldest_age == ages[np.argmax(alpha > 0)]


@every_method
@of_pairs(
    [*((rule, "float") for rule in TAILS), *((AnyTail(6, 0.5), name) for name in list(KINDS)[1:])]
)
def test_every_window_is_the_average_by_its_weights(rule, kind, method):
    xs, average, matrices = kind.draw(STEPS), TailAverage(rule), weight_matrices(rule)
    windows = [window for window, _ in matrices]
    expected = [averages(matrix, xs) for _, matrix in matrices]
    take(average, kind, xs[:1], "update", 1.0)  # what a sample is, its first one tells
    for start, end in pairwise([1, 2, 5, 29, 30, 31, 88, STEPS]):
        if method == "scan":
            got = average.scan(xs[start:end], windows)
            assert got.shape == (len(windows), end - start, *(kind.shape or ()))
            assert got.dtype == kind.held
        else:
            take(average, kind, xs[start:end], method, windows[0])
            got = np.array([average.value(window) for window in windows])[:, None]
        for values, right in zip(got, expected, strict=True):
            assert_close(values, right[end - values.shape[0] : end], kind.rtol)
    for window in windows:
        value = average.value(window)
        if kind.shape is None:
            assert type(value) is (complex if kind.dtype == "complex128" else float)
        else:
            assert isinstance(value, np.ndarray)
            assert (value.shape, value.dtype) == (kind.shape, kind.held)
    assert average.dtype == kind.held
    assert average.count == STEPS


@every_tail
@settings(max_examples=5)
@given(parts=chunks(500), kind=st.sampled_from(["float", "float32 (3,)", "complex128 (2, 3)"]))
def test_any_chunks_by_any_method_give_the_same_averages(rule, kind, parts):
    kind, window = EVERY_KIND[kind], (1 + rule.shortest) / 2
    xs = kind.draw(500)
    values = TailAverage(rule).scan(xs, window)
    average = TailAverage(rule)
    for start, end, method in parts:
        got = take(average, kind, xs[start:end], method, window)
        assert_close(got, values[start:end] if method == "scan" else values[end - 1], kind.rtol)
        assert average.count == end
        assert_close(average.value(window), values[end - 1], kind.rtol)
    assert average.state_dict()["starts"] == advance(rule, [0], 500)


@settings(max_examples=some(20, 60))
@given(
    st.integers(6, 25),
    st.one_of(st.floats(0.005, 0.99), st.sampled_from([0.1, 0.25, 1 / 3, 0.5])),
    st.sampled_from([FLOAT, ROW]),
    chunks(250),
    st.data(),
)
def test_any_tail_in_any_chunks_follows_the_model(m, shortest, kind, parts, data):
    rule, xs = AnyTail(m, shortest), kind.draw(250)
    counts = st.integers(math.ceil(250 * shortest), 300)
    window = data.draw(st.one_of(st.floats(shortest, 0.99), st.just(1.0), counts))
    tails, expected = Tails(rule), []
    for t in range(1, 251):
        tails.add()
        expected.append(np.tensordot(tails.of(window), xs[:t], 1))
    average = TailAverage(rule)
    for start, end, method in parts:
        got = take(average, kind, xs[start:end], method, window)
        assert_close(got, expected[start:end] if method == "scan" else expected[end - 1], 1e-12)


@of_kinds("float", "float32 (3,)", "complex128 (2, 3)")
@of_rules([AnyTail(), AnyTail(6, 0.4)])
def test_long_chunks_give_the_same_averages(rule, kind, scanner, monkeypatch):
    """Chunks that span many turns and folds, and more numbers than are taken at once."""
    monkeypatch.setattr(fallback, "CHUNK", 600)
    steps = 5000
    xs, windows = kind.draw(steps), [rule.shortest, 0.7, 1.0, steps // 2]
    one, values = TailAverage(rule), {}
    marks = {1, 776, 777, 778, 3001, 4000, 4999, steps}
    for t, x in enumerate(kind.each(xs), start=1):
        one.update(x)
        if t in marks:
            values[t] = [one.value(window) for window in windows]
            alpha = one.weights(windows[1])
            assert_close(values[t][1], np.tensordot(alpha, xs[:t].astype(complex), 1), kind.rtol)
    for cuts in ([], [1, 777, 3001]):
        scanned, added = TailAverage(rule), TailAverage(rule)
        got = []
        for start, end in pairwise([0, *cuts, steps]):
            got.append(scanned.scan(xs[start:end], windows))
            added.update_many(xs[start:end])
            for i, window in enumerate(windows):
                assert_close(added.value(window), values[end][i], kind.rtol)
                assert_close(scanned.value(window), values[end][i], kind.rtol)
        got = np.concatenate(got, axis=1)
        for t in marks:
            assert_close(got[:, t - 1], values[t], kind.rtol)
        assert scanned._clock.blocks == added._clock.blocks


@pytest.mark.parametrize("kind", ["float", "float32 (3,)"])
def test_without_numba_scans_and_additions_leave_the_same_averages(kind, without_numba):
    xs = EVERY_KIND[kind].draw(9000)
    scanned, added = TailAverage(AnyTail()), TailAverage(AnyTail())
    for part in np.split(xs, [1, 777, 3001]):
        scanned.scan(part, 0.3)
        added.update_many(part)
        for window in (0.1, 0.3, 1.0):
            assert_close(scanned.value(window), added.value(window), EVERY_KIND[kind].rtol)


def test_a_million_samples_in_single_precision_keep_five_digits():
    """Each merge rounds the mean, and the oldest samples are merged again and again."""
    random = np.random.default_rng(0)
    xs = (1 + random.random((10**6, 2))).astype(np.float32)
    single, double = TailAverage(AnyTail(6)), TailAverage(AnyTail(6), dtype="float64")
    for start in range(0, 10**6, 2500):
        single.update_many(xs[start : start + 2500])
    double.update_many(xs)
    for window in (0.1, 0.35, 1.0, 500_000):
        assert_close(single.value(window), double.value(window), 4e-7)


@every_method
def test_sums_of_many_large_numbers_do_not_overflow(method):
    xs = np.full((40_000, 2), 1e35, np.float32)
    average = TailAverage(AnyTail(6, 0.5))
    got = take(average, KINDS["float32 (3,)"], xs, method, 0.6)
    assert_close(got, 1e35, 2e-6)
    assert_close(average.value(0.6), 1e35, 2e-6)


@every_method
def test_samples_may_have_many_elements_or_none(method):
    for width in (0, 1, 20_000):
        xs = 1 + np.random.default_rng(0).random((30, width))
        average = TailAverage(AnyTail(6))
        got = take(average, ROW, xs, method, 0.4)
        assert average.value(0.4).shape == (width,)
        expected = average.weights(0.4) @ xs
        assert_close(got[-1] if method == "scan" else got, expected, 1e-12)
        assert_close(average.value(1.0), xs.mean(axis=0), 1e-12)


def test_a_stream_of_one_number_has_that_average():
    average = TailAverage(AnyTail(7, 0.2))
    for _ in range(3000):
        average.update(0.1)
        assert math.isclose(average.value(0.2), 0.1, rel_tol=1e-14)
        assert math.isclose(average.value(1.0), 0.1, rel_tol=1e-14)


@pytest.mark.parametrize("kind", ["float", "float32 (3,)", "0-d float64"])
def test_scan_with_one_window_is_that_row_of_a_scan_with_several(kind):
    kind = EVERY_KIND[kind]
    rule, xs = AnyTail(8, 0.2), kind.draw(300)
    windows = [0.2, 0.5, 1.0, 70, Fixed(90), Growing(0.9, at_most=64)]
    for chosen in (windows, tuple(windows), windows[:1]):
        several = TailAverage(rule)
        first = several.scan(xs[:100], chosen)
        second = several.scan(xs[100:], chosen)
        assert first.shape[:2] == (len(chosen), 100)
        for i, window in enumerate(chosen):
            one = TailAverage(rule)
            assert np.array_equal(one.scan(xs[:100], window), first[i])
            assert np.array_equal(one.scan(xs[100:], window), second[i])
            assert one == several


def test_values_and_states_are_not_shared_with_the_caller():
    xs = ROW.draw(50)
    kept, average = xs.copy(), TailAverage(AnyTail(6))
    average.update_many(xs)
    before = [average.value(window) for window in (0.1, 1.0)]
    xs[...] = 0
    average.value(0.1)[...] = 5
    average.weights(0.1)[...] = 5
    state = average.state_dict()
    state["blocks"][...] = 7
    state["starts"].clear()
    state["partial"][...] = 7
    scanned = TailAverage(AnyTail(6))
    scanned.scan(kept, [0.1, 1.0])[...] = 3
    for run in (average, scanned):
        assert_close([run.value(window) for window in (0.1, 1.0)], before, 1e-15)


# NaN and infinities


@every_method
@of_bad_samples
@of_rules(TAILS[:2])
def test_nan_and_infinity_last_as_long_as_their_block_has_a_weight(rule, kind, bad, method):
    xs, matrices = kind.draw(STEPS), weight_matrices(rule)
    xs[[3, 20, 28]] = bad
    windows = [window for window, _ in matrices]
    expected = np.array([averages(matrix, xs) for _, matrix in matrices])
    average = TailAverage(rule)
    for start in range(0, STEPS, 50 if method == "scan" else 1):
        if method == "scan":
            got = average.scan(xs[start : start + 50], windows)
            assert_close(got, expected[:, start : start + 50], 1e-12)
        else:
            take(average, kind, xs[start : start + 1], method, 1.0)
            got = [average.value(window) for window in windows]
            assert_close(got, expected[:, start], 1e-12)
    clean = np.isfinite(expected[:, -1].reshape(len(windows), -1)).all(axis=1)
    assert clean[0]  # the shortest window
    assert not clean[windows.index(1.0)]
    assert not np.isnan(average.weights(0.5)).any()


def test_a_window_is_clean_as_soon_as_it_does_not_touch_the_bad_block():
    rule = AnyTail(10)
    average = TailAverage(rule)
    average.update_many(np.ones(5000))
    average.update(math.nan)
    assert math.isnan(average.value(0.1))
    cleaned, starts = {}, advance(rule, [0], 5001)
    for t in range(5002, 12_000):
        average.update(1.0)
        starts = advance(rule, starts, t)
        after = next(start for start in [*starts, t] if start > 5000)
        for window in (0.1, 0.2, 0.3):
            touches = t - after < window * t * (1 - 1e-12)
            assert math.isnan(average.value(window)) is touches, (t, window)
            if not touches:
                cleaned.setdefault(window, t)
    assert cleaned[0.1] < cleaned[0.2] < cleaned[0.3]
    assert cleaned[0.1] < 1.3 * 5000


def test_omit_leaves_samples_with_nan_out_whole_and_does_not_count_them():
    for kind in (FLOAT, ROW, KINDS["float32 (3,)"], KINDS["complex"]):
        rule, xs = AnyTail(6, 0.2), kind.draw(300)
        kept = np.random.default_rng(1).random(300) < 0.7
        kept[:4] = False, False, False, True
        xs.reshape(300, -1)[~kept, -1] = math.nan
        windows = [0.2, 0.6, 1.0, 300]
        expected = TailAverage(rule).scan(xs[kept], windows)
        one, many, scanned = (TailAverage(rule, nan_policy="omit") for _ in range(3))
        many.update_many(xs[:120])
        many.update_many(xs[120:])
        for x in kind.each(xs):
            one.update(x)
        parts = [scanned.scan(xs[a:b], windows) for a, b in pairwise([0, 2, 90, 300])]
        values = np.concatenate(parts, axis=1)
        assert values.shape == (4, *xs.shape)
        assert np.isnan(values[:, :3]).all()
        assert_close(values[:, 3:], expected[:, np.cumsum(kept)[3:] - 1], kind.rtol)
        assert_close(scanned.scan(xs[:2], 0.6), values[[1, 1], -1], kind.rtol)
        assert scanned.scan(xs[:2], windows).shape == (4, 2, *xs.shape[1:])
        for average in (one, many, scanned):
            assert average.count == kept.sum()
            assert len(average.weights(0.6)) == kept.sum()
            for i, window in enumerate(windows):
                assert_close(average.value(window), expected[i, -1], kind.rtol)


def test_a_count_is_long_enough_if_it_is_for_the_samples_that_are_counted():
    average = TailAverage(AnyTail(), nan_policy="omit")
    average.update_many(range(95))
    got = average.scan([1.0] + [math.nan] * 9, 10)
    assert average.count == 96
    assert_close(got, average.value(10), 1e-12)


def test_raise_refuses_a_nan_and_changes_nothing():
    average = TailAverage(AnyTail(6), nan_policy="raise")
    average.update_many(range(40))
    before = average.copy()
    for call in (
        lambda: average.update(math.nan),
        lambda: average.update_many([1.0, math.nan]),
        lambda: average.scan([1.0, math.nan], 0.5),
        lambda: average.scan([1.0, math.nan], [0.5, 1.0]),
    ):
        with pytest.raises(ValueError, match="NaN"):
            call()
        assert average == before
    assert average.scan([2.0, math.inf], [0.1, 1.0]).shape == (2, 2)


@pytest.mark.parametrize("policy", ["raise", "omit"])
@pytest.mark.parametrize("kind", [FLOAT, ROW], ids=["float", "array"])
def test_a_policy_changes_nothing_where_there_is_no_nan(kind, policy):
    xs, rule = kind.draw(300), AnyTail(7, 0.3)
    plain, guarded = TailAverage(rule), TailAverage(rule, nan_policy=policy)
    for average in (plain, guarded):
        take(average, kind, xs[:200], "update", 1.0)
        average.update_many(xs[200:])
    assert np.array_equal(plain.value(0.4), guarded.value(0.4))


# Extreme tails


@pytest.mark.parametrize("shortest", [1e-6, 1e-5 / 3, 1 - 2.0**-53, 1 - 1e-9])
def test_the_most_extreme_tails_average_all_the_same(shortest):
    average = TailAverage(AnyTail(6, shortest))
    average.update_many(range(100))
    assert math.isclose(average.value(1.0), 49.5)
    assert average.value(shortest) >= 49.4
    assert math.isclose(average.weights(shortest).sum(), 1)
