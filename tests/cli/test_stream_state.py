"""`tailavg stream`, live: answers at once, signals, and a state to go on from."""

import json
import signal
from itertools import pairwise

import numpy as np
import pytest

from tailavg import (
    AnyTail,
    AnytimeWindow,
    ExactWindow,
    Exponential,
    Growing,
    TailAverage,
    TailAverages,
)
from tailavg.cli.averages import Averages
from tailavg.cli.cells import BlockReader
from tailavg.cli.lines import CsvInput, PlainInput
from tailavg.cli.stream import Format, Session
from tests.support.streams import (
    CSV,
    JSON,
    LONG,
    NUMBERS,
    Live,
    close,
    done,
    expected,
    failed,
    lines,
    same_digits,
)


def test_a_line_is_answered_at_once():
    averages = expected(AnytimeWindow(0.25), NUMBERS)
    with Live("-w", "0.25") as live:
        answers = [live.ask(number) for number in NUMBERS]
    assert close("".join(answers), averages)


def test_half_a_line_is_waited_for():
    with Live("-w", "2") as live:
        assert live.ask("1") == "1\n"
        live.send("3")
        assert live.ask("0") == "15.5\n"


SHARED = AnyTail(12, 0.1)
READS = {
    "fraction": [(AnytimeWindow(0.25), None)],
    "count": [(AnytimeWindow(20), None)],
    "exponential": [(Exponential(0.25), None)],
    "exact": [(ExactWindow(50), None)],
    "windows": [(SHARED, Growing(0.1)), (AnytimeWindow(20), None), (SHARED, Growing(0.5))],
}


def answers(session, blocks):
    with np.errstate(all="ignore"):
        return "".join(session.answer(block.encode()).decode() for block in blocks)


def plain_session(reads):
    return Session(reads, PlainInput(["value"], None), Format.plain, 1, False)


@pytest.mark.usefixtures("without_numba")  # test_stream_arrival.py has it
@pytest.mark.parametrize("odd", [["nan"], ["-inf"], ["inf", "-inf"], ["1e290"]])
@pytest.mark.parametrize("method", READS)
def test_lines_one_by_one_are_a_block(method, odd):
    reads = READS[method]
    numbers = [f"{x:.4f}" for x in np.random.default_rng(3).normal(3, 1, 1000)]
    numbers[100 : 100 + len(odd)] = odd
    alone = answers(plain_session(reads), [f"{number}\n" for number in numbers])
    assert same_digits(alone, answers(plain_session(reads), [lines(numbers)]))
    few = [lines(numbers[i : i + 100]) for i in range(0, 1000, 100)]
    assert same_digits(alone, answers(plain_session(reads), few))
    averages = {rule: TailAverage(rule) for rule, _ in reads}
    rows = []
    with np.errstate(all="ignore"):
        for number in numbers:
            for average in averages.values():
                average.update(float(number))
            rows.append([averages[rule].value(window) for rule, window in reads])
    assert alone == lines("\t".join(f"{x:.12g}" for x in row) for row in rows)
    if method != "exponential":  # for which the past never ends
        assert all(1 < x < 5 for x in rows[-1])


@pytest.mark.parametrize("method", READS)
@pytest.mark.parametrize("kind", [PlainInput, CsvInput])
def test_a_line_alone_is_not_scanned(monkeypatch, method, kind):
    session = Session(READS[method], kind(["value"], None), Format.plain, 1, False)
    session.source.suffixes = [str(i) for i in range(len(session.reads))]
    header = "value\n" if kind is CsvInput else ""
    answers(session, [header + lines(NUMBERS)])
    held = len(json.dumps(list(session.averages.saved())))

    def refuse(*_):
        raise AssertionError("scanned")

    monkeypatch.setattr(Averages, "scan", refuse)
    monkeypatch.setattr(TailAverage, "scan", refuse)
    monkeypatch.setattr(TailAverages, "scan_parts", refuse)
    for name in ("numbers", "table"):
        monkeypatch.setattr(BlockReader, name, refuse)
    assert answers(session, [f"{number}\n" for number in NUMBERS]).count("\n") == len(NUMBERS)
    # nothing but the averages is kept, and they have not grown
    ((_, averages),) = session.averages.saved()
    assert {average["count"] for average in averages} == {2 * len(NUMBERS)}
    assert len(json.dumps(list(session.averages.saved()))) < 1.2 * held


