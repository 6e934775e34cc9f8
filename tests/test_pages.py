"""The programs of docs/index.md and docs/tutorial.md run as printed, and print what is said."""

import csv
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from tailavg.optax import averaged_params
from tests.support.paths import DOCS
from tests.support.programs import blocks, run

TABS = {
    re.search(r'=== "(.*)"', block.before)[1]: block
    for block in blocks("index.md")
    if '=== "' in block.before
}


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A folder and random numbers of its own; what warns are the packages of others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize(
    ("tab", "averages"),
    [
        ("PyTorch", lambda names: names["average"].averaged_state_dict()["weight"]),
        ("Lightning", lambda names: names["module"].layer.weight.detach()),
        ("JAX", lambda names: averaged_params(names["opt_state"], names["params"])),
        ("Keras", lambda names: names["model"].get_weights()[0]),
    ],
)
def test_a_tab_finds_the_answer(tab, averages):
    names = {}
    run(TABS[tab].text, names, f"index.md, {tab}")
    np.testing.assert_allclose(np.ravel(averages(names)), 1, atol=0.2)


def test_the_tab_of_hugging_face(tmp_path):
    names = {}
    run(TABS["Hugging Face"].text, names, "index.md, Hugging Face")
    assert names["trainer"].tail_average.count == 40
    assert (tmp_path / "averaged" / "model.safetensors").exists()


def test_the_tab_of_a_shell():
    install, *commands = re.findall(r"\$ (.*)\n([^$]*)", TABS["Shell"].text)
    assert install[0].startswith("pip install")
    for command, expected in commands:
        line = command.replace("tailavg", f"{sys.executable} -m tailavg")
        got = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
        assert got.stdout == expected
    assert len(commands) == 2


def test_highlighted_lines_are_ours():
    lines = {
        (tab, number): block.text.splitlines()[int(number) - 1]
        for tab, block in TABS.items()
        for number in re.findall(r"\d+", block.options)
    }
    assert len(lines) == 14
    for where, line in lines.items():
        assert re.search("tail|average", line, re.IGNORECASE), where


def same(printed, said):
    """The same words, and numbers within 5 %: processors round differently."""
    number = r"\d+\.\d+"
    got, expected = (np.array(re.findall(number, text), float) for text in (printed, said))
    words = [re.sub(number, "#", text).split() for text in (printed, said)]
    return words[0] == words[1] and np.allclose(got, expected, rtol=0.05, atol=6e-4)


def test_tutorial(tmp_path):
    names, printed, compared = {}, "", 0
    for block in blocks("tutorial.md"):
        if block.language == "python":
            assert not printed
            printed = run(block.text, names, "tutorial.md")
        elif block.language == "text":
            assert same(printed, block.text), printed
            printed, compared = "", compared + 1
    assert compared == 5
    _, raw, averaged = names["history"][-1]
    assert averaged < raw / 5
    assert {path.name for path in tmp_path.iterdir()} == {"averaged.safetensors", "run.pt"}


def losses(name):
    """Kept losses of a training run, by method."""
    with (DOCS / "figures" / f"{name}.csv").open(newline="") as file:
        names, *rows = csv.reader(file)
    return dict(zip(names, np.array(rows, dtype=float).T, strict=True))


def test_what_is_said_of_the_runs_on_digits():
    digits, page = losses("digits"), (DOCS / "torch.md").read_text()
    for name, said in (
        ("last iterate", "is 0.131;"),
        ("last 25 %", "is 0.032."),
        ("EMA 0.9", "at 0.058"),
    ):
        assert f"{digits[name][20:].mean():.3f}" in said
        assert said in page
    assert np.flatnonzero(digits["EMA 0.999"] < digits["last iterate"])[0] > 10
    for epoch in (9, 39):
        best = np.nanmin([row[epoch] for row in digits.values()])
        assert digits["EMA 0.99"][epoch] - best < 0.003
        assert max(digits["last 25 %"][epoch], digits["last 50 %"][epoch]) - best < 0.0015


def test_what_is_said_of_every_tail():
    every, page = losses("every-tail"), (DOCS / "any-tail.md").read_text()
    said = re.search(r"lowest mean test loss, .*noisy\.", page, re.DOTALL)[0]
    numbers = [float(number) for number in re.findall(r"0\.03\d\d", said)]
    ends = ("selected tail", "post-hoc EMA", "last 50 %", "Two-Tailed, Alg. 1")
    expected = [every[name][-1] for name in ends]
    expected += [every[name][23] for name in ("post-hoc EMA", "selected tail")]
    assert numbers == pytest.approx(expected, abs=5.1e-5)
    tails = [name for name in every if re.fullmatch(r"\d+%", name)]
    best = [int(tails[i][:-1]) for i in np.argmin([every[name] for name in tails], axis=0)]
    assert (min(best[:24]), max(best[:24]), best[-1]) == (25, 65, 80)
    starts = [epoch * (1 - best[epoch - 1] / 100) for epoch in range(26, 41)]
    assert 8 - 1e-9 <= min(starts) <= max(starts) < 10.5


def test_every_figure_is_shown_and_there():
    shown = {
        Path(path).name
        for page in DOCS.glob("*.md")
        for path in re.findall(r"!\[[^\]]*\]\(((?:figures|reproduction)/[^)]*)\)", page.read_text())
    }
    assert shown == {
        path.name
        for folder in ("figures", "reproduction")
        for path in (DOCS / folder).glob("*.svg")
    }
