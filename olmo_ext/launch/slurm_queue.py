"""What Slurm's queue says, and which jobs were submitted for which run. Everything works without Slurm too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import InputError, WorkError
from olmo_ext.base.files import append_line

JOBS_FILE = "slurm-jobs.jsonl"
"""In the sweep's folder, one line a submission: `{"kind", "job", "runs": [names, by array index], ...}`."""

SLURM_SECONDS = 20.0
"""Clients hang for 15 s where the controller is down."""

SBATCH_SECONDS = 60.0

FOREIGN = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_", "SCONTROL_")


def client_environment() -> dict[str, str]:
    """The caller's environment for Slurm's commands, but for what a job around us or somebody's habits left in it.

    SQUEUE_STATES=RUNNING would hide what waits, and it would be queued twice; SLURM_CONF says which cluster it is.
    """
    return {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not name.startswith(FOREIGN)}


def ask_slurm(command: Sequence[str], *, seconds: float = SLURM_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands in `client_environment`.

    :param seconds: how long it may take.
    :raises WorkError: if it is not there, cannot be started, or does not answer in time.
    """
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=client_environment(), check=False
        )
    except subprocess.TimeoutExpired:
        raise WorkError(f"{command[0]} has not answered for {seconds:.0f} s") from None
    except OSError as error:
        raise WorkError(f"{command[0]} cannot be started: {error.strerror}") from None


def _squeue(field: str, *more: str) -> dict[str, str] | None:
    """Job, or `ARRAY_TASK` for an element, -> a field of it; None without a working Slurm."""
    if shutil.which("squeue") is None:
        return None
    # --all: also partitions that are hidden from listings.
    command = ["squeue", "--all", "--noheader", "--array", f"--format=%i {field}", *more]
    try:
        answer = ask_slurm(command)
    except WorkError:
        return None
    if answer.returncode:
        return None
    rows = (line.strip().split(maxsplit=1) for line in answer.stdout.splitlines())
    return {words[0]: words[1] for words in rows if len(words) == 2}


def read_queue() -> dict[str, str] | None:
    """Job, or `ARRAY_TASK` for an element, -> state of everything in the queue; None without a working Slurm."""
    return _squeue("%T")


def certain_queue() -> dict[str, str]:
    """What `read_queue` gives, nothing on a machine without Slurm.

    :raises WorkError: if there is a Slurm that does not answer: what is queued would be started a second time.
    """
    queue = read_queue()
    if queue is None and shutil.which("squeue") is not None:
        raise WorkError(
            "squeue does not answer: which runs are in Slurm's queue cannot be seen; try again when it does"
        )
    return queue or {}


def read_reasons() -> dict[str, str]:
    """Job, or `ARRAY_TASK`, -> why Slurm does not start it, in Slurm's words, of everything that waits."""
    return _squeue("%r", "--states=PENDING") or {}


def record_submission(sweep_directory: Path, entry: dict[str, Any]) -> None:
    """Remember a job; written at once, so that a launch that dies half-way does not submit twice."""
    append_line(sweep_directory / JOBS_FILE, json.dumps(entry))


def submit(command: Sequence[str]) -> str:
    """Run sbatch; the job's id.

    :raises WorkError: with what sbatch said, or that it said nothing: then it may have queued the job all the same.
    """
    try:
        answer = ask_slurm(command, seconds=SBATCH_SECONDS)
    except WorkError as error:
        raise WorkError(f"{error}; look with squeue, and scancel a job of this sweep that `status` lacks") from None
    job = answer.stdout.strip().partition(";")[0]
    if answer.returncode or not job.isdigit():
        raise WorkError(f"sbatch: {' '.join(answer.stderr.split()) or answer.returncode}")
    return job


def remember_submission(sweep_directory: Path, entry: dict[str, Any]) -> None:
    """Record a job that sbatch has just queued; one that is not recorded would be queued again by the next launch.

    :raises OSError: if the record cannot be written: the job has been cancelled.
    """
    try:
        record_submission(sweep_directory, entry)
    except OSError:
        ask_slurm(["scancel", entry["job"]])
        raise


def read_entries(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file of one a line, without what a kill has torn; none where there is no file.

    :raises InputError: for a file that is there and cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", where=str(path)) from None
    entries = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def read_submissions(sweep_directory: Path) -> list[dict[str, Any]]:
    """Every job that was submitted for the sweep, in order."""
    return [entry for entry in read_entries(sweep_directory / JOBS_FILE) if isinstance(entry.get("job"), str)]


def submitted_jobs(sweep_directory: Path) -> dict[str, str]:
    """Run -> the `ARRAY_TASK` that was submitted for it last."""
    jobs = {}
    for entry in read_submissions(sweep_directory):
        if entry.get("kind") == "runs":
            for index, name in enumerate(entry.get("runs", [])):
                jobs[name] = f"{entry['job']}_{index}"
    return jobs


def queued_fetch(sweep_directory: Path, arguments: Sequence[str], queue: Mapping[str, str]) -> str | None:
    """The job of an earlier launch that fetches the same data and has not ended; None if there is none."""
    alive = {job.partition("_")[0] for job in queue}
    for entry in reversed(read_submissions(sweep_directory)):
        if entry.get("kind") == "fetch" and entry.get("arguments") == list(arguments) and entry["job"] in alive:
            return entry["job"]
    return None


def waiting_comparisons(sweep_directory: Path, queue: Mapping[str, str]) -> list[str]:
    """Jobs of the sweep's comparisons that wait in the queue."""
    queued = [entry["job"] for entry in read_submissions(sweep_directory) if entry.get("kind") == "compare"]
    return [job for job in queued if queue.get(job) == "PENDING"]


def lost_its_comparison(sweep_directory: Path, queue: Mapping[str, str]) -> bool:
    """Whether the sweep was launched and no comparison waits: sbatch refused it, or nobody wanted one then."""
    was_launched = any(entry.get("kind") == "runs" for entry in read_submissions(sweep_directory))
    return was_launched and not waiting_comparisons(sweep_directory, queue)
