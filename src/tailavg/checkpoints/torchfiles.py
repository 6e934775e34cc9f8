"""Files of `torch.save`: tensors and other plain data in nested dicts and lists."""

from __future__ import annotations

import sys
import threading
import zipfile
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from tailavg.checkpoints.checkpoint import (
    PARTS,
    Averages,
    Checkpoint,
    CheckpointError,
    Piece,
    Tensor,
    flowing,
    read_at,
    stamp_of,
)
from tailavg.io.state import FORMAT

__all__ = ["TorchFile"]

REMAP = 2**25
"""How many bytes to read from a mapped file before it is mapped again: they stay in memory."""


class TorchFile(Checkpoint):
    """A file of `torch.save`. The key of a tensor is the path to it, a tuple.

    What is averaged is the memory that a tensor covers, so strides must be the same in all files.
    Tensors that overlap are averaged once, under the key of the first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamps = {path: stamp_of(path)}
        self.tensors = {}
        self._lock = threading.Lock()
        self._groups: dict[Hashable, list[Any]] = {}  # tensors that overlap, by the first of them
        self._mapped = self._load(mmap=True)[2]
        self._seen = 0  # bytes in it
        if not self.tensors:
            raise CheckpointError(f"{path}: no tensors found in its dicts and lists")
        self._places = self._offsets()

    def _load(self, *, mmap: bool) -> tuple[Any, dict[Hashable, Any], dict[Hashable, Any]]:
        """Return the contents of the file, its tensors, and the memory to average, as bytes.

        With `mmap` numbers are read on access, and must not be written to.
        """
        import torch

        try:
            if not self.tensors:
                _check_records(self.path)
            tree = torch.load(self.path, map_location="cpu", mmap=mmap, weights_only=True)
            leaves: dict[Hashable, Any] = dict(self._leaves(tree))
            tensors, memory = self._described(leaves)
        except (CheckpointError, ModuleNotFoundError):
            raise
        except Exception as error:  # a damaged file can raise anything
            first = (str(error).strip() or type(error).__name__).partition("\n")[0]
            raise CheckpointError(
                f"{self.path}: not a complete file of tensors and plain data, as torch.save writes "
                f"it since torch 1.6: {first}"
            ) from error
        if not self.tensors:
            self._opened, self.tensors = tensors, dict(tensors)
        elif tensors != self._opened:
            raise CheckpointError(f"{self.path}: the file changed while it was read")
        return tree, leaves, memory

    def _offsets(self) -> dict[Hashable, int]:
        """Return where in the file the numbers are, if this version of torch can tell."""
        import torch

        tree = torch.load(self.path, map_location="meta", weights_only=True)
        offsets: dict[Hashable, int] = {}
        for key, leaf in self._leaves(tree):
            start = getattr(leaf.untyped_storage(), "_checkpoint_offset", None)
            if start is not None:
                offsets[key] = start + leaf.storage_offset() * leaf.element_size()
        return offsets

    def _leaves(
        self, tree: Any, path: tuple[Any, ...] = ()
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Return the tensors in dicts, lists and tuples, each with the path to it."""
        import torch

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
                            "has the average already: load_state_dict() it and save "
                            "averaged_state_dict(), or the module of an AveragedModel. To average "
                            "the weights of each step, save those alone to new files first"
                        )
                    yield leaf

    def _described(
        self, leaves: Mapping[Any, Any]
    ) -> tuple[dict[Hashable, Tensor], dict[Hashable, Any]]:
        """Return what is known about each tensor, and the memory to average."""
        import torch

        tensors: dict[Hashable, Tensor] = {}
        for key, leaf in leaves.items():
            name, dtype = _joined(key), str(leaf.dtype).removeprefix("torch.")
            if (
                type(leaf) not in (torch.Tensor, torch.nn.Parameter)
                or leaf.is_nested
                or leaf.layout != torch.strided
                or leaf.device.type != "cpu"
                or leaf.is_quantized
                or leaf.is_neg()
                or ((leaf.is_floating_point() or leaf.is_complex()) and dtype not in PARTS)
            ):
                raise CheckpointError(
                    f"{self.path}: tensor {name!r}: only dense tensors of numbers can be averaged, "
                    f"got a {'nested ' * leaf.is_nested}{type(leaf).__name__} ({leaf.layout}, "
                    f"{leaf.dtype}, {leaf.device})"
                )
            tensors[key] = Tensor(name, dtype, tuple(leaf.shape))

        memory: dict[Hashable, Any] = {}
        for start, stop, keys in _overlapping(leaves):
            owner = keys[0]
            names = [tensors[key].name for key in keys]
            dtypes = {tensors[key].dtype for key in keys}
            if PARTS.keys().isdisjoint(dtypes):
                continue
            if len(dtypes) > 1:
                raise CheckpointError(
                    f"{self.path}: tensors {', '.join(map(repr, names))} share memory, but have "
                    f"different dtypes: {', '.join(sorted(dtypes))}"
                )
            self._groups[owner] = keys
            storage = leaves[owner].untyped_storage()
            memory[owner] = torch.empty(0, dtype=torch.uint8).set_(
                storage, start - storage.data_ptr(), (stop - start,), (1,)
            )
            elements = (stop - start) // leaves[owner].element_size()
            for key in keys:
                tensor, leaf = tensors[key], leaves[key]
                if key is owner:
                    tensor = Tensor.averaged(tensor.name, tensor.dtype, tensor.shape, elements)
                where = tensor.memory
                if len(keys) > 1:
                    other = names[1] if key is owner else names[0]
                    where = f"tied to {other}, {leaf.data_ptr() - start} bytes from the first"
                if len(keys) > 1 or not leaf.is_contiguous():
                    where += f", with strides {leaf.stride()}"
                where += ", conjugated" * leaf.is_conj()
                tensors[key] = replace(tensor, memory=where)
        return tensors, memory

    def arrange(self) -> None:
        for owner, keys in self._groups.items():
            for key in keys:
                one, other = self.tensors[owner], self.tensors[key]
                if one.left != other.left:
                    raise CheckpointError(
                        f"{self.path}: tensors {one.name!r} and {other.name!r} share memory: "
                        "average both or neither"
                    )

    def read(self, key: Hashable, start: int, stop: int, out: Piece) -> None:
        size = self.tensors[key].part.itemsize
        if key in self._places:
            read_at(self.path, self._places[key] + start * size, out)
            return
        with self._lock:
            self._seen += len(out)
            if self._seen > REMAP:
                self._seen, self._mapped = 0, self._load(mmap=True)[2]
            memory = self._mapped[key]
        out[:] = memory[start * size : stop * size].numpy()

    def write(self, outputs: Sequence[BinaryIO], averages: Averages) -> None:
        trees = [self._load(mmap=False) for _ in outputs]
        for key, tensor in self.tensors.items():
            if not tensor.numbers:
                continue
            targets = [self._target(key, leaves, memory) for _, leaves, memory in trees]
            written = 0
            while written < tensor.numbers:
                means = next(averages)
                for target, mean in zip(targets, means, strict=True):
                    target[written : written + len(mean)] = mean
                written += len(means[0])
        for output, (tree, _, _) in zip(outputs, trees, strict=True):
            _save(tree, output)

    def _target(
        self, key: Hashable, leaves: Mapping[Hashable, Any], memory: Mapping[Hashable, Any]
    ) -> Piece:
        """Return the numbers of a tensor in memory, which is new if their dtype changes."""
        import torch

        tensor, first = self.tensors[key], leaves[key]
        bytes_ = memory[key]
        if tensor.to != tensor.part:
            new = torch.empty(tensor.numbers, dtype=getattr(torch, tensor.to.name))
            start = first.storage_offset()
            sharing = [leaves[other] for other in self._groups[key]]  # maybe one, several times
            places = [(leaf.stride(), leaf.storage_offset() - start) for leaf in sharing]
            for leaf, (strides, offset) in zip(sharing, places, strict=True):
                leaf.data = new.as_strided(leaf.shape, strides, offset)
            bytes_ = new.view(torch.uint8)
        numbers: Piece = bytes_.numpy().view(tensor.to)
        return numbers


