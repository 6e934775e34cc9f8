"""The loops of scans: plain Python, compiled by numba if it is installed.

Each loop does what `update` and `value` do sample by sample, with the same operations in the same
order, so results are bit-identical. `tailavg.numpy.table` calls the loops. Without numba it calls
the array operations of `tailavg.numpy.fallback` instead.

Samples are the rows of a matrix `xs`, and the averages after each sample are the rows of `out`; a
stream of numbers is a matrix with one column. The state is changed in place: the `means` and
`starts` of the blocks, oldest first, and in `sums` the sum of the samples since step `folded`. A
window is a tuple of six numbers: see `window_numbers`. With `variance=True`, the state also has the
`variances` of the blocks and the `squares` of the deviations since step `folded`; otherwise these
arrays are empty. What to write to `out` is a `Statistic` as two numbers.

Read `scan_blocks` first, then the functions that it calls.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from tailavg.core.clock import FOLD, SMALLEST
from tailavg.core.equation import weights
from tailavg.core.windows import TIE, Fixed, Window
from tailavg.numpy.arithmetic import MEAN, NOISE, STD

__all__ = [
    "GIVEN",
    "LONG",
    "SHORT",
    "compiled",
    "installed",
    "kernel",
    "plain_loops",
    "window_numbers",
]

LONG = 20_000
"""From this many numbers on, numba saves more time than its import takes, half a second."""

SHORT = 1_000
"""Below this many numbers, plain loops are faster than reading numba's cache."""

FEW = 30
"""Up to this many numbers, plain loops are as fast as array operations."""

GROUPED = 10
"""With many groups, one number takes as long as this many numbers of a single group."""

_TIE = float(TIE)
GIVEN = 2
"""A plan whose weights are given: see `scan_blocks`."""

_TOGETHER = 1024  # the most samples to weigh together, so that they fit into the cache
_RAMP = np.arange(1.0, FOLD + 1.0)  # compiled code converts integers to floats slowly


def window_numbers(window: Window) -> tuple[float, float, float, float, float, float]:
    """Return a window as numbers, for `size_at` and `decay_at`.

    k_t is t times the first number divided by the second, but at least the third and at most the
    fourth. The fifth is 0 if a size within a `TIE` of a whole number is rounded to it. The sixth is
    the growth of the window per sample, while k_t is between its bounds.

    Examples:
        >>> from tailavg import Fixed, Growing
        >>> window_numbers(Growing(0.25, at_most=1000))
        (1.0, 4.0, 1.0, 1000.0, 1.0, 0.25)
        >>> window_numbers(Fixed(100))
        (0.0, 1.0, 100.0, 100.0, 1.0, 0.0)
    """
    if isinstance(window, Fixed):
        return 0.0, 1.0, float(window.k), float(window.k), 1.0, 0.0
    over, under, exact = window.ratio
    return over, under, 1.0, window.most, float(exact), window.c


def size_at(t: Any, window: Any) -> Any:
    """Return `Window.size`, given the `window_numbers`."""
    k = window[0] * t / window[1]
    if window[4] == 0.0:
        near = np.rint(k)
        k = near if abs(near - k) <= _TIE * k else k
    k = k if k > window[2] else window[2]
    return k if k < window[3] else window[3]


def decay_at(t: Any, window: Any) -> Any:
    """Return `Exponential.decay`, given the `window_numbers`."""
    before = size_at(t - 1.0, window)
    k = size_at(t, window)
    growth = k - before
    if before > 1.0 and k < window[3]:
        growth += window[5] - growth
    old = t - 1.0 if t - 1.0 < before else before
    excess = 1.0 - growth if t - 1.0 >= before else 0.0
    return abs(weights(old, 1.0, excess, math.sqrt)[1])


def fold_sums(
    means: Any, sums: Any, variances: Any, squares: Any, total: Any, weight: Any, carry: Any
) -> None:
    """Merge the sums into the newest means, as `tailavg.numpy.arithmetic.joined` does."""
    kind = sums.dtype.type
    mean = means[-1]
    if len(squares) > 0:
        variance = variances[-1]
        for j in range(len(squares)):  # as `tailavg.numpy.arithmetic.joined_variance` does
            moved = sums[j] / kind(total) - mean[j]
            fresh = (squares[j] - kind(total * weight) * moved * moved) / kind(total)
            joint, lost = fresh, kind(0.0)
            if weight != 1.0:
                step = (fresh - variance[j]) * kind(weight)
                joint = variance[j] + step
                lost = (step - (joint - variance[j])) * kind(carry)
                if lost - lost != 0.0:
                    joint = variance[j] * kind(1.0 - weight) + fresh * kind(weight)
                    lost = kind(0.0)
            variance[j], squares[j] = kind(0.0) if joint < 0.0 else joint, lost
    if weight == 1.0:
        for j in range(len(sums)):
            mean[j] = sums[j] / kind(total)
            sums[j] = 0.0
        return
    for j in range(len(sums)):
        fresh = sums[j] / kind(total)
        step = (fresh - mean[j]) * kind(weight)
        joint = mean[j] + step
        lost = (step - (joint - mean[j])) * kind(carry)
        if lost - lost != 0.0:  # inf - inf is NaN
            joint = mean[j] * kind(1.0 - weight) + fresh * kind(weight)
            lost = kind(0.0)
        mean[j], sums[j] = joint, lost


