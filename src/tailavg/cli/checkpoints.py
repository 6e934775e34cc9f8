"""`tailavg checkpoints`: average the last checkpoints of a run."""

from __future__ import annotations

import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tailavg.cli.common import Method, fail, parse_rule, parse_windows, window_name

__all__ = ["checkpoints"]


class Sort(StrEnum):
    """How to order checkpoints in time."""

    step = "step"
    name = "name"
    mtime = "mtime"


def checkpoints(
    files: Annotated[
        list[Path],
        typer.Argument(exists=True, dir_okay=False, help="Checkpoints: .safetensors, .pt or .pth."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="The file to write; {window} stands for each of --windows."
        ),
    ],
    window: Annotated[
        str | None,
        typer.Option(
            help="How many of the last files to average (10), or which fraction (0.25); "
            "1 is the last file, 1.0 all of them."
        ),
    ] = None,
    windows: Annotated[
        str | None,
        typer.Option(
            help="Several windows, such as 0.1,0.25,10, with a file for each; replaces --window."
        ),
    ] = None,
    sort: Annotated[
        Sort,
        typer.Option(help="Order by the numbers in names, by name, or by modification time."),
    ] = Sort.step,
    method: Annotated[
        Method, typer.Option(help="How to weigh the files; exact is the plain mean of the window.")
    ] = Method.exact,
    accumulators: Annotated[
        int | None, typer.Option(help="With --method anytime: how many accumulators to imitate.")
    ] = None,
) -> None:
    """Average the last checkpoints of a run, in the memory of one.

    Examples: tailavg checkpoints run/step-*.safetensors --window 0.25 -o average.safetensors

    tailavg checkpoints run/step-*.pt --windows 0.1,0.25,0.5 -o average-{window}.pt
    """
    chosen = parse_windows(window, windows)
    if len(chosen) > 1 and "{window}" not in str(output):
        raise typer.BadParameter(
            f"expected {{window}} in the name, since there are several windows, got {output}",
            param_hint="--output",
        )
    outputs = {}
    for one in chosen:
        name = str(output) if windows is None else str(output).replace("{window}", window_name(one))
        outputs[Path(name)] = parse_rule(one, method, accumulators)
        _check_names(files, Path(name))

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from tailavg.checkpoints import CheckpointError, average_checkpoints

    console = Console(stderr=True)
    columns = TextColumn("averaging"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")
    try:
        with Progress(
            *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
        ) as bar:
            task = bar.add_task("averaging", total=None)
            every = average_checkpoints(
                _in_order(files, sort),
                outputs,
                lambda done, total: bar.update(task, completed=done, total=total),
            )
    except CheckpointError as error:
        fail(f"{error}\nNothing was written.")
    except OSError as error:
        fail(f"{error.filename or output}: {error.strerror or error}\nNothing was written.")
    except MemoryError:
        fail("expected memory for the averages and the newest file, got less\nNothing was written.")
    except ImportError as error:
        extra = "torch" if error.name == "torch" else "'tailavg[cli]'"
        fail(f"{output.suffix} files need {error.name}; install it with: pip install {extra}")
    for path, used in zip(outputs, every, strict=True):
        span = f"{used[0]} to {used[-1]}" if len(used) > 1 else f"{used[0]}"
        said = f"{path}: the average of {len(used)} of {len(files)} checkpoints, {span}"
        encoding = sys.stdout.encoding or "utf-8"  # in which a name may have no place
        typer.echo(said.encode(encoding, "backslashreplace").decode(encoding))


def _check_names(files: list[Path], output: Path) -> None:
    """Raise if the names cannot be right."""
    from tailavg.checkpoints import SAFETENSORS, TORCH

    kinds = SAFETENSORS if output.suffix in SAFETENSORS else TORCH
    for path in [output, *files]:
        if path.suffix not in kinds:
            raise typer.BadParameter(
                "expected all files and the output to end in .safetensors, or all in .pt or .pth; "
                f"got the output {output} and {path}"
            )
    if not output.parent.is_dir():
        raise typer.BadParameter(
            f"expected an existing folder, got {output.parent}", param_hint="--output"
        )
    seen: dict[Path, Path] = {}
    for path in files:
        if seen.setdefault(path.resolve(), path) is not path:
            raise typer.BadParameter(f"expected each checkpoint once, got {path} twice")
    if output.resolve() in seen:
        raise typer.BadParameter(
            f"expected a file that is not one of the checkpoints, got {output}",
            param_hint="--output",
        )


def _in_order(files: list[Path], sort: Sort) -> list[Path]:
    """The files, oldest first."""
    from tailavg.checkpoints import natural

    if sort is Sort.name:
        return sorted(files, key=str)
    if sort is Sort.mtime:
        return sorted(files, key=lambda path: (path.stat().st_mtime_ns, natural(path)))
    patterns = {re.sub(r"\d+", "N", str(path)): path for path in files}
    if len(patterns) > 1:
        one, other, *_ = patterns.values()
        raise typer.BadParameter(
            f"expected names that differ in their numbers only, got {one} and {other}: "
            "which is older? Leave one out, or choose --sort name or --sort mtime",
            param_hint="--sort",
        )
    return sorted(files, key=natural)
