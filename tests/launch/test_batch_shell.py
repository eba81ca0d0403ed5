"""The batch shell and the node agent with an srun and a torchrun that play theirs: signals, and what srun is asked."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "olmo_ext" / "resources" / "slurm"

FAKES = {
    # Is "saving" from its start until the test lets it go, whatever signals come.
    "srun": """#!/bin/bash
for name in USR1 USR2 TERM; do trap "echo $name >> $FAKE/signals" $name; done
printf '%s\\n' "$@" > "$FAKE/asked"; env > "$FAKE/environment"
touch "$FAKE/started"
until [ -e "$FAKE/saved" ]; do sleep 0.02; done
""",
    "scontrol": """#!/bin/bash
case "$1 $2" in
"show hostnames") for i in $(seq "$SLURM_JOB_NUM_NODES"); do echo "n0$i"; done ;;
"show node") echo "NodeName=$3 NodeAddr=127.0.0.1 x" ;;
requeue*) echo "$2" >> "$FAKE/requeued" ;;
esac
""",
    # No node name leaves this machine: the resolver there may take its time.
    "getent": """#!/bin/bash
[ "$1" = hosts ] && exit 2
exec /usr/bin/getent "$@"
""",
    "squeue": """#!/bin/bash
[ -z "${FAKE_END:-}" ] || echo "$FAKE_END"
""",
    "python": """#!/bin/bash
script=${1##*/}; shift
case $script in
slurm_begin.py)
  touch "$FAKE/begun"
  until [ ! -e "$FAKE/hold-begin" ]; do sleep 0.02; done
  echo "verdict=run run_directory='$FAKE/a run' attempt=3 port=20001 world_size=1 gpus=1" ;;
slurm_end.py) printf '%s\\n' "$*" > "$FAKE/end"; echo "verdict=requeue status=75 message=stopped" ;;
command.py) [ "$1" != ends-at-once ] || exit 7; exec "$FAKE/srun" "$@" ;;
esac
""",
}


class Shell:
    """A job's batch shell."""

    def __init__(self, folder: Path, script: str, *arguments: str, site: str = "", **environment: str) -> None:
        self.folder = folder
        launched = folder / "launched"
        (launched / "code" / "olmo_ext").mkdir(parents=True)
        for name in (script, "job.sh"):
            shutil.copy(SCRIPTS / name, launched)
        for name, text in FAKES.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (launched / "environment.sh").write_text(f"PATH={folder}:$PATH\nOLMO_EXT_PYTHON={folder}/python\n")
        (launched / "site.env").write_text(site)
        job = {
            "SLURM_JOB_ID": "107",
            "SLURM_ARRAY_JOB_ID": "100",
            "SLURM_ARRAY_TASK_ID": "0",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "n[01-02]",
            "SLURM_CPUS_PER_TASK": "14",
            "SLURM_SUBMIT_DIR": str(folder),
            # As --export=NONE leaves it.
            "SLURM_EXPORT_ENV": "NONE",
        }
        given = {"PATH": os.environ["PATH"], "FAKE": str(folder), **job, **environment}
        self.process = subprocess.Popen(
            ["/bin/bash", str(launched / script), f"--launched={launched}", *arguments],
            cwd=folder,
            env={name: value for name, value in given.items() if value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, condition: Callable[[], object]) -> float:
        """Seconds until it holds; half a minute is for a machine that does other things, not for the shell."""
        begun = time.monotonic()
        while not condition():
            assert time.monotonic() - begun < 30, self.lines("signals")
            time.sleep(0.01)
        return time.monotonic() - begun

    def finish(self) -> int:
        (self.folder / "saved").touch()
        self.process.communicate(timeout=30)
        return self.process.returncode


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Callable[..., Shell]]:
    started: list[Shell] = []

    def start(*arguments: str, **environment: str) -> Shell:
        started.append(Shell(tmp_path, *arguments, **environment))
        return started[-1]

    yield start
    for one in started:
        (one.folder / "saved").touch()
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize("script", ["b200.sbatch", "rtx6000ada.sbatch"])
@pytest.mark.parametrize(
    ("sent", "flags"),
    [
        ("USR1", "--warned 1 --terminated 0"),
        ("USR2", "--warned 1 --terminated 0"),
        ("TERM", "--warned 0 --terminated 1"),
    ],
)
def test_every_signal_reaches_the_run_within_a_second_while_a_save_goes_on_and_the_shell_waits_for_the_save(
    shell: Callable[..., Shell], script: str, sent: str, flags: str
) -> None:
    one = shell(script)
    one.wait_for(lambda: (one.folder / "started").exists())
    delays = []
    for count in (1, 2, 3):
        one.process.send_signal(getattr(signal, f"SIG{sent}"))
        # A shell that ran srun in the foreground would trap nothing before the save ends, which it does not here.
        delays.append(one.wait_for(lambda count=count: len(one.lines("signals")) >= count))
    assert min(delays) < 1
    assert one.lines("signals") == ["USR1"] * 3
    assert one.process.poll() is None and not one.lines("end"), "the shell did not wait for the save"
    assert one.finish() == 75
    assert one.lines("end") == [f"{one.folder}/a run --attempt 3 {flags} --reason "]
    assert one.lines("requeued") == ["100_0"], "its own element, once"


