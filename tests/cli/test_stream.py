"""`tailavg stream`, as a process: pipes, signals and files, against averages from the model."""

import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from model import weight_matrix
from tailavg import AnyTail, AnytimeWindow, ExactWindow, Exponential, Growing, TailAverage
from tailavg.cli.lines import column, format_numbers, parse_numbers

COMMAND = [sys.executable, "-m", "tailavg", "stream"]
ENVIRONMENT = os.environ | {"COLUMNS": "400"}
RANDOM = np.random.default_rng(5)
NUMBERS = [f"{x:.4f}" for x in RANDOM.normal(3, 2, 300)]


def run(*arguments, text=""):
    data = text if isinstance(text, bytes) else text.encode()
    process = subprocess.run(
        [*COMMAND, *map(str, arguments)], input=data, capture_output=True, env=ENVIRONMENT
    )
    process.stdout, process.stderr = process.stdout.decode(), process.stderr.decode()
    assert "Traceback" not in process.stderr
    assert "Warning" not in process.stderr
    return process


def done(*arguments, text=""):
    process = run(*arguments, text=text)
    assert process.returncode == 0, process.stderr
    assert not process.stderr
    return process.stdout


def failed(*arguments, text="", code=1):
    process = run(*arguments, text=text)
    assert process.returncode == code, process.stderr
    return process.stdout, " ".join(process.stderr.replace("│", " ").split())


def lines(texts):
    return "".join(f"{text}\n" for text in texts)


def expected(rule, numbers):
    """The averages, from the weights of a model that shares no code with the library."""
    numbers = np.array([float(x) for x in numbers])
    return (weight_matrix(rule, len(numbers)) @ numbers).tolist()


def close(text, averages):
    return [float(line) for line in text.split()] == pytest.approx(averages, rel=1e-11, abs=1e-11)


# Numbers


def test_a_line_in_is_an_average_out():
    assert done("--window", "2", text="1\n3\n5\n7\n") == "1\n2\n4\n6\n"


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["-w", "0.25"], AnytimeWindow(0.25)),
        (["-w", "20"], AnytimeWindow(20)),
        (["-w", "0.5", "--accumulators", "5"], AnytimeWindow(0.5, 5)),
        (["-w", "0.5", "--at-most", "40"], AnytimeWindow(Growing(0.5, at_most=40))),
        (["-w", "0.25", "--method", "exponential"], Exponential(0.25)),
        (["-w", "30", "--method", "exact"], ExactWindow(30)),
    ],
)
def test_every_method(options, rule):
    assert close(done(*options, text=lines(NUMBERS)), expected(rule, NUMBERS))


def test_a_file_is_read_as_a_pipe_is(tmp_path):
    path = tmp_path / "numbers.txt"
    path.write_text(lines(NUMBERS))
    piped = done("-w", "0.25", text=lines(NUMBERS))
    assert done("-w", "0.25", path) == piped
    assert done("-w", "0.25", "-", text=lines(NUMBERS)) == piped


def test_every_nth():
    every = done("-w", "0.25", text=lines(NUMBERS)).split()
    assert done("-w", "0.25", "--every", "7", text=lines(NUMBERS)).split() == every[6::7]


# Several windows


def any_tail(rule, windows, numbers):
    """What is read of one average after each number, a list for each window."""
    average = TailAverage(rule)
    rows = []
    for number in numbers:
        average.update(float(number))
        rows.append([average.value(window) for window in windows])
    return [list(column) for column in zip(*rows, strict=True)]


def columns(text):
    rows = [line.split("\t") for line in text.splitlines()]
    return [list(cells) for cells in zip(*rows, strict=True)]


def test_several_windows():
    found = columns(done("--windows", "0.5,20,0.1, 1.0,1", text=lines(NUMBERS)))
    half, last_20, tenth, every, last = found
    fractions = any_tail(AnyTail(12, 0.1), [0.5, 0.1, 1.0], NUMBERS)
    for column_, averages in zip([half, tenth, every], fractions, strict=True):
        assert close(" ".join(column_), averages)
    assert last_20 == done("--window", "20", text=lines(NUMBERS)).split()
    assert close(" ".join(every), expected(ExactWindow(1.0), NUMBERS))
    assert close(" ".join(last), [float(number) for number in NUMBERS])


