"""Averages of frames and of keys against their peers: `make bench`.

    python benchmarks/frames.py [--rounds 3] [--groups 100000]

Every group is one interleaved run: its candidates take turns, and the best round of each counts.
Ratios are to the first row of the group; smaller is faster. What is compiled is compiled before.
The rows go to results/frames.csv, and as a table to results/frames.md for the documentation.
"""

import argparse
import csv
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns

import numba
import numpy as np
import pandas as pd
import polars as pl

from tailavg import Exponential, TailAverage, TailAverages
from tailavg.pandas import tail_mean as of_pandas
from tailavg.polars import tail_mean as of_polars

RESULTS = Path(__file__).parent / "results"
ROWS = 10**7
SIZE = 100  # rows of a group
Candidate = tuple[str, Callable[[], object], int]  # name, what is timed, items it handles


def series_group(k: int | float) -> list[Candidate]:
    """One column. Missing values are omitted, unless they are said to propagate."""
    xs = np.random.default_rng(0).random(ROWS)
    series, column = pd.Series(xs), pl.Series("x", xs)
    frame = column.to_frame()
    runs = {
        "TailAverage.scan, omit": lambda: TailAverage(k, nan_policy="omit").scan(xs),
        "pandas, tail_mean(series)": lambda: of_pandas(series, k),
        "TailAverage.scan, propagate": lambda: TailAverage(k).scan(xs),
        "pandas, tail_mean(series), propagate": lambda: of_pandas(
            series, k, nan_policy="propagate"
        ),
        "polars, tail_mean(series)": lambda: of_polars(column, k),
        "polars, tail_mean(expr)": lambda: frame.select(of_polars(pl.col("x"), k)),
    }
    if isinstance(k, int):
        runs["pandas rolling.mean"] = lambda: series.rolling(k).mean()
        runs["polars rolling_mean"] = lambda: column.rolling_mean(k)
    return [(name, run, ROWS) for name, run in runs.items()]


def keyed_group(groups: int) -> list[Candidate]:
    """Shuffled rows of many groups."""
    rng = np.random.default_rng(0)
    keys, xs = np.repeat(np.arange(groups), SIZE), rng.random(groups * SIZE)
    rng.shuffle(keys)
    df = pd.DataFrame({"run": keys, "loss": xs})
    frame = pl.DataFrame({"run": keys, "loss": xs})
    named = frame.with_columns(pl.format("run {}", "run").alias("run"))
    loss = pl.col("loss")

    def with_state() -> None:
        state = TailAverages(SIZE, nan_policy="omit")
        of_pandas(df, SIZE, by="run", state=state)

    runs = {
        "pandas groupby.rolling(100).mean": lambda: df.groupby("run")["loss"].rolling(SIZE).mean(),
        "pandas groupby.ewm.mean": lambda: df.groupby("run")["loss"].ewm(span=SIZE).mean(),
        "polars rolling_mean(100).over": lambda: frame.select(loss.rolling_mean(SIZE).over("run")),
        "pandas, by=, k = 100": lambda: of_pandas(df, SIZE, by="run"),
        "pandas, by=, c = 0.25": lambda: of_pandas(df, 0.25, by="run"),
        "pandas, by=, exponential, k = 100": lambda: of_pandas(df, Exponential(SIZE), by="run"),
        "pandas, groupby, k = 100": lambda: of_pandas(df.groupby("run")["loss"], SIZE),
        "pandas, by=, k = 100, state=": with_state,
        "polars, by=, k = 100": lambda: frame.select(of_polars(loss, SIZE, by="run")),
        "polars, by= of strings, k = 100": lambda: named.select(of_polars(loss, SIZE, by="run")),
        "polars, over, k = 100": lambda: frame.select(of_polars(loss, SIZE).over("run")),
        "TailAverages.scan, k = 100": lambda: TailAverages(SIZE).scan(keys, xs),
    }
    return [(name, run, len(xs)) for name, run in runs.items()]


def file_group(groups: int) -> list[Candidate]:
    """The file of many keys, and one row of each."""
    averages, keys = TailAverages(SIZE), np.arange(groups)
    for _ in range(5):
        averages.update_many(keys, np.ones(groups))
    path = RESULTS / "frames.npz"

    def updates() -> None:
        for key in range(groups):
            averages.update(key, 1.0)

    def load() -> None:
        assert len(TailAverages.load(path)) == groups

    runs = {
        "update, one by one": updates,
        "update_many": lambda: averages.update_many(keys, np.ones(groups)),
        "save": lambda: averages.save(path),
        "load": load,
    }
    return [(name, run, groups) for name, run in runs.items()]


def compile_loops() -> None:
    """Let numba compile what will be timed, for arrays that may be written to or not."""
    keys, xs = np.resize(np.arange(500), 50_000), np.ones(50_000)
    for rule in (100, 0.25, Exponential(100)):
        for order in (keys, np.sort(keys)):
            df = pd.DataFrame({"run": order, "loss": xs})
            of_pandas(df["loss"], rule)
            of_pandas(df, rule, by="run")
            of_polars(pl.from_dict({"run": order, "loss": xs}), rule, by="run")
            of_polars(pl.Series(xs), rule)
            TailAverages(rule).scan(order, xs)
    long = np.ones(10**6)
    for rule in (1000, 0.25):
        TailAverage(rule).scan(long)
        of_pandas(pd.Series(long), rule)
        of_polars(pl.Series(long), rule)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each group (%(default)s)")
    parser.add_argument("--groups", type=int, default=10**5, help="groups of 100 (%(default)s)")
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    compile_loops()
    rows = []
    made: dict[str, Callable[[], list[Candidate]]] = {
        "10⁷ numbers, k = 1,000": lambda: series_group(1000),
        "10⁷ numbers, c = 0.25": lambda: series_group(0.25),
        f"{options.groups:,} groups of 100, shuffled": lambda: keyed_group(options.groups),
        f"{options.groups:,} keys, one number each": lambda: file_group(options.groups),
    }
    for group, make in made.items():
        candidates = make()
        best = dict.fromkeys((name for name, _, _ in candidates), float("inf"))
        for _ in range(options.rounds):
            for name, run, items in candidates:
                start = perf_counter_ns()
                run()
                best[name] = min(best[name], (perf_counter_ns() - start) / items)
        peer = candidates[0][0]
        for name, took in best.items():
            rows.append([group, name, f"{took:.4g}", f"{took / best[peer]:.3g}"])
            print(f"{group:36} {name:36} {took:10.4g} ns  {took / best[peer]:6.3g} × {peer}")
    (RESULTS / "frames.npz").unlink(missing_ok=True)
    with (RESULTS / "frames.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["group", "candidate", "ns each", "ratio to the first"])
        writer.writerows(rows)
    versions = (
        f"Python {platform.python_version()}, NumPy {np.__version__}, numba {numba.__version__}, "
        f"pandas {pd.__version__}, polars {pl.__version__}"
    )
    table = ["| | ns each | ratio |", "| --- | ---: | ---: |"]
    seen = ""
    for group, name, took, ratio in rows:
        if group != seen:
            table.append(f"| **{group}** | | |")
            seen = group
        table.append(f"| {name} | {took} | {ratio} |")
    text = f"{versions}; best of {options.rounds} interleaved rounds.\n\n" + "\n".join(table) + "\n"
    (RESULTS / "frames.md").write_text(text)
    print(f"\nkept in {RESULTS / 'frames.csv'}", file=sys.stderr)


if __name__ == "__main__":
    main()
