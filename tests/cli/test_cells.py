"""Text to numbers and back, with pyarrow and without."""

import math
import random
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailavg.cli import cells
from tailavg.cli.cells import BlockReader, csv_line, format_numbers, split_cells
from tailavg.cli.lines import CsvInput, PlainInput
from tests.support.streams import RANDOM, lines

pytestmark = pytest.mark.usefixtures("pyarrow")


def is_number(text):
    """Whether `float` reads a text; but 1_000 is no number here."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def check_read(texts):
    """Each text is read as `float` reads it, alone and as a cell of CSV."""
    expected = [repr(float(text)) for text in texts]
    reader = BlockReader()
    assert list(map(repr, reader.numbers(lines(texts).encode()).tolist())) == expected
    table = lines(f"{i},{text},word" for i, text in enumerate(texts)).encode()
    numbers, keys = reader.table(table, 3, [1], 0)
    assert [repr(x) for (x,) in numbers.tolist()] == expected
    assert keys == [str(i) for i in range(len(texts))]


WHY = r"number|float|parse|cells|columns|CSV"  # float's, pyarrow's or our own


def check_refused(texts):
    def block(row):
        return lines(row.format(text) for text in texts).encode(errors="surrogateescape")

    with pytest.raises(ValueError, match=WHY):
        BlockReader().numbers(block("{}"))
    with pytest.raises(ValueError, match=WHY):
        BlockReader().table(block("{},1"), 2, [0], None)
    with pytest.raises(ValueError, match=WHY):
        BlockReader().table(block("1,{}"), 2, [1], 0)


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


@pytest.mark.parametrize(
    "texts",
    [
        ["0", "-0", "-0.0", "0e9", "007", "5.", ".5", "-.5", "1E5", "1e+05", "1.e5"],
        ["+1", "+.5", "-1"],
        ["nan", "NaN", "-nan", "inf", "-Infinity", "INF"],
        [" 5 ", "\t-2.5", "6 ", "\x0b7", "1"],
        ["٣", "1"],  # a digit of another script
        ["1e400", "-1e400", "1e-400", "1e999999", "-1e999999", "1e-999999", "0e999999"],
        ["1e99999999999999999999", "1e-99999999999999999999", "1e0000000000000000005"],
        ["1" * 400, "0" * 400 + "1", "0." + "0" * 400 + "1", "1" * 400 + "e-400", "9" * 19],
        ["5e-324", "2e-324", "3e-324", "2.4703282292062327e-324", "2.4703282292062328e-324"],
        ["2.2250738585072011e-308", "2.2250738585072014e-308", "4.4501477170144023e-308"],
        ["1.7976931348623157e308", "1.7976931348623159e308", "8.98846567431158e307", "1e309"],
        ["1e22", "1e23", "1e-22", "1e-23", "9007199254740993", "9007199254740992.5"],
    ],
    ids=lambda texts: texts[0][:20],
)
def test_odd_numbers_are_read(texts):
    check_read(texts)
    check_read(["1.5", *texts, "2.5"])


def test_numbers_of_all_sizes():
    random_ = random.Random(2)
    texts = []
    for _ in range(2000):
        x = struct.unpack("d", struct.pack("Q", random_.getrandbits(64)))[0]
        texts += [repr(x), f"{x:.{random_.randint(0, 25)}e}"]
        texts += [f"{random_.getrandbits(64)}e{random_.randint(-345, 310)}"]
    check_read([text for text in texts if "n" not in text])


def test_numbers_half_way_between_floats():
    """Exactly half-way, which rounds to even, and next to it in the last of many digits."""
    random_ = random.Random(3)
    texts = [f"{odd * 5**i}e-{i}" for odd in range(2**53 + 1, 2**53 + 99, 2) for i in range(5)]
    for _ in range(500):
        x = random_.uniform(1, 10) * 10.0 ** random_.randint(-300, 300)
        middle = Fraction(x) + Fraction(math.ulp(x)) / 2
        for digits in (17, 18, 19, 40):
            power = digits - math.floor(math.log10(x))
            whole = round(middle * Fraction(10) ** power)
            texts += [f"{whole + off}e{-power}" for off in (-1, 0, 1)]
    check_read(texts)


NO_NUMBERS = ["", "-", "+", ".", "-.", "e5", "1e", "1e+", ".e1", "1.2.3", "1e5.5", "--1", "1-2"]
NO_NUMBERS += ["2-", "1 2", "1_000", "0x10", "0x1p3", "one", "1,5", "1e5_0", "5f", "1d5", "1.5\0"]
NO_NUMBERS += ["NA", "null", "NULL", "N/A", "#N/A", "nan(1)", "true", "True", "1.000,5", "½", "²"]
NO_NUMBERS += ["2024-01-01", "12:30", "1'000", "50%", "\ufeff1", "1;2", "(1)", "$1", "\udcff"]


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
ANY = st.text(st.characters(max_codepoint=126, exclude_characters='\n\r,"'), max_size=12)
NEARLY = st.text("0123456789.eE+-", max_size=12)
ODD = st.sampled_from(["nan", "-inf", " 5 ", "12345678901234567890", "1e999999"])
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


def test_columns_and_keys():
    rows = [[f"{i}", f"{x:.3f}", "wörd" * (i % 3)] for i, x in enumerate(RANDOM.normal(size=9000))]
    block = lines(",".join(row) for row in rows).encode()
    numbers, keys = BlockReader().table(block, 3, [1, 0], 2)
    assert numbers.tolist() == [[float(row[1]), float(row[0])] for row in rows]
    assert keys == [row[2] for row in rows]
    numbers, keys = BlockReader().table(block, 3, [0], 0)
    assert keys == [row[0] for row in rows] == [f"{x:.0f}" for (x,) in numbers.tolist()]


def test_keys_of_any_bytes():
    block = b"\xff\xfe,1\nNA,2\n,3\n\0,4\n \xe2\x80\xa8\t,5\n_,6\n"
    numbers, keys = BlockReader().table(block, 2, [1], 0)
    assert numbers[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert keys == ["\udcff\udcfe", "NA", "", "\0", " \u2028\t", "_"]


def test_quoted_cells():
    numbers, keys = BlockReader().table(b'"1.5","a, ""b"""\n2,c\n', 2, [0], 1)
    assert (numbers.tolist(), keys) == ([[1.5], [2.0]], ['a, "b"', "c"])


