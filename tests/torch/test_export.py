"""A .safetensors file: every dtype and view, synced, written completely or not at all."""

import os
import stat

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from tailavg.torch import ParameterAverage
from tailavg.torch.export import write_safetensors
from tests.support.torch_models import bits, raw

KINDS = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]


def numbers(kind, *shape):
    size = kind.itemsize
    for n in shape:
        size *= n
    values = torch.arange(size, dtype=torch.uint8) % (2 if kind == torch.bool else 251)
    return values.view(kind).view(shape)


def some():
    return {f"{kind} {i}": numbers(kind, 3, i) for kind in KINDS for i in (2, 1)}


NAMES = {
    "é": torch.ones(2),
    'a\n\t"\\/\x01\x7f\u2028': torch.ones(3),
    "𝄞": torch.ones(1),
    "～": torch.ones(1),
    "": torch.ones(1),
}


@pytest.mark.parametrize(
    "tensors",
    [some(), {}, NAMES, {"none": torch.ones(3, 0), "number": torch.tensor(1.5)}],
    ids=["all dtypes", "nothing", "odd names", "odd shapes"],
)
def test_a_file_has_the_values_of_the_tensors(tmp_path, tensors):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, tensors)
    assert bits(safetensors.torch.load_file(path)) == bits(tensors)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert raw(file.get_tensor(name)) == raw(tensor)


def test_views_are_written_as_what_they_show(tmp_path):
    spin = torch.randn(3, dtype=torch.complex64)
    matrix = torch.rand(4, 3)
    tensors = {
        "transposed": matrix.t(),
        "part": matrix[1:, ::2],
        "again": matrix,
        "once more": matrix,
        "expanded": matrix[0].expand(5, 3),
        "conjugate": spin.conj(),
        "negative": spin.conj().imag,
        "trained": torch.ones(2, requires_grad=True),
    }
    path = tmp_path / "a.safetensors"
    write_safetensors(path, tensors)
    for name, tensor in safetensors.torch.load_file(path).items():
        assert torch.equal(tensor, tensors[name]), name


def test_what_the_format_has_not_is_refused_by_name_and_nothing_is_written(tmp_path):
    path = tmp_path / "a.safetensors"
    for value in (
        torch.ones(2, dtype=torch.complex128),
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
        [1.0],
    ):
        with pytest.raises(TypeError, match="odd"):
            write_safetensors(path, {"plain": torch.ones(2), "odd": value})
    weight = torch.ones(2, dtype=torch.complex128)
    average = ParameterAverage({"weight": weight}, 5)
    average.update()
    with pytest.raises(TypeError, match=r"weight.*complex128"):
        average.save_averaged(path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_what_is_synced_and_its_mode_is_a_new_files(tmp_path, monkeypatch):
    weight = torch.rand(1000)
    average = ParameterAverage({"weight": weight}, 5)
    average.update()
    synced = {}
    real = os.fsync

    def fsync(file):
        found = os.fstat(file)
        synced[found.st_ino] = found.st_size
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "a.safetensors"
    average.save_averaged(path)
    found = path.stat()
    assert synced[found.st_ino] == found.st_size > 4000
    (tmp_path / "plain").touch()
    assert stat.S_IMODE(found.st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
