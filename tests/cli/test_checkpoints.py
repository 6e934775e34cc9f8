"""`tailavg checkpoints`: against averages in float64 that share no code with it."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch.distributed.checkpoint
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.support import commands
from tests.support.commands import TAILAVG
from tests.support.processes import python, started

BF16 = np.dtype(ml_dtypes.bfloat16)


def done(folder, *arguments, **options):
    return commands.done("checkpoints", *arguments, folder=folder, **options)


def failed(folder, *arguments, **options):
    """What is said of a failure, which leaves no file behind."""
    before = sorted(folder.rglob("*"))
    _, told = commands.failed("checkpoints", *arguments, folder=folder, **options)
    assert sorted(folder.rglob("*")) == before
    return told


def tensors(step):
    random = np.random.default_rng(step)
    return {
        "weight": random.normal(size=(7, 5)).astype(np.float32),
        "bias": random.normal(size=()).astype(np.float64),
        "half": random.normal(size=(3, 2, 2)).astype(np.float16),
        "brain": random.normal(size=(400,)).astype(BF16),
        "wave": (random.normal(size=4) + 1j * random.normal(size=4)).astype(np.complex64),
        "frozen": np.linspace(-3, 3, 1000, dtype=np.float32) / 7,
        "mask": np.array([0.0, -np.inf, np.finfo(np.float32).min], np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "steps": np.array([step, -step]),
        "flags": np.array([step % 2 == 0, True]),
    }


def save_run(folder, steps, make=tensors, **options):
    names = [f"step-{step}.safetensors" for step in steps]
    for step, name in zip(steps, names, strict=True):
        save_file(make(step), folder / name, metadata={"step": str(step), "format": "pt"})
    return names


def mean(steps, weights, make=tensors):
    """The average that is expected, in double precision; the newest's where it is not averaged."""
    every = [make(step) for step in steps]
    expected = {}
    for name, newest in every[-1].items():
        if newest.dtype.kind in "ib":
            expected[name] = newest
        else:
            wide = np.complex128 if newest.dtype.kind == "c" else np.float64
            pairs = zip(weights, every, strict=True)
            expected[name] = sum(w * each[name].astype(wide) for w, each in pairs if w)
    return expected


def assert_close(path, expected, dtypes):
    got = load_file(path)
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == dtypes[name].dtype, name
        assert got[name].shape == dtypes[name].shape, name
        if array.dtype.kind in "ib":
            np.testing.assert_array_equal(got[name], array)
        else:
            # half a unit in the last place: one rounding, at the end
            wide = got[name].astype(array.dtype)
            unit = float(ml_dtypes.finfo(got[name].dtype).eps)
            np.testing.assert_allclose(wide, array, rtol=0.51 * unit, atol=1e-12, err_msg=name)


STEPS = [5, 50, 100, 150, 200, 900, 1000, 1100]  # not in the order of their names


def test_exact_window_is_the_default(tmp_path):
    names = save_run(tmp_path, STEPS)
    said = done(tmp_path, *names, "--window", "0.4", "-o", "average.safetensors")
    expected = mean(STEPS[-4:], [0.25] * 4)  # the ceiling of 3.2
    assert_close(tmp_path / "average.safetensors", expected, tensors(1))
    assert "4 of 8" in said
    assert "step-200.safetensors to step-1100.safetensors" in said


def test_metadata_and_layout_are_those_of_the_newest(tmp_path):
    names = save_run(tmp_path, STEPS)
    done(tmp_path, *names, "--window", "3", "-o", "average.safetensors")
    with (
        safe_open(tmp_path / "average.safetensors", "np") as got,
        safe_open(tmp_path / names[-1], "np") as newest,
    ):
        assert got.metadata() == newest.metadata() == {"step": "1100", "format": "pt"}
        assert got.offset_keys() == newest.offset_keys()


