"""`tailavg stream`: pipes and files, against averages from the model."""

from pathlib import Path

import pytest

from tailavg import (
    AnyTail,
    AnytimeWindow,
    ExactWindow,
    Exponential,
    Freshest,
    Growing,
    TailAverage,
)
from tests.support import processes
from tests.support.streams import (
    COMMAND,
    NUMBERS,
    any_tail,
    close,
    done,
    expected,
    failed,
    lines,
    run,
)

# Numbers


def test_a_line_in_is_an_average_out():
    assert done("--window", "2", text="1\n3\n5\n7\n") == "1\n2\n4\n6\n"


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ([], AnytimeWindow(0.25)),
        (["--at-most", "40"], AnytimeWindow(Growing(0.25, at_most=40))),
        (["-w", "0.25"], AnytimeWindow(0.25)),
        (["-w", "0.7%"], AnytimeWindow(0.007)),
        (["-w", "12.5 %"], AnytimeWindow(0.125)),
        (["-w", "2.5e-1"], AnytimeWindow(0.25)),
        (["-w", "2e1"], AnytimeWindow(20)),
        (["-w", "2_0"], AnytimeWindow(20)),
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


# Odd input


def test_nan_can_be_omitted_or_refused():
    text = "nan\n1\n3\nnan\n5\n"
    assert done("-w", "2", text=text) == "nan\nnan\n2\nnan\nnan\n"
    assert done("-w", "2", "--nan", "propagate", text=text) == done("-w", "2", text=text)
    assert done("-w", "2", "--nan", "omit", text=text) == "nan\n1\n2\n2\n4\n"
    for many in (0, 100):
        written, told = failed("-w", "2", "--nan", "raise", text="1\n" * (many + 1) + "nan\n3\n")
        assert written == "1\n" * (many + 1)
        assert f"line {many + 2}: 'nan': expected no NaN, because of --nan raise" in told
    ended = run("-w", "2", "--nan", "raise", "--skip-bad", text=text)
    assert ended.stdout == "1\n2\n4\n"
    assert "skipped 2 rows, the first is line 1: 'nan'" in ended.told


@pytest.mark.parametrize("options", [[], ["-c", "x"], ["-f", "x"], ["-c", "x", "--format", "csv"]])
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
    ended = run("-w", "2", "-c", "x", "--format", "csv", text=b"x,name\n1,caf\xe9\n")
    assert ended.output == b"x,name,x_average\n1,caf\xe9,1\n"


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
    assert '"x_average": null' in done("-w", "1", "-f", "x", "--format", "jsonl", text=text)


def test_a_line_of_a_megabyte():
    assert done("-w", "2", text="1" * 2**20 + "\n" + "0" * 2**20 + "3\n").split() == ["inf", "inf"]
    cell = "a" * 2**20
    assert done("-w", "2", "-c", "x", text=f'x,y\n1,"{cell}"\n3,{cell}\n') == "1\n2\n"
    _, told = failed("-w", "2", text="a" * 2**20)
    assert "1048576 characters" in told
    assert len(told) < 300


def shell(command):
    """Run a command of the shell, in which `stream` is the command under test."""
    stream = " ".join(f"'{word}'" for word in COMMAND)
    return processes.run("bash", "-c", f'stream() {{ {stream} "$@"; }}; {command}', code=None)


def test_a_closed_pipe():
    process = shell("yes 1.5 | stream -w 3 | head -n 2; echo ${PIPESTATUS[1]}")
    assert process.stdout == "1.5\n1.5\n0\n"
    assert not process.stderr


def test_a_closed_standard_input():
    process = shell("stream -w 3 <&-")
    assert process.returncode == 1
    assert process.stderr == "tailavg: standard input: Bad file descriptor\n"


def test_a_full_disk():
    with Path("/dev/full").open("wb") as full:
        ended = run("-w", "3", text="1\n", output=full, code=1)
    assert ended.stderr == "tailavg: standard output: No space left on device\n"


# Bad rows


