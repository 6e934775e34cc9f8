"""Which tail is best? Read every tail of a training run at every epoch, and watch the best move.

    python examples/every_tail.py [--quick] [--epochs 40] [--seeds 5] [--output build/every.csv]

The network of `digits.py` trains with a learning rate that falls to a tenth after 60 % of the run.
One `AnyTail` sees every step; after each epoch, the script reads its tails from 10 % to 100 %, and
`select_tail` picks one. The same runs compare it with:

- tails of a fixed fraction, each with its own average, and the last iterate;
- post-hoc EMA (Karras et al., 2024), as in ema-pytorch: two EMAs, with snapshots of both on disk
  after each epoch, which give EMAs of any width. The script tries widths that match the tails: a
  tail of a fraction c has the relative standard deviation c/√12;
- Two-Tailed Averaging (Melis, 2022), which adapts the length of one tail during training.

797 images are held out. The first 400 are for validation: they choose the tail and the EMA, and
make the decisions of Two-Tailed Averaging. The other 397 are the test set. All weights are tested
with BatchNorm statistics recomputed on the training images. All numbers are means over the runs.
The losses go to a CSV, and a picture of them beside it.
"""

import argparse
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from digits import BATCH, TRAINING, make_network, write
from matplotlib import pyplot as plt
from matplotlib.colors import LogNorm
from sklearn.datasets import load_digits
from style import ANYTAIL, ANYTIME, DARK, EXACT, EXPONENTIAL, LIGHT, OTHERS, RAW, save
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

from tailavg import AnyTail
from tailavg.torch import ParameterAverage, recompute_batchnorm

try:
    from ema_pytorch import PostHocEMA
except ModuleNotFoundError:
    PostHocEMA = None

FRACTIONS = [round(0.05 * i, 2) for i in range(2, 21)]  # 0.1, 0.15, … 1.0
FIXED = {"last 10 %": 0.1, "last 25 %": 0.25, "last 50 %": 0.5, "all steps": 1.0}
SELECTED, LAST, POSTHOC = "selected tail", "last iterate", "post-hoc EMA"
CORE, EXTENDED = "Two-Tailed, Alg. 1", "Two-Tailed, Alg. 2"
STYLES = {
    LAST: {"color": RAW},
    "last 10 %": {"color": LIGHT[ANYTIME]},
    "last 25 %": {"color": ANYTIME},
    "last 50 %": {"color": DARK[ANYTIME]},
    "all steps": {"color": EXACT, "linewidth": 3},
    CORE: {"color": OTHERS[0]},
    EXTENDED: {"color": OTHERS[1]},
    POSTHOC: {"color": EXPONENTIAL, "marker": "s", "markersize": 4, "linestyle": "--"},
    SELECTED: {"color": ANYTAIL, "linewidth": 2.5},
}
VALIDATION = 400  # images
STORED = (0.05, 0.28)  # the widths of the two EMAs, from ema-pytorch's own example
PATIENCE = 3  # evaluations

Losses = Callable[[nn.Module], tuple[float, float]]  # on the validation and on the test images


class Tail:
    """A running mean for `TwoTailed`, with its validation losses so far."""

    def __init__(self, model: nn.Module) -> None:
        self.mean = AveragedModel(model)
        self.reset()

    def reset(self) -> None:
        """Forget everything: the next update is the first."""
        self.mean.n_averaged.zero_()
        self.losses: list[float] = []

    @property
    def stagnates(self) -> bool:
        """Whether none of the newest losses is lower than all earlier ones."""
        before, newest = self.losses[:-PATIENCE], self.losses[-PATIENCE:]
        return bool(before) and min(newest) >= min(before)


class TwoTailed:
    """Two-Tailed Averaging: both algorithms of the paper (arXiv 2209.12581).

    Every iterate goes into two running means, a long one and a short one; the long one is used. At
    each evaluation, once an epoch, if the short one is at least as good, it becomes the long one,
    and the other is reset. This is Algorithm 1.

    Algorithm 2, `extended`, is what the paper recommends in practice. There the short one also
    replaces a long one that stagnates; otherwise it is reset if it stagnates itself. The last
    iterate is used if it is better; if the long one has seen only one epoch by then, both are
    reset. A mean stagnates if it does not improve "for a few evaluations". We take three, from the
    paper's figure of a new basin that is entered at 40 and noticed at 43.
    """

    def __init__(self, model: nn.Module, period: int, extended: bool) -> None:
        self.model, self.period, self.extended = model, period, extended
        self.short, self.long = Tail(model), Tail(model)

    def update(self) -> None:
        """Add the model's weights to both means."""
        self.short.mean.update_parameters(self.model)
        self.long.mean.update_parameters(self.model)

    def adapt(self, losses: Losses) -> nn.Module:
        """Evaluate, decide, and return the network to use."""
        for tail in (self.short, self.long):
            tail.losses.append(losses(tail.mean.module)[0])
        better = self.short.losses[-1] <= self.long.losses[-1]
        if better or (self.extended and self.long.stagnates):
            self.short, self.long = self.long, self.short
            self.short.reset()
        elif self.extended and self.short.stagnates:
            self.short.reset()
        if self.extended and losses(self.model)[0] <= self.long.losses[-1]:
            if self.long.mean.n_averaged == self.period:
                self.short.reset()
                self.long.reset()
            return self.model
        return self.long.mean.module


