"""The commands `dashboard` and `sync`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from olmo_ext.base.errors import WorkError


@click.command()
@click.argument("sweep", type=click.Path(path_type=Path))
@click.option("--project", help="W&B project; by default the one in the runs' config.")
@click.option("--entity", help="W&B team or user; by default the one in the runs' config, then the login's own.")
@click.option("--again", is_flag=True, help="Upload every run whole, as a new W&B run under a new id.")
@click.option("--dry-run", is_flag=True, help="Say what would go up; no network, no login.")
@click.option("--seconds", type=click.FloatRange(min=1), help="Limit for one run's upload.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def sync(
    sweep: Path,
    project: str | None,
    entity: str | None,
    again: bool,
    dry_run: bool,
    seconds: float | None,
    as_json: bool,
) -> None:
    """Upload the runs of SWEEP (or one run's folder) to W&B: whole, in order, and never twice.

    Works for runs logged offline, online runs whose server went away, and runs trained without a `wandb` section.
    """
    from olmo_ext.weights_and_biases import sync as work

    uploads = []
    for upload in work.sync_sweep(sweep, project=project, entity=entity, again=again, dry_run=dry_run, seconds=seconds):
        uploads.append(upload)
        if not as_json:
            click.echo(upload.line())
    if as_json:
        click.echo(json.dumps(work.as_json(uploads), indent=1))
    failed = [upload.run for upload in uploads if not upload.ok]
    if failed:
        raise WorkError(f"{len(failed)} of {len(uploads)} runs did not go up: {', '.join(failed)}")


@click.command()
@click.argument("sweep", type=click.Path(path_type=Path))
@click.option("--project", help="W&B project; by default the one in the runs' config.")
@click.option("--entity", help="W&B team or user; by default the one in the runs' config, then the login's own.")
@click.option("--baseline", help="Group to compare with (default: the sweep's).")
@click.option("--validation", help="Validation set to show (default: the first that all runs have).")
@click.option(
    "--expected", type=click.Path(path_type=Path), help="A paper's figures (default: SWEEP/expected.yaml if there)."
)
@click.option("--dry-run", is_flag=True, help="Print the specification as JSON; no network, no login.")
def dashboard(
    sweep: Path,
    project: str | None,
    entity: str | None,
    baseline: str | None,
    validation: str | None,
    expected: Path | None,
    dry_run: bool,
) -> None:
    """Build, or update, a W&B workspace view and a report for SWEEP, a folder runs/<sweep>.

    The runs themselves get there by logging online or by `olmo-ext sync`.
    """
    from olmo_ext.compare import dashboard as work
    from olmo_ext.compare.collect import read_sweep
    from olmo_ext.compare.comparison import compare_sweep
    from olmo_ext.compare.words import plural

    if expected is None and (sweep / "expected.yaml").is_file():
        expected = sweep / "expected.yaml"
    result = compare_sweep(read_sweep(sweep, baseline=baseline), label=validation, expected=expected)
    names = work.choose_names(result, project=project, entity=entity)
    if dry_run:
        click.echo(json.dumps(work.specification(result, names), indent=1, sort_keys=True))
        return
    saved = work.save(result, names)
    click.echo(f"{'Updated' if saved.updated else 'Built'} {saved.workspace}")
    click.echo(f"Report {saved.report}")
    if saved.missing:
        many = f"{plural(len(saved.missing), 'run')} {'is' if len(saved.missing) == 1 else 'are'}"
        names_text = ", ".join(saved.missing)
        click.echo(f"{many} not on W&B yet, `olmo-ext sync` brings what is missing: {names_text}", err=True)
