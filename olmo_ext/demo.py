"""`olmo-ext demo`: corpus, sweep, comparison, each step the command a user would type."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import click

from olmo_ext.base.errors import EXIT_DONE, InputError
from olmo_ext.base.quantities import format_seconds

SWEEP = Path("configs/sweeps/demo.yaml")
CORPUS_LIMIT = "20MB"
SMOKE_CORPUS_LIMIT = "1MB"
SMOKE_OVERRIDES = ("max_duration=6", "scheduler.t_warmup=2", "eval_interval=3")


def demo_commands(*, directory: Path, report: Path, smoke: bool) -> list[list[str]]:
    """The commands of the demo, as argument lists of `olmo-ext`."""
    corpus = directory / ("corpus-smoke" if smoke else "corpus")
    limit = SMOKE_CORPUS_LIMIT if smoke else CORPUS_LIMIT
    overrides = [f"data.corpus={corpus}", *(SMOKE_OVERRIDES if smoke else ())]
    runs = directory / ("runs-smoke" if smoke else "runs")
    return [
        ["data", "corpus", "-o", str(corpus), "--max-bytes", limit],
        ["launch", str(SWEEP), "--on", "local", "--runs-directory", str(runs), *overrides],
        ["compare", str(runs / SWEEP.stem), "-o", str(report)],
    ]


@click.command()
@click.option(
    "-o", "--output", "report", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="Where the corpus and the runs go; a second call continues there.",
)
@click.option("--smoke", is_flag=True, help="Runs of seconds: shows that everything works, not which shape is better.")
def demo(report: Path, directory: Path, smoke: bool) -> None:
    """Train a conventional, an hourglass and a tapered model of equal size on this machine and compare them.

    Three paired seeds each, about six minutes on two CPU cores. Called again, it does only what is missing.
    """
    from olmo_ext.cli import cli

    if not SWEEP.is_file():
        raise InputError(f"no {SWEEP} here", right="run the demo in a checkout of the repository")
    started = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    report.parent.mkdir(parents=True, exist_ok=True)
    for arguments in demo_commands(directory=directory, report=report, smoke=smoke):
        click.echo(f"\n$ olmo-ext {shlex.join(arguments)}")
        code = cli.main(args=arguments, prog_name="olmo-ext", standalone_mode=False)
        if isinstance(code, int) and code != EXIT_DONE:
            raise SystemExit(code)
    click.echo(f"\n{format_seconds(time.monotonic() - started)} in all. Open {report} in a browser.")
