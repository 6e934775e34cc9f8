"""`tailavg stream --std`, against standard deviations from the weights of the model."""

import csv
import json
import math

import numpy as np
import pytest

from tailavg import AnytimeWindow, ExactWindow, Exponential, TailAverage
from tailavg.cli.lines import PlainInput
from tailavg.cli.stream import Format, Session
from tests.support.model import weight_matrix
from tests.support.streams import CSV, JSON, NUMBERS, ROWS, done, failed, lines, same_digits

DEFAULTS = {"output_format": Format.plain, "every": 1, "skip_bad": False}


def deviations(rule, texts):
    """The standard deviation after each number, with ddof=1; NaN if one has all weight."""
    xs = np.array(texts, float)
    found = []
    for alpha in weight_matrix(rule, len(xs)):
        rest = 1 - alpha @ alpha
        spread = alpha @ (xs - alpha @ xs) ** 2
        found.append(math.sqrt(spread / rest) if rest > 1e-9 else math.nan)
    return found


def is_close(cells, expected):
    return [float(cell) for cell in cells] == pytest.approx(expected, rel=1e-9, nan_ok=True)


def columns(text, separator="\t"):
    rows = csv.reader(text.splitlines(), delimiter=separator)
    return [list(cells) for cells in zip(*rows, strict=True)]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["-w", "0.25"], AnytimeWindow(0.25)),
        (["-w", "20"], AnytimeWindow(20)),
        (["-w", "20", "--accumulators", "5"], AnytimeWindow(20, 5)),
        (["-w", "0.25", "--method", "exponential"], Exponential(0.25)),
        (["-w", "30", "--method", "exponential"], Exponential(30)),
        (["-w", "30", "--method", "exact"], ExactWindow(30)),
    ],
)
def test_a_deviation_follows_each_average(options, rule):
    text = lines(NUMBERS)
    averages, stds = columns(done(*options, "--std", text=text))
    assert averages == done(*options, text=text).split()
    assert stds[0] == "nan"
    assert is_close(stds, deviations(rule, NUMBERS))


def test_the_freshest_average_of_all_numbers():
    found = columns(done("-w", "1.0", "--method", "freshest", "--std", text=lines(NUMBERS)))
    assert is_close(found[1], deviations(ExactWindow(1.0), NUMBERS))


def test_each_window_has_its_deviation():
    text = done("--windows", "20,1.0", "--std", "--format", "csv", text=lines(NUMBERS))
    header, *rows = csv.reader(text.splitlines())
    assert header == ["value", "average_20", "std_20", "average_1.0", "std_1.0"]
    _, averages, last_20, _, every = zip(*rows, strict=True)
    assert list(averages) == done("-w", "20", text=lines(NUMBERS)).split()
    assert is_close(last_20, deviations(AnytimeWindow(20), NUMBERS))
    assert is_close(every, deviations(ExactWindow(1.0), NUMBERS))


def test_columns_of_each_key():
    options = "-w", "0.25", "-c", "loss", "-c", "step", "--by", "run"
    text = done(*options, "--std", "--format", "csv", text=CSV)
    names = ["loss_average", "loss_std", "step_average", "step_std"]
    header, *rows = csv.reader(text.splitlines())
    assert header == ["step", "loss", "run", *names]
    for run in ("train", "eval, slow"):
        mine = [row for row in rows if row[2] == run]
        steps, losses = zip(*[row[:2] for row in ROWS if row[2] == run], strict=True)
        assert is_close([row[4] for row in mine], deviations(AnytimeWindow(0.25), losses))
        assert is_close([row[6] for row in mine], deviations(AnytimeWindow(0.25), steps))
    without = done(*options, "--format", "csv", text=CSV)
    kept = [[*row[:4], row[5]] for row in rows]
    assert kept == list(csv.reader(without.splitlines()))[1:]


def test_json_has_null_where_a_deviation_is_unknown():
    rows = [
        json.loads(line)
        for line in done("-f", "loss", "--std", "--format", "jsonl", text=JSON).splitlines()
    ]
    assert list(rows[0]) == ["step", "loss", "run", "loss_average", "loss_std"]
    assert rows[0]["loss_std"] is None
    stds = [math.nan if row["loss_std"] is None else row["loss_std"] for row in rows]
    assert is_close(stds, deviations(AnytimeWindow(0.25), NUMBERS))


def test_a_row_without_a_number_repeats_its_deviation():
    text = "a=1 b=1\na=3\nb=5\na=8 b=0\n"
    assert done("--match", "a", "--match", "b", "-w", "1.0", "--std", text=text) == (
        "1\tnan\t1\tnan\n2\t1.41421356237\t1\tnan\n2\t1.41421356237\t3\t2.82842712475\n"
        f"4\t{np.std([1, 3, 8], ddof=1):.12g}\t2\t{np.std([1, 5, 0], ddof=1):.12g}\n"
    )


