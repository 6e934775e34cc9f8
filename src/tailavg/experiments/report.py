"""The output folder of `tailavg reproduce`: a self-contained page, figures, curves and claims.

`write` writes the folder; the command prints `summary`. The page is `report.html`, a template.
"""

from __future__ import annotations

import csv
import json
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import matplotlib as mpl
import numpy as np

import tailavg
from tailavg.experiments import figures
from tailavg.experiments.claims import (
    AGREE,
    CLAIMS,
    MARGIN,
    Claim,
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

MARKS = {Verdict.holds: "✓", Verdict.fails: "✗", Verdict.depends: "~"}


def write(result: Result, folder: Path, advance: Callable[[int], Any] = lambda _: None) -> None:
    """Write all files to an existing folder. Call `advance` after each figure and the page."""
    made = figures.make(result)
    for figure in made:
        figures.save(figure, folder)
        advance(1)
    heads = ["window", "method", "t", "error", "standard_error", "ratio", "gap"]
    _write_table(folder / "curves.csv", heads, _curves(result.errors))
    heads = ["fraction", "t", "error", "standard_error", "ratio_to_best", "is_best"]
    _write_table(folder / "tails.csv", heads, _tails(result.tails))
    claims = json.dumps(_claims(result), indent=1, ensure_ascii=False)
    (folder / "claims.json").write_text(claims + "\n", encoding="utf-8")
    (folder / "claims.md").write_text(_markdown(result), encoding="utf-8")
    page = _page(result, [_picture(figure, folder) for figure in made])
    (folder / "report.html").write_text(page, encoding="utf-8")
    advance(1)


def summary(result: Result) -> list[str]:
    """Return three sentences: which claims hold, and by how much the errors differ."""
    findings = [finding for finding in result.findings if not finding.claim.ours]
    means = result.by_seed[0]
    exceptions = [finding for finding in findings if finding.verdict is not Verdict.holds]
    quoted = [
        f"“{row.claim.words}” {row.verdict} ({agreement(row)}, {_range(row)})"
        for row in exceptions[:2]
    ]
    more = f" and {len(exceptions) - 2} more" if len(exceptions) > 2 else ""
    but = f", but {'; '.join(quoted)}{more}" if exceptions else ""

    def most(window: str, *names: str) -> str:
        gaps = [f"{extent(means, window, name)[1]:.2f} ({name})" for name in names]
        listed = ", ".join(gaps[:-1]) + f" and {gaps[-1]}"
        return f"At {window} the error is at worst {listed} times that of {exact(window).method}"

    def between(window: str, *names: str) -> str:
        low, high = extent(means, window, *names)
        return f"at {window} it stays between {low:.2f} and {high:.2f} times"

    return [
        f"{len(findings) - len(exceptions)} of {len(findings)} claims of the paper hold{but}.",
        f"{most('k = 100', 'expk', 'awak')}; {between('k = 10', 'expk', 'awak')}.",
        f"{most('c = 0.5', 'exp', 'awa', 'awa3')}; {between('c = 0.25', 'exp', 'awa', 'awa3')}.",
    ]


def _write_table(path: Path, heads: list[str], rows: Iterable[list[Any]]) -> None:
    """Write a CSV file, with 6 digits for each float."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(heads)
        for row in rows:
            table.writerow([f"{x:.6g}" if isinstance(x, float) else x for x in row])


def _curves(errors: Errors) -> Iterator[list[Any]]:
    """Yield the rows of curves.csv."""
    for curve, values in errors.items():
        error, deviation = figures.mean(values)
        true = errors[exact(curve.window)].mean(axis=1)
        columns = np.stack([error, deviation, error / true, gap(error, true)], axis=1)
        for t, row in enumerate(columns.tolist(), 1):
            yield [*curve, t, *row]


def _tails(tails: Tails) -> Iterator[list[Any]]:
    """Yield the rows of tails.csv."""
    for i, fraction in enumerate(FRACTIONS):
        error = tails.error[i]
        columns = np.stack([error, tails.standard_error[i], error / tails.least], axis=1)
        for t, row in enumerate(columns.tolist(), 1):
            yield [fraction, t, *row, int(tails.best[t - 1] == i)]


def value(number: float) -> str:
    """Format a deciding number."""
    return f"{number:.3f}" if number < 2 else f"{number:.2f}"


def agreement(finding: Finding) -> str:
    """Return a text of how many seeds agree; empty if the claim does not depend on the seed."""
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


def _at_step(claim: Claim, outcome: Outcome) -> dict[str, Any]:
    return {"name": claim.name, "value": outcome.value, "holds": outcome.holds}


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
            {"step": step, "claims": outcomes and list(map(_at_step, CLAIMS, outcomes))}
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
    for claim, outcomes in _by_step(result):
        lines += [f"| “{claim.words}” | {' | '.join(map(_short, outcomes))} |"]
    return "\n".join(lines) + "\n"


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
    values = {
        "summary": " ".join(map(escape, summary(result))),
        "paper": "\n".join(pictures[:2]),
        "ours": "\n".join(pictures[2:]),
        "claims": "\n".join(map(_claim_row, result.findings)),
        "heads": "".join(f"<th scope=col>{step:.3f}" for step in result.by_step),
        "steps": "\n".join(
            f"<tr><th scope=row>“{escape(claim.words)}”{''.join(map(_cell, outcomes))}</tr>"
            for claim, outcomes in _by_step(result)
        ),
        "first_step": first_step(problem.batches),
        "margin": f"{100 * (MARGIN - 1):.0f}",
        "agree": f"{100 * AGREE:.0f}",
        "disagree": f"{100 * (1 - AGREE):.0f}",
        "last_seed": problem.seed + plan.seeds - 1,
        "chosen": "the default, half of the guaranteed one" if problem.step is None else "as given",
        "guaranteed": f"{problem.guaranteed_step:.4g}",
        "radius": f"{spectral_radius(problem, problem.guaranteed_step):.3f}",
        "largest": f"{largest_stable_step(problem):.4g}",
        "ball": f"at t = {ball}" if ball else f"not in {problem.batches} batches",
        "command": escape(plan.command),
        "versions": ", ".join(f"{name} {version}" for name, version in _versions().items()),
        **vars(problem),
        "step": f"{problem.used_step:.4g}",
        "noise": f"{problem.noise:g}",
        "start": _point(problem.start),
        "optimum": _point(problem.optimum),
    }
    template = files("tailavg.experiments") / "report.html"
    return Template(template.read_text(encoding="utf-8")).substitute(values)


def _by_step(result: Result) -> list[tuple[Claim, list[Outcome | None]]]:
    """Return each claim with its outcome at every step, None where the iterates diverged."""
    diverged: list[Outcome | None] = [None] * len(CLAIMS)
    columns = [outcomes or diverged for outcomes in result.by_step.values()]
    return [(claim, list(row)) for claim, *row in zip(CLAIMS, *columns, strict=True)]


def _short(outcome: Outcome | None) -> str:
    return f"{'✓' if outcome.holds else '✗'} {outcome.value:.2f}" if outcome else "–"


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return '<td title="diverged">–'
    name = "holds" if outcome.holds else "fails"
    return f'<td class="{name}" title="{escape(outcome.text)}">{_short(outcome)}'


def _point(point: float | str) -> str:
    return "drawn from N(0, I) for each run" if point == "normal" else f"{point:g} everywhere"
