"""`tailavg plot`: what it draws is what the averages are."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from matplotlib.figure import Figure

from tailavg import (
    AnyTail,
    AnytimeWindow,
    ExactWindow,
    Exponential,
    Freshest,
    Growing,
    TailAverage,
)
from tailavg.cli import pictures
from tailavg.cli.charts import Chart, Panel, styled
from tailavg.cli.curves import BandKind, Track
from tests.support import commands
from tests.support.commands import TAILAVG
from tests.support.model import weight_matrix
from tests.support.processes import python, started

PLOT = [*TAILAVG, "plot"]
SCREEN = {"COLUMNS": "100", "LINES": "40", "NO_COLOR": "1"}

run = partial(commands.run, "plot", **SCREEN)
drawn = partial(commands.done, "plot", **SCREEN)


def page(folder, *arguments, text=""):
    """The curves in a page, by panel and name: their points."""
    drawn(*arguments, "-o", "page.html", folder=folder, text=text)
    html = (folder / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"(?!data:)", html), "nothing is fetched"
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])

    def unpacked(packed):
        return np.frombuffer(base64.b64decode(packed), "<f8")

    for panel in data["panels"]:
        for line in panel["lines"]:
            line["xs"], line["ys"] = unpacked(line["xs"]), unpacked(line["ys"])
            if "band" in line:
                line["band"] = [unpacked(each) for each in line["band"]]
    return {
        panel["name"]: {line["name"]: line for line in panel["lines"]} for panel in data["panels"]
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs as CSV, the same as JSON lines with a key, and one column of numbers."""
    folder = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    samples = {name: rng.normal(size=(900, 2)).round(6) + 2 for name in "ab"}
    for name, rows in samples.items():
        lines = [f"{10 * i},{x},{y}\n" for i, (x, y) in enumerate(rows.tolist(), 1)]
        (folder / f"{name}.csv").write_text("step,loss,accuracy\n" + "".join(lines))
    mixed = [
        json.dumps({"run": name, "step": 10 * i, "loss": samples[name][i - 1, 0]}) + "\n"
        for i in range(1, 901)
        for name in "ab"
    ]
    (folder / "both.jsonl").write_text("".join(mixed))
    np.savetxt(folder / "loss.txt", samples["a"][:, 0], fmt="%.6f")
    return folder, samples


def check(line, xs, curve):
    """The points of a line are those of a curve that fits the page without reduction."""
    np.testing.assert_array_equal(line["xs"], xs)
    np.testing.assert_allclose(line["ys"], curve, rtol=1e-12)


def test_the_freshest_method(runs, tmp_path):
    folder, samples = runs
    lines = page(tmp_path, folder / "loss.txt", "-w", "0.25", "--method", "freshest")["value"]
    average, xs = TailAverage(AnyTail(12, 0.25)), samples["a"][:, 0]
    check(lines["the last 25 %"], np.arange(1.0, 901.0), average.scan(xs, Freshest(0.25)))
    error = average.standard_error(Freshest(0.25))
    assert lines["the last 25 %"]["now"] == f"{average.value(Freshest(0.25)):.4g} ± {error:.2g}"


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ([], AnytimeWindow(0.25, 12)),
        (["-w", "100"], AnytimeWindow(100, 12)),
        (["-w", "0.5", "--at-most", "200"], AnytimeWindow(Growing(0.5, 200), 12)),
        (["-w", "0.5", "--accumulators", "3"], AnytimeWindow(0.5, 3)),
        (["-w", "50", "--method", "exponential"], Exponential(50)),
    ],
)
def test_draws_samples_and_their_average(runs, tmp_path, options, rule):
    folder, samples = runs
    ((name, lines),) = page(tmp_path, folder / "loss.txt", *options).items()
    raw, line = lines.values()
    xs = np.arange(1.0, 901.0)
    check(raw, xs, samples["a"][:, 0])
    check(line, xs, TailAverage(rule).scan(samples["a"][:, 0]))
    assert name == "value"
    assert raw["name"] == "samples"
    assert ("band" in line) == (rule.accumulators == 12)


