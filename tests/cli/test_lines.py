"""Text to numbers and back, with numba and without."""

import math
import random
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailavg.cli import loops
from tailavg.cli.lines import column, format_numbers, parse_column, parse_numbers
from tests.support.streams import RANDOM, lines

pytestmark = pytest.mark.usefixtures("numba")


def is_number(text):
    """Whether `float` reads a text; but 1_000 is no number here."""
    try:
        float(text.encode())
    except ValueError:
        return False
    return "_" not in text


def check_read(texts):
    """Each text is read as `float` reads it."""
    numbers = parse_numbers(lines(texts).encode()).tolist()
    assert list(map(repr, numbers)) == [repr(float(text)) for text in texts]


def check_refused(texts):
    with pytest.raises(ValueError, match=r"number|float"):
        parse_numbers(lines(texts).encode())


def check_written(numbers):
    """Each number is written as by printf."""
    written = format_numbers(np.array(numbers, float)).decode()
    assert written == lines(f"{float(x):.12g}" for x in numbers)


# To numbers


@pytest.mark.parametrize("digits", [0, 3, 9, 13, 16])
def test_usual_numbers_are_read(digits):
    spread = 10.0 ** RANDOM.integers(0, 6, 10_000)
    texts = [f"{x:.{digits}f}" for x in RANDOM.normal(size=10_000) * spread]
    check_read([*texts, "-0", "5.", ".5", "-.5", "007", "999999999999999", "0.000000000000001"])


def test_numbers_of_all_kinds_in_one_block():
    check_read(["1", "-2.5", "1e-3", "+4", " 5 ", "nan", "-inf", "1e400", "12345678901234567890"])
    check_read(["0", "-0", "-0.0", "0e9", "+1", "007", "5.", ".5", "-.5", "1E5", "1e+05"])
    check_read(["0000000000000000000000001.5", "0.000000000000000000000000000123", "0e400"])
    check_read(["1e22", "1e23", "1e-22", "1e-23", "9007199254740993", "9007199254740992.5"])


def test_numbers_of_all_sizes():
    random_ = random.Random(2)
    texts = []
    for _ in range(500):
        x = struct.unpack("d", struct.pack("Q", random_.getrandbits(64)))[0]
        texts += [repr(x), f"{x:.{random_.randint(0, 19)}e}"]
        texts += [f"{random_.getrandbits(64)}e{random_.randint(-345, 310)}"]
    for scale in [10.0**power for power in range(-20, 21)]:
        texts += [repr(random_.gauss(0, scale)) for _ in range(50)]
        texts += [f"{random_.gauss(0, scale):.{digits}e}" for digits in range(18)]
    check_read(texts)


def test_integers_half_way_between_floats():
    middles = (2**60 + 128 + 256 * RANDOM.integers(0, 2**51, 5000)).tolist()
    texts = [str(whole + off) for whole in middles for off in (-1, 0, 1)]
    texts += [str(2**power - off) for power in range(54, 63) for off in (0, 1, 2, 64, 128)]
    check_read([*texts, "0.1234567890123456789012", "-12345678901234567890123", "9" * 19])


def test_decimals_half_way_between_floats():
    """As near to half-way as 19 digits allow: rounded twice, some would be wrong."""
    texts = []
    for x in RANDOM.uniform(1, 10, 5000).tolist():
        middle = Fraction(x) + Fraction(math.ulp(x)) / 2
        whole, decimals = divmod(round(middle * 10**18), 10**18)
        texts.append(f"{whole}.{decimals:018}")
    check_read(texts)
    for power in range(5):  # exactly half-way
        odd = range(2**53 + 1, 2**53 + 200, 2)
        check_read([f"{number * 5**power}e-{power}" for number in odd])


