"""The output folder: a self-contained page, figures, curves and claims."""

from __future__ import annotations

import csv
import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

import tailavg
from tailavg.experiments import figures
from tailavg.experiments.claims import (
    AGREE,
    CLAIMS,
    MARGIN,
    Finding,
    Outcome,
    Verdict,
    exact,
    extent,
    first_step,
    gap,
)
from tailavg.experiments.moments import largest_stable_step, noise_ball, spectral_radius
from tailavg.experiments.regression import FRACTIONS, Errors, Tails
from tailavg.experiments.run import Result

__all__ = ["agreement", "summary", "value", "write"]

MARKS = {Verdict.holds: "✓", Verdict.fails: "✗", Verdict.depends: "~"}


def write(result: Result, folder: Path, advance: Callable[[int], Any] = lambda _: None) -> None:
    """Write everything to an existing folder; call `advance` after each figure."""
    drawn = figures.make(result)
    for figure in drawn:
        figures.save(figure, folder)
        advance(1)
    _curves(result.errors, folder / "curves.csv")
    _tails(result.tails, folder / "tails.csv")
    claims = json.dumps(_claims(result), indent=1, ensure_ascii=False)
    (folder / "claims.json").write_text(claims + "\n", encoding="utf-8")
    (folder / "claims.md").write_text(_markdown(result), encoding="utf-8")
    page = _page(result, [_picture(figure, folder) for figure in drawn])
    (folder / "report.html").write_text(page, encoding="utf-8")
    advance(1)


def summary(result: Result) -> list[str]:
    """Does the paper hold? In three sentences."""
    findings, means = result.findings, result.by_seed[0]
    others = [finding for finding in findings if finding.verdict is not Verdict.holds]
    told = [
        f"“{row.claim.words}” {row.verdict} ({agreement(row)}, {_range(row)})"
        for row in others[:2]
    ]
    rest = f" and {len(others) - 2} more" if len(others) > 2 else ""
    but = f", but {'; '.join(told)}{rest}" if others else ""

    def most(window: str, *names: str) -> str:
        parts = [f"{extent(means, window, name)[1]:.2f} ({name})" for name in names]
        listed = ", ".join(parts[:-1]) + f" and {parts[-1]}"
        return f"At {window} the error is at worst {listed} times that of {exact(window).method}"

    def between(window: str, *names: str) -> str:
        low, high = extent(means, window, *names)
        return f"at {window} it stays between {low:.2f} and {high:.2f} times"

    return [
        f"{len(findings) - len(others)} of {len(findings)} claims of the paper hold{but}.",
        f"{most('k = 100', 'expk', 'awak')}; {between('k = 10', 'expk', 'awak')}.",
        f"{most('c = 0.5', 'exp', 'awa', 'awa3')}; {between('c = 0.25', 'exp', 'awa', 'awa3')}.",
    ]


def _curves(errors: Errors, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["window", "method", "t", "error", "standard_error", "ratio", "gap"])
        for curve, values in errors.items():
            error, deviation = figures.mean(values)
            true = errors[exact(curve.window)].mean(axis=1)
            columns = (error, deviation, error / true, gap(error, true))
            for t, row in enumerate(zip(*(column.tolist() for column in columns), strict=True), 1):
                rows.writerow([*curve, t, *(f"{number:.6g}" for number in row)])


def _tails(tails: Tails, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["fraction", "t", "error", "standard_error", "ratio_to_best", "is_best"])
        best = tails.best
        for i, fraction in enumerate(FRACTIONS):
            columns = (tails.error[i], tails.standard_error[i], tails.error[i] / tails.least)
            for t, row in enumerate(zip(*(column.tolist() for column in columns), strict=True), 1):
                numbers = (f"{number:.6g}" for number in row)
                rows.writerow([fraction, t, *numbers, int(best[t - 1] == i)])


def value(number: float) -> str:
    """A deciding number."""
    return f"{number:.3f}" if number < 2 else f"{number:.2f}"


def agreement(finding: Finding) -> str:
    """How many seeds agree, if seeds matter."""
    return f"{finding.agreeing} of {len(finding.outcomes)} seeds" if finding.claim.seeds else ""


def _range(finding: Finding) -> str:
    low, high = map(value, finding.span)
    return f"{low} to {high}" if finding.claim.seeds else low


def _decided(finding: Finding) -> str:
    number = value(finding.outcomes[0].value)
    return f"{number}, {_range(finding)} over the seeds" if finding.claim.seeds else number


