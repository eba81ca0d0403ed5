"""The learning rates of a run. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def learning_rate(values: Mapping[str, Any], length: RunLength, step: int) -> float:
    """The rate of a step.

    :param values: a resolved config.
    :param step: counted from 1, as OLMo's trainer does.
    """
    in_tokens = values["scheduler"]["units"] == "tokens"
    return scheduled_rate(
        values["scheduler"],
        initial=values["optimizer"]["learning_rate"],
        step=step * length.tokens_per_step if in_tokens else step,
        end=length.horizon_tokens if in_tokens else length.horizon_steps,
    )


def learning_rates(values: Mapping[str, Any], length: RunLength) -> LearningRates:
    """Peak and last rate of a run."""
    scheduler = values["scheduler"]
    per_step = length.tokens_per_step if scheduler["units"] == "tokens" else 1
    warmed = math.ceil(scheduler["t_warmup"] / per_step)
    if SCHEDULERS.get(scheduler["name"]).rises_after_warmup:
        candidates = set(range(1, length.steps + 1))
    else:
        # Of a schedule that falls or stays after its warm-up, the peak is beside the warm-up's end or the run's.
        candidates = {min(max(1, step), length.steps) for step in (1, warmed - 1, warmed, warmed + 1, length.steps)}
    return LearningRates(
        configured=values["optimizer"]["learning_rate"],
        peak=max(learning_rate(values, length, step) for step in candidates),
        last=learning_rate(values, length, length.steps),
    )
