"""How many digits a float32 average keeps over a million samples.

    python examples/float32.py

Prints the largest relative error of the mean of all samples so far, against float64, for the usual
ways to keep a running mean and for `TailAverage(1.0)` with float32 accumulators.
"""

import numpy as np

from tailavg import TailAverage

STEPS = 10**6


def main() -> None:
    """Print a table."""
    rng = np.random.default_rng(0)
    columns = {
        "constant 0.1": np.full(STEPS, 0.1),
        "slow random walk": 1 + np.cumsum(rng.normal(size=STEPS)) * 1e-6,
        "1 + noise / 1000": 1 + 1e-3 * rng.normal(size=STEPS),
        "noise around 1": rng.normal(1, 1, STEPS),
    }
    xs = np.stack(list(columns.values()), axis=1).astype(np.float32)
    truth = np.cumsum(xs, axis=0, dtype=np.float64) / np.arange(1, STEPS + 1)[:, None]

    average = TailAverage(1.0)
    running, total = np.zeros_like(xs[0]), np.zeros_like(xs[0])
    worst = np.zeros((3, len(columns)))
    for t, x in enumerate(xs, start=1):
        running += (x - running) / np.float32(t)
        total += x
        average.update(x)
        if t % 1000 == 0:
            values = np.array([running, total / np.float32(t), average.value()], np.float64)
            worst = np.maximum(worst, np.abs(values / truth[t - 1] - 1))
    print(f"{'':20}" + "".join(f"{name:>18}" for name in columns))
    for name, row in zip(("running mean", "sum / count", "tailavg"), worst, strict=True):
        print(f"{name:20}" + "".join(f"{error:18.1e}" for error in row))


if __name__ == "__main__":
    main()
