"""Locks between processes, on an open file. A lock ends with the last process that has the file open, however it ends.

A file system that is mounted without locks is no obstacle: nobody can hold a lock there, so everybody gets it.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

POLL_SECONDS = 0.2


def try_lock(file: IO[Any] | int, *, shared: bool = False) -> bool:
    """Lock an open file or descriptor; False at once where another process holds it.

    :param shared: whether others may hold it too, as long as all ask for a shared lock.
    """
    return _flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def wait_for_lock(file: IO[Any], *, seconds: float) -> bool:
    """Lock an open file; False where another process holds it for longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while not try_lock(file):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, which is made if it is not there, after waiting for as long as others hold it."""
    with open(path, "a") as file:
        _flock(file, fcntl.LOCK_EX)
        yield


def _flock(file: IO[Any] | int, how: int) -> bool:
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError:
        pass  # ENOLCK, ENOSYS, EOPNOTSUPP and others, by file system: there are no locks here.
    return True
