"""Decay: tails that are read as learning-rate decays, against the weights of each sample."""

import math
import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailavg import AnyTail, AnytimeWindow, Decay, Exponential, Fixed, Growing, TailAverage
from tailavg.core.windows import as_window
from tests.support.any_tails import TAILS, Tails, every_tail
from tests.support.cases import EVERY_KIND
from tests.support.effort import some
from tests.support.model import Window

FALLS = {  # what is left of the rate when the part u of the window has passed
    "linear": lambda u: 1 - u,
    "cosine": lambda u: (1 + math.cos(math.pi * u)) / 2,
    "1-sqrt": lambda u: 1 - math.sqrt(u),
}


def staircase(u):
    """Flat in between: some samples have no weight."""
    return 1.0 if u < 0.2035 else 0.5 if u < 0.7071 else 0.0


def squared(u):
    return (1 - u) ** 2


SHAPES = {**{name: name for name in FALLS}, "squared": squared, "staircase": staircase}
OTHERS = [name for name in SHAPES if name != "linear"]
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def by_sample(window, shape, t):
    """The weight of each sample, oldest first: the contract, one by one."""
    fall = FALLS.get(shape, shape)
    k = min(t, Window.of(as_window(window)).size(t))
    return np.array(
        [fall(max(0, 1 - (a + 1) / k)) - fall(max(0, 1 - a / k)) for a in reversed(range(t))]
    )


def by_block(tails, window, shape):
    """The weights of an AnyTail: each block has those of its samples, spread evenly."""
    exact = by_sample(window, shape, tails.t)
    weights = np.zeros(tails.t)
    for block in tails.blocks:
        weights[block] = exact[block].sum() / len(block)
    return weights


# The weights of samples


@every_shape
@pytest.mark.parametrize("window", [1, 2, 7, 100, 0.3, 0.07, 1.0, Growing(0.5, at_most=20)])
def test_weights_of_every_sample(shape, window):
    for t in (1, 2, 3, 10, 50, 99):
        got = Decay(window, shape).weights(t)
        np.testing.assert_allclose(got, by_sample(window, shape, t), rtol=1e-9, atol=1e-14)
        assert got.sum() == pytest.approx(1, abs=1e-14)
        assert (got >= 0).all()


def test_small_weights_keep_their_digits():
    """The newest of a million has a weight of 2.5e-12, which differences of cosines would lose."""
    newest = Decay(10**6, "cosine").weights(10**6)[-1]
    assert newest == pytest.approx((math.pi / 2e6) ** 2, rel=1e-9)
    newest = Decay(10**6, "1-sqrt").weights(10**6)[-1]
    assert newest == pytest.approx(0.5e-6 * (1 + 0.25e-6), rel=1e-12)


@every_shape
def test_an_average_is_a_decayed_rate(shape):
    """SGD on a quadratic; its gradients again with a rate that falls end at the average."""
    random = np.random.default_rng(3)
    curvature, start, rate, steps, k = np.diag([1.0, 0.3, 0.05]), np.full(3, 5.0), 0.1, 400, 150
    w, iterates, gradients = start, [], []
    for _ in range(steps):
        gradients.append(curvature @ w + random.normal(size=3))
        w = w - rate * gradients[-1]
        iterates.append(w)
    average = Decay(k, shape).weights(steps) @ np.array(iterates)
    fall, w = FALLS.get(shape, shape), start
    for i, gradient in enumerate(gradients):
        w = w - rate * fall(max(0, i - (steps - k)) / k) * gradient
    np.testing.assert_allclose(average, w, rtol=0, atol=1e-10)
    # an AnyTail that keeps every sample reads the same
    tails = TailAverage(AnyTail(steps))
    tails.update_many(np.array(iterates))
    np.testing.assert_allclose(tails.value(Decay(k, shape)), w, rtol=0, atol=1e-10)


