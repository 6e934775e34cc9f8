"""Folders of `torch.distributed.checkpoint`, also those of Megatron-LM (`torch_dist`).

A `.metadata` file says where the chunks of each tensor are: each is an archive of `torch.save`
somewhere in a `.distcp` file. Pieces are read straight from the bytes of the stored tensors, so the
checkpoints may be sharded into different chunks. Neither a process group nor a model is needed.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
import shutil
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.utils import _create_file_view

from tailavg.checkpoints.checkpoint import (
    PIECE,
    Averages,
    Checkpoint,
    CheckpointError,
    Piece,
    Tensor,
    read_at,
    reading,
    stamp_of,
)
from tailavg.checkpoints.metadata import read_metadata
from tailavg.checkpoints.runs import ITERATION, TRACKER
from tailavg.checkpoints.torchfiles import save
from tailavg.io.files import sync, whole_file, whole_folder

__all__ = ["Distributed"]

OPTIMIZER = re.compile(r"(.*\.)?optim(izers?)?(_states?)?\..+")
"""The names of optimizer states, such as `optimizer.state.exp_avg.decoder.weight`."""

FILE_SIZE = 2**28
"""The bytes after which a file of the output ends, so that several processes can write."""

Key = tuple[str, tuple[int, ...] | None]
"""The name of an item and, if it is the chunk of a tensor, the offsets of the chunk."""
Places = list[tuple[int, str, int, int]]
"""Where items are stored: the number of the item in the newest, the file, start and length."""


class Distributed(Checkpoint):
    """A folder of `torch.distributed.checkpoint`. The key of a chunk is a `Key`."""

    kind = "a folder of torch.distributed.checkpoint"

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path / ".metadata"
        self.stamps = {file: stamp_of(file)}
        with reading(f"{file}: not the metadata of torch.distributed.checkpoint"):
            self._metadata: Any = read_metadata(file)
            self._stored: dict[Any, _StorageInfo] = self._metadata.storage_data
            place = {item: (info.relative_path, info.offset) for item, info in self._stored.items()}
            self._items = {_key(item): item for item in sorted(place, key=lambda i: place[i])}
            self._chunks: dict[Hashable, Any] = {
                (name, tuple(chunk.offsets)): chunk
                for name, entry in self._metadata.state_dict_metadata.items()
                for chunk in getattr(entry, "chunks", ())
            }
            self.tensors = {key: self._tensor(key) for key in self._items}
        self._check_files()
        self._layout = self._chunks  # of the newest checkpoint, whose keys are read
        self._places: dict[Hashable, tuple[int, tuple[int, ...]]] = {}
        self._by_name: dict[str, list[Any]] = {}
        for key in self._items:
            self._by_name.setdefault(key[0], []).append(key)
        if not self.tensors:
            raise CheckpointError(f"{path}: no tensors found")

    def _check_files(self) -> None:
        """Raise if a file is missing or too short. Keep the stamps of all files."""
        for info in self._stored.values():
            file = self.path / info.relative_path
            if file.name != info.relative_path or getattr(info, "transform_descriptors", None):
                raise CheckpointError(
                    f"{file}: only files directly in the folder, stored without compression, can "
                    "be read; save the checkpoint again"
                )
            if file not in self.stamps:
                if not file.is_file():
                    raise CheckpointError(f"{file}: the file is missing; copy the folder again")
                self.stamps[file] = stamp_of(file)
            if file.stat().st_size < info.offset + info.length:
                raise CheckpointError(f"{file}: the file is truncated; copy the folder again")
        self._siblings = [
            file
            for file in sorted(self.path.iterdir())
            if not file.name.startswith(".") and file.suffix != ".distcp"
        ]
        self.stamps |= {file: stamp_of(file) for file in self._siblings}

    def _tensor(self, key: Key) -> Tensor:
        name, entry = key[0], self._metadata.state_dict_metadata[key[0]]
        if not hasattr(entry, "properties"):
            return Tensor(name, "bytes", ())
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        if name.endswith("_extra_state"):  # of Transformer Engine
            return Tensor(name, dtype, tuple(entry.size))
        elements = math.prod(self._chunks[key].sizes)
        return self.describe(name, dtype, tuple(entry.size), elements)

    def choose(self, include: Sequence[str], exclude: Sequence[str], dtype: str | None) -> None:
        patterns = (*include, *exclude)
        names = {tensor.name for tensor in self.tensors.values()}
        self._left_out = {
            name
            for name in names
            if OPTIMIZER.fullmatch(name) and not any(fnmatchcase(name, each) for each in patterns)
        }
        super().choose(include, exclude, dtype)
        self._leave_out(self._left_out)
        if not self.tensors:
            raise CheckpointError(
                f"{self.path}: holds only optimizer states; choose them with --include"
            )
        self.left_out = len(self._left_out)

    def _leave_out(self, names: set[str]) -> None:
        self.tensors = {k: each for k, each in self.tensors.items() if each.name not in names}

    def check_like(self, newest: Checkpoint) -> None:
        if isinstance(newest, Distributed):
            kept = {tensor.name for tensor in newest.tensors.values()}
            names = {tensor.name for tensor in self.tensors.values()} - kept
            self._leave_out({name for name in names if OPTIMIZER.fullmatch(name)})
            self._layout = newest._chunks
        super().check_like(newest)

    def compared(self) -> Mapping[Hashable, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors.values()}

    def arrange(self) -> None:
        """Sort chunks by name, and cut them into boxes whose numbers are next to each other."""
        self.tensors = dict(sorted(self.tensors.items()))
        self._dtypes: dict[str, Any] = {}
        for key, tensor in self.tensors.items():
            if key not in self._chunks:
                continue
            dtype = self._metadata.state_dict_metadata[tensor.name].properties.dtype
            if tensor.mean_dtype != tensor.number_dtype:
                dtype = getattr(torch, tensor.mean_dtype.name)
            self._dtypes[tensor.name] = dtype
            if tensor.numbers:
                sizes, strides = self._chunks[key].sizes, self._place(key)[1]
                in_order = torch.empty_strided(sizes, strides, device="meta").is_contiguous()
                cuts = _cuts(sizes, tensor.numbers) if in_order else (0, tensor.numbers)
                tensor = dataclasses.replace(tensor, cuts=cuts)
            self.tensors[key] = tensor

    def read(self, key: Any, start: int, stop: int, out: Piece) -> None:
        name, chunk = key[0], self._layout[key]
        dtype = self._metadata.state_dict_metadata[name].properties.dtype
        size = dtype.itemsize
        numbers = 2 if dtype.is_complex else 1
        low = np.array(np.unravel_index(start // numbers, tuple(chunk.sizes)), int)
        high = np.array(np.unravel_index(stop // numbers - 1, tuple(chunk.sizes)), int) + 1
        target = out.view("c16" if size == 16 else f"u{size}").reshape(high - low)
        begin = np.array(chunk.offsets, int) + low
        read = sum(self._copy(other, begin, target) for other in self._by_name[name])
        if read < target.size:
            raise CheckpointError(
                f"{self.path}: tensor {name!r}: its chunks hold only {read} of {target.size} "
                "numbers; save the checkpoint again"
            )

    def _copy(self, key: Any, begin: Any, target: Piece) -> int:
        """Copy what a stored chunk has of a box that begins at `begin`, and return how much."""
        chunk = self._chunks[key]
        offsets = np.array(chunk.offsets, int)
        low = np.maximum(begin, offsets)
        high = np.minimum(begin + target.shape, offsets + np.array(chunk.sizes, int))
        if (low >= high).any():
            return 0
        position, strides = self._place(key)
        first, last = (low - offsets) @ strides, (high - 1 - offsets) @ strides
        box: Any = (*map(slice, low - begin, high - begin), ...)
        inside = target[box]
        memory = np.empty(int(last - first) + 1, target.dtype)
        stored = as_strided(memory, inside.shape, np.multiply(strides, memory.itemsize))
        is_same = stored.flags.c_contiguous and inside.flags.c_contiguous
        file = self.path / self._stored[self._items[key]].relative_path
        out = inside.reshape(-1) if is_same else memory
        read_at(file, position + int(first) * memory.itemsize, out)
        if not is_same:
            inside[...] = stored
        return int(inside.size)

    def _place(self, key: Any) -> tuple[int, tuple[int, ...]]:
        """Return the position of a chunk's first number in its file, and the chunk's strides."""
        if key not in self._places:
            info, chunk = self._stored[self._items[key]], self._chunks[key]
            dtype = self._metadata.state_dict_metadata[key[0]].properties.dtype
            path = self.path / info.relative_path
            with reading(f"{path}: tensor {key[0]!r} is damaged"), path.open("rb") as file:
                view: Any = _create_file_view(file, info.offset, info.length)
                tensor = torch.load(view, map_location="meta", weights_only=True)
                view.seek(0)
                archive: Any = torch._C.PyTorchFileReader(view)
                start = archive.get_record_offset("data/0")
                if (tensor.shape, tensor.dtype) != (chunk.sizes, dtype) or tensor.is_conj():
                    raise ValueError(f"expected {chunk.sizes} {dtype}, got {tensor}")
                start += tensor.storage_offset() * dtype.itemsize
                if start + tensor.untyped_storage().nbytes() > info.length:
                    raise ValueError("its numbers are not complete")
            self._places[key] = info.offset + start, tensor.stride()
        return self._places[key]

    def each(self, averages: Averages) -> Iterator[tuple[str, Any]]:
        entries = self._metadata.state_dict_metadata
        keys: list[Any] = [key for key in self.tensors if key in self._chunks]
        for name, chunks in groupby(keys, key=lambda key: key[0]):
            target = torch.empty(entries[name].size, dtype=self._dtypes[name])
            for key in chunks:
                values = self._averaged_chunks(key, averages, 1)[0]
                _region(target, self._chunks[key]).copy_(values)
            yield name, target

    def _averaged_chunks(self, key: Any, averages: Averages, outputs: int) -> list[Any]:
        """Return a chunk of the average for each output."""
        tensor, sizes = self.tensors[key], self._chunks[key].sizes
        chunks = [torch.empty(sizes, dtype=self._dtypes[key[0]]) for _ in range(outputs)]
        memories = [chunk.view(-1).view(torch.uint8).numpy() for chunk in chunks]
        if not tensor.numbers and memories[0].size:
            self.read(key, 0, math.prod(sizes) * (1 + chunks[0].is_complex()), memories[0])
        start = 0
        for means in tensor.means(averages):
            for memory, mean in zip(memories, means, strict=True):
                memory[start : start + mean.nbytes] = mean.view(np.uint8)
            start += means[0].nbytes
        return chunks

    def share(self, rank: int, size: int) -> None:
        """Keep the tensors that this process writes, in the order of the files.

        The files do not depend on the number of processes.
        """
        files: dict[str, list[Any]] = {}
        sizes: dict[str, int] = {}
        for key in self._items:
            if key in self.tensors:
                info = self._stored[self._items[key]]
                name, part = info.relative_path, sizes.get(info.relative_path, 0) // FILE_SIZE
                sizes[name] = sizes.get(name, 0) + info.length
                file = f"{Path(name).stem}-{part}{Path(name).suffix}" if part else name
                files.setdefault(file, []).append(key)
        work = {
            file: sum(self._stored[self._items[key]].length for key in keys)
            for file, keys in files.items()
        }
        loads = [0] * size
        owners: dict[str, int] = {}
        for file in sorted(work, key=lambda file: (-work[file], file)):
            owners[file] = loads.index(min(loads))
            loads[owners[file]] += work[file]
        self._files = {file: keys for file, keys in files.items() if owners[file] == rank}
        self.tensors = {key: self.tensors[key] for keys in self._files.values() for key in keys}

    def write(self, outputs: Sequence[Any], averages: Averages) -> list[Places]:
        """Write the files of this process, and return where each output stores each item."""
        numbers = {key: number for number, key in enumerate(self._items)}
        places: list[Places] = [[] for _ in outputs]
        for name, keys in self._files.items():
            with ExitStack() as stack:
                files = [
                    stack.enter_context((Path(output) / name).open("xb")) for output in outputs
                ]
                for key in keys:
                    starts = [file.tell() for file in files]
                    if self.tensors[key].numbers:
                        chunks = self._averaged_chunks(key, averages, len(files))
                        for file, chunk in zip(files, chunks, strict=True):
                            save(chunk, file)
                    else:
                        self._copy_item(key, files)
                    for file, start, of_output in zip(files, starts, places, strict=True):
                        of_output.append((numbers[key], name, start, file.tell() - start))
                for file in files:
                    sync(file)
        return places

    def _copy_item(self, key: Key, files: Sequence[BinaryIO]) -> None:
        """Copy the stored bytes of an item that is not averaged."""
        info = self._stored[self._items[key]]
        end = info.offset + info.length
        for start in range(info.offset, end, 2**20):
            piece = np.empty(min(2**20, end - start), np.uint8)
            read_at(self.path / info.relative_path, start, piece)
            for file in files:
                file.write(piece.data)

    def finish(self, outputs: Sequence[Any], parts: Sequence[list[Places]]) -> None:
        """Write what makes the output loadable: `.metadata`, and the newest's other files."""
        items = list(self._items.values())
        for output, places in zip(outputs, zip(*parts, strict=True), strict=True):
            stored = {
                items[number]: _StorageInfo(sys.intern(name), start, length)
                for number, name, start, length in sorted(p for part in places for p in part)
            }
            entries = {
                name: self._entry(name, entry)
                for name, entry in self._kept(self._metadata.state_dict_metadata).items()
            }
            planner_data = self._kept(self._metadata.planner_data)
            metadata: Any = Metadata(entries, planner_data, stored, StorageMeta())
            metadata.version = getattr(self._metadata, "version", None)
            if hasattr(self._metadata, "mcore_data"):  # of Megatron before 0.16
                metadata.mcore_data = self._kept(self._metadata.mcore_data)
            for sibling in self._siblings:
                copy = shutil.copytree if sibling.is_dir() else shutil.copy2
                copy(sibling, Path(output) / sibling.name)
            with (Path(output) / ".metadata").open("xb") as file:
                pickle.dump(metadata, file)
                sync(file)

    def _kept(self, values: Any) -> Any:
        """Return the values of the names that are not left out, if there are values."""
        return values and {key: values[key] for key in values if key not in self._left_out}

    def _entry(self, name: str, entry: Any) -> Any:
        """Return the metadata of an item, with the dtype of the averages."""
        if not hasattr(entry, "properties"):
            return entry
        properties = dataclasses.replace(entry.properties, dtype=self._dtypes[name])
        return dataclasses.replace(entry, properties=properties)

    @contextmanager
    def replacing(self, output: Path) -> Iterator[Path]:
        """Open an output. That of Megatron is a folder of a run: an iteration and its tracker."""
        if not (ITERATION.fullmatch(self.path.name) and (self.path / "metadata.json").is_file()):
            with whole_folder(output) as folder:
                yield folder
        elif not ITERATION.fullmatch(output.name):
            with whole_folder(output) as folder:
                iteration = folder / self.path.name
                iteration.mkdir()
                yield iteration
                with whole_file(folder / TRACKER) as file:
                    file.write(_iteration(iteration))
        else:
            tracker = output.parent / TRACKER
            content = _iteration(output)
            if tracker.exists() and tracker.read_bytes().strip() != content:
                raise CheckpointError(
                    f"{tracker}: belongs to other checkpoints; write to another folder"
                )
            with whole_folder(output) as folder:
                yield folder
            with whole_file(tracker) as file:
                file.write(content)


def _iteration(folder: Path) -> bytes:
    """Return what the tracker says if this folder is the newest."""
    return str(int(folder.name.removeprefix("iter_"))).encode()


def _key(item: Any) -> Key:
    return item.fqn, None if item.offset is None else tuple(item.offset)


def _cuts(sizes: Sequence[int], numbers: int) -> tuple[int, ...]:
    """Cut a chunk into boxes of about `PIECE` numbers, which are next to each other."""
    inside = numbers  # in one step along the axis that is cut
    block = numbers
    for size in sizes:
        block, inside = inside, inside // size
        if inside <= PIECE:
            break
    step = inside * max(1, PIECE // max(1, inside))
    starts = range(0, numbers, block)
    return *(cut for start in starts for cut in range(start, start + block, step)), numbers


def _region(target: Any, chunk: ChunkStorageMetadata) -> Any:
    """Return the view of a tensor that a chunk fills."""
    for axis, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        target = target.narrow(axis, start, size)
    return target