def copies(average: ParameterAverage) -> int:
    """How many copies of the weights an average keeps."""
    return len(average.state_dict()["blocks"]) + 1  # and a sum


def best_synthesized(posthoc: "PostHocEMA", losses: Losses) -> float:
    """The test loss of the best EMA that the snapshots so far can give."""
    tried = [
        losses(posthoc.synthesize_ema_model(sigma_rel=fraction / math.sqrt(12)).ema_model)
        for fraction in FRACTIONS
    ]
    return min(tried)[1]


def run(seed: int, epochs: int, drop: int, folder: str) -> tuple[np.ndarray, dict, dict]:
    """Train once.

    Returns:
        The test loss by epoch and fraction; the test loss by method after each epoch; and the cost
        by method: copies of the weights in memory and on disk, and evaluations.
    """
    torch.manual_seed(seed)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 16
    labels = torch.tensor(labels)[order]
    steps = -(-TRAINING // BATCH)

    model = make_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.005)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=drop, gamma=0.1)
    average = ParameterAverage(model, AnyTail(12))
    fixed = {name: ParameterAverage(model, fraction) for name, fraction in FIXED.items()}
    for one in (average, *fixed.values()):
        one.attach(optimizer)  # from now on, every step counts
    twotailed = {
        CORE: TwoTailed(model, steps, extended=False),
        EXTENDED: TwoTailed(model, steps, extended=True),
    }
    posthoc = PostHocEMA and PostHocEMA(
        model,
        sigma_rels=STORED,
        update_every=1,
        checkpoint_every_num_steps=steps,
        checkpoint_folder=folder,
        checkpoint_dtype=torch.float32,
    )

    def losses(network: nn.Module) -> tuple[float, float]:
        recompute_batchnorm(network, images[:TRAINING].split(250))
        network.eval()
        with torch.no_grad():
            outputs = network(images[TRAINING:])
        network.train()
        each = functional.cross_entropy(outputs, labels[TRAINING:], reduction="none")
        return each[:VALIDATION].mean().item(), each[VALIDATION:].mean().item()

    tested: list[float] = []

    def evaluate() -> float:  # chooses on the validation images; the test loss is only recorded
        validation, test = losses(model)
        tested.append(test)
        return validation

    tails = np.empty((epochs, len(FRACTIONS)))
    methods = (SELECTED, *FIXED, LAST, *twotailed, *([POSTHOC] if posthoc else []))
    test = {name: np.full(epochs, np.nan) for name in methods}
    for epoch in range(epochs):
        for batch in torch.randperm(TRAINING).split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            for two in twotailed.values():
                two.update()
            if posthoc:
                posthoc.update()
        scheduler.step()

        tested.clear()
        found = average.select_tail(evaluate, FRACTIONS)
        tails[epoch] = tested
        test[SELECTED][epoch] = tested[FRACTIONS.index(found.window)]
        for name, one in fixed.items():
            with one.average_parameters():
                test[name][epoch] = losses(model)[1]
        test[LAST][epoch] = losses(model)[1]
        for name, two in twotailed.items():
            test[name][epoch] = losses(two.adapt(losses))[1]
        # it reads all its files for each EMA, so not at every epoch
        if posthoc and (epoch + 1 in (drop, epochs) or (epoch + 1) % 8 == 0):
            test[POSTHOC][epoch] = best_synthesized(posthoc, losses)

    took = {
        SELECTED: (copies(average), 0, len(FRACTIONS)),
        **{name: (copies(one), 0, 0) for name, one in fixed.items()},
        LAST: (0, 0, 0),
        CORE: (2, 0, 2 * epochs),
        EXTENDED: (2, 0, 3 * epochs),
        POSTHOC: (len(STORED), len(list(Path(folder).iterdir())), len(FRACTIONS)),
    }
    return tails, test, took


