"""`launch --on NODE_TYPE`: freeze, submit once what is missing, and queue the comparison behind it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from olmo_ext.base.errors import EXIT_DONE, InputError, WorkError
from olmo_ext.base.files import write_atomically
from olmo_ext.base.nodes import load_hardware
from olmo_ext.config.run_config import differing_keys, load_run_config
from olmo_ext.config.sweep import Sweep, load_sweep
from olmo_ext.launch.fit_to_node import Placement, node_settings
from olmo_ext.launch.freeze import freeze_code, link_code
from olmo_ext.launch.local import sweep_lock
from olmo_ext.launch.members import Member, busy_runs, members_of, prepare
from olmo_ext.launch.preflight import Findings, preflight
from olmo_ext.launch.slurm_command import Submission, sbatch_command, sbatch_runs, shell_line, time_option
from olmo_ext.launch.slurm_init import older_copies
from olmo_ext.launch.slurm_job import record
from olmo_ext.launch.slurm_limits import Limits, check_partition, limit_of, objection_to, read_limits
from olmo_ext.launch.slurm_queue import (
    ask_slurm,
    lost_its_comparison,
    queued_fetch,
    read_queue,
    remember_submission,
    submit,
    waiting_comparisons,
)
from olmo_ext.launch.slurm_site import NODES_FILE, SHARED_FILES, Site, job_environment, read_site, slurm_file

LAUNCH_FOLDER = ".launch"


@dataclass(frozen=True, kw_only=True)
class SlurmRequest:
    """The options of `launch --on NODE_TYPE`."""

    node_type: str
    num_nodes: int = 1
    gpus_per_node: int | None = None
    throttle: int | None = None
    time_limit: str | None = None
    fetch_parts: int | None = None
    fetch_source: str | None = None
    compare: bool = True


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """A request, with the runs, site settings and limits that it was found to concern."""

    sweep: Sweep
    sweep_directory: Path
    """Absolute."""

    request: SlurmRequest
    placement: Placement
    site: Site
    limits: Limits
    missing: list[Member]
    busy: dict[str, str]
    """Run -> job of those that are queued or running."""

    lacks_comparison: bool
    """Whether runs are to be queued, or some are and no comparison waits for them."""

    def files(self) -> tuple[str, ...]:
        """The Slurm files that its jobs need."""
        return (f"{self.request.node_type}.sbatch", *SHARED_FILES)

    def folders(self) -> list[tuple[Path, list[Member]]]:
        """The launch folder and the runs of each array: one array, or as many as the array limit makes of it."""
        parent = self.sweep_directory / LAUNCH_FOLDER
        taken = [int(entry.name) for entry in parent.glob("*") if entry.name.isdigit()]
        first, size = max(taken, default=0) + 1, self.limits.array_size
        chunks = [self.missing[start : start + size] for start in range(0, len(self.missing), size)]
        return [(parent / f"{first + index:03d}", chunk) for index, chunk in enumerate(chunks)]

    def newest_folder(self) -> Path:
        """Of the launches so far."""
        folders = [path.parent for path in (self.sweep_directory / LAUNCH_FOLDER).glob("*/command.sbatch")]
        return max(folders, key=lambda folder: int(folder.name))

    def runs_command(
        self, folder: Path, chunk: Sequence[Member], *, after: str | None, fetched: str | None
    ) -> list[str]:
        conditions = [f"afterok:{fetched}"] if fetched else []
        # A throttle holds for the sweep: the next array waits for the one before.
        conditions += [f"afterany:{after}"] if after and self.request.throttle else []
        return sbatch_runs(
            Submission(
                script=folder / f"{self.request.node_type}.sbatch",
                launch_folder=folder,
                job_name=self.sweep.name,
                num_runs=len(chunk),
                placement=self.placement,
                site=self.site,
                throttle=self.request.throttle,
                time_limit=self.request.time_limit,
                dependency=",".join(conditions) or None,
            )
        )

    def compare_command(self, folder: Path, jobs: Sequence[str]) -> list[str]:
        # Also after those of an earlier launch that still run: this comparison takes the place of theirs.
        jobs = [*jobs, *sorted({job.partition("_")[0] for job in self.busy.values()} - set(jobs))]
        return sbatch_command(
            ["compare", str(self.sweep_directory), "-o", str(self.sweep_directory / "report.html")],
            launch_folder=folder,
            job_name=f"{self.sweep.name}-compare",
            site=self.site,
            # Also after failures: the report says which runs are missing.
            dependency="afterany:" + ":".join(jobs),
        )

    def fetch_arguments(self) -> list[str]:
        """Of `olmo-ext`, for what the missing runs read."""
        from olmo_ext.launch.missing_data import fetch_arguments

        assert self.request.fetch_parts is not None
        configs = [member.run.config for member in self.missing]
        return fetch_arguments(configs, parts=self.request.fetch_parts, source=self.request.fetch_source)

    def fetch_command(self, folder: Path) -> list[str]:
        return sbatch_command(
            self.fetch_arguments(),
            launch_folder=folder,
            job_name=f"{self.sweep.name}-fetch",
            site=self.site,
            array=self.request.fetch_parts,
        )


def _write_launch_folder(launch: _Launch, folder: Path, chunk: Sequence[Member], code: Path) -> None:
    """Freeze the job's files beside the code: a requeued element reads them again."""
    folder.mkdir(parents=True)
    for name in launch.files():
        shutil.copyfile(slurm_file(name), folder / name)
    if launch.site.path is not None:
        shutil.copyfile(launch.site.path, folder / "site.env")
    (folder / "environment.sh").write_text(job_environment())
    launched = {"runs": [member.run.name for member in chunk], "world_size": launch.placement.world_size}
    write_atomically(folder / "runs.json", json.dumps(launched, indent=1, ensure_ascii=False) + "\n")
    link_code(folder, code)


