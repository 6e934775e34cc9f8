"""`stream` and `plot` on the logs that trainers write: text, sparse records, tables of any kind."""

import json

import numpy as np
import pytest

from tailavg import AnytimeWindow, TailAverage
from tests.cli.test_plot import check, page
from tests.support import commands
from tests.support.streams import NUMBERS, close, done, expected, failed, lines, run

TENTH = NUMBERS[:30]
AVERAGES = expected(AnytimeWindow(4), TENTH)


def told_of(*options, text, **more):
    """The output and the messages of a run that has something to tell."""
    ended = run(*options, text=text, **more)
    return ended.stdout, ended.told


# Text


@pytest.mark.parametrize(
    "form",
    [
        "loss={}",
        "loss: {}",
        "loss = {}",
        '{{"step": 3, "loss": {}}}',
        "{{'eval_loss': 7.5, 'loss': {}, 'epoch': 0.1}}",
        "{{'loss': '{}', 'epoch': '0.1'}}",
        "2026-11-19 10:00:00,123 INFO step 7 - val_loss: 9, train-loss: 8, loss: {} (best)",
        "Epoch 3: 10%|█ | 1/9 [00:01<00:09, loss={}, lr=1e-4]",
        "\x1b[32mloss\x1b[0m: \x1b[1m{}\x1b[0m",
        "a.loss=1 x/loss=2 loss=={} loss={}",
    ],
)
@pytest.mark.parametrize("times", [1, 10])
def test_the_number_after_a_name(form, times):
    text = lines(form.format(x, x) for x in TENTH * times)
    text = "starting\n" + text + "done in 3 s\n"
    written, told = told_of("-w", "4", "--match", "loss", text=text)
    assert close(written, expected(AnytimeWindow(4), TENTH * times))
    assert told == "tailavg: passed over 2 lines without 'loss'"


@pytest.mark.parametrize(
    "number", ["1", "-1.5", "+.5", "3.", "1e-3", "1.5E+07", "nan", "-inf", "Infinity"]
)
def test_numbers_of_every_form(number):
    written = done("-w", "1", "-m", "loss", text=f"loss={number}, \nloss: {number}.\n")
    assert written == 2 * done("-w", "1", text=f"{number}\n")


@pytest.mark.parametrize(
    "line", ["eval_loss=1", "loss 1", "loss=none", "loss=nano", "loss=", "losses=1", "loss:", "x"]
)
def test_what_is_no_number_after_the_name(line):
    written, told = failed("-w", "2", "--match", "loss", text=f"\n{line}\n")
    assert not written
    assert told == f"tailavg: no line has a number for 'loss'; the first is line 2: {line!r}"


@pytest.mark.parametrize("number", ["1,234.5", "12,345", "1_234", "-1,234,567"])
def test_thousands_are_not_read_as_a_small_number(number):
    written, told = failed("-w", "1", "-m", "loss", text=f"loss=900,lr=1\nloss={number}, lr=1\n")
    assert written == "900\n"
    assert f"line 2: 'loss={number}, lr=1': expected a number, got '{number}'" in told


def test_a_regular_expression():
    text = lines(f"[{step}] {x} | lr 0.1" for step, x in enumerate(TENTH))
    written, told = told_of("-w", "4", "--regex", r"\] (\S+) \|", text=f"start\n{text}")
    assert close(written, AVERAGES)
    assert told == r"tailavg: passed over 1 line without '\] (\S+) \|'"
    written, told = failed("--regex", r"\] (\S+)", text="[0] 1\n[1] much\n")
    assert written == "1\n"
    assert "line 2: '[1] much': expected a number, got 'much'" in told


def test_progress_bars_write_carriage_returns():
    text = "".join(f"\r 10%|#  | 1/9 [00:01<00:09, loss={x}]" for x in TENTH) + "\n"
    written, _ = told_of("-w", "4", "--match", "loss", text=text)
    assert close(written, AVERAGES)
    written = done("-w", "4", "--match", "loss", text=lines(f"loss={x}\r" for x in TENTH))
    assert close(written, AVERAGES)


def test_text_as_csv_and_json():
    text = "begin\nloss=1 lr=0.1\nloss=3\nlr=0.3\n"
    options = ["-w", "2", "-m", "loss", "-m", "lr", "--format"]
    written, told = told_of(*options, "csv", text=text)
    assert written.splitlines() == [
        "loss,lr,loss_average,lr_average",
        "1,0.1,1,0.1",
        "3,,2,0.1",
        ",0.3,2,0.2",
    ]
    assert told == "tailavg: passed over 1 line without 'loss' or 'lr'"
    written, _ = told_of(*options, "jsonl", text=text)
    assert [json.loads(line) for line in written.splitlines()] == [
        {"loss": 1, "lr": 0.1, "loss_average": 1, "lr_average": 0.1},
        {"loss": 3, "lr": None, "loss_average": 2, "lr_average": 0.1},
        {"loss": None, "lr": 0.3, "loss_average": 2, "lr_average": 0.2},
    ]


