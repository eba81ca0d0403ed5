"""`olmo-ext sync`. The upload code is imported when the command runs, so that `--help` stays fast."""

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
    from olmo_ext.weights_and_biases.sync import as_json as uploads_as_json
    from olmo_ext.weights_and_biases.sync import sync_sweep

    uploads = []
    for upload in sync_sweep(sweep, project=project, entity=entity, again=again, dry_run=dry_run, seconds=seconds):
        uploads.append(upload)
        if not as_json:
            click.echo(upload.line())
    if as_json:
        click.echo(json.dumps(uploads_as_json(uploads), indent=1))
    failed = [upload.run for upload in uploads if not upload.ok]
    if failed:
        raise WorkError(f"{len(failed)} of {len(uploads)} runs did not go up: {', '.join(failed)}")
