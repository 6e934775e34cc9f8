"""Rules: their weights against the model, and what they promise at every step.

Slow: `make test-all` looks at 100,000 steps of every window with 2 to 13 accumulators.
"""

import math
from dataclasses import FrozenInstanceError
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailavg import AnytimeWindow, ExactWindow, Exponential, Fixed, Growing, RawTail, TailAverage
from tailavg.core.clock import BlockClock
from tailavg.core.equation import read, weights
from tests.support.cases import (
    CAPPED,
    EVERY_RULE,
    anytime_windows,
    of_rules,
    rules,
    short,
    windows,
)
from tests.support.effort import some
from tests.support.model import TIE, Blocks, Window, alphas, ceiling, weight_matrix
from tests.support.schedule import advance

FIXED = [Fixed(k) for k in (1, 10, 64, 100, 997, 12_345, 200_000)]
GROWING = [
    Growing(c)
    for c in (
        0.01, 0.07, 0.1, 0.13, 0.25, 0.3, 0.5, 0.55, 0.618, 0.75, 0.9, 0.99, 1 - 1e-5, 1 - 1e-9,
        1 - 2**-53, 1.0,
    )
]  # fmt: skip
CAPS = [
    Growing(c, at_most)
    for c, at_most in [
        (0.01, 50), (0.07, 700), (0.1, 30), (0.25, 12_345), (0.3, 1000), (0.55, 1023), (0.9, 10),
        (0.9, 50_000), (0.95, 400), (0.99, 400), (1.0, 777),
    ]
]  # fmt: skip
every_window = FIXED + GROWING + CAPS
of_windows = pytest.mark.parametrize("window", every_window, ids=short)


def steps_for(window):
    """How many steps to look at: a window of many samples fills and turns late."""
    late = 5000 < Window.of(window).most < math.inf
    return some(70_000 if late else 10_000, 100_000)


def blocks_of(rule, steps):
    """For every step, the starts of the blocks; those that are not there yet start at 0 too."""
    every, clock = np.zeros((rule.accumulators, steps), np.int64), BlockClock(rule)
    while clock.count < steps:
        every[:, clock.count : clock.closes] = np.reshape(clock.blocks, (-1, 1))
        clock.count = clock.closes
        clock.turn()
    return every


def folded(sizes, k):
    """The paper's equation, folded over blocks, the newest first; all steps at once."""
    found, newer = np.zeros_like(sizes), np.zeros(sizes.shape[1])
    for block in reversed(range(len(sizes))):
        old, total = sizes[block], sizes[block] + newer
        size = np.minimum(k, total)
        root = np.sqrt(old * newer * (total - size) / size)
        g = np.divide(old - root, total, out=np.zeros_like(total), where=(newer < k) & (total > 0))
        found[block + 1 :] *= 1 - g
        found[block] = g
        newer = total
    return found


class Reading:
    """What the blocks of an anytime window weigh at every step, all steps at once."""

    def __init__(self, rule):
        steps = steps_for(rule.window)
        self.t = np.arange(1, steps + 1)
        self.k = rule.window.size(self.t)
        self.starts = blocks_of(rule, steps)
        self.sizes = np.diff(self.starts, axis=0, append=self.t[None])
        self.weights = folded(self.sizes.astype(float), self.k)
        squares = np.zeros_like(self.weights)
        np.divide(self.weights**2, self.sizes, out=squares, where=self.sizes > 0)
        self.effective = 1 / squares.sum(axis=0)
        oldest = np.argmax(self.weights > 0, axis=0)
        self.touched = self.t - np.take_along_axis(self.starts, oldest[None], axis=0)[0]


def most_touched(window, z, t):
    """How many samples balanced turns may weigh at most."""
    if isinstance(window, Fixed):
        return np.minimum(t, window.k + math.ceil(window.k / z) - 1)
    share = 1 - (1 - window.c) ** (1 / z)
    bound = (1 - (1 - window.c) ** (1 + 1 / z)) * t
    bound = np.ceil(bound * (1 - TIE))
    if window.at_most is not None:
        cap = window.at_most + share * window.at_most / window.c
        # never more than while it grows, nor than the passage to the cap allows
        bound = np.where(window.c * t <= window.at_most, np.minimum(bound, cap), cap)
    return np.minimum(t, bound)


