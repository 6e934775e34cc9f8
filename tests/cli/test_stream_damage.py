"""A damaged state of `tailavg stream`: refused in a line, or read as what it then says."""

import json
import random
import re

import numpy as np
import pytest
import typer

from tailavg import AnyTail, AnytimeWindow, ExactWindow, Exponential, Growing
from tailavg.cli.lines import CsvInput, PlainInput
from tailavg.cli.stream import Format, Session
from tests.support.effort import some
from tests.support.streams import failed, lines

SHARED = AnyTail(12, 0.1)
READS = [
    [(AnytimeWindow(0.25), None)],
    [(AnytimeWindow(3), None)],
    [(Exponential(0.25), None)],
    [(ExactWindow(5), None)],
    [(SHARED, Growing(0.1)), (AnytimeWindow(20), None), (SHARED, Growing(0.5))],
]
BY = "key,x,y\n" + lines(f"{'abcd'[i % 4 if i < 8 else 0]},{i}.5,{-i}" for i in range(60))


def session(reads, by):
    source = CsvInput(["x", "y"], "key") if by else PlainInput(["value"], None)
    source.suffixes = [f"_{i}" for i in range(len(reads))]
    return Session(reads, source, Format.csv, 1, False)


def saved(path, reads, by):
    one = session(reads, by)
    one.answer((BY if by else lines(range(50))).encode())
    one.save(path)
    return path.read_bytes()


def outcome(path, reads, by, capsys):
    """Load a state, and go on if it was loaded; whether it was."""
    one = session(reads, by)

    @np.errstate(all="ignore")
    def go():
        one.load(path)
        one.answer(b"a,1,2\nb,3,4\ne,5,6\n" if by else b"1\n2\n3\n")
        one.answer(b"a,1,2\n" * 100 if by else b"1\n" * 100)
        list(one.averages.saved())
        raise typer.Exit(0)

    with pytest.raises(typer.Exit) as end:
        go()
    told = capsys.readouterr().err
    assert end.value.exit_code == 0 or (told.startswith("tailavg: ") and len(told) < 2000)
    return end.value.exit_code == 0


ODD = [
    None,
    True,
    -1,
    0,
    7,
    2**63,
    10**400,
    -(10**30),
    1.5,
    float("nan"),
    float("inf"),
    1e308,
    "",
    "one",
    "\ud800",
    [],
    [None],
    [[1.0]],
    {},
    {"count": 1},
]


def places(value, path=()):
    """The way to each value in some JSON."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def put(value, path, new):
    if not path:
        return new
    changed = value.copy()
    changed[path[0]] = put(value[path[0]], path[1:], new)
    return changed


@pytest.mark.parametrize("by", [False, True])
@pytest.mark.parametrize("reads", READS, ids=lambda reads: type(reads[0][0]).__name__)
def test_any_value_in_any_place(tmp_path, capsys, reads, by):
    path = tmp_path / "state"
    rows = [json.loads(line) for line in saved(path, reads, by).splitlines()]
    random_ = random.Random(1)
    changes = [(row, place) for row, found in enumerate(rows) for place in places(found)]
    loaded = 0
    times = some(100, 300)
    for row, place in random_.choices(changes, k=times):
        damaged = [*rows[:row], put(rows[row], place, random_.choice(ODD)), *rows[row + 1 :]]
        path.write_text(lines(map(json.dumps, damaged)))
        loaded += outcome(path, reads, by, capsys)
    assert loaded < times / 3  # an average may well be another number


@pytest.mark.parametrize("by", [False, True])
def test_any_bytes(tmp_path, capsys, by):
    path = tmp_path / "state"
    whole = saved(path, READS[0], by)
    random_ = random.Random(2)
    for _ in range(some(200, 600)):
        damaged = bytearray(whole)
        start = random_.randrange(len(whole))
        match random_.randrange(4):
            case 0:
                del damaged[start:]
            case 1:
                del damaged[start : start + random_.randrange(1, 40)]
            case 2:
                damaged[start : start + 1] = random_.randbytes(random_.randrange(1, 6))
            case 3:
                there = random_.randrange(len(whole))
                damaged[start:start] = whole[there : there + random_.randrange(1, 99)]
        path.write_bytes(damaged)
        if outcome(path, READS[0], by, capsys):
            assert path.read_bytes().count(b"\n") >= whole.count(b"\n") - 1


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format": ' * 50_000,
        b'{"format": "tailavg stream", "version": ' + b"9" * 5000 + b"}",
        b"\x00" * 100,
        b"null",
        b'"\\ud800"',
    ],
)
def test_a_file_that_is_no_state(tmp_path, text):
    path = tmp_path / "state"
    path.write_bytes(text)
    _, told = failed("-w", "3", "--state", path, text="1\n")
    assert "expected a state saved by tailavg stream" in told
    assert len(told) < 600
    assert path.read_bytes() == text


@pytest.mark.parametrize("odd", ["null", "true", "1", '"1.5"', "[1.5]", "1e", "0x1"])
def test_samples_are_numbers(tmp_path, capsys, odd):
    """What is no number does not become a NaN."""
    path = tmp_path / "state"
    whole = saved(path, READS[0], True)
    damaged = re.sub(rb'"partial": [-.0-9]+', b'"partial": ' + odd.encode(), whole, count=1)
    assert damaged != whole
    path.write_bytes(damaged)
    assert not outcome(path, READS[0], True, capsys)


def test_a_key_too_few(tmp_path):
    """A state that lost a line is not read as if the key were new."""
    path, options = tmp_path / "state", ["-w", "9", "-c", "x", "--by", "k", "--state"]
    failed(*options, path, text="x,k\n2.5,a\n3.5,b\nbad,a\n")
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(rows[:-1]))
    _, told = failed(*options, path, text="1,a\n")
    assert "expected 2 keys, got 1" in told
