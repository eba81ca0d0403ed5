"""Writing files and folders so that a kill at any moment leaves the old content or the new one, never a mixture.

What is on its way stands beside its place, under a name that says so and names the process:

    .<name>.<machine>-<pid>.aside     a file or a link
    <name>-aside-<machine>-<pid>      a folder
    <name>-replaced-<machine>-<pid>   a folder that has just been replaced
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def this_process() -> str:
    """A name that no other process has, on a disk that several machines share: their process ids may be equal."""
    return f"{os.uname().nodename}-{os.getpid()}"


def sync_directory(path: Path) -> None:
    """Make renames inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def file_aside(path: Path) -> Iterator[BinaryIO]:
    """A file to write in the block, at the end of which it is made durable and takes the place of `path`.

    An error in the block removes it and leaves `path` as it was.
    """
    aside = _file_aside(path)
    try:
        with open(aside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_atomically(path: Path | str, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) in the place of `path`.

    :raises OSError: naming `path`; its old content is untouched.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        with file_aside(Path(path)) as file:
            file.write(data)
    except OSError as error:
        # A disk that runs full names no file by itself.
        raise OSError(error.errno, error.strerror, str(path)) from None


def link_atomically(path: Path, destination: str) -> None:
    """Make `path` a symbolic link to `destination`, also where it is a link to something else."""
    aside = _file_aside(path)
    aside.unlink(missing_ok=True)
    os.symlink(destination, aside)
    os.replace(aside, path)
    sync_directory(path.parent)


def _file_aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{this_process()}.aside")


@contextmanager
def folder_aside(target: Path) -> Iterator[Path]:
    """A new, empty folder beside `target` to fill in the block, which ends with `put_in_place`.

    What is left of it at the end of the block is removed. So is what this machine's killed processes have left there:
    it may be as large as a model. Of another machine's processes nobody here knows which are alive.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for kind in ("aside", "replaced"):
        ours = f"{target.name}-{kind}-{os.uname().nodename}-"
        for entry in target.parent.glob(f"{glob.escape(ours)}*"):
            process = entry.name.removeprefix(ours)
            if process.isdecimal() and (process == str(os.getpid()) or not Path(f"/proc/{process}").exists()):
                shutil.rmtree(entry, ignore_errors=True)
    aside = target.with_name(f"{target.name}-aside-{this_process()}")
    aside.mkdir()
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def put_in_place(aside: Path, target: Path, *, replace: bool = False) -> None:
    """Rename a whole folder to `target`, where nothing or an empty folder is.

    :param replace: whether a full folder may be there too; it is gone afterwards.
    :raises OSError: naming `target`, which is as it was.
    """
    try:
        replaced = set_aside(target) if replace and target.exists() else None
        try:
            os.rename(aside, target)
        except OSError:
            if replaced is not None:
                os.rename(replaced, target)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from None
    sync_directory(target.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Rename a folder that is to be removed, so that a kill inside the removal leaves nothing that looks whole."""
    replaced = folder.with_name(f"{folder.name}-replaced-{this_process()}")
    os.rename(folder, replaced)
    return replaced


def append_line(path: Path | str, line: str) -> None:
    """Append one line (`line` has no line end) with a single write, after closing a line that a kill has torn.

    :raises OSError: naming `path`; a part of the line may be there.
    """
    try:
        with open(path, "ab+") as file:
            torn = False
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                torn = file.read(1) != b"\n"
            file.write((b"\n" if torn else b"") + line.encode() + b"\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync_file(path: Path | str) -> None:
    """Make durable what was appended to `path`, and its name; a file that is not there has nothing to lose.

    :raises OSError: naming `path`.
    """
    try:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    except FileNotFoundError:
        return
    sync_directory(Path(path).parent)


def sha256_of_file(path: Path | str) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
