"""`olmo-ext compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from olmo_ext.base.errors import InputError


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the report, one HTML file, here.")
@click.option("--baseline", help="Group to compare with (default: the sweep's).")
@click.option("--validation", help="Validation set to compare on (default: the first that all runs have).")
@click.option(
    "--expected", type=click.Path(path_type=Path), help="A paper's figures (default: DIRECTORY/expected.yaml if there)."
)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
@click.option("--csv", "as_csv", is_flag=True, help="Print every metric as tidy CSV.")
@click.option("--figures", type=click.Path(path_type=Path), help="Write PNG and SVG figures into this folder.")
@click.option("--tensorboard", type=click.Path(path_type=Path), help="Write TensorBoard event files into this folder.")
def compare(
    directory: Path,
    output: Path | None,
    baseline: str | None,
    validation: str | None,
    expected: Path | None,
    as_json: bool,
    as_csv: bool,
    figures: Path | None,
    tensorboard: Path | None,
) -> None:
    """Compare the runs of a sweep with its baseline: what is better, by how much, how surely, at what cost.

    DIRECTORY is a sweep's folder, as in runs/<sweep>, or a folder of runs that were trained one by one, with
    --baseline RUN. Only the run directories in it are read.
    """
    from olmo_ext.compare.collect import read_sweep

    if as_json and as_csv:
        raise InputError("both --json and --csv", right="one of them: each fills the standard output")
    sweep = read_sweep(directory, baseline=baseline, every_metric=as_csv or tensorboard is not None)
    if as_csv and output is None and figures is None and tensorboard is None:
        from olmo_ext.compare.table import to_csv

        click.echo(to_csv(sweep), nl=False)
        return
    from olmo_ext.compare.comparison import compare_sweep

    result = compare_sweep(sweep, label=validation, expected=expected)
    # Files first: `compare ... | head` closes the output before it is all printed, and the report is still wanted.
    written = []
    if output is not None:
        from olmo_ext.compare.report.page import write_report

        size = write_report(result, output)
        written.append(f"Wrote {output} ({size / 1e6:.1f} MB).")
    if figures is not None:
        from olmo_ext.compare.figures import write_figures

        names = write_figures(result, figures)
        written.append(f"Wrote {len(names)} figures as PNG and SVG into {figures}.")
    if tensorboard is not None:
        from olmo_ext.compare.tensorboard import write_events

        count = write_events(sweep, tensorboard)
        written.append(f"Wrote {count} runs for TensorBoard: tensorboard --logdir {tensorboard}")
    _print(result, as_json=as_json, as_csv=as_csv)
    for line in written:
        click.echo(line, err=as_json or as_csv)


def _print(result: Any, *, as_json: bool, as_csv: bool) -> None:
    from olmo_ext.compare import table

    if as_json:
        import json

        click.echo(json.dumps(table.to_json(result), indent=1, ensure_ascii=False))
    elif as_csv:
        click.echo(table.to_csv(result.sweep), nl=False)
    else:
        from rich.console import Console

        console = Console(soft_wrap=False)
        # A file or a pipe has no width; the table should not be folded to 80 columns there.
        console = console if console.is_terminal else Console(width=200)
        table.print_comparison(result, console)
