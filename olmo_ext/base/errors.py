"""The two kinds of failure that a user meets, and the exit codes that belong to them."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_REQUEUE = 75
"""A signal stopped the run after a complete checkpoint was written (EX_TEMPFAIL): start it again."""


class OlmoExtError(Exception):
    """Base class; `exit_code` is what the process ends with, `str(error)` the one line that is printed."""

    exit_code = EXIT_FAILED


class WorkError(OlmoExtError):
    """The input was fine and the work failed: a server, a disk, a diverged run."""


class InputError(OlmoExtError):
    """Input that cannot be used.

    :param what: what is wrong, with the value that was met.
    :param where: the file and key path, or the data file and offset.
    :param right: what would be right.
    """

    exit_code = EXIT_BAD_INPUT

    def __init__(self, what: str, *, where: str | None = None, right: str | None = None) -> None:
        self.what, self.where, self.right = what, where, right
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text}; {right}" if right else text)


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str, most: int = 1) -> str:
    """The `right` of an error about an unknown name: the nearest known names, or `otherwise` if none is near.

    :param most: how many names to offer, the nearest first.
    """
    near = difflib.get_close_matches(name, list(known), n=most)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else otherwise


UNUSABLE_FILE = (
    *(errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENAMETOOLONG, errno.ELOOP),
)


def unexpected(error: Exception) -> tuple[int, str]:
    """Exit code and line for an error that no part of the program has put into words.

    A file that was named and cannot be used is bad input; anything else is failed work.
    """
    if isinstance(error, OSError) and error.strerror:
        code = EXIT_BAD_INPUT if error.errno in UNUSABLE_FILE else EXIT_FAILED
        return code, f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    text = " ".join(str(error).split())
    if os.strerror(errno.ENOSPC) in text:  # what is no OSError where it was written by Rust or C++
        return EXIT_FAILED, text
    return EXIT_FAILED, f"{type(error).__name__}: {text} (--debug shows where)"
