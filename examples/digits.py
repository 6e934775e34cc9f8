"""Train a small network on scikit-learn's digits, and test every average at every epoch.

    python examples/digits.py [--quick] [--epochs 40] [--seeds 5] [--output build/digits.csv]

SGD with momentum, weight decay and a constant learning rate soon gets near the answer, then jumps
around it. The script compares the last iterate, torch's averages (exponential moving averages with
three decays, and SWA, the mean of all iterates in the second half of the run) and tail averages.
All see every step. Each is tested with BatchNorm statistics recomputed on the training images. A
star marks the lowest loss and the highest accuracy of a column. The losses go to a CSV, and a
picture of them beside it.
"""

import argparse
import csv
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from style import ANYTIME, DARK, EXACT, EXPONENTIAL, LIGHT, RAW, save
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tailavg.torch import ParameterAverage, recompute_batchnorm

torch.set_num_threads(1)  # a network this small gains nothing from more

DECAYS = {f"EMA {decay}": decay for decay in (0.9, 0.99, 0.999)}
TAILS = {"last 10 %": 0.1, "last 25 %": 0.25, "last 50 %": 0.5, "last 500 steps": 500}
STYLES = {
    "last iterate": {"color": RAW},
    "EMA 0.9": {"color": LIGHT[EXPONENTIAL]},
    "EMA 0.99": {"color": EXPONENTIAL},
    "EMA 0.999": {"color": DARK[EXPONENTIAL]},
    "SWA": {"color": EXACT, "linewidth": 3},
    "last 10 %": {"color": LIGHT[ANYTIME]},
    "last 25 %": {"color": ANYTIME, "linewidth": 2.2},
    "last 50 %": {"color": DARK[ANYTIME]},
    "last 500 steps": {"color": ANYTIME, "linestyle": "--", "linewidth": 1.2},
}
TRAINING, BATCH = 1000, 16  # images; the other 797 are the test set


def make_network() -> nn.Module:
    """Two convolutions with BatchNorm and a linear layer: 6,138 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)),
        *(nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)),
        *(nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )


def run(seed: int, epochs: int) -> dict[str, np.ndarray]:
    """Train once; return each method's test loss and accuracy after each epoch."""
    torch.manual_seed(seed)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 16
    labels = torch.tensor(labels)[order]
    training, test = slice(TRAINING), slice(TRAINING, None)

    model = make_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.005)
    emas = {
        name: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        for name, decay in DECAYS.items()
    }
    swa = AveragedModel(model)
    tails = {name: ParameterAverage(model, window) for name, window in TAILS.items()}
    for average in tails.values():
        average.attach(optimizer)  # from now on, every step counts

    def score(tested: nn.Module) -> tuple[float, float]:
        recompute_batchnorm(tested, images[training].split(250))
        tested.eval()
        with torch.no_grad():
            outputs = tested(images[test])
        tested.train()
        right = outputs.argmax(dim=1) == labels[test]
        return functional.cross_entropy(outputs, labels[test]).item(), right.double().mean().item()

    scores = {
        name: np.full((epochs, 2), np.nan) for name in ("last iterate", *DECAYS, "SWA", *TAILS)
    }
    for epoch in range(epochs):
        for batch in torch.randperm(TRAINING).split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            for ema in emas.values():
                ema.update_parameters(model)
            if epoch >= epochs // 2:
                swa.update_parameters(model)

        scores["last iterate"][epoch] = score(model)  # training ignores the statistics
        for name, ema in emas.items():
            scores[name][epoch] = score(ema.module)
        if epoch >= epochs // 2:
            scores["SWA"][epoch] = score(swa.module)
        for name, average in tails.items():
            with average.average_parameters():
                scores[name][epoch] = score(model)
    return scores


def print_table(title: str, rows: dict[str, np.ndarray], best: str, digits: int) -> None:
    """Print rows at some epochs, and their means over the second half of the run."""
    epochs = len(next(iter(rows.values())))
    shown = sorted({1, *(max(1, epochs // n) for n in (8, 4, 2, 1))})
    cells = {
        name: [*row[[epoch - 1 for epoch in shown]], row[epochs // 2 :].mean()]
        for name, row in rows.items()
    }
    stars = getattr(np, f"nan{best}")(list(cells.values()), axis=0)
    print(f"{title:16}" + "".join(f"{f'epoch {epoch}':>11}" for epoch in shown) + "   second half")
    for name, values in cells.items():
        line = f"{name:16}"
        for value, star, width in zip(values, stars, [10] * len(shown) + [13], strict=True):
            text = "–" if np.isnan(value) else f"{value:.{digits}f}"
            line += f"{text:>{width}}" + ("*" if value == star else " ")
        print(line.rstrip())
    print()


def write(losses: dict[str, np.ndarray], path: Path) -> None:
    """Keep the losses: a column for each method, a row for each epoch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(losses)
        rows.writerows(
            [f"{loss:.5f}" for loss in row] for row in zip(*losses.values(), strict=True)
        )


def read(path: Path) -> dict[str, np.ndarray]:
    """The losses of such a file."""
    with path.open(newline="", encoding="utf-8") as file:
        names, *rows = csv.reader(file)
    return dict(zip(names, np.array(rows, dtype=float).T, strict=True))


def draw(losses: dict[str, np.ndarray], path: Path) -> None:
    """Save the picture: torch's averages on the left, tail averages on the right."""
    epochs = np.arange(1, len(losses["last iterate"]) + 1)
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 4), sharey=True, layout="constrained")
    for panel, title, names in (
        (panels[0], "EMA and SWA", ("last iterate", *DECAYS, "SWA", "last 25 %")),
        (panels[1], "Tail averages", ("last iterate", *TAILS)),
    ):
        for name in names:
            panel.loglog(epochs, losses[name], label=name, **STYLES[name])
        panel.set(title=title, xlabel="epoch")
        panel.set_xticks([n for n in (1, 2, 5, 10, 20, 40, 100) if n <= len(epochs)])
        panel.set_yticks([0.03, 0.1, 0.3, 1])
        panel.minorticks_off()
        panel.xaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.legend()
    panels[0].set_ylabel("test loss")
    save(figure, path)


def main() -> None:
    """Run every seed, print the tables and save the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5, help="runs to average")
    parser.add_argument("--output", type=Path, default=Path("build/digits.csv"))
    parser.add_argument("--quick", action="store_true", help="6 epochs and one seed")
    options = parser.parse_args()
    epochs, seeds = (6, 1) if options.quick else (options.epochs, options.seeds)

    runs = [run(seed, epochs) for seed in range(seeds)]
    scores = {name: np.mean([one[name] for one in runs], axis=0) for name in runs[0]}
    losses = {name: values[:, 0] for name, values in scores.items()}
    print(f"{epochs} epochs of {-(-TRAINING // BATCH)} steps; the mean of {seeds} run(s)\n")
    print_table("test loss", losses, best="min", digits=4)
    accuracies = {name: 100 * values[:, 1] for name, values in scores.items()}
    print_table("test accuracy, %", accuracies, best="max", digits=2)
    write(losses, options.output)
    draw(losses, options.output.with_suffix(".svg"))
    print(f"The losses and their picture are in {options.output.resolve().parent}")


if __name__ == "__main__":
    main()
