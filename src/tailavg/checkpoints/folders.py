"""Folders that `save_pretrained` and trainers write: weights, maybe in shards, and other files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tailavg.checkpoints.checkpoint import (
    PARTS,
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
"""Files that an averaged model does without: states of training, and weights in other formats."""

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
    """A folder of a model. The key of a tensor is the name of its model, and its key in a file.

    Every `.safetensors` file is averaged, also in folders within it; where there is none, every
    `.bin` file. Shards of one index are one model. Paths of files are relative to the folder.
    """

    kind = "a folder of a model"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamps = {}
        self._files: dict[Path, tuple[str, Checkpoint]] = {}  # a model and a file of it, by path
        self._indices: list[Path] = []
        self._others: list[Path] = []
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not TRAINING_FOLDERS.fullmatch(name))
            names = sorted(name for name in names if not TRAINING_FILES.fullmatch(name))
            self._open_folder(Path(folder).relative_to(path), names)
        if not self._files:
            inside = sorted(path.glob("*/.metadata"))
            raise CheckpointError(
                f"{path}: no model.safetensors, no shards with an index and no pytorch_model.bin"
                + (f"; average its folder {inside[0].parent.name} instead" if inside else "")
            )
        self._gather()

    def _open_folder(self, folder: Path, names: list[str]) -> None:
        """Open the weights in a folder, and list its other files."""
        kinds = ".safetensors", ".bin"
        kind = next((kind for kind in kinds if any(name.endswith(kind) for name in names)), "")
        models: dict[str, list[str]] = {}  # the files of each
        for name in names:
            match = INDEX.fullmatch(name)
            if match and match[2] == kind:
                models[match[1] + (match[3] or "")] = self._shards(folder / name)
            elif not match and not name.endswith(kinds):
                self._others.append(folder / name)
        shards = {name for files in models.values() for name in files}
        for name in names:
            if name in shards or not name.endswith(kinds):
                continue
            path, model = self.path / folder / name, name.removesuffix(kind)
            if not name.endswith(kind):
                if not name.startswith("pytorch_model") and name.removesuffix(".bin") not in models:
                    raise CheckpointError(
                        f"{path}: the other weights here are {kind} files; convert it or remove it"
                    )
            elif SHARD.fullmatch(name):
                if not shards:  # or it is of another time
                    raise CheckpointError(
                        f"{path}: a shard without its index, such as model{kind}.index.json"
                    )
            elif model in models:
                raise CheckpointError(
                    f"{path.parent}: {name} and an index with shards; remove the older of the two"
                )
            else:
                models[model] = [name]
        for model, files in models.items():
            for name in files:
                file = open_file(self.path / folder / name)
                self._files[folder / name] = str(folder / model), file
                self.stamps |= file.stamps

    def _shards(self, index: Path) -> list[str]:
        """Return the files that an index names."""
        path = self.path / index
        self.stamps[path] = stamp_of(path)
        self._indices.append(index)
        shards = self._json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise CheckpointError(f"{path}: not an index with a weight_map from tensors to files")
        for name, shard in shards.items():
            if shard != Path(str(shard)).name or not (path.parent / shard).is_file():
                raise CheckpointError(
                    f"{path}: no file {shard!r} beside it, where {name!r} should be"
                )
        return sorted({*shards.values()})

    def _gather(self) -> None:
        """Take the tensors of all files together."""
        self.tensors, self._sources = {}, dict[Hashable, tuple[Checkpoint, Hashable]]()
        for path, (model, file) in self._files.items():
            for key, tensor in file.tensors.items():
                name = (path.parent / tensor.name).as_posix() if path.parent.name else tensor.name
                self.tensors[model, key] = replace(tensor, name=name)
                self._sources[model, key] = file, key

    def read(self, key: Hashable, start: int, stop: int, out: Piece) -> None:
        file, inner = self._sources[key]
        file.read(inner, start, stop, out)

    def choose(self, include: Sequence[str], exclude: Sequence[str], dtype: str | None) -> None:
        self._dtype = dtype
        for other in self._others:
            if other.name == "config.json" and "quantization_config" in self._json(other):
                raise CheckpointError(
                    f"{self.path / other}: the model is quantized, as quantization_config says; "
                    "average the checkpoints first, and quantize the average"
                )
        super().choose(include, exclude, dtype)

    def arrange(self) -> None:
        for key, tensor in self.tensors.items():
            file, inner = self._sources[key]
            file.tensors[inner] = replace(tensor, name=file.tensors[inner].name)
        for _, file in self._files.values():
            file.arrange()
        self._gather()

    def write(self, outputs: Sequence[Path], averages: Averages) -> None:
        for path in [*self._files, *self._others, *self._indices]:
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

    def averaged(self, averages: Averages) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for path, (_, file) in self._files.items():
            for name, tensor in file.averaged(averages).items():
                whole_name = (path.parent / name).as_posix() if path.parent.name else name
                if whole_name in state:
                    raise CheckpointError(
                        f"{self.path}: two files have a tensor {whole_name!r}; write the average "
                        "to a folder instead"
                    )
                state[whole_name] = tensor
        return state

    def _content(self, path: Path) -> bytes:
        """Return what a file says, and anew if it tells the dtype or size of the weights."""
        if self._dtype is None or not (path.name == "config.json" or path in self._indices):
            return (self.path / path).read_bytes()
        content = self._json(path)
        if path in self._indices:
            metadata = content.get("metadata")
            if isinstance(metadata, dict) and "total_size" in metadata:
                shards = [self._files[path.parent / s] for s in {*content["weight_map"].values()}]
                metadata["total_size"] += sum(
                    tensor.numbers * (tensor.to.itemsize - tensor.part.itemsize)
                    for _, file in shards
                    for tensor in file.tensors.values()
                )
        else:
            _rename_dtypes(content, self._dtype)
        return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"

    def _json(self, path: Path) -> dict[str, Any]:
        with reading(f"{self.path / path}: not an object in JSON"):
            return {**json.loads((self.path / path).read_text())}


def _rename_dtypes(config: dict[str, Any], dtype: str) -> None:
    """Let a configuration, and those within it, name another dtype."""
    for key, value in config.items():
        if isinstance(value, dict):
            _rename_dtypes(value, dtype)
        elif key in ("dtype", "torch_dtype") and value in PARTS:
            config[key] = dtype
