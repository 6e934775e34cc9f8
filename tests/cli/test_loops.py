"""The loops from text to numbers and back, as they are and compiled."""

import math
import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailavg.cli import loops
from tailavg.cli.lines import format_numbers, parse_column, parse_numbers
from tests.support.streams import lines


@pytest.fixture(params=["plain", "compiled"], scope="module")
def kind(request):
    if request.param == "plain":
        return loops.plain
    pytest.importorskip("numba")
    return loops.compiled()


def parsed(kind, texts, place=0, width=1):
    """The numbers, and the cells that are left to Python; None if the rows are not as wide."""
    block = lines(texts).encode()
    numbers, odd = np.full(len(texts), 7.0), np.empty((len(texts), 3), np.int64)
    with np.errstate(over="ignore"):  # of what has too many digits
        found = kind.parse(np.frombuffer(block, np.uint8), place, width, numbers, odd)
    if found < 0:
        return None
    return numbers.tolist(), {row: block[start:end] for row, start, end in odd[:found].tolist()}


def check_parsed(kind, texts):
    """Each is read as `float` reads it, or left to Python; how many are left."""
    numbers, odd = parsed(kind, texts)
    for row, (text, number) in enumerate(zip(texts, numbers, strict=True)):
        if row in odd:
            assert odd[row] == text.encode()
        else:
            assert repr(number) == repr(float(text)), text
    return len(odd)


def any_float(random_):
    return struct.unpack("d", struct.pack("Q", random_.getrandbits(64)))[0]


def check_usual(kind, texts):
    assert check_parsed(kind, texts) == 0


def test_usual_numbers_are_not_left(kind):
    random_ = random.Random(1)
    for _ in range(20):
        scale = 10.0 ** random_.randint(-20, 20)
        texts = [f"{random_.gauss(0, scale)!r}" for _ in range(50)]
        texts += [f"{random_.gauss(0, 1):.{random_.randint(0, 17)}f}" for _ in range(20)]
        texts += [f"{random_.gauss(0, scale):.{random_.randint(0, 17)}e}" for _ in range(20)]
        check_usual(kind, texts)
    check_usual(kind, ["0", "-0", "-0.0", "0e9", "+1", "007", "5.", ".5", "-.5", "1E5", "1e+05"])
    check_usual(kind, ["0000000000000000000000001.5", "0.000000000000000000000000000123"])
    check_usual(kind, ["1e22", "1e23", "1e-22", "1e-23", "9007199254740993", "9007199254740992.5"])


def test_numbers_of_all_sizes(kind):
    random_ = random.Random(2)
    texts = []
    for _ in range(500):
        x = any_float(random_)
        texts += [repr(x), f"{x:.{random_.randint(0, 19)}e}"]
        texts += [f"{random_.getrandbits(64)}e{random_.randint(-345, 310)}"]
    check_parsed(kind, texts)


@pytest.mark.parametrize("power", [*range(-30, 56, 5), 22, 23, -4, -5, -27, -28])
def test_halves_and_their_neighbours(kind, power):
    """Half-way between two floats, if that has at most 19 digits, and next to it."""
    random_ = random.Random(power)
    texts = [f"{10**i}e{power - i}" for i in range(19)]
    for bits in (54, 55, 56, 60, 62, 63):
        middle = (random_.getrandbits(52) | 1 << 52) * 2 + 1 << bits - 54
        texts += [f"{middle + off}e{power}" for off in (-1, 0, 1)]
    for x in (10.0**power, math.nextafter(10.0**power, 0), math.nextafter(10.0**power, math.inf)):
        texts += [repr(x), f"{x:.16e}", f"{x:.17e}", f"{x:.18e}"]
    check_usual(kind, texts)


def test_at_the_ends_of_the_range(kind):
    texts = ["5e-324", "2e-324", "3e-324", "2.2250738585072011e-308", "2.2250738585072014e-308"]
    texts += ["4.4501477170144023e-308", "1.7976931348623157e308", "1.7976931348623159e308"]
    texts += [
        "8.98846567431158e307",
        "1e308",
        "1e309",
        "-1e400",
        "1e-400",
        "0e400",
        "1e99999999999",
    ]
    texts += ["0." + "0" * 400 + "1", "1" + "0" * 400, "1e-99999999999999999999"]
    check_parsed(kind, texts)


NO_NUMBERS = [
    "",
    "-",
    "+",
    ".",
    "-.",
    "e5",
    "1e",
    "1e+",
    ".e1",
    "1.2.3",
    "--1",
    "1-2",
    "1 2",
    "one",
]
OTHERS = [*NO_NUMBERS, "nan", "-inf", " 5 ", "1_000", "0x10", "1e5.5", "٣", "12345678901234567890"]


def test_what_is_odd_is_left(kind):
    numbers, odd = parsed(kind, ["1.5", *OTHERS, "-2.5"])
    assert list(odd) == list(range(1, len(OTHERS) + 1))
    assert [text.decode() for text in odd.values()] == OTHERS
    assert (numbers[0], numbers[-1]) == (1.5, -2.5)


def digits(most):
    return st.text("0123456789", max_size=most)


DECIMALS = st.builds(
    "{}{}{}{}{}".format,
    st.sampled_from(["", "-", "+"]),
    digits(22),
    st.sampled_from(["", "."]),
    digits(22),
    st.one_of(st.just(""), st.builds("e{}".format, st.integers(-400, 400))),
)
ANY = st.text(st.characters(max_codepoint=126, exclude_characters='\n,"'), max_size=12)
NEARLY = st.text("0123456789.eE+-", max_size=12)


