"""Scans against the slow loop that says what a scan is: to the bit with loops; and chunks."""

import sys
from fractions import Fraction
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailavg import (
    AnyTail,
    AnytimeWindow,
    ExactWindow,
    Exponential,
    Growing,
    RawTail,
    TailAverage,
)
from tailavg.numpy import kernel
from tests.support.cases import (
    EVERY_RULE,
    FEW_RULES,
    FLOAT,
    RULES,
    assert_close,
    bits,
    of_pairs,
    of_rules,
    rules,
    windows,
)

# Beside the shared ones: each way of the loops to weigh a block.
MORE = [
    AnytimeWindow(60),  # blocks of more than SMALL samples
    AnytimeWindow(600),  # blocks of more than FOLD samples, by a table
    AnytimeWindow(520, 2),
    AnytimeWindow(0.6),
    AnytimeWindow(1e-19),
    AnytimeWindow(0.002, 4),
    AnytimeWindow(Growing(0.3, 50), 5),
    AnytimeWindow(Growing(0.0015, at_most=3), 4),
    Exponential(1e-6),
]
PAIRS = [
    *((rule, "float") for rule in EVERY_RULE + MORE),
    *((rule, "float32 (3,)") for rule in RULES + MORE[1:2]),
    *((rule, "float64 (1,)") for rule in FEW_RULES),
    *((rule, "float64 (3,)") for rule in FEW_RULES),
]
SCANS = ["numpy", "plain", "compiled"]


@pytest.fixture(params=SCANS)
def way(request, monkeypatch):
    """Scan with NumPy alone, with plain loops, and with compiled ones."""
    if request.param == "compiled":
        pytest.importorskip("numba", reason="numba is not installed: nothing can be compiled")
    monkeypatch.setattr(kernel, "installed", lambda: request.param != "numpy")
    for name in ("LONG", "SHORT"):
        monkeypatch.setattr(kernel, name, 0 if request.param == "compiled" else 10**9)
    return request.param


def one_by_one(average, xs, window=None):
    """What a scan is: update with each sample, and read."""
    averages = []
    for x in xs:
        average.update(x)
        averages.append(average.value(window))
    return np.array(averages)


loops_only = pytest.mark.parametrize("way", ["plain", "compiled"], indirect=True)


def scanned(average, xs, *window):
    cuts = [cut for cut in (1, 2, 250, 600, 1401) if cut < len(xs)]
    parts = np.split(xs, cuts)
    return np.concatenate([average.scan(part, *window) for part in parts], axis=-xs.ndim)


@of_pairs([*PAIRS, *((rule, "complex") for rule in FEW_RULES)])
def test_a_scan_is_what_the_slow_loop_says(rule, kind, without_numba):
    xs = kind.draw(900)
    expected = one_by_one(TailAverage(rule), kind.each(xs))
    assert_close(scanned(TailAverage(rule), xs), expected, kind.rtol)


@of_pairs(PAIRS)
@loops_only
def test_loops_give_the_bits_of_the_slow_loop(rule, kind, way):
    xs = kind.draw(1700 if way == "compiled" else 900)
    one, other = TailAverage(rule), TailAverage(rule)
    expected = one_by_one(one, kind.each(xs))
    assert scanned(other, xs).tobytes() == expected.tobytes()
    assert bits(other) == bits(one)
    if way == "compiled":
        assert TailAverage(rule).scan(xs).tobytes() == expected.tobytes()  # in one go


@of_rules([AnyTail(6), AnyTail(12, 0.05)])
@loops_only
def test_loops_give_the_bits_of_the_slow_loop_for_any_tail(rule, way):
    xs, windows = FLOAT.draw(1500), [0.1, 0.3, 1.0]
    average = TailAverage(rule)
    for window, averages in zip(windows, scanned(average, xs, windows), strict=True):
        one = TailAverage(rule)
        assert averages.tobytes() == one_by_one(one, xs.tolist(), window).tobytes()
        assert bits(average) == bits(one)


@given(rule=rules, chunks=st.lists(st.integers(1, 700), min_size=1, max_size=5))
@pytest.mark.parametrize("way", ["compiled"], indirect=True)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_chunks_of_any_length_give_the_same_bits(rule, chunks, way):
    xs = np.random.default_rng(sum(chunks)).normal(size=sum(chunks))
    whole, parts = TailAverage(rule), TailAverage(rule)
    got = [parts.scan(part) for part in np.split(xs, np.cumsum(chunks)[:-1])]
    assert np.concatenate(got).tobytes() == whole.scan(xs).tobytes()
    assert bits(parts) == bits(whole)
    slow = TailAverage(rule)
    assert one_by_one(slow, xs[:300].tolist()).tobytes() == np.concatenate(got)[:300].tobytes()


