"""The output folder: a self-contained page, figures, curves and claims."""

from __future__ import annotations

import csv
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

import tailavg
from tailavg.experiments import figures
from tailavg.experiments.claims import MARGIN, OTHER_MARGINS, Finding, Verdict, ratios
from tailavg.experiments.regression import FRACTIONS, Errors, Problem, Tails, measure_tails

__all__ = ["MARKS", "Result", "write"]

MARKS = {Verdict.holds: "✓", Verdict.fails: "✗", Verdict.undecided: "?", Verdict.diverged: "–"}


@dataclass(frozen=True)
class Result:
    """A run of the experiments: the problem, the errors, and the claims by step size."""

    problem: Problem
    at: int
    quick: bool
    errors: Errors
    sweep: Mapping[float, list[Finding]]

    @property
    def findings(self) -> list[Finding]:
        """The claims at the problem's own step size."""
        return self.sweep[self.problem.step]

    @cached_property
    def tails(self) -> Tails:
        """Every tail at the problem's own step size, measured on first use."""
        return measure_tails(self.problem)

    @property
    def command(self) -> str:
        """The command that reproduces these numbers."""
        given = {
            field.name: getattr(self.problem, field.name)
            for field in fields(Problem)
            if getattr(self.problem, field.name) != field.default
        }
        options = [f"--{name.replace('_', '-')} {value}" for name, value in given.items()]
        quick = ["--quick"] if self.quick else []
        return " ".join(["tailavg reproduce", *quick, *options, f"--at {self.at}"])


def write(result: Result, folder: Path, advance: Callable[[int], Any] = lambda _: None) -> None:
    """Write everything to an existing folder; call `advance` after each figure."""
    drawn = figures.make(result.errors, result.tails, result.at)
    for figure in drawn:
        figures.save(figure, folder)
        advance(1)
    _curves(result.errors, folder / "curves.csv")
    _tails(result.tails, folder / "tails.csv")
    claims = json.dumps(_claims(result), indent=1, ensure_ascii=False)
    (folder / "claims.json").write_text(claims + "\n", encoding="utf-8")
    (folder / "claims.md").write_text(_markdown(result), encoding="utf-8")
    (folder / "report.html").write_text(_page(result, drawn), encoding="utf-8")
    advance(1)


