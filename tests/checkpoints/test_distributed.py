"""Folders of `torch.distributed.checkpoint`, written and loaded by torch itself.

Functions named `…_rank` run on each process of a group; the tests start them there.
"""

import pickle
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from tailavg import ExactWindow
from tailavg.checkpoints import CheckpointError, average_checkpoints
from tests.support import commands

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

from tests.support.torch_processes import on_ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(step):
    generator = torch.Generator().manual_seed(step)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "model": {
            "weight": random(13, 6),
            "brain": random(9, 4).bfloat16(),
            "number": random(1)[0],
            "wave": random(4, 3, 2).view(4, 6).contiguous().view(torch.complex64),
            "one row": random(1, 1, 8, 2),
            "turned": random(4, 5).T,
            "frozen": torch.linspace(-1, 1, 7),
            "none": torch.zeros(0, 3),
            "count": torch.tensor([step, 1]),
        },
        "optimizer": {"lr": 0.1 * step, "betas": [random(2), "text"]},
        "step": step,
    }


def blank():
    """What to load into: without the optimizer, which averages leave out."""
    found = state(0)
    for tensor in found["model"].values():
        tensor.zero_()
    del found["optimizer"]
    return found


def save(folder, steps=(1, 2, 3), make=state):
    paths = [folder / f"step-{step}" for step in steps]
    for step, path in zip(steps, paths, strict=True):
        dcp.save(make(step), checkpoint_id=path, no_dist=True)
    return paths


def assert_averaged(path, steps, weights, dtype=None):
    got = blank()
    for name, tensor in got["model"].items():
        if dtype is not None and tensor.is_floating_point():
            got["model"][name] = tensor.to(dtype)
    dcp.load(got, checkpoint_id=path, no_dist=True)
    every, newest = [state(step) for step in steps], state(steps[-1])
    for name, tensor in got["model"].items():
        if name in ("count", "none", "frozen"):
            assert torch.equal(tensor, newest["model"][name].to(tensor.dtype))
            continue
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        expected = sum(
            w * each["model"][name].to(wide) for w, each in zip(weights, every, strict=True)
        )
        unit = torch.finfo(tensor.dtype).eps
        assert ((tensor.to(wide) - expected).abs() <= 0.71 * unit * expected.abs() + 1e-9).all()
    assert got["step"] == steps[-1]


done = partial(commands.done, "checkpoints")


def test_folders_of_one_process(tmp_path):
    paths = save(tmp_path)
    said = done(*paths, "--window", "2", "-o", tmp_path / "averaged")
    assert f"the average of 2 of 3 checkpoints, {paths[1]} to {paths[2]}" in said
    files = {path.name for path in (tmp_path / "averaged").iterdir()}
    assert files == {".metadata", "__0_0.distcp"}
    assert_averaged(tmp_path / "averaged", [2, 3], [0.5, 0.5])
    metadata = pickle.loads((tmp_path / "averaged" / ".metadata").read_bytes())
    assert "tailavg" not in repr(metadata)  # no temporary name


def test_several_windows_and_other_dtypes(tmp_path):
    paths = save(tmp_path)
    arguments = ["--windows", "2,1.0", "--dtype", "float64", "-o", tmp_path / "averaged-{window}"]
    done(*paths, *arguments)
    assert_averaged(tmp_path / "averaged-2", [2, 3], [0.5] * 2, torch.float64)
    assert_averaged(tmp_path / "averaged-1.0", [1, 2, 3], [1 / 3] * 3, torch.float64)


def test_optimizer_states(tmp_path):
    """They are left out; patterns that match them average or copy them."""
    paths = save(tmp_path, [1, 3])
    name = "optimizer.betas.0"
    betas = [state(step)["optimizer"]["betas"][0] for step in (1, 3)]
    for options, note, expected in (
        ([], "; the optimizer state (3 entries) is left out", None),
        (["--include", "*"], "", (betas[0].double() + betas[1].double()) / 2),
        (["--exclude", "optimizer.*"], "", betas[1]),
    ):
        output = tmp_path / f"averaged{len(options) and options[0]}"
        said = done(*paths, "--window", "2", *options, "-o", output)
        assert said.strip().endswith(f"to {paths[1]}{note}")
        if expected is None:
            assert b"betas" not in (output / ".metadata").read_bytes()
        else:
            got = {name: torch.zeros(2), "optimizer.lr": 0.0}
            dcp.load(got, checkpoint_id=output, no_dist=True)
            torch.testing.assert_close(got[name], expected.float())
            assert got["optimizer.lr"] == state(3)["optimizer"]["lr"]
    average_checkpoints(paths, 1.0, include=["model.*"])


