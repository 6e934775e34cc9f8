"""The core against its peers: `make bench`.

    python benchmarks/core.py [core] [std] [time] [--rounds 7]

Every group is one interleaved run: its candidates take turns, and the best round of each counts.
Ratios are to the first row of the group, a peer; smaller is faster. The rows go to
results/core.csv, and as a table to results/core.md for the documentation; those about standard
deviations go to results/std.csv and std.md, those about windows of time to results/time.csv and
time.md. The variable NUMBERS sets another length of streams.
"""

import argparse
import csv
import gc
import os
import platform
import subprocess
import sys
import tempfile
import tracemalloc
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from types import FunctionType

import bottleneck
import numba
import numbagg
import numpy as np
import pandas as pd
import polars as pl
import river
from river import stats, utils

from tailavg import AnyTail, AnytimeWindow, Elapsed, ExactWindow, Exponential, TailAverage
from tailavg.core.rules import Rule
from tailavg.numpy import kernel

RESULTS = Path(__file__).parent / "results"
SCALARS = np.random.default_rng(0).random(100_000).tolist()
LONG = np.random.default_rng(1).random(int(os.environ.get("NUMBERS", 10**7)))
MATRIX = LONG.reshape(-1, 100)
Candidate = tuple[str, Callable[[], object], int]  # name, what is timed, items it handles


class DequeMean:
    """The mean of the last k numbers, written by hand: it adds and subtracts."""

    def __init__(self, k: int) -> None:
        self.window: deque[float] = deque(maxlen=k)
        self.sum = 0.0

    def update(self, x: float) -> None:
        if len(self.window) == self.window.maxlen:
            self.sum -= self.window[0]
        self.window.append(x)
        self.sum += x

    def get(self) -> float:
        return self.sum / len(self.window)


def rolling(k: int, kind: type = stats.Mean) -> utils.Rolling:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it will take a class in future
        return utils.Rolling(kind(), k)


def own(run: FunctionType) -> FunctionType:
    """A copy of the function with its own code, which the interpreter specialises for its types."""
    return FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)


def updates(name: str, make: Callable[[], object]) -> Candidate:
    def run() -> None:
        average = make()
        for x in SCALARS:
            average.update(x)

    return name, own(run), len(SCALARS)


def updates_and_reads(name: str, make: Callable[[], object], read: str) -> Candidate:
    # written twice, since getattr would be timed too
    def run_get() -> None:
        average = make()
        for x in SCALARS:
            average.update(x)
            average.get()

    def run_value() -> None:
        average = make()
        for x in SCALARS:
            average.update(x)
            average.value()

    return name, own(run_get if read == "get" else run_value), len(SCALARS)


def over(name: str, run: Callable[[], object]) -> Candidate:
    return name, run, len(LONG)


