"""The output does not depend on how lines arrive: in blocks, alone, after a stop."""

import json
import math
import random

import numpy as np
import pytest

from tailavg import AnyTail, AnytimeWindow, ExactWindow, Exponential, Growing, TailAverage
from tailavg.cli.averages import Averages
from tailavg.cli.lines import CsvInput, JsonInput, PlainInput
from tailavg.cli.stream import Format, Session
from tailavg.numpy import table as tables
from tests.support.streams import lines

SHARED = AnyTail(12, 0.1)
READS = {
    "fraction": [(AnytimeWindow(0.25), None)],
    "count": [(AnytimeWindow(20), None)],
    "one": [(AnytimeWindow(1), None)],
    "large": [(AnytimeWindow(1000), None)],
    "capped": [(AnytimeWindow(Growing(0.5, at_most=60)), None)],
    "exponential": [(Exponential(0.25), None)],
    "fixed exponential": [(Exponential(100), None)],
    "exact": [(ExactWindow(5), None)],
    "windows": [(SHARED, Growing(0.1)), (AnytimeWindow(20), None), (SHARED, Growing(0.5))],
}
ODD = [[], ["nan", "1", "inf", "-inf"], ["1e16", "-1e16"]]

pytestmark = pytest.mark.usefixtures("switched")


@np.errstate(all="ignore")
def answers(session, blocks):
    return "".join(session.answer(block.encode()).decode() for block in blocks)


def cut(texts, sizes):
    """Blocks of lines, of these sizes in turn."""
    found, start, turn = [], 0, 0
    while start < len(texts):
        size = sizes[turn % len(sizes)]
        found.append("".join(texts[start : start + size]))
        start, turn = start + size, turn + 1
    return found


WAYS = [[100], [3000], [1, 200, 3, 40, 29, 30, 31]]


def plain(reads):
    return Session(reads, PlainInput(["value"], None), Format.plain, 1, False)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("method", READS)
def test_numbers(tmp_path, method, odd):
    reads = READS[method]
    numbers = [f"{x:.4f}" for x in np.random.default_rng(3).normal(3, 1, 800)]
    numbers[300 : 300 + len(odd)] = odd
    texts = [f"{number}\n" for number in numbers]
    alone = answers(plain(reads), texts)
    for way in WAYS:
        assert answers(plain(reads), cut(texts, way)) == alone
    found = ""
    for block in cut(texts, [400, 1, 50]):
        session = plain(reads)
        session.load(tmp_path / "state")
        found += answers(session, [block])
        session.save(tmp_path / "state")
    assert found == alone


