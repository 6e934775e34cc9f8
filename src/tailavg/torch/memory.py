"""Where an average is held: with the model, in main memory, or in files.

An update touches one tensor, the sum. The means of blocks are touched by folds, turns and reads
only, so they may be elsewhere. There they are worked on part by part, by the same operations, and
so to the same bits.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import secrets
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from errno import EBUSY, EINVAL, EOPNOTSUPP, ESTALE
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import torch
from torch import Tensor

from tailavg.core.files import InUseError, locked
from tailavg.core.tensors import NAMES, Entry, header

__all__ = [
    "LINE",
    "Flat",
    "Folder",
    "Mean",
    "Memory",
    "Offload",
    "Piece",
    "Place",
    "Spool",
    "empty",
    "place",
    "round_up",
]

Offload = str | os.PathLike[str] | None

LINE = 64
"""Bytes in a cache line."""


def empty(size: int, dtype: torch.dtype, device: torch.device, *, pinned: bool = False) -> Tensor:
    """A flat tensor, uninitialised if it is not in main memory.

    There it uses huge pages where the system has them, which makes the first write to 100 MB of new
    memory several times faster. What is never written takes no memory, and reads as 0.
    """
    if device.type != "cpu" or pinned:
        return torch.empty(size, dtype=dtype, device=device, pin_memory=pinned)
    return torch.frombuffer(_pages(size * dtype.itemsize), dtype=torch.uint8).view(dtype)[:size]


def _pages(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, round_up(size))
    pages = mmap.mmap(-1, round_up(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def round_up(size: int, unit: int = mmap.PAGESIZE) -> int:
    """Round a size in bytes up to a multiple of `unit`, at least one."""
    return max(1, math.ceil(size / unit)) * unit


class Piece(NamedTuple):
    """Where a tensor lies in a flat tensor, and in which order of elements."""

    start: int
    stop: int
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def order(self) -> list[int]:
        """The axes from the slowest to the fastest, unless that is their own order."""
        axes = sorted(range(len(self.shape)), key=lambda axis: -self.stride[axis])
        long = [axis for axis in axes if self.shape[axis] != 1]
        return axes if long != sorted(long) else []

    def shaped(self, flat: Tensor) -> Tensor:
        """The elements of this piece alone, as a tensor."""
        return flat.as_strided(self.shape, self.stride)

    def of(self, flat: Tensor) -> Tensor:
        """The tensor inside a flat tensor."""
        return self.shaped(flat[self.start : self.stop])


class Flat(NamedTuple):
    """The form of a flat tensor: its length, dtype, device, and the tensors that lie in it."""

    size: int
    dtype: torch.dtype
    device: torch.device
    pieces: Mapping[str, Piece]


class Mean(ABC):
    """The mean of a block: a flat tensor for each form, wherever it is."""

    @abstractmethod
    def load(self, form: int, start: int, stop: int, room: Tensor) -> Tensor:
        """The numbers [start, stop) of a flat tensor: a view, or a copy in `room`."""

    @abstractmethod
    def store(self, form: int, start: int, values: Tensor) -> None:
        """Put numbers in their place, unless they are a view of it."""

    @abstractmethod
    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Put whole tensors in their place."""

    @abstractmethod
    def views(self) -> dict[str, Tensor]:
        """Its tensors by name, to look at."""

    def file(self) -> Path | None:
        """The file that it is in."""
        return None


class Place(ABC):
    """Where means, and weights that are put aside, are held."""

    in_place: bool
    """Whether a mean may change while anything may still fail."""

    @abstractmethod
    def elsewhere(self, device: torch.device) -> bool:
        """Whether this is another place than a device."""

    @abstractmethod
    def mean(self, forms: Sequence[Flat]) -> Mean:
        """A mean that holds nothing yet."""

    @abstractmethod
    @contextmanager
    def renewed(self, mean: Mean) -> Iterator[Mean]:
        """What takes the place of a mean: itself, or another, which is whole in the end."""

    @abstractmethod
    def emptied(self, mean: Mean) -> Mean:
        """A mean that holds nothing, in the place of one that is given up."""

    @abstractmethod
    def spool(self, sizes: Mapping[torch.device, int]) -> Spool:
        """Room for so many bytes of weights from each device."""


