"""Files of `torch.save`: tensors and other plain data in nested dicts and lists."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from tailavg.checkpoints.checkpoint import (
    REAL_DTYPES,
    Averages,
    Checkpoint,
    CheckpointError,
    Piece,
    Tensor,
    read_at,
    reading,
    stamp_of,
)
from tailavg.io.files import sync
from tailavg.io.state import FORMAT

__all__ = ["TorchFile", "save"]

Leaves = dict[Any, Any]
"""The tensors in a file, by their path in its dicts and lists."""


class TorchFile(Checkpoint):
    """A file of `torch.save`. The key of a tensor is its path in the dicts and lists, a tuple.

    Tensors are averaged in the order of their memory, so all files must have the same strides.
    Overlapping tensors are averaged once, under the key of the first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamps = {path: stamp_of(path)}
        self.tensors = {}
        self._tied: dict[Hashable, list[Hashable]] = {}  # overlapping tensors, by the first
        self._mapped = self._load(mmap=True)[1]
        if not self._mapped:
            raise CheckpointError(f"{path}: no tensors found in its dicts and lists")
        self._describe(self._mapped)
        self._positions = self._offsets()

    def _load(self, **options: Any) -> tuple[Any, Leaves]:
        """Return the contents of the file, and its tensors."""
        with reading(
            f"{self.path}: not a complete file of tensors and plain data saved by torch.save "
            "(torch 1.6 or later)"
        ):
            _check_records(self.path)
            tree = torch.load(self.path, **{"map_location": "cpu", "weights_only": True, **options})
            return tree, dict(self._leaves(tree))

    def _offsets(self) -> dict[Hashable, int]:
        """Return the positions of tensors in the file, if this version of torch provides them."""
        offsets: dict[Hashable, int] = {}
        for key, leaf in self._load(map_location="meta")[1].items():
            start = getattr(leaf.untyped_storage(), "_checkpoint_offset", None)
            if start is not None:
                offsets[key] = start + leaf.storage_offset() * leaf.element_size()
        return offsets

    def _leaves(
        self, tree: Any, path: tuple[Any, ...] = ()
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Yield the tensors in dicts, lists and tuples, each with its path."""
        if isinstance(tree, torch.Tensor):
            yield path, tree
        elif isinstance(tree, Mapping | list | tuple):
            is_state = isinstance(tree, Mapping) and tree.get("format") == FORMAT
            for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
                for leaf in self._leaves(value, (*path, key)):
                    if is_state:
                        raise CheckpointError(
                            f"{self.path}: {repr(_joined(path)) if path else 'this'} is the state "
                            "of a tailavg average, which cannot be averaged again. The newest file "
                            "already holds the average: load it with load_state_dict() and save "
                            "averaged_state_dict(), or the module of an AveragedModel. To average "
                            "the weights of each step instead, first save only the weights to new "
                            "files"
                        )
                    yield leaf

    def _describe(self, leaves: Leaves) -> None:
        """Describe each tensor, and find tensors that overlap."""
        for key, leaf in leaves.items():
            name, dtype = _joined(key), str(leaf.dtype).removeprefix("torch.")
            if not _is_dense(leaf, dtype):
                raise CheckpointError(
                    f"{self.path}: tensor {name!r}: only dense tensors of numbers can be averaged, "
                    f"got a {'nested ' * leaf.is_nested}{type(leaf).__name__} ({leaf.layout}, "
                    f"{leaf.dtype}, {leaf.device})"
                )
            self.tensors[key] = Tensor(name, dtype, tuple(leaf.shape))
        for keys, size in _overlapping(leaves):
            owner = keys[0]
            tensors, first = [self.tensors[key] for key in keys], leaves[owner]
            dtypes = {tensor.dtype for tensor in tensors}
            if REAL_DTYPES.keys().isdisjoint(dtypes):
                continue
            if len(dtypes) > 1:
                raise CheckpointError(
                    f"{self.path}: tensors {', '.join(repr(tensor.name) for tensor in tensors)} "
                    "share memory but have different dtypes, which cannot be averaged: "
                    f"{', '.join(sorted(dtypes))}"
                )
            self._tied[owner] = keys
            for key, tensor in zip(keys, tensors, strict=True):
                leaf = leaves[key]
                if key is owner:
                    elements = size // leaf.element_size()
                    tensor = Tensor.averaged(tensor.name, tensor.dtype, tensor.shape, elements)
                memory = f"{leaf.data_ptr() - first.data_ptr()} bytes from {tensors[0].name}"
                if not leaf.is_contiguous():
                    memory += f", with strides {leaf.stride()}"
                memory += ", conjugated" * leaf.is_conj()
                self.tensors[key] = replace(tensor, memory=memory)

    def arrange(self) -> None:
        for owner, keys in self._tied.items():
            first = self.tensors[owner]
            for tensor in (self.tensors[key] for key in keys):
                if first.left != tensor.left:
                    raise CheckpointError(
                        f"{self.path}: tensors {first.name!r} and {tensor.name!r} share memory: "
                        "include or exclude both"
                    )

    def read(self, key: Hashable, start: int, stop: int, out: Piece) -> None:
        tensor = self.tensors[key]
        if key in self._positions:
            read_at(self.path, self._positions[key] + start * tensor.number_dtype.itemsize, out)
        else:
            out.view(tensor.number_dtype)[:] = _numbers(self._mapped[key], tensor)[start:stop]

    def each(self, averages: Averages) -> Iterator[tuple[str, Any]]:
        tree = self.averaged(averages)
        if not isinstance(tree, Mapping):
            raise CheckpointError(f"{self.path}: holds a {type(tree).__name__}, not a dict by name")
        yield from tree.items()

    def averaged(self, averages: Averages) -> Any:
        (tree,) = self._averaged(1, averages)
        return tree

    def _averaged(self, number: int, averages: Averages) -> list[Any]:
        """Return the contents of the file for each output, with its averages."""
        loaded = [self._load() for _ in range(number)]
        self.check_unchanged()
        for key, tensor in self.tensors.items():
            if not tensor.numbers:
                continue
            targets = [self._target(key, leaves) for _, leaves in loaded]
            written = 0
            for means in tensor.means(averages):
                for target, mean in zip(targets, means, strict=True):
                    target[written : written + len(mean)] = mean
                written += len(means[0])
        return [tree for tree, _ in loaded]

    def write(self, outputs: Sequence[BinaryIO], averages: Averages) -> None:
        for output, tree in zip(outputs, self._averaged(len(outputs), averages), strict=True):
            save(tree, output)
            sync(output)

    def _target(self, key: Hashable, leaves: Leaves) -> Piece:
        """Return the numbers of a tensor in memory; allocate new memory if their dtype changes."""
        tensor, first = self.tensors[key], leaves[key]
        if tensor.mean_dtype == tensor.number_dtype:
            return _numbers(first, tensor)
        new = torch.empty(tensor.numbers, dtype=getattr(torch, tensor.mean_dtype.name))
        start = first.storage_offset()
        tied = [leaves[tied_key] for tied_key in self._tied[key]]  # may repeat the same tensor
        views = [(leaf.stride(), leaf.storage_offset() - start) for leaf in tied]
        for leaf, (strides, offset) in zip(tied, views, strict=True):
            leaf.data = new.as_strided(leaf.shape, strides, offset)
        return _numbers(new, replace(tensor, number_dtype=tensor.mean_dtype))


def save(tree: Any, output: BinaryIO) -> None:
    """Call `torch.save`, and raise the error of the write, which torch hides."""
    try:
        torch.save(tree, output)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _numbers(leaf: Any, tensor: Tensor) -> Piece:
    """Return the numbers in the memory of a torch tensor, from its first element on."""
    start = leaf.storage_offset() * leaf.element_size()
    size = tensor.numbers * tensor.number_dtype.itemsize
    memory = torch.empty(0, dtype=torch.uint8)
    numbers: Piece = memory.set_(leaf.untyped_storage(), start, (size,), (1,)).numpy()
    return numbers.view(tensor.number_dtype)


def _is_dense(leaf: Any, dtype: str) -> bool:
    """Return whether a tensor is dense, on the CPU, and of a dtype that is averaged or copied."""
    return (
        type(leaf) in (torch.Tensor, torch.nn.Parameter)
        and not leaf.is_nested
        and leaf.layout == torch.strided
        and leaf.device.type == "cpu"
        and not leaf.is_quantized
        and not leaf.is_neg()
        and (dtype in REAL_DTYPES or not (leaf.is_floating_point() or leaf.is_complex()))
    )


def _check_records(path: Path) -> None:
    """Raise if numbers are compressed or in another byte order: torch maps them unchecked."""
    with zipfile.ZipFile(path) as file:
        if any(record.compress_type for record in file.infolist()):
            raise ValueError("the records are compressed")
        for name in file.namelist():
            if name.endswith("/byteorder") and file.read(name).decode() != sys.byteorder:
                raise ValueError(f"the byte order is not {sys.byteorder}-endian")


def _joined(path: Sequence[Any]) -> str:
    """Return a path as text for messages, such as model/layer.weight."""
    return "/".join(
        key if isinstance(key, str) and "/" not in key and not key.isdigit() else repr(key)
        for key in path
    )


def _overlapping(leaves: Leaves) -> Iterator[tuple[list[Hashable], int]]:
    """Yield the keys of each group of overlapping tensors, and the bytes that the group covers."""
    spans = []
    for key, leaf in leaves.items():
        if leaf.numel():
            steps = zip(leaf.shape, leaf.stride(), strict=True)
            reach = 1 + sum((size - 1) * stride for size, stride in steps)
            start = leaf.data_ptr()
            spans.append((start, _joined(key), start + reach * leaf.element_size(), key))
    spans.sort(key=lambda span: span[:2])  # ties by name, since the order in files may differ
    keys: list[Hashable] = []
    begin = end = 0
    for start, _, stop, key in spans:
        if keys and start >= end:
            yield keys, end - begin
            keys = []
        if not keys:
            begin = start
        keys.append(key)
        end = max(end, stop)
    if keys:
        yield keys, end - begin
