"""What the explorer shows is what the library says, and its lines do what its settings mean."""

import re
import shlex

import numpy as np
import pytest

from tailavg import AnyTail, AnytimeWindow, ExactWindow, Exponential, Freshest, Growing, TailAverage
from tailavg.core.clock import starts_at
from tailavg.core.profile import profile
from tests.support import browser, commands
from tests.support.browser import link, written

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
    (AnyTail(), 1150, Freshest(0.3)),
    (AnyTail(8), 100_000, Freshest(0.25)),
    (AnyTail(), 777, Freshest(1.0)),
    (AnyTail(7, shortest=0.05), 5000, Freshest(0.05)),
]
CASES = {f"{rule}, {window} at {t}": (rule, t, window) for rule, t, window in CASES}
BLOCKS = AnytimeWindow | AnyTail


STATS = ["size", "effective", "mean", "oldest", "noise", "hot", "cold"]
READ = """
const text = (selector) => document.querySelector(selector).textContent;
return {
  stats: Object.fromEntries(arguments[0].map((name) => [name, text(`[data-stat=${name}]`)])),
  live: text('#x-live'), python: text('#x-python-code'), pythonNote: text('#x-python-note'),
  shell: text('#x-shell-code'), shellNote: text('#x-shell-note'),
};
"""


@pytest.fixture(scope="module")
def shown(explorer):
    """What the explorer shows of each case, by name."""
    shown = {}
    for name, case in CASES.items():
        explorer.follow(link(*case))
        shown[name] = {**explorer.run(READ, STATS), "blocks": explorer.blocks()}
    return shown


@pytest.mark.parametrize("name", CASES)
def test_numbers(shown, name):
    rule, t, window = CASES[name]
    expected = profile(rule, starts_at(rule, t), t, window)
    accumulators = expected.accumulators
    hot, cold = "1 sum", f"{accumulators} mean{'s' * (accumulators > 1)}"
    if isinstance(rule, ExactWindow):
        hot, cold = f"{accumulators} samples", "nothing"
    stats = shown[name]["stats"]
    assert stats == {
        "size": written(expected.size),
        "effective": written(expected.effective_size),
        "mean": written(expected.mean_age),
        "oldest": f"{expected.oldest_age:,}",
        "noise": written(expected.effective_size**-0.5),
        "hot": hot,
        "cold": cold,
    }
    assert f"effective size {stats['effective']}" in shown[name]["live"]


@pytest.mark.parametrize(
    "name", [name for name, (rule, *_) in CASES.items() if isinstance(rule, BLOCKS)]
)
def test_blocks(shown, name):
    rule, t, window = CASES[name]
    starts, drawn = starts_at(rule, t), shown[name]["blocks"]
    assert drawn == starts[-len(drawn) :]  # the figure does not go back all the way
    assert t - drawn[0] >= min(t, profile(rule, starts, t, window).size)


@pytest.mark.parametrize("name", CASES)
def test_lines_of_python_mean_the_rule(shown, name):
    names = {}
    exec(shown[name]["python"], names)
    rule, _, window = CASES[name]
    average = names["average"]
    assert average.rule == rule
    average.update_many(np.sin(np.arange(400.0)))
    said = eval(re.search(r"average\.value\(.*?\)+", shown[name]["pythonNote"])[0], names)
    assert said == average.value(window)


@pytest.mark.parametrize(
    ("rule", "window"),
    [
        (0.25, None),
        (AnytimeWindow(100, 5), None),
        (Exponential(Growing(0.5, 90)), None),
        (AnyTail(), Growing(0.3)),
        (AnyTail(), Freshest(0.3)),
    ],
)
def test_lines_of_torch_and_optax_run(explorer, rule, window):
    torch, optax = pytest.importorskip("torch"), pytest.importorskip("optax")
    asked = AnytimeWindow(rule) if isinstance(rule, float) else rule
    explorer.follow(link(asked, 500, window))
    names = {"model": torch.nn.Linear(2, 1), "optax": optax}
    exec(explorer.text("#x-torch-code"), names)
    exec(explorer.text("#x-optax-code"), names)
    average, params = names["average"], {"x": np.zeros(3)}
    assert average.rule == asked
    average.update()
    reading = {None: "", Growing(0.3): "window=0.3", Freshest(0.3): "window=Freshest(0.3)"}[window]
    of_torch = f"average.average_parameters({reading})"
    assert f"{of_torch} to evaluate" in explorer.text("#x-torch-note")
    with eval(of_torch, names):
        pass
    state = names["tx"].init(params)
    _, state = names["tx"].update(params, state, params)
    of_optax = f"averaged_params(opt_state, params{reading and f', {reading}'})"
    assert f"Then {of_optax} to evaluate" in explorer.text("#x-optax-note")
    assert set(eval(of_optax, names, {"opt_state": state, "params": params})) == {"x"}


