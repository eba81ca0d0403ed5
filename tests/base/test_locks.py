"""A lock keeps other processes out until its holder ends, in whatever way."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from olmo_ext.base.locks import locked, try_lock, wait_for_lock

HOLDER = """
import sys
from olmo_ext.base.locks import try_lock
file = open(sys.argv[1], "a+")
assert try_lock(file, shared=sys.argv[2] == "shared")
print("held", flush=True)
sys.stdin.read()
"""

WAITER = """
import sys
from pathlib import Path
from olmo_ext.base.locks import locked
print("waits", flush=True)
with locked(Path(sys.argv[1])):
    print("held", flush=True)
"""


def start(script: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A process that has printed its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline()
    return process


@pytest.fixture
def holder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    process = start(HOLDER, str(tmp_path / "lock"), getattr(request, "param", "exclusive"))
    yield process
    process.kill()
    process.wait()


def test_a_held_lock_is_not_given_and_not_for_a_bounded_wait(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    with open(tmp_path / "lock", "a+") as file:
        assert not try_lock(file) and not try_lock(file.fileno(), shared=True)
        assert not wait_for_lock(file, seconds=0.0)


@pytest.mark.parametrize("holder", ["shared"], indirect=True)
def test_a_shared_lock_is_shared(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    with open(tmp_path / "lock", "a+") as file:
        assert not try_lock(file) and try_lock(file, shared=True)


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    waiter = start(WAITER, str(tmp_path / "lock"))
    holder.kill()
    assert waiter.communicate()[0] == b"held\n"
    with open(tmp_path / "lock", "a+") as file:
        assert wait_for_lock(file, seconds=60.0)


def test_a_lock_ends_with_its_block(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"), open(tmp_path / "lock", "a+") as file:
        assert not try_lock(file)
    with open(tmp_path / "lock", "a+") as file:
        assert try_lock(file)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(number, "no locks here")

    monkeypatch.setattr("fcntl.flock", flock)
    with locked(tmp_path / "lock"), open(tmp_path / "lock", "a+") as file:
        assert try_lock(file) and try_lock(file, shared=True) and wait_for_lock(file, seconds=0.0)
