"""The Typer app and its exit codes; `tailavg.__main__` calls `run`.

Each command has a file of its own, and imports slow packages only when it runs.
"""

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
    """Run the command in `sys.argv`, and return the exit code."""
    code = _outcome(_command)
    code = _outcome(_flush) or code
    signals.end()
    return code


def _outcome(call: Callable[[], None]) -> int:
    """Call a function, print an error as one line, and return the exit code."""
    try:
        call()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else FAILED
    except BrokenPipeError:  # the reader has exited, as in `| head`
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
    os.fstat(1)  # raises if stdout is closed: the next file to be opened would become stdout
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # its encoding may lack characters
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
    """Discard buffered output, which Python would otherwise try to write again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
