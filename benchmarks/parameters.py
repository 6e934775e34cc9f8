"""`tailavg.torch` against its peers, on the weights of networks: `make bench`.

    python benchmarks/parameters.py [--rounds 20] [--warmup 200]
    python benchmarks/parameters.py --swaps [--rounds 200]

Every group is one interleaved run: all methods take turns, in an order that rotates, and the best
update of each counts. Next to it is the median over cycles of the mean of CYCLE consecutive
updates, including folds and turns. Peers, whose updates are all alike, run fewer of them. The
memory limit is `add_` of one flat tensor onto another of the same size, in the same run. Memory is
the resident memory of the process on Linux. The numbers go to results/parameters.csv, and as tables
to results/parameters.md.

`--swaps` compares only the swaps of ResNet-50 in and out, with torch-ema, and writes no files.

timm is loaded from one file, `pip install --no-deps timm`: the full package needs torchvision.
"""

import argparse
import csv
import ctypes
import gc
import importlib.util
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from importlib.metadata import version
from itertools import product
from operator import truediv
from pathlib import Path
from statistics import mean, median
from time import perf_counter_ns
from types import ModuleType
from typing import Any, NamedTuple

import torch
from ema_pytorch import EMA
from networks import SETS, Shapes, elements, processor
from torch import nn
from torch.optim import swa_utils
from torch_ema import ExponentialMovingAverage

from tailavg import AnytimeWindow, Exponential
from tailavg.torch import ParameterAverage

RESULTS = Path(__file__).parent / "results"
WINDOW = 540
CYCLE = 270  # updates, in which WINDOW folds its sum twice and turns once
DECAY = 0.999
PATIENCE = 4.0  # seconds: the longest warm-up of a peer
MIB = 2**20
LIMIT = "add_ of one flat tensor"
COPIES = ("two copies of the weights, foreach", "two copies of the weights, one by one")
CANNOT = "cannot"

Call = Callable[[], object]


class Method(NamedTuple):
    """A way to average weights; `make` returns its update and its swap in and out, if any."""

    name: str
    make: Callable[[nn.Module], tuple[Call, Call | None]]


class Timed(NamedTuple):
    """A call to time, and how often in each round."""

    name: str
    call: Call
    times: int


class Took(NamedTuple):
    """Milliseconds: the best call, the median of cycles, and the best call of each round."""

    best: float
    median: float
    rounds: list[float]


# The parameter sets.


