"""`tailavg checkpoints`: average the last checkpoints of a run."""

from __future__ import annotations

import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tailavg.cli.common import Method, fail, parse_rule, parse_windows, window_name
from tailavg.core.decay import Decay
from tailavg.core.rules import WindowRule
from tailavg.core.windows import Window

if TYPE_CHECKING:
    from tailavg.checkpoints import Plan

__all__ = ["checkpoints"]


class Sort(StrEnum):
    """How to order checkpoints in time."""

    step = "step"
    name = "name"
    mtime = "mtime"


class DType(StrEnum):
    """The dtypes that averages may have."""

    float64 = "float64"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


Shape = Literal["linear", "cosine", "1-sqrt"]


def checkpoints(
    files: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            help="Files (.safetensors; .pt, .pth, .ckpt, .bin), or folders that save_pretrained or "
            "torch.distributed.checkpoint wrote.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="The file or folder to write; {window} stands for each of --windows.",
        ),
    ],
    window: Annotated[
        str | None,
        typer.Option(
            help="How many of the last checkpoints to average (10), or which fraction (0.25); "
            "1 is the last one, 1.0 all of them."
        ),
    ] = None,
    windows: Annotated[
        str | None,
        typer.Option(
            help="Several windows, such as 0.1,0.25,10, with an output for each; replaces --window."
        ),
    ] = None,
    sort: Annotated[
        Sort,
        typer.Option(help="Order by the numbers in names, by name, or by modification time."),
    ] = Sort.step,
    method: Annotated[
        Method | None,
        typer.Option(
            help="How to weigh the checkpoints; exact, the default, is the mean of the window."
        ),
    ] = None,
    accumulators: Annotated[
        int | None, typer.Option(help="With --method anytime: how many accumulators to imitate.")
    ] = None,
    decay: Annotated[
        Shape | None,
        typer.Option(
            help="Weigh the window as this learning-rate decay would; linear is the plain mean."
        ),
    ] = None,
    by_step: Annotated[
        bool,
        typer.Option(
            "--by-step",
            help="Count windows in steps, the last numbers in the names: 0.25 is the last quarter "
            "of the steps, however the checkpoints are spaced.",
        ),
    ] = False,
    weights: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A JSON list of one weight per checkpoint, oldest first; replaces --window.",
        ),
    ] = None,
    dtype: Annotated[
        DType | None,
        typer.Option(help="The dtype of the averages; by default that of the checkpoints."),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            help="Average only tensors with such names, as in 'model.*'; may be repeated."
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Leave tensors with such names as in the newest; may be repeated."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be averaged, and write nothing.")
    ] = False,
) -> None:
    """Average the last checkpoints of a run: files, or folders.

    Examples: tailavg checkpoints run/checkpoint-* --window 0.25 -o averaged

    tailavg checkpoints run/step-*.pt --windows 0.1,0.25,0.5 -o average-{window}.pt
    """
    from tailavg.checkpoints import CheckpointError, Plan, read_weights, steps_of

    ordered = _in_order(files, sort)
    outputs: dict[Path, Any] = {}
    if weights is not None:
        _check_alone(
            windows=windows,
            window=window,
            method=method,
            accumulators=accumulators,
            decay=decay,
            by_step=by_step or None,
        )
        outputs[output] = weights
    else:
        for one in parse_windows(window, windows):
            name = str(output)
            if windows is not None:
                name = name.replace("{window}", window_name(one))
            if Path(name) in outputs:
                raise typer.BadParameter(
                    "expected {window} in the name, since there are several windows, got "
                    f"{output}",
                    param_hint="--output",
                )
            outputs[Path(name)] = _rule(one, method, accumulators, decay, by_step)
    for path in outputs:
        _check_names(files, path)

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("averaging"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    try:
        if weights is not None:
            outputs[output] = read_weights(weights, len(ordered))
        plan = Plan(
            ordered,
            outputs,
            dtype=None if dtype is None else dtype.value,
            include=include or (),
            exclude=exclude or (),
            steps=steps_of(ordered) if by_step else None,
        )
        if dry_run:
            _describe(plan, ordered)
            return
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("averaging", total=None)
            plan.run(lambda done, total: bar.update(task, completed=done, total=total))
    except CheckpointError as error:
        fail(f"{error}\nNothing was written.")
    except OSError as error:
        fail(f"{error.filename or output}: {error.strerror or error}\nNothing was written.")
    except MemoryError:
        fail("expected memory for the averages and the newest file, got less\nNothing was written.")
    except ImportError as error:
        extra = "torch" if error.name == "torch" else "'tailavg[cli]'"
        fail(f"these checkpoints need {error.name}; install it with: pip install {extra}")
    for path in outputs:
        used = plan.used(path)
        span = f"{used[0]} to {used[-1]}" if len(used) > 1 else f"{used[0]}"
        _echo(f"{path}: the average of {len(used)} of {len(files)} checkpoints, {span}")


def _echo(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"  # in which a name may have no place
    typer.echo(text.encode(encoding, "backslashreplace").decode(encoding))


def _describe(plan: Plan, paths: list[Path]) -> None:
    """Say what would be averaged, with which weights."""
    for output, shares in plan.shares.items():
        _echo(f"{output} would be the average of")
        width = max(len(str(path)) for path in paths)
        for path, share in zip(paths, shares.tolist(), strict=True):
            if share:
                _echo(f"  {path!s:{width}}  {share:.6g}")
    for what, size in (
        ("read", plan.reads),
        ("written", plan.writes),
        ("held in memory, at most", plan.holds),
    ):
        _echo(f"bytes to be {what}: {size:,}".replace("to be held", "held"))


def _check_alone(**options: object) -> None:
    """Raise if --weights comes with an option that it replaces."""
    for name, value in options.items():
        if value is not None:
            raise typer.BadParameter(
                f"--weights has all the weights: expected no --{name.replace('_', '-')} with it"
            )


def _rule(
    window: Window,
    method: Method | None,
    accumulators: int | None,
    decay: Shape | None,
    by_step: bool,
) -> WindowRule | Decay:
    """The rule that the options describe."""
    for option, given in ("--decay", decay is not None), ("--by-step", by_step):
        if given and method not in (None, Method.exact):
            raise typer.BadParameter(
                f"{option} weighs the checkpoints by itself: expected no --method {method} with it"
            )
    rule = parse_rule(window, method or Method.exact, accumulators)
    if decay is None or decay == "linear":  # the plain window is a linear decay
        return rule

    return Decay(window, decay)


def _check_names(paths: list[Path], output: Path) -> None:
    """Raise if the names cannot be right."""
    from tailavg.checkpoints import SAFETENSORS, TORCH

    kinds = SAFETENSORS if output.suffix in SAFETENSORS else TORCH
    folders = [path for path in paths if path.is_dir()]
    for path in paths if len(folders) < len(paths) else ():
        expected = "all files and the output to end in .safetensors, or all in .pt, .pth, .ckpt or"
        if path in folders:
            raise typer.BadParameter(f"expected files only, or folders only, got the folder {path}")
        for one in output, path:
            if one.suffix not in kinds:
                got = "the output " * (one is output) + str(one)
                raise typer.BadParameter(f"expected {expected} .bin; got {got}")
    if not output.absolute().parent.is_dir():
        raise typer.BadParameter(
            f"expected an existing folder, got {output.parent}", param_hint="--output"
        )
    seen: dict[Path, Path] = {}
    for path in paths:
        if seen.setdefault(path.resolve(), path) is not path:
            raise typer.BadParameter(f"expected each checkpoint once, got {path} twice")
    kind = "folder" if folders else "file"
    for path in (found := output.resolve()), *found.parents:
        if path in seen:
            raise typer.BadParameter(
                f"expected a {kind} that is not one of the checkpoints, nor in one, got {output}",
                param_hint="--output",
            )


def _in_order(paths: list[Path], sort: Sort) -> list[Path]:
    """The checkpoints, oldest first."""
    from tailavg.checkpoints import natural

    if sort is Sort.name:
        return sorted(paths, key=str)
    if sort is Sort.mtime:
        return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, natural(path)))
    patterns = {re.sub(r"\d+", "N", str(path)): path for path in paths}
    if len(patterns) > 1:
        one, other, *_ = patterns.values()
        raise typer.BadParameter(
            f"expected names that differ in their numbers only, got {one} and {other}: "
            "which is older? Leave one out, or choose --sort name or --sort mtime",
            param_hint="--sort",
        )
    return sorted(paths, key=natural)
