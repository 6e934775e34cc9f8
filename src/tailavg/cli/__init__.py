"""The command line. One file per command; each imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

from tailavg.core.extras import needs

with needs("cli"):
    import typer

    from tailavg.cli.checkpoints import checkpoints
    from tailavg.cli.profile import profile
    from tailavg.cli.reproduce import reproduce
    from tailavg.cli.stream import stream

__all__ = ["app"]

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
app.command()(reproduce)
