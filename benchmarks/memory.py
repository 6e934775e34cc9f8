"""Hot and cold memory of `tailavg.torch` on a large model, and what `offload` costs: `make bench`.

    python benchmarks/memory.py [--millions 302] [--folder build/offload] [--updates 1024]

Memory is what a process holds for itself, `Anonymous` in /proc/self/smaps_rollup (Linux). The page
cache, where files are while there is room, is not memory held. Every method has a process of its
own. Updates are timed in one process, in which all methods take turns, over whole cycles with their
folds and turns. Beside what folds, turns, reads and checkpoints take stand the bytes that they move
and what `dd` does on that disk. The numbers go to results/memory.csv, and as tables to
results/memory.md.
"""

import argparse
import csv
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch
from networks import processor
from torch import nn
from torch.optim import swa_utils

from tailavg import AnyTail, AnytimeWindow, Exponential
from tailavg.core.clock import starts_at
from tailavg.core.rules import Rule
from tailavg.torch import ParameterAverage

RESULTS = Path(__file__).parent / "results"
RULES: dict[str, tuple[Rule, int, int]] = {  # and from which update to which it is measured
    "3 accumulators": (AnytimeWindow(600), 0, 860),
    "AnyTail(12)": (AnyTail(12), 3000, 3600),  # its first few hundred updates merge all the time
    "Exponential": (Exponential(600), 0, 300),
}
SPEEDS = {"updates from the start": 0, "updates later on": 4096}
CYCLES = AnytimeWindow(1024)  # two folds and a turn in 512 updates
EMA = "torch AveragedModel, EMA"


def model(millions: float) -> nn.Module:
    """Layers of four million parameters, with biases between them."""
    layers = max(1, round(millions * 1e6 / 2**22))
    return nn.Sequential(*(nn.Linear(4096, 1024) for _ in range(layers)))


def elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def held() -> int:
    """Bytes of memory that belong to this process alone."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no line 'Anonymous:' in /proc/self/smaps_rollup")


def written() -> int:
    """Bytes that this process has written so far."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    raise RuntimeError("no line 'wchar:' in /proc/self/io")


class Watched:
    """The most memory held during a block, and its seconds."""

    def __enter__(self) -> "Watched":
        self.most, self._done = held(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        self._begin = perf_counter()
        return self

    def _watch(self) -> None:
        while not self._done.is_set():
            self.most = max(self.most, held())
            sleep(0.002)

    def __exit__(self, *_: object) -> None:
        self.seconds = perf_counter() - self._begin
        self._done.set()
        self._thread.join()


def averaged(net: nn.Module, rule: str, offload: Path | None) -> tuple[Callable[[], Any], Any]:
    """An update, and the average."""
    if rule == EMA:
        ema = swa_utils.AveragedModel(
            net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.999), use_buffers=False
        )
        return lambda: ema.update_parameters(net), ema
    made = RULES[rule][0] if rule in RULES else CYCLES
    average = ParameterAverage(net, made, offload=offload)
    return average.update, average


def holding(millions: float, rule: str, offload: Path | None) -> dict[str, float]:
    """Bytes a parameter at rest, and more of them in a fold, a turn and a swap; their seconds."""
    net = model(millions)
    size = elements(net)
    before = held()
    update, average = averaged(net, rule, offload)
    found: dict[str, float] = {}
    if rule == EMA:
        update()
        update()
        return {"at rest": (held() - before) / size}
    rule_made, first, last = RULES[rule]
    if first:
        later(average, rule_made, first)
    clock = average._accumulators.clock
    took: dict[str, list[float]] = {"fold": [], "turn": []}

    def timed(name: str) -> None:
        work = getattr(average._accumulators, name)

        def call(*args: Any) -> None:
            begin = perf_counter()
            work(*args)
            took[name].append(perf_counter() - begin)

        setattr(average._accumulators, name, call)

    for name in took:
        timed(name)
    most = 0
    while clock.count < last:
        if clock.count < clock.next:
            update()
            continue
        with Watched() as watched:
            update()
        most = max(most, watched.most - before)
    rest = (held() - before) / size
    found["at rest"] = rest
    found["more in a fold or turn"] = max(0.0, most / size - rest)
    for name, times in took.items():
        if times:
            found[f"{name} s"] = median(times)
            found[f"{name} s, longest"] = max(times)
    window = 0.3 if rule == "AnyTail(12)" else None
    swaps = []
    for _ in range(3):
        begin = perf_counter()
        with Watched() as watched, average.average_parameters(window):
            swaps.append(perf_counter() - begin)
        found["more in a swap"] = max(
            found.get("more in a swap", 0.0), (watched.most - before) / size - rest
        )
    found["swap in s"] = median(swaps)
    begin = perf_counter()
    for kind, write in saves(average, offload):
        start, begin = written(), perf_counter()
        write()
        found[f"{kind} s"] = perf_counter() - begin
        found[f"{kind} bytes"] = (written() - start) / size
    return found


