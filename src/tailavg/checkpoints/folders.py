"""Folders that `save_pretrained` and trainers write: weights, maybe in shards, and other files."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tailavg.checkpoints.checkpoint import (
    PARTS,
    Averages,
    Checkpoint,
    CheckpointError,
    Piece,
    stamp_of,
)
from tailavg.checkpoints.safetensors import Safetensors
from tailavg.checkpoints.torchfiles import TorchFile
from tailavg.io.files import sync, whole_folder

__all__ = ["Folder"]

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


class Folder(Checkpoint):
    """A folder of a model. The key of a tensor is the name of its model, and its key in a file.

    Every `.safetensors` file is averaged, also in folders within it; where there is none, every
    `.bin` file. Shards of one index are one model. Places are paths within the folder.
    """

    kind = "a folder of a model"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamps = {}
        self._files: dict[Path, tuple[str, Checkpoint]] = {}  # a model and a file of it, by place
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

    def replacing(self, output: Path) -> AbstractContextManager[Path]:
        return whole_folder(output)

    def _open_folder(self, folder: Path, names: list[str]) -> None:
        """Open the weights in a folder, and list its other files."""
        kinds = ".safetensors", ".bin"
        kind = next((kind for kind in kinds if any(name.endswith(kind) for name in names)), "")
        models: dict[str, dict[str, list[str]]] = {}  # by model and file, the tensors in an index
        for name in names:
            match = INDEX.fullmatch(name)
            if match and match[2] == kind:
                models[match[1] + (match[3] or "")] = self._indexed(folder / name)
            elif not match and not name.endswith(kinds):
                self._others.append(folder / name)
        listed = {name for files in models.values() for name in files}
        for name in names:
            if name in listed or not name.endswith(kinds):
                continue
            place, model = self.path / folder / name, name.removesuffix(kind)
            if not name.endswith(kind):
                if not name.startswith("pytorch_model") and name.removesuffix(".bin") not in models:
                    raise CheckpointError(
                        f"{place}: the other weights here are {kind} files; convert it or remove it"
                    )
            elif SHARD.fullmatch(name):
                if not listed:  # or it is of another time
                    raise CheckpointError(
                        f"{place}: a shard without its index, such as model{kind}.index.json"
                    )
            elif model in models:
                raise CheckpointError(
                    f"{place.parent}: {name} and an index with shards; remove the older of the two"
                )
            else:
                models[model] = {name: []}
        for model, files in models.items():
            for name, tensors in files.items():
                self._open(folder / name, str(folder / model), tensors)

    def _indexed(self, place: Path) -> dict[str, list[str]]:
        """Return the shards in an index, each with its tensors."""
        path = self.path / place
        self.stamps[path] = stamp_of(path)
        self._indices.append(place)
        shards: dict[str, list[str]] = {}
        try:
            for name, shard in json.loads(path.read_text())["weight_map"].items():
                if shard != Path(shard).name or not (path.parent / shard).is_file():
                    raise ValueError(f"no file {shard!r} beside it, where {name!r} should be")
                shards.setdefault(shard, []).append(name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path}: not an index with a weight_map from tensors to files: "
                f"{type(error).__name__}: {error}"
            ) from None
        return {shard: shards[shard] for shard in sorted(shards)}

    def _open(self, place: Path, model: str, indexed: list[str]) -> None:
        """Open a file of weights, in which an index, if there is one, has these tensors."""
        file = (Safetensors if place.suffix == ".safetensors" else TorchFile)(self.path / place)
        self._files[place] = model, file
        self.stamps |= file.stamps
        names = {tensor.name for tensor in file.tensors.values()}
        for name in sorted(names.symmetric_difference(indexed)) if indexed else ():
            where = "here, but not" if name in names else "not here, but"
            raise CheckpointError(f"{file.path}: tensor {name!r} is {where} in the index")

    def _gather(self) -> None:
        """Take the tensors of all files together."""
        self.tensors, self._where = {}, dict[Hashable, tuple[Checkpoint, Hashable]]()
        for place, (model, file) in self._files.items():
            for key, tensor in file.tensors.items():
                name = (place.parent / tensor.name).as_posix() if place.parent.name else tensor.name
                self.tensors[model, key] = replace(tensor, name=name)
                self._where[model, key] = file, key

    def read(self, key: Hashable, start: int, stop: int, out: Piece) -> None:
        file, inner = self._where[key]
        file.read(inner, start, stop, out)

    def choose(self, include: Sequence[str], exclude: Sequence[str], dtype: str | None) -> None:
        self._dtype = dtype
        for place in self._others:
            if place.name == "config.json" and "quantization_config" in self._json(place):
                raise CheckpointError(
                    f"{self.path / place}: the model is quantized, as quantization_config says; "
                    "average the checkpoints first, and quantize the average"
                )
        super().choose(include, exclude, dtype)

    def arrange(self) -> None:
        for key, tensor in self.tensors.items():
            file, inner = self._where[key]
            file.tensors[inner] = replace(tensor, name=file.tensors[inner].name)
        for _, file in self._files.values():
            file.arrange()
        self._gather()

    def write(self, outputs: Sequence[Path], averages: Averages) -> None:
        copied = {place: self._changed(place) for place in [*self._others, *self._indices]}
        for place in [*self._files, *copied]:
            for output in outputs:
                (output / place).parent.mkdir(parents=True, exist_ok=True)
        for place, (_, file) in self._files.items():
            with ExitStack() as stack:
                new = [stack.enter_context((output / place).open("xb")) for output in outputs]
                file.write(new, averages)
        for place, changed in copied.items():
            for output in outputs:
                with (self.path / place).open("rb") as source, (output / place).open("xb") as copy:
                    if changed is None:
                        shutil.copyfileobj(source, copy)
                    else:
                        copy.write(changed)
                    sync(copy)

    def _changed(self, place: Path) -> bytes | None:
        """Return a file that tells the dtype or size of the weights anew, if it does."""
        if self._dtype is None or not (place.name == "config.json" or place in self._indices):
            return None
        found = self._json(place)
        if place in self._indices:
            if isinstance(metadata := found.get("metadata"), dict) and "total_size" in metadata:
                files = [self._files[place.parent / s] for s in {*found["weight_map"].values()}]
                metadata["total_size"] += sum(
                    tensor.numbers * (tensor.to.itemsize - tensor.part.itemsize)
                    for _, file in files
                    for tensor in file.tensors.values()
                )
        else:
            _rename_dtypes(found, self._dtype)
        return json.dumps(found, indent=2, ensure_ascii=False).encode() + b"\n"

    def _json(self, place: Path) -> dict[str, Any]:
        path = self.path / place
        try:
            found = json.loads(path.read_text())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not JSON: {error}") from None
        if not isinstance(found, dict):
            raise CheckpointError(f"{path}: not an object in JSON, but a {type(found).__name__}")
        return found


def _rename_dtypes(config: dict[str, Any], dtype: str) -> None:
    """Let a configuration, and those within it, name another dtype."""
    for key, value in config.items():
        if isinstance(value, dict):
            _rename_dtypes(value, dtype)
        elif key in ("dtype", "torch_dtype") and value in PARTS:
            config[key] = dtype
