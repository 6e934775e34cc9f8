"""What every kind of checkpoint is: named tensors that are read a piece at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tailavg.io.files import whole_file, whole_folder

__all__ = [
    "PARTS",
    "Averages",
    "Checkpoint",
    "CheckpointError",
    "Piece",
    "Tensor",
    "read_at",
    "reading",
    "stamp_of",
]

Piece = npt.NDArray[Any]
Averages = Iterator[Sequence[Piece]]
"""Piece after piece, in the order of the newest checkpoint, each with one average per output."""

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_FLOATS_8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_COMPLEX = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
PARTS: Mapping[str, str] = {name: name for name in (*_FLOATS, *_FLOATS_8)} | _COMPLEX
"""The dtypes that are averaged, and the dtypes of their real and imaginary parts."""

NO_NUMBERS = np.dtype(np.uint8)


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or does not match the others."""


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
    memory: str = ""
    """Where it is in memory, in formats that can tell."""
    cuts: tuple[int, ...] = ()
    """The only places where it can be cut into pieces; if empty, it can be cut anywhere."""
    left: bool = False
    """Whether the user chose to leave it as it is in the newest."""

    @classmethod
    def averaged(cls, name: str, dtype: str, shape: tuple[int, ...], elements: int) -> Tensor:
        """Describe a tensor of a dtype in `PARTS`, of which so many elements are averaged."""
        part = _part(dtype)
        return cls(name, dtype, shape, elements * (1 + _is_complex(dtype)), part, part)

    def means(self, averages: Averages) -> Averages:
        """Take the averages of this tensor."""
        taken = 0
        while taken < self.numbers:
            means = next(averages)
            taken += len(means[0])
            yield means


class Checkpoint(ABC):
    """A saved model. Only the names and kinds of its tensors are read at first."""

    kind: ClassVar[str] = "a file"
    """How messages call it."""
    together: ClassVar[bool] = True
    """Whether several outputs can be written in one pass."""
    threads: ClassVar[int] = 2
    """How many threads may read it: one computes while another reads. More would wait for Python's
    lock."""
    path: Path
    tensors: dict[Hashable, Tensor]
    stamps: dict[Path, tuple[int, ...]]
    """The files of the checkpoint, each with values that change if the file does."""

    def replacing(self, output: Path) -> AbstractContextManager[Any]:
        """Open an output, which appears when it is complete."""
        return whole_folder(output) if self.path.is_dir() else whole_file(output)

    @abstractmethod
    def read(self, key: Hashable, start: int, stop: int, out: Piece) -> None:
        """Read the numbers from `start` to `stop` of a tensor into bytes. Threads may share it."""

    @abstractmethod
    def write(self, outputs: Sequence[Any], averages: Averages) -> None:
        """Write this checkpoint to each output, with averages instead of its tensors."""

    @abstractmethod
    def averaged(self, averages: Averages) -> Any:
        """Return this checkpoint in memory, with averages instead of its tensors."""

    def choose(self, include: Sequence[str], exclude: Sequence[str], dtype: str | None) -> None:
        """Leave some tensors as they are in this checkpoint, and change the dtype of the others."""
        names = {tensor.name for tensor in self.tensors.values()}
        for pattern in (*include, *exclude):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise CheckpointError(f"no tensor matches {pattern!r}; a name is {min(names)!r}")
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
            for kind in ("shape", "dtype", "memory") if not expected.left else ():
                here, there = getattr(got, kind), getattr(expected, kind)
                if here != there:
                    raise CheckpointError(
                        f"{where}: tensor {got.name!r}: expected {kind} {there}, got {here}"
                    )

    def compared(self) -> Mapping[Hashable, Tensor]:
        """Return the tensors that another checkpoint must have as well."""
        return self.tensors

    def described(self, name: str, dtype: str, shape: tuple[int, ...], elements: int) -> Tensor:
        """Describe a tensor. Raise if it can be neither averaged nor, as integers are, left."""
        if dtype in PARTS:
            return Tensor.averaged(name, dtype, shape, elements)
        if dtype.startswith(("int", "uint", "bool")):
            return Tensor(name, dtype, shape)
        raise CheckpointError(
            f"{self.path}: tensor {name!r}: {dtype} cannot be averaged, only integers and "
            f"{', '.join(PARTS)}; remove the tensor from the checkpoints"
        )


def stamp_of(path: Path) -> tuple[int, ...]:
    """Return values that change if a file does."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def reading(problem: str) -> Iterator[None]:
    """Raise a CheckpointError with this text if a file is damaged, which can raise anything."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]  # torch adds a stack of C++ calls
        raise CheckpointError(f"{problem}: {type(error).__name__}: {first_line}") from error


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


def read_at(path: Path, position: int, out: Piece) -> None:
    """Fill `out` with the bytes of a file from a position on."""
    view = memoryview(out.data)
    with path.open("rb", buffering=0) as stream:
        stream.seek(position)
        while view:
            count = stream.readinto(view)
            if not count:
                raise CheckpointError(f"{path}: the file shrank while it was read")
            view = view[count:]