def print_table(test: dict[str, list[np.ndarray]], took: dict, drop: int) -> None:
    """Print each method's loss and cost; a star marks the lowest loss of a column."""
    epochs = len(test[LAST][0])
    shown = [drop - 1, epochs - 1]
    ends = np.array([[one[-1] for one in runs] for runs in test.values()])
    won = dict(zip(test, np.bincount(ends.argmin(axis=0), minlength=len(test)), strict=True))
    means = {name: np.mean(runs, axis=0)[shown] for name, runs in test.items()}
    stars = np.min(list(means.values()), axis=0)
    print(
        "test loss".ljust(18)
        + "".join(f"{f'epoch {epoch + 1}':>11}" for epoch in shown)
        + "   runs won   in memory   on disk   evaluations"
    )
    for name, values in means.items():
        line = f"{name:18}"
        for value, star in zip(values, stars, strict=True):
            line += f"{value:10.4f}" + ("*" if value == star else " ")
        memory, disk, evaluations = took[name]
        print(f"{line}{won[name]:11}{memory:12}{disk:10}{evaluations:14}")
    print("\nin memory, on disk: copies of the weights, while training")
    print("evaluations: on the validation images, to choose the weights of the last epoch")
    print(f"The lowest loss at epoch {epochs}: {min(means, key=lambda name: means[name][-1])}\n")


def draw(losses: dict[str, np.ndarray], path: Path) -> None:
    """Save the picture: every tail on the left, the methods on the right."""
    tails = np.array([losses[f"{fraction:.0%}"] for fraction in FRACTIONS]).T
    epochs = np.arange(1, len(tails) + 1)
    drop = drop_of(len(tails))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.4), layout="constrained")

    relative = tails / tails.min(axis=1, keepdims=True)
    colors = left.pcolormesh(
        epochs, FRACTIONS, relative.T, norm=LogNorm(1, 1.6), cmap="viridis", rasterized=True
    )
    bar = figure.colorbar(colors, ax=left, extend="max", ticks=[1, 1.1, 1.2, 1.4, 1.6])
    bar.ax.minorticks_off()
    bar.ax.yaxis.set_major_formatter("{x:g}")
    bar.set_label("test loss over the lowest of its epoch")
    best = np.array(FRACTIONS)[tails.argmin(axis=1)]
    left.plot(epochs, best, "o", color="white", markeredgecolor="black", markersize=5, label="best")
    since = epochs[epochs > drop]
    left.plot(since, 1 - drop / since, color="white", linestyle="--", label="all since the drop")
    left.set(title="Every tail, after each epoch", ylabel="fraction of the steps so far")
    left.set_ylim(0.075, 1.025)
    left.grid(visible=False)
    left.set_yticks([0.1, 0.25, 0.5, 0.75, 1.0])
    left.legend(facecolor="0.75", frameon=True, loc="upper left")

    for name, style in STYLES.items():
        if name in losses:
            there = ~np.isnan(losses[name])
            right.semilogy(epochs[there], losses[name][there], label=name, **style)
    right.set(title="Methods, in the same runs", ylabel="test loss", ylim=(0.025, 0.5))
    right.set_yticks([0.03, 0.04, 0.06, 0.1, 0.2, 0.4])
    right.minorticks_off()
    right.yaxis.set_major_formatter("{x:g}")
    right.legend(ncols=2)
    right.annotate(
        "learning rate / 10",
        (drop + 0.5, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
    )
    for panel, color in ((left, "white"), (right, "black")):
        panel.set_xlabel("epoch")
        panel.axvline(drop + 0.5, color=color, linestyle=":", linewidth=1)
    save(figure, path)


def drop_of(epochs: int) -> int:
    """The last epoch at the first learning rate."""
    return max(1, round(0.6 * epochs))


def main() -> None:
    """Run every seed, print the table and save the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5, help="runs to average")
    parser.add_argument("--output", type=Path, default=Path("build/every.csv"))
    parser.add_argument("--quick", action="store_true", help="3 epochs and one seed")
    options = parser.parse_args()
    epochs, seeds = (3, 1) if options.quick else (options.epochs, options.seeds)
    drop = drop_of(epochs)

    results = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:  # for the snapshots of post-hoc EMA
            results.append(run(seed, epochs, drop, folder))
    tails, tests, (took, *_) = zip(*results, strict=True)
    test = {name: [one[name] for one in tests] for name in tests[0]}
    print(
        f"{epochs} epochs of {-(-TRAINING // BATCH)} steps, learning rate 0.1, from epoch "
        f"{drop + 1} on 0.01; the mean of {seeds} run(s)"
    )
    if PostHocEMA is None:
        print("ema-pytorch is not installed: post-hoc EMA is left out")
    print()
    print_table(test, took, drop)
    losses = {name: np.mean(runs, axis=0) for name, runs in test.items()}
    each = np.mean(tails, axis=0).T
    losses |= {f"{fraction:.0%}": row for fraction, row in zip(FRACTIONS, each, strict=True)}
    write(losses, options.output)
    draw(losses, options.output.with_suffix(".svg"))
    print(f"The losses and their picture are in {options.output.resolve().parent}")


if __name__ == "__main__":
    main()
