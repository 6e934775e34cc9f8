"""How many samples `AnyTail` touches for each sample of a window: exact, without a stream.

    python benchmarks/overhead.py

A window is read from complete blocks, so it touches all samples of the oldest block it needs. The
overhead is the samples touched over the size of the window. Blocks change at few steps (some
hundred up to 10⁹). In between, the overhead is worst where a window starts to need one more block,
so integers give it exactly, without any samples. The rows go to results/overhead.csv, and as a
table to results/overhead.md for the documentation.
"""

import csv
import sys
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np

from tailavg import AnyTail
from tailavg.core.clock import BlockClock

RESULTS = Path(__file__).parent / "results"
FIRST, LASTS = 1000, (10**5, 10**9)
SHORTEST = (Fraction(1, 10), Fraction(1, 20), Fraction(1, 4))
ACCUMULATORS = (6, 8, 10, 12, 16, 24)
STEPS = np.unique(np.geomspace(FIRST, LASTS[0], 2000).astype(int)).tolist()
"""The steps of the mean, evenly spread on a log scale."""

Gap = tuple[int, int, int, int]  # the starts of a block and of the next one, first and last step


def fractions(shortest: Fraction) -> list[Fraction]:
    """The shortest, and every hundredth above it."""
    return [shortest] + [Fraction(n, 100) for n in range(1, 101) if n > 100 * shortest]


def gaps(rule: AnyTail, last: int) -> Iterator[Gap]:
    """Every block that was ever closed, with its first and last step.

    The open block is no gap: it holds at most one sample more than the shortest window.
    """
    clock, since = BlockClock(rule), {}
    while (end := clock.closes) < last:
        clock.advance(end + 1)
        now = set(pairwise(clock.starts))
        for block in since.keys() - now:
            yield *block, since.pop(block), end
        since |= dict.fromkeys(now - since.keys(), end + 1)
    for block, first in since.items():
        yield *block, first, last


def worst(rule: AnyTail, shortest: Fraction, last: int) -> tuple[Fraction, Fraction]:
    """The worst overhead from FIRST to `last`: over hundredths, and over all real fractions."""
    hundredths = reals = Fraction(1)
    asked = [fraction.as_integer_ratio() for fraction in fractions(shortest)]
    p, q = asked[0]
    for start, end, since, until in gaps(rule, last):
        first = max(since, FIRST)
        if first > until:
            continue
        # any real fraction: all windows above t - end need the block, and none may be below
        # shortest · t; the overhead grows until the two are equal, and falls after that
        equal = q * end // (q - p)
        for t in {first, until, equal, equal + 1}:
            if first <= t <= until and q * (t - start) >= p * t:
                reals = max(reals, Fraction(q * (t - start), max(q * (t - end), p * t)))
        # one fraction: the overhead grows while the window needs the block, t - end < fraction · t
        for n, d in asked:
            t = min(until, -(-d * end // (d - n)) - 1) if n < d else until
            if first <= t and d * (t - start) >= n * t > d * (t - end):
                hundredths = max(hundredths, Fraction(d * (t - start), n * t))
    return hundredths, reals


def mean(rule: AnyTail, shortest: Fraction) -> float:
    """The mean overhead, over hundredths and over STEPS."""
    asked, found = np.array(list(map(float, fractions(shortest)))), []
    clock = BlockClock(rule)
    for t in STEPS:
        clock.advance(t)
        held = t - np.array(clock.starts[::-1])  # in the newest block, the newest two, …
        touched = held[np.searchsorted(held, asked * t * (1 - 1e-12))]
        found.append((touched / (asked * t)).mean())
    return float(np.mean(found))


def main() -> None:
    heads = ["shortest", "accumulators", "last t", "worst, hundredths", "worst, all fractions"]
    heads += ["mean", "bound", "worst of all fractions / bound"]
    rows, table = [], []
    for shortest in SHORTEST:
        table.append(f"| **shortest {float(shortest)}** | | | | | |")
        for accumulators in ACCUMULATORS:
            rule = AnyTail(accumulators, float(shortest))
            bound = float(shortest) ** (-1 / (accumulators - 2))
            typical, found = mean(rule, shortest), []
            for last in LASTS:
                found += [float(each) for each in worst(rule, shortest, last)]
                numbers = [*found[-2:], typical, bound, found[-1] / bound]
                rows.append([float(shortest), accumulators, last, *(f"{x:.4f}" for x in numbers)])
            cells = [f"{x:.3f}" for x in (typical, found[0], found[2], found[3], bound)]
            above = f"{found[3] / bound - 1:.0%}"
            table.append(f"| {accumulators} | {' | '.join(cells)}, +{above} |")
            print(f"shortest {float(shortest):4}, {accumulators:2} accumulators: mean {cells[0]},")
            print(f"    worst to 10⁵ {cells[1]}, to 10⁹ {cells[2]}, of all fractions {cells[3]},")
            print(f"    bound {cells[4]}, {above} above it")
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "overhead.csv").open("w", newline="") as file:
        csv.writer(file).writerows([heads, *rows])
    text = [
        "| accumulators | mean | t ≤ 10⁵ | t ≤ 10⁹ | any fraction | bound |",
        "| ---: " * 6 + "|",
        *table,
    ]
    (RESULTS / "overhead.md").write_text("\n".join(text) + "\n")
    print(f"\nkept in {RESULTS / 'overhead.csv'}", file=sys.stderr)


if __name__ == "__main__":
    main()
