"""`tailavg profile`: compare the size, ages and memory of all methods at one step."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain, cycle
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from tailavg.cli import options
from tailavg.cli.options import parse_window
from tailavg.core.clock import starts_at
from tailavg.core.profile import Profile, newest_first
from tailavg.core.profile import profile as summarise
from tailavg.core.readings import Freshest
from tailavg.core.rules import (
    AnyTail,
    AnytimeWindow,
    ExactWindow,
    Exponential,
    RawTail,
    Rule,
    shared_rules,
)
from tailavg.core.windows import Fixed, Growing, Window

MAX_SUMMED = 10**6
"""The most samples over which to sum an exponential one by one; longer ones are scaled."""

MAX_COUNT = 2**62
"""The largest count, since steps are 64-bit integers."""

Dtype = Literal["float32", "float64"]
Format = Literal["table", "json"]


def profile(
    count: Annotated[str, typer.Option(help="The number of samples so far, such as 10000 or 1e9.")],
    window: Annotated[str, options.WINDOW] = options.DEFAULT_WINDOW,
    at_most: Annotated[int | None, options.AT_MOST] = None,
    accumulators: Annotated[
        int,
        typer.Option(min=2, max=100, help="List the anytime method up to this many accumulators."),
    ] = 5,
    parameters: Annotated[
        str | None,
        typer.Option(help="The numbers in a sample, such as 7e9; adds columns for memory."),
    ] = None,
    dtype: Annotated[
        Dtype,
        typer.Option(help="The dtype of the accumulators; use float32 for 16-bit parameters."),
    ] = "float32",
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the weights to this file (.svg, .png, .pdf); needs the extra plot."
        ),
    ] = None,
    output_format: Annotated[
        Format, typer.Option("--format", help="How to print the profiles.")
    ] = "table",
) -> None:
    """Compare the size, ages and memory of all methods at a number of samples.

    Example: tailavg profile --window 0.25 --count 1e6 --plot weights.svg
    """
    parsed = parse_window(window, at_most)
    t = _parse_count(count, "--count")
    numbers = None if parameters is None else _parse_count(parameters, "--parameters")
    rules = _rules(parsed, t, accumulators)
    rows = []
    for name, rule in rules.items():
        summary = _profile(rule, t, _reading(rule, parsed))
        rows.append({"method": name, **asdict(summary)})
        if numbers is not None:
            size = numbers * np.dtype(dtype).itemsize
            rows[-1] |= _memory(rule, summary, size)
    if plot is not None:
        _plot(rules, parsed, t, plot)
    if output_format == "json":
        typer.echo(json.dumps(rows, indent=2))
    else:
        _print_table(rules, rows, dtype)


def _parse_count(text: str, option: str) -> int:
    """Parse an integer of at least 1, such as 7000 or 7e9."""
    try:
        value = int(text) if text.strip().isdigit() else float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value <= MAX_COUNT or value != int(value):
        raise typer.BadParameter(
            f"expected a whole number from 1 to 2^62, such as 7000000000 or 7e9, got {text!r}",
            param_hint=option,
        )
    return int(value)


def _rules(window: Window, t: int, accumulators: int) -> dict[str, Rule]:
    """Return the rules to compare, by name."""
    freshest: dict[str, Rule] = {}
    if isinstance(window, Growing) and window.at_most is None and window.c >= 1e-6:
        freshest = {"freshest, 12": shared_rules([window])[0][0]}
    anytime = {f"anytime, {n}": AnytimeWindow(window, n) for n in range(2, accumulators + 1)}
    return {
        "raw tail": RawTail(window, t),
        "exponential": Exponential(window),
        **anytime,
        "anytime, 3, paper's turns": AnytimeWindow(window, 3, turns="paper"),
        **freshest,
        "exact": ExactWindow(window),
    }


def _reading(rule: Rule, window: Window) -> Freshest | None:
    """Return how the average of a rule is read. An `AnyTail` has no window of its own."""
    return Freshest(window) if isinstance(rule, AnyTail) else None


def _profile(rule: Rule, t: int, reading: Freshest | None = None) -> Profile:
    """Return the profile at step t, in time that is nearly independent of t."""
    if not isinstance(rule, Exponential):
        return summarise(rule, _starts(rule, t), t, reading)
    small, steps, scale = _scaled(rule, t)
    size = float(rule.size(t))
    # all samples have a weight, except those before the window grew past 1, where the decay is 0
    oldest = t - max(1, bisect_right(range(1, t + 1), 1.0, key=rule.size))
    mean_age = summarise(small, [], steps).mean_age * scale
    return Profile(t, size, min(size, float(t)), mean_age, oldest, rule.accumulators)


def _starts(rule: Rule, t: int) -> list[int]:
    """Return the starts of the blocks; none for an ExactWindow, which has a block per sample."""
    return [] if isinstance(rule, ExactWindow) else starts_at(rule, t)


def _scaled(rule: Rule, t: int) -> tuple[Rule, int, int]:
    """Return a shorter rule and an earlier step with a scaled profile, and the scale.

    Only exponentials need this, since their weights are summed one by one. If window and stream are
    both a hundred times shorter, so are the ages, to within a ten-thousandth while the window holds
    at least 10,000 samples.
    """
    if not isinstance(rule, Exponential):
        return rule, t, 1
    size = float(rule.size(t))
    if min(t, 40 * size) <= MAX_SUMMED:
        return rule, t, 1
    scale = max(1, int(min(t / MAX_SUMMED, size / 10**4)))
    window: Window
    if isinstance(rule.window, Fixed):
        window = Fixed(round(rule.window.k / scale))
    else:
        cap = rule.window.at_most
        window = Growing(rule.window.c, None if cap is None else max(1, round(cap / scale)))
    return Exponential(window), t // scale, scale


def _memory(rule: Rule, summary: Profile, size: int) -> dict[str, int]:
    """Return the bytes that an average holds, if each array has `size` bytes.

    The sum is hot: every update rewrites it. The means are cold: only merges, turns and reads
    access them, so they may be kept on disk.
    """
    hot, cold = size, summary.accumulators * size
    if isinstance(rule, ExactWindow):
        hot, cold = cold, 0
    return {"memory": hot + cold, "hot": hot, "cold": cold}


def _print_table(rules: Mapping[str, Rule], rows: list[dict[str, Any]], dtype: Dtype) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    t = rows[0]["count"]
    table = Table(
        "method",
        box=box.SIMPLE_HEAD,
        title=_heading(rows[0]["size"], t),
        title_justify="left",
    )
    columns = ["accumulators", "effective\nsize", "mean\nage", "oldest\nage"]
    has_memory = "hot" in rows[0]
    for column in [*columns, "hot\nmemory", "cold\nmemory"] if has_memory else columns:
        table.add_column(column, justify="right", no_wrap=True)
    scaled = {name for name, rule in rules.items() if _scaled(rule, t)[2] > 1}
    for row in rows:
        sign = "≈" if row["method"] in scaled else ""
        table.add_row(
            row["method"],
            f"{row['accumulators']:,}",
            f"{row['effective_size']:,.1f}",
            f"{sign}{row['mean_age']:,.1f}",
            f"{row['oldest_age']:,}",
            *(_in_bytes(row[kind]) for kind in ("hot", "cold") if has_memory),
        )
    console = Console(highlight=False, width=200)  # wide enough to print all numbers in full
    console.print(table)
    console.print("exact holds samples, not accumulators; an age of 0 is the newest sample.")
    if has_memory:
        console.print(
            f"Memory in {dtype}. Hot: the sum, rewritten by every update; for exact, the samples.\n"
            "Cold: the accumulators, used every few hundred updates and by reads; in PyTorch,\n"
            "ParameterAverage(..., offload=folder) keeps them on disk. Scratch is not counted."
        )
    if scaled:
        console.print(f"≈ scaled up from about {MAX_SUMMED:,} samples: accurate to 4 digits.")


def _heading(size: float, t: int) -> str:
    return f"a window of {size:,.10g} after {t:,} samples"


def _in_bytes(size: float) -> str:
    """Format a number of bytes in decimal units.

    Examples:
        >>> _in_bytes(112e9), _in_bytes(40)
        ('112 GB', '40 B')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} PB" if size < 999.5 else f"{size:.2e} PB"


