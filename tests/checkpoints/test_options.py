"""Weights, dtypes and choices of `tailavg checkpoints`, against numbers computed by hand."""

import json
import math
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support import commands
from tests.support.model import freshest

STEPS = [100, 250, 300, 700, 1000]


done = partial(commands.done, "checkpoints")


def failed(folder, *arguments, code=1):
    """What is said of a failure, which leaves no file behind."""
    before = sorted(folder.rglob("*"))
    _, told = commands.failed("checkpoints", *arguments, code=code)
    assert sorted(folder.rglob("*")) == before
    return told


def powers(folder, steps=STEPS, name="step-{}.safetensors"):
    """Checkpoint i has a one at place i: the average is the weights."""
    paths = [folder / name.format(step) for step in steps]
    for i, path in enumerate(paths):
        path.parent.mkdir(exist_ok=True)
        save_file({"w": np.eye(len(steps))[i]}, path)
    return paths


def got(folder, *arguments):
    done(*arguments, "-o", folder / "average.safetensors")
    return load_file(folder / "average.safetensors")["w"]


def cosine(u):
    return (1 + math.cos(math.pi * u)) / 2


def sqrt(u):
    return 1 - math.sqrt(u)


def by_hand(decay, k, ages):
    """The weight of samples of ages from `young` up to `old`."""
    return [
        decay(min(1, max(0, 1 - old / k))) - decay(min(1, max(0, 1 - young / k)))
        for young, old in ages
    ]


AGES = [(4, 5), (3, 4), (2, 3), (1, 2), (0, 1)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--window", "3", "--decay", "linear"], [0, 0, 1 / 3, 1 / 3, 1 / 3]),
        (["--window", "0.5", "--decay", "linear"], [0, 0, 1 / 3, 1 / 3, 1 / 3]),
        (["--window", "4", "--decay", "cosine"], by_hand(cosine, 4, AGES)),
        (["--window", "3", "--method", "freshest"], freshest([1] * 5, 3)),
        (["--window", "0.5", "--method", "freshest"], freshest([1] * 5, 2.5)),
        (["--window", "0.5", "--decay", "cosine"], by_hand(cosine, 2.5, AGES)),
        (["--window", "1.0", "--decay", "1-sqrt"], by_hand(sqrt, 5, AGES)),
        (["--window", "100", "--decay", "1-sqrt"], by_hand(sqrt, 5, AGES)),
        # steps: (0, 100], (100, 250], (250, 300], (300, 700], (700, 1000]
        (["--window", "1.0", "--by-step"], [0.1, 0.15, 0.05, 0.4, 0.3]),
        (["--window", "0.5", "--by-step"], [0, 0, 0, 0.4, 0.6]),
        (["--window", "0.25", "--by-step"], [0, 0, 0, 0, 1]),
        (
            ["--window", "720", "--by-step", "--decay", "linear"],
            [0, 0, 20 / 720, 400 / 720, 300 / 720],
        ),
        (["--window", "5000", "--by-step"], [0.1, 0.15, 0.05, 0.4, 0.3]),
        (
            ["--window", "0.5", "--by-step", "--method", "freshest"],
            freshest([100, 150, 50, 400, 300], 500),
        ),
        (
            ["--window", "0.8", "--by-step", "--decay", "1-sqrt"],
            by_hand(sqrt, 800, [(900, 1000), (750, 900), (700, 750), (300, 700), (0, 300)]),
        ),
    ],
)
def test_decays_and_steps(tmp_path, options, expected):
    expected = np.array(expected, float)
    assert math.isclose(sum(expected), 1)
    weights = got(tmp_path, *powers(tmp_path), *options)
    np.testing.assert_allclose(weights, expected, rtol=1e-9, atol=1e-12)


def test_steps_in_the_names_of_folders(tmp_path):
    paths = powers(tmp_path / "a", [100, 400], "checkpoint-{}.safetensors")
    np.testing.assert_allclose(got(tmp_path, *paths, "--window", "1.0", "--by-step"), [0.25, 0.75])
    folders = [tmp_path / f"7-checkpoint-{step}" for step in (100, 400)]
    for folder, path in zip(folders, paths, strict=True):
        folder.mkdir()
        path.rename(folder / "model-5.safetensors")
    files = [folder / "model-5.safetensors" for folder in folders]
    np.testing.assert_allclose(got(tmp_path, *files, "--window", "1.0", "--by-step"), [0.25, 0.75])
    done(*folders, "--window", "1.0", "--by-step", "-o", tmp_path / "averaged")
    averaged = load_file(tmp_path / "averaged" / "model-5.safetensors")
    np.testing.assert_allclose(averaged["w"], [0.25, 0.75])


