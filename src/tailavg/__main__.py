"""The entry point of `tailavg` and `python -m tailavg`."""

import sys

from tailavg.cli import signals


def main() -> None:
    """Run the command line. Handle signals first, since the imports take time."""
    signals.begin()
    try:
        from tailavg.cli.main import run
    except ImportError as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        sys.exit(f"tailavg: {error}\n{notes}".rstrip())
    sys.exit(run())


if __name__ == "__main__":
    main()
