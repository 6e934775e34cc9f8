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

from tailavg.core.files import whole_file

__all__ = [
    "BUFFER",
    "PARTS",
    "Averages",
    "Checkpoint",
    "CheckpointError",
    "Piece",
    "Tensor",
    "flowing",
    "part_of",
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
"""The dtypes that are averaged, and those of their real and imaginary parts."""

NONE = np.dtype(np.uint8)
"""The dtype of no numbers."""


class CheckpointError(ValueError):
    """A file that cannot be read, or does not match the others."""


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
    to: np.dtype[Any] = NONE
    """That of their average."""
    real: bool = True
    """Whether they are real numbers, and not parts of complex ones."""
    memory: str = "in memory of its own"
    """Where it is, in formats that can tell."""
    cuts: tuple[int, ...] = ()
    """Where it must be cut into pieces, and nowhere else, in formats that cannot do so anywhere."""
    left: bool = False
    """Whether the user chose to leave it as it is in the newest."""

    @classmethod
    def averaged(
        cls, name: str, dtype: str, shape: tuple[int, ...], kind: str, size: int
    ) -> Tensor:
        """A tensor of a dtype in `PARTS`, with so many bytes."""
        part = part_of(kind)
        real = not kind.startswith("complex")
        return cls(name, dtype, shape, size // part.itemsize, part, part, real)


class Checkpoint(ABC):
    """A saved model. Only the names and kinds of its tensors are read at first."""

    together: ClassVar[bool] = True
    """Whether several outputs can be written in one pass."""
    path: Path
    tensors: dict[Hashable, Tensor]
    stamps: dict[Path, tuple[int, ...]]
    """The files it is made of, and what changes if they do."""

    def whole(self, output: Path) -> AbstractContextManager[Any]:
        """What to write an output to; it appears when it is whole."""
        return whole_file(output)

    @abstractmethod
    def read(self, key: Hashable, start: int, stop: int, out: Piece) -> None:
        """Read the numbers from `start` to `stop` of a tensor into bytes. Threads may share it."""

    @abstractmethod
    def write(self, outputs: Sequence[Any], averages: Averages) -> None:
        """Write this checkpoint to each output, with averages instead of its tensors."""

    def sizes(self) -> tuple[int, int]:
        """How many bytes `write` will write to an output, and how many it will hold for it."""
        grown = sum(t.numbers * (t.to.itemsize - t.part.itemsize) for t in self.tensors.values())
        return sum(path.stat().st_size for path in self.stamps) + grown, 0

    def choose(self, include: Sequence[str], exclude: Sequence[str], dtype: str | None) -> None:
        """Leave some tensors as they are in this checkpoint, and change the dtype of the others."""
        names = {tensor.name for tensor in self.tensors.values()}
        for option, patterns in ("include", include), ("exclude", exclude):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise CheckpointError(
                        f"--{option}: expected a pattern that fits the name of a tensor, such as "
                        f"{min(names)!r}, got {pattern!r}"
                    )
        for key, tensor in self.tensors.items():
            if any(fnmatchcase(tensor.name, pattern) for pattern in exclude) or (
                include and not any(fnmatchcase(tensor.name, pattern) for pattern in include)
            ):
                self.tensors[key] = replace(tensor, numbers=0, left=True)
            elif dtype is not None and tensor.numbers and tensor.real:
                self.tensors[key] = replace(tensor, to=part_of(dtype))
        self.arrange()

    def arrange(self) -> None:  # noqa: B027 (some have nothing to arrange)
        """Prepare to write what was chosen, and put the tensors in the order of that."""

    def check_unchanged(self) -> None:
        """Raise if a file is not the one that was opened."""
        for path, stamp in self.stamps.items():
            if stamp_of(path) != stamp:
                raise CheckpointError(f"{path}: the file changed while it was read")

    def check_like(self, newest: Checkpoint) -> None:
        """Raise unless both have the same tensors, of the same shapes and dtypes."""
        where = f"{self.path}: differs from the newest, {newest.path}"
        if type(self) is not type(newest):
            raise CheckpointError(f"{where}: expected {newest.described}, got {self.described}")
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
        """The tensors that another checkpoint must have as well."""
        return self.tensors

    def threads(self, most: int) -> int:
        """How many threads may read it, without too much memory."""
        return most

    @property
    def described(self) -> str:
        """What kind of checkpoint it is."""
        return "a file"


def stamp_of(path: Path) -> tuple[int, ...]:
    """What changes if a file does."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def part_of(dtype: str) -> np.dtype[Any]:
    """The dtype of the real and imaginary parts of an averaged dtype."""
    name = PARTS[dtype]
    source: Any = np
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes as source
    part: np.dtype[Any] = np.dtype(getattr(source, name))
    return part


def read_at(path: Path, place: int, out: Piece, name: str) -> None:
    """Fill `out` with the bytes of a file from a place on."""
    view = memoryview(out.data)
    with path.open("rb", buffering=0) as stream:
        stream.seek(place)
        while view:
            got = stream.readinto(view)
            if not got:
                raise CheckpointError(f"{path}: tensor {name!r}: the file shrank while it was read")
            view = view[got:]


@contextmanager
def flowing(stream: BinaryIO) -> Iterator[Callable[[Any], None]]:
    """A function that writes to a file, while what was written goes to the disk."""
    written = 0
    sync = getattr(os, "fdatasync", os.fsync)
    with ThreadPoolExecutor(1) as pool:
        pending: list[Future[Any]] = [pool.submit(int)]

        def write(data: Any) -> None:
            nonlocal written
            stream.write(data)
            written += memoryview(data).nbytes
            if written >= FLOW:
                written = 0
                stream.flush()
                pending[0].result()
                pending[0] = pool.submit(sync, stream.fileno())

        yield write
        pending[0].result()
    stream.flush()
    os.fsync(stream.fileno())
