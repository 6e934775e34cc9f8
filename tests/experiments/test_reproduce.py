"""The experiments of the paper: against slow loops, with verdicts both ways."""

import json
import os
import pty
import re
import signal
import subprocess
import threading
from contextlib import contextmanager
from dataclasses import replace
from html import escape

import numpy as np
import pytest

from tailavg import Exponential, TailAverage
from tailavg.experiments import figures
from tailavg.experiments.claims import (
    CLAIMS,
    STREAM_CLAIMS,
    Claim,
    Finding,
    Outcome,
    Verdict,
    extent,
    find,
    gap,
)
from tailavg.experiments.moments import (
    expected_errors,
    largest_stable_step,
    noise_ball,
    spectral_radius,
    transition,
)
from tailavg.experiments.noise import promised, settled_share, sizes, variances
from tailavg.experiments.regression import (
    EVERY_TAIL,
    FRACTIONS,
    Curve,
    DivergedError,
    Problem,
    Regression,
    measure,
    measure_tails,
    methods,
    reading,
    turns,
)
from tailavg.experiments.run import Plan, run
from tests.support import commands
from tests.support.any_tails import Tails
from tests.support.commands import TAILAVG
from tests.support.model import averages, freshest, weight_matrix
from tests.support.paths import DOCS
from tests.support.processes import started

REPRODUCTION = DOCS / "reproduction"
SMALL = Problem(runs=3, batches=60, dimension=4, batch_size=5, seed=3)
OPTIONS = ["--runs=3", "--batches=60", "--dimension=4", "--batch-size=5", "--quick"]
FILES = [
    "claims.json",
    "claims.md",
    "curves.csv",
    *(f"figure{n}.{kind}" for n in range(1, 6) for kind in ("png", "svg")),
    "report.html",
    "tails.csv",
]


def iterates(problem):
    return np.concatenate(list(Regression(problem).iterates()))


# The problem


def test_sgd_is_the_slow_loop_over_runs_samples_and_coordinates():
    fast = Regression(SMALL)
    got = np.concatenate(list(fast.iterates()))
    slow = Regression(SMALL)
    w = slow.start.copy()
    for t, (x, y) in enumerate(slow.batches()):
        for row in range(SMALL.runs):
            gradient = [0.0] * SMALL.dimension
            for sample in range(SMALL.batch_size):
                pairs = zip(x[row, sample], w[row], strict=True)
                residual = sum(a * b for a, b in pairs) - y[row, sample]
                for i in range(SMALL.dimension):
                    gradient[i] += 2 * x[row, sample, i] * residual / SMALL.batch_size
            for i in range(SMALL.dimension):
                w[row, i] -= SMALL.used_step * gradient[i]
        np.testing.assert_allclose(got[t], w, rtol=1e-11, atol=1e-13)


def test_batches_have_the_distribution_of_the_paper():
    problem = Problem(runs=200, batches=40, dimension=3, noise=0.25)
    regression = Regression(problem)
    xs, ys = zip(*regression.batches(), strict=True)
    x, y = np.stack(xs), np.stack(ys)
    covariance = np.cov(x.reshape(-1, 3).T)
    np.testing.assert_allclose(covariance, np.diag([1, 1 / 2, 1 / 3]), atol=0.02)
    noise = y - np.einsum("trbd,rd->trb", x, regression.optimum)
    assert noise.mean() == pytest.approx(0, abs=0.01)
    assert noise.var() == pytest.approx(0.25, rel=0.02)
    assert regression.optimum.std() == pytest.approx(1, rel=0.1)
    assert not regression.start.any()


def test_excess_is_the_expected_loss_above_that_of_the_optimum():
    regression = Regression(replace(SMALL, dimension=3))
    w = regression.optimum + np.array([1.0, -2.0, 3.0])
    np.testing.assert_allclose(regression.excess(w), 1 / 1 + 4 / 2 + 9 / 3)

    many = Regression(replace(SMALL, batches=20_000))
    xs, ys = zip(*many.batches(), strict=True)
    x, y, best = np.concatenate(xs, axis=1)[0], np.concatenate(ys, axis=1)[0], many.optimum[0]
    above = np.mean((x @ (best + 0.5) - y) ** 2) - np.mean((x @ best - y) ** 2)
    assert above == pytest.approx(many.excess(many.optimum + 0.5)[0], rel=0.02)


