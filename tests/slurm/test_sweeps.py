"""A sweep on a real Slurm with a fake trainer: what is queued, what runs at a time, what is left alone."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from tests.slurm.conftest import CONFIG, FAKE_TRAINING, Project, queued_jobs, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.once]

SIX = """
base: base.yaml
axes: {optimizer.learning_rate: [1e-3, 2e-3, 3e-3]}
seeds: [1, 2]
"""
NAMES = [f"learning_rate{rate}-s{seed}" for rate in ("0.001", "0.002", "0.003") for seed in (1, 2)]


def most_at_a_time(project: Project, names: list[str], *, since: float) -> int:
    """Of the attempts that began after a time; an earlier one may have been killed before it noted its end."""
    changes = []
    for name in names:
        events = [event for event in project.events(f"sweep/{name}") if event["time"] >= since]
        changes += [(e["time"], {"begin": 1, "end": -1}[e["event"]]) for e in events if e["event"] != "queued"]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


def test_a_half_finished_sweep_is_queued_again_without_what_is_done_and_ends_as_a_comparison(project: Project) -> None:
    project.write("sweep.yaml", SIX)
    project.hold("learning_rate0.00[23]-*")  # the first two of the six get to their end
    out = project.launch("sweep.yaml", "--throttle", "2").stdout
    assert out.count("to be queued") == 6 and "6 runs" in out and "comparison" in out
    again = project.launch("sweep.yaml", "--throttle", "2").stdout
    assert again.count("in the queue as") == 6 and "to be queued" not in again

    def done() -> int:
        return sum(project.run(f"sweep/{name}").read_state().status == "done" for name in NAMES)

    wait_until(lambda: done() >= 2, "two runs")
    statuses = {
        run["name"]: run["status"] for run in json.loads(project.olmo_ext("status", "runs/sweep", "--json").stdout)
    }
    assert list(statuses) == NAMES
    assert {"done", "queued"} <= set(statuses.values()) <= {"done", "running", "queued"}
    project.olmo_ext("cancel", "runs/sweep")
    wait_until(lambda: not queued_jobs(), "the queue to be empty", 120)
    finished = [name for name in NAMES if project.run(f"sweep/{name}").read_state().status == "done"]
    assert finished == NAMES[:2]
    assert not (project.path / "runs" / "sweep" / "report.html").exists()

    project.release()
    again_at = time.time()
    out = project.launch("sweep.yaml", "--throttle", "3").stdout
    assert out.count("to be queued") == 6 - len(finished) and out.count(": done") == len(finished)
    project.wait_until_gone("sweep")
    assert done() == 6
    assert all(len(project.attempts(f"sweep/{name}")) == 1 for name in finished)
    assert most_at_a_time(project, NAMES, since=again_at) <= 3
    assert (project.path / "runs" / "sweep" / "report.html").stat().st_size > 1000


def test_a_crash_is_not_requeued_and_the_other_elements_go_on(project: Project) -> None:
    project.write("sweep.yaml", "base: base.yaml\nruns: {crash: {seed: 1}, fine: {seed: 2}}")
    project.launch("sweep.yaml")
    project.wait_until_gone("sweep")
    assert project.verdicts("sweep/crash") == ["failed"] and project.verdicts("sweep/fine") == ["done"]
    assert "a deterministic crash" in project.run("sweep/crash").read_state().reason
    text = project.olmo_ext("status", "runs/sweep").stdout
    assert "RuntimeError: a deterministic crash" in text and "1 done" in text and "1 failed" in text
    # Launched again by a person, it is tried again.
    project.launch("sweep.yaml", "--no-compare")
    project.wait_until_gone("sweep")
    assert project.attempts("sweep/crash") == [(1, 0), (2, 2)] or project.attempts("sweep/crash") == [(1, 0), (2, 0)]
    assert len(project.attempts("sweep/fine")) == 1


NASTY = ["a b", "x,y=1", "50%", "it's", "$(touch executed)"]


def test_names_with_blanks_quotes_and_dollars_arrive_unchanged_and_nothing_of_the_caller_leaks(
    project: Project,
) -> None:
    runs = {name: {"seed": index} for index, name in enumerate(NASTY)}
    project.write(
        "sweep.yaml", json.dumps({"base": "base.yaml", "max_duration": 2, "name": "50% of 'it'", "runs": runs})
    )
    # Any command that runs another stands for a container.
    project.site(f"PYTHONPATH={FAKE_TRAINING}\nFAKE_STEP_SECONDS=0.1\nCONTAINER='env INSIDE=yes'")
    project.launch(
        "sweep.yaml",
        "--no-compare",
        SLURM_JOB_ID="7",
        SLURM_CPUS_PER_TASK="3",
        SLURM_MEM_PER_CPU="17",
        SBATCH_PARTITION="nowhere",
        SBATCH_ARRAY_INX="0-99",
        SECRET_OF_THE_CALLER="1",
    )
    project.wait_until_gone("50% of 'it'")
    gpus = []
    for name in NASTY:
        directory = project.run(f"50% of 'it'/{name}")
        assert directory.read_state().status == "done", name
        assert directory.read_config()["run_name"] == name
        seen = json.loads((directory.path / "environment").read_text())
        assert "SECRET_OF_THE_CALLER" not in seen and "SLURM_MEM_PER_CPU" not in seen
        assert seen["SLURM_CPUS_PER_TASK"] == "14" and seen["INSIDE"] == "yes"
        gpus.append((seen["SLURMD_NODENAME"], seen["CUDA_VISIBLE_DEVICES"]))
    assert len(set(gpus)) == len(NASTY)  # each its own GPU
    assert not list(project.path.rglob("executed"))
    assert len({e["port"] for name in NASTY for e in project.events(f"50% of 'it'/{name}") if "port" in e}) == 5


def test_what_the_cluster_would_refuse_is_refused_before_anything_is_written(project: Project) -> None:
    project.write("sweep.yaml", SIX)
    too_long = project.launch("sweep.yaml", "--time", "3-00:00:00", check=False)
    assert too_long.returncode == 2 and "allows 2-00:00:00" in too_long.stderr
    project.site("SBATCH_PARTITION_B200=nowhere")
    nowhere = project.launch("sweep.yaml", check=False)
    assert nowhere.returncode == 2 and "no partition 'nowhere'" in nowhere.stderr
    project.site("SBATCH_PARTITION_B200=ada")
    wrong = project.launch("sweep.yaml", check=False)
    assert wrong.returncode == 2 and "sbatch would refuse" in wrong.stderr
    (project.path / "tokens.bin").unlink()
    no_data = project.launch("sweep.yaml", check=False)
    assert no_data.returncode == 2 and "tokens.bin" in no_data.stderr
    assert not (project.path / "runs").exists() and not queued_jobs()


def test_the_subset_is_fetched_in_parts_by_jobs_before_the_runs(project: Project) -> None:
    ids = np.random.default_rng(0).integers(0, 250, 1 << 14)
    ids.astype(np.uint32).tofile(project.path / "source.bin")
    project.write(
        "source.yaml",
        "name: mine\ndtype: uint32\nsequence_length: 16\nvocabulary_size: 256\n"
        f"prefix: {project.path}/\ngroups:\n  - files: source.bin\n",
    )
    files = "{paths: [tokens.bin], memmap_dtype: uint16, num_workers: 0"
    project.write("base.yaml", CONFIG.replace(f"data: {files}", "data: {subset: my-subset, num_workers: 0", 1))
    project.write("sweep.yaml", "base: base.yaml\nruns: {a: {seed: 1}}")
    refused = project.launch("sweep.yaml", check=False)
    assert refused.returncode == 2 and "my-subset" in refused.stderr
    out = project.launch("sweep.yaml", "--fetch", "3", "--fetch-from", "source.yaml", "--no-compare").stdout
    assert "3 parts" in out
    project.wait_until_gone("sweep")
    assert project.run("sweep/a").read_state().status == "done"
    assert json.loads((project.path / "my-subset" / "subset.json").read_text())["instances"] == 80
