"""Complete programs of the pages run in a user's environment, and print what the pages say."""

import csv
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.effort import exhaustive
from tests.support.paths import DOCS
from tests.support.processes import run
from tests.support.programs import Program, blocks, example, run_fresh

TABS = {
    re.search(r'=== "(.*)"', block.before)[1]: block
    for block in blocks("index.md")
    if '=== "' in block.before
}
TUTORIAL = [block for block in blocks("tutorial.md") if block.language in ("python", "text")]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """What complete programs did. Keras comes first, before anything could choose its backend."""
    questions = {
        "Keras": "model.get_weights()[0].tolist()",
        "PyTorch": "average.averaged_state_dict()['weight'].tolist()",
        "Lightning": "module.layer.weight.tolist()",
        "Hugging Face": "trainer.tail_average.count",
        "JAX": "averaged_params(opt_state, params).tolist()",
    }
    tabs = {name: Program([TABS[name].text], question) for name, question in questions.items()}
    tutorial = Program([b.text for b in TUTORIAL if b.language == "python"], "history[-1]")
    return run_fresh(tabs | {"tutorial": tutorial}, tmp_path_factory.mktemp("programs"))


@pytest.mark.parametrize("tab", ["PyTorch", "Lightning", "JAX", "Keras"])
def test_a_tab_finds_the_answer(tab, programs):
    np.testing.assert_allclose(np.ravel(programs[tab].answer), 1, atol=0.2)


def test_the_tab_of_hugging_face(programs):
    trained = programs["Hugging Face"]
    assert trained.answer == 40
    assert (trained.folder / "averaged" / "model.safetensors").exists()


def test_programs_choose_a_backend_before_they_import_keras():
    texts = {page.name: page.read_text() for page in DOCS.glob("*.md")}
    pages = {name: text for name, text in texts.items() if "import keras" in text}
    assert sorted(pages) == ["index.md", "keras.md"]
    for name, text in pages.items():
        assert 'os.environ["KERAS_BACKEND"] = "torch"' in text.partition("import keras")[0], name


def test_the_tab_of_a_shell():
    install, *commands = re.findall(r"\$ (.*)\n([^$]*)", TABS["Shell"].text)
    assert install[0].startswith("pip install")
    for command, expected in commands:
        line = command.replace("tailavg", f"{sys.executable} -m tailavg")
        assert run("sh", "-c", line).stdout == expected
    assert len(commands) == 2


def test_the_freshest_weights():
    program, said = (block.text for block in blocks("optimal.md") if block.language)
    assert run(sys.executable, "-c", program).stdout == said


def test_samples_around_an_average():
    (program,) = [
        block.text
        for block in blocks("torch.md")
        if block.language == "python" and "sample_parameters" in block.text
    ]
    variance, prediction = run(sys.executable, "-c", program).stdout.splitlines()
    assert re.fullmatch(r"tensor\(\[0\.0\d+, 0\.0\d+\]\)", variance)
    first, second = map(float, re.findall(r"0\.\d+", prediction))
    assert first + second == pytest.approx(1, abs=1e-3)
    assert second > 0.9


@exhaustive("trains five networks")
def test_what_is_said_of_samples_on_digits():
    page, printed = (DOCS / "torch.md").read_text(), example("swag_digits.py")
    said = re.findall(r"^\| ([^|]*) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    rows = re.findall(r"^\S.*?\s{2,}([\d.]+)\s+([\d.]+)\s+([\d.]+)$", printed, re.MULTILINE)
    assert len(rows) == 3
    for (_, *numbers), row in zip(said, rows, strict=True):
        # other processors round differently, and training amplifies it
        np.testing.assert_allclose(list(map(float, numbers)), list(map(float, row)), rtol=0.1)


def test_programs_of_streams():
    printed = blocks("streams.md")
    said = [block.text for block in printed if block.language == "text"]
    programs = [b.text for b in printed if b.language == "python" and ">>>" not in b.text]
    assert [run(sys.executable, "-c", program).stdout for program in programs] == said
    assert len(said) == 8


def test_checkpoints_in_python(tmp_path):
    (program,) = [block.text for block in blocks("checkpoints.md") if block.language == "python"]
    assert (
        run(sys.executable, "-c", program, cwd=tmp_path).stdout == "[7.5 7.5]\nweight [7.5 7.5]\n"
    )
    assert (tmp_path / "averaged.safetensors").exists()


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


def test_tutorial(programs):
    tutorial, texts = programs["tutorial"], [b.text for b in TUTORIAL if b.language == "text"]
    printed = [text for text in tutorial.printed if text]
    assert len(printed) == len(texts) == 5
    for text, said in zip(printed, texts, strict=True):
        assert same(text, said), text
    _, raw, averaged = tutorial.answer
    assert averaged < raw / 5
    files = {path.name for path in tutorial.folder.iterdir()}
    assert files == {"averaged.safetensors", "run.pt"}


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
