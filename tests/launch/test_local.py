"""`launch --on local` runs what is missing, whatever happens to it on the way. Training itself is played by a fake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.launch.local import worker_environment
from tests.launch.conftest import CONFIG

pytestmark = pytest.mark.once

Launch = Callable[..., subprocess.Popen]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    (tmp_path / "base.yaml").write_text(CONFIG)
    np.arange(256, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    started = []

    def start(names: str, *arguments: str, step_seconds: float = 0.02) -> subprocess.Popen:
        runs = "".join(f"  {name}: {{seed: {i}}}\n" for i, name in enumerate(names.split()))
        (tmp_path / "sweep.yaml").write_text(f"base: base.yaml\nruns:\n{runs}")
        process = subprocess.Popen(
            [sys.executable, "-m", "olmo_ext", "launch", "sweep.yaml", "--on", "local", *arguments],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parent / "fake_training"),
                "FAKE_STEP_SECONDS": str(step_seconds),
                "PYTHONUNBUFFERED": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def run_of(tmp_path: Path, name: str) -> RunDirectory:
    return RunDirectory(tmp_path / "runs" / "sweep" / name)


def processes(tmp_path: Path, name: str) -> list[str]:
    return (run_of(tmp_path, name).path / "processes").read_text().split()


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def attempts(directory: RunDirectory) -> list[tuple[int, int]]:
    return [(row.attempt, row.step) for row in directory.read_all_metrics() if row.kind == "attempt"]


def test_members_run_one_after_the_other_in_one_process_and_a_second_call_does_nothing(launch, tmp_path) -> None:
    first = launch("a b c")
    out, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    assert [run_of(tmp_path, name).read_state().status for name in "abc"] == ["done"] * 3
    assert len({processes(tmp_path, name)[0] for name in "abc"}) == 1
    assert "c: done, loss 0.2000 (3 of 3)" in out
    sweep = json.loads((tmp_path / "runs" / "sweep" / "sweep.json").read_text())
    assert [run["name"] for run in sweep["runs"]] == ["a", "b", "c"]
    again = launch("a b c")
    out, _ = again.communicate(timeout=60)
    assert again.returncode == 0 and "all 3 runs of sweep are done" in out
    assert [len(processes(tmp_path, name)) for name in "abc"] == [1, 1, 1]


def test_a_worker_sees_its_share_of_the_machine_and_nothing_of_a_job_around_it(monkeypatch) -> None:
    around = {"RANK": "1", "WORLD_SIZE": "8", "MASTER_PORT": "1", "SLURM_JOB_ID": "55", "SLURM_ARRAY_JOB_ID": "55"}
    for name, value in {**around, "SLURM_JOB_END_TIME": "9", "MINE": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(9)))
    seen = [worker_environment(index, 4, ["3", "5"]) for index in range(3)]
    assert not set(around) & set(seen[0]) and seen[0]["MINE"] == "x" and seen[0]["SLURM_JOB_END_TIME"] == "9"
    assert [one["CUDA_VISIBLE_DEVICES"] for one in seen] == ["3", "5", "3"]
    assert {one["OMP_NUM_THREADS"] for one in seen} == {"2"}


def test_several_workers_share_the_members(launch, tmp_path) -> None:
    process = launch("a b c d", "--jobs", "2")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert len({processes(tmp_path, name)[0] for name in "abcd"}) == 2


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("crash", "RuntimeError: a deterministic crash"),
        ("killed", "ended by SIGKILL"),
        ("bad", "data.paths: no such data"),
    ],
)
def test_a_member_that_fails_does_not_stop_the_others_and_the_exit_code_says_so(launch, tmp_path, bad, says) -> None:
    process = launch(f"a {bad} c")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"{bad}: FAILED: " in err and says in err
    assert f"1 of 3 runs failed: {bad}" in err
    assert [run_of(tmp_path, name).read_state().status for name in ("a", bad, "c")] == ["done", "failed", "done"]
    assert says.split(": ")[-1] in run_of(tmp_path, bad).read_state().reason


def test_a_failed_member_is_tried_again_by_the_next_call(launch, tmp_path) -> None:
    assert launch("killed b").wait(60) == 1
    assert launch("killed b").wait(60) == 0
    assert attempts(run_of(tmp_path, "killed")) == [(1, 0), (2, 0)]
    assert attempts(run_of(tmp_path, "b")) == [(1, 0)]


def test_ctrl_c_checkpoints_the_running_member_and_the_next_call_continues_it(launch, tmp_path) -> None:
    process = launch("a b", "max_duration=600", step_seconds=0.1)
    a = run_of(tmp_path, "a")
    wait_until(lambda: len(a.read_all_metrics()) > 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "the same command continues" in err
    state = a.read_state()
    assert state.status == "requeued" and 3 <= state.step < 600
    assert not (run_of(tmp_path, "b").path / "processes").exists()
    assert launch("a b", "max_duration=600", step_seconds=0).wait(60) == 0
    assert attempts(a) == [(1, 0), (2, state.step)]


def test_a_launcher_killed_without_warning_leaves_a_checkpoint_and_nobody_behind(launch, tmp_path) -> None:
    process = launch("a b", "max_duration=600", step_seconds=0.1)
    a = run_of(tmp_path, "a")
    wait_until(lambda: len(a.read_all_metrics()) > 3)
    process.kill()
    process.communicate()
    again = launch("a b", "max_duration=600", step_seconds=0)  # at once: waits for the worker's checkpoint
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    first, second = attempts(a)
    assert first == (1, 0) and second[1] > 0
    assert len({*processes(tmp_path, "a"), *processes(tmp_path, "b")}) == 2


def test_two_launches_in_one_folder_do_not_both_run(launch, tmp_path) -> None:
    process = launch("a", "max_duration=6000", step_seconds=0.1)
    wait_until(lambda: len(run_of(tmp_path, "a").read_all_metrics()) > 1)
    second = launch("a", "max_duration=6000")
    _, err = second.communicate(timeout=60)
    assert second.returncode == 2 and "another launch is at work here" in err
    cancelled = subprocess.run(
        [sys.executable, "-m", "olmo_ext", "cancel", "runs/sweep"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "local launch" in cancelled.stdout
    assert process.wait(60) == 75
    assert run_of(tmp_path, "a").read_state().status == "requeued"


def test_another_config_in_the_folder_of_a_started_run_is_refused(launch, tmp_path) -> None:
    assert launch("a b").wait(60) == 0
    process = launch("a b", "optimizer.learning_rate=0.5")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "optimizer.learning_rate" in err and "runs/sweep/a" in err
    # The same where a full disk or a kill took the state: what was trained is there.
    before = run_of(tmp_path, "a").config_path.read_bytes()
    run_of(tmp_path, "a").state_path.write_bytes(b"")
    process = launch("a b", "optimizer.learning_rate=0.5")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "optimizer.learning_rate" in err
    assert run_of(tmp_path, "a").config_path.read_bytes() == before


def test_a_dry_run_changes_nothing_and_names_what_would_be_refused(launch, tmp_path) -> None:
    (tmp_path / "tokens.bin").unlink()
    process = launch("a b", "--dry-run")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "run  runs/sweep/a" in out and "would be refused" in err and "tokens.bin" in err
    assert not (tmp_path / "runs").exists()
    real = launch("a b")
    _, err = real.communicate(timeout=60)
    assert real.returncode == 2 and "tokens.bin" in err
