"""Real training as real jobs: both scripts by hand, two nodes, the time limit, a full disk."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.conftest import Project, queued_jobs, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.once]


def weights(project: Project, name: str, step: int) -> list[str]:
    folder = project.run(name).checkpoints / f"step{step}"
    return [
        hashlib.sha256((folder / f"{part}.safetensors").read_bytes()).hexdigest() for part in ("model", "optimizer")
    ]


def test_both_scripts_by_hand(project_with_training: Project) -> None:
    project = project_with_training
    jobs = {
        node: project.sbatch(
            f"--partition={partition}",
            "--gpus-per-node=1",
            "--cpus-per-task=4",
            "--mem=2G",
            f"slurm/{node}.sbatch",
            "base.yaml",
            f"run_name=by hand on {node}",
            "precision=fp32",
            "compile=null",
        )
        for node, partition in (("rtx6000ada", "ada"), ("b200", "b200"))
    }
    wait_until(lambda: not queued_jobs(), "both jobs", 180)
    for node, job in jobs.items():
        directory = project.run(f"base/by hand on {node}")
        state = directory.read_state()
        assert (state.status, state.step, state.slurm_job) == ("done", 10, job), state.reason
        assert directory.read_config()["node"] == node
        log = (project.path / f"olmo-ext-{job}.log").read_text()
        assert "attempt 1 of" in log and "done at step 10" in log
        revision = directory.read_provenance()["code"]
        assert revision == json.loads((directory.path / "code" / "code.json").read_text())["code"]
        assert (directory.path / "code" / "olmo_ext" / "cli.py").is_file()
    # The same command again finds the run finished; an element that the sweep does not have is refused.
    again = project.sbatch("-p", "ada", "--gpus-per-node=1", "--cpus-per-task=4", "--mem=2G", "slurm/rtx6000ada.sbatch",
                           "base.yaml", "run_name=by hand on rtx6000ada", "precision=fp32", "compile=null")  # fmt: skip
    wait_until(lambda: not queued_jobs(), "the repetition", 60)
    assert "done at step 10" in (project.path / f"olmo-ext-{again}.log").read_text()
    assert len(project.attempts("base/by hand on rtx6000ada")) == 1


def test_two_nodes_of_two_ranks_are_one_run_of_world_size_four(project_with_training: Project) -> None:
    project = project_with_training
    project.write("sweep.yaml", "base: base.yaml\nname: two\nwandb: {project: test}\nruns: {a: {seed: 1}}")
    project.olmo_ext("launch", "sweep.yaml", "--on", "b200", "--nodes", "2", "--gpus", "2", "precision=fp32",
                     "compile=null", "--no-compare")  # fmt: skip
    project.wait_until_gone("two", seconds=240)
    directory = project.run("two/a")
    state = directory.read_state()
    assert (state.status, state.step) == ("done", 10), state.reason
    assert directory.read_provenance()["world_size"] == 4
    nodes = [event["nodes"] for event in project.events("two/a") if event["event"] == "begin"]
    assert nodes == ["b200-[1-2]"]
    assert len(list(directory.wandb.rglob("run-*.wandb"))) == 1
    assert {path.name for path in directory.logs.glob("attempt1-rank?.log")} == {
        f"attempt1-rank{r}.log" for r in range(4)
    }
    steps = [row.step for row in directory.read_metrics() if row.kind == "train"]
    assert steps == sorted(set(steps)) and steps[-1] == 10


SLOW_FFN = """
import os
import time

from olmo_ext.shapes.registry import FFNType, register_ffn


@register_ffn
class Slow(FFNType):
    name = "slow"

    def matrices(self, d_model, d_ff, spec):
        return [(d_ff, d_model), (d_model, d_ff)]

    def build(self, d_model, d_ff, spec, config):
        from torch import nn

        class Module(nn.Module):
            def __init__(self):
                super().__init__()
                self.ff_proj = nn.Linear(d_model, d_ff, bias=config.include_bias, device=config.init_device)
                self.ff_out = nn.Linear(d_ff, d_model, bias=config.include_bias, device=config.init_device)

            def forward(self, x):
                if os.path.exists("HOLD"):
                    time.sleep(0.25)
                return self.ff_out(self.ff_proj(x).relu())

        return Module()
"""


def test_the_time_limit_saves_requeues_and_ends_with_the_weights_of_an_uninterrupted_run(
    project_with_training: Project,
) -> None:
    project = project_with_training
    hold = project.path / "hold"
    project.write("slow_ffn.py", SLOW_FFN.replace("HOLD", str(hold)))
    # Slurm looks at time limits every 30 seconds and warns up to 30 seconds early: after 85 to 115 seconds here.
    # The layers would sleep for 150 seconds in all, so that the fastest machine is warned before it is done.
    project.site('SBATCH_OPTIONS="--signal=B:USR1@5"')
    steps = 300
    for name in ("straight", "limited"):
        project.write(
            f"{name}.yaml",
            f"base: base.yaml\nmax_duration: {steps}\nprecision: fp32\ncompile: null\nplugins: [slow_ffn]\n"
            "runs: {a: {seed: 1, model.ffn.type: slow}}\n",
        )
    project.launch("straight.yaml", "--time", "1h")
    project.wait_until_gone("straight", seconds=400)
    hold.touch()
    project.launch("limited.yaml", "--time", "2m", "--no-compare")
    wait_until(lambda: project.verdicts("limited/a"), "the end of the first attempt", 300)
    hold.unlink()
    project.wait_until_gone("limited", seconds=400)
    attempts = project.attempts("limited/a")
    assert len(attempts) >= 2 and 0 < attempts[-1][1] < steps
    assert project.verdicts("limited/a") == ["requeue"] * (len(attempts) - 1) + ["done"]
    assert project.attempts("straight/a") == [(1, 0)]
    assert project.run("straight/a").read_state().step == project.run("limited/a").read_state().step == steps
    assert weights(project, "straight/a", steps) == weights(project, "limited/a", steps)
    report = (project.path / "runs" / "straight" / "report.html").read_text()
    assert "validation" in report


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_a_failure_with_its_reason_and_leaves_the_older_checkpoint(
    project_with_training: Project, small_disk: Path
) -> None:
    project = project_with_training
    (project.path / "runs" / "sweep" / "a").mkdir(parents=True)
    (project.path / "runs" / "sweep" / "a" / "checkpoints").symlink_to(small_disk, target_is_directory=True)
    project.write(
        "sweep.yaml",
        "base: base.yaml\nmax_duration: 400\nsave_interval: 100\nsave_num_checkpoints_to_keep: -1\nprecision: fp32\n"
        "compile: null\nruns: {a: {seed: 1}}",
    )
    project.launch("sweep.yaml", "--no-compare")
    project.wait_until_gone("sweep", seconds=180)
    state = project.run("sweep/a").read_state()
    assert state.status == "failed" and "disk is full" in state.reason
    assert project.verdicts("sweep/a") == ["failed"]
    complete = sorted(folder.name for folder in small_disk.glob("step*") if (folder / "complete.json").is_file())
    assert complete and state.step == max(int(name.removeprefix("step")) for name in complete)
    assert "disk is full" in project.olmo_ext("status", "runs/sweep").stdout
