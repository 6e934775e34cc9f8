"""The experiments of the paper: against slow loops, with verdicts both ways, and as a process."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from model import averages, weight_matrix
from paths import DOCS
from tailavg import TailAverage
from tailavg.cli import app
from tailavg.experiments import figures
from tailavg.experiments.claims import (
    CLAIMS,
    Claim,
    Finding,
    Kind,
    Ratio,
    Verdict,
    judge,
    ratios,
    sweep,
)
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
    turns,
)
from tailavg.experiments.report import Result

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
        for run in range(SMALL.runs):
            gradient = [0.0] * SMALL.dimension
            for sample in range(SMALL.batch_size):
                pairs = zip(x[run, sample], w[run], strict=True)
                residual = sum(a * b for a, b in pairs) - y[run, sample]
                for i in range(SMALL.dimension):
                    gradient[i] += 2 * x[run, sample, i] * residual / SMALL.batch_size
            for i in range(SMALL.dimension):
                w[run, i] -= SMALL.step * gradient[i]
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


@pytest.mark.parametrize(("curve", "rule"), [*methods(60).items(), *turns().items()], ids=str)
def test_errors_are_those_of_brute_force_averages(curve, rule):
    weights = weight_matrix(rule, SMALL.batches)
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
    with pytest.raises(DivergedError, match=r"step 50\.0 is too large"):
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


# The claims


A, B = Curve("c = 0.5", "awa"), Curve("c = 0.5", "true")


def errors_with(ratio, spread=0.001, steps=100, runs=50):
    """Errors whose ratio is 1 but at step 40, where it is `ratio`, run by run."""
    base = np.random.default_rng(0).lognormal(size=(steps, runs))  # differs widely between runs
    factor = np.ones((steps, runs))
    factor[39] = ratio * np.exp(spread * np.linspace(-1, 1, runs))
    return {A: base * factor, B: base}


@pytest.mark.parametrize(
    ("kind", "ratio", "verdict"),
    [
        ("alike", 1.05, "holds"),
        ("alike", 0.95, "holds"),
        ("alike", 1.2, "fails"),
        ("alike", 0.8, "fails"),
        ("apart", 1.05, "fails"),
        ("apart", 0.8, "holds"),
        ("apart", 1.2, "holds"),
        ("behind", 1.2, "holds"),
        ("behind", 1.05, "fails"),
        ("behind", 0.5, "fails"),
        ("level", 1.2, "fails"),
        ("level", 1.05, "holds"),
        ("level", 0.5, "holds"),
        ("alike", 1.1, "undecided"),
        ("alike", 1 / 1.1, "undecided"),
        ("apart", 1.1, "undecided"),
        ("behind", 1.1, "undecided"),
        ("level", 1.1, "undecided"),
    ],
)
def test_verdicts_follow_the_numbers(kind, ratio, verdict):
    finding = judge(Claim("x", "x", Kind[kind], (A,), (B,)), errors_with(ratio))
    assert finding.verdict is Verdict[verdict]
    if kind in ("alike", "apart") or ratio > 1:
        assert finding.figure.t == 40
        assert finding.figure.ratio == pytest.approx(ratio)


def test_verdicts_depend_on_the_margin():
    finding = judge(Claim("x", "x", Kind.behind, (A,), (B,)), errors_with(1.12))
    verdicts = [finding.verdict_at(margin) for margin in (1.05, 1.1, 1.12, 1.2)]
    assert verdicts == [Verdict.holds, Verdict.holds, Verdict.undecided, Verdict.fails]
    assert finding.verdict is finding.verdict_at(1.1)


def test_noise_leaves_a_verdict_undecided():
    claim = Claim("x", "x", Kind.behind, (A,), (B,))
    assert judge(claim, errors_with(1.2, spread=0.01)).verdict is Verdict.holds
    assert judge(claim, errors_with(1.2, spread=1.0)).verdict is Verdict.undecided


def test_ratios_are_paired_geometric_means_with_standard_errors():
    errors = errors_with(1.2, spread=0.3)
    ratio, error = ratios(np.log(errors[A] / errors[B]))
    by_run = [errors[A][39, run] / errors[B][39, run] for run in range(50)]
    mean = np.prod(by_run) ** (1 / 50)
    variance = sum((np.log(r) - np.log(mean)) ** 2 for r in by_run) / 49
    assert ratio[39] == pytest.approx(mean)
    assert error[39] == pytest.approx(mean * (variance / 50) ** 0.5)


def test_a_claim_may_start_late_and_be_against_the_end():
    errors = errors_with(1.2)
    claim = Claim("x", "x", Kind.behind, (A,), (B,), since=0.5)
    assert judge(claim, errors).verdict is Verdict.fails
    errors[A][-1] *= 1.2
    ended = Claim("x", "x", Kind.behind, (A,), (B,), against_end=True)
    assert judge(ended, errors).figure.ratio == pytest.approx(1.0)


def test_every_claim_can_come_out_both_ways():
    rng = np.random.default_rng(1)
    same = dict.fromkeys(methods(100), rng.lognormal(size=(100, 8)))
    for claim in CLAIMS:
        bent = dict(same)
        bent[claim.over[0]] = same[claim.over[0]].copy()
        bent[claim.over[0]][60] *= 1.5
        verdicts = {judge(claim, errors).verdict for errors in (same, bent)}
        assert verdicts == {Verdict.holds, Verdict.fails}, claim.name


def test_the_sweep_measures_every_claim_at_every_step_and_survives_divergence():
    found = sweep(replace(SMALL, batches=400), [0.1, 50.0])
    assert [finding.claim for finding in found[0.1]] == list(CLAIMS)
    assert all(finding.figure is not None for finding in found[0.1])
    assert {finding.verdict for finding in found[50.0]} == {Verdict.diverged}


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
    done = CliRunner().invoke(app, ["reproduce", *OPTIONS, "--output", str(output)])
    assert done.exit_code == 0, done.output
    assert "At c = 0.5, exp falls" in done.stdout
    assert f"Report: {output / 'report.html'}" in done.stdout.replace("\n", "")
    return output


def test_the_folder_has_every_file_and_no_other(folder):
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


def test_the_claims_are_those_of_the_options(folder):
    saved = json.loads((folder / "claims.json").read_text())
    problem = replace(SMALL, seed=0)
    assert saved["options"] == {**vars(problem), "at": 51}
    assert set(saved["versions"]) == {"tailavg", "python", "numpy", "matplotlib"}
    errors = measure(problem, methods(60))
    for claim, row in zip(CLAIMS, saved["claims"], strict=True):
        finding = judge(claim, errors)
        assert row["sentence"] == claim.sentence
        assert row["verdict"] == finding.verdict
        assert row["figure"] == pytest.approx(vars(finding.figure))
    assert len(saved["sweep"]) >= 5


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
        ratio = np.exp(np.log(values[29] / exact[29]).mean())
        assert rows[curve, 30][:3] == pytest.approx([mean, error, ratio], rel=1e-5)


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
    assert page.count("<svg") == 4 + 4 + 8 + 3 + 3
    for claim in CLAIMS:
        assert page.count(claim.sentence) == 2  # the claims, and the sweep
    assert "Not in the paper, and chosen here" in page


@pytest.mark.skipif(not REPRODUCTION.exists(), reason="the documentation is not here")
def test_the_committed_claims_are_of_the_defaults_and_of_these_sentences():
    saved = json.loads((REPRODUCTION / "claims.json").read_text())
    assert saved["options"] == {**vars(Problem()), "at": 850}
    assert [row["sentence"] for row in saved["claims"]] == [claim.sentence for claim in CLAIMS]
    for claim, row in zip(CLAIMS, saved["claims"], strict=True):
        assert Finding(claim, Ratio(**row["figure"])).verdict == row["verdict"]
    assert all(
        (REPRODUCTION / name).stat().st_size < 600_000 for name in FILES if name.endswith("svg")
    )


def test_the_same_command_writes_the_same_files(folder, tmp_path):
    done = CliRunner().invoke(app, ["reproduce", *OPTIONS, "--output", str(tmp_path)])
    assert done.exit_code == 0
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name


def test_the_report_tells_a_command_that_gives_it():
    problem = replace(SMALL, step=0.2, optimum=1.0)
    command = Result(problem, 40, True, {}, {}).command
    assert command == (
        "tailavg reproduce --quick --step 0.2 --optimum 1.0 --seed 3 --runs 3 --batches 60 "
        "--batch-size 5 --dimension 4 --at 40"
    )


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--optimum", "x"], 2, 'expected a number or "normal"'),
        (["--step", "0"], 2, "step: expected a number above 0"),
        (["--at", "61"], 2, "at most 60, the batches"),
        (["--step", "1e9"], 1, "too large: the iterates diverge; try a smaller --step"),
        (["--output", "/dev/null/x"], 1, "cannot write to /dev/null/x"),
    ],
)
def test_a_mistake_is_told_in_a_line_and_leaves_nothing(options, code, message, tmp_path):
    output = tmp_path / "output"
    arguments = ["reproduce", *OPTIONS, "--output", str(output), *options]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == code
    assert message in done.stderr
    assert not output.exists()


def test_files_of_others_are_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    arguments = ["reproduce", *OPTIONS, "--output", str(tmp_path)]
    assert CliRunner().invoke(app, [*arguments, "--step", "1e9"]).exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def start(output, *options):
    """The command as a process on a terminal, and the terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tailavg", "reproduce", "--output", str(output), *options]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, env=environment
    )
    os.close(theirs)
    return process, ours


