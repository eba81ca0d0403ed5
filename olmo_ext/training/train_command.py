"""`olmo-ext train`. What loads torch or the config is imported when the command runs, so that `--help` stays fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from olmo_ext.base.errors import InputError


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--run-directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="The run's folder; runs/<run_name> by default.",
)
@click.option("--extend", is_flag=True, help="Continue a run with a longer max_duration.")
@click.option("--time-limit", help="Save and exit 75 before this has passed: seconds, 12:30:00, 2h.")
@click.option("--progress/--no-progress", default=None, help="A progress bar; by default on a terminal.")
def train(
    config: Path,
    overrides: tuple[str, ...],
    run_directory: Path | None,
    extend: bool,
    time_limit: str | None,
    progress: bool | None,
) -> int:
    """Train one run on this machine, on one GPU or the CPU.

    CONFIG is a YAML file; key=value or --key=value changes a key of it. The same command again continues the run.
    Ctrl-C, SIGTERM, SIGUSR1 and SIGUSR2 save at the next step and exit with 75. For several devices:
    torchrun scripts/train.py CONFIG [key=value ...].
    """
    return run_from_arguments(
        config, overrides, run_directory=run_directory, extend=extend, time_limit=time_limit, progress=progress
    )


def run_from_arguments(
    config: Path,
    overrides: tuple[str, ...],
    *,
    run_directory: Path | None = None,
    extend: bool = False,
    time_limit: str | None = None,
    progress: bool | None = None,
) -> int:
    """Load the config and train; what `olmo-ext train` and scripts/train.py share."""
    from olmo_ext.config.run_config import load_run_config
    from olmo_ext.training.signals import StopRequest
    from olmo_ext.training.train import train as train_run

    # Signals count from here on, not from when torch is imported.
    with StopRequest() as stop:
        limit: list[Any] = [f"time_limit={time_limit}"] if time_limit else []
        loaded = load_run_config(config, [*overrides, *limit])
        folder = run_directory or Path("runs") / _folder_name(loaded.run_name or config.stem)
        return train_run(loaded, run_directory=folder, progress=progress, extend=extend, stop=stop)


def _folder_name(run_name: str) -> str:
    """A run's name as a path below runs/, and never out of it.

    :raises InputError: where a part of it cannot be a folder.
    """
    from olmo_ext.config.groups import NAME_LIMIT, check_name

    for part in run_name.split("/"):
        try:
            check_name(part, where="run_name")
        except InputError as error:
            raise InputError(
                error.what,
                where=f"run_name {run_name!r}",
                right=f"folders below runs/, as a or a/b; each at most {NAME_LIMIT} bytes and not empty, without a line"
                " break, a blank at an end, a leading dot or dash",
            ) from None
    return run_name
