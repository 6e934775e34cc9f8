"""Write files and folders completely or not at all, and lock them.

Everything is written under a temporary name beside its target, synced, and then renamed. A process
that is killed leaves at most that temporary: a hidden name that ends in `.tailavg`.
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

_LONGEST = 200  # bytes of a name that its temporary name repeats; names end at some 255


class InUseError(OSError):
    """Another process uses the file."""


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block ends without an exception.

    An exception leaves the old file unchanged and removes the temporary one. A symlink is followed,
    and a file that is replaced keeps its mode.
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
    """Make a temporary folder that is renamed to `path` when the block ends without an exception.

    Whoever writes a file into the folder syncs that file. An exception leaves an old folder
    unchanged and removes the temporary one. `replaces` tells whether an old folder, which is not
    empty, may be replaced.

    No system can replace a folder that is not empty by renaming another one, so an old folder is
    renamed first and removed last. `saved_folder` finds it if the process is killed in between.
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
            shutil.rmtree(old, ignore_errors=True)  # of a process that was killed before it did
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
    """Return `path`, or where its old contents are if a process was killed while replacing them."""
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
    """Hold the lock of a file: a hidden file beside it, which is removed at the end.

    There are no locks on Windows.

    Raises:
        InUseError: If another process holds it.
    """
    if fcntl is None:
        yield
        return
    target, _ = _target(path)
    lock = target.with_name(f".{_short(target)}.lock")
    file = _open_locked(lock, path)
    try:
        yield
    finally:
        if _is_at(lock, file):  # and not one in a folder that was removed and made anew
            lock.unlink()
        os.close(file)


def sync(file: BinaryIO) -> None:
    """Wait until what was written to a file is on disk."""
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
        except OSError:  # a file system without locks
            pass
        if _is_at(lock, file):
            return file
        os.close(file)  # its last holder removed it between our open and our lock


def _is_at(path: Path, file: int) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _target(path: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """Return the file that a plain `open` would write, and its mode if it exists."""
    target = Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return target, None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):  # a device would be replaced
        raise OSError(errno.EINVAL, "expected a regular file, got a device or a pipe", str(path))
    return target, stat.S_IMODE(mode)


def _short(target: Path) -> str:
    """As much of a name as fits into the name of a file beside it."""
    return os.fsdecode(os.fsencode(target.name)[:_LONGEST])


def _beside(target: Path, tag: str) -> Path:
    return target.with_name(f".{_short(target)}.{tag}.tailavg")


def _sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk, where folders can be opened."""
    try:
        opened = os.open(folder, os.O_RDONLY)
    except PermissionError:  # on Windows, or a folder that may be written to and not read
        return
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without it
            raise
    finally:
        os.close(opened)
