"""Options that commands share, and the windows and rules that they describe."""

from __future__ import annotations

from enum import StrEnum

import typer

from tailavg.core.rules import AnytimeWindow, ExactWindow, Exponential, WindowRule
from tailavg.core.windows import Growing, Window, as_window

WINDOW = typer.Option(
    "--window",
    "-w",
    help="How much to average: 100 is the last hundred, 0.25 the last quarter; "
    "1 is the last one, 1.0 all of them.",
)
WINDOWS = typer.Option(help="Several windows at once, such as 0.1,0.25,100; replaces --window.")
AT_MOST = typer.Option(help="The largest window that a fraction grows to.")
METHOD = typer.Option(help="How to average.")
COLUMN = typer.Option("--column", "-c", help="Read this column of CSV with a header.")
FIELD = typer.Option("--field", "-f", help="Read this field of JSON lines.")
BY = typer.Option(help="Keep one average for each value of this column or field.")
SKIP_BAD = typer.Option("--skip-bad", help="Skip rows that cannot be read, and report how many.")


class Method(StrEnum):
    """The methods that need only a window."""

    anytime = "anytime"
    exponential = "exponential"
    exact = "exact"


def parse_window(text: str, at_most: int | None = None) -> Window:
    """Parse a window: `100` is the last hundred, `0.25` the last quarter.

    Examples:
        >>> parse_window("1"), parse_window("1.0")
        (Fixed(k=1), Growing(c=1.0, at_most=None))
    """
    try:
        number = int(text) if text.strip().lstrip("+-").isdigit() else float(text)
    except ValueError:
        raise typer.BadParameter(f"expected a window such as 1000 or 0.25, got {text!r}") from None
    try:
        window = as_window(number)
        if at_most is None:
            return window
        if not isinstance(window, Growing):
            raise ValueError("--at-most needs a fraction as --window")
        return Growing(window.c, at_most)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def parse_windows(
    window: str | None, windows: str | None, at_most: int | None = None
) -> list[Window]:
    """Parse --window or --windows, whichever is given.

    Examples:
        >>> parse_windows(None, "100,0.25")
        [Fixed(k=100), Growing(c=0.25, at_most=None)]
    """
    if windows is None and window is not None:
        return [parse_window(window, at_most)]
    if windows is None or window is not None:
        got = "neither" if windows is None else "both"
        raise typer.BadParameter(f"expected either --window or --windows, got {got}")
    if at_most is not None:
        raise typer.BadParameter("--at-most goes with --window, not with --windows")
    parsed: list[Window] = []
    for text in windows.split(","):
        if (number := parse_window(text)) in parsed:
            raise typer.BadParameter(
                f"--windows: expected each window once, got {text.strip()} twice"
            )
        parsed.append(number)
    return parsed


def window_name(window: Window) -> str:
    """Return the shortest text that `parse_window` turns into a window.

    Examples:
        >>> window_name(parse_window("0.50")), window_name(parse_window("1"))
        ('0.5', '1')
    """
    return str(window.c if isinstance(window, Growing) else window.k)


def parse_rule(window: Window, method: Method, accumulators: int | None) -> WindowRule:
    """Return the rule that the options describe."""
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
