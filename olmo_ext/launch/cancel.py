"""`olmo-ext cancel`: ask the launcher on this machine, and Slurm, to stop a sweep's runs."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import click

from olmo_ext.errors import EXIT_DONE, InputError, WorkError
from olmo_ext.launch.local import launcher_of
from olmo_ext.launch.slurm_queue import SLURM_SECONDS, client_environment, read_queue, read_submissions, submitted_jobs


def cancel_runs(directory: Path, runs: Sequence[str]) -> int:
    """Stop the named runs, or everything of the sweep with the jobs that depend on it.

    :raises InputError: for a run that the sweep does not have.
    """
    jobs = submitted_jobs(directory)
    for name in runs:
        if not (directory / name).is_dir() and name not in jobs:
            raise InputError(f"no run {name!r}", where=str(directory))
    stopped = _cancel_local(directory, runs)
    stopped += _cancel_slurm(directory, runs, jobs)
    click.echo(f"asked to stop: {', '.join(stopped)}" if stopped else "nothing is queued or running")
    return EXIT_DONE


def _cancel_local(directory: Path, runs: Sequence[str]) -> list[str]:
    pid = launcher_of(directory)
    if pid is None:
        return []
    if runs:
        raise InputError("a local launch is stopped as a whole", where=str(directory), right="give no run names")
    os.kill(pid, signal.SIGTERM)
    return [f"local launch (process {pid})"]


def _cancel_slurm(directory: Path, runs: Sequence[str], jobs: dict[str, str]) -> list[str]:
    queue = read_queue() if jobs else None
    if queue is None:
        return []
    wanted = [job for name, job in jobs.items() if (not runs or name in runs) and job in queue]
    if not runs:
        others = [entry["job"] for entry in read_submissions(directory) if entry.get("kind") != "runs"]
        wanted += [job for job in queue if job.partition("_")[0] in others]
    if wanted:
        command = ["scancel", *wanted]
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=SLURM_SECONDS, env=client_environment(), check=False
        )
        if answer.returncode:
            raise WorkError(f"scancel: {answer.stderr.strip() or answer.returncode}")
    return wanted
