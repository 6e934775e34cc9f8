"""Files and folders that are written whole or not at all, by one process at a time."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # on Windows, where an open file cannot be renamed or removed
    fcntl = None  # type: ignore[assignment]

__all__ = ["InUseError", "check_writable", "locked", "whole_file", "whole_folder"]

_LONGEST = 200  # bytes of a name in that of its temporary file: there is a limit of some 255


class InUseError(OSError):
    """Another process uses the file."""


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file under a temporary name, which gets its own name when all is on disk.

    Whatever is raised before that leaves the old file as it was, and nothing else behind. What a
    killed process left is removed. A symlink is followed; an old file's mode is kept.
    """
    target, mode = _target(path)
    _remove_leftovers(target)
    temporary = _temporary(target)
    try:
        with temporary.open("xb") as file:
            if not (_lock(file.fileno()) and _is(temporary, file.fileno())):
                # another process took it for a leftover before it was locked
                with whole_file(path) as another:
                    yield another
                return
            yield file
            file.flush()
            if mode is not None and hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
            if fcntl is not None:  # while the lock is held, none takes it for a leftover
                temporary.replace(target)
        if fcntl is None:
            temporary.replace(target)
        _sync_folder(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(
    path: str | os.PathLike[str], replaces: Callable[[Path], bool] = lambda _: False
) -> Iterator[Path]:
    """A folder under a temporary name, which gets its own name when all is on disk.

    Whoever writes a file into it syncs that file. Whatever is raised before the end leaves an old
    folder as it was, and nothing else behind. What a killed process left is removed.

    Args:
        path: Its name.
        replaces: Whether it may take the place of this folder, which is not empty.
    """
    target = Path(os.path.realpath(path))
    replaced = target.is_dir() and any(target.iterdir())
    if target.exists() and not (replaces(target) if replaced else target.is_dir()):
        raise FileExistsError(
            errno.EEXIST, "expected a new name or that of its like, got other files", str(path)
        )
    _remove_leftovers(target)
    temporary = _temporary(target)
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target.parent))
    temporary.mkdir()
    try:
        with _opened_folder(temporary) as opened:
            if opened is not None and not (_lock(opened) and _is(temporary, opened)):
                # another process took it for a leftover before it was locked
                with whole_folder(path, replaces) as another:
                    yield another
                return
            yield temporary
            _sync(opened)
            (_exchange if replaced else os.replace)(temporary, target)
            _sync_folder(target.parent)
    finally:  # or what was replaced
        shutil.rmtree(temporary, ignore_errors=True)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise the OSError that `whole_file` would raise, without writing anything."""
    temporary = _temporary(_target(path)[0])
    try:
        temporary.touch(exist_ok=False)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Keep other processes that ask for this lock away from a file.

    Raises:
        InUseError: If another process has it.
    """
    target, _ = _target(path)
    lock = target.with_name(f".{_short(target)}.lock")
    while True:
        file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not _lock(file):
                raise InUseError(errno.EBUSY, "in use by another process", str(path))
            if _is(lock, file):  # the process that had it may have removed it meanwhile
                break
        except BaseException:
            os.close(file)
            raise
        os.close(file)
    try:
        yield
    finally:
        if fcntl is not None and _is(lock, file):  # and not that of a folder made anew
            lock.unlink(missing_ok=True)
        os.close(file)


def _target(path: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """The file that a plain `open` would write, and its mode if it exists."""
    target = Path(os.path.realpath(path))
    try:
        found = target.lstat()
    except FileNotFoundError:
        return target, None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if not stat.S_ISREG(found.st_mode):  # a device would be replaced
        raise OSError(errno.EINVAL, "expected a regular file, got a device or a pipe", str(path))
    return target, stat.S_IMODE(found.st_mode)


def _short(target: Path) -> str:
    """As much of a name as fits into that of a temporary file."""
    return os.fsdecode(os.fsencode(target.name)[:_LONGEST])


def _temporary(target: Path) -> Path:
    """A new name beside the target."""
    return target.with_name(f".{_short(target)}.{secrets.token_hex(4)}.tailavg")


def _remove_leftovers(target: Path) -> None:
    """Remove the temporary files of processes that were killed: those that are not locked."""
    if fcntl is None:
        return
    pattern = re.compile(rf"\.{re.escape(_short(target))}\.[0-9a-f]{{8}}\.tailavg")
    with suppress(OSError):  # whose files are not ours to read or to remove
        for found in target.parent.iterdir():
            if pattern.fullmatch(found.name):
                with suppress(OSError):
                    if found.is_dir():
                        with _opened_folder(found) as opened:
                            if opened is not None and _lock(opened):
                                shutil.rmtree(found)
                        continue
                    with found.open("rb") as file:
                        if _lock(file.fileno()):
                            found.unlink()


def _lock(file: int) -> bool:
    """Lock an open file; False if another process has it. Closing it unlocks it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL):
            raise
    return True


def _is(path: Path, file: int) -> bool:
    """Whether a name is that of an open file."""
    try:
        named: Any = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(file))


def _exchange(one: Path, other: Path) -> None:
    """Let two folders change names, in one step."""
    import ctypes  # which takes milliseconds

    library: Any = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
    names = os.fsencode(one), os.fsencode(other)
    if hasattr(library, "renameat2"):
        here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        failed = library.renameat2(here, names[0], here, names[1], both)
    elif sys.platform == "darwin":
        failed = library.renamex_np(*names, 2)  # RENAME_SWAP
    else:
        ctypes.set_errno(errno.ENOSYS)
        failed = True
    if failed:
        reason = os.strerror(ctypes.get_errno())
        raise OSError(
            ctypes.get_errno(), f"cannot replace a folder in one step here: {reason}", str(other)
        )


@contextmanager
def _opened_folder(folder: Path) -> Iterator[int | None]:
    """A folder that is open, where folders can be opened."""
    if os.name != "posix":
        yield None
        return
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # a folder may be writable and not readable
        yield None
        return
    try:
        yield opened
    finally:
        os.close(opened)


def _sync(opened: int | None) -> None:
    try:
        if opened is not None:
            os.fsync(opened)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without it
            raise


def _sync_folder(folder: Path) -> None:
    """Let a new name in a folder reach the disk."""
    with _opened_folder(folder) as opened:
        _sync(opened)