def _check_records(path: Path) -> None:
    """Raise unless numbers stand in the file as they are in memory: torch maps them blindly."""
    with zipfile.ZipFile(path) as file:
        if any(record.compress_type for record in file.infolist()):
            raise ValueError("compressed records")
        for name in file.namelist():
            if name.endswith("/byteorder") and file.read(name).decode() != sys.byteorder:
                raise ValueError(f"numbers that are not in {sys.byteorder}-endian order")


def _joined(path: Sequence[Any]) -> str:
    """Return a path as messages show it: model/layer.weight."""
    return "/".join(
        key if isinstance(key, str) and "/" not in key and not key.isdigit() else repr(key)
        for key in path
    )


def _overlapping(
    leaves: Mapping[Any, Any],
) -> Iterator[tuple[int, int, list[tuple[Any, ...]]]]:
    """Return the stretches of memory that tensors cover: start, stop, keys of the tensors."""
    spans = []
    for key, leaf in leaves.items():
        if leaf.numel():
            steps = zip(leaf.shape, leaf.stride(), strict=True)
            reach = 1 + sum((size - 1) * stride for size, stride in steps)
            start = leaf.data_ptr()
            spans.append((start, _joined(key), start + reach * leaf.element_size(), key))
    spans.sort(key=lambda span: span[:2])  # and by name, since the order in files may differ
    keys: list[tuple[Any, ...]] = []
    begin = end = 0
    for start, _, stop, key in spans:
        if start >= end:
            if keys:
                yield begin, end, keys
            begin, end, keys = start, stop, []
        end = max(end, stop)
        keys.append(key)
    if keys:
        yield begin, end, keys


def _save(tree: Any, output: BinaryIO) -> None:
    """Call `torch.save`. If a write fails, raise its error, and not that of torch."""
    import torch

    failures: list[OSError] = []

    with flowing(output) as write:

        class Stream:
            def write(self, data: Any) -> int:
                try:
                    write(data)
                except OSError as error:
                    failures.append(error)
                    raise
                return len(data)

            def flush(self) -> None:
                pass

        try:
            torch.save(tree, Stream())  # type: ignore[arg-type]
        except RuntimeError:
            if failures:
                raise failures[0] from None
            raise