class Spool(ABC):
    """Where the weights of a model are put aside."""

    @abstractmethod
    def put(self, tensors: Sequence[Tensor]) -> Sequence[Any]:
        """Copy tensors of one dtype and device; return what `get` needs for each."""

    @abstractmethod
    def get(self, kept: Any, into: Tensor) -> None:
        """Copy one of them back."""


def place(offload: Offload, device: torch.device | None) -> Place:
    """The place that is asked for; `device` is that of the accumulators, if one was given."""
    if offload is None:
        return Memory(device)
    if offload == "cpu":
        return Memory(torch.device("cpu"))
    if not isinstance(offload, str | os.PathLike):
        raise TypeError(f'offload: expected None, "cpu" or a folder, got {offload!r}')
    if isinstance(offload, str) and (not offload or _is_device(offload)):
        raise ValueError(
            f'offload: expected None, "cpu" or a folder, got {offload!r}; a folder of that name '
            f'is "./{offload}"'
        )
    return Folder(offload)


def _is_device(name: str) -> bool:
    try:
        torch.device(name.lower())
    except RuntimeError:
        return False
    return True


# In memory.


class Memory(Place):
    """In memory: on one device, or on that of the sums."""

    in_place = True

    def __init__(self, device: torch.device | None) -> None:
        self.device = device

    def elsewhere(self, device: torch.device) -> bool:
        """See `Place`."""
        return self.device is not None and self.device.type != device.type

    def mean(self, forms: Sequence[Flat]) -> Mean:
        """See `Place`."""
        return _Held(forms, self)

    @contextmanager
    def renewed(self, mean: Mean) -> Iterator[Mean]:
        """See `Place`."""
        yield mean

    def emptied(self, mean: Mean) -> Mean:
        """See `Place`."""
        return mean

    def spool(self, sizes: Mapping[torch.device, int]) -> Spool:
        """See `Place`."""
        return _Rooms(sizes, self.device)


class _Held(Mean):
    def __init__(self, forms: Sequence[Flat], where: Memory) -> None:
        self._forms = forms
        self._apart = [where.elsewhere(form.device) for form in forms]
        self.flats = [
            # an accelerator copies pinned memory without waiting
            empty(
                form.size,
                form.dtype,
                where.device or form.device,
                pinned=apart and form.device.type != "cpu",
            ).zero_()
            for form, apart in zip(forms, self._apart, strict=True)
        ]

    def load(self, form: int, start: int, stop: int, room: Tensor) -> Tensor:
        part = self.flats[form][start:stop]
        return room[: stop - start].copy_(part, non_blocking=True) if self._apart[form] else part

    def store(self, form: int, start: int, values: Tensor) -> None:
        if self._apart[form]:  # `views` waits for it
            self.flats[form][start : start + len(values)].copy_(values, non_blocking=True)

    def fill(self, values: Mapping[str, Tensor]) -> None:
        for name, view in self.views().items():
            view.copy_(values[name])

    def views(self) -> dict[str, Tensor]:
        for form, apart in zip(self._forms, self._apart, strict=True):
            if apart and form.device.type != "cpu":
                torch.accelerator.current_stream(form.device).synchronize()
        return {
            name: piece.of(flat)
            for form, flat in zip(self._forms, self.flats, strict=True)
            for name, piece in form.pieces.items()
        }


