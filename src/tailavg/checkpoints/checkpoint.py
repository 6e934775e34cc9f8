"""What every kind of checkpoint is: named tensors that are read a piece at a time."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import numpy.typing as npt

from tailavg.io.files import sync, whole_file

__all__ = [
    "BUFFER",
    "PARTS",
    "Averages",
    "Checkpoint",
    "CheckpointError",
    "Piece",
    "Tensor",
    "flowing",
    "read_at",
    "stamp_of",
]

Piece = npt.NDArray[Any]
Averages = Iterator[Sequence[Piece]]
"""Piece after piece, in the order of the newest checkpoint, each with one average per output."""

BUFFER = 2**20
"""How many bytes to copy at once."""

FLOW = 2**26
"""After how many bytes to send them to the disk."""

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
"""The dtypes that are averaged, and the dtypes of their real and imaginary parts."""

NO_NUMBERS = np.dtype(np.uint8)


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or does not match the others.

    Args:
        message: What is wrong.
        argument: The argument of `Merge` that is wrong, if it is one.
    """

    def __init__(self, message: str, argument: str | None = None) -> None:
        super().__init__(message if argument is None else f"{argument}: {message}")
        self.message, self.argument = message, argument


@dataclass(frozen=True)
class Tensor:
    """What is known about a tensor before it is read."""

    name: str
    """Its name in messages; two tensors may share it."""
    dtype: str
    shape: tuple[int, ...]
    numbers: int = 0
    """How many real numbers to average; 0 if it comes from the newest file, or with another."""
    part: np.dtype[Any] = NO_NUMBERS
    """Their dtype."""
    to: np.dtype[Any] = NO_NUMBERS
    """The dtype of their average."""
    memory: str = "in memory of its own"
    """Where it is, in formats that can tell."""
    cuts: tuple[int, ...] = ()
    """The only places where it can be cut into pieces; if empty, it can be cut anywhere."""
    left: bool = False
    """Whether the user chose to leave it as it is in the newest."""

    @classmethod
    def averaged(cls, name: str, dtype: str, shape: tuple[int, ...], elements: int) -> Tensor:
        """Describe a tensor of a dtype in `PARTS`, of which so many elements are averaged."""
        part = _part(dtype)
        return cls(name, dtype, shape, elements * (1 + _is_complex(dtype)), part, part)