def test_points_are_numbers_or_drawn():
    regression = Regression(replace(SMALL, start="normal", optimum=2.5))
    assert (regression.optimum == 2.5).all()
    assert len(np.unique(regression.start)) == regression.start.size


@pytest.mark.parametrize("chunk", [1, 17 * 12, 10**9])
def test_chunks_do_not_change_the_errors(chunk, monkeypatch):
    expected = measure(SMALL, methods(60))
    monkeypatch.setattr("tailavg.experiments.regression.CHUNK", chunk)
    got = measure(SMALL, methods(60))
    for curve, errors in expected.items():
        np.testing.assert_allclose(got[curve], errors, rtol=1e-9)


def freshest_matrix(rule, c):
    """The weights of an AnyTail read as Freshest(c), a row for each step, by the slow model."""
    tails, matrix = Tails(rule), np.zeros((SMALL.batches, SMALL.batches))
    for t in range(1, SMALL.batches + 1):
        tails.add()
        weights = freshest([len(block) for block in tails.blocks], max(1.0, c * t))
        for block, weight in zip(tails.blocks, weights, strict=True):
            matrix[t - 1, block] = weight / len(block)
    return matrix


@pytest.mark.parametrize(("curve", "rule"), [*methods(60).items(), *turns().items()], ids=str)
def test_errors_are_those_of_brute_force_averages(curve, rule):
    if reading(curve) is None:
        weights = weight_matrix(rule, SMALL.batches)
    else:
        weights = freshest_matrix(rule, float(curve.window.removeprefix("c = ")))
    expected = Regression(SMALL).excess(averages(weights, iterates(SMALL)))
    np.testing.assert_allclose(measure(SMALL, {curve: rule})[curve], expected, rtol=1e-9)


@pytest.mark.parametrize("chunk", [1, 17 * 12, 10**9])
def test_every_tail_has_the_error_of_its_dense_weights(chunk, monkeypatch):
    monkeypatch.setattr("tailavg.experiments.regression.CHUNK", chunk)
    tails, w = measure_tails(SMALL), iterates(SMALL)
    average = TailAverage(EVERY_TAIL)
    for t in range(1, SMALL.batches + 1):
        average.update(0.0)
        for i, fraction in enumerate(FRACTIONS):
            value = np.tensordot(average.weights(fraction), w[:t], axes=1)
            errors = Regression(SMALL).excess(value)
            got = tails.error[i, t - 1], tails.standard_error[i, t - 1]
            assert got == pytest.approx((errors.mean(), errors.std(ddof=1) / 3**0.5))
    assert (tails.least == tails.error[tails.best, np.arange(SMALL.batches)]).all()
    assert (tails.least <= tails.error).all()


def test_the_same_seed_gives_the_same_errors_and_another_does_not():
    rules = methods(60)
    once, again = measure(SMALL, rules), measure(SMALL, rules)
    other = measure(replace(SMALL, seed=4), rules)
    for curve in rules:
        np.testing.assert_array_equal(once[curve], again[curve])
        assert (once[curve] != other[curve]).any()


def test_the_same_seed_gives_the_same_batches_at_another_step():
    one, two = Regression(SMALL), Regression(replace(SMALL, step=0.3))
    for (x, y), (u, v) in zip(one.batches(), two.batches(), strict=True):
        np.testing.assert_array_equal(x, u)
        np.testing.assert_array_equal(y, v)


def test_a_step_that_is_too_large_is_named():
    with pytest.raises(DivergedError, match="step 50 is too large"):
        measure(replace(SMALL, step=50.0, batches=400), methods(400))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", 0.0),
        ("step", float("nan")),
        ("noise", -1.0),
        ("start", float("inf")),
        ("optimum", float("nan")),
        ("runs", 1),
    ],
)
def test_a_bad_problem_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}: expected"):
        replace(SMALL, **{field: value})


# The step


def test_the_default_step_is_half_of_the_guaranteed_one():
    problem = Problem()
    assert problem.guaranteed_step == pytest.approx(11 / (sum(1 / i for i in range(1, 51)) + 12))
    assert problem.used_step == problem.default_step == problem.guaranteed_step / 2
    assert problem.used_step == pytest.approx(1 / 3, abs=1e-4)
    assert replace(problem, step=0.1).used_step == 0.1
    assert replace(problem, batch_size=1, dimension=1).used_step == pytest.approx(1 / 6)


