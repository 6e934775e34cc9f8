"""`tailavg checkpoints`: average the last checkpoints of a run."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from tailavg.cli import options
from tailavg.cli.common import FAILED, fail, say
from tailavg.cli.options import Method, parse_rule, parse_window, parse_windows, window_name
from tailavg.core.readings import ByAge, Decay, Freshest
from tailavg.core.rules import WindowRule
from tailavg.core.windows import Fixed, Window

if TYPE_CHECKING:
    from tailavg.checkpoints.merge import Merge
    from tailavg.checkpoints.processes import Group

Sort = Literal["step", "name", "mtime"]
DType = Literal["float64", "float32", "float16", "bfloat16"]
Shape = Literal["linear", "cosine", "1-sqrt"]


def checkpoints(
    files: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            metavar="FILES",
            help="Files (.safetensors; .pt, .pth, .ckpt, .bin), folders that save_pretrained, "
            "torch.distributed.checkpoint or Megatron wrote, or the folder of a run that holds "
            "such folders (iter_*, step-*, checkpoint-*).",
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
    window: Annotated[str | None, options.WINDOW] = None,
    windows: Annotated[str | None, options.WINDOWS] = None,
    sort: Annotated[
        Sort,
        typer.Option(help="Order by the numbers in names, by name, or by modification time."),
    ] = "step",
    last: Annotated[int | None, typer.Option(min=1, help="Use only this many newest.")] = None,
    start: Annotated[int | None, typer.Option(help="Use only steps from this one on.")] = None,
    end: Annotated[int | None, typer.Option(help="Use only steps up to this one.")] = None,
    every: Annotated[
        int | None,
        typer.Option(
            min=1, help="Use only checkpoints this many steps apart, counted from the newest."
        ),
    ] = None,
    method: Annotated[
        Method | None,
        typer.Option(
            metavar="METHOD",
            help="How to weight the checkpoints: exact (the default, the mean of the window), "
            "anytime, exponential or freshest.",
        ),
    ] = None,
    accumulators: Annotated[
        int | None,
        typer.Option(help="With --method anytime: the number of accumulators to imitate."),
    ] = None,
    decay: Annotated[
        Shape | None,
        typer.Option(
            help="Weight the window as this learning-rate decay would; linear is the plain mean."
        ),
    ] = None,
    by_step: Annotated[
        bool,
        typer.Option(
            "--by-step",
            help="Measure windows in steps, the last numbers in the names: 0.25 is the last "
            "quarter of the steps, even if checkpoints are unevenly spaced.",
        ),
    ] = False,
    tokens_per_step: Annotated[
        str | None,
        typer.Option(help="Measure windows in tokens, as in --window 50B; implies --by-step."),
    ] = None,
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
        typer.Option(
            metavar="DTYPE",
            help="The dtype of the averages: float64, float32, float16 or bfloat16; by default "
            "the dtype of the checkpoints.",
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            help="Average only tensors whose names match, as in 'model.*'; may be repeated."
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Copy matching tensors from the newest instead; may be repeated."),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            help="Split folders of torch.distributed.checkpoint over this many processes of this "
            "machine. For several machines, use torchrun instead.",
        ),
    ] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be averaged, and write nothing.")
    ] = False,
) -> None:
    """Average the last checkpoints of a run: files, or folders.

    Examples: tailavg checkpoints run/checkpoint-* --window 0.25 -o averaged

    tailavg checkpoints run --last 10 -o averaged

    tailavg checkpoints run/step-*.pt --windows 0.1,0.25 -o average-{window}.pt
    """
    from tailavg.checkpoints import CheckpointError, processes
    from tailavg.checkpoints.merge import Merge
    from tailavg.checkpoints.weights import chosen, read_weights, steps_of

    is_first = processes.rank() == 0
    selection = {"last": last, "start": start, "end": end, "every": every}
    is_selected = any(value is not None for value in selection.values())
    outputs: dict[Path, Any]
    if weights is None:
        by_step = by_step or tokens_per_step is not None
        default = "1.0" if is_selected and not by_step else None
        parsed = _windows_of_outputs(output, window, windows, default)
        if tokens_per_step is not None:
            parsed = {path: _in_steps(each, tokens_per_step) for path, each in parsed.items()}
        rule = partial(_rule, method, accumulators, decay, by_step)
        outputs = {path: rule(parsed_window) for path, parsed_window in parsed.items()}
    else:
        replaced: dict[str, Any] = {"window": window, "windows": windows, "method": method}
        replaced |= {"accumulators": accumulators, "decay": decay, "by-step": by_step or None}
        replaced |= {"tokens-per-step": tokens_per_step}
        for option, value in replaced.items():
            if value is not None:
                raise typer.BadParameter(f"--weights replaces --{option}: leave one of them out")
        outputs = {output: None}
    files = _of_run(files, is_first)
    ordered = _in_order(files, sort)
    try:
        ordered = chosen(ordered, **selection)
        if not ordered:
            raise CheckpointError("no checkpoint has a step between --start and --end")
        for path in outputs:
            _check_paths(ordered, path)
        if workers > 1 and processes.size() == 1 and not dry_run:
            raise typer.Exit(processes.workers(["-m", "tailavg", *sys.argv[1:]], workers))
        if weights is not None:
            outputs = {output: read_weights(weights, len(ordered))}
        open_all = partial(
            Merge,
            ordered,
            outputs,
            dtype=dtype,
            include=include or (),
            exclude=exclude or (),
            steps=steps_of(ordered) if by_step else None,
        )
        with processes.group() as group:
            merge = group.together(open_all)
            if not dry_run:
                _run(merge, group)
    except (CheckpointError, OSError, MemoryError, ImportError) as error:
        if not is_first:
            raise typer.Exit(FAILED) from None
        _fail(error, output)
    if not is_first:
        return
    for path, shares in merge.weights.items():
        used = merge.used(path)
        entries = merge.newest.left_out
        note = f"; the optimizer state ({entries} entries) is left out" if entries else ""
        if dry_run:
            typer.echo(f"{path} would be the average of{note.replace(';', ',', 1)}")
            width = max(len(str(file)) for file in used)
            for file, share in zip(used, shares[shares != 0], strict=True):
                typer.echo(f"  {file!s:{width}}  {share:.6g}")
        else:
            span = f"{used[0]} to {used[-1]}" if len(used) > 1 else f"{used[0]}"
            typer.echo(
                f"{path}: the average of {len(used)} of {len(files)} checkpoints, {span}{note}"
            )


def _fail(error: Exception, output: Path) -> NoReturn:
    """End the command with a message about an error."""
    if isinstance(error, ImportError):
        extra = "torch" if error.name == "torch" else "'tailavg[cli]'"
        fail(f"these checkpoints need {error.name}; install it with: pip install {extra}")
    message = str(error)
    if isinstance(error, MemoryError):
        message = "out of memory"
    elif isinstance(error, OSError):
        message = f"{error.filename or output}: {error.strerror or error}"
    fail(f"{message}\nNothing was written.")


def _of_run(files: list[Path], is_first: bool) -> list[Path]:
    """Return the finished checkpoints in the folder of a run, or the files themselves."""
    from tailavg.checkpoints.runs import of_run, unfinished

    found = of_run(files[0]) if len(files) == 1 and files[0].is_dir() else []
    reasons = {path: unfinished(path) for path in found}
    for path, reason in reasons.items():
        if reason is not None and is_first:
            say(f"{path} is left out, since {reason}")
    return [path for path, reason in reasons.items() if reason is None] or files


def _in_steps(window: Window, tokens_per_step: str) -> Window:
    """Return a window of tokens in steps."""
    tokens = parse_window(tokens_per_step)
    if not isinstance(tokens, Fixed):
        raise typer.BadParameter("--tokens-per-step: expected a count, such as 4M")
    if not isinstance(window, Fixed):
        raise typer.BadParameter("--tokens-per-step needs a window in tokens, such as 50B")
    return Fixed(max(1, round(window.k / tokens.k)))


def _windows_of_outputs(
    output: Path, window: str | None, windows: str | None, default: str | None
) -> dict[Path, Window]:
    """Return the window of each output."""
    parsed = parse_windows(window, windows, default=default)
    if windows is None:
        return {output: parsed[0]}
    outputs = {Path(str(output).replace("{window}", window_name(each))): each for each in parsed}
    if len(outputs) < len(parsed):
        raise typer.BadParameter(
            "several windows need {window} in the name, as in average-{window}.pt",
            param_hint="--output",
        )
    return outputs


def _run(merge: Merge, group: Group) -> None:
    """Average, with a progress bar on a terminal."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        progress.TextColumn("averaging"),
        progress.BarColumn(),
        progress.TextColumn("{task.percentage:>3.0f} %"),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(
        *columns, console=console, disable=group.rank > 0 or not console.is_terminal
    ) as bar:
        task = bar.add_task("averaging", total=None)
        merge.run(lambda done, total: bar.update(task, completed=done, total=total), group)


