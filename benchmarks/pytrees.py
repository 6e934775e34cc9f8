"""`tailavg.jax` against optax's EMA of parameters, on the weights of networks: `make bench`.

    python benchmarks/pytrees.py [--rounds 12]

Every group is one interleaved run: all that is compared takes turns, round after round, in an
order that rotates. All are jitted, with what they overwrite donated. The best update of each
counts; beside it stands the median over the rounds of CYCLE consecutive updates, by their mean, in
which a tail folds its sums twice and turns once. Temporaries and bytes are those of the compiled
program, by XLA. The numbers go to results/pytrees.csv, and as tables to results/pytrees.md.
"""

import argparse
import csv
import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from networks import SETS, processor

from tailavg import AnytimeWindow, Exponential
from tailavg.jax import tail_average

RESULTS = Path(__file__).parent / "results"
WINDOW = 540
CYCLE = 270  # updates: in so many, WINDOW folds its sum twice and turns once
STEPS = 16  # of one lax.scan
DECAY = 0.999
MIB = 2**20
PEER = "optax.incremental_update"
RULES = {
    f"tail of {WINDOW}, 3 accumulators": AnytimeWindow(WINDOW),
    "tail of a quarter, 3 accumulators": AnytimeWindow(0.25),
    "tail of a quarter, 5 accumulators": AnytimeWindow(0.25, 5),
    "Exponential of a quarter": Exponential(0.25),
}

Update = Callable[[Any, Any], Any]


def incremental(average: Any, params: Any) -> Any:
    return optax.incremental_update(params, average, 1.0 - DECAY)


def scanned(update: Update) -> Update:
    def steps(state: Any, params: Any) -> Any:
        return jax.lax.scan(lambda state, _: (update(state, params), None), state, length=STEPS)[0]

    return steps


class Candidate:
    """A compiled update with its state, and how long its calls took."""

    def __init__(self, update: Callable[..., Any], state: Any, *rest: Any) -> None:
        begin = perf_counter_ns()
        donated = (0,) if rest else ()  # what only reads a state keeps it
        self.compiled = jax.jit(update, donate_argnums=donated).lower(state, *rest).compile()
        self.compile_s = (perf_counter_ns() - begin) / 1e9
        self.state, self.rest = state, rest
        self.best: list[float] = []
        self.means: list[float] = []

    def run(self, times: int) -> None:
        took = []
        for _ in range(times):
            begin = perf_counter_ns()
            made = jax.block_until_ready(self.compiled(self.state, *self.rest))
            took.append((perf_counter_ns() - begin) / 1e6)
            self.state = made if self.rest else self.state
        self.best.append(min(took))
        self.means.append(sum(took) / len(took))

    @property
    def temporary(self) -> float:
        return self.compiled.memory_analysis().temp_size_in_bytes / MIB


class Nnx:
    """The same of flax, whose averages change in place."""

    temporary, compile_s = "", ""

    def __init__(self, params: Any) -> None:
        self.params = nnx.Dict({name: nnx.Param(x) for name, x in params.items()})
        self.average = nnx.EMA(self.params, DECAY)
        self.update = nnx.jit(lambda average, params: average.update(params))
        self.best: list[float] = []
        self.means: list[float] = []

    def run(self, times: int) -> None:
        took = []
        for _ in range(times):
            begin = perf_counter_ns()
            self.update(self.average, self.params)
            jax.block_until_ready(nnx.state(self.average))
            took.append((perf_counter_ns() - begin) / 1e6)
        self.best.append(min(took))
        self.means.append(sum(took) / len(took))


def interleave(candidates: dict[str, Any], rounds: int, times: int) -> None:
    for candidate in candidates.values():
        candidate.run(3)
        candidate.best.clear()
        candidate.means.clear()
    names = list(candidates)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            candidates[name].run(times)


def rows(group: str, what: str, candidates: dict[str, Any], peer: Any) -> list[list[Any]]:
    return [
        [
            group,
            what,
            name,
            f"{min(one.best):.3f}",
            f"{median(one.means):.3f}",
            f"{min(one.best) / min(peer.best):.3f}",
            f"{median(one.means) / median(peer.means):.3f}",
            f"{one.temporary:.3f}" if one.temporary != "" else "",
            f"{one.compile_s:.1f}" if one.compile_s != "" else "",
        ]
        for name, one in candidates.items()
    ]


def measure(group: str, rounds: int, cycle: int) -> list[list[Any]]:
    key = jax.random.key(0)
    params = {
        name: jax.random.normal(jax.random.fold_in(key, i), shape)
        for i, (name, shape) in enumerate(SETS[group].items())
    }

    def begin(average: Any) -> Any:
        """A state far enough on that turns of a growing window are as rare as they usually are."""
        state = average.init(params)
        update = jax.jit(average.update, donate_argnums=0)
        for _ in range(cycle):
            state = update(state, params)
        return jax.block_until_ready(state)

    print(group, file=sys.stderr)
    peer = Candidate(incremental, jax.tree.map(jnp.copy, params), params)
    candidates: dict[str, Any] = {PEER: peer, "flax nnx.EMA, nnx.jit": Nnx(params)}
    for name, rule in RULES.items():
        average = tail_average(rule)
        candidates[name] = Candidate(average.update, begin(average), params)
    interleave(candidates, rounds, cycle)
    found = rows(group, "update", candidates, peer)

    reads: dict[str, Any] = {PEER: peer}
    for name, rule in RULES.items():
        reads[name] = Candidate(tail_average(rule).value, candidates[name].state)
    interleave(reads, rounds, 5)
    found += rows(group, "value", reads, peer)

    name, rule = next(iter(RULES.items()))
    average = tail_average(rule)
    scans = {
        PEER: Candidate(scanned(incremental), peer.state, params),
        name: Candidate(scanned(average.update), candidates[name].state, params),
    }
    interleave(scans, rounds, max(2, cycle // STEPS // 4))
    return found + rows(group, f"{STEPS} updates in lax.scan", scans, scans[PEER])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    begin = perf_counter_ns()
    found = [
        *measure("ResNet-50", rounds, CYCLE),
        *measure("GPT-2 small", max(2, rounds // 4), CYCLE),
        *measure("2,000 × 256", max(2, rounds // 2), CYCLE),
    ]
    heads = ["set", "what", "method", "best ms", "mean ms", "ratio", "ratio of means"]
    heads += ["temporaries MiB", "compiled in s"]
    packages = ["jax", "optax", "flax"]
    facts = (
        f"Python {platform.python_version()}, "
        f"{', '.join(f'{name} {version(name)}' for name in packages)}; {processor()}; "
        f"{rounds} interleaved rounds of {CYCLE} updates (a quarter as many rounds for GPT-2, half "
        "as many for small tensors): the best update, and the median over rounds of their mean."
    )
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "pytrees.csv").open("w", newline="") as file:
        csv.writer(file).writerows([heads, *found])
    lines = [facts, "", f"| {' | '.join(heads)} |", f"| {' | '.join(['---'] * len(heads))} |"]
    for row in found:
        lines.append(f"| {' | '.join(row)} |")
        print(*row, sep=" | ")
    (RESULTS / "pytrees.md").write_text("\n".join(lines) + "\n")
    minutes = (perf_counter_ns() - begin) / 6e10
    print(f"{facts}\n{minutes:.1f} minutes; kept in {RESULTS / 'pytrees.csv'}", file=sys.stderr)


if __name__ == "__main__":
    main()