def accumulators_for(window, every):
    """Return two of `every`, others for each window; in `make test-all` all of them."""
    first = every_window.index(window)
    return some([every[(first + i) % len(every)] for i in (0, len(every) // 2)], every)


@of_windows
def test_anytime_window_is_exact_and_touches_few_samples_at_every_step(window):
    for accumulators in accumulators_for(window, range(2, 14)):
        got = Reading(AnytimeWindow(window, accumulators))
        context = f"{accumulators} accumulators"
        assert (got.weights >= 0).all(), context
        np.testing.assert_allclose(got.weights.sum(axis=0), 1, 0, 1e-12, err_msg=context)
        wanted = np.minimum(got.t, got.k)
        exact = np.full(len(got.t), True) if accumulators > 2 else got.sizes[-1] < got.k
        np.testing.assert_allclose(got.effective[exact], wanted[exact], 1e-9, err_msg=context)
        assert (got.effective > wanted * (1 - 1e-9)).all(), context
        assert (got.effective < wanted + 1).all(), context
        most = most_touched(window, accumulators - 1, got.t)
        assert (got.touched <= most * (1 + TIE)).all(), context


@of_windows
def test_paper_turns_weigh_at_least_the_window_at_every_step(window):
    for accumulators in accumulators_for(window, [2, 3, 4, 7]):
        got = Reading(AnytimeWindow(window, accumulators, turns="paper"))
        context = f"{accumulators} accumulators"
        assert (got.weights >= 0).all(), context
        np.testing.assert_allclose(got.weights.sum(axis=0), 1, 0, 1e-12, err_msg=context)
        assert (got.effective > np.minimum(got.t, got.k) * (1 - 1e-9)).all(), context


@of_windows
def test_exponential_is_exact_at_every_step(window):
    rule = Exponential(window)
    t = np.arange(1, steps_for(window) + 1)
    decays = rule.decay(t)
    assert ((decays >= 0) & (decays < 1)).all()
    variance, effective = 0.0, []
    for g in decays.tolist():
        variance = g * g * variance + (1 - g) ** 2
        effective.append(1 / variance)
    np.testing.assert_allclose(effective, np.minimum(t, window.size(t)), rtol=1e-9)


@of_windows
def test_exact_window_holds_the_ceiling_of_its_size(window):
    steps = [*range(1, 3000), *range(3000, 100_000, some(31, 1))]
    expected = [min(t, ceiling(Window.of(window).size(t))) for t in steps]
    assert ExactWindow(window).samples(np.array(steps)).tolist() == expected


@pytest.mark.parametrize("turns", ["balanced", "paper"])
@pytest.mark.parametrize("accumulators", [2, 3, 6, 13])
@pytest.mark.parametrize(
    "window",
    [Fixed(10), Fixed(1000), *map(Growing, [0.07, 0.3, 0.9]), Growing(0.07, 700)],
    ids=short,
)
def test_blocks_are_those_of_the_model_at_every_step(window, accumulators, turns):
    rule, steps = AnytimeWindow(window, accumulators, turns), some(2500, 100_000)
    model, starts = Blocks(rule), blocks_of(rule, steps).T.tolist()
    for t in range(steps):
        model.add()
        if model.starts() != starts[t][-len(model.blocks) :]:
            pytest.fail(f"at step {t + 1}: {model.starts()} != {starts[t]}")


@given(anytime_windows, st.lists(st.integers(1, 3000), min_size=1, max_size=5, unique=True))
def test_blocks_are_the_same_in_one_stride_or_many(rule, stops):
    starts = [0]
    every = blocks_of(rule, max(stops)).T.tolist()
    for t in sorted(stops):
        starts = advance(rule, starts, t)
        assert starts == every[t - 1][-len(starts) :]
        assert starts == advance(rule, [0], t)


@settings(max_examples=some(40, 300))
@given(rules, st.integers(1, 400))
def test_weights_are_those_of_the_model_at_every_step(rule, steps):
    average = TailAverage(rule)
    for t, alpha in enumerate(islice(alphas(rule), steps), start=1):
        average.update(1.0)
        weights = average.weights()
        assert weights.shape == (t,)
        assert (weights >= 0).all()
        np.testing.assert_allclose(weights, alpha, rtol=0, atol=1e-12 * alpha.max())
        assert math.isclose(weights.sum(), 1, abs_tol=1e-12)


@settings(max_examples=some(60, 300))
@given(windows, st.integers(2, 13), st.integers(1, 300))
def test_the_model_keeps_the_promises_too(window, accumulators, steps):
    model = Blocks(AnytimeWindow(window, accumulators))
    for t in range(1, steps + 1):
        model.add()
        alpha, k = model.alpha(), min(t, model.window.size(t))
        effective = 1 / (alpha @ alpha)
        if accumulators > 2 or len(model.blocks[-1]) < k:
            assert math.isclose(effective, k, rel_tol=1e-9)
        assert k * (1 - 1e-9) <= effective < k + 1
        touched = t - np.argmax(alpha > 0)
        assert touched <= most_touched(window, accumulators - 1, t) * (1 + TIE)


@settings(max_examples=some(30, 100))
@given(rules, st.integers(1, 200), st.sampled_from(["update", "scan"]))
def test_weights_are_those_that_are_applied(rule, steps, method):
    """A stream of unit vectors is averaged to its own weights."""
    average, model = TailAverage(rule), weight_matrix(rule, steps)
    values = average.scan(np.eye(steps)) if method == "scan" else np.zeros((steps, steps))
    if method == "update":
        for row, x in zip(values, np.eye(steps), strict=True):
            average.update(x)
            row[:] = average.value()
    np.testing.assert_allclose(values, model, rtol=0, atol=1e-13)
    np.testing.assert_allclose(average.value(), average.weights(), rtol=1e-12, atol=1e-15)


@of_rules(EVERY_RULE)
def test_weights_are_those_of_the_model_far_into_the_stream(rule):
    average = TailAverage(rule)
    for t, alpha in enumerate(islice(alphas(rule), 1000), start=1):
        if t in (600, 999, 1000):
            average.update_many(np.ones(t - average.count))
            np.testing.assert_allclose(average.weights(), alpha, rtol=0, atol=1e-12 * alpha.max())


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.floats(0, 1, exclude_max=True))
def test_weights_have_the_variance_of_the_window(old, new, part):
    excess = part * old
    each, of_old = weights(old, new, excess)
    assert 0 <= of_old <= old / (old + new) * (1 + 1e-12)
    assert math.isclose(of_old + new * each, 1, rel_tol=1e-12)
    variance = of_old**2 / old + new * each**2
    assert math.isclose(variance, 1 / (old + new - excess), rel_tol=1e-9)
    if not excess:
        assert each == 1 / (old + new)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=10), st.floats(1, 300))
