"""What the explorer shows is what the library says, and its lines do what its settings mean."""

import shlex
import subprocess

import numpy as np
import pytest

from tailavg import AnyTail, AnytimeWindow, ExactWindow, Exponential, Fixed, Growing, TailAverage
from tailavg.core.clock import starts_at
from tailavg.core.profile import profile
from tests.support import browser
from tests.support.browser import link, written
from tests.support.commands import TAILAVG

pytestmark = browser.MARKS

CASES = [
    (AnytimeWindow(0.25), 1150, None),
    (AnytimeWindow(200, 5), 1030, None),
    (AnytimeWindow(12_345), 50_000, None),
    (AnytimeWindow(Growing(0.25, at_most=10_000), 4), 123_456, None),
    (AnytimeWindow(1.0), 77, None),
    (AnytimeWindow(0.25, turns="paper"), 1150, None),
    (AnytimeWindow(Growing(0.3, at_most=50), 6, turns="paper"), 300, None),
    (AnytimeWindow(100, 2, turns="paper"), 170, None),
    (Exponential(0.25), 1150, None),
    (Exponential(Growing(0.5, at_most=100)), 3, None),
    (ExactWindow(30), 1000, None),
    (ExactWindow(Growing(0.07, at_most=100)), 101, None),
    (AnyTail(), 1150, Growing(0.3)),
    (AnyTail(8), 100_000, Growing(1.0)),
    (AnyTail(12, shortest=0.05), 5000, Growing(0.05)),
]
NAMES = [f"{rule} at {t}" for rule, t, _ in CASES]


@pytest.fixture(params=CASES, ids=NAMES)
def case(request, pages):
    """A rule, a step and a window to read, as the explorer shows them."""
    pages.explore(link(*request.param))
    return request.param


def test_numbers(pages, case):
    rule, t, window = case
    expected = profile(rule, starts_at(rule, t), t, window)
    held = expected.accumulators
    hot, cold = "1 sum", f"{held} mean{'s' * (held > 1)}"
    if isinstance(rule, ExactWindow):
        hot, cold = f"{held} samples", "nothing"
    shown = {name: pages.stat(name) for name in ("size", "effective", "mean", "oldest", "noise")}
    assert shown == {
        "size": written(expected.size),
        "effective": written(expected.effective_size),
        "mean": written(expected.mean_age),
        "oldest": f"{expected.oldest_age:,}",
        "noise": written(expected.effective_size**-0.5),
    }
    assert (pages.stat("hot"), pages.stat("cold")) == (hot, cold)
    assert f"effective size {shown['effective']}" in pages.text("#x-live")
    if isinstance(rule, AnytimeWindow | AnyTail):  # the figure does not go back all the way
        starts = starts_at(rule, t)
        drawn = pages.blocks()
        assert drawn == starts[-len(drawn) :]
        assert t - drawn[0] >= min(t, expected.size)


def test_lines_of_python_mean_the_rule(pages, case):
    names = {}
    exec(pages.text("#x-python-code"), names)
    assert names["average"].rule == case[0]


@pytest.mark.parametrize(
    "rule", [0.25, AnytimeWindow(100, 5), Exponential(Growing(0.5, 90)), AnyTail()]
)
def test_lines_of_torch_and_optax_run(pages, rule):
    torch, optax = pytest.importorskip("torch"), pytest.importorskip("optax")
    asked = AnytimeWindow(rule) if isinstance(rule, float) else rule
    window = Growing(0.3) if isinstance(rule, AnyTail) else None
    pages.explore(link(asked, 500, window))
    names = {"model": torch.nn.Linear(2, 1), "optax": optax}
    exec(pages.text("#x-torch-code"), names)
    exec(pages.text("#x-optax-code"), names)
    average, params = names["average"], {"x": np.zeros(3)}
    assert average.rule == asked
    average.update()
    reading = {} if window is None else {"window": 0.3}
    with average.average_parameters(**reading):
        pass
    state = names["tx"].init(params)
    names["tx"].update(params, state, params)
    said = pages.text("#x-torch-note") + pages.text("#x-optax-note")
    assert said.count("window=0.3") == (0 if window is None else 2)