@pytest.mark.parametrize(
    ("options", "text", "output", "told"),
    [
        ([], "1\n3\nabc\n5\n", "1\n2\n", "line 3: 'abc': expected a number"),
        ([], "1\n1_0\n", "1\n", "line 2: '1_0': expected a number"),
        ([], "1 2\n", "", "line 1: '1 2': expected a number"),
        (
            ["-c", "x"],
            "x,y\n1,2\nz,4\n",
            "1\n",
            "line 3: 'z,4': expected a number in column 'x'",
        ),
        (["-c", "x"], "x,y\n1,2\n3\n", "1\n", "line 3: '3': expected 2 cells, got 1"),
        (["-c", "x"], 'x,y\n1,2\n3,"4\n', "1\n", "line 3: '3,\"4': expected CSV"),
        (["-f", "x"], '{"x": 1}\nx\n', "1\n", "line 2: 'x': expected a JSON object"),
        (["-f", "x"], '{"x": 1}\n[1]\n', "1\n", "line 2: '[1]': expected a JSON object"),
        (["-f", "x"], '{"x": 1}\n{"x": "2"}\n', "1\n", "expected a number in field 'x', got \"2\""),
        (["-f", "x"], '{"x": 1}\n{"x": true}\n', "1\n", "expected a number in field 'x', got true"),
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
    ended = run("-w", "2", "--skip-bad", text="a\n1\n3\nb\n5\nc\n")
    assert ended.stdout == "1\n2\n4\n"
    assert ended.told == "tailavg: skipped 3 rows, the first is line 1: 'a': expected a number"
    ended = run("-w", "2", "--skip-bad", "-c", "x", text="x,y\n1,2\n3\n5,6\n")
    assert ended.stdout == "1\n3\n"
    assert "skipped 1 row, the first is line 3: '3': expected 2 cells" in ended.told


@pytest.mark.parametrize("times", [1, 100])
def test_to_skip_every_row_is_an_error(times):
    written, told = failed("-w", "2", "--skip-bad", text="\n" + "a\n" * times)
    assert not written
    assert f"skipped every row, {times} row" in told
    assert "none could be read; the first is line 2: 'a': expected a number" in told
    assert not done("-w", "2", "--skip-bad", "-c", "x", text="x,y\n")


def test_a_missing_column_names_those_there_are():
    _, told = failed("-w", "2", "-c", "x", text="step,loss\n1,2\n")
    assert told == "tailavg: no column 'x' in the header; there are: step, loss"
    _, told = failed("-w", "2", "-c", "loss", "--by", "run", text="step,loss\n1,2\n")
    assert "no column 'run'" in told


def test_an_average_that_is_there_already():
    _, told = failed("-w", "2", "-c", "x", "--format", "csv", text="x,x_average\n1,2\n")
    assert "already has a column 'x_average'" in told


NO_WINDOWS = ["0", "-1", "1.5", "1000.0", "0%", "101%", "1e1%", "%", "1__0", "1e19", "1e400", "nan"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["-w", "2", "--windows", "3"], "--windows replaces --window"),
        (["--windows", "2,much"], "much"),
        (["--windows", "0.5,2,.50"], "expected each window once, got .50 twice"),
        (["--windows", "2,"], "''"),
        (["--windows", "0.5", "--method", "exact"], "--method exact goes with --window"),
        (["--windows", "0.5", "--at-most", "9"], "--at-most goes with --window"),
        (["--windows", "0.5", "--accumulators", "5"], "expected an int >= 6, got 5"),
        (["--windows", "2", "--accumulators", "6"], "--accumulators goes with fractions"),
        (["-w", "0"], "window"),
        (["-w", "much"], "much"),
        *((["-w", text], f"such as 0.25 or 25%; got {text!r}") for text in NO_WINDOWS),
        (["-w", "2", "-c", "x", "-f", "x"], "use only one of them"),
        (["-w", "2", "--by", "x"], "--by needs --column or --field"),
        (["-w", "2", "--every", "0"], "--every"),
        (["--every", "2", "--nan", "omit"], "--every counts all numbers"),
        (["--nan", "drop"], "drop"),
        (["-w", "2", "--method", "best"], "best"),
        (["-w", "2", "--method", "exact", "--accumulators", "3"], "--accumulators goes with"),
        (["-w", "2", "--at-most", "3"], "--at-most needs a fraction"),
    ],
)
def test_a_wrong_command_line(options, told):
    _, said = failed(*options, code=2)
    assert told in said


def test_files_that_cannot_be_read(tmp_path):
    _, told = failed("-w", "2", tmp_path / "absent.txt")
    assert told.endswith("absent.txt: No such file or directory")
    _, told = failed("-w", "2", tmp_path)
    assert told.endswith(
        "expected event files with scalars, got none; to read a folder of runs, "
        "pass each run, as in runs/*"
    )


@pytest.mark.parametrize("window", ["0.25", "1.0"])
def test_the_freshest_method(window):
    """An AnyTail whose shortest window is the fraction, read as Freshest."""
    rule = AnyTail(12, 0.25 if window == "0.25" else 0.5)
    averages = TailAverage(rule).scan([float(x) for x in NUMBERS], Freshest(float(window)))
    written = done("-w", window, "--method", "freshest", text=lines(NUMBERS))
    assert close(written, averages.tolist())
    both = columns(done("--windows", f"{window},0.5", "--method", "freshest", text=lines(NUMBERS)))
    rule = AnyTail(12, min(0.5, rule.shortest))
    for column_, fraction in zip(both, (float(window), 0.5), strict=True):
        averages = TailAverage(rule).scan([float(x) for x in NUMBERS], Freshest(fraction))
        assert close(" ".join(column_), averages.tolist())


@pytest.mark.parametrize(
    "options", [["-w", "100"], ["-w", "0.5", "--at-most", "9"], ["--windows", "0.5,9"]]
)
def test_the_freshest_method_needs_fractions(options):
    _, told = failed("--method", "freshest", *options, code=2)
    assert "--method freshest needs fractions, such as 0.25" in told
    _, told = failed("--method", "freshest", "--accumulators", "3", code=2)
    assert "accumulators: expected an int >= 6" in told
