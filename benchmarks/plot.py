"""`tailavg plot` on 10⁷ numbers, against pandas and matplotlib.

    python benchmarks/plot.py [--rounds 3] [--lines 10000000]

The same file is drawn as SVG with three averages over its samples: by `tailavg plot`, with numba
and without it, and by a script that reads it with pandas, takes two rolling means and one of
everything so far, and draws each curve at 4,000 rows, which loses extremes and has no errors.
Complete processes, in interleaved rounds; the best round counts. The results go to
results/plot.csv, and as a table to results/plot.md.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np

RESULTS = Path(__file__).parent / "results"
WINDOWS = ["--windows", "0.1,0.25,1000"]
HIDE = """
import sys
from importlib import util

find = util.find_spec
sys.modules["numba"] = None
util.find_spec = lambda name, package=None: None if name == "numba" else find(name, package)
from tailavg.__main__ import main

sys.exit(main())
"""
PEER = """
import sys
import pandas as pd
from matplotlib.figure import Figure

xs = pd.read_csv(sys.argv[1], header=None)[0]
figure = Figure(figsize=(9, 4.4))
axes = figure.subplots()
every = max(1, len(xs) // 4000)
axes.plot(xs[::every], linewidth=0.5, color="0.6")
for k in (len(xs) // 10, 1000):
    axes.plot(xs.rolling(k, min_periods=1).mean()[::every])
axes.plot(xs.expanding().mean()[::every])
figure.savefig(sys.argv[2])
"""


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds of a process, and its memory in GB."""
    start = perf_counter()
    process = subprocess.Popen(command)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{command[:4]} failed")
    return perf_counter() - start, used.ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lines", type=int, default=10**7)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file, picture = Path(folder) / "numbers.txt", str(Path(folder) / "picture.svg")
        np.savetxt(file, np.random.default_rng(0).normal(3.0, size=chosen.lines), fmt="%.6f")
        plot = ["plot", str(file), *WINDOWS, "-o"]
        commands = {
            "tailavg plot, with numba": [sys.executable, "-m", "tailavg", *plot, picture],
            "tailavg plot, without numba": [sys.executable, "-c", HIDE, *plot, picture],
            "tailavg plot, as a page": [sys.executable, "-m", "tailavg", *plot, f"{folder}/x.html"],
            "pandas and matplotlib": [sys.executable, "-c", PEER, str(file), picture],
        }
        best = dict.fromkeys(commands, float("inf"))
        most: dict[str, float] = {}
        for _ in range(chosen.rounds):
            for name, command in commands.items():
                seconds, memory = timed(command)
                best[name] = min(best[name], seconds)
                most[name] = memory
    peer = best["pandas and matplotlib"]
    rows = [
        {"what": name, "rows": chosen.lines, "seconds": round(seconds, 2),
         "ratio": round(seconds / peer, 2), "GB": round(most[name], 2)}
        for name, seconds in best.items()
    ]  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "plot.csv").open("w", newline="") as out:
        writer = csv.DictWriter(out, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    lines = [f"| {chosen.lines:,} rows | seconds | ratio to pandas and matplotlib | memory |"]
    lines += ["| --- | ---: | ---: | ---: |"]
    lines += [f"| {r['what']} | {r['seconds']} | {r['ratio']} | {r['GB']} GB |" for r in rows]
    text = "\n".join(lines) + "\n"
    (RESULTS / "plot.md").write_text(text)
    print(text, f"cores: {os.cpu_count()}", sep="")


if __name__ == "__main__":
    main()