def saves(average: Any, offload: Path | None) -> list[tuple[str, Callable[[], Any]]]:
    folder = Path(os.environ["TAILAVG_SAVES"])
    folder.mkdir(parents=True, exist_ok=True)

    def by_torch() -> None:
        torch.save(average.state_dict(), folder / "state.pt")
        with (folder / "state.pt").open("rb") as file:
            os.fsync(file.fileno())
        (folder / "state.pt").unlink()

    def to_folder() -> None:
        average.save(folder / "state")
        if offload is None:
            shutil.rmtree(folder / "state")

    os.sync()
    return [("save", to_folder), ("torch.save", by_torch)]


def speed(millions: float, updates: int, first: int, folder: Path) -> dict[str, float]:
    """Milliseconds of an update, on average over whole cycles; all methods take turns."""
    net = model(millions)
    methods: dict[str, Callable[[], Any]] = {}
    keep = []
    for name, rule, offload in (
        ("in memory", "cycles", None),
        ("in files", "cycles", folder / "speed"),
        (EMA, EMA, None),
    ):
        methods[name], average = averaged(net, rule, offload)
        keep.append(average)
        if first and rule != EMA:
            for _ in range(2):  # then there is a file to be written again, as after many turns
                later(average, CYCLES, first)
    took: dict[str, list[float]] = {name: [] for name in methods}
    if not first:
        for update in methods.values():
            update()  # the first is another
    order = list(methods)
    for _ in range(updates):
        order = [*order[1:], order[0]]
        for name in order:
            begin = perf_counter()
            methods[name]()
            took[name].append(perf_counter() - begin)
    found = {f"{name}: ms an update": 1000 * sum(times) / updates for name, times in took.items()}
    for other in ("in memory", EMA):
        ratio = sum(took["in files"]) / sum(took[other])
        found[f"in files / {other}"] = ratio
        found[f"in files / {other}, by medians"] = median(took["in files"]) / median(took[other])
    return found


def later(average: ParameterAverage, rule: Rule, count: int) -> None:
    """Let an average be as after so many updates of zeros."""
    starts = starts_at(rule, count)
    state = average.state_dict() | {"count": count, "starts": starts, "folded": starts[-1]}
    average.load_state_dict(state)


