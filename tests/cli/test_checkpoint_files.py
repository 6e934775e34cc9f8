"""`average_checkpoints`: bits that stay, tensors of every kind, and files that must be refused."""

import json
import math
import os
import shutil
import warnings
import zipfile

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize, safe_open
from safetensors.numpy import load_file, save_file

from tailavg import AnytimeWindow, ExactWindow, Exponential, TailAverage
from tailavg.checkpoints import CheckpointError, average_checkpoints
from tailavg.checkpoints.weights import weights
from tests.support.effort import some

ALL = ExactWindow(1.0)


def average(folder, contents, rule=ALL, **options):
    """The average of contents that are saved to .pt files."""
    torch = pytest.importorskip("torch")
    paths = [folder / f"step-{step}.pt" for step in range(len(contents))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch calls some kinds of tensors experimental
        for path, content in zip(paths, contents, strict=True):
            torch.save(content, path)
        average_checkpoints(paths, {folder / "average.pt": rule}, **options)
        return torch.load(folder / "average.pt", weights_only=True)


def refused(folder, contents, **options):
    """Why contents are refused; nothing is left behind."""
    with pytest.raises(CheckpointError) as caught:
        average(folder, contents, **options)
    assert {path.suffix for path in folder.iterdir()} == {".pt"}
    assert not (folder / "average.pt").exists()
    return str(caught.value)


# What never changed keeps its bits.


def save_arrays(arrays, path):
    """`save_file`, for all dtypes: that of safetensors knows no 8-bit floats of NumPy."""
    header, end = {}, 0
    for name, array in arrays.items():
        span = [end, end := end + array.nbytes]
        header[name] = {
            "dtype": CODES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": span,
        }
    text = json.dumps(header).encode()
    data = b"".join(array.tobytes() for array in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}

RULES = [ALL, Exponential(2), Exponential(0.5), AnytimeWindow(0.5, 2)]


def bits_of(dtype):
    """Numbers of every kind: random bits, both zeros, infinities, NaNs with a payload."""
    dtype = np.dtype(dtype)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    top = 2 ** (8 * dtype.itemsize) - 1
    random = np.random.default_rng(0).integers(0, top, 2000, unsigned, endpoint=True)
    random[:4] = 0, top // 2 + 1, top, top // 2
    with np.errstate(over="ignore"):
        random[4:6] = np.array([math.inf, -math.inf]).astype(dtype).view(unsigned)
    return random.view(dtype)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("files", [1, 2, 3, 7])
def test_numbers_that_never_changed_keep_their_bits(tmp_path, rule, files):
    kinds = {
        name: bits_of(getattr(np if hasattr(np, name) else ml_dtypes, name))
        for name in CODES
        if name != "complex64"
    }
    kinds["complex64"] = bits_of(np.float32).view(np.complex64)
    paths = [tmp_path / f"step-{step}.safetensors" for step in range(files)]
    for step, path in enumerate(paths):
        changing = {f"{name} and one": array.copy() for name, array in kinds.items()}
        for array in changing.values():
            array[-1] = step
        save_arrays(kinds | changing, path)
    output = tmp_path / "average.safetensors"
    average_checkpoints(paths, {output: rule})
    expected = sum(w * step for step, w in enumerate(weights(rule, files)))
    got = dict(deserialize(output.read_bytes()))
    for name, array in kinds.items():
        got[name] = np.frombuffer(got[name]["data"], array.dtype)
        got[f"{name} and one"] = np.frombuffer(got[f"{name} and one"]["data"], array.dtype)
        assert got[name].tobytes() == array.tobytes(), name
        partly = got[f"{name} and one"]
        assert partly[:-1].tobytes() == array[:-1].tobytes(), name
        assert complex(partly[-1]) == pytest.approx(expected, rel=0.13)  # the 8-bit floats


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    "dtype",
    [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "complex128",
        "complex64",
        "complex32",
    ],
)
def test_every_dtype_of_torch(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, dtype)
    kind = torch.complex64 if dtype.is_complex else torch.float32
    generator = torch.Generator().manual_seed(1)
    size = 2000 // dtype.itemsize * dtype.itemsize
    still = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype)
    moving = [torch.randn(4, 5, generator=generator, dtype=kind).to(dtype).T for _ in range(3)]
    got = average(tmp_path, [{"still": still, "moving": each} for each in moving])
    assert torch.equal(got["still"].view(torch.uint8), still.view(torch.uint8))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = sum(each.to(wide) for each in moving) / 3
    assert got["moving"].dtype == dtype
    assert got["moving"].stride() == moving[0].stride()
    unit = 0.25 if "e5m2" in str(dtype) else torch.finfo(dtype).eps
    assert ((got["moving"].to(wide) - expected).abs() <= 0.75 * unit * expected.abs() + 1e-6).all()


