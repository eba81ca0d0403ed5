"""`launch --on NODE_TYPE` against a Slurm that only writes down what it is asked: what is queued, refused, told."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from olmo_ext.base.errors import InputError, WorkError
from olmo_ext.base.run_directory import RunDirectory, RunState
from olmo_ext.launch.launch_command import launch as launch_command
from olmo_ext.launch.slurm_queue import client_environment, record_submission
from tests.launch.conftest import CONFIG, invoke, option, submitted

pytestmark = pytest.mark.once

SCRIPTS = Path(__file__).parents[2] / "olmo_ext" / "resources" / "slurm"


def test_a_sweep_is_one_array_and_a_comparison_that_waits_for_it(fake_slurm: Path, tmp_path: Path) -> None:
    os.environ["SLURM_NTASKS"] = "3"
    os.environ["SBATCH_QOS"] = "wrong"
    try:
        invoke("--throttle", "2")
    finally:
        del os.environ["SLURM_NTASKS"], os.environ["SBATCH_QOS"]
    runs, compare = submitted(fake_slurm)
    assert option(runs, "array") == "0-5%2"
    assert option(compare, "dependency") == "afterany:101" and "--kill-on-invalid-dep=yes" in compare
    launch_folder = Path(runs[-1].partition("=")[2])
    assert json.loads((launch_folder / "runs.json").read_text())["world_size"] == 8
    assert (launch_folder / "code" / "olmo_ext" / "launch" / "slurm.py").read_bytes()
    environment = (fake_slurm / "environment").read_text()
    assert "SLURM_NTASKS" not in environment and "SBATCH_QOS" not in environment
    # The package's own scripts, frozen: nothing of slurm/ lies in this folder.
    assert (launch_folder / "job.sh").read_bytes() == (SCRIPTS / "job.sh").read_bytes()


def test_only_what_is_neither_done_nor_queued_is_queued_again(fake_slurm: Path, tmp_path: Path) -> None:
    invoke()
    directory = tmp_path / "runs" / "sweep"
    done = RunDirectory(directory / "learning_rate0.001-s1")
    done.write_state(RunState(status="done", attempt=1, step=5))
    (fake_slurm / "queue").write_text("101_1 RUNNING\n101_2 PENDING\n999 RUNNING\n")
    before = (directory / "learning_rate0.001-s2" / "config.yaml").stat().st_mtime_ns
    invoke()
    again = submitted(fake_slurm)[2]
    assert option(again, "array") == "0-2"
    names = json.loads((directory / ".launch" / "002" / "runs.json").read_text())["runs"]
    assert names == ["learning_rate0.002-s2", "learning_rate0.003-s1", "learning_rate0.003-s2"]
    assert (directory / "learning_rate0.001-s2" / "config.yaml").stat().st_mtime_ns == before


def test_an_array_is_split_where_the_cluster_takes_no_larger_one(fake_slurm: Path, monkeypatch) -> None:
    monkeypatch.setenv("MAX_ARRAY_SIZE", "5")
    invoke("--throttle", "3")
    first, second, compare = submitted(fake_slurm)
    assert (option(first, "array"), option(second, "array")) == ("0-3%3", "0-1%3")
    assert option(second, "dependency") == "afterany:101"  # so that the throttle holds for both
    assert option(compare, "dependency") == "afterany:101:102"


def test_a_refused_submission_says_what_is_queued_and_the_rest_is_queued_by_the_next_call(
    fake_slurm, monkeypatch
) -> None:
    monkeypatch.setenv("MAX_ARRAY_SIZE", "5")
    (fake_slurm / "refuse").touch()
    assert "QOSMaxSubmit (4 of 6 runs queued" in invoke(fails=WorkError)
    (fake_slurm / "refuse").unlink()
    (fake_slurm / "queue").write_text("".join(f"101_{i} PENDING\n" for i in range(4)))
    invoke()
    assert option(submitted(fake_slurm)[2], "array") == "0-1"


def test_a_comparison_waits_also_for_what_an_earlier_launch_still_runs(fake_slurm: Path) -> None:
    invoke()
    (fake_slurm / "queue").write_text("101_1 RUNNING\n101_3 PENDING\n102 PENDING\n")
    invoke()
    assert option(submitted(fake_slurm)[3], "dependency") == "afterany:103:101"
    assert (fake_slurm / "cancelled").read_text() == "102\n"


def test_a_refused_comparison_is_queued_by_the_same_command(fake_slurm: Path) -> None:
    (fake_slurm / "refuse").touch()
    assert "the comparison is not; the same command again" in invoke(fails=WorkError)
    (fake_slurm / "refuse").unlink()
    queue = "".join(f"101_{i} PENDING\n" for i in range(6))
    (fake_slurm / "queue").write_text(queue)
    assert "--dependency=afterany:101" in invoke("--dry-run")
    invoke()
    assert len(submitted(fake_slurm)) == 3 and option(submitted(fake_slurm)[2], "dependency") == "afterany:101"
    (fake_slurm / "queue").write_text(queue + "103 PENDING\n")
    invoke()
    assert len(submitted(fake_slurm)) == 3


def test_a_partition_that_only_the_comparison_lacks_is_refused_before_anything_is_queued(
    fake_slurm: Path, tmp_path: Path
) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "site.env").write_text("SBATCH_PARTITION_CPU=cpux\n")
    assert "SBATCH_PARTITION_CPU): no partition 'cpux'" in invoke(fails=InputError)
    assert not submitted(fake_slurm) and not (tmp_path / "runs").exists()
    invoke("--no-compare")
    assert len(submitted(fake_slurm)) == 1


NO_NODE = "allocation failure: Requested node configuration is not available"
UP = "".join(f"n{i}|{state}\n" for i, state in enumerate(["idle", "mixed", "allocated", "completing", "maint"]))


def test_a_node_that_the_cluster_does_not_have_is_refused_with_what_was_asked_for(fake_slurm: Path) -> None:
    (fake_slurm / "refuse-test").write_text(NO_NODE)
    (fake_slurm / "nodes").write_text(UP)
    message = invoke(fails=InputError)
    assert "--gpus-per-node=8 --cpus-per-task=112" in message and "slurm/nodes.yaml" in message


@pytest.mark.parametrize("state", ["down", "down*", "drained", "draining", "idle*", "unknown*", "reboot_issued"])
def test_a_job_that_only_waits_for_a_node_that_is_away_is_queued_with_a_warning(fake_slurm: Path, state: str) -> None:
    """Slurm's test counts the nodes that are up; a job that is really submitted waits for the others."""
    (fake_slurm / "refuse-test").write_text(NO_NODE)
    (fake_slurm / "nodes").write_text(f"{UP}away-1|{state}\n")
    assert f"it will wait for away-1 {state}\n" in invoke()
    assert len(submitted(fake_slurm)) == 2