def test_an_optimizer_may_be_in_some_checkpoints_only(tmp_path):
    paths = save(tmp_path, [1, 2, 3])
    model = state(4)
    del model["optimizer"]
    dcp.save(model, checkpoint_id=tmp_path / "step-4", no_dist=True)
    done(*paths, tmp_path / "step-4", "--window", "2", "-o", tmp_path / "averaged")
    assert_averaged(tmp_path / "averaged", [3, 4], [0.5, 0.5])


def test_one_tensor_at_a_time(tmp_path):
    paths = save(tmp_path)
    at_once = average_checkpoints(paths, 2)
    one_by_one = average_checkpoints([str(path) for path in paths], 2, lazy=True)
    assert next(one_by_one)[0] == "model.brain"
    one_by_one.close()  # ends the threads
    pairs = list(average_checkpoints(paths, 2, lazy=True))
    assert [name for name, _ in pairs] == sorted(at_once)
    for name, tensor in pairs:
        assert torch.equal(tensor, at_once[name])
    with pytest.raises(ValueError, match="lazy"):
        average_checkpoints(paths, {"averaged": 2}, lazy=True)


def test_an_output_inside_a_checkpoint(tmp_path):
    paths = save(tmp_path, [1, 2])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="is inside the checkpoint"):
        average_checkpoints(paths, {paths[0] / "averaged": 2})
    assert sorted(tmp_path.rglob("*")) == before


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_metadata_runs_no_code(tmp_path):
    (path,) = save(tmp_path, [1])
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = Evil(tmp_path / "touched")
    file.write_bytes(pickle.dumps(metadata))
    assert f"{file}: not the metadata of" in (error := refused(tmp_path, [path]))
    assert "is not a class of metadata" in error
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd"])
def test_files_outside_the_folder(tmp_path, name):
    (path,) = save(tmp_path, [1])
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "only files directly in the folder" in refused(tmp_path, [path])


def test_some_tensors_are_left(tmp_path):
    paths = save(tmp_path, [1, 3])
    done(*paths, "--window", "2", "--exclude", "model.w*", "-o", tmp_path / "averaged")
    got = blank()
    dcp.load(got, checkpoint_id=tmp_path / "averaged", no_dist=True)
    newest = state(3)["model"]
    assert torch.equal(got["model"]["weight"], newest["weight"])
    assert torch.equal(got["model"]["wave"], newest["wave"])
    assert not torch.equal(got["model"]["turned"], newest["turned"])


def sharded(mesh, step):
    model = state(step)["model"]
    return {
        "weight": distribute_tensor(model["weight"], mesh, [Shard(0)]),
        "brain": distribute_tensor(model["brain"], mesh, [Shard(1)]),
        "frozen": model["frozen"],
    }