def test_infinities_and_nans_stay_where_they_are(tmp_path):
    inf, nan = math.inf, math.nan
    files = []
    for step, numbers in enumerate([[inf, inf, 1, nan, 1], [inf, -inf, inf, 1, 3]]):
        files.append(tmp_path / f"step-{step}.safetensors")
        wave = np.array([complex(inf, step), complex(step, nan)], np.complex64)
        save_file({"x": np.array(numbers, np.float32), "wave": wave}, files[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        average_checkpoints(files, {tmp_path / "average.safetensors": ALL})
    got = load_file(tmp_path / "average.safetensors")
    np.testing.assert_array_equal(got["x"], [inf, nan, inf, nan, 2])
    np.testing.assert_array_equal(got["wave"].view(np.float32), [inf, 0.5, 0.5, nan])


# Tensors of .pt files.


def test_tensors_are_known_by_their_path(tmp_path):
    torch = pytest.importorskip("torch")

    def content(step):
        return {
            "a/b": torch.tensor([1.0 * step]),
            "a": {"b": torch.tensor([10.0 * step])},
            0: torch.tensor([100.0 * step]),
            "0": torch.tensor([1000.0 * step]),
            "list": [torch.tensor(2.0 * step), {"0": torch.tensor(20.0 * step)}],
        }

    got = average(tmp_path, [content(step) for step in (1, 2, 3)])
    assert repr(got) == repr(content(2))
    odd = content(2)
    odd["a/b"] = odd["a/b"][:0]
    assert "tensor \"'a/b'\": expected shape (1,)" in refused_after(tmp_path, [odd, content(3)])
    del odd["0"]
    assert "tensor \"'0'\" is missing" in refused_after(tmp_path, [odd, content(3)])


def refused_after(folder, contents):
    (folder / "average.pt").unlink(missing_ok=True)
    return refused(folder, contents)


def as_complex(pairs):
    return pytest.importorskip("torch").view_as_complex(pairs)


VIEWS = {
    "expanded": lambda random: random(3, 1).expand(3, 5),
    "windows": lambda random: random(9).unfold(0, 3, 1),
    "every other": lambda random: random(9, 9)[::2, 1::3],
    "turned": lambda random: random(4, 5, 6).permute(2, 0, 1),
    "conjugated": lambda random: as_complex(random(4, 3, 2)).conj().T,
    "a number": lambda random: random(1)[0],
    "empty": lambda random: random(0, 3),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views(tmp_path, view):
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(2)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    every = [VIEWS[view](random) for _ in range(3)]
    got = average(tmp_path, [{"x": each} for each in every])["x"]
    wide = torch.complex128 if got.is_complex() else torch.float64
    expected = sum(each.resolve_conj().resolve_neg().to(wide) for each in every) / 3
    assert got.stride() == every[0].stride()
    torch.testing.assert_close(got.to(wide), expected, rtol=1e-6, atol=1e-7)


def test_views_of_one_memory(tmp_path):
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(3)

    def content():
        memory = torch.randn(40, generator=generator)
        return {
            "first": memory[:24],
            "second": memory[12:36],
            "matrix": memory[:12].view(3, 4),
            "turned": memory[:12].view(3, 4).T,
            "apart": memory[36:],
        }

    every = [content() for _ in range(3)]
    got = average(tmp_path, every)
    for name, tensor in got.items():
        expected = sum(each[name].double() for each in every) / 3
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-7)
    got["turned"][:] = 7
    assert (got["matrix"] == 7).all()
    assert (got["first"][:12] == 7).all()
    got["first"][:] = 8
    assert (got["second"][:12] == 8).all()
    backwards = dict(reversed(every[1].items()))
    again = average(tmp_path, [every[0], backwards, every[2]])
    assert torch.equal(again["second"], average(tmp_path, every)["second"])

    split = every[1] | {"second": every[1]["second"].clone()}
    said = refused_after(tmp_path, [every[0], split, every[2]])
    assert "step-1.pt" in said
    assert "expected memory 48 bytes from first, got 0 bytes from second" in said


def test_a_torch_that_cannot_tell_where_numbers_are(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    from tailavg.checkpoints import torchfiles

    every = [{str(i): torch.randn(5, 4).T for i in range(3)} for _ in range(3)]
    expected = average(tmp_path, every)
    monkeypatch.setattr(torchfiles.TorchFile, "_offsets", lambda _: {})
    mapped = average(tmp_path, every)
    assert all(torch.equal(mapped[name], expected[name]) for name in expected)


def test_layouts_that_differ_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    one, two = torch.arange(12.0).view(3, 4), torch.ones(4, 3).T
    said = refused(tmp_path, [{"x": one}, {"x": two}])
    assert (
        "tensor 'x': expected memory 0 bytes from x, with strides (1, 3), got 0 bytes from x"
        in said
    )


def test_integers_come_from_the_newest(tmp_path):
    torch = pytest.importorskip("torch")
    dtypes = torch.bool, torch.uint8, torch.int8, torch.uint16, torch.uint32, torch.uint64

    def content(step):
        kinds = {str(dtype): torch.tensor([step, 1]).to(dtype) for dtype in dtypes}
        return kinds | {"x": torch.tensor([1.0 * step])}

    got = average(tmp_path, [content(0), content(1), content(2)])
    assert repr(got) == repr(content(2) | {"x": torch.tensor([1.0])})


def unusable(torch):
    eights = torch.ones(4).to(torch.float8_e5m2)
    return {
        "sparse": torch.eye(3).to_sparse(),
        "compressed": torch.eye(3).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": torch.ones(3, device="meta"),
        "negated": as_complex(torch.ones(4, 2)).conj().imag,
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "scale": torch.ones(4).to(torch.float8_e8m0fnu),
        "\ud800": torch.eye(3).to_sparse(),
        "bytes of eights": {"eights": eights, "as shorts": eights.view(torch.uint16)},
    } | (
        {"four": torch.ones(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}
        if hasattr(torch, "float4_e2m1fn_x2")
        else {}
    )


def test_tensors_without_an_average(tmp_path):
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in unusable(torch).items():
            said = refused(tmp_path, [{"fine": torch.ones(1), name: value}] * 2)
            assert repr(name)[1:-1] in said
            assert "step-0.pt: tensor" in said


def test_states_of_averages_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    from tailavg.torch import AveragedModel, ParameterAverage

    model = torch.nn.Linear(2, 1)
    tail, averaged, loss = ParameterAverage(model, 0.5), AveragedModel(model, 0.5), TailAverage(0.5)
    tail.update()
    averaged.update_parameters(model)
    loss.update(1.0)
    for content, where in (
        (tail.state_dict(), "this is the state of a tailavg average"),
        ({"model": model.state_dict(), "average": tail.state_dict()}, "'average' is the state"),
        (averaged.state_dict(), "'_extra_state' is the state"),
        ({"callbacks": [{"a": averaged.state_dict()}]}, "'callbacks/0/a/_extra_state' is"),
    ):
        said = refused(tmp_path, [content] * 2)
        assert where in said
        assert "averaged_state_dict()" in said
    numbers_only = {"model": model.state_dict(), "loss": loss.state_dict()}
    assert average(tmp_path, [numbers_only] * 2)["loss"] == loss.state_dict()


# Files.


def run_of(folder, suffix):
    """Two checkpoints, and where to put their average."""
    paths = [folder / f"step-{step}{suffix}" for step in (1, 2)]
    if suffix == ".pt":
        torch = pytest.importorskip("torch")
        for path in paths:
            torch.save(
                {"m": {"w": torch.ones(3, 4), "b": torch.ones(2)}, "l": [torch.ones(2)]}, path
            )
    else:
        for path in paths:
            save_file({"w": np.ones((3, 4), np.float32), "b": np.arange(3)}, path)
    return paths, {folder / f"average{suffix}": ALL}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_damaged_files_are_refused_or_averaged(tmp_path, suffix):
    paths, outputs = run_of(tmp_path, suffix)
    whole = paths[0].read_bytes()
    random = np.random.default_rng(4)
    for size in range(0, len(whole), 97):
        paths[0].write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="step-1"):
            average_checkpoints(paths, outputs)
        assert sorted(tmp_path.iterdir()) == paths
    for place in range(0, len(whole), some(29, 11)):
        flipped = bytearray(whole)
        flipped[place] ^= int(random.integers(1, 256))
        paths[0].write_bytes(flipped)
        try:
            average_checkpoints(paths, outputs)
        except CheckpointError as error:
            assert "step-1" in str(error)  # noqa: PT017
            assert sorted(tmp_path.iterdir()) == paths
        else:
            next(iter(outputs)).unlink()
    for content in (b"", b"PK", b"\xff" * 64, json.dumps({"a": 1}).encode()):
        paths[0].write_bytes(content)
        with pytest.raises(CheckpointError, match="step-1"):
            average_checkpoints(paths, outputs)


def entry(dtype="F32", shape=(4,), offsets=(0, 16)):
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets})


@pytest.mark.parametrize(
    ("header", "length"),
    [
        (f'{{"a": {entry()}}}', 2**63),
        (f'{{"a": {entry()}}}', 2**64 - 1),
        (f'{{"a": {entry()}, "b": {entry()}}}', None),
        (f'{{"a": {entry()}, "b": {entry(offsets=(8, 24))}}}', None),
        (f'{{"a": {entry("F7")}}}', None),
        (f'{{"a": {entry("F4", (32,))}}}', None),
        (f'{{"a": {entry(shape=(-4,))}}}', None),
        (f'{{"a": {entry(offsets=(0, 10**30))}}}', None),
        (f'{{"a": {entry(shape=(2,), offsets=(0, 8))}, "a": {entry(offsets=(8, 16))}}}', None),
        ('{"a": ' * 100_000, None),
        ("[" * 100_000, None),
        ('{"a": null}', None),
        ("{}", None),
    ],
)
def test_crafted_headers(tmp_path, header, length):
    path = tmp_path / "step-1.safetensors"
    size = len(header) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + header.encode() + bytes(16))
    with pytest.raises(CheckpointError, match="step-1"):
        average_checkpoints([path], {tmp_path / "average.safetensors": ALL})
    assert list(tmp_path.iterdir()) == [path]


