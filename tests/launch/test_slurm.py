"""Slurm without Slurm: command lines, site settings, ports, and what follows from how an attempt ended."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.base.nodes import load_hardware
from olmo_ext.base.run_directory import RunDirectory, RunState
from olmo_ext.launch.fit_to_node import Placement
from olmo_ext.launch.slurm_command import Submission, sbatch_command, sbatch_runs, shell_line, time_option
from olmo_ext.launch.slurm_job import (
    attempts_without_progress,
    ephemeral_start,
    free_port,
    gpus_on_node,
    port_candidates,
    record,
    shell,
    verdict_after,
)
from olmo_ext.launch.slurm_site import Site, read_site

SCRIPTS = Path(__file__).parents[2] / "olmo_ext" / "resources" / "slurm"
GOLDEN = Path(__file__).parent / "golden" / "sbatch.txt"


def submission(**changes) -> Submission:
    values = {
        "script": Path("/lab/runs/s/.launch/001/b200.sbatch"),
        "launch_folder": Path("/lab/runs/s/.launch/001"),
        "job_name": "s",
        "num_runs": 6,
        "placement": Placement(node=load_hardware().node("b200"), num_nodes=1, gpus_per_node=8),
        "site": Site(path=None),
    }
    return Submission(**{**values, **changes})


def test_the_command_lines_are_these() -> None:
    site = Site(
        path=Path("slurm/site.env"),
        values={
            "SBATCH_ACCOUNT": "my account",
            "SBATCH_PARTITION": "gpu",
            "SBATCH_PARTITION_CPU": "cpu",
            "GPU_TYPE_B200": "b200",
            "SBATCH_OPTIONS": "--exclusive --comment='it is mine'",
        },
    )
    folder = Path("/lab/runs/50% of it's/.launch/001")
    ada = Placement(node=load_hardware().node("rtx6000ada"), num_nodes=1, gpus_per_node=1)
    two = Placement(node=load_hardware().node("b200"), num_nodes=2, gpus_per_node=8)
    commands = [
        sbatch_runs(submission()),
        sbatch_runs(submission(placement=two, throttle=2, time_limit="1-12:00:00", dependency="afterok:7", site=site)),
        sbatch_runs(
            submission(
                placement=ada,
                launch_folder=folder,
                script=folder / "rtx6000ada.sbatch",
                job_name="50% of it's",
                num_runs=1,
                time_limit="20m",
            )
        ),
        sbatch_command(
            ["compare", "/lab/runs/s"], launch_folder=folder, job_name="c", site=site, dependency="afterany:8:9"
        ),
        sbatch_command(
            ["data", "fetch", "--part={part}/4"], launch_folder=folder, job_name="f", site=Site(path=None), array=4
        ),
    ]
    assert "".join(shell_line(command) + "\n" for command in commands) == GOLDEN.read_text()


@pytest.mark.parametrize(
    ("text", "option"),
    [("12:30:00", "0-12:30:00"), ("1-00:00:00", "1-00:00:00"), ("90m", "0-01:30:00"), ("2d", "2-00:00:00")],
)
def test_a_time_limit_means_the_same_in_every_spelling(text: str, option: str) -> None:
    assert time_option(text) == option


@pytest.mark.parametrize("text", ["60", "soon", "30s"])
def test_a_time_limit_that_slurm_would_take_for_something_else_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        time_option(text)


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.s*")), ids=lambda path: path.name)
def test_every_script_is_valid_bash(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_the_two_node_types_scripts_differ_in_their_numbers_alone() -> None:
    texts = [(SCRIPTS / f"{name}.sbatch").read_text() for name in ("b200", "rtx6000ada")]
    b200, ada = (text.replace("rtx6000ada", "b200").replace("RTX 6000 Ada", "B200").splitlines() for text in texts)
    different = [(one, two) for one, two in zip(b200, ada, strict=True) if one != two]
    assert all("--cpus-per-task=" in one for one, _ in different) and len(different) == 2
    for name in ("b200", "rtx6000ada"):
        node = load_hardware().node(name)
        text = (SCRIPTS / f"{name}.sbatch").read_text()
        assert f"#SBATCH --cpus-per-task={node.cpus_per_node}\n" in text
        assert f"#SBATCH --gpus-per-node={node.gpus_per_node}\n" in text


def test_site_settings_are_read_without_a_shell(tmp_path: Path) -> None:
    path = tmp_path / "site.env"
    path.write_text(
        "# comment\nexport SBATCH_ACCOUNT='my account'  # mine\nSBATCH_PARTITION=all\nSBATCH_PARTITION_B200=b\n"
        "SBATCH_OPTIONS=\"--a --b='c d'\"\nHF_HOME=/scratch/$USER\n"
    )
    site = read_site(path)
    assert site.get("SBATCH_ACCOUNT") == "my account"
    assert site.get("SBATCH_PARTITION", "b200") == "b" and site.get("SBATCH_PARTITION", "rtx6000ada") == "all"
    assert site.options("b200") == ["--a", "--b=c d"]
    path.write_text("SBATCH_ACCOUNT=$(id)")
    with pytest.raises(InputError, match="site.env:1.*without a shell"):
        read_site(path)
    example = SCRIPTS / "site.env.example"
    assert read_site(example).values == {}
    uncommented = tmp_path / "uncommented"
    uncommented.write_text(example.read_text().replace("\n#", "\n"))
    assert read_site(uncommented).get("GPU_TYPE", "rtx6000ada") == "rtx_6000_ada"


def test_a_thousand_array_elements_share_no_port_and_none_is_ephemeral() -> None:
    first = 4_194_303
    ports = [port_candidates(job, ephemeral_from=32768)[0] for job in range(first, first + 1000)]
    assert len(set(ports)) == 1000
    for low in (32768, 15000, ephemeral_start()):
        every = {port for job in range(first, first + 1000) for port in port_candidates(job, ephemeral_from=low)}
        assert min(every) >= 1024 and max(every) < low


def test_a_taken_port_is_passed_over() -> None:
    job = 12345
    first = port_candidates(job, ephemeral_from=ephemeral_start())[0]
    assert free_port(job) == first
    with socket.socket() as taken:
        taken.bind(("", first))
        taken.listen()
        assert free_port(job) == port_candidates(job, ephemeral_from=ephemeral_start())[1]


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({"SLURM_GPUS_ON_NODE": "8"}, 8),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_GPUS_PER_NODE": "b200:1"}, 1),
        ({"SLURM_GPUS_PER_NODE": "4", "NPROC_PER_NODE": "2"}, 2),
    ],
)
def test_ranks_are_the_gpus_that_were_asked_for(environment: dict[str, str], gpus: int) -> None:
    assert gpus_on_node(environment) == gpus
    with pytest.raises(InputError, match="no GPUs"):
        gpus_on_node({})


@pytest.mark.parametrize(
    ("status", "began", "warned", "terminated", "verdict", "after"),
    [
        ("done", True, False, False, "done", "done"),
        ("done", True, True, True, "done", "done"),
        ("requeued", True, True, False, "requeue", "requeued"),
        ("requeued", True, False, False, "requeue", "requeued"),  # the run's own watch on the time limit
        ("requeued", True, False, True, "stopped", "requeued"),  # scancel, preemption: Slurm decides
        ("running", True, False, True, "stopped", "requeued"),
        ("running", True, False, False, "failed", "failed"),  # a process died
        ("running", True, True, False, "failed", "failed"),  # it died while it saved
        ("failed", True, False, False, "failed", "failed"),
        ("failed", True, True, False, "failed", "failed"),
        ("requeued", False, True, False, "requeue", "requeued"),  # warned before training began
        ("requeued", False, False, False, "failed", "failed"),  # the attempt never began
        ("pending", False, False, False, "failed", "failed"),
    ],
)
def test_what_follows_from_the_state(tmp_path, status, began, warned, terminated, verdict, after) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.write_state(RunState(status=status, attempt=2 if began else 1, step=20))
    record(directory, "begin", step=10)
    got = verdict_after(directory, attempt=2, warned=warned, terminated=terminated)[0]
    assert (got, directory.read_state().status) == (verdict, after)


def test_the_second_attempt_without_progress_is_the_last_and_queueing_starts_the_count_anew(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    for attempt, (begins, ends, verdict) in enumerate(
        [(0, 5, "requeue"), (5, 5, "requeue"), (5, 5, "failed")], start=1
    ):
        record(directory, "begin", step=begins)
        directory.write_state(RunState(status="requeued", attempt=attempt, step=ends))
        assert verdict_after(directory, attempt=attempt, warned=True, terminated=False)[0] == verdict
    assert attempts_without_progress(directory, 5) == 2
    record(directory, "queued")
    assert attempts_without_progress(directory, 5) == 0


@pytest.mark.parametrize("value", ["a b", "x,y=1", "50%", "it's", "$(touch executed)", "`id`", 'a"b\nc'])
def test_values_reach_the_batch_shell_unchanged(tmp_path: Path, value: str) -> None:
    script = 'eval "$(cat)"; printf %s "$run_directory"'
    shown = subprocess.run(
        ["bash", "-c", script],
        input=shell(run_directory=value),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert shown.stdout == value and not list(tmp_path.iterdir())
