"""A checkpoint is complete or absent, whatever happens inside a save."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from olmo_ext.base.errors import InputError, WorkError
from olmo_ext.training import checkpoint
from olmo_ext.training.checkpoint import MARKER, MODEL, OPTIMIZER, CheckpointStore, Snapshot

pytestmark = pytest.mark.once

OPERATIONS = ("fsync", "rename", "replace", "symlink", "mkdir", "unlink")


def snapshot(step: int) -> Snapshot:
    value = torch.full((64,), float(step))
    return Snapshot(
        step=step,
        tensors={MODEL: {"w": value}, OPTIMIZER: {"exp_avg/w": value}, checkpoint.RNG: {"rank0/torch": value.byte()}},
        texts={checkpoint.TRAIN_STATE: json.dumps({"format": 1, "step": step}), checkpoint.CONFIG: "a: 1\n"},
    )


def check_whole(folder: Path, step: int) -> None:
    checkpoint.require_complete(folder)
    assert torch.equal(load_file(folder / MODEL)["w"], torch.full((64,), float(step)))
    assert torch.equal(checkpoint.load_optimizer_state(folder)["w"]["exp_avg"], torch.full((64,), float(step)))
    assert checkpoint.read_train_state(folder)["step"] == step


def kill_at(operation_number: int) -> None:
    """SIGKILL ourselves before the n-th operation on the file system that a save makes."""
    made = iter(range(1, 10_000))
    for module, names in ((os, OPERATIONS), (shutil, ("rmtree",)), (Path, ("write_text", "unlink", "mkdir"))):
        for name in names:
            original = getattr(module, name)

            def counted(*arguments, original=original, **options):
                if next(made) == operation_number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **options)

            setattr(module, name, counted)


@pytest.mark.parametrize("again", [False, True], ids=["next step", "the same step again"])
def test_a_kill_at_any_point_of_a_save_leaves_a_usable_newest_checkpoint(forked, tmp_path, again):
    """Every operation in turn; with retention, which removes step 1 at the end."""
    for number in range(1, 200):
        folder = tmp_path / f"at{number}"
        store = CheckpointStore(folder)
        store.write(snapshot(1))
        if again:
            store.write(snapshot(2))
            (store.folder(2) / MODEL).write_bytes(b"")

        def save(number=number, store=store):
            kill_at(number)
            store.write(snapshot(2))
            store.retain(written=2, permanent=lambda step: False, keep=0)

        ended = forked(save, seconds=20)
        said: list[str] = []
        found = CheckpointStore(folder, report=said.append).newest_complete()
        assert found is not None, number
        check_whole(found, int(found.name.removeprefix("step")))
        if (folder / "latest").is_symlink():
            assert (folder / "latest").resolve().name in ("step1", "step2")
        after = CheckpointStore(folder, report=said.append)
        after.remove_leftovers()
        after.write(snapshot(3))
        check_whole(folder / "latest", 3)
        assert not [path for path in folder.iterdir() if "aside" in path.name or "replaced" in path.name]
        if ended.code == 0:
            assert found.name == "step2" and number > 10
            return
        assert ended.code == -signal.SIGKILL, ended.output
    raise AssertionError("the save never ended")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: [path.unlink() for path in folder.iterdir()], "the save did not end"),
        (lambda folder: (folder / MARKER).unlink(), "the save did not end"),
        (lambda folder: (folder / MARKER).write_text(""), "torn"),
        (lambda folder: (folder / MARKER).write_text('{"files": {}}'), "does not list"),
        (lambda folder: (folder / checkpoint.TRAIN_STATE).write_text(""), "has 0 bytes of"),
        (lambda folder: (folder / OPTIMIZER).unlink(), "optimizer.safetensors is missing"),
        (lambda folder: (folder / OPTIMIZER).write_bytes((folder / OPTIMIZER).read_bytes()[:-8]), "bytes of"),
        (lambda folder: (folder / MODEL).write_bytes((folder / MODEL).read_bytes()[:-1] + b"?"), "sha256"),
    ],
)
def test_a_damaged_newest_checkpoint_is_passed_over_and_the_reason_said(tmp_path, damage, reason):
    said: list[str] = []
    store = CheckpointStore(tmp_path / "checkpoints", report=said.append)
    store.write(snapshot(100))
    store.write(snapshot(200))
    damage(store.folder(200))
    found = store.newest_complete()
    assert found == store.folder(100)
    assert len(said) == 1 and "step200" in said[0] and reason in said[0]
    with pytest.raises(InputError, match=reason):
        checkpoint.require_complete(store.folder(200))


def test_a_newest_checkpoint_that_the_disk_does_not_give_back_is_passed_over(tmp_path, monkeypatch):
    said: list[str] = []
    store = CheckpointStore(tmp_path / "checkpoints", report=said.append)
    for step in (100, 200):
        store.write(snapshot(step))
    original = checkpoint.sha256_of_file

    def bad_sector(path):
        if path == store.folder(200) / OPTIMIZER:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(path)

    monkeypatch.setattr(checkpoint, "sha256_of_file", bad_sector)
    assert store.newest_complete() == store.folder(100)
    assert len(said) == 1 and "optimizer.safetensors cannot be read (Input/output error)" in said[0]


def test_every_file_of_a_checkpoint_can_be_read_by_whom_the_umask_lets(tmp_path):
    umask = os.umask(0o022)
    try:
        CheckpointStore(tmp_path, report=print).write(snapshot(1))
    finally:
        os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "step1").iterdir()} == {0o644}


def test_no_checkpoint_at_all_is_none(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.newest_complete() is None
    store.folder(5).mkdir(parents=True)
    assert store.newest_complete() is None


@pytest.mark.parametrize("failing", ["save_file", "fsync"])
def test_a_full_disk_leaves_the_older_checkpoint_and_gives_one_line(tmp_path, monkeypatch, failing):
    store = CheckpointStore(tmp_path / "checkpoints")
    store.write(snapshot(1))

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*(("safetensors.torch.save_file", full) if failing == "save_file" else (os, "fsync", full)))
    with pytest.raises(WorkError, match="disk is full.*older checkpoints are untouched") as raised:
        store.write(snapshot(2))
    assert "\n" not in str(raised.value)
    monkeypatch.undo()
    check_whole(store.newest_complete(), 1)
    assert sorted(path.name for path in store.path.iterdir()) == ["latest", "step1"]


def test_a_really_full_disk_leaves_the_older_checkpoint(tmp_path):
    """A file size limit of the process stands in for a file system that runs full inside safetensors' writer."""
    import resource

    store = CheckpointStore(tmp_path / "checkpoints")
    store.write(snapshot(1))
    big = Snapshot(step=2, tensors={MODEL: {"w": torch.zeros(1 << 20)}, OPTIMIZER: {}}, texts={})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(WorkError, match="could not be written"):
            store.write(big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    check_whole(store.newest_complete(), 1)
    assert sorted(path.name for path in store.path.iterdir()) == ["latest", "step1"]


def test_retention_keeps_the_newest_and_the_named_steps(tmp_path):
    def left(keep: int) -> list[int]:
        store = CheckpointStore(tmp_path / str(keep))
        for step in range(1, 12):
            store.write(snapshot(step))
            store.retain(written=step, permanent=lambda step: step % 4 == 0, keep=keep)
            assert len(store.steps()) <= (keep if keep >= 0 else 2) + 1
            assert store.steps()[-1] == step
        return store.steps()

    assert left(-1) == [4, 8, 11]
    assert left(1) == [8, 11]
    assert left(2) == [4, 8, 11]
    assert left(0) == [11]


@pytest.mark.parametrize("failing", ["rename", "rmtree"])
def test_a_checkpoint_that_cannot_be_removed_is_said_and_stops_nothing(tmp_path, monkeypatch, failing):
    """A network disk keeps a folder whose files another machine reads."""
    said: list[str] = []
    store = CheckpointStore(tmp_path / "checkpoints", report=said.append)
    for step in (1, 2, 3):
        store.write(snapshot(step))
    module = os if failing == "rename" else shutil
    original = getattr(module, failing)

    def busy(path, *arguments, **options):
        if Path(path).name.startswith("step1"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return original(path, *arguments, **options)

    monkeypatch.setattr(module, failing, busy)
    store.retain(written=3, permanent=lambda step: False, keep=0)
    assert said == [f"checkpoint {store.folder(1)} could not be removed (Device or resource busy)"]
    monkeypatch.undo()
    check_whole(store.newest_complete(), 3)
    assert not store.folder(2).exists()


def test_retention_never_counts_an_incomplete_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.write(snapshot(step))
    (store.folder(3) / MARKER).unlink()
    store.retain(written=3, permanent=lambda step: False, keep=0)
    assert store.steps() == [2, 3]
    check_whole(store.newest_complete(), 2)


@pytest.mark.parametrize("keep", [-1, 0, 1])
def test_retention_keeps_what_was_written_after_falling_back_behind_a_damaged_checkpoint(tmp_path, keep):
    store = CheckpointStore(tmp_path)
    for step in (10, 15):
        store.write(snapshot(step))
    (store.folder(15) / MODEL).write_bytes((store.folder(15) / MODEL).read_bytes()[:-1] + b"?")
    assert store.newest_complete() == store.folder(10)
    store.write(snapshot(12))
    store.retain(written=12, permanent=lambda step: step % 5 == 0, keep=keep)
    check_whole(store.newest_complete(), 12)
    check_whole(tmp_path / "latest", 12)
    store.write(snapshot(15))
    store.retain(written=15, permanent=lambda step: step % 5 == 0, keep=keep)
    check_whole(store.newest_complete(), 15)


def test_nothing_in_a_checkpoint_is_pickled(forked, config, tmp_path):
    from olmo_ext.training.train import train

    assert forked(lambda: train(config(), run_directory=tmp_path / "run")).code == 0
    folder = tmp_path / "run/checkpoints/step4"
    names = {path.name for path in folder.iterdir()}
    assert names == {MODEL, OPTIMIZER, checkpoint.RNG, checkpoint.TRAIN_STATE, checkpoint.CONFIG, MARKER}
    for name in (MODEL, OPTIMIZER, checkpoint.RNG):
        assert load_file(folder / name)
    json.loads((folder / checkpoint.TRAIN_STATE).read_text())


def test_the_space_of_checkpoints_is_compared_with_the_disk_at_the_start(tmp_path, monkeypatch):
    usage = shutil._ntuple_diskusage  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100_000, 0, 25_000))
    folder = tmp_path / "run/checkpoints"
    assert checkpoint.check_space(folder, size=10_000, kept=1) is None
    warning = checkpoint.check_space(folder, size=10_000, kept=8)
    assert warning is not None and "8 checkpoints" in warning and "save_num_checkpoints_to_keep" in warning
    with pytest.raises(InputError, match="free"):
        checkpoint.check_space(folder, size=13_000, kept=1)
