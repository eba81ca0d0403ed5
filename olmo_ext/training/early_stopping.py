"""When a loss that has risen ends a run (OLMo's `early_stopping_factor`)."""

from __future__ import annotations

from olmo_ext.base.sections import TrainConfig
from olmo_ext.upstream.trainer import RunTrainer


def early_stopping_reason(trainer: RunTrainer, config: TrainConfig) -> str | None:
    """Why the run should stop, None where it should not: behind the warm-up, the last step's loss is more than the
    factor times the least one.

    :param config: the run's resolved config.
    """
    factor = config.early_stopping_factor
    if factor is None or trainer.scheduler_current <= config.scheduler.t_warmup:
        return None
    # The loss of the previous step: this step's loss is not known yet.
    now, least = trainer.cur_train_loss, trainer.min_train_loss
    if now > factor * least:
        return f"early stopping: loss {now:.4f} is more than early_stopping_factor {factor:g} x its least, {least:.4f}"
    return None
