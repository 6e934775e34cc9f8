"""Folders as Megatron-LM writes them (`torch_dist`), averaged by one process and by several.

Slow: nine processes import torch.
"""

import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from tailavg import Decay
from tailavg.checkpoints import CheckpointError, average_checkpoints
from tailavg.checkpoints.merge import Merge
from tailavg.checkpoints.processes import Group
from tests.support import commands, processes
from tests.support.commands import TAILAVG
from tests.support.effort import exhaustive

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed._shard import sharded_tensor  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

done = partial(commands.done, "checkpoints")
TRACKER = "latest_checkpointed_iteration.txt"
EXTRA = "decoder.layers.self_attention._extra_state/shard_0_1"
STRATEGIES = "megatron.core.dist_checkpointing.strategies.torch"


class MCoreMetadata(Metadata):
    """A class that only a machine with Megatron can unpickle."""


MCoreMetadata.__module__ = STRATEGIES


def tensors(step):
    random = torch.Generator().manual_seed(step)
    return {
        "decoder.weight": torch.randn(8, 6, generator=random),
        "embedding.weight": torch.randn(12, 4, generator=random).bfloat16(),
        "output.weight": torch.randn(4, 10, generator=random),
        "optimizer.state.exp_avg.decoder.weight": torch.randn(8, 6, generator=random),
        "chained_0.optimizer.state.exp_avg.embedding.weight": torch.randn(12, generator=random),
    }


MODEL = ["decoder.weight", "embedding.weight", "output.weight"]