def test_text_is_resumed(tmp_path):
    options = ["-w", "4", "--match", "loss", "--format", "csv", "--state", tmp_path / "state"]
    texts = [lines(f"loss={x}" for x in part) for part in (TENTH[:11], TENTH[11:])]
    assert "".join(done(*options, text=text) for text in texts) == done(
        *options[:-2], text="".join(texts)
    )


def test_a_hint_for_text():
    for line in ("step 1 loss=0.5", "{'loss': 1}x", "loss: 0.5"):
        _, told = failed("-w", "2", text=f"{line}\n")
        assert ("--match NAME" in told) or ("--field NAME" in told)


# Records that lack some of the fields


def sparse(every=5):
    """A training loss at every step, and now and then an evaluation in a record of its own."""
    rows, evaluations = [], []
    for step, x in enumerate(TENTH, start=1):
        rows.append({"step": step, "loss": float(x), "epoch": step / 10})
        if step % every == 0:
            evaluations.append((step, step / 7))
            rows.append({"step": step, "eval_loss": step / 7, "epoch": step / 10})
    return rows, evaluations


def as_csv(rows):
    cells = [[row.get(name, "") for name in ("step", "loss", "eval_loss")] for row in rows]
    return lines(",".join(map(str, row)) for row in [["step", "loss", "eval_loss"], *cells])


FORMATS = {
    "--field": lambda rows: lines(map(json.dumps, rows)),
    "--column": as_csv,
    "--match": lambda rows: lines(map(str, rows)),
}


@pytest.mark.parametrize("option", FORMATS)
def test_rows_without_the_number_are_passed_over(option):
    rows, evaluations = sparse()
    text = FORMATS[option](rows)
    written, told = told_of("-w", "4", option, "loss", text=text)
    assert close(written, AVERAGES)
    assert told == "tailavg: passed over 6 lines without 'loss'"
    written, _ = told_of("-w", "2", option, "eval_loss", text=text)
    assert close(written, expected(AnytimeWindow(2), [x for _, x in evaluations]))


@pytest.mark.parametrize("option", FORMATS)
def test_averages_stay_where_a_row_lacks_a_number(option, tmp_path):
    rows, _ = sparse()
    text = FORMATS[option](rows)
    averages = {name: TailAverage(4) for name in ("loss", "eval_loss")}
    answers = []
    for row in rows:
        for name, average in averages.items():
            if name in row:
                average.update(row[name])
        answers.append([a.value() if a.count else float("nan") for a in averages.values()])
    names = [option, "loss", option, "eval_loss"]
    written = done("-w", "4", *names, text=text)
    found = [[float(cell) for cell in line.split("\t")] for line in written.splitlines()]
    np.testing.assert_allclose(found, answers, rtol=1e-11)
    state = tmp_path / "state"
    head, *rest = text.splitlines(keepends=True)
    parts = ["".join([head, *rest[:3]]), "".join(rest[3:])]
    halves = [done("-w", "4", *names, "--state", state, text=part) for part in parts]
    assert "".join(halves) == written


def test_null_is_no_number():
    written, told = told_of("-w", "2", "-f", "x", text='{"x": 1}\n{"x": null}\n{"x": 3}\n')
    assert written == "1\n2\n"
    assert "passed over 1 line" in told


def test_every_needs_all_numbers():
    text = '{"x": 1, "y": 2}\n{"x": 1}\n'
    _, told = failed("-f", "x", "-f", "y", "--every", "2", text=text)
    assert "line 2: '{\"x\": 1}': expected a number in each column, because of --every" in told
    assert done("-f", "x", "--every", "2", text='{"x": 1, "y": 2}\n{"x": 1}\n') == "1\n"


@pytest.mark.parametrize("option", FORMATS)
@pytest.mark.parametrize("x", [None, "step"])
def test_sparse_records_are_drawn_in_one_picture(tmp_path, option, x):
    rows, _ = sparse()
    (tmp_path / "log").write_text(FORMATS[option](rows))
    options = [option, "loss", option, "eval_loss", "-w", "4"]
    panels = page(tmp_path, tmp_path / "log", *options, *([] if x is None else ["--x", x]))
    for name in ("loss", "eval_loss"):
        numbers = [(i, row["step"], row[name]) for i, row in enumerate(rows, 1) if name in row]
        places, steps, values = map(list, zip(*numbers, strict=True))
        raw, line = panels[name].values()
        check(raw, np.array(places if x is None else steps, float), values)
        averages = TailAverage(AnytimeWindow(4, 12)).scan(values)
        check(line, np.array(places if x is None else steps, float), averages)


