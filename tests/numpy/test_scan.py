"""Scans against the slow loop that says what a scan is; chunks that lose no digits."""

from fractions import Fraction

import numpy as np
import pytest

from cases import KINDS, RULES, assert_close, of_rules
from tailavg import AnyTail, AnytimeWindow, ExactWindow, Exponential, Growing, TailAverage
from tailavg.numpy.scan import one_by_one


@of_rules([*RULES, AnytimeWindow(1e-19), Exponential(1e-6), AnytimeWindow(Growing(0.3, 50), 5)])
@pytest.mark.parametrize("kind", ["float", "complex", "0-d float32", "float32 (3,)"])
def test_a_scan_is_what_the_slow_loop_says(rule, kind):
    xs = KINDS[kind].draw(900)
    expected = one_by_one(TailAverage(rule), KINDS[kind].each(xs))
    average = TailAverage(rule)
    got = np.concatenate([average.scan(part) for part in np.split(xs, [1, 2, 250, 600])])
    assert_close(got, expected, KINDS[kind].rtol)


@pytest.mark.parametrize("windows", [[0.1, 0.3, 1.0], (0.5,)])
def test_a_scan_of_several_windows_is_what_the_slow_loop_says(windows):
    xs = KINDS["float"].draw(900)
    got = TailAverage(AnyTail(6)).scan(xs, windows)
    for window, averages in zip(windows, got, strict=True):
        assert_close(averages, one_by_one(TailAverage(AnyTail(6)), xs.tolist(), window), 1e-12)


@of_rules([AnytimeWindow(10), Exponential(10), ExactWindow(10)])
def test_several_windows_are_refused_of_a_rule_that_has_its_own(rule):
    average = TailAverage(rule)
    with pytest.raises(ValueError, match=r"window: expected none, since .* has its own"):
        average.scan(np.ones(5), [None, None])
    assert average.count == 0


@pytest.mark.parametrize("chunk", [1, 16, 256, 5000])
@pytest.mark.parametrize("rule", [Exponential(10**6), AnytimeWindow(10**6)], ids=str)
def test_small_chunks_of_float32_lose_no_more_than_single_samples(rule, chunk):
    """Each chunk rounds the mean; what it rounds off must not be lost."""
    start, after = np.full((10**6, 1), 100.0), np.resize([101.0, 100.5], (20_000, 1))
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