class _Rooms(Spool):
    """Copies in memory. Parts of a tensor must fill cache lines, all but the last."""

    def __init__(self, sizes: Mapping[torch.device, int], device: torch.device | None) -> None:
        self._device = device
        rooms: dict[torch.device, int] = {}
        for source, size in sizes.items():
            rooms[device or source] = rooms.get(device or source, 0) + size
        elsewhere = any(source.type != "cpu" for source in sizes)
        self._rooms = {
            where: empty(size, torch.uint8, where, pinned=where.type == "cpu" and elsewhere)
            for where, size in rooms.items()
        }
        self._used = dict.fromkeys(rooms, 0)

    def put(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        where, dtype = self._device or tensors[0].device, tensors[0].dtype
        sizes = [tensor.numel() for tensor in tensors]
        start, size = self._used[where], sum(sizes) * dtype.itemsize
        room = self._rooms[where][start : start + size].view(dtype)
        parts: tuple[Tensor, ...] = room.split(sizes)  # type: ignore[no-untyped-call]
        if len(tensors) > 1 and tensors[0].dim() == 1:
            torch.cat(tuple(tensors), out=room)
        else:
            parts = tuple(part.view(t.shape) for part, t in zip(parts, tensors, strict=True))
            torch._foreach_copy_(parts, tuple(tensors))
        self._used[where] += round_up(size, LINE)
        return parts

    def get(self, kept: Tensor, into: Tensor) -> None:
        into.copy_(kept)


# In files.


class _Span(NamedTuple):
    """Numbers [start, stop) of a flat tensor, and the byte of a file at which they begin."""

    start: int
    stop: int
    at: int


class _Form:
    """How flat tensors lie in a safetensors file: one after the other, without gaps."""

    def __init__(self, forms: Sequence[Flat]) -> None:
        self.flats = forms
        entries = []
        order = sorted(
            range(len(forms)), key=lambda i: list(NAMES).index(_format_name(forms[i].dtype))
        )
        for i in order:
            dtype = NAMES[_format_name(forms[i].dtype)]
            for name, piece in forms[i].pieces.items():
                size = piece.size * forms[i].dtype.itemsize
                entries.append(Entry(name, dtype, piece.shape, size, piece.order))
        self.header = header(entries, unit=mmap.PAGESIZE)
        self.spans: list[list[_Span]] = [[] for _ in forms]
        self.places: dict[str, tuple[int, int]] = {}  # the form and first byte of each tensor
        at = len(self.header)
        for i in order:
            size, spans = forms[i].dtype.itemsize, self.spans[i]
            for name, piece in forms[i].pieces.items():
                self.places[name] = i, at
                if spans and spans[-1].stop == piece.start:
                    spans[-1] = spans[-1]._replace(stop=piece.stop)
                else:
                    spans.append(_Span(piece.start, piece.stop, at))
                at += piece.size * size
        self.size = at

    def spans_in(self, form: int, start: int, stop: int) -> Iterator[_Span]:
        """What of [start, stop) is in the file, and where."""
        spans, size = self.spans[form], self.flats[form].dtype.itemsize
        first = max(0, bisect_right(spans, start, key=lambda span: span.start) - 1)
        for span in spans[first:]:
            if span.start >= stop:
                break
            low, high = max(start, span.start), min(stop, span.stop)
            if low < high:
                yield _Span(low, high, span.at + (low - span.start) * size)


def _format_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in NAMES:
        raise TypeError(f"offload: expected accumulators that safetensors can hold, got {dtype}")
    return name


class Folder(Place):
    """In the files of a folder, which no other average may use meanwhile.

    Every file is a safetensors file and is written once. If several processes train together, each
    has a folder of its own inside. Files go when the average does; those of a process that was
    killed go when the folder is used again.
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
                "offload: expected a folder of its own, got one that an average uses",
                str(self.path),
            ) from error
        self._process, self._made = os.getpid(), set[Path]()
        weakref.finalize(self, _close, self._made, lock, self._process)
        self._spare: Path | None = None  # a file to be written again, which takes half the time
        for pattern in ("mean-*.tailavg", "aside-*.tailavg"):
            for left in self.path.glob(pattern):  # by a process that was killed
                left.unlink(missing_ok=True)

    def elsewhere(self, device: torch.device) -> bool:
        """See `Place`."""
        return True

    def mean(self, forms: Sequence[Flat]) -> Mean:
        """See `Place`."""
        return _Filed(self, _Form(forms))

    @contextmanager
    def renewed(self, mean: Mean) -> Iterator[Mean]:
        """See `Place`."""
        assert isinstance(mean, _Filed)
        new = _Filed(self, mean.form)
        try:
            new.begin()
            yield new
            new.finish()
        except BaseException:
            new.remove()
            raise

    def emptied(self, mean: Mean) -> Mean:
        """See `Place`."""
        assert isinstance(mean, _Filed)
        mean.remove()
        return _Filed(self, mean.form)

    def spool(self, sizes: Mapping[torch.device, int]) -> Spool:
        """See `Place`."""
        file = self.new_file("aside", sum(sizes.values()))
        self._remove(Path(file.name))  # it goes with the process
        return _SpoolFile(file)

    def recycle(self, path: Path) -> None:
        """Take back a file, unless a saved state shares it."""
        if os.getpid() == self._process:
            with suppress(OSError):  # what is not removed now goes with the average
                if self._spare is None and path.stat().st_nlink == 1:
                    self._spare = path
                else:
                    self._remove(path)

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._made.discard(path)

    def new_file(self, kind: str, size: int) -> BinaryIO:
        """A file with room for so many bytes."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"offload: expected the process that made the average, got a fork of it; the files "
                f"in {self.path} are not its own"
            )
        spare, self._spare = self._spare, None
        if spare is not None:
            with suppress(OSError):
                if kind == "mean" and spare.stat().st_size == size:
                    return spare.open("r+b", buffering=0)
                self._remove(spare)
        path = self.path / f"{kind}-{secrets.token_hex(8)}.tailavg"
        file = path.open("x+b", buffering=0)
        self._made.add(path)
        try:
            _allocate(file, size)
        except BaseException as error:
            file.close()
            self._remove(path)
            if isinstance(error, OSError):
                raise OSError(
                    error.errno, f"no room for {size:,} bytes: {error.strerror}", str(path)
                ) from error
            raise
        return file

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"copy: expected an average in memory, got one with files in {self.path}; save its "
            "state, and load that into another"
        )