def module(shapes: Shapes, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Nested modules with parameters of these names and shapes."""
    torch.manual_seed(0)
    root = nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.register_parameter(last, nn.Parameter((torch.randn(shape) / 50).to(dtype)))
    return root


# The methods. Peers are used as documented, at their fastest; none skips an update.


def timm_model_ema() -> ModuleType:
    package = importlib.util.find_spec("timm")
    if package is None or not package.submodule_search_locations:
        sys.exit("benchmarks/parameters.py: needs timm: pip install --no-deps timm")
    path = Path(package.submodule_search_locations[0]) / "utils" / "model_ema.py"
    spec = importlib.util.spec_from_file_location("timm_model_ema", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def ours(name: str, rule: Any) -> Method:
    def make(model: nn.Module) -> tuple[Call, Call]:
        average = ParameterAverage(model, rule)

        def swap() -> None:
            with average.average_parameters():
                pass

        return average.update, swap

    return Method(name, make)


def torch_averaged(**function: Any) -> Callable[[nn.Module], tuple[Call, None]]:
    def make(model: nn.Module) -> tuple[Call, None]:
        average = swa_utils.AveragedModel(model, **function)
        average.module.float()
        return lambda: average.update_parameters(model), None

    return make


def ema_pytorch(**options: Any) -> Callable[[nn.Module], tuple[Call, None]]:
    def make(model: nn.Module) -> tuple[Call, None]:
        shadow = deepcopy(model).float()
        schedule: dict[str, Any] = {"beta": DECAY, "min_value": DECAY, "update_after_step": 0}
        average = EMA(
            model, shadow, update_every=1, include_online_model=False, **schedule, **options
        )
        average.update()  # the first two calls copy
        average.update()
        return average.update, None

    return make


def torch_ema(model: nn.Module) -> tuple[Call, Call]:
    average = ExponentialMovingAverage(model.parameters(), DECAY, use_num_updates=False)
    average.to(dtype=torch.float32)

    def swap() -> None:
        with average.average_parameters():
            pass

    return average.update, swap


def timm_v3(**options: Any) -> Callable[[nn.Module], tuple[Call, None]]:
    def make(model: nn.Module) -> tuple[Call, None]:
        average = timm_model_ema().ModelEmaV3(model, decay=DECAY, **options)
        average.module.float()
        return lambda: average.update(model), None

    return make


def diffusers(foreach: bool) -> Callable[[nn.Module], tuple[Call, Call]]:
    def make(model: nn.Module) -> tuple[Call, Call]:
        from diffusers.training_utils import EMAModel

        average = EMAModel(model.parameters(), decay=DECAY, min_decay=DECAY, foreach=foreach)
        average.to(dtype=torch.float32)
        average.step(model.parameters())  # the first two steps copy
        average.step(model.parameters())

        def swap() -> None:
            average.store(model.parameters())
            average.copy_to(model.parameters())
            average.restore(model.parameters())

        return lambda: average.step(model.parameters()), swap

    return make


OURS = [
    ours("tailavg, c = 0.25", 0.25),
    ours(f"tailavg, k = {WINDOW}", AnytimeWindow(WINDOW, accumulators=3)),
    ours("tailavg, exponential, c = 0.25", Exponential(0.25)),
]
PEERS = [
    Method(
        "torch AveragedModel, ema multi",
        torch_averaged(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(DECAY)),
    ),
    Method(
        "torch AveragedModel, swa multi",
        torch_averaged(multi_avg_fn=swa_utils.get_swa_multi_avg_fn()),
    ),
    Method("ema-pytorch, foreach", ema_pytorch(use_foreach=True)),
    Method("torch-ema", torch_ema),
    Method("timm ModelEmaV3", timm_v3()),
    Method("timm ModelEmaV3, exclude_buffers", timm_v3(exclude_buffers=True)),
    Method("diffusers EMAModel, foreach", diffusers(foreach=True)),
]
# float32 averages of bfloat16 weights, with each peer's options, with or without foreach
HALF_PEERS = [
    PEERS[1],
    Method(
        "torch AveragedModel, swa avg_fn, module.float()",
        torch_averaged(avg_fn=swa_utils.get_swa_avg_fn()),
    ),
    Method("ema-pytorch, foreach, coerce_dtype", ema_pytorch(use_foreach=True, coerce_dtype=True)),
    Method("ema-pytorch, coerce_dtype", ema_pytorch(coerce_dtype=True)),
    Method("torch-ema, to(float32)", torch_ema),
    Method("timm ModelEmaV3", timm_v3()),
    Method("diffusers EMAModel, foreach, to(float32)", diffusers(foreach=True)),
    Method("diffusers EMAModel, to(float32)", diffusers(foreach=False)),
]


# Time.


def interleave(what: list[Timed], rounds: int, cycles: int) -> dict[str, Took]:
    """The best of equally many calls of each, and the median of the means of cycles."""
    fewest = min(timed.times for timed in what)
    best: dict[str, list[float]] = {timed.name: [] for timed in what}
    took: dict[str, list[float]] = {timed.name: [] for timed in what}
    for turn in range(rounds):
        start = turn % len(what)
        for name, call, times in what[start:] + what[:start]:
            calls = []
            for _ in range(times):
                begin = perf_counter_ns()
                call()
                calls.append((perf_counter_ns() - begin) / 1e6)
            best[name].append(min(calls[:fewest]))
            took[name] += calls
    return {
        name: Took(min(best[name]), median(map(mean, parts(calls, cycles))), best[name])
        for name, calls in took.items()
    }


def parts(calls: list[float], number: int) -> Iterator[list[float]]:
    size = len(calls) // number
    return (calls[i * size : (i + 1) * size] for i in range(number))


def flat_add(size: int) -> Call:
    total, x = torch.zeros(size), torch.randn(size)
    return lambda: total.add_(x)


def two_copies(model: nn.Module) -> list[Call]:
    """Copy to a second set of tensors and back, as lists or one by one."""
    here = [p.detach() for p in model.parameters()]
    there = [p.clone() for p in here]

    def together() -> None:
        torch._foreach_copy_(there, here)
        torch._foreach_copy_(here, there)

    def one_by_one() -> None:
        for a, b in ((there, here), (here, there)):
            for to, of in zip(a, b, strict=True):
                to.copy_(of)

    return [together, one_by_one]


def those_that_can(peers: list[Method], model: nn.Module) -> dict[str, tuple[Call, Call | None]]:
    """The peers that can average this model; others raise a RuntimeError about dtypes."""
    found = {}
    for name, make in peers:
        try:
            update, swap = make(model)
            update()  # the first one may only copy
            update()
        except RuntimeError as error:
            print(f"{name:48} {CANNOT}: {str(error).splitlines()[0]}")
        else:
            found[name] = update, swap
    return found


class Run(NamedTuple):
    rounds: int
    warmup: int
    rows: list[list[str]]  # set, what, method, measure, value

    def keep(self, group: str, what: str, method: str, **measures: float | str) -> None:
        cells = []
        for measure, value in measures.items():
            text = value if isinstance(value, str) else f"{value:.4g}"
            self.rows.append([group, what, method, measure.replace("_", " "), text])
            cells.append(f"{text} {measure.replace('_', ' ')}")
        print(f"{group:12} {what:20} {method:48} {', '.join(cells)}", flush=True)

    def get(self, group: str, what: str, method: str, measure: str) -> str:
        for row in self.rows:
            if row[:4] == [group, what, method, measure]:
                return row[4]
        return ""


def updates(run: Run, group: str, dtype: torch.dtype, peers: list[Method], cycles: int) -> None:
    """Time all updates of a set and then, for float32, the swaps in and out."""
    shapes = SETS[group]
    model = module(shapes, dtype)
    alive = those_that_can(peers, model) | {name: make(model) for name, make in OURS}
    limit = flat_add(elements(shapes))
    names = [method.name for method in OURS]
    for name, (update, _) in alive.items():
        until = math.inf if name in names else perf_counter_ns() + PATIENCE * 1e9
        for _ in range(run.warmup):
            if perf_counter_ns() < until:
                update()
    few, many = (10 if elements(shapes) < 10**6 else 2), math.ceil(CYCLE * cycles / run.rounds)
    timed = [Timed(LIMIT, limit, few)]
    timed += [
        Timed(name, update, max(few, many) if name in names else few)
        for name, (update, _) in alive.items()
    ]
    took = interleave(timed, run.rounds, cycles)
    what = "update" if dtype == torch.float32 else "update, bfloat16"
    peer = min((name for name in alive if name not in names), key=lambda name: took[name].best)
    # bfloat16 reads 2 bytes instead of 4, so it moves 10 bytes instead of 12
    share = 1.0 if dtype == torch.float32 else 10 / 12
    for name in [LIMIT, *(method.name for method in [*peers, *OURS])]:
        if name not in took:
            run.keep(group, what, name, best_ms=CANNOT)
            continue
        best, cycle, each = took[name]
        run.keep(
            group,
            what,
            name,
            best_ms=best,
            median_ms=cycle,
            ratio_to_the_fastest_peer=best / took[peer].best,
            ratio_of_medians=cycle / took[peer].median,
            ratio_in_the_median_round=median(map(truediv, each, took[peer].rounds)),
            share_of_the_limit=(1.0 if name == LIMIT else share) * took[LIMIT].best / best,
            share_in_the_median_round=(1.0 if name == LIMIT else share)
            * median(map(truediv, took[LIMIT].rounds, each)),
        )
    if dtype == torch.float32 and elements(shapes) > 10**6:
        small = elements(shapes) < 10**8  # the peers' swaps of a large set take too long
        for name, _ in product(names, range(CYCLE // 2)):
            alive[name][0]()  # until all three accumulators are in use
        found = {name: swap for name, (_, swap) in alive.items() if swap}
        swaps(run, group, model, {n: s for n, s in found.items() if small or n in names})


def swaps(run: Run, group: str, model: nn.Module, found: dict[str, Call]) -> None:
    timed = [Timed(name, copy, 1) for name, copy in zip(COPIES, two_copies(model), strict=True)]
    timed += [Timed(name, swap, 1) for name, swap in found.items()]
    for _, call, _ in timed:
        call()
    took = interleave(timed, run.rounds, run.rounds)
    copies = min(took[name].best for name in COPIES)
    middle = min(took[name].median for name in COPIES)
    for name, (best, each, _) in took.items():
        run.keep(
            group,
            "swap in and out",
            name,
            best_ms=best,
            median_ms=each,
            ratio_to_two_copies=best / copies,
            ratio_of_medians=each / middle,
        )


def only_swaps(rounds: int) -> None:
    """Print the times of swaps, all three accumulators in use, beside those of torch-ema."""
    model = module(SETS["ResNet-50"])
    methods = [Method("torch-ema", torch_ema), ours("tailavg, k = 12", AnytimeWindow(12))]
    methods += [ours("tailavg, exponential, c = 0.25", Exponential(0.25))]
    calls = {name: make(model) for name, make in methods}
    for update, _ in calls.values():
        for _ in range(22):
            update()
    timed = [Timed(name, swap, 1) for name, (_, swap) in calls.items() if swap]
    took = interleave(timed, rounds, rounds)
    peer = took["torch-ema"]
    for name, (best, middle, each) in took.items():
        ratio = median(map(truediv, each, peer.rounds))
        print(
            f"{name:32} best {best:6.2f} ms, ratio {best / peer.best:.2f}; median {middle:6.2f} ms,"
            f" ratio {middle / peer.median:.2f}; median of the ratios in a round {ratio:.2f}"
        )


# Memory of the process.


def trim() -> None:
    """Return free memory to the system, so that new allocations show."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def resident(field: str = "VmRSS") -> int:
    """Bytes of resident memory now, or at the peak since `forget_peak` ("VmHWM")."""
    status = Path("/proc/self/status").read_text()
    return (
        next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) * 1024
    )


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def memory(run: Run, group: str, methods: list[tuple[Method, int]]) -> None:
    """Memory after the updates, extra memory while swapped, and temporaries of an update."""
    model = module(SETS[group])
    size = elements(SETS[group])
    for method, number in methods:
        trim()
        before = resident()
        update, swap = method.make(model)
        update()
        trim()
        forget_peak()
        for _ in range(number):
            update()
        peak = resident("VmHWM")
        trim()
        held = resident()
        measures = {
            "bytes_a_parameter": (held - before) / size,
            "temporaries_MiB": (peak - held) / MIB,
        }
        if swap:
            forget_peak()
            swap()
            measures["more_while_swapped"] = (resident("VmHWM") - held) / size
        run.keep(group, "memory", method.name, **measures)
        del update, swap


