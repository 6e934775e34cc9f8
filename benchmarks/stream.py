"""`tailavg stream` against `mawk` on 10⁷ lines, rows with keys, and the time for a lone line.

    python benchmarks/stream.py [--rounds 3] [--lines 10000000] [--rows 1000000]

mawk writes the running mean of a file, the cheapest comparable task; `tailavg stream` writes the
average of the last quarter. Both are timed as complete processes that write to a file, in
interleaved rounds; the best round counts. Ratios are to mawk on the same file; smaller is faster.
Each is run with the extra `fast` (numba and pyarrow) and without it: both are then hidden from the
process.

Rows of CSV with 1,000 keys, and JSON lines with and without keys, are timed in the same way, in
microseconds of a complete process for each row. The results go to results/stream.csv, and as
tables to results/stream.md.

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
from importlib.metadata import version as version_of
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from time import perf_counter

import numpy as np

from tailavg import AnytimeWindow
from tailavg.cli.lines import CsvInput, PlainInput
from tailavg.cli.stream import Output, Session, _write

RESULTS = Path(__file__).parent / "results"
STREAM = [sys.executable, "-m", "tailavg", "stream", "--window"]
HIDE = """
import sys
sys.modules["numba"] = sys.modules["pyarrow"] = None  # not found
from importlib import util
find = util.find_spec
util.find_spec = lambda name, package=None: None if name == "numba" else find(name, package)
from tailavg.__main__ import main
main()
"""
WITHOUT = [sys.executable, "-c", HIDE, "stream", "--window"]
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
            *both("stream, c = 0.25", "0.25", short),
            *both("stream, k = 1,000", "1000", short),
        ],
        "plain numbers of 17 digits": [
            ("mawk, mean", [*MEAN, full]),
            *both("stream, c = 0.25", "0.25", full),
        ],
        "a CSV column": [
            ("mawk, mean", [*COLUMN_MEAN, table]),
            *both("stream, c = 0.25", "0.25", "--column", "loss", table),
        ],
    }


def both(name: str, *arguments: str) -> list[Candidate]:
    """With the extra `fast`, and without it."""
    return [(name, [*STREAM, *arguments]), (f"{name}, not [fast]", [*WITHOUT, *arguments])]


def keyed_groups(folder: Path, rows: int) -> list[Candidate]:
    """Rows with keys, and JSON lines."""
    keys = np.random.default_rng(1).integers(0, 1000, rows).tolist()
    table = write(folder / "keyed.csv", rows, HEADER, lambda i, x: f"{i},{x:.6f},run{keys[i]}\n")
    objects = write(
        folder / "keyed.jsonl",
        rows,
        "",
        lambda i, x: f'{{"step": {i}, "loss": {x:.6f}, "run": "run{keys[i]}"}}\n',
    )
    return [
        *both("CSV, 1,000 keys", "0.25", "--column", "loss", "--by", "run", table),
        *both("JSON lines", "0.25", "--field", "loss", objects),
        *both("JSON lines, 1,000 keys", "0.25", "--field", "loss", "--by", "run", objects),
    ]


def measure(command: list[str], output: Path) -> tuple[float, float]:
    """Seconds of wall time, and of processor time."""
    with output.open("wb") as file:
        before, start = getrusage(RUSAGE_CHILDREN), perf_counter()
        subprocess.run(command, stdout=file, check=True)
        took, after = perf_counter() - start, getrusage(RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def fastest(candidates: list[Candidate], rounds: int, output: Path) -> dict[str, list[float]]:
    """The least seconds of wall time, and of processor time, of interleaved rounds."""
    best = {name: [float("inf")] * 2 for name, _ in candidates}
    for _ in range(rounds):
        for name, command in candidates:
            best[name] = list(map(min, best[name], measure(command, output)))
    return best


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
    parser.add_argument("--rows", type=int, default=10**6, help="rows with keys (%(default)s)")
    options = parser.parse_args()
    if shutil.which("mawk") is None:
        sys.exit("benchmarks/stream.py: skipped: mawk is missing; apt-get install mawk")
    rows, keyed = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for group, candidates in groups(folder, options.lines).items():
            best = fastest(candidates, options.rounds, folder / "output")
            peer = best[candidates[0][0]]
            for name, (clock, processor) in best.items():
                ratios = f"{clock / peer[0]:.3g}", f"{processor / peer[1]:.3g}"
                rows.append([group, name, f"{clock:.3g}", ratios[0], f"{processor:.3g}", ratios[1]])
                print(f"{group:30} {name:28} {clock:6.3g} s, {ratios[0]:>5} × mawk;", end=" ")
                print(f"processor {processor:6.3g} s, {ratios[1]:>5} × mawk")
        best = fastest(keyed_groups(folder, options.rows), options.rounds, folder / "output")
        for name, times in best.items():
            each = [f"{1e6 * time / options.rows:.3g}" for time in times]
            keyed.append([name, *each])
            print(f"{name:36} {each[0]} µs a row, {each[1]} µs of processor time")
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
    heads += ["median µs", "best µs", "µs a row", "processor µs a row"]
    with (RESULTS / "stream.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(heads)
        writer.writerows([*row, *[""] * 4] for row in rows)
        writer.writerows(["rows", name, *[""] * 6, *times] for name, *times in keyed)
        writer.writerows(["a lone line", name, *[""] * 4, *times, "", ""] for name, *times in lone)
    version = subprocess.run(["mawk", "-W", "version"], capture_output=True, text=True)
    versions = (
        f"Python {platform.python_version()}, NumPy {np.__version__}, numba {version_of('numba')}, "
        f"pyarrow {version_of('pyarrow')}, {(version.stdout or version.stderr).splitlines()[0]}"
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
        + f"\n\n| {options.rows:,} rows | µs a row | processor µs a row |\n| --- | ---: | ---: |\n"
        + "".join(f"| {' | '.join(row)} |\n" for row in keyed)
        + "\n| a lone line | median µs | best µs |\n| --- | ---: | ---: |\n"
        + "".join(f"| {' | '.join(row)} |\n" for row in lone)
    )
    (RESULTS / "stream.md").write_text(text)
    print(f"\nkept in {RESULTS / 'stream.csv'}", file=sys.stderr)


if __name__ == "__main__":
    main()
