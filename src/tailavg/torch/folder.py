"""Blocks in the files of a folder: `offload=folder`. See `tailavg.torch.storage`."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from errno import EBUSY, EINVAL, EOPNOTSUPP, ESTALE
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import torch
from torch import Tensor

from tailavg.io.files import InUseError, locked
from tailavg.io.tensors import NAMES, Entry, header
from tailavg.torch.layout import Layout

__all__ = ["FileBlock", "FolderStorage"]


class FolderStorage:
    """Blocks in the files of a folder, which no other average may use meanwhile.

    Every block is a safetensors file and is written once. If several processes train together, each
    has a folder of its own inside. The files are removed with the average; those of a process that
    was killed are removed when the folder is used again.
    """

    in_place = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        if together and torch.distributed.get_world_size() > 1:
            self.path /= f"rank-{torch.distributed.get_rank()}"
        self.path.mkdir(parents=True, exist_ok=True)
        lock = ExitStack()
        try:
            lock.enter_context(locked(self.path / "offload"))
        except InUseError as error:
            raise InUseError(
                EBUSY,
                "offload: another average uses this folder; choose another one",
                str(self.path),
            ) from error
        self._process, self._files = os.getpid(), set[Path]()
        weakref.finalize(self, _close, self._files, lock, self._process)
        for pattern in ("mean-*.tailavg", "saved-*.tailavg"):
            for leftover in self.path.glob(pattern):  # of a process that was killed
                leftover.unlink(missing_ok=True)

    def new_block(self, layouts: Sequence[Layout]) -> FileBlock:
        """See `MemoryStorage`."""
        return FileBlock(self, _FileLayout(layouts))

    def save(self, tensors: list[Tensor]) -> Callable[[], None]:
        """See `MemoryStorage`."""
        file = self.new_file("saved", sum(tensor.numel() * tensor.itemsize for tensor in tensors))
        self.remove(Path(file.name))  # the file is gone when it is closed
        starts = []
        for tensor in tensors:
            starts.append(file.tell())
            _write(file, file.tell(), _bytes(tensor.cpu().contiguous()))

        def write_back() -> None:
            for tensor, start in zip(tensors, starts, strict=True):
                direct = tensor.device.type == "cpu" and tensor.is_contiguous()
                copy = tensor if direct else torch.empty(tensor.shape, dtype=tensor.dtype)
                _read(file, start, _bytes(copy))
                if not direct:
                    tensor.copy_(copy)

        weakref.finalize(write_back, file.close)
        return write_back

    def new_file(self, kind: str, size: int) -> BinaryIO:
        """Create a file with room for so many bytes."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"offload: the files in {self.path} belong to the process that made the average; "
                "a fork of that process may read them, but not update the average"
            )
        path = self.path / f"{kind}-{secrets.token_hex(8)}.tailavg"
        file = path.open("x+b", buffering=0)
        self._files.add(path)
        try:
            _allocate(file, size)
        except BaseException as error:
            file.close()
            self.remove(path)
            if isinstance(error, OSError):
                raise OSError(
                    error.errno, f"no room for {size:,} bytes: {error.strerror}", str(path)
                ) from error
            raise
        return file

    def remove(self, path: Path) -> None:
        """Remove a file; a saved state that links it keeps its own name for it."""
        if os.getpid() == self._process:
            with suppress(OSError):  # what is not removed now is removed with the average
                path.unlink(missing_ok=True)
                self._files.discard(path)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"copy: an average with files in {self.path} cannot be copied; save its state, and "
            "load the state into another average"
        )


def _close(files: set[Path], lock: ExitStack, process: int) -> None:
    if os.getpid() == process:  # and not a fork of it
        for path in files:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        with suppress(OSError):
            lock.close()