@pytest.mark.parametrize("options", [{}, {"dimension": 3}, {"batch_size": 1}, {"batch_size": 200}])
def test_the_second_moments_contract_at_the_bound_and_up_to_the_largest_stable_step(options):
    problem = Problem(**options)
    assert spectral_radius(problem, problem.guaranteed_step) < 1
    largest = largest_stable_step(problem)
    assert largest > problem.guaranteed_step
    assert spectral_radius(problem, 0.999 * largest) < 1 < spectral_radius(problem, 1.001 * largest)


def test_below_the_bound_the_mean_square_falls_whatever_the_error_is():
    """E‖w - w*‖² after a step, without noise, is a column sum of the recursion per coordinate."""
    problem = Problem()
    at_bound, _ = transition(problem, problem.guaranteed_step)
    assert at_bound.sum(axis=0).max() == pytest.approx(1)
    below, _ = transition(problem, 0.99 * problem.guaranteed_step)
    assert below.sum(axis=0).max() < 1


@pytest.mark.parametrize("start", [0.0, 2.0, "normal"])
def test_the_recursion_of_second_moments_is_that_of_simulated_iterates(start):
    problem = Problem(runs=20_000, batches=30, dimension=4, batch_size=3, start=start)
    regression = Regression(problem)
    errors = np.concatenate([regression.excess(w) for w in regression.iterates()])
    deviation = errors.std(axis=1) / problem.runs**0.5
    assert (np.abs(errors.mean(axis=1) - expected_errors(problem)) < 4 * deviation).all()


def test_the_noise_ball_is_reached_when_the_error_is_near_its_limit():
    problem = Problem(batches=2000)
    errors = expected_errors(problem)
    at = noise_ball(problem, 1.1)
    assert errors[at - 1] <= 1.1 * errors[-1] < errors[at - 2]
    assert noise_ball(replace(problem, batches=at - 1), 1.1) is None
    assert noise_ball(replace(problem, step=0.9), 1.1) is None  # unstable: there is no limit


# The claims


ALL = methods(400)


def curves(**factors):
    """Curves that fall from 1, all the same but for factors around step 200, by method name."""
    t = np.arange(1, 401)
    bump = np.exp(-(np.log(t / 200) ** 2) / 0.1)
    return {
        curve: (1 / t) * factors.get(f"{curve.method}_{curve.window.split()[-1]}", 1.0) ** bump
        for curve in ALL
    }


def judged(means):
    problem = Problem(batches=400)
    return {claim.name: claim.judge(problem, means) for claim in CLAIMS}


def test_a_gap_is_the_mean_log_ratio_over_a_tenth_of_a_decade():
    random = np.random.default_rng(0)
    over, under = random.lognormal(size=(2, 300))
    got = gap(over, under)
    for t in range(1, 301):
        near = [s for s in range(1, 301) if abs(np.log10(s / t)) <= 0.05]
        logs = [np.log(over[s - 1] / under[s - 1]) for s in near]
        assert got[t - 1] == pytest.approx(np.exp(np.average(logs, weights=[1 / s for s in near])))


def test_extent_is_the_least_and_largest_gap_from_the_first_step_on():
    means = curves(expk_10=1.5, awak_10=0.8)
    means[Curve("k = 10", "expk")][:5] *= 100  # too early to count
    assert extent(means, "k = 10", "expk", "awak") == pytest.approx((0.8, 1.5), rel=0.02)
    assert extent(means, "k = 10", "awak") == pytest.approx((0.8, 1.0), rel=0.02)


