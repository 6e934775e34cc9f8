"""Averages of saved checkpoints, piece by piece, so that memory does not grow with their number.

The weights are known before any file is read. Tensors are cut into pieces, and pieces are grouped.
For each group, every file with a weight is read once, the newest first, and added to float64 sums.
Numbers that have the same bits in all of them, and everything but real and complex tensors, are
taken from the newest file as they are.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from tailavg.core.clock import starts_at
from tailavg.core.files import whole_file
from tailavg.core.profile import dense_weights
from tailavg.core.rules import WindowRule
from tailavg.core.state import FORMAT
from tailavg.core.windows import Reals

__all__ = ["CheckpointError", "average_checkpoints", "natural", "weights"]

Piece = npt.NDArray[Any]
Read = Callable[[Hashable, int, int], Piece]

PIECE = 2**15
"""How many numbers to add at once: few enough for the cache."""

GROUP = 2**25
"""How many bytes of pieces to hold at once, or an eighth of the checkpoint if that is more."""

SAFETENSORS = frozenset({".safetensors"})
TORCH = frozenset({".pt", ".pth"})

PARTS: Mapping[str, str] = {
    "float64": "float64",
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3fnuz": "float8_e4m3fnuz",
    "float8_e5m2": "float8_e5m2",
    "float8_e5m2fnuz": "float8_e5m2fnuz",
    "complex128": "float64",
    "complex64": "float32",
    "complex32": "float16",
}
"""The dtypes that are averaged, and those of their real and imaginary parts."""


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


NONE = np.dtype(np.uint8)
"""The dtype of no numbers."""


@dataclass(frozen=True)
class Tensor:
    """What is known about a tensor before it is read."""

    name: str
    """Its name in messages; two tensors may share it."""
    dtype: str
    shape: tuple[int, ...]
    numbers: int = 0
    """How many real numbers to average: none if it comes from the newest file, or with another."""
    part: np.dtype[Any] = NONE
    """Their dtype."""
    memory: str = "in memory of its own"
    """Where it is, in formats that can tell."""


class _File(ABC):
    """A checkpoint. Only the names and kinds of its tensors are read at first."""

    path: Path
    tensors: dict[Hashable, Tensor]

    @abstractmethod
    def __init__(self, path: Path) -> None: ...

    @abstractmethod
    def opened(self) -> AbstractContextManager[Read]:
        """A function that reads a piece of a tensor: its key, start, stop."""

    @abstractmethod
    def write(self, streams: Sequence[BinaryIO], averages: Iterator[Sequence[Piece]]) -> None:
        """Write this file to each stream, with averages instead of its tensors.

        `averages` gives piece after piece, each as a sequence with one average per stream.
        """


class _Mean:
    """The weighted mean of pieces, in float64."""

    def __init__(self, newest: Piece) -> None:
        self._dtype = newest.dtype
        self._bits = f"u{self._dtype.itemsize}"
        self._newest: Piece | None = newest.view(self._bits)
        self._same = np.ones(len(newest), bool)
        self._sum: Any = 0.0

    def add(self, weight: float, piece: Piece, wide: Reals) -> None:
        """Add a piece, which comes also in float64."""
        self._sum += weight * wide
        if self._newest is not None:
            self._same &= piece.view(self._bits) == self._newest
            if not self._same.any():
                self._newest = None

    def rounded(self) -> Piece:
        """The mean in the dtype of the pieces; numbers whose bits never changed have them still."""
        mean: Piece = self._sum.astype(self._dtype)
        if self._newest is None:
            return mean
        return np.where(self._same, self._newest, mean.view(self._bits)).view(self._dtype)


@np.errstate(all="ignore")  # the NaN of two infinities is a result, and no mistake
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
        CheckpointError: If a file cannot be read, changes meanwhile, or differs in tensors, shapes
            or dtypes.
        OSError: If a file cannot be opened or written.
    """
    suffixes = {output.suffix for output in outputs}
    kind: type[_File] = _Safetensors if suffixes <= SAFETENSORS else _Torch
    stamps = {path: _stamp(path) for path in paths}
    files = [kind(path) for path in paths]
    newest = files[-1]
    for file in files[:-1]:
        _check_alike(file, newest)
    shares = np.transpose([weights(rule, len(files)) for rule in outputs.values()]).tolist()
    terms = [(file, its) for file, its in zip(files, shares, strict=True) if any(its)]
    total = sum(tensor.numbers for tensor in newest.tensors.values()) * len(terms)

    def check_unchanged(file: _File) -> None:
        if _stamp(file.path) != stamps[file.path]:
            raise CheckpointError(f"{file.path}: the file changed while it was read")

    def averages() -> Iterator[list[Piece]]:
        done = 0
        for group in _groups(newest.tensors):
            means: list[list[_Mean]] = []
            for file, its in reversed(terms):
                check_unchanged(file)
                with file.opened() as read:
                    for i, (key, start, stop) in enumerate(group):
                        piece = read(key, start, stop)
                        if file is newest:
                            means.append([_Mean(piece) for _ in outputs])
                        wide = piece.astype(np.float64)
                        for mean, weight in zip(means[i], its, strict=True):
                            if weight > 0.0:
                                mean.add(weight, piece, wide)
                        done += stop - start
                        if progress is not None:
                            progress(done, total)
            for each in means:
                yield [mean.rounded() for mean in each]

    with ExitStack() as stack:
        streams = [stack.enter_context(whole_file(output)) for output in outputs]
        newest.write(streams, averages())
        for file, _ in terms:
            check_unchanged(file)
        for stream in streams:  # before the first gets its name
            stream.flush()
            os.fsync(stream.fileno())
    return [[file.path for file, its in terms if its[i] > 0.0] for i in range(len(outputs))]


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes if a file does."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _groups(
    tensors: Mapping[Hashable, Tensor],
) -> Iterator[list[tuple[Hashable, int, int]]]:
    """Cut tensors into pieces (key, start, stop), and group the pieces."""
    size = sum(tensor.numbers * tensor.part.itemsize for tensor in tensors.values())
    most = max(GROUP, size // 8)
    group: list[tuple[Hashable, int, int]] = []
    held = 0
    for key, tensor in tensors.items():
        for start in range(0, tensor.numbers, PIECE):
            stop = min(tensor.numbers, start + PIECE)
            group.append((key, start, stop))
            held += (stop - start) * (tensor.part.itemsize + 9)  # as a _Mean holds it
            if held >= most:
                yield group
                group, held = [], 0
    if group:
        yield group


def _check_alike(file: _File, newest: _File) -> None:
    """Raise unless both files have the same tensors, of the same shapes and dtypes."""
    where = f"{file.path}: differs from the newest, {newest.path}"
    for key, expected in newest.tensors.items():
        if key not in file.tensors:
            raise CheckpointError(f"{where}: tensor {expected.name!r} is missing")
    for key, got in file.tensors.items():
        if key not in newest.tensors:
            raise CheckpointError(f"{where}: tensor {got.name!r} is not in the newest")
        expected = newest.tensors[key]
        where_in = f"{where}: tensor {got.name!r}: expected"
        if got.shape != expected.shape:
            raise CheckpointError(f"{where_in} shape {expected.shape}, got {got.shape}")
        if got.dtype != expected.dtype:
            raise CheckpointError(f"{where_in} dtype {expected.dtype}, got {got.dtype}")
        if got.memory != expected.memory:
            raise CheckpointError(f"{where_in} it {expected.memory}, got it {got.memory}")


def _part(dtype: str) -> np.dtype[Any]:
    """The dtype of the real and imaginary parts of an averaged dtype."""
    name = PARTS[dtype]
    source: Any = np
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes as source
    part: np.dtype[Any] = np.dtype(getattr(source, name))
    return part


class _Safetensors(_File):
    """A .safetensors file: the length of a header, the header in JSON, the numbers.

    The format's own library validates a file. Numbers are read by their offsets, a piece at a time,
    which the slices of that library cannot do for every shape.
    """

    _INTEGERS = frozenset({"BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
    _AVERAGED: Mapping[str, str] = {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
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
        self._spans: dict[Hashable, tuple[int, int]] = {}
        for name, entry in entries.items():
            shape, dtype = tuple(entry["shape"]), entry["dtype"]
            start, stop = entry["data_offsets"]
            self._spans[name] = len(self._head) + start, len(self._head) + stop
            if dtype in self._INTEGERS:
                self.tensors[name] = Tensor(name, dtype, shape)
            elif dtype in self._AVERAGED:
                part = _part(self._AVERAGED[dtype])
                numbers = (stop - start) // part.itemsize
                self.tensors[name] = Tensor(name, dtype, shape, numbers, part)
            else:
                raise CheckpointError(
                    f"{path}: tensor {name!r}: expected integers or one of "
                    f"{', '.join(self._AVERAGED)}, got {dtype}, which cannot be averaged"
                )

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
        except Exception:  # a damaged header can raise anything
            raise CheckpointError(f"{self.path}: {problem}") from None
        raise CheckpointError(
            f"{self.path}: truncated in tensor {cut[1]!r}: expected {max(ends.values())} bytes "
            f"of tensors, got {room}"
        )

    @contextmanager
    def opened(self) -> Iterator[Read]:
        with self.path.open("rb") as stream:

            def read(key: Hashable, start: int, stop: int) -> Piece:
                tensor = self.tensors[key]
                size = tensor.part.itemsize
                stream.seek(self._spans[key][0] + start * size)
                numbers = stream.read((stop - start) * size)
                if len(numbers) < (stop - start) * size:
                    raise CheckpointError(
                        f"{self.path}: tensor {tensor.name!r}: the file shrank while it was read"
                    )
                return np.frombuffer(numbers, tensor.part)

            yield read

    def write(self, streams: Sequence[BinaryIO], averages: Iterator[Sequence[Piece]]) -> None:
        for stream in streams:
            stream.write(self._head)
        with self.path.open("rb") as source:
            for key, tensor in self.tensors.items():
                start, stop = self._spans[key]
                if not tensor.numbers:
                    source.seek(start)
                    for begin in range(start, stop, PIECE):
                        numbers = source.read(min(PIECE, stop - begin))
                        for stream in streams:
                            stream.write(numbers)
                written = 0
                while written < tensor.numbers:
                    means = next(averages)
                    for stream, mean in zip(streams, means, strict=True):
                        stream.write(mean.tobytes())
                    written += len(means[0])


class _Torch(_File):
    """A .pt file: tensors and other plain data in nested dicts and lists.

    The key of a tensor is the path to it, a tuple. Tensors that overlap in memory, with others or
    with themselves, are averaged once, as the stretch of memory that they cover.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = {}
        self._load(mmap=True)
        if not self.tensors:
            raise CheckpointError(f"{path}: expected tensors in dicts or lists, got none")

    def _load(self, *, mmap: bool) -> tuple[Any, dict[Hashable, Any]]:
        """The contents of the file, and what to average: tensors, or the memory they share.

        With `mmap` numbers are read on access, and must not be written to.
        """
        import torch

        try:
            if not self.tensors:
                with zipfile.ZipFile(self.path) as file:
                    if any(record.compress_type for record in file.infolist()):
                        raise ValueError("compressed records")  # torch would map them as they are
            tree = torch.load(self.path, map_location="cpu", mmap=mmap, weights_only=True)
            tensors, memory = self._described(dict(self._leaves(tree)))
        except (CheckpointError, ModuleNotFoundError):
            raise
        except Exception as error:  # a damaged file can raise anything
            first = (str(error).strip() or type(error).__name__).partition("\n")[0]
            raise CheckpointError(
                f"{self.path}: expected a whole file of tensors and plain data, as torch.save "
                f"writes it since torch 1.6, got: {first}"
            ) from error
        if self.tensors and tensors != self.tensors:
            raise CheckpointError(f"{self.path}: the file changed while it was read")
        self.tensors = tensors
        return tree, memory

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
        self, leaves: Mapping[tuple[Any, ...], Any]
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
                    other = others[0] if others and key is owner else owner
                    tensors[key] = replace(
                        tensors[key],
                        memory=f"tied to {tensors[other].name}, {leaf.data_ptr() - start} bytes "
                        f"from the first, with strides {leaf.stride()}"
                        + ", conjugated" * leaf.is_conj()
                        + ", negated" * leaf.is_neg(),
                    )
            part = _part(dtypes[0])
            numbers = memory[owner].nbytes // part.itemsize
            tensors[owner] = replace(tensors[owner], numbers=numbers, part=part)
        return tensors, memory

    @contextmanager
    def opened(self) -> Iterator[Read]:
        memory = self._load(mmap=True)[1]
        last: tuple[Hashable, Piece] | None = None

        def read(key: Hashable, start: int, stop: int) -> Piece:
            nonlocal last
            if last is None or last[0] != key:
                last = key, _flat(memory[key]).numpy()
            part = self.tensors[key].part
            return last[1][start * part.itemsize : stop * part.itemsize].copy().view(part)

        yield read

    def write(self, streams: Sequence[BinaryIO], averages: Iterator[Sequence[Piece]]) -> None:
        trees = [self._load(mmap=False) for _ in streams]
        for key, tensor in self.tensors.items():
            if not tensor.numbers:
                continue
            targets = [memory[key] for _, memory in trees]
            flats = [_flat(target) for target in targets]
            written = 0
            while written < tensor.numbers:
                means = next(averages)
                stop = written + len(means[0])
                for flat, mean in zip(flats, means, strict=True):
                    flat.numpy().view(tensor.part)[written:stop] = mean
                written = stop
            for flat, target in zip(flats, targets, strict=True):
                if flat.data_ptr() != target.data_ptr():
                    target.detach().copy_(flat.view(target.dtype).view(target.shape))
        for stream, (tree, _) in zip(streams, trees, strict=True):
            _save(tree, stream)


def _shown(path: Sequence[Any]) -> str:
    """A path in messages: model/layer.weight."""
    return "/".join(
        key if isinstance(key, str) and "/" not in key and not key.isdigit() else repr(key)
        for key in path
    )


def _overlapping(
    leaves: Mapping[tuple[Any, ...], Any],
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


def _save(tree: Any, stream: BinaryIO) -> None:
    """`torch.save`, but a write that fails raises its own error and not one of torch."""
    import torch

    failures: list[OSError] = []

    class Output:
        def write(self, data: Any) -> int:
            try:
                return stream.write(data)
            except OSError as error:
                failures.append(error)
                raise

        def flush(self) -> None:
            pass

    try:
        torch.save(tree, Output())  # type: ignore[arg-type]
    except RuntimeError:
        if failures:
            raise failures[0] from None
        raise
