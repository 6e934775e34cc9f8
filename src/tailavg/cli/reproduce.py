"""`tailavg reproduce`: run the experiments of the paper, in `tailavg.experiments`."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailavg.cli.common import fail

if TYPE_CHECKING:
    from tailavg.experiments.run import Plan, Result


def reproduce(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to write to.", file_okay=False)
    ] = Path("reproduction"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Use fewer runs, seeds and steps; takes seconds.")
    ] = False,
    step: Annotated[
        float | None,
        typer.Option(help="The step size of SGD; by default b / (2 tr H + 2(b+1)‖H‖), 1/3 here."),
    ] = None,
    start: Annotated[
        str, typer.Option(help="w₀: a number for all coordinates, or normal.", metavar="POINT")
    ] = "0",
    optimum: Annotated[
        str, typer.Option(help="w*: a number for all coordinates, or normal.", metavar="POINT")
    ] = "normal",
    seed: Annotated[
        int, typer.Option(min=0, help="The first of ten seeds, or of two with --quick.")
    ] = 0,
    runs: Annotated[
        int | None,
        typer.Option(min=2, help="The runs to average over; by default 100, or 20 with --quick."),
    ] = None,
    batches: Annotated[int, typer.Option(min=10, help="The batches in a run.")] = 1000,
    batch_size: Annotated[int, typer.Option(min=1, help="The samples in a batch.")] = 11,
    dimension: Annotated[int, typer.Option(min=1, help="The dimension of the regression.")] = 50,
    noise: Annotated[float, typer.Option(help="ε², the variance of y given x.")] = 0.01,
    at: Annotated[
        int | None,
        typer.Option(min=1, help="The step of Figure 4; by default 0.85 of the batches."),
    ] = None,
) -> None:
    """Run the paper's experiments, and check the paper's claims.

    Writes report.html, the figures (SVG and PNG), curves.csv, tails.csv,
    claims.json and claims.md to a folder. The step size, the start w₀ and the
    solution w* are options, since the paper does not give them. By default the
    step is half of the largest step that is guaranteed to be stable.

    Example: tailavg reproduce --step 0.2 --output step-0.2
    """
    if find_spec("matplotlib") is None:
        fail("reproduce needs matplotlib; install it with: pip install 'tailavg[cli,plot]'")
    from tailavg.experiments.regression import DivergedError, Problem
    from tailavg.experiments.run import Plan

    at = at or max(1, round(0.85 * batches))
    if at > batches:
        raise typer.BadParameter(f"--at {at} is after the end of the run; choose at most {batches}")
    try:
        problem = Problem(
            step=step,
            start=_point(start),
            optimum=_point(optimum),
            seed=seed,
            runs=runs or (20 if quick else 100),
            batches=batches,
            batch_size=batch_size,
            dimension=dimension,
            noise=noise,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        result = _run(Plan(problem, at, quick), output)
    except DivergedError as error:
        fail(f"{error}; try a smaller --step")
    except OSError as error:
        fail(f"cannot write to {output}: {error}")
    _show(result, output)


def _point(text: str) -> Any:
    if text == "normal":
        return text
    try:
        return float(text)
    except ValueError as error:
        raise typer.BadParameter(f'expected a number or "normal", got {text!r}') from error


def _run(plan: Plan, output: Path) -> Result:
    """Run and write to a temporary folder in `output`; move the files out when all are complete."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from tailavg.experiments import report, run

    problem, other_steps = plan.problem, len(plan.other_steps)
    console = Console(stderr=True)
    existed = output.exists()
    output.mkdir(parents=True, exist_ok=True)
    totals = {
        f"{plan.seeds} seeds at step {problem.used_step:.3g}": plan.seeds * problem.batches,
        f"{other_steps} other step sizes": other_steps * problem.batches,
        "Figures and report": 6,
    }
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    try:
        with (
            TemporaryDirectory(prefix=".partial-", dir=output) as folder,
            Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ):
            bars = [progress.add_task(name, total=total) for name, total in totals.items()]
            seeds, steps, figures = (partial(progress.advance, bar) for bar in bars)
            result = run.run(plan, seeds, steps)
            report.write(result, Path(folder), figures)
            for file in sorted(Path(folder).iterdir()):
                file.replace(output / file.name)
    finally:
        if not existed:
            with suppress(OSError):  # the folder stays if it is not empty
                output.rmdir()
    return result


def _show(result: Result, output: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from tailavg.experiments import report

    for sentence in report.summary(result):
        typer.echo(sentence)
    table = Table("the paper says", "measured", "verdict", pad_edge=False)
    for row in result.findings:
        place, outcome = next(iter(row.claim.quotes)), row.outcomes[0]
        table.add_row(
            f"{place}: “{row.claim.words}”",
            f"{report.value(outcome.value)}: {outcome.text}",
            f"{row.verdict}\n{report.agreement(row)}",
        )
    Console().print(table)
    typer.echo(f"Report: {(output / 'report.html').resolve()}")