@pytest.mark.parametrize(
    ("name", "factors", "holds"),
    [
        ("small", {"expk_10": 1.08}, True),
        ("small", {"expk_10": 0.93}, True),
        ("small", {"expk_10": 1.15}, False),
        ("small", {"awak_10": 0.85}, False),
        ("faster", {"expk_100": 1.5, "awak_100": 1.2}, True),
        ("faster", {"expk_100": 1.5, "awak_100": 1.45}, False),
        ("faster", {"expk_100": 1.5, "expk_10": 1.5}, False),
        ("fixed", {"expk_100": 1.5}, True),
        ("fixed", {"expk_100": 1.5, "awak_100": 1.5}, False),
        ("early", {"expk_100": 1.5}, True),
        ("early", {"expk_100": 1.05}, False),
        ("close", {"exp_0.25": 0.93, "awa_0.25": 1.08}, True),
        ("close", {"exp_0.25": 1.15}, False),
        ("close", {"awa_0.25": 0.85}, False),
        ("close", {"awa3_0.25": 1.15}, False),
        ("raw", {"raw_0.25": 8.0}, True),
        ("raw", {"raw_0.25": 0.5}, True),
        ("raw", {}, False),
        ("exp", {"exp_0.5": 1.2}, True),
        ("exp", {"exp_0.5": 1.05}, False),
        ("exp", {"exp_0.5": 0.5}, False),
        ("awa", {"awa_0.5": 1.15}, True),
        ("awa", {}, False),
        ("awa3", {"awa3_0.5": 0.93}, True),
        ("awa3", {"awa3_0.5": 1.15}, False),
        ("memory", {"awa_0.5": 1.15}, True),
        ("memory", {"awa_0.5": 1.15, "awa3_0.5": 1.15}, False),
        ("freshest", {"freshest_0.25": 1.05, "freshest_0.5": 0.8}, True),
        ("freshest", {"freshest_0.25": 1.15}, False),
        ("freshest", {"freshest_0.5": 1.15}, False),
    ],
)
def test_verdicts_follow_the_curves(name, factors, holds):
    outcome = judged(curves(**factors))[name]
    assert outcome.holds is holds
    if len(factors) == 1 and name != "faster":
        (factor,) = factors.values()
        if name in ("small", "close", "raw", "awa3") or factor > 1:
            assert np.log(outcome.value) == pytest.approx(np.log(factor), rel=0.1)


def test_the_worst_of_several_curves_decides_and_is_named():
    outcome = judged(curves(**{"exp_0.25": 0.93, "awa_0.25": 1.09, "awa3_0.25": 1.01}))["close"]
    assert outcome.text.startswith("awa 9 % above true at t = ")


def test_old_examples_penalize_early_only_if_the_gap_is_gone_at_the_end():
    means = curves(expk_100=1.5)
    means[Curve("k = 100", "expk")][300:] *= 1.3
    assert not judged(means)["early"].holds


def test_a_rate_is_a_slope_over_the_second_half():
    means, t = curves(), np.arange(1, 401)
    assert judged(means)["rate"].value == pytest.approx(1)
    awa3 = Curve("c = 0.5", "awa3")
    means[awa3] = 5 * t**-1.1  # elsewhere, and slightly steeper
    outcome = judged(means)["rate"]
    assert outcome.value == pytest.approx(2**-0.1)
    assert outcome.text.startswith("slopes -1.10 and -1.00 from t = 200")
    assert outcome.holds
    means[awa3] = t**-1.2
    assert not judged(means)["rate"].holds


def test_many_iterates_are_before_the_noise_ball_or_few_or_all():
    claim = next(claim for claim in CLAIMS if claim.name == "ball")
    assert not claim.seeds
    reached = noise_ball(Problem(), 1.1)
    assert claim.judge(Problem(), {}).value == reached / 1000
    assert claim.judge(Problem(), {}).holds
    assert not claim.judge(Problem(batches=20 * reached), {}).holds
    assert not claim.judge(Problem(batches=reached - 1), {}).holds


def test_every_claim_quotes_the_paper_and_says_what_is_compared():
    claims = CLAIMS + STREAM_CLAIMS
    assert len({claim.name for claim in claims}) == len(claims)
    words = [words for claim in claims for words in claim.quotes.values()]
    assert len(set(words)) == len(words)
    places = {place for claim in claims for place in claim.quotes}
    assert places == {
        "Abstract", "Introduction", "Section 2", "Section 3", "Figure 1", "Figure 2", "Experiments"
    } | {"Ours, not in the paper"}  # fmt: skip
    assert [claim.name for claim in claims if claim.ours] == ["freshest"]


@pytest.mark.parametrize(
    ("agreeing", "verdict"),
    [(10, "holds"), (9, "holds"), (8, "depends"), (2, "depends"), (1, "fails"), (0, "fails")],
)
def test_a_claim_holds_if_nine_of_ten_seeds_say_so(agreeing, verdict):
    claim = Claim("x", {"x": "x"}, "x", lambda *_: Outcome(1.0, "", 0.0))
    outcomes = [Outcome(float(i), "", 0.1 if i < agreeing else -0.1) for i in range(10)]
    finding = Finding(claim, outcomes)
    assert finding.agreeing == agreeing
    assert finding.verdict is Verdict[verdict]
    assert finding.span == (0, 9)