def disk(folder: Path, size: int) -> dict[str, float]:
    """MB a second that `dd` writes, with a sync, and reads from the cache."""
    folder.mkdir(parents=True, exist_ok=True)
    count, found = max(1, size // 2**22), {}
    for name, arguments in {
        "dd writes and syncs": ["if=/dev/zero", f"of={folder}/dd", "conv=fsync"],
        "dd writes": ["if=/dev/zero", f"of={folder}/dd", "conv=notrunc"],
        "dd reads": [f"if={folder}/dd", "of=/dev/null"],
    }.items():
        begin = perf_counter()
        subprocess.run(
            ["dd", *arguments, "bs=4M", f"count={count}"], check=True, capture_output=True
        )
        found[f"{name}, MB/s"] = count * 2**22 / 1e6 / (perf_counter() - begin)
    (folder / "dd").unlink()
    return found


def apart(*arguments: object) -> dict[str, float]:
    """Measure in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--measure", json.dumps(arguments, default=str)],
        check=True,
        stdout=subprocess.PIPE,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, default=302, help="parameters (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("build/offload"))
    parser.add_argument("--updates", type=int, default=1024, help="timed (%(default)s)")
    parser.add_argument("--only", choices=["speed"], help="keep the other rows of the last run")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.absolute()
    os.environ["TAILAVG_SAVES"] = str(folder / "saves")
    if options.measure:
        what, *rest = json.loads(options.measure)
        rest = [Path(part) if isinstance(part, str) and part[:1] == "/" else part for part in rest]
        print(json.dumps({"holding": holding, "speed": speed, "disk": disk}[what](*rest)))
        return
    load = f"load {os.getloadavg()[0]:.1f} before"
    rows: list[tuple[str, str, str]] = []

    def keep(method: str, found: dict[str, float]) -> None:
        for measure, value in found.items():
            rows.append((method, measure, f"{value:.4g}"))
            print(method, measure, f"{value:.4g}", sep=" | ", flush=True)

    size = round(options.millions * 1e6)
    if options.only == "speed":
        with (RESULTS / "memory.csv").open() as file:
            rows = [
                (row["method"], row["measure"], row["value"])
                for row in csv.DictReader(file)
                if row["method"] not in SPEEDS
            ]
    else:
        keep("disk", apart("disk", folder, 4 * size))
        keep(EMA, apart("holding", options.millions, EMA, None))
    for rule in RULES if options.only is None else ():
        cold = folder / "cold"
        if rule != "AnyTail(12)":  # which takes too much memory here
            keep(f"{rule}, in memory", apart("holding", options.millions, rule, None))
        keep(f"{rule}, in files", apart("holding", options.millions, rule, cold))
        shutil.rmtree(folder, ignore_errors=True)
    for name, first in SPEEDS.items():
        keep(name, apart("speed", options.millions, options.updates, first, folder))
        shutil.rmtree(folder, ignore_errors=True)
    facts = (
        f"Python {platform.python_version()}, torch {torch.__version__}; {processor()}, "
        f"{torch.get_num_threads()} threads, {load}; {size / 1e6:.0f} million float32 parameters, "
        f"{options.updates} updates."
    )
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "memory.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "measure", "value"])
        writer.writerows(rows)
    (RESULTS / "memory.md").write_text("\n".join([facts, "", *tables(rows)]) + "\n")
    print(f"\nkept in {RESULTS / 'memory.csv'}", file=sys.stderr)


def tables(rows: list[tuple[str, str, str]]) -> list[str]:
    found = {(method, measure): value for method, measure, value in rows}
    methods = [m for m in dict.fromkeys(row[0] for row in rows) if (m, "at rest") in found]
    heads = {
        "at rest": "at rest",
        "more in a fold or turn": "more in a fold or turn",
        "more in a swap": "more in a swap",
    }
    lines = [
        "| bytes a parameter | " + " | ".join(heads.values()) + " |",
        "| --- |" + " ---: |" * 3,
    ]
    for method in methods:
        cells = [found.get((method, head), "") for head in heads]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    heads = {
        "fold s": "fold",
        "fold s, longest": "the longest",
        "turn s": "turn",
        "turn s, longest": "the longest",
        "swap in s": "swap in",
        "save s": "save(folder)",
        "save bytes": "it writes, bytes a parameter",
        "torch.save s": "torch.save",
        "torch.save bytes": "it writes, bytes a parameter",
    }
    lines += ["", "| seconds | " + " | ".join(heads.values()) + " |"]
    lines += ["| --- |" + " ---: |" * len(heads)]
    for method in methods:
        cells = [found.get((method, head), "") for head in heads]
        if any(cells):
            lines.append(f"| {method} | {' | '.join(cells)} |")
    lines += ["", f"| | {' | '.join(SPEEDS)} |", "| --- |" + " ---: |" * len(SPEEDS)]
    for measure in dict.fromkeys(row[1] for row in rows if row[0] in SPEEDS):
        lines.append(f"| {measure} | {' | '.join(found[name, measure] for name in SPEEDS)} |")
    lines += ["", "| this disk | |", "| --- | ---: |"]
    lines += [f"| {measure} | {value} |" for method, measure, value in rows if method == "disk"]
    return lines


if __name__ == "__main__":
    main()