# Logs of trainers


@pytest.fixture
def trained(tmp_path):
    rows, _ = sparse()
    folder = tmp_path / "checkpoint-30"
    folder.mkdir()
    state = {"epoch": 3.0, "log_history": [*rows, {"step": 30, "train_runtime": 1.5}]}
    (folder / "trainer_state.json").write_text(json.dumps(state, indent=2))
    return folder


@pytest.mark.parametrize("name", ["", "trainer_state.json"])
def test_trainer_state_of_hugging_face(tmp_path, trained, name):
    file = trained / name
    written, told = told_of("-w", "4", "-f", "loss", file, text="")
    assert close(written, AVERAGES)
    assert told == "tailavg: passed over 7 lines without 'loss'"
    names = ["loss", "eval_loss", "train_runtime"]
    panels = page(tmp_path, file, *(f"-f{each}" for each in names), "-w", "4")
    raw, line = panels["loss"].values()
    check(raw, np.arange(1.0, 31.0), [float(x) for x in TENTH])
    check(line, np.arange(1.0, 31.0), TailAverage(AnytimeWindow(4, 12)).scan(TENTH_FLOATS))
    raw, _ = panels["eval_loss"].values()
    check(raw, np.arange(5.0, 35.0, 5), [step / 7 for step in range(5, 31, 5)])
    for command in ("stream", "plot"):
        _, told = commands.failed(command, file, code=2)
        assert "choose a field with --field (found: loss, epoch, eval_loss, train_runtime)" in told
        _, told = commands.failed(command, file, "-f", "lost")
        assert "no field 'lost'; there are: loss, epoch, eval_loss, train_runtime" in told
    _, told = commands.failed("plot", file, "-f", "loss", "--x", "epochs")
    assert "no field 'epochs'; there are: loss, epoch, eval_loss, train_runtime" in told


TENTH_FLOATS = [float(x) for x in TENTH]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"log_history": [{"loss": 1}]}', '{"log_history": [1]}']
)
def test_a_damaged_trainer_state(tmp_path, text):
    (tmp_path / "trainer_state.json").write_text(text)
    _, told = failed("-f", "loss", tmp_path / "trainer_state.json", text="")
    assert "expected a trainer_state.json with a log_history, got " in told


