"""Averages of saved checkpoints, piece by piece, so that memory does not grow with their number.

The weights are known before any file is read. Tensors are cut into pieces, and pieces are grouped.
For each group, every file with a weight is read once and added to float64 sums. Everything but real
and complex tensors is taken from the newest file.
"""

from __future__ import annotations

import errno
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from tailavg.core.clock import starts_at
from tailavg.core.files import whole_file
from tailavg.core.profile import dense_weights
from tailavg.core.rules import WindowRule
from tailavg.core.windows import Reals

__all__ = ["CheckpointError", "average_checkpoints", "natural", "weights"]

Piece = npt.NDArray[Any]
Read = Callable[[str, int, int], Piece]

PIECE = 2**15
"""How many numbers to add at once: few enough for the cache, and for one torch thread."""

GROUP = 2**22
"""How many sums to hold at once, or a 32nd of the checkpoint if that is more."""

SAFETENSORS = frozenset({".safetensors"})
TORCH = frozenset({".pt", ".pth"})


class CheckpointError(ValueError):
    """A file that cannot be read, or does not match the others."""


def natural(path: Path) -> tuple[list[int], str]:
    """A key that sorts names by the numbers in them: step-9 before step-10.

    Examples:
        >>> sorted([Path("step-10.pt"), Path("step-9.pt")], key=natural)[0].name
        'step-9.pt'
    """
    return [int(number) for number in re.findall(r"\d+", str(path))], str(path)


def weights(rule: WindowRule, files: int) -> Reals:
    """The weight of each checkpoint, oldest first.

    Examples:
        >>> from tailavg import ExactWindow
        >>> weights(ExactWindow(0.5), 4)
        array([0. , 0. , 0.5, 0.5])
    """
    return dense_weights(rule, starts_at(rule, files), files)


@dataclass(frozen=True)
class Tensor:
    """What is known about a tensor before it is read."""

    dtype: str
    shape: tuple[int, ...]
    size: int
    averaged: bool
    """Whether to average it, rather than take it from the newest file."""
    tied_to: str | None = None
    """The tensor it shares memory with, in formats that can tell."""


class _File(ABC):
    """A checkpoint. Only the names and kinds of its tensors are read at first."""

    path: Path
    tensors: dict[str, Tensor]

    @abstractmethod
    def __init__(self, path: Path) -> None: ...

    @abstractmethod
    def opened(self) -> AbstractContextManager[Read]:
        """A function that reads a piece of a tensor in float64: name, start, stop."""

    @abstractmethod
    def write(self, streams: Sequence[BinaryIO], averages: Iterator[Sequence[Piece]]) -> None:
        """Write this file to each stream, with averages instead of its tensors.

        `averages` gives piece after piece, each as a sequence with one average per stream.
        """


def average_checkpoints(
    paths: Sequence[Path],
    outputs: Mapping[Path, WindowRule],
    progress: Callable[[int, int], object] | None = None,
) -> list[list[Path]]:
    """Average checkpoints in one pass, and write an output for each rule.

    No output appears before all are whole.

    Args:
        paths: The checkpoints, oldest first.
        outputs: The files to write, each with its rule.
        progress: Called with how many numbers have been read, and how many there are.

    Returns:
        For each output, the files that have a weight.

    Raises:
        CheckpointError: If a file cannot be read, or differs in tensors, shapes or dtypes.
    """
    for output in outputs:
        if output.is_dir():  # caught now, before other outputs get their names
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(output))
    suffixes = {output.suffix for output in outputs}
    kind: type[_File] = _Safetensors if suffixes <= SAFETENSORS else _Torch
    files = [kind(path) for path in paths]
    newest = files[-1]
    for file in files[:-1]:
        _check_alike(file, newest)
    shares = np.transpose([weights(rule, len(files)) for rule in outputs.values()]).tolist()
    terms = [(file, its) for file, its in zip(files, shares, strict=True) if any(its)]
    sizes = {name: tensor.size for name, tensor in newest.tensors.items() if tensor.averaged}
    total = sum(sizes.values()) * len(terms)

    def averages() -> Iterator[list[Piece]]:
        done = 0
        for group in _groups(sizes):
            sums: list[list[Any]] = [[0.0] * len(outputs) for _ in group]
            for file, its in terms:
                with file.opened() as read:
                    for pieces, (name, start, stop) in zip(sums, group, strict=True):
                        numbers = read(name, start, stop)
                        for i, weight in enumerate(its):
                            if weight > 0.0:
                                # in float64, numbers that all files share stay the same
                                pieces[i] += weight * numbers
                        done += stop - start
                        if progress is not None:
                            progress(done, total)
            yield from sums

    with ExitStack() as stack:
        streams = [stack.enter_context(whole_file(output)) for output in outputs]
        newest.write(streams, averages())
        for stream in streams:
            stream.flush()
    return [[file.path for file, its in terms if its[i] > 0.0] for i in range(len(outputs))]


