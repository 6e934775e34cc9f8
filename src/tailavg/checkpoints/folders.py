"""Folders that `save_pretrained` and trainers write: weights in shards, and what goes with them."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tailavg.checkpoints.safetensors import Safetensors
from tailavg.checkpoints.tensors import (
    PARTS,
    Averages,
    Checkpoint,
    CheckpointError,
    Piece,
    stamp_of,
)
from tailavg.checkpoints.torchfiles import TorchFile
from tailavg.core.files import whole_folder

__all__ = ["Folder"]

INDEX = re.compile(r"(.+)(\.safetensors|\.bin)\.index(\..+)?\.json")
SHARD = re.compile(r".+-\d{5}-of-\d{5}(\.safetensors|\.bin)")

STATE = re.compile(
    r"""\..* | optimizer.* | (scheduler | sampler | dl_state).*\.bin | training_args\..*
    | trainer_state\.json | (all|train|eval|test|predict)_results\.json | latest
    | zero_to_fp32\.py | events\.out\.tfevents.*
    | .*\.(pt | pth | ckpt | pkl | distcp | h5 | msgpack | onnx | gguf | lock | tmp)""",
    re.VERBOSE,
)
"""Files that an averaged model does without: states of training, and weights in other formats."""

STATES = re.compile(
    r"\..* | __pycache__ | runs | checkpoint-\d+ | (global_step|optimizer|tail_average|.*fsdp).*",
    re.VERBOSE,
)
"""And folders."""


class Folder(Checkpoint):
    """A folder of a model. The key of a tensor is the name of its file or index, and its own.

    Every `.safetensors` file is averaged, also in folders within it; where there is none, every
    `.bin` file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamps, self.tensors = {}, {}
        self._parts: dict[Path, Checkpoint] = {}  # files of weights, by their place in the folder
        self._keys: dict[Path, dict[Hashable, Hashable]] = {}  # ours, by those of each file
        self._indices: list[Path] = []
        self._others: list[Path] = []
        for folder, names in _walked(path):
            self._take(folder, names)
        if not self._parts:
            inside = sorted(path.glob("*/.metadata"))
            raise CheckpointError(
                f"{path}: expected model.safetensors, or shards with their index, or "
                "pytorch_model.bin, got none of them"
                + (f"; average its folder {inside[0].parent.name} instead" if inside else "")
            )
        self._gather()

    @property
    def described(self) -> str:
        return "a folder of a model"

    def whole(self, output: Path) -> AbstractContextManager[Path]:
        return whole_folder(output)

    def _take(self, folder: Path, names: list[str]) -> None:
        """Sort the files in a folder: weights, their indices, others."""
        kinds = ".safetensors", ".bin"
        kind = next((kind for kind in kinds if any(name.endswith(kind) for name in names)), "")
        models: dict[str, dict[str, list[str]]] = {}  # by name, the tensors in each file
        for name in names:
            match = INDEX.fullmatch(name)
            if match and match[2] == kind:
                models[match[1] + (match[3] or "")] = self._indexed(folder / name)
            elif not match and not name.endswith(kinds):
                self._others.append(folder / name)
        listed = {name for files in models.values() for name in files}
        for name in sorted({*names} - listed):
            model = name.removesuffix(kind)
            if not name.endswith(kinds) or (model != name and SHARD.fullmatch(name) and models):
                continue  # a shard of another time, which none loads
            if model == name:  # of the other kind: weights that are here twice
                if not name.startswith("pytorch_model") and name.removesuffix(".bin") not in models:
                    raise CheckpointError(
                        f"{self.path / folder / name}: expected all weights in {kind} files, as "
                        "the others here, got this one"
                    )
            elif model in models:
                raise CheckpointError(
                    f"{self.path / folder}: expected {name}, or an index and its shards, got both; "
                    "remove the older one"
                )
            elif SHARD.fullmatch(name):
                raise CheckpointError(
                    f"{self.path / folder / name}: expected an index beside a shard, as in "
                    f"model{kind}.index.json, got none"
                )
            else:
                models[model] = {name: []}
        for model, files in models.items():
            for name, expected in files.items():
                self._open(folder / name, str(folder / model), expected)

    def _indexed(self, place: Path) -> dict[str, list[str]]:
        """The shards in an index, each with its tensors."""
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
            got = error if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
            raise CheckpointError(
                f"{path}: expected an index, with a weight_map from tensors to files, got: {got}"
            ) from None
        return {shard: shards[shard] for shard in sorted(shards)}

    def _open(self, place: Path, model: str, expected: list[str]) -> None:
        """Open a file of weights, in which an index expects these tensors."""
        path = self.path / place
        kind = Safetensors if place.suffix == ".safetensors" else TorchFile
        self._parts[place] = part = kind(path)
        self.stamps |= part.stamps
        self._keys[place] = {key: (model, key) for key in part.tensors}
        names = {tensor.name for tensor in part.tensors.values()}
        for name in sorted(names.symmetric_difference(expected)) if expected else ():
            said = "the index has it elsewhere, or not at all" if name in names else "it is missing"
            raise CheckpointError(
                f"{path}: tensor {name!r}: expected what its index says, got another: {said}"
            )

    def _gather(self) -> None:
        """Take the tensors of all files together."""
        self.tensors = {}
        for place, part in self._parts.items():
            for key, tensor in part.tensors.items():
                name = (place.parent / tensor.name).as_posix() if place.parent.name else tensor.name
                self.tensors[self._keys[place][key]] = replace(tensor, name=name)
        self._where = {
            ours: (self._parts[place], key)
            for place, keys in self._keys.items()
            for key, ours in keys.items()
        }

    def read(self, key: Hashable, start: int, stop: int, out: Piece) -> None:
        part, its = self._where[key]
        part.read(its, start, stop, out)

    def choose(self, include: Sequence[str], exclude: Sequence[str], dtype: str | None) -> None:
        self._dtype = dtype
        for place in self._others:
            if place.name == "config.json" and "quantization_config" in self._json(place):
                raise CheckpointError(
                    f"{self.path / place}: expected a model that is not quantized, got one with a "
                    "quantization_config; average the checkpoints first, and quantize the average"
                )
        super().choose(include, exclude, dtype)

    def arrange(self) -> None:
        for key, tensor in self.tensors.items():
            part, its = self._where[key]
            part.tensors[its] = replace(tensor, name=part.tensors[its].name)
        for part in self._parts.values():
            part.arrange()
        self._gather()

    def sizes(self) -> tuple[int, int]:
        others = sum((self.path / place).stat().st_size for place in self._others)
        holds = max(part.sizes()[1] for part in self._parts.values())
        return super().sizes()[0] + others, holds

    def write(self, outputs: Sequence[Path], averages: Averages) -> None:
        for place in [*self._parts, *self._others, *self._indices]:
            for output in outputs:
                (output / place).parent.mkdir(parents=True, exist_ok=True)
        for place, part in self._parts.items():
            with ExitStack() as stack:
                files = [stack.enter_context((output / place).open("xb")) for output in outputs]
                part.write(files, averages)
        for place in [*self._others, *self._indices]:
            for output in outputs:
                with (self.path / place).open("rb") as source, (output / place).open("xb") as file:
                    changed = self._changed(place)
                    if changed is None:
                        shutil.copyfileobj(source, file)
                    else:
                        file.write(changed)
                    file.flush()
                    os.fsync(file.fileno())

    def _changed(self, place: Path) -> bytes | None:
        """A file that says which dtype the weights have, or their size, if that is another now."""
        if self._dtype is None or not (place.name == "config.json" or place in self._indices):
            return None
        found = self._json(place)
        if place in self._indices:
            if isinstance(metadata := found.get("metadata"), dict) and "total_size" in metadata:
                parts = [self._parts[place.parent / s] for s in {*found["weight_map"].values()}]
                grown = [
                    tensor.numbers * (tensor.to.itemsize - tensor.part.itemsize)
                    for part in parts
                    for tensor in part.tensors.values()
                ]
                metadata["total_size"] += sum(grown)
        else:
            _rename_dtypes(found, self._dtype)
        return json.dumps(found, indent=2, ensure_ascii=False).encode() + b"\n"

    def _json(self, place: Path) -> dict[str, Any]:
        path = self.path / place
        try:
            found = json.loads(path.read_text())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: expected JSON, got: {error}") from None
        if not isinstance(found, dict):
            raise CheckpointError(f"{path}: expected an object in JSON, got a {type(found)}")
        return found


def _walked(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """The folders in a folder, as places in it, with their files, without states of training."""
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not STATES.fullmatch(name))
        place = Path(folder).relative_to(path)
        yield place, sorted(name for name in names if not STATE.fullmatch(name))


def _rename_dtypes(config: Any, dtype: str) -> None:
    """Let a configuration, and those within it, name another dtype."""
    for key, value in config.items():
        if isinstance(value, dict):
            _rename_dtypes(value, dtype)
        elif key in ("dtype", "torch_dtype") and value in PARTS:
            config[key] = dtype
