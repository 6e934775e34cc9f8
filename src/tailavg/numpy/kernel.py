"""The loops of scans: plain Python, compiled by numba if it is installed.

Each loop does what `update` and `value` do sample by sample, with the same operations in the same
order, so results are bit-identical. `tailavg.numpy.table` calls the loops. Without numba it calls
the array operations of `tailavg.numpy.fallback` instead.

Samples are the rows of a matrix `xs`, and the averages after each sample are the rows of `out`; a
stream of numbers is a matrix with one column. The state is changed in place: the `means` and
`starts` of the blocks, oldest first, and in `sums` the sum of the samples since step `folded`. A
window is a tuple of six numbers: see `window_numbers`.

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

__all__ = ["LONG", "SHORT", "compiled", "installed", "kernel", "window_numbers"]

LONG = 20_000
"""From this many numbers on, numba saves more time than its import takes, half a second."""

SHORT = 1_000
"""Below this many numbers, plain loops are faster than reading numba's cache."""

FEW = 30
"""Up to this many numbers, plain loops are as fast as array operations."""

GROUPED = 10
"""With many groups, one number takes as long as this many numbers of a single group."""

_TIE = float(TIE)
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


def fold_sums(means: Any, sums: Any, total: Any, weight: Any, carry: Any) -> None:
    """Merge the sums into the newest means, as `tailavg.numpy.arithmetic.joined` does."""
    kind = sums.dtype.type
    mean = means[-1]
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


def open_block(means: Any, starts: Any, gone: int, t: int) -> None:
    """Open a block at step t. Block `gone` is dropped, or merged with the one before it."""
    kind = means.dtype.type
    last = len(starts) - 1
    if gone > 0:
        end = starts[gone + 1] if gone < last else t
        weight = (end - starts[gone]) / (end - starts[gone - 1])
        for j in range(means.shape[1]):
            kept = means[gone - 1, j] * kind(1.0 - weight)
            means[gone - 1, j] = kept + means[gone, j] * kind(weight)
    for block in range(gone, last):
        starts[block] = starts[block + 1]
        for j in range(means.shape[1]):
            means[block, j] = means[block + 1, j]
    starts[last] = t
    for j in range(means.shape[1]):
        means[last, j] = 0.0


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
    plan: Any,
    ends: Any,
    window: Any,
    steady: bool,
    each: Any,
    of_old: Any,
) -> None:
    """Scan samples into rows of a table: samples bounds[i, 0] to bounds[i, 1] into rows[i].

    `plan` has the runs of `BlockClock.runs`, and `ends` the steps at which the runs end. After its
    last run, the plan begins again. If the plan is `steady`, the weights repeat, too: they are kept
    in `each` and `of_old`.
    """
    width, last = xs.shape[1], starts.shape[1] - 1
    numbers, averages = xs.reshape(xs.size), out.reshape(out.size)
    blocks, sizes = np.empty(last + 1, np.int64), np.empty(last + 1)
    room = np.empty(FOLD, xs.dtype)
    begin = ends[0] - plan[0, 0]
    for i in range(len(rows)):
        row, at, stop = rows[i], bounds[i, 0], bounds[i, 1]
        t, fold, start, mean, total = counts[row], folded[row], starts[row], means[row], sums[row]
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
                fold_sums(mean, total, t - fold, (t - fold) / size, size)
                fold = t
            if turns:
                open_block(mean, start, gone, t)
                fold = t
                for j in range(width):
                    total[j] = 0.0
            first = oldest + 1 if oldest >= 0 else last
            old = start[first] - start[oldest] if oldest >= 0 else 0
            n = min(stop - at, end - t, FOLD - (t - fold))
            place = t - repeated - begin if steady else 0
            if repeated == 0 or not steady:
                new = float(t - start[first])
                fill_weights(each, of_old, place, n, float(old), new, float(t), window)
            newer = blocks[: newer_blocks(start, fold, first, blocks, sizes)]
            oldest = oldest if old > 0 else -1
            if width == 1:
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
            at += n
            t += n
            if t == end:
                run += 1
            if run == len(plan):
                run, repeated = 0, t - begin
        counts[row], folded[row] = t, fold


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
        fold_sums(means, sums, in_sum, in_sum / size, size)
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
    steady: int,
    window: Any,
) -> None:
    """Scan the samples of each row of a table into an exponential average.

    The decay is constant from step `steady` on. If `out` is empty, averages are not computed.
    """
    numbers, averages = xs.reshape(xs.size), out.reshape(out.size)
    scales, factors, room = np.empty(FOLD), np.empty(FOLD), np.empty(FOLD, xs.dtype)
    for group in range(len(counts)):
        at, end = bounds[group], bounds[group + 1]
        if at == end:
            continue
        t, in_sum = counts[group], counts[group] - folded[group]
        mean, total = means[group], sums[group]
        most, decay = fill_factors(scales, factors, t - in_sum, max(1, in_sum), window)
        while at < end:
            if in_sum >= most:
                of_mean, of_sum = decay * scales[in_sum - 1], scales[in_sum - 1]
                if t - in_sum < steady:
                    most, decay = fill_factors(scales, factors, t, 1, window)
                fold_sums(mean, total, (1.0 - of_mean) / of_sum, 1.0 - of_mean, decay)
                in_sum = 0
            n = min(end - at, most - in_sum)
            factor, scale = factors[in_sum : in_sum + n], scales[in_sum : in_sum + n]
            if xs.shape[1] == 1:
                if len(out):
                    chunk = averages[at : at + n]
                    total[0] = add_decaying(numbers[at : at + n], chunk, factor, total[0])
                    weigh_decayed(chunk, scale, decay, mean[0, 0])
                else:
                    total[0] = add_decaying(numbers[at : at + n], room, factor, total[0])
            else:
                rows = out[at : at + n] if len(out) else out
                scan_decaying_rows(xs[at : at + n], rows, mean[0], total, factor, scale, decay)
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
    scan_blocks,
    scan_small_blocks,
    fill_factors,
    add_decaying,
    weigh_decayed,
    scan_decaying_rows,
    scan_decaying,
    scan_exact,
    sort_groups,
]

_PLAIN = SimpleNamespace(**{loop.__name__: loop for loop in _LOOPS})


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