def _curves(errors: Errors, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(
            ["window", "method", "t", "error", "standard_error", "ratio", "ratio_standard_error"]
        )
        for curve, values in errors.items():
            exact = errors[figures.exact(curve.window)]
            columns = (*figures.mean(values), *ratios(np.log(values / exact)))
            for t, row in enumerate(np.stack(columns, axis=1), start=1):
                rows.writerow([*curve, t, *(f"{value:.6g}" for value in row)])


def _tails(tails: Tails, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["fraction", "t", "error", "standard_error", "ratio_to_best", "is_best"])
        for i, fraction in enumerate(FRACTIONS):
            ratio = tails.error[i] / tails.least
            columns = np.stack((tails.error[i], tails.standard_error[i], ratio), axis=1)
            for t, row in enumerate(columns, start=1):
                best = int(tails.best[t - 1] == i)
                rows.writerow([fraction, t, *(f"{value:.6g}" for value in row), best])


def _row(finding: Finding) -> dict[str, Any]:
    claim = finding.claim
    return {
        "name": claim.name,
        "sentence": claim.sentence,
        "quantity": claim.quantity,
        "says": claim.kind.value,
        "figure": finding.figure and asdict(finding.figure),
        "verdict": finding.verdict.value,
        "verdict_at_other_margins": {
            f"{margin:g}": finding.verdict_at(margin).value for margin in OTHER_MARGINS
        },
    }


def _versions() -> dict[str, str]:
    return {
        "tailavg": tailavg.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "matplotlib": mpl.__version__,
    }


def _claims(result: Result) -> dict[str, Any]:
    return {
        "command": result.command,
        "options": {**asdict(result.problem), "at": result.at},
        "versions": _versions(),
        "margin": MARGIN,
        "claims": [_row(finding) for finding in result.findings],
        "sweep": [
            {
                "step": step,
                "claims": [
                    {key: _row(finding)[key] for key in ("name", "figure", "verdict")}
                    for finding in findings
                ],
            }
            for step, findings in result.sweep.items()
        ],
    }


def _markdown(result: Result) -> str:
    heads = ("the paper says", "ratio of errors", "measured", "verdict", "at other margins")
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    lines += [
        f"| {row.claim.sentence} | {row.claim.quantity} | {row.figure} | {row.verdict} "
        f"| {_others(row)} |"
        for row in result.findings
    ]
    steps = list(result.sweep)
    lines += ["", "| step | " + " | ".join(f"{step:g}" for step in steps) + " |"]
    lines += ["| --- " + "| :-: " * len(steps) + "|"]
    for findings in zip(*result.sweep.values(), strict=True):
        cells = [_short(row) for row in findings]
        lines += [f"| {findings[0].claim.sentence} | " + " | ".join(cells) + " |"]
    return "\n".join(lines) + "\n"


STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1c; --paper: #fff; --soft: #5d6066; --line: #d8dbe0;
  --holds: #00694d; --fails: #b03a00; --undecided: #7a5b00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ea; --paper: #15171a; --soft: #a4a8b0;
  --line: #3a3e45; --holds: #4fd0a5; --fails: #ff9a66; --undecided: #e8c34a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 62rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
p, li, figcaption { max-width: 44rem; } figcaption, small { color: var(--soft); }
figure { margin: 0; } .panels { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
.panels svg { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { padding: .4rem .6rem .4rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
.sweep td, .sweep th + th { text-align: center; white-space: nowrap; }
.sweep th[scope=row] { min-width: 12rem; font-weight: normal; }
.holds { color: var(--holds); } .fails { color: var(--fails); }
.undecided, .diverged { color: var(--undecided); }
.verdict { font-weight: 600; white-space: nowrap; }
td small { display: block; font-weight: normal; }
pre { overflow-x: auto; padding: .6rem; border: 1px solid var(--line); border-radius: .3rem; }
@media (max-width: 40rem) { .claims thead { display: none; }
  .claims tr { display: block; padding: .6rem 0; border-bottom: 1px solid var(--line); }
  .claims td { display: block; border: 0; padding: 0; } }
"""


def _page(result: Result, drawn: list[figures.Figure]) -> str:
    problem, findings = result.problem, result.findings
    holding = sum(finding.verdict is Verdict.holds for finding in findings)
    claims = "\n".join(
        f"<tr><td>{escape(row.claim.sentence)}<td>{row.figure}"
        f"<small>{escape(row.claim.quantity)}</small>"
        f'<td class="verdict {row.verdict.name}">{MARKS[row.verdict]} {row.verdict}'
        f"<small>{_others(row)}</small></tr>"
        for row in findings
    )
    pictures = "\n".join(
        f"<h2>{escape(figure.title)}</h2>\n<figure><div class=panels>"
        + "\n".join(
            f'<div role="img" aria-label="{escape(panel.title)}">'
            f"{figures.inline(panel, height)}</div>"
            for row, height in zip(figure.rows, figure.heights, strict=True)
            for panel in row
        )
        + f"</div><figcaption>{escape(figure.caption)}</figcaption></figure>"
        for figure in drawn
    )
    heads = "".join(f"<th scope=col>{step:g}" for step in result.sweep)
    sweep = "\n".join(
        f"<tr><th scope=row>{escape(row[0].claim.sentence)}" + "".join(map(_cell, row)) + "</tr>"
        for row in zip(*result.sweep.values(), strict=True)
    )
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Anytime Tail Averaging: the experiments</title><style>{STYLE}</style></head><body>
<h1>Anytime Tail Averaging: the experiments</h1>
<p>The experiments of the paper by Nicolas Le Roux, run with the library <em>tailavg</em>. Of the
{len(findings)} claims of its experimental section, {holding} hold here at the chosen step size.</p>
<h2>The problem</h2>
<p>Minimise E(xᵀw − y)² by SGD with a constant step, for x ~ N(0, H), H = diag(1/i) in
{problem.dimension} dimensions, y ~ N(xᵀw*, ε), ε² = {problem.noise:g}, in {problem.batches} batches
of {problem.batch_size}; {problem.runs} runs. The excess error of an average w is
(w − w*)ᵀH(w − w*). All averages see the same iterates, starting with w<sub>1</sub>, the one after
the first batch.</p>
<p><strong>Not in the paper, and chosen here:</strong> the step size, {problem.step:g} on the
gradient 2x(xᵀw − y) averaged over the batch; the start w₀, {_point(problem.start)}; the solution
w*, {_point(problem.optimum)}; the seed, {problem.seed}. The claims depend on them: see the last
table.</p>
<h2>The claims</h2>
<p>Each ratio of errors is a geometric mean over runs of the ratio within a run, ± its standard
error, at the step t where the curves are furthest apart. Curves count as apart if they differ by
more than {MARGIN - 1:.0%}. A verdict needs two standard errors on one side; otherwise it is
“undecided”. The margin was chosen after looking at the ratios of first runs, so it is a scale, not
a test planned in advance. Below each verdict are those at other margins.</p>
<table class=claims><thead><tr><th>The paper says<th>Ratio of errors<th>Verdict</tr></thead>
<tbody>{claims}</tbody></table>
{pictures}
<h2>The claims at other step sizes</h2>
<p>✓ holds, ✗ does not hold, ? undecided, – diverged, each with the deciding ratio.</p>
<div class=wide><table class=sweep><thead><tr><th>Step size{heads}</tr></thead>
<tbody>{sweep}</tbody></table></div>
<h2>How to reproduce this page</h2>
<pre>{escape(result.command)}</pre>
<p><small>{versions}. The curves are in curves.csv, those of Figure 5 in tails.csv, and the
claims in claims.json, next to this page.
</small></p>
</body></html>
"""


def _others(finding: Finding) -> str:
    marks = {margin: MARKS[finding.verdict_at(margin)] for margin in OTHER_MARGINS}
    return ", ".join(f"{margin - 1:.0%}: {mark}" for margin, mark in marks.items())


def _short(finding: Finding) -> str:
    ratio = f" {finding.figure.ratio:.2f}" if finding.figure else ""
    return f"{MARKS[finding.verdict]}{ratio}"


def _cell(finding: Finding) -> str:
    title = f"{finding.verdict}: {finding.figure}" if finding.figure else finding.verdict
    return f'<td class="{finding.verdict.name}" title="{title}">{_short(finding)}'


def _point(point: float | str) -> str:
    return "drawn from N(0, I) for each run" if point == "normal" else f"{point:g} everywhere"