def save(root, step, files=4, metadata=Metadata, rows=4, properties=TensorProperties):
    """Write an iteration by hand: chunks of rows, in turns in each of the files."""
    folder = root / f"iter_{step:07d}"
    folder.mkdir(parents=True)
    entries, stored = {}, {}
    streams = [(folder / f"__{i}_0.distcp").open("wb") for i in range(files)]
    number = 0

    def store(index, data):
        nonlocal number
        stream = streams[number % files]
        start = stream.tell()
        torch.save(data, stream)
        name = Path(stream.name).name
        stored[index] = dcp.filesystem._StorageInfo(name, start, stream.tell() - start)
        number += 1

    for name, tensor in tensors(step).items():
        chunks = []
        for start in range(0, len(tensor), rows):
            part = tensor[start : start + rows].clone()
            offsets = torch.Size([start, *([0] * (tensor.dim() - 1))])
            chunks.append(ChunkStorageMetadata(offsets, part.shape))
            store(MetadataIndex(name, offsets), part)
        entries[name] = TensorStorageMetadata(properties(tensor.dtype), tensor.shape, chunks)
    for name, data in ((EXTRA, {"scale": step}), ("rng_state/shard_0_1", [step])):
        entries[name] = BytesStorageMetadata()
        store(MetadataIndex(name), [data])
    for stream in streams:
        stream.close()
    found = metadata(entries, None, stored)
    found.mcore_data = {name: {} for name in entries}
    found.all_local_plans = [SavePlan([])]
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    torch.save({"iteration": step, "args": Path("needs weights_only=False")}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (folder / "modelopt_state").mkdir()
    (folder / "modelopt_state" / "common.pt").write_bytes(b"not a pickle")
    (root / TRACKER).write_text(f"{step}")
    return folder


@pytest.fixture
def run(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path / "run", step)
    return tmp_path / "run"


def assert_averaged(folder, steps, newest):
    """Load an average with torch's own reader; compare it with means in float64."""
    got = {name: torch.zeros_like(tensors(0)[name]) for name in MODEL}
    dcp.load(got, checkpoint_id=folder, no_dist=True)
    for name, tensor in got.items():
        expected = sum(tensors(step)[name].double() for step in steps) / len(steps)
        unit = torch.finfo(tensor.dtype).eps
        assert ((tensor.double() - expected).abs() <= 0.51 * unit * expected.abs() + 1e-9).all()
    metadata = dcp.FileSystemReader(folder).read_metadata()
    assert sorted(metadata.state_dict_metadata) == sorted([*MODEL, EXTRA, "rng_state/shard_0_1"])
    index = MetadataIndex(EXTRA)
    theirs = dcp.FileSystemReader(newest).read_metadata()
    assert stored_bytes(folder, metadata, index) == stored_bytes(newest, theirs, index)
    for name in ("common.pt", "metadata.json", "modelopt_state/common.pt"):
        assert (folder / name).read_bytes() == (newest / name).read_bytes()


def stored_bytes(folder, metadata, index):
    info = metadata.storage_data[index]
    return (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]


def test_a_run(run, tmp_path):
    said = done(run, "--last", "2", "-o", tmp_path / "averaged")
    assert f"the average of 2 of 3 checkpoints, {run}/iter_0000200 to {run}/iter_0000300" in said
    assert said.strip().endswith("; the optimizer state (2 entries) is left out")
    assert {path.name for path in (tmp_path / "averaged").iterdir()} == {"iter_0000300", TRACKER}
    assert (tmp_path / "averaged" / TRACKER).read_text() == "300"
    assert_averaged(tmp_path / "averaged" / "iter_0000300", (200, 300), run / "iter_0000300")


def test_an_iteration_as_the_output(run, tmp_path):
    output = tmp_path / "merged" / "iter_0000300"
    output.parent.mkdir()
    iterations = sorted(run.glob("iter_*"))
    done(*iterations, "--window", "1.0", "-o", output)
    assert_averaged(output, (100, 200, 300), run / "iter_0000300")
    assert (tmp_path / "merged" / TRACKER).read_text() == "300"
    before = sorted(tmp_path.rglob("*"))
    _, told = commands.failed(
        "checkpoints", run, "--last", "2", "-o", tmp_path / "merged" / "iter_0000301"
    )
    assert f"{TRACKER}: belongs to other checkpoints" in told
    assert sorted(tmp_path.rglob("*")) == before


def test_metadata_of_a_class_of_megatron(run, tmp_path, monkeypatch):
    """It is read without Megatron; what its loader asks of it is in the output.

    The tensors have the properties that torch stored before 2.3.
    """
    module = ModuleType(STRATEGIES)
    module.MCoreMetadata = MCoreMetadata
    with monkeypatch.context() as registered:
        parts = STRATEGIES.split(".")
        for i in range(1, len(parts)):
            name = ".".join(parts[:i])
            registered.setitem(sys.modules, name, ModuleType(name))
        registered.setitem(sys.modules, STRATEGIES, module)
        save(run, 400, metadata=MCoreMetadata, properties=sharded_tensor.metadata.TensorProperties)
    assert b"MCoreMetadata" in (run / "iter_0000400" / ".metadata").read_bytes()
    done(run, "--last", "2", "-o", tmp_path / "averaged")
    folder = tmp_path / "averaged" / "iter_0000400"
    shutil.rmtree(run / "iter_0000400")
    save(run, 400)  # the same in a class that the test can read
    assert_averaged(folder, (300, 400), run / "iter_0000400")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    assert sorted(metadata.mcore_data) == sorted(metadata.state_dict_metadata)
    assert not hasattr(metadata, "all_local_plans")  # plans of a save with the optimizer


def test_other_shards(run, tmp_path):
    """Chunks of other rows, in other files."""
    save(run, 400, files=1, rows=3)
    save(run, 500, files=2, rows=5)
    done(run, "--last", "3", "-o", tmp_path / "averaged")
    assert_averaged(tmp_path / "averaged" / "iter_0000500", (300, 400, 500), run / "iter_0000500")


def test_which_iterations(run, tmp_path):
    save(run, 350)

    def used(*options):
        output = tmp_path / "averaged"
        told = done(run, *options, "-o", output, "--dry-run").splitlines()[1:]
        return {int(line.split()[0][-7:]): float(line.split()[1]) for line in told}

    assert used("--last", "2") == {300: 0.5, 350: 0.5}
    assert used("--last", "9") == dict.fromkeys((100, 200, 300, 350), 0.25)
    assert used("--start", "200", "--end", "300") == {200: 0.5, 300: 0.5}
    assert used("--every", "100") == pytest.approx(dict.fromkeys((100, 200, 350), 1 / 3), rel=1e-5)
    assert used("--end", "300", "--window", "0.3") == {300: 1.0}
    # 200 steps: all 50 before 350, all 100 before 300, and 50 of those before 200
    assert used("--window", "800M", "--tokens-per-step", "4M") == {200: 0.25, 300: 0.5, 350: 0.25}
    assert used("--window", "200", "--by-step") == {200: 0.25, 300: 0.5, 350: 0.25}


def test_unfinished_iterations(run, tmp_path):
    (run / TRACKER).write_text("200\n")
    ended = commands.run("checkpoints", run, "--last", "2", "-o", tmp_path / "averaged")
    assert f"{run}/iter_0000300 is left out, since {TRACKER} beside it still says 200" in ended.told
    assert_averaged(tmp_path / "averaged" / "iter_0000200", (100, 200), run / "iter_0000200")
    named = [run / "iter_0000200", run / "iter_0000300"]
    _, told = commands.failed("checkpoints", *named, "--last", "2", "-o", tmp_path / "other")
    assert f"{run}/iter_0000300: unfinished" in told
    (run / "iter_0000200" / ".metadata").unlink()
    ended = commands.run("checkpoints", run, "--last", "2", "-o", tmp_path / "one")
    assert "iter_0000200 is left out, since it has no .metadata yet" in ended.told
    assert_averaged(tmp_path / "one" / "iter_0000100", [100], run / "iter_0000100")


def test_wrong_options(run, tmp_path):
    for options, said in (
        (["--last", "0"], "--last"),
        ([], "choose a window"),
        (["--last", "2", "--by-step"], "choose a window"),
        (["--tokens-per-step", "4M", "--window", "0.5"], "needs a window in tokens, such as 50B"),
        (["--tokens-per-step", "0.5", "--window", "50B"], "expected a count, such as 4M"),
        (["--last", "2", "--workers", "0"], "--workers"),
    ):
        _, told = commands.failed("checkpoints", run, *options, "-o", tmp_path / "averaged", code=2)
        assert said in told
    _, told = commands.failed("checkpoints", run, "--start", "400", "-o", tmp_path / "averaged")
    assert "no checkpoint has a step between --start and --end" in told
    _, told = commands.failed(
        "checkpoints", run, "--last", "2", "-o", run / "iter_0000300" / "averaged", code=2
    )
    assert "is one of the checkpoints, or inside one" in told


# Many processes.


def content(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_four_processes_write_the_same_bytes_as_one(run, tmp_path):
    arguments = [run, "--windows", "2,1.0", "--decay", "1-sqrt"]
    alone = done(*arguments, "-o", tmp_path / "alone-{window}")
    four = done(*arguments, "--workers", "4", "-o", tmp_path / "four-{window}")
    assert four == alone.replace("alone", "four")
    for window in ("2", "1.0"):
        expected = content(tmp_path / f"alone-{window}")
        assert content(tmp_path / f"four-{window}") == expected
        assert len([path for path in expected if path.suffix == ".distcp"]) == 4


def test_large_files_are_cut(run, tmp_path, monkeypatch):
    """Several processes then have work even if one process saved the checkpoint."""
    monkeypatch.setattr("tailavg.checkpoints.distributed.FILE_SIZE", 3000)
    paths = [save(tmp_path / "alone", step, files=1) for step in (1, 2)]
    average_checkpoints(paths, {tmp_path / "averaged": 2})
    folder = tmp_path / "averaged" / "iter_0000002"
    assert_averaged(folder, (1, 2), paths[1])
    names = sorted(path.name for path in folder.glob("*.distcp"))
    assert names == ["__0_0-1.distcp", "__0_0-2.distcp", "__0_0-3.distcp", "__0_0.distcp"]


@exhaustive("as with --workers, but for the store")
def test_torchrun(run, tmp_path):
    done(run, "--last", "2", "-o", tmp_path / "alone")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "tailavg", "checkpoints", run, "--last", "2", "-o"]
    processes.python(*command, tmp_path / "two")
    assert content(tmp_path / "two") == content(tmp_path / "alone")


def test_an_error_in_one_process_is_one_message(run, tmp_path):
    """Only the process that reads a damaged file knows of it."""
    damaged = run / "iter_0000200" / "__3_0.distcp"
    damaged.write_bytes(bytes(damaged.stat().st_size))
    before = sorted(tmp_path.rglob("*"))
    arguments = [run, "--last", "2", "--workers", "2", "-o", tmp_path / "averaged"]
    ended = commands.run("checkpoints", *arguments, code=1)
    assert ended.told.count("tailavg:") == 1
    assert f"{damaged}: tensor " in ended.told
    assert ended.told.endswith("Nothing was written.")
    assert sorted(tmp_path.rglob("*")) == before


def test_other_formats_take_one_process(tmp_path):
    paths = [tmp_path / f"step-{step}.pt" for step in (1, 2)]
    for path in paths:
        torch.save({"w": torch.ones(2)}, path)
    merge = Merge(paths, {tmp_path / "averaged.pt": 2})
    with pytest.raises(CheckpointError, match="only folders of torch"):
        merge.run(group=Group(size=2))
    assert sorted(tmp_path.iterdir()) == paths


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
@pytest.mark.parametrize(
    "victim", ["parent", pytest.param("worker", marks=exhaustive("waits 5 s for the other one"))]
)
def test_a_kill_in_the_middle_leaves_nothing(tmp_path, victim):
    state = {str(i): torch.zeros(10**6) for i in range(20)}
    dcp.save(state, checkpoint_id=tmp_path / "step-0", no_dist=True)
    for step in range(1, 8):
        shutil.copytree(tmp_path / "step-0", tmp_path / f"step-{step}", copy_function=os.link)
    names = sorted(path.name for path in tmp_path.iterdir())
    command = [*TAILAVG, "checkpoints", ".", "--last", "8", "--workers", "2", "-o", "averaged"]
    with processes.started(*command, cwd=tmp_path, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not list(tmp_path.glob(".averaged*/*")):
            time.sleep(0.001)
        if victim == "parent":
            process.send_signal(signal.SIGTERM)
        else:
            os.kill(second_worker(process.pid), signal.SIGKILL)
        told = process.communicate(timeout=300)[1].decode()
    assert process.returncode == (128 + signal.SIGTERM if victim == "parent" else 1), told
    assert "Traceback" not in told
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def second_worker(pid):
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"RANK=1" in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError("no second worker")


# The coefficients of Megatron-LM: NVIDIA/Megatron-LM, pull request 5114,
# tools/checkpoint/weighted_merge.py, schedule_to_merge_coefficients.


def theirs(schedule, n):
    """The differences of the schedule at i/n; the oldest checkpoint gets what is left of 1."""
    values = [schedule(i / n) for i in range(n)]
    later = [a - b for a, b in pairwise(values[1:])] + values[-1:]
    return [1 - sum(later), *later] if n > 1 else [1.0]


@pytest.mark.parametrize(
    ("shape", "schedule"),
    [("linear", lambda x: 1 - x), ("1-sqrt", lambda x: 1 - math.sqrt(x))],
)
@pytest.mark.parametrize("n", [1, 2, 3, 10, 100])
def test_coefficients_of_megatron(shape, schedule, n):
    ours = Decay(1.0, shape).weights(n)
    assert ours.tolist() == pytest.approx(theirs(schedule, n), rel=0, abs=1e-15)
    if shape == "1-sqrt":
        exact = [(math.sqrt(i + 1) - math.sqrt(i)) / math.sqrt(n) for i in range(n)]
        assert ours.tolist() == pytest.approx(exact, rel=0, abs=1e-15)
