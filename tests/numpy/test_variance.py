"""`variance=True`: against dense weights in 80-bit floats, and what it must not change."""

import copy
import json
import math
import pickle
import sys
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from tailavg import (
    AnyTail,
    AnytimeWindow,
    Decay,
    ExactWindow,
    Exponential,
    Freshest,
    Growing,
    RawTail,
    TailAverage,
    TailAverages,
)
from tailavg.numpy import kernel
from tests.support.any_tails import Tails
from tests.support.cases import (
    EVERY_KIND,
    EVERY_RULE,
    FEW_RULES,
    FLOAT,
    METHODS,
    MORE_RULES,
    ROW,
    RULES,
    assert_close,
    bits,
    chunks,
    every_method,
    of_bad_samples,
    of_kinds,
    of_pairs,
    of_rules,
    rules,
    take,
    ways_for,
)
from tests.support.corrupt_states import mutants, within
from tests.support.effort import exhaustive, some
from tests.support.interrupts import interrupted
from tests.support.model import freshest, weight_matrix
from tests.support.processes import run
from tests.support.programs import blocks

STEPS = 300
REAL = [name for name in EVERY_KIND if "complex" not in name and name != "float64 (8, 16)"]
TINY = [
    *map(AnytimeWindow, [2, 3]),
    *map(Exponential, [2, 3]),
    *map(ExactWindow, [1, 2, 3]),
    AnytimeWindow(1e-19),
    Exponential(1e-6),
    AnytimeWindow(Growing(0.0015, at_most=3), 4),
]
LOOPS = [
    AnytimeWindow(60),  # blocks of more than SMALL samples
    AnytimeWindow(600),  # blocks of more than FOLD samples, by a table
    AnytimeWindow(520, 2),
    AnytimeWindow(0.002, 4),
]
SOME_RULES = [AnytimeWindow(10), AnytimeWindow(400, 2), AnytimeWindow(0.3), Exponential(0.3)]
PAIRS = [
    *((rule, name) for rule in RULES for name in ("float", "float32 (3,)")),
    *((rule, name) for rule in SOME_RULES[2:] for name in REAL[1:] if name != "float32 (3,)"),
    *((rule, "float") for rule in MORE_RULES + TINY + LOOPS),
]
TAIL = AnyTail(6)
READINGS = [0.1, 0.3, 1.0, Freshest(0.25), Decay(0.5, "cosine")]
STATISTICS = [("variance", 0), ("variance", 1), ("std", 0), ("std", 1)]
WAYS = ["numpy", "plain", "compiled"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Scan with NumPy alone, with plain loops, and with compiled ones."""
    if request.param == "compiled":
        pytest.importorskip("numba", reason="numba is not installed: nothing can be compiled")
    monkeypatch.setattr(kernel, "installed", lambda: request.param != "numpy")
    for name in ("LONG", "SHORT"):
        monkeypatch.setattr(kernel, name, 0 if request.param == "compiled" else 10**9)
    return request.param


loops_only = pytest.mark.parametrize("way", ["plain", "compiled"], indirect=True)


def assert_near(got, expected, kind):
    """Near for samples of about 1 to 3, or 100 to 300; the same NaNs."""
    few = kind.held == "float32"
    np.testing.assert_allclose(got, expected, rtol=5e-5 if few else 1e-10, atol=2e-6 * few)


def spreads(matrix, xs, ddof=0):
    """The definition, for each row of weights; a sample without weight does not count."""
    used = matrix > 0
    alpha = matrix.astype(np.longdouble)
    alpha /= alpha.sum(axis=1, keepdims=True)
    out = []
    for column in xs.reshape(len(xs), -1).T.astype(np.longdouble):
        x = np.where(used, column, 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            apart = np.where(used, x - (alpha * x).sum(axis=1, keepdims=True), 0)
            variance = (alpha * apart**2).sum(axis=1)
            out.append(variance / (1 - (alpha**2).sum(axis=1)) if ddof else variance)
    return np.transpose(out).reshape(len(matrix), *xs.shape[1:]).astype(np.float64)


def spread_by(name, matrix, xs, ddof):
    variances = spreads(matrix, xs, ddof)
    return np.sqrt(variances) if name == "std" else variances


def tail_weights(readings, steps):
    """The weights of an `AnyTail` at each step, for each reading, from lists of samples."""
    tails, out = Tails(TAIL), np.zeros((len(readings), steps, steps))
    for t in range(1, steps + 1):
        tails.add()
        for matrix, reading in zip(out, readings, strict=True):
            if isinstance(reading, Freshest):
                blocks = [len(block) for block in tails.blocks]
                weights = freshest(blocks, min(t, max(1.0, reading.window.c * t)))
                for block, weight in zip(tails.blocks, weights, strict=True):
                    matrix[t - 1, block] = weight / len(block)
            elif isinstance(reading, Decay):
                average = TailAverage(TAIL)
                average.update_many(np.zeros(t))
                matrix[t - 1, :t] = average.weights(reading)
            else:
                matrix[t - 1, :t] = tails.of(reading)
    return out


def spread_average(rule, **options):
    return TailAverage(rule, variance=True, **options)


def one_by_one(average, xs, *window, of="variance", ddof=1, every=1):
    """Update with each sample, and read after every so many."""
    found = []
    for i, x in enumerate(xs):
        average.update(x)
        if i % every == 0:
            found.append(getattr(average, of)(*window, ddof=ddof))
    return np.array(found)


def scanned(average, xs, *window, **how):
    cuts = [cut for cut in (1, 2, 250, 600, 1401) if cut < len(xs)]
    return np.concatenate([average.scan(part, *window, **how) for part in np.split(xs, cuts)])


# The definition


@of_pairs(PAIRS)
def test_is_the_definition(rule, kind):
    xs, average, found = kind.draw(STEPS), spread_average(rule), []
    for x in kind.each(xs):
        average.update(x)
        found.append(average.variance())
    matrix = weight_matrix(rule, STEPS)
    assert_near(np.array(found), spreads(matrix, xs, 1), kind)
    for name, ddof in STATISTICS:
        value, mean = getattr(average, name)(ddof=ddof), average.value()
        assert_near(value, spread_by(name, matrix[-1:], xs, ddof)[0], kind)
        assert type(value) is type(mean)
        assert np.asarray(value).dtype == np.asarray(mean).dtype


@of_pairs([*PAIRS[: 2 * len(RULES)], *((rule, "float") for rule in TINY[:4] + LOOPS)])
def test_a_scan_is_the_definition(rule, kind, way):
    xs = kind.draw(STEPS)
    for name, ddof in STATISTICS[1:3]:
        got = scanned(spread_average(rule), xs, of=name, ddof=ddof)
        assert_near(got, spread_by(name, weight_matrix(rule, STEPS), xs, ddof), kind)


def test_every_tail_of_an_any_tail(way):
    xs, steps = FLOAT.draw(400), 400
    single, found = spread_average(TAIL), []
    for x in xs.tolist():
        single.update(x)
        found.append([single.variance(reading) for reading in READINGS])
    scans = spread_average(TAIL).scan(xs, READINGS, of="variance")
    for i, matrix in enumerate(tail_weights(READINGS, steps)):
        expected = spreads(matrix, xs, 1)
        assert_close(np.array(found)[:, i], expected, 1e-8)
        assert_close(scans[i], expected, 1e-8)


@settings(max_examples=some(40, 400))
@given(rule=rules, parts=chunks(400))
def test_in_any_chunks_by_any_method(rule, parts):
    """The means are those without variances, in every method and mixture."""
    xs = FLOAT.draw(400)
    plain, average = TailAverage(rule), spread_average(rule)
    for start, end, method in parts:
        expected = take(plain, FLOAT, xs[start:end], method)
        got = take(average, FLOAT, xs[start:end], method)
        assert_close(got, expected, 1e-12)
        assert_close(average.value(), plain.value(), 1e-12)
        matrix = weight_matrix(rule, 400)[end - 1 : end]
        assert_close(average.variance(), spreads(matrix, xs, 1)[0], 1e-8)
    assert_close(average.standard_error(), plain.standard_error(), 1e-9)


@of_kinds("0-d float32", "float16 (3,)", "float32 (3,)", "float64 (3,)", "uint8 (2, 2)")
@every_method
@of_rules([*FEW_RULES, AnytimeWindow(400, 2), TAIL])
def test_means_are_bit_identical(rule, kind, method):
    """But `update_many` adds sums of many samples only without variances."""
    window = [0.3] if rule is TAIL else []
    xs, plain, average = kind.draw(900), TailAverage(rule), spread_average(rule)
    for part in np.split(xs, [1, 2, 250, 266]):
        taken = [take(one, kind, part, method, *window) for one in (plain, average)]
        values = [one.value(*window) for one in (plain, average)]
        for one, other in (taken, values):
            if method == "update_many":
                assert_near(one, other, kind)
            else:
                assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@of_rules([*RULES, TAIL])
def test_update_many_takes_samples_of_every_dtype(rule):
    """Deviations are taken in the dtype of the average, not in that of the samples."""
    window = [0.3] if rule is TAIL else []
    for name in REAL:
        kind = EVERY_KIND[name]
        single, many = spread_average(rule), spread_average(rule)
        for part in np.split(kind.draw(700), [5, 300, 310]):
            for x in kind.each(part):
                single.update(x)
            many.update_many(part)
            assert_near(many.variance(*window), single.variance(*window), kind)


# Loops


@of_pairs([*PAIRS[: 2 * len(RULES)], *((rule, "float") for rule in MORE_RULES[1:5] + TINY + LOOPS)])
@loops_only
def test_loops_leave_the_bits_of_updates(rule, kind, way):
    xs = kind.draw(1500 if way == "compiled" else 620)
    single = spread_average(rule)
    expected = one_by_one(single, kind.each(xs), every=7)
    parts, whole = spread_average(rule), spread_average(rule)
    got = scanned(parts, xs, of="variance")
    assert got.tobytes() == whole.scan(xs, of="variance").tobytes()
    assert_near(got[::7], expected, kind)
    averages = spread_average(rule)
    scanned(averages, xs)
    assert bits(parts) == bits(whole) == bits(averages) == bits(single)


@of_rules([*RULES[:8], *TINY[:5]])
def test_array_operations_leave_nearly_the_same_state(rule, without_numba):
    xs = FLOAT.draw(900)
    single, other = spread_average(rule), spread_average(rule)
    one_by_one(single, xs.tolist())
    scanned(other, xs, of="std")
    for one in (single, other):  # their sums may be folded at different steps
        one.update_many(xs[:300])
    assert_close(other.variance(), single.variance(), 1e-10)


@of_rules(FEW_RULES)
def test_a_scan_of_means_and_one_of_deviations_leave_the_same_state(rule, way):
    xs, states = ROW.draw(700), []
    for how in ({}, {"of": "std"}, {"of": "variance", "ddof": 0}):
        average = spread_average(rule)
        scanned(average, xs, **how)
        states.append(bits(average))
    assert states[0] == states[1] == states[2]


@of_rules([AnytimeWindow(300), Exponential(10)])
def test_read_only_samples_are_scanned(rule, compiled):
    xs = ROW.draw(400)
    expected = spread_average(rule).scan(xs, of="std")
    xs.flags.writeable = False
    np.testing.assert_array_equal(spread_average(rule).scan(xs, of="std"), expected)


# What leaves with its block


@of_rules([AnytimeWindow(10), AnytimeWindow(100, 5), AnytimeWindow(0.3), ExactWindow(10)])
@pytest.mark.parametrize("bad", [1e16, 1e300, np.inf, np.nan])
@every_method
def test_a_bad_sample_leaves_no_trace(rule, bad, method):
    for place in (40, 0):
        xs = FLOAT.draw(3000)
        averages = []
        for value in (bad, 1.5):
            xs[place] = value
            average = spread_average(rule)
            take(average, FLOAT, xs[:2000], method)
            averages.append(average)
        assert bits(averages[0]) == bits(averages[1])
        assert averages[0].variance() == averages[1].variance() > 0


@of_bad_samples
@of_rules([AnytimeWindow(10), AnytimeWindow(0.25), ExactWindow(10), Exponential(10)])
def test_bad_samples_make_it_nan_while_they_are_in_the_window(rule, kind, bad, way):
    xs = kind.draw(300)
    xs[[3, 100]] = bad
    matrix = weight_matrix(rule, 300)
    expected = spreads(matrix, xs)
    found = one_by_one(spread_average(rule), kind.each(xs), ddof=0)
    scan = scanned(spread_average(rule), xs, of="variance", ddof=0)
    if isinstance(rule, Exponential):  # it forgets nothing altogether
        expected[3:] = np.nan
    assert_close(found, expected, 1e-9)
    assert_close(scan, expected, 1e-9)


def test_nan_policies():
    xs = FLOAT.draw(500)
    holes = xs.copy()
    holes[::7] = np.nan
    for rule in FEW_RULES:
        clean, average = spread_average(rule), spread_average(rule, nan_policy="omit")
        expected = clean.scan(holes[np.isfinite(holes)], of="std")
        got = average.scan(holes, of="std")
        filled = np.concatenate([[np.nan], expected])[np.cumsum(np.isfinite(holes))]
        np.testing.assert_array_equal(got, filled)
        np.testing.assert_array_equal(average.scan([np.nan], of="std"), [average.std()])
        for x in holes.tolist():
            average.update(x)
            if x == x:
                clean.update(x)
        assert average.variance() == clean.variance()
        strict = spread_average(rule, nan_policy="raise")
        strict.update_many(xs[:30])
        before = strict.copy()
        for call in (strict.update, lambda x: strict.scan([1.0, x], of="std")):  # noqa: B023
            with pytest.raises(ValueError, match="nan_policy='raise'"):
                call(np.nan)
        assert strict == before


# Numerics


CONSTANTS = [0.1, -0.1, 1e-200, 1e150, 1 / 3, 33_000_001.1, 5e-324, 0.0]
CONSTANT_RULES = [*RULES, AnytimeWindow(3), Exponential(3), AnytimeWindow(700), TAIL]


@of_rules(CONSTANT_RULES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_constants_have_no_variance_at_all(rule, dtype):
    window = [0.3] if rule is TAIL else []
    row = np.array(CONSTANTS if dtype == "float64" else [3.3e7, 0.1, -1e-3, 1 / 3, 1e15], dtype)
    single, many = spread_average(rule), spread_average(rule)
    for _ in range(1000):
        single.update(row)
        assert not single.variance(*window, ddof=0).any()
    for size in (1, 6, 293, 700, 1, 999):
        many.update_many(np.tile(row, (size, 1)))
        assert not many.std(*window, ddof=0).any()


@of_rules(CONSTANT_RULES)
def test_scans_of_constants_have_no_variance_at_all(rule, way):
    window = [0.3] if rule is TAIL else []
    for constant in CONSTANTS if way == "compiled" else CONSTANTS[:2]:
        xs = np.full(3000 if way == "compiled" else 900, constant)
        assert not spread_average(rule).scan(xs, *window, of="variance", ddof=0).any()


LONG = [AnytimeWindow(0.25), AnytimeWindow(10**5, 5), Exponential(0.25), Exponential(10**5)]


def exact_std(average, xs, *window):
    weights = average.weights(*window)[:, None]
    return spread_by("std", weights.T, xs - 1e3, 1)[0]


@of_rules([*LONG, AnyTail()])
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-5), ("float64", 1e-11)])
def test_a_million_samples_keep_five_or_eleven_digits(rule, dtype, rtol):
    """Samples with the mean 1,000 and the deviation 1."""
    window = [0.5] if isinstance(rule, AnyTail) else []
    xs = np.random.default_rng(0).normal(1e3, 1, (10**6, 1)).astype(dtype)
    scans, many, single = (spread_average(rule) for _ in range(3))
    for part in np.split(xs, range(100_003, 10**6, 100_003)):
        found = scans.scan(part, *window, of="std")
        many.update_many(part)
    single.update_many(xs[:-3000])
    for x in xs[-3000:]:
        single.update(x)
    stds = [found[-1], *(one.std(*window) for one in (scans, many, single))]
    assert_close(stds, [exact_std(scans, xs, *window)] * 4, rtol)


@pytest.mark.parametrize(("dtype", "least"), [("float32", 1.53e-5), ("float64", 2.85e-14)])
def test_deviations_that_rounding_could_cause_read_as_0(dtype, least):
    for rule in (AnytimeWindow(10), Exponential(10)):
        for factor in (0.9, 1.5):
            average = spread_average(rule, dtype=dtype)
            average.update_many(100 * (1 + factor * least * np.resize([1, -1], 50)))
            assert (average.std(ddof=0) > 0) == (factor > 1)


@exhaustive("a million updates of each rule, one by one")
@of_rules(LONG)
def test_float32_keeps_five_digits_over_a_million_updates(rule):
    xs = np.random.default_rng(0).normal(1e3, 1, (10**6, 1)).astype(np.float32)
    average = spread_average(rule)
    for x in xs:
        average.update(x)
    assert_close(average.std(), exact_std(average, xs), 1e-5)


@of_rules([*SOME_RULES, Exponential(100), RawTail(0.5, total=3000)])
@pytest.mark.parametrize("offset", [1e6, 1e9])
def test_a_small_deviation_beside_a_large_offset(rule, offset):
    xs = offset + np.random.default_rng(1).normal(size=1000)
    matrix = weight_matrix(rule, 1000)[[9, 99, 999]]
    expected = spread_by("std", matrix, xs, 1)
    single = one_by_one(spread_average(rule), xs.tolist(), of="std")[[9, 99, 999]]
    scan = spread_average(rule).scan(xs, of="std")[[9, 99, 999]]
    assert_close(single, expected, 3e-15 * offset)
    assert_close(scan, expected, 3e-15 * offset)


@of_rules([*SOME_RULES, Exponential(100), ExactWindow(0.3)])
def test_a_trend(rule, way):
    xs = np.linspace(0, 1e9, 700)
    expected = spread_by("std", weight_matrix(rule, 700), xs, 1)
    assert_close(spread_average(rule).scan(xs, of="std"), expected, 1e-8)
    assert_close(one_by_one(spread_average(rule), xs.tolist(), of="std"), expected, 1e-8)


@of_rules([AnytimeWindow(100, 12), Exponential(30), ExactWindow(100)])
@pytest.mark.parametrize("scale", [1e-150, 1e150])
def test_of_small_and_large_numbers(rule, scale):
    xs = np.random.default_rng(0).normal(size=400)
    average, scaled = spread_average(rule), spread_average(rule)
    average.update_many(xs)
    scaled.update_many(xs * scale)
    assert scaled.std() == pytest.approx(average.std() * scale, rel=1e-9)


# Against pandas


@pytest.mark.parametrize("window", [2, 3, 50])
@pytest.mark.parametrize("ddof", [0, 1])
def test_an_exact_window_is_that_of_pandas(window, ddof, way):
    pandas = pytest.importorskip("pandas")
    xs = np.random.default_rng(3).normal(size=500)
    series = pandas.Series(xs).rolling(window, min_periods=1)
    for of in ("var", "std"):
        expected = getattr(series, of)(ddof=ddof).to_numpy()
        name = "variance" if of == "var" else of
        got = spread_average(ExactWindow(window)).scan(xs, of=name, ddof=ddof)
        np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-12)


# Standard errors


@of_rules([*RULES, AnyTail()])
def test_standard_error_of_independent_samples(rule):
    window = [0.3] if isinstance(rule, AnyTail) else []
    for xs in (FLOAT.draw(500), ROW.draw(500)):
        average = spread_average(rule)
        average.update_many(xs)
        weights = average.weights(*window)
        expected = average.std(*window) * math.sqrt((weights**2).sum())
        assert_close(average.standard_error(*window, iid=True), expected, 1e-12)
        ratio = average.standard_error(*window) / average.standard_error(*window, iid=True)
        assert_close(average.autocorrelation_time(*window), ratio**2, 1e-12)


def autoregressive(rho, steps, columns):
    """AR(1) streams, whose autocorrelation time is (1 + ρ) / (1 - ρ)."""
    xs = np.random.default_rng(1).normal(size=(steps, columns))
    xs[1:] *= math.sqrt(1 - rho**2)
    for t in range(1, steps):
        xs[t] += rho * xs[t - 1]
    return xs


@pytest.mark.parametrize(("rho", "expected"), [(0.0, 1.0), (0.5, 3.0), (0.8, 9.0), (-0.5, 1 / 3)])
def test_autocorrelation_time_of_an_autoregressive_stream(rho, expected):
    average = spread_average(AnytimeWindow(0.5, accumulators=50))
    average.update_many(autoregressive(rho, 20_000, 100))
    assert average.autocorrelation_time().mean() == pytest.approx(expected, rel=0.05)


def test_the_program_of_the_page():
    program, said = (b.text for b in blocks("streams.md") if "autocorrelation time" in b.text)
    assert run(sys.executable, "-c", program).stdout == said


def test_autocorrelation_time_without_enough_blocks_or_deviations():
    average = spread_average(AnytimeWindow(10))
    average.update_many(np.arange(30.0))
    assert math.isnan(average.autocorrelation_time())
    constant = spread_average(AnytimeWindow(0.5, 12))
    constant.update_many(np.ones((300, 2)))
    assert np.isnan(constant.autocorrelation_time()).all()


# Bad input


def test_one_sample():
    for rule in [*EVERY_RULE, *TINY]:
        for x in (3.0, np.array([3.0, 4.0])):
            average = spread_average(rule)
            average.update(x)
            assert not np.any(average.variance(ddof=0))
            assert np.isnan(average.variance()).all()
            assert np.isnan(average.std()).all()
            assert np.isnan(average.standard_error(iid=True)).all()


@pytest.mark.parametrize("ddof", [2, -1, 0.5, 1.0, True, None, "1"])
def test_ddof_is_0_or_1(ddof):
    average, keyed = spread_average(5), TailAverages(5, variance=True)
    average.update_many([1.0, 2.0])
    keyed.update("a", 1.0)
    before = average.copy()
    for call in (
        lambda: average.variance(ddof=ddof),
        lambda: average.std(ddof=ddof),
        lambda: average.scan([1.0], of="std", ddof=ddof),
        lambda: keyed.std("a", ddof=ddof),
        lambda: keyed.scan(["a"], [1.0], of="std", ddof=ddof),
    ):
        with pytest.raises(ValueError, match="ddof: expected 0 or 1"):
            call()
    assert average == before
    assert keyed["a"].count == 1


@pytest.mark.parametrize("rule", [*FEW_RULES, TAIL])
def test_an_average_without_variances_says_how_to_have_them(rule):
    average, keyed = TailAverage(rule), TailAverages(rule)
    average.update(1.0)
    keyed.update("a", 1.0)
    before = average.copy()
    for call in (
        average.variance,
        average.std,
        lambda: average.standard_error(iid=True),
        average.autocorrelation_time,
        lambda: average.scan([1.0], 0.5 if rule is TAIL else None, of="std"),
        lambda: keyed.variance("a"),
        lambda: keyed.std("a"),
        lambda: keyed.scan(["a"], [1.0], 0.5 if rule is TAIL else None, of="variance"),
    ):
        with pytest.raises(ValueError, match=r"variance=True|no window"):
            call()
    assert average == before
    assert keyed["a"].count == 1


def test_other_errors_leave_the_average_as_it_was():
    with pytest.raises(ValueError, match=r"^variance: .*at least one sample"):
        spread_average(5).variance()
    with pytest.raises(ValueError, match=r"^std: .*at least one sample"):
        spread_average(5).std()
    average = spread_average(AnytimeWindow(5))
    average.update_many([1.0, 2.0])
    before = average.copy()
    for call in (
        lambda: average.scan([1.0], of="median"),
        lambda: average.scan([1.0], of=None),
        lambda: average.variance(0.5),
        lambda: average.std(0.5),
    ):
        with pytest.raises(ValueError, match=r"of: expected one of|has its own window"):
            call()
    assert average == before
    for window in (None, 0.01):
        tail = spread_average(TAIL)
        tail.update_many(np.ones(300))
        with pytest.raises(ValueError, match="window"):
            tail.variance(window)


@of_rules(FEW_RULES)
def test_complex_numbers_have_none(rule):
    with pytest.raises(TypeError, match="variance=True needs real numbers, got complex64"):
        spread_average(rule, dtype="complex64")
    for samples in (1j, np.ones(2, "complex64")):
        average = spread_average(rule)
        calls = average.update, lambda x: average.update_many([x]), lambda x: average.scan([x])  # noqa: B023
        for call in calls:
            with pytest.raises(TypeError, match="variance=True needs real numbers"):
                call(samples)
        assert average == spread_average(rule)
        average.update(1.0)


@of_rules([*SOME_RULES, ExactWindow(10), TAIL])
def test_a_buffer_that_is_used_again_is_copied(rule):
    window = [0.3] if rule is TAIL else []
    xs, buffer = ROW.draw(300), np.zeros(3)
    copied, reused, many = (spread_average(rule) for _ in range(3))
    for x in xs:
        buffer[...] = x
        reused.update(buffer)
        copied.update(x.copy())
    assert bits(reused) == bits(copied)
    for start, end in pairwise([0, 1, 5, 40, 300]):
        rows = xs[start:end].copy()
        many.update_many(rows)
        rows[...] = 0.0
    assert_close(many.variance(*window), copied.variance(*window), 1e-10)


def test_infinite_and_overflowing_samples_raise_no_warning():
    for rule in [*FEW_RULES, TAIL]:
        for xs in ([1.0, np.inf, -np.inf, 1e308, 1e308], [[1e308], [-1e308], [np.inf], [1.0]]):
            for method in METHODS:
                window = [0.5] if rule is TAIL and method == "scan" else []
                average = spread_average(rule)
                with np.errstate(all="raise"):
                    if method == "update":
                        for x in xs:
                            average.update(x)
                    else:
                        getattr(average, method)(xs, *window)
                    average.std(0.5 if rule is TAIL else None)
                assert average.count == len(xs)


# Other places


@of_pairs([*((rule, "float") for rule in RULES), *((rule, "float32 (3,)") for rule in SOME_RULES)])
def test_a_resumed_run_is_bit_identical(rule, kind):
    xs = kind.draw(700)
    average = spread_average(rule)
    for stop in (1, 4, 200, 257):
        for x in kind.each(xs[average.count : stop]):
            average.update(x)
        for name, way in ways_for(kind).items():
            resumed, before = way(average), bits(average)
            assert resumed == average, name
            assert bits(resumed) == before, name
            assert repr(resumed) == repr(average)
            assert "variance=True" in repr(resumed)
            same = average.copy()
            for one in (same, resumed):
                for x in kind.each(xs[stop : stop + 40]):
                    one.update(x)
                one.update_many(xs[stop + 40 : stop + 50])
                one.scan(xs[stop + 50 : stop + 60], of="std")
            assert bits(resumed) == bits(same), name
            assert bits(average) == before, name
            np.testing.assert_array_equal(resumed.variance(), same.variance())


def test_copies_are_independent():
    for rule in FEW_RULES:
        for x in (1.0, np.ones(2)):
            average = spread_average(rule)
            average.update_many([x * i for i in range(9)])
            before, other = bits(average), copy.copy(average)
            for i in range(50):
                other.update(x * i * i)
            assert bits(average) == before
            assert other != average


def test_equality_and_subclasses():
    class Named(TailAverage):
        def __init__(self, name, **options):
            super().__init__(5, **options)
            self.name = name

    named = Named("loss", variance=True)
    named.update_many([1.0, 2.0, 4.0])
    twin = named.copy()
    assert type(twin) is Named
    assert twin.name == "loss"
    assert twin.std() == named.std()
    plain = TailAverage(5)
    plain.update_many([1.0, 2.0, 4.0])
    assert plain != named
    assert TailAverage(5) != spread_average(5)
    other = spread_average(5)
    other.update_many([1.0, 2.0, 4.0])
    assert other == named
    assert {"variances", "squares"} <= set(named.state_dict())
    assert not {"variances", "squares"} & set(plain.state_dict())


@of_rules([*RULES, TAIL])
@pytest.mark.parametrize("shape", [(), (2,)], ids=["numbers", "arrays"])
def test_a_corrupt_state_is_refused(rule, shape):
    average = spread_average(rule)
    average.update_many(np.random.default_rng(0).normal(size=(40, *shape)))
    state = average.state_dict()
    assert TailAverage.from_state_dict(state) == average
    variances = np.asarray(state["variances"])
    wrong = [
        {"variances": variances[1:]},
        {"variances": variances - 1e9},
        {"variances": np.concatenate([variances, variances])},
        {"variances": np.zeros((len(variances), 7))},
        {"squares": np.zeros(7)},
        {"variances": None},
        {"squares": None},
        {"variances": "x"},
        {"squares": 1j if not shape else np.zeros(shape, complex)},
        {"dtype": "complex128"},
    ]
    for change in wrong:
        data = {k: v.tolist() if not shape and k != "dtype" and hasattr(v, "tolist") else v
                for k, v in change.items()}  # fmt: skip
        with pytest.raises(ValueError, match="state"):
            TailAverage.from_state_dict(state | data)
    for missing in ("variances", "squares"):
        with pytest.raises(ValueError, match="expected both variances and squares"):
            TailAverage.from_state_dict({k: v for k, v in state.items() if k != missing})


@of_rules([*FEW_RULES, TAIL])
def test_a_mutated_state_is_refused_or_works(rule):
    window = [1.0] if rule is TAIL else []
    refused = 0
    for shape in ((), (2,)):
        average = spread_average(rule)
        average.update_many(np.random.default_rng(3).normal(size=(40, *shape)))
        for mutant in mutants(average.state_dict(), some(80, 800), seed=len(str(rule))):
            try:
                with np.errstate(all="ignore"):
                    loaded = within(lambda: TailAverage.from_state_dict(mutant))  # noqa: B023
            except ValueError:
                refused += 1
                continue
            if loaded._variances is None or isinstance(loaded.rule, AnyTail) != bool(window):
                continue
            loaded.update(np.ones(loaded._shape or ()) if loaded._shape is not None else 1.0)
            assert not np.any(loaded.variance(*window, ddof=0) < 0)
            assert TailAverage.from_state_dict(loaded.state_dict()) == loaded
    assert refused > 40


def test_a_file_without_one_of_the_arrays_is_refused(tmp_path):
    average = spread_average(10)
    average.update_many(np.arange(40.0))
    path = tmp_path / "average.npz"
    average.save(path)
    assert TailAverage.load(path) == average
    with np.load(path) as file:
        members = dict(file)
    assert {"variances", "squares"} <= set(members)
    for missing in ("variances", "squares"):
        np.savez(path, **{name: array for name, array in members.items() if name != missing})
        with pytest.raises(ValueError, match="expected both variances and squares"):
            TailAverage.load(path)


def test_jax_refuses_a_state_with_variances():
    pytest.importorskip("jax")
    from tailavg.jax import tail_average

    average = spread_average(10, dtype="float32")
    average.update_many(np.ones((20, 3)))
    with pytest.raises(ValueError, match="saved with variance=True"):
        tail_average(10).from_state_dict(average.state_dict(), np.zeros(3, np.float32))


# Interrupts


@pytest.mark.parametrize("rule", [AnytimeWindow(0.3), Exponential(10)], ids=str)
@pytest.mark.parametrize("x", [1.0, np.ones(3)], ids=["number", "array"])
@pytest.mark.parametrize("count", [0, 17, 256])
def test_an_interrupted_update_is_whole(rule, x, count):
    before, refused = spread_average(rule), 0
    for i in range(count):
        before.update(x * math.sin(i))
    after = before.copy()
    after.update(x)
    for at, average in interrupted(before.copy, lambda average: average.update(x), 300, 60):
        if "incomplete" in repr(average):
            refused += 1
            for read in (average.variance, average.std, average.state_dict, average.copy):
                with pytest.raises(RuntimeError, match="incomplete"):
                    read()
            continue
        assert average in (before, after), f"opcode {at}"
        if average == before:
            average.update(x)
        assert bits(average) == bits(after), f"opcode {at}"
    assert refused <= 100  # an addition takes a few opcodes


@pytest.mark.parametrize("rule", [AnytimeWindow(0.3), Exponential(10), ExactWindow(10)], ids=str)
@pytest.mark.parametrize("call", ["update_many", "scan"])
def test_many_interrupted_updates_are_whole(rule, call):
    xs, before = FLOAT.draw(40), spread_average(rule)
    before.update_many(xs[:17])
    after = before.copy()
    getattr(after, call)(xs)
    for at, average in interrupted(before.copy, lambda it: getattr(it, call)(xs), 40, 40):
        assert average in (before, after), f"opcode {at}"


# What it costs not to have it


def test_without_variance_nothing_more_is_held():
    for rule in [*FEW_RULES, TAIL]:
        average = TailAverage(rule)
        average.update_many(np.ones((50, 3)))
        average.scan(np.ones((50, 3)), 0.5 if rule is TAIL else None)
        for one in (average, average.copy(), pickle.loads(pickle.dumps(average))):
            assert one._variances is None
            assert one._squares == 0.0
            assert np.ndim(one._squares) == 0
        keyed = TailAverages(rule)
        keyed.update_many(["a", "b"], [1.0, 2.0])
        if not isinstance(rule, ExactWindow):
            assert keyed._table.squares.size == keyed._table.variances.size == 0
            assert keyed._table.records().dtype.names[-1] == "partial"


def memory(make):
    tracemalloc.start()
    try:
        kept = make()
        assert kept.count
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@of_rules([AnytimeWindow(10), Exponential(10)])
def test_a_variance_doubles_the_memory(rule):
    x = np.ones(100_000)

    def made(**options):
        average = TailAverage(rule, **options)
        for _ in range(30):
            average.update(x)
        return average

    without, having = memory(made), memory(lambda: made(variance=True))
    assert 1.7 < having / without < 2.5
    average = made()
    assert memory(average.copy) < 1.1 * x.nbytes  # means are shared


# Averages by key


def test_keys_have_the_deviations_of_averages_of_their_own(way):
    rng = np.random.default_rng(5)
    keys, xs = rng.integers(0, 7, 500), rng.normal(5, 1, 500)
    for rule in [*FEW_RULES, AnytimeWindow(400, 2), TAIL]:
        window = [0.5] if rule is TAIL else []
        averages = TailAverages(rule, variance=True)
        parts = [slice(0, 300), slice(300, 310), slice(310, 500)]
        got = np.concatenate(
            [averages.scan(keys[part], xs[part], *window, of="std") for part in parts]
        )
        for key in range(7):
            single = spread_average(rule)
            expected = one_by_one(single, xs[keys == key].tolist(), *window, of="std")
            assert_close(got[keys == key], expected, 1e-9)
            assert_close(averages.std(key, *window), single.std(*window), 1e-9)
            variances = [one.variance(*window, ddof=0) for one in (averages[key], single)]
            assert_close(*variances, 1e-9)


@of_rules([*FEW_RULES, TAIL])
def test_keys_go_into_files_and_on(rule, tmp_path):
    averages = TailAverages(rule, variance=True)
    averages.update_many(list("abcab" * 30), FLOAT.draw(150))
    averages.update("d", 1.0)
    averages.save(tmp_path / "averages.npz")
    others = [
        TailAverages.load(tmp_path / "averages.npz"),
        TailAverages.from_state_dict(json.loads(json.dumps(averages.state_dict()))),
        averages.copy(),
        pickle.loads(pickle.dumps(averages)),
    ]
    for other in others:
        assert other == averages
        assert repr(other) == repr(averages)
        assert "variance=True" in repr(other)
    for one in [averages, *others]:
        one.update("a", 2.0)
        one.update_many(["b", "e"], [3.0, 4.0])
    assert others == [averages] * 4
    plain = TailAverages(rule)
    assert plain != TailAverages(rule, variance=True)
    state = averages.state_dict()
    for change in (
        {"variances": state["variances"][1:]},
        {"variances": [[0.0] * 9] * len(state["keys"])},
        {"variances": [[x - 1e9 for x in each] for each in state["variances"]]},
        {"squares": state["squares"][1:]},
        {"squares": [None] * len(state["keys"])},
    ):
        with pytest.raises(ValueError, match="state"):
            TailAverages.from_state_dict(state | change)
    for missing in ("variances", "squares"):
        with pytest.raises(ValueError, match="expected both variances and squares"):
            TailAverages.from_state_dict({k: v for k, v in state.items() if k != missing})


def test_scans_of_keys_repeat_the_deviation_of_an_omitted_nan(way):
    averages = TailAverages(3, nan_policy="omit", variance=True)
    averages.update_many(["a", "a", "b"], [1.0, 3.0, 5.0])
    got = averages.scan(["a", "b", "c"], [np.nan] * 3, of="variance", ddof=0)
    np.testing.assert_allclose(got, [1.0, 0.0, np.nan])
