"""Text to numbers and back."""

import math

import numpy as np
import pytest

from tailavg.cli.lines import column, format_numbers, parse_numbers
from tests.support.streams import RANDOM, lines

pytestmark = pytest.mark.usefixtures("numba")


@pytest.mark.parametrize("digits", [0, 3, 9, 13, 16])
def test_numbers_are_read_as_float_reads_them(digits):
    spread = 10.0 ** RANDOM.integers(0, 6, 20_000)
    texts = [f"{x:.{digits}f}" for x in RANDOM.normal(size=20_000) * spread]
    texts += ["-0", "5.", ".5", "-.5", "007", "999999999999999", "0.000000000000001"]
    read = parse_numbers(lines(texts).encode()).tolist()
    assert list(map(repr, read)) == [repr(float(text)) for text in texts]


def test_numbers_half_way_between_floats_are_read_as_float_reads_them():
    middles = (2**60 + 128 + 256 * RANDOM.integers(0, 2**51, 5000)).tolist()
    texts = [str(whole + off) for whole in middles for off in (-1, 0, 1)]
    texts += [str(2**power - off) for power in range(54, 63) for off in (0, 1, 2, 64, 128)]
    texts += ["0.1234567890123456789012", "-12345678901234567890123", "9999999999999999999"]
    assert parse_numbers(lines(texts).encode()).tolist() == [float(text) for text in texts]


def test_numbers_of_all_kinds_in_one_block():
    texts = ["1", "-2.5", "1e-3", "+4", " 5 ", "nan", "-inf", "1e400", "12345678901234567890", "6"]
    read = parse_numbers(lines(texts).encode()).tolist()
    assert list(map(repr, read)) == [repr(float(text)) for text in texts]


@pytest.mark.parametrize(
    "line", ["", "-", ".", "-.", "1.2.3", "1-2", "2-", "--1", "1 2", "1_000", "0x10", "one", "1,5"]
)
def test_what_is_no_number_is_refused(line):
    for block in (f"{line}\n", f"{line}\n-1.5\n2\n", f"3\n-.5\n{line}\n"):
        with pytest.raises(ValueError, match=r"number|float"):
            parse_numbers(block.encode())


def test_numbers_are_written_as_printf_does():
    powers = 10.0 ** np.arange(-6, 16)
    numbers = np.concatenate(
        [
            RANDOM.normal(size=30_000) * 10.0 ** RANDOM.integers(-3, 11, 30_000),
            np.round(RANDOM.normal(size=10_000) * 1000, 2),
            RANDOM.integers(-(10**6), 10**6, 5000) / 2,
            [999999999999.5, 99999999999.95, 9.999999999995, 9.99999999999499, 0.0, -0.0],
            [math.nan, math.inf, -math.inf, 5e-324, -1.7e308, -1.23456789012e-300],
            *(np.nextafter(powers, goal) for goal in (0, 1e300)),
            powers,
            -powers,
        ]
    )
    for part in (numbers, numbers[-120:], numbers[-100:-90], numbers[:1]):
        assert format_numbers(part).decode() == "".join(f"{x:.12g}\n" for x in part.tolist())


def test_rows_of_numbers_are_written_with_tabs():
    for rows in (
        RANDOM.normal(size=(9000, 3)),
        np.array([[1.5, math.nan, -1.23456789012e-300], [math.inf, 0.0, 1e15]]),
        np.full((3, 2), math.nan),
        np.ones((1, 20_000)),
        np.empty((0, 2)),
    ):
        texts = ["\t".join(f"{x:.12g}" for x in row) for row in rows.tolist()]
        assert format_numbers(rows).decode() == lines(texts)


def test_a_column_of_cells():
    rows = [[f"{i}", f"{x:.3f}", "word" * (i % 3)] for i, x in enumerate(RANDOM.normal(size=9000))]
    block = lines(",".join(row) for row in rows).encode()
    for i in range(3):
        assert column(block, i, 3).decode().split("\n")[:-1] == [row[i] for row in rows]
    for uneven in (b"1,2,3\n4,5\n6,7,8,9\n", b'1,"2",3\n', b"1,2\n", b"1,2,3\n\n"):
        assert column(uneven, 1, 3) is None
    assert column(b"1\n2\n", 0, 1) == b"1\n2\n"
