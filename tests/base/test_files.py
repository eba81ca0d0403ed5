"""What a run has written survives a kill at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from olmo_ext.base.files import append_line, folder_aside, link_atomically, put_in_place, write_atomically

pytestmark = pytest.mark.once

WRITER = """
import sys
from olmo_ext.base.files import write_atomically
n = 0
while True:
    write_atomically(sys.argv[1], (str(n % 10) * 200_000) + "\\n")
    n += 1
    print(n, flush=True)
"""


def test_a_file_is_whole_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    for delay in (0.0, 0.003, 0.011, 0.02, 0.031):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(target)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(delay)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        text = target.read_text()
        assert len(text) == 200_001 and len(set(text.strip())) == 1


def test_a_failed_write_leaves_the_old_content_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "state.json"
    write_atomically(target, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(target, "new")
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_a_line_after_a_torn_one_stands_on_its_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, "one")
    with open(path, "a") as file:
        file.write('{"torn": ')
    append_line(path, "two")
    assert path.read_text().splitlines() == ["one", '{"torn": ', "two"]


def test_equal_process_ids_of_two_machines_write_into_two_files(tmp_path: Path, monkeypatch) -> None:
    """On a shared disk: the half that one has written is not renamed by the other."""
    target, there = tmp_path / "state.json", os.uname_result(("Linux", "elsewhere", "", "", ""))
    original = os.fsync

    def other_machine_writes_too(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", original)
        monkeypatch.setattr(os, "uname", lambda: there)
        write_atomically(target, "theirs")

    monkeypatch.setattr(os, "fsync", other_machine_writes_too)
    write_atomically(target, "ours")
    assert target.read_text() == "ours" and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("write", [write_atomically, append_line])
def test_a_full_disk_names_the_file(tmp_path: Path, write) -> None:
    """A limit on the size of a file stands in for it."""
    import resource

    path = tmp_path / "a.json"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError) as raised:
            write(path, "x" * 20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert raised.value.filename == str(path)


def test_what_a_killed_process_left_beside_a_target_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    target = tmp_path / "out [1]"
    here = os.uname().nodename
    names = (
        f"{here}-{gone.pid}",
        f"{here}-{os.getppid()}",
        "mine",
        f"elsewhere-{gone.pid}",
        f"elsewhere-{os.getpid()}",
    )
    dead, *others = (tmp_path / f"out [1]-aside-{name}" for name in names)
    for folder in (dead, *others):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    (tmp_path / f"out [1]-replaced-{names[0]}").mkdir()
    with folder_aside(target) as aside:
        assert aside.is_dir() and not list(aside.iterdir())
        assert sorted(tmp_path.iterdir()) == sorted([*others, aside])
    assert sorted(tmp_path.iterdir()) == sorted(others) and all(list(folder.iterdir()) for folder in others)


FOLDER_WRITER = """
import sys
from pathlib import Path
from olmo_ext.base.files import folder_aside, put_in_place
n = 0
while True:
    with folder_aside(Path(sys.argv[1])) as aside:
        for name in "abc":
            (aside / name).write_text(str(n))
        put_in_place(aside, Path(sys.argv[1]), replace=True)
    n += 1
    print(n, flush=True)
"""


def test_a_folder_is_whole_or_absent_after_a_kill_and_the_next_writer_clears_the_rest(tmp_path: Path) -> None:
    target = tmp_path / "step5"
    for delay in (0.0, 0.003, 0.011, 0.02, 0.031):
        writer = subprocess.Popen([sys.executable, "-c", FOLDER_WRITER, str(target)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(delay)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        assert not target.exists() or len({(target / name).read_text() for name in "abc"}) == 1
    with folder_aside(target) as aside:
        assert {path.name for path in tmp_path.iterdir()} <= {aside.name, target.name}


def test_a_full_folder_is_replaced_only_where_that_is_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    for content, replace in (("first", False), ("second", True)):  # What is empty stands in nobody's way.
        with folder_aside(target) as aside:
            (aside / "content").write_text(content)
            put_in_place(aside, target, replace=replace)
    with pytest.raises(OSError) as raised, folder_aside(target) as aside:
        put_in_place(aside, target)
    assert raised.value.filename == str(target) and list(tmp_path.iterdir()) == [target]
    assert (target / "content").read_text() == "second"


def test_a_folder_that_cannot_be_replaced_stays(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(FileNotFoundError):
        put_in_place(tmp_path / "absent", tmp_path / "out", replace=True)
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_link_takes_the_place_of_another(tmp_path: Path) -> None:
    for destination in ("step1", "step2"):
        link_atomically(tmp_path / "latest", destination)
    assert os.readlink(tmp_path / "latest") == "step2" and len(list(tmp_path.iterdir())) == 1
