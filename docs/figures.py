"""Draw the figures of the documentation, with the library: `make figures`."""

from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt

from tailavg import AnytimeWindow, ExactWindow, Exponential, TailAverage

plt.switch_backend("Agg")
plt.style.use("tableau-colorblind10")
plt.rcParams["svg.hashsalt"] = "tailavg"  # the same file from the same data

FOLDER = Path(__file__).parent / "figures"


def average(rule: object, t: int) -> TailAverage:
    """An average that has seen t samples."""
    made = TailAverage(rule)
    made.update_many(np.zeros(t))
    return made


def save(figure: plt.Figure, name: str) -> None:
    """Write a figure as SVG, without a date in it."""
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / name, metadata={"Date": None})


def weights() -> None:
    """What each sample weighs at one step, for every method."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for panel, window, t, title in (
        (panels[0], 200, 1050, "the last 200, at t = 1050"),
        (panels[1], 0.25, 1150, "the last quarter, at t = 1150"),
    ):
        for rule, name, style in (
            (ExactWindow(window), "exact window", "-"),
            (AnytimeWindow(window, 2), "anytime, 2 accumulators", "--"),
            (AnytimeWindow(window, 3), "anytime, 3 accumulators", "-"),
            (Exponential(window), "exponential", ":"),
        ):
            alpha = average(rule, t).weights()
            panel.plot(np.arange(len(alpha))[::-1], 1000 * alpha, style, label=name)
        panel.set(title=title, xlabel="age of the sample", xlim=(-20, 620))
    panels[0].set_ylabel("weight, thousandths")
    panels[0].legend()
    save(figure, "weights.svg")


def turns() -> None:
    """How far back a growing window reaches, under both kinds of turns."""
    figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
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
            axes.semilogx(steps, reach, label=f'turns="{kind}"')
    axes.axhline((1 - 0.75**1.5) / 0.25, color="0.6", linestyle=":", label="the bound of balanced")
    axes.set(xlabel="step t", ylabel="samples touched / ct", title="c = 0.25, three accumulators")
    axes.set(xlim=(100, 3000), ylim=(0.95, 2.0))
    axes.legend(loc="upper right", ncols=3)
    save(figure, "turns.svg")


if __name__ == "__main__":
    weights()
    turns()
