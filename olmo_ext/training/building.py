"""Build a trainer from its parts: data, evaluators, model, optimizer and schedule."""

from __future__ import annotations

import dataclasses

import torch
from olmo.config import DistributedStrategy, TrainConfig
from olmo.optim import build_optimizer
from olmo.torch_util import seed_all

from olmo_ext.base.errors import InputError
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.base.sections import plain_section
from olmo_ext.config.run_config import RunConfig
from olmo_ext.data.loader import build_train_loader
from olmo_ext.training.distributed import Ranks, build_wrapped_model, effective_precision
from olmo_ext.training.evaluators import build_evaluators
from olmo_ext.training.update_periods import with_update_periods
from olmo_ext.upstream.compile import CompileReport
from olmo_ext.upstream.scheduler import run_scheduler
from olmo_ext.upstream.trainer import Hooks, RunTrainer, loop_settings, train_config

REFUSALS = ("OLMoConfigurationError", "NotImplementedError", "NameError", "InvalidBackend")
"""Exceptions by which OLMo or the compiler refuses, while the model is built, a setting that is not supported here."""


def effective_config(config: RunConfig, *, per_rank: int, directory: RunDirectory, ranks: Ranks) -> TrainConfig:
    """OLMo's config, adapted to this device and number of ranks.

    :param per_rank: instances per rank and step.
    """
    cfg = train_config(config)
    cfg.precision = effective_precision(cfg.precision, ranks.device)
    cfg.distributed_strategy = cfg.distributed_strategy or DistributedStrategy.ddp
    loop_settings(cfg, per_rank=per_rank, save_folder=str(directory.path))
    return cfg


def build_trainer(
    config: RunConfig, cfg: TrainConfig, *, steps: int, directory: RunDirectory, ranks: Ranks, hooks: Hooks, where: str
) -> tuple[RunTrainer, CompileReport | None]:
    """A trainer at step 0, and what was compiled.

    :param steps: the run's length.
    :param where: the config's name, for errors.
    :raises InputError: for what OLMo or the compiler refuse.
    """
    try:
        return _build_trainer(config, cfg, steps=steps, directory=directory, ranks=ranks, hooks=hooks)
    except Exception as error:
        if type(error).__name__ not in REFUSALS:
            raise
        reason = " ".join(str(error).split())
        raise InputError(f"OLMo refuses this config: {type(error).__name__}: {reason}", where=where) from None


def _build_trainer(
    config: RunConfig, cfg: TrainConfig, *, steps: int, directory: RunDirectory, ranks: Ranks, hooks: Hooks
) -> tuple[RunTrainer, CompileReport | None]:
    seed_all(config.seed)
    # Skipped batches are data too: the loader may make only the part of the order that the run needs.
    skipped = config.fast_forward_batches or 0
    longer = dataclasses.replace(config, max_duration=steps + skipped, stop_at=None) if skipped else config
    loader = build_train_loader(longer, rank=ranks.rank, world_size=ranks.world_size, work_dir=directory.path / "order")
    evaluators = build_evaluators(cfg, device=ranks.device, world_size=ranks.world_size, rank=ranks.rank)
    for own_randomness in (loader, *(evaluator.eval_loader for evaluator in evaluators)):
        # Every pass over a DataLoader draws from the global generator: a restart, which begins one more pass, and an
        # evaluation would change the dropout of the steps after it.
        own_randomness.generator = torch.Generator()
    model, wrapped, compile_report = build_wrapped_model(config, cfg, ranks)
    # Dropout differs between ranks, and does not depend on how the weights were drawn.
    seed_all((config.seed + ranks.rank) % 2**32)
    trainer = RunTrainer(
        cfg=cfg,
        epoch=cfg.epoch,
        model=model,
        dist_model=wrapped,
        optim=with_update_periods(build_optimizer(cfg, wrapped), config.shape),
        scheduler=run_scheduler(cfg, plain_section(config.scheduler)),
        train_loader=loader,
        device=ranks.device,
        evaluators=evaluators,
        hooks=hooks,
        chunked_loss=config.loss == "chunked",
    )
    return trainer, compile_report
