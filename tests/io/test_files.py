"""Files are whole, synced, private to one writer, and look as if `open` had written them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tailavg.io import files
from tailavg.io.files import (
    InUseError,
    check_writable,
    locked,
    saved_folder,
    whole_file,
    whole_folder,
)
from tests.support.processes import started


def write(path: Path, data: bytes = b"new") -> None:
    with whole_file(path) as file:
        file.write(data)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def leftovers(folder: Path) -> list[str]:
    return [found.name for found in folder.iterdir() if found.name.startswith(".")]


def test_a_new_file_has_the_mode_that_open_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "ours")
        (tmp_path / "theirs").write_bytes(b"new")
    finally:
        os.umask(before)
    assert mode(tmp_path / "ours") == mode(tmp_path / "theirs") == 0o640


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o604)
    write(path)
    assert (path.read_bytes(), mode(path)) == (b"new", 0o604)


@pytest.mark.parametrize("exists", [True, False])
def test_a_symlink_is_followed(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "target", tmp_path / "link"
    if exists:
        target.write_bytes(b"old")
    link.symlink_to(target)
    write(link)
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert not leftovers(tmp_path)
    assert not leftovers(tmp_path / "elsewhere")


def test_what_is_written_and_its_folder_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, bytes]] = []

    def fsync(file: int) -> None:
        found = os.fstat(file)
        data = (
            os.pread(os.open(f"/proc/self/fd/{file}", os.O_RDONLY), 100, 0)
            if (stat.S_ISREG(found.st_mode))
            else b"a folder"
        )
        synced.append((found.st_ino, data))

    monkeypatch.setattr(files.os, "fsync", fsync)
    write(tmp_path / "file", b"all of it")
    assert synced == [
        ((tmp_path / "file").stat().st_ino, b"all of it"),
        (tmp_path.stat().st_ino, b"a folder"),
    ]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path)])
def test_what_is_no_file_is_refused_and_stays(tmp_path: Path, make: object) -> None:
    path = tmp_path / "it"
    make(path)  # type: ignore[operator]
    before = path.lstat()
    for attempt in (check_writable, write):
        with pytest.raises(OSError, match="it"):
            attempt(path)
    assert os.path.samestat(before, path.lstat())
    assert os.listdir(tmp_path) == ["it"]  # noqa: PTH208


def test_a_device_is_not_replaced() -> None:
    with pytest.raises(OSError, match="regular file"):
        write(Path("/dev/null"))
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "%s.{}[0-9]*"])
def test_any_name_that_open_takes_will_do(tmp_path: Path, name: str) -> None:
    check_writable(tmp_path / name)
    write(tmp_path / name)
    with locked(tmp_path / name):
        pass
    assert [found.name for found in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["x" * 256, "no such folder/file"])
def test_what_cannot_be_written_is_said_before(tmp_path: Path, name: str) -> None:
    for attempt in (check_writable, write):
        with pytest.raises(OSError):  # noqa: PT011
            attempt(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def interrupted() -> None:
        with whole_file(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert not leftovers(tmp_path)


WRITER = """
import sys
from tailavg.io.files import locked, whole_file
with {context}(sys.argv[1]) as file:
    if file is not None:
        file.write(b"half of it")
        file.flush()
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def writer(path: Path, context: str) -> Iterator[None]:
    """Run a process that is in the middle of this context, and kill it with the block."""
    program, pipe = WRITER.format(context=context), subprocess.PIPE
    with started(sys.executable, "-c", program, path, stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline() == b"ready\n"
        yield


def test_a_killed_process_leaves_the_old_file_and_does_not_disturb_the_next(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with writer(path, "whole_file"), writer(path, "whole_file"):
        pass
    assert path.read_bytes() == b"old"
    assert len(leftovers(tmp_path)) == 2
    write(path)
    assert path.read_bytes() == b"new"


def fill(path: Path, text: str) -> None:
    with whole_folder(path, replaces=lambda _: True) as folder:
        (folder / "text").write_text(text)


def text_in(path: Path) -> str:
    return (saved_folder(path) / "text").read_text()


def test_a_folder_replaces_another(tmp_path: Path) -> None:
    for text in ("old", "new"):
        fill(tmp_path / "folder", text)
        assert text_in(tmp_path / "folder") == text
        assert [found.name for found in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("renames", [0, 1])
def test_an_exception_leaves_the_old_folder_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    path, rename = tmp_path / "folder", Path.rename
    fill(path, "old")
    left = [True] * renames + [False]

    def interrupted(self: Path, target: Path) -> Path:
        if left and not left.pop(0):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fill(path, "new")
    assert text_in(path) == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["folder"]


REPLACING = """
import os, signal, sys
from pathlib import Path
from tailavg.io.files import whole_folder
rename, left = Path.rename, int(sys.argv[2])
def killed(self, target):
    global left
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return rename(self, target)
Path.rename = killed
with whole_folder(sys.argv[1], replaces=lambda _: True) as folder:
    (folder / "text").write_text("new")
"""


@pytest.mark.parametrize("renames", [0, 1])
def test_the_old_folder_is_found_if_its_replacement_was_killed(
    tmp_path: Path, renames: int
) -> None:
    path = tmp_path / "folder"
    fill(path, "old")
    with started(sys.executable, "-c", REPLACING, path, renames) as process:
        process.wait(600)
    assert path.exists() is not bool(renames)
    assert text_in(path) == "old"
    with pytest.raises(ZeroDivisionError), whole_folder(path, lambda _: True):
        1 / 0  # noqa: B018
    assert text_in(path) == "old"
    fill(path, "newest")
    assert text_in(path) == "newest"
    assert "old" not in [file.read_text() for file in tmp_path.rglob("text")]


def test_a_lock_keeps_others_out_until_its_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with (
        writer(path, "locked"),
        pytest.raises(InUseError, match="in use by another process"),
        locked(path),
    ):
        pass
    with locked(path):
        pass
    assert not leftovers(tmp_path)


COUNTER = """
import sys, time
from pathlib import Path
from tailavg.io.files import InUseError, locked
count, done = Path(sys.argv[1]), 0
while done < 25:
    try:
        with locked(count):
            n = int(count.read_text())
            time.sleep(0.0002)
            count.write_text(str(n + 1))
            done += 1
    except InUseError:
        pass
"""


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    """Processes that take and leave a lock, which is a file that comes and goes."""
    count = tmp_path / "count"
    count.write_text("0")
    with ExitStack() as stack:
        command = (sys.executable, "-c", COUNTER, count)
        counters = [stack.enter_context(started(*command)) for _ in range(3)]
        assert [counter.wait(600) for counter in counters] == [0, 0, 0]
    assert count.read_text() == "75"