def test_several_windows_and_accumulators():
    text = done("--windows", "0.3,0.7", "--accumulators", "6", text=lines(NUMBERS))
    for found, averages in zip(
        columns(text), any_tail(AnyTail(6, 0.3), [0.3, 0.7], NUMBERS), strict=True
    ):
        assert close(" ".join(found), averages)
    assert close(done("--windows", "1.0", text=lines(NUMBERS)), expected(ExactWindow(1.0), NUMBERS))


def test_several_windows_and_every_nth():
    every = done("--windows", "10,0.25", text=lines(NUMBERS)).splitlines()
    shown = done("--windows", "10,0.25", "--every", "7", text=lines(NUMBERS)).splitlines()
    assert shown == every[6::7]


def test_a_nan_in_some_of_several_windows():
    numbers = ["1"] * 100 + ["nan"] + ["3"] * 899
    tenth, count, every = columns(done("--windows", "0.1,50,1.0", text=lines(numbers)))
    assert tenth[100] == count[100] == every[100] == "nan"
    assert [tenth[-1], count[-1], every[-1]] == ["3", "3", "nan"]


# Text to numbers and back


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


# CSV and JSON lines

ROWS = [(i, x, "train" if i % 3 else "eval, slow") for i, x in enumerate(NUMBERS)]
CSV = "step,loss,run\n" + lines(
    f'{step},{loss},"{run}"' if "," in run else f"{step},{loss},{run}" for step, loss, run in ROWS
)
JSON = lines(
    json.dumps({"step": step, "loss": float(loss), "run": run}) for step, loss, run in ROWS
)


def by_run():
    """The averages of each run by itself, in the order of the rows."""
    found = {
        run: iter(expected(AnytimeWindow(0.5), [x for _, x, its in ROWS if its == run]))
        for run in {run for _, _, run in ROWS}
    }
    return [next(found[run]) for _, _, run in ROWS]


def test_a_column_and_a_field():
    averages = expected(AnytimeWindow(0.5), NUMBERS)
    assert close(done("-w", "0.5", "--column", "loss", text=CSV), averages)
    assert close(done("-w", "0.5", "--field", "loss", text=JSON), averages)


def test_several_columns():
    text = done("-w", "10", "-c", "step", "-c", "loss", text=CSV)
    steps, losses = zip(*(line.split("\t") for line in text.splitlines()), strict=True)
    assert close(" ".join(steps), expected(AnytimeWindow(10), range(300)))
    assert close(" ".join(losses), expected(AnytimeWindow(10), NUMBERS))


@pytest.mark.parametrize(("option", "text"), [("--column", CSV), ("--field", JSON)])
def test_one_average_for_each_key(option, text):
    rows = [
        line.split("\t")
        for line in done("-w", "0.5", option, "loss", "--by", "run", text=text).splitlines()
    ]
    assert [key for key, _ in rows] == [run for _, _, run in ROWS]
    assert close(" ".join(average for _, average in rows), by_run())


def test_every_nth_of_each_key():
    rows = done("-w", "2", "-c", "loss", "--by", "run", "--every", "10", text=CSV).splitlines()
    assert [row.split("\t")[0] for row in rows].count("train") == 20
    assert [row.split("\t")[0] for row in rows].count("eval, slow") == 10


@pytest.mark.parametrize("by", [[], ["--by", "run"]])
@pytest.mark.parametrize(("option", "text"), [("--column", CSV), ("--field", JSON)])
def test_columns_are_carried_through(option, text, by):
    averages = by_run() if by else expected(AnytimeWindow(0.5), NUMBERS)
    options = ["-w", "0.5", option, "loss", *by, "--output"]
    rows = list(csv.DictReader(io.StringIO(done(*options, "csv", text=text))))
    assert list(rows[0]) == ["step", "loss", "run", "loss_average"]
    assert [(int(r["step"]), float(r["loss"]), r["run"]) for r in rows] == [
        (step, float(loss), run) for step, loss, run in ROWS
    ]
    assert close(" ".join(row["loss_average"] for row in rows), averages)
    rows = [json.loads(line) for line in done(*options, "jsonl", text=text).splitlines()]
    assert [(int(r["step"]), r["loss"], r["run"]) for r in rows] == [
        (step, float(loss), run) for step, loss, run in ROWS
    ]
    assert [row["loss_average"] for row in rows] == pytest.approx(averages, rel=1e-11, abs=1e-11)


