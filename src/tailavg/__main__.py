"""`python -m tailavg` is `tailavg`."""

from tailavg.cli import app

if __name__ == "__main__":
    app()
