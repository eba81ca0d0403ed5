"""The model of a run that was trained, read from one of its checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from olmo.model import OLMo

from olmo_ext.base.errors import InputError
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.config.run_config import RunConfig, load_run_config
from olmo_ext.training.checkpoint import CheckpointStore, load_model_state, require_complete
from olmo_ext.training.tensor_state import check_fits
from olmo_ext.upstream.shaped_model import build_model


def load_model_from_run(
    run_directory: Path | str, step: int | None = None, device: str | torch.device = "cpu"
) -> tuple[OLMo, RunConfig]:
    """A run's model in eval mode, and its config.

    :param step: which checkpoint; the newest complete one by default.
    :raises InputError: if there is no such complete checkpoint, or config.yaml is not that of its model.
    """
    run = RunDirectory(run_directory)
    if not run.exists():
        raise InputError("no config.yaml", where=str(run.path), right="name the folder of a run that was started")
    config = load_run_config(run.config_path, check_budget_too=False)
    store = CheckpointStore(run.checkpoints, report=lambda line: print(line, file=sys.stderr))
    checkpoint = store.newest_complete() if step is None else store.folder(step)
    if checkpoint is None:
        raise InputError("no complete checkpoint", where=str(run.checkpoints), right="train the run first")
    if step is not None:
        require_complete(checkpoint)
    model = build_model(config, device="meta").to_empty(device="cpu")
    state, _ = model._make_state_dict_compatible(load_model_state(checkpoint))
    check_fits(model.state_dict(), state, str(checkpoint))
    model.load_state_dict(state)
    model.config.init_device = "cpu"
    return model.to(torch.device(device)).eval(), config