def test_plain_numbers_as_csv_and_json_lines():
    assert done("-w", "2", "--output", "csv", text="1\n2\n") == "value,average\n1,1\n2,1.5\n"
    text = done("-w", "2", "--output", "jsonl", text="1\nnan\n")
    assert [json.loads(line) for line in text.splitlines()] == [
        {"value": 1, "average": 1},
        {"value": None, "average": None},
    ]


def test_several_windows_of_columns_and_keys():
    options = ["--windows", "0.5,10", "--by", "run", "--output"]
    text = done(*options, "csv", "-c", "loss", "-c", "step", text=CSV)
    rows = list(csv.DictReader(io.StringIO(text)))
    names = ["loss_average_0.5", "loss_average_10", "step_average_0.5", "step_average_10"]
    assert list(rows[0]) == ["step", "loss", "run", *names]
    for run_ in ("train", "eval, slow"):
        mine = [row for row in rows if row["run"] == run_]
        for column_ in ("loss", "step"):
            numbers = [row[column_] for row in mine]
            (half,) = any_tail(AnyTail(12, 0.5), [0.5], numbers)
            assert close(" ".join(row[f"{column_}_average_0.5"] for row in mine), half)
            ten = expected(AnytimeWindow(10), numbers)
            assert close(" ".join(row[f"{column_}_average_10"] for row in mine), ten)
    text = done(*options, "jsonl", "-f", "loss", "-f", "step", text=JSON)
    objects = [json.loads(line) for line in text.splitlines()]
    assert [[f"{x[name]:.12g}" for name in names] for x in objects] == [
        [row[name] for name in names] for row in rows
    ]
    text = done("--windows", "0.5,10", "--output", "csv", text="1\n2\n")
    assert text == "value,average_0.5,average_10\n1,1,1\n2,2,1.5\n"


# Odd input


@pytest.mark.parametrize("options", [[], ["-c", "x"], ["-f", "x"], ["-c", "x", "--output", "csv"]])
def test_empty_input(options):
    assert done("-w", "2", *options) == ""


def test_no_newline_at_the_end():
    assert done("-w", "2", text="1\n3") == "1\n2\n"
    assert done("-w", "2", "-c", "x", text="x\n1\n3") == "1\n2\n"
    assert done("-w", "2", "-f", "x", text='{"x": 1}\n{"x": 3}') == "1\n2\n"


def test_windows_line_ends_and_a_byte_order_mark():
    assert done("-w", "2", text=b"\xef\xbb\xbf1\r\n3\r\n5") == "1\n2\n4\n"
    assert done("-w", "2", "-c", "x", text=b"\xef\xbb\xbfx,y\r\n1,2\r\n3,4\r\n") == "1\n2\n"
    assert done("-w", "2", "-f", "x", text=b'\xef\xbb\xbf{"x": 1}\r\n{"x": 3}\r\n') == "1\n2\n"


def test_empty_lines_are_passed_over():
    assert done("-w", "2", text="1\n\n3\n  \n\n") == "1\n2\n"


def test_bytes_that_are_no_text_are_carried_through():
    process = subprocess.run(
        [*COMMAND, "-w", "2", "-c", "x", "--output", "csv"],
        input=b"x,name\n1,caf\xe9\n",
        capture_output=True,
    )
    assert process.stdout == b"x,name,x_average\n1,caf\xe9,1\n"


