"""The paper's other strategy: give the newest block as much weight as the variance allows.

    python examples/newest_block.py

Prints the weighted mean age of the samples and the oldest age, for a fixed window over one turn of
the blocks, with that strategy and with ours, which gives the oldest block the least weight. Both
have the variance of k samples at every step.
"""

import numpy as np

from tailavg import AnytimeWindow, TailAverage
from tailavg.core.equation import read

K, STEPS = 600, 6000


def newest_block_weights(sizes: list[int], k: int) -> np.ndarray:
    """The weight of each sample, oldest first: the newest block against all older ones pooled."""
    sizes = [sum(sizes[:-1]), sizes[-1]]
    return np.concatenate(
        [np.full(n, weight / n) for n, weight in zip(sizes, read(sizes, k), strict=True) if n]
    )


def main() -> None:
    """Print a table."""
    print(f"fixed window, k = {K}: ages over one turn, as fractions of k\n")
    print(f"{'':14}{'least to the oldest':>28}{'most to the newest':>28}")
    print(f"{'accumulators':14}" + f"{'mean age':>14}{'oldest age':>14}" * 2)
    for accumulators in (2, 3, 4, 6):
        average = TailAverage(AnytimeWindow(K, accumulators))
        average.update_many(np.zeros(STEPS))
        ages = []
        for _ in range(K // (accumulators - 1)):
            average.update(0.0)
            profile = average.profile()
            starts = average.state_dict()["starts"]
            weights = newest_block_weights(np.diff([*starts, average.count]).tolist(), K)
            assert np.isclose(1 / np.sum(weights**2), K)
            age = np.arange(len(weights))[::-1]
            held = age[weights > 0].max()
            ages.append([profile.mean_age, profile.oldest_age, weights @ age, held])
        mean, oldest = np.mean(ages, axis=0) / K, np.max(ages, axis=0) / K
        print(f"{accumulators:<14}{mean[0]:14.3f}{oldest[1]:14.3f}{mean[2]:14.3f}{oldest[3]:14.3f}")


if __name__ == "__main__":
    main()
