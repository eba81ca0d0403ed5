"""Learning-rate schedulers by name. No torch: `plan` prints the rates that training uses.

Adding one is one file, named under `plugins:`, and its test:

    @register_scheduler
    class Halves(Scheduler):
        name = "halves"
        options = {"every": 1000}
        def rate(self, step, *, initial, horizon, warmup, section): return initial * 0.5 ** (step // section["every"])

The built-in ones are OLMo's: training builds those by OLMo's own classes, and the tests hold that the rates are equal.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from olmo_ext.base.registry import Registry


class Scheduler(ABC):
    """How the learning rate follows the steps, or the tokens where `scheduler.units` says so."""

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    """Extra keys under `scheduler` and their defaults."""

    warms_up: ClassVar[bool] = True
    """Whether the rate rises from `warmup_min_lr` to the initial rate first; `rate` is asked afterwards alone."""

    uses_horizon: ClassVar[bool] = True
    """Whether the rate depends on the horizon: such a run cannot be made longer without an explicit `t_max`."""

    ends_at_horizon: ClassVar[bool] = True
    """Whether a run that ends elsewhere than the horizon misses the end of the schedule."""

    rises_after_warmup: ClassVar[bool] = False
    """Whether the highest rate may lie anywhere after the warm-up: `plan` then looks at every step."""

    def check(self, section: Mapping[str, Any]) -> str | None:
        """What is wrong with the options of the section, in words, or None."""
        return None

    @abstractmethod
    def rate(self, step: int, *, initial: float, horizon: int, warmup: int, section: Mapping[str, Any]) -> float:
        """The learning rate of a step.

        :param step: steps (or tokens) that are done with this one; at least `warmup` where the scheduler warms up.
        :param initial: `optimizer.learning_rate`.
        :param horizon: `t_max`, or where the run's `max_duration` ends.
        :param section: the config's `scheduler` section, with OLMo's keys and the scheduler's own options.
        """


SCHEDULERS: Registry[Scheduler] = Registry("scheduler", "scheduler.name")
register_scheduler = SCHEDULERS.add
"""Class decorator: make a scheduler known under its `name`."""


def scheduled_rate(section: Mapping[str, Any], *, initial: float, step: int, end: int) -> float:
    """The learning rate of a step, by the scheduler that the section names.

    :param step: counted from 1 as OLMo's trainer does, in the section's units, as `end` is.
    :param end: where the run's `max_duration` ends.
    """
    kind, warmup = SCHEDULERS.get(section["name"]), int(section["t_warmup"])
    if kind.warms_up and step < warmup:
        low = initial * 0.10 if section["warmup_min_lr"] is None else section["warmup_min_lr"]
        return low + (initial - low) * step / warmup
    horizon = end if section["t_max"] is None else int(section["t_max"])
    return kind.rate(step, initial=initial, horizon=horizon, warmup=warmup, section=section)


class _Decay(Scheduler):
    """From the initial rate at the end of the warm-up to `alpha_f` of it at the horizon, and there it stays."""

    def rate(self, step: int, *, initial: float, horizon: int, warmup: int, section: Mapping[str, Any]) -> float:
        floor = initial * section["alpha_f"]
        return floor if step >= horizon else self.between(step - warmup, horizon - warmup, initial, floor)

    @abstractmethod
    def between(self, step: int, steps: int, initial: float, floor: float) -> float:
        """The rate `step` steps after the warm-up, of the `steps` that the decay takes."""


@register_scheduler
class CosineWithWarmup(_Decay):
    name = "cosine_with_warmup"

    def between(self, step: int, steps: int, initial: float, floor: float) -> float:
        return floor + (initial - floor) * (1 + math.cos(math.pi * step / steps)) / 2


@register_scheduler
class LinearWithWarmup(_Decay):
    name = "linear_with_warmup"

    def between(self, step: int, steps: int, initial: float, floor: float) -> float:
        return initial - (initial - floor) * (step / steps)


@register_scheduler
class CosineLinearEnvelope(_Decay):
    """A cosine times a line."""

    name = "cosine_linear_envelope"

    def between(self, step: int, steps: int, initial: float, floor: float) -> float:
        cosine = (initial - floor) * (1 + math.cos(math.pi * step / steps)) / 2
        return floor + (1 - step / steps) * cosine


@register_scheduler
class InverseSquareRootWithWarmup(Scheduler):
    name = "inverse_sqrt_with_warmup"
    uses_horizon = ends_at_horizon = False

    def rate(self, step: int, *, initial: float, horizon: int, warmup: int, section: Mapping[str, Any]) -> float:
        return initial * math.sqrt(warmup / max(warmup, step))


@register_scheduler
class MaximumScheduler(Scheduler):
    """OLMo's pair: a cosine, and the inverse square root that takes over where it is higher."""

    name = "max_scheduler"
    ends_at_horizon = False

    def rate(self, step: int, *, initial: float, horizon: int, warmup: int, section: Mapping[str, Any]) -> float:
        pair = (CosineWithWarmup(), InverseSquareRootWithWarmup())
        return max(part.rate(step, initial=initial, horizon=horizon, warmup=warmup, section=section) for part in pair)


@register_scheduler
class ConstantWithWarmup(Scheduler):
    name = "constant_with_warmup"
    uses_horizon = ends_at_horizon = False

    def rate(self, step: int, *, initial: float, horizon: int, warmup: int, section: Mapping[str, Any]) -> float:
        return initial


@register_scheduler
class Constant(ConstantWithWarmup):
    name = "constant"
    warms_up = False