def test_a_shape_of_nothing_may_be_huge(tmp_path):
    path, output = tmp_path / "step-1.safetensors", tmp_path / "average.safetensors"
    header = f'{{"a": {entry(shape=(0, 2**63), offsets=(0, 0))}}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    average_checkpoints([path], {output: ALL})
    with safe_open(output, "np") as file:
        assert file.get_slice("a").get_shape() == [0, 2**63]


def test_compressed_torch_files_are_refused(tmp_path):
    paths, outputs = run_of(tmp_path, ".pt")
    with zipfile.ZipFile(paths[1]) as file:
        records = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(paths[0], "w", zipfile.ZIP_DEFLATED) as file:
        for name, record in records.items():
            file.writestr(name, record)
    with pytest.raises(CheckpointError, match=r"step-1\.pt: .*compressed"):
        average_checkpoints(paths, outputs)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("change", ["rewritten", "replaced", "shrunk", "removed"])
def test_a_file_that_changes_meanwhile(tmp_path, suffix, change):
    paths, outputs = run_of(tmp_path, suffix)
    whole = paths[0].read_bytes()

    def meddle(done, total):
        if paths[0].exists() and paths[0].stat().st_mtime_ns != 1:
            if change == "removed":
                paths[0].unlink()
            elif change == "shrunk":
                os.truncate(paths[0], len(whole) // 2)
            elif change == "replaced":
                shutil.copy(paths[1], tmp_path / "new")
                (tmp_path / "new").replace(paths[0])
            else:
                paths[0].write_bytes(whole)
                os.utime(paths[0], ns=(1, 1))

    with pytest.raises((CheckpointError, FileNotFoundError), match=r"step-1"):
        average_checkpoints(paths, outputs, meddle)
    assert set(tmp_path.iterdir()) <= set(paths)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_folder_that_vanishes(tmp_path, suffix):
    paths, _ = run_of(tmp_path, suffix)
    folder = tmp_path / "folder"
    folder.mkdir()

    def meddle(done, total):
        shutil.rmtree(folder, ignore_errors=True)

    with pytest.raises(FileNotFoundError):
        average_checkpoints(paths, {folder / f"average{suffix}": ALL}, meddle)
    assert sorted(tmp_path.iterdir()) == paths


def test_each_of_several_outputs_has_its_own_newest(tmp_path):
    paths = [tmp_path / f"step-{step}.safetensors" for step in range(3)]
    for step, path in enumerate(paths):
        save_file({"x": np.full(3, step, np.float32)}, path)
    outputs = {tmp_path / f"average-{i}.safetensors": np.eye(3)[i] for i in range(3)}
    assert average_checkpoints(paths, outputs) == [[path] for path in paths]
    for step, output in enumerate(outputs):
        assert load_file(output)["x"].tolist() == [step] * 3