def test_band_is_one_standard_error(runs, tmp_path):
    folder, samples = runs
    line = page(tmp_path, folder / "loss.txt", "-w", "0.25")["value"]["the last 25 %"]
    average = TailAverage(AnytimeWindow(0.25, 12))
    x, low, high = line["band"]
    done = 0
    for t, least, greatest in zip(x.astype(int).tolist(), low, high, strict=True):
        average.update_many(samples["a"][done:t, 0])
        done = t
        error = average.standard_error()
        now = average.value()
        assert least == pytest.approx(now - error, rel=1e-9, nan_ok=True)
        assert greatest == pytest.approx(now + error, rel=1e-9, nan_ok=True)
    assert done == 900
    assert np.isfinite(low).mean() > 0.9
    assert line["now"] == f"{average.value():.4g} ± {average.standard_error():.2g}"
    bare = page(tmp_path, folder / "loss.txt", "-w", "0.25", "--band", "none", "--no-raw")["value"]
    assert list(bare) == ["the last 25 %"]
    assert "band" not in bare["the last 25 %"]


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("anytime", AnytimeWindow(50, 12)),
        ("exponential", Exponential(50)),
        ("exact", ExactWindow(50)),
    ],
)
def test_band_is_one_standard_deviation(runs, tmp_path, method, rule):
    folder, samples = runs
    options = ["-w", "50", "--method", method, "--band", "std"]
    line = page(tmp_path, folder / "loss.txt", *options)["value"]["the last 50"]
    plain = page(tmp_path, folder / "loss.txt", *options[:4], "--band", "none")["value"]
    np.testing.assert_array_equal(line["ys"], plain["the last 50"]["ys"])
    losses = samples["a"][:, 0]
    rows, low, high = line["band"]
    assert len(rows) > 50
    matrix = weight_matrix(rule, 900)[rows.astype(int) - 1]
    middle = matrix @ losses
    squares = (matrix * (losses - middle[:, None]) ** 2).sum(axis=1)
    std = np.sqrt(squares / (1 - (matrix**2).sum(axis=1)))
    np.testing.assert_allclose((low, high), (middle - std, middle + std), rtol=1e-9)
    assert line["now"] == f"{middle[-1]:.4g} ± {std[-1]:.2g}"
    assert line["now"] in drawn(*options, folder / "loss.txt")


def test_a_band_that_reaches_below_0_on_a_logarithmic_axis():
    ys = np.array([*[1, 2] * 100, *[0.1, 90] * 4, *[1, 2] * 100])
    track = Track([(AnytimeWindow(20), None)], 512, log=False, band=BandKind.std)
    track.take(np.arange(1.0, len(ys) + 1), ys)
    line = styled(track.lines()[1], 0, ["run"], ["the last 20"])
    low = line.band.low
    assert 4 < (low < 0).sum() < 50
    axes = Figure().subplots()
    pictures._draw_panel(Chart("", "", False, log_y=True), Panel("", [line]), axes)
    ((path,),) = (drawn_band.get_paths() for drawn_band in axes.collections)
    assert path.vertices[:, 1].min() == low[low > 0].min()


def test_files_are_runs_and_columns_are_panels(runs, tmp_path):
    folder, samples = runs
    files = [folder / "a.csv", folder / "b.csv"]
    options = ["-c", "loss", "-c", "accuracy", "--x", "step", "--windows", "0.1,100"]
    panels = page(tmp_path, *files, *options)
    assert list(panels) == ["loss", "accuracy"]
    xs = np.arange(10.0, 9010.0, 10)
    for place, column in enumerate(panels):
        for name in "ab":
            for window, title in ((0.1, "the last 10 %"), (100, "the last 100")):
                curve = TailAverage(AnytimeWindow(window, 12)).scan(samples[name][:, place])
                check(panels[column][f"{name}.csv, {title}"], xs, curve)


