"""`tailavg.jax` against optax's EMA of parameters, on the weights of networks: `make bench`.

    python benchmarks/pytrees.py [--rounds 8]

Every group is one interleaved run: all methods take turns, in an order that rotates. All are
jitted, and donate what they overwrite. Each round starts with new memory, since its place changes
the speed by a tenth. As in a training loop, ROW calls follow each other without waiting; the best
row counts, by its mean. Next to it is the median over rounds of the mean of CYCLE updates. In a
cycle, a tail of WINDOW folds its sums twice and turns once; growing tails turn more often here than
later in a run. Temporaries are those of the compiled program, according to XLA. Compile times, from
the call to the program, are medians of COMPILES turns in which nothing is cached. The numbers go to
results/pytrees.csv, and as tables to results/pytrees.md.
"""

import argparse
import csv
import platform
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from networks import SETS, processor

from tailavg import AnyTail, AnytimeWindow, Exponential
from tailavg.jax import tail_average

RESULTS = Path(__file__).parent / "results"
WINDOW = 540
CYCLE = 270  # updates, in which WINDOW folds its sum twice and turns once
ROW = 10  # calls without waiting
STEPS = 16  # of one lax.scan
COMPILES = 5
DECAY = 0.999
MIB = 2**20
PEER = "optax.incremental_update"
RULES = {
    f"tail of {WINDOW}, 3 accumulators": AnytimeWindow(WINDOW),
    "tail of a quarter, 3 accumulators": AnytimeWindow(0.25),
    "tail of a quarter, 5 accumulators": AnytimeWindow(0.25, 5),
    "Exponential of a quarter": Exponential(0.25),
    "AnyTail, 12 accumulators": AnyTail(),
}
READ = 0.25  # of an AnyTail

Update = Callable[[Any, Any], Any]


def incremental(average: Any, params: Any) -> Any:
    return optax.incremental_update(params, average, 1.0 - DECAY)


def scanned(update: Update) -> Update:
    def steps(state: Any, params: Any) -> Any:
        return jax.lax.scan(lambda state, _: (update(state, params), None), state, length=STEPS)[0]

    return steps


class Timed:
    """A call, and how long it took."""

    temporary: float | None = None
    compile_s: float | None = None
    call: Callable[[], object]  # timed until its result is ready
    move: Callable[[], None]  # into new memory

    def __init__(self) -> None:
        self.best: list[float] = []
        self.means: list[float] = []

    def run(self, times: int, row: int = ROW) -> None:
        took = []
        for _ in range(0, times, row):
            begin = perf_counter_ns()
            for _ in range(row):
                made = self.call()
            jax.block_until_ready(made)
            took.append((perf_counter_ns() - begin) / 1e6 / row)
        self.best.append(min(took))
        self.means.append(sum(took) / len(took))


class Compiled(Timed):
    """An update of a state; without further arguments, a read of it."""

    def __init__(self, function: Callable[..., Any], state: Any, *rest: Any) -> None:
        super().__init__()
        donated = (0,) if rest else ()  # a read keeps the state
        jitted = jax.jit(function, donate_argnums=donated)
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, *rest))
        self.compiling: list[float] = []
        self.state = state

        def compile_anew() -> None:
            jax.clear_caches()
            begin = perf_counter_ns()
            compiled = jitted.lower(*arguments).compile()
            self.compiling.append((perf_counter_ns() - begin) / 1e9)
            self.compile_s = median(self.compiling)
            self.temporary = compiled.memory_analysis().temp_size_in_bytes / MIB

        self.compile_anew = compile_anew

        def call() -> object:
            made = jitted(self.state, *rest)
            if rest:
                self.state = made
            return made

        def move() -> None:
            if rest:
                self.state = jax.tree.map(jnp.copy, self.state)

        self.call, self.move = call, move


class Nnx(Timed):
    """flax's own EMA, which changes in place."""

    def __init__(self, params: Any) -> None:
        super().__init__()
        variables = nnx.Dict({name: nnx.Param(x) for name, x in params.items()})
        average = nnx.EMA(variables, DECAY)
        update = nnx.jit(lambda average, params: average.update(params), donate_argnums=0)

        def call() -> object:
            update(average, variables)
            return nnx.state(average)

        def move() -> None:
            nnx.update(average, jax.tree.map(jnp.copy, nnx.state(average)))

        self.call, self.move = call, move


def window(rule: Any) -> float | None:
    return READ if isinstance(rule, AnyTail) else None


def interleave(timed: dict[str, Timed], rounds: int, times: int, row: int = ROW) -> None:
    for one in timed.values():
        one.run(3, row)
        one.best.clear()
        one.means.clear()
    names = list(timed)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            timed[name].move()
            timed[name].run(times, row)


