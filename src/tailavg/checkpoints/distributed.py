"""Folders of `torch.distributed.checkpoint`, through torch's own reader and writer.

No process group and no model is needed. Torch reads a stored chunk at once. One folder may have
other chunks than the next.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from tailavg.checkpoints.checkpoint import (
    PARTS,
    Averages,
    Checkpoint,
    CheckpointError,
    Piece,
    Tensor,
    stamp_of,
)
from tailavg.io.files import whole_folder

__all__ = ["Distributed"]


class Distributed(Checkpoint):
    """A folder of `torch.distributed.checkpoint`. A key is a tensor's name and a chunk's place.

    Its metadata is a pickle, which torch's reader loads.
    """

    kind = "a folder of torch.distributed.checkpoint"
    together = False

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        self.path = path
        metadata = path / ".metadata"
        self.stamps, self.tensors = {metadata: stamp_of(metadata)}, {}
        self._reader = FileSystemReader(path)
        try:
            self._metadata: Any = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            stored = self._metadata.storage_data
            # in the order of the files
            self._items = sorted(stored, key=lambda i: (stored[i].relative_path, stored[i].offset))
            files = {path / stored[item].relative_path for item in self._items}
            self._chunks: dict[Any, Any] = {
                (name, tuple(chunk.offsets)): chunk
                for name, entry in self._metadata.state_dict_metadata.items()
                for chunk in getattr(entry, "chunks", ())
            }
            for item in self._items:
                self._describe(item)
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle can raise anything
            raise CheckpointError(
                f"{metadata}: not the metadata of torch.distributed.checkpoint: "
                f"{type(error).__name__}: {error}"
            ) from error
        self.stamps |= {file: stamp_of(file) for file in sorted(files)}
        if not self.tensors:
            raise CheckpointError(f"{path}: no tensors found")

    def _describe(self, item: Any) -> None:
        entry = self._metadata.state_dict_metadata[item.fqn]
        if not hasattr(entry, "properties"):
            self.tensors[_key(item)] = Tensor(item.fqn, "bytes", ())
            return
        dtype, shape = str(entry.properties.dtype).removeprefix("torch."), tuple(entry.size)
        self.check_dtype(item.fqn, dtype)
        tensor = Tensor(item.fqn, dtype, shape)
        if dtype in PARTS:
            elements = math.prod(self._chunks[_key(item)].sizes)
            tensor = Tensor.averaged(item.fqn, dtype, shape, elements)
        self.tensors[_key(item)] = tensor

    def replacing(self, output: Path) -> AbstractContextManager[Path]:
        return whole_folder(output)

    def compared(self) -> Mapping[Hashable, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors.values()}

    def check_like(self, newest: Checkpoint) -> None:
        super().check_like(newest)
        assert isinstance(newest, Distributed)
        self._chunks = newest._chunks  # `read` is called with keys of the newest

    def arrange(self) -> None:
        """Cut chunks along their first axis, so that pieces fit into a quarter of the checkpoint.

        Torch reads all of a chunk for each piece of it, so there are eight pieces at most.
        """
        room = self._room() - self._largest()
        for key, tensor in self.tensors.items():
            if tensor.numbers:
                rows = tensor.numbers // max(1, self._axis(key)[1])
                fits = max(room // (HELD * tensor.part.itemsize), -(-tensor.numbers // 8))
                step = max(1, -(-fits // rows)) * rows
                cuts = (*range(0, tensor.numbers, step), tensor.numbers)
                self.tensors[key] = dataclasses.replace(tensor, cuts=cuts)

    def _room(self) -> int:
        total = sum(t.numbers * t.part.itemsize for t in self.tensors.values())
        return max(2**26, total // 4)

    def _largest(self) -> int:
        """Return the bytes of the largest chunk, which torch reads at once."""
        return max((t.numbers * t.part.itemsize for t in self.tensors.values()), default=0)

    def threads(self, most: int) -> int:
        """Return how many threads have room for a chunk each."""
        return max(1, min(most, self._room() // max(1, (1 + HELD) * self._largest())))

    def _axis(self, key: Hashable) -> tuple[int, int]:
        """Return the first axis of a chunk that can be cut, and its size."""
        sizes = self._chunks[key].sizes
        axis = next((axis for axis, size in enumerate(sizes) if size > 1), 0)
        return axis, sizes[axis] if sizes else 1

    def read(self, key: Any, start: int, stop: int, out: Piece) -> None:
        import torch
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        chunk = self._chunks[key]
        offsets, sizes = list(chunk.offsets), list(chunk.sizes)
        if sizes:
            axis, size = self._axis(key)
            rows = math.prod(sizes) // max(1, size) * _parts(self._dtype(key))
            offsets[axis] += start // rows
            sizes[axis] = (stop - start) // rows
        region = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        self._load(key[0], region, torch.from_numpy(out).view(self._dtype(key)).view(sizes))

    def _dtype(self, key: Any) -> Any:
        return self._metadata.state_dict_metadata[key[0]].properties.dtype

    def _load(self, name: str, region: Any, target: Any) -> None:
        """Read a region of a tensor."""
        from torch.distributed.checkpoint.planner import LoadPlan
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        entry = self._metadata.state_dict_metadata[name]
        items = create_read_items_for_chunk_list(name, entry, [region])
        covered = sum(math.prod(item.lengths) for item in items)
        if covered != target.numel():
            raise CheckpointError(
                f"{self.path}: tensor {name!r}: its chunks hold only {covered} of "
                f"{target.numel()} numbers; save the checkpoint again"
            )
        self._read_data(name, LoadPlan(items), _Into(target))

    def _bytes(self, item: Any) -> io.BytesIO:
        """Read what is not a tensor, as it is stored."""
        import torch
        from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

        into, none = _Into(None), torch.Size((0,))
        kind = LoadItemType.BYTE_IO
        self._read_data(item.fqn, LoadPlan([ReadItem(kind, item, none, item, none, none)]), into)
        return into.data

    def _read_data(self, name: str, plan: Any, into: Any) -> None:
        try:
            self._reader.read_data(plan, into).wait()
        except OSError:
            raise
        except Exception as error:  # a damaged file can raise anything
            first = (str(error).strip() or type(error).__name__).partition("\n")[0]
            raise CheckpointError(
                f"{self.path}: tensor {name!r}: torch cannot read its chunks: {first}"
            ) from error

    def write(self, outputs: Sequence[Path], averages: Averages) -> None:
        import torch
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
        from torch.distributed.checkpoint.planner import (
            SavePlan,
            TensorWriteData,
            WriteItem,
            WriteItemType,
        )

        class Writer(FileSystemWriter):
            def storage_meta(self) -> StorageMeta:  # without the temporary name
                return StorageMeta(save_id=self.save_id)

        (output,) = outputs
        kinds = dict(self._metadata.state_dict_metadata)
        for tensor in self.tensors.values():
            if tensor.numbers and tensor.to != tensor.part:
                entry = kinds[tensor.name]
                dtype = getattr(torch, tensor.to.name)
                kinds[tensor.name] = dataclasses.replace(
                    entry, properties=dataclasses.replace(entry.properties, dtype=dtype)
                )

        def to_write(item: Any) -> WriteItem:
            entry = kinds[item.fqn]
            if not hasattr(entry, "properties"):
                return WriteItem(item, WriteItemType.BYTE_IO)
            data = TensorWriteData(self._chunks[_key(item)], entry.properties, entry.size)
            return WriteItem(item, WriteItemType.SHARD, tensor_data=data)

        def size_of(key: Any) -> int:
            return int(math.prod(self._chunks[key].sizes) * kinds[key[0]].properties.dtype.itemsize)

        # torch's writer keeps all tensors until the file ends, so all of them share one memory
        largest = max((size_of(key) for key in self._chunks), default=0)
        room = torch.empty(largest, dtype=torch.uint8)

        def resolve(write: WriteItem) -> Any:
            key = _key(write.index)
            if key[1] is None:
                return self._bytes(write.index)
            tensor, chunk = self.tensors[key], self._chunks[key]
            found: Any = torch.empty(0, dtype=kinds[key[0]].properties.dtype)
            storage: Any = room.untyped_storage()[: size_of(key)]
            found.set_(storage, 0, chunk.sizes)
            if not tensor.numbers:
                self._load(key[0], chunk, found)
                return found
            unwritten = found.view(-1).view(torch.uint8)
            while len(unwritten):
                (mean,) = next(averages)
                unwritten[: mean.nbytes] = torch.from_numpy(mean.view(np.uint8))
                unwritten = unwritten[mean.nbytes :]
            return found

        # with one thread and no copies ahead, it calls `resolve` in this order
        writer = Writer(output, per_thread_copy_ahead=0)
        writer.set_up_storage_writer(True)
        stored = self._metadata.storage_data
        by_file = groupby(self._items, key=lambda item: stored[item].relative_path)
        plans = [SavePlan([to_write(item) for item in items]) for _, items in by_file]
        plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
        results = [writer.write_data(plan, _From(resolve)).wait() for plan in plans]  # type: ignore[arg-type]
        writer.finish(Metadata(kinds, self._metadata.planner_data), results)


HELD = 8
"""Bytes in memory for a byte of a piece in float32: two copies, two arrays in float64, the mean."""


class _Into:
    """A planner whose only target is a tensor, or bytes."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.data = io.BytesIO()

    def resolve_tensor(self, item: Any) -> Any:
        found = self._target
        for axis, (start, size) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            found = found.narrow(axis, start, size)
        return found

    def commit_tensor(self, item: Any, tensor: Any) -> None:
        pass

    def load_bytes(self, item: Any, data: io.BytesIO) -> None:
        self.data = data


class _From:
    """A planner that knows its data."""

    def __init__(self, resolve: Callable[[Any], Any]) -> None:
        self.resolve_data = resolve


def _key(item: Any) -> tuple[str, tuple[int, ...] | None]:
    return item.fqn, None if item.offset is None else tuple(item.offset)


def _parts(dtype: Any) -> int:
    """Return how many real numbers an element has."""
    return 2 if dtype.is_complex else 1