def read_until(terminal, words):
    """What the terminal shows until it shows `words`, or all of it."""
    seen = ""
    while words not in seen:
        try:
            seen += os.read(terminal, 4096).decode(errors="replace")
        except OSError:  # the other side is closed
            break
    return seen


def test_a_terminal_shows_progress_bars_on_stderr(tmp_path):
    process, terminal = start(tmp_path / "output", *OPTIONS)
    with process:
        shown = read_until(terminal, "never shown")
        table = process.stdout.read().decode()
    os.close(terminal)
    assert process.returncode == 0
    assert "SGD with step 0.1" in shown
    assert "━" in shown
    assert "Figures and report" in shown
    assert "Report:" in table
    assert "SGD" not in table


def test_without_a_terminal_stderr_is_silent(tmp_path):
    command = [sys.executable, "-m", "tailavg", "reproduce", *OPTIONS, "-o", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=120)
    assert done.stderr == b""


@pytest.mark.parametrize("existed", [False, True])
def test_ctrl_c_leaves_no_half_written_file(existed, tmp_path):
    output = tmp_path / "output"
    if existed:
        output.mkdir()
        (output / "claims.json").write_text("old")
    process, terminal = start(output, "--runs=2", "--batches=100000", "--dimension=4")
    with process:
        assert "SGD with step" in read_until(terminal, "SGD with step")
        assert list(output.glob(".partial-*"))
        process.send_signal(signal.SIGINT)
        left = read_until(terminal, "never shown")
    os.close(terminal)
    assert process.returncode == 130
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
    done = CliRunner().invoke(app, ["reproduce", *OPTIONS, "--output", str(output)])
    assert done.exit_code == 130
    assert not output.exists()
