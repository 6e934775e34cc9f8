"""`tailavg stream` with windows of time, against `TailAverage` with the same times."""

import json
from datetime import UTC, datetime, timedelta, timezone
from functools import cache

import numpy as np
import pytest

from tailavg import Elapsed, Exponential, TailAverage
from tailavg.cli import stream
from tests.support import commands
from tests.support.streams import done, failed, lines, run

pytestmark = pytest.mark.usefixtures("switched")

RANDOM = np.random.default_rng(11)
ROWS = 1200
XS = np.round(RANDOM.normal(3, 2, ROWS), 3)
AFTER = np.cumsum(RANDOM.choice([0, 1, 999, 1_500_000, 90_000_000], ROWS)).tolist()
TIMES = [datetime(2026, 5, 1, tzinfo=UTC) + timedelta(microseconds=after) for after in AFTER]
KEYS = RANDOM.choice(["a", "b", "c"], ROWS).tolist()


def epoch(time):
    """The seconds since 1970 as text, with six decimals."""
    micro = (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    return f"{micro // 10**6}.{micro % 10**6:06d}"


def abroad(time):
    return time.astimezone(timezone(timedelta(hours=-7, minutes=-30))).isoformat()


WRITTEN = {
    "epoch": epoch,
    "zone": abroad,
    "no zone": lambda time: time.replace(tzinfo=None).isoformat(" "),
    "Z": lambda time: time.replace(tzinfo=None).isoformat() + "Z",
}


def table(write=epoch, start=0, stop=ROWS):
    rows = list(zip(KEYS, map(write, TIMES), XS.tolist(), strict=True))[start:stop]
    return "run,ts,x\n" + lines(f"{key},{time},{x}" for key, time, x in rows)


@cache
def scanned(rule, of="mean"):
    return TailAverage(rule, variance=True).scan(XS, TIMES, of=of).tolist()


def text_of(*columns):
    return "".join("\t".join(f"{x:.12g}" for x in row) + "\n" for row in zip(*columns, strict=True))


@pytest.mark.parametrize("write", WRITTEN.values(), ids=WRITTEN)
def test_times_in_each_form(write):
    text = done("-w", "10m", "--time", "ts", "-c", "x", text=table(write))
    assert text == text_of(scanned("10min"))


def test_a_column_by_its_number_without_a_header():
    text = table(WRITTEN["zone"]).split("\n", 1)[1]
    assert done("-w", "10m", "--time", "2", "-c", "3", text=text) == text_of(scanned("10min"))


def test_exponential():
    text = done("-w", "1h30m", "--time", "ts", "-c", "x", "--method", "exponential", text=table())
    assert text == text_of(scanned(Exponential(Elapsed("90min"))))


def test_several_windows_and_deviations():
    text = done("--windows", "90s,1h,100", "--time", "ts", "-c", "x", "--std", text=table())
    windows = [Elapsed(90), Elapsed(3600), 100]
    rows = np.array([line.split("\t") for line in text.splitlines()], float).T
    averages = [
        scanned(window) if isinstance(window, Elapsed) else TailAverage(window).scan(XS).tolist()
        for window in windows
    ]
    for i, window in enumerate(windows[:2]):
        np.testing.assert_allclose(rows[2 * i + 1], scanned(window, "std"), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(rows[::2], averages, rtol=1e-11)


def test_names_of_windows_of_time():
    text = done(
        "--windows", "90s,60m,10M", "--time", "1", "-c", "2", "--format", "csv", text="1,2\n"
    )
    assert text == "1,2,2_average_1m30s,2_average_1h,2_average_10000000\n1,2,2,2,2\n"


def test_each_key_has_its_times():
    text = done("-w", "10m", "--time", "ts", "-c", "x", "--by", "run", text=table())
    found = [line.split("\t") for line in text.splitlines()]
    for key in "abc":
        mine = [i for i, each in enumerate(KEYS) if each == key]
        averages = TailAverage("10min").scan(XS[mine], [TIMES[i] for i in mine])
        assert [row[1] for row in found if row[0] == key] == text_of(averages).split()


def test_every():
    text = done("-w", "10m", "--time", "ts", "-c", "x", "--every", "7", text=table())
    assert text == text_of(scanned("10min")[6::7])


@pytest.mark.parametrize("method", ["anytime", "exponential"])
@pytest.mark.parametrize("cut", [5, 801])
def test_a_resumed_run_writes_the_same(tmp_path, cut, method):
    options = "--windows" if method == "anytime" else "-w", "10m", "--method", method
    options += "--time", "ts", "-c", "x", "--by", "run", "--std"
    parts = [
        done(*options, "--state", tmp_path / "state", text=part)
        for part in (table(stop=cut), table(start=cut))
    ]
    assert "".join(parts) == done(*options, text=table())


def test_a_state_refuses_older_rows(tmp_path):
    options = "-w", "10m", "--time", "ts", "-c", "x", "--state", tmp_path / "state"
    done(*options, text="ts,x\n5.25,1\n")
    assert done(*options, text="ts,x\n5.25,2\n") == "1.5\n"
    _, told = failed(*options, text="ts,x\n5.2,2\n")
    assert "line 2: '5.2,2': expected times that do not go back" in told


def test_a_state_has_times_of_one_kind(tmp_path):
    options = "-w", "10m", "-c", "x", "--state", tmp_path / "state"
    done(*options, text="ts,x\n5,1\n")
    _, told = failed(*options, "--time", "ts", text="ts,x\n5,1\n")
    assert "the state was made with other options" in told


def test_json_with_both_kinds_of_times():
    rows = [
        {"ts": epoch(time) if i % 2 else float(epoch(time)), "x": x, "at": abroad(time)}
        for i, (time, x) in enumerate(zip(TIMES, XS.tolist(), strict=True))
    ]
    text = lines(map(json.dumps, rows))
    for name in "ts", "at":
        assert done("-w", "10m", "--time", name, "-f", "x", text=text) == text_of(scanned("10m"))
    added = done("-w", "10m", "--time", "at", "-f", "x", "--format", "jsonl", text=text)
    pairs = zip(rows, scanned("10m"), strict=True)
    expected = [row | {"x_average": float(f"{average:.12g}")} for row, average in pairs]
    assert list(map(json.loads, added.splitlines())) == expected


@pytest.mark.parametrize("write", WRITTEN.values(), ids=WRITTEN)
def test_text(write):
    pairs = zip(TIMES, XS.tolist(), strict=True)
    text = lines(f"ts={write(time)} loss={x} and more" for time, x in pairs)
    assert done("-w", "10m", "--time", "ts", "-m", "loss", text=text) == text_of(scanned("10m"))


@pytest.mark.parametrize("time", ["soon", "nan", "inf", "1e11", "2026-13-01", "1_000", "10:30"])
def test_a_bad_time_names_its_line(time):
    options = "-w", "10m", "--time", "ts", "-c", "x"
    text = f"ts,x\n1,1\n{time},2\n3,3\n"
    output, told = failed(*options, text=text)
    assert output == "1\n"
    assert f"line 3: '{time},2': expected a time within 146 years of 1970" in told
    ended = run(*options, "--skip-bad", text=text)
    assert ended.stdout == "1\n2\n"
    assert "skipped 1 row" in ended.told


@pytest.mark.parametrize("rows", [3, ROWS - 1])
def test_a_time_that_goes_back_names_its_line(rows):
    text = table(stop=rows) + f"{KEYS[0]},{epoch(TIMES[0] - timedelta(microseconds=1))},1\n"
    output, told = failed("-w", "10m", "--time", "ts", "-c", "x", "--by", "run", text=text)
    assert output == done(
        "-w", "10m", "--time", "ts", "-c", "x", "--by", "run", text=table(stop=rows)
    )
    assert f"line {rows + 2}: " in told
    assert "expected times that do not go back" in told


def test_a_row_without_a_time_is_passed_over():
    ended = run("-w", "10m", "--time", "ts", "-c", "x", text="ts,x\n1,1\n,2\n3,3\n")
    assert ended.stdout == "1\n2\n"
    assert "passed over 1 line without 'ts'" in ended.told


def test_the_time_of_arrival(tmp_path, monkeypatch):
    """Also if the clock is set back between two runs."""
    options = "-w", "10m", "--state", tmp_path / "state"
    now = [10**18]
    monkeypatch.setattr(stream.clock, "time_ns", lambda: now[0])
    assert done(*options, text="1\n2\n") == "1\n1.5\n"
    now[0] -= 10**15
    assert done(*options, text="6\n") == "3\n"
    now[0] += 10**15 + 601 * 10**9
    assert done(*options, text="8\n") == "8\n"
    assert TailAverage.load(tmp_path / "state").value() == 8.0


def test_a_loaded_state_goes_on(tmp_path):
    options = "-w", "10m", "--time", "ts", "-c", "x", "--state", tmp_path / "state"
    done(*options, text=table(stop=700))
    average = TailAverage.load(tmp_path / "state")
    average.update_many(XS[700:], TIMES[700:])
    assert average.value() == pytest.approx(scanned("10min")[-1], rel=1e-14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-w", "10m", "--method", "exact"], "--method exact needs a count or a fraction"),
        (["-w", "10m", "--method", "freshest"], "--method freshest needs fractions"),
        (["-w", "10m", "--at-most", "5"], "--at-most needs a fraction"),
        (["-w", "10m", "--time", "ts"], "--time needs --column, --field or --match"),
        (["-w", "10m", "--time", "x", "-c", "x"], "expected another column than the averaged"),
        (["-w", "10M", "--time", "ts", "-c", "x"], "--time goes with a window of time"),
        (["--windows", "60s,1m"], "expected each window once, got 1m twice"),
        (["-w", "0s"], "a time such as 10m, or a fraction"),
        (["-w", "10MIN"], "a time such as 10m, or a fraction"),
    ],
)
def test_what_does_not_go_together(options, message):
    _, told = failed(*options, code=2)
    assert message in told


@pytest.mark.parametrize("options", [["-w", "10k"], ["-w", "10M"], ["-w", "1e6"], ["-w", "50B"]])
def test_counts_are_still_counts(options):
    assert done(*options, "--method", "exponential", text="1\n3\n") == "1\n2\n"
    _, told = failed(*options, "--time", "t", "-c", "x", code=2)
    assert "--time goes with a window of time" in told


@pytest.mark.parametrize(
    "command",
    [
        ["profile", "--window", "10m", "--count", "100"],
        ["checkpoints", __file__, "--window", "10m", "-o", "b"],
    ],
    ids=["profile", "checkpoints"],
)
def test_other_commands_refuse_windows_of_time(command):
    _, told = commands.failed(*command, code=2)
    assert "'10m' is a window of time, which only stream and plot take" in told
