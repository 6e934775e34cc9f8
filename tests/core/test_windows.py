"""Windows: their sizes, when they fill, and the numbers that stand for them."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tailavg import (
    AnytimeWindow,
    ExactWindow,
    Exponential,
    Fixed,
    Growing,
    RawTail,
    TailAverage,
)
from tailavg.core.windows import NEVER
from tests.support.corrupt_states import within
from tests.support.model import TIE, Window, reaches

TAKERS = {
    "AnytimeWindow": AnytimeWindow,
    "Exponential": Exponential,
    "ExactWindow": ExactWindow,
    "RawTail": lambda window: RawTail(window, total=10),
    "TailAverage": TailAverage,
}
NOT_WINDOWS = [True, False, np.True_, 0, -3, 0.0, -0.5, 1.5, 2.0, float("nan"), float("inf")]
NOT_NUMBERS = [None, [100], (0.5,), 1j, {}, np.array([3]), b"1"]

FRACTIONS = [1e-6, 1e-4, 0.001, 0.007, 0.01, 0.07, 0.1, 0.25, 0.3, 0.5, 0.55, 0.7, 0.9, 0.99, 1.0]


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
def test_a_number_stands_for_a_window(take):
    def window(x):
        taken = take(x)
        return taken.rule.window if isinstance(taken, TailAverage) else taken.window

    assert window(100) == window(np.int32(100)) == window(Fixed(100)) == Fixed(100)
    assert window(0.25) == window(np.float32(0.25)) == window(Growing(0.25)) == Growing(0.25)
    assert window(1) == Fixed(1)
    assert window(1.0) == Growing(1.0)


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
@pytest.mark.parametrize("bad", NOT_WINDOWS + NOT_NUMBERS, ids=repr)
def test_what_is_not_a_window_is_refused_with_what_was_expected(take, bad):
    with pytest.raises((ValueError, TypeError), match=r"expected an int >= 1.*or a float in"):
        take(bad)


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
def test_text_is_a_period_of_time(take):
    with pytest.raises((ValueError, TypeError), match=r"text such as '10min'|a window of time"):
        take("100")


@pytest.mark.parametrize("bad", [True, 0, -1, 2.0, 0.5, float("nan"), "3", [3]], ids=repr)
@pytest.mark.parametrize("make", [Fixed, lambda k: Growing(0.5, at_most=k)], ids=["k", "at_most"])
def test_a_count_of_samples_is_a_whole_number_of_at_least_1(make, bad):
    with pytest.raises((ValueError, TypeError), match="expected an int >= 1, got"):
        make(bad)


@pytest.mark.parametrize("bad", [True, 0, 0.0, -0.1, 1.5, 2, float("nan"), "0.5", None], ids=repr)
def test_a_fraction_is_in_0_to_1(bad):
    with pytest.raises((ValueError, TypeError), match=r"c: expected a fraction in \(0, 1\], got"):
        Growing(bad)


def test_windows_are_immutable_comparable_and_faithfully_shown():
    made = [Fixed(3), Fixed(4), Growing(0.25), Growing(0.5), Growing(0.25, at_most=4)]
    assert len({*made, *(eval(repr(window)) for window in made)}) == len(made)
    for window in made:
        with pytest.raises(FrozenInstanceError):
            window.c = 0.5


@pytest.mark.parametrize("window", [Fixed(1), Fixed(7), *map(Growing, FRACTIONS), Growing(0.07, 9)])
def test_size_is_that_of_the_model_for_numbers_and_arrays_of_steps(window):
    steps = np.random.default_rng(0).permutation(np.arange(1, 5001))
    expected = np.array([Window.of(window).size(t) for t in steps.tolist()])
    np.testing.assert_allclose([window.size(t) for t in steps.tolist()], expected, rtol=1e-14)
    for some in (np.sort(steps), steps, steps.reshape(50, 100), steps[:0]):
        sizes = np.broadcast_to(window.size(some), some.shape)
        wanted = np.sort(expected) if some[:1].tolist() == [1] else expected[: some.size]
        np.testing.assert_allclose(sizes.ravel(), wanted, rtol=1e-14)


def test_a_size_that_misses_a_whole_number_by_rounding_is_that_number():
    for hundredths in range(1, 101):
        for t in range(100, 10_001, 100):
            expected = hundredths * t // 100
            assert Growing(hundredths / 100).size(t) == expected


@given(
    st.one_of(
        st.builds(Fixed, st.integers(1, 300)),
        st.builds(Growing, st.sampled_from(FRACTIONS[2:])),
        st.builds(Growing, st.sampled_from(FRACTIONS[2:]), st.integers(1, 300)),
        st.builds(Growing, st.floats(0.001, 1.0)),
    ),
    st.integers(0, 2000),
    st.integers(1, 12),
)
def test_a_window_or_share_is_filled_at_the_first_step_that_reaches_it(window, start, parts):
    model = Window.of(window)

    def full(t):
        goal = model.size(t) if parts == 1 else model.share(t, parts)
        return reaches(t - start, goal)

    t = window.filled_at(start, parts)
    assert t > start
    if t > start + 10_000:
        assume(window.c > 0.8)  # a long time, or never: only what comes before is looked at
        t = start + 10_000
    else:
        assert full(t)
    assert not any(full(s) for s in range(start + 1, t))


@pytest.mark.parametrize("c", FRACTIONS[:-1])
def test_a_tie_fills_the_window_however_small_the_fraction(c):
    for n in [*range(1, 200), 1000, 12_345, 10**6]:
        t = round(n / c)
        if abs(c * t - n) <= 1e-13 * n:
            assert Growing(c).filled_at(t - n) == t


@pytest.mark.parametrize("rest", [1e-6, 1e-9, 1e-12, 2**-53])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_fraction_just_below_1_is_filled_without_a_search(rest, parts):
    c = 1 - rest
    share = 1 - (1 - c) ** (1 / parts)
    for start in (1, 1000, 10**6, 10**9):
        t = within(lambda start=start: Growing(c).filled_at(start, parts))
        before = t - 2 - t // 10**9
        assert t == NEVER or t - start >= share * t * (1 - 2 * TIE)
        assert before <= start or before - start < share * before * (1 - TIE / 2)