def test_what_does_not_change_is_kept_to_the_bit(tmp_path):
    names = save_run(tmp_path, STEPS[:3])
    done(tmp_path, *names, "--window", "3", "-o", "average.safetensors")
    got = load_file(tmp_path / "average.safetensors")
    assert got["frozen"].tobytes() == tensors(0)["frozen"].tobytes()
    assert got["mask"].tobytes() == tensors(0)["mask"].tobytes()


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        (
            ["--window", "2", "--method", "exponential"],  # a mean of two, then a decay of 1/3
            [0.5 / 3**6, 0.5 / 3**6, *(2 / 3**age for age in range(6, 0, -1))],
        ),
        (["--window", "4", "--method", "anytime", "--accumulators", "2"], [0.0] * 4 + [0.25] * 4),
        (["--window", "1.0"], [0.125] * 8),
        (["--window", "100"], [0.125] * 8),
        (["--window", "1"], [0.0] * 7 + [1.0]),
    ],
)
def test_methods_and_windows(tmp_path, options, weights):
    names = save_run(tmp_path, STEPS)
    done(tmp_path, *names, *options, "-o", "average.safetensors")
    expected = mean(STEPS, weights)
    assert_close(tmp_path / "average.safetensors", expected, tensors(1))


@pytest.mark.parametrize("method", ["exact", "exponential", "anytime"])
def test_several_windows_are_those_of_several_runs(tmp_path, method):
    names = save_run(tmp_path, STEPS)
    options = [*names, "--method", method]
    said = done(tmp_path, *options, "--windows", "0.5, 3,1.0", "-o", "all-{window}.safetensors")
    assert [line.partition(":")[0] for line in said.splitlines()] == [
        f"all-{window}.safetensors" for window in ("0.5", "3", "1.0")
    ]
    for window in ("0.5", "3", "1.0"):
        alone = done(tmp_path, *options, "--window", window, "-o", "one.safetensors")
        assert alone.replace("one", f"all-{window}") in said
        one, same = tmp_path / "one.safetensors", tmp_path / f"all-{window}.safetensors"
        assert one.read_bytes() == same.read_bytes()


def test_one_of_several_windows_needs_no_place_in_the_name(tmp_path):
    names = save_run(tmp_path, [1, 2])
    said = done(tmp_path, *names, "--windows", "0.50", "-o", "average.safetensors")
    assert said.startswith("average.safetensors: the average of 1 of 2")


def test_order(tmp_path):
    names = save_run(tmp_path, [2, 10, 9])
    for age, name in enumerate(["step-10.safetensors", "step-9.safetensors"]):
        os.utime(tmp_path / name, (10**9 - age, 10**9 - age))
    os.utime(tmp_path / "step-2.safetensors", (10**9 + 1, 10**9 + 1))
    for options, newest in (
        ([], 10),
        (["--sort", "step"], 10),
        (["--sort", "name"], 9),
        (["--sort", "mtime"], 2),
    ):
        done(tmp_path, *names, "--window", "1", "-o", "average.safetensors", *options)
        assert load_file(tmp_path / "average.safetensors")["steps"][0] == newest


def test_steps_may_be_in_the_names_of_folders(tmp_path):
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        save_file(tensors(step), tmp_path / f"checkpoint-{step}" / "model.safetensors")
    names = sorted(tmp_path.glob("checkpoint-*/model.safetensors"))
    done(tmp_path, *names, "--window", "1", "-o", "average.safetensors")
    assert load_file(tmp_path / "average.safetensors")["steps"][0] == 10


def test_tensors_of_many_pieces(tmp_path):
    def make(step):
        random = np.random.default_rng(step)
        return {
            "a": random.normal(size=(3, 300_001)).astype(np.float32),
            "b": random.integers(0, 9, 600_000),
            "c": random.normal(size=1_000_000).astype(BF16),
            "d": random.normal(size=11).astype(np.float32),
        }

    names = save_run(tmp_path, [1, 2, 3], make)
    done(tmp_path, *names, "--window", "2", "-o", "average.safetensors")
    assert_close(tmp_path / "average.safetensors", mean([2, 3], [0.5, 0.5], make), make(1))


