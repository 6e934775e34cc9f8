"""The command line. One file per command; each imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

from tailavg.cli import signals
from tailavg.extras import needs

with needs("cli"):
    import typer

    from tailavg.cli.checkpoints import checkpoints
    from tailavg.cli.common import FAILED, say
    from tailavg.cli.plot import plot
    from tailavg.cli.profile import profile
    from tailavg.cli.reproduce import reproduce
    from tailavg.cli.stream import stream

app = typer.Typer(
    name="tailavg",
    help="Average the tail of a stream: its last k samples, or its last fraction.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from tailavg import __version__

        typer.echo(f"tailavg {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


app.command()(profile)
app.command()(checkpoints)
app.command()(stream)
app.command()(plot)
app.command()(reproduce)


def run() -> int:
    """Run the command that the command line names, and return its exit code."""
    code = _outcome(_command)
    code = _outcome(_flush) or code
    signals.end()
    return code


def _outcome(do: Callable[[], None]) -> int:
    """Return the exit code, after a line about what went wrong."""
    try:
        do()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else FAILED
    except BrokenPipeError:  # the reader has gone, as in `| head`
        return 0
    except OSError as error:
        say(f"{error.filename or 'standard output'}: {error.strerror or error}")
        if error.filename is None:
            _discard(1)
    except MemoryError:
        say("out of memory")
    except Exception as error:
        if (code := signals.stopped()) is not None:
            return code
        if sys.flags.dev_mode:
            raise
        say(f"internal error: {error!r}; please report it (traceback: python -X dev -m tailavg)")
    else:
        return 0
    return FAILED


def _command() -> None:
    signals.act(signals.Act.stop)
    os.fstat(1)  # if it is closed, the next open file would take its number
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # it may lack a character
    app()


def _flush() -> None:
    for number, file in enumerate((sys.stdout, sys.stderr), start=1):
        try:
            if file is not None:
                file.flush()
        except BaseException:
            _discard(number)
            raise


def _discard(number: int) -> None:
    """Discard what is left in a buffer, or Python would try to write it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