@pytest.mark.parametrize(
    "bad",
    [
        "1,2",
        "1,2,3,4",
        "",
        "1,,3",
        "1,1_0,3",
        "1,one,3",
        '1,"2,3',
        '1,"2\n3",4',
        '1,"2"x,3',
        "1,2\r3,4",
    ],
)
def test_a_block_with_an_odd_row_is_refused(bad):
    good = "a,1.5,x\n"
    for text in (f"{good}{bad}\n", f"{bad}\n{good}"):
        with pytest.raises(ValueError, match=WHY):
            BlockReader().table(text.encode(), 3, [1], None)


ROW_PARTS = st.sampled_from(["1", "-2.5", "x", ",", ",", '"', '""', "\r", " ", "_", "\ufeff", "\0"])
ROW = st.lists(ROW_PARTS, max_size=7).map("".join)


@given(st.lists(st.one_of(st.just("1,2"), st.just("-3,x"), ROW), min_size=1, max_size=4))
@example(["\ufeff1,x", "2,y"])
@example(["1,x\r", "2,y"])
@example(["1,x\r2,y"])
@example(['1,"x', '2",y'])
@example(['1,"x, y"', '"2",z'])
def test_a_block_is_what_its_lines_are(rows):
    """Or it is refused: then its lines are parsed one by one."""
    block = lines(rows).encode()
    for source, names in ((CsvInput(["a"], "b"), ["a", "b"]), (PlainInput(["a"], None), ["a"])):
        source.names = names
        try:
            numbers, keys = source.take(block)
        except ValueError:
            continue
        parsed = [source.parse(row) for row in rows]
        assert numbers.tolist() == [row.numbers for row in parsed]
        assert keys == ([row.key for row in parsed] if source.by else [])


@given(st.lists(st.text(st.characters(exclude_characters="\r\n")), min_size=1))
def test_cells_of_a_line(row):
    if row != [""]:  # which csv writes in quotes
        assert split_cells(csv_line(row)) == row


# To text


@given(st.lists(st.floats(), min_size=1, max_size=40))
def test_any_float_is_written(numbers):
    check_written(numbers)


def test_many_floats_are_written():
    scale = 10.0 ** RANDOM.integers(-20, 20, 30_000)
    check_written((RANDOM.normal(size=30_000) * scale).tolist())
    powers = [10.0**power for power in range(-16, 18)]
    powers += [math.nextafter(x, goal) for x in powers for goal in (0, math.inf)]
    odd = [0.0, -0.0, 5e-324, -1.7e308, math.nan, math.inf, -math.inf, -1.23456789012e-300]
    halves = [math.ldexp(whole + 0.5, -9) for whole in range(10**11, 10**11 + 99)]
    check_written([*powers, *odd, *halves, 999999999999.5, 9.999999999995, 9.99999999999499])


@pytest.mark.parametrize(
    "rows",
    [
        RANDOM.normal(size=(9000, 3)),
        np.array([[1.5, math.nan, -1.23456789012e-300], [math.inf, 0.0, 1e15]]),
        np.ones((1, 20_000)),
        np.empty((0, 2)),
    ],
    ids=lambda rows: str(rows.shape),
)
def test_rows_of_numbers_are_written_with_tabs(rows):
    texts = ["\t".join(f"{x:.12g}" for x in row) for row in rows.tolist()]
    assert format_numbers(rows).decode() == lines(texts)


# When pyarrow is used


def test_a_short_input_needs_no_pyarrow(monkeypatch):
    def refuse():
        raise AssertionError("imported")

    monkeypatch.setattr(cells, "LONG", 4 << 20)
    monkeypatch.setattr(cells, "LARGE", 1 << 14)
    monkeypatch.setattr(cells, "_pyarrow", refuse)
    reader = BlockReader()
    large = b"1.5\n" * (1 << 18)
    for block in [*[large] * 3, *[b"1.5\n" * 100] * 9]:
        assert len(reader.numbers(block)) == block.count(b"\n")
    with pytest.raises(AssertionError, match="imported"):
        reader.numbers(large)


def test_pyarrow_reads_usual_blocks(pyarrow, monkeypatch):
    """Python reads none of them."""
    if not pyarrow:
        pytest.skip("pyarrow is not there")
    monkeypatch.delattr(cells, "_floats")
    assert BlockReader().numbers(b"1.5\n-2e3\n").tolist() == [1.5, -2000]
    numbers, keys = BlockReader().table(b"1,0.5,train\n2,.25,NA\n", 3, [1], 2)
    assert (numbers.tolist(), keys) == ([[0.5], [0.25]], ["train", "NA"])
