"""Scans: the average after each of many samples.

`one_by_one` says what a scan is. The other functions give the same, to the last few digits, much
faster, each for one kind of average. They are used where `tailavg.numpy.loops`, which gives the
same bits, is not compiled. Samples are the rows of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tailavg.core.clock import BlockClock, SampleClock, factors
from tailavg.core.decay import Decay, Reading
from tailavg.core.equation import read, root
from tailavg.core.rules import Exponential, window_of
from tailavg.numpy.arithmetic import Array, sum_rows, wide

if TYPE_CHECKING:
    from tailavg.numpy.average import TailAverage

__all__ = ["alike_blocks", "decaying", "exact", "newer_part", "one_by_one", "open_block"]

CHUNK = 15000
"""How many numbers are taken at once: few enough for the cache."""

_SMALLEST = 2.0**-32  # how far a chunk may decay: a double has digits to spare
_STEPS = np.arange(1.0, CHUNK + 1.0)


def one_by_one(average: TailAverage, xs: Sequence[Any], window: Reading | None = None) -> Array:
    """What a scan is: update with each sample, and read.

    Examples:
        >>> from tailavg import TailAverage
        >>> one_by_one(TailAverage(2), [1.0, 3.0, 5.0, 7.0])
        array([1., 2., 4., 6.])
    """
    averages = []
    for x in xs:
        average.update(x)
        averages.append(average.value(window))
    return np.array(averages)


def newer_part(clock: BlockClock, means: Sequence[Any], oldest: int) -> tuple[int, Any]:
    """Of the samples since `oldest` (see `split`), those folded: how many, and their mean."""
    blocks, last = clock.blocks, len(clock.blocks) - 1
    first = oldest + 1 if oldest >= 0 else last
    folded, mean = clock.folded - blocks[first], means[first]
    if first < last and folded:
        mean = mean * ((blocks[first + 1] - blocks[first]) / folded)
        for block in range(first + 1, last):
            mean = mean + means[block] * ((blocks[block + 1] - blocks[block]) / folded)
        if clock.folded > blocks[last]:
            mean = mean + means[last] * ((clock.folded - blocks[last]) / folded)
    return folded, mean


def open_block(
    clock: BlockClock,
    means: Sequence[Any],
    partial: Any,
    rows: Array,
    window: Reading | None,
    out: Array,
) -> None:
    """Scan samples that all go into the open block, of which `partial` is the sum so far.

    Their running sums, by weights that follow t.
    """
    t, width, dtype = clock.count, rows.shape[1], wide(out.dtype)
    asked = window_of(clock.rule, window, t + len(rows))
    if isinstance(asked, Decay):
        decayed_block(clock, means, partial, rows, asked, out)
        return
    chunk = max(1, CHUNK // max(1, width))
    done = until = 0
    while done < len(rows):
        if t + done + 1 >= until:
            oldest, since, until = clock.split(asked, done + 1)
            old = clock.blocks[oldest + 1] - clock.blocks[oldest] if oldest >= 0 else 0
            old_mean = np.reshape(means[oldest], -1) if old else 0.0
            folded, folded_mean = newer_part(clock, means, oldest)
            total = np.reshape(folded_mean, -1).astype(dtype) * folded + np.reshape(partial, -1)
            total = total + sum_rows(rows[:done], out.dtype)
        part = slice(done, min(done + chunk, len(rows), until - 1 - t))
        steps = _STEPS[: part.stop - done] + (t + done)
        newer = steps - since
        sums = np.cumsum(rows[part], axis=0, dtype=dtype)
        sums += total
        total = sums[-1].copy()
        if old:
            excess = newer + old
            excess -= asked.size(steps)
            if excess[0] < 0.0:
                excess *= excess > 0.0
            g = root(float(old), newer, excess)
            np.divide(1.0 - g, newer, newer)
            sums *= newer[:, None]
            np.add(sums, g[:, None] * old_mean, out[part])
        else:
            np.divide(sums, newer[:, None], out[part])
        done = part.stop


def decayed_block(
    clock: BlockClock, means: Sequence[Any], partial: Any, rows: Array, decay: Decay, out: Array
) -> None:
    """As `open_block`, for a `Decay`: every block has a weight of its own, which follows t."""
    t, width, dtype = clock.count, rows.shape[1], wide(out.dtype)
    flat = [np.reshape(mean, -1).astype(dtype) for mean in means]
    spans, last = list(pairwise(clock.blocks)), clock.blocks[-1]
    total = flat[-1] * (clock.folded - last) + np.reshape(partial, -1)
    chunk = max(1, CHUNK // max(1, width))
    for done in range(0, len(rows), chunk):
        part = slice(done, min(done + chunk, len(rows)))
        steps = _STEPS[: part.stop - done] + (t + done)
        k = np.minimum(steps, decay.size(steps))
        sums = np.cumsum(rows[part], axis=0, dtype=dtype)
        sums += total
        total = sums[-1].copy()
        terms = [
            (decay.of_ages(steps - end, steps - start, k), np.broadcast_to(mean, sums.shape))
            for mean, (start, end) in zip(flat, spans, strict=False)
            if start < end
        ]
        terms.append((decay.of_ages(0.0, steps - last, k) / (steps - last), sums))
        averages = np.zeros_like(sums)
        for weight, values in terms:
            used = weight > 0.0  # 0 times a NaN would be a NaN
            averages[used] += weight[used, None] * values[used]
        out[part] = averages


def alike_blocks(
    clock: BlockClock, means: Sequence[Any], rows: Array, out: Array
) -> tuple[int, Array]:
    """Scan whole blocks at once, if all are alike from here on and the window is fixed.

    The open block is closed and folded. Returns how many rows were done, perhaps none, and the
    means of the latest blocks. Weights then repeat from block to block.
    """
    width, dtype = rows.shape[1], wide(out.dtype)
    size, until = clock.alike()
    rule: Any = clock.rule
    fixed = size and rule.size(clock.count) == rule.size(until)
    end = min(until + size - clock.count, len(rows)) // size * size if fixed else 0
    if not end or end < 2 * size or size * width > 8 * CHUNK:
        return 0, np.empty(0)
    z = clock.rule.accumulators - 1
    sizes = np.arange(1.0, size + 1.0)
    *closed, opened = read([*[size] * z, sizes], rule.size(clock.count))
    weights, each = np.reshape(closed, (z, size)), opened / sizes
    held = np.reshape(means, (z + 1, width)).astype(dtype)
    blocks = max(1, 8 * CHUNK // (size * max(1, width)))
    for done in range(0, end, blocks * size):
        part = slice(done, min(end, done + blocks * size))
        n = (part.stop - done) // size
        x = rows[part].reshape(n, size, width)
        sums = np.cumsum(x, axis=1, dtype=dtype)
        held = np.concatenate([held[len(held) - z :], sums[:, -1] / size])
        sums *= each[:, None]
        for i, weight in enumerate(weights):
            needed = np.count_nonzero(weight)
            sums[:, :needed] += held[i : i + n, None] * weight[:needed, None]
        out[part] = sums.reshape(n * size, width)
    return end, held[-1 - z :]


def decaying(rule: Exponential, t: int, mean: Array, rows: Array, out: Array | None) -> Array:
    """Scan an exponential average from step t on; the average at the end.

    A chunk is a sum with factors, as in `tailavg.core.clock.DecayClock`, of as many samples as a
    double can hold; nothing is written without `out`.
    """
    chunk, done = max(1, CHUNK // max(1, rows.shape[1])), 0
    while done < len(rows):
        most = min(chunk, len(rows) - done)
        if rule.size(t + done + 1) == 1.0:  # a window of one sample: the average is the sample
            ones = rule.size(np.arange(t + done + 1, t + done + most + 1)) == 1.0
            n = most if ones.all() else int(ones.argmin())
            averages = rows[done : done + n] if out is not None else rows[done + n - 1 : done + n]
        else:
            decay, *both = factors(rule, t + done, most, _SMALLEST)
            factor, scale = (part[:, None] for part in both)
            n = len(scale)
            x = rows[done : done + n]
            start = decay * mean if decay else 0.0  # 0 times a NaN would be a NaN
            if out is not None:
                averages = scale * (start + np.cumsum(factor * x, axis=0))
            else:
                averages = scale[-1:] * (start + factor.T @ x)
        if out is not None:
            out[done : done + n] = averages
        mean = averages[-1].astype(mean.dtype)
        done += n
    return mean


def exact(clock: SampleClock, before: Array, rows: Array, out: Array) -> None:
    """Scan exact windows, of which the samples `before` are held.

    Sums of runs of 1, 2, 4, … samples make those of any length: no difference is taken.
    """
    runs = np.concatenate([before, rows]).astype(wide(out.dtype))
    lengths = clock.rule.samples(np.arange(clock.count + 1, clock.count + len(rows) + 1))
    ends = np.arange(len(before), len(runs))  # where the rest of each window ends
    sums = np.zeros((len(rows), rows.shape[1]), runs.dtype)
    run = 1
    while run <= lengths.max():
        windows = np.flatnonzero(lengths & run)
        sums[windows] += runs[ends[windows]]
        ends[windows] -= run
        runs[run:] = runs[run:] + runs[:-run]
        run *= 2
    out[...] = sums / lengths[:, None]