def _row(finding: Finding) -> dict[str, Any]:
    claim = finding.claim
    return {
        "name": claim.name,
        "quotes": [{"place": place, "words": words} for place, words in claim.quotes.items()],
        "compared": claim.compared,
        "value": finding.outcomes[0].value,
        "measured": finding.outcomes[0].text,
        "values": [outcome.value for outcome in finding.outcomes],
        "agreeing": finding.agreeing,
        "of": len(finding.outcomes),
        "verdict": finding.verdict.value,
    }


def _versions() -> dict[str, str]:
    return {
        "tailavg": tailavg.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "matplotlib": mpl.__version__,
    }


def _claims(result: Result) -> dict[str, Any]:
    plan = result.plan
    problem = plan.problem
    return {
        "command": plan.command,
        "summary": summary(result),
        "options": {**asdict(problem), "step": problem.used_step, "at": plan.at},
        "seeds": [problem.seed + i for i in range(plan.seeds)],
        "versions": _versions(),
        "margin": MARGIN,
        "first_step": first_step(problem.batches),
        "default_step": problem.default_step,
        "guaranteed_step": problem.guaranteed_step,
        "largest_stable_step": largest_stable_step(problem),
        "noise_ball": noise_ball(problem, MARGIN),
        "claims": [_row(finding) for finding in result.findings],
        "steps": [
            {
                "step": step,
                "claims": outcomes
                and [
                    {"name": claim.name, "value": outcome.value, "holds": outcome.holds}
                    for claim, outcome in zip(CLAIMS, outcomes, strict=True)
                ],
            }
            for step, outcomes in result.by_step.items()
        ],
    }


def _markdown(result: Result) -> str:
    heads = ("the paper says", "measured", "deciding number", "verdict")
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for row in result.findings:
        quotes = "<br>".join(f"{place}: “{words}”" for place, words in row.claim.quotes.items())
        decided = _decided(row).replace(", ", "<br>")
        verdict = f"{MARKS[row.verdict]} {row.verdict}"
        verdict += f"<br>{agreement(row)}" if row.claim.seeds else ""
        measured = f"{row.outcomes[0].text}<br>*{row.claim.compared}*"
        lines += [f"| {quotes} | {measured} | {decided} | {verdict} |"]
    lines += ["", "| step | " + " | ".join(f"{step:.3f}" for step in result.by_step) + " |"]
    lines += ["| --- " + "| :-: " * len(result.by_step) + "|"]
    for i, claim in enumerate(CLAIMS):
        cells = [_short(outcomes[i] if outcomes else None) for outcomes in result.by_step.values()]
        lines += [f"| “{claim.words}” | " + " | ".join(cells) + " |"]
    return "\n".join(lines) + "\n"


STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1c; --paper: #fff; --soft: #5d6066; --line: #d8dbe0;
  --holds: #00694d; --fails: #b03a00; --depends: #7a5b00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ea; --paper: #15171a; --soft: #a4a8b0;
  --line: #3a3e45; --holds: #4fd0a5; --fails: #ff9a66; --depends: #e8c34a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 62rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