# An AnyTail


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        *((TAILS[0], name) for name in OTHERS),
        *zip(TAILS[1:], OTHERS, strict=True),
    ],
    ids=str,
)
def test_an_any_tail_reads_the_weights_of_its_blocks(rule, name):
    shape = SHAPES[name]
    average, tails, steps = TailAverage(rule), Tails(rule), 150
    read_at = {1, 2, 13, 32, 99, 150}
    xs = np.random.default_rng(0).normal(3, 1, steps)
    windows = [rule.shortest, 0.95, 1.0, math.ceil(rule.shortest * steps), 10 * steps]
    decays = [Decay(window, shape) for window in windows]
    scanned = TailAverage(rule).scan(xs, decays)
    for t in range(1, steps + 1):
        average.update(xs[t - 1])
        tails.add()
        if t not in read_at:
            continue
        for i, (window, decay) in enumerate(zip(windows, decays, strict=True)):
            alpha = by_block(tails, window, shape)
            np.testing.assert_allclose(average.weights(decay), alpha, rtol=1e-9, atol=1e-13)
            expected = alpha @ xs[:t]
            assert average.value(decay) == pytest.approx(expected, rel=1e-12)
            assert scanned[i, t - 1] == pytest.approx(expected, rel=1e-12)
            got, ages = average.profile(decay), t - 1 - np.arange(t)
            assert got.size == pytest.approx(Window.of(as_window(window)).size(t), rel=1e-14)
            assert got.effective_size == pytest.approx(1 / (alpha @ alpha), rel=1e-9)
            assert got.mean_age == pytest.approx(alpha @ ages, rel=1e-9, abs=1e-9)
            assert got.oldest_age == ages[np.argmax(alpha > 1e-15)]
            assert got.accumulators == rule.accumulators


@settings(max_examples=some(8, 40))
@given(
    rule=st.sampled_from(TAILS),
    shape=st.sampled_from([SHAPES[name] for name in OTHERS]),
    part=st.floats(0, 1),
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    kind=st.sampled_from(["float", "float64 (3,)", "float32 (3,)", "complex"]),
)
def test_scans_of_long_streams_in_pieces(rule, shape, part, sizes, kind):
    """Folds and merges in between; a scan is a read after each update."""
    decay = Decay(rule.shortest + part * (1 - rule.shortest), shape)
    xs = EVERY_KIND[kind].draw(sum(sizes))
    scanned, single = TailAverage(rule), TailAverage(rule)
    for start, end in pairwise([0, *np.cumsum(sizes)]):
        found = scanned.scan(xs[start:end], decay)
        for x in xs[start:end]:
            single.update(x)
        rtol = 2e-5 if "32" in kind else 1e-11
        np.testing.assert_allclose(found[-1], single.value(decay), rtol=rtol, atol=rtol)


@every_tail
def test_linear_is_the_plain_window_to_the_bit(rule):
    average, xs = TailAverage(rule), np.random.default_rng(1).normal(size=(700, 2))
    average.update_many(xs[:600])
    for window in (rule.shortest, 0.95, 1.0, 700, Growing(1.0, at_most=650)):
        decay = Decay(window, "linear")
        assert average.value(decay).tobytes() == average.value(window).tobytes()
        assert average.profile(decay) == average.profile(window)
        assert np.array_equal(average.weights(decay), average.weights(window))
        one, other = average.copy(), average.copy()
        assert np.array_equal(one.scan(xs[600:], decay), other.scan(xs[600:], window))


def test_plain_windows_and_decays_in_one_scan():
    xs = np.random.default_rng(2).normal(size=300)
    windows = [0.2, Decay(0.2, "cosine"), 1.0]
    both = TailAverage(AnyTail()).scan(xs, windows)
    for got, window in zip(both, windows, strict=True):
        assert np.array_equal(got, TailAverage(AnyTail()).scan(xs, window))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_block_without_weight_does_no_harm(bad):
    """Neither one older than the window, nor one where the rate stands still."""
    xs = np.ones(200)
    xs[3] = bad
    average = TailAverage(AnyTail())
    scanned = average.scan(xs, Decay(0.5, "cosine"))
    assert scanned[-1] == average.value(Decay(0.5, "cosine")) == pytest.approx(1)
    assert not math.isfinite(average.value(Decay(1.0, "cosine")))
    xs = np.ones(60)
    xs[33] = bad  # where the staircase is flat
    average = TailAverage(AnyTail(70))
    scanned = average.scan(xs, Decay(1.0, staircase))
    assert scanned[-1] == average.value(Decay(1.0, staircase)) == pytest.approx(1)


# Functions that misbehave between the points at which they are checked


def checked_at(u):
    return (1024 * u) % 1 == 0