def array_group(size: int) -> list[Candidate]:
    """In-place additions of an array, many per round, after the start of the stream."""
    x, total = np.ones(size), np.zeros(size)
    repeats = max(20, 10**7 // size // 10)
    averages = {"k = 1,000": TailAverage(1000), "c = 0.25": TailAverage(0.25)}
    averages["exponential, c = 0.25"] = TailAverage(Exponential(0.25))

    def add() -> None:
        for _ in range(repeats):
            np.add(total, x, out=total)

    def update_of(average: TailAverage) -> Callable[[], None]:
        average.update_many(np.ones((300, size)) if size <= 10**5 else np.ones((20, size)))
        average.update_many(np.broadcast_to(x, (500, size)))

        def run() -> None:
            for _ in range(repeats):
                average.update(x)

        return run

    rows: list[Candidate] = [("numpy.add(a, x, out=a)", add, repeats)]
    return rows + [(f"update, {name}", update_of(a), repeats) for name, a in averages.items()]


def without_numba(run: Callable[[], object]) -> Callable[[], object]:
    """The same, as if numba were not installed."""

    def run_without() -> None:
        installed, kernel.installed = kernel.installed, lambda: False
        try:
            run()
        finally:
            kernel.installed = installed

    return run_without


def scan(name: str, rule: Rule, xs: np.ndarray = LONG, windows: object = None) -> Candidate:
    return name, lambda: TailAverage(rule).scan(xs, windows), xs.size


def scan_without(name: str, rule: Rule) -> Candidate:
    run = without_numba(lambda: TailAverage(rule).scan(LONG))
    return f"{name}, without numba", run, len(LONG)


def scans() -> dict[str, list[Candidate]]:
    """The average after each sample."""
    found: dict[str, list[Candidate]] = {}
    series, frame = pd.Series(LONG), pl.Series(LONG)
    for k in (10, 1000, 100_000):
        found[f"scan, 10⁷ numbers, k = {k:,}"] = [
            over("bottleneck move_mean", lambda k=k: bottleneck.move_mean(LONG, k)),
            over("numbagg move_mean", lambda k=k: numbagg.move_mean(LONG, window=k)),
            over("polars rolling_mean", lambda k=k: frame.rolling_mean(k)),
            over("pandas rolling.mean", lambda k=k: series.rolling(k).mean()),
            scan("anytime window", AnytimeWindow(k)),
            scan("anytime window, 5 accumulators", AnytimeWindow(k, 5)),
            scan("exact window", ExactWindow(k)),
            scan_without("anytime window", AnytimeWindow(k)),
        ]
    found["scan, 10⁷ numbers, c = 0.25"] = [
        over("bottleneck move_mean, 1,000", lambda: bottleneck.move_mean(LONG, 1000)),
        scan("anytime window", AnytimeWindow(0.25)),
        scan("anytime window, 5 accumulators", AnytimeWindow(0.25, 5)),
        scan("exact window", ExactWindow(0.25)),
        scan_without("anytime window", AnytimeWindow(0.25)),
    ]
    for k in (10, 1000, 100_000):
        alpha = 2 / (k + 1)
        found[f"exponential scan, 10⁷ numbers, k = {k:,}"] = [
            over("pandas ewm.mean", lambda alpha=alpha: series.ewm(alpha=alpha).mean()),
            over(
                "numbagg move_exp_nanmean",
                lambda alpha=alpha: numbagg.move_exp_nanmean(LONG, alpha=alpha),
            ),
            scan("exponential", Exponential(k)),
            scan_without("exponential", Exponential(k)),
        ]
    found["exponential scan, 10⁷ numbers, c = 0.25"] = [
        over("pandas ewm.mean, k = 1,000", lambda: series.ewm(alpha=2 / 1001).mean()),
        scan("exponential", Exponential(0.25)),
        scan_without("exponential", Exponential(0.25)),
    ]
    found["scan of every tail, 10⁷ numbers"] = [
        scan("one window, 0.25", AnyTail(), LONG, 0.25),
        scan("four windows", AnyTail(), LONG, [0.1, 0.25, 0.5, 1.0]),
    ]
    found["scan, 10⁵ rows of 100 numbers"] = [
        ("numpy.copy", MATRIX.copy, MATRIX.size),
        scan("anytime window, k = 10", AnytimeWindow(10), MATRIX),
        scan("anytime window, k = 1,000", AnytimeWindow(1000), MATRIX),
        scan("anytime window, c = 0.25", AnytimeWindow(0.25), MATRIX),
        scan("exponential, c = 0.25", Exponential(0.25), MATRIX),
    ]
    windows = (10, 100, 1000, 10_000, 100_000, 10**6, 0.25, 0.01, 0.001, 1e-6)
    found["scan, 10⁷ numbers, by window"] = [
        scan(f"{'k' if isinstance(w, int) else 'c'} = {w:,}", AnytimeWindow(w)) for w in windows
    ]
    return found


K = 1000
RULES = {
    "k = 1,000": AnytimeWindow(K),
    "c = 0.25": AnytimeWindow(0.25),
    "exponential, k = 1,000": Exponential(K),
}


def rolling_stds(xs: list[float]) -> list[float]:
    """What river's Rolling(Var) gives after each number."""
    variance, found = rolling(K, stats.Var), []
    for x in xs:
        variance.update(x)
        found.append(variance.get())
    return np.sqrt(found).tolist()


def stds_of(rule: Rule) -> Callable[[np.ndarray], np.ndarray]:
    return lambda xs: TailAverage(rule, variance=True).scan(xs, of="std")


STDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "pandas rolling.std": lambda xs: pd.Series(xs).rolling(K).std().to_numpy(),
    "polars rolling_std": lambda xs: pl.Series(xs).rolling_std(K).to_numpy(),
    "bottleneck move_std": lambda xs: bottleneck.move_std(xs, K, ddof=1),
    "numbagg move_std": lambda xs: numbagg.move_std(xs, window=K),
    "river Rolling(Var)": lambda xs: np.array(rolling_stds(xs.tolist())),
    **{f"tailavg, {name}": stds_of(rule) for name, rule in RULES.items()},
    "tailavg, exact window": stds_of(ExactWindow(K)),
}
"""By name, the standard deviation of the last K numbers after each number."""