def _close(made: set[Path], lock: ExitStack, process: int) -> None:
    if os.getpid() == process:  # and not a copy of it that was forked
        for path in made:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        with suppress(OSError):
            lock.close()


class _Filed(Mean):
    """A mean in a file; no file while it holds nothing."""

    def __init__(self, folder: Folder, form: _Form) -> None:
        self._folder = folder
        self.form = form
        self.path: Path | None = None
        self._stamp: tuple[int, ...] = ()
        self._file: BinaryIO | None = None  # while it is written

    def begin(self) -> None:
        self._file = self._folder.new_file("mean", self.form.size)
        self.path = Path(self._file.name)
        _write(self._file, self.path, 0, memoryview(self.form.header))

    def finish(self) -> None:
        assert self._file is not None
        self._stamp = _stamp(self._file)
        self._file.close()
        self._file = None

    def remove(self) -> None:
        if self._file is not None:
            self._file.close()
        if self.path is not None:
            self._folder.recycle(self.path)
        self.path = self._file = None

    def file(self) -> Path | None:
        if self.path is not None:
            self._opened().close()
        return self.path

    def _opened(self) -> BinaryIO:
        """The file as it was written, or an OSError that names it."""
        assert self.path is not None
        file = self.path.open("rb", buffering=0)
        if _stamp(file) != self._stamp:
            file.close()
            raise OSError(
                ESTALE,
                "expected a file as the average wrote it, got one that was changed since; load a "
                "saved state, or create a new average",
                str(self.path),
            )
        return file

    def load(self, form: int, start: int, stop: int, room: Tensor) -> Tensor:
        out = room[: stop - start]
        if self.path is None:
            return out  # whatever it is
        part = out if out.device.type == "cpu" else torch.empty_like(out, device="cpu")
        with self._opened() as file:
            end = start
            for low, high, at in self.form.spans_in(form, start, stop):
                part[end - start : low - start].zero_()  # a gap
                _read(file, at, _bytes(part[low - start : high - start]))
                end = high
            part[end - start :].zero_()
        return out if part is out else out.copy_(part)

    def store(self, form: int, start: int, values: Tensor) -> None:
        assert self._file is not None
        assert self.path is not None
        values = values.cpu()
        for low, high, at in self.form.spans_in(form, start, start + len(values)):
            _write(self._file, self.path, at, _bytes(values[low - start : high - start]))

    def fill(self, values: Mapping[str, Tensor]) -> None:
        assert self._file is not None
        assert self.path is not None
        for name, (form, at) in self.form.places.items():
            flat = self.form.flats[form]
            piece, value = flat.pieces[name], values[name].detach()
            if piece.order or not value.is_contiguous() or value.dtype != flat.dtype:
                room = torch.empty(piece.size, dtype=flat.dtype, device="cpu")
                piece.shaped(room).copy_(value)
                value = room
            _write(self._file, self.path, at, _bytes(value.cpu()))

    def views(self) -> dict[str, Tensor]:
        flats = self.form.flats
        if self.path is None:
            zeros = [empty(flat.size, flat.dtype, torch.device("cpu")) for flat in flats]
            return {n: flats[i].pieces[n].of(zeros[i]) for n, (i, _) in self.form.places.items()}
        with self._opened() as file:
            data = mmap.mmap(file.fileno(), self.form.size, access=mmap.ACCESS_COPY)
        found = {}
        for name, (i, at) in self.form.places.items():
            piece, dtype = flats[i].pieces[name], flats[i].dtype
            found[name] = piece.shaped(
                torch.frombuffer(data, dtype=dtype, count=piece.size, offset=at)
                if piece.size
                else torch.empty(0, dtype=dtype, device="cpu")
            )
        return found