def test_any_other_refusal_stays_one_whatever_nodes_are_away(fake_slurm: Path) -> None:
    (fake_slurm / "refuse-test").write_text("allocation failure: Invalid account or account/partition combination")
    (fake_slurm / "nodes").write_text("away-1|down\n")
    assert "sbatch would refuse: allocation failure: Invalid account" in invoke(fails=InputError)
    assert not submitted(fake_slurm)


def test_a_node_that_comes_back_between_two_questions_is_no_refusal(fake_slurm: Path) -> None:
    """sbatch did not count it yet, and a moment later sinfo already says that it is up."""
    (fake_slurm / "refuse-test").write_text(NO_NODE)
    (fake_slurm / "nodes").write_text(UP)
    (fake_slurm / "once").touch()
    invoke()
    assert len(submitted(fake_slurm)) == 2


@pytest.mark.parametrize("text", ["soon", "60", "1e3", "30s", "", "1e300d"])
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_time_limit_that_is_none_is_refused_by_its_option(fake_slurm: Path, text: str, more: list[str]) -> None:
    assert invoke("--time", text, *more, fails=InputError).startswith("--time: ")
    assert not submitted(fake_slurm)


@pytest.mark.parametrize(
    ("limit", "refused"), [("2-0", True), ("UNLIMITED", True), ("1-0", False), ("90", False), ("whatever", False)]
)
def test_a_scripts_own_time_limit_is_read_as_slurm_reads_it(
    fake_slurm: Path, tmp_path: Path, limit: str, refused: bool
) -> None:
    (tmp_path / "slurm").mkdir()
    own = (SCRIPTS / "b200.sbatch").read_text().replace("--time=24:00:00", f"--time={limit}")
    (tmp_path / "slurm" / "b200.sbatch").write_text(own)
    said = invoke("--dry-run")
    assert (f"allows 1-00:00:00, the time limit is {limit}" in said) == refused