@pytest.mark.parametrize("power", [*range(-30, 56, 5), 22, 23, -4, -5, -27, -28])
def test_halves_and_their_neighbours(power):
    """Half-way between two floats, if that has at most 19 digits, and next to it."""
    random_ = random.Random(power)
    texts = [f"{10**i}e{power - i}" for i in range(19)]
    for bits in (54, 55, 56, 60, 62, 63):
        middle = (random_.getrandbits(52) | 1 << 52) * 2 + 1 << bits - 54
        texts += [f"{middle + off}e{power}" for off in (-1, 0, 1)]
    for x in (10.0**power, math.nextafter(10.0**power, 0), math.nextafter(10.0**power, math.inf)):
        texts += [repr(x), f"{x:.16e}", f"{x:.17e}", f"{x:.18e}"]
    check_read(texts)


def test_at_the_ends_of_the_range():
    check_read(["5e-324", "2e-324", "3e-324", "2.2250738585072011e-308", "2.2250738585072014e-308"])
    check_read(["4.4501477170144023e-308", "1.7976931348623157e308", "1.7976931348623159e308"])
    check_read(["8.98846567431158e307", "1e308", "1e309", "-1e400", "1e-400", "1e99999999999"])
    check_read(["0." + "0" * 400 + "1", "1" + "0" * 400, "1e-99999999999999999999"])


NO_NUMBERS = ["", "-", "+", ".", "-.", "e5", "1e", "1e+", ".e1", "1.2.3", "1e5.5", "--1", "1-2"]
NO_NUMBERS += ["2-", "1 2", "1_000", "0x10", "one", "1,5", "٣"]


@pytest.mark.parametrize("line", NO_NUMBERS)
def test_what_is_no_number_is_refused(line):
    for texts in ([line], [line, "-1.5", "2"], ["3", "-.5", line]):
        check_refused(texts)


DIGITS = st.text("0123456789", max_size=22)
DECIMALS = st.builds(
    "{}{}{}{}{}".format,
    st.sampled_from(["", "-", "+"]),
    DIGITS,
    st.sampled_from(["", "."]),
    DIGITS,
    st.one_of(st.just(""), st.builds("e{}".format, st.integers(-400, 400))),
)
ANY = st.text(st.characters(max_codepoint=126, exclude_characters='\n,"'), max_size=12)
NEARLY = st.text("0123456789.eE+-", max_size=12)
ODD = st.sampled_from(["nan", "-inf", " 5 ", "12345678901234567890"])
NUMBERS = st.one_of(DECIMALS.filter(is_number), st.floats().map(repr), ODD)


@given(st.lists(NUMBERS, min_size=1, max_size=40))
def test_any_numbers_are_read(texts):
    check_read(texts)


@given(st.lists(NUMBERS, max_size=3), st.one_of(DECIMALS, ANY, NEARLY))
def test_any_text_is_read_or_refused(texts, text):
    for place in (0, len(texts)):
        check = check_read if is_number(text) else check_refused
        check([*texts[:place], text, *texts[place:]])


# Columns


def test_a_column_of_cells():
    rows = [[f"{i}", f"{x:.3f}", "word" * (i % 3)] for i, x in enumerate(RANDOM.normal(size=9000))]
    block = lines(",".join(row) for row in rows).encode()
    for i in range(3):
        assert column(block, i, 3).decode().split("\n")[:-1] == [row[i] for row in rows]
    for uneven in (b"1,2,3\n4,5\n6,7,8,9\n", b'1,"2",3\n', b"1,2\n", b"1,2,3\n\n"):
        assert column(uneven, 1, 3) is None
    assert column(b"1\n2\n", 0, 1) == b"1\n2\n"


def test_a_column_of_numbers():
    block = b"a,1.5,x\nb,nan,y\nc,-2e3,\n"
    assert repr(parse_column(block, 1, 3).tolist()) == "[1.5, nan, -2000.0]"
    for bad in (b"a,1.5\n", b"a,1,2,3\n", b"a,,3\n", b"a,1_0,3\n", b"a,one,3\n", b'a,"1",3\n'):
        with pytest.raises(ValueError, match=r"number|cells|float"):
            parse_column(block + bad, 1, 3)