def _groups(sizes: Mapping[str, int]) -> Iterator[list[tuple[str, int, int]]]:
    """Cut tensors into pieces (name, start, stop), and group the pieces."""
    most = max(GROUP, sum(sizes.values()) // 32)
    group: list[tuple[str, int, int]] = []
    held = 0
    for name, size in sizes.items():
        for start in range(0, size, PIECE):
            stop = min(size, start + PIECE)
            group.append((name, start, stop))
            held += stop - start
            if held >= most:
                yield group
                group, held = [], 0
    if group:
        yield group


def _check_alike(file: _File, newest: _File) -> None:
    """Raise unless both files have the same tensors, of the same shapes and dtypes."""
    where = f"{file.path}: differs from the newest, {newest.path}"
    for name in newest.tensors:
        if name not in file.tensors:
            raise CheckpointError(f"{where}: tensor {name!r} is missing")
    for name, got in file.tensors.items():
        expected = newest.tensors.get(name)
        if expected is None:
            raise CheckpointError(f"{where}: tensor {name!r} is not in the newest")
        if got.shape != expected.shape:
            raise CheckpointError(
                f"{where}: tensor {name!r}: expected shape {expected.shape}, got {got.shape}"
            )
        if got.dtype != expected.dtype:
            raise CheckpointError(
                f"{where}: tensor {name!r}: expected dtype {expected.dtype}, got {got.dtype}"
            )
        if got.tied_to != expected.tied_to:
            raise CheckpointError(
                f"{where}: tensor {name!r}: expected it tied to {expected.tied_to}, "
                f"got {got.tied_to}"
            )


class _Safetensors(_File):
    """A .safetensors file: the length of a header, the header in JSON, the numbers.

    The format's own library validates a file. Numbers are read by their offsets, a piece at a time,
    which the slices of that library cannot do for every shape.
    """

    _INTEGERS = frozenset({"BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
    _REALS: Mapping[str, str] = {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "C64": "complex64",
    }

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            self._head = length.to_bytes(8, "little") + stream.read(min(length, 10**8))
            room = os.fstat(stream.fileno()).st_size - 8 - length
        self._check(room)
        entries = json.loads(self._head[8:])
        entries.pop("__metadata__", None)
        # in file order
        entries = dict(sorted(entries.items(), key=lambda item: item[1]["data_offsets"]))
        self.tensors = {}
        self._spans: dict[str, tuple[int, int]] = {}
        for name, entry in entries.items():
            shape, dtype = tuple(entry["shape"]), entry["dtype"]
            if dtype not in self._REALS and dtype not in self._INTEGERS:
                raise CheckpointError(
                    f"{path}: tensor {name!r}: expected integers or one of "
                    f"{', '.join(self._REALS)}, got {dtype}, which cannot be averaged"
                )
            size = int(np.prod(shape, dtype=np.int64))
            self.tensors[name] = Tensor(dtype, shape, size, dtype in self._REALS)
            start, stop = entry["data_offsets"]
            self._spans[name] = len(self._head) + start, len(self._head) + stop

    def _check(self, room: int) -> None:
        """Raise unless the file is valid and complete."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, "np"):
                return
        except (SafetensorError, OSError) as error:
            problem = f"not a valid .safetensors file: {error}"
        if room < 0:
            raise CheckpointError(
                f"{self.path}: truncated in its header, before any tensor, or {problem}"
            )
        try:
            entries = json.loads(self._head[8:])
            entries.pop("__metadata__", None)
            ends = {name: entry["data_offsets"][1] for name, entry in entries.items()}
            cut = min((end, name) for name, end in ends.items() if end > room)
        except (ValueError, AttributeError, KeyError, IndexError, TypeError):
            raise CheckpointError(f"{self.path}: {problem}") from None
        raise CheckpointError(
            f"{self.path}: truncated in tensor {cut[1]!r}: expected {max(ends.values())} bytes "
            f"of tensors, got {room}"
        )

    @cached_property
    def _dtypes(self) -> dict[str, np.dtype[Any]]:
        """The dtypes of the tensors to average, some of them from ml_dtypes."""
        used = {tensor.dtype for tensor in self.tensors.values() if tensor.averaged}
        found: dict[str, np.dtype[Any]] = {}
        for dtype in used:
            name = self._REALS[dtype]
            if dtype.startswith(("BF", "F8")):
                import ml_dtypes

                found[dtype] = np.dtype(getattr(ml_dtypes, name))
            else:
                found[dtype] = np.dtype(name).newbyteorder("<")
        return found

    @contextmanager
    def opened(self) -> Iterator[Read]:
        with self.path.open("rb") as stream:

            def read(name: str, start: int, stop: int) -> Piece:
                dtype = self._dtypes[self.tensors[name].dtype]
                stream.seek(self._spans[name][0] + start * dtype.itemsize)
                numbers = stream.read((stop - start) * dtype.itemsize)
                if len(numbers) < (stop - start) * dtype.itemsize:
                    raise CheckpointError(
                        f"{self.path}: tensor {name!r}: the file shrank while it was read"
                    )
                wide = np.complex128 if dtype.kind == "c" else np.float64
                return np.frombuffer(numbers, dtype).astype(wide)

            yield read

    def write(self, streams: Sequence[BinaryIO], averages: Iterator[Sequence[Piece]]) -> None:
        for stream in streams:
            stream.write(self._head)
        with self.path.open("rb") as source:
            for name, tensor in self.tensors.items():
                start, stop = self._spans[name]
                if not tensor.averaged:
                    source.seek(start)
                    for begin in range(start, stop, PIECE):
                        numbers = source.read(min(PIECE, stop - begin))
                        for stream in streams:
                            stream.write(numbers)
                written = 0
                while tensor.averaged and written < tensor.size:
                    means = next(averages)
                    for stream, mean in zip(streams, means, strict=True):
                        stream.write(_rounded(mean, self._dtypes[tensor.dtype]).tobytes())
                    written += len(means[0])


def _rounded(numbers: Piece, dtype: np.dtype[Any]) -> Piece:
    with np.errstate(over="ignore", invalid="ignore"):
        return numbers.astype(dtype)


class _Torch(_File):
    """A .pt file: tensors and other plain data in nested dicts and lists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = {}
        first: dict[Any, str] = {}
        for name, tensor in self._load()[1].items():
            memory = tensor.untyped_storage().data_ptr() if tensor.numel() else name
            view = (memory, tensor.storage_offset(), tensor.stride(), tensor.shape, tensor.dtype)
            tied_to = first.setdefault(view, name)
            self.tensors[name] = Tensor(
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                tensor.numel(),
                tensor.is_floating_point() or tensor.is_complex(),
                None if tied_to == name else tied_to,
            )
        if not self.tensors:
            raise CheckpointError(f"{path}: expected tensors in dicts or lists, got none")

    def _load(self) -> tuple[Any, dict[str, Any]]:
        """The contents of the file, and its tensors by name. Numbers are read on access."""
        import torch

        try:
            tree = torch.load(self.path, map_location="cpu", mmap=True, weights_only=True)
            tensors = dict(_leaves(tree))
        except Exception as error:  # a damaged file can raise anything
            first = str(error).strip().partition("\n")[0]
            raise CheckpointError(
                f"{self.path}: expected a whole file of tensors and plain data, as torch.save "
                f"writes it, got: {first}"
            ) from error
        for name, tensor in tensors.items():
            if tensor.layout != torch.strided or tensor.is_quantized:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r}: expected a dense tensor, got "
                    f"{tensor.layout} of {tensor.dtype}, which cannot be averaged"
                )
        return tree, tensors

    @contextmanager
    def opened(self) -> Iterator[Read]:
        import torch

        tensors = self._load()[1]

        def read(name: str, start: int, stop: int) -> Piece:
            tensor = tensors[name].detach()
            wide = torch.complex128 if tensor.is_complex() else torch.float64
            piece: Piece = tensor.reshape(-1)[start:stop].to(wide).numpy()
            return piece

        yield read

    def write(self, streams: Sequence[BinaryIO], averages: Iterator[Sequence[Piece]]) -> None:
        import torch

        # The mapping is private: writing to the tensors does not change the file, and tied
        # tensors and unusual layouts are kept.
        trees = [self._load() for _ in streams]
        for name, tensor in self.tensors.items():
            if not tensor.averaged:
                continue
            targets = [tensors[name].detach() for _, tensors in trees]
            wholes = [
                target if target.is_contiguous() else torch.empty(tensor.shape, dtype=target.dtype)
                for target in targets
            ]
            written = 0
            while written < tensor.size:
                means = next(averages)
                stop = written + len(means[0])
                for whole, mean in zip(wholes, means, strict=True):
                    whole.view(-1)[written:stop] = torch.from_numpy(mean)
                written = stop
            for whole, target in zip(wholes, targets, strict=True):
                if whole is not target:
                    target.copy_(whole)
        for stream, (tree, _) in zip(streams, trees, strict=True):
            torch.save(tree, stream)


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors in dicts, lists and tuples, each with its path: "model/layer.weight"."""
    import torch

    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, Mapping | list | tuple):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _leaves(value, f"{name}/{key}" if name else str(key))