def test_nothing_is_queued_where_slurm_stops_answering_before_the_last_look(
    fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from olmo_ext.launch import slurm

    @contextlib.contextmanager
    def lock(directory: Path) -> Iterator[None]:
        (fake_slurm / "no-answer").touch()
        yield

    monkeypatch.setattr(slurm, "sweep_lock", lock)
    assert "squeue no longer answers" in invoke(fails=WorkError)
    assert not submitted(fake_slurm)


def test_an_sbatch_that_does_not_answer_is_told_with_what_may_have_come_of_it(
    fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olmo_ext.launch.slurm_queue.SBATCH_SECONDS", 0.2)
    (fake_slurm / "hangs").touch()
    said = invoke(fails=WorkError)
    assert "sbatch has not answered" in said and "look with squeue" in said and "0 of 6 runs queued" in said


def test_a_job_that_cannot_be_recorded_is_cancelled_for_the_next_launch_would_queue_it_again(
    fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device", "slurm-jobs.jsonl")

    monkeypatch.setattr("olmo_ext.launch.slurm_queue.record_submission", full)
    assert "No space left" in invoke(fails=OSError)
    assert (fake_slurm / "cancelled").read_text() == "101\n"


def test_a_fetch_that_an_earlier_launch_has_queued_is_waited_for_and_not_queued_again(
    fake_slurm: Path, tmp_path: Path
) -> None:
    data = "{paths: [tokens.bin], memmap_dtype: uint16}"
    (tmp_path / "base.yaml").write_text(CONFIG.replace(data, "{subset: my-subset}"))
    (fake_slurm / "refuse").touch()
    assert "0 of 6 runs queued" in invoke("--fetch", "4", fails=WorkError)
    (fake_slurm / "refuse").unlink()
    (fake_slurm / "queue").write_text("101_3 RUNNING\n")
    invoke("--fetch", "4", "--no-compare")
    assert len(submitted(fake_slurm)) == 3  # the fetch, the runs that were refused, and they again
    assert option(submitted(fake_slurm)[2], "dependency") == "afterok:101"
    # Other data, and one that has ended, are fetched.
    (fake_slurm / "queue").write_text("101_3 RUNNING\n")
    invoke("--fetch", "5", "--no-compare")
    (fake_slurm / "queue").write_text("")
    invoke("--fetch", "4", "--no-compare")
    assert [option(command, "array") for command in submitted(fake_slurm)[3:]] == ["1-5", "0-5", "1-4", "0-5"]


def test_a_job_that_is_ending_is_told_from_one_that_will_run(fake_slurm: Path) -> None:
    invoke()
    (fake_slurm / "queue").write_text("101_0 COMPLETING\n" + "".join(f"101_{i} PENDING\n" for i in range(1, 6)))
    lines = invoke().splitlines()
    (ending,) = [line for line in lines if "101_0" in line]
    assert "launch again when it has gone" in ending
    assert not any("launch again when it has gone" in line for line in lines if "101_1" in line)


def test_lines_of_a_site_that_launch_does_not_use_are_named(fake_slurm: Path, tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "site.env").write_text(
        "SBATCH_TIMELIMIT=60\nSBATCH_PARTION=x\nSBATCH_QOS_B200=q\nPYTHON=$HOME/bin/python\nGPU_TYPES=b200\n"
    )
    said = invoke()
    assert "does not use SBATCH_TIMELIMIT, SBATCH_PARTION, GPU_TYPES;" in said
    assert option(submitted(fake_slurm)[0], "qos") == "q"


@pytest.mark.parametrize("name", ["SQUEUE_STATES", "SINFO_PARTITION", "SCANCEL_STATE", "SLURM_CLUSTERS", "SBATCH_QOS"])
def test_habits_in_the_environment_do_not_change_what_slurm_answers(
    fake_slurm: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    invoke()
    (fake_slurm / "queue").write_text("".join(f"101_{i} PENDING\n" for i in range(6)) + "102 PENDING\n")
    monkeypatch.setenv(name, "RUNNING")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    assert name not in client_environment() and "SLURM_CONF" in client_environment()
    invoke()
    assert len(submitted(fake_slurm)) == 2


def test_of_two_launches_at_the_same_time_one_queues(fake_slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from olmo_ext.launch import slurm

    @contextlib.contextmanager
    def late(directory: Path) -> Iterator[None]:
        """The lock is free again after another launch, which has queued a run."""
        directory.mkdir(parents=True)
        record_submission(directory, {"kind": "runs", "job": "55", "runs": ["learning_rate0.001-s1"]})
        (fake_slurm / "queue").write_text("55_0 PENDING\n")
        yield

    monkeypatch.setattr(slurm, "sweep_lock", late)
    assert "has just been queued as 55_0" in invoke(fails=InputError)
    assert not submitted(fake_slurm)


def test_a_changed_yaml_is_refused_while_the_run_is_queued(fake_slurm: Path, tmp_path: Path) -> None:
    invoke()
    (fake_slurm / "queue").write_text("101_0 PENDING\n")
    (tmp_path / "base.yaml").write_text(CONFIG.replace("n_layers: 2", "n_layers: 3"))
    assert "is queued with another config: model" in invoke(fails=InputError)


def test_a_local_launch_leaves_queued_runs_to_slurm(fake_slurm: Path) -> None:
    invoke()
    (fake_slurm / "queue").write_text("101_3 PENDING\n")
    result = CliRunner().invoke(launch_command, ["sweep.yaml", "--on", "local", "device_train_microbatch_size=8"])
    assert "is in Slurm's queue as 101_3" in str(result.exception)


def test_a_local_launch_leaves_runs_queued_by_hand_too_and_starts_none_where_slurm_does_not_answer(
    fake_slurm: Path, tmp_path: Path
) -> None:
    directory = RunDirectory(tmp_path / "runs" / "sweep" / "learning_rate0.001-s1")
    directory.write_state(RunState(status="requeued", attempt=1, slurm_job="55"))
    (fake_slurm / "queue").write_text("55 PENDING\n")
    asked = ["sweep.yaml", "device_train_microbatch_size=8"]
    assert "is in Slurm's queue as 55" in str(CliRunner().invoke(launch_command, asked).exception)
    (fake_slurm / "no-answer").touch()
    assert "squeue does not answer" in str(CliRunner().invoke(launch_command, asked).exception)


def test_the_job_that_we_are_in_ourselves_does_not_keep_a_run_from_being_queued(
    fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path / "runs" / "sweep" / "learning_rate0.001-s1")
    directory.write_state(RunState(status="requeued", attempt=1, slurm_job="55"))
    (fake_slurm / "queue").write_text("55 RUNNING\n")
    assert "learning_rate0.001-s1: in the queue as 55" in invoke("--dry-run")
    monkeypatch.setenv("SLURM_JOB_ID", "55")
    assert "learning_rate0.001-s1: to be queued" in invoke("--dry-run")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpus", "2"], "--gpus: has no meaning with --on local; --on a node type"),
        (["--nodes", "1"], "--nodes: has no meaning"),
        (["--time", "1h"], "--time: has no meaning"),
        (["--fetch", "4"], "--fetch: has no meaning"),
        (["--throttle", "4"], "--throttle: has no meaning with --on local; --jobs"),
        (["--on", "b200", "--jobs", "2"], "--jobs: has no meaning with --on b200; --throttle"),
        (["--on", "b200", "--fetch-from", "x.yaml"], "--fetch-from: nothing is fetched; --fetch N"),
    ],
)
def test_an_option_that_would_be_dropped_is_refused(fake_slurm: Path, arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(launch_command, ["sweep.yaml", *arguments])
    assert isinstance(result.exception, InputError) and says in str(result.exception)


def test_a_dry_run_prints_every_command_and_writes_nothing(fake_slurm: Path, tmp_path: Path) -> None:
    output = invoke("--dry-run", "--time", "2-00:00:00")
    assert "sbatch --parsable --export=NONE --job-name=sweep --array=0-5" in output
    assert "would be refused: partition 'b200' allows 1-00:00:00" in output
    assert "all: ddp, amp_bf16, SDPA, compiled, micro-batch 1" in output
    assert not submitted(fake_slurm) and not (tmp_path / "runs").exists()


def test_data_is_fetched_before_the_runs(fake_slurm: Path, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        CONFIG.replace("{paths: [tokens.bin], memmap_dtype: uint16}", "{subset: my-subset}")
    )
    invoke("--fetch", "4")
    fetch, runs, _ = submitted(fake_slurm)
    assert option(fetch, "array") == "1-4"
    assert fetch[fetch.index("data") :] == [
        "data", "fetch", "--instances=40", f"--output={tmp_path / 'my-subset'}", "--seed=6198", "--part={part}/4",
    ]  # fmt: skip
    assert option(runs, "dependency") == "afterok:101" and "--kill-on-invalid-dep=yes" in runs


@pytest.mark.parametrize(
    ("missing", "says"),
    [("scontrol", "no scontrol on PATH"), ("", "has no address")],
)
def test_the_batch_shell_stops_where_it_cannot_name_the_nodes(fake_slurm: Path, tmp_path: Path, missing, says) -> None:
    """The shell itself: without scontrol, and with a node list whose names mean nothing."""
    invoke("--gpus", "1")
    launch_folder = tmp_path / "runs" / "sweep" / ".launch" / "001"
    binaries = tmp_path / "bin"
    binaries.mkdir()
    tools = {
        "srun": "#!/bin/bash\ntouch started\n",
        "squeue": "#!/bin/bash\n",
        "scontrol": '#!/bin/bash\ncase "$2" in\nhostnames) printf "no-such-node-%s\\n" 1 2 ;;\n'
        'node) echo "NodeAddr=$3 x" ;;\nesac\n',
    }
    for name, text in tools.items():
        if name != missing:
            (binaries / name).write_text(text)
            (binaries / name).chmod(0o755)
    (launch_folder / "environment.sh").write_text(
        f"PATH={binaries}:/usr/bin:/bin\nOLMO_EXT_PYTHON={sys.executable}\n"
    )  # fmt: skip
    if missing and Path(f"/usr/bin/{missing}").exists():
        (launch_folder / "environment.sh").write_text(
            f"PATH={binaries}:/bin_of_nothing\nOLMO_EXT_PYTHON={sys.executable}\n"
        )
        for tool in ("date", "cat", "bash", "getent", "cut", "id"):
            os.symlink(f"/usr/bin/{tool}", binaries / tool)
    done = subprocess.run(
        ["/bin/bash", str(launch_folder / "b200.sbatch"), f"--launched={launch_folder}"],
        cwd=tmp_path,
        env={
            "SLURM_JOB_ID": "101",
            "SLURM_ARRAY_JOB_ID": "101",
            "SLURM_ARRAY_TASK_ID": "0",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "no-such-node-[1-2]",
            "SLURM_GPUS_ON_NODE": "1",
            "SLURM_CPUS_PER_TASK": "4",
            "SLURM_SUBMIT_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode in (1, 2) and says in done.stdout + done.stderr
    assert not (tmp_path / "started").exists()
    assert "127.0.0.1" not in done.stdout and "localhost" not in done.stdout
    if not missing:
        assert "has no address" in RunDirectory(tmp_path / "runs/sweep/learning_rate0.001-s1").read_state().reason
