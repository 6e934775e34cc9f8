"""The command line: one file per command. `tailavg.cli.main` is where it starts."""
