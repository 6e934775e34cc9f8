"""Calibration on scikit-learn's digits: the last iterate, a tail average, and samples around it.

    python examples/swag_digits.py [--epochs 30] [--seeds 5] [--samples 20]

A small network trains with SGD at a constant learning rate. The average is over the last half of
the steps. The samples are drawn around it with `sample_parameters`, the diagonal of SWAG (Maddox et
al., 2019), and their predicted probabilities are averaged. The table has, on the test images, the
negative log-likelihood (NLL), the expected calibration error (ECE, 15 bins) and the accuracy, as
means over the seeds. The settings were chosen before the first run, and not changed afterwards.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from tailavg.torch import ParameterAverage

torch.set_num_threads(1)  # a network this small gains nothing from more

TRAINING, BATCH, BINS = 1000, 16, 15  # images; the other 797 are the test set


def run(seed: int, epochs: int, samples: int) -> dict[str, tuple[float, float, float]]:
    """Train once; return NLL, ECE and accuracy of each way to predict."""
    torch.manual_seed(seed)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    images = torch.tensor(images, dtype=torch.float32)[order] / 16
    labels = torch.tensor(labels)[order]
    test = slice(TRAINING, None)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    average = ParameterAverage(model, 0.5, variance=True)
    for _ in range(epochs):
        for batch in torch.randperm(TRAINING).split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            average.update()

    @torch.no_grad()
    def probabilities() -> torch.Tensor:
        return model(images[test]).double().softmax(dim=1)

    predictions = {"last iterate": probabilities()}
    with average.average_parameters():
        predictions["tail average"] = probabilities()
    drawn, generator = [], torch.Generator().manual_seed(seed)
    for _ in range(samples):
        with average.sample_parameters(generator=generator):
            drawn.append(probabilities())
    predictions[f"{samples} samples"] = torch.stack(drawn).mean(dim=0)
    return {name: scores(p, labels[test]) for name, p in predictions.items()}


def scores(probabilities: torch.Tensor, labels: torch.Tensor) -> tuple[float, float, float]:
    """Return the NLL, the ECE and the accuracy of predicted probabilities."""
    nll = functional.nll_loss(probabilities.log(), labels).item()
    confidence, predicted = probabilities.max(dim=1)
    right = (predicted == labels).double()
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, confidence - right)
    return nll, gaps.abs().sum().item() / len(labels), right.mean().item()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=20)
    options = parser.parse_args()
    runs = [run(seed, options.epochs, options.samples) for seed in range(options.seeds)]
    print(f"{options.epochs} epochs; the mean of {options.seeds} run(s)")
    print()
    print(f"{'':14}  {'NLL':>8}  {'ECE, %':>8}  {'accuracy, %':>12}")
    rows = {
        name: torch.tensor([run[name] for run in runs]).mean(dim=0).tolist() for name in runs[0]
    }
    for name, (nll, ece, accuracy) in rows.items():
        print(f"{name:14}  {nll:8.4f}  {100 * ece:8.2f}  {100 * accuracy:12.2f}")
    print()
    for what, column in (("NLL", 0), ("ECE", 1)):
        print(f"The lowest {what}: {min(rows, key=lambda name: rows[name][column])}")


if __name__ == "__main__":
    main()