def _refuse_changed(members: Sequence[Member], busy: dict[str, str]) -> None:
    """Refuse a config that a run in the queue would not take: it keeps the one that it was queued with.

    :raises InputError: naming the first key that differs.
    """
    for member in members:
        if member.run.name not in busy or not member.directory.exists():
            continue
        stored = load_run_config(member.directory.config_path, check_budget_too=False)
        if differences := differing_keys(member.run.config.identity(), stored.identity()):
            raise InputError(
                f"run {member.run.name!r} is queued with another config: {differences[0]}",
                where=str(member.directory.path),
                right="`olmo-ext cancel` it first, or launch under another sweep name",
            )


def launch_slurm(
    sweep_file: Path, overrides: Sequence[str], runs_directory: Path, *, request: SlurmRequest, dry_run: bool
) -> int:
    """Queue what is missing of a sweep.

    :raises InputError: for what would fail in the queue, before anything is written.
    :raises WorkError: if sbatch refuses; what was submitted before stays and is not submitted again.
    """
    node = load_hardware().node(request.node_type, where="--on")
    script = slurm_file(f"{request.node_type}.sbatch")
    site = read_site()
    placement = Placement(
        node=node, num_nodes=request.num_nodes, gpus_per_node=request.gpus_per_node or node.gpus_per_node
    )  # fmt: skip
    if placement.gpus_per_node > node.gpus_per_node:
        raise InputError(
            f"{placement.gpus_per_node} GPUs a node", where="--gpus", right=f"at most {node.gpus_per_node}"
        )
    time_limit = time_option(request.time_limit) if request.time_limit is not None else None
    request = dataclasses.replace(request, time_limit=time_limit)
    sweep = load_sweep(sweep_file, overrides, rule=lambda config: node_settings(config, placement))
    sweep_directory = (runs_directory / sweep.name).absolute()
    members = members_of(sweep, runs_directory.absolute())
    queue = read_queue()
    has_slurm = queue is not None and shutil.which("sbatch") is not None
    if not has_slurm and not dry_run:
        raise InputError("Slurm does not answer here", right="launch on a login node, or look with --dry-run")
    busy = busy_runs(members, sweep_directory, queue)
    _refuse_changed(members, busy)
    missing = [member for member in members if not member.is_done and member.run.name not in busy]
    launch = _Launch(
        sweep=sweep,
        sweep_directory=sweep_directory,
        request=request,
        placement=placement,
        site=site,
        limits=read_limits() if has_slurm else Limits(),
        missing=missing,
        busy=busy,
        lacks_comparison=request.compare
        and (bool(missing) or (bool(busy) and lost_its_comparison(sweep_directory, queue or {}))),
    )
    if request.fetch_parts and launch.missing:
        launch.fetch_arguments()  # refuses what cannot be fetched
    findings = preflight(
        sweep,
        [member.run for member in launch.missing],
        sweep_directory,
        placement=placement,
        will_be_fetched=bool(request.fetch_parts),
    )
    if has_slurm and launch.missing:
        _check_with_slurm(launch, script, findings)
    _tell(launch, members, findings, queue=queue)
    if dry_run:
        _show_commands(launch)
        for text in findings.errors:
            click.echo(f"would be refused: {text}", err=True)
        return EXIT_DONE
    findings.refuse()
    if not launch.missing and not launch.lacks_comparison:
        if not busy:
            click.echo(f"all are done: olmo-ext compare {os.path.relpath(sweep_directory)}")
        return EXIT_DONE
    with sweep_lock(sweep_directory):
        _refuse_queued_meanwhile(launch)
        _submit_all(launch)
    return EXIT_DONE