@given(st.lists(st.one_of(DECIMALS, ANY, NEARLY), min_size=1, max_size=40))
def test_any_text(kind, texts):
    check_parsed(kind, texts)


@given(st.lists(st.floats(allow_nan=False).map(repr), min_size=1, max_size=40))
def test_any_float(kind, texts):
    check_parsed(kind, texts)


CELLS = st.one_of(ANY, st.floats().map(repr))


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n))))
def test_a_column(kind, table):
    if not table:
        return
    width = len(table[0])
    rows = [",".join(row) for row in table]
    for place in range(width):
        found = parsed(kind, rows, place, width)
        assert found is not None
        for row, number in enumerate(found[0]):
            text = table[row][place]
            if row in found[1]:
                assert found[1][row] == text.encode()
            else:
                assert repr(number) == repr(float(text))
        assert parsed(kind, [*rows, ",".join(["1"] * (width + 1))], place, width) is None
        if width > 1:
            assert parsed(kind, [*rows, ",".join(["1"] * (width - 1))], place, width) is None


def written(kind, numbers, width):
    wholes, exponents = np.empty((2, len(numbers)), np.int64)
    found = kind.twelve_digits(numbers, wholes, exponents)
    assert found == np.count_nonzero(wholes < 0)
    left = [b"%.12g" % number for number in numbers[wholes < 0].tolist()]
    texts = np.array(left, f"S{loops.WIDEST}").view(np.uint8).reshape(found, loops.WIDEST)
    out = np.empty(loops.WIDEST * len(numbers), np.uint8)
    size = kind.write(numbers, wholes, exponents, width, texts, out)
    return out[:size].tobytes().decode(), found


def check_written(kind, numbers):
    text, found = written(kind, np.array(numbers, float), 1)
    assert text.split("\n")[:-1] == [f"{float(x):.12g}" for x in numbers]
    return found


@given(st.lists(st.floats(), min_size=1, max_size=40))
def test_any_float_is_written(kind, numbers):
    check_written(kind, numbers)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(-12, 6))
def test_usual_floats_are_written(kind, numbers, power):
    check_written(kind, [x * 10.0**power for x in numbers])


@given(st.lists(st.integers(10**11, 10**12 - 1), min_size=1, max_size=20), st.integers(-3, 30))
def test_halves_are_written(kind, wholes, power):
    """Half-way between two decimals, and next to it."""
    halves = [math.ldexp(whole + 0.5, -power) for whole in wholes]
    near = [math.nextafter(x, goal) for x in halves for goal in (0, math.inf)]
    check_written(kind, [*halves, *near, *(-x for x in halves)])


def test_edges_are_written(kind):
    powers = [10.0**power for power in range(-16, 18)]
    powers += [math.nextafter(x, goal) for x in powers for goal in (0, math.inf)]
    odd = [0.0, -0.0, 5e-324, 1.7e308, math.nan, math.inf, -math.inf, -1.23456789012e-300]
    carried = [9.9999999999949 * 10.0**power for power in range(-13, 13)]
    carried += [9.9999999999951 * 10.0**power for power in range(-13, 13)]
    check_written(kind, [*powers, *odd, *carried, *(-x for x in carried)])
    assert check_written(kind, [0.0, -0.0, 1e-11, 123456789012.0, 1e-5, 0.0001, 7.0, 1200.0]) == 0


def test_rows_are_written(kind):
    numbers = np.array([1.5, math.nan, -20.0, 1e300, 0.25, 1e-9])
    assert written(kind, numbers, 2)[0] == "1.5\tnan\n-20\t1e+300\n0.25\t1e-09\n"
    assert written(kind, numbers, 3)[0] == "1.5\tnan\t-20\n1e+300\t0.25\t1e-09\n"


@given(st.lists(st.one_of(DECIMALS, NEARLY, st.floats().map(repr)), min_size=1, max_size=20))
def test_with_numba_and_without(texts):
    """The same numbers, or the same refusal."""
    pytest.importorskip("numba")
    block = lines(texts).encode()
    found = []
    for there in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tailavg.numpy.compiling.installed", lambda there=there: there)
            patch.setattr(loops, "LONG", 0)
            try:
                numbers = parse_numbers(block)
            except ValueError:
                found.append(None)
            else:
                found.append((numbers.tobytes(), format_numbers(numbers)))
    assert found[0] == found[1]


def test_a_column_of_numbers(numba):
    block = b"a,1.5,x\nb,nan,y\nc,-2e3,\n"
    assert repr(parse_column(block, 1, 3).tolist()) == "[1.5, nan, -2000.0]"
    for bad in (b"a,1.5\n", b"a,1,2,3\n", b"a,,3\n", b"a,1_0,3\n", b"a,one,3\n", b'a,"1",3\n'):
        with pytest.raises(ValueError, match=r"number|cells|float"):
            parse_column(block + bad, 1, 3)


def test_a_short_input_needs_no_numba(monkeypatch):
    def refuse():
        raise AssertionError("compiled")

    monkeypatch.setattr("tailavg.cli.lines._taken", 0)
    monkeypatch.setattr("tailavg.numpy.compiling.installed", lambda: True)
    monkeypatch.setattr(loops, "compiled", refuse)
    block = b"1.5\n" * 1000
    for _ in range(20):
        assert len(format_numbers(parse_numbers(block))) == len(block)
    with pytest.raises(AssertionError, match="compiled"):
        parse_numbers(block * 1100)
