"""The loops of scans, one sample after another: plain Python, compiled by numba if it is installed.

Each loop does what `update` and `value` do one by one, with the same operations in the same order,
and gives the same bits. They are written so that they compile well: a run of samples is first
summed and then weighed, by a loop without branches.

A stream is a vector `xs` or the rows of a matrix; `out` is of its shape. What an average holds is
changed in place: `means` of its blocks, oldest first, and their `sizes`, the sum of the last `rest`
samples, which are in no mean yet, in `sums`. A window is five numbers: see `described`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from tailavg.core.clock import FOLD, SMALLEST, BlockClock, DecayClock, SampleClock
from tailavg.core.windows import NEVER, TIE, Fixed, Window
from tailavg.numpy import compiling
from tailavg.numpy.arithmetic import Array

__all__ = [
    "LONG",
    "compiles",
    "described",
    "fastest",
    "plain",
    "scan_blocks",
    "scan_exponential",
    "scan_samples",
    "split_weights",
]

LONG = 50_000
"""How many numbers plain loops scan before numba is imported, which takes half a second."""

SMALL = 24
"""Blocks of at most as many samples are weighed side by side."""

_TIE = float(TIE)
_ROOM = 1024  # samples that are handled together: they stay in the nearest cache
_TABLE = 1 << 16  # weights that are kept: more do not stay in a cache
_RAMP = np.arange(1.0, FOLD + 1.0)  # compiled code has no fast way from integers to floats

Described = tuple[float, float, float, float, float, float]


def described(window: Window) -> Described:
    """A window as numbers: k_t is t times the first by the second, between the next two.

    The fifth is 0 if a size is to be rounded where it misses a whole number by a `TIE`. The last is
    how much it grows with each sample, between its bounds.

    Examples:
        >>> from tailavg import Fixed, Growing
        >>> described(Growing(0.25, at_most=1000))
        (1.0, 4.0, 1.0, 1000.0, 1.0, 0.25)
        >>> described(Fixed(100))
        (0.0, 1.0, 100.0, 100.0, 1.0, 0.0)
    """
    if isinstance(window, Fixed):
        return 0.0, 1.0, float(window.k), float(window.k), 1.0, 0.0
    over, under, exact = window.ratio
    return over, under, 1.0, window.most, float(exact), window.c


def size_at(t: Any, window: Any) -> Any:
    """`Window.size`."""
    k = window[0] * t / window[1]
    if window[4] == 0.0:
        near = np.rint(k)
        k = near if abs(near - k) <= _TIE * k else k
    k = k if k > window[2] else window[2]
    return k if k < window[3] else window[3]


def decay_at(t: Any, window: Any) -> Any:
    """`Exponential.decay`."""
    before = size_at(t - 1.0, window)
    k = size_at(t, window)
    growth = k - before
    if before > 1.0 and k < window[3]:
        growth += window[5] - growth
    old = t - 1.0 if t - 1.0 < before else before
    excess = 1.0 - growth if t - 1.0 >= before else 0.0
    total = old + 1.0
    return abs((old - math.sqrt(old * excess / (total - excess))) / total)


def split_weights(old: Any, newer: Any, k: Any) -> Any:
    """The weights of each of `newer` samples, and of the mean of `old` ones before them.

    `tailavg.core.equation.join` with one division: its g is (old - q newer) / total, and what is
    left for each newer sample (1 + q) / total, where q² = old excess / (k newer).
    """
    total = old + newer
    excess = total - k
    excess = excess if excess > 0.0 else 0.0
    under = k * newer
    inverse = 1.0 / (under * total)
    q = math.sqrt(old * excess * total * inverse)
    inverse *= under  # 1 / total
    return (1.0 + q) * inverse, (old - q * newer) * inverse


def joined_number(mean: Any, summed: Any, total: Any, weight: Any, carry: Any, kind: Any) -> Any:
    """`tailavg.numpy.arithmetic.joined`."""
    fresh = summed / kind(total)
    if weight == 1.0:
        return fresh, kind(0.0)
    step = (fresh - mean) * kind(weight)
    joint = mean + step
    lost = (step - (joint - mean)) * kind(carry)
    if lost - lost == 0.0:
        return joint, lost
    return mean * kind(1.0 - weight) + fresh * kind(weight), kind(0.0)


def fold_sums(means: Any, sums: Any, total: Any, weight: Any, carry: Any) -> None:
    """Fold each sum into the newest mean."""
    kind = sums.dtype.type
    for j in range(len(sums)):
        means[-1, j], sums[j] = joined_number(means[-1, j], sums[j], total, weight, carry, kind)


def turn_blocks(means: Any, sizes: Any, gone: int) -> None:
    """Open a block; that one makes room, or is merged with the one before it."""
    kind = means.dtype.type
    last = len(means) - 1
    if gone > 0:
        weight = sizes[gone] / (sizes[gone - 1] + sizes[gone])
        sizes[gone - 1] += sizes[gone]
        for j in range(means.shape[1]):
            merged = means[gone - 1, j] * kind(1.0 - weight) + means[gone, j] * kind(weight)
            means[gone - 1, j] = merged
    for block in range(gone, last):
        sizes[block] = sizes[block + 1]
        for j in range(means.shape[1]):
            means[block, j] = means[block + 1, j]
    sizes[last] = 0
    for j in range(means.shape[1]):
        means[last, j] = 0.0


def mean_since(means: Any, sizes: Any, first: int, rest: int, out: Any) -> int:
    """The mean of the samples from block `first` on that are in means, and how many they are."""
    kind = means.dtype.type
    last = len(means) - 1
    folded = -rest
    for block in range(first, last + 1):
        folded += sizes[block]
    for j in range(len(out)):
        mean = means[last, j]
        if first < last and folded > 0:
            mean = means[first, j] * kind(sizes[first] / folded)
            for block in range(first + 1, last):
                mean += means[block, j] * kind(sizes[block] / folded)
            if sizes[last] > rest:
                mean += means[last, j] * kind((sizes[last] - rest) / folded)
        out[j] = mean
    return folded


def running_sums(xs: Any, out: Any, total: Any) -> Any:
    """The sum after each sample."""
    for i in range(len(xs)):
        total += xs[i]
        out[i] = total
    return total


def weigh_evenly(out: Any, folded: Any, mean: Any) -> None:
    """From sums to averages, where no sample is older than those in `mean`."""
    kind = out.dtype.type
    for i in range(len(out)):
        newer = folded[1] + _RAMP[i]
        out[i] = out[i] / kind(newer) + kind(folded[0] / newer) * mean


def weigh_by_table(out: Any, folded: Any, mean: Any, old_mean: Any, each: Any, olds: Any) -> None:
    """From sums to averages, by weights that are known."""
    kind = out.dtype.type
    for i in range(len(out)):
        of_mean = kind(each[i] * folded) * mean
        out[i] = kind(each[i]) * out[i] + of_mean + kind(olds[i]) * old_mean


def weigh(out: Any, folded: Any, mean: Any, old: Any, old_mean: Any, t: Any, window: Any) -> None:
    """From sums to averages."""
    kind = out.dtype.type
    for i in range(len(out)):
        k = size_at(t + _RAMP[i], window)
        each, of_old = split_weights(old, folded[1] + _RAMP[i], k)
        of_mean = kind(each * folded[0]) * mean
        out[i] = kind(each) * out[i] + of_mean + kind(of_old) * old_mean


def fill_table(each: Any, olds: Any, size: int, closed: int, plan: Any, k: float) -> None:
    """The weights of the samples of one block, after so many others of the same size."""
    place = 0
    for run in range(len(plan)):
        oldest = plan[run, 1]
        if oldest >= 0:
            newer = (closed - 1 - oldest) * size
            for i in range(place, place + plan[run, 0]):
                each[i], olds[i] = split_weights(float(size), float(newer + i + 1), k)
        place += plan[run, 0]


def scan_numbers(
    xs: Any,
    out: Any,
    means: Any,
    sizes: Any,
    sums: Any,
    rest: int,
    t: int,
    plan: Any,
    repeats: int,
    window: Any,
    each: Any,
    olds: Any,
) -> int:
    """Scan numbers in blocks; returns how many are in the sum at the end.

    The plan is of `BlockClock.runs`. If it repeats with the same weights, they are in `each` and
    `olds`; otherwise these are empty.
    """
    newer_mean = np.empty(1, xs.dtype)
    last = len(means) - 1
    at = 0
    for _ in range(repeats):
        place = 0
        for run in range(len(plan)):
            oldest, gone = plan[run, 1], plan[run, 2]
            end = at + plan[run, 0]
            while at < end:
                if rest >= FOLD or (rest > 0 and gone >= 0):
                    fold_sums(means, sums, rest, rest / sizes[last], sizes[last])
                    rest = 0
                if gone >= 0:
                    turn_blocks(means, sizes, gone)
                    sums[0] = 0.0
                    gone = -1
                first = oldest + 1 if oldest >= 0 else last
                folded = mean_since(means, sizes, first, rest, newer_mean)
                counts = float(folded), float(folded + rest)
                mean = newer_mean[0]
                n = min(end - at, FOLD - rest)
                part = out[at : at + n]
                sums[0] = running_sums(xs[at : at + n], part, sums[0])
                old = sizes[oldest] if oldest >= 0 else 0
                if old == 0:
                    weigh_evenly(part, counts, mean)
                elif len(each):
                    weights, of_old = each[place : place + n], olds[place : place + n]
                    weigh_by_table(part, counts[0], mean, means[oldest, 0], weights, of_old)
                else:
                    weigh(part, counts, mean, float(old), means[oldest, 0], float(t), window)
                at += n
                t += n
                place += n
                rest += n
                sizes[last] += n
    return rest


def scan_small(
    xs: Any, out: Any, means: Any, sizes: Any, sums: Any, rest: int, plan: Any, each: Any, olds: Any
) -> int:
    """As `scan_numbers`, for many small blocks that are alike: side by side, a place at a time.

    Each block before is full, and the plan begins with a turn.
    """
    kind = xs.dtype.type
    closed, size = len(means) - 1, sizes[-1]
    if rest > 0:
        fold_sums(means, sums, rest, rest / size, size)
    most = max(1, _ROOM // size)
    held = np.empty(closed + most, xs.dtype)  # the means of blocks, and those of the ones before
    mean = np.empty(most, xs.dtype)
    for block in range(closed):
        held[block] = means[block + 1, 0]
    blocks = len(xs) // size
    for start in range(0, blocks, most):
        n = min(most, blocks - start)
        opened = start * size
        for block in range(n):
            at = opened + block * size
            total = running_sums(xs[at : at + size], out[at : at + size], kind(0.0))
            held[closed + block] = total / kind(size)
            sums[0] = total
        place = opened
        for run in range(len(plan)):
            length, oldest = plan[run, 0], plan[run, 1]
            first = oldest + 1 if oldest >= 0 else closed
            folded = (closed - first) * size
            for block in range(n):
                mean[block] = 0.0
            for newer in range(first, closed):
                share = kind(size / folded)
                for block in range(n):
                    mean[block] += held[block + newer] * share
            if oldest < 0:
                for i in range(length):
                    count = kind(place - opened + i + 1)
                    for block in range(n):
                        out[place + i + block * size] /= count
            elif size <= SMALL:
                for i in range(length):
                    share = each[place - opened + i]
                    weight, of_mean, of_old = (
                        kind(share),
                        kind(share * folded),
                        kind(olds[place - opened + i]),
                    )
                    for block in range(n):
                        at = place + i + block * size
                        older = of_mean * mean[block]
                        out[at] = weight * out[at] + older + of_old * held[block + oldest]
            else:
                weights = each[place - opened : place - opened + length]
                of_old = olds[place - opened : place - opened + length]
                for block in range(n):
                    at = place + block * size
                    part, old_mean = out[at : at + length], held[block + oldest]
                    weigh_by_table(part, float(folded), mean[block], old_mean, weights, of_old)
            place += length
        for block in range(closed):
            means[block, 0] = held[n - 1 + block]
        for block in range(closed):
            held[block] = held[n + block]
    means[closed, 0] = 0.0
    return int(size)


def scan_rows(
    xs: Any,
    out: Any,
    means: Any,
    sizes: Any,
    sums: Any,
    rest: int,
    t: int,
    plan: Any,
    repeats: int,
    window: Any,
) -> int:
    """As `scan_numbers`, for the rows of a matrix."""
    kind = xs.dtype.type
    mean = np.empty(len(sums), xs.dtype)
    last = len(means) - 1
    at = 0
    for _ in range(repeats):
        for run in range(len(plan)):
            oldest, gone = plan[run, 1], plan[run, 2]
            end = at + plan[run, 0]
            while at < end:
                if rest >= FOLD or (rest > 0 and gone >= 0):
                    fold_sums(means, sums, rest, rest / sizes[last], sizes[last])
                    rest = 0
                if gone >= 0:
                    turn_blocks(means, sizes, gone)
                    sums[:] = 0.0
                    gone = -1
                first = oldest + 1 if oldest >= 0 else last
                folded = mean_since(means, sizes, first, rest, mean)
                newer = folded + rest
                old = sizes[oldest] if oldest >= 0 else 0
                n = min(end - at, FOLD - rest)
                for i in range(at, at + n):
                    x, average = xs[i], out[i]
                    newer += 1
                    t += 1
                    if old == 0:
                        count, of_mean = kind(newer), kind(folded / newer)
                        for j in range(len(sums)):
                            sums[j] += x[j]
                            average[j] = sums[j] / count + of_mean * mean[j]
                    else:
                        k = size_at(float(t), window)
                        share, of_old = split_weights(float(old), float(newer), k)
                        each, of_mean, of_old = kind(share), kind(share * folded), kind(of_old)
                        old_mean = means[oldest]
                        for j in range(len(sums)):
                            sums[j] += x[j]
                            average[j] = each * sums[j] + of_mean * mean[j] + of_old * old_mean[j]
                at += n
                rest += n
                sizes[last] += n
    return rest


def group_rows(codes: Any, xs: Any, omit: bool, starts: Any, places: Any, grouped: Any) -> None:
    """Put rows of one group next to each other, in their order: a counting sort.

    A row without a group, whose code is -1, or with a NaN that is omitted, has no place: -1.
    """
    for i in range(len(xs)):
        if codes[i] >= 0 and not (omit and xs[i] != xs[i]):
            starts[codes[i] + 1] += 1
    for group in range(1, len(starts)):
        starts[group] += starts[group - 1]
    following = starts[:-1].copy()
    for i in range(len(xs)):
        places[i] = -1
        if codes[i] >= 0 and not (omit and xs[i] != xs[i]):
            place = following[codes[i]]
            following[codes[i]] = place + 1
            places[i] = place
            grouped[place] = xs[i]


def ungroup_rows(codes: Any, places: Any, averages: Any, latest: Any, out: Any) -> None:
    """Back to the order of the rows; one that was omitted has the latest average of its group."""
    for i in range(len(out)):
        if codes[i] < 0:
            out[i] = np.nan
            continue
        if places[i] >= 0:
            latest[codes[i]] = averages[places[i]]
        out[i] = latest[codes[i]]


def scan_groups(
    xs: Any,
    out: Any,
    starts: Any,
    means: Any,
    sizes: Any,
    sums: Any,
    rests: Any,
    counts: Any,
    plan: Any,
    ends: Any,
    window: Any,
) -> None:
    """`scan_numbers` for each group; one that goes on beyond the plan is left out.

    All share a plan, which is that from step 0 on. Its runs end at the steps `ends`.
    """
    none = np.empty(0)
    own = np.empty_like(plan)  # the part of the plan that a group goes through
    for group in range(len(counts)):
        first, until = starts[group], starts[group + 1]
        t, end = counts[group], counts[group] + until - first
        if t == end or end > ends[-1]:
            continue
        run = np.searchsorted(ends, t, side="right")
        runs, at = 0, t
        while at < end:
            begun = at > ends[run] - plan[run, 0]
            own[runs, 0] = min(end, ends[run]) - at
            own[runs, 1] = plan[run, 1]
            own[runs, 2] = -1 if begun else plan[run, 2]
            at += own[runs, 0]
            run += 1
            runs += 1
        rests[group] = scan_numbers(
            xs[first:until],
            out[first:until],
            means[group],
            sizes[group],
            sums[group],
            rests[group],
            t,
            own[:runs],
            1,
            window,
            none,
            none,
        )


def fill_factors(scales: Any, factors: Any, folded: int, least: int, window: Any) -> Any:
    """`tailavg.core.clock.factors`: how many there are, and the decay of the first sample."""
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


def sum_with_factors(xs: Any, out: Any, factors: Any, total: Any) -> Any:
    """As `running_sums`, of samples times factors."""
    kind = xs.dtype.type
    for i in range(len(xs)):
        total += xs[i] * kind(factors[i])
        out[i] = total
    return total


def weigh_decayed(out: Any, scales: Any, decay: Any, mean: Any) -> None:
    """From sums with factors to averages."""
    kind = out.dtype.type
    if decay == 0.0:  # 0 times a NaN would be a NaN
        for i in range(len(out)):
            out[i] = kind(scales[i]) * out[i]
    else:
        for i in range(len(out)):
            out[i] = kind(scales[i]) * out[i] + kind(decay * scales[i]) * mean


def scan_decaying(
    xs: Any, out: Any, means: Any, sums: Any, rest: int, t: int, steady: int, window: Any
) -> int:
    """Scan numbers in an exponential average; returns how many are in the sum at the end.

    The decay is constant from step `steady` on. If `out` is shorter than `xs`, it is room to work
    in, of `FOLD` numbers at least, and nothing is to be read from it.
    """
    scales, factors = np.empty(FOLD), np.empty(FOLD)
    write = len(out) >= len(xs)
    most, decay = fill_factors(scales, factors, t - rest, max(1, rest), window)
    at = 0
    while at < len(xs):
        if rest >= most:
            of_mean, of_sum = decay * scales[rest - 1], scales[rest - 1]
            if t - rest < steady:
                most, decay = fill_factors(scales, factors, t, 1, window)
            fold_sums(means, sums, (1.0 - of_mean) / of_sum, 1.0 - of_mean, decay)
            rest = 0
        n = min(len(xs) - at, most - rest)
        part = out[at : at + n] if write else out[:n]
        x, factor = xs[at : at + n], factors[rest : rest + n]
        sums[0] = sum_with_factors(x, part, factor, sums[0])
        if write:
            weigh_decayed(part, scales[rest : rest + n], decay, means[0, 0])
        at += n
        t += n
        rest += n
    return rest


def scan_decaying_rows(
    xs: Any, out: Any, means: Any, sums: Any, rest: int, t: int, steady: int, window: Any
) -> int:
    """As `scan_decaying`, for the rows of a matrix; without `out`, if that is shorter."""
    kind = xs.dtype.type
    scales, factors = np.empty(FOLD), np.empty(FOLD)
    write = len(out) >= len(xs)
    most, decay = fill_factors(scales, factors, t - rest, max(1, rest), window)
    for at in range(len(xs)):
        if rest >= most:
            of_mean, of_sum = decay * scales[rest - 1], scales[rest - 1]
            if t - rest < steady:
                most, decay = fill_factors(scales, factors, t, 1, window)
            fold_sums(means, sums, (1.0 - of_mean) / of_sum, 1.0 - of_mean, decay)
            rest = 0
        factor, x, mean = kind(factors[rest]), xs[at], means[0]
        for j in range(len(sums)):
            sums[j] += x[j] * factor
        if write:
            scale, kept, average = kind(scales[rest]), decay * scales[rest], out[at]
            for j in range(len(sums)):
                average[j] = scale * sums[j]
            if kept > 0.0:  # 0 times a NaN would be a NaN
                of_mean = kind(kept)
                for j in range(len(sums)):
                    average[j] += of_mean * mean[j]
        rest += 1
        t += 1
    return rest


def scan_decaying_groups(
    xs: Any,
    out: Any,
    starts: Any,
    means: Any,
    sums: Any,
    rests: Any,
    counts: Any,
    steady: int,
    window: Any,
) -> None:
    """`scan_decaying` for each group."""
    for group in range(len(counts)):
        first, until = starts[group], starts[group + 1]
        if first < until:
            rests[group] = scan_decaying(
                xs[first:until],
                out[first:until],
                means[group],
                sums[group],
                rests[group],
                counts[group],
                steady,
                window,
            )


def scan_exact(xs: Any, first: int, out: Any, t: int, window: Any, most: int) -> None:
    """Scan exact windows over numbers; `xs` has the last `first` of those before, too.

    A window of n samples is cut at the last multiple of the largest power of 2 up to n. What comes
    before the cut is summed backwards, what comes after it forwards: no sample is ever subtracted.
    `most` is the most samples that a window has.
    """
    before = np.zeros(most + 1)  # the sums of so many samples before the cut
    after = 0.0
    start = first - t  # where sample 0 would be
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


def scan_exact_rows(xs: Any, first: int, out: Any, t: int, window: Any, most: int) -> None:
    """As `scan_exact`, for the rows of a matrix."""
    before = np.zeros((most + 1, xs.shape[1]))
    after = np.zeros(xs.shape[1])
    start = first - t
    cut, power = -1, 1
    for i in range(len(out)):
        t += 1
        n = int(min(float(t), np.ceil(size_at(float(t), window))))
        while 2 * power <= n:
            power *= 2
        if t & -power != cut:
            cut = t & -power
            for size in range(1, n - (t - cut) + 1):
                for j in range(len(after)):
                    before[size, j] = before[size - 1, j] + xs[start + cut - size, j]
            after[:] = 0.0
            for row in range(start + cut, start + t - 1):
                for j in range(len(after)):
                    after[j] += xs[row, j]
        older, x = before[n - (t - cut)], xs[start + t - 1]
        for j in range(len(after)):
            if t > cut:
                after[j] += x[j]
            out[i, j] = (older[j] + after[j]) / n


_LOOPS: list[Any] = [
    size_at,
    decay_at,
    split_weights,
    joined_number,
    fold_sums,
    turn_blocks,
    mean_since,
    running_sums,
    weigh_evenly,
    weigh_by_table,
    weigh,
    fill_table,
    scan_numbers,
    scan_small,
    scan_rows,
    group_rows,
    ungroup_rows,
    scan_groups,
    fill_factors,
    sum_with_factors,
    weigh_decayed,
    scan_decaying,
    scan_decaying_rows,
    scan_decaying_groups,
    scan_exact,
    scan_exact_rows,
]

plain = compiling.together(_LOOPS)
"""The loops as they are."""

_taken = 0  # numbers that were scanned while numba was not imported


def compiles(dtype: np.dtype[Any]) -> bool:
    """Whether there are compiled loops for such samples."""
    return compiling.installed() and dtype in (np.float32, np.float64)


def fastest(numbers: int) -> SimpleNamespace:
    """The loops for so many numbers: compiled, or plain while there have been few. See `LONG`."""
    global _taken
    _taken += numbers + FOLD
    if _taken < LONG:
        return plain
    return _compiled() or plain


@lru_cache
def _compiled() -> SimpleNamespace | None:
    return compiling.compiled(_LOOPS, globals())


def scan_blocks(
    loops: SimpleNamespace,
    clock: BlockClock,
    means: Array,
    sums: Array,
    xs: Array,
    out: Array,
    window: Window,
) -> None:
    """Scan the rows of a matrix, with what an average holds in `means` and `sums`.

    The clock goes along.
    """
    t, start, described_window = clock.count, clock.count, described(window)
    sizes, rest = np.diff([*clock.blocks, t]), t - clock.folded
    for runs, repeats in clock.runs(t + len(xs), window):
        plan = np.array(runs)
        n = repeats * int(plan[:, 0].sum())
        part, averages = xs[t - start : t - start + n], out[t - start : t - start + n]
        if xs.shape[1] != 1 or xs.dtype != np.float64:
            rest = loops.scan_rows(
                part, averages, means, sizes, sums, rest, t, plan, repeats, described_window
            )
        else:
            numbers = part[:, 0], averages[:, 0], means, sizes, sums, rest
            each = olds = np.empty(0)
            block = n // repeats
            if repeats > 1 and block <= _TABLE and window.size(t + 1) == window.size(t + n):
                each, olds = np.empty(block), np.empty(block)
                loops.fill_table(each, olds, block, len(sizes) - 1, plan, window.size(t + n))
            if len(each) and block <= FOLD:
                rest = loops.scan_small(*numbers, plan, each, olds)
            else:
                rest = loops.scan_numbers(*numbers, t, plan, repeats, described_window, each, olds)
        t += n
    clock.resume(t, clock.blocks, t - int(rest))


def scan_exponential(
    loops: SimpleNamespace,
    clock: DecayClock,
    means: Array,
    sums: Array,
    xs: Array,
    out: Array | None,
) -> int:
    """As `scan_blocks`, for an exponential average; returns how many samples are in the sum.

    Without `out` nothing is written.
    """
    window = clock.rule.window
    steady = min(window.steady_from, NEVER)
    state = clock.count - clock.folded, clock.count, steady, described(window)
    out = np.empty((FOLD, len(sums)), xs.dtype) if out is None else out
    if len(sums) == 1 and xs.dtype == np.float64:
        return int(loops.scan_decaying(xs[:, 0], out[:, 0], means, sums, *state))
    return int(loops.scan_decaying_rows(xs, out, means, sums, *state))


def scan_samples(
    loops: SimpleNamespace, clock: SampleClock, before: Array, rows: Array, out: Array
) -> None:
    """Scan exact windows, of which the samples `before` are held."""
    t, window = clock.count, clock.rule.window
    xs = np.concatenate([before, rows], dtype=np.float64)
    most = clock.rule.samples(t + len(rows))
    how = t, described(window), most
    if xs.shape[1] == 1 and out.dtype == np.float64:
        loops.scan_exact(xs[:, 0], len(before), out[:, 0], *how)
    else:
        loops.scan_exact_rows(xs, len(before), out, *how)
