"""Means of blocks, and weights that a swap saves, in the files of a folder: `offload=folder`.

The classes have the methods of those in `tailavg.torch.storage`; read that first.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from errno import EBUSY, EINVAL, EOPNOTSUPP, ESTALE
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np
import torch
from torch import Tensor

from tailavg.io.files import InUseError, locked
from tailavg.io.tensors import NAMES, Entry, header
from tailavg.torch.storage import Layout, dtype_name

__all__ = ["FileBlock", "FolderStorage"]

_ALIGNMENT = 16  # bytes: the size of the largest number, a complex128


class FolderStorage:
    """Blocks in the files of a folder, which is locked: only one average can use it at a time.

    Each block is a safetensors file, which is written once. In distributed training, each process
    has its own subfolder. The files are removed with the average; files of a killed process are
    removed when the folder is used again.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and torch.distributed.get_world_size() > 1:
            self.path /= f"rank-{torch.distributed.get_rank()}"
        self.path.mkdir(parents=True, exist_ok=True)
        lock = ExitStack()
        try:
            lock.enter_context(locked(self.path / "offload"))
        except InUseError as error:
            raise InUseError(
                EBUSY,
                "offload: another average uses this folder; choose another folder",
                str(self.path),
            ) from error
        self._process, self._files = os.getpid(), set[Path]()
        weakref.finalize(self, _close, self._files, lock, self._process)
        for pattern in ("mean-*.tailavg", "saved-*.tailavg"):
            for leftover in self.path.glob(pattern):  # of a process that was killed
                leftover.unlink(missing_ok=True)

    def new_block(self, layouts: Sequence[Layout]) -> FileBlock:
        """See `MemoryStorage`."""
        return FileBlock(self, layouts)

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `MemoryStorage`. The copies are in an unlinked file, which is freed with them."""
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        starts = list(accumulate(sizes, initial=0))
        with self.new_file("saved", max(starts[-1], _ALIGNMENT)) as file:
            data = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
            self.remove(Path(file.name))
        return [
            data[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            for start, tensor in zip(starts, tensors, strict=False)
        ]

    def new_file(self, kind: str, size: int) -> BinaryIO:
        """Create a file, and allocate `size` bytes for it on disk."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"offload: the files in {self.path} belong to the process that made the average; "
                "a forked process can read the average, but not update it"
            )
        path = self.path / f"{kind}-{secrets.token_hex(8)}.tailavg"
        self._files.add(path)
        file = path.open("x+b")
        try:
            _allocate(file, size)
        except OSError as error:
            file.close()
            self.remove(path)
            raise OSError(
                error.errno, f"no room for {size:,} bytes: {error.strerror}", str(path)
            ) from error
        return file

    def remove(self, path: Path) -> None:
        """Remove a file. Saved states that hard-link the file keep their link."""
        if os.getpid() == self._process:
            with suppress(OSError):  # a file that stays is removed with the average
                path.unlink(missing_ok=True)
                self._files.discard(path)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"copy: an average with files in {self.path} cannot be copied; save its state, and "
            "load the state into another average"
        )


def _close(files: set[Path], lock: ExitStack, process: int) -> None:
    if os.getpid() == process:  # not in a forked process
        for path in files:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        with suppress(OSError):
            lock.close()


def _allocate(file: BinaryIO, size: int) -> None:
    """Allocate a file on disk: on a full disk, a write to mapped memory crashes the process."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
            return
    except OSError as error:
        if error.errno not in (EINVAL, EOPNOTSUPP):
            raise
    for start in range(0, size, 1 << 20):
        file.write(bytes(min(1 << 20, size - start)))
    file.seek(0)


class FileBlock:
    """The mean of a block in a safetensors file. A block without values has no file."""

    def __init__(self, folder: FolderStorage, layouts: Sequence[Layout]) -> None:
        self._folder = folder
        self._layouts = layouts
        entries = []
        for layout in layouts:
            dtype = dtype_name(layout.dtype)
            if dtype not in NAMES:
                raise TypeError(f"offload: safetensors does not support accumulators of {dtype}")
            for name, (start, stop, shape, _) in layout.slices.items():
                size = (stop - start) * layout.dtype.itemsize
                entries.append(Entry(name, NAMES[dtype], shape, size))
        self._header = header(entries, unit=mmap.PAGESIZE)
        sizes = [layout.size * layout.dtype.itemsize for layout in layouts]
        *self._starts, self._size = accumulate(sizes, initial=len(self._header))
        self.path: Path | None = None
        self._file: BinaryIO | None = None  # while the block is written
        self._stamp: tuple[int, ...] = ()

    def flats(self) -> list[Tensor]:
        """See `MemoryBlock`. Raise an OSError that names the file if the file was changed."""
        if self.path is None:  # NumPy's zeros take no memory until they are written to
            return [
                torch.from_numpy(np.zeros(layout.size, dtype_name(layout.dtype)))
                for layout in self._layouts
            ]
        with self.path.open("rb") as file:
            if _stamp(file) != self._stamp:
                raise OSError(
                    ESTALE,
                    "the file was changed since the average wrote it; load a saved state, or "
                    "create a new average",
                    str(self.path),
                )
            # copy-on-write: the file must not change, since saved states may link it
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return [
            torch.frombuffer(data, dtype=layout.dtype, count=layout.size, offset=start)
            if layout.size
            else torch.empty(0, dtype=layout.dtype)
            for layout, start in zip(self._layouts, self._starts, strict=True)
        ]

    @contextmanager
    def rewritten(self) -> Iterator[FileBlock]:
        """See `MemoryBlock`."""
        file = self._folder.new_file("mean", self._size)
        new = copy(self)
        new.path, new._file = Path(file.name), file
        try:
            with file:
                file.write(self._header)
                yield new
                file.flush()
                new._stamp = _stamp(file)
        except BaseException as error:
            new.clear()
            if isinstance(error, OSError) and error.filename is None:
                error.filename = file.name
            raise

    def store(self, layout: int, start: int, values: Tensor) -> None:
        """See `MemoryBlock`."""
        assert self._file is not None
        dtype = self._layouts[layout].dtype
        self._file.seek(self._starts[layout] + start * dtype.itemsize)
        self._file.write(values.detach().to("cpu", dtype).numpy().data)

    def clear(self) -> None:
        """See `MemoryBlock`."""
        if self.path is not None:
            self._folder.remove(self.path)
        self.path = None


def _stamp(file: BinaryIO) -> tuple[int, ...]:
    """Return the identity, size and time of a file: they differ after a change."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
