"""Decide whether a start may continue the run in the folder. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from olmo_ext.base.errors import InputError
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.config.run_config import RunConfig, differing_keys, load_run_config
from olmo_ext.config.schedulers import SCHEDULERS
from olmo_ext.training.checkpoint import CONFIG, CheckpointStore


def _checkpoint_config(directory: RunDirectory) -> Path | None:
    newest = CheckpointStore(directory.checkpoints, report=lambda text: None).newest_complete(verify=False)
    return newest / CONFIG if newest is not None and (newest / CONFIG).is_file() else None


def stored_config(directory: RunDirectory) -> RunConfig | None:
    """The config that a folder was trained with: its own, or where that was lost its newest checkpoint's.

    :returns: None where nothing was trained yet.
    """
    if not directory.has_begun:
        return None
    lost = not directory.exists() or not directory.config_path.stat().st_size
    path = _checkpoint_config(directory) if lost else directory.config_path
    return None if path is None else load_run_config(path, check_budget_too=False)


def differences_from(directory: RunDirectory, config: RunConfig) -> list[str]:
    """Keys of a run's identity that differ from what the folder was trained with.

    The newest checkpoint's config is compared too, since `config.yaml` may have been edited or written again. A run
    may be extended, so the checkpoint's length is not compared.
    """
    stored = stored_config(directory)
    if stored is None:
        return []
    differing = differing_keys(config.identity(), stored.identity())
    path = _checkpoint_config(directory)
    if not differing and path is not None:
        saved = load_run_config(path, check_budget_too=False).identity()
        differing = differing_keys({**config.identity(), "max_duration": None}, {**saved, "max_duration": None})
    return differing


def check_same_run(config: RunConfig, directory: RunDirectory, *, extend: bool) -> None:
    """Refuse to continue a folder with another model, data, optimizer, schedule, seed, batch or length.

    A folder in which nothing was trained yet (an attempt that failed on its input) takes any config.

    :param extend: whether a longer `max_duration` is meant.
    :raises InputError: naming the differing keys with both values.
    """
    stored = stored_config(directory)
    if stored is None:
        return
    if extend:
        check_extension(config, stored, directory.config_path)
    differences = differences_from(directory, config)
    if extend:
        differences = [text for text in differences if not text.startswith("max_duration: ")]
    if differences:
        more = f" and {len(differences) - 6} more" if len(differences) > 6 else ""
        longer = all(text.startswith("max_duration: ") for text in differences)
        right = "another config is another run: give another run_name or folder"
        if longer:
            right = "--extend continues it for longer"
        raise InputError(
            f"the folder holds a run of another config: {'; '.join(differences[:6])}{more}",
            where=str(directory.path),
            right=right,
        )


def check_extension(config: RunConfig, stored: RunConfig, where: Path) -> None:
    """A longer run keeps the learning rates of its first part only if the schedule does not depend on the length.

    :raises InputError: where it would, or where the run would become shorter.
    """
    ours, theirs = config.max_duration, stored.max_duration
    if ours == theirs:
        return
    if type(ours) is not type(theirs) or (str(ours)[-1] != str(theirs)[-1] and isinstance(ours, str)):
        raise InputError(f"max_duration {theirs} -> {ours}", where=str(where), right="keep the unit")
    if _amount(ours) < _amount(theirs):
        raise InputError(f"max_duration {theirs} -> {ours} is shorter", where=str(where), right="--extend only adds")
    scheduler = stored.scheduler
    if scheduler.t_max is None and SCHEDULERS.get(scheduler.name).uses_horizon:
        raise InputError(
            f"the {scheduler.name} schedule ends where the run ends: a longer max_duration would change the"
            " learning rates of the steps already done",
            where=f"{where}, scheduler.t_max",
            right="a run to be extended is started with an explicit scheduler.t_max",
        )


def _amount(duration: int | str) -> int:
    return duration if isinstance(duration, int) else int(duration.removesuffix("ep").removesuffix("T"))
