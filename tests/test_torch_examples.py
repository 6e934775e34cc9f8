"""The examples of `tailavg.torch` run, in their reduced form, and show what they claim to show."""

import contextlib
import csv
import importlib.util
import math
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys
from multiprocessing.pool import ThreadPool
from types import SimpleNamespace

import pytest
import torch
from matplotlib import pyplot as plt

from tests.support.effort import exhaustive
from tests.support.paths import EXAMPLES
from tests.support.processes import python, user_environment
from tests.support.programs import example

TAILS = ("last 10 %", "last 25 %", "last 50 %", "last 500 steps")


@pytest.fixture(autouse=True)
def as_a_program(monkeypatch):
    """Import from the folder of the examples; undo what they do to torch and matplotlib."""
    monkeypatch.syspath_prepend(EXAMPLES)
    for module in ("style", "digits"):  # an import sets the look and the number of threads
        monkeypatch.delitem(sys.modules, module, raising=False)
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), plt.rc_context():
        yield
    torch.set_num_threads(threads)


def functions(name):
    """The functions of an example, which is not run."""
    return SimpleNamespace(**runpy.run_path(EXAMPLES / f"{name}.py"))


def table(text, title):
    """Rows of numbers by name, under the line that starts with the title."""
    (block,) = (block for block in text.split("\n\n") if block.startswith(title))
    rows = {}
    for line in block.splitlines()[1:]:
        name, *values = re.split(r"\s{2,}", line)
        rows[name] = [math.nan if value == "–" else float(value.rstrip("*")) for value in values]
    return rows


def different(text):
    """The parts that the resume example found to differ."""
    return set(re.findall(r"^(.*?) +DIFFERENT", text, re.MULTILINE))


def test_digits(tmp_path):
    picture = tmp_path / "new" / "digits.svg"
    printed = example("digits.py", "--quick", "--output", picture.with_suffix(".csv"))
    assert printed.startswith("6 epochs of 63 steps; the mean of 1 run(s)")
    losses, accuracies = table(printed, "test loss"), table(printed, "test accuracy, %")

    methods = ["last iterate", "EMA 0.9", "EMA 0.99", "EMA 0.999", "SWA", *TAILS]
    assert list(losses) == list(accuracies) == methods
    for name in methods:
        # SWA starts half-way: it has the last epoch and the mean from there on
        before = slice(0, -2) if name == "SWA" else slice(0, 0)
        assert all(map(math.isnan, losses[name][before] + accuracies[name][before]))
        assert all(0 < loss < 5 for loss in losses[name][before.stop :])
        assert all(5 < accuracy <= 100 for accuracy in accuracies[name][before.stop :])

    *_, last = losses["last iterate"]  # over the second half, since it jumps
    for name in TAILS:
        assert losses[name][-1] < last, name
        assert accuracies[name][-1] > 90
    assert picture.stat().st_size > 10_000
    assert "EMA 0.999" in picture.read_text()


METHODS = [
    "selected tail",
    "last 10 %",
    "last 25 %",
    "last 50 %",
    "all steps",
    "last iterate",
    "Two-Tailed, Alg. 1",
    "Two-Tailed, Alg. 2",
]


@pytest.mark.skipif(
    importlib.util.find_spec("ema_pytorch") is None, reason="ema-pytorch is not installed"
)
def test_every_tail(tmp_path):
    picture = tmp_path / "new" / "every-tail.svg"
    printed = example("every_tail.py", "--quick", "--output", picture.with_suffix(".csv"))
    assert printed.startswith("3 epochs of 63 steps")
    assert "not installed" not in printed
    rows = table(printed, "test loss")
    assert list(rows) == [*METHODS, "post-hoc EMA"]
    for *losses, won, _, _, _ in rows.values():
        assert len(losses) == 2
        assert all(0 < loss < 1 for loss in losses)
        assert won in (0, 1)
    assert sum(row[2] for row in rows.values()) == 1
    costs = {name: row[3:] for name, row in rows.items()}  # in memory, on disk, evaluations
    assert costs["selected tail"] == [13, 0, 19]
    assert costs["last 25 %"] == [4, 0, 0]
    assert [costs[name] for name in METHODS[-2:]] == [[2, 0, 6], [2, 0, 9]]
    assert costs["post-hoc EMA"] == [2, 6, 19]
    (winner,) = re.findall(r"^The lowest loss at epoch 3: (.*)$", printed, re.MULTILINE)
    assert rows[winner][1] == min(row[1] for row in rows.values())
    assert rows["selected tail"][0] < rows["last iterate"][0]  # before the learning rate drops
    assert picture.stat().st_size > 10_000
    assert "post-hoc EMA" in picture.read_text()