def open_block(means: Any, variances: Any, starts: Any, gone: int, t: int) -> None:
    """Open a block at step t. Block `gone` is dropped, or merged with the one before it."""
    kind = means.dtype.type
    spread = len(variances) > 0
    last = len(starts) - 1
    if gone > 0:
        end = starts[gone + 1] if gone < last else t
        weight = (end - starts[gone]) / (end - starts[gone - 1])
        for j in range(means.shape[1]):
            kept = means[gone - 1, j] * kind(1.0 - weight)
            if spread:
                apart = means[gone, j] - means[gone - 1, j]
                within = variances[gone - 1, j] * kind(1.0 - weight)
                within += variances[gone, j] * kind(weight)
                variances[gone - 1, j] = within + kind(weight * (1.0 - weight)) * apart * apart
            means[gone - 1, j] = kept + means[gone, j] * kind(weight)
    for block in range(gone, last):
        starts[block] = starts[block + 1]
        for j in range(means.shape[1]):
            means[block, j] = means[block + 1, j]
            if spread:
                variances[block, j] = variances[block + 1, j]
    starts[last] = t
    for j in range(means.shape[1]):
        means[last, j] = 0.0
        if spread:
            variances[last, j] = 0.0


def fill_weights(
    all_each: Any, all_old: Any, place: int, n: int, old: Any, new: Any, t: Any, window: Any
) -> None:
    """Write the weights at the n steps after t: see `tailavg.core.equation.weights`."""
    each, of_old = all_each[place : place + n], all_old[place : place + n]
    for i in range(n):
        excess = old + (new + _RAMP[i]) - size_at(t + _RAMP[i], window)
        excess = excess if excess > 0.0 else 0.0
        each[i], of_old[i] = weights(old, new + _RAMP[i], excess, math.sqrt)


def newer_blocks(starts: Any, folded: int, first: int, blocks: Any, sizes: Any) -> int:
    """Write the blocks from `first` on that have a mean, and the number of samples in each mean.

    Return the number of such blocks.
    """
    n, last = 0, len(starts) - 1
    for block in range(first, last + 1):
        size = (starts[block + 1] if block < last else folded) - starts[block]
        if size > 0:
            blocks[n], sizes[n] = block, size
            n += 1
    return n


def add_numbers(xs: Any, out: Any, total: Any) -> Any:
    """Write the sum after each number, and return the last sum."""
    for i in range(len(xs)):
        total += xs[i]
        out[i] = total
    return total


def scan_numbers(
    all_xs: Any,
    all_out: Any,
    at: int,
    n: int,
    sums: Any,
    all_each: Any,
    all_old: Any,
    place: int,
    oldest: int,
    means: Any,
    blocks: Any,
    sizes: Any,
    room: Any,
) -> None:
    """Add n numbers to the sum, and write the averages.

    The terms have the order of `BlockClock.terms`: the mean of the `oldest` block, unless that is
    -1; the means of the newer `blocks`; the sum.
    """
    kind = all_out.dtype.type
    xs, out = all_xs[at : at + n], all_out[at : at + n]
    each, of_old = all_each[place : place + n], all_old[place : place + n]
    sums[0] = add_numbers(xs, out, sums[0])
    old = means[oldest, 0] if oldest >= 0 else kind(0.0)
    last = len(blocks) - 1
    mean, size = (means[blocks[last], 0], sizes[last]) if last >= 0 else (kind(0.0), 0.0)
    if last <= 1:
        older, older_size = (means[blocks[0], 0], sizes[0]) if last == 1 else (kind(0.0), 0.0)
        for i in range(n):
            value = kind(of_old[i]) * old + kind(each[i] * older_size) * older
            out[i] = value + kind(each[i] * size) * mean + kind(each[i]) * out[i]
        return
    for i in range(n):
        room[i] = kind(of_old[i]) * old
    for block in range(last):
        older, older_size = means[blocks[block], 0], sizes[block]
        for i in range(n):
            room[i] += kind(each[i] * older_size) * older
    for i in range(n):
        out[i] = room[i] + kind(each[i] * size) * mean + kind(each[i]) * out[i]


