"""Draw every figure of the documentation anew, in one style: `make figures`.

    PYTHONPATH=examples python docs/figures.py [memory weights …]

Long training runs are not repeated: their figures are drawn from the CSV files that they left.
"""

import contextlib
import csv
import os
import re
import shlex
import subprocess
import sys
from html import escape
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import anytime_lm
import digits
import every_tail
import numpy as np
import style
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter
from rich.console import Console
from rich.text import Text
from style import ANYTAIL, ANYTIME, EXACT, EXPONENTIAL, LIGHT, OTHERS, RAW

from tailavg import AnyTail, AnytimeWindow, Decay, ExactWindow, Exponential, TailAverage
from tailavg.core.clock import BlockClock, Store, starts_at
from tailavg.experiments.figures import make
from tailavg.experiments.figures import save as save_panels
from tailavg.experiments.regression import Problem
from tailavg.experiments.run import Plan, run

DOCS = Path(__file__).parent
FOLDER = DOCS / "figures"
RESULTS = DOCS.parent / "benchmarks" / "results"
WIDE, NARROW = 9.6, 4.8  # inches: a figure as wide as the text, and half of it


def average(rule: object, t: int) -> TailAverage:
    """An average that has seen t samples."""
    made = TailAverage(rule)
    made.update_many(np.zeros(t))
    return made


def save(figure: plt.Figure, name: str) -> None:
    """Write a figure as SVG."""
    style.save(figure, FOLDER / name)


def memory() -> None:
    """Arrays held for each parameter: those that every update touches, and the others."""
    rows = [("EMA", 1, 0)]
    for name, rule in (
        ("Exponential(0.25)", Exponential(0.25)),
        ("the last quarter: 0.25", AnytimeWindow(0.25)),
        ("every tail: AnyTail()", AnyTail()),
    ):
        rows.append((name, 1, rule.accumulators))
    exact = average(ExactWindow(0.25), 10_000).profile().accumulators
    figure, axes = plt.subplots(figsize=(NARROW, 2.9), layout="constrained")
    for y, (_, hot, cold) in enumerate(rows):
        axes.barh(y, hot, color=EXPONENTIAL)
        axes.barh(y, cold, left=hot, color=LIGHT[ANYTIME])
        axes.text(hot + cold + 0.2, y, f"{hot} + {cold}" if cold else f"{hot}", va="center")
    axes.barh(len(rows), 16, color=EXPONENTIAL)
    note = f"{exact:,} after 10,000 steps →"
    axes.text(15.7, len(rows), note, color="white", weight="bold", va="center", ha="right")
    axes.barh(0, 0, color=EXPONENTIAL, label="hot: every update")
    axes.barh(0, 0, color=LIGHT[ANYTIME], label="cold: now and then")
    names = [*(name for name, _, _ in rows), "exact: ExactWindow(0.25)"]
    axes.set(yticks=range(len(names)), yticklabels=names, xlim=(0, 16), ylim=(4.5, -0.5))
    axes.set(title="Arrays held for each parameter", xticks=[])
    axes.grid(visible=False)
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.legend(loc="upper right")
    save(figure, "memory.svg")


def anytime() -> None:
    """The headline of decay-free training, small: one run, and runs that know their end."""
    losses = anytime_lm.Losses(FOLDER / "anytime_lm.csv")
    rate, _ = losses.one_rate(anytime_lm.tail("constant"))
    figure, axes = plt.subplots(figsize=(NARROW, 2.9), layout="constrained")
    for name, method, colour, width in (
        ("one run: last iterate", anytime_lm.Method("constant"), RAW, 1.6),
        ("the same run: last 20 %", anytime_lm.tail("constant"), ANYTIME, 2.6),
    ):
        steps, each = zip(*sorted(losses[method][rate].items()), strict=True)
        axes.plot(steps, np.mean(each, axis=1), color=colour, lw=width, label=name)
    for name, (colour, marker) in (("cosine", anytime_lm.COSINE), ("WSD", anytime_lm.WSD)):
        best = [losses.best(anytime_lm.Method(name), step)[1].mean() for step in losses.horizons]
        label = f"{name}: a run for each length"
        axes.plot(losses.horizons, best, marker, color=colour, ms=6, zorder=3, label=label)
    axes.set(xscale="log", xlabel="steps", title="Validation loss: one run, read at any time")
    axes.set_xticks(losses.horizons, [f"{step:,}" for step in losses.horizons])
    axes.minorticks_off()
    axes.legend(fontsize=9)
    save(figure, "anytime.svg")