@pytest.mark.parametrize("options", [[], ["--method", "exponential"], ["--method", "exact"]])
def test_nan_and_infinities_are_numbers(options):
    texts = ["1", "nan", "1e400", "-inf", *["2"] * 20]
    averages = done("-w", "2", *options, text=lines(texts)).split()
    assert averages[:2] == ["1", "nan"]
    if "exponential" not in options:  # for which the past never ends
        assert averages[-1] == "2"


def test_json_numbers_out_of_range():
    text = '{"x": 1e400}\n{"x": -1' + "0" * 400 + "}\n"
    assert done("-w", "1", "-f", "x", text=text) == "inf\n-inf\n"
    assert '"x_average": null' in done("-w", "1", "-f", "x", "--output", "jsonl", text=text)


def test_a_line_of_a_megabyte():
    assert done("-w", "2", text="1" * 2**20 + "\n" + "0" * 2**20 + "3\n").split() == ["inf", "inf"]
    cell = "a" * 2**20
    assert done("-w", "2", "-c", "x", text=f'x,y\n1,"{cell}"\n3,{cell}\n') == "1\n2\n"
    _, told = failed("-w", "2", text="a" * 2**20)
    assert "1048576 characters" in told
    assert len(told) < 300


def test_a_closed_pipe():
    command = " ".join(f"'{word}'" for word in COMMAND)
    process = subprocess.run(
        ["bash", "-c", f"yes 1.5 | {command} -w 3 | head -n 2; echo ${{PIPESTATUS[1]}}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.stdout == "1.5\n1.5\n0\n"
    assert not process.stderr


def test_closed_standard_streams():
    command = " ".join(f"'{word}'" for word in COMMAND)
    for closed, name in (("<&-", "standard input"), ("< /dev/null >&-", "standard output")):
        process = subprocess.run(
            ["bash", "-c", f"{command} -w 3 {closed}"], capture_output=True, text=True, timeout=60
        )
        assert process.returncode == 1
        assert process.stderr == f"tailavg: {name}: Bad file descriptor\n"


def test_a_full_disk():
    with Path("/dev/full").open("wb") as full:
        process = subprocess.run(
            [*COMMAND, "-w", "3"], input=b"1\n", stdout=full, stderr=subprocess.PIPE
        )
    assert process.returncode == 1
    assert process.stderr == b"tailavg: standard output: No space left on device\n"


# Bad rows


@pytest.mark.parametrize(
    ("options", "text", "output", "told"),
    [
        ([], "1\n3\nabc\n5\n", "1\n2\n", "line 3: 'abc': expected a number"),
        ([], "1\n1_0\n", "1\n", "line 2: '1_0': expected a number"),
        ([], "1 2\n", "", "line 1: '1 2': expected a number"),
        (
            ["-c", "x"],
            "x,y\n1,2\n,4\n",
            "1\n",
            "line 3: ',4': expected a number in column 'x'",
        ),
        (["-c", "x"], "x,y\n1,2\n3\n", "1\n", "line 3: '3': expected 2 cells, got 1"),
        (["-c", "x"], 'x,y\n1,2\n3,"4\n', "1\n", "line 3: '3,\"4': expected CSV"),
        (["-f", "x"], '{"x": 1}\nx\n', "1\n", "line 2: 'x': expected a JSON object"),
        (["-f", "x"], '{"x": 1}\n[1]\n', "1\n", "line 2: '[1]': expected a JSON object"),
        (["-f", "x"], '{"x": 1}\n{"x": "2"}\n', "1\n", "expected a number in field 'x', got \"2\""),
        (["-f", "x"], '{"x": 1}\n{"x": true}\n', "1\n", "expected a number in field 'x', got true"),
        (["-f", "x"], '{"y": 1}\n', "", "expected a field 'x', got ['y']"),
        (["-f", "x", "--by", "k"], '{"x": 1}\n', "", "expected a field 'k', got ['x']"),
        (["-f", "x"], "[" * 100_000 + "\n", "", "expected a JSON object"),
        (["-f", "x"], '{"x": 1' + "0" * 5000 + "}\n", "", "expected a JSON object"),
    ],
)
def test_a_bad_row_stops_after_what_came_before(options, text, output, told):
    written, said = failed("-w", "2", *options, text=text)
    assert written == output
    assert told in said
    assert "--skip-bad" in said


def test_bad_rows_are_skipped_and_counted():
    process = run("-w", "2", "--skip-bad", text="a\n1\n3\nb\n5\nc\n")
    assert process.returncode == 0
    assert process.stdout == "1\n2\n4\n"
    assert process.stderr == (
        "tailavg: skipped 3 rows, the first is line 1: 'a': expected a number\n"
    )
    process = run("-w", "2", "--skip-bad", "-c", "x", text="x,y\n1,2\n3\n5,6\n")
    assert process.stdout == "1\n3\n"
    assert "skipped 1 row, the first is line 3: '3': expected 2 cells" in process.stderr


def test_a_missing_column_names_those_there_are():
    _, told = failed("-w", "2", "-c", "x", text="step,loss\n1,2\n")
    assert told == "tailavg: no column 'x' in the header; there are: step, loss"
    _, told = failed("-w", "2", "-c", "loss", "--by", "run", text="step,loss\n1,2\n")
    assert "no column 'run'" in told


def test_an_average_that_is_there_already():
    _, told = failed("-w", "2", "-c", "x", "--output", "csv", text="x,x_average\n1,2\n")
    assert "'x_average' already" in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "expected either --window or --windows, got none"),
        (["-w", "2", "--windows", "3"], "expected either --window or --windows, got both"),
        (["--windows", "2,much"], "much"),
        (["--windows", "0.5,2,.50"], "expected each once, got .50 twice"),
        (["--windows", "2,"], "''"),
        (["--windows", "0.5", "--method", "exact"], "--method exact goes with --window"),
        (["--windows", "0.5", "--at-most", "9"], "--at-most goes with --window"),
        (["--windows", "0.5", "--accumulators", "5"], "expected an int >= 6, got 5"),
        (["--windows", "2", "--accumulators", "6"], "--accumulators goes with fractions"),
        (["-w", "0"], "window"),
        (["-w", "much"], "much"),
        (["-w", "2", "-c", "x", "-f", "x"], "give one of them"),
        (["-w", "2", "--by", "x"], "--by goes with"),
        (["-w", "2", "--every", "0"], "--every"),
        (["-w", "2", "--method", "best"], "best"),
        (["-w", "2", "--method", "exact", "--accumulators", "3"], "--accumulators goes with"),
        (["-w", "2", "--at-most", "3"], "--at-most goes with"),
    ],
)
def test_a_wrong_command_line(options, told):
    _, said = failed(*options, code=2)
    assert told in said