def std_groups() -> dict[str, list[Candidate]]:
    """The standard deviation after each sample, and for comparison our averages."""
    river, few = "river Rolling(Var)", LONG[: len(SCALARS)]
    stds = {name: run for name, run in STDS.items() if name != river}
    return {
        f"standard deviation, {len(LONG):,} numbers, k = 1,000": [
            *(over(name, lambda run=run: run(LONG)) for name, run in stds.items()),
            (f"{river}, {len(few):,} numbers", lambda: STDS[river](few), len(few)),
            *(scan(f"tailavg, the average, {name}", rule) for name, rule in RULES.items()),
        ]
    }


def std_errors() -> dict[str, float]:
    """The largest relative errors of 1,000 standard deviations after a 1e16 has left the window.

    They are relative to those of the same stream with an ordinary number in its place.
    """
    xs = LONG[:10_000].copy()
    huge = xs.copy()
    huge[4000] = 1e16
    windows = {name: run for name, run in STDS.items() if "exponential" not in name}
    with np.errstate(invalid="ignore"):  # the square root of a negative variance
        return {
            name: float(np.abs(run(huge)[-1000:] / run(xs)[-1000:] - 1).max())
            for name, run in windows.items()
        }


PERIOD = "10min"
TIMES = np.datetime64("2026-01-01", "ns") + np.cumsum(
    np.random.default_rng(2).exponential(600e9 / K, len(LONG)).astype("timedelta64[ns]")
)
"""Irregular times: K samples in ten minutes on average."""


def time_groups() -> dict[str, list[Candidate]]:
    """The average of the last ten minutes after each sample, and of the last K samples."""
    seconds = TIMES.view(np.int64) / 1e9
    series = pd.Series(LONG, index=TIMES)

    def timed_scan(rule: object, ts: np.ndarray) -> Callable[[], object]:
        return lambda: TailAverage(rule).scan(LONG, ts)

    return {
        f"window of time, {len(LONG):,} irregular samples, 1,000 in 10 minutes": [
            over('pandas rolling("10min").mean', lambda: series.rolling(PERIOD).mean().to_numpy()),
            scan("tailavg, last 1,000 samples", K),
            over("tailavg, last 10 minutes", timed_scan(PERIOD, TIMES)),
            over("tailavg, last 10 minutes, seconds", timed_scan(PERIOD, seconds)),
            over("tailavg, exponential, 10 minutes", timed_scan(Exponential(PERIOD), TIMES)),
            over(
                "tailavg, last 10 minutes, without numba",
                without_numba(timed_scan(PERIOD, TIMES)),
            ),
        ]
    }


def bytes_of_a_period(samples: int) -> int:
    """The bytes that an average of a period with so many samples holds, by tracemalloc."""
    gc.collect()
    tracemalloc.start()
    average = TailAverage(Elapsed(1))
    for start in range(3):
        average.update_many(np.ones(samples), start + np.arange(samples) / samples)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert average.size > 0.9 * samples
    return held