def test_a_signal_before_the_run_starts_starts_nothing_and_is_told(shell: Callable[..., Shell], tmp_path: Path) -> None:
    (tmp_path / "hold-begin").touch()
    one = shell("b200.sbatch")
    one.wait_for(lambda: (one.folder / "begun").exists())
    one.process.send_signal(signal.SIGUSR1)
    (tmp_path / "hold-begin").unlink()
    assert one.finish() == 75
    assert not one.lines("asked")
    assert one.lines("end") == [f"{one.folder}/a run --attempt 3 --warned 1 --terminated 0 --reason "]


@pytest.mark.parametrize(("nodes", "cpus"), [("1", "14"), ("1", "112"), ("2", "112")])
def test_srun_is_told_the_nodes_and_the_cpus_that_steps_do_not_inherit(
    shell: Callable[..., Shell], nodes: str, cpus: str
) -> None:
    one = shell("b200.sbatch", SLURM_JOB_NUM_NODES=nodes, SLURM_CPUS_PER_TASK=cpus)
    one.finish()
    asked = one.lines("asked")
    assert [word for word in asked if word.startswith("--") and "=" in word][:5] == [
        "--kill-on-bad-exit=1",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}",
    ]
    assert asked[asked.index("--addresses") + 1].split(",") == ["127.0.0.1"] * int(nodes)
    assert not any(line.startswith("SLURM_EXPORT_ENV=") for line in one.lines("environment"))


@pytest.mark.parametrize(
    ("says", "told"),
    [("2030-01-01T00:00:00", ["1893456000"]), ("", []), ("N/A", []), ("Unknown", []), ("NONE", [])],
)
def test_a_job_knows_its_end_only_where_slurm_says_one(shell: Callable[..., Shell], says: str, told: list[str]) -> None:
    """An end in the past would make the run save and leave at its first step, and again after the requeue."""
    one = shell("b200.sbatch", FAKE_END=says, TZ="UTC")
    one.finish()
    lines = [line.partition("=") for line in one.lines("environment")]
    assert [value for name, _, value in lines if name == "SLURM_JOB_END_TIME"] == told


@pytest.mark.parametrize("path", ["", "/site/a:/site/b"])
def test_the_frozen_code_comes_first_and_the_submit_folder_is_no_place_for_modules(
    shell: Callable[..., Shell], path: str
) -> None:
    one = shell("b200.sbatch", site=f"PYTHONPATH={path}\n")
    one.finish()
    (found,) = [line.partition("=")[2] for line in one.lines("environment") if line.startswith("PYTHONPATH=")]
    assert found.split(":") == [f"{one.folder}/launched/code", *path.split(":")][: 3 if path else 1]


SITE = """
LD_LIBRARY_PATH=/site/lib:$LD_LIBRARY_PATH
module() { [ -z "$LMOD_HUSH" ] && [ "$1 $2 $3" = "load cuda/12.8 gcc" ] && export LOADED="$2 $3"; }
MODULES="cuda/12.8 gcc"
"""


def test_a_sites_scripts_may_read_what_an_empty_environment_lacks(shell: Callable[..., Shell]) -> None:
    one = shell("b200.sbatch", site=SITE)
    one.finish()
    assert {"LD_LIBRARY_PATH=/site/lib:", "LOADED=cuda/12.8 gcc"} <= set(one.lines("environment"))


def test_a_module_that_cannot_be_loaded_stops_the_job(shell: Callable[..., Shell]) -> None:
    one = shell("b200.sbatch", site=SITE.replace('gcc"\n', 'gcc-99"\n'))
    assert one.finish() == 1
    assert not one.lines("asked")


def test_a_job_without_cpus_per_task_stops(shell: Callable[..., Shell]) -> None:
    one = shell("b200.sbatch", SLURM_CPUS_PER_TASK="")
    assert one.finish() == 2
    assert not one.lines("asked")


@pytest.mark.parametrize("sent", ["USR1", "TERM"])
def test_a_command_in_a_job_is_told_at_once_too(shell: Callable[..., Shell], sent: str) -> None:
    one = shell("command.sbatch", "compare", "runs/a b")
    one.wait_for(lambda: (one.folder / "started").exists())
    one.process.send_signal(getattr(signal, f"SIG{sent}"))
    one.wait_for(lambda: one.lines("signals"))
    assert one.lines("signals") == ["TERM"]
    assert one.process.poll() is None, "the shell did not wait for the command"
    assert one.finish() == 0
    assert one.lines("asked") == ["compare", "runs/a b"]


