"""`average_checkpoints` without an output: what an output would hold, and no file."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tailavg import ExactWindow, Exponential
from tailavg.checkpoints import CheckpointError, average_checkpoints


def arrays(step):
    rng = np.random.default_rng(step)
    return {
        "weight": rng.normal(size=(300, 1000)).astype(np.float32),  # of several pieces
        "brain": rng.normal(size=7).astype(ml_dtypes.bfloat16),
        "wave": rng.normal(size=(2, 4)).view(np.complex128).astype(np.complex64),
        "number": np.array(rng.normal()),
        "none": np.zeros((0, 3), np.float32),
        "count": np.array([step, 1]),
        "mask": np.array([True, False]),
    }


def saved(folder, steps=(1, 2, 3, 4), make=arrays):
    folder.mkdir(exist_ok=True)
    paths = [folder / f"step-{step}.safetensors" for step in steps]
    for step, path in zip(steps, paths, strict=True):
        save_file(make(step), path)
    return paths


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert bytes(got[name].tobytes()) == bytes(tensor.tobytes()), name


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("rule", [0.5, 3, Exponential(2), [0.1, 0.2, 0.3, 0.4]])
def test_safetensors(tmp_path, rule, dtype):
    paths = saved(tmp_path)
    before = sorted(tmp_path.iterdir())
    calls = []
    options = {"dtype": dtype, "exclude": ["number"]}
    got = average_checkpoints(paths, rule, lambda *call: calls.append(call), **options)
    assert sorted(tmp_path.iterdir()) == before
    assert calls[-1][0] == calls[-1][1]
    average_checkpoints(map(str, paths), {str(tmp_path / "mean.safetensors"): rule}, **options)
    assert_same(got, load_file(tmp_path / "mean.safetensors"))


def test_a_number_is_an_exact_window(tmp_path):
    paths = saved(tmp_path)
    assert_same(average_checkpoints(paths, 2), average_checkpoints(paths, ExactWindow(2)))
    mean = np.mean([arrays(step)["number"] for step in (3, 4)])
    assert average_checkpoints(paths, 0.5)["number"] == pytest.approx(mean, rel=1e-15)


def test_torch_files(tmp_path):
    torch = pytest.importorskip("torch")
    paths = [tmp_path / f"step-{step}.pt" for step in (1, 2)]
    for step, path in enumerate(paths, 1):
        tied = torch.full((3,), 1.0 * step)
        torch.save({"model": {"a": tied, "b": tied}, "step": step, "names": ["x"]}, path)
    got = average_checkpoints(paths, 1.0)
    assert got["model"]["a"].tolist() == [1.5] * 3
    assert got["model"]["a"].data_ptr() == got["model"]["b"].data_ptr()
    assert (got["step"], got["names"]) == (2, ["x"])
    assert average_checkpoints(paths, 1.0, dtype="float64")["model"]["b"].dtype == torch.float64
    assert sorted(tmp_path.iterdir()) == paths


def test_folders_of_a_model(tmp_path):
    for step in (1, 2):
        for name in ("model.safetensors", "tower/model.safetensors"):
            path = tmp_path / f"checkpoint-{step}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"w": np.full(2, step + len(name) * 1.0)}, path)
    paths = sorted(tmp_path.iterdir())
    got = average_checkpoints(paths, 1.0)
    assert {name: array.tolist() for name, array in got.items()} == {
        "w": [18.5] * 2,
        "tower/w": [24.5] * 2,
    }
    for path in paths:
        save_file({"w": np.zeros(2)}, path / "other.safetensors")
    with pytest.raises(CheckpointError, match="two files have a tensor 'w'; write the average"):
        average_checkpoints(paths, 1.0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", [None, "float64"])
def test_distributed_checkpoints(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")

    def state(step):
        generator = torch.Generator().manual_seed(step)
        tensors = {
            "weight": torch.randn(13, 6, generator=generator),
            "brain": torch.randn(9, generator=generator).bfloat16(),
            "wave": torch.randn(4, 2, generator=generator).view(torch.complex64),
            "number": torch.randn((), generator=generator),
            "none": torch.zeros(0, 3),
            "count": torch.tensor([step, 1]),
        }
        return {"model": tensors, "lr": 0.1 * step}

    paths = [tmp_path / f"step-{step}" for step in (1, 2, 3)]
    for step, path in enumerate(paths, 1):
        dcp.save(state(step), checkpoint_id=path, no_dist=True)
    before = sorted(tmp_path.rglob("*"))
    got = average_checkpoints(paths, 2, dtype=dtype)
    assert sorted(tmp_path.rglob("*")) == before
    average_checkpoints(paths, {tmp_path / "mean": 2}, dtype=dtype)
    written = {name: torch.zeros_like(tensor) for name, tensor in got.items()}
    dcp.load(written, checkpoint_id=tmp_path / "mean", no_dist=True)
    assert got.keys() == {f"model.{name}" for name in state(1)["model"]}
    for name, tensor in written.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name
    expected = (state(2)["model"]["weight"].double() + state(3)["model"]["weight"].double()) / 2
    torch.testing.assert_close(got["model.weight"].double(), expected, rtol=1e-6, atol=1e-7)


def test_a_file_that_changes_meanwhile(tmp_path):
    paths = saved(tmp_path)

    def change(*_):
        save_file(arrays(9), paths[-1])

    with pytest.raises(CheckpointError, match="changed while it was read"):
        average_checkpoints(paths, 1.0, change)


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ([0.5, 0.5], "expected 4 numbers, one per checkpoint"),
        ([1, 1, 1, 1], "expected a sum of 1, got 4"),
        ([np.nan] * 4, "expected a sum of 1, got nan"),
        (0, "expected an int >= 1"),
        (1.5, "expected an int >= 1"),
    ],
)
def test_wrong_rules(tmp_path, rule, told):
    with pytest.raises(ValueError, match=told):
        average_checkpoints(saved(tmp_path), rule)


def test_no_checkpoints():
    with pytest.raises(ValueError, match="expected at least one checkpoint"):
        average_checkpoints([], 0.25)