class _SpoolFile(Spool):
    def __init__(self, file: BinaryIO) -> None:
        self._file, self._used = file, 0
        weakref.finalize(self, file.close)

    def put(self, tensors: Sequence[Tensor]) -> Sequence[int]:
        starts = []
        for tensor in tensors:
            data = _bytes(tensor.cpu().contiguous())
            _write(self._file, Path(self._file.name), self._used, data)
            starts.append(self._used)
            self._used += len(data)
        return starts

    def get(self, kept: int, into: Tensor) -> None:
        direct = into.device.type == "cpu" and into.is_contiguous()
        part = into if direct else torch.empty(into.shape, dtype=into.dtype, device="cpu")
        _read(self._file, kept, _bytes(part))
        if not direct:
            into.copy_(part)


def _allocate(file: BinaryIO, size: int) -> None:
    """Let a file have room, on disk where the system can tell."""
    try:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
            return
    except OSError as error:
        if error.errno not in (EINVAL, EOPNOTSUPP):
            raise
    file.truncate(size)


def _stamp(file: BinaryIO) -> tuple[int, ...]:
    """What changes if a file does."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor. (NumPy would keep it from being resized.)"""
    size = tensor.numel() * tensor.itemsize
    if not size:
        return memoryview(b"")
    memory: Any = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    memory.owner = tensor  # which lives as long as this is looked at
    return memoryview(memory).cast("B")


def _write(file: BinaryIO, path: Path, at: int, data: memoryview) -> None:
    file.seek(at)
    while data:
        try:
            data = data[file.write(data) or 0 :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


def _read(file: BinaryIO, at: int, into: memoryview) -> None:
    file.seek(at)
    while into:
        got = file.readinto(into)  # type: ignore[attr-defined]
        if not got:
            raise OSError(
                ESTALE, "expected a file as the average wrote it, got a shorter one", file.name
            )
        into = into[got:]