p, li, figcaption { max-width: 44rem; } figcaption, small { color: var(--soft); }
figure { margin: 0; } svg { display: block; width: 100%; min-width: 40rem; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { padding: .4rem .6rem .4rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
.steps td, .steps th + th { text-align: center; white-space: nowrap; }
.steps th[scope=row] { min-width: 12rem; font-weight: normal; }
.holds { color: var(--holds); } .fails { color: var(--fails); }
.depends { color: var(--depends); }
.answer { font-size: 1.15rem; }
.verdict { font-weight: 600; white-space: nowrap; }
td small { display: block; font-weight: normal; white-space: normal; }
pre { overflow-x: auto; padding: .6rem; border: 1px solid var(--line); border-radius: .3rem; }
@media (max-width: 40rem) { .claims thead { display: none; }
  .claims tr { display: block; padding: .6rem 0; border-bottom: 1px solid var(--line); }
  .claims td { display: block; border: 0; padding: 0; } }
"""


def _picture(figure: figures.Figure, folder: Path) -> str:
    svg = (folder / f"{figure.name}.svg").read_text(encoding="utf-8")
    return (
        f"<h2>{escape(figure.title)}</h2>\n<figure>{figures.inline(figure, svg)}"
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


def _claim_row(row: Finding) -> str:
    quotes = "<br>".join(
        f"<small>{place}</small> “{escape(words)}”" for place, words in row.claim.quotes.items()
    )
    outcome = row.outcomes[0]
    return (
        f"<tr><td>{quotes}<td>{escape(outcome.text)}<small>{_decided(row)}. "
        f'{escape(row.claim.compared)}.</small><td class="verdict {row.verdict.name}">'
        f"{MARKS[row.verdict]} {row.verdict}<small>{agreement(row)}</small></tr>"
    )


def _page(result: Result, pictures: list[str]) -> str:
    plan, problem = result.plan, result.plan.problem
    ball = noise_ball(problem, MARGIN)
    last = problem.seed + plan.seeds - 1
    heads = "".join(f"<th scope=col>{step:.3f}" for step in result.by_step)
    steps = "\n".join(
        f"<tr><th scope=row>“{escape(claim.words)}”"
        + "".join(_cell(outcomes[i] if outcomes else None) for outcomes in result.by_step.values())
        + "</tr>"
        for i, claim in enumerate(CLAIMS)
    )
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    paper, ours = ("\n".join(part) for part in (pictures[:2], pictures[2:]))
    claims = "\n".join(map(_claim_row, result.findings))
    chosen = "the default, half of the guaranteed one" if problem.step is None else "as given"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Anytime Tail Averaging: the experiments</title><style>{STYLE}</style></head><body>
<h1>Anytime Tail Averaging: the experiments</h1>
<p>The experiments of the paper by Nicolas Le Roux, run with the library <em>tailavg</em>.</p>
<p class=answer>{" ".join(map(escape, summary(result)))}</p>
{paper}
<h2>The claims</h2>
<p>A curve is the mean error over runs, as the paper draws it. The gap of a curve to another at t
is the ratio of the two, its logarithm averaged over a tenth of a decade around t, from
t = {first_step(problem.batches)} on. Two curves are the same if their gap never exceeds
{100 * (MARGIN - 1):.0f} % in either direction, and a curve is worse if its gap exceeds it
somewhere: on a plot of four decades that is 1 % of its height, a line's width. Each of the seeds
{problem.seed} to {last} decides. A claim holds if at least {100 * AGREE:.0f} % of them say so, and
does not hold if at most {100 * (1 - AGREE):.0f} % do. The numbers are those of seed {problem.seed},
at the t of the largest gap.</p>
<table class=claims><thead><tr><th>The paper says<th>Measured<th>Verdict</tr></thead>
<tbody>{claims}</tbody></table>
<h2>The problem</h2>
<p>Minimise E(xᵀw − y)² by SGD with a constant step, for x ~ N(0, H), H = diag(1/i) in
{problem.dimension} dimensions, y ~ N(xᵀw*, ε), ε² = {problem.noise:g}, in {problem.batches} batches
of {problem.batch_size}; {problem.runs} runs. The excess error of an average w is
(w − w*)ᵀH(w − w*). All averages see the same iterates, starting with w<sub>1</sub>, the one after
the first batch.</p>
<p><strong>Not in the paper, and chosen here:</strong> the step size, {problem.used_step:.4g} on the
gradient 2x(xᵀw − y) averaged over the batch ({chosen}); the start w₀, {_point(problem.start)}; the
solution w*, {_point(problem.optimum)}; the seed, {problem.seed}.</p>
<p>With batches of b, the mean square of w − w* falls at every step size below
b / (tr H + (b + 1) ‖H‖) = {problem.guaranteed_step:.4g}. By the exact recursion of the second
moments, whose spectral radius is {spectral_radius(problem, problem.guaranteed_step):.3f} there, SGD
is stable up to a step size of {largest_stable_step(problem):.4g}, and the expected error of the
iterate comes within {100 * (MARGIN - 1):.0f} % of its limit, the noise ball,
{f"at t = {ball}" if ball else f"not in {problem.batches} batches"}.</p>
{ours}
<h2>The claims at other step sizes</h2>
<p>✓ holds, ✗ does not hold, – diverged, each with the deciding number, for seed
{problem.seed}.</p>
<div class=wide><table class=steps><thead><tr><th>Step size{heads}</tr></thead>
<tbody>{steps}</tbody></table></div>
<h2>How to reproduce this page</h2>
<pre>{escape(plan.command)}</pre>
<p><small>{versions}. The curves are in curves.csv, those of Figure 5 in tails.csv, and the
claims in claims.json, next to this page.
</small></p>
</body></html>
"""


def _short(outcome: Outcome | None) -> str:
    return f"{'✓' if outcome.holds else '✗'} {outcome.value:.2f}" if outcome else "–"


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return '<td title="diverged">–'
    name = "holds" if outcome.holds else "fails"
    return f'<td class="{name}" title="{escape(outcome.text)}">{_short(outcome)}'


def _point(point: float | str) -> str:
    return "drawn from N(0, I) for each run" if point == "normal" else f"{point:g} everywhere"