def _refuse_queued_meanwhile(launch: _Launch) -> None:
    """Two launches at the same time both find the same runs missing; the second finds it out under the lock.

    :raises InputError: if a run was queued meanwhile.
    :raises WorkError: if Slurm does not answer: then nothing is queued.
    """
    queue = read_queue()
    if queue is None:
        raise WorkError("squeue no longer answers: what another launch has queued meanwhile cannot be seen")
    queued = busy_runs(launch.missing, launch.sweep_directory, queue)
    for name, job in queued.items():
        raise InputError(
            f"run {name!r} has just been queued as {job} by another launch",
            where=str(launch.sweep_directory),
            right="the same command again for what is missing then",
        )


def _check_with_slurm(launch: _Launch, script: Path, findings: Findings) -> None:
    """Whether Slurm would take the runs and the jobs before and after them: a later refusal leaves half a sweep."""
    site, node_type = launch.site, launch.request.node_type
    folder, chunk = launch.folders()[0]
    runs = launch.runs_command(folder, chunk, after=None, fetched=None)
    jobs = [(node_type, script, launch.request.time_limit, [*runs[:-2], str(script)], "")]
    if launch.request.compare or launch.request.fetch_parts:
        shared = slurm_file("command.sbatch")
        command = sbatch_command(["--version"], launch_folder=folder, job_name=launch.sweep.name, site=site)
        command = [*command[: command.index(str(folder / shared.name))], str(shared)]
        jobs.append(("cpu", shared, None, command, "the comparison or data fetch (SBATCH_PARTITION_CPU): "))
    for kind, file, time_limit, command, whose in jobs:
        partition = site.get("SBATCH_PARTITION", kind)
        if problem := check_partition(partition, limit_of(file, site.options(kind), time_limit)):
            findings.add_error(whose + problem)
        elif objection := objection_to(command, partition):
            (findings.add_warning if objection.waits else findings.add_error)(whose + objection.text)


def _tell(launch: _Launch, members: Sequence[Member], findings: Findings, *, queue: Mapping[str, str] | None) -> None:
    busy = launch.busy
    missing = {member.run.name for member in launch.missing}
    click.echo(f"{len(members)} runs of {launch.sweep.name}, each on {launch.placement}:")
    for member in members:
        name = member.run.name
        what = "to be queued" if name in missing else "done"
        if name in busy:
            ends = (queue or {}).get(busy[name]) == "COMPLETING"
            again = ", which is ending: launch again when it has gone, if the run is not done"
            what = f"in the queue as {busy[name]}{again if ends else ''}"
        click.echo(f"  {name}: {what}")
    for text, groups in findings.settings.items():
        click.echo(f"{'all' if len(findings.settings) == 1 else ', '.join(groups)}: {text}")
    for text in findings.facts:
        click.echo(text)
    for text in findings.warnings:
        click.echo(f"warning: {text}", err=True)
    if older := older_copies((*launch.files(), NODES_FILE)):
        names = ", ".join(map(str, older))
        click.echo(
            f"note: {names}: unchanged since an older olmo-ext, used as is; `olmo-ext slurm init` renews", err=True
        )
    if launch.site.path is None:
        click.echo("note: no slurm/site.env: partition and account are the cluster's defaults", err=True)
    if launch.site.unused:
        names = ", ".join(launch.site.unused)
        click.echo(
            f"note: {launch.site.path}: `launch` does not use {names}; SBATCH_OPTIONS takes any option", err=True
        )
    if queue is None:
        click.echo("note: no Slurm here: partition, limits and array size are not checked", err=True)


