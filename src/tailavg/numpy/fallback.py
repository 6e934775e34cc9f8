"""Scans by array operations, for machines without numba and for readings that weigh blocks by age.

The results equal those of `tailavg.numpy.kernel` up to rounding. Samples are the rows of a matrix,
and so are the means of blocks. The state of a row of a `Table`, which the `variances` and `squares`
are part of, is changed in place. Without `variance=True`, these two are empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tailavg.core.clock import (
    BlockClock,
    DecayClock,
    ElapsedClock,
    SampleClock,
    factors,
)
from tailavg.core.elapsed import Counted
from tailavg.core.equation import weights
from tailavg.core.readings import ByAge
from tailavg.core.rules import AnyTail
from tailavg.core.windows import Window
from tailavg.numpy.arithmetic import (
    MEAN,
    Array,
    Statistic,
    centred,
    joined,
    joined_variance,
    merged_variance,
    wide,
)

__all__ = ["scan_blocks", "scan_decaying", "scan_exact", "scan_exact_spread"]

CHUNK = 1 << 16
"""How many numbers are scanned at a time: few enough for the cache."""

_SMALLEST = 2.0**-32  # the smallest scale in a chunk: float64 has digits to spare


def block_weights(
    blocks: Sequence[int], steps: Array, window: Window | ByAge
) -> tuple[Array, list[tuple[int, Any, Array]]]:
    """Return the weight of a sample of the open block at each step, and those of closed blocks.

    The closed blocks are a list of tuples, oldest first: the block, the indices of the steps at
    which it has a weight, and its weights at these steps. A block without a weight is left out,
    since 0 times NaN is NaN.
    """
    ends, k = blocks[1:], window.size(steps)
    if isinstance(window, ByAge):
        ages = np.stack([*(steps - start for start in blocks), np.zeros(len(steps))])
        *closed, opened = window.of_ages(ages, np.minimum(steps, k))
        used = [(block, np.flatnonzero(weight)) for block, weight in enumerate(closed)]
        each = opened / (steps - blocks[-1])
        return each, [(block, where, closed[block][where]) for block, where in used]
    each, of_closed, begin = np.empty(len(steps)), [], 0
    for oldest in range(len(blocks)):  # the oldest block that has a weight
        end = len(steps)
        if oldest < len(ends):
            end = int(np.searchsorted(steps - k, ends[oldest]))
        if begin == end:
            continue
        now = slice(begin, end)
        first = ends[oldest] if oldest < len(ends) else blocks[-1]  # the start of the newer samples
        old, new = first - blocks[oldest], steps[now] - first
        each[now], of_old = weights(old, new, np.maximum(0.0, old + new - k[now]), np.sqrt)
        if old:
            of_closed.append((oldest, now, of_old))
        newer = [block for block in range(oldest + 1, len(ends)) if ends[block] > blocks[block]]
        of_closed += [(block, now, each[now] * (ends[block] - blocks[block])) for block in newer]
        begin = end
    return each, of_closed


def scan_blocks(
    clock: BlockClock,
    state: tuple[Array, Array, Array, Array],
    xs: Array,
    out: Array,
    window: Any,
    statistic: Statistic,
) -> None:
    """Scan samples in blocks, and advance the clock. Equal blocks are scanned together.

    `state` is the means, the sums, the variances and the squares. For an `ElapsedClock`, `window`
    is the times of the samples.
    """
    means, sums, variances, squares = state
    dtype, width, last, done = wide(means.dtype), xs.shape[1], len(means) - 1, 0
    total, total_squares = sums.astype(dtype), squares.astype(dtype)
    while done < len(xs):
        if isinstance(clock, ElapsedClock):
            clock.arrive(int(window[done]))
        total, total_squares = _close(clock, means, variances, total, total_squares)
        t, blocks = clock.count, clock.blocks
        most = max(1, CHUNK // max(1, width))
        n, many = min(clock.closes - t, len(xs) - done, most), 1
        if t == blocks[-1] and n == clock.closes - t:
            many = _repeats(clock, window, min(len(xs) - done, 8 * most))
        reading = window
        if isinstance(clock, ElapsedClock):
            times = window[done : done + n]
            n, many = int(np.searchsorted(times, clock.until)), 1
            reading = Counted(clock.counts(times[:n]))
        steps = t + np.arange(1.0, n + 1.0)
        each, of_closed = block_weights(blocks, steps, reading)
        x = xs[done : done + many * n].reshape(many, n, width)
        running = np.cumsum(x, axis=1, dtype=dtype)
        running[0] += total
        averages = each[:, None] * running
        if clock.folded > blocks[-1]:
            averages += (each * (clock.folded - blocks[-1]))[:, None] * means[last]
        # the means of the closed blocks, then of these blocks; each uses the means before its own
        closed = np.concatenate([means[:last].astype(dtype), running[:-1, -1] / n])
        for block, where, weight in of_closed:
            averages[:, where] += weight[:, None] * closed[block : block + many, None]
        if len(squares):
            shifts = x[:, 0].astype(dtype)  # the first sample of each block
            if t > blocks[-1]:
                shifts[0] = means[last]
            apart = x - shifts[:, None]
            running_squares = np.cumsum(apart * apart, axis=1)
            running_squares[0] += total_squares
            within = running_squares[:-1, -1] / n - (running[:-1, -1] / n - shifts[:-1]) ** 2
            closed_variances = np.concatenate([variances[:last], np.maximum(within, 0.0)])
            total_squares = running_squares[-1, -1]
            if statistic.of != MEAN:
                in_sum = each * (steps - clock.folded)
                first = each[:, None] * running - in_sum[:, None] * shifts[:, None]
                second = each[:, None] * running_squares
                if clock.folded > blocks[-1]:
                    second += (each * (clock.folded - blocks[-1]))[:, None] * variances[last]
                weights_squared = each * each * (steps - blocks[-1])
                for block, where, weight in of_closed:
                    moved = closed[block : block + many] - shifts
                    spread = closed_variances[block : block + many] + moved * moved
                    first[:, where] += weight[:, None] * moved[:, None]
                    second[:, where] += weight[:, None] * spread[:, None]
                    weights_squared[where] += weight * weight / (blocks[block + 1] - blocks[block])
                variance = centred(first, second, shifts[:, None], means.dtype)
                averages = statistic.of_spread(variance, weights_squared[:, None])
            variances[:last] = closed_variances[many - 1 :]
            if clock.folded == blocks[-1]:
                means[last] = shifts[-1]
        out[done : done + many * n] = averages.reshape(many * n, width)
        means[:last], total = closed[many - 1 :], running[-1, -1]
        done += many * n
        if many > 1:
            clock.advance(t + many * n)
        clock.count = t + many * n
        if isinstance(clock, ElapsedClock):
            clock.lasts = [*clock.lasts[:-1], int(times[n - 1])]
        clock.folded = max(clock.folded, clock.blocks[-1])
        if clock.overfull:
            total, total_squares = _fold(clock, means, variances, total, total_squares)
    clock.resume(*clock.step)
    sums[:], squares[:] = total, total_squares


def _fold(
    clock: BlockClock, means: Array, variances: Array, total: Array, squares: Array
) -> tuple[Array, Array]:
    """Fold the sums into the newest mean and variance. Return the rounding errors."""
    how = clock.fold()
    if len(squares):
        variances[-1], lost = joined_variance(means[-1], variances[-1], total, squares, *how)
        squares = np.zeros_like(squares) + lost
    means[-1], total = joined(means[-1], total, *how)
    return total, squares


def _close(
    clock: BlockClock, means: Array, variances: Array, total: Array, squares: Array
) -> tuple[Array, Array]:
    """Close the open block if it is full. Return the sums over the samples that are in no mean."""
    if clock.count < clock.closes:
        return total, squares
    if clock.count > clock.folded:
        _fold(clock, means, variances, total, squares)
    turn = clock.turn()
    if turn is not None:
        gone, weight = turn
        if weight:
            if len(squares):
                blocks = means[gone - 1], variances[gone - 1], means[gone], variances[gone]
                variances[gone - 1] = merged_variance(*blocks, weight)
            means[gone - 1] = means[gone - 1] * (1.0 - weight) + means[gone] * weight
        for moments in (means, variances) if len(squares) else (means,):
            moments[gone:-1] = moments[gone + 1 :]
            moments[-1] = 0.0
    return np.zeros_like(total), np.zeros_like(squares)


def _repeats(clock: BlockClock, window: Window | ByAge, most: int) -> int:
    """Return how many of the next blocks, in `most` samples, have equal sizes and weights."""
    if isinstance(clock.rule, AnyTail):
        return 1
    size, until = clock.alike()
    many = min((until - clock.count) // size + 1, most // size) if size else 1
    steady = window.size(clock.count + 1) == window.size(clock.count + max(1, many) * max(1, size))
    return max(1, many) if steady else 1


def scan_decaying(
    clock: DecayClock,
    mean: Array,
    variance: Array,
    xs: Array,
    out: Array | None,
    statistic: Statistic,
    dtype: np.dtype[Any],
) -> tuple[Array, Array]:
    """Scan an exponential average that begins with `mean`. Return the last average.

    Samples are summed with factors, as in `DecayClock`, in chunks as long as float64 allows. The
    result also has the last variance, or an empty array if `variance` is empty. The accumulators
    have the `dtype`.
    """
    rule, t, done = clock.rule, clock.count, 0
    chunk = max(1, CHUNK // max(1, xs.shape[1]))
    while done < len(xs):
        most = min(chunk, len(xs) - done)
        if rule.size(t + done + 1) == 1.0:  # a window of one sample: the average is the sample
            ones = rule.size(np.arange(t + done + 1, t + done + most + 1)) == 1.0
            n = most if ones.all() else int(ones.argmin())
            averages = xs[done : done + n] if out is not None else xs[done + n - 1 : done + n]
            variances = np.zeros((len(averages), len(variance)))
        else:
            decay, *both = factors(rule, t + done, most, _SMALLEST)
            factor, scale = (values[:, None] for values in both)
            n = len(scale)
            x = xs[done : done + n]
            start = decay * mean if decay else 0.0  # 0 times NaN is NaN
            if out is not None:
                averages = scale * (start + np.cumsum(factor * x, axis=0))
            else:
                averages = scale[-1:] * (start + factor.T @ x)
            if len(variance):
                shift = mean if t + done else x[0].astype(mean.dtype)
                # with half of the scale in each factor, squares overflow or vanish last
                half = math.sqrt(_SMALLEST)
                squares = scale / half * np.cumsum(factor * half * (x - shift) ** 2, axis=0)
                squares += scale * (decay * variance if decay else 0.0)
                squares = squares[-len(averages) :]
                variances = centred(averages - shift, squares, shift, dtype)
        if out is not None and statistic.of == MEAN:
            out[done : done + n] = averages
        elif out is not None:
            steps = t + done + np.arange(1.0, n + 1.0)
            size = np.minimum(steps, rule.size(steps))[:, None]
            out[done : done + n] = statistic.of_spread(variances, 1.0 / size)
        mean = averages[-1].astype(mean.dtype)
        variance = variances[-1] if len(variance) else variance
        done += n
    return mean, variance


def scan_exact_spread(
    clock: SampleClock, before: Array, xs: Array, out: Array, statistic: Statistic
) -> None:
    """Scan the variances of exact windows, as `scan_exact` scans their means."""
    means = np.concatenate([before, xs]).astype(wide(out.dtype))
    squares = np.zeros_like(means)  # summed squared deviations from the means
    lengths = clock.rule.samples(np.arange(clock.count + 1, clock.count + len(xs) + 1))
    ends = np.arange(len(before), len(means))
    sizes = np.zeros((len(xs), 1))
    mean, square = np.zeros((2, len(xs), xs.shape[1]), means.dtype)
    run = 1
    while run <= lengths.max():
        w = np.flatnonzero(lengths & run)
        apart = means[ends[w]] - mean[w]
        sizes[w] += run
        square[w] += squares[ends[w]] + apart * (run * (sizes[w] - run) / sizes[w]) * apart
        mean[w] += apart * (run / sizes[w])
        ends[w] -= run
        apart = means[run:] - means[:-run]
        squares[run:] = squares[run:] + squares[:-run] + apart * apart * (run / 2)
        means[run:] = means[:-run] + apart / 2
        run *= 2
    variance = np.where(np.isfinite(mean), square / sizes, np.nan)
    out[...] = statistic.of_spread(variance, 1.0 / sizes)


def scan_exact(clock: SampleClock, before: Array, xs: Array, out: Array) -> None:
    """Scan exact windows. `before` holds the stored samples.

    A sum of any length is put together from sums of 1, 2, 4, … samples: nothing is subtracted.
    """
    runs = np.concatenate([before, xs]).astype(wide(out.dtype))
    lengths = clock.rule.samples(np.arange(clock.count + 1, clock.count + len(xs) + 1))
    ends = np.arange(len(before), len(runs))  # for each window, where the samples not yet added end
    sums: Any = np.zeros((len(xs), xs.shape[1]), runs.dtype)
    run = 1
    while run <= lengths.max():
        windows = np.flatnonzero(lengths & run)
        sums[windows] += runs[ends[windows]]
        ends[windows] -= run
        runs[run:] = runs[run:] + runs[:-run]
        run *= 2
    out[...] = sums / lengths[:, None]