def compile_in_turn(compiled: dict[str, Compiled]) -> None:
    for _ in range(COMPILES):
        for one in compiled.values():
            one.compile_anew()


def rows(group: str, what: str, timed: dict[str, Timed]) -> list[list[str]]:
    """A row for each method, with ratios to the first."""
    peer = next(iter(timed.values()))
    compiling = peer.compile_s or 1.0
    found = [
        [
            group,
            what,
            name,
            f"{min(one.best):.3f}",
            f"{median(one.means):.3f}",
            f"{min(one.best) / min(peer.best):.3f}",
            f"{median(one.means) / median(peer.means):.3f}",
            "" if one.temporary is None else f"{one.temporary:.3f}",
            "" if one.compile_s is None else f"{one.compile_s:.2f}",
            "" if one.compile_s is None else f"{one.compile_s / compiling:.2f}",
        ]
        for name, one in timed.items()
    ]
    for row in found:
        print(*row, sep=" | ", flush=True)
    return found


def measure(group: str, rounds: int, rules: dict[str, Any]) -> list[list[str]]:
    key = jax.random.key(0)
    params = {
        name: jax.random.normal(jax.random.fold_in(key, i), shape)
        for i, (name, shape) in enumerate(SETS[group].items())
    }
    averages = {name: tail_average(rule) for name, rule in rules.items()}
    peer = Compiled(incremental, jax.tree.map(jnp.copy, params), params)
    tails = {
        name: Compiled(average.update, average.init(params), params)
        for name, average in averages.items()
    }
    compile_in_turn({PEER: peer, **tails})
    for tail in tails.values():
        tail.run(CYCLE)  # skip the first turns, which come close together
    timed: dict[str, Timed] = {PEER: peer, **tails}
    if group == "ResNet-50":
        timed["flax nnx.EMA"] = Nnx(params)
    interleave(timed, rounds, CYCLE)
    found = rows(group, "update", timed)
    interleave(timed, rounds, CYCLE // 5, row=1)
    found += rows(group, "update, waiting for each", timed)

    reads = {
        name: Compiled(partial(average.value, window=window(average.rule)), tails[name].state)
        for name, average in averages.items()
    }
    compile_in_turn(reads)
    interleave({PEER: peer, **reads}, rounds, 5, row=1)
    found += rows(group, "value, against an update", {PEER: peer, **reads})

    name, average = next(iter(averages.items()))
    scans = {
        PEER: Compiled(scanned(incremental), peer.state, params),
        name: Compiled(scanned(average.update), tails[name].state, params),
    }
    compile_in_turn(scans)
    interleave(scans, rounds, 4, row=1)
    return found + rows(group, f"{STEPS} updates in lax.scan", scans)


def tables(heads: list[str], found: list[list[str]]) -> list[str]:
    """A table for each measurement of each set."""
    lines = []
    for (group, what), part in groupby(found, key=lambda row: row[:2]):
        lines += ["", f"**{group}: {what}**", ""]
        lines += [f"| {' | '.join(heads[2:])} |", f"| {' | '.join(['---'] * len(heads[2:]))} |"]
        lines += [f"| {' | '.join(row[2:])} |" for row in part]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    begin = perf_counter_ns()
    few = dict(list(RULES.items())[:1])
    found = [
        *measure("ResNet-50", rounds, RULES),
        *measure("GPT-2 small", max(2, rounds // 4), few),
        *measure("2,000 × 256", max(2, rounds // 2), few),
    ]
    heads = ["set", "what", "method", "best ms", "mean ms", "ratio", "ratio of means"]
    heads += ["temporary MiB", "compile s", "ratio of compile times"]
    packages = ["jax", "optax", "flax"]
    facts = (
        f"Python {platform.python_version()}, "
        f"{', '.join(f'{name} {version(name)}' for name in packages)}; {processor()}; "
        f"{rounds} interleaved rounds of {CYCLE} updates (a quarter as many for GPT-2, half as "
        f"many for small tensors): the best {ROW} updates in a row, and the median over rounds of "
        f"the mean; compile times are medians of {COMPILES}."
    )
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "pytrees.csv").open("w", newline="") as file:
        csv.writer(file).writerows([heads, *found])
    (RESULTS / "pytrees.md").write_text("\n".join([facts, *tables(heads, found)]) + "\n")
    minutes = (perf_counter_ns() - begin) / 6e10
    print(f"{facts}\n{minutes:.1f} minutes; kept in {RESULTS / 'pytrees.csv'}", file=sys.stderr)


if __name__ == "__main__":
    main()
