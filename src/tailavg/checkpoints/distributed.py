"""Folders of `torch.distributed.checkpoint`, read and written by torch's own reader and writer.

Neither a process group nor a model is needed. Torch can only read whole chunks. The checkpoints may
be sharded into different chunks.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tailavg.checkpoints.checkpoint import (
    Averages,
    Checkpoint,
    CheckpointError,
    Piece,
    Tensor,
    reading,
    stamp_of,
)

__all__ = ["Distributed"]

MEMORY_PER_BYTE = 8
"""Bytes in memory per byte of a float32 piece: two copies, two float64 arrays, and the mean."""


class Distributed(Checkpoint):
    """A folder of `torch.distributed.checkpoint`.

    The key of a chunk is the tensor's name and the chunk's offsets. The metadata is a pickle, which
    torch's reader loads.
    """

    kind = "a folder of torch.distributed.checkpoint"
    together = False
    threads = 1  # each thread would hold a chunk in memory

    def __init__(self, path: Path) -> None:
        self.path = path
        metadata = path / ".metadata"
        self.stamps = {metadata: stamp_of(metadata)}
        self._reader = FileSystemReader(path)
        with reading(f"{metadata}: not the metadata of torch.distributed.checkpoint"):
            self._metadata: Any = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            stored = self._metadata.storage_data
            self._items = sorted(stored, key=lambda i: (stored[i].relative_path, stored[i].offset))
            files = {path / stored[item].relative_path for item in self._items}
            self._chunks: dict[Any, Any] = {
                (name, tuple(chunk.offsets)): chunk
                for name, entry in self._metadata.state_dict_metadata.items()
                for chunk in getattr(entry, "chunks", ())
            }
            self.tensors = {_key(item): self._tensor(item) for item in self._items}
        self.stamps |= {file: stamp_of(file) for file in sorted(files)}
        if not self.tensors:
            raise CheckpointError(f"{path}: no tensors found")

    def _tensor(self, item: Any) -> Tensor:
        entry = self._metadata.state_dict_metadata[item.fqn]
        if not hasattr(entry, "properties"):
            return Tensor(item.fqn, "bytes", ())
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        elements = math.prod(self._chunks[_key(item)].sizes)
        return self.describe(item.fqn, dtype, tuple(entry.size), elements)

    def compared(self) -> Mapping[Hashable, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors.values()}

    def check_like(self, newest: Checkpoint) -> None:
        super().check_like(newest)
        assert isinstance(newest, Distributed)
        self._chunks = newest._chunks  # `read` is called with keys of the newest

    def arrange(self) -> None:
        """Cut large chunks along an axis, so that a piece needs little memory.

        That is at most a quarter of the checkpoint's size, if eight pieces per chunk are enough.
        More would be slow, since torch reads the whole chunk for each piece.
        """
        tensors = self.tensors.values()
        total = sum(tensor.numbers * tensor.number_dtype.itemsize for tensor in tensors)
        room = max(2**26, total // 4)
        for key, tensor in self.tensors.items():
            if tensor.numbers:
                sizes = self._chunks[key].sizes
                rows = sizes[_axis(sizes)] if sizes else 1
                memory = MEMORY_PER_BYTE * tensor.numbers * tensor.number_dtype.itemsize
                pieces = min(8, math.ceil(memory / room))
                step = math.ceil(rows / pieces) * (tensor.numbers // rows)
                cuts = (*range(0, tensor.numbers, step), tensor.numbers)
                self.tensors[key] = dataclasses.replace(tensor, cuts=cuts)

    def read(self, key: Any, start: int, stop: int, out: Piece) -> None:
        dtype = self._metadata.state_dict_metadata[key[0]].properties.dtype
        offsets, sizes = list(self._chunks[key].offsets), list(self._chunks[key].sizes)
        if sizes:
            axis = _axis(sizes)
            row = math.prod(sizes) // sizes[axis] * (2 if dtype.is_complex else 1)
            offsets[axis] += start // row
            sizes[axis] = (stop - start) // row
        region = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        self._load(key[0], region, torch.from_numpy(out).view(dtype).view(sizes))

    def _load(self, name: str, region: Any, target: Any) -> None:
        """Read a region of a tensor."""
        entry = self._metadata.state_dict_metadata[name]
        items = create_read_items_for_chunk_list(name, entry, [region])
        covered = sum(math.prod(item.lengths) for item in items)
        if covered != target.numel():
            raise CheckpointError(
                f"{self.path}: tensor {name!r}: its chunks hold only {covered} of "
                f"{target.numel()} numbers; save the checkpoint again"
            )
        self._read_items(name, items, _Loader(target))

    def _bytes(self, item: Any) -> io.BytesIO:
        """Read the stored bytes of an item that is not a tensor."""
        loader, none = _Loader(None), torch.Size((0,))
        read = planner.ReadItem(planner.LoadItemType.BYTE_IO, item, none, item, none, none)
        self._read_items(item.fqn, [read], loader)
        return loader.data

    def _read_items(self, name: str, items: list[Any], loader: Any) -> None:
        with reading(f"{self.path}: tensor {name!r}: torch cannot read its chunks"):
            self._reader.read_data(planner.LoadPlan(items), loader).wait()

    def averaged(self, averages: Averages) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for key, tensor in self.tensors.items():
            if key not in self._chunks:  # not a tensor
                continue
            chunk, entry = self._chunks[key], self._metadata.state_dict_metadata[tensor.name]
            changed = tensor.numbers and tensor.mean_dtype != tensor.number_dtype
            dtype = getattr(torch, tensor.mean_dtype.name) if changed else entry.properties.dtype
            values = torch.empty(chunk.sizes, dtype=dtype)
            if not tensor.numbers:
                self._load(tensor.name, chunk, values)
            memory, start = values.view(-1).view(torch.uint8), 0
            for (mean,) in tensor.means(averages):
                memory[start : start + mean.nbytes] = torch.from_numpy(mean.view(np.uint8))
                start += mean.nbytes
            target = state.setdefault(tensor.name, torch.empty(entry.size, dtype=dtype))
            _region(target, chunk.offsets, chunk.sizes).copy_(values)
        return state

    def write(self, outputs: Sequence[Path], averages: Averages) -> None:
        (output,) = outputs
        entries = dict(self._metadata.state_dict_metadata)
        for tensor in self.tensors.values():
            if tensor.numbers and tensor.mean_dtype != tensor.number_dtype:
                entry = entries[tensor.name]
                dtype = getattr(torch, tensor.mean_dtype.name)
                entries[tensor.name] = dataclasses.replace(
                    entry, properties=dataclasses.replace(entry.properties, dtype=dtype)
                )

        def to_write(item: Any) -> planner.WriteItem:
            entry = entries[item.fqn]
            if not hasattr(entry, "properties"):
                return planner.WriteItem(item, planner.WriteItemType.BYTE_IO)
            data = planner.TensorWriteData(self._chunks[_key(item)], entry.properties, entry.size)
            return planner.WriteItem(item, planner.WriteItemType.SHARD, tensor_data=data)

        def size_of(key: Any) -> int:
            dtype = entries[key[0]].properties.dtype
            return int(math.prod(self._chunks[key].sizes) * dtype.itemsize)

        # torch's writer keeps all tensors of a file, so all of them share one buffer
        largest = max((size_of(key) for key in self._chunks), default=0)
        buffer = torch.empty(largest, dtype=torch.uint8)

        def resolve(write: planner.WriteItem) -> Any:
            key = _key(write.index)
            if key[1] is None:
                return self._bytes(write.index)
            tensor, chunk = self.tensors[key], self._chunks[key]
            values: Any = torch.empty(0, dtype=entries[key[0]].properties.dtype)
            storage: Any = buffer.untyped_storage()[: size_of(key)]
            values.set_(storage, 0, chunk.sizes)
            if not tensor.numbers:
                self._load(key[0], chunk, values)
            start = 0
            for (mean,) in tensor.means(averages):
                buffer[start : start + mean.nbytes] = torch.from_numpy(mean.view(np.uint8))
                start += mean.nbytes
            return values

        # with one thread and no copies ahead, the writer calls `resolve` in the order of the plans
        writer = _Writer(output, per_thread_copy_ahead=0)
        writer.set_up_storage_writer(True)
        stored = self._metadata.storage_data
        by_file = groupby(self._items, key=lambda item: stored[item].relative_path)
        plans = [planner.SavePlan([to_write(item) for item in items]) for _, items in by_file]
        plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
        source: Any = SimpleNamespace(resolve_data=resolve)
        results = [writer.write_data(plan, source).wait() for plan in plans]
        writer.finish(Metadata(entries, self._metadata.planner_data), results)


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        # torch would also store the path of the folder, which is temporary
        return StorageMeta(save_id=self.save_id)


class _Loader:
    """A load planner for torch's reader, with a tensor or bytes as its only target."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.data = io.BytesIO()

    def resolve_tensor(self, item: Any) -> Any:
        return _region(self._target, item.dest_offsets, item.lengths)

    def commit_tensor(self, item: Any, tensor: Any) -> None:
        pass

    def load_bytes(self, item: Any, data: io.BytesIO) -> None:
        self.data = data


def _region(target: Any, offsets: Sequence[int], sizes: Sequence[int]) -> Any:
    """Return a view of a region of a tensor."""
    for axis, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        target = target.narrow(axis, start, size)
    return target


def _key(item: Any) -> tuple[str, tuple[int, ...] | None]:
    return item.fqn, None if item.offset is None else tuple(item.offset)


def _axis(sizes: Sequence[int]) -> int:
    """Return the first axis of a chunk that can be cut."""
    return next((axis for axis, size in enumerate(sizes) if size > 1), 0)