def _show_commands(launch: _Launch) -> None:
    folders = launch.folders()
    if not folders and not launch.lacks_comparison:
        click.echo("nothing to queue")
        return
    fetched = None
    if launch.request.fetch_parts and folders:
        fetched = "FETCH_JOB"
        click.echo(shell_line(launch.fetch_command(folders[0][0])))
    jobs: list[str] = []
    for folder, chunk in folders:
        command = launch.runs_command(folder, chunk, after=jobs[-1] if jobs else None, fetched=fetched)
        click.echo(shell_line(command))
        jobs.append(f"JOB_{folder.name}")
    if launch.lacks_comparison:
        click.echo(shell_line(launch.compare_command(folders[-1][0] if folders else launch.newest_folder(), jobs)))


def _submit_all(launch: _Launch) -> None:
    """Write everything that the jobs read, then submit, remembering each job at once."""
    directory = launch.sweep_directory
    jobs = _submit_runs(launch) if launch.missing else []
    if launch.lacks_comparison:
        _submit_comparison(launch, jobs)
    click.echo(f"olmo-ext status {os.path.relpath(directory)}")


def _submit_runs(launch: _Launch) -> list[str]:
    directory = launch.sweep_directory
    plugins = [name for member in launch.missing for name in member.run.config.plugins]
    code = freeze_code(directory, plugins)
    prepare(launch.sweep, directory.parent, launch.missing)
    (directory / "logs").mkdir(exist_ok=True)
    folders = launch.folders()
    for folder, chunk in folders:
        _write_launch_folder(launch, folder, chunk, code)
        for member in chunk:
            link_code(member.directory.path, code)
            record(member.directory, "queued")
    fetched = None
    if launch.request.fetch_parts:
        # Two fetches into one folder would refuse each other. One of an earlier launch may wait or run: sbatch took it
        # and then refused the runs.
        arguments = launch.fetch_arguments()
        fetched = queued_fetch(directory, arguments, read_queue() or {})
        if fetched is None:
            fetched = submit(launch.fetch_command(folders[0][0]))
            remember_submission(directory, {"kind": "fetch", "job": fetched, "arguments": arguments})
        click.echo(f"data: job {fetched}, {launch.request.fetch_parts} parts")
    jobs: list[str] = []
    for folder, chunk in folders:
        try:
            job = submit(launch.runs_command(folder, chunk, after=jobs[-1] if jobs else None, fetched=fetched))
        except WorkError as error:
            done = sum(len(other) for _, other in folders[: len(jobs)])
            raise WorkError(
                f"{error} ({done} of {len(launch.missing)} runs queued; launch again for the rest)"
            ) from None
        jobs.append(job)
        names = [member.run.name for member in chunk]
        remember_submission(directory, {"kind": "runs", "job": job, "runs": names, "folder": folder.name})
        click.echo(f"runs: job {job}, {len(chunk)} runs")
    return jobs


def _submit_comparison(launch: _Launch, jobs: Sequence[str]) -> None:
    """Queue the comparison after everything of the sweep that is in the queue, in place of an earlier launch's.

    :raises WorkError: if sbatch refuses: the runs stay queued.
    """
    directory = launch.sweep_directory
    older = waiting_comparisons(directory, read_queue() or {})
    try:
        job = submit(launch.compare_command(launch.newest_folder(), jobs))
    except WorkError as error:
        raise WorkError(
            f"{error} (the runs are queued, the comparison is not; the same command again queues it)"
        ) from None
    remember_submission(directory, {"kind": "compare", "job": job})
    if older:
        ask_slurm(["scancel", *older])
    click.echo(f"comparison: job {job}, writes {directory / 'report.html'}")