PEAK = """
import sys
from tailavg.cli.main import app
def peak():  # in bytes; VmHWM, as the maximum of getrusage is inherited
    return 1024 * int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
import numpy, rich.progress, safetensors, tailavg.checkpoints
if not sys.argv[1].endswith(".safetensors"):
    import torch.distributed.checkpoint
before = peak()
app(["checkpoints", *sys.argv[1:]], standalone_mode=False)
print(peak() - before)
"""


@pytest.fixture
def grown(tmp_path):
    """By how much the memory of a process grows at most, files that it maps included."""
    if not Path("/proc/self/status").exists():
        pytest.skip("reads /proc")
    return lambda *arguments: int(python("-c", PEAK, *arguments, cwd=tmp_path).stdout.split()[-1])


@pytest.mark.parametrize("shapes", [[(12_000_000,)], [(1000, 1000)] * 12])
def test_memory_of_several_files_is_near_one(tmp_path, grown, shapes):
    def make(step):
        return {f"{i}": np.full(shape, step, np.float32) for i, shape in enumerate(shapes)}

    names = save_run(tmp_path, range(3), make)
    options = ["--windows", "0.6,1.0", "-o", "average-{window}.safetensors"]
    assert grown(*names, *options) < 2**26  # two files would not fit
    assert load_file(tmp_path / "average-0.6.safetensors")["0"].flat[-1] == 1.5
    assert load_file(tmp_path / "average-1.0.safetensors")["0"].flat[-1] == 1