def _plot(rules: Mapping[str, Rule], window: Window, t: int, path: Path) -> None:
    """Draw weights by age, relative to a uniform weight over the window."""
    from tailavg.cli.pictures import check, save

    check(path, "--plot")
    from matplotlib import rc_context, style
    from matplotlib.figure import Figure

    from tailavg.style import LOOK

    size = min(float(t), float(window.size(t)))
    reach = min(float(t), 2.5 * size)
    with style.context("tableau-colorblind10"), rc_context(LOOK):
        figure = Figure(figsize=(9, 4), layout="constrained")
        axes = figure.subplots()
        lines = chain(["-.", ":"], cycle(["--", "-"]))
        for (name, rule), line in zip(rules.items(), lines, strict=False):
            ages, weights = _curve(rule, _reading(rule, window), t, reach)
            axes.plot(ages, weights * size, line, label=name)
        axes.set(
            title=_heading(float(window.size(t)), t),
            xlabel="age of the sample",
            ylabel="weight × size of the window",
            xlim=(-0.02 * reach, reach),
        )
        axes.legend()
        save(figure, path)


def _curve(rule: Rule, reading: Freshest | None, t: int, reach: float) -> tuple[Any, Any]:
    """Return the ages and weights of a curve, back to `reach`."""
    rule, t, scale = _scaled(rule, t)
    ages: list[Any] = []
    weights: list[Any] = []
    age = 0
    for size, run in newest_first(rule, _starts(rule, t), t, reading):
        if isinstance(run, np.ndarray):
            drawn = np.unique(np.linspace(0, size - 1, 1000).astype(int))
            ages.append(age + drawn)
            weights.append(run[drawn])
        else:
            ages.append([age, age + size])
            weights.append([run, run])
        age += size
        if age * scale > reach:
            break
    ages.append([age, t])
    weights.append([0.0, 0.0])
    return np.concatenate(ages) * scale, np.concatenate(weights) / scale