FIRST = """
import time, sys
import numpy as np
from tailavg import Exponential, TailAverage
start, xs = time.perf_counter(), np.ones(10**5)
TailAverage(0.25).scan(xs)
print(time.perf_counter() - start)
for rule in (10, 1000, Exponential(0.25)):
    for kind in (xs, xs.reshape(-1, 10), xs.reshape(-1, 10).astype("f4")):
        TailAverage(rule).scan(kind)
print(time.perf_counter() - start)
"""


def first_scans() -> list[tuple[str, float]]:
    """Seconds for the first scan of a process, and for one of every kind: compiled, and cached."""
    found = []
    with tempfile.TemporaryDirectory() as cache:
        for name in ("compiled", "from numba's cache"):
            command = [sys.executable, "-c", FIRST]
            environment = os.environ | {"NUMBA_CACHE_DIR": cache}
            ran = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True
            )
            first, all_kinds = map(float, ran.stdout.split())
            found += [(f"numbers, c = 0.25, {name}", first), (f"every kind, {name}", all_kinds)]
    return found


def groups() -> dict[str, list[Candidate]]:
    """By name, with the peer first."""
    found = {
        "update, a number": [
            updates("river stats.Mean", stats.Mean),
            updates("river stats.EWMean", lambda: stats.EWMean(0.002)),
            updates("k = 1,000", lambda: TailAverage(1000)),
            updates("c = 0.25", lambda: TailAverage(0.25)),
            updates("exponential, k = 1,000", lambda: TailAverage(Exponential(1000))),
            updates("exponential, c = 0.25", lambda: TailAverage(Exponential(0.25))),
        ],
        "update and read, a number": [
            updates_and_reads("river Rolling(Mean, 1,000)", lambda: rolling(1000), "get"),
            updates_and_reads("deque and a sum, 1,000", lambda: DequeMean(1000), "get"),
            updates_and_reads("river stats.Mean", stats.Mean, "get"),
            updates_and_reads("k = 1,000", lambda: TailAverage(1000), "value"),
            updates_and_reads("c = 0.25", lambda: TailAverage(0.25), "value"),
            updates_and_reads(
                "exponential, k = 1,000", lambda: TailAverage(Exponential(1000)), "value"
            ),
            updates_and_reads(
                "exponential, c = 0.25", lambda: TailAverage(Exponential(0.25)), "value"
            ),
        ],
        "update_many, 10⁷ numbers": [
            over("numpy.add.reduce", lambda: np.add.reduce(LONG)),
            over("k = 1,000", lambda: TailAverage(1000).update_many(LONG)),
            over("c = 0.25", lambda: TailAverage(0.25).update_many(LONG)),
            over("c = 1.0", lambda: TailAverage(1.0).update_many(LONG)),
            over(
                "exponential, k = 1,000", lambda: TailAverage(Exponential(1000)).update_many(LONG)
            ),
            over("exponential, c = 0.25", lambda: TailAverage(Exponential(0.25)).update_many(LONG)),
            over(
                "exponential, c = 0.25, without numba",
                without_numba(lambda: TailAverage(Exponential(0.25)).update_many(LONG)),
            ),
        ],
    }
    found |= scans()
    for size in (100, 10_000, 1_000_000):
        found[f"update, an array of {size:,}"] = array_group(size)
    found["update, a number, by window"] = [
        updates(f"k = 10^{power}", lambda power=power: TailAverage(10**power))
        for power in range(1, 8)
    ]
    return found


def bytes_held(k: int) -> int:
    """The bytes that an average of 1,000 numbers holds after 3 k updates, by tracemalloc."""
    gc.collect()
    tracemalloc.start()
    average = TailAverage(AnytimeWindow(k))
    sample = np.ones(1000)
    average.update(sample)
    average.update_many(np.broadcast_to(sample, (min(3 * k, 3 * 10**5), 1000)))
    for _ in range(10):
        average.update(sample)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held