def test_every_tail_without_ema_pytorch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ema_pytorch", None)
    picture = tmp_path / "every-tail.svg"
    options = ("--epochs", 1, "--seeds", 1, "--output", picture.with_suffix(".csv"))
    printed = example("every_tail.py", *options)
    assert "ema-pytorch is not installed" in printed
    assert list(table(printed, "test loss")) == METHODS
    assert "post-hoc EMA" not in picture.read_text()


def test_swag_digits():
    options = ("--epochs", 4, "--seeds", 1, "--samples", 5)
    printed = example("swag_digits.py", *options)
    rows = table(printed, " ")
    assert list(rows) == ["last iterate", "tail average", "5 samples"]
    for nll, error, accuracy in rows.values():
        assert 0 < nll < 1
        assert 0 < error < 20
        assert 80 < accuracy <= 100
    for name, column in (("NLL", 0), ("ECE", 1)):
        (winner,) = re.findall(rf"^The lowest {name}: (.*)$", printed, re.MULTILINE)
        assert rows[winner][column] == min(row[column] for row in rows.values())
    assert example("swag_digits.py", *options) == printed


def losses_in(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_anytime_lm(tmp_path, monkeypatch):
    in_threads = SimpleNamespace(Pool=ThreadPool)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: in_threads)
    path = tmp_path / "new" / "lm.csv"
    printed = example("anytime_lm.py", "--quick", "--output", path)
    assert "bytes to train on" in printed
    rows = losses_in(path)
    assert all(math.isfinite(float(row["loss"])) for row in rows)
    assert {row["seed"] for row in rows} == {"0", "1"}

    def windows(schedule, step, read="tail", shape="linear"):
        wanted = {"schedule": schedule, "step": step, "read": read, "shape": shape}
        return sorted({float(row["window"]) for row in rows if wanted.items() <= row.items()})

    for schedule in ("constant", "1/√t"):
        for step in ("20", "40"):
            assert windows(schedule, step) == [0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0]
            assert windows(schedule, step, "EMA", "") == [0.99, 0.999, 0.9999]
            assert windows(schedule, step, "warmed-up EMA", "") == [0.999, 0.9999]
            assert windows(schedule, step, "EMA with a half-life of", "") == [0.05]
            assert windows(schedule, step, "freshest", "") == [0.1, 0.2, 0.4]
        assert windows(schedule, "30") == [0.2]
    for shape in ("cosine", "1-sqrt"):
        assert windows("constant", "40", shape=shape) == [0.1, 0.2, 0.4]
    for schedule in ("cosine", "WSD"):  # two horizons, two rates, two seeds
        assert sum(row["schedule"] == schedule for row in rows) == 8
    for beta in (0.9, 0.98):  # three steps, three rates, two seeds
        assert sum(row["schedule"] == f"Schedule-Free β={beta}" for row in rows) == 18

    pictures = [path.with_suffix(kind) for kind in (".svg", ".png")]
    assert all(picture.stat().st_size > 10_000 for picture in pictures)
    before = pictures[0].read_bytes()
    tables = example("anytime_lm.py", "--plot-only", "--output", path)
    assert tables.strip()
    assert printed.endswith(tables)
    assert pictures[0].read_bytes() == before


def test_models_of_two_seeds_do_not_mix():
    lm = functions("anytime_lm")
    job = lm.Job("constant", 1e-2, 40)
    _, both = lm.train(job, lm.QUICK)
    _, alone = lm.train(job, lm.QUICK._replace(seeds=1))
    for together, single in zip([row for row in both if row[0] == 0], alone, strict=True):
        assert together[:-1] == single[:-1]
        assert together[-1] == pytest.approx(single[-1], abs=1e-3)


@exhaustive("starts processes that import torch")
def test_losses_of_anytime_lm_do_not_depend_on_the_process_that_trains(tmp_path):
    path = tmp_path / "lm.csv"
    options = ("--quick", "--output", path)
    python(EXAMPLES / "anytime_lm.py", *options, env=user_environment())
    lm = functions("anytime_lm")
    written = [[row[field] for field in lm.FIELDS] for row in losses_in(path)]
    _, trained = lm.train(lm.Job("constant", 1e-2, 40), lm.QUICK)
    assert all([str(value) for value in row] in written for row in trained)


class Died(Exception):  # noqa: N818
    """Raised where the example ends its process."""


