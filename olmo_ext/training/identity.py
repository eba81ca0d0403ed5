"""Whether a start continues the run that is in the folder. No torch."""

from __future__ import annotations

from pathlib import Path

from olmo_ext.config import RunConfig, differing_keys, load_run_config
from olmo_ext.errors import InputError
from olmo_ext.rundir import RunDirectory

STEADY_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt_with_warmup")
"""Schedules whose learning rate does not depend on where the run ends."""


def check_same_run(config: RunConfig, directory: RunDirectory, *, extend: bool) -> None:
    """Refuse to continue a folder with another model, data, optimizer, schedule, seed, batch or length.

    A folder in which nothing was trained yet (an attempt that failed on its input) takes any config.

    :param extend: whether a longer `max_duration` is meant.
    :raises InputError: naming the differing keys with both values.
    """
    if not directory.exists() or not (directory.metrics_path.exists() or directory.checkpoints.exists()):
        return
    stored = load_run_config(directory.config_path, check_budget_too=False)
    differences = differing_keys(config.identity(), stored.identity())
    if extend:
        differences = [text for text in differences if not text.startswith("max_duration: ")]
        check_extension(config, stored, directory.config_path)
    if differences:
        more = f" and {len(differences) - 6} more" if len(differences) > 6 else ""
        longer = all(text.startswith("max_duration: ") for text in differences)
        right = "--extend continues it for longer" if longer else "another config is another run: give another folder"
        raise InputError(
            f"the folder holds a run of another config: {'; '.join(differences[:6])}{more}",
            where=str(directory.path),
            right=right,
        )


def check_extension(config: RunConfig, stored: RunConfig, where: Path) -> None:
    """A longer run keeps the learning rates of its first part only if the schedule does not depend on the length.

    :raises InputError: where it would, or where the run would become shorter.
    """
    ours, theirs = config.values["max_duration"], stored.values["max_duration"]
    if ours == theirs:
        return
    if type(ours) is not type(theirs) or (isinstance(ours, str) and ours[-1] != theirs[-1]):
        raise InputError(f"max_duration {theirs} -> {ours}", where=str(where), right="keep the unit")
    if _amount(ours) < _amount(theirs):
        raise InputError(f"max_duration {theirs} -> {ours} is shorter", where=str(where), right="--extend only adds")
    scheduler = stored.values["scheduler"]
    if scheduler["t_max"] is None and scheduler["name"] not in STEADY_SCHEDULES:
        raise InputError(
            f"the {scheduler['name']} schedule ends where the run ends: a longer max_duration would change the"
            " learning rates of the steps already done",
            where=f"{where}, scheduler.t_max",
            right="a run to be extended is started with an explicit scheduler.t_max",
        )


def _amount(duration: int | str) -> int:
    return duration if isinstance(duration, int) else int(duration.removesuffix("ep").removesuffix("T"))
