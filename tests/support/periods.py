"""The average over a period of time, from explicit lists of samples.

It shares no code with the library. Times are whole nanoseconds.
"""

import numpy as np

SECOND = 10**9


def times_of(rows: int, kind: str = "random", seed: int = 0) -> np.ndarray:
    """Times in one hour, in whole seconds, with ties: random, or in bursts."""
    rng = np.random.default_rng(seed)
    if kind == "bursts":
        starts = np.repeat(rng.uniform(0, 3600, -(-rows // 20)), 20)[:rows]
        seconds = starts + rng.exponential(5, rows)
    else:
        seconds = rng.uniform(0, 3600, rows)
    return np.sort(seconds).astype(np.int64) * SECOND


def weights_after_each(times, period: int, accumulators: int = 3) -> np.ndarray:
    """Row t has the weights of all samples after sample t."""
    parts, blocks = accumulators - 1, []  # lists of indices, oldest first
    matrix = np.zeros((len(times), len(times)))
    times = [int(time) for time in times]
    for now, time in enumerate(times):
        if not blocks or (time - times[blocks[-1][0]]) * parts >= period:
            blocks.append([])
        blocks[-1].append(now)
        since, k, used = time - period, 0.0, []
        for block in reversed(blocks):
            first, last = times[block[0]], times[block[-1]]
            if last <= since:
                break
            used.insert(0, block)
            if first <= since:
                k += (len(block) - 1) * (last - since) / (last - first)
                break
            k += len(block)
        old, new = used[0], [sample for block in used[1:] for sample in block]
        if not new or len(old) + len(new) - k < 1e-9:
            matrix[now, old + new] = 1 / (len(old) + len(new))
            continue
        # the smaller g with g²/old + (1 - g)²/new = 1/k
        a, b, c = 1 / len(old) + 1 / len(new), -2 / len(new), 1 / len(new) - 1 / k
        g = (-b - np.sqrt(b * b - 4 * a * c)) / (2 * a)
        matrix[now, old], matrix[now, new] = g / len(old), (1 - g) / len(new)
    return matrix