@pytest.fixture
def in_this_process(monkeypatch):
    """What resume.py starts as processes is run here, and what ends one raises `Died`."""

    def die(code):
        raise Died

    def run_here(command, check=False):
        with contextlib.nullcontext() if check else pytest.raises(Died):
            sys.stdout.write(example("resume.py", *command[2:]))

    monkeypatch.setattr(os, "_exit", die)
    monkeypatch.setattr(subprocess, "run", run_here)


def assert_resumes(folder):
    """Run the example, and return what was printed of the two runs that it compares."""
    printed = example("resume.py", "--folder", folder)
    for name in ("model", "optimizer", "quarter", "window", "random"):
        assert re.search(rf"^{name} +equal to the bit", printed, re.MULTILINE)
    for average in ("quarter", "window"):
        assert re.search(rf"^weights of {average} +equal to the bit", printed, re.MULTILINE)
    assert not different(printed)
    assert not list(folder.rglob("*.tmp"))
    return printed


def test_a_resumed_run_is_the_unbroken_one_to_the_bit(tmp_path, in_this_process):
    printed = assert_resumes(tmp_path / "new")
    assert "is resumed from step 200\n" in printed


@exhaustive("starts processes that import torch")
def test_a_run_resumed_in_another_process_is_the_unbroken_one_to_the_bit(tmp_path, capfd):
    """The run that dies and the one that goes on are processes, whose output is not caught here."""
    assert_resumes(tmp_path / "new")
    assert capfd.readouterr().out == "dies at step 250\nis resumed from step 200\n"


def test_a_run_resumed_without_its_average_fails(tmp_path, capsys, in_this_process):
    with pytest.raises(SystemExit, match="not the unbroken one"):
        example("resume.py", "--folder", tmp_path, "--forget", "quarter")


def test_whatever_is_not_restored_is_found_out(tmp_path, capsys, in_this_process):
    resume = functions("resume")
    unbroken, broken = tmp_path / "unbroken.pt", tmp_path / "broken.pt"
    averages = {"quarter", "weights of quarter", "window", "weights of window"}
    resume.train(unbroken)
    with pytest.raises(Died):
        resume.train(broken, die=True)
    for forgotten, expected in {
        None: set(),
        "model": {"model", "optimizer"} | averages,
        "optimizer": {"model", "optimizer"} | averages,
        "quarter": {"quarter", "weights of quarter"},
        "window": {"window", "weights of window"},
        "random": {"model", "optimizer", "random"} | averages,
    }.items():
        resumed = shutil.copy(broken, tmp_path / "resumed.pt")
        resume.train(resumed, resume=True, forget=forgotten)
        capsys.readouterr()
        assert resume.compare(unbroken, resumed) == (forgotten is None)
        assert different(capsys.readouterr().out) == expected


def test_two_tailed_averaging_follows_the_paper():
    every_tail = functions("every_tail")

    def follow(*evaluations, extended=True):
        """What is used after each, if these are the losses: of the iterate, the short, the long."""
        model = torch.nn.Linear(1, 1, bias=False)
        method = every_tail.TwoTailed(model, 2, extended)
        step = 0
        for raw, short, long in evaluations:
            for _ in range(2):
                step += 1
                torch.nn.init.constant_(model.weight, step)
                method.update()
            losses = {
                id(model): raw,
                id(method.short.mean.module): short,
                id(method.long.mean.module): long,
            }
            used = method.adapt(lambda network, losses=losses: (losses[id(network)], None))
            yield used.weight.item()

    # steps 1–2, 1–4; then 3–6, as good as 1–6; 3–8; and 3–10, or the last iterate if better
    switches = [(9, 5, 5), (9, 5, 4), (9, 3, 3), (9, 4, 2), (1, 4, 2)]
    assert list(follow(*switches, extended=False)) == [1.5, 2.5, 4.5, 5.5, 6.5]
    assert list(follow(*switches)) == [1.5, 2.5, 4.5, 5.5, 10]
    # the long one has no lower loss three times: the short one, of 3–8, takes its place
    assert list(follow((9, 5, 5), (9, 8, 5), (9, 7, 5), (9, 6, 5)))[2:] == [3.5, 5.5]
    # the short one has none: it starts anew, with 11–12
    short = [(9, 5, 5), (9, 7, 4), (9, 8, 3), (9, 8, 2), (9, 8, 1), (9, 1, 1)]
    assert list(follow(*short))[4:] == [5.5, 11.5]
    # the iterate was better from the start: both start anew
    assert list(follow((1, 5, 5), (9, 5, 5))) == [2, 3.5]
