"""What becomes of a run on a real Slurm when something happens to it. The trainer is a fake; the shell is not."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.slurm.conftest import FAKE_TRAINING, Project, nodes_down, queued_jobs, scontrol, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.once]

ONE = "base: base.yaml\nmax_duration: 12\nruns: {a: {seed: 1}, b: {seed: 2}}\n"


def test_the_warning_saves_and_requeues_this_element_only(project: Project) -> None:
    project.write("sweep.yaml", ONE)
    project.hold()
    project.launch("sweep.yaml", "--no-compare")
    project.wait_for_step("sweep/a", 3)
    project.wait_for_step("sweep/b", 1)
    job = project.job("sweep/a")
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)
    wait_until(lambda: project.verdicts("sweep/a"), "the first attempt to end")
    project.release()
    project.wait_until_gone("sweep")
    (_, first), (attempt, restored) = project.attempts("sweep/a")
    assert (first, attempt) == (0, 2) and restored >= 3
    assert project.verdicts("sweep/a") == ["requeue", "done"]
    assert project.attempts("sweep/b") == [(1, 0)]
    # One log a job, appended to; one folder of logs per attempt's node.
    text = (project.path / "runs" / "sweep" / "logs" / f"{job}.log").read_text()
    assert "attempt 1 of" in text and "attempt 2 of" in text
    assert (project.run("sweep/a").logs / "attempt1-node0.log").is_file()


def test_the_frozen_config_and_plugins_run_whatever_is_edited_meanwhile_also_after_scontrol_requeue(
    project: Project,
) -> None:
    project.write("plugin_of_mine.py", "print('plugin version 1')\n")
    project.write("base.yaml", (project.path / "base.yaml").read_text() + "\nplugins: [plugin_of_mine]\n")
    project.write("sweep.yaml", ONE)
    project.hold()
    project.launch("sweep.yaml", "--no-compare")
    project.write("plugin_of_mine.py", "raise RuntimeError('edited while the job waited')\n")
    project.write("sweep.yaml", "not: [valid")
    project.write("base.yaml", "max_duration: 1")
    project.wait_for_step("sweep/a", 3)
    scontrol("requeue", project.job("sweep/a"))
    wait_until(lambda: len(project.attempts("sweep/a")) == 2, "a second attempt")
    project.release()
    project.wait_until_gone("sweep")
    for name in ("a", "b"):
        state = project.run(f"sweep/{name}").read_state()
        assert (state.status, state.step) == ("done", 12), state.reason
    attempts = project.attempts("sweep/a")
    assert [attempt for attempt, _ in attempts] == [1, 2] and attempts[1][1] > 0
    for attempt in (1, 2):
        log = (project.run("sweep/a").logs / f"attempt{attempt}-node0.log").read_text()
        assert "plugin version 1" in log and "edited" not in log
    assert (project.run("sweep/a").path / "code" / "olmo_ext" / "cli.py").is_file()


def test_scancel_saves_and_does_not_requeue_and_the_next_launch_continues(project: Project) -> None:
    project.write("sweep.yaml", ONE)
    project.hold()
    project.launch("sweep.yaml", "--no-compare")
    project.wait_for_step("sweep/a", 3)
    project.olmo_ext("cancel", "runs/sweep", "a")
    wait_until(lambda: project.job("sweep/a") not in queued_jobs(), "the cancelled element to go", 30)
    state = project.run("sweep/a").read_state()
    assert state.status == "requeued" and state.step >= 3
    assert "1 stopped" in project.olmo_ext("status", "runs/sweep").stdout
    out = project.launch("sweep.yaml", "--no-compare").stdout
    assert "a: to be queued" in out and "b: in the queue" in out
    project.release()
    project.wait_until_gone("sweep")
    assert project.attempts("sweep/a") == [(1, 0), (2, state.step)]
    assert len(project.attempts("sweep/b")) == 1


def test_a_node_that_goes_down_costs_an_attempt_and_not_the_run(project: Project) -> None:
    project.write("sweep.yaml", "base: base.yaml\nmax_duration: 12\nruns: {a: {seed: 1}}")
    project.hold()
    project.launch("sweep.yaml", "--no-compare")
    project.wait_for_step("sweep/a", 3)
    node = next(event["nodes"] for event in project.events("sweep/a") if event["event"] == "begin")
    with nodes_down(node, partition="b200"):
        wait_until(lambda: len(project.attempts("sweep/a")) == 2, "a second attempt")
        nodes = [event["nodes"] for event in project.events("sweep/a") if event["event"] == "begin"]
        assert nodes[1] != node
        project.release()
        project.wait_until_gone("sweep")
    assert project.run("sweep/a").read_state().status == "done"


def test_a_partition_that_is_down_for_now_takes_the_runs_and_they_wait_for_it(project: Project) -> None:
    project.write("sweep.yaml", "base: base.yaml\nmax_duration: 12\nruns: {a: {seed: 1}}")
    with nodes_down("b200-[1-2]", partition="b200"):
        said = project.launch("sweep.yaml", "--no-compare").stderr
        assert "it will wait for b200-1 down" in said
        assert list(queued_jobs().values()) == ["PENDING"]
    project.wait_until_gone("sweep")
    assert project.run("sweep/a").read_state().status == "done"


def test_preemption_is_requeued_by_slurm(project: Project) -> None:
    project.site(f'{project.fake}SBATCH_PARTITION_B200=low\nSBATCH_OPTIONS="--exclusive --nodelist=b200-1"')
    project.write("sweep.yaml", "base: base.yaml\nmax_duration: 12\nruns: {a: {seed: 1}}")
    project.hold()
    project.launch("sweep.yaml", "--no-compare")
    project.wait_for_step("sweep/a", 3)
    project.sbatch("--partition=b200", "--exclusive", "--nodelist=b200-1", "--mem=0", "--wrap=sleep 3")
    wait_until(lambda: len(project.attempts("sweep/a")) == 2, "a second attempt")
    # Attempt, and the step it goes on from: what the first has saved when it was told to leave.
    assert project.attempts("sweep/a")[1][1] >= 3
    project.release()
    project.wait_until_gone("sweep")
    assert project.run("sweep/a").read_state().status == "done"


def test_a_killed_rank_ends_all_within_a_minute_and_is_not_requeued(project: Project) -> None:
    project.write("sweep.yaml", "base: base.yaml\nmax_duration: 2000\nruns: {a: {seed: 1}}")
    project.olmo_ext("launch", "sweep.yaml", "--on", "b200", "--gpus", "2", "--nodes", "2", "--no-compare")
    project.wait_for_step("sweep/a", 3)
    directory = project.run("sweep/a").path
    assert (directory / "world_size").read_text() == "4"
    os.kill(int((directory / "processes").read_text().split()[0]), signal.SIGKILL)
    project.wait_until_gone("sweep", seconds=60)
    assert project.verdicts("sweep/a") == ["failed"]
    assert "died" in project.run("sweep/a").read_state().reason


def test_two_attempts_without_progress_stop_the_run(project: Project) -> None:
    # The first step never ends, so no attempt gets anywhere.
    project.site(f"PYTHONPATH={FAKE_TRAINING}\nFAKE_STEP_SECONDS=3600")
    project.write("sweep.yaml", "base: base.yaml\nruns: {a: {seed: 1}}")
    project.launch("sweep.yaml", "--no-compare")
    for attempt in (1, 2):
        wait_until(lambda n=attempt: len(project.attempts("sweep/a")) == n, f"attempt {attempt}")
        scontrol("requeue", project.job("sweep/a"))
    project.wait_until_gone("sweep")
    state = project.run("sweep/a").read_state()
    assert state.status == "failed" and "2 attempts without progress beyond step 0" in state.reason
    assert len(project.attempts("sweep/a")) == 2


def test_an_array_by_hand_goes_back_to_the_run_it_began_whatever_becomes_of_the_yaml(project: Project) -> None:
    project.write("sweep.yaml", ONE)
    project.hold()
    job = project.sbatch("--array=0-1", "--partition=b200", "--gpus-per-node=1", "--cpus-per-task=2", "--mem=1G",
                         "slurm/b200.sbatch", "sweep.yaml", "max_duration=12")  # fmt: skip
    project.wait_for_step("sweep/a", 3)
    project.wait_for_step("sweep/b", 1)
    project.write("sweep.yaml", "not: [valid")
    subprocess.run(["scancel", "--batch", "--signal=USR1", f"{job}_0"], check=True)
    wait_until(lambda: project.verdicts("sweep/a"), "the first attempt to end")
    project.release()
    wait_until(lambda: not queued_jobs(), "the array")
    assert [attempt for attempt, _ in project.attempts("sweep/a")] == [1, 2]
    assert [attempt for attempt, _ in project.attempts("sweep/b")] == [1]
    for name in ("a", "b"):
        state = project.run(f"sweep/{name}").read_state()
        assert (state.status, state.step) == ("done", 12), state.reason
    # An element that the sweep does not have ends with one line.
    project.write("sweep.yaml", ONE)
    extra = project.sbatch("--array=7", "--partition=b200", "--gpus-per-node=1", "--cpus-per-task=2", "--mem=1G",
                           "--output=extra.txt", "slurm/b200.sbatch", "sweep.yaml", "max_duration=12")  # fmt: skip
    wait_until(lambda: f"{extra}_7" not in queued_jobs(), "the element")
    assert "element 7 of a sweep of 2 runs" in (project.path / "extra.txt").read_text()
