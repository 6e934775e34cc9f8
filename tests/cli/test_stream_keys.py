"""`tailavg stream --by`: many keys, each with few samples or many.

Here numba is not there; test_stream_arrival.py has it.
"""

import random
import tracemalloc

import numpy as np
import pytest

from tailavg import AnyTail, AnytimeWindow, ExactWindow, Exponential, Growing, TailAverage
from tailavg.cli.lines import CsvInput
from tailavg.cli.stream import Format, Session
from tests.support.streams import lines, same_digits

SHARED = AnyTail(12, 0.1)
READS = {
    "fraction": [(AnytimeWindow(0.25), None)],
    "count": [(AnytimeWindow(7), None)],
    "all": [(AnytimeWindow(1.0), None)],
    "capped": [(AnytimeWindow(Growing(0.5, at_most=6)), None)],
    "exponential": [(Exponential(0.25), None)],
    "exact": [(ExactWindow(5), None)],
    "windows": [(SHARED, Growing(0.1)), (AnytimeWindow(20), None), (SHARED, Growing(0.5))],
}


pytestmark = pytest.mark.usefixtures("without_numba")


def rows(odd=()):
    """Of 17 keys; some have one row."""
    random_ = random.Random(4)
    counts = [*(1 + i * i // 4 for i in range(15)), 32, 33]
    keys = [key for key, count in enumerate(counts) for _ in range(count)]
    random_.shuffle(keys)
    table = [
        (f"k{key}", f"{random_.gauss(3, 1):.4f}", f"{random_.gauss(0, 9):.4f}") for key in keys
    ]
    for i, number in enumerate(odd):
        table[100 + i] = ("k14", number, "1")
    return table


def session(reads, output=Format.plain, every=1):
    source = CsvInput(["x", "y"], "k")
    source.suffixes = [f"_{i}" for i in range(len(reads))]
    return Session(reads, source, output, every, False)


@np.errstate(all="ignore")
def answers(one, texts):
    return "".join(one.answer(text.encode()).decode() for text in texts)


@np.errstate(all="ignore")
def one_by_one(reads, table, every=1):
    """What the library says of each row."""
    held = {}
    text = ""
    for key, *numbers in table:
        averages = held.setdefault(
            key, [{rule: TailAverage(rule) for rule, _ in reads} for _ in numbers]
        )
        now = []
        for column, number in zip(averages, numbers, strict=True):
            for average in column.values():
                average.update(float(number))
            now += [column[rule].value(window) for rule, window in reads]
        if not next(iter(averages[0].values())).count % every:
            text += "\t".join([key, *(f"{x:.12g}" for x in now)]) + "\n"
    return text, held


def table_text(table):
    return [",".join(row) + "\n" for row in table]


@pytest.mark.parametrize("odd", [(), ("nan", "inf"), ("inf", "-inf"), ("-0.0", "0"), ("1e290",)])
@pytest.mark.parametrize("method", READS)
def test_each_key_has_the_averages_of_its_own_rows(method, odd):
    reads, table = READS[method], rows(odd)
    expected, held = one_by_one(reads, table)
    text = table_text(table)
    for size in (1, 10, 100, len(text)):
        one = session(reads)
        found = answers(one, ["k,x,y\n"])
        found += answers(one, ["".join(text[i : i + size]) for i in range(0, len(text), size)])
        assert same_digits(found, expected)
    for key, saved in one.averages.saved():
        whole = [average for column in held[key] for average in column.values()]
        states = [average.state_dict() for average in whole]
        own = [{name: state[name] for name in saved[0]} for state in states]
        assert repr(saved) == repr(own)


@pytest.mark.parametrize("output", [Format.plain, Format.csv, Format.jsonl])
def test_plain_and_quoted_keys_are_the_same(output):
    """The first are handled many at once, the others one by one."""
    text = table_text(rows())
    quoted = ['"' + row.replace(",", '",', 1) for row in text]
    plain = answers(session(READS["fraction"], output, 3), ["k,x,y\n" + "".join(text)])
    other = answers(session(READS["fraction"], output, 3), ["k,x,y\n" + "".join(quoted)])
    if output is Format.csv:
        other = other.replace('"', "")
    assert same_digits(plain, other)


@pytest.mark.parametrize("every", [1, 3, 40, 1000])
def test_every_nth_of_each_key(every):
    reads, table = READS["windows"], rows()
    expected, _ = one_by_one(reads, table, every)
    one = session(reads, every=every)
    assert same_digits(answers(one, ["k,x,y\n" + "".join(table_text(table))]), expected)


@pytest.mark.parametrize("method", READS)
def test_stop_and_go(tmp_path, method):
    reads, table = READS[method], rows()
    expected, _ = one_by_one(reads, table)
    found = ""
    text = table_text(table)
    for start in range(0, len(text), 50):
        one = session(reads)
        one.load(tmp_path / "state")
        found += answers(one, ["k,x,y\n" + "".join(text[start : start + 50])])
        one.save(tmp_path / "state")
    assert same_digits(found, expected)
    before = (tmp_path / "state").read_bytes()
    one = session(reads)
    one.load(tmp_path / "state")
    one.save(tmp_path / "state")
    assert (tmp_path / "state").read_bytes() == before


def test_a_key_takes_little_memory():
    one = Session(READS["fraction"], CsvInput(["x"], "k"), Format.plain, 1, False)
    answers(one, ["k,x\n"])
    keys = [f"key{i:07d}" for i in range(4000)]
    tracemalloc.start()
    for _ in range(3):  # a block has fewer rows than there are keys
        for start in range(0, len(keys), 500):
            answers(one, [lines(f"{key},1.5" for key in keys[start : start + 500])])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / len(keys) < 400
