"""Bad input: a clear error, and the average as it was, and usable."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from tailavg import AnyTail, AnytimeWindow, ExactWindow, Exponential, Fixed, Growing, TailAverage
from tests.support.cases import of_rules

NAN = math.nan
few_rules = of_rules([AnytimeWindow(10), Exponential(10), ExactWindow(0.3)])
errors = (ValueError, TypeError)


def refuses(average, call, error, match):
    """Whether `call` raises, and leaves the average as it was and usable."""
    average, before, twin = average.copy(), average.copy(), average.copy()
    with pytest.raises(error, match=match):
        call(average)
    assert average == before
    assert average.count == before.count
    assert repr(average) == repr(before)
    sample = average.value() if average.count else 1.5
    for run in (average, twin):
        run.update(sample)
        run.update_many([sample, sample])
        run.scan([sample])
    assert average == twin
    np.testing.assert_array_equal(average.value(), twin.value())


def started(rule, sample, steps=12, **options):
    average = TailAverage(rule, **options)
    for _ in range(steps):
        average.update(sample)
    return average


NOT_NUMBERS = {
    "text": "1.0",
    "bytes": b"1.0",
    "None": None,
    "dict": {},
    "set": {1.0},
    "object": object(),
    "decimal": Decimal(1),
    "fraction": Fraction(1, 2),
    "date": np.datetime64("2020-01-01"),
    "duration": np.timedelta64(1, "s"),
    "generator": (x for x in [1.0]),
    "type": float,
    "text array": np.array("a"),
    "object array": np.array(1.0, dtype=object),
    "masked array": np.ma.masked_array(1.0),
    "masked": np.ma.masked,
    "record": np.zeros((), [("a", float)]),
}
not_numbers = pytest.mark.parametrize("bad", NOT_NUMBERS.values(), ids=NOT_NUMBERS)


@not_numbers
@few_rules
def test_a_sample_that_is_not_a_number_is_refused(rule, bad):
    match = r"expected (real or complex )?numbers, got"
    for steps in (0, 1, 12):
        refuses(started(rule, 1.0, steps), lambda average: average.update(bad), TypeError, match)
        for call in (
            lambda average: average.update_many([1.0, bad]),
            lambda average: average.scan([1.0, bad]),
        ):
            refuses(started(rule, 1.0, steps), call, errors, "expected")


@pytest.mark.parametrize(
    "bad",
    [
        np.ma.masked_array([1.0, 2.0], [False, True]),
        np.ma.masked_array([1.0, 2.0]),
        np.array([1.0, None]),
        np.array([1.0, 2.0], dtype=object),
        np.array(["1", "2"]),
        np.array([1, 2], "datetime64[s]"),
        np.zeros(2, [("a", float)]),
        [1.0, "2"],
        [1.0, None],
        [1.0, [2.0]],
        [[1.0], [1.0, 2.0]],
    ],
    ids=repr,
)
@few_rules
def test_an_array_of_what_are_not_numbers_is_refused(rule, bad):
    for steps in (0, 12):
        for call in (
            lambda average: average.update(bad),
            lambda average: average.update_many(bad),
            lambda average: average.scan(bad),
            lambda average: average.update_many([[1.0, 1.0], bad] if type(bad) is list else bad),
        ):
            refuses(started(rule, np.ones(2), steps), call, errors, "expected")


@pytest.mark.parametrize(
    ("shape", "other"),
    [
        ((), (1,)), ((), (2, 2)), ((2,), ()), ((2,), (1,)), ((2,), (3,)), ((2,), (1, 2)),
        ((2,), (2, 1)), ((2, 3), (3, 2)), ((2, 3), (6,)), ((2, 3), ()), ((2, 3), (2, 3, 1)),
        ((2,), (0,)), ((1,), ()), ((1,), (2,)),
    ],
)  # fmt: skip
@few_rules
def test_a_sample_of_another_shape_is_refused_even_if_it_could_be_broadcast(rule, shape, other):
    average = started(rule, np.ones(shape))
    match = r"expected shape \("
    refuses(average, lambda average: average.update(np.ones(other)), ValueError, match)
    refuses(average, lambda average: average.update_many(np.ones((4, *other))), ValueError, match)
    refuses(average, lambda average: average.scan(np.ones((4, *other))), ValueError, match)
    if other == ():
        refuses(average, lambda average: average.update(1.0), ValueError, match)
        refuses(average, lambda average: average.update(1), ValueError, match)
    if shape == ():
        numbers = started(rule, 1.0)
        refuses(numbers, lambda average: average.update(np.ones(other)), ValueError, match)


@pytest.mark.parametrize("sample", [1.0, np.ones(2), np.ones(2, "f4")], ids=["float", "f8", "f4"])
@few_rules
def test_complex_samples_are_refused_by_an_average_of_reals(rule, sample):
    average, bad = started(rule, sample), sample * (1 + 2j)
    match = "expected real numbers"
    refuses(average, lambda average: average.update(bad), TypeError, match)
    refuses(average, lambda average: average.update_many([bad, bad]), TypeError, match)
    refuses(average, lambda average: average.scan([sample, bad]), TypeError, match)
    fresh = TailAverage(rule, dtype="float64")
    refuses(fresh, lambda average: average.update(1j), TypeError, match)


@pytest.mark.parametrize("empty", [[], (), np.empty(0), np.empty((0, 2)), np.empty((0, 0, 3))])
@few_rules
def test_an_empty_chunk_is_nothing(rule, empty):
    for average in (TailAverage(rule), started(rule, 1.0), started(rule, np.ones(2))):
        before = average.copy()
        average.update_many(empty)
        assert len(average.scan(empty)) == 0
        assert average == before
    assert started(rule, np.ones(2)).scan([]).shape == (0, 2)
    assert TailAverage(AnyTail()).scan([], [0.5, 1.0]).shape == (2, 0)


def test_infinities_are_data_even_if_warnings_are_errors():
    """As they are here: pytest raises every warning."""
    for rule in (4, 1.0, Exponential(4)):
        for plain in (True, False):  # with the fast path of `update`, and without it
            average = TailAverage(rule)
            for value in (1.0, math.inf, -math.inf, 2.0):
                average.update(np.full(2, value) if plain else [value, value])
            assert average.count == 4
            assert np.isnan(average.value()).all()


def test_an_any_tail_takes_no_window_when_it_is_created():
    for window in (0.25, Fixed(100), Growing(0.5)):
        with pytest.raises(TypeError, match=r"AnyTail takes its window when it is read: value\("):
            AnyTail(window)


@few_rules
def test_one_number_is_not_a_chunk(rule):
    for steps in (0, 12):
        for number in (1.0, 3, np.array(1.0)):
            average = started(rule, 1.0, steps)
            match = "expected a sequence"
            refuses(average, lambda average, x=number: average.update_many(x), ValueError, match)
            refuses(average, lambda average, x=number: average.scan(x), ValueError, match)


@few_rules
@pytest.mark.parametrize(
    ("sample", "bad"), [(1.0, NAN), (1j, complex(0, NAN)), (np.ones(3), np.array([1.0, NAN, 2.0]))]
)
def test_nan_is_refused_under_raise_wherever_it_stands(rule, sample, bad):
    for steps in (0, 12):
        average = started(rule, sample, steps, nan_policy="raise")
        refuses(average, lambda average: average.update(bad), ValueError, "expected no NaN")
        for chunk in ([bad], [sample, bad], [sample] * 300 + [bad], [bad, sample]):
            at = f"index {[np.isnan(x).any() for x in chunk].index(True)}"
            for call in ("update_many", "scan"):
                refuses(average, lambda average, call=call, chunk=chunk:
                        getattr(average, call)(chunk), ValueError, at)  # fmt: skip


@few_rules
def test_infinity_is_no_error_under_any_policy(rule):
    for policy in ("propagate", "raise", "omit"):
        average = TailAverage(rule, nan_policy=policy)
        average.update(math.inf)
        assert average.value() == math.inf
        assert average.scan([math.inf, math.inf]).tolist() == [math.inf] * 2
        assert average.count == 3


@few_rules
def test_nothing_can_be_read_before_the_first_sample(rule):
    average = TailAverage(rule)
    refuses(average, lambda average: average.value(), ValueError, "value: expected at least one")
    average = TailAverage(rule)
    match = "profile: expected at least one"
    refuses(average, lambda average: average.profile(), ValueError, match)
    assert TailAverage(rule).weights().tolist() == []
    assert TailAverage(rule).count == 0


@few_rules
@pytest.mark.parametrize("x", [2**63, -(2**64), 10**30])
def test_whole_numbers_may_be_of_any_size_at_any_step(rule, x):
    for steps in (0, 1, 12):
        average = TailAverage(rule)
        for _ in range(steps + 1):
            average.update(x)
        assert average.value() == pytest.approx(float(x), rel=1e-12)


@few_rules
def test_a_whole_number_beyond_all_floats_is_refused_at_any_step(rule):
    for steps in (0, 1, 12):
        average = started(rule, 1.0, steps)
        refuses(average, lambda average: average.update(10**400), (*errors, OverflowError), ".")


def test_an_error_in_a_long_chunk_leaves_nothing_of_it():
    average = started(3, np.ones(2), nan_policy="raise")
    rows = np.ones((5000, 2))
    rows[-1, 1] = NAN
    refuses(average, lambda average: average.update_many(rows), ValueError, "index 4999")


@pytest.mark.parametrize(
    "dtype", ["int64", "bool", "float16", "object", "U3", "datetime64[s]", "nonsense", 3.5]
)
def test_accumulators_hold_real_or_complex_numbers_of_32_bits_or_more(dtype):
    with pytest.raises(TypeError, match=r"expected float32|not understood|interpret"):
        TailAverage(3, dtype=dtype)


@pytest.mark.parametrize("policy", ["ignore", "", None, "Raise", 1, True, ["omit"]])
def test_a_nan_policy_is_one_of_three(policy):
    with pytest.raises(ValueError, match=r"nan_policy: expected one of .*propagate.*raise.*omit"):
        TailAverage(3, nan_policy=policy)


@pytest.mark.parametrize("rule", [None, "10", [], object(), Growing, AnytimeWindow, 1j, 0, 1.5])
def test_what_is_not_a_rule_is_refused(rule):
    with pytest.raises(errors, match="expected"):
        TailAverage(rule)


def test_an_average_has_no_other_attributes_or_arguments():
    with pytest.raises(TypeError):
        TailAverage(3, "float32")
    with pytest.raises(TypeError):
        TailAverage(3, window=3)
    with pytest.raises(TypeError):
        TailAverage()
    average = TailAverage(3)
    for name in ("count", "size", "rule", "dtype", "nan_policy"):
        with pytest.raises(AttributeError):
            setattr(average, name, 1)