def scan_rows(
    all_xs: Any,
    all_out: Any,
    at: int,
    n: int,
    sums: Any,
    all_each: Any,
    all_old: Any,
    place: int,
    oldest: int,
    means: Any,
    blocks: Any,
    sizes: Any,
) -> None:
    """Do the work of `scan_numbers` for the rows of a matrix."""
    kind, last = all_out.dtype.type, len(blocks) - 1
    for i in range(n):
        xs, out, each = all_xs[at + i], all_out[at + i], all_each[place + i]
        of_sum, of_old = kind(each), kind(all_old[place + i])
        if oldest >= 0 and last == 0:
            old, mean, of_mean = means[oldest], means[blocks[0]], kind(each * sizes[0])
            for j in range(len(out)):
                sums[j] += xs[j]
                out[j] = of_old * old[j] + of_mean * mean[j] + of_sum * sums[j]
        elif oldest >= 0 and last == 1:
            old, mean, of_mean = means[oldest], means[blocks[1]], kind(each * sizes[1])
            older, of_older = means[blocks[0]], kind(each * sizes[0])
            for j in range(len(out)):
                sums[j] += xs[j]
                value = of_old * old[j] + of_older * older[j]
                out[j] = value + of_mean * mean[j] + of_sum * sums[j]
        else:
            for j in range(len(out)):
                out[j] = of_old * means[oldest, j] if oldest >= 0 else kind(0.0)
            for block in range(last + 1):
                mean, of_mean = means[blocks[block]], kind(each * sizes[block])
                for j in range(len(out)):
                    out[j] += of_mean * mean[j]
            for j in range(len(out)):
                sums[j] += xs[j]
                out[j] += of_sum * sums[j]


def add_squares(xs: Any, factors: Any, shift: Any, total: Any) -> Any:
    """Add the squared deviations of numbers from the shift, times factors, to a sum."""
    kind = xs.dtype.type
    for i in range(len(xs)):
        apart = xs[i] - shift
        total += apart * apart * kind(factors[i])
    return total


def fill_scales(
    scales: Any, each: Any, of_old: Any, old: float, new: float, statistic: Any
) -> None:
    """Write what variances are multiplied by at each step: 1 / (1 - Σ α²), or 1 for ddof=0."""
    inverse = 1.0 / old if old > 0.0 else 0.0
    for i in range(len(scales)):
        squared = each[i] * each[i] * (new + _RAMP[i]) + of_old[i] * of_old[i] * inverse
        scales[i] = 1.0 / (1.0 - statistic[1] * squared)


def moments(means: Any, variances: Any, j: int, oldest: int, blocks: Any, sizes: Any) -> Any:
    """Return the moments of closed blocks around the newest mean of column j, for `scan_spread`.

    These are the mean and the mean square of the `oldest` block (0 if that is -1), and of the newer
    `blocks` the sums of both, and the number of samples.
    """
    shift, first, second = float(means[-1, j]), 0.0, 0.0
    newer_first, newer_second, newer = 0.0, 0.0, 0.0
    if oldest >= 0:
        first = means[oldest, j] - shift
        second = variances[oldest, j] + first * first
    for block in range(len(blocks)):
        apart = means[blocks[block], j] - shift
        newer += sizes[block]
        newer_first += sizes[block] * apart
        newer_second += sizes[block] * (variances[blocks[block], j] + apart * apart)
    return first, second, newer_first, newer_second, newer


def scan_spread(
    xs: Any,
    out: Any,
    factors: Any,
    each: Any,
    of_old: Any,
    scales: Any,
    shift: Any,
    closed: Any,
    total: Any,
    squares: Any,
    statistic: Any,
    room: Any,
) -> Any:
    """Add numbers to both sums, write variances, and return the sums.

    Deviations are first taken from the `shift`. `closed` is what `moments` returns. The weight of
    the samples in the sum is what the closed blocks leave of 1.
    """
    kind = xs.dtype.type
    old_first, old_second, newer_first, newer_second, newer = closed
    for i in range(len(xs)):
        apart = xs[i] - shift
        total += xs[i] * kind(factors[i])
        squares += apart * apart * kind(factors[i])
        out[i], room[i] = total, squares
    eps = np.finfo(xs.dtype).eps
    middle, noise = float(shift), NOISE * eps
    for i in range(len(xs)):
        in_sum = 1.0 - of_old[i] - each[i] * newer
        moved = each[i] * out[i] - in_sum * middle
        moved += of_old[i] * old_first + each[i] * newer_first
        second = of_old[i] * old_second + each[i] * (newer_second + room[i])
        variance = second - moved * moved
        limit = noise * (middle + moved)
        limit = limit * limit + 4.0 * eps * moved * moved
        variance = 0.0 if variance <= limit else variance
        out[i] = kind(variance * scales[i])
    if statistic[0] == STD:
        for i in range(len(xs)):
            out[i] = math.sqrt(out[i])
    return total, squares


def scan_spread_rows(
    xs: Any,
    out: Any,
    factors: Any,
    each: Any,
    of_old: Any,
    scales: Any,
    means: Any,
    variances: Any,
    oldest: Any,
    blocks: Any,
    sizes: Any,
    sums: Any,
    squares: Any,
    statistic: Any,
    room: Any,
    column: Any,
) -> None:
    """Do the work of `scan_spread` for each column of a matrix, or only add to the squares."""
    n, width = len(xs), xs.shape[1]
    copied = column[:n]
    for j in range(width):
        if width > 1:
            copied[:] = xs[:, j]
        x = xs.reshape(xs.size) if width == 1 else copied  # for numba, xs may be read-only
        if statistic[0] == MEAN:
            squares[j] = add_squares(x, factors, means[-1, j], squares[j])
            continue
        averages = out.reshape(out.size) if width == 1 else copied
        closed = moments(means, variances, j, oldest, blocks, sizes)
        how = factors, each, of_old, scales, means[-1, j], closed, sums[j], squares[j]
        sums[j], squares[j] = scan_spread(x, averages, *how, statistic, room)
        if width > 1:
            out[:, j] = copied