def _rule(
    method: Method | None,
    accumulators: int | None,
    decay: Shape | None,
    by_step: bool,
    window: Window,
) -> WindowRule | ByAge:
    """Return the rule that the options describe."""
    is_exact = method in (None, Method.exact)
    for option, refused in (
        ("--decay", decay is not None and not is_exact),
        ("--by-step", by_step and not (is_exact or method is Method.freshest)),
    ):
        if refused:
            raise typer.BadParameter(f"{option} works only with --method exact, not {method}")
    if method is Method.freshest:
        if accumulators is not None:
            raise typer.BadParameter("--accumulators goes with --method anytime, not freshest")
        return Freshest(window)
    rule = parse_rule(window, method or Method.exact, accumulators)
    if decay is None or decay == "linear":  # a linear decay is the plain mean of the window
        return rule
    return Decay(window, decay)


def _check_paths(paths: list[Path], output: Path) -> None:
    """Raise if these paths cannot be averaged, or the output cannot be written."""
    from tailavg.checkpoints.merge import SAFETENSORS, TORCH

    folders = [path for path in paths if path.is_dir()]
    if len(folders) < len(paths):
        if folders:
            raise typer.BadParameter(f"pass files or folders, not both: {folders[0]} is a folder")
        kinds = SAFETENSORS if output.suffix in SAFETENSORS else TORCH
        for path in output, *paths:
            if path.suffix not in kinds:
                raise typer.BadParameter(
                    f"{path}: the files and the output must all end in .safetensors, or all in "
                    ".pt, .pth, .ckpt or .bin"
                )
    if not output.absolute().parent.is_dir():
        raise typer.BadParameter(
            f"the folder {output.parent} does not exist", param_hint="--output"
        )
    resolved = [path.resolve() for path in paths]
    for path, real in zip(paths, resolved, strict=True):
        if resolved.count(real) > 1:
            raise typer.BadParameter(f"{path} is given twice; leave one out")
    real = output.resolve()
    if not {real, *real.parents}.isdisjoint(resolved):
        raise typer.BadParameter(
            f"{output} is one of the checkpoints, or inside one; choose another path",
            param_hint="--output",
        )


def _in_order(paths: list[Path], sort: Sort) -> list[Path]:
    """Return the checkpoints, oldest first."""
    from tailavg.checkpoints.weights import natural

    if sort == "name":
        return sorted(paths, key=str)
    if sort == "mtime":
        return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, natural(path)))
    patterns = {re.sub(r"\d+", "N", str(path)): path for path in paths}
    if len(patterns) > 1:
        first, second, *_ = patterns.values()
        raise typer.BadParameter(
            f"cannot order {first} and {second}: their names differ in more than numbers; choose "
            "--sort name or --sort mtime, or leave one out",
            param_hint="--sort",
        )
    return sorted(paths, key=natural)