def test_weights_of_a_file(tmp_path):
    paths = powers(tmp_path)
    expected = [0.0, -0.25, 0.75, 0.5, 0.0]  # the newest has none, and gives the layout alone
    (tmp_path / "weights.json").write_text(json.dumps(expected))
    said = done(*paths, "--weights", tmp_path / "weights.json", "-o", tmp_path / "a.safetensors")
    assert load_file(tmp_path / "a.safetensors")["w"].tolist() == expected
    assert "3 of 5 checkpoints" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[0.5, 0.5]", "expected a list of 5 numbers, one per checkpoint, oldest first"),
        ("[0.2, 0.2, 0.2, 0.2, 0.1]", "sum to 1, got a sum of 0.9; divide each by the sum"),
        ('[1, 0, 0, 0, "0"]', "expected finite numbers, got '0'"),
        ("[1, 0, 0, 0, true]", "expected finite numbers, got True"),
        ("[1, 0, 0, 0, NaN]", "expected finite numbers, got nan"),
        ('{"a": 1}', "expected a list of 5 numbers"),
        ("nothing", "expected a list of numbers in JSON"),
    ],
)
def test_weights_that_are_refused(tmp_path, content, said):
    paths = powers(tmp_path)
    (tmp_path / "w.json").write_text(content)
    arguments = [*paths, "--weights", tmp_path / "w.json", "-o", tmp_path / "a.safetensors"]
    error = failed(tmp_path, *arguments)
    assert "w.json: expected " in error
    assert said in error


def test_options_that_exclude_each_other(tmp_path):
    paths = powers(tmp_path, [1, 2])
    (tmp_path / "w.json").write_text("[0.5, 0.5]")
    output = ["-o", tmp_path / "a.safetensors"]
    weights = ["--weights", tmp_path / "w.json"]
    window = ["--window", "2"]
    for options, said in (
        ([*weights, *window], "--weights replaces --window: leave one"),
        ([*weights, "--windows", "2"], "--weights replaces --windows: leave one"),
        ([*weights, "--decay", "cosine"], "--weights replaces --decay: leave one"),
        ([*weights, "--method", "exact"], "--weights replaces --method: leave one"),
        ([*weights, "--by-step"], "--weights replaces --by-step: leave one"),
        (
            [*window, "--by-step", "--method", "anytime"],
            "works only with --method exact, not anytime",
        ),
        (
            [*window, "--by-step", "--method", "exponential"],
            "works only with --method exact, not exp",
        ),
        (
            [*window, "--decay", "cosine", "--method", "anytime"],
            "--decay works only with --method exact",
        ),
        ([*window, "--decay", "square"], "square"),
        ([*window, "--dtype", "int8"], "int8"),
    ):
        assert said in failed(tmp_path, *paths, *options, *output, code=2)


def test_steps_that_are_refused(tmp_path):
    output = ["--window", "1.0", "--by-step", "--sort", "name", "-o", tmp_path / "a.safetensors"]
    for names, said in (
        (["first", "second"], "first.safetensors: no step in its name"),
        (["a-2", "b-1"], "b-1.safetensors: its step 1 does not come after step 2"),
        (["a-2", "b-2"], "b-2.safetensors: its step 2 does not come after step 2"),
    ):
        paths = powers(tmp_path, names, "{}.safetensors")
        assert said in failed(tmp_path, *paths, *output)
    assert "the last step is 0, but" in failed(tmp_path, *powers(tmp_path, [0]), *output)


# Other dtypes.


def tensors(step):
    random = np.random.default_rng(step)
    return {
        "double": random.normal(size=5),
        "single": random.normal(size=(3, 3)).astype(np.float32),
        "brain": random.normal(size=100_000).astype(ml_dtypes.bfloat16),
        "same": np.linspace(-1, 1, 7, dtype=np.float32),
        "half": random.normal(size=3).astype(np.float16),
        "wave": (random.normal(size=4) + 1j).astype(np.complex64),
        "count": np.array([step, 1], np.int8),
    }


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_dtypes(tmp_path, dtype):
    paths = [tmp_path / f"step-{step}.safetensors" for step in (1, 2, 3)]
    for step, path in enumerate(paths, 1):
        save_file(tensors(step), path, metadata={"step": str(step)})
    output = tmp_path / "average.safetensors"
    done(*paths, "--window", "2", "--dtype", dtype, "-o", output)
    found = load_file(output)
    kind = np.dtype(getattr(ml_dtypes if dtype == "bfloat16" else np, dtype))
    for name, newest in tensors(3).items():
        old = tensors(2)[name]
        if newest.dtype.kind == "c":
            assert found[name].dtype == np.complex64
            np.testing.assert_allclose(found[name], (old + newest) / 2, rtol=1e-6)
        elif newest.dtype.kind == "i":
            assert found[name].dtype == np.int8
            assert found[name].tolist() == newest.tolist()
        else:
            wide = (old.astype(np.float64) + newest.astype(np.float64)) / 2
            assert found[name].dtype == kind
            assert found[name].tobytes() == wide.astype(kind).tobytes(), name
    from safetensors import safe_open

    with safe_open(output, "np") as file:
        assert file.metadata() == {"step": "3"}


def test_bfloat16_is_rounded_once(tmp_path):
    """Halfway between two of them in float32, but not in float64."""
    for step, number in enumerate([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8 - 2.0**-40, math.nan], 1):
        save_file({"x": np.array([number, 1.5])}, tmp_path / f"step-{step}.safetensors")
        options = ["--window", "1", "--dtype", "bfloat16", "-o", tmp_path / "a.safetensors"]
        done(tmp_path / f"step-{step}.safetensors", *options)
        found = load_file(tmp_path / "a.safetensors")["x"].astype(float).tolist()
        np.testing.assert_equal(found, [[1 + 2.0**-7, 1.5], [1.0, 1.5], [math.nan, 1.5]][step - 1])


