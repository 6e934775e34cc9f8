"""AnyTail: a resumed run is as one that never stopped, and what was tampered with is refused."""

import math
from itertools import cycle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailavg import AnyTail, AnytimeWindow, Exponential, RawTail, TailAverage
from tests.support.cases import KINDS, WAYS, bits, chunks, of_kinds, of_rules, take, ways_for
from tests.support.effort import some


@of_kinds("float", "complex", "0-d float32", "float32 (3,)", "int32 (2,)")
@of_rules([AnyTail(), AnyTail(6, 0.4)])
def test_a_resumed_run_is_as_one_that_never_stopped_to_the_bit(rule, kind):
    """Each way is gone on from once."""
    xs, ways, average = kind.draw(1500), ways_for(kind), TailAverage(rule)
    stops = [(1, 4), (4, 12), (12, 37), (37, 290), (290, 900), (900, 1500)]
    for (stop, after), chosen in zip(stops, cycle(ways), strict=False):
        half = (stop + after) // 2
        take(average, kind, xs[average.count : stop], "update", 1.0)
        resumed = ways[chosen](average)
        assert bits(resumed) == bits(average), chosen
        assert resumed == average
        assert repr(resumed) == repr(average)
        for run in (average, resumed):
            take(run, kind, xs[stop:half], "update", 1.0)
            run.update_many(xs[half : half + 1])
            run.scan(xs[half + 1 : after], 0.5)
        assert bits(resumed) == bits(average), chosen
        for window in (rule.shortest, 0.77, 1500):
            once, again = average.value(window), resumed.value(window)
            assert np.asarray(once).tobytes() == np.asarray(again).tobytes()
            assert np.array_equal(average.weights(window), resumed.weights(window))
        average = resumed


@settings(max_examples=some(20, 60))
@given(
    st.integers(6, 20),
    st.floats(0.01, 0.9),
    st.sampled_from(["float", "0-d float32", "float32 (3,)", "complex128 (2, 3)"]),
    st.data(),
    chunks(700),
)
def test_a_run_resumed_after_every_chunk_is_as_one_that_never_was(m, shortest, kind, data, parts):
    kind = KINDS[kind]
    way = data.draw(st.sampled_from(sorted(ways_for(kind))))
    xs = kind.draw(700)
    average = stopped = TailAverage(AnyTail(m, shortest))
    for start, end, method in parts:
        stopped = WAYS[way](stopped)
        values = take(average, kind, xs[start:end], method, 0.95)
        again = take(stopped, kind, xs[start:end], method, 0.95)
        assert np.asarray(values).tobytes() == np.asarray(again).tobytes()
        assert bits(average) == bits(stopped)


@pytest.mark.parametrize("way", WAYS)
def test_nan_and_infinity_are_resumed_too(way):
    average = TailAverage(AnyTail(6))
    for x in [1.0, math.nan, 2.0, math.inf, 3.0, 4.0, 5.0, 6.0]:
        average.update(x)
    resumed = WAYS[way](average)
    assert resumed == average
    for run in (average, resumed):
        run.update_many(np.ones(50))
    np.testing.assert_equal(resumed.value(1.0), average.value(1.0))
    assert resumed.value(0.1) == average.value(0.1) == pytest.approx(1.0, rel=1e-15)


def test_the_blocks_of_a_state_are_means_of_their_samples():
    xs = np.sin(np.arange(3000.0))
    for rule in (AnyTail(), AnyTail(6, 0.3)):
        average = TailAverage(rule)
        for t, x in enumerate(xs.tolist(), start=1):
            average.update(x)
            if t % 41 == 0:
                state = average.state_dict()
                assert state["rule"] == {
                    "type": "AnyTail",
                    "accumulators": rule.accumulators,
                    "shortest": rule.shortest,
                }
                assert state["starts"][0] == 0
                ends = [*state["starts"][1:], state["folded"]]
                expected = [
                    xs[start:end].mean() if end > start else 0.0
                    for start, end in zip(state["starts"], ends, strict=True)
                ]
                np.testing.assert_allclose(state["blocks"], expected, rtol=0, atol=1e-13)
                fresh = xs[state["folded"] : t].sum()
                assert math.isclose(state["partial"], fresh, rel_tol=1e-9, abs_tol=1e-9)


