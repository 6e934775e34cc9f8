"""Options that commands share, and the windows and rules that they describe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from enum import StrEnum
from typing import Any

import typer

from tailavg.core.elapsed import Elapsed
from tailavg.core.readings import Freshest, Reading
from tailavg.core.rules import (
    AnytimeWindow,
    ExactWindow,
    Exponential,
    Rule,
    WindowRule,
    shared_rules,
)
from tailavg.core.windows import Growing, Window, as_window

WINDOW = typer.Option(
    "--window",
    "-w",
    help="How much to average: 100 is the last hundred; 0.25 or 25% is the last quarter; "
    "1 is the last one, 1.0 all of them; 10k, 4M and 50B are counts, too; in stream and plot, "
    "10m, 1h30m and 90s are times.",
)
DEFAULT_WINDOW = "0.25"
POWERS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
WINDOWS = typer.Option(help="Several windows at once, such as 0.1,0.25,100; replaces --window.")
AT_MOST = typer.Option(help="The largest window that a fraction grows to.")
METHOD = typer.Option(
    metavar="METHOD", help="How to average: anytime, exponential, exact or freshest."
)
COLUMN = typer.Option(
    "--column", "-c", help="Read this column of CSV: a name in the header, or a number from 1."
)
FIELD = typer.Option("--field", "-f", help="Read this field of JSON lines.")
MATCH = typer.Option(
    "--match", "-m", help="Read the number after this name, as in loss=0.5 or 'loss': 0.5."
)
REGEX = typer.Option("--regex", help="Read the number in the group of this regular expression.")
DELIMITER = typer.Option(
    "--delimiter", help="The delimiter of columns: one character, tab or space; by default guessed."
)
NAN = typer.Option(
    metavar="POLICY",
    help="What to do with a NaN: propagate (it enters the averages), omit or raise.",
)
TIME = typer.Option(
    help="The column, field or name of the time, for windows such as 10m: epoch seconds or "
    "ISO 8601; without it, rows have the time of their arrival."
)
BY = typer.Option(help="Keep one average for each value of this column or field.")
SKIP_BAD = typer.Option("--skip-bad", help="Skip rows that cannot be read, and report how many.")


class Method(StrEnum):
    """The methods that need only a window."""

    anytime = "anytime"
    exponential = "exponential"
    exact = "exact"
    freshest = "freshest"


Reads = Sequence[tuple[Rule, Reading | None]]
"""For each window, a rule, and the reading if the rule has no window of its own."""


def parse_window(text: str, at_most: int | None = None, times: bool = False) -> Any:
    """Return the window that a text describes: `100` the last hundred, `25%` the last quarter.

    With `times`, it may also be an `Elapsed`: `10m` is ten minutes, since `10M` is ten million.

    Examples:
        >>> parse_window("1"), parse_window("1.0")
        (Fixed(k=1), Growing(c=1.0, at_most=None))
        >>> parse_window("1e3"), parse_window("1_000"), parse_window("25%")
        (Fixed(k=1000), Fixed(k=1000), Growing(c=0.25, at_most=None))
        >>> parse_window("50B"), parse_window("4.2M")
        (Fixed(k=50000000000), Fixed(k=4200000))
        >>> parse_window("10M"), parse_window("10m", times=True)
        (Fixed(k=10000000), Elapsed(period=600.0))
    """
    window: Any = _period(text)
    if window is not None and not times:
        raise typer.BadParameter(
            f"{text!r} is a window of time, which only stream and plot take; use a count, such as "
            "10k or 10M (million), or a fraction, such as 0.25"
        )
    try:
        window = window or as_window(_window_number(text))
    except ValueError:
        raise typer.BadParameter(
            "expected a window: a count from 1 to 2^62, such as 1000, 1_000, 1e3 or 1k, "
            f"{'a time such as 10m, ' if times else ''}or a fraction up to 1.0, such as 0.25 or "
            f"25%; got {text!r}"
        ) from None
    if at_most is None:
        return window
    if not isinstance(window, Growing):
        raise typer.BadParameter("--at-most needs a fraction as --window")
    try:
        return Growing(window.c, at_most)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _period(text: str) -> Elapsed | None:
    """Return the period of a text such as `10m`; None if it is another text."""
    try:
        return Elapsed(text) if text.islower() else None  # M is million
    except ValueError:
        return None


def _window_number(text: str) -> int | float:
    """Return a count of samples as an int, or a fraction as a float."""
    text = text.strip()
    if text.endswith("%"):
        return float(f"{text[:-1].rstrip()}e-2")  # dividing by 100 would round twice
    if re.fullmatch(r"\d[\d_]*(\.\d+)?[kKMBT]", text):
        number = Decimal(text[:-1]) * POWERS[text[-1].upper()]
        if number % 1:
            raise ValueError(text)
        return int(number)
    try:
        return int(text)
    except ValueError:
        fraction = float(text)
    is_count = "e" in text.lower() and fraction >= 1 and fraction.is_integer()
    return int(fraction) if is_count else fraction


def parse_windows(
    window: str | None,
    windows: str | None,
    at_most: int | None = None,
    default: str | None = None,
    times: bool = False,
) -> list[Any]:
    """Return the windows of --window or --windows. Without both options, return `default`.

    With `times`, windows may also be periods of time.

    Examples:
        >>> parse_windows(None, "100,25%")
        [Fixed(k=100), Growing(c=0.25, at_most=None)]
    """
    if windows is None:
        window = default if window is None else window
        if window is None:
            raise typer.BadParameter("choose a window: --window 0.25, or --windows 0.1,0.25")
        return [parse_window(window, at_most, times)]
    if window is not None:
        raise typer.BadParameter("--windows replaces --window: leave one of them out")
    if at_most is not None:
        raise typer.BadParameter("--at-most goes with --window, not with --windows")
    parsed: list[Any] = []
    for text in windows.split(","):
        if (number := parse_window(text, times=times)) in parsed:
            raise typer.BadParameter(
                f"--windows: expected each window once, got {text.strip()} twice"
            )
        parsed.append(number)
    return parsed


def window_name(window: Window | Elapsed) -> str:
    """Return the shortest text from which `parse_window` makes the window.

    Examples:
        >>> window_name(parse_window("0.50")), window_name(parse_window("1"))
        ('0.5', '1')
        >>> window_name(parse_window("90min", times=True)), window_name(Elapsed(0.25))
        ('1h30m', '0.25s')
    """
    if isinstance(window, Elapsed):
        return _period_name(window.length)
    return str(window.c if isinstance(window, Growing) else window.k)


def _period_name(nanoseconds: int) -> str:
    """Return the text of a period, as in `1h30m`."""
    name, left = "", nanoseconds
    for unit, seconds in ("d", 86400), ("h", 3600), ("m", 60):
        number, left = divmod(left, seconds * 10**9)
        name += f"{number}{unit}" if number else ""
    return f"{name}{Decimal(left).scaleb(-9).normalize():f}s" if left else name


def parse_reads(windows: list[Window], method: Method, accumulators: int | None) -> Reads:
    """Return how to read each window with the method."""
    if method is not Method.freshest:
        return [(parse_rule(window, method, accumulators), None) for window in windows]
    if not all(isinstance(window, Growing) and window.at_most is None for window in windows):
        raise typer.BadParameter(
            "--method freshest needs fractions, such as 0.25, and no --at-most: a window of a "
            "fixed number of samples becomes an ever smaller fraction"
        )
    shared = share(windows, accumulators)
    return [(rule, Freshest(window)) for (rule, _), window in zip(shared, windows, strict=True)]


def share(windows: list[Window], accumulators: int | None) -> Reads:
    """Return how to read several windows, all fractions from one set of blocks."""
    try:
        return shared_rules(windows, 12 if accumulators is None else accumulators)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def parse_rule(window: Window, method: Method, accumulators: int | None) -> WindowRule:
    """Return the rule that the options describe."""
    if isinstance(window, Elapsed) and method is Method.exact:
        raise typer.BadParameter(
            "--method exact needs a count or a fraction; a window of time goes with anytime and "
            "exponential"
        )
    if method is not Method.anytime:
        if accumulators is not None:
            raise typer.BadParameter(f"--accumulators goes with --method anytime, not {method}")
        return Exponential(window) if method is Method.exponential else ExactWindow(window)
    try:
        return (
            AnytimeWindow(window) if accumulators is None else AnytimeWindow(window, accumulators)
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
