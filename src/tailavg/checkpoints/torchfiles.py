"""Files of `torch.save`: tensors and other plain data in nested dicts and lists."""

from __future__ import annotations

import sys
import threading
import zipfile
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from tailavg.checkpoints.tensors import (
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
from tailavg.core.state import FORMAT

__all__ = ["TorchFile"]

REMAP = 2**25
"""How many bytes to look at in a mapped file before it is mapped anew."""


class TorchFile(Checkpoint):
    """A file of `torch.save`. The key of a tensor is the path to it, a tuple.

    Tensors that overlap in memory, with others or with themselves, are averaged once, as the
    stretch of memory that they cover.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamps = {path: stamp_of(path)}
        self.tensors = {}
        self._lock = threading.Lock()
        self._last: tuple[Hashable, Any] | None = None
        self._mapped: dict[Hashable, Any] | None = None
        self._seen = 0
        self._sharing: dict[Hashable, Hashable] = {}  # tensors that overlap, and the first of them
        memory = self._load(mmap=True)[2]
        if not self.tensors:
            raise CheckpointError(f"{path}: expected tensors in dicts or lists, got none")
        self._places = self._placed(memory)

    def _load(self, *, mmap: bool) -> tuple[Any, dict[Hashable, Any], dict[Hashable, Any]]:
        """The contents of the file, its tensors, and what to average: those, or shared memory.

        With `mmap` numbers are read on access, and must not be written to.
        """
        import torch

        try:
            if not self.tensors:
                with zipfile.ZipFile(self.path) as file:
                    if any(record.compress_type for record in file.infolist()):
                        raise ValueError("compressed records")  # torch would map them as they are
                    for record in file.namelist():
                        if record.endswith("/byteorder"):
                            order = file.read(record).decode()
                            if order != sys.byteorder:
                                raise ValueError(f"numbers in {order}-endian order")
            tree = torch.load(self.path, map_location="cpu", mmap=mmap, weights_only=True)
            leaves: dict[Hashable, Any] = dict(self._leaves(tree))
            tensors, memory = self._described(leaves)
        except (CheckpointError, ModuleNotFoundError):
            raise
        except Exception as error:  # a damaged file can raise anything
            first = (str(error).strip() or type(error).__name__).partition("\n")[0]
            raise CheckpointError(
                f"{self.path}: expected a whole file of tensors and plain data, as torch.save "
                f"writes it since torch 1.6, got: {first}"
            ) from error
        if not self.tensors:
            self._found, self.tensors = tensors, dict(tensors)
        elif tensors != self._found:
            raise CheckpointError(f"{self.path}: the file changed while it was read")
        return tree, leaves, memory

    def _placed(self, memory: Mapping[Hashable, Any]) -> dict[Hashable, int]:
        """Where in the file the numbers are, if they stand there in order and torch can tell."""
        import torch

        tree = torch.load(self.path, map_location="meta", weights_only=True)
        places: dict[Hashable, int] = {}
        for key, leaf in self._leaves(tree):
            start = getattr(leaf.untyped_storage(), "_checkpoint_offset", None)
            if start is not None and key in memory and _in_order(memory[key]):
                places[key] = start + leaf.storage_offset() * leaf.element_size()
        return places

    def _leaves(
        self, tree: Any, path: tuple[Any, ...] = ()
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """The tensors in dicts, lists and tuples, each with the path to it."""
        import torch

        if isinstance(tree, torch.Tensor):
            yield path, tree
        elif isinstance(tree, Mapping | list | tuple):
            is_state = isinstance(tree, Mapping) and tree.get("format") == FORMAT
            for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
                for leaf in self._leaves(value, (*path, key)):
                    if is_state:
                        raise CheckpointError(
                            f"{self.path}: {repr(_shown(path)) if path else 'this'} is the state "
                            "of a tailavg average, which cannot be averaged again. The newest file "
                            "has the average already: load_state_dict() it and save "
                            "averaged_state_dict(), or the module of an AveragedModel. To average "
                            "the weights of each step, save those alone to new files first"
                        )
                    yield leaf

    def _described(
        self, leaves: Mapping[Any, Any]
    ) -> tuple[dict[Hashable, Tensor], dict[Hashable, Any]]:
        """What is known about each tensor, and what to average."""
        import torch

        tensors: dict[Hashable, Tensor] = {}
        for key, leaf in leaves.items():
            name, dtype = _shown(key), str(leaf.dtype).removeprefix("torch.")
            if (
                type(leaf) not in (torch.Tensor, torch.nn.Parameter)
                or leaf.is_nested
                or leaf.layout != torch.strided
                or leaf.device.type != "cpu"
                or leaf.is_quantized
                or ((leaf.is_floating_point() or leaf.is_complex()) and dtype not in PARTS)
            ):
                raise CheckpointError(
                    f"{self.path}: tensor {name!r}: expected a dense tensor of numbers, got a "
                    f"{'nested ' * leaf.is_nested}{type(leaf).__name__} ({leaf.layout}, "
                    f"{leaf.dtype}, {leaf.device}), which cannot be averaged"
                )
            tensors[key] = Tensor(name, dtype, tuple(leaf.shape))

        memory: dict[Hashable, Any] = {}
        for start, stop, keys in _overlapping(leaves):
            owner, *others = keys
            first = leaves[owner]
            dtypes = sorted({tensors[key].dtype for key in keys})
            if PARTS.keys().isdisjoint(dtypes):
                continue
            if len(dtypes) > 1:
                raise CheckpointError(
                    f"{self.path}: tensors {', '.join(repr(tensors[key].name) for key in keys)}: "
                    f"expected one dtype, as they share memory, got {', '.join(dtypes)}"
                )
            memory[owner] = first
            if others or _overlaps_itself(first):
                storage = first.untyped_storage()
                memory[owner] = torch.empty(0, dtype=torch.uint8).set_(
                    storage, start - storage.data_ptr(), (stop - start,), (1,)
                )
                for key in keys:
                    leaf = leaves[key]
                    self._sharing[key] = owner
                    other = others[0] if others and key is owner else owner
                    tensors[key] = replace(
                        tensors[key],
                        memory=f"tied to {tensors[other].name}, {leaf.data_ptr() - start} bytes "
                        f"from the first, with strides {leaf.stride()}"
                        + ", conjugated" * leaf.is_conj()
                        + ", negated" * leaf.is_neg(),
                    )
            tensor = tensors[owner]
            tensors[owner] = replace(
                Tensor.averaged(
                    tensor.name, tensor.dtype, tensor.shape, dtypes[0], memory[owner].nbytes
                ),
                memory=tensor.memory,
            )
        return tensors, memory

    def arrange(self) -> None:
        for key, owner in self._sharing.items():
            one, other = self.tensors[owner], self.tensors[key]
            if one.left != other.left:
                raise CheckpointError(
                    f"{self.path}: tensors {one.name!r} and {other.name!r} share memory: expected "
                    "both or neither to be averaged, got one"
                )

    def read(self, key: Hashable, start: int, stop: int, out: Piece) -> None:
        tensor = self.tensors[key]
        size = tensor.part.itemsize
        if key in self._places:
            read_at(self.path, self._places[key] + start * size, out, tensor.name)
            return
        with self._lock:
            if self._last is None or self._last[0] != key:
                if self._mapped is None or self._seen > REMAP:  # what was seen stays in memory
                    self._seen, self._mapped = 0, self._load(mmap=True)[2]
                self._last = key, _flat(self._mapped[key]).numpy()
                self._seen += tensor.numbers * size
            flat = self._last[1]
        out[:] = flat[start * size : stop * size]

    def sizes(self) -> tuple[int, int]:
        return (size := super().sizes()[0]), size

    def write(self, outputs: Sequence[BinaryIO], averages: Averages) -> None:
        trees = [self._load(mmap=False) for _ in outputs]
        for key, tensor in self.tensors.items():
            if not tensor.numbers:
                continue
            flats = [self._emptied(key, leaves, memory) for _, leaves, memory in trees]
            written = 0
            while written < tensor.numbers:
                means = next(averages)
                stop = written + len(means[0])
                for (_, flat), mean in zip(flats, means, strict=True):
                    flat.numpy().view(tensor.to)[written:stop] = mean
                written = stop
            for target, flat in flats:
                if flat.data_ptr() != target.data_ptr():
                    target.detach().copy_(flat.view(target.dtype).view(target.shape))
        for output, (tree, _, _) in zip(outputs, trees, strict=True):
            _save(tree, output)

    def _emptied(
        self, key: Hashable, leaves: Mapping[Hashable, Any], memory: dict[Hashable, Any]
    ) -> tuple[Any, Any]:
        """Where averages go: the memory of a tensor, and that in order; of another dtype, if so."""
        import torch

        tensor, target = self.tensors[key], memory[key]
        if tensor.to != tensor.part:
            first = leaves[key]
            dtype = getattr(torch, tensor.to.name)
            sharing = [other for other, owner in self._sharing.items() if owner == key]
            if sharing:
                target = torch.empty(tensor.numbers, dtype=dtype)
                start = first.storage_offset()
                for other in sharing:
                    leaf = leaves[other]
                    leaf.data = target.as_strided(
                        leaf.shape, leaf.stride(), leaf.storage_offset() - start
                    )
            else:
                target = torch.empty_strided(first.shape, first.stride(), dtype=dtype)
                leaves[key].data = target
        return target, _flat(target)


def _shown(path: Sequence[Any]) -> str:
    """A path in messages: model/layer.weight."""
    return "/".join(
        key if isinstance(key, str) and "/" not in key and not key.isdigit() else repr(key)
        for key in path
    )


def _overlapping(
    leaves: Mapping[Any, Any],
) -> Iterator[tuple[int, int, list[tuple[Any, ...]]]]:
    """The stretches of memory that tensors cover, each with their keys: start, stop, keys."""
    spans = []
    for key, leaf in leaves.items():
        if leaf.numel():
            steps = zip(leaf.shape, leaf.stride(), strict=True)
            reach = 1 + sum((size - 1) * stride for size, stride in steps)
            start = leaf.data_ptr()
            spans.append((start, _shown(key), start + reach * leaf.element_size(), key))
    spans.sort(key=lambda span: span[:2])  # by name, too, as the order in files may differ
    held: list[tuple[Any, ...]] = []
    begin = end = 0
    for start, _, stop, key in spans:
        if start >= end:
            if held:
                yield begin, end, held
            begin, end, held = start, stop, []
        end = max(end, stop)
        held.append(key)
    if held:
        yield begin, end, held


def _overlaps_itself(leaf: Any) -> bool:
    """Whether several elements may be in one place, as in an expanded tensor."""
    reach = 1
    for stride, size in sorted(zip(leaf.stride(), leaf.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += (size - 1) * stride
    return False


def _flat(leaf: Any) -> Any:
    """Its numbers as bytes, in order: a view, or a copy where memory has another order."""
    import torch

    return leaf.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _in_order(leaf: Any) -> bool:
    """Whether memory has the numbers of a tensor in order, as they are."""
    return bool(leaf.is_contiguous() and not leaf.is_conj() and not leaf.is_neg())


def _save(tree: Any, output: BinaryIO) -> None:
    """`torch.save`, but a write that fails raises its own error and not one of torch."""
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
