"""`cancel` stops what was launched, says when it cannot know, and touches nobody's interactive session."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from olmo_ext.base.errors import InputError, WorkError
from olmo_ext.base.run_directory import RunDirectory, RunState
from olmo_ext.launch.cancel import cancel_runs
from olmo_ext.launch.launch_command import cancel as cancel_command
from olmo_ext.launch.local import launcher_of, sweep_lock

pytestmark = pytest.mark.once

SLURM = {
    "squeue": """#!/bin/bash
[ ! -e "$FAKE/no-answer" ] || exit 1
cat "$FAKE/queue"
""",
    "scancel": """#!/bin/bash
echo "$*" >> "$FAKE/cancelled"
[ ! -e "$FAKE/ended" ] || { mv "$FAKE/ended" "$FAKE/queue"; exit 1; }
[ ! -e "$FAKE/refuses" ] || { echo "scancel: error: Access denied" >&2; exit 1; }
""",
}


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs of a sweep that were queued as job 7, with a comparison, 8, behind them."""
    for name, text in SLURM.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(tmp_path))
    directory = tmp_path / "runs" / "sweep"
    for name in "ab":
        RunDirectory(directory / name).write_config({})
        RunDirectory(directory / name).write_state(RunState())
    (directory / "sweep.json").write_text(json.dumps({"runs": [{"name": "a"}, {"name": "b"}]}))
    entries = [{"kind": "runs", "job": "7", "runs": ["a", "b"]}, {"kind": "compare", "job": "8"}]
    (directory / "slurm-jobs.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (tmp_path / "queue").write_text("7_0 RUNNING\n7_1 PENDING\n8 PENDING\n55 RUNNING\n")
    return directory


def cancelled(sweep: Path) -> list[str]:
    path = sweep.parents[1] / "cancelled"
    return path.read_text().splitlines() if path.exists() else []


def test_all_of_a_sweep_one_run_by_name_and_one_by_its_folder(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cancel_runs(sweep, [])
    cancel_runs(sweep, ["b"])
    cancel_runs(sweep / "a", [])
    monkeypatch.chdir(sweep / "b")
    cancel_runs(Path("."), [])
    assert cancelled(sweep) == ["7_0 7_1 8", "7_1", "7_0", "7_1"]
    with pytest.raises(InputError, match="no run 'c'"):
        cancel_runs(sweep, ["c"])
    with pytest.raises(InputError, match="no sweep.json and no runs here"):
        cancel_runs(sweep.parent, [])


def test_where_slurm_does_not_answer_nobody_says_that_nothing_is_queued(sweep: Path) -> None:
    (sweep.parents[1] / "no-answer").touch()
    with pytest.raises(WorkError, match="does not answer here; 2 runs may be in its queue"):
        cancel_runs(sweep, [])
    for name in "ab":
        RunDirectory(sweep / name).write_state(RunState(status="done"))
    assert "nothing is queued or running" in CliRunner().invoke(cancel_command, [str(sweep)]).output


def test_a_job_that_has_ended_meanwhile_is_no_failure_and_a_refusal_is_one(sweep: Path) -> None:
    (sweep.parents[1] / "refuses").touch()
    with pytest.raises(WorkError, match="Access denied"):
        cancel_runs(sweep, [])
    (sweep.parents[1] / "ended").write_text("7_0 COMPLETING\n")
    assert cancel_runs(sweep, []) == 0


def test_a_job_that_launch_did_not_queue_is_named_and_left(sweep: Path) -> None:
    RunDirectory(sweep / "a").write_state(RunState(status="running", slurm_job="55"))
    output = CliRunner().invoke(cancel_command, [str(sweep)]).output
    assert "left alone: a, which `launch` did not queue: scancel 55" in output
    assert cancelled(sweep) == ["7_0 7_1 8"]


def test_a_launch_on_another_machine_is_neither_waited_for_nor_signalled(tmp_path: Path) -> None:
    with sweep_lock(tmp_path):
        assert launcher_of(tmp_path) == os.getpid()
        (tmp_path / ".launch.lock").write_text(f"{os.getpid()} elsewhere\n")
        with pytest.raises(InputError, match=rf"process {os.getpid()} on elsewhere\).*stop it on elsewhere"):
            launcher_of(tmp_path)
        with pytest.raises(InputError, match="at work here .*on elsewhere"), sweep_lock(tmp_path):
            pass
    assert launcher_of(tmp_path) is None


@pytest.mark.parametrize("number", ["ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def test_a_file_system_without_locks_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    import errno

    def flock(descriptor: int, how: int) -> None:
        raise OSError(getattr(errno, number), "no locks here")

    monkeypatch.setattr("fcntl.flock", flock)
    with sweep_lock(tmp_path):
        assert launcher_of(tmp_path) is None