def shards_rank(folder):
    """Save two checkpoints in shards; load the average of three when the first process has it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    paths = [folder / f"step-{step}" for step in (1, 2, 3)]
    for step in (1, 3):
        dcp.save({"model": sharded(mesh, step)}, checkpoint_id=folder / f"step-{step}")
    if dist.get_rank() == 0:
        average_checkpoints(paths, {folder / "averaged": ExactWindow(3)})
    dist.barrier()
    got = {"model": sharded(mesh, 0)}
    dcp.load(got, checkpoint_id=folder / "averaged")
    return {
        name: getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)().tolist()
        for name, tensor in got["model"].items()
    }


def test_shards_of_two_processes(tmp_path):
    """The checkpoint between them has chunks of another size: those of one process."""
    alone = {name: state(2)["model"][name] for name in ("weight", "brain", "frozen")}
    dcp.save({"model": alone}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    loaded = on_ranks(2, shards_rank, tmp_path, seconds=300)
    paths = [tmp_path / f"step-{step}" for step in (1, 2, 3)]
    files = {path.name for path in (tmp_path / "averaged").iterdir()}
    assert files == {path.name for path in paths[2].iterdir()}
    assert files == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    every = [state(step)["model"] for step in (1, 2, 3)]
    for got in loaded:
        for name, tensor in got.items():
            expected = sum(model[name].double() for model in every) / 3
            unit = torch.finfo(every[0][name].dtype).eps
            off = (torch.tensor(tensor).double() - expected).abs()
            assert (off <= 0.51 * unit * expected.abs() + 1e-9).all()
    average_checkpoints([paths[0], paths[2], paths[1]], {tmp_path / "alone": ExactWindow(3)})
    assert {path.name for path in (tmp_path / "alone").iterdir()} == {".metadata", "__0_0.distcp"}


def test_large_chunks_are_cut(tmp_path):
    """A large chunk is read in boxes of limited size, along the first axis that allows it."""

    def make(step):
        return {"x": torch.arange(6_000_000.0).view(1, 3000, 2000) * step, "y": torch.ones(5)}

    paths = save(tmp_path, [1, 2], make)
    from tailavg.checkpoints.checkpoint import PIECE
    from tailavg.checkpoints.merge import Merge

    merge = Merge(paths, {tmp_path / "averaged": ExactWindow(2)})
    cuts = next(iter(merge.newest.tensors.values())).cuts
    assert max(b - a for a, b in pairwise(cuts)) <= PIECE
    merge.run()
    got = {"x": torch.zeros(1, 3000, 2000)}
    dcp.load(got, checkpoint_id=tmp_path / "averaged", no_dist=True)
    assert torch.equal(got["x"], torch.arange(6_000_000.0).view(1, 3000, 2000) * 1.5)


def refused(folder, paths):
    before = sorted(folder.rglob("*"))
    with pytest.raises(CheckpointError) as caught:
        average_checkpoints(paths, {folder / "averaged": ExactWindow(1.0)})
    assert sorted(folder.rglob("*")) == before
    return str(caught.value)


def test_folders_that_are_refused(tmp_path):
    paths = save(tmp_path, [1, 2])
    odd = tmp_path / "odd"
    for change, said in (
        (lambda content: content["model"].pop("weight"), "tensor 'model.weight' is missing"),
        (lambda content: content.update(more=torch.ones(1)), "tensor 'more' is not in the newest"),
        (
            lambda content: content["model"].update(weight=torch.ones(2, 3)),
            "tensor 'model.weight': expected shape (13, 6), got (2, 3)",
        ),
        (
            lambda content: content["model"].update(weight=torch.ones(13, 6).double()),
            "tensor 'model.weight': expected dtype float32, got float64",
        ),
    ):
        content = state(0)
        change(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is written over another
            dcp.save(content, checkpoint_id=odd, no_dist=True)
        error = refused(tmp_path, [odd, paths[1]])
        assert f"odd: differs from the newest, {paths[1]}" in error
        assert said in error
    (odd / ".metadata").write_bytes(b"damaged")
    assert "odd/.metadata: not the metadata of" in refused(tmp_path, [odd, paths[1]])
    file = paths[0] / "__0_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert f"{file}: the file is truncated" in refused(tmp_path, paths)
    file.write_bytes(bytes(len(whole)))
    assert f"{file}: tensor 'model." in refused(tmp_path, paths)
    file.unlink()
    assert f"{file}: the file is missing" in refused(tmp_path, paths)
    (paths[0] / ".metadata").unlink()
    file.write_bytes(whole)
    assert f"{paths[0]}: unfinished, since it has no .metadata yet" in refused(tmp_path, paths)


def test_a_folder_of_another_kind(tmp_path):
    from safetensors.torch import save_file

    (path,) = save(tmp_path, [1])
    (tmp_path / "step-2").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "step-2" / "model.safetensors")
    said = refused(tmp_path, [path, tmp_path / "step-2"])
    assert "expected a folder of a model, got a folder of torch.distributed.checkpoint" in said


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    paths = save(tmp_path, [1, 2])
    before = sorted(tmp_path.rglob("*"))
    write = Path.open

    def full(path, mode="r", *args, **options):
        found = write(path, mode, *args, **options)
        if mode == "xb":
            found.close()
            found = write(Path("/dev/full"), "wb", *args, **options)
        return found

    monkeypatch.setattr(Path, "open", full)
    _, told = commands.failed("checkpoints", *paths, "--window", "2", "-o", tmp_path / "averaged")
    assert "No space left on device" in told
    assert sorted(tmp_path.rglob("*")) == before