def test_the_state_holds_averages(tmp_path):
    state = tmp_path / "state"
    done("--windows", "0.25,20,0.5", "-c", "loss", "-c", "step", "--state", state, text=CSV)
    head, (key, saved) = map(json.loads, state.read_text().splitlines())
    assert (head["keys"], key, len(saved)) == (1, "", 4)
    rules = [AnyTail(12, 0.25), AnytimeWindow(20)]
    for own, numbers, rule in zip(
        saved, [NUMBERS, NUMBERS, *[range(300)] * 2], rules * 2, strict=True
    ):
        whole = TailAverage(rule)
        whole.update_many([float(number) for number in numbers])
        loaded = TailAverage.from_state_dict(whole.state_dict() | own)
        assert (loaded.rule, loaded.count) == (rule, 300)
        window = 0.5 if isinstance(rule, AnyTail) else None
        assert loaded.value(window) == pytest.approx(whole.value(window), rel=1e-12)


METHODS = [
    ["-w", "0.25"],
    ["-w", "1000"],
    ["-w", "10", "--accumulators", "2"],
    ["-w", "0.25", "--method", "exponential"],
    ["-w", "100", "--method", "exponential"],
    ["-w", "50", "--method", "exact"],
    ["--windows", "0.1,1000,0.5,1.0"],
]


@pytest.mark.parametrize(
    ("options", "odd"),
    [
        *((method, None) for method in METHODS),
        (METHODS[0], "nan"),
        (METHODS[4], "inf"),
        (METHODS[6], "nan"),
    ],
)
def test_stop_and_go_is_never_stopping(tmp_path, options, odd):
    """To the digits written, wherever it is cut."""
    numbers = list(LONG)
    if odd:
        numbers[6000] = odd
    whole = done(*options, text=lines(numbers))
    parts = [
        done(*options, "--state", tmp_path / "state", text=lines(numbers[start:end]))
        for start, end in pairwise([0, 1, 4200, 6000, 6001, len(LONG)])
    ]
    assert same_digits("".join(parts), whole)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_the_whole_is_what_the_library_says():
    average = TailAverage(0.25)
    averages = []
    for number in LONG:
        average.update(float(number))
        averages.append(average.value())
    assert close(done("-w", "0.25", text=lines(LONG)), averages)


@pytest.mark.parametrize("output", ["plain", "csv", "jsonl"])
@pytest.mark.parametrize("by", [[], ["--by", "run"]])
@pytest.mark.parametrize(("option", "text"), [("--column", CSV), ("--field", JSON)])
def test_stop_and_go_with_columns_and_keys(tmp_path, option, text, by, output):
    options = ["-w", "0.5", option, "loss", option, "step", *by, "--format", output, "--every", "3"]
    whole = done(*options, text=text)
    rows = text.splitlines()
    parts = [
        done(*options, "--state", tmp_path / "state", text=lines(rows[start:end]))
        for start, end in pairwise([0, 1, 100, len(rows)])
    ]
    assert same_digits("".join(parts), whole)


def test_stop_and_go_with_several_windows_of_columns_and_keys(tmp_path):
    options = ["--windows", "0.25,5,1.0", "-c", "loss", "-c", "step", "--by", "run"]
    whole = done(*options, text=CSV)
    rows = CSV.splitlines()
    parts = [
        done(*options, "--state", tmp_path / "state", text=lines(rows[start:end]))
        for start, end in pairwise([0, 100, len(rows)])
    ]
    assert same_digits("".join(parts), whole)