def test_any_blocks_are_read_as_the_fold_of_the_equation(sizes, k):
    expected = folded(np.array(sizes, float)[:, None], np.array([k]))[:, 0]
    np.testing.assert_allclose(read([0, *sizes], k), [0, *expected], rtol=1e-9, atol=1e-12)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=10), st.floats(1, 300))
def test_any_blocks_are_read_with_the_variance_of_the_window(sizes, k):
    weights = read(sizes, k)
    assert math.isclose(sum(weights), 1, abs_tol=1e-12)
    assert min(weights) >= 0
    effective = 1 / sum(w * w / n for w, n in zip(weights, sizes, strict=True))
    # the newest block alone may hold more than was asked for
    assert math.isclose(effective, max(min(k, sum(sizes)), min(sizes[-1], effective)), rel_tol=1e-9)


def test_fixed_exponential_decays_as_in_the_paper():
    for k in (1, 2, 10, 1000):
        assert math.isclose(Exponential(k).decay(k + 1), (k - 1) / (k + 1), rel_tol=1e-12)
        assert math.isclose(Exponential(k).decay(10**9), (k - 1) / (k + 1), rel_tol=1e-12)


@pytest.mark.parametrize(
    ("decay", "k"),
    [
        (0.9, 19), (0.99, 199), (0.999, 1999), (0.9999, 19_999), (0.99999, 199_999), (0.95, 39),
        (0.5, 3), (0.21, 2), (0.93, 28), (0.999999999, 1_999_999_999), (np.float32(0.999), 1999),
        (Fraction(9, 10), 19),
    ],
)  # fmt: skip
def test_the_exponential_of_a_decay(decay, k):
    assert Exponential.from_decay(decay) == Exponential(k)


@pytest.mark.parametrize("decay", [-0.5, 0, 0.0, 0.2, 1, 1.0, 1999, 1 - 1e-17, math.nan, math.inf])
def test_a_decay_that_no_window_has_is_refused(decay):
    with pytest.raises(ValueError, match=r"decay: expected a number in \(0.2, 1\), got"):
        Exponential.from_decay(decay)


@pytest.mark.parametrize("decay", [None, "0.9", True, 0.9j, [0.9]])
def test_a_decay_that_is_no_number_is_refused(decay):
    with pytest.raises(TypeError, match=r"decay: expected a number in \(0.2, 1\), got"):
        Exponential.from_decay(decay)


@pytest.mark.parametrize("c", [0.07, 0.25, 0.5, 0.9])
def test_growing_exponential_decays_as_in_the_paper(c):
    t = np.arange(math.ceil(1 / c) + 2, 5000)
    gamma = c * (t - 1) / (1 + c * (t - 1)) * (1 - np.sqrt((1 - c) / (t * (t - 1))) / c)
    np.testing.assert_allclose(Exponential(c).decay(t), gamma, rtol=1e-10)