@pytest.mark.parametrize("suffix", ["pt", "ckpt", "bin"])
def test_dtypes_of_torch_files(tmp_path, suffix):
    torch = pytest.importorskip("torch")

    def content(step):
        generator = torch.Generator().manual_seed(step)
        memory = torch.randn(12, generator=generator)
        return {
            "first": memory[:8],
            "second": memory[4:],
            "turned": torch.nn.Parameter(torch.randn(4, 3, generator=generator).T),
            "list": [torch.randn(2, generator=generator).double(), torch.tensor(step)],
            "wave": torch.randn(2, generator=generator, dtype=torch.complex64),
        }

    paths = [tmp_path / f"step-{step}.{suffix}" for step in (1, 2)]
    for step, path in enumerate(paths, 1):
        torch.save(content(step), path)
    output = tmp_path / f"average.{suffix}"
    done(*paths, "--window", "2", "--dtype", "float16", "-o", output)
    found = torch.load(output, weights_only=True)
    one, two = content(1), content(2)
    for name in ("first", "second", "turned"):
        expected = ((one[name].double() + two[name].double()) / 2).half()
        assert torch.equal(found[name], expected)
        assert found[name].stride() == two[name].stride()
    assert isinstance(found["turned"], torch.nn.Parameter)
    assert found["list"][0].dtype == torch.float16
    assert found["list"][1] == 2
    assert found["wave"].dtype == torch.complex64
    found["first"][4:] = 7
    assert (found["second"][:4] == 7).all()  # they share memory still


# Some tensors only.


def test_some_tensors_are_left(tmp_path):
    paths = [tmp_path / f"step-{step}.safetensors" for step in (1, 3)]
    for step, path in zip((1, 3), paths, strict=True):
        names = ["model.a", "model.b", "head"] + ["optimizer"] * (step == 3)
        save_file({name: np.full(2, step, np.float32) for name in names}, path)
    output = tmp_path / "a.safetensors"
    every = ["--window", "2", "-o", output]
    assert "tensor 'optimizer' is missing" in failed(tmp_path, *paths, *every)
    for options, averaged in (
        (["--exclude", "opt*"], {"model.a", "model.b", "head"}),
        (["--include", "model.*"], {"model.a", "model.b"}),
        (["--include", "model.*", "--include", "head", "--exclude", "*.b"], {"model.a", "head"}),
    ):
        done(*paths, *options, *every, "--dtype", "float64")
        for name, found in load_file(output).items():
            assert found.tolist() == ([2.0, 2.0] if name in averaged else [3.0, 3.0])
            assert found.dtype == (np.float64 if name in averaged else np.float32)
    output.unlink()
    said = failed(tmp_path, *paths, *every, "--exclude", "opt*", "--include", "modell.*")
    assert "no tensor matches 'modell.*'; names look like 'head'" in said


def test_tied_tensors_are_left_together(tmp_path):
    torch = pytest.importorskip("torch")
    paths = [tmp_path / f"step-{step}.pt" for step in (1, 2)]
    for step, path in enumerate(paths, 1):
        tied = torch.full((3,), 1.0 * step)
        torch.save({"embed": tied, "head": tied, "x": torch.ones(1) * step}, path)
    every = ["--window", "2", "-o", tmp_path / "a.pt"]
    said = failed(tmp_path, *paths, *every, "--exclude", "head")
    assert "tensors 'embed' and 'head' share memory" in said
    done(*paths, *every, "--exclude", "head", "--exclude", "embed")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert (found["head"].tolist(), found["x"].tolist()) == ([2.0] * 3, [1.5])


def test_a_dry_run(tmp_path):
    paths = powers(tmp_path)
    (tmp_path / "w.json").write_text("[0, 0, 0.5, 0, 0.5]")
    before = sorted(tmp_path.iterdir())
    said = done(
        *paths, "--window", "0.5", "--by-step", "-o", tmp_path / "a.safetensors", "--dry-run"
    )
    lines = said.splitlines()
    assert lines[0] == f"{tmp_path / 'a.safetensors'} would be the average of"
    assert [line.split() for line in lines[1:3]] == [[str(paths[3]), "0.4"], [str(paths[4]), "0.6"]]
    assert len(lines) == 3
    said = done(
        *paths, "--weights", tmp_path / "w.json", "-o", tmp_path / "a.safetensors", "--dry-run"
    )
    assert [line.split()[-1] for line in said.splitlines()[1:3]] == ["0.5", "0.5"]
    assert sorted(tmp_path.iterdir()) == before


def test_a_wrong_suffix_is_named_once(tmp_path):
    paths = powers(tmp_path, [1, 2])
    said = failed(tmp_path, *paths, "--window", "2", "-o", "average.bla", code=2)
    assert said.count("average.bla") == 1
    assert "average.bla: the files and the output must all end in .safetensors" in said