def test_stop_and_go_with_both_infinities(tmp_path):
    """A state whose average is a NaN is read without a warning."""
    for options in METHODS:
        state = ["--state", tmp_path / "-".join(options)]
        parts = [done(*options, *state, text=text) for text in ("1\ninf\n-inf\n", "1\n2\n")]
        assert "".join(parts) == done(*options, text="1\ninf\n-inf\n1\n2\n")


def test_a_header_may_come_again(tmp_path):
    options = ["-w", "2", "-c", "x", "--format", "csv", "--state", tmp_path / "state"]
    assert done(*options, text="x,y\n1,2\n") == "x,y,x_average\n1,2,1\n"
    assert done(*options, text="x,y\n3,4\n") == "3,4,2\n"


@pytest.mark.parametrize(
    ("options", "number", "code"),
    [
        (METHODS[0], signal.SIGTERM, 143),
        (METHODS[1], signal.SIGINT, 130),
        (METHODS[2], signal.SIGHUP, 129),
        (METHODS[3], signal.SIGTERM, 143),
    ],
)
def test_signals_save_the_state(tmp_path, options, number, code):
    state = tmp_path / "state"
    with Live(*options, "--state", state) as live:
        before = [live.ask(x) for x in LONG[:20]]
        live.send("12")  # half a line is not a sample
        ended = live.stop(number)
    assert ended == (
        code,
        "",
        f"tailavg: stopped after line 20; the state so far is in {state}\n",
    )
    after = done(*options, "--state", state, text=lines(LONG[20:40]))
    assert same_digits("".join(before) + after, done(*options, text=lines(LONG[:40])))


def test_a_signal_in_the_midst_of_a_flood(tmp_path):
    """Then what was written, and the state, are those of the same number of lines."""
    state, feed = tmp_path / "state", tmp_path / "feed.txt"
    feed.write_text(lines(LONG) * 25)  # which is read in three blocks
    with Live("-w", "0.25", "--state", state, feed) as live:
        written = [live.process.stdout.readline()]
        live.process.send_signal(signal.SIGTERM)
        written += live.process.stdout.readlines()
        assert live.process.wait(timeout=300) == 143
        told = live.process.stderr.read()
    assert f"stopped after line {len(written)};" in told
    assert len(written) < 25 * len(LONG)
    following = (LONG * 25)[len(written) :][:100]
    after = done("-w", "0.25", "--state", state, text=lines(following))
    whole = done("-w", "0.25", feed).splitlines(keepends=True)
    assert same_digits("".join(written), "".join(whole[: len(written)]))
    assert same_digits(after, "".join(whole[len(written) :][:100]))


LOADED = [
    (["-w", "0.25"], NUMBERS),
    (["-w", "20", "--format", "csv"], NUMBERS),
    (["-w", "50", "--method", "exact"], NUMBERS),
    (["-w", "0.25", "--method", "exponential"], NUMBERS),
    (["--windows", "0.25"], NUMBERS),
    (["-w", "20", "--nan", "omit"], NUMBERS),
    (["-w", "0.25"], []),
]