def test_groups_are_runs(runs, tmp_path):
    folder, samples = runs
    with (folder / "both.jsonl").open() as file:
        given = file.read()
    lines = page(tmp_path, "-f", "loss", "--by", "run", "--x", "step", text=given)["loss"]
    for name in "ab":
        curve = TailAverage(AnytimeWindow(0.25, 12)).scan(samples[name][:, 0])
        check(lines[name], np.arange(10.0, 9010.0, 10), curve)


def test_draws_after_some_rows_what_was_averaged_of_all(runs, tmp_path):
    folder, samples = runs
    line = page(tmp_path, folder / "loss.txt", "--after", "600")["value"]["the last 25 %"]
    curve = TailAverage(AnytimeWindow(0.25, 12)).scan(samples["a"][:, 0])
    check(line, np.arange(601.0, 901.0), curve[600:])
    assert min(line["band"][0]) > 600


def test_output_of_stream_can_be_drawn(runs, tmp_path):
    """Its columns have the names that averages would get."""
    folder, _ = runs
    options = ["-w", "9", "-c", "loss", "--format", "csv"]
    averaged = commands.done("stream", *options, folder / "a.csv")
    assert list(page(tmp_path, "-c", "loss", "-c", "loss_average", text=averaged)) == [
        "loss",
        "loss_average",
    ]


KINDS = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF", "html": b"<!doctype html>"}
TITLED = ["-c", "loss", "--log-x", "--log-y", "--title", "a <run> & more"]
DRAW = "import sys; from tailavg.cli.main import app\n"
DRAW += "for kind in sys.argv[1].split(): "
DRAW += "app(['plot', *sys.argv[2:], '-o', f'again.{kind}'], standalone_mode=False)"