class Checkpoint(ABC):
    """A saved model. Only the names and kinds of its tensors are read at first."""

    kind: ClassVar[str] = "a file"
    """How messages call it."""
    together: ClassVar[bool] = True
    """Whether several outputs can be written in one pass."""
    path: Path
    tensors: dict[Hashable, Tensor]
    stamps: dict[Path, tuple[int, ...]]
    """The files of the checkpoint, each with values that change if the file does."""

    def replacing(self, output: Path) -> AbstractContextManager[Any]:
        """Open an output, which appears when it is complete."""
        return whole_file(output)

    @abstractmethod
    def read(self, key: Hashable, start: int, stop: int, out: Piece) -> None:
        """Read the numbers from `start` to `stop` of a tensor into bytes. Threads may share it."""

    @abstractmethod
    def write(self, outputs: Sequence[Any], averages: Averages) -> None:
        """Write this checkpoint to each output, with averages instead of its tensors."""

    def choose(self, include: Sequence[str], exclude: Sequence[str], dtype: str | None) -> None:
        """Leave some tensors as they are in this checkpoint, and change the dtype of the others."""
        names = {tensor.name for tensor in self.tensors.values()}
        for argument, patterns in ("include", include), ("exclude", exclude):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise CheckpointError(
                        f"no tensor matches {pattern!r}; a name is {min(names)!r}", argument
                    )
        for key, tensor in self.tensors.items():
            if any(fnmatchcase(tensor.name, pattern) for pattern in exclude) or (
                include and not any(fnmatchcase(tensor.name, pattern) for pattern in include)
            ):
                self.tensors[key] = replace(tensor, numbers=0, left=True)
            elif dtype is not None and tensor.numbers and not _is_complex(tensor.dtype):
                self.tensors[key] = replace(tensor, to=_part(dtype))
        self.arrange()

    def arrange(self) -> None:  # noqa: B027 (some have nothing to arrange)
        """Prepare to write what was chosen, and sort the tensors in the order of writing."""

    def check_unchanged(self) -> None:
        """Raise if a file is not the one that was opened."""
        for path, stamp in self.stamps.items():
            if stamp_of(path) != stamp:
                raise CheckpointError(f"{path}: the file changed while it was read")

    def check_like(self, newest: Checkpoint) -> None:
        """Raise unless both have the same tensors, of the same shapes and dtypes."""
        where = f"{self.path}: differs from the newest, {newest.path}"
        if type(self) is not type(newest):
            raise CheckpointError(f"{where}: expected {newest.kind}, got {self.kind}")
        ours, theirs = self.compared(), newest.compared()
        for key, expected in theirs.items():
            if key not in ours and not expected.left:
                raise CheckpointError(f"{where}: tensor {expected.name!r} is missing")
        for key, got in ours.items():
            if key not in theirs:
                raise CheckpointError(f"{where}: tensor {got.name!r} is not in the newest")
            expected = theirs[key]
            where_in = f"{where}: tensor {got.name!r}: expected"
            if expected.left:
                continue
            if got.shape != expected.shape:
                raise CheckpointError(f"{where_in} shape {expected.shape}, got {got.shape}")
            if got.dtype != expected.dtype:
                raise CheckpointError(f"{where_in} dtype {expected.dtype}, got {got.dtype}")
            if got.memory != expected.memory:
                raise CheckpointError(f"{where_in} it {expected.memory}, got it {got.memory}")

    def compared(self) -> Mapping[Hashable, Tensor]:
        """Return the tensors that another checkpoint must have as well."""
        return self.tensors

    def threads(self, most: int) -> int:
        """Return how many threads may read it without too much memory."""
        return most

    def check_dtype(self, name: str, dtype: str) -> None:
        """Raise unless a tensor of this dtype can be averaged, or left: integers are."""
        if dtype not in PARTS and not dtype.startswith(("int", "uint", "bool")):
            raise CheckpointError(
                f"{self.path}: tensor {name!r}: {dtype} cannot be averaged, only integers and "
                f"{', '.join(PARTS)}; remove the tensor from the checkpoints"
            )


def stamp_of(path: Path) -> tuple[int, ...]:
    """Return values that change if a file does."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _is_complex(dtype: str) -> bool:
    return dtype.startswith("complex")


def _part(dtype: str) -> np.dtype[Any]:
    """Return the dtype of the real and imaginary parts of an averaged dtype."""
    name = PARTS[dtype]
    source: Any = np
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes as source
    part: np.dtype[Any] = np.dtype(getattr(source, name))
    return part


def read_at(path: Path, place: int, out: Piece) -> None:
    """Fill `out` with the bytes of a file from a place on."""
    view = memoryview(out.data)
    with path.open("rb", buffering=0) as stream:
        stream.seek(place)
        while view:
            got = stream.readinto(view)
            if not got:
                raise CheckpointError(f"{path}: the file shrank while it was read")
            view = view[got:]


@contextmanager
def flowing(stream: BinaryIO) -> Iterator[Callable[[Any], None]]:
    """Give a function that writes to a file, while another thread syncs what was written."""
    written = 0
    to_disk = getattr(os, "fdatasync", os.fsync)
    with ThreadPoolExecutor(1) as pool:
        pending: Future[Any] = pool.submit(int)

        def write(data: Any) -> None:
            nonlocal written, pending
            stream.write(data)
            written += memoryview(data).nbytes
            if written >= FLOW:
                written = 0
                stream.flush()
                pending.result()
                pending = pool.submit(to_disk, stream.fileno())

        yield write
        pending.result()
    sync(stream)