def test_files_that_cannot_be_read(tmp_path):
    _, told = failed("-w", "2", tmp_path / "absent.txt")
    assert told.endswith("absent.txt: No such file or directory")
    _, told = failed("-w", "2", tmp_path)
    assert told.endswith("Is a directory")


# Live, and the state


class Live:
    """A process that is given a line at a time."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        self.limit = threading.Timer(120, self.process.kill)  # a missing answer fails, not hangs
        self.limit.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.limit.cancel()
        self.process.kill()
        self.process.communicate()

    def send(self, text):
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def ask(self, line):
        """What is answered to a line, while the input stays open."""
        self.send(f"{line}\n")
        return self.process.stdout.readline()

    def stop(self, number):
        """The exit code, the rest of the output and the messages after a signal."""
        self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        return code, self.process.stdout.read(), self.process.stderr.read()


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


LONG = [f"{x:.5f}" for x in RANDOM.normal(1, 1, 40_000)]
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
    """To the byte, wherever it is cut."""
    numbers = list(LONG)
    if odd:
        numbers[20_000] = odd
    whole = done(*options, text=lines(numbers))
    parts = [
        done(*options, "--state", tmp_path / "state", text=lines(numbers[start:end]))
        for start, end in pairwise([0, 1, 14_000, 20_000, 20_001, 40_000])
    ]
    assert "".join(parts) == whole
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
    options = ["-w", "0.5", option, "loss", option, "step", *by, "--output", output, "--every", "3"]
    whole = done(*options, text=text)
    rows = text.splitlines()
    parts = [
        done(*options, "--state", tmp_path / "state", text=lines(rows[start:end]))
        for start, end in pairwise([0, 1, 100, len(rows)])
    ]
    assert "".join(parts) == whole


def test_stop_and_go_with_several_windows_of_columns_and_keys(tmp_path):
    options = ["--windows", "0.25,5,1.0", "-c", "loss", "-c", "step", "--by", "run"]
    whole = done(*options, text=CSV)
    rows = CSV.splitlines()
    parts = [
        done(*options, "--state", tmp_path / "state", text=lines(rows[start:end]))
        for start, end in pairwise([0, 100, len(rows)])
    ]
    assert "".join(parts) == whole


def test_a_header_may_come_again(tmp_path):
    options = ["-w", "2", "-c", "x", "--output", "csv", "--state", tmp_path / "state"]
    assert done(*options, text="x,y\n1,2\n") == "x,y,x_average\n1,2,1\n"
    assert done(*options, text="x,y\n3,4\n") == "3,4,2\n"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["term", "int"]
)
@pytest.mark.parametrize("options", METHODS[:4])
def test_signals_save_the_state(tmp_path, options, number, code):
    state = tmp_path / "state"
    with Live(*options, "--state", state) as live:
        before = [live.ask(x) for x in LONG[:20]]
        live.send("12")  # half a line is not a sample
        ended = live.stop(number)
    assert ended == (
        code,
        "",
        f"tailavg: stopped after line 20; the state up to there is in {state}\n",
    )
    after = done(*options, "--state", state, text=lines(LONG[20:40]))
    assert "".join(before) + after == done(*options, text=lines(LONG[:40]))


def test_a_signal_in_the_midst_of_a_flood(tmp_path):
    """Then what was written, and the state, are those of the same number of lines."""
    state, feed = tmp_path / "state", tmp_path / "feed.txt"
    feed.write_text(lines(LONG) * 50)
    with Live("-w", "0.25", "--state", state, feed) as live:
        written = [live.process.stdout.readline()]
        live.process.send_signal(signal.SIGTERM)
        written += live.process.stdout.readlines()
        assert live.process.wait(timeout=60) == 143
        told = live.process.stderr.read()
    assert f"stopped after line {len(written)};" in told
    assert len(written) < 50 * len(LONG)
    following = (lines(LONG) * 50).splitlines()[len(written) :][:100]
    after = done("-w", "0.25", "--state", state, text=lines(following))
    whole = done("-w", "0.25", feed).splitlines(keepends=True)
    assert "".join(written) == "".join(whole[: len(written)])
    assert after == "".join(whole[len(written) :][:100])


def test_a_bad_row_leaves_the_state_of_what_came_before(tmp_path):
    state = tmp_path / "state"
    output, told = failed("-w", "3", "--state", state, text="1\n2\nbad\n")
    assert output == "1\n1.5\n"
    assert f"the state up to there is in {state}" in told
    assert done("-w", "3", "--state", state, text="3\n") == "2\n"


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (["-w", "4"], "rule was"),
        (["-w", "3", "--method", "exact"], "rule was"),
        (["-w", "3", "-c", "x"], "input was plain, is csv"),
        (["-w", "3", "--output", "csv"], "output was plain, is csv"),
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
        lambda text: text.replace('"version": 1', '"version": 2', 1),
        lambda text: text.replace('"count": 8', '"count": 7'),
        lambda text: text.replace('"samples": [9.0', '"samples": ["one"'),
        lambda text: text.replace('"samples": [9.0', '"samples": [[9.0]'),
        lambda text: text.replace('"samples": [9.0', '"samples": [9.0, 9.0'),
        lambda text: text.replace('"averages": [{', '"averages": [], "more": [{'),
        lambda text: text.replace('"series": {"": [{', '"series": {"": [], "a": [{'),
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


def test_a_state_that_cannot_be_saved(tmp_path):
    _, told = failed("-w", "3", "--state", tmp_path / "absent" / "state", text="1\n")
    assert "expected a folder" in told
    _, told = failed("-w", "3", "--state", tmp_path, text="1\n")
    assert "Is a directory" in told
