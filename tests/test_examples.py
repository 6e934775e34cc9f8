"""The examples run, and print the figures that README and docs quote."""

import pytest

from tests.support.programs import example


@pytest.mark.parametrize(
    ("name", "quoted"),
    [
        ("noisy_stream", ["anytime window", "The picture is in"]),
        ("newest_block", ["0.476", "0.479", "0.485", "0.499"]),
        ("float32", ["running mean", "5.0e-04", "9.6e-03", "2.5e-06"]),
    ],
)
def test_an_example_prints_what_is_quoted_of_it(name, quoted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = example(f"{name}.py")
    for text in quoted:
        assert text in printed
    if name == "noisy_stream":
        assert (tmp_path / "build" / "noisy_stream.png").stat().st_size > 10_000