@given(st.integers(1, 4), st.lists(st.floats().map(repr), min_size=4, max_size=40))
def test_any_column_of_numbers(width, cells):
    table = [cells[i : i + width] for i in range(0, len(cells) - width + 1, width)]
    block = lines(map(",".join, table)).encode()
    for place in range(width):
        expected = [repr(float(row[place])) for row in table]
        assert list(map(repr, parse_column(block, place, width).tolist())) == expected
        for other in {width - 1, width + 1} - {0}:
            with pytest.raises(ValueError, match=r"number|cells|float"):
                parse_column(block + lines([",".join(["1"] * other)]).encode(), place, width)


# To text


@given(st.lists(st.floats(), min_size=1, max_size=40))
def test_any_float_is_written(numbers):
    check_written(numbers)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(-12, 6))
def test_usual_floats_are_written(numbers, power):
    check_written([x * 10.0**power for x in numbers])


@given(st.lists(st.integers(10**11, 10**12 - 1), min_size=1, max_size=20), st.integers(-3, 30))
def test_halves_are_written(wholes, power):
    """Half-way between two decimals, and next to it."""
    halves = [math.ldexp(whole + 0.5, -power) for whole in wholes]
    near = [math.nextafter(x, goal) for x in halves for goal in (0, math.inf)]
    usual = [1.5] * 3 * len(near)  # of which there are enough for the fast way
    check_written([*halves, *near, *(-x for x in halves), *usual])


def test_many_floats_are_written():
    scale = 10.0 ** RANDOM.integers(-3, 11, 30_000)
    check_written((RANDOM.normal(size=30_000) * scale).tolist())
    check_written(np.round(RANDOM.normal(size=10_000) * 1000, 2).tolist())
    check_written((RANDOM.integers(-(10**6), 10**6, 5000) / 2).tolist())


@pytest.mark.parametrize("usual", [0, 1000])
def test_edges_are_written(usual):
    """Few of them among usual numbers, and nothing else."""
    powers = [10.0**power for power in range(-16, 18)]
    powers += [math.nextafter(x, goal) for x in powers for goal in (0, math.inf)]
    odd = [0.0, -0.0, 5e-324, -1.7e308, math.nan, math.inf, -math.inf, -1.23456789012e-300]
    odd += [999999999999.5, 99999999999.95, 9.999999999995, 9.99999999999499, 123456789012.0]
    carried = [9.9999999999949 * 10.0**power for power in range(-13, 13)]
    carried += [9.9999999999951 * 10.0**power for power in range(-13, 13)]
    check_written([*powers, *odd, *carried, *(-x for x in powers + carried), *[2.5] * usual])


@pytest.mark.parametrize(
    "rows",
    [
        RANDOM.normal(size=(9000, 3)),
        np.array([[1.5, math.nan, -1.23456789012e-300], [math.inf, 0.0, 1e15]]),
        np.array([[1.5, math.nan], [-20.0, 1e300], [0.25, 1e-9], *[[1.0, 2.0]] * 9]),
        np.full((3, 2), math.nan),
        np.ones((1, 20_000)),
        np.empty((0, 2)),
    ],
    ids=lambda rows: str(rows.shape),
)
def test_rows_of_numbers_are_written_with_tabs(rows):
    texts = ["\t".join(f"{x:.12g}" for x in row) for row in rows.tolist()]
    assert format_numbers(rows).decode() == lines(texts)


def test_a_short_input_needs_no_numba(monkeypatch):
    def refuse():
        raise AssertionError("compiled")

    monkeypatch.setattr("tailavg.cli.lines._taken", 0)
    monkeypatch.setattr("tailavg.numpy.compiling.installed", lambda: True)
    monkeypatch.setattr(loops, "LONG", 4 << 20)
    monkeypatch.setattr(loops, "compiled", refuse)
    block = b"1.5\n" * 1000
    for _ in range(20):
        assert len(format_numbers(parse_numbers(block))) == len(block)
    with pytest.raises(AssertionError, match="compiled"):
        parse_numbers(block * 1100)