def errors_after_a_huge_sample() -> dict[str, float]:
    """Relative errors of a mean of the last 10, a thousand samples after one of 1e16."""
    xs = LONG[:2000].copy()
    xs[1000] = 1e16
    truth = xs[-10:].mean()
    theirs = rolling(10)
    for x in xs.tolist():
        theirs.update(x)
    values = {
        "tailavg": TailAverage(10).scan(xs)[-1],
        "tailavg, exact window": TailAverage(ExactWindow(10)).scan(xs)[-1],
        "river Rolling(Mean)": theirs.get(),
        "numbagg move_mean": numbagg.move_mean(xs, window=10)[-1],
        "bottleneck move_mean": bottleneck.move_mean(xs, 10)[-1],
        "pandas rolling.mean": pd.Series(xs).rolling(10).mean().iloc[-1],
        "polars rolling_mean": pl.Series(xs).rolling_mean(10)[-1],
    }
    return {name: abs(float(value) / truth - 1) for name, value in values.items()}


Row = list[object]


def timed(groups: dict[str, list[Candidate]], rounds: int) -> list[Row]:
    """The best time of each candidate, and its ratio to the first of its group."""
    rows: list[Row] = []
    for group, candidates in groups.items():
        best = dict.fromkeys((name for name, _, _ in candidates), float("inf"))
        for _ in range(rounds):
            for name, run, items in candidates:
                start = perf_counter_ns()
                run()
                best[name] = min(best[name], (perf_counter_ns() - start) / items)
        peer = candidates[0][0]
        for name, took in best.items():
            rows.append([group, name, f"{took:.4g}", f"{took / best[peer]:.3g}"])
            print(f"{group:32} {name:32} {took:12.4g} ns  {took / best[peer]:6.3g} × {peer}")
    return rows


def core_rows(rounds: int) -> list[Row]:
    rows = timed(groups(), rounds)
    for name, seconds in first_scans():
        rows.append(["seconds for the first scan", name, f"{seconds:.2f}", ""])
        print(*rows[-1])
    for power in range(1, 6):
        rows.append(
            ["bytes held, 1,000 numbers each", f"k = 10^{power}", bytes_held(10**power), ""]
        )
        print(*rows[-1])
    for name, error in errors_after_a_huge_sample().items():
        rows.append(["relative error, long after a 1e16", name, f"{error:.1e}", ""])
        print(*rows[-1])
    return rows


def std_rows(rounds: int) -> list[Row]:
    rows = timed(std_groups(), rounds)
    for name, error in std_errors().items():
        rows.append(["largest relative error after a 1e16 has left", name, f"{error:.1e}", ""])
        print(*rows[-1])
    return rows


def time_rows(rounds: int) -> list[Row]:
    rows = timed(time_groups(), rounds)
    bytes_of_a_period(10**6)  # imports and caches
    for power in range(2, 7):
        held = min(bytes_of_a_period(10**power) for _ in range(3))
        rows.append(["bytes held, a window of time", f"10^{power} samples in it", held, ""])
        print(*rows[-1])
    return rows


TABLES = {"core": core_rows, "std": std_rows, "time": time_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", help="core, std, time; by default all")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each group (%(default)s)")
    arguments = parser.parse_args()
    for name in arguments.tables or TABLES:
        keep(name, TABLES[name](arguments.rounds), arguments.rounds)


def keep(name: str, rows: list[Row], rounds: int) -> None:
    """Write rows to the files of a table."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["group", "candidate", "ns each, or as named", "ratio to the first"])
        writer.writerows(rows)
    versions = (
        f"Python {platform.python_version()}, NumPy {np.__version__}, river {river.__version__}, "
        f"pandas {pd.__version__}, polars {pl.__version__}, bottleneck {bottleneck.__version__}, "
        f"numbagg {numbagg.__version__}, numba {numba.__version__}"
    )
    table = ["| | ns each (or as named) | ratio |", "| --- | ---: | ---: |"]
    seen = ""
    for group, candidate, took, ratio in rows:
        if group != seen:
            table.append(f"| **{group}** | | |")
            seen = group
        table.append(f"| {candidate} | {took} | {ratio} |")
    text = f"{versions}; best of {rounds} interleaved rounds.\n\n" + "\n".join(table) + "\n"
    (RESULTS / f"{name}.md").write_text(text)
    print(f"\nkept in {RESULTS / name}.csv", file=sys.stderr)


if __name__ == "__main__":
    main()
