"""The commands `launch`, `status` and `cancel`."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from olmo_ext.base.errors import EXIT_DONE, InputError


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("sweep_file", metavar="SWEEP.yaml", type=click.Path(path_type=Path))
@click.argument("overrides", metavar="[key=value ...]", nargs=-1)
@click.option("--on", "target", default="local", show_default=True, help="local, or a node type of nodes.yaml.")
@click.option(
    "--runs-directory", type=click.Path(path_type=Path), default=Path("runs"), show_default=True,
    help="Runs go to RUNS_DIRECTORY/<sweep>/<run>.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show what would be done; change nothing.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Local runs at a time.")
@click.option("--nodes", "num_nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Nodes a run.")
@click.option("--gpus", type=click.IntRange(min=1), help="GPUs a node; all of the node type's by default.")
@click.option("--throttle", type=click.IntRange(min=1), help="Runs at a time in the queue.")
@click.option("--time", "time_limit", help="Slurm's time limit of one attempt: 12:00:00, 1-00:00:00, 45m.")
@click.option("--fetch", "fetch_parts", type=click.IntRange(min=1), metavar="N",
              help="Fetch the sweep's subset first, as an array of N jobs.")  # fmt: skip
@click.option("--fetch-from", "fetch_source", help="A source or manifest of `data fetch`; its default if left out.")
@click.option("--no-compare", is_flag=True, help="Queue no comparison at the end.")
def launch(
    sweep_file: Path,
    overrides: tuple[str, ...],
    target: str,
    runs_directory: Path,
    dry_run: bool,
    jobs: int,
    num_nodes: int,
    gpus: int | None,
    throttle: int | None,
    time_limit: str | None,
    fetch_parts: int | None,
    fetch_source: str | None,
    no_compare: bool,
) -> int:
    """Run what is missing of a sweep: on this machine, or as Slurm jobs on a node type.

    Called again it continues: finished runs, and those that are queued or running, are left alone.

    Exit codes: 0 all done (or queued), 1 a run failed, 2 bad input, 75 stopped by a signal after a checkpoint.
    """
    context = click.get_current_context()
    _refuse_options(context, OF_SLURM if target == "local" else OF_LOCAL, target)
    if fetch_source is not None and fetch_parts is None:
        raise InputError("nothing is fetched", where="--fetch-from", right="--fetch N beside it")
    if target == "local":
        return _launch_local(sweep_file, overrides, runs_directory, dry_run=dry_run, jobs=jobs)
    from olmo_ext.launch.slurm import SlurmRequest, launch_slurm

    request = SlurmRequest(
        node_type=target,
        num_nodes=num_nodes,
        gpus_per_node=gpus,
        throttle=throttle,
        time_limit=time_limit,
        fetch_parts=fetch_parts,
        fetch_source=fetch_source,
        compare=not no_compare,
    )
    return launch_slurm(sweep_file, overrides, runs_directory, request=request, dry_run=dry_run)


OF_LOCAL = {"jobs": "--throttle"}
OF_SLURM = dict.fromkeys(
    ("num_nodes", "gpus", "throttle", "time_limit", "fetch_parts", "fetch_source"), "--on a node type"
) | {"throttle": "--jobs"}  # fmt: skip
"""Options that mean nothing on the other side -> what to give there instead."""


def _refuse_options(context: click.Context, names: dict[str, str], target: str) -> None:
    """An option that would be dropped in silence.

    :raises InputError: naming the first.
    """
    for parameter in context.command.params:
        given = parameter.name in names and context.get_parameter_source(parameter.name) != ParameterSource.DEFAULT
        if given:
            assert parameter.name is not None
            raise InputError(f"has no meaning with --on {target}", where=parameter.opts[0], right=names[parameter.name])


def _launch_local(
    sweep_file: Path, overrides: tuple[str, ...], runs_directory: Path, *, dry_run: bool, jobs: int
) -> int:
    from olmo_ext.config.sweep import load_sweep
    from olmo_ext.launch.local import launch_local, sweep_lock
    from olmo_ext.launch.members import busy_runs, members_of, prepare
    from olmo_ext.launch.preflight import preflight
    from olmo_ext.launch.slurm_queue import certain_queue, submitted_jobs

    sweep = load_sweep(sweep_file, overrides)
    directory = runs_directory / sweep.name
    members = members_of(sweep, runs_directory)
    missing = [member for member in members if not member.is_done]
    findings = preflight(sweep, [member.run for member in missing], directory)
    for text in findings.warnings:
        click.echo(f"warning: {text}", err=True)
    if dry_run:
        for member in members:
            click.echo(f"{'done' if member.is_done else 'run '} {member.directory.path}")
        for text in findings.errors:
            click.echo(f"would be refused: {text}", err=True)
        return EXIT_DONE
    findings.refuse()
    if not missing:
        click.echo(f"all {len(members)} runs of {sweep.name} are done: olmo-ext compare {directory}")
        return EXIT_DONE
    known = submitted_jobs(directory) or any(member.directory.read_state().slurm_job for member in missing)
    for name, job in busy_runs(missing, directory, certain_queue() if known else None).items():
        raise InputError(f"run {name!r} is in Slurm's queue as {job}", right=f"olmo-ext cancel {directory}")
    with sweep_lock(directory) as lock:
        prepare(sweep, runs_directory, members)
        return launch_local(members, jobs=jobs, lock=lock)


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="One JSON list, for scripts.")
def status(directory: Path, as_json: bool) -> int:
    """What each run of a sweep is doing: DIR is runs/<sweep> or runs/<sweep>/<run>."""
    from olmo_ext.launch.status import print_status, status_json, sweep_status

    statuses = sweep_status(directory)
    if as_json:
        click.echo(status_json(statuses))
    else:
        print_status(statuses)
    return EXIT_DONE


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("runs", metavar="[RUN ...]", nargs=-1)
def cancel(directory: Path, runs: tuple[str, ...]) -> int:
    """Stop the runs of a sweep, or the named ones; running ones save a checkpoint first.

    Slurm kills a job that is still saving after the cluster's KillWait (30 seconds as a rule): then the steps since its
    last checkpoint are lost. What was stopped is continued by the same `launch`.
    """
    from olmo_ext.launch.cancel import cancel_runs

    return cancel_runs(directory, runs)
