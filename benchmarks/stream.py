"""`tailavg stream` against `mawk` on 10⁷ lines, and the time for a lone line.

    python benchmarks/stream.py [--rounds 3] [--lines 10000000]

mawk writes the running mean of a file, the cheapest comparable task; `tailavg stream` writes the
average of the last quarter. Both are timed as complete processes that write to a file, in
interleaved rounds; the best round counts. Ratios are to mawk on the same file; smaller is faster.
The rows go to results/stream.csv, and as a table to results/stream.md.

A lone line is parsed, averaged, formatted and written to /dev/null, after 20,000 others. Its time
is that within the process, without the wait for the line; its rows have the median and the best.
"""

import argparse
import csv
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from time import perf_counter

import numpy as np

from tailavg import AnytimeWindow
from tailavg.cli.lines import CsvInput, PlainInput
from tailavg.cli.stream import Output, Session, _write

RESULTS = Path(__file__).parent / "results"
STREAM = [sys.executable, "-m", "tailavg", "stream", "--window"]
MEAN = ["mawk", "{ s += $1; print s / NR }"]
COLUMN_MEAN = ["mawk", "-F,", "NR > 1 { s += $2; print s / (NR - 1) }"]
HEADER = "step,loss,run\n"
Candidate = tuple[str, list[str]]  # name, command


def plain_line(_: int, x: float) -> str:
    return f"{x:.6f}\n"


def table_line(i: int, x: float) -> str:
    return f"{i},{x:.6f},train\n"


def write(path: Path, lines: int, header: str, line: Callable[[int, float], str]) -> str:
    numbers = np.random.default_rng(0).normal(2, 1, lines).tolist()
    with path.open("w") as file:
        file.write(header)
        file.writelines(line(i, x) for i, x in enumerate(numbers))
    return str(path)


def groups(folder: Path, lines: int) -> dict[str, list[Candidate]]:
    """By name, with mawk first."""
    short = write(folder / "short.txt", lines, "", plain_line)
    full = write(folder / "full.txt", lines, "", lambda _, x: f"{x!r}\n")
    table = write(folder / "table.csv", lines, HEADER, table_line)
    return {
        "plain numbers of 6 decimals": [
            ("mawk, mean", [*MEAN, short]),
            ("stream, c = 0.25", [*STREAM, "0.25", short]),
            ("stream, k = 1,000", [*STREAM, "1000", short]),
        ],
        "plain numbers of 17 digits": [
            ("mawk, mean", [*MEAN, full]),
            ("stream, c = 0.25", [*STREAM, "0.25", full]),
        ],
        "a CSV column": [
            ("mawk, mean", [*COLUMN_MEAN, table]),
            ("stream, c = 0.25", [*STREAM, "0.25", "--column", "loss", table]),
        ],
    }


def measure(command: list[str], output: Path) -> tuple[float, float]:
    """Seconds of wall time, and of processor time."""
    with output.open("wb") as file:
        before, start = getrusage(RUSAGE_CHILDREN), perf_counter()
        subprocess.run(command, stdout=file, check=True)
        took, after = perf_counter() - start, getrusage(RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def lone_lines(source: PlainInput, header: bytes, line: Callable[[int, float], str]) -> list[float]:
    """The microseconds for each of 5,000 lines that come one by one, after 20,000 others."""
    numbers = np.random.default_rng(0).normal(2, 1, 25_000).tolist()
    texts = [line(i, x).encode() for i, x in enumerate(numbers)]
    session = Session([(AnytimeWindow(0.25), None)], source, Output.plain, 1, False)
    session.answer(header + b"".join(texts[:20_000]))
    took = []
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        for text in texts[20_000:]:
            start = perf_counter()
            _write(session.answer(text))
            took.append(1e6 * (perf_counter() - start))
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each group (%(default)s)")
    parser.add_argument("--lines", type=int, default=10**7, help="lines of a file (%(default)s)")
    options = parser.parse_args()
    if shutil.which("mawk") is None:
        sys.exit("benchmarks/stream.py: skipped: mawk is missing; apt-get install mawk")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for group, candidates in groups(folder, options.lines).items():
            best = {name: (float("inf"), float("inf")) for name, _ in candidates}
            for _ in range(options.rounds):
                for name, command in candidates:
                    took = measure(command, folder / "output")
                    best[name] = tuple(map(min, best[name], took))
            peer = best[candidates[0][0]]
            for name, (clock, processor) in best.items():
                ratios = f"{clock / peer[0]:.3g}", f"{processor / peer[1]:.3g}"
                rows.append([group, name, f"{clock:.3g}", ratios[0], f"{processor:.3g}", ratios[1]])
                print(f"{group:30} {name:20} {clock:6.3g} s, {ratios[0]:>5} × mawk;", end=" ")
                print(f"processor {processor:6.3g} s, {ratios[1]:>5} × mawk")
    lone = []
    for name, took in (
        ("plain numbers", lone_lines(PlainInput(["value"], None), b"", plain_line)),
        ("a CSV column", lone_lines(CsvInput(["loss"], None), HEADER.encode(), table_line)),
    ):
        median, best_one = f"{np.median(took):.3g}", f"{min(took):.3g}"
        lone.append([name, median, best_one])
        print(f"{'a lone line':30} {name:20} median {median} µs, best {best_one} µs")
    RESULTS.mkdir(exist_ok=True)
    heads = ["group", "candidate", "seconds", "ratio", "processor seconds", "ratio of those"]
    heads += ["median µs", "best µs"]
    with (RESULTS / "stream.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(heads)
        writer.writerows([*row, "", ""] for row in rows)
        writer.writerows(["a lone line", name, *[""] * 4, *times] for name, *times in lone)
    version = subprocess.run(["mawk", "-W", "version"], capture_output=True, text=True)
    versions = (
        f"Python {platform.python_version()}, NumPy {np.__version__}, "
        f"{(version.stdout or version.stderr).splitlines()[0]}"
    )
    table = [
        "| | seconds | ratio | processor seconds | ratio |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    seen = ""
    for group, *cells in rows:
        if group != seen:
            table.append(f"| **{group}** | | | | |")
            seen = group
        table.append(f"| {' | '.join(cells)} |")
    text = (
        f"{versions}; {options.lines:,} lines, best of {options.rounds} interleaved rounds.\n\n"
        + "\n".join(table)
        + "\n\n| a lone line | median µs | best µs |\n| --- | ---: | ---: |\n"
        + "".join(f"| {' | '.join(row)} |\n" for row in lone)
    )
    (RESULTS / "stream.md").write_text(text)
    print(f"\nkept in {RESULTS / 'stream.csv'}", file=sys.stderr)


if __name__ == "__main__":
    main()