@pytest.mark.parametrize(("options", "numbers"), LOADED)
def test_a_state_of_one_average_is_loaded_in_python(tmp_path, options, numbers):
    state = tmp_path / "state"
    *_, last = done(*options, "--state", state, text=lines(numbers)).split() or [""]
    average = TailAverage.load(state)
    assert average.count == len(numbers)
    assert average.nan_policy == ("omit" if "omit" in options else "propagate")
    if numbers:
        window = 0.25 if "--windows" in options else None
        assert f"{average.value(window):.12g}" == last.split(",")[-1]
        average.update(7.0)
        after = done(*options, "--state", state, text="7\n").split()[-1]
        assert f"{average.value(window):.12g}" == after.split(",")[-1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["-w", "2", "-c", "loss", "--by", "run"], "by 'run'"),
        (["-w", "2", "-c", "loss", "-c", "step"], "['loss_average', 'step_average']"),
        (["--windows", "2,5", "-c", "loss"], "['loss_average_2', 'loss_average_5']"),
    ],
)
def test_a_state_of_several_averages_is_not_loaded(tmp_path, options, told):
    state = tmp_path / "state"
    done(*options, "--state", state, text=CSV)
    with pytest.raises(ValueError, match="tailavg stream with one average can be loaded") as error:
        TailAverage.load(state)
    assert told in str(error.value)
    assert "tailavg stream --state" in str(error.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda _: "{}",
        lambda _: '{"format": "tailavg stream"',
        lambda text: text.replace('"version": 4', '"version": 5', 1),
        lambda text: text.replace('"count": 9', '"count": 7'),
        lambda text: text.splitlines()[0],
        lambda text: text.replace('"partial": ', '"parts": '),
    ],
)
def test_a_damaged_state_is_not_loaded(tmp_path, damage):
    state = tmp_path / "state"
    done("-w", "3", "--state", state, text=lines(range(1, 10)))
    state.write_text(damage(state.read_text()))
    with pytest.raises(ValueError, match=r"damaged, or not saved by tailavg|state: "):
        TailAverage.load(state)


def test_a_bad_row_leaves_the_state_of_what_came_before(tmp_path):
    state = tmp_path / "state"
    output, told = failed("-w", "3", "--state", state, text="1\n2\nbad\n")
    assert output == "1\n1.5\n"
    assert f"the state so far is in {state}" in told
    assert done("-w", "3", "--state", state, text="3\n") == "2\n"


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (["-w", "4"], "rule was"),
        (["-w", "3", "--method", "exact"], "rule was"),
        (["-w", "3", "-c", "x"], "input was plain, is csv"),
        (["-w", "3", "--format", "csv"], "format was plain, is csv"),
        (["-w", "3", "--nan", "omit"], "nan was propagate, is omit"),
        (["--windows", "3"], "averages was ['average'], is ['average_3']"),
        (["--windows", "3,0.5"], "rule was"),
    ],
)
def test_a_state_of_other_options_is_refused(tmp_path, other, told):
    state = tmp_path / "state"
    done("-w", "3", "--state", state, text="1\n2\n")
    saved = state.read_bytes()
    output, said = failed(*other, "--state", state, text="x\n1\n")
    assert not output
    assert told in said
    assert state.read_bytes() == saved


def test_a_state_of_other_windows_is_refused(tmp_path):
    state = tmp_path / "state"
    done("--windows", "0.1,0.5", "--state", state, text="1\n2\n")
    for other in ("0.1,0.6", "0.5,0.1", "0.1,0.5,1.0"):
        _, said = failed("--windows", other, "--state", state, text="1\n")
        assert "averages was ['average_0.1', 'average_0.5'], is" in said
    _, said = failed("--windows", "0.1,0.5", "--accumulators", "6", "--state", state, text="1\n")
    assert "rule was" in said


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: "",
        lambda text: text[: len(text) // 2],
        lambda _: "[]",
        lambda _: "{}",
        lambda _: "\x80\x00",
        lambda text: text.replace('"version": 4', '"version": 1', 1),
        lambda text: text.replace('"version": 4', '"version": 5', 1),
        lambda text: text.replace('"count": 9', '"count": 7'),
        lambda text: text.replace('"blocks": [', '"blocks": ["one", '),
        lambda text: text.replace('"blocks": [', '"blocks": [9.0, '),
        lambda text: text.replace('"partial": ', '"more": 1, "partial": '),
        lambda text: text.replace('["", [{', '["", [], [{'),
    ],
)
def test_a_damaged_state_is_refused(tmp_path, damage):
    state = tmp_path / "state"
    done("-w", "3", "--state", state, text=lines(range(1, 10)))
    damaged = damage(state.read_text())
    assert damaged != state.read_text()
    state.write_text(damaged, encoding="latin-1")
    _, told = failed("-w", "3", "--state", state, text="1\n")
    assert "expected a state saved by tailavg stream" in told
    assert state.read_text(encoding="latin-1") == damaged