@pytest.fixture(scope="module")
def drawn_again(runs, tmp_path_factory):
    """A picture of each kind, from another process: its hashes and the time are others."""
    folder = tmp_path_factory.mktemp("again")
    python("-c", DRAW, " ".join(KINDS), runs[0] / "a.csv", *TITLED, cwd=folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_the_same_every_time(runs, tmp_path, drawn_again, kind):
    drawn(runs[0] / "a.csv", *TITLED, "-o", f"x.{kind}", folder=tmp_path)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    assert content == (drawn_again / f"again.{kind}").read_bytes()
    assert content.startswith(KINDS[kind])
    if kind == "svg":
        ET.fromstring(content)
    if kind == "html":
        assert b"<h1>a &lt;run&gt; &amp; more</h1>" in content


def test_a_name_cannot_end_the_script(tmp_path):
    given = "</script><b>\n" + "1\n2\n"
    panels = page(tmp_path, "-c", "</script><b>", text=given)
    assert list(panels) == ["</script><b>"]


def braille(text):
    """The dots of a chart: columns and rows, from its left and its top."""
    rows = [line.partition("│")[2] or line.partition("┤")[2] for line in text.split("\n")]
    first = next(i for i, row in enumerate(rows) if row.strip())
    bits = [(0x1, 0, 0), (0x2, 0, 1), (0x4, 0, 2), (0x8, 1, 0)]
    bits += [(0x10, 1, 1), (0x20, 1, 2), (0x40, 0, 3), (0x80, 1, 3)]
    return {
        (2 * column + right, 4 * (i - first) + down)
        for i, row in enumerate(rows)
        for column, cell in enumerate(row)
        for bit, right, down in bits
        if cell != " " and (ord(cell) - 0x2800) & bit
    }


def test_terminal_shows_the_curve(tmp_path):
    """Of a parabola, each sample has a dot where it should be, and dots are on the curve only."""
    xs = np.arange(1, 301)
    given = "".join(f"{x * x}\n" for x in xs.tolist())
    text = drawn("-w", "1", "--no-raw", text=given, folder=tmp_path)
    assert {len(line) for line in text.split("\n") if "│" in line or "┤" in line} == {100}
    dots = braille(text)
    width, height = (max(places) + 1 for places in zip(*dots, strict=True))
    columns = (xs - 1) / 299 * (width - 1)
    rows = (1 - (xs**2 - 1) / (300**2 - 1)) * (height - 1)
    for column, row in zip(columns.tolist(), rows.tolist(), strict=True):
        assert any(abs(c - column) <= 0.5 and abs(r - row) <= 0.5 for c, r in dots)
    for column, row in dots:
        near = np.maximum(np.abs(columns - column), np.abs(rows - row))
        assert near.min() <= 2
    assert "the last 1 90,000" in text
    assert re.search(r"80,000┤", text)


def test_terminal_without_unicode(runs, tmp_path):
    folder, _ = runs
    text = run(folder / "loss.txt", encoding="ascii").output.decode("ascii")
    assert "*" in text
    assert "." in text
    assert "?" not in text


def test_values_that_cannot_be_drawn_are_gaps(tmp_path):
    given = "1\nnan\n3\ninf\n5\n-5\n"
    text = drawn("-w", "1", "--log-y", text=given, folder=tmp_path)
    assert "the last 1 -5" in text
    for kind in ("svg", "html"):
        drawn("-w", "2", "--log-y", "-o", f"x.{kind}", text=given, folder=tmp_path)
    assert "the last 1 nan" in drawn("-w", "1", text="1\nnan\n", folder=tmp_path)
    assert "the last 1 7" in drawn("-w", "1", text="7\n", folder=tmp_path)
    assert "the last 1 7" in drawn("-w", "1", "--log-x", "--log-y", text="7\n7\n", folder=tmp_path)


@pytest.mark.parametrize("writer", ["torch", "tensorboard"])
def test_event_files(tmp_path, writer):
    """What torch writes, and what TensorFlow writes."""
    values = np.random.default_rng(0).normal(size=50).astype(np.float32).tolist()
    if writer == "torch":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(tmp_path / "run") as log:
            for i, value in enumerate(values):
                log.add_scalar("train/loss", value, 10 * i)
    else:
        from tensorboard.summary import Writer

        log = Writer(str(tmp_path / "run"))
        for i, value in enumerate(values):
            log.add_scalar("train/loss", value, step=10 * i)
        log.close()
    (file,) = (tmp_path / "run").iterdir()
    for given in (tmp_path / "run", file):
        raw, line = page(tmp_path, given, "-c", "train/loss", "-w", "5")["train/loss"].values()
        check(raw, np.arange(0.0, 500.0, 10), values)
        check(line, np.arange(0.0, 500.0, 10), TailAverage(AnytimeWindow(5, 12)).scan(values))
    _, told = commands.failed("plot", file, "-c", "loss")
    assert "no tag 'loss'; there are: train/loss" in told
    for command in ("plot", "stream"):
        _, told = commands.failed(command, file, code=2)
        assert "choose a tag with --column (found: train/loss)" in told
    written = commands.done("stream", file, "-c", "train/loss", "-w", "5").split()
    averages = TailAverage(AnytimeWindow(5)).scan(values)
    assert [float(cell) for cell in written] == pytest.approx(averages, rel=1e-11)


@pytest.mark.parametrize(
    ("arguments", "given", "code", "told"),
    [
        (["-w", "0"], "1\n", 2, "expected"),
        (["--live", "-o", "x.svg"], "1\n", 2, "--live draws in the terminal"),
        (["--x", "step"], "1\n", 2, "--x needs --column, --field or --match"),
        (["--x", "a", "-c", "a"], "a\n1\n", 2, "expected another column than those to draw"),
        (["--x", "step", "-mloss"], "step 1 loss=2\n", 1, "no line has a number for 'step'; the"),
        (["--x", "b", "-fa"], '{"a": 1}\n{"c": 1}\n', 1, "passed over 1 line without 'b'"),
        ([""], "1\n", 1, "No such file or directory"),
        (["--by", "run"], "1\n", 2, "--by needs --column or --field"),
        (["-o", "x.doc"], "1\n", 2, "expected a file name that ends in"),
        (["-o", "no/x.svg"], "1\n", 1, "cannot write the plot"),
        (["-o", "no/x.html"], "1\n", 1, "cannot write the plot"),
        ([], "", 1, "expected at least one number to draw, got none"),
        (["--after", "9"], "1\n2\n", 1, "expected at least one number to draw, got none"),
        (["--log-y"], "-1\n0\n", 1, "expected at least one number above 0, for a logarithmic axis"),
        ([], "nan\nnan\n", 1, "expected at least one number to draw, got none"),
        (["-w", "110%"], "1\n", 2, "such as 0.25 or 25%; got '110%'"),
        ([], "step,loss\n1,2\n", 1, "expected a number, or --column NAME for CSV; fix it"),
        ([], '{"loss": 1}\n', 1, "expected a number, or --field NAME for JSON lines; fix it"),
        ([f"-c{i}" for i in range(21)], "1\n", 2, "expected at most 20 columns to draw, got 21"),
        (["-c", "lost"], "loss\n1\n", 1, "no column 'lost' in the header; there are: loss"),
        (["missing.txt"], "", 1, "missing.txt: No such file"),
        ([], "1\ntwo\n", 1, "line 2: 'two': expected a number; fix it, or skip such rows"),
        (
            ["-c", "x", "--by", "k"],
            "x,k\n" + "".join(f"1,{i}\n" for i in range(201)),
            1,
            "200 runs",
        ),
        (["folder"], "", 1, "expected event files with scalars, got none"),
        (["folder", "-c", "x"], "", 1, "expected event files with scalars, got none"),
    ],
)
def test_errors(tmp_path, arguments, given, code, told):
    (tmp_path / "folder").mkdir()
    _, said = commands.failed("plot", *arguments, folder=tmp_path, text=given, code=code)
    assert told in said
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(("name", "code"), [("x.doc", 2), ("no/x.svg", 1)])
def test_what_cannot_be_drawn_is_said_before_reading(tmp_path, name, code):
    with started(*PLOT, "-o", name, cwd=tmp_path, stdin=subprocess.PIPE) as process:
        assert process.wait(300) == code  # though the input has not ended


def test_odd_names(tmp_path):
    """What matplotlib would take for mathematics or hide, and what would clear a terminal."""
    name = "loss\x1b[2J\udcff".encode(errors="surrogateescape")
    for more in ([], ["-o", "z.svg"], ["-o", "z.html"]):
        ended = run("-c", os.fsdecode(name), *more, text=name + b"\n1\n2\n", folder=tmp_path)
        assert b"\x1b" not in ended.output
    ET.parse(tmp_path / "z.svg")
    names = ["_a$b$_{", "$\\frac$", "c\x1b[2J", "d\ufffd"]
    given = "x,k\n" + "".join(f"{i},{name}\n" for name in names for i in range(5))
    text = drawn("-c", "x", "--by", "k", folder=tmp_path, text=given)
    assert "\x1b" not in text
    drawn("-c", "x", "--by", "k", "-o", "x.svg", folder=tmp_path, text=given)
    image = (tmp_path / "x.svg").read_text(encoding="utf-8")
    for name in ("_a$b$_{", "$\\frac$", "c\ufffd[2J"):
        assert name in text
        assert name in image
    lines = page(tmp_path, "-c", "x", "--by", "k", text=given)["x"]
    assert "c\ufffd[2J" in lines
    text = b"x,k\n1,\xff\n2,\xff\n"
    drawn("-c", "x", "--by", "k", "-o", "y.html", text=text, folder=tmp_path)


@pytest.mark.parametrize("log", [[], ["--log-y"]])
@pytest.mark.parametrize(
    "numbers",
    [["1e17"], ["1e16"] * 3, ["5e-324"], ["1.7e308"], ["-1.7e308", "1.7e308"], ["3.5"] * 99],
)
def test_extreme_numbers(tmp_path, numbers, log):
    given = "\n".join(numbers) + "\n"
    drawn("-w", "1", *log, folder=tmp_path, text=given)
    if len(numbers) == 2:
        drawn("-w", "1", *log, "-o", "x.png", folder=tmp_path, text=given)
        page(tmp_path, "-w", "1", *log, text=given)


def test_ticks_of_logarithmic_axes(runs, tmp_path):
    folder, _ = runs
    drawn(folder / "loss.txt", "--log-x", "-o", "x.svg", folder=tmp_path)
    text = (tmp_path / "x.svg").read_text(encoding="utf-8")
    assert "mathdefault" not in re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def test_a_file_twice_is_two_runs(runs, tmp_path):
    folder, _ = runs
    lines = page(tmp_path, folder / "loss.txt", folder / "loss.txt")["value"]
    assert [name for name in lines if "samples" not in name] == [
        f"{folder / 'loss.txt'} ({i})" for i in (1, 2)
    ]


def test_a_title_is_no_template(tmp_path):
    drawn("--title", "{{data}}", "-o", "x.html", folder=tmp_path, text="1\n2\n")
    assert "<title>{{data}}</title>" in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_points_without_neighbours_are_marked(tmp_path):
    for given in ("1\n", "1\nnan\n2\nnan\n3\n"):
        drawn("-w", "1", "--no-raw", "-o", "x.svg", folder=tmp_path, text=given)
        points = (tmp_path / "x.svg").read_text(encoding="utf-8").count("stroke: #0083cc")
        assert points >= given.count("\n") // 2 + 1


def test_many_files_are_not_all_open(tmp_path):
    resource = pytest.importorskip("resource")
    names = [f"{i}.txt" for i in range(80)]
    for name in names:
        (tmp_path / name).write_text("1\n2\n")
    open_now = max(int(path.name) for path in Path("/dev/fd").iterdir())
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 40, before[1]))
    try:
        drawn(*names, "-o", "x.html", folder=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "<h1>80 files</h1>" in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_bad_rows_can_be_skipped(tmp_path):
    ended = run("--skip-bad", "-w", "2", folder=tmp_path, text="1\ntwo\n3\n")
    assert "the last 2 2" in ended.stdout
    assert "skipped 1 row, the first is line 2: 'two'" in ended.stderr
    _, told = commands.failed("plot", "--skip-bad", text="two\n")
    assert "skipped every row, 1 row: none could be read" in told


@pytest.fixture
def terminal():
    """A terminal, and what is written to it so far."""
    pty = pytest.importorskip("pty")
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    os.set_blocking(ours, False)
    seen = bytearray()

    def read(until, seconds=300):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                seen.extend(os.read(ours, 65536))
            except OSError:  # nothing to read now, or for good
                time.sleep(0.02)
            if until(seen.decode(errors="replace")):
                return seen.decode(errors="replace")
        raise AssertionError(seen.decode(errors="replace")[-3000:])

    yield theirs, read
    os.close(ours)


@pytest.mark.parametrize("ending", ["end", "interrupt"])
def test_live_redraws_and_leaves_the_last_picture(terminal, ending):
    screen, read = terminal
    with started(
        *[*PLOT, "--live", "-w", "2"],
        stdin=subprocess.PIPE,
        stdout=screen,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
    ) as process:
        os.close(screen)
        for number, average in ((b"1", 1), (b"3", 2), (b"5", 4), (b"9\n11", 10)):
            process.stdin.write(number + b"\n")
            process.stdin.flush()
            # also the last line of a burst is drawn, though nothing follows it
            read(lambda text, average=average: f"last 2 {average}" in text)
        if ending == "end":
            process.stdin.close()
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(300) == (0 if ending == "end" else 130)
        assert process.stderr.read() == b""
    text = read(
        lambda text: text.rstrip().endswith(("sample\x1b[0m", "sample")) or "\x1b[?25h" in text
    )
    assert text.count("\x1b[1A") >= 3 * 10, "it was drawn over several times"
    assert "\x1b[?25h" in text, "the cursor is back"
    last = text[text.rindex("last 2 10") :]
    assert "└" in last
    assert "\x1b[2K" not in last.partition("└")[2].partition("\n")[2], "the last picture stays"


@contextmanager
def drawing(folder, text):
    """A process that has read `text` from a pipe that stays open."""
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    os.mkfifo(folder / "pipe")
    with started(*PLOT, "pipe", "-o", "x.html", cwd=folder, stderr=subprocess.PIPE) as process:
        writer = None
        while writer is None and process.poll() is None:
            try:
                writer = os.open(folder / "pipe", os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # nobody reads yet
                time.sleep(0.01)
        os.write(writer, text)
        while any(fcntl.ioctl(writer, termios.FIONREAD, bytes(4))) and process.poll() is None:
            time.sleep(0.01)
        yield process
        os.close(writer)


def test_interrupted_before_the_first_row(tmp_path):
    with drawing(tmp_path, b"") as process:
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=300)
        assert (process.returncode, told) == (130, b"")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_interrupted_it_draws_what_has_arrived(tmp_path):
    with drawing(tmp_path, b"1\n2\n3\n") as process:
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=300)
        assert process.returncode == 130, told
    assert "the last 25 %" in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_a_signal_ends_the_drawing(tmp_path):
    """At once, and not when a large picture is done."""
    (tmp_path / "numbers.txt").write_text("1\n2\n")
    slow = """
import sys, time
from tailavg.cli import main, plot, signals

def draw(*_):
    print("drawing", flush=True)
    time.sleep(600)

plot.draw = draw
signals.begin()
sys.exit(main.run())
"""
    with started(
        *[sys.executable, "-c", slow, "plot", "numbers.txt", "-o", "x.svg"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"drawing\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 143
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.txt"]


WITHOUT_MATPLOTLIB = """
import sys
sys.modules["matplotlib"] = None
from tailavg.cli.main import app
codes = []
for options in ([], ["-o", "x.html"], ["-o", "x.svg"]):
    try:
        app(["plot", sys.argv[1], *options])
    except SystemExit as end:
        codes.append(end.code)
print("ended with", *codes)
"""


def test_without_matplotlib(runs, tmp_path):
    """The terminal and pages need nothing more; a picture says what to install."""
    folder, _ = runs
    process = python("-c", WITHOUT_MATPLOTLIB, folder / "loss.txt", cwd=tmp_path)
    assert process.stdout.endswith("\nended with 0 0 1\n")
    assert "pip install 'tailavg[plot]'" in process.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["x.html"]


def test_windows_of_time(tmp_path):
    (tmp_path / "log.csv").write_text(
        "ts,loss\n" + "".join(f"2026-05-01T12:{i:02d}:00Z,{i % 7}\n" for i in range(60))
    )
    command = ["plot", "log.csv", "-c", "loss", "--windows", "10m,0.5"]
    text = commands.done(*command, "--x", "ts", folder=tmp_path)
    assert "ts, seconds from the first row" in text
    assert "the last 10m" in text
    _, told = commands.failed(*command, code=2, folder=tmp_path)
    assert "a window of time needs --x with the time of each row" in told
    (tmp_path / "log.csv").write_text("ts,loss\n2,1\n1,1\n")
    _, told = commands.failed(*command, "--x", "ts", folder=tmp_path)
    assert "line 3: '1,1': expected times that do not go back" in told
