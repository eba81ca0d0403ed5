"""`olmo-ext dashboard`."""

from __future__ import annotations

import json
from pathlib import Path

import click


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
