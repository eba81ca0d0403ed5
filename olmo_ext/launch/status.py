"""What each run of a sweep is doing, from the folder alone and, where there is one, from Slurm's queue."""

from __future__ import annotations

import datetime
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from olmo_ext.base.errors import InputError
from olmo_ext.base.quantities import format_count, format_seconds
from olmo_ext.base.run_directory import RunDirectory, RunState
from olmo_ext.base.sweep_directory import SweepDirectory
from olmo_ext.launch.run_progress import failure_lines, process_lives, read_progress

SHOWN = ("done", "running", "queued", "requeued", "stopped", "pending", "failed")


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """One line of `olmo-ext status`."""

    name: str
    status: str
    """`pending` (not queued anywhere), `queued`, `running`, `requeued` (waits to continue), `stopped` (was running or
    to be requeued, and nothing runs it any more), `done` or `failed`."""

    attempt: int
    step: int
    max_steps: int
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    reason: str = ""
    log: Sequence[str] = ()
    """Last lines of the log of a failed run."""

    job: str | None = None
    waits_for: str = ""
    """Why Slurm does not start a queued job yet, in its words: `Priority`, `PartitionTimeLimit`, `JobHeldUser`."""


WAITING_STATES = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
"""Slurm's states of a job that will start, or start again."""


def _current_job(state: RunState, queued: Mapping[str, str] | None, job: str | None) -> str | None:
    """The job that counts: one in the queue before one that has left it, the launched before one by hand."""
    jobs = [name for name in (job, state.slurm_job) if name]
    return next((name for name in jobs if name in (queued or {})), jobs[0] if jobs else None)


def _status_of(state: RunState, queued: Mapping[str, str] | None, job: str | None) -> str:
    """Merge what the run wrote with what the queue says.

    :param queued: job or `ARRAY_TASK` -> Slurm state; None where there is no queue to ask.
    :param job: the job that counts for this run.
    """
    in_queue = None if queued is None or job is None else queued.get(job)
    if state.status in ("done", "failed") and in_queue not in (*WAITING_STATES, "RUNNING"):
        return state.status
    if in_queue is not None:
        if in_queue in WAITING_STATES:
            return "requeued" if state.attempt else "queued"
        return state.status if state.status in ("done", "failed") else "running"
    if state.status == "running":
        if state.slurm_job is None:
            alive = state.host != socket.gethostname() or process_lives(state)
        else:
            alive = queued is None
        return "running" if alive else "stopped"
    if state.status == "requeued":
        return "stopped" if queued is not None or state.slurm_job is None else "requeued"
    return state.status


def run_status(
    directory: RunDirectory,
    *,
    queued: Mapping[str, str] | None = None,
    job: str | None = None,
    reasons: Mapping[str, str] | None = None,
) -> RunStatus:
    """The status of one run.

    :param queued: job or `ARRAY_TASK` -> Slurm state; None where there is no queue to ask.
    :param job: the job that was submitted for it last, by `launch`; one by hand stands in its state.
    :param reasons: job -> why Slurm does not start it, in its words.
    :raises InputError: if a file of the run is there and cannot be read.
    """
    state = directory.read_state()
    job = _current_job(state, queued, job)
    status = _status_of(state, queued, job)
    where = read_progress(directory)
    step = max(state.step, where.step if where and where.attempt == state.attempt else 0)
    left = None
    if status == "running" and where and where.seconds_per_step and state.max_steps:
        left = max(0, state.max_steps - step) * where.seconds_per_step
    return RunStatus(
        name=directory.name,
        status=status,
        attempt=state.attempt,
        step=step,
        max_steps=state.max_steps,
        loss=where.loss if where else None,
        tokens_per_second=where.tokens_per_second if where else None,
        seconds_left=left,
        reason=state.reason if status in ("failed", "stopped", "requeued") else "",
        log=failure_lines(directory) if status == "failed" else (),
        job=job,
        waits_for=(reasons or {}).get(job or "", "") if status in ("queued", "requeued") else "",
    )


def run_directories(path: Path) -> list[RunDirectory]:
    """The runs of a sweep's folder, in the sweep's order; a run's own folder is a list of one.

    :raises InputError: if the folder is neither.
    """
    sweep = SweepDirectory(path)
    runs = sweep.runs()
    if not runs and not sweep.is_declared():
        raise InputError(
            "no sweep.json and no runs here", where=str(path), right="name runs/<sweep> or runs/<sweep>/<run>"
        )
    return runs


def sweep_status(path: Path) -> list[RunStatus]:
    """The status of every run under a sweep's folder, or of the one run whose folder it is.

    :raises InputError: if the folder is neither.
    """
    from olmo_ext.launch.slurm_queue import read_queue, read_reasons, submitted_jobs

    jobs = submitted_jobs(SweepDirectory.around(path).path)
    directories = run_directories(path)
    states = [directory.read_state() for directory in directories]
    queue = read_queue() if jobs or any(state.slurm_job for state in states) else None
    ours = {job for job in (*jobs.values(), *(state.slurm_job for state in states)) if job}
    reasons = read_reasons() if any((queue or {}).get(job) == "PENDING" for job in ours) else {}
    return [
        run_status(directory, queued=queue, job=jobs.get(directory.name), reasons=reasons) for directory in directories
    ]


def summary(statuses: Sequence[RunStatus]) -> str:
    """How many runs are in which state, in one line."""
    counts = {name: sum(run.status == name for run in statuses) for name in SHOWN}
    number = "1 run" if len(statuses) == 1 else f"{len(statuses)} runs"
    return f"{number}: " + ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def status_json(statuses: Sequence[RunStatus]) -> str:
    return json.dumps([{**asdict(run), "log": list(run.log)} for run in statuses], indent=1, ensure_ascii=False)


COLOURS = {"done": "green", "running": "cyan", "failed": "bold red", "stopped": "yellow", "requeued": "yellow"}


def print_status(statuses: Sequence[RunStatus]) -> None:
    """A table for people; plain text where the output is no terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    # A pipe has no width: 80 columns would cut names.
    console = Console(width=None if os.isatty(1) else 200, highlight=False)
    table = Table(box=None, pad_edge=False)
    for title in ("run", "status"):
        table.add_column(title, overflow="fold")
    for title in ("attempt", "step", "loss", "tokens/s", "left", "job"):
        table.add_column(title, justify="right", no_wrap=True)
    for run in statuses:
        colour = COLOURS.get(run.status, "")
        table.add_row(
            escape(run.name),
            f"[{colour}]{run.status}[/]" if colour else run.status,
            str(run.attempt or ""),
            f"{run.step}/{run.max_steps}" if run.max_steps else "",
            f"{run.loss:.4f}" if run.loss is not None else "",
            format_count(run.tokens_per_second) if run.tokens_per_second else "",
            format_seconds(run.seconds_left) if run.seconds_left is not None else "",
            run.job or "",
        )
    console.print(table)
    for run in statuses:
        if run.reason:
            console.print(f"{escape(run.name)}: {run.status}: {escape(run.reason)}")
        for line in run.log:
            console.print(f"    {escape(line)}", soft_wrap=True)
    for reason in dict.fromkeys(run.waits_for for run in statuses if run.waits_for):
        count = sum(run.waits_for == reason for run in statuses)
        console.print(f"{count} {'waits' if count == 1 else 'wait'} in Slurm's queue: {escape(reason)}")
    now = datetime.datetime.now().strftime("%H:%M:%S")
    console.print(f"{summary(statuses)} ({now})")