class _FileLayout:
    """How flat tensors lie in a safetensors file: one after the other."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.layouts = layouts
        formats = list(NAMES)
        names = [str(layout.dtype).removeprefix("torch.") for layout in layouts]
        for name in names:
            if name not in NAMES:
                raise TypeError(f"offload: safetensors does not support accumulators of {name}")
        entries = []
        sizes = {}
        for i in sorted(range(len(layouts)), key=lambda i: formats.index(names[i])):
            layout = layouts[i]
            sizes[i] = layout.size * layout.dtype.itemsize
            for name, where in sorted(layout.slices.items(), key=lambda item: item[1].start):
                size = where.size * layout.dtype.itemsize
                entries.append(Entry(name, NAMES[names[i]], where.shape, size, where.axis_order))
        self.header = header(entries, unit=mmap.PAGESIZE)
        self.starts: dict[int, int] = {}  # the first byte of each flat tensor
        self.size = len(self.header)
        for i, size in sizes.items():
            self.starts[i] = self.size
            self.size += size

    def position(self, layout: int, start: int) -> int:
        """Return the byte at which a number of a flat tensor begins."""
        return self.starts[layout] + start * self.layouts[layout].dtype.itemsize


class FileBlock:
    """The mean of a block in a file. There is no file while the block has no values."""

    def __init__(self, folder: FolderStorage, layout: _FileLayout) -> None:
        self._folder = folder
        self._layout = layout
        self._path: Path | None = None
        self._stamp: tuple[int, ...] = ()
        self._file: BinaryIO | None = None  # while it is written

    @contextmanager
    def rewritten(self) -> Iterator[FileBlock]:
        """See `MemoryBlock`."""
        new = FileBlock(self._folder, self._layout)
        try:
            new._file = self._folder.new_file("mean", self._layout.size)
            new._path = Path(new._file.name)
            _write(new._file, 0, memoryview(self._layout.header))
            yield new
            new._stamp = _stamp(new._file)
            new._file.close()
            new._file = None
        except BaseException:
            new.emptied()
            raise

    def emptied(self) -> FileBlock:
        """See `MemoryBlock`."""
        if self._file is not None:
            self._file.close()
        if self._path is not None:
            self._folder.remove(self._path)
        self._path = self._file = None
        return self

    def file(self) -> Path | None:
        """See `MemoryBlock`."""
        if self._path is not None:
            self._opened().close()
        return self._path

    def _opened(self) -> BinaryIO:
        """Open the file, or raise an OSError that names it."""
        assert self._path is not None
        file = self._path.open("rb", buffering=0)
        if _stamp(file) != self._stamp:
            file.close()
            raise OSError(
                ESTALE,
                "the file was changed since the average wrote it; load a saved state, or create a "
                "new average",
                str(self._path),
            )
        return file

    def load(self, layout: int, start: int, stop: int) -> Tensor:
        """See `MemoryBlock`."""
        form = self._layout.layouts[layout]
        part = torch.empty(stop - start, dtype=form.dtype, device="cpu")
        if self._path is not None:
            with self._opened() as file:
                _read(file, self._layout.position(layout, start), _bytes(part))
        return part.to(form.device)

    def store(self, layout: int, start: int, values: Tensor) -> None:
        """See `MemoryBlock`."""
        assert self._file is not None
        _write(self._file, self._layout.position(layout, start), _bytes(values.cpu()))

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """See `MemoryBlock`."""
        for i, layout in enumerate(self._layout.layouts):
            for name, where in layout.slices.items():
                value = values[name].detach()
                if where.axis_order or not value.is_contiguous() or value.dtype != layout.dtype:
                    elements = torch.empty(where.size, dtype=layout.dtype, device="cpu")
                    where.shaped(elements).copy_(value)
                    value = elements
                self.store(i, where.start, value)

    def views(self) -> dict[str, Tensor]:
        """See `MemoryBlock`."""
        found: dict[str, Tensor] = {}
        for i, layout in enumerate(self._layout.layouts):
            flat = self._mapped(i, layout)
            found |= {name: where.of(flat) for name, where in layout.slices.items()}
        return found

    def _mapped(self, i: int, layout: Layout) -> Tensor:
        if self._path is None:  # NumPy's zeros take no memory until they are written to
            zeros = np.zeros(layout.size, str(layout.dtype).removeprefix("torch."))
            return torch.from_numpy(zeros)
        if not layout.size:
            return torch.empty(0, dtype=layout.dtype, device="cpu")
        with self._opened() as file:
            data = mmap.mmap(file.fileno(), self._layout.size, access=mmap.ACCESS_COPY)
        return torch.frombuffer(
            data, dtype=layout.dtype, count=layout.size, offset=self._layout.starts[i]
        )


def _allocate(file: BinaryIO, size: int) -> None:
    """Give a file its size, and its room on disk where the system supports that."""
    try:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
            return
    except OSError as error:
        if error.errno not in (EINVAL, EOPNOTSUPP):
            raise
    file.truncate(size)


def _stamp(file: BinaryIO) -> tuple[int, ...]:
    """Return what changes if a file does."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor. (NumPy would keep it from being resized.)"""
    size = tensor.numel() * tensor.itemsize
    if not size:
        return memoryview(b"")
    memory: Any = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    memory.owner = tensor  # stays alive as long as the view
    return memoryview(memory).cast("B")


def _write(file: BinaryIO, position: int, data: memoryview) -> None:
    file.seek(position)
    while data:
        try:
            data = data[file.write(data) or 0 :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file.name)) from error


def _read(file: BinaryIO, position: int, into: memoryview) -> None:
    file.seek(position)
    while into:
        count = file.readinto(into)  # type: ignore[attr-defined]
        if not count:
            raise OSError(ESTALE, "the file is shorter than the average wrote it", file.name)
        into = into[count:]