def test_a_nan_spreads_or_is_left_out():
    text = "1\nnan\n3\n"
    assert done("-w", "1.0", "--std", text=text) == "1\tnan\nnan\tnan\nnan\tnan\n"
    omitted = done("-w", "1.0", "--std", "--nan", "omit", text=text)
    assert omitted == "1\tnan\n1\tnan\n2\t1.41421356237\n"


def test_equal_numbers_have_no_deviation():
    assert set(columns(done("-w", "20", "--std", text="0.1\n" * 500))[1][1:]) == {"0"}


def test_a_huge_number_leaves_no_trace():
    huge, small = (done("-w", "4", "--std", text=lines([x, *NUMBERS])) for x in ("1e16", "1"))
    assert huge.splitlines()[20:] == small.splitlines()[20:]


def test_every_nth():
    text = lines(NUMBERS)
    every = done("--std", "--every", "7", text=text).splitlines()
    assert every == done("--std", text=text).splitlines()[6::7]


@pytest.mark.usefixtures("switched")
@pytest.mark.parametrize("odd", [[], ["nan", "inf"], ["1e16", "-1e16"]])
@pytest.mark.parametrize("rule", [AnytimeWindow(0.25), Exponential(100), ExactWindow(5)])
def test_blocks_are_as_single_lines(rule, odd):
    # the deviation after a single line is summed in another order: the twelfth digit may differ
    def answers(texts):
        session = Session([(rule, None)], PlainInput(["value"], None), std=True, **DEFAULTS)
        with np.errstate(all="ignore"):
            return "".join(session.answer(text.encode()).decode() for text in texts)

    texts = [f"{number}\n" for number in [*NUMBERS, *odd, *NUMBERS, *NUMBERS]]
    for size in (40, 1000):
        blocks = ["".join(texts[i : i + size]) for i in range(0, len(texts), size)]
        assert same_digits(answers(blocks), answers(texts))


# States


@pytest.mark.parametrize(
    "options",
    [
        ["-w", "20"],
        ["--windows", "0.25,7"],
        ["-w", "0.25", "--method", "exponential"],
        ["-w", "5", "--method", "exact"],
        ["-w", "0.25", "--by", "run"],
    ],
)
def test_a_resumed_run_writes_what_one_run_writes(tmp_path, options):
    options = [*options, "-c", "loss", "--std"]
    header, *rows = CSV.splitlines(keepends=True)
    whole = done(*options, text=CSV)
    parts = [rows[:100], rows[100:101], rows[101:]]
    texts = ["".join([header, *part]) for part in parts]
    state = tmp_path / "state"
    assert "".join(done(*options, "--state", state, text=text) for text in texts) == whole
    once = tmp_path / "once"
    done(*options, "--state", once, text=CSV)
    assert state.read_bytes() == once.read_bytes()


@pytest.mark.parametrize(("saved", "other"), [([], ["--std"]), (["--std"], [])])
def test_a_state_with_or_without_deviations_is_refused(tmp_path, saved, other):
    state = tmp_path / "state"
    done("-w", "3", *saved, "--state", state, text="1\n2\n")
    before = state.read_bytes()
    output, told = failed("-w", "3", *other, "--state", state, text="3\n")
    assert not output
    assert f"other options: std was {bool(saved)}, is {bool(other)}; use the same options" in told
    assert state.read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        ('"squares": ', '"squares": "x", "s": '),
        ('"variances": [', '"variances": [0.0, '),
        ('"variances": [', '"variances": [1, '),
    ],
)
def test_a_damaged_state_is_refused(tmp_path, damage):
    state = tmp_path / "state"
    done("-w", "3", "--std", "--state", state, text=lines(range(1, 10)))
    text = state.read_text()
    assert damage[0] in text
    state.write_text(text.replace(*damage))
    _, told = failed("-w", "3", "--std", "--state", state, text="1\n")
    assert "expected a state saved by tailavg stream" in told


@pytest.mark.parametrize("numbers", [NUMBERS, []])
@pytest.mark.parametrize("method", ["anytime", "exponential", "exact"])
def test_a_state_is_loaded_in_python_with_its_deviation(tmp_path, numbers, method):
    state = tmp_path / "state"
    output = done("-w", "20", "--method", method, "--std", "--state", state, text=lines(numbers))
    average = TailAverage.load(state)
    assert average.count == len(numbers)
    if numbers:
        assert f"{average.value():.12g}\t{average.std():.12g}" == output.splitlines()[-1]
    average.update(7.0)
    after = done("-w", "20", "--method", method, "--std", "--state", state, text="7\n")
    assert f"{average.value():.12g}\t{average.std():.12g}\n" == after


def test_a_column_cannot_have_the_name_of_a_deviation():
    _, told = failed("-c", "x", "--std", "--format", "csv", text="x,x_std\n1,2\n")
    assert "already has a column 'x_std'" in told