def a_state(rule=AnyTail(6), steps=600, shape=()):  # noqa: B008
    average = TailAverage(rule)
    average.update_many(np.sin(np.arange(steps * math.prod(shape))).reshape(steps, *shape))
    return average.state_dict()


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize(
    "change",
    [
        {"count": 1},
        {"count": 0},
        {"count": -1},
        {"count": 10**6},
        {"count": 10**15},
        {"folded": 0},
        {"folded": 601},
        {"starts": []},
        {"starts": [0, 1]},
        {"starts": [0, 100, 200, 300, 400, 500]},
        {"starts": [1, 2, 3, 4, 5, 6]},
        {"blocks": []},
        {"blocks": np.zeros((7, 2))},
        {"partial": np.zeros(3)},
        {"rule": {"type": "AnyTail"}},
        {"rule": {"type": "AnyTail", "accumulators": 7, "shortest": 0.1}},
        {"rule": {"type": "AnyTail", "accumulators": 6, "shortest": 0.2}},
        {"rule": {"type": "AnyTail", "accumulators": 5, "shortest": 0.1}},
        {"rule": {"type": "AnyTail", "accumulators": 6, "shortest": 1.0}},
        {"rule": {"type": "AnyTail", "accumulators": 6, "shortest": "0.1"}},
        {"rule": {"type": "AnyTail", "accumulators": 6, "shortest": 0.1, "window": 3}},
        {"rule": {"type": "AnytimeWindow", "window": {"type": "AnyTail"}}},
        {"rule": {"type": "AnytimeWindow", "window": {"type": "Fixed", "k": 50}}},
    ],
    ids=str,
)
def test_a_state_that_was_tampered_with_is_refused(change, shape):
    state = a_state(shape=shape)
    TailAverage.from_state_dict(state)
    with pytest.raises(ValueError, match="state: "):
        TailAverage.from_state_dict({**state, **change})


def test_a_state_of_another_rule_is_no_tail():
    for rule in (AnytimeWindow(0.1, 6), AnytimeWindow(50, 6), Exponential(0.1), RawTail(0.1, 600)):
        with pytest.raises(ValueError, match="state: "):
            TailAverage.from_state_dict({**a_state(rule), "rule": a_state()["rule"]})


def test_each_start_of_a_state_counts():
    state = a_state()
    for i in range(6):
        for by in (-1, 1):
            starts = [start + by * (i == j) for j, start in enumerate(state["starts"])]
            with pytest.raises(ValueError, match="state: "):
                TailAverage.from_state_dict({**state, "starts": starts})


def test_averages_are_equal_when_their_states_are():
    one, other = TailAverage(AnyTail(6)), TailAverage(AnyTail(6))
    for average in (one, other):
        average.update_many(range(100))
    assert one == other
    other.update(1.0)
    assert one != other
    one.update(2.0)
    assert one != other
    assert TailAverage(AnyTail(6)) != TailAverage(AnyTail(7))
    assert TailAverage(AnyTail(6)) != TailAverage(AnyTail(6, 0.2))
    assert TailAverage(AnyTail(6)) != TailAverage(6)
    assert repr(one) == (
        "<TailAverage(AnyTail(accumulators=6, shortest=0.1), dtype='float64'): 101 samples>"
    )


def test_a_file_that_is_damaged_is_refused(tmp_path):
    average = TailAverage(AnyTail(6))
    average.update_many(np.ones((100, 3)))
    path = tmp_path / "average"
    average.save(path)
    assert TailAverage.load(path) == average
    content = path.read_bytes()
    for length in range(0, len(content), 301):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="average: damaged, or not saved by tailavg"):
            TailAverage.load(path)