def scan_blocks(
    xs: Any,
    out: Any,
    rows: Any,
    bounds: Any,
    counts: Any,
    folded: Any,
    starts: Any,
    means: Any,
    sums: Any,
    variances: Any,
    squares: Any,
    plan: Any,
    ends: Any,
    window: Any,
    steady: int,
    each: Any,
    of_old: Any,
    statistic: Any,
) -> None:
    """Scan samples into rows of a table: samples bounds[i, 0] to bounds[i, 1] into rows[i].

    `plan` has the runs of `BlockClock.runs`, and `ends` the steps at which the runs end. After its
    last run, the plan begins again. If the plan is `steady`, the weights repeat, too: they are kept
    in `each` and `of_old`. If it is `GIVEN`, the weights are already there.
    """
    width, last = xs.shape[1], starts.shape[1] - 1
    numbers, averages = xs.reshape(xs.size), out.reshape(out.size)
    blocks, sizes = np.empty(last + 1, np.int64), np.empty(last + 1)
    room, spread = np.empty(FOLD, xs.dtype), squares.shape[1] > 0
    ones, column = np.ones(FOLD), np.empty(FOLD, xs.dtype)
    scales = np.empty(len(each) if spread else 0)
    begin = ends[0] - plan[0, 0]
    for i in range(len(rows)):
        row, at, stop = rows[i], bounds[i, 0], bounds[i, 1]
        t, fold, start, mean, total = counts[row], folded[row], starts[row], means[row], sums[row]
        variance, square = variances[row], squares[row]
        run, repeated, above = 0, 0, len(ends) - 1
        while run < above:  # find the run of the next sample
            middle = (run + above) // 2
            if ends[middle] > t:
                above = middle
            else:
                run = middle + 1
        while at < stop:
            oldest, gone, end = plan[run, 1], plan[run, 2], ends[run] + repeated
            turns = gone >= 0 and t == end - plan[run, 0]
            if t - fold >= FOLD or (turns and t > fold):
                size = t - start[last]
                fold_sums(mean, total, variance, square, t - fold, (t - fold) / size, size)
                fold = t
            if turns:
                open_block(mean, variance, start, gone, t)
                fold = t
                for j in range(width):
                    total[j] = 0.0
                    if spread:
                        square[j] = 0.0
            if spread and t == start[last]:  # the first sample is the shift
                for j in range(width):
                    mean[last, j] = xs[at, j]
            first = oldest + 1 if oldest >= 0 else last
            old = start[first] - start[oldest] if oldest >= 0 else 0
            n = min(stop - at, end - t, FOLD - (t - fold))
            place = t - repeated - begin if steady else 0
            if steady != GIVEN and (repeated == 0 or not steady):
                new = float(t - start[first])
                fill_weights(each, of_old, place, n, float(old), new, float(t), window)
            newer = blocks[: newer_blocks(start, fold, first, blocks, sizes)]
            oldest = oldest if old > 0 else -1
            if statistic[0] != MEAN:
                pass  # see below
            elif width == 1:
                scan_numbers(
                    numbers,
                    averages,
                    at,
                    n,
                    total,
                    each,
                    of_old,
                    place,
                    oldest,
                    mean,
                    newer,
                    sizes,
                    room,
                )
            else:
                scan_rows(xs, out, at, n, total, each, of_old, place, oldest, mean, newer, sizes)
            if spread:
                now = xs[at : at + n], out[at : at + n], ones[:n], each[place : place + n]
                state = mean, variance, oldest, newer, sizes, total, square
                if repeated == 0 or not steady:
                    old_new = float(old), float(t - start[first])
                    scale = scales[place : place + n]
                    fill_scales(scale, now[3], of_old[place : place + n], *old_new, statistic)
                weights_now = of_old[place : place + n], scales[place : place + n]
                scan_spread_rows(*now, *weights_now, *state, statistic, room, column)
            at += n
            t += n
            if t == end:
                run += 1
            if run == len(plan):
                run, repeated = 0, t - begin
        counts[row], folded[row] = t, fold


