"""Write files and folders atomically, and lock them.

Each file or folder is written under a temporary name beside its target, synced, and then renamed.
A killed process leaves at most the temporary: a hidden file or folder that ends in `.tailavg`.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "InUseError",
    "check_writable",
    "locked",
    "saved_folder",
    "sync",
    "whole_file",
    "whole_folder",
]

_MAX_NAME = 200  # bytes of a name that its temporary name repeats; file systems allow about 255


class InUseError(OSError):
    """Another process uses the file."""


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block ends without an exception.

    An exception removes the temporary file and leaves the old one unchanged. Symbolic links are
    followed, and the new file gets the mode of the old one.
    """
    target, mode = _target(path)
    temporary = _beside(target, secrets.token_hex(4))
    try:
        with temporary.open("xb") as file:
            yield file
            sync(file)
        if mode is not None:
            temporary.chmod(mode)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


@contextmanager
def whole_folder(
    path: str | os.PathLike[str], replaces: Callable[[Path], bool] = lambda _: False
) -> Iterator[Path]:
    """Create a temporary folder that is renamed to `path` when the block ends without an exception.

    The caller syncs the files that it writes. An exception removes the temporary folder and leaves
    the old one unchanged. `replaces` returns whether a folder that is not empty may be replaced.

    A rename cannot replace a folder that is not empty, so the old folder is renamed first and
    removed last. If the process is killed in between, `saved_folder` finds the old folder.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not (
        target.is_dir() and (replaces(target) or not any(target.iterdir()))
    ):
        raise FileExistsError(
            errno.EEXIST, "exists and holds other files; choose another path", str(path)
        )
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target.parent))
    temporary, old = _beside(target, secrets.token_hex(4)), _beside(target, "old")
    try:
        temporary.mkdir()
        yield temporary
        _sync_folder(temporary)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)  # left behind by a killed process
            target.rename(old)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    _sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def saved_folder(path: str | os.PathLike[str]) -> Path:
    """Return `path`, or its old folder if a process was killed while replacing it."""
    target = Path(os.path.realpath(path))
    old = _beside(target, "old")
    return old if old.is_dir() and not target.exists() else Path(path)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise the OSError that `whole_file` would raise, without writing anything."""
    temporary = _beside(_target(path)[0], secrets.token_hex(4))
    try:
        temporary.touch(exist_ok=False)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Lock a file by a hidden lock file beside it, which is removed at the end.

    On Windows, nothing is locked.

    Raises:
        InUseError: If another process holds the lock.
    """
    if fcntl is None:
        yield
        return
    target, _ = _target(path)
    lock = target.with_name(f".{_short_name(target)}.lock")
    file = _open_locked(lock, path)
    try:
        yield
    finally:
        if _is_at(lock, file):  # not so if the folder was deleted and created again
            lock.unlink()
        os.close(file)


def sync(file: BinaryIO) -> None:
    """Wait until the contents of a file are on disk."""
    file.flush()
    os.fsync(file.fileno())


def _open_locked(lock: Path, path: str | os.PathLike[str]) -> int:
    while True:
        file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise InUseError(errno.EBUSY, "in use by another process", str(path)) from None
        except OSError:  # the file system has no locks
            pass
        if _is_at(lock, file):
            return file
        os.close(file)  # the previous process removed the file after we opened it


def _is_at(path: Path, file: int) -> bool:
    """Return whether a path still leads to an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _target(path: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """Return the file that `open` would write, and its mode, or None if it does not exist."""
    target = Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return target, None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):  # the rename would replace a device by a file
        raise OSError(errno.EINVAL, "expected a regular file, got a device or a pipe", str(path))
    return target, stat.S_IMODE(mode)


def _short_name(target: Path) -> str:
    """Return a file's name, cut so that the names of its temporary files are not too long."""
    return os.fsdecode(os.fsencode(target.name)[:_MAX_NAME])


def _beside(target: Path, tag: str) -> Path:
    """Return a hidden name beside a file or folder."""
    return target.with_name(f".{_short_name(target)}.{tag}.tailavg")


def _sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk, if the system can sync folders."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # on Windows, or if the folder is not readable
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system cannot sync folders
            raise
    finally:
        os.close(descriptor)
