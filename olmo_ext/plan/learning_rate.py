"""The learning rates of a run. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from olmo_ext.base.sections import TrainConfig, plain_section
from olmo_ext.config.run_length import RunLength
from olmo_ext.config.schedulers import SCHEDULERS, scheduled_rate


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
    return _rate(plain_section(config.scheduler), config.optimizer.learning_rate, length, step)


def _rate(section: Mapping[str, Any], initial: float, length: RunLength, step: int) -> float:
    in_tokens = section["units"] == "tokens"
    return scheduled_rate(
        section,
        initial=initial,
        step=step * length.tokens_per_step if in_tokens else step,
        end=length.horizon_tokens if in_tokens else length.horizon_steps,
    )


def learning_rates(config: TrainConfig, length: RunLength) -> LearningRates:
    """Peak and last rate of a run."""
    scheduler, initial = config.scheduler, config.optimizer.learning_rate
    section = plain_section(scheduler)
    per_step = length.tokens_per_step if scheduler.units == "tokens" else 1
    warmed = math.ceil(scheduler.t_warmup / per_step)
    if SCHEDULERS.get(scheduler.name).rises_after_warmup:
        candidates = set(range(1, length.steps + 1))
    else:
        # Of a schedule that falls or stays after its warm-up, the peak is beside the warm-up's end or the run's.
        candidates = {min(max(1, step), length.steps) for step in (1, warmed - 1, warmed, warmed + 1, length.steps)}
    return LearningRates(
        configured=initial,
        peak=max(_rate(section, initial, length, step) for step in candidates),
        last=_rate(section, initial, length, length.steps),
    )
