"""Average a noisy stream that settles down with every method, and draw the errors.

    python examples/noisy_stream.py [FOLDER]

The truth falls from 2 to 0; the noise has a standard deviation of 1. A good tail average follows
the fall, and averages the noise away once it is over.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt

from tailavg import ExactWindow, Exponential, RawTail, TailAverage

plt.switch_backend("Agg")
plt.style.use("tableau-colorblind10")

STEPS, RUNS, C = 4000, 200, 0.5
AVERAGES = {
    "last sample": TailAverage(1),
    "mean of all": TailAverage(1.0),
    "raw tail": TailAverage(RawTail(C, total=STEPS)),
    "exponential": TailAverage(Exponential(C)),
    "anytime window": TailAverage(C),
    "exact window": TailAverage(ExactWindow(C)),
}


def main(folder: Path) -> None:
    """Average the stream, print the errors and save the picture."""
    rng = np.random.default_rng(0)
    t = np.arange(1, STEPS + 1)
    truth = 2 * np.exp(-t / 200)
    stream = truth[:, None] + rng.normal(size=(STEPS, RUNS))

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    print(f"The last half of {STEPS} samples: distance from the truth at step t, {RUNS} runs\n")
    print(f"{'':16}{'held':>8}" + "".join(f"{'t=' + str(s):>10}" for s in (100, 500, 1000, STEPS)))
    for name, average in AVERAGES.items():
        errors = np.sqrt(np.mean((average.scan(stream) - truth[:, None]) ** 2, axis=1))
        cells = "".join(f"{errors[s - 1]:10.3f}" for s in (100, 500, 1000, STEPS))
        print(f"{name:16}{average.profile().accumulators:8}{cells}")
        axes.loglog(t, errors, label=name, linestyle="--" if name == "exact window" else "-")
    axes.set(xlabel="step t", ylabel="distance from the truth", title="The last half of a stream")
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "noisy_stream.png"
    figure.savefig(path, dpi=120)
    print(f"\nThe picture is in {path.resolve()}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build"))
