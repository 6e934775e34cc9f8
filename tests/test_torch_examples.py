"""The examples of `tailavg.torch` run, in their reduced form, and show what they claim to show."""

import csv
import importlib.util
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.support.paths import EXAMPLES

TAILS = ("last 10 %", "last 25 %", "last 50 %", "last 500 steps")


def example(name, *options, env=None):
    script = EXAMPLES / f"{name}.py"
    return subprocess.run(
        [sys.executable, script, *options], capture_output=True, text=True, env=env
    )


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
    run = example("digits", "--quick", "--output", picture.with_suffix(".csv"))
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("6 epochs of 63 steps; the mean of 1 run(s)")
    losses, accuracies = table(run.stdout, "test loss"), table(run.stdout, "test accuracy, %")

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


@pytest.mark.parametrize(
    "installed",
    [
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                importlib.util.find_spec("ema_pytorch") is None,
                reason="ema-pytorch is not installed: the example leaves post-hoc EMA out",
            ),
        ),
        False,
    ],
)
def test_every_tail(tmp_path, installed):
    env = None
    if not installed:
        (tmp_path / "ema_pytorch.py").write_text("raise ModuleNotFoundError\n")
        paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    picture = tmp_path / "new" / "every-tail.svg"
    run = example("every_tail", "--quick", "--output", picture.with_suffix(".csv"), env=env)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("5 epochs of 63 steps")
    assert ("ema-pytorch is not installed" in run.stdout) != installed
    rows = table(run.stdout, "test loss")

    tails = ["selected tail", "last 10 %", "last 25 %", "last 50 %", "all steps"]
    posthoc = ["post-hoc EMA"] if installed else []
    twotailed = ["Two-Tailed, Alg. 1", "Two-Tailed, Alg. 2"]
    assert list(rows) == [*tails, "last iterate", *twotailed, *posthoc]
    for *losses, won, _, _, _ in rows.values():
        assert len(losses) == 2
        assert all(0 < loss < 1 for loss in losses)
        assert won in (0, 1)
    assert sum(row[2] for row in rows.values()) == 1
    took = {name: row[3:] for name, row in rows.items()}  # in memory, on disk, evaluations
    assert took["selected tail"] == [13, 0, 19]
    assert took["last 25 %"] == [4, 0, 0]
    assert [took[name] for name in twotailed] == [[2, 0, 10], [2, 0, 15]]
    if installed:
        assert took["post-hoc EMA"] == [2, 10, 19]
    (winner,) = re.findall(r"^The lowest loss at epoch 5: (.*)$", run.stdout, re.MULTILINE)
    assert rows[winner][1] == min(row[1] for row in rows.values())
    assert rows["selected tail"][0] < rows["last iterate"][0]  # before the learning rate drops
    assert picture.stat().st_size > 10_000
    assert ("post-hoc EMA" in picture.read_text()) == installed


@pytest.mark.usefixtures("torch_settings")
def test_anytime_lm(tmp_path, monkeypatch, capsys):
    path = tmp_path / "new" / "lm.csv"
    run = example("anytime_lm", "--quick", "--output", path)
    assert run.returncode == 0, run.stderr
    assert "bytes to train on" in run.stdout
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert all(math.isfinite(float(row["loss"])) for row in rows)
    assert {row["seed"] for row in rows} == {"0", "1"}

    def windows(schedule, step, read="tail", shape="linear"):
        found = [
            float(row["window"])
            for row in rows
            if [row[name] for name in ("schedule", "step", "read", "shape")]
            == [schedule, step, read, shape]
        ]
        return sorted(set(found))

    for schedule in ("constant", "1/√t"):
        for step in ("20", "40"):
            assert windows(schedule, step) == [0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0]
            assert windows(schedule, step, "EMA", "") == [0.99, 0.999, 0.9999]
        assert windows(schedule, "30") == [0.2]
    for shape in ("cosine", "1-sqrt"):
        assert windows("constant", "40", shape=shape) == [0.1, 0.2, 0.4]
    for schedule in ("cosine", "WSD"):  # two horizons, two rates, two seeds
        assert sum(row["schedule"] == schedule for row in rows) == 8

    # the losses do not depend on the process that trains, nor the picture on the training
    monkeypatch.syspath_prepend(EXAMPLES)
    lm = SimpleNamespace(**runpy.run_path(EXAMPLES / "anytime_lm.py"))
    _, trained = lm.train(lm.Job("constant", 1e-2, 40), lm.QUICK)
    written = [[row[field] for field in lm.FIELDS] for row in rows]
    assert all([str(value) for value in row] in written for row in trained)
    pictures = [path.with_suffix(kind) for kind in (".svg", ".png")]
    assert all(picture.stat().st_size > 10_000 for picture in pictures)
    before = pictures[0].read_bytes()
    monkeypatch.setattr(sys, "argv", ["anytime_lm", "--plot-only", "--output", str(path)])
    lm.main()
    shown = capsys.readouterr().out
    assert shown.strip()
    assert run.stdout.endswith(shown)  # the same tables, and nothing else
    assert pictures[0].read_bytes() == before

    # nor do the models of two seeds mix, side by side as they are
    _, alone = lm.train(lm.Job("constant", 1e-2, 40), lm.QUICK._replace(seeds=1))
    for mine, other in zip([row for row in trained if row[0] == 0], alone, strict=True):
        assert mine[:-1] == other[:-1]
        assert mine[-1] == pytest.approx(other[-1], abs=1e-3)


def test_a_resumed_run_is_the_unbroken_one_to_the_bit(tmp_path):
    run = example("resume", "--folder", tmp_path / "new")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "dies at step 250\nis resumed from step 200\n" in run.stdout
    for part in ("model", "optimizer", "quarter", "window", "random"):
        assert re.search(rf"^{part} +equal to the bit", run.stdout, re.MULTILINE)
    for average in ("quarter", "window"):
        assert re.search(rf"^weights of {average} +equal to the bit", run.stdout, re.MULTILINE)
    assert not different(run.stdout)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_run_resumed_without_its_average_fails(tmp_path):
    run = example("resume", "--folder", tmp_path, "--forget", "quarter")
    assert run.returncode == 1
    assert "not the unbroken one" in run.stderr
    assert different(run.stdout) == {"quarter", "weights of quarter"}


@pytest.fixture
def torch_settings():
    """What the example does to torch stays in the test."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("torch_settings")
def test_whatever_is_not_restored_is_found_out(tmp_path, monkeypatch, capsys):
    class Died(Exception):  # noqa: N818
        pass

    def die(code):
        raise Died

    monkeypatch.setattr(os, "_exit", die)
    resume = SimpleNamespace(**runpy.run_path(EXAMPLES / "resume.py"))
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


@pytest.mark.usefixtures("torch_settings")
def test_two_tailed_averaging_follows_the_paper(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    every_tail = SimpleNamespace(**runpy.run_path(EXAMPLES / "every_tail.py"))

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