def test_claims_are_judged_on_every_seed_unless_seeds_do_not_matter():
    by_seed = [curves(), curves(**{"exp_0.5": 1.5}), curves(**{"exp_0.5": 1.3})]
    found = {row.claim.name: row for row in find(CLAIMS, Problem(batches=400), by_seed)}
    assert [outcome.holds for outcome in found["exp"].outcomes] == [False, True, True]
    assert len(found["ball"].outcomes) == 1


# What needs no SGD


@pytest.mark.parametrize("c", [0.25, 0.5])
def test_the_share_follows_the_weights_of_the_papers_recurrence(c):
    """From n equal weights at t = 8, by the paper's γ_t and a list of all weights."""
    weights = [1 / 5] * 5
    for t in range(9, 61):
        gamma = c * (t - 1) / (1 + c * (t - 1)) * (1 - ((1 - c) / (t * (t - 1))) ** 0.5 / c)
        weights = [gamma * weight for weight in weights] + [1 - gamma]
    expected = 1 / sum(weight**2 for weight in weights) / 60
    assert settled_share(c, 5.0, 8, 60) == pytest.approx(expected)


def test_variances_are_those_of_the_weights():
    got = variances(seed=1, total=60, streams=20_000)
    for curve, rule in promised(60).items():
        expected = np.square(weight_matrix(rule, 60)).sum(axis=1)
        np.testing.assert_allclose(got[curve], expected, rtol=6 * (2 / 20_000) ** 0.5)
        k = sizes(rule, 60)
        assert ((1 / (k + 1) < expected + 1e-12) & (expected < 1 / k + 1e-12)).all()


def test_the_stream_claims_can_come_out_both_ways(monkeypatch):
    problem = Problem(batches=100)
    settles, variance = STREAM_CLAIMS
    assert settles.judge(problem, {}).holds
    kept = variances(0, 100)
    assert variance.judge(problem, kept).holds
    for factor in (0.5, 1.15):
        curve = Curve("c = 0.5", "awa")
        assert not variance.judge(problem, {**kept, curve: factor * kept[curve]}).holds
    monkeypatch.setattr("tailavg.experiments.noise.Exponential", lambda _: Exponential(10))
    assert not settles.judge(problem, {}).holds  # k_t goes to 10


# All measurements together


def test_a_run_has_every_seed_and_step_and_survives_a_step_that_diverges(monkeypatch):
    problem = replace(SMALL, step=0.05)
    monkeypatch.setattr(Plan, "other_steps", [0.1, 1e9])
    result = run(Plan(problem, 51, quick=True))
    rules = methods(60)
    for seed, means in enumerate(result.by_seed, start=problem.seed):
        errors = measure(replace(problem, seed=seed), rules)
        for curve in rules:
            np.testing.assert_array_equal(means[curve], errors[curve].mean(axis=1))
    assert list(result.by_step) == [0.05, 0.1, 1e9]
    assert result.by_step[1e9] is None
    other = replace(problem, step=0.1)
    means = {curve: errors.mean(axis=1) for curve, errors in measure(other, rules).items()}
    assert result.by_step[0.1] == [claim.judge(other, means) for claim in CLAIMS]
    assert [row.claim for row in result.findings] == [*CLAIMS, *STREAM_CLAIMS]


def test_a_full_run_has_ten_seeds_and_the_steps_up_to_the_bound():
    plan = Plan(Problem(), 850)
    assert plan.seeds == 10
    assert len(plan.other_steps) == 5
    assert plan.other_steps[-1] == plan.problem.guaranteed_step
    assert plan.problem.default_step in Plan(Problem(step=0.1), 850).other_steps


def test_an_interrupt_ends_every_thread():
    def interrupt(_):
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run(Plan(replace(SMALL, batches=20_000), 51), seeds_advance=interrupt)
    assert threading.active_count() == before


# The figures