def test_events_of_several_tags(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "run") as log:
        for step, x in enumerate(TENTH_FLOATS):
            log.add_scalar("loss", x, step)
            if step % 10 == 0:
                log.add_scalar("eval", step / 8, step)
    text = done(tmp_path / "run", "-c", "loss", "-c", "eval", "-w", "1", "--format", "csv", text="")
    head, *rows = [line.split(",") for line in text.splitlines()]
    assert head == ["step", "loss", "eval", "loss_average", "eval_average"]
    assert [int(row[0]) for row in rows] == list(range(30))
    assert [float(row[3]) for row in rows] == pytest.approx(TENTH_FLOATS, rel=1e-6)
    assert [float(row[4]) for row in rows] == [step // 10 * 10 / 8 for step in range(30)]


# Tables


@pytest.mark.parametrize(
    ("delimiter", "join"),
    [
        ("tab", "\t"),
        (r"\t", "\t"),
        (";", ";"),
        ("|", "|"),
        (",", ","),
        ("space", " "),
        ("space", "  \t "),
    ],
)
@pytest.mark.parametrize("times", [1, 10])
def test_delimiters(delimiter, join, times):
    rows = (
        [["1,5", x, "a"] for x in TENTH * times]
        if join != ","
        else [["1", x, "a"] for x in TENTH * times]
    )
    text = lines(join.join(row) for row in [["step", "loss", "run"], *rows])
    averages = expected(AnytimeWindow(4), TENTH * times)
    guessed = [] if join != "|" else ["--delimiter", "|"]
    for options in (guessed, ["--delimiter", delimiter]):
        assert close(done("-w", "4", "-c", "loss", *options, text=text), averages)
        written = done("-w", "4", "-c", "loss", "--format", "csv", *options, text=text)
        first, *others = written.splitlines()
        split = None if delimiter == "space" else join
        assert first.split(split) == ["step", "loss", "run", "loss_average"]
        assert [line.split(split)[:3] for line in others] == rows
        assert close(" ".join(line.split(split)[3] for line in others), averages)
        written = done("-w", "4", "-c", "loss", "--by", "run", *options, text=text)
        assert close(" ".join(line.split("\t")[1] for line in written.splitlines()), averages)


def test_names_with_spaces():
    assert done("-w", "2", "-c", "train loss", text="train loss\n1\n3\n") == "1\n2\n"
    assert done("-w", "2", "-c", "train loss", text="step;train loss\n1;1\n2;3\n") == "1\n2\n"


@pytest.mark.parametrize("join", [",", "\t", " "])
@pytest.mark.parametrize("header", [True, False])
def test_columns_by_number(join, header, tmp_path):
    rows = [[str(i), x, "ab"[i % 2]] for i, x in enumerate(TENTH)]
    text = lines(join.join(row) for row in ([["step", "loss", "run"]] if header else []) + rows)
    assert close(done("-w", "4", "-c", "2", text=text), AVERAGES)
    by_name = done("-w", "4", "-c", "2", "--by", "3", text=text)
    for key in "ab":
        cells = [line.split("\t") for line in by_name.splitlines()]
        mine = [x for _, x, run in rows if run == key]
        averages = expected(AnytimeWindow(4), mine)
        assert close(" ".join(x for name, x in cells if name == key), averages)
    written = done("-w", "4", "-c", "2", "--format", "csv", text=text)
    names = ["step", "loss", "run"] if header else ["1", "2", "3"]
    assert written.splitlines()[0].split(join) == [*names, "2_average"]
    head, tail = text[: text.index(rows[10][1])], text[text.index(rows[10][1]) :]
    cut = head.rindex("\n") + 1
    halves = [text[:cut], text[cut:]]
    options = ["-w", "4", "-c", "2", "--format", "csv", "--state", tmp_path / "state"]
    assert "".join(done(*options, text=half) for half in halves) == written
    assert tail


def test_a_column_that_is_not_there_by_number():
    _, told = failed("-c", "4", text="1,2,3\n")
    assert told == "tailavg: no column '4' in the header; there are: 1, 2, 3"
    _, told = failed("-c", "0", text="a,b\n1,2\n")
    assert "no column '0' in the header; there are: a, b" in told
    # a number that is no place is a name
    assert done("-w", "1", "-c", "2020", text="x,2020,2\n5,6,7\n") == "6\n"


def test_a_state_of_another_delimiter_goes_on_without_a_header(tmp_path):
    state = ["-w", "2", "-c", "y", "--state", tmp_path / "state"]
    assert done(*state, text="x;y\n1,5;1\n") == "1\n"
    assert done(*state, text="1,5;3\n") == "2\n"
    assert done(*state, text="x;y\n1,5;5\n") == "4\n"


# NaN in a plot


def test_nan_in_a_plot(tmp_path):
    values = [1.0, float("nan"), 3.0, 5.0, 4.0]
    (tmp_path / "log").write_text(lines(map(str, values)))
    for nan, average in (
        ("propagate", TailAverage(AnytimeWindow(2, 12))),
        ("omit", TailAverage(AnytimeWindow(2, 12), nan_policy="omit")),
    ):
        _, line = page(tmp_path, tmp_path / "log", "-w", "2", "--nan", nan)["value"].values()
        averages = average.scan(values)
        check(line, np.arange(1.0, 6.0), averages)
    _, told = commands.failed("plot", tmp_path / "log", "--nan", "raise")
    assert "line 2: 'nan': expected no NaN, because of --nan raise" in told


# Wrong command lines


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--match", "loss", "-c", "loss"], "--column and --match read different kinds of input"),
        (["--match", "loss", "--regex", "(x)"], "--match and --regex read different kinds"),
        (["--match", "loss", "--by", "x"], "--by needs --column or --field"),
        (["--delimiter", "tab"], "--delimiter needs --column"),
        (["-c", "x", "--delimiter", "ab"], "expected one character, or tab or space, got 'ab'"),
        (["-c", "x", "--delimiter", '"'], "expected one character, or tab or space"),
        (["--regex", "("], "--regex: missing ), unterminated subpattern"),
        (["--regex", "loss"], "expected a pattern with one group, such as 'loss (\\S+)', got 0"),
        (["--regex", "(a)(b)"], "got 2 groups in '(a)(b)'"),
    ],
)
@pytest.mark.parametrize("command", ["stream", "plot"])
def test_a_wrong_command_line(command, options, told):
    _, said = commands.failed(command, *options, code=2)
    assert told in said
