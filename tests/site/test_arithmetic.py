"""The explorer's arithmetic, in a browser, against the library's."""

import numpy as np
import pytest

from tailavg import (
    AnyTail,
    AnytimeWindow,
    ExactWindow,
    Exponential,
    Fixed,
    Freshest,
    Growing,
    TailAverage,
)
from tailavg.core.clock import starts_at
from tailavg.core.profile import dense_weights, profile
from tests.support import browser
from tests.support.browser import link
from tests.support.effort import some

pytestmark = browser.MARKS

READ = """
return arguments[0].map((hash) => {
  const chosen = settings.fromHash(hash), { t, method } = chosen;
  const rule = settings.rules(chosen)[method];
  const runs = tailavg.newestFirst(rule, t);
  return {
    hash: settings.toHash(chosen),
    sizes: runs.flatMap(([size, run]) => typeof run === "number" ? [size] : Array(size).fill(1)),
    weights: runs.flatMap(([size, run]) => typeof run === "number" ? [run] : [...run]),
    starts: rule.closes ? tailavg.startsAt(rule, t) : [],
    closes: rule.closes ? tailavg.closesAt(rule, t) : 0,
    profile: tailavg.profile(rule, t),
  };
});
"""

FOLLOW = """
return arguments[0].map((hash) => {
  const chosen = settings.fromHash(hash), rules = Object.values(settings.rules(chosen));
  const { n, since, averages } = signals.responses(rules, rules[0].window, chosen.t);
  const { t, c, method } = chosen;
  return { n, since, averages, t, c, method, python: settings.lines(chosen).python.code };
});
"""

WINDOWS = [
    Fixed(1),
    Fixed(2),
    Fixed(7),
    Fixed(100),
    Fixed(1000),
    Growing(0.07),
    Growing(0.25),
    Growing(1 / 3),
    Growing(0.75),
    Growing(1.0),
    Growing(0.001),
    Growing(0.123456789012),
    Growing(0.25, at_most=100),
    Growing(0.07, at_most=7),
    Growing(0.9, at_most=1),
    Growing(0.6180339887498949, at_most=333),
]
STEPS = [1, 2, 3, 13, 14, 99, 100, 101, 400, 777, 1150, 3456, 5000, 20_000, 123_456]


def cases():
    """A hundred settings and more: each window with each method, at steps that go around."""
    tried, number = [], 0
    for window in WINDOWS:
        for z in (2, 3, 4, 5, 8):
            rules = [AnytimeWindow(window, z), AnytimeWindow(window, z, turns="paper")]
            if z == 2:
                rules += [Exponential(window), ExactWindow(window)]
            for rule in rules:
                t = STEPS[number % len(STEPS)]
                if not isinstance(rule, AnytimeWindow):
                    t = min(t, some(5000, t))  # each sample has a weight of its own
                tried.append((rule, t, None))
                number += 1
        if isinstance(window, Growing) and window.at_most is None:
            for accumulators, t in ((6, 101), (12, 4000), (16, 77_777)):
                rule = AnyTail(accumulators, min(0.1, window.c))
                tried += [(rule, t, window), (rule, t, Freshest(window))]
            tried += [(AnyTail(12, min(0.1, window.c)), t, Freshest(window)) for t in STEPS]
    return [
        *tried,
        (AnytimeWindow(0.07), 100, None),  # 0.07 · 100 is 7
        (ExactWindow(0.07), 100, None),
        (ExactWindow(0.29), 100, None),
        (AnytimeWindow(Growing(0.07, at_most=7)), 100, None),
        (AnytimeWindow(Growing(0.5, at_most=100), 5), 300, None),  # as it stops growing
        (AnytimeWindow(100, 8), 750, None),  # seven blocks do not divide a hundred
        (AnytimeWindow(3, 8), 50, None),  # more accumulators than samples
        (AnytimeWindow(1_000_000), 1000, None),
        (AnytimeWindow(1, 16), 1_000_000, None),
        (AnytimeWindow(0.25, 3), 1_000_000, None),
    ]


def test_every_weight_is_that_of_the_library(explorer):
    tried = cases()
    assert len(tried) > 100
    answers = explorer.run(READ, [link(*case) for case in tried])
    for (rule, t, window), answer in zip(tried, answers, strict=True):
        where = f"{rule}, {window}, t = {t}"
        assert answer["hash"] == link(rule, t, window), where
        starts = starts_at(rule, t)
        blocks = isinstance(rule, AnytimeWindow | AnyTail)
        assert answer["starts"] == (starts if blocks else []), where
        newest_first = np.repeat(answer["weights"], answer["sizes"])
        weights = np.concatenate([np.zeros(t - len(newest_first)), newest_first[::-1]])
        expected = dense_weights(rule, starts, t, window)
        np.testing.assert_allclose(weights, expected, rtol=1e-12, atol=0, err_msg=where)
        summary = profile(rule, starts, t, window)
        assert answer["profile"] == {
            "count": t,
            "size": summary.size,
            "effectiveSize": pytest.approx(summary.effective_size, rel=1e-11),
            "meanAge": pytest.approx(summary.mean_age, rel=1e-11),
            "oldestAge": summary.oldest_age,
            "accumulators": summary.accumulators,
        }, where
        if blocks and answer["closes"] < 2**53:  # the library turns there, too
            closes = int(answer["closes"])
            assert starts_at(rule, closes)[-1] == starts[-1], where
            assert starts_at(rule, closes + 1)[-1] == closes, where


def test_the_weights_are_those_of_averages():
    """What the cases above compare with is what an average says of itself."""
    for rule, t in ((AnytimeWindow(0.3, 4), 777), (Exponential(50), 300), (ExactWindow(0.2), 41)):
        average = TailAverage(rule)
        average.update_many(np.zeros(t))
        np.testing.assert_array_equal(average.weights(), dense_weights(rule, starts_at(rule, t), t))


SIGNALS = {  # settings of charts, and how close they are to the averages of their signals
    "#window=200&t=1050": 1e-9,
    "#window=0.25&accumulators=5&t=1150": 1e-9,
    "#window=0.5&at_most=100&method=paper&t=190": 1e-9,
    "#window=1&t=1": 1e-9,
    "#window=0.25&t=100000": 1e-3,
    "#window=0.3&method=anytail&t=900": 1e-9,
    "#window=0.3&method=freshest&t=900": 1e-9,
}


def test_the_charts_are_averages_of_their_signals(explorer):
    charts = explorer.run(FOLLOW, list(SIGNALS))
    for (settings, atol), chart in zip(SIGNALS.items(), charts, strict=True):
        names = {}
        exec(chart["python"], names)
        rule = names["average"].rule
        window = Growing(chart["c"]) if isinstance(rule, AnyTail) else rule.window
        tails = {"anytail": window, "freshest": Freshest(window)}
        t, n, ahead = chart["t"], chart["n"], np.arange(chart["since"][-1] + 1)
        signals = {"step": ahead > 0, "drift": ahead / n, "outlier": n * (ahead == 1)}
        columns = np.array([*signals.values()], float).T
        rules = [
            (rule, tails.get(chart["method"])),
            (Exponential(window), None),
            (ExactWindow(window), None),
        ]
        for (other, reading), drawn in zip(rules, chart["averages"], strict=True):
            average = TailAverage(other)
            average.update_many(np.zeros((t - 1, len(signals))))
            averaged = average.scan(columns, *([reading] if reading else []))
            for name, expected in zip(signals, averaged[chart["since"]].T, strict=True):
                where = f"{settings}: {name} by {other}"
                np.testing.assert_allclose(drawn[name], expected, atol=atol, err_msg=where)