# Our figures beside those of the best peer.


def summary(run: Run) -> list[list[str]]:
    """Our figures beside the lowest of the peers, or of plain copies if no peer was measured."""
    names = [method.name for method in OURS]
    rows = []
    for measure, (group, what) in [
        *product(["best ms"], product(SETS, ["update", "update, bfloat16", "swap in and out"])),
        *product(
            ["bytes a parameter", "more while swapped", "temporaries MiB"],
            product(SETS, ["memory"]),
        ),
    ]:
        found = {
            row[2]: row[4]
            for row in run.rows
            if row[:2] == [group, what] and row[3] == measure and row[4] != CANNOT
        }
        own = [found[name] for name in names if name in found]
        peers = [name for name in found if name not in (*names, *COPIES, LIMIT)]
        peers = peers or [name for name in found if name in COPIES]
        best = min(peers, key=lambda name: float(found[name]), default=None)
        if own and best:
            rows.append([group, what, measure, " / ".join(own), found[best], best])
    return rows


def table(run: Run, what: list[str], heads: list[str]) -> list[str]:
    lines = [f"| | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    for group, kind in product(SETS, what):
        methods = dict.fromkeys(row[2] for row in run.rows if row[:2] == [group, kind])
        if methods:
            lines.append(f"| **{group}, {kind}** |{' |' * len(heads)}")
        for name in methods:
            cells = [run.get(group, kind, name, head) for head in heads]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="of each group (%(default)s)")
    parser.add_argument("--warmup", type=int, default=200, help="updates before (%(default)s)")
    parser.add_argument("--swaps", action="store_true", help="compare only swaps, with torch-ema")
    options = parser.parse_args()
    if options.swaps:
        only_swaps(options.rounds)
        return
    run = Run(options.rounds, options.warmup, [])
    load = f"load {os.getloadavg()[0]:.1f} before"
    begin = perf_counter_ns()

    memory(run, "ResNet-50", [*((peer, 3) for peer in PEERS), *((own, CYCLE) for own in OURS)])
    memory(run, "GPT-2 small", [(OURS[1], CYCLE)])
    trim()
    for group, cycles in (("ResNet-50", 3), ("GPT-2 small", 1), ("2,000 × 256", 4)):
        updates(run, group, torch.float32, PEERS, cycles)
        gc.collect()
    updates(run, "ResNet-50", torch.bfloat16, HALF_PEERS, cycles=2)

    packages = ["torch", "ema-pytorch", "torch-ema", "timm", "diffusers"]
    facts = (
        f"Python {platform.python_version()}, "
        f"{', '.join(f'{name} {version(name)}' for name in packages)}; {processor()}, "
        f"{torch.get_num_threads()} threads (torch's default), {load}; best of {run.rounds} "
        f"interleaved rounds after {run.warmup} warm-up updates (for peers, at most {PATIENCE:.0f} "
        f"seconds of them), and the median of cycles of {CYCLE} updates."
    )
    print(f"{facts}\n{(perf_counter_ns() - begin) / 6e10:.1f} minutes", file=sys.stderr)
    found = summary(run)
    for row in found:
        print(*row, sep=" | ")
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "parameters.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["set", "what", "method", "measure", "value"])
        writer.writerows(run.rows)
    ratio, share = "ratio to the fastest peer", "share of the limit"
    lines = [
        facts,
        "",
        f"| | {' / '.join(method.name for method in OURS)} | best peer | |",
        "| --- | ---: | ---: | --- |",
        *(
            f"| {group}, {what}: {measure} | {' | '.join(cells)} |"
            for group, what, measure, *cells in found
        ),
        "",
        *table(
            run,
            ["update", "update, bfloat16"],
            ["best ms", "median ms", ratio, "ratio of medians", share],
        ),
        "",
        *table(
            run,
            ["swap in and out"],
            ["best ms", "median ms", "ratio to two copies", "ratio of medians"],
        ),
        "",
        *table(
            run,
            ["memory"],
            ["bytes a parameter", "more while swapped", "temporaries MiB"],
        ),
    ]
    (RESULTS / "parameters.md").write_text("\n".join(lines) + "\n")
    print(f"\nkept in {RESULTS / 'parameters.csv'}", file=sys.stderr)


if __name__ == "__main__":
    main()