@given(windows, st.integers(1, 400))
def test_decay_needs_no_state_and_takes_a_step_or_an_array_of_them(window, steps):
    rule, average = Exponential(window), 0.0
    decays = rule.decay(np.arange(1, steps + 1))
    for t, x in enumerate(np.sin(np.arange(steps)), start=1):
        g = rule.decay(t)
        assert isinstance(g, float)
        assert math.isclose(g, decays[t - 1], rel_tol=1e-14, abs_tol=1e-15)
        average = g * average + (1 - g) * x
    shuffled = np.random.default_rng(0).permutation(steps)
    np.testing.assert_allclose(rule.decay(shuffled + 1), decays[shuffled], rtol=1e-14, atol=1e-15)
    matrix = weight_matrix(rule, steps)
    assert math.isclose(average, matrix[-1] @ np.sin(np.arange(steps)), abs_tol=1e-12)


@pytest.mark.parametrize("k", [1, 2, 10, 30])
def test_two_accumulators_are_joined_as_in_the_paper(k):
    average = TailAverage(AnytimeWindow(k, 2, turns="paper"))
    for t in range(1, 5 * k + 1):
        average.update(float(t))
        newest = (t - 1) % k + 1
        if t > k:
            old = average.weights()[t - newest - k : t - newest]
            np.testing.assert_allclose(old.sum(), (k - newest) / (k + newest), atol=1e-12)


def test_balanced_and_paper_turns_coincide_for_a_fixed_window():
    for k in (1, 7, 10, 100):
        for accumulators in (2, 3, 5, 13):
            balanced, paper = (
                blocks_of(AnytimeWindow(k, accumulators, turns), 2000)
                for turns in ("balanced", "paper")
            )
            assert (balanced == paper).all()


def test_balanced_turns_are_fresher_than_the_papers():
    """The third accumulator buys nearly nothing with the paper's turns: 1.68 ct against 1.40."""
    late = slice(3000, None)
    for accumulators, turns, farthest in [
        (2, "paper", 1.75),
        (3, "paper", 1.68),
        (3, "balanced", 1.40),
    ]:
        got = Reading(AnytimeWindow(0.25, accumulators, turns))
        assert math.isclose((got.touched / got.k)[late].max(), farthest, abs_tol=0.005)


def test_raw_tail_is_the_latest_sample_then_the_mean_since_its_start():
    average = TailAverage(RawTail(0.25, total=100))
    assert RawTail(0.25, total=100).first == 75
    for t in range(1, 201):
        average.update(float(t))
        assert average.value() == pytest.approx(t if t <= 75 else (76 + t) / 2, rel=1e-15)
        assert average.size == max(1, t - 75)


@pytest.mark.parametrize(
    ("rule", "first"),
    [
        (RawTail(0.07, 100), 93),
        (RawTail(0.25, 10), 7),
        (RawTail(1.0, 10), 0),
        (RawTail(5, 10), 5),
        (RawTail(50, 10), 0),
        (RawTail(Growing(0.5, at_most=3), 10), 7),
    ],
    ids=short,
)
def test_raw_tail_starts_so_that_it_has_the_window_at_the_end(rule, first):
    assert rule.first == first


def test_rules_are_immutable_comparable_and_faithfully_shown():
    made = [*EVERY_RULE, AnytimeWindow(10, 3, turns="paper"), RawTail(10, total=101)]
    assert len({*made, *(eval(repr(rule)) for rule in made)}) == len(made)
    for rule in made:
        assert eval(repr(rule)) == rule
        with pytest.raises(FrozenInstanceError):
            rule.window = CAPPED


def test_options_of_a_rule_are_by_default_three_accumulators_and_balanced_turns():
    assert AnytimeWindow(10) == AnytimeWindow(Fixed(10), accumulators=3, turns="balanced")
    assert TailAverage(10).rule == TailAverage(Fixed(10)).rule == AnytimeWindow(10)
    assert TailAverage(0.5).rule == TailAverage(Growing(0.5)).rule == AnytimeWindow(0.5)
    assert AnytimeWindow(10) != ExactWindow(10)
    assert AnytimeWindow(1) != AnytimeWindow(1.0)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        *[(lambda n=n: AnytimeWindow(9, n), "accumulators: expected an int >= 2")
          for n in (1, 0, -1, True, 2.5, 3.0, "3", None)],
        *[(lambda turns=turns: AnytimeWindow(9, 3, turns), "turns: expected .balanced. or .paper.")
          for turns in ("Paper", "", None, 1, ["paper"])],
        *[(lambda n=n: RawTail(0.5, n), "total: expected an int >= 1")
          for n in (0, -1, True, 2.5, "3", None)],
    ],
)  # fmt: skip
def test_bad_options_of_a_rule_are_refused_with_what_was_expected(make, what):
    with pytest.raises((ValueError, TypeError), match=what):
        make()
