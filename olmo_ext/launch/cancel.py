"""`olmo-ext cancel`: ask the launcher on this machine, and Slurm, to stop a sweep's runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from olmo_ext.base.errors import EXIT_DONE, InputError, WorkError
from olmo_ext.base.run_directory import RunState
from olmo_ext.base.sweep_directory import SweepDirectory
from olmo_ext.launch.local import launcher_of
from olmo_ext.launch.slurm_queue import ask_slurm, read_queue, read_submissions, submitted_jobs
from olmo_ext.launch.status import run_directories


def cancel_runs(directory: Path, runs: Sequence[str]) -> int:
    """Stop the named runs, or everything of the sweep with the jobs that depend on it.

    :param directory: the sweep's folder, or one run's, which then is the one to stop.
    :raises InputError: for a run that the sweep does not have.
    :raises WorkError: if Slurm does not answer, or refuses.
    """
    states = {run.name: run.read_state() for run in run_directories(directory)}
    if (sweep := SweepDirectory.around(directory).path) != directory.absolute():
        directory, runs = sweep, [directory.absolute().name, *runs]
    jobs = submitted_jobs(directory)
    for name in runs:
        if name not in states and name not in jobs:
            raise InputError(f"no run {name!r}", where=str(directory), right="`olmo-ext status` lists them")
    pid = launcher_of(directory)
    known = bool(jobs) or any(state.slurm_job for state in states.values())
    queue = read_queue() if known else {}
    if queue is None:
        open_runs = [name for name in jobs if name not in states or states[name].status not in ("done", "failed")]
        if open_runs and pid is None:
            raise WorkError(f"Slurm does not answer here; {len(open_runs)} runs may be in its queue: try a login node")
        queue = {}
    stopped = _cancel_local(directory, runs, pid)
    stopped += _cancel_slurm(directory, runs, jobs, queue)
    click.echo(f"asked to stop: {', '.join(stopped)}" if stopped else "nothing is queued or running")
    for name, job in _by_hand(states, jobs, queue).items():
        if not runs or name in runs:
            click.echo(f"left alone: {name}, which `launch` did not queue: scancel {job}")
    return EXIT_DONE


def _by_hand(states: Mapping[str, RunState], jobs: Mapping[str, str], queue: Mapping[str, str]) -> dict[str, str]:
    """Run -> job that trains it and was not submitted by `launch`: it may be somebody's interactive session."""
    return {
        name: state.slurm_job
        for name, state in states.items()
        if state.slurm_job in queue and state.slurm_job not in jobs.values() and state.slurm_job is not None
    }


def _cancel_local(directory: Path, runs: Sequence[str], pid: int | None) -> list[str]:
    if pid is None:
        return []
    if runs:
        raise InputError("a local launch is stopped as a whole", where=str(directory), right="give no run names")
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return []  # it has just ended
    except PermissionError:
        raise InputError(f"process {pid} is somebody else's", where=str(directory), right="ask its owner") from None
    return [f"local launch (process {pid})"]


def _cancel_slurm(directory: Path, runs: Sequence[str], jobs: Mapping[str, str], queue: Mapping[str, str]) -> list[str]:
    wanted = [job for name, job in jobs.items() if (not runs or name in runs) and job in queue]
    if not runs:
        others = [entry["job"] for entry in read_submissions(directory) if entry.get("kind") != "runs"]
        wanted += [job for job in queue if job.partition("_")[0] in others]
    if wanted:
        answer = ask_slurm(["scancel", *wanted])
        # One that has ended since we looked is no failure.
        left = (read_queue() or {}) if answer.returncode else {}
        if answer.returncode and any(left.get(job) in ("PENDING", "RUNNING") for job in wanted):
            raise WorkError(f"scancel: {' '.join(answer.stderr.split()) or answer.returncode}")
    return wanted