def test_an_exact_window_has_no_lines_for_models(explorer):
    explorer.follow("#window=30&method=exact&t=100")
    for name in ("torch", "optax"):
        assert explorer.text(f"#x-{name}-code") == ""
        assert "holds every sample" in explorer.text(f"#x-{name}-note")


def has_shell_line(rule):
    turns = getattr(rule, "turns", "balanced")
    return turns == "balanced" or rule == AnytimeWindow(100, 2, turns="paper")  # which are the same


@pytest.mark.parametrize(
    "name", [name for name, (rule, *_) in CASES.items() if has_shell_line(rule)]
)
def test_lines_of_the_shell_run(shown, name, tmp_path):
    rule, _, window = CASES[name]
    samples = np.sin(np.arange(400.0))
    (tmp_path / "log.txt").write_text("".join(f"{x!r}\n" for x in samples.tolist()))
    average = TailAverage(rule)
    average.update_many(samples)
    expected = average.value(window)
    line, note = shown[name]["shell"], shown[name]["shellNote"]
    if other := re.search("With (--windows .*?) instead of (--window .*?),", note):
        own_blocks = TailAverage(AnyTail(rule.accumulators, shortest=window.window.c))
        own_blocks.update_many(samples)
        assert last_number(line, tmp_path) == pytest.approx(own_blocks.value(window), rel=1e-11)
        line = line.replace(other[2], other[1])
    assert bool(other) == (isinstance(window, Freshest) and rule.shortest < window.window.c < 1)
    assert last_number(line, tmp_path) == pytest.approx(expected, rel=1e-11)


def last_number(line, folder):
    """The last number that a line for the shell prints."""
    program, *options = shlex.split(line)
    assert program == "tailavg"
    output = commands.run(*options, folder=folder).stdout
    return float(output.splitlines()[-1].replace(",", "\t").split()[-1])


def test_the_shell_has_balanced_turns_only(shown):
    names = [name for name, (rule, *_) in CASES.items() if not has_shell_line(rule)]
    assert len(names) == 2
    for name in names:
        assert shown[name]["shell"] == "", name
        assert "balanced turns only" in shown[name]["shellNote"], name


def test_memory_in_bytes(explorer):
    explorer.follow("#window=0.25&t=10000&numbers=7000000000")
    assert (explorer.stat("hot"), explorer.stat("cold")) == ("28 GB", "84 GB")
    explorer.follow("#window=0.25&method=exact&t=10000&numbers=7e9")
    assert (explorer.stat("hot"), explorer.stat("cold")) == ("70 TB", "0 B")


def test_the_next_turn_is_the_librarys(explorer):
    explorer.follow("#window=0.25&t=1150")
    starts = starts_at(AnytimeWindow(0.25), 1150)
    explorer.find("previous").click()
    explorer.rest()
    assert explorer.settings()["t"] == str(starts[-1] + 1)
    explorer.find("next").click()
    explorer.rest()
    t = int(explorer.settings()["t"])
    assert t > 1150
    assert starts_at(AnytimeWindow(0.25), t)[:-1] == starts_at(AnytimeWindow(0.25), t - 1)[1:]
    assert explorer.blocks() == [*starts[1:], t - 1]


def test_play_moves_through_the_stream(explorer):
    explorer.follow("#window=0.25&t=1150")
    explorer.find("play").click()
    explorer.wait("document.getElementById('x-t').value.replaceAll(',', '') > 1200")
    explorer.find("play").click()
    explorer.rest()
    t = int(explorer.settings()["t"])
    assert explorer.blocks() == starts_at(AnytimeWindow(0.25), t)
    explorer.wait(f"location.hash.endsWith('t={t}')")


def test_copies(explorer):
    explorer.follow("#window=0.25&t=1150")
    kept = "window.kept = []; navigator.clipboard.writeText = async (text) => kept.push(text);"
    explorer.run(kept)
    explorer.find("link").click()
    explorer.wait("document.getElementById('x-link').textContent === 'Copied'")
    explorer.find("python-copy").click()
    explorer.wait("kept.length === 2")
    url, line = explorer.run("return kept")
    assert url.endswith("explorer.html#window=0.25&method=anytime&accumulators=3&t=1150")
    assert line == "from tailavg import TailAverage\naverage = TailAverage(0.25)"


def test_a_pointer_reads_weights(explorer):
    from selenium.webdriver import ActionChains

    explorer.follow("#window=200&t=1050")
    figure = explorer.find("weights")
    right = figure.size["width"] / 2 - 15  # the newest sample
    ActionChains(explorer.browser).move_to_element_with_offset(figure, right, 0).perform()
    average = TailAverage(200)
    average.update_many(np.zeros(1050))
    assert f"anytime window {written(average.weights()[-1])}" in explorer.text("#x-legend")
