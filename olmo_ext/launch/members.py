"""The members of a sweep: its runs with their folders, which of them are done or queued, and the files of a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from olmo_ext.base.errors import InputError
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.config.sweep import Sweep, write_sweep_json
from olmo_ext.config.sweep_run import SweepRun
from olmo_ext.launch.slurm_queue import submitted_jobs
from olmo_ext.training.identity import differences_from
from olmo_ext.training.provenance import slurm_job
from olmo_ext.training.train import is_finished


@dataclass(frozen=True, kw_only=True)
class Member:
    """A run of a sweep and its folder."""

    run: SweepRun
    directory: RunDirectory
    is_done: bool
    """Whether it was finished, at this length, when the launch began."""


def members_of(sweep: Sweep, runs_directory: Path) -> list[Member]:
    """The sweep's runs with their folders `runs_directory/<sweep>/<run>`.

    :raises InputError: if a folder holds a run of another config that has been started.
    """
    members = []
    for run in sweep.runs:
        directory = RunDirectory(runs_directory / sweep.name / run.name)
        _refuse_another_config(run, directory)
        members.append(Member(run=run, directory=directory, is_done=is_finished(run.config, directory)))
    return members


def _refuse_another_config(run: SweepRun, directory: RunDirectory) -> None:
    if differences := differences_from(directory, run.config):
        more = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
        right = "another sweep name or --runs-directory, or remove the folder if it is not needed"
        if all(text.startswith("max_duration: ") for text in differences):
            right = (
                "another sweep name; `olmo-ext train ... --run-directory FOLDER --extend` continues one run for longer"
            )
        raise InputError(
            f"the folder holds a run of another config: {'; '.join(differences[:4])}{more}",
            where=str(directory.path),
            right=right,
        )


def prepare(sweep: Sweep, runs_directory: Path, members: list[Member]) -> None:
    """Write `sweep.json`, and config and state of every run that is not finished.

    A run that was done at another `stop_at` or `stop_after` becomes `pending`: it is not done by its new config.
    """
    write_sweep_json(sweep, runs_directory / sweep.name)
    for member in members:
        if member.is_done:
            continue
        state = member.directory.read_state()
        if state.status == "done":
            state.status = "pending"
            member.directory.write_state(state)
        elif not member.directory.state_path.exists():
            member.directory.write_state(state)
        member.directory.write_config(member.run.config.plain())


def busy_runs(members: Sequence[Member], sweep_directory: Path, queue: Mapping[str, str] | None) -> dict[str, str]:
    """Run -> job of those that Slurm has queued or running; not the job that we are in ourselves.

    :param queue: what `read_queue` gives; where that is None, no run counts as busy.
    """
    ours = slurm_job()
    jobs = submitted_jobs(sweep_directory)
    busy = {}
    for member in members:
        for job in (jobs.get(member.run.name), member.directory.read_state().slurm_job):
            if job not in (None, ours) and job in (queue or {}):
                assert job is not None
                busy[member.run.name] = job
    return busy