def save_sharded(folder, tensors):
    folder.mkdir()
    shards = {name: f"model-{i:05}-of-00004.safetensors" for i, name in enumerate(tensors, 1)}
    for name, shard in shards.items():
        save_file({name: tensors[name]}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def save_distributed(folder, tensors):
    state = {name: torch.from_numpy(array) for name, array in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about processes
        torch.distributed.checkpoint.save(state, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize(
    ("save", "tensors", "most"),
    # torch's reader and writer take some 100 MB, but must not hold the 250 MB of a checkpoint
    [(save_sharded, 4, 2**26), (save_distributed, 25, 2 * 10**8)],
)
def test_memory_of_folders_is_bounded(tmp_path, grown, save, tensors, most):
    array = np.ones(2_500_000, np.float32)
    save(tmp_path / "step-1", {f"{i}": array for i in range(tensors)})
    (tmp_path / "step-2").mkdir()
    for file in (tmp_path / "step-1").iterdir():
        os.link(file, tmp_path / "step-2" / file.name)
    assert grown("step-1", "step-2", "--window", "1.0", "-o", "average") < most


def test_a_progress_bar_on_a_terminal(tmp_path):
    pty = pytest.importorskip("pty")
    names = save_run(tmp_path, [1, 2])
    ours, theirs = pty.openpty()
    with started(
        *[*TAILAVG, "checkpoints", *names, "--window", "2", "-o", "average.safetensors"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 4096):
                shown += chunk
        except OSError:  # the other end is closed
            pass
        assert process.stdout.read().startswith(b"average.safetensors: ")
    os.close(ours)
    assert b"averaging" in shown
    assert b"100 %" in shown


# What cannot be averaged.

ARGUMENTS = ["--window", "1.0", "-o", "average.safetensors"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("bias"), "tensor 'bias' is missing"),
        (lambda t: t.update(extra=t["bias"]), "tensor 'extra' is not in the newest"),
        (
            lambda t: t.update(weight=t["weight"].T.copy()),
            "tensor 'weight': expected shape (7, 5), got (5, 7)",
        ),
        (
            lambda t: t.update(half=t["half"].astype(np.float32)),
            "tensor 'half': expected dtype float16, got float32",
        ),
    ],
)
def test_files_that_differ(tmp_path, change, said):
    names = save_run(tmp_path, [1, 2, 3])
    odd = tensors(2)
    change(odd)
    save_file(odd, tmp_path / names[1])
    error = failed(tmp_path, *names, "--window", "1", "-o", "average.safetensors")
    assert "step-2.safetensors" in error  # it has no weight, but it is one of the count
    assert said in error
    assert "Nothing was written" in error


def test_truncated_files(tmp_path):
    names = save_run(tmp_path, [1, 2, 3])
    path = tmp_path / names[1]
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for size in (len(whole) - 1, header + 1, header - 5, 4, 0):
        path.write_bytes(whole[:size])
        error = failed(tmp_path, *names, *ARGUMENTS)
        assert "step-2.safetensors: not a complete .safetensors file" in error


def test_files_of_another_kind(tmp_path):
    names = save_run(tmp_path, [1, 2])
    path = tmp_path / names[0]
    for content in (
        b"hello",
        b"\x05" + b"\0" * 7 + b"hello",
        b"\x02" + b"\0" * 7 + b"[]",
        b"\xff" * 64,
    ):
        path.write_bytes(content)
        assert "step-1.safetensors" in failed(tmp_path, *names, *ARGUMENTS)


def test_dtypes_that_have_no_average(tmp_path):
    head = json.dumps({"scale": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}})
    content = len(head).to_bytes(8, "little") + head.encode() + b"\x7f\x7f"
    (tmp_path / "step-1.safetensors").write_bytes(content)
    error = failed(tmp_path, "step-1.safetensors", *ARGUMENTS)
    assert "step-1.safetensors: tensor 'scale'" in error
    assert "float8_e8m0fnu cannot be averaged" in error


def test_wrong_command_lines(tmp_path):
    names = save_run(tmp_path, [1, 2])
    save_file(tensors(3), tmp_path / "final.safetensors")
    for arguments, said in (
        ([*names, "--window", "1.0"], "--output"),
        (["-o", "a.safetensors", "--window", "1.0"], "FILES"),
        ([*names, "--window", "-1", "-o", "a.safetensors"], "expected a window: a count from 1"),
        ([*names, "-o", "a.safetensors"], "choose a window: --window 0.25"),
        (["nosuch.safetensors", *ARGUMENTS], "nosuch.safetensors"),
        ([*names, names[0], *ARGUMENTS], "step-1.safetensors is given twice"),
        (
            [*names, "--window", "1", "-o", names[1]],
            "is one of the checkpoints, or inside one",
        ),
        ([*names, "--window", "1", "-o", "a.pt"], "must all end in .safetensors, or all"),
        ([*names, "--window", "1", "-o", "no/a.safetensors"], "the folder no does not exist"),
        ([*names, "final.safetensors", *ARGUMENTS], "--sort name or --sort mtime"),
        ([*names, *ARGUMENTS, "--accumulators", "3"], "goes with --method anytime"),
        (
            [*names, *ARGUMENTS, "--method", "freshest", "--accumulators", "12"],
            "goes with --method anytime, not freshest",
        ),
        ([*names, *ARGUMENTS, "--windows", "1"], "--windows replaces --window"),
        (
            [*names, "--windows", "1,0.5", "-o", "a.safetensors"],
            "need {window} in the name",
        ),
        ([*names, "--windows", "1,1", "-o", "{window}.safetensors"], "got 1 twice"),
        (
            [*names, "--windows", "5,2", "-o", "step-{window}.safetensors"],
            "is one of the checkpoints, or inside one",
        ),
        (
            [*names, "--windows", "5,2", "-o", "{window}/a.safetensors"],
            "folder 5 does not",
        ),
    ):
        assert said in failed(tmp_path, *arguments, code=2)


def test_an_output_that_cannot_be_written_is_left_as_it_was(tmp_path):
    names = save_run(tmp_path, [1, 2])
    (tmp_path / "average.safetensors").mkdir()
    assert "average.safetensors" in failed(tmp_path, *names, *ARGUMENTS)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a pipe with a name")
def test_an_output_is_a_regular_file(tmp_path):
    names = save_run(tmp_path, [1, 2])
    os.mkfifo(tmp_path / "average.safetensors")
    assert "expected a regular file" in failed(tmp_path, *names, *ARGUMENTS)


@contextmanager
def limited_files(size):
    """Let no file grow beyond this size, as on a disk that is full."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_disk_that_is_full(tmp_path, suffix):
    if suffix == "pt":
        _, names = torch_run(tmp_path, [1, 2], lambda torch, step: {"w": torch.ones(50_000) * step})
    else:
        names = save_run(tmp_path, [1, 2], lambda step: {"w": np.full(50_000, step, np.float32)})
    arguments = [*names, "--windows", "1,2", "-o", f"average-{{window}}.{suffix}"]
    with limited_files(100_000):
        told = failed(tmp_path, *arguments)
    assert told == f"tailavg: average-{{window}}.{suffix}: File too large Nothing was written."


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_names_that_cannot_be_printed(tmp_path, encoding):
    save_run(tmp_path, [1, 2])
    names = [os.fsdecode(b"\xff-%d.safetensors" % step) for step in (1, 2)]
    for step, name in enumerate(names, 1):
        (tmp_path / f"step-{step}.safetensors").rename(tmp_path / name)
    arguments = ["--window", "1.0", "-o", "平均.safetensors"]
    said = done(tmp_path, *names, *arguments, encoding=encoding)
    assert "2 of 2 checkpoints, ?-1.safetensors to ?-2.safetensors" in said
    (tmp_path / names[0]).write_bytes(b"damaged")
    said = failed(tmp_path, *names, *arguments, encoding=encoding)
    assert "-1.safetensors: not a complete .safetensors file" in said


def test_of_several_outputs_all_are_written_or_none(tmp_path):
    names = save_run(tmp_path, [1, 2])
    (tmp_path / "average-2.safetensors").mkdir()
    (tmp_path / "average-1.safetensors").write_bytes(b"older")
    arguments = [*names, "--windows", "1,2,0.5", "-o", "average-{window}.safetensors"]
    assert "average-2.safetensors: Is a directory" in failed(tmp_path, *arguments)
    assert (tmp_path / "average-1.safetensors").read_bytes() == b"older"


def test_an_older_output_is_replaced_only_by_a_whole_one(tmp_path):
    names = save_run(tmp_path, [1, 2])
    output = tmp_path / "average.safetensors"
    output.write_bytes(b"older")
    (tmp_path / names[0]).write_bytes(b"damaged")
    failed(tmp_path, *names, *ARGUMENTS)
    assert output.read_bytes() == b"older"
    save_run(tmp_path, [1])
    done(tmp_path, *names, *ARGUMENTS)
    assert load_file(output)["steps"][0] == 2


def test_an_interrupt_leaves_nothing(tmp_path):
    size = 4 * 10**8
    entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    head = json.dumps({"zeros": entry}).encode()
    names = [f"step-{step}.safetensors" for step in range(10)]
    for name in names:  # files of a hole, which take no room
        with (tmp_path / name).open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            file.truncate(8 + len(head) + size)
    command = [*TAILAVG, "checkpoints", *names, *ARGUMENTS]
    with started(*command, cwd=tmp_path, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not list(tmp_path.glob(".average*")):
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        assert b"Traceback" not in process.communicate(timeout=300)[1]
        assert process.returncode == 130
    assert {path.name for path in tmp_path.iterdir()} == set(names)


# torch's files.


def torch_run(folder, steps, make):
    torch = pytest.importorskip("torch")
    names = [f"step-{step}.pt" for step in steps]
    for step, name in zip(steps, names, strict=True):
        torch.save(make(torch, step), folder / name)
    return torch, names


def a_tree(torch, step):
    generator = torch.Generator().manual_seed(step)
    embedding = torch.randn(10, 4, generator=generator)
    brain = torch.randn(3, 3, generator=generator).bfloat16()
    return {
        "model": {
            "embedding": embedding,
            "head": embedding,
            "brain": torch.nn.Parameter(brain),
            "turned": torch.randn(4, 3, generator=generator).T,
            "double": torch.randn((), generator=generator, dtype=torch.float64),
            "counter": torch.tensor(step),
        },
        "history": [torch.full((2,), float(step)), {"lr": 1.0 / step}],
        "step": step,
    }


def test_torch_files(tmp_path):
    torch, names = torch_run(tmp_path, [2, 9, 10], a_tree)
    kept = (tmp_path / "step-10.pt").read_bytes()
    done(tmp_path, *names, "--window", "2", "-o", "average.pt")
    got = torch.load(tmp_path / "average.pt", weights_only=True)
    one, two = a_tree(torch, 9), a_tree(torch, 10)
    for name in ("embedding", "head", "brain", "turned", "double"):
        a, b = one["model"][name].detach(), two["model"][name].detach()
        value = got["model"][name].detach()
        assert value.dtype == b.dtype
        assert value.stride() == b.stride()
        torch.testing.assert_close(value, ((a.double() + b.double()) / 2).to(b.dtype))
    assert got["model"]["head"].data_ptr() == got["model"]["embedding"].data_ptr()
    assert isinstance(got["model"]["brain"], torch.nn.Parameter)
    assert got["model"]["counter"] == 10
    assert got["history"][0].tolist() == [9.5, 9.5]
    assert got["history"][1] == {"lr": 0.1}
    assert got["step"] == 10
    assert (tmp_path / "step-10.pt").read_bytes() == kept


def test_several_windows_of_torch_files(tmp_path):
    torch, names = torch_run(tmp_path, [2, 9, 10], a_tree)
    done(tmp_path, *names, "--windows", "2,1.0", "-o", "all-{window}.pt")
    for window in ("2", "1.0"):
        done(tmp_path, *names, "--window", window, "-o", "one.pt")
        one, same = (torch.load(tmp_path / f"{name}.pt") for name in ("one", f"all-{window}"))
        for name, tensor in one["model"].items():
            assert torch.equal(tensor, same["model"][name])
        assert torch.equal(one["history"][0], same["history"][0])
        assert same["model"]["head"].data_ptr() == same["model"]["embedding"].data_ptr()


def test_torch_memory_of_several_files_is_near_one(tmp_path, grown):
    _, names = torch_run(
        tmp_path,
        range(3),
        lambda torch, step: {str(i): torch.full((1000, 1000), float(step)) for i in range(20)},
    )
    one = (tmp_path / names[0]).stat().st_size
    assert grown(*names, "--window", "1.0", "-o", "average.pt") < 2 * one


def test_torch_files_that_cannot_be_averaged(tmp_path):
    torch, names = torch_run(tmp_path, [1, 2, 3], a_tree)
    path = tmp_path / names[1]
    whole = path.read_bytes()
    arguments = [*names, "--window", "1.0", "-o", "average.pt"]

    path.write_bytes(whole[: len(whole) // 2])
    assert "step-2.pt: not a complete file" in failed(tmp_path, *arguments)

    odd = a_tree(torch, 2)
    odd["model"]["head"] = odd["model"]["head"].clone()
    torch.save(odd, path)
    said = failed(tmp_path, *arguments)
    assert "'model/head': expected memory 0 bytes from model/embedding, got 0 bytes from" in said

    odd["model"].pop("head")
    torch.save(odd, path)
    assert "tensor 'model/head' is missing" in failed(tmp_path, *arguments)

    torch.save({"sparse": torch.eye(3).to_sparse()}, path)
    assert "tensor 'sparse': only dense tensors" in failed(tmp_path, *arguments)

    torch.save({"step": 3}, path)
    assert "no tensors found" in failed(tmp_path, *arguments)


def test_torch_files_run_no_code(tmp_path):
    torch, names = torch_run(tmp_path, [1, 2], a_tree)
    torch.save({"path": Path("here"), "tensor": torch.ones(1)}, tmp_path / names[0])
    error = failed(tmp_path, *names, "--window", "1.0", "-o", "average.pt")
    assert "step-1.pt" in error
