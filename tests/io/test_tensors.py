"""Safetensors files of accumulators: written and mapped with NumPy alone, read by the library."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tailavg.io.tensors import mapped, write_arrays

ARRAYS = {
    "single": np.arange(6, dtype=np.float32).reshape(2, 3),
    "double": np.array(0.5),
    "empty": np.zeros((0, 2**40)),
    "wave": np.array([1 + 2j], np.complex64),
}


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name], array)


def test_what_is_written_can_be_mapped_and_changed_without_the_file(tmp_path: Path) -> None:
    write_arrays(tmp_path / "file", ARRAYS)
    arrays = mapped(tmp_path / "file")
    assert_same(arrays, ARRAYS)
    arrays["single"][:] = 7
    assert_same(mapped(tmp_path / "file"), ARRAYS)


def test_the_library_reads_it(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    write_arrays(tmp_path / "file", ARRAYS)
    assert_same(library.load_file(tmp_path / "file"), ARRAYS)


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"save: x: safetensors files cannot hold complex128"):
        write_arrays(tmp_path / "file", {"x": np.zeros(1, complex)})


ROW = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "rows",
    [
        {"x": {**ROW, "shape": [-4]}},
        {"x": {**ROW, "shape": [2**70], "data_offsets": [0, 2**72]}},
        {"x": {**ROW, "shape": [-4], "data_offsets": [0, -16]}},
        {"x": {**ROW, "shape": [5]}},
        {"x": {**ROW, "dtype": "F16"}},
        {"x": {**ROW, "data_offsets": [16, 32]}},
        {"x": ROW, "y": ROW},
        {"x": {"dtype": "F32"}},
        {"x": 3},
        [],
        {},
    ],
)
def test_a_crafted_header_is_refused(tmp_path: Path, rows: object) -> None:
    text = json.dumps(rows).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(ValueError, match="file: not a complete safetensors file"):
        mapped(tmp_path / "file")


def test_a_file_that_is_too_short_or_too_long_is_refused(tmp_path: Path) -> None:
    write_arrays(tmp_path / "file", ARRAYS)
    content = (tmp_path / "file").read_bytes()
    for size in [*range(0, len(content), 7), len(content) - 1]:
        (tmp_path / "file").write_bytes(content[:size])
        with pytest.raises(ValueError, match="not a complete safetensors file"):
            mapped(tmp_path / "file")
    (tmp_path / "file").write_bytes(content + b"x")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        mapped(tmp_path / "file")
