"""`tailavg profile`: its numbers are those of averages that saw every sample."""

import json
import re
import shlex
from dataclasses import asdict
from functools import partial

import numpy as np
import pytest

from tailavg import (
    AnyTail,
    AnytimeWindow,
    ExactWindow,
    Exponential,
    Freshest,
    Growing,
    RawTail,
    TailAverage,
)
from tailavg.cli.profile import _profile
from tailavg.core.windows import as_window
from tests.support import commands
from tests.support.paths import DOCS

CHOOSING = DOCS / "choosing.md"


done = partial(commands.done, "profile", COLUMNS="200")


def rows(*arguments):
    table = json.loads(done(*arguments, "--format", "json"))
    return {row.pop("method"): row for row in table}


def seen(rule, t):
    average = TailAverage(rule)
    average.update_many(np.zeros(t))
    return average.profile()


@pytest.mark.parametrize(
    ("window", "options"),
    [
        (0.25, ["--window", "0.25"]),
        (70, ["--window", "70"]),
        (9000, ["--window", "9000"]),
        (1, ["--window", "1"]),
        (Growing(0.5, at_most=300), ["--window", "0.5", "--at-most", "300"]),
    ],
)
def test_every_method_has_the_profile_of_an_average(window, options):
    t = 7321
    got = rows(*options, "--count", str(t), "--accumulators", "4")
    rules = {
        "raw tail": RawTail(window, t),
        "exponential": Exponential(window),
        "anytime, 2": AnytimeWindow(window, 2),
        "anytime, 3": AnytimeWindow(window, 3),
        "anytime, 4": AnytimeWindow(window, 4),
        "anytime, 3, paper's turns": AnytimeWindow(window, 3, turns="paper"),
        "exact": ExactWindow(window),
    }
    fraction = as_window(window)
    if isinstance(fraction, Growing) and fraction.at_most is None:  # what an AnyTail can read
        fresh = TailAverage(AnyTail(12, fraction.c))
        fresh.update_many(np.zeros(t))
        expected = fresh.profile(Freshest(window))
        assert got.pop("freshest, 12") == asdict(expected)
    assert got.keys() == rules.keys()
    for name, rule in rules.items():
        expected = seen(rule, t)
        for key in ("count", "size", "accumulators", "oldest_age"):
            assert got[name][key] == getattr(expected, key), (name, key)
        for key in ("effective_size", "mean_age"):
            assert got[name][key] == pytest.approx(getattr(expected, key), rel=1e-9), (name, key)


@pytest.mark.parametrize("window", [0.25, 0.9, 0.01, 100_000, Growing(0.1, at_most=200_000)])
def test_an_exponential_that_is_scaled_has_four_digits(window):
    t = 2_000_000
    rule = Exponential(window)
    decays = rule.decay(np.arange(1, t + 1))
    kept = np.concatenate([np.cumprod(decays[:0:-1])[::-1], [1.0]])  # of sample i, until now
    mean_age = np.sum((1 - decays) * kept * np.arange(t - 1, -1, -1))
    got = _profile(rule, t)
    assert got.mean_age == pytest.approx(mean_age, rel=2e-4)
    assert got.effective_size == rule.size(t)
    assert got.oldest_age == t - max(1, int((rule.size(np.arange(1, t + 1)) <= 1).sum()))


def test_huge_counts_take_no_longer():
    for window, size in (("100", 100), ("0.25", 250_000_000), ("250000000", 250_000_000)):
        for row in rows("--window", window, "--count", "1e9").values():
            assert row["count"] == 10**9
            assert row["effective_size"] == pytest.approx(size, rel=1e-9)
            assert 0.445 < row["mean_age"] / size < 0.51


def test_the_default_window_is_a_quarter():
    assert rows("--count", "1000") == rows("--window", "0.25", "--count", "1000")


def test_memory():
    got = rows("--window", "0.25", "--count", "1000", "--parameters", "7e9")
    arrays = {name: row["memory"] / (4 * 7e9) for name, row in got.items()}
    assert arrays["exponential"] == arrays["raw tail"] == 2
    assert [arrays[f"anytime, {n}"] for n in (2, 3, 4, 5)] == [3, 4, 5, 6]
    assert arrays["exact"] == 250
    wide = rows("--window", "4", "--count", "9", "--parameters", "10", "--dtype", "float64")
    assert wide["exponential"]["memory"] == 2 * 10 * 8
    for name, row in got.items():
        assert row["hot"] + row["cold"] == row["memory"]
        assert row["hot"] == (row["memory"] if name == "exact" else 4 * 7e9), name
    table = done("--window", "0.25", "--count", "1000", "--parameters", "7e9")
    assert re.search(r"anytime, 3 .* 28 GB +84 GB", table)
    assert re.search(r"exact .* 7 TB +0 B", table)
    assert "Hot: the sum" in table


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    for count in ("2000", "1e9"):
        for name, start in (("w.svg", b"<?xml"), ("w.png", b"\x89PNG")):
            done("--window", "0.25", "--count", count, "--plot", name, folder=tmp_path)
            assert (tmp_path / name).read_bytes().startswith(start)
    svg = (tmp_path / "w.svg").read_bytes()
    done("--window", "0.25", "--count", "1e9", "--plot", "w.svg", folder=tmp_path)
    assert (tmp_path / "w.svg").read_bytes() == svg


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--window", "10"], 2, "--count"),
        (["--window", "2.5", "--count", "10"], 2, "expected a window: a count from 1"),
        (["--window", "1.0001k", "--count", "10"], 2, "expected a window: a count from 1"),
        (["--window", "5", "--count", "0"], 2, "expected a whole number from 1"),
        (["--window", "5", "--count", "1.5"], 2, "expected a whole number from 1"),
        (["--window", "5", "--count", "many"], 2, "expected a whole number from 1"),
        (["--window", "5", "--count", "nan"], 2, "expected a whole number from 1"),
        (["--window", "5", "--count", "inf"], 2, "expected a whole number from 1"),
        (["--window", "5", "--count", "9", "--parameters", "-1"], 2, "--parameters"),
        (["--window", "5", "--count", "9", "--dtype", "float16"], 2, "float32"),
        (["--window", "5", "--count", "9", "--at-most", "3"], 2, "--at-most needs a fraction"),
        (["--window", "5", "--count", "9", "--plot", "w.xyz"], 2, "expected a file name that ends"),
        (["--window", "5", "--count", "9", "--plot", "no/w.svg"], 1, "no/w.svg: cannot write"),
    ],
)
def test_mistakes(tmp_path, arguments, code, said):
    output, told = commands.failed("profile", *arguments, folder=tmp_path, code=code)
    assert said in told
    assert not output
    assert not list(tmp_path.iterdir())


def test_the_tables_in_the_docs_are_what_is_printed():
    blocks = re.findall(
        r"```console\n\$ tailavg profile (.*)\n([^`]*)```", CHOOSING.read_text("utf-8")
    )
    assert blocks
    for arguments, shown in blocks:
        printed = done(*shlex.split(arguments))
        assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()