@of_rules([AnytimeWindow(10), AnytimeWindow(0.25), AnytimeWindow(300), *map(Exponential, [1, 0.3])])
@pytest.mark.parametrize("shape", [(), (2,)])
@loops_only
def test_bad_samples_give_the_bits_of_the_slow_loop(rule, shape, way):
    for bad in (np.nan, np.inf, -np.inf, 1e300):
        xs = np.ones((700, *shape))
        xs[[3, 400]] = bad
        with np.errstate(all="ignore"):
            expected = one_by_one(TailAverage(rule), xs if shape else xs.tolist())
        np.testing.assert_array_equal(scanned(TailAverage(rule), xs), expected, str(bad))


def test_a_state_from_update_many_is_scanned_to_the_bit(compiled):
    """Its sum may hold any number of samples."""
    xs = FLOAT.draw(1500)
    for rule in (AnytimeWindow(700), AnytimeWindow(0.4), Exponential(0.3), RawTail(400, 1000)):
        average = TailAverage(rule)
        average.update_many(xs[:633])
        other = average.copy()
        expected = one_by_one(other, xs[633:].tolist())
        assert average.scan(xs[633:]).tobytes() == expected.tobytes(), rule


@pytest.mark.parametrize("windows", [[0.1, 0.3, 1.0], (0.5,)])
def test_a_scan_of_several_windows_is_what_the_slow_loop_says(windows, way):
    xs = FLOAT.draw(900)
    got = TailAverage(AnyTail(6)).scan(xs, windows)
    for window, averages in zip(windows, got, strict=True):
        assert_close(averages, one_by_one(TailAverage(AnyTail(6)), xs.tolist(), window), 1e-12)


@of_rules([AnytimeWindow(10), Exponential(10), ExactWindow(10)])
def test_several_windows_are_refused_of_a_rule_that_has_its_own(rule):
    average = TailAverage(rule)
    with pytest.raises(ValueError, match=r"window: .* has its own window"):
        average.scan(np.ones(5), [None, None])
    assert average.count == 0


@pytest.mark.parametrize("chunk", [1, 16, 256, 1500])
@of_rules([Exponential(10**5), AnytimeWindow(10**5)])
def test_small_chunks_of_float32_lose_no_more_than_single_samples(rule, chunk):
    """Each chunk rounds the mean; what it rounds off must not be lost."""
    start, after = np.full((10**5, 1), 100.0), np.resize([101.0, 100.5], (2000, 1))
    exact, average = TailAverage(rule, dtype="float64"), TailAverage(rule, dtype="float32")
    for one in (exact, average):
        one.update_many(start.astype(one.dtype))
    exact.update_many(after)
    for part in np.split(after.astype(np.float32), range(chunk, len(after), chunk)):
        average.update_many(part)
    assert_close(average.value(), exact.value(), 3e-7)


def test_a_fraction_that_is_no_positive_float_is_refused():
    with pytest.raises(ValueError, match="c: expected a fraction"):
        Growing(Fraction(1, 10**400))


def test_a_numba_that_cannot_be_imported_is_told_and_done_without(monkeypatch):
    pytest.importorskip("numba", reason="numba is not installed: nobody tries to import it")
    monkeypatch.setattr(kernel, "SHORT", 0)
    empty = module_from_spec(ModuleSpec("numba", None))  # without njit
    monkeypatch.setitem(sys.modules, "numba", empty)
    kernel._compiled.cache_clear()
    xs = np.arange(10.0)
    try:
        with pytest.warns(UserWarning, match="numba cannot be imported, so loops are slower"):
            first = TailAverage(3).scan(xs)
        assert_close(TailAverage(3).scan(xs), first, 1e-15)
    finally:
        kernel._compiled.cache_clear()


@given(window=windows, t=st.integers(1, 10**7))
def test_sizes_and_decays_of_the_loops_are_those_of_the_core_to_the_bit(window, t):
    described = kernel.window_numbers(window)
    assert kernel.size_at(float(t), described) == window.size(t)
    assert kernel.decay_at(float(t), described) == Exponential(window).decay(np.array([t]))[0]