def tutorial() -> None:
    """What the programs of the tutorial find, run in order."""
    page = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        for program in re.findall(r"^```python[^\n]*\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
            exec(program, names)
    steps, raw, averaged = zip(*names["history"], strict=True)
    figure, axes = plt.subplots(figsize=(WIDE, 3), layout="constrained")
    axes.semilogy(steps, raw, color=RAW, label="raw weights")
    axes.semilogy(steps, averaged, color=ANYTIME, lw=2.6, label="the last quarter, averaged")
    axes.set(xlabel="step", ylabel="loss", title="Loss on samples without noise", xlim=(0, 2000))
    ticks = (0.01, 0.03, 0.1, 0.3)
    axes.set_yticks(ticks, [f"{tick}" for tick in ticks])
    axes.minorticks_off()
    axes.legend(loc="upper right", ncols=2)
    save(figure, "tutorial.svg")


def anytime_language_model() -> None:
    """One run read at any time, against runs that know their end."""
    path = FOLDER / "anytime_lm.csv"
    anytime_lm.draw(anytime_lm.Losses(path), path)
    path.with_suffix(".png").unlink()


def trained() -> None:
    """The training runs on digits."""
    for module, name in ((digits, "digits"), (every_tail, "every-tail")):
        module.draw(digits.read(FOLDER / f"{name}.csv"), FOLDER / f"{name}.svg")


def reproduction() -> None:
    """The paper's experiments, as `tailavg reproduce` draws them."""
    with TemporaryDirectory() as folder:
        for figure in make(run(Plan(Problem(), 850))):
            svg, _ = save_panels(figure, Path(folder))
            (DOCS / "reproduction" / svg.name).write_bytes(svg.read_bytes())


def weights() -> None:
    """What each sample weighs at one step, for every method."""
    figure, panels = plt.subplots(1, 2, figsize=(WIDE, 3.4), layout="constrained")
    for panel, window, t, title in (
        (panels[0], 200, 1050, "the last 200, at t = 1050"),
        (panels[1], 0.25, 1150, "the last quarter, at t = 1150"),
    ):
        for rule, name, look in (
            (ExactWindow(window), "exact window", {"color": EXACT, "lw": 3}),
            (AnytimeWindow(window, 2), "anytime, 2 accumulators", {"color": LIGHT[ANYTIME]}),
            (AnytimeWindow(window, 3), "anytime, 3 accumulators", {"color": ANYTIME}),
            (Exponential(window), "exponential", {"color": EXPONENTIAL, "ls": "--"}),
        ):
            alpha = average(rule, t).weights()
            panel.plot(np.arange(len(alpha))[::-1], 1000 * alpha, label=name, **look)
        panel.set(title=title, xlabel="age of the sample", xlim=(-20, 620))
    panels[0].set_ylabel("weight, thousandths")
    panels[0].legend()
    save(figure, "weights.svg")


def turns() -> None:
    """How far back a growing window reaches, under both kinds of turns."""
    figure, axes = plt.subplots(figsize=(WIDE, 3), layout="constrained")
    for accumulators, kind in ((2, "paper"), (3, "paper"), (3, "balanced")):
        now = TailAverage(AnytimeWindow(0.25, accumulators, turns=kind))
        now.update_many(np.zeros(100))
        steps, reach = [], []
        while now.count < 10_000:
            now.update(0.0)
            steps.append(now.count)
            reach.append((now.profile().oldest_age + 1) / now.size)
        print(f"{accumulators} accumulators, {kind}: at most {max(reach[900:]):.2f} ct touched")
        if accumulators == 3:
            colour = ANYTIME if kind == "balanced" else OTHERS[1]
            axes.semilogx(steps, reach, color=colour, label=f'turns="{kind}"')
    axes.axhline((1 - 0.75**1.5) / 0.25, color=EXACT, linestyle=":", label="the bound of balanced")
    axes.set(xlabel="step t", ylabel="samples touched / ct", title="c = 0.25, three accumulators")
    axes.set(xlim=(100, 3000), ylim=(0.95, 2.0))
    axes.legend(loc="upper right", ncols=3)
    save(figure, "turns.svg")


def blocks() -> None:
    """How the blocks of `AnyTail` merge over time, and what windows read from them."""
    rule, last, at = AnyTail(8), 120, 100
    windows = {0.1: EXPONENTIAL, 0.3: ANYTIME, 0.6: ANYTAIL}
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(WIDE, 7), height_ratios=(3, 1), sharex=True, layout="constrained"
    )
    lives: dict[tuple[int, int], tuple[int, int]] = {}  # a block: its first and last step
    for t in range(1, last + 1):
        starts = starts_at(rule, t)
        above.add_patch(Rectangle((starts[-1], t - 1), t - starts[-1], 1, color="#f2b705", lw=0.5))
        for block in pairwise(starts):
            lives[block] = (lives.get(block, (t,))[0], t)
    shades = plt.colormaps["GnBu"]
    for (start, end), (since, until) in lives.items():
        shade = shades(0.25 + 0.65 * np.log(end - start) / np.log(last / 2))
        box = (start, since - 1), end - start, until - since + 1
        above.add_patch(Rectangle(*box, facecolor=shade, edgecolor="white", lw=0.9))
    for window, colour in windows.items():
        above.plot([0, (1 - window) * last], [0, last], color=colour, lw=1.6, ls="--")
        above.annotate(
            f"the last {window:.0%}", ((1 - window) * 112, 112), color=colour, ha="right",
            xytext=(-8, 0), textcoords="offset points", va="center", weight="bold",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )  # fmt: skip
    above.axhline(at, color="0.3", lw=1, ls=":")
    above.set(xlim=(0, last), ylim=(last, 0), ylabel="step t, downwards")
    above.grid(visible=False)
    below.grid(visible=False)
    above.set_title("8 accumulators: yellow is the open block, the others are darker the longer")
    average = TailAverage(rule)
    average.update_many(np.zeros(at))
    for edge in starts_at(rule, at):
        below.axvline(edge, color="0.85", lw=0.9)
    for window, colour in windows.items():
        weights = window * at * average.weights(window)
        below.stairs(weights, np.arange(at + 1), color=colour, lw=1.8, label=f"{window:.0%}")
    below.axvline(at, color="0.85", lw=0.9)
    below.axhline(1, color="0.6", lw=1, ls=":")
    below.set(xlabel="sample", ylabel="weight / even weight", ylim=(0, 1.5))
    below.legend(title=f"read at t = {at}", loc="upper left")
    save(figure, "blocks.svg")