WILD = {
    "waves": lambda u: 1 - u + 0.04 * math.sin(1024 * math.pi * u) ** 2,
    "NaN": lambda u: 1 - u if checked_at(u) else math.nan,
    "some NaN": lambda u: math.nan if not checked_at(u) and 0.3 < u < 0.4 else 1 - u,
    "infinite": lambda u: 1 - u if checked_at(u) else math.inf,
    "negative": lambda u: 1 - u if checked_at(u) else -5.0,
    "nearly 0 at the end": lambda u: 1 - u * (1 - 5e-10),
}


@pytest.mark.parametrize("shape", WILD.values(), ids=WILD)
@pytest.mark.parametrize("window", [0.3, 1.0, 170])
@pytest.mark.usefixtures("scanner")
def test_weights_add_up_whatever_a_function_does(shape, window):
    decay, xs = Decay(window, shape), np.random.default_rng(4).normal(5, 1, 150)
    for t in (1, 2, 3, 10, 150):
        weights = decay.weights(t)
        assert (weights >= 0).all()  # so none is NaN
        assert weights.sum() == pytest.approx(1, abs=1e-12)
    average = TailAverage(AnyTail(8))
    scanned = TailAverage(AnyTail(8)).scan(xs, decay)
    for t, x in enumerate(xs, start=1):
        average.update(x)
        weights = average.weights(decay)
        assert (weights >= 0).all()
        assert weights.sum() == pytest.approx(1, abs=1e-12)
        assert average.value(decay) == pytest.approx(weights @ xs[:t], rel=1e-12)
        assert scanned[t - 1] == pytest.approx(average.value(decay), rel=1e-12)


# What is refused


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        ("sine", ValueError, r"shape: expected one of \['linear', 'cosine', '1-sqrt'\], or a fun"),
        (None, TypeError, "shape: expected one of .* got None"),
        (0.5, TypeError, "shape: expected one of .* got 0.5"),
        (lambda u: 0.9 * (1 - u), ValueError, "expected 1 at 0, got 0.9"),
        (lambda u: 1 - 0.5 * u, ValueError, "expected 0 at 1, got 0.5"),
        (lambda u: u, ValueError, "expected 1 at 0, got 0.0"),
        (lambda u: 1 - u + math.sin(9.42477796 * u) ** 2, ValueError, "never rises, got 0.99"),
        (lambda u: math.nan if 0.4 < u < 0.6 else 1 - u, ValueError, "never rises, got .* nan"),
        (lambda u: 1 / (1 - u) - 1, ValueError, "expected a number for 1, got ZeroDivisionError"),
        (lambda u: f"x{u}", ValueError, "expected a number for 0, got ValueError"),
        (lambda: 1, ValueError, "expected a number for 0, got TypeError"),
    ],
)
def test_shapes_that_are_no_decays(shape, error, message):
    with pytest.raises(error, match=message):
        Decay(0.2, shape)


def test_windows_that_cannot_be_read():
    average = TailAverage(AnyTail())
    average.update_many(range(1000))
    for decay in (Decay(0.05, "cosine"), Decay(50, "linear")):
        for call in (average.value, average.weights, average.profile):
            with pytest.raises(
                ValueError, match=r"expected at least 0.1 of the samples .* got Decay"
            ):
                call(decay)
        with pytest.raises(ValueError, match=r"expected at least 0.1 of the samples .* got Decay"):
            average.scan([1.0], [0.5, decay])
    assert average.count == 1000
    with pytest.raises(ValueError, match="window: expected an int"):
        Decay(0, "cosine")


@pytest.mark.parametrize("rule", [AnytimeWindow(100), Exponential(0.25)])
def test_other_rules_have_their_own_weights(rule):
    average = TailAverage(rule)
    average.update_many(range(10))
    with pytest.raises(ValueError, match=r"has its own window, got Decay"):
        average.value(Decay(0.2, "cosine"))


def test_a_decay_is_no_rule():
    with pytest.raises(
        TypeError, match=r"got Decay.*; average with AnyTail\(\), and read the average"
    ):
        TailAverage(Decay(0.2, "cosine"))


def test_a_decay_is_a_value():
    assert Decay(0.2, "cosine") == Decay(Growing(0.2), "cosine") != Decay(Fixed(2), "cosine")
    assert len({Decay(0.2, "cosine"), Decay(0.2, "cosine"), Decay(0.2, squared)}) == 2
    assert repr(Decay(5, "1-sqrt")) == "Decay(window=Fixed(k=5), shape='1-sqrt')"
    assert pickle.loads(pickle.dumps(Decay(5, squared))) == Decay(5, squared)
