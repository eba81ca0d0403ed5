"""Writing files so that a kill at any moment leaves the old content or the new one, never a mixture."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
from pathlib import Path


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


def write_atomically(path: Path | str, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) beside `path`, fsync it, and rename it into place.

    :raises OSError: naming `path`; its old content is untouched.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    aside = path.with_name(f".{path.name}.{this_process()}.aside")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        # A disk that runs full names no file by itself.
        raise OSError(error.errno, error.strerror, str(path)) from None
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def make_aside(target: Path) -> Path:
    """A new, empty folder beside `target`, to be renamed to it when it is whole.

    What a process of this machine that was killed has left there is removed: it may be as large as a model. Of another
    machine's processes nobody here knows which are alive.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    ours = f"{target.name}-aside-{os.uname().nodename}-"
    for entry in target.parent.glob(f"{glob.escape(ours)}*"):
        process = entry.name.removeprefix(ours)
        if process.isdecimal() and (process == str(os.getpid()) or not Path(f"/proc/{process}").exists()):
            shutil.rmtree(entry, ignore_errors=True)
    aside = target.parent / f"{target.name}-aside-{this_process()}"
    aside.mkdir()
    return aside


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
