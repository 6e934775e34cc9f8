"""`tailavg checkpoints` against reading and writing the files, and a loop in torch: `make bench`.

    python benchmarks/checkpoints.py [--gigabytes 1] [--rounds 5] [--folder build/checkpoints]

Four safetensors files are averaged. The least that this can take is to read them and to write one:
`cat` of all of them to /dev/null, and then a process that writes as many bytes as the output has
and syncs them. The loop is the one that many write: `safe_open` each file, add tensor after tensor
in double precision, `save_file`, sync. All are processes of their own, which take turns; their time
is that within the process, without imports. Before a round with a cold cache, the files are dropped
from it. Ratios are to reading and writing, in the same round; their medians are kept. "Without
syncs" nothing waits for the disk. The loop runs in the first round only. The rows go to
results/checkpoints.csv, and as a table to results/checkpoints.md.
"""

import argparse
import csv
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import ml_dtypes
import numpy as np
import safetensors
import torch
from networks import processor
from safetensors.numpy import save_file

RESULTS = Path(__file__).parent / "results"
FILES = 4
BASE, OURS, LOOP = "cat and write", "tailavg checkpoints", "a loop of safe_open in torch"

WRITE = """
import os, sys, time
size, sync = int(sys.argv[1]), sys.argv[2] == "sync"
data = os.urandom(2**24)
start = time.perf_counter()
with open("output", "wb", buffering=0) as file:
    while size:
        size -= file.write(data[:size])
    if sync:
        os.fsync(file.fileno())
print(time.perf_counter() - start)
"""

AVERAGE = """
import os, sys, time, resource
from pathlib import Path
import ml_dtypes, safetensors
if sys.argv[1] != "sync":
    os.fsync = os.fdatasync = lambda file: None
from tailavg import ExactWindow
from tailavg.checkpoints import average_checkpoints
paths = [Path(name) for name in sys.argv[2:]]
def held():
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before = held()
start = time.perf_counter()
average_checkpoints(paths, {Path("output.safetensors"): ExactWindow(1.0)})
took = time.perf_counter() - start
print(held() - before, file=sys.stderr)
print(took)
"""

STRAIGHT = """
import os, sys, time
import torch
from safetensors import safe_open
from safetensors.torch import save_file
start = time.perf_counter()
files = [safe_open(name, "pt") for name in sys.argv[2:]]
averages = {}
for name in files[0].keys():
    total = sum(file.get_tensor(name).double() for file in files)
    averages[name] = (total / len(files)).to(files[0].get_tensor(name).dtype)
save_file(averages, "output.safetensors")
if sys.argv[1] == "sync":
    with open("output.safetensors", "rb") as file:
        os.fsync(file.fileno())
print(time.perf_counter() - start)
"""


def write(folder: Path, dtype: str, gigabytes: float) -> list[Path]:
    """Checkpoints of random numbers, in tensors of 64 MB and some small ones."""
    kind = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
    columns = 2**24 // kind.itemsize // 1024
    paths = []
    for step in range(FILES):
        random = np.random.default_rng(step)
        tensors: dict[str, np.ndarray] = {}
        for layer in range(max(1, round(gigabytes * 1e9 / 2**26))):
            weight = random.standard_normal((4096, columns), np.float32)
            tensors[f"{layer}.weight"] = weight.astype(kind)
            tensors[f"{layer}.bias"] = random.standard_normal(4096, np.float32).astype(kind)
        paths.append(folder / f"{dtype}-{step}.safetensors")
        save_file(tensors, paths[-1])
    return paths


def python(program: str, folder: Path, *arguments: object) -> tuple[float, str]:
    """The seconds that a program counted, and what else it said."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return float(done.stdout), done.stderr


def drop(paths: list[Path]) -> None:
    """Take files out of the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(name: str, folder: Path, paths: list[Path], sync: str) -> tuple[float, str]:
    if name != BASE:
        return python(AVERAGE if name == OURS else STRAIGHT, folder, sync, *paths)
    start = perf_counter()
    with Path("/dev/null").open("wb") as null:
        subprocess.run(["cat", *paths], stdout=null, check=True)
    read = perf_counter() - start
    wrote, _ = python(WRITE, folder, paths[0].stat().st_size, sync)
    return read + wrote, f"{read:.3g} {wrote:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of a file (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("build/checkpoints"))
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    load = f"load {os.getloadavg()[0]:.1f} before"
    rows, memory, size = [], 0, 0
    try:
        for dtype in ("float32", "bfloat16"):
            paths = write(folder, dtype, options.gigabytes)
            size = paths[0].stat().st_size
            for cache, sync in (("warm", "sync"), ("cold", "sync"), ("warm", "")):
                group = f"{dtype}, {cache} cache" + ", without syncs" * (not sync)
                took: dict[str, list[float]] = {name: [] for name in (BASE, OURS, LOOP)}
                order = list(took)
                for turn in range(options.rounds):
                    for name in order:
                        if name == LOOP and (turn or not sync):
                            continue  # it takes long
                        os.sync()
                        if cache == "cold":
                            drop(paths)
                        else:
                            subprocess.run(["cat", *paths], stdout=subprocess.DEVNULL, check=True)
                        seconds, said = measure(name, folder, paths, sync)
                        took[name].append(seconds)
                        memory = max(memory, int(said) if name == OURS else 0)
                        print(group, name, f"{seconds:.3g}", said.strip(), sep=" | ", flush=True)
                        for output in folder.glob("output*"):
                            output.unlink()
                    order = [*order[1:], order[0]]
                for name, times in took.items():
                    if not times:
                        continue
                    ratio = median(a / b for a, b in zip(times, took[BASE], strict=False))
                    best = min(times) / min(took[BASE])
                    cells = (
                        f"{median(times):.3g}",
                        f"{min(times):.3g}",
                        f"{ratio:.3g}",
                        f"{best:.3g}",
                    )
                    rows.append([group, name, *cells])
                    print(*rows[-1], sep=" | ", flush=True)
            for path in paths:
                path.unlink()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    RESULTS.mkdir(exist_ok=True)
    heads = ["group", "candidate", "median seconds", "best seconds", "ratio", "ratio of the best"]
    with (RESULTS / "checkpoints.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(heads)
        writer.writerows(rows)
    facts = (
        f"Python {platform.python_version()}, NumPy {np.__version__}, torch {torch.__version__}, "
        f"safetensors {safetensors.__version__}; {processor()}, {load}; {FILES} files of "
        f"{size / 1e9:.2f} GB, {options.rounds} interleaved rounds. `tailavg` held at most "
        f"{memory / 1e6:.0f} MB."
    )
    table = [
        "| | median seconds | best | ratio, median | ratio of the best |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    seen = ""
    for group, *cells in rows:
        if group != seen:
            table.append(f"| **{group}** | | | | |")
            seen = group
        table.append(f"| {' | '.join(cells)} |")
    (RESULTS / "checkpoints.md").write_text("\n".join([facts, "", *table]) + "\n")
    print(f"\nkept in {RESULTS / 'checkpoints.csv'}", file=sys.stderr)


if __name__ == "__main__":
    main()
