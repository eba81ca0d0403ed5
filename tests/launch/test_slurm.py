"""Slurm without Slurm: command lines, site settings, decisions, and the batch shell against fake binaries."""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from olmo_ext.errors import InputError
from olmo_ext.launch.command import launch as launch_command
from olmo_ext.launch.rule import Placement
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
from olmo_ext.launch.slurm_queue import client_environment, record_submission
from olmo_ext.launch.slurm_site import Site, read_site
from olmo_ext.nodes import load_hardware
from olmo_ext.rundir import RunDirectory, RunState

REPOSITORY = Path(__file__).parents[2]
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


def test_the_users_slurm_folder_and_the_packages_are_the_same_files() -> None:
    packaged = Path(str(importlib.resources.files("olmo_ext.resources") / "slurm"))
    names = sorted(path.name for path in packaged.iterdir())
    assert names == sorted(p.name for p in (REPOSITORY / "slurm").iterdir() if p.name not in ("nodes.yaml", "site.env"))
    for name in names:
        assert (packaged / name).read_bytes() == (REPOSITORY / "slurm" / name).read_bytes(), name


@pytest.mark.parametrize("path", sorted((REPOSITORY / "slurm").glob("*.s*")), ids=lambda path: path.name)
def test_every_script_is_valid_bash(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_the_two_node_types_scripts_differ_in_their_numbers_alone() -> None:
    texts = [(REPOSITORY / "slurm" / f"{name}.sbatch").read_text() for name in ("b200", "rtx6000ada")]
    b200, ada = (text.replace("rtx6000ada", "b200").replace("RTX 6000 Ada", "B200").splitlines() for text in texts)
    different = [(one, two) for one, two in zip(b200, ada, strict=True) if one != two]
    assert all("--cpus-per-task=" in one for one, _ in different) and len(different) == 2
    for name in ("b200", "rtx6000ada"):
        node = load_hardware().node(name)
        text = (REPOSITORY / "slurm" / f"{name}.sbatch").read_text()
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
    example = REPOSITORY / "slurm" / "site.env.example"
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


# -- launch against fake binaries ----------------------------------------------------------------------------------

CONFIG = """
model: {d_model: 64, n_heads: 4, n_layers: 2, max_sequence_length: 8, vocab_size: 256, embedding_size: 256,
        ffn: {d_ff: 128}}
tokenizer: {identifier: none}
data: {paths: [tokens.bin], memmap_dtype: uint16}
max_duration: 5
global_train_batch_size: 8
device_train_microbatch_size: 1
"""
FAKES = {
    "sbatch": """#!/bin/bash
case " $* " in *" --test-only "*)
  [ -e "$FAKE/refuse-test" ] || exit 0
  cat "$FAKE/refuse-test" >&2; exit 1 ;;
esac
printf '%s\\n' "$@" "" >> "$FAKE/asked"
env | sort > "$FAKE/environment"
count=$(grep -c -- --parsable "$FAKE/asked")
if [ -e "$FAKE/refuse" ] && [ "$count" -ge 2 ]; then echo "sbatch: error: QOSMaxSubmit" >&2; exit 1; fi
echo $((100 + count))
""",
    "squeue": """#!/bin/bash
[ -z "$SQUEUE_STATES" ] || exit 0
[ ! -e "$FAKE/queue" ] || cat "$FAKE/queue"
""",
    "scontrol": """#!/bin/bash
echo "MaxArraySize            = ${MAX_ARRAY_SIZE:-1001}"
""",
    "sinfo": """#!/bin/bash
case " $* " in *" --Node "*) cat "$FAKE/nodes" 2>/dev/null; exit ;; esac
echo "b200*|up|1-00:00:00"
""",
    "scancel": """#!/bin/bash
echo "$*" >> "$FAKE/cancelled"
""",
}


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with six runs, and a Slurm that only writes down what it is asked."""
    folder = tmp_path / "fake"
    folder.mkdir()
    for name, text in FAKES.items():
        (folder / name).write_text(text)
        (folder / name).chmod((folder / name).stat().st_mode | stat.S_IXUSR)
    (tmp_path / "base.yaml").write_text(CONFIG)
    (tmp_path / "sweep.yaml").write_text(
        "base: base.yaml\naxes: {optimizer.learning_rate: [1e-3, 2e-3, 3e-3]}\nseeds: [1, 2]"
    )
    np.arange(256, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(folder))
    return folder


def invoke(*arguments: str, fails: type[Exception] | None = None) -> str:
    result = CliRunner().invoke(launch_command, ["sweep.yaml", "--on", "b200", *arguments], catch_exceptions=True)
    if fails is None:
        assert result.exception is None or result.exit_code == 0, result.output + repr(result.exception)
        return result.output
    assert isinstance(result.exception, fails), result.output
    return str(result.exception)


def submitted(folder: Path) -> list[list[str]]:
    path = folder / "asked"
    return [part.splitlines() for part in path.read_text().split("\n\n") if part.strip()] if path.exists() else []


def option(command: list[str], name: str) -> str | None:
    return next((word.partition("=")[2] for word in command if word.startswith(f"--{name}=")), None)


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
    assert (launch_folder / "job.sh").read_bytes() == (REPOSITORY / "slurm" / "job.sh").read_bytes()


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
    from olmo_ext.errors import WorkError

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
    from olmo_ext.errors import WorkError

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
