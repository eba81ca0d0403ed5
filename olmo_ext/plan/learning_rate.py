"""The learning rate of every step, as OLMo's schedulers have it. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from olmo_ext.base.sections import TrainConfig
from olmo_ext.base.upstream_sections import SchedulerConfig
from olmo_ext.config.run_length import RunLength


@dataclass(frozen=True, kw_only=True)
class LearningRates:
    """What a run's schedule comes to."""

    configured: float
    """`optimizer.learning_rate`."""

    peak: float
    """Highest rate that a step of the run has."""

    last: float
    """Rate of the last step."""


def learning_rate(config: TrainConfig, length: RunLength, step: int) -> float:
    """The rate of a step.

    :param config: a resolved config.
    :param step: counted from 1, as OLMo's trainer does.
    """
    scheduler, full = config.scheduler, config.optimizer.learning_rate
    if scheduler.units == "tokens":
        return _rate(full, scheduler.name, scheduler, step * length.tokens_per_step, length.horizon_tokens)
    return _rate(full, scheduler.name, scheduler, step, length.horizon_steps)


def _rate(full: float, name: str, scheduler: SchedulerConfig, now: int, end: int) -> float:
    warmup = int(scheduler.t_warmup)
    if name == "constant":
        return full
    if name == "max_scheduler":
        # OLMo's pair: a cosine, and the inverse square root that takes over where it is higher.
        parts = ("cosine_with_warmup", "inverse_sqrt_with_warmup")
        return max(_rate(full, part, scheduler, now, end) for part in parts)
    if now < warmup:
        low = full * 0.1 if scheduler.warmup_min_lr is None else scheduler.warmup_min_lr
        return low + (full - low) * now / warmup
    if name == "constant_with_warmup":
        return full
    if name == "inverse_sqrt_with_warmup":
        return full * math.sqrt(warmup / max(warmup, now, 1))
    horizon = end if scheduler.t_max is None else int(scheduler.t_max)
    floor = full * scheduler.alpha_f
    if now >= horizon:
        return floor
    done = (now - warmup) / (horizon - warmup)
    if name == "linear_with_warmup":
        return full - (full - floor) * done
    cosine = (full - floor) * (1 + math.cos(math.pi * done)) / 2
    return floor + (cosine * (1 - done) if name == "cosine_linear_envelope" else cosine)


def learning_rates(config: TrainConfig, length: RunLength) -> LearningRates:
    """Peak and last rate of a run."""
    scheduler = config.scheduler
    per_step = length.tokens_per_step if scheduler.units == "tokens" else 1
    warmed = math.ceil(scheduler.t_warmup / per_step)
    # After its warm-up every schedule falls or stays, so the peak is beside the warm-up's end or the run's.
    corners = {min(max(1, step), length.steps) for step in (1, warmed - 1, warmed, warmed + 1, length.steps)}
    return LearningRates(
        configured=config.optimizer.learning_rate,
        peak=max(learning_rate(config, length, step) for step in corners),
        last=learning_rate(config, length, length.steps),
    )
