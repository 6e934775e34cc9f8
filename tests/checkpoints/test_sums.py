"""Means of pieces, compiled and not: against Python's floats, rounded by exact fractions."""

import math
from bisect import bisect_left
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tailavg.checkpoints import average_checkpoints, loops, merge
from tailavg.checkpoints.sums import Mean

DTYPES = {
    name: np.dtype(getattr(np, name, None) or getattr(ml_dtypes, name))
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
}
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1e-45, -1e-39, 3e38, 6e-8, 65504.0]
WEIGHTS = [[1.0], [0.25, 0.75], [0.5, -0.5, 1.0], [0.1, 0.2, 0.3, 0.4], [1 / 3] * 3]


@pytest.fixture(params=["compiled", "numpy"])
def compiled(request):
    """The loops of numba, or None."""
    if request.param == "numpy":
        return None
    pytest.importorskip("numba", reason="numba is not installed: there are no compiled loops")
    return loops.merge_loops(loops.LONG)


def bits(array):
    return array.view(f"u{array.itemsize}")


def pieces(dtype, count, seed=0, size=3000):
    """Random numbers, all pairs of special ones, NaN with payloads, and numbers that stay."""
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        made = rng.normal(size=(count, size)).astype(dtype)
        special = rng.choice(SPECIAL, (count, size // 4)).astype(dtype)
    made[:, : size // 4] = special
    anything = rng.integers(0, 256, (count, size // 4 * dtype.itemsize), np.uint8).view(dtype)
    made[:, size // 4 : size // 2] = anything
    made[1:, ::5] = made[0, ::5]
    return made


def mean_of(rows, weights, compiled, to=None):
    """The mean of the library; a mean of something else before leaves no trace."""
    size = rows.shape[1]
    mean, out = Mean(size + 7, compiled), np.empty(size, to or rows.dtype)
    with np.errstate(all="ignore"):
        for _ in range(2):
            mean.add(np.full(size // 2, 7, DTYPES["float64"]), 0.5)
            mean.round_into(np.empty(size // 2), DTYPES["float64"])
        for row, weight in zip(rows, weights, strict=True):
            mean.add(row, weight)
        mean.round_into(out, rows.dtype)
    return out


def finite(dtype):
    """All finite numbers of a dtype of at most 16 bits, by value, with their bits."""
    every = np.arange(2 ** (8 * dtype.itemsize)).astype(f"u{dtype.itemsize}").view(dtype)
    with np.errstate(all="ignore"):
        values = [(float(x), int(code)) for code, x in enumerate(every)]
    return sorted((x, code) for x, code in values if math.isfinite(x) and math.copysign(1, x) > 0)


def nearest(number, table, above):
    """The bits of the nearest number, to even; `above` are the bits beyond the largest."""
    size, place = Fraction(abs(number)), bisect_left(table, (abs(number), -1))
    if place == len(table):
        top, under = Fraction(table[-1][0]), Fraction(table[-2][0])
        return above if size - top >= (top - under) / 2 else table[-1][1]
    if place == 0:
        return table[0][1]
    (low, low_bits), (high, high_bits) = table[place - 1 : place + 1]
    below, beyond = size - Fraction(low), Fraction(high) - size
    if below == beyond:
        return low_bits if low_bits % 2 == 0 else high_bits
    return low_bits if below < beyond else high_bits


def in_python(rows, weights):
    """The sums in Python's floats, in the order of the rows."""
    columns = rows.astype(np.float64).T.tolist()
    sums = []
    for column in columns:
        total = column[0] * weights[0]
        for x, weight in zip(column[1:], weights[1:], strict=True):
            total += x * weight
        sums.append(total)
    return sums


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", DTYPES)
def test_means(name, weights, compiled):
    rows = pieces(DTYPES[name], len(weights))
    with np.errstate(all="ignore"):
        exact = in_python(rows, weights)
    got = mean_of(rows, weights, compiled)
    same = (bits(rows) == bits(rows[0])).all(axis=0)
    assert same.mean() >= 0.2
    assert bits(got)[same].tolist() == bits(rows[0])[same].tolist()
    if DTYPES[name].itemsize <= 2 and weights != [1.0]:
        check_rounded(got, exact, ~same)
    else:  # NumPy's own casts round once
        with np.errstate(all="ignore"):
            expected = np.array(exact).astype(DTYPES[name])
        assert_same_numbers(got[~same], expected[~same])


def check_rounded(got, exact, where):
    """Check each number against the table of all numbers of its dtype."""
    dtype, table = got.dtype, finite(got.dtype)
    with np.errstate(all="ignore"):
        above = int(bits(np.array([math.inf]).astype(dtype))[0])
    sign = 1 << (8 * dtype.itemsize - 1)
    for code, number in zip(bits(got)[where].tolist(), np.array(exact)[where], strict=True):
        if math.isnan(number):
            assert math.isnan(float(np.array([code], bits(got).dtype).view(dtype)[0]))
            continue
        beyond = math.isinf(number)
        expected = above if beyond else nearest(float(number), table, above)
        if above & (sign - 1) != expected or not math.isnan(float(dtype.type(math.inf))):
            assert code == expected | sign * (math.copysign(1, number) < 0), number


def assert_same_numbers(got, expected):
    """Bit for bit, except for the payloads of NaN."""
    nan = np.isnan(expected)
    assert np.isnan(got[nan]).all()
    assert bits(got)[~nan].tolist() == bits(expected)[~nan].tolist()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_halfway_cases(name, compiled):
    """Numbers halfway between two, and their neighbours in float64, from tiny to too large."""
    dtype = DTYPES[name]
    numbers = np.array([x for x, _ in finite(dtype)])
    middle = (numbers[1:] + numbers[:-1]) / 2
    middle = np.concatenate([middle, -middle, [2 * numbers[-1] - middle[-1]]])
    middle = middle[:: max(1, len(middle) // 6000)]
    cases = np.concatenate([middle, np.nextafter(middle, math.inf), np.nextafter(middle, -9e99)])
    got = mean_of(np.stack([cases, np.zeros_like(cases)]), [1.0, 1.0], compiled, dtype)
    check_rounded(got, cases.tolist(), np.ones(len(cases), bool))


@pytest.mark.parametrize("to", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", DTYPES)
def test_compiled_means_in_other_dtypes_are_the_same(name, to):
    pytest.importorskip("numba", reason="numba is not installed: there are no compiled loops")
    rows = pieces(DTYPES[name], 3, seed=1)
    means = [
        mean_of(rows, [0.3, 0.3, 0.4], each, DTYPES[to])
        for each in (None, loops.merge_loops(loops.LONG))
    ]
    assert_same_numbers(*means)


def test_few_numbers_do_not_import_numba(monkeypatch):
    monkeypatch.setattr(loops, "installed", lambda: True)
    monkeypatch.delitem(loops.sys.modules, "numba", raising=False)
    assert loops.merge_loops(loops.LONG - 1) is None
    monkeypatch.setattr(loops, "installed", lambda: False)
    assert loops.merge_loops(10**12) is None


def test_merges_in_many_pieces(tmp_path, monkeypatch, compiled):
    """More pieces than buffers: each buffer is used again and again, for two outputs."""
    monkeypatch.setattr(merge, "merge_loops", lambda _: compiled)
    monkeypatch.setattr(merge, "PIECE", 100)
    made = {name: pieces(DTYPES[name], 3, size=1240) for name in DTYPES}
    paths = [tmp_path / f"{step}.safetensors" for step in range(3)]
    for step, path in enumerate(paths):
        save_file({name: rows[step] for name, rows in made.items()}, path)
    weights = {"a": [0.25, 0.25, 0.5], "b": [0.0, 0.5, 0.5]}
    outputs = {str(tmp_path / f"{name}.safetensors"): row for name, row in weights.items()}
    average_checkpoints(paths, outputs)
    for output, row in outputs.items():
        got = average_checkpoints([output], 1)
        used = [step for step, weight in enumerate(row) if weight]
        for name, rows in made.items():
            newest_first = rows[used][::-1]
            expected = mean_of(newest_first, [row[step] for step in used][::-1], None)
            assert_same_numbers(got[name], expected)