def table():
    """Of 18 keys; some have one row."""
    random_ = random.Random(4)
    keys = [i for i in range(18) for _ in range(1 + i * i // 4)]
    random_.shuffle(keys)
    return [(f"k{key}", random_.gauss(3, 1), random_.gauss(0, 9)) for key in keys]


def csv_lines():
    return [f"{key},{x:.4f},{y:.4f}\n" for key, x, y in table()]


def json_lines():
    return [json.dumps({"k": key, "x": x, "y": y}) + "\n" for key, x, y in table()]


def keyed(reads, kind, output=Format.plain, every=1, nan="propagate"):
    source = kind(["x", "y"], "k")
    source.suffixes = [f"_{i}" for i in range(len(reads))]
    session = Session(reads, source, output, every, False, nan)
    if kind is CsvInput:
        source.names = ["k", "x", "y"]
    return session


@np.errstate(all="ignore")
def one_by_one(reads, rows):
    """What the library says of each row, and what it holds in the end."""
    held, text = {}, ""
    for key, *numbers in rows:
        averages = held.setdefault(
            key, [{rule: TailAverage(rule) for rule, _ in reads} for _ in numbers]
        )
        now = []
        for column, number in zip(averages, numbers, strict=True):
            for average in column.values():
                average.update(number)
            now += [column[rule].value(window) for rule, window in reads]
        text += "\t".join([key, *(f"{x:.12g}" for x in now)]) + "\n"
    return text, held


@pytest.mark.parametrize("method", READS)
def test_keys(tmp_path, method):
    reads, texts = READS[method], csv_lines()
    alone = answers(keyed(reads, CsvInput), texts)
    rows = [(key, float(x), float(y)) for key, x, y in (text.split(",") for text in texts)]
    expected, held = one_by_one(reads, rows)
    if method != "exact":
        assert alone == expected
    for way in WAYS:
        session = keyed(reads, CsvInput)
        assert answers(session, cut(texts, way)) == alone
        assert len(session.averages) == 18
        for key, saved in session.averages.saved():
            whole = [average for column in held[key] for average in column.values()]
            states = [average.state_dict() for average in whole]
            assert repr(saved) == repr([{k: state[k] for k in saved[0]} for state in states])
    found = ""
    for block in cut(texts, [200, 1, 50, 100]):
        session = keyed(reads, CsvInput)
        session.load(tmp_path / "state")
        found += answers(session, [block])
        session.save(tmp_path / "state")
    assert found == alone


@pytest.mark.parametrize("method", READS)
def test_omitted_nans(tmp_path, method):
    """Each column leaves out its own; some columns of some keys have nothing else."""
    random_ = random.Random(5)
    rows = [
        (key, *(math.nan if key == gone or random_.random() < 0.3 else x for x, gone in numbers))
        for key, *numbers in ((key, (x, "k9"), (y, "k8")) for key, x, y in table())
    ]
    texts = [f"{key},{x:.4f},{y:.4f}\n" for key, x, y in rows]

    def session():
        return keyed(READS[method], CsvInput, nan="omit")

    alone = answers(session(), texts)
    for place in (0, 1):
        held = {}
        for (key, *numbers), line in zip(rows, alone.splitlines(), strict=True):
            averages = held.setdefault(
                key, [TailAverage(rule, nan_policy="omit") for rule, _ in READS[method]]
            )
            reads = len(averages)
            for i, (average, (_, window)) in enumerate(zip(averages, READS[method], strict=True)):
                average.update(round(numbers[place], 4))
                now = average.value(window) if average.count else math.nan
                answer = float(line.split("\t")[1 + place * reads + i])
                assert answer == pytest.approx(now, rel=1e-11, nan_ok=True)
    for way in WAYS:
        assert answers(session(), cut(texts, way)) == alone
    found = ""
    for block in cut(texts, [200, 1, 50, 100]):
        resumed = session()
        resumed.load(tmp_path / "state")
        found += answers(resumed, [block])
        resumed.save(tmp_path / "state")
    assert found == alone


@pytest.mark.parametrize("output", Format)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("kind", [CsvInput, JsonInput])
def test_outputs(kind, every, output):
    reads, texts = READS["windows"], csv_lines() if kind is CsvInput else json_lines()
    alone = answers(keyed(reads, kind, output, every), texts)
    for way in WAYS:
        assert answers(keyed(reads, kind, output, every), cut(texts, way)) == alone


def test_keys_with_more_rows_than_a_plan_has(monkeypatch):
    monkeypatch.setattr(tables, "LONGEST", 30)
    texts = csv_lines()
    for method in ("fraction", "count", "windows"):
        alone = answers(keyed(READS[method], CsvInput), texts)
        for way in ([3000], [200, 1]):
            assert answers(keyed(READS[method], CsvInput), cut(texts, way)) == alone


def test_keys_in_arrays_take_little_memory():
    averages = Averages(READS["fraction"], 1)
    for start in range(0, 10_000, 1000):
        keys = [f"key{i:07d}" for i in range(start, start + 1000)]
        averages.scan(np.ones((1000, 1)), keys)
    table = averages._tables[0]._table
    held = [part for part in vars(table).values() if isinstance(part, np.ndarray)]
    assert len(averages) == 10_000
    assert sum(part.nbytes for part in held) / 10_000 < 120
    assert lines(key for key, _ in averages.saved()).count("\n") == 10_000
