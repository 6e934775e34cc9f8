"""Folders that `save_pretrained` and trainers write: weights, perhaps sharded, and other files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tailavg.checkpoints.checkpoint import (
    REAL_DTYPES,
    Averages,
    Checkpoint,
    CheckpointError,
    Piece,
    reading,
    stamp_of,
)
from tailavg.checkpoints.safetensors import Safetensors
from tailavg.io.files import sync

__all__ = ["Folder", "open_file"]

INDEX = re.compile(r"(.+)(\.safetensors|\.bin)\.index(\..+)?\.json")
SHARD = re.compile(r".+-\d{5}-of-\d{5}(\.safetensors|\.bin)")

TRAINING_FILES = re.compile(
    r"""\..* | optimizer.* | (scheduler | sampler | dl_state).*\.bin | training_args\..*
    | trainer_state\.json | (all|train|eval|test|predict)_results\.json | latest
    | zero_to_fp32\.py | events\.out\.tfevents.*
    | .*\.(pt | pth | ckpt | pkl | distcp | h5 | msgpack | onnx | gguf | lock | tmp)""",
    re.VERBOSE,
)
"""Files that are not copied to the average: training states, and weights in other formats."""

TRAINING_FOLDERS = re.compile(
    r"\..* | __pycache__ | runs | checkpoint-\d+ | (global_step|optimizer|tail_average|.*fsdp).*",
    re.VERBOSE,
)


def open_file(path: Path) -> Checkpoint:
    """Open a file of weights."""
    if path.suffix == ".safetensors":
        return Safetensors(path)
    from tailavg.checkpoints.torchfiles import TorchFile  # needs torch

    return TorchFile(path)


class Folder(Checkpoint):
    """A folder with one or more models. The key of a tensor is its model and its key in a file.
    All `.safetensors` files are averaged, in subfolders too; in a folder without any, all `.bin`
    files. The shards of one index are one model. Paths of files are relative to `path`.
    """

    kind = "a folder of a model"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamps = {}
        self._files: dict[Path, tuple[str, Checkpoint]] = {}  # path to model's name and weights
        self._indices: list[Path] = []
        self._other_files: list[Path] = []
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not TRAINING_FOLDERS.fullmatch(name))
            names = sorted(name for name in names if not TRAINING_FILES.fullmatch(name))
            self._open_folder(Path(folder).relative_to(path), names)
        if not self._files:
            inside = [metadata.parent.name for metadata in sorted(path.glob("*/.metadata"))]
            raise CheckpointError(
                f"{path}: no model.safetensors, no shards with an index and no pytorch_model.bin"
                + (f"; average its folder {inside[0]} instead" if inside else "")
            )
        self._gather()

    def _open_folder(self, folder: Path, names: list[str]) -> None:
        """Open the weights directly in a folder, and list its other files."""
        kinds = ".safetensors", ".bin"
        kind = next((kind for kind in kinds if any(name.endswith(kind) for name in names)), "")
        models: dict[str, list[str]] = {}  # name of a model to its files
        for name in names:
            match = INDEX.fullmatch(name)
            if match and match[2] == kind:
                models[match[1] + (match[3] or "")] = self._shards(folder / name)
            elif not match and not name.endswith(kinds):
                self._other_files.append(folder / name)
        shards = {name for files in models.values() for name in files}
        for name in names:
            if name in shards or not name.endswith(kinds):
                continue
            path, model = self.path / folder / name, name.removesuffix(kind)
            if not name.endswith(kind):
                if not name.startswith("pytorch_model") and name.removesuffix(".bin") not in models:
                    raise CheckpointError(
                        f"{path}: the other weights in this folder are {kind} files; convert or "
                        "remove this file"
                    )
            elif SHARD.fullmatch(name):
                if not shards:  # beside an indexed model, an extra shard is left over and ignored
                    raise CheckpointError(
                        f"{path}: a shard without its index; restore the index, such as "
                        f"model{kind}.index.json"
                    )
            elif model in models:
                raise CheckpointError(
                    f"{path.parent}: holds both {name} and an index with shards; remove the older "
                    "of the two"
                )
            else:
                models[model] = [name]
        for model, files in models.items():
            for name in files:
                file = open_file(self.path / folder / name)
                self._files[folder / name] = str(folder / model), file
                self.stamps |= file.stamps

    def _shards(self, index: Path) -> list[str]:
        """Return the names of the files in an index."""
        path = self.path / index
        self.stamps[path] = stamp_of(path)
        self._indices.append(index)
        shards = self._json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise CheckpointError(f"{path}: not an index: expected a dict weight_map")
        for name, shard in shards.items():
            if shard != Path(str(shard)).name or not (path.parent / shard).is_file():
                raise CheckpointError(
                    f"{path}: the file {shard!r} with tensor {name!r} is missing from the folder"
                )
        return sorted({*shards.values()})

    def _gather(self) -> None:
        """Collect the tensors of all files."""
        self.tensors, self._sources = {}, dict[Hashable, tuple[Checkpoint, Hashable]]()
        for path, (model, file) in self._files.items():
            for key, tensor in file.tensors.items():
                name = (path.parent / tensor.name).as_posix() if path.parent.name else tensor.name
                self.tensors[model, key] = replace(tensor, name=name)
                self._sources[model, key] = file, key

    def read(self, key: Hashable, start: int, stop: int, out: Piece) -> None:
        file, file_key = self._sources[key]
        file.read(file_key, start, stop, out)

    def choose(self, include: Sequence[str], exclude: Sequence[str], dtype: str | None) -> None:
        self._dtype = dtype
        for path in self._other_files:
            if path.name == "config.json" and "quantization_config" in self._json(path):
                raise CheckpointError(
                    f"{self.path / path}: the model is quantized (quantization_config); average "
                    "the checkpoints before quantization, then quantize the average"
                )
        super().choose(include, exclude, dtype)

    def arrange(self) -> None:
        for key, tensor in self.tensors.items():
            file, file_key = self._sources[key]
            file.tensors[file_key] = replace(tensor, name=file.tensors[file_key].name)
        for _, file in self._files.values():
            file.arrange()
        self._gather()

    def write(self, outputs: Sequence[Path], averages: Averages) -> None:
        for path in [*self._files, *self._other_files, *self._indices]:
            with ExitStack() as stack:
                files = []
                for output in outputs:
                    (output / path).parent.mkdir(parents=True, exist_ok=True)
                    files.append(stack.enter_context((output / path).open("xb")))
                if path in self._files:
                    self._files[path][1].write(files, averages)
                    continue
                content = self._content(path)
                for file in files:
                    file.write(content)
                    sync(file)

    def each(self, averages: Averages) -> Iterator[tuple[str, Any]]:
        names: set[str] = set()
        for path, (_, file) in self._files.items():
            for name, tensor in file.each(averages):
                full_name = (path.parent / name).as_posix() if path.parent.name else name
                if full_name in names:
                    raise CheckpointError(
                        f"{self.path}: two files have a tensor {full_name!r}; write the average "
                        "to a folder instead"
                    )
                names.add(full_name)
                yield full_name, tensor

    def _content(self, path: Path) -> bytes:
        """Return the contents of a file, with the new dtype and size of the weights."""
        if self._dtype is None or not (path.name == "config.json" or path in self._indices):
            return (self.path / path).read_bytes()
        content = self._json(path)
        if path in self._indices:
            metadata = content.get("metadata")
            if isinstance(metadata, dict) and "total_size" in metadata:
                shards = [self._files[path.parent / s] for s in {*content["weight_map"].values()}]
                metadata["total_size"] += sum(
                    tensor.numbers * (tensor.mean_dtype.itemsize - tensor.number_dtype.itemsize)
                    for _, file in shards
                    for tensor in file.tensors.values()
                )
        else:
            _rename_dtypes(content, self._dtype)
        return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"

    def _json(self, path: Path) -> dict[str, Any]:
        with reading(f"{self.path / path}: not a JSON object"):
            return {**json.loads((self.path / path).read_text())}


def _rename_dtypes(config: dict[str, Any], dtype: str) -> None:
    """Change the dtype in a configuration and the configurations nested in it."""
    for key, value in config.items():
        if isinstance(value, dict):
            _rename_dtypes(value, dtype)
        elif key in ("dtype", "torch_dtype") and value in REAL_DTYPES:
            config[key] = dtype
