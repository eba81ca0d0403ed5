"""What the batch shell asks Python before and after an attempt: which run, and what follows from how it ended.

Both answers are shell assignments on standard output, every value quoted. No torch: each takes a fraction of a second.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, InputError, OlmoExtError, WorkError, unexpected
from olmo_ext.base.files import append_line, write_atomically
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.launch.slurm_queue import read_entries, read_queue
from olmo_ext.training.provenance import slurm_job

ATTEMPTS_FILE = "slurm-attempts.jsonl"
"""In the run's folder: `queued` (by launch), `begin` and `end` of every attempt with the step of its checkpoint."""

MAX_ATTEMPTS_WITHOUT_PROGRESS = 2
LOWEST_PORT = 20000


def shell(**values: object) -> str:
    """Assignments for `eval`."""
    return "\n".join(f"{name}={shlex.quote(str(value))}" for name, value in values.items())


def port_candidates(job_id: int, *, ephemeral_from: int) -> list[int]:
    """Rendezvous ports of a job, the first to be taken if it is free.

    Every array element has a job id of its own, and the ids of one array differ by less than the range: no two share
    the first port. All lie below the range that the kernel hands out.
    """
    lowest = LOWEST_PORT if ephemeral_from >= LOWEST_PORT + 4096 else 1024
    span = ephemeral_from - lowest
    if span < 1:
        raise WorkError(f"no port below the ephemeral range, which begins at {ephemeral_from}")
    # A stride that shares no factor with the span, so that a neighbour's second choice is not our first.
    return [lowest + (job_id + attempt * (span // 2 | 1)) % span for attempt in range(16)]


def ephemeral_start() -> int:
    """Where the kernel's range of outgoing ports begins."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def free_port(job_id: int) -> int:
    """:raises WorkError: if all candidates are taken on this node."""
    candidates = port_candidates(job_id, ephemeral_from=ephemeral_start())
    for port in candidates:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise WorkError(f"ports {candidates[0]} ... are all taken on {socket.gethostname()}")


def _told(environment: Mapping[str, str], name: str) -> str:
    """:raises InputError: if a variable that Slurm or the .sbatch file sets is missing."""
    if name not in environment:
        raise InputError(f"{name} is not set", where="environment", right="started by sbatch, inside a Slurm job")
    return environment[name]


def gpus_on_node(environment: Mapping[str, str]) -> int:
    """GPUs of each node of the job.

    :raises InputError: if Slurm gave none.
    """
    # What was asked for: on a node taken --exclusive, SLURM_GPUS_ON_NODE counts all that it has.
    given = environment.get("NPROC_PER_NODE") or environment.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    given = given or environment.get("SLURM_GPUS_ON_NODE", "")
    if not given.isdigit() or not int(given):
        raise InputError(
            "the job has no GPUs", where="environment", right="keep --gpus-per-node, or set NPROC_PER_NODE"
        )
    return int(given)


# -- attempts ------------------------------------------------------------------------------------------------------


def record(directory: RunDirectory, event: str, **values: Any) -> None:
    """Append what happened to the run's `ATTEMPTS_FILE`, with the unix time and this job."""
    directory.path.mkdir(parents=True, exist_ok=True)
    entry = {"event": event, "time": round(time.time(), 1), "job": slurm_job(), **values}
    append_line(directory.path / ATTEMPTS_FILE, json.dumps(entry))


def steps_at_begin(directory: RunDirectory) -> list[int]:
    """The checkpoint's step at the beginning of every attempt since the run was queued by a person."""
    steps: list[int] = []
    for entry in read_entries(directory.path / ATTEMPTS_FILE):
        if entry.get("event") == "queued":
            steps = []
        elif entry.get("event") == "begin":
            steps.append(entry["step"])
    return steps


def attempts_without_progress(directory: RunDirectory, step: int) -> int:
    """How many of the last attempts began at the step that the run stands at."""
    count = 0
    for begun in reversed(steps_at_begin(directory)):
        if begun != step:
            break
        count += 1
    return count


def _fail(directory: RunDirectory, reason: str) -> None:
    state = directory.read_state()
    state.status, state.reason = "failed", reason
    directory.write_state(state)


# -- before an attempt ---------------------------------------------------------------------------------------------


def _launched_run(folder: Path, environment: Mapping[str, str]) -> tuple[RunDirectory, Path, int]:
    """The run of this array element, its frozen code and the world size that was planned."""
    launched = json.loads((folder / "runs.json").read_text())
    index = int(environment.get("SLURM_ARRAY_TASK_ID", "0"))
    if index >= len(launched["runs"]):
        raise InputError(f"element {index} of {len(launched['runs'])} runs", where=str(folder / "runs.json"))
    return RunDirectory(folder.parent.parent / launched["runs"][index]), folder / "code", launched["world_size"]


def _run_by_hand(arguments: Sequence[str], environment: Mapping[str, str], gpus: int) -> tuple[RunDirectory, Path]:
    """The run of `sbatch slurm/TYPE.sbatch CONFIG [key=value ...]`, frozen at its first start.

    A requeued job goes back to the folder it began, whatever has become of the YAML.
    """
    from olmo_ext.base.nodes import load_hardware
    from olmo_ext.config.sweep import load_sweep
    from olmo_ext.launch.fit_to_node import Placement, describe, node_settings
    from olmo_ext.launch.freeze import freeze_code, link_code
    from olmo_ext.launch.members import members_of, prepare

    if not arguments:
        raise InputError("no config", right="sbatch slurm/TYPE.sbatch CONFIG.yaml [key=value ...]")
    runs_directory = Path(environment.get("RUNS_DIRECTORY") or "runs")
    memory = runs_directory / ".jobs" / (slurm_job() or "none")
    if environment.get("SLURM_RESTART_COUNT", "0") != "0" and memory.is_file():
        directory = RunDirectory(memory.read_text())
        return directory, directory.path / "code"
    placement = Placement(
        node=load_hardware().node(_told(environment, "OLMO_EXT_NODE")),
        num_nodes=int(_told(environment, "SLURM_JOB_NUM_NODES")),
        gpus_per_node=gpus,
    )
    sweep = load_sweep(arguments[0], arguments[1:], rule=lambda config: node_settings(config, placement))
    index = int(environment.get("SLURM_ARRAY_TASK_ID", "0"))
    if "SLURM_ARRAY_TASK_ID" not in environment and len(sweep.runs) > 1:
        raise InputError(
            f"a sweep of {len(sweep.runs)} runs", where=arguments[0], right=f"--array=0-{len(sweep.runs) - 1}"
        )
    if index >= len(sweep.runs):
        raise InputError(f"element {index} of a sweep of {len(sweep.runs)} runs", where=arguments[0])
    member = members_of(sweep, runs_directory)[index]
    _refuse_another_job(member.directory)
    code = freeze_code(runs_directory / sweep.name, member.run.config.plugins)
    prepare(sweep, runs_directory, [member])
    link_code(member.directory.path, code)
    print(f"{member.run.name}: {describe(member.run.config, placement)}", file=sys.stderr)
    memory.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(memory, str(member.directory.path))
    record(member.directory, "queued")
    return member.directory, member.directory.path / "code"


def _refuse_another_job(directory: RunDirectory) -> None:
    """The same run may have been submitted twice; the second job must not write into what the first one trains.

    :raises InputError: if another job of the queue is training it.
    """
    state = directory.read_state()
    other = state.slurm_job
    if state.status != "running" or other in (None, slurm_job()):
        return
    if (read_queue() or {}).get(other) == "RUNNING":
        raise InputError(f"job {other} is training this run", where=str(directory.path), right="one job a run")


def begin(arguments: Sequence[str]) -> str:
    """Which run this job is for and whether it may start: `verdict` is `run` or `leave`.

    :raises InputError: for a bad config, a job that is not what was planned, and a run that another job trains.
    :raises WorkError: if no port is free.
    """
    environment = os.environ
    planned = None
    if arguments and arguments[0].startswith("--launched="):
        directory, code, planned = _launched_run(Path(arguments[0].partition("=")[2]), environment)
        _refuse_another_job(directory)
    else:
        directory, code = _run_by_hand(arguments, environment, gpus_on_node(environment))
    state = directory.read_state()
    if state.status == "done":
        return shell(verdict="leave", status=EXIT_DONE, message=f"{directory.path}: done at step {state.step}")
    tried = attempts_without_progress(directory, state.step)
    if tried >= MAX_ATTEMPTS_WITHOUT_PROGRESS:
        reason = f"{tried} attempts without progress beyond step {state.step}"
        _fail(directory, reason)
        return shell(verdict="leave", status=EXIT_FAILED, message=f"{directory.path}: stopped after {reason}")
    try:
        return _start(directory, code, environment, planned=planned)
    except OlmoExtError as error:
        _fail(directory, " ".join(str(error).split()))  # else the run would seem never to have been queued
        raise


def _start(directory: RunDirectory, code: Path, environment: Mapping[str, str], *, planned: int | None) -> str:
    """Note the attempt in the run's folder; what the batch shell has to know of it.

    :param planned: ranks that the launch counted on; None for a job by hand, which takes what it has.
    """
    gpus = gpus_on_node(environment)
    world_size = int(_told(environment, "SLURM_JOB_NUM_NODES")) * gpus
    if planned not in (None, world_size):
        raise InputError(f"the job has {world_size} GPUs, {planned} were planned", right="launch again")
    port = free_port(int(_told(environment, "SLURM_JOB_ID")))
    state = directory.read_state()
    if state.status == "failed":
        state.status, state.reason = "pending", ""  # an earlier attempt's; this one has not failed yet
    state.slurm_job = slurm_job()
    directory.write_state(state)
    attempt, nodes = state.attempt + 1, _told(environment, "SLURM_JOB_NODELIST")
    record(directory, "begin", step=state.step, attempt=attempt, nodes=nodes, port=port)
    return shell(
        verdict="run",
        run_directory=directory.path.absolute(),
        attempt=attempt,
        port=port,
        world_size=world_size,
        gpus=gpus,
        code=code.absolute(),
    )


# -- after an attempt ----------------------------------------------------------------------------------------------


def verdict_after(directory: RunDirectory, *, attempt: int, warned: bool, terminated: bool) -> tuple[str, int, str]:
    """What follows from `state.json`: (`done` | `requeue` | `stopped` | `failed`, exit status, message).

    :param attempt: the attempt that has ended.
    :param warned: the time limit's warning came (SIGUSR1), or somebody asked for a requeue with it.
    :param terminated: SIGTERM came: scancel, preemption, node failure. Slurm requeues what it wants to have requeued.
    """
    state = directory.read_state()
    name, step = directory.name, state.step
    if state.status == "done":
        return "done", EXIT_DONE, f"{name}: done at step {step}"
    if state.status == "failed":
        return "failed", EXIT_FAILED, f"{name}: failed: {state.reason}"
    began = state.attempt >= attempt
    saved = began and state.status == "requeued"
    if terminated:
        if not saved:
            state.status, state.reason = "requeued", "ended by Slurm (SIGTERM)"
            directory.write_state(state)
        return "stopped", EXIT_REQUEUE, f"{name}: ended by Slurm; its checkpoint is of step {step}"
    if not saved and not (warned and not began):
        reason = "a process of the run died" if began else "ended before training began"
        _fail(directory, f"{reason}: see {directory.logs}")
        return "failed", EXIT_FAILED, f"{name}: {reason}"
    tried = attempts_without_progress(directory, step)
    if tried >= MAX_ATTEMPTS_WITHOUT_PROGRESS:
        reason = f"{tried} attempts without progress beyond step {step}"
        _fail(directory, reason)
        return "failed", EXIT_FAILED, f"{name}: stopped after {reason}"
    state.status = "requeued"
    state.reason = state.reason or "the time limit came before training began"
    directory.write_state(state)
    return "requeue", EXIT_REQUEUE, f"{name}: stopped at step {step} ({state.reason}), queued again"


def end(arguments: Sequence[str]) -> str:
    """The verdict on an attempt, for the batch shell."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_directory", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--warned", type=int, default=0)
    parser.add_argument("--terminated", type=int, default=0)
    parser.add_argument("--reason", default="", help="Why the batch shell could not start the attempt.")
    given = parser.parse_args(arguments)
    directory = RunDirectory(given.run_directory)
    if given.reason:
        _fail(directory, given.reason)
    verdict, status, message = verdict_after(
        directory, attempt=given.attempt, warned=bool(given.warned), terminated=bool(given.terminated)
    )
    record(directory, "end", step=directory.read_state().step, attempt=given.attempt, verdict=verdict)
    return shell(verdict=verdict, status=status, message=message)


def answer(ask: Callable[[Sequence[str]], str]) -> None:
    """Print the answer, or one line on standard error and an exit code."""
    # The shell evaluates what stands on standard output: a plugin of the config that prints must not reach it.
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        text = ask(sys.argv[1:])
    except OlmoExtError as error:
        print(f"olmo-ext: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        code, line = unexpected(error)
        print(f"olmo-ext: {line}", file=sys.stderr)
        sys.exit(code)
    sys.stdout.flush()
    with os.fdopen(output, "w") as file:
        file.write(text + "\n")