def test_samples_touched_are_those_with_a_weight():
    steps = [1, 2, 7, 30, 55, 60]
    for rule in turns().values():
        weights = weight_matrix(rule, 60)
        expected = [t - np.flatnonzero(weights[t - 1] > 1e-15)[0] for t in steps]
        np.testing.assert_array_equal(figures.samples_touched(rule, steps), expected)


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The output of a small run."""
    output = tmp_path_factory.mktemp("reproduce") / "new" / "output"
    said = commands.done("reproduce", *OPTIONS, "--output", output)  # which tells nothing else
    assert "claims of the paper hold" in said.splitlines()[0]
    assert "exp performs" in said
    assert f"Report: {output / 'report.html'}" in said
    return output


def test_the_folder_has_every_file_and_no_other(folder):
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


def test_the_claims_are_those_of_the_options(folder):
    saved = json.loads((folder / "claims.json").read_text())
    problem = replace(SMALL, seed=0)
    assert saved["options"] == {**vars(problem), "step": problem.default_step, "at": 51}
    assert saved["seeds"] == [0, 1]
    assert set(saved["versions"]) == {"tailavg", "python", "numpy", "matplotlib"}
    by_seed = [
        {curve: errors.mean(axis=1) for curve, errors in measure(one, methods(60)).items()}
        for one in (problem, replace(problem, seed=1))
    ]
    findings = find(CLAIMS, problem, by_seed)
    for finding, row in zip(findings, saved["claims"], strict=False):
        assert {quote["place"]: quote["words"] for quote in row["quotes"]} == finding.claim.quotes
        assert row["verdict"] == finding.verdict
        assert row["values"] == pytest.approx([outcome.value for outcome in finding.outcomes])
    assert len(saved["claims"]) == len(CLAIMS + STREAM_CLAIMS)
    assert [row["step"] for row in saved["steps"]] == sorted(
        {problem.default_step, *Plan(problem, 51, quick=True).other_steps}
    )
    assert saved["largest_stable_step"] == pytest.approx(largest_stable_step(problem))


def test_the_curves_are_the_errors(folder):
    lines = (folder / "curves.csv").read_text().splitlines()
    assert len(lines) == 1 + 60 * len(methods(60) | turns())
    errors = measure(replace(SMALL, seed=0), methods(60))
    rows = {}
    for line in lines[1:]:
        window, method, t, *numbers = line.split(",")
        rows[Curve(window, method), int(t)] = [float(number) for number in numbers]
    for curve, values in errors.items():
        mean, error = values[29].mean(), values[29].std(ddof=1) / 3**0.5
        exact = errors[Curve(curve.window, "truek" if "k" in curve.window else "true")]
        ratio, smooth = mean / exact[29].mean(), gap(values.mean(axis=1), exact.mean(axis=1))[29]
        assert rows[curve, 30] == pytest.approx([mean, error, ratio, smooth], rel=1e-5)


def test_the_tails_are_their_errors_and_one_is_best_at_each_step(folder):
    lines = (folder / "tails.csv").read_text().splitlines()
    assert lines[0] == "fraction,t,error,standard_error,ratio_to_best,is_best"
    rows = np.array([[float(cell) for cell in line.split(",")] for line in lines[1:]])
    tails = measure_tails(replace(SMALL, seed=0))
    table = rows.reshape(len(FRACTIONS), SMALL.batches, 6)
    np.testing.assert_array_equal(table[:, 0, 0], FRACTIONS)
    np.testing.assert_array_equal(table[0, :, 1], np.arange(1, 61))
    np.testing.assert_allclose(table[..., 2], tails.error, rtol=1e-5)
    np.testing.assert_allclose(table[..., 3], tails.standard_error, rtol=1e-5)
    np.testing.assert_allclose(table[..., 4], tails.error / tails.least, rtol=1e-5)
    np.testing.assert_array_equal(table[..., 5].sum(axis=0), 1)
    assert (table[..., 4][table[..., 5] == 1] == 1).all()


def test_the_page_needs_nothing_else_and_suits_phones_and_the_dark(folder):
    page = (folder / "report.html").read_text()
    assert '<meta name="viewport" content="width=device-width' in page
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r'(src|href)="(?!#)|<link|<script|@import|url\((?!#)', page)
    assert figures.INK not in page.partition("</style>")[2]
    assert page.count("<svg") == page.count('role="img"') == 5
    assert "$" not in page
    for claim in CLAIMS + STREAM_CLAIMS:
        assert all(f"“{escape(words)}”" in page for words in claim.quotes.values())
    order = ["claims of the paper hold", "Figure 1:", "Figure 2:", "The claims<", "The problem<"]
    order += ["Figure 3:", "Figure 4:", "Figure 5:", "The claims at other step sizes"]
    assert sorted(order, key=page.index) == order
    assert "Not in the paper, and chosen here" in page


@pytest.mark.skipif(not REPRODUCTION.exists(), reason="the documentation is not here")
def test_the_committed_claims_are_of_the_defaults_and_of_these_quotes():
    saved = json.loads((REPRODUCTION / "claims.json").read_text())
    defaults = {**vars(Problem()), "step": Problem().default_step, "at": 850}
    assert saved["options"] == pytest.approx(defaults)
    assert saved["seeds"] == list(range(10))
    for claim, row in zip(CLAIMS + STREAM_CLAIMS, saved["claims"], strict=True):
        assert {quote["place"]: quote["words"] for quote in row["quotes"]} == claim.quotes
        assert row["compared"] == claim.compared
        assert row["of"] == len(row["values"]) == (10 if claim.seeds else 1)
    assert all(
        (REPRODUCTION / name).stat().st_size < 600_000 for name in FILES if name.endswith("svg")
    )


def test_the_report_tells_a_command_that_gives_it():
    problem = replace(SMALL, step=0.2, optimum=1.0)
    command = Plan(problem, 40, quick=True).command
    assert command == (
        "tailavg reproduce --quick --step 0.2 --optimum 1.0 --seed 3 --runs 3 --batches 60 "
        "--batch-size 5 --dimension 4 --at 40"
    )


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--optimum", "x"], 2, 'expected a number or "normal"'),
        (["--step", "0"], 2, "step: expected a number above 0"),
        (["--at", "61"], 2, "choose at most 60"),
        (["--step", "1e9"], 1, "too large: the iterates diverge; try a smaller --step"),
        (["--output", "/dev/null/x"], 1, "cannot write to /dev/null/x"),
    ],
)
def test_a_mistake_is_told_in_a_line_and_leaves_nothing(options, code, message, tmp_path):
    output = tmp_path / "output"
    _, told = commands.failed("reproduce", *OPTIONS, "--output", output, *options, code=code)
    assert message in told
    assert not output.exists()


def test_files_of_others_are_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    commands.failed("reproduce", *OPTIONS, "--output", tmp_path, "--step", "1e9")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@contextmanager
def on_a_terminal(output, *options):
    """The command as a process, and the terminal that is its standard error."""
    terminal, theirs = pty.openpty()
    with started(
        *[*TAILAVG, "reproduce", "--output", output, *options],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    ) as process:
        os.close(theirs)
        yield process, terminal
    os.close(terminal)


def read_until(terminal, words):
    """What the terminal shows until it shows `words`, or all of it."""
    seen = ""
    while words not in seen:
        try:
            seen += os.read(terminal, 4096).decode(errors="replace")
        except OSError:  # the other side is closed
            break
    return seen


def test_a_terminal_shows_progress_bars_on_stderr(folder, tmp_path):
    with on_a_terminal(tmp_path, *OPTIONS) as (process, terminal):
        shown = read_until(terminal, "never shown")
        table = process.stdout.read().decode()
        assert process.wait(300) == 0
    assert "2 seeds at step 0.309" in shown
    assert "━" in shown
    assert "Figures and report" in shown
    assert "Report:" in table
    assert "━━━ 0:" not in table
    for name in FILES:  # another process writes the same
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name


@pytest.mark.parametrize("existed", [False, True])
def test_ctrl_c_leaves_no_half_written_file(existed, tmp_path):
    output = tmp_path / "output"
    if existed:
        output.mkdir()
        (output / "claims.json").write_text("old")
    options = ["--runs=2", "--batches=100000", "--dimension=4"]
    with on_a_terminal(output, *options) as (process, terminal):
        assert "10 seeds at step" in read_until(terminal, "10 seeds at step")
        assert list(output.glob(".partial-*"))
        process.send_signal(signal.SIGINT)
        left = read_until(terminal, "never shown")
        assert process.wait(300) == 130
    assert "Traceback" not in left
    if existed:
        assert [path.name for path in output.iterdir()] == ["claims.json"]
        assert (output / "claims.json").read_text() == "old"
    else:
        assert not output.exists()


def test_an_interrupt_while_files_are_written_leaves_none(tmp_path, monkeypatch):
    def interrupt(figure, folder):
        (folder / "figure1.svg").write_text("<svg")
        if figure.name == "figure2":
            raise KeyboardInterrupt

    monkeypatch.setattr(figures, "save", interrupt)
    output = tmp_path / "output"
    commands.run("reproduce", *OPTIONS, "--output", output, code=130)
    assert not output.exists()
