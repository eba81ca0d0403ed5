"""Give OLMo's trainer a registered scheduler; OLMo builds the schedulers that it knows itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from olmo.config import SchedulerConfig, SchedulerType, TrainConfig
from olmo.optim import Scheduler, build_scheduler

from olmo_ext.config.schedulers import scheduled_rate

OLMOS = frozenset(kind.value for kind in SchedulerType)


@dataclass
class RegisteredScheduler(Scheduler):
    """A scheduler that OLMo does not know."""

    section: Mapping[str, Any]
    """The run's `scheduler` section."""

    def get_lr(self, initial_lr: float, step: int, max_steps: int) -> float:
        return scheduled_rate(self.section, initial=initial_lr, step=step, end=max_steps)


def scheduler_values(section: Mapping[str, Any]) -> dict[str, Any]:
    """What OLMo's typed config can hold of a `scheduler` section: a name of its own, and no options of a plugin."""
    own = {field.name for field in fields(SchedulerConfig)} - (set() if section["name"] in OLMOS else {"name"})
    return {key: value for key, value in section.items() if key in own}


def run_scheduler(cfg: TrainConfig, section: Mapping[str, Any]) -> Scheduler:
    """The scheduler that a run's trainer uses.

    :param cfg: OLMo's config of the run.
    :param section: the run's own `scheduler` section.
    """
    if section["name"] in OLMOS:
        return build_scheduler(cfg)
    steps = section["grad_clip_warmup_steps"]
    return RegisteredScheduler(
        grad_clip_warmup_steps=None if steps is None else int(steps),
        grad_clip_warmup_factor=section["grad_clip_warmup_factor"],
        warmup_min_lr=section["warmup_min_lr"],
        section=section,
    )