def overhead() -> None:
    """How many samples `AnyTail` touches for each sample of the window, by accumulators."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDE, 3.6), layout="constrained")
    steps = np.geomspace(1000, 10_000, 700).astype(int)
    fractions = np.arange(10, 101) / 100
    for accumulators, colour in ((6, EXPONENTIAL), (8, OTHERS[1]), (12, ANYTAIL), (24, OTHERS[0])):
        worst, clock = [], BlockClock(AnyTail(accumulators))
        for t in steps.tolist():
            clock.advance(t)
            held = t - np.array(clock.starts[::-1])
            touched = held[np.searchsorted(held, fractions * t * (1 - 1e-12))]
            worst.append((touched / (fractions * t)).max())
        left.semilogx(steps, worst, color=colour, lw=1.2, label=f"{accumulators}")
    left.xaxis.set_major_locator(FixedLocator([1000, 2000, 5000, 10_000]))
    left.xaxis.set_major_formatter(ScalarFormatter())
    left.xaxis.set_minor_locator(NullLocator())
    left.set(xlabel="step t", ylabel="samples touched / asked for", ylim=(1, 2.55))
    left.set_title("the worst window, at each step")
    left.legend(title="accumulators", ncols=4, loc="upper center")
    with (RESULTS / "overhead.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["shortest"] == "0.1"]
    rows = [row for row in rows if row["last t"] == "1000000000"]
    numbers = [int(row["accumulators"]) for row in rows]
    for column, name, look in (
        ("worst, all fractions", "the worst ever", {"color": ANYTAIL, "marker": "o"}),
        ("bound", "a bound for any schedule", {"color": EXACT, "linestyle": ":"}),
        ("mean", "the mean", {"color": OTHERS[0], "marker": "s"}),
    ):
        right.plot(numbers, [float(row[column]) for row in rows], label=name, ms=4, **look)
    right.plot([6, 8, 10, 12], [2.05, 1.70, 1.55, 1.43], "kx", ms=6, label="best schedule known")
    right.set(xlabel="accumulators", ylim=(1, 2.55), xticks=numbers)
    right.set_title("over all windows and steps")
    right.legend()
    save(figure, "overhead.svg")


class Touched(Store):
    """Notes when the means of blocks are written; each keeps its row for life."""

    def __init__(self, clock: BlockClock) -> None:
        self.clock = clock
        self.rows = list(range(clock.rule.accumulators))
        self.writes: list[tuple[int, int]] = []  # step, row
        self.opened: list[tuple[int, int]] = [(0, self.rows[-1])]

    def fold(self, total: float, weight: float, carry: float) -> None:
        """See `Store`."""
        self.writes.append((self.clock.count, self.rows[-1]))

    def turn(self, gone: int, weight: float) -> None:
        """See `Store`."""
        if weight:
            self.writes.append((self.clock.count, self.rows[gone - 1]))
        self.rows.append(self.rows.pop(gone))
        self.opened.append((self.clock.count, self.rows[-1]))


def touched() -> None:
    """What is touched when: the sum by every update, means by folds, merges and reads only."""
    last, reads = 4096, (1400, 2900)
    cases = (
        ("AnytimeWindow(2000), 3 accumulators", AnytimeWindow(2000)),
        ("AnyTail(12)", AnyTail(12)),
    )
    figure, panels = plt.subplots(
        3, 1, figsize=(WIDE, 5.4), height_ratios=(1, 4, 9), sharex=True, layout="constrained"
    )
    hot, cold, read = EXPONENTIAL, ANYTIME, "#555555"
    panels[0].barh([0], [last], color=hot, height=0.7)
    panels[0].set(yticks=[0], yticklabels=["the EMA"], title="an EMA")
    for panel, (title, rule) in zip(panels[1:], cases, strict=True):
        clock = BlockClock(rule)
        store, rows = Touched(clock), rule.accumulators
        panel.barh([rows], [last], color=hot, height=0.7)
        for t in range(last):
            clock.prepare(store)
            clock.count += 1
            if t in reads:
                terms = clock.terms(0.25 if isinstance(rule, AnyTail) else None)
                used = [store.rows[block] for _, block in terms if block >= 0]
                panel.plot([t] * len(used), used, "o", ms=4, color=read)
        for step, row in store.writes:
            panel.plot([step, step], [row - 0.35, row + 0.35], color=cold, lw=1.6)
        for n in (100, 300, 1000, 2000, last):
            writes = sum(step < n for step, _ in store.writes)
            print(f"{title}: {writes} writes of a mean in {n} updates")
        every = 1 if rows < 6 else 3
        ticks = [*range(0, rows, every), rows]
        names = [*(f"mean {row + 1}" for row in range(0, rows, every)), "the sum"]
        panel.set(yticks=ticks, yticklabels=names, title=title, ylim=(-0.7, rows + 0.7))
    for panel in panels:
        panel.spines["left"].set_visible(False)
        panel.grid(visible=False)
        panel.tick_params(left=False)
    marks = [
        plt.Line2D([], [], color=hot, lw=6, label="touched by every update: hot"),
        plt.Line2D([], [], color=cold, lw=0, marker="|", ms=10, mew=1.6, label="written: cold"),
        plt.Line2D([], [], color=read, lw=0, marker="o", ms=4, label="read by two evaluations"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=3)
    panels[-1].set(xlabel="updates", xlim=(0, last))
    save(figure, "touched.svg")


def decays() -> None:
    """A learning rate that falls, and the weights of iterates that stand for it."""
    t, window = 1000, 0.3
    k = round(window * t)
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(WIDE, 5), sharex=True, height_ratios=(2, 3), layout="constrained"
    )
    tails = average(AnyTail(), t)
    steps = np.arange(t + 1)
    for shape, colour in zip(
        ("linear", "cosine", "1-sqrt"), (ANYTIME, OTHERS[1], OTHERS[0]), strict=True
    ):
        exact = Decay(window, shape).weights(t)
        left = 1 - np.concatenate([[0], np.cumsum(exact)])  # of the rate, at each step
        above.plot(steps, left, color=colour, lw=1.8, label=shape)
        below.plot(steps[1:], k * exact, color=colour, lw=1.8, label=shape)
        got = k * tails.weights(Decay(window, shape))
        below.stairs(got, steps, color=colour, lw=1.1, ls=":")
    above.set(ylabel="learning rate", ylim=(-0.05, 1.1), title="what the decay does to the rate")
    above.legend(title=f"over the last {window:.0%}", loc="lower left")
    below.set(xlabel="step", ylabel="weight × window", xlim=(600, t), ylim=(0, 2.7))
    below.set_title("the same as an average: weights of iterates at a constant rate")
    below.plot([], color="0.4", lw=1.1, ls=":", label="read from the 12 blocks of AnyTail()")
    below.legend(loc="upper right")
    save(figure, "decays.svg")


def spark() -> None:
    """The way of rows through Spark: in bundles, by bucket, past the state of each key."""
    figure, axes = plt.subplots(figsize=(WIDE, 4.2), layout="constrained")
    axes.set(xlim=(0, 90), ylim=(0, 42))
    axes.axis("off")
    runs = (ANYTIME, "#f2b705", EXPONENTIAL, ANYTAIL)
    write = {"ha": "center", "va": "center", "fontsize": 9}

    def box(x: float, y: float, width: float, height: float, text: str, colour: str) -> None:
        shape = Rectangle((x, y), width, height, facecolor=colour, edgecolor="0.55", lw=0.8)
        axes.add_patch(shape)
        axes.text(x + width / 2, y + height / 2, text, **write)

    def arrow(x: float, y: float, to_x: float, to_y: float) -> None:
        style = {"arrowstyle": "-|>", "color": "0.35", "lw": 1.1}
        axes.annotate("", (to_x, to_y), (x, y), arrowprops=style)

    def rows(x: float, y: float, keys: tuple[int, ...], average: bool = False) -> None:
        for i, key in enumerate(keys):
            axes.add_patch(Rectangle((x, y - 1.6 * i), 5, 1.2, color=runs[key]))
            if average:
                axes.add_patch(Rectangle((x + 5.2, y - 1.6 * i), 1.6, 1.2, color="0.3"))

    mixed = ((0, 2, 1, 3, 0), (3, 1, 2, 0, 2))
    for y, keys in zip((27, 12), mixed, strict=True):
        rows(2, y + 2, keys)
        arrow(8, y, 12, y)
        box(12, y - 3, 9, 6, "pack", "#e8e8e8")
        buckets = tuple(tuple(key for key in keys if key // 2 == half) for half in (0, 1))
        for bucket, low, end in zip(buckets, (2.6, -3.6), (30, 12), strict=True):
            axes.add_patch(
                Rectangle((24, y + low - 2.6), 6, 5.4, facecolor="white", edgecolor="0.55", lw=0.8)
            )
            rows(24.5, y + low + 1.2, bucket)
            arrow(30.5, y + low, 42, end)
    for y, keys in zip((30, 12), ((0, 1), (2, 3)), strict=True):
        box(42, y - 4, 13, 8, "sort by key\nand order,\naverage", "#e8e8e8")
        arrow(48.5, y - 4, 48.5, y - 6.4)
        arrow(50, y - 6.4, 50, y - 4)
        for i, key in enumerate(keys):
            axes.add_patch(Rectangle((42.5 + 6.2 * i, y - 9), 5.6, 2.4, color=runs[key]))
            axes.text(45.3 + 6.2 * i, y - 7.8, "82 bytes", ha="center", va="center", fontsize=7)
        arrow(55.5, y, 60, y)
        box(60, y - 3, 9, 6, "unpack", "#e8e8e8")
        arrow(69.5, y, 73, y)
        rows(74, y + 2, tuple(sorted((keys * 3)[:5])), average=True)
    for x, text in (
        (4.5, "rows, as\nthey come"),
        (27, "bundles of\nArrow bytes"),
        (48.5, "one task for a bucket of keys;\ntheir states in RocksDB"),
        (77.5, "rows with\ntheir averages"),
    ):
        axes.text(x, 39, text, **write)
    axes.text(36, 34, "shuffle", **write)
    save(figure, "spark.svg")


def plotted() -> None:
    """What `tailavg plot` draws, of a loss that falls under noise that lasts for a while."""
    noise = np.random.default_rng(0).normal(size=4000)
    for t in range(1, len(noise)):
        noise[t] = 0.8 * noise[t - 1] + 0.6 * noise[t]
    steps = np.arange(1, len(noise) + 1)
    losses = 2 + 2 / (1 + steps / 500) + 0.2 * noise
    with TemporaryDirectory() as folder:
        rows = [f"{step},{loss:.6f}\n" for step, loss in zip(steps, losses, strict=True)]
        (Path(folder) / "train.csv").write_text("step,loss\n" + "".join(rows))
        options = "plot train.csv --column loss --windows 0.1,0.25,1000 -o loss.svg"
        command = [sys.executable, "-m", "tailavg", *options.split()]
        subprocess.run(command, cwd=folder, check=True)
        (FOLDER / "plot.svg").write_bytes((Path(folder) / "loss.svg").read_bytes())


def terminal() -> None:
    """What the command in docs/plot.md shows in a terminal, dot by dot: fonts differ in these."""
    command = re.search(r"\$ (seq .*)", (DOCS / "plot.md").read_text())[1]
    command = command.replace("tailavg", f"{shlex.quote(sys.executable)} -m tailavg")
    look = {"COLUMNS": "92", "LINES": "22", "FORCE_COLOR": "1", "COLORTERM": "truecolor"}
    drawn = subprocess.run(
        command, shell=True, check=True, capture_output=True, env=os.environ | look
    )
    lines = Text.from_ansi(drawn.stdout.decode()).split("\n")
    wide, tall, shapes = 9, 18, []
    for row, line in enumerate(lines):
        for column, cell in enumerate(line.plain.rstrip()):
            style = line.get_style_at_offset(Console(), column)
            ink = (
                style.color.get_truecolor().hex
                if style.color
                else "#9aa3ad"
                if style.dim
                else "#e7eaee"
            )
            x, y = 16 + column * wide, 16 + row * tall
            bits = ord(cell) - 0x2800
            if not 0 < bits < 256:
                shapes.append(f'<text x="{x}" y="{y + 14}" fill="{ink}">{escape(cell)}</text>')
                continue
            for bit, (right, down) in enumerate(
                ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))
            ):
                if bits >> bit & 1:
                    at = x + 2.5 + 4.5 * right, y + 2.5 + 4.5 * down
                    shapes.append(f'<circle cx="{at[0]}" cy="{at[1]}" r="1.6" fill="{ink}"/>')
    size = f'width="{92 * wide + 32}" height="{len(lines) * tall + 32}"'
    font = 'font-family="monospace" font-size="15"'
    paper = '<rect width="100%" height="100%" rx="8" fill="#14171c"/>'
    (FOLDER / "terminal.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>\n{paper}\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


DRAWINGS = (
    *(
        plotted,
        terminal,
        memory,
        anytime,
        tutorial,
        weights,
        turns,
        blocks,
        overhead,
        touched,
        decays,
        spark,
    ),
    *(anytime_language_model, trained, reproduction),
)

if __name__ == "__main__":
    for draw in DRAWINGS:
        if not sys.argv[1:] or draw.__name__ in sys.argv[1:]:
            draw()
