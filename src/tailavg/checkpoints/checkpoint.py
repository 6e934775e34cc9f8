"""The base class of all checkpoint formats: named tensors that are read piece by piece.

`merge.py` calls it; `safetensors.py`, `torchfiles.py`, `folders.py` and `distributed.py` implement
it.
"""

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
    "PIECE",
    "REAL_DTYPES",
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
"""The averages of each piece, one per output. The pieces are in the order of `tensors`."""

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_FLOATS_8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_COMPLEX = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
REAL_DTYPES: Mapping[str, str] = {name: name for name in (*_FLOATS, *_FLOATS_8)} | _COMPLEX
"""The dtypes that are averaged, each with the dtype of its real and imaginary parts."""

PIECE = 2**18
"""The numbers in a piece: enough that threads rarely wait for the GIL or for each other."""

NO_NUMBERS = np.dtype(np.uint8)


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or does not match the others."""


@dataclass(frozen=True)
class Tensor:
    """The description of a tensor, known before its numbers are read."""

    name: str
    """The name in messages; two tensors may share one."""
    dtype: str
    shape: tuple[int, ...]
    numbers: int = 0
    """The number of real numbers to average. It is 0 if the tensor is copied from the newest
    checkpoint, or if it shares the memory of another tensor, which is averaged."""
    number_dtype: np.dtype[Any] = NO_NUMBERS
    """The dtype of the real numbers."""
    mean_dtype: np.dtype[Any] = NO_NUMBERS
    """The dtype of their averages."""
    memory: str = ""
    """The layout in memory, in formats with shared memory. All checkpoints must have the same."""
    cuts: tuple[int, ...] = ()
    """The positions where the tensor can be cut into pieces; if empty, it can be cut anywhere."""
    left: bool = False
    """Whether the user chose to copy the tensor from the newest checkpoint."""

    @classmethod
    def averaged(cls, name: str, dtype: str, shape: tuple[int, ...], elements: int) -> Tensor:
        """Describe a tensor whose `elements` are averaged, of a dtype in `REAL_DTYPES`."""
        real = _real_dtype(dtype)
        return cls(name, dtype, shape, elements * (1 + _is_complex(dtype)), real, real)

    def means(self, averages: Averages) -> Averages:
        """Yield the averages of this tensor's pieces, which come next in `averages`."""
        taken = 0
        while taken < self.numbers:
            means = next(averages)
            taken += len(means[0])
            yield means


class Checkpoint(ABC):
    """A saved model. The constructor reads only the descriptions of its tensors."""

    kind: ClassVar[str] = "a file"
    """The name of the format in messages."""
    threads: ClassVar[int] = 2
    """The number of threads that read and average. With two, one computes while the other reads."""
    left_out: int = 0
    """How many items the output lacks, since they belong to an optimizer."""
    path: Path
    tensors: dict[Hashable, Tensor]
    stamps: dict[Path, tuple[int, ...]]
    """The files of the checkpoint, each with its `stamp_of`."""

    def replacing(self, output: Path) -> AbstractContextManager[Any]:
        """Open an output, which replaces `output` atomically."""
        return whole_folder(output) if self.path.is_dir() else whole_file(output)

    @abstractmethod
    def read(self, key: Hashable, start: int, stop: int, out: Piece) -> None:
        """Read the numbers from `start` to `stop` of a tensor into the bytes `out`. Thread-safe."""

    def share(self, rank: int, size: int) -> None:
        """Keep only the tensors that one of several processes writes."""
        if size > 1:
            raise CheckpointError(
                f"{self.path}: only folders of torch.distributed.checkpoint can be averaged by "
                "several processes; start one process"
            )

    @abstractmethod
    def write(self, outputs: Sequence[Any], averages: Averages) -> Any:
        """Write this checkpoint to each output, with its tensors replaced by averages.

        Return what `finish` needs to know of this process.
        """

    def finish(self, outputs: Sequence[Any], parts: Sequence[Any]) -> None:  # noqa: B027
        """Complete the outputs in the first process, after all processes wrote their parts."""

    @abstractmethod
    def each(self, averages: Averages) -> Iterator[tuple[str, Any]]:
        """Yield the name and the average of each tensor, one at a time."""

    def averaged(self, averages: Averages) -> Any:
        """Return this checkpoint in memory, with its tensors replaced by averages."""
        return dict(self.each(averages))

    def choose(self, include: Sequence[str], exclude: Sequence[str], dtype: str | None) -> None:
        """Choose the tensors to average, and the dtype of the averages."""
        names = {tensor.name for tensor in self.tensors.values()}
        for pattern in (*include, *exclude):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise CheckpointError(
                    f"no tensor matches {pattern!r}; names look like {min(names)!r}"
                )
        for key, tensor in self.tensors.items():
            if any(fnmatchcase(tensor.name, pattern) for pattern in exclude) or (
                include and not any(fnmatchcase(tensor.name, pattern) for pattern in include)
            ):
                self.tensors[key] = replace(tensor, numbers=0, left=True)
            elif dtype is not None and tensor.numbers and not _is_complex(tensor.dtype):
                self.tensors[key] = replace(tensor, mean_dtype=_real_dtype(dtype))
        self.arrange()

    def arrange(self) -> None:  # noqa: B027 (some formats have nothing to arrange)
        """Sort and cut the tensors for writing, after `choose`."""

    def check_unchanged(self) -> None:
        """Raise if a file changed since it was opened."""
        for path, stamp in self.stamps.items():
            if stamp_of(path) != stamp:
                raise CheckpointError(f"{path}: the file changed while it was read")

    def check_like(self, newest: Checkpoint) -> None:
        """Raise unless both checkpoints have the same tensors, shapes and dtypes."""
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
        """Return the tensors that the other checkpoints must have as well."""
        return self.tensors

    def describe(self, name: str, dtype: str, shape: tuple[int, ...], elements: int) -> Tensor:
        """Describe a tensor. Raise unless it can be averaged or, such as integers, copied."""
        if dtype in REAL_DTYPES:
            return Tensor.averaged(name, dtype, shape, elements)
        if dtype.startswith(("int", "uint", "bool")):
            return Tensor(name, dtype, shape)
        raise CheckpointError(
            f"{self.path}: tensor {name!r}: {dtype} cannot be averaged; remove the tensor from the "
            f"checkpoints (supported: integers and {', '.join(REAL_DTYPES)})"
        )


def stamp_of(path: Path) -> tuple[int, ...]:
    """Return values that change if the file does."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def reading(problem: str) -> Iterator[None]:
    """Turn any exception, such as those of damaged files, into a CheckpointError with this text."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]  # torch adds a stack of C++ calls
        raise CheckpointError(f"{problem}: {type(error).__name__}: {first_line}") from error


def _is_complex(dtype: str) -> bool:
    return dtype.startswith("complex")


def _real_dtype(dtype: str) -> np.dtype[Any]:
    """Return the dtype of the real and imaginary parts of an averaged dtype."""
    name = REAL_DTYPES[dtype]
    module: Any = np
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes as module
    real: np.dtype[Any] = np.dtype(getattr(module, name))
    return real


def read_at(path: Path, position: int, out: Piece) -> None:
    """Fill `out` with the bytes of a file, starting at `position`."""
    view = memoryview(out.data)
    with path.open("rb", buffering=0) as stream:
        stream.seek(position)
        while view:
            count = stream.readinto(view)
            if not count:
                raise CheckpointError(f"{path}: the file shrank while it was read")
            view = view[count:]