def plan_elapsed(
    times: Any,
    start: Any,
    t: int,
    first: Any,
    latest: Any,
    length: int,
    plan: Any,
    each: Any,
    of_old: Any,
) -> Any:
    """Write the plan and the weights with which `scan_blocks` scans samples that have times.

    These are the decisions of `tailavg.core.clock.ElapsedClock`. The clock's times, `first` and
    `latest`, are updated; `start` is not. Return the number of runs in the plan.
    """
    last, at, runs, starts = len(start) - 1, 0, 0, start.copy()
    while at < len(times):
        time, gone = times[at], -1
        if t > 0 and (time - first[last]) * last >= length:
            gone = 0
            for block in range(last):
                starts[block] = starts[block + 1]
                first[block], latest[block] = first[block + 1], latest[block + 1]
            starts[last] = t
        if gone == 0 or t == 0:
            first[last] = time
        latest[last] = time
        oldest = 0  # the oldest block with samples in the period
        while oldest < last and (
            starts[oldest] == starts[oldest + 1] or latest[oldest] <= time - length
        ):
            oldest += 1
        # the run ends when the open block is full, or the period passes a block's start or end
        until, old, new, rate = first[last] - (-length // last), 0.0, float(t - starts[last]), 0.0
        if oldest < last:
            old, new = float(starts[oldest + 1] - starts[oldest]), float(t - starts[oldest + 1])
            if first[oldest] <= time - length:
                rate = (old - 1.0) / (latest[oldest] - first[oldest])
                until = min(until, latest[oldest] + length)
            else:
                until = min(until, first[oldest] + length)
        n = max(1, np.searchsorted(times[at : at + FOLD], until))
        now, of_each, of_oldest = times[at : at + n], each[at : at + n], of_old[at : at + n]
        bound, floor = latest[oldest] + length, old if rate == 0.0 else 0.0
        for i in range(n):
            excess = old - rate * np.uint64(bound - now[i]) - floor  # not below 0
            of_each[i], of_oldest[i] = weights(old, new + _RAMP[i], excess, math.sqrt)
        at, t = at + n, t + n
        latest[last] = times[at - 1]
        plan[runs, 0], plan[runs, 1], plan[runs, 2] = n, oldest if oldest < last else -1, gone
        runs += 1
    return runs


def scan_elapsed_decay(
    xs: Any,
    out: Any,
    times: Any,
    bounds: Any,
    counts: Any,
    folded: Any,
    means: Any,
    sums: Any,
    variances: Any,
    squares: Any,
    firsts: Any,
    lasts: Any,
    decays: Any,
    length: int,
    statistic: Any,
) -> None:
    """Scan samples with times into each row of a table, as `ElapsedDecayClock` says.

    `decays` has its effective size, the decay of the first sample after the fold, and the scale.
    """
    kind, width, spread = xs.dtype.type, xs.shape[1], squares.shape[1] > 0
    eps = np.finfo(xs.dtype).eps
    noise = NOISE * eps
    for row in range(len(counts)):
        t, fold = counts[row], folded[row]
        size, first, scale = decays[row, 0], decays[row, 1], decays[row, 2]
        mean, total, variance, square = means[row], sums[row], variances[row], squares[row]
        for at in range(bounds[row], bounds[row + 1]):
            weight, decay, leaving = 1.0, 0.0, 0.0
            if t > 0:
                if times[at] - firsts[row, 0] >= length:
                    leaving = size * min(1.0, (times[at] - lasts[row, 0]) / length)
                if leaving < size:
                    weight, decay = weights(size, 1.0, leaving, math.sqrt)
                    decay = abs(decay)
            else:
                firsts[row, 0] = times[at]
                if spread:  # the first sample is the shift
                    for j in range(width):
                        mean[0, j] = xs[at, j]
            lasts[row, 0], size = times[at], 1.0 + (size - leaving)
            if t > fold and (t - fold >= FOLD or scale * decay < SMALLEST):
                of_mean = first * scale
                how = (1.0 - of_mean) / scale, 1.0 - of_mean, decay
                fold_sums(mean, total, variance, square, *how)
                fold = t
            if t == fold:
                first, scale = decay, 1.0
            else:
                scale *= decay
            factor, kept = kind(weight / scale), first * scale
            for j in range(width):
                total[j] += xs[at, j] * factor
                middle = mean[0, j]
                if spread:
                    apart = xs[at, j] - middle
                    square[j] += apart * apart * factor
                if statistic[0] == MEAN:
                    old = kind(kept) * middle if kept != 0.0 else kind(0.0)  # 0 times NaN is NaN
                    out[at, j] = old + kind(scale) * total[j]
                else:
                    moved = scale * total[j] - (1.0 - kept) * middle
                    second = kept * variance[0, j] + scale * square[j]
                    result, limit = second - moved * moved, noise * (middle + moved)
                    limit = limit * limit + 4.0 * eps * moved * moved
                    result = 0.0 if result <= limit else result
                    result /= 1.0 - statistic[1] / size
                    out[at, j] = kind(math.sqrt(result) if statistic[0] == STD else result)
            t += 1
        counts[row], folded[row] = t, fold
        decays[row, 0], decays[row, 1], decays[row, 2] = size, first, scale


def scan_small_blocks(
    xs: Any,
    out: Any,
    means: Any,
    sums: Any,
    in_sum: int,
    t: int,
    plan: Any,
    window: Any,
    each: Any,
    of_old: Any,
) -> None:
    """Do the work of `scan_blocks` for small, equal blocks of numbers, many blocks at a time.

    Each block before step t is full, the last `in_sum` samples are in the sum, and the plan begins
    with a turn. The last block stays open. `each` and `of_old` are buffers for the weights.
    """
    kind = xs.dtype.type
    closed, size = len(means) - 1, len(each)
    if in_sum > 0:
        nothing = means[:0], sums[:0]
        fold_sums(means, sums, *nothing, in_sum, in_sum / size, size)
    most = max(1, _TOGETHER // size)
    averages = np.empty(closed + most, xs.dtype)  # of the blocks before, then of these blocks
    room = np.empty(most, xs.dtype)
    for block in range(closed):
        averages[block] = means[block + 1, 0]
    place = 0
    for run in range(len(plan)):
        oldest, until = plan[run, 1], place + plan[run, 0]
        older, new = (size, (closed - 1 - oldest) * size) if oldest >= 0 else (0, 0)
        new_now, t_now = float(new + place), float(t + place)
        fill_weights(each, of_old, place, plan[run, 0], float(older), new_now, t_now, window)
        place = until
    blocks = len(xs) // size
    for start in range(0, blocks, most):
        n, opened = min(most, blocks - start), start * size
        for block in range(n):
            at = opened + block * size
            sums[0] = add_numbers(xs[at : at + size], out[at : at + size], kind(0.0))
            averages[closed + block] = sums[0] / kind(size)
        table = out[opened : opened + n * size].reshape(n, size)
        place = 0
        for run in range(len(plan)):
            oldest = plan[run, 1]
            for i in range(place, place + plan[run, 0]):
                of_sum, of_block, of_oldest = kind(each[i]), kind(each[i] * size), kind(of_old[i])
                if oldest < 0:
                    for block in range(n):
                        table[block, i] *= of_sum
                    continue
                older_means = averages[oldest : oldest + n]
                for block in range(n):
                    room[block] = of_oldest * older_means[block]
                for newer in range(oldest + 1, closed):
                    between = averages[newer : newer + n]
                    for block in range(n):
                        room[block] += of_block * between[block]
                for block in range(n):
                    table[block, i] = room[block] + of_sum * table[block, i]
            place += plan[run, 0]
        for block in range(closed):
            means[block, 0] = averages[n - 1 + block]
        for block in range(closed):
            averages[block] = averages[n + block]
    means[closed, 0] = 0.0


def scan_small_spread(
    xs: Any,
    out: Any,
    means: Any,
    sums: Any,
    variances: Any,
    squares: Any,
    in_sum: int,
    t: int,
    plan: Any,
    window: Any,
    each: Any,
    of_old: Any,
    statistic: Any,
) -> None:
    """Do the work of `scan_small_blocks` for the variances of numbers, one block at a time."""
    kind, closed, size = xs.dtype.type, len(means) - 1, len(each)
    eps, scales = np.finfo(xs.dtype).eps, np.empty(size)
    noise = NOISE * eps
    if in_sum > 0:
        fold_sums(means, sums, variances, squares, in_sum, in_sum / size, size)
    place = 0
    for run in range(len(plan)):
        oldest, until = plan[run, 1], place + plan[run, 0]
        old, new = (size, (closed - 1 - oldest) * size) if oldest >= 0 else (0, 0)
        now, t_now = float(new + place), float(t + place)
        fill_weights(each, of_old, place, plan[run, 0], float(old), now, t_now, window)
        run_scales = scales[place:until], each[place:until], of_old[place:until]
        fill_scales(*run_scales, float(old), now, statistic)
        place = until
    for start in range(0, len(xs), size):
        if start > 0:
            fold_sums(means, sums, variances, squares, size, 1.0, size)
        for block in range(closed):
            means[block, 0], variances[block, 0] = means[block + 1, 0], variances[block + 1, 0]
        shift, total, square = xs[start], kind(0.0), kind(0.0)
        means[closed, 0], variances[closed, 0] = shift, 0.0
        middle, place = float(shift), 0
        for run in range(len(plan)):
            oldest, until = plan[run, 1], place + plan[run, 0]
            first, second, newer_first, newer_second, newer = 0.0, 0.0, 0.0, 0.0, 0.0
            if oldest >= 0:
                first = means[oldest, 0] - middle
                second = variances[oldest, 0] + first * first
                for block in range(oldest + 1, closed):
                    apart = means[block, 0] - middle
                    newer += size
                    newer_first += size * apart
                    newer_second += size * (variances[block, 0] + apart * apart)
            for i in range(place, until):
                x = xs[start + i]
                total += x
                square += (x - shift) * (x - shift)
                moved = each[i] * total - (1.0 - of_old[i] - each[i] * newer) * middle
                moved += of_old[i] * first + each[i] * newer_first
                spread = of_old[i] * second + each[i] * (newer_second + square)
                variance = spread - moved * moved
                limit = noise * (middle + moved)
                limit = limit * limit + 4.0 * eps * moved * moved
                variance = 0.0 if variance <= limit else variance
                out[start + i] = kind(variance * scales[i])
            place = until
        sums[0], squares[0] = total, square
    if statistic[0] == STD:
        for i in range(len(out)):
            out[i] = math.sqrt(out[i])


def fill_factors(scales: Any, factors: Any, folded: int, least: int, window: Any) -> Any:
    """Write what `tailavg.core.clock.factors` returns. Return its length, and the first decay."""
    for i in range(FOLD):
        scales[i] = decay_at(float(folded) + _RAMP[i], window)
    decay = scales[0]
    for i in range(FOLD):
        factors[i] = 1.0 - scales[i]
    n, scale = 1, 1.0
    scales[0] = 1.0
    while n < FOLD and (n < least or scale * scales[n] >= SMALLEST):
        scale *= scales[n]
        scales[n] = scale
        n += 1
    for i in range(n):
        factors[i] /= scales[i]
    return n, decay


def add_decaying(xs: Any, out: Any, factors: Any, total: Any) -> Any:
    """Write the sum of numbers times factors after each number, and return the last sum."""
    kind = xs.dtype.type
    for i in range(len(xs)):
        total += xs[i] * kind(factors[i])
        out[i] = total
    return total


def weigh_decayed(out: Any, scales: Any, decay: Any, mean: Any) -> None:
    """Replace the sums of `add_decaying` by averages."""
    kind = out.dtype.type
    if decay == 0.0:  # 0 times NaN is NaN
        for i in range(len(out)):
            out[i] = kind(scales[i]) * out[i]
    else:
        for i in range(len(out)):
            out[i] = kind(decay * scales[i]) * mean + kind(scales[i]) * out[i]


def scan_decaying_rows(
    xs: Any, out: Any, mean: Any, sums: Any, factors: Any, scales: Any, decay: Any
) -> None:
    """Add the rows of a matrix, times factors, to the sums, and write the averages."""
    kind, width = xs.dtype.type, xs.shape[1]
    for i in range(len(xs)):
        x, factor = xs[i], kind(factors[i])
        for j in range(width):
            sums[j] += x[j] * factor
        if len(out):
            average, scale, kept = out[i], kind(scales[i]), kind(decay * scales[i])
            if decay == 0.0:
                for j in range(width):
                    average[j] = scale * sums[j]
            else:
                for j in range(width):
                    average[j] = kept * mean[j] + scale * sums[j]


def scan_decaying(
    xs: Any,
    out: Any,
    bounds: Any,
    counts: Any,
    folded: Any,
    means: Any,
    sums: Any,
    variances: Any,
    squares: Any,
    steady: int,
    window: Any,
    statistic: Any,
) -> None:
    """Scan the samples of each row of a table into an exponential average.

    The decay is constant from step `steady` on. If `out` is empty, averages are not computed.
    """
    numbers, averages = xs.reshape(xs.size), out.reshape(out.size)
    scales, factors, room = np.empty(FOLD), np.empty(FOLD), np.empty(FOLD, xs.dtype)
    width, spread, column = xs.shape[1], squares.shape[1] > 0, np.empty(FOLD, xs.dtype)
    kept, scales_of_spread = np.empty(FOLD), np.empty(FOLD)
    nothing, sizes = np.empty(0, np.int64), np.empty(0)
    for group in range(len(counts)):
        at, end = bounds[group], bounds[group + 1]
        if at == end:
            continue
        t, in_sum = counts[group], counts[group] - folded[group]
        mean, total, variance, square = means[group], sums[group], variances[group], squares[group]
        most, decay = fill_factors(scales, factors, t - in_sum, max(1, in_sum), window)
        while at < end:
            if in_sum >= most:
                of_mean, of_sum = decay * scales[in_sum - 1], scales[in_sum - 1]
                if t - in_sum < steady:
                    most, decay = fill_factors(scales, factors, t, 1, window)
                how = (1.0 - of_mean) / of_sum, 1.0 - of_mean, decay
                fold_sums(mean, total, variance, square, *how)
                in_sum = 0
            n = min(end - at, most - in_sum)
            factor, scale = factors[in_sum : in_sum + n], scales[in_sum : in_sum + n]
            if spread and t == 0:  # the first sample is the shift
                for j in range(width):
                    mean[0, j] = xs[at, j]
            if statistic[0] != MEAN:
                pass  # see below
            elif xs.shape[1] == 1:
                if len(out):
                    chunk = averages[at : at + n]
                    total[0] = add_decaying(numbers[at : at + n], chunk, factor, total[0])
                    weigh_decayed(chunk, scale, decay, mean[0, 0])
                else:
                    total[0] = add_decaying(numbers[at : at + n], room, factor, total[0])
            else:
                rows = out[at : at + n] if len(out) else out
                scan_decaying_rows(xs[at : at + n], rows, mean[0], total, factor, scale, decay)
            if spread:
                for i in range(n):  # in place of an old block, the mean since the last fold
                    step = float(t) + _RAMP[i]
                    kept[i] = decay * scale[i]
                    size = min(step, size_at(step, window))
                    if size > 1.0:
                        scales_of_spread[i] = 1.0 / (1.0 - statistic[1] / size)
                    else:  # one sample, whose deviation from the shift is rounded
                        scales_of_spread[i] = np.nan if statistic[1] else 0.0
                averages_now = out[at : at + n] if len(out) else out
                now = xs[at : at + n], averages_now, factor, scale, kept[:n], scales_of_spread[:n]
                state = mean, variance, 0, nothing, sizes, total, square
                scan_spread_rows(*now, *state, statistic, room, column)
            at += n
            t += n
            in_sum += n
        counts[group], folded[group] = t, t - in_sum


def scan_exact(xs: Any, first: int, out: Any, t: int, window: Any, most: int) -> None:
    """Scan exact windows over numbers. `xs` begins with the `first` samples that are stored.

    A window of n samples is cut at the last multiple of the largest power of 2 up to n. The samples
    before the cut are summed backwards, those after it forwards: no sample is ever subtracted.
    `most` is the size of the largest window.
    """
    before = np.zeros(most + 1)  # before[n] is the sum of the last n samples before the cut
    after = 0.0
    start = first - t  # the row where sample 0 would be
    cut, power = -1, 1
    for i in range(len(out)):
        t += 1
        n = int(min(float(t), np.ceil(size_at(float(t), window))))
        while 2 * power <= n:
            power *= 2
        now = t & -power
        if now != cut:
            cut = now
            for size in range(1, n - (t - cut) + 1):
                before[size] = before[size - 1] + xs[start + cut - size]
            after = 0.0
            for row in range(start + cut, start + t - 1):
                after += xs[row]
        if t > cut:
            after += xs[start + t - 1]
        out[i] = (before[n - (t - cut)] + after) / n


def sort_groups(codes: Any, bounds: Any, order: Any) -> None:
    """Sort rows by group, stably: `order` becomes the rows of group 0, then of group 1, …

    `bounds` says where each group begins; it is overwritten.
    """
    for i in range(len(codes)):
        order[bounds[codes[i]]] = i
        bounds[codes[i]] += 1


_LOOPS: list[Any] = [
    weights,
    size_at,
    decay_at,
    fold_sums,
    open_block,
    fill_weights,
    newer_blocks,
    add_numbers,
    scan_numbers,
    scan_rows,
    add_squares,
    fill_scales,
    moments,
    scan_spread,
    scan_spread_rows,
    scan_blocks,
    plan_elapsed,
    scan_elapsed_decay,
    scan_small_blocks,
    scan_small_spread,
    fill_factors,
    add_decaying,
    weigh_decayed,
    scan_decaying_rows,
    scan_decaying,
    scan_exact,
    sort_groups,
]

_PLAIN = SimpleNamespace(**{loop.__name__: loop for loop in _LOOPS})


def plain_loops() -> SimpleNamespace:
    """Return the loops, by name, as plain Python."""
    return _PLAIN


@lru_cache
def installed() -> bool:
    """Return whether numba is installed, and can be imported."""
    return find_spec("numba") is not None


def kernel(numbers: int, groups: int = 1, *, same_bits: bool = False) -> SimpleNamespace | None:
    """Return the loops, by name, to scan this many numbers with; None for array operations.

    The loops are compiled, or plain Python if there are few numbers. Results are bit-identical.
    Without numba, array operations are faster unless each group has only a few numbers. They round
    differently: with `same_bits`, plain loops are used instead.
    """
    if not installed():
        return _PLAIN if same_bits or numbers <= FEW * groups else None
    work = numbers if groups == 1 else GROUPED * numbers
    return _PLAIN if work < (SHORT if "numba" in sys.modules else LONG) else _compiled()


@lru_cache
def _compiled() -> SimpleNamespace | None:
    """Compile the loops of this file.

    numba renews the cache only when this file changes: after a change of `tailavg.core.equation`,
    change this file, too.
    """
    return compiled(_LOOPS, globals())


def compiled(
    loops: Sequence[Any], names: Mapping[str, Any], **options: Any
) -> SimpleNamespace | None:
    """Return compiled loops by name, or None if numba cannot be imported.

    Each is compiled when it is first called, or read from numba's cache on disk.

    Args:
        loops: Functions of one file.
        names: The globals of that file.
        **options: Options of `numba.njit`.
    """
    try:
        from numba import njit
    except ImportError as error:  # for example, numba does not support this NumPy
        warnings.warn(f"numba cannot be imported, so loops are slower: {error}", stacklevel=4)
        return None
    names = dict(names)  # the compiled loops find each other here, by the same names
    for loop in loops:
        copy = FunctionType(loop.__code__, names, loop.__name__)
        try:
            names[loop.__name__] = njit(cache=True, error_model="numpy", **options)(copy)
        except RuntimeError:  # there is no writable folder for a cache
            names[loop.__name__] = njit(error_model="numpy", **options)(copy)
    return SimpleNamespace(**{loop.__name__: names[loop.__name__] for loop in loops})
