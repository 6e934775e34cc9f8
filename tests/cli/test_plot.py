"""`tailavg plot`, as a process: what it draws is what the averages are."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from tailavg import AnytimeWindow, Exponential, Growing, TailAverage

TAILAVG = [sys.executable, "-m", "tailavg", "plot"]
ENV = os.environ | {"PYTHONIOENCODING": "utf-8", "COLUMNS": "100", "LINES": "40", "NO_COLOR": "1"}


def run(*arguments, folder, given=None):
    return subprocess.run(
        [*TAILAVG, *arguments],
        cwd=folder,
        input=given,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=ENV,
        timeout=60,
    )


def drawn(*arguments, folder, given=None):
    process = run(*arguments, folder=folder, given=given)
    assert process.returncode == 0, process.stderr
    return process.stdout


def page(folder, *arguments, given=None):
    """The curves in a page, by panel and name: their points."""
    drawn(*arguments, "-o", "page.html", folder=folder, given=given)
    text = (folder / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"(?!data:)", text), "nothing is fetched"
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])

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


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ([], AnytimeWindow(0.1, 12)),
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
    bare = page(tmp_path, folder / "loss.txt", "-w", "0.25", "--no-band", "--no-raw")["value"]
    assert list(bare) == ["the last 25 %"]
    assert "band" not in bare["the last 25 %"]


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
    lines = page(tmp_path, "-f", "loss", "--by", "run", "--x", "step", given=given)["loss"]
    for name in "ab":
        curve = TailAverage(AnytimeWindow(0.1, 12)).scan(samples[name][:, 0])
        check(lines[name], np.arange(10.0, 9010.0, 10), curve)


def test_draws_after_some_rows_what_was_averaged_of_all(runs, tmp_path):
    folder, samples = runs
    line = page(tmp_path, folder / "loss.txt", "--after", "600")["value"]["the last 10 %"]
    curve = TailAverage(AnytimeWindow(0.1, 12)).scan(samples["a"][:, 0])
    check(line, np.arange(601.0, 901.0), curve[600:])
    assert min(line["band"][0]) > 600


def test_output_of_stream_can_be_drawn(runs, tmp_path):
    """Its columns have the names that averages would get."""
    folder, _ = runs
    command = [
        sys.executable,
        "-m",
        "tailavg",
        "stream",
        "-w",
        "9",
        "-c",
        "loss",
        "--output",
        "csv",
    ]
    averaged = subprocess.run([*command, folder / "a.csv"], capture_output=True, text=True).stdout
    assert list(page(tmp_path, "-c", "loss", "-c", "loss_average", given=averaged)) == [
        "loss",
        "loss_average",
    ]


@pytest.mark.parametrize("kind", ["svg", "png", "pdf", "html"])
def test_files_are_the_same_every_time(runs, tmp_path, kind):
    folder, _ = runs
    options = [folder / "a.csv", "-c", "loss", "--log-x", "--log-y", "--title", "a <run> & more"]
    texts = []
    for name in ("one", "two"):
        drawn(*options, "-o", f"{name}.{kind}", folder=tmp_path)
        texts.append((tmp_path / f"{name}.{kind}").read_bytes())
    assert texts[0] == texts[1]
    begins = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF", "html": b"<!doctype html>"}
    assert texts[0].startswith(begins[kind])
    if kind == "svg":
        ET.fromstring(texts[0])
    if kind == "html":
        assert b"<h1>a &lt;run&gt; &amp; more</h1>" in texts[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"one.{kind}", f"two.{kind}"]


def test_a_name_cannot_end_the_script(tmp_path):
    given = "</script><b>\n" + "1\n2\n"
    panels = page(tmp_path, "-c", "</script><b>", given=given)
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
    text = drawn("-w", "1", "--no-raw", given=given, folder=tmp_path)
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
    command = [*TAILAVG, folder / "loss.txt"]
    shown = subprocess.run(command, env=ENV | {"PYTHONIOENCODING": "ascii"}, capture_output=True)
    text = shown.stdout.decode("ascii")
    assert shown.returncode == 0
    assert "*" in text
    assert "." in text
    assert "?" not in text


def test_values_that_cannot_be_drawn_are_gaps(tmp_path):
    given = "1\nnan\n3\ninf\n5\n-5\n"
    text = drawn("-w", "1", "--log-y", given=given, folder=tmp_path)
    assert "the last 1 -5" in text
    for kind in ("svg", "html"):
        drawn("-w", "2", "--log-y", "-o", f"x.{kind}", given=given, folder=tmp_path)
    assert "the last 1 nan" in drawn("-w", "1", given="1\nnan\n", folder=tmp_path)
    assert "the last 1 7" in drawn("-w", "1", given="7\n", folder=tmp_path)
    assert "the last 1 7" in drawn("-w", "1", "--log-x", "--log-y", given="7\n7\n", folder=tmp_path)


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
    failed = run(file, "-c", "loss", folder=tmp_path)
    assert failed.returncode == 1
    assert "no tag 'loss'; there are: train/loss" in failed.stderr
    assert run(file, folder=tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "given", "code", "told"),
    [
        (["-w", "0"], "1\n", 2, "expected"),
        (["--live", "-o", "x.svg"], "1\n", 2, "--live draws in the terminal"),
        (["--x", "step"], "1\n", 2, "--x needs --column or --field"),
        (["--x", "a", "-c", "a"], "a\n1\n", 2, "expected another column than those to draw"),
        (["--by", "run"], "1\n", 2, "--by needs --column or --field"),
        (["-o", "x.doc"], "1\n", 2, "expected a file name that ends in"),
        (["-o", "no/x.svg"], "1\n", 1, "cannot write the plot"),
        (["-o", "no/x.html"], "1\n", 1, "cannot write the plot"),
        ([], "", 1, "expected at least one number to draw, got none"),
        (["--after", "9"], "1\n2\n", 1, "expected at least one number to draw, got none"),
        (["--log-y"], "-1\n0\n", 1, "expected at least one number above 0, for a logarithmic axis"),
        ([], "nan\nnan\n", 1, "expected at least one number to draw, got none"),
        (["-w", "10%"], "1\n", 2, "expected a window such as 1000 or 0.25, got '10%'"),
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
        (["folder"], "", 2, "event files are read with --column TAG"),
        (["folder", "-c", "x"], "", 1, "expected event files with scalars, got none"),
    ],
)
def test_errors(tmp_path, arguments, given, code, told):
    (tmp_path / "folder").mkdir()
    process = run(*arguments, folder=tmp_path, given=given)
    assert process.returncode == code, process.stderr
    assert told in re.sub(r"[\s│]+", " ", process.stderr)
    assert "Traceback" not in process.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("name", ["x.doc", "no/x.svg", "no/x.html"])
def test_what_cannot_be_drawn_is_said_before_reading(tmp_path, name):
    command = [*TAILAVG, "-o", name]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ENV
    )
    assert process.wait(30) == (2 if name == "x.doc" else 1)  # though the input has not ended
    process.stdin.close()


def test_odd_names(tmp_path):
    """What matplotlib would take for mathematics or hide, and what would clear a terminal."""
    name = "loss\x1b[2J\udcff".encode(errors="surrogateescape")
    command = [*TAILAVG, "-c", os.fsdecode(name)]
    for more in ([], ["-o", "z.svg"], ["-o", "z.html"]):
        ran = subprocess.run(
            [*command, *more], input=name + b"\n1\n2\n", cwd=tmp_path, env=ENV, capture_output=True
        )
        assert ran.returncode == 0, ran.stderr
        assert b"\x1b" not in ran.stdout
    ET.parse(tmp_path / "z.svg")
    names = ["_a$b$_{", "$\\frac$", "c\x1b[2J", "d\ufffd"]
    given = "x,k\n" + "".join(f"{i},{name}\n" for name in names for i in range(5))
    text = drawn("-c", "x", "--by", "k", folder=tmp_path, given=given)
    assert "\x1b" not in text
    drawn("-c", "x", "--by", "k", "-o", "x.svg", folder=tmp_path, given=given)
    image = (tmp_path / "x.svg").read_text(encoding="utf-8")
    for name in ("_a$b$_{", "$\\frac$", "c\ufffd[2J"):
        assert name in text
        assert name in image
    lines = page(tmp_path, "-c", "x", "--by", "k", given=given)["x"]
    assert "c\ufffd[2J" in lines
    process = subprocess.run(
        [*TAILAVG, "-c", "x", "--by", "k", "-o", "y.html"],
        input=b"x,k\n1,\xff\n2,\xff\n",
        cwd=tmp_path,
        capture_output=True,
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("log", [[], ["--log-y"]])
@pytest.mark.parametrize(
    "numbers",
    [["1e17"], ["1e16"] * 3, ["5e-324"], ["1.7e308"], ["-1.7e308", "1.7e308"], ["3.5"] * 99],
)
def test_extreme_numbers(tmp_path, numbers, log):
    given = "\n".join(numbers) + "\n"
    drawn("-w", "1", *log, folder=tmp_path, given=given)
    if len(numbers) == 2:
        drawn("-w", "1", *log, "-o", "x.png", folder=tmp_path, given=given)
        page(tmp_path, "-w", "1", *log, given=given)


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
    drawn("--title", "{{data}}", "-o", "x.html", folder=tmp_path, given="1\n2\n")
    assert "<title>{{data}}</title>" in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_points_without_neighbours_are_marked(tmp_path):
    for given in ("1\n", "1\nnan\n2\nnan\n3\n"):
        drawn("-w", "1", "--no-raw", "-o", "x.svg", folder=tmp_path, given=given)
        points = (tmp_path / "x.svg").read_text(encoding="utf-8").count("stroke: #0083cc")
        assert points >= given.count("\n") // 2 + 1


def test_many_files_are_not_all_open(tmp_path):
    if os.name != "posix":
        pytest.skip("needs a limit of open files")
    for i in range(80):
        (tmp_path / f"{i}.txt").write_text("1\n2\n")
    command = ["sh", "-c", 'ulimit -n 64 && exec "$@"', "sh", *TAILAVG]
    command += [*(f"{i}.txt" for i in range(80)), "-o", "x.html"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True)
    assert process.returncode == 0, process.stderr
    assert "<h1>80 files</h1>" in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_bad_rows_can_be_skipped(tmp_path):
    process = run("--skip-bad", "-w", "2", folder=tmp_path, given="1\ntwo\n3\n")
    assert process.returncode == 0
    assert "the last 2 2" in process.stdout
    assert "skipped 1 row, the first is line 2: 'two'" in process.stderr


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

    def read(until, seconds=30):
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
    process = subprocess.Popen(
        [*TAILAVG, "--live", "-w", "2"],
        stdin=subprocess.PIPE,
        stdout=screen,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
    )
    os.close(screen)
    for number in (1, 3, 5):
        process.stdin.write(f"{number}\n".encode())
        process.stdin.flush()
        shown = number if number == 1 else number - 1
        # also the last line of a burst is drawn, though nothing follows it
        text = read(lambda text, shown=shown: f"last 2 {shown}" in text)
    process.stdin.write(b"9\n11\n")
    process.stdin.flush()
    text = read(lambda text: "last 2 10" in text)
    if ending == "end":
        process.stdin.close()
        assert process.wait(30) == 0
    else:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert process.stderr.read() == b""
    process.stderr.close()
    if ending != "end":
        process.stdin.close()
    text = read(
        lambda text: text.rstrip().endswith(("sample\x1b[0m", "sample")) or "\x1b[?25h" in text
    )
    assert text.count("\x1b[1A") >= 3 * 10, "it was drawn over several times"
    assert "\x1b[?25h" in text, "the cursor is back"
    last = text[text.rindex("last 2 10") :]
    assert "└" in last
    assert "\x1b[2K" not in last.partition("└")[2].partition("\n")[2], "the last picture stays"


def test_interrupted_before_the_first_row(tmp_path):
    process = subprocess.Popen(
        [*TAILAVG, "-o", "x.html"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    )
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert (process.returncode, told) == (130, b"")
    assert list(tmp_path.iterdir()) == []


def test_interrupted_it_draws_what_has_arrived(tmp_path):
    process = subprocess.Popen(
        [*TAILAVG, "-o", "x.html"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    )
    process.stdin.write(b"1\n2\n3\n")
    process.stdin.flush()
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130, told
    assert "the last 10 %" in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_a_signal_ends_the_drawing(tmp_path):
    """At once, and not when a large picture is done."""
    slow = """
import sys, time
import tailavg.cli
from tailavg.core import signals

def draw(*_):
    print("drawing", flush=True)
    time.sleep(60)

sys.modules["tailavg.cli.plot"].draw = draw
signals.begin()
sys.exit(tailavg.cli.run())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", slow, "plot", "-o", "x.svg"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    process.stdin.write(b"1\n2\n")
    process.stdin.close()
    assert process.stdout.readline() == b"drawing\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib(runs, tmp_path):
    """The terminal and pages need nothing more; a picture says what to install."""
    folder, _ = runs
    hide = "import sys; sys.modules['matplotlib'] = None; import tailavg.__main__ as m; m.main()"
    command = [sys.executable, "-c", hide, "plot", str(folder / "loss.txt")]
    for extra, code in (([], 0), (["-o", "x.html"], 0), (["-o", "x.svg"], 1)):
        process = subprocess.run([*command, *extra], cwd=tmp_path, capture_output=True, env=ENV)
        assert process.returncode == code, process.stderr
    assert b"pip install 'tailavg[plot]'" in process.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["x.html"]
