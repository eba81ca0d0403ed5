"""What a job asks before an attempt: its shell evaluates the answer alone, and a refusal leaves a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.base.run_directory import RunDirectory, RunState
from olmo_ext.launch import rank
from olmo_ext.launch.slurm_job import attempts_without_progress, begin
from olmo_ext.launch.slurm_queue import read_submissions, submitted_jobs

ENTRY = Path(__file__).parents[2] / "olmo_ext" / "launch" / "entry" / "slurm_begin.py"
JOB = {
    "SLURM_JOB_ID": "107",
    "SLURM_ARRAY_JOB_ID": "107",
    "SLURM_ARRAY_TASK_ID": "0",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_GPUS_ON_NODE": "2",
}


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The launch folder of a sweep of one run, inside its job."""
    folder = tmp_path / "sweep" / ".launch" / "001"
    folder.mkdir(parents=True)
    (folder / "runs.json").write_text(json.dumps({"runs": ["a"], "world_size": 2}))
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    return folder


def fake_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(f"#!/bin/bash\necho '{text}'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"SLURM_JOB_NUM_NODES": "2"}, "the job has 4 GPUs, 2 were planned"),
        ({"SLURM_GPUS_ON_NODE": ""}, "the job has no GPUs"),
        ({"SLURM_JOB_NODELIST": None}, "SLURM_JOB_NODELIST is not set"),
    ],
)
def test_a_launched_run_whose_job_cannot_start_it_has_failed_and_says_why(
    launched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], says: str
) -> None:
    for name, value in changes.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=says):
        begin([f"--launched={launched}"])
    state = RunDirectory(tmp_path / "sweep" / "a").read_state()
    assert state.status == "failed" and says in state.reason


@pytest.mark.parametrize("status", ["running", "requeued", "pending", "failed"])
@pytest.mark.parametrize("other", ["55 RUNNING", "55 PENDING", "56 RUNNING"])
def test_a_job_leaves_a_run_alone_that_another_job_of_the_queue_is_training(
    launched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, other: str
) -> None:
    fake_queue(tmp_path, monkeypatch, other)
    directory = RunDirectory(tmp_path / "sweep" / "a")
    directory.write_state(RunState(status=status, attempt=1, step=4, slurm_job="55"))
    before = directory.state_path.read_bytes()
    if status == "running" and other == "55 RUNNING":
        with pytest.raises(InputError, match="a: job 55 is training this run"):
            begin([f"--launched={launched}"])
        assert directory.state_path.read_bytes() == before
    else:
        assert "verdict=run" in begin([f"--launched={launched}"])
        assert directory.read_state().slurm_job == "107_0"


def asked_by_hand(folder: Path, **changes: str) -> subprocess.CompletedProcess:
    (folder / "config.yaml").write_text(
        "model: {d_model: 64, n_heads: 4, n_layers: 2, max_sequence_length: 8, vocab_size: 256, embedding_size: 256,\n"
        "        ffn: {d_ff: 128}}\n"
        "tokenizer: {identifier: none}\nmax_duration: 5\nglobal_train_batch_size: 8\nplugins: [loud]\n"
    )
    (folder / "loud.py").write_text(
        "import os\nprint('touch printed')\nos.system('echo touch called')\nos.write(1, b'touch written\\n')\n"
    )
    job = {name: value for name, value in JOB.items() if "ARRAY" not in name}
    given = {**os.environ, **job, "OLMO_EXT_NODE": "b200", **changes}
    return subprocess.run(
        [sys.executable, str(ENTRY), "config.yaml"],
        cwd=folder,
        env={name: value for name, value in given.items() if value},
        capture_output=True,
        text=True,
    )


def test_nothing_that_a_plugin_prints_reaches_what_the_batch_shell_evaluates(tmp_path: Path) -> None:
    done = asked_by_hand(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "touch" not in done.stdout and done.stdout.startswith("verdict=run\n")
    assert all(f"touch {word}" in done.stderr for word in ("printed", "called", "written"))


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the runs should go")
    done = asked_by_hand(tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("olmo-ext: ") and "Traceback" not in done.stderr


def test_ranks_that_are_not_as_many_as_planned_fail_the_run_with_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"OLMO_EXT_WORLD_SIZE": "4", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    directory = RunDirectory(tmp_path / "run")
    directory.write_state(RunState())
    assert rank.main([str(directory.path)]) == 2
    state = directory.read_state()
    assert (state.status, state.reason) == ("failed", "2 ranks have met, 4 were planned")


@pytest.mark.parametrize("line", ["", "{", "5", "null", "[]", "{}", '{"kind": "runs"}', '{"job": 7}', "\x00\xff"])
def test_a_line_that_a_kill_or_a_disk_has_spoilt_does_not_hide_the_others(tmp_path: Path, line: str) -> None:
    good = [{"kind": "runs", "job": "7", "runs": ["a", "b"]}, {"kind": "compare", "job": "8"}]
    path = tmp_path / "slurm-jobs.jsonl"
    path.write_bytes(b"\n".join([json.dumps(good[0]).encode(), line.encode("latin-1"), json.dumps(good[1]).encode()]))
    assert read_submissions(tmp_path) == good
    assert submitted_jobs(tmp_path) == {"a": "7_0", "b": "7_1"}
    attempts = [json.dumps({"event": "begin", "step": 3}).encode(), line.encode("latin-1")]
    (tmp_path / "slurm-attempts.jsonl").write_bytes(b"\n".join(attempts))
    assert attempts_without_progress(RunDirectory(tmp_path), 3) == 1
