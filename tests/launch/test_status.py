"""`status` tells what a run is doing from its folder alone, and better where there is a queue."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from olmo_ext.base.run_directory import MetricsRow, RunDirectory, RunState
from olmo_ext.launch.launch_command import status as status_command
from olmo_ext.launch.run_progress import last_lines, read_progress, tail_of
from olmo_ext.launch.status import run_status, sweep_status


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


HERE = {"host": socket.gethostname(), "pid": os.getpid()}


@pytest.mark.parametrize(
    ("state", "queue", "shown"),
    [
        ({"status": "pending"}, None, "pending"),
        ({"status": "pending"}, {"7_0": "PENDING"}, "queued"),
        ({"status": "pending"}, {"7_0": "RUNNING"}, "running"),
        ({"status": "running", "attempt": 1, **HERE}, None, "running"),
        ({"status": "running", "attempt": 1, "host": HERE["host"], "pid": "dead"}, None, "stopped"),
        ({"status": "running", "attempt": 1, "slurm_job": "7_0", "host": "other"}, {"7_0": "RUNNING"}, "running"),
        ({"status": "running", "attempt": 1, "slurm_job": "7_0", "host": "other"}, {}, "stopped"),
        ({"status": "running", "attempt": 1, "slurm_job": "7_0", "host": "other"}, None, "running"),
        ({"status": "running", "attempt": 1, "slurm_job": "7_0", "host": "other"}, {"7_0": "PENDING"}, "requeued"),
        ({"status": "requeued", "attempt": 1, "slurm_job": "7_0"}, {"7_0": "PENDING"}, "requeued"),
        ({"status": "requeued", "attempt": 1, "slurm_job": "7_0"}, {}, "stopped"),
        ({"status": "requeued", "attempt": 1}, None, "stopped"),
        ({"status": "done", "attempt": 2}, {}, "done"),
        ({"status": "done", "attempt": 2}, {"7_0": "COMPLETING"}, "done"),
        ({"status": "failed", "attempt": 2}, {}, "failed"),
        ({"status": "failed", "attempt": 2}, {"7_0": "PENDING"}, "requeued"),
        ({"status": "failed", "attempt": 2}, {"7_0": "CONFIGURING"}, "requeued"),
        # By hand, after the job of a launch that has ended.
        ({"status": "running", "attempt": 2, "slurm_job": "9", "host": "other"}, {"9": "RUNNING"}, "running"),
        ({"status": "requeued", "attempt": 2, "slurm_job": "9", "host": "other"}, {"9": "PENDING"}, "requeued"),
    ],
)
def test_the_state_and_the_queue_are_merged(tmp_path: Path, state: dict, queue: dict | None, shown: str) -> None:
    if state.get("pid") == "dead":
        state = {**state, "pid": dead_pid()}
    directory = RunDirectory(tmp_path / "run")
    directory.write_state(RunState(**state))
    job = "7_0" if queue else None
    assert run_status(directory, queued=queue, job=job).status == shown


def test_speed_and_time_left_are_those_of_the_running_attempt(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.write_state(RunState(status="running", attempt=2, step=10, max_steps=100, **HERE))

    def row(kind: str, attempt: int, step: int, time: float) -> None:
        values = {"train/CrossEntropyLoss": 5 - step / 100} if kind == "train" else {}
        directory.append_metrics(
            MetricsRow(kind=kind, attempt=attempt, step=step, tokens=step * 1000, time=time, values=values)
        )

    for step in range(1, 20):
        row("train", 1, step, step * 1.0)
    row("attempt", 2, 10, 500.0)
    for step in range(11, 21):
        row("train", 2, step, 500 + (step - 10) * 4.0)
    status = run_status(directory)
    assert status.step == 20 and status.tokens_per_second == pytest.approx(250)
    assert status.seconds_left == pytest.approx(80 * 4)
    assert status.loss == pytest.approx(4.8)


def test_a_failed_run_shows_why_with_the_last_lines_of_its_log(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "sweep" / "a [b]")
    directory.write_config({})
    directory.write_state(RunState(status="failed", attempt=1, reason="ValueError: [red]no[/red]"))
    directory.logs.mkdir()
    lines = [f"line {i}" for i in range(50)] + ["ValueError: [red]no[/red]"]
    trailer = "E0102 torch/distributed/elastic/multiprocessing/api.py:1002] failed\nTraceback\nRoot Cause"
    (directory.logs / "attempt1-node0.log").write_text("\n".join(lines) + "\n" + trailer)
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({"runs": [{"name": "a [b]"}, {"name": "never begun"}]}))
    result = CliRunner().invoke(status_command, [str(tmp_path / "sweep"), "--json"])
    first, second = json.loads(result.output)
    assert first["status"] == "failed" and first["log"] == lines[45:50]  # the reason stands beside them
    assert second["status"] == "pending" and second["step"] == 0
    shown = CliRunner().invoke(status_command, [str(tmp_path / "sweep")])
    assert shown.exit_code == 0


def test_a_table_shows_every_run_and_the_sums(tmp_path: Path) -> None:
    for name, status in (("a", "done"), ("b", "failed"), ("c", "pending")):
        RunDirectory(tmp_path / name).write_config({})
        RunDirectory(tmp_path / name).write_state(RunState(status=status, reason="[red]why[/red]"))
    shown = subprocess.run(
        [sys.executable, "-m", "olmo_ext", "status", str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert "b: failed: [red]why[/red]" in shown
    assert "3 runs: 1 done, 1 pending, 1 failed" in shown


def test_what_waits_says_what_slurm_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(
        "#!/bin/bash\n"
        'case "$*" in\n'
        "*%r*) echo '7_0 Priority'; echo '7_1 launch failed requeued held'; echo '7_2 Priority' ;;\n"
        "*) for i in 0 1 2; do echo 7_$i PENDING; done; echo 7_3 RUNNING ;;\n"
        "esac\n"
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    sweep = tmp_path / "sweep"
    for name in "abcd":
        RunDirectory(sweep / name).write_config({})
    (sweep / "slurm-jobs.jsonl").write_text(json.dumps({"kind": "runs", "job": "7", "runs": list("abcd")}))
    assert [(run.status, run.waits_for) for run in sweep_status(sweep)] == [
        ("queued", "Priority"),
        ("queued", "launch failed requeued held"),
        ("queued", "Priority"),
        ("running", ""),
    ]
    shown = CliRunner().invoke(status_command, [str(sweep)]).output
    assert "2 wait in Slurm's queue: Priority\n1 waits in Slurm's queue: launch failed requeued held\n" in shown


def test_the_status_of_one_run_by_its_folder_knows_the_sweeps_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        RunDirectory(tmp_path / "sweep" / name).write_config({})
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({"runs": [{"name": "a"}, {"name": "b"}]}))
    (tmp_path / "sweep" / "slurm-jobs.jsonl").write_text(json.dumps({"kind": "runs", "job": "7", "runs": ["a", "b"]}))
    monkeypatch.setattr("olmo_ext.launch.slurm_queue.read_queue", lambda: {"7_1": "PENDING"})
    monkeypatch.setattr("olmo_ext.launch.slurm_queue.read_reasons", dict)
    monkeypatch.chdir(tmp_path / "sweep" / "b")
    for path in (tmp_path / "sweep" / "b", Path("."), Path("../b")):
        assert [(run.name, run.status, run.job) for run in sweep_status(path)] == [("b", "queued", "7_1")]


@pytest.mark.parametrize("loss", ['"low"', "null", "[1]", "true"])
def test_a_loss_that_is_no_number_is_none(tmp_path: Path, loss: str) -> None:
    RunDirectory(tmp_path / "a").write_config({})
    row = '{"kind": "train", "attempt": 1, "step": 1, "values": {"train/CrossEntropyLoss": %s}}\n'
    (tmp_path / "a" / "metrics.jsonl").write_text(row % loss)
    result = CliRunner().invoke(status_command, [str(tmp_path)])
    assert result.exit_code == 0 and "1 pending" in result.output, result.output


def test_a_log_of_any_length_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100_000 + b"\nlast \xff line\n\n")
    assert last_lines(path, 1) == ["last \ufffd line"]
    assert tail_of(path, 20) == b"last \xff line\n\n"
    assert read_progress(RunDirectory(tmp_path / "nothing")) is None


def test_the_steps_of_fifty_long_runs_come_from_the_ends_of_their_files(tmp_path: Path) -> None:
    rows = "".join(
        json.dumps({"kind": "train", "attempt": 1, "step": s, "tokens": s, "time": float(s), "values": {}}) + "\n"
        for s in range(5000)
    )
    for index in range(50):
        directory = RunDirectory(tmp_path / f"run{index:02d}")
        directory.write_config({})
        directory.write_state(RunState(status="done", attempt=1))
        directory.metrics_path.write_text(rows)
    statuses = sweep_status(tmp_path)
    assert [run.step for run in statuses] == [4999] * 50