def test_an_exact_window_has_no_lines_for_models(pages):
    pages.explore("#window=30&method=exact&t=100")
    for name in ("torch", "optax"):
        assert pages.text(f"#x-{name}-code") == ""
        assert "holds every sample" in pages.text(f"#x-{name}-note")


def test_lines_of_the_shell_run(pages, case, tmp_path):
    rule, _, window = case
    line = pages.text("#x-shell-code")
    if isinstance(rule, AnytimeWindow) and rule.turns == "paper" and rule.window != Fixed(100):
        assert line == ""
        assert "balanced turns only" in pages.text("#x-shell-note")
        return
    samples = np.sin(np.arange(400.0))
    (tmp_path / "log.txt").write_text("".join(f"{x!r}\n" for x in samples.tolist()))
    program, *options = shlex.split(line)
    assert program == "tailavg"
    ran = subprocess.run(
        [*TAILAVG, *options], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    average = TailAverage(rule)
    average.update_many(samples)
    expected = average.value(*([] if window is None else [window]))
    last = ran.stdout.splitlines()[-1].replace(",", "\t").split()[-1]
    assert float(last) == pytest.approx(expected, rel=1e-11)


def test_memory_in_bytes(pages):
    pages.explore("#window=0.25&t=10000&numbers=7000000000")
    assert (pages.stat("hot"), pages.stat("cold")) == ("28 GB", "84 GB")
    pages.explore("#window=0.25&method=exact&t=10000&numbers=7e9")
    assert (pages.stat("hot"), pages.stat("cold")) == ("70 TB", "0 B")


def test_the_next_turn_is_the_librarys(pages):
    pages.explore("#window=0.25&t=1150")
    starts = starts_at(AnytimeWindow(0.25), 1150)
    pages.find("previous").click()
    pages.rest()
    assert pages.settings()["t"] == str(starts[-1] + 1)
    pages.find("next").click()
    pages.rest()
    t = int(pages.settings()["t"])
    assert t > 1150
    assert starts_at(AnytimeWindow(0.25), t)[:-1] == starts_at(AnytimeWindow(0.25), t - 1)[1:]
    assert pages.blocks() == [*starts[1:], t - 1]


def test_play_moves_through_the_stream(pages):
    pages.explore("#window=0.25&t=1150")
    pages.find("play").click()
    pages.wait("return document.getElementById('x-t').value.replaceAll(',', '') > 1200")
    pages.find("play").click()
    pages.rest()
    t = int(pages.settings()["t"])
    assert pages.blocks() == starts_at(AnytimeWindow(0.25), t)
    pages.wait("return location.hash.endsWith(`t=${arguments[0]}`)".replace("arguments[0]", str(t)))


def test_copies(pages):
    pages.explore("#window=0.25&t=1150")
    kept = "window.kept = []; navigator.clipboard.writeText = async (text) => kept.push(text);"
    pages.run(kept)
    pages.find("link").click()
    pages.wait("return document.getElementById('x-link').textContent === 'Copied'")
    pages.find("python-copy").click()
    pages.wait("return kept.length === 2")
    url, line = pages.run("return kept")
    assert url.endswith("explorer.html#window=0.25&method=anytime&accumulators=3&t=1150")
    assert line == "from tailavg import TailAverage\naverage = TailAverage(0.25)"


def test_a_pointer_reads_weights(pages):
    from selenium.webdriver import ActionChains

    pages.explore("#window=200&t=1050")
    figure = pages.find("weights")
    right = figure.size["width"] / 2 - 15  # the newest sample
    ActionChains(pages.browser).move_to_element_with_offset(figure, right, 0).perform()
    average = TailAverage(200)
    average.update_many(np.zeros(1050))
    assert f"anytime window {written(average.weights()[-1])}" in pages.text("#x-legend")
