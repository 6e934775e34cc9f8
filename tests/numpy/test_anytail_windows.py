"""AnyTail: windows and samples that cannot be taken are refused."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from tailavg import (
    AnyTail,
    AnytimeWindow,
    ExactWindow,
    Exponential,
    Fixed,
    Growing,
    RawTail,
    TailAverage,
)
from tests.support.cases import short


def refuses(average, call, error, match):
    """Whether `call` raises, and leaves the average as it was."""
    before = average.copy()
    with pytest.raises(error, match=match):
        call(average)
    assert average == before
    assert repr(average) == repr(before)
    assert average.count == before.count


def reads(window):
    return {
        "value": lambda average: average.value(window),
        "weights": lambda average: average.weights(window),
        "profile": lambda average: average.profile(window),
        "scan": lambda average: average.scan([1.0], window),
        "scan several": lambda average: average.scan([1.0], [1.0, window]),
    }


@pytest.mark.parametrize("call", reads(None))
@pytest.mark.parametrize("window", [0.05, 0.0999999, 3, 99, Growing(0.5, at_most=80), Fixed(1)])
def test_a_window_that_is_too_short_is_refused_with_the_shortest(window, call):
    average = TailAverage(AnyTail(8, 0.1))
    average.update_many(range(1000))
    refuses(average, reads(window)[call], ValueError, r"window: expected .*at least 0\.1.*10.*got ")


def test_the_shortest_window_itself_can_be_read():
    for shortest in (0.1, 0.07, 1 / 3, 0.29, 0.999, 0.123456789):
        average = TailAverage(AnyTail(6, shortest))
        for t in range(1, 400):
            average.update(1.0)
            least = max(1, math.ceil(shortest * t - 1e-9))
            for window in (shortest, least, Fixed(least), np.float64(shortest), np.int64(least)):
                average.value(window)
            if least > 1 and t > 1:
                with pytest.raises(ValueError, match=f"at least {shortest:g} .* of {t}, got"):
                    average.value(least - 1)


def test_numbers_of_every_kind_stand_for_a_window():
    average = TailAverage(AnyTail())
    average.update_many(range(1000))
    for window in (Fraction(1, 2), np.float64(0.5), np.float32(0.5), Growing(0.5), np.float16(0.5)):
        assert average.value(window) == average.value(0.5)
        assert average.scan([500.0], window).shape == (1,)
    for window in (Fixed(500), np.int32(500), np.uint8(200)):
        assert average.value(window) == average.value(int(getattr(window, "k", window)))


@pytest.mark.parametrize("call", reads(None))
def test_a_window_is_needed(call):
    average = TailAverage(AnyTail(8, 0.2))
    average.update_many(range(100))
    refuses(average, reads(None)[call], ValueError, r"AnyTail has no window of its own: pass one")
    for bare in (
        lambda average: average.value(),
        lambda average: average.weights(),
        lambda average: average.profile(),
        lambda average: average.scan([1.0]),
    ):
        refuses(average, bare, ValueError, "no window of its own")
    assert average.size == 100.0  # of the whole stream


@pytest.mark.parametrize("call", reads(None))
@pytest.mark.parametrize(
    "window",
    ["0.3", b"0.3", True, np.True_, 0.3j, Decimal("0.3"), {0.3}, {0.3: 1}, object(), float,
     AnytimeWindow(0.3), AnyTail(), np.array([[0.3]]), [[0.3]], "", np.array(0.3)],
    ids=lambda window: type(window).__name__,
)  # fmt: skip
def test_what_is_no_window_is_refused(window, call):
    average = TailAverage(AnyTail())
    average.update_many(range(100))
    refuses(average, reads(window)[call], TypeError, r"window: expected an int >= 1 .*got ")


@pytest.mark.parametrize("call", reads(None))
@pytest.mark.parametrize("window", [0, -1, 0.0, -0.3, 1.5, 2.0, math.nan, math.inf], ids=repr)
def test_a_number_that_is_no_window_is_refused(window, call):
    average = TailAverage(AnyTail())
    average.update_many(range(100))
    refuses(average, reads(window)[call], ValueError, r"window: expected an int >= 1 .*got ")


def test_a_scan_without_any_window_is_refused():
    average = TailAverage(AnyTail())
    average.update_many(range(100))
    for nothing in ([], ()):
        refuses(average, lambda run: run.scan([1.0], nothing), ValueError, "window: expected")  # noqa: B023


@pytest.mark.parametrize("windows", [100, [0.5, 100], [1.0, Growing(1.0, at_most=100)]], ids=repr)
def test_a_count_that_is_too_short_at_the_end_of_a_scan_is_refused_before_anything_is_taken(
    windows,
):
    average = TailAverage(AnyTail())
    average.update_many(range(950))
    assert average.value(100) > 0
    too_many = np.ones(51)
    refuses(average, lambda average: average.scan(too_many, windows), ValueError, "100.1 of 1001")
    assert average.scan(too_many[:50], windows).shape[-1] == 50
    assert average.count == 1000
    fresh = TailAverage(AnyTail())
    refuses(fresh, lambda average: average.scan(np.ones(1001), windows), ValueError, "of 1001")
    assert fresh.dtype is None


@pytest.mark.parametrize(
    "rule", [100, 0.3, Exponential(10), ExactWindow(5), RawTail(0.5, 40)], ids=short
)
@pytest.mark.parametrize("call", reads(None))
def test_a_rule_that_has_a_window_takes_no_other(rule, call):
    average = TailAverage(rule)
    average.update_many(range(50))
    refuses(average, reads(0.3)[call], ValueError, "window: .* has its own window")


def test_reads_before_the_first_sample_are_refused():
    average = TailAverage(AnyTail())
    for call in ("value", "profile"):
        for window in (None, 0.3, 5):
            with pytest.raises(ValueError, match="at least one"):
                getattr(average, call)(*() if window is None else (window,))
    assert len(average.weights(0.3)) == 0
    assert average.count == 0


BAD_CHUNKS = {
    "a number": (3.0, ValueError, "samples: expected a sequence"),
    "text": ("abc", TypeError, "samples: expected real"),
    "None": (None, TypeError, "samples: expected real"),
    "ragged": ([[1.0], [1.0, 2.0]], ValueError, "samples: expected arrays of one shape"),
    "another shape": (np.ones((2, 3)), ValueError, "sample: expected shape"),
    "complex": ([1j], TypeError, "sample: expected real"),
    "masked": (np.ma.masked_array([1.0]), TypeError, "samples: expected numbers"),
}


@pytest.mark.parametrize(("xs", "error", "match"), BAD_CHUNKS.values(), ids=BAD_CHUNKS)
@pytest.mark.parametrize("policy", ["propagate", "raise", "omit"])
def test_bad_samples_are_refused(xs, error, match, policy):
    average = TailAverage(AnyTail(6), nan_policy=policy)
    average.update_many(range(50))
    refuses(average, lambda average: average.update_many(xs), error, match)
    refuses(average, lambda average: average.scan(xs, 0.5), error, match)
    refuses(average, lambda average: average.scan(xs, [0.5, 40]), error, match)
