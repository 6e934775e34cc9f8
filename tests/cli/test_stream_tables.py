"""`tailavg stream` on CSV and JSON lines."""

import csv
import io
import json

import pytest

from tailavg import AnyTail, AnytimeWindow
from tests.support.streams import CSV, JSON, NUMBERS, ROWS, any_tail, close, done, expected, run


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
    options = ["-w", "0.5", option, "loss", *by, "--format"]
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
    assert done("-w", "2", "--format", "csv", text="1\n2\n") == "value,average\n1,1\n2,1.5\n"
    text = done("-w", "2", "--format", "jsonl", text="1\nnan\n")
    assert [json.loads(line) for line in text.splitlines()] == [
        {"value": 1, "average": 1},
        {"value": None, "average": None},
    ]


def test_several_windows_of_columns_and_keys():
    options = ["--windows", "0.5,10", "--by", "run", "--format"]
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
    text = done("--windows", "0.5,10", "--format", "csv", text="1\n2\n")
    assert text == "value,average_0.5,average_10\n1,1,1\n2,2,1.5\n"


@pytest.mark.parametrize("many", [1, 40])
def test_a_skipped_object_does_not_name_the_columns(many):
    text = '{"x": 1, "odd": 2}\n' + '{"x": 3, "k": "a"}\n' * many
    options = ["-w", "2", "-f", "x", "--by", "k", "--format", "csv", "--skip-bad"]
    ended = run(*options, text=text)
    assert ended.stdout == "x,k,x_average\n" + "3,a,3\n" * many