def test_the_elements_number_replaces_part_of_a_fetch_and_nothing_in_a_path(shell: Callable[..., Shell]) -> None:
    given = ["data", "fetch", "--part={part}/4", "--part", "{part}/4", "--output=/lab/{part}/4", "/lab/{part}"]
    one = shell("command.sbatch", *given, SLURM_ARRAY_TASK_ID="3")
    assert one.finish() == 0
    assert one.lines("asked") == ["data", "fetch", "--part=3/4", "--part", "3/4", *given[-2:]]


def test_a_command_that_ends_at_once_gives_the_job_its_exit_code(shell: Callable[..., Shell]) -> None:
    assert shell("command.sbatch", "ends-at-once").finish() == 7


def test_a_containers_words_are_those_of_a_command_line(shell: Callable[..., Shell], tmp_path: Path) -> None:
    box = tmp_path / "in a box"
    box.write_text('#!/bin/bash\nprintf "%s\\n" "$1" "$2" > "$FAKE/boxed"; shift 2; exec "$@"\n')
    box.chmod(0o755)
    one = shell("b200.sbatch", site=f"""CONTAINER='"{box}" --bind "/my  data:/data"'\n""")
    assert one.finish() == 75
    assert one.lines("boxed") == ["--bind", "/my  data:/data"]


def test_a_container_with_an_open_quote_stops_the_job_and_is_named(shell: Callable[..., Shell]) -> None:
    one = shell("b200.sbatch", site="CONTAINER='apptainer exec \"img'\n")
    output = one.process.communicate(timeout=30)[0]
    assert one.process.returncode == 1 and 'no command line: apptainer exec "img' in output
    assert not one.lines("asked")


TORCHRUN = """
import os, signal, subprocess, sys, time
folder = sys.argv[1]
if sys.argv[2:] == ["worker"]:
    # Loses what comes before it listens, then saves at the second request.
    got = []
    signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    open(f"{folder}/listens", "w").close()
    while len(got) < 2:
        time.sleep(0.01)
    open(f"{folder}/saved", "w").close()
    sys.exit(0)
worker = subprocess.Popen([sys.executable, __file__, folder, "worker"])
sys.exit(worker.wait())
"""


@pytest.mark.parametrize("sent", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_the_node_agent_asks_the_workers_until_they_are_gone_and_torchrun_survives(
    tmp_path: Path, sent: signal.Signals
) -> None:
    (tmp_path / "torchrun.py").write_text(TORCHRUN)
    start = (
        "import os, sys; import olmo_ext.launch.node_agent as a; a.REPEAT_SECONDS = 0.3;"
        "sys.exit(a.Agent().run([sys.executable, *sys.argv[1:]], dict(os.environ)))"
    )
    command = [sys.executable, "-c", start, str(tmp_path / "torchrun.py"), str(tmp_path)]
    agent = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "listens").exists():
            assert time.monotonic() < deadline and agent.poll() is None
            time.sleep(0.02)
        agent.send_signal(sent)
        assert agent.wait(timeout=30) == 0
        assert (tmp_path / "saved").exists()
    finally:
        if agent.poll() is None:
            agent.kill()
            agent.wait()


def test_the_installed_torchrun_takes_the_nodes_command_and_leaves_the_stop_signals_to_the_workers() -> None:
    from torch.distributed.run import get_args_parser

    from olmo_ext.launch.node_agent import torchrun_command, torchrun_takes_signals

    assert torchrun_takes_signals()
    command = torchrun_command(Path("a run"), node=1, addresses=["n0", "n1"], port=29500, gpus=8, attempt=2)
    taken = get_args_parser().parse_args(command[3:])
    assert taken.signals_to_handle == "SIGQUIT"
    assert (taken.nnodes, taken.nproc_per_node, taken.rdzv_endpoint, taken.local_addr) == ("2", "8", "n0:29500", "n1")
    assert taken.max_restarts == 0 and "is_host=0" in taken.rdzv_conf and taken.training_script_args == ["a run"]


def test_a_torchrun_that_would_end_workers_in_a_save_is_not_started(tmp_path: Path) -> None:
    start = (
        "import sys; import olmo_ext.launch.node_agent as a; a.torchrun_takes_signals = lambda: False;"
        "a.Agent.run = lambda *_: open('started', 'w'); sys.exit(a.main())"
    )
    given = ["run", "--attempt", "1", "--gpus", "1", "--port", "29500", "--addresses", "n0"]
    ended = subprocess.run(
        [sys.executable, "-c", start, *given], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
    )
    assert ended.returncode == 2 and not (tmp_path / "started").exists()
    assert "has no --signals-to-handle" in (tmp_path / "run/logs/attempt1-node0.log").read_text()
