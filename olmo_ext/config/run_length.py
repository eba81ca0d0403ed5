"""How long a run is and what its learning rate does, from the config alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from olmo_ext.base.errors import InputError
from olmo_ext.base.quantities import format_count
from olmo_ext.base.sections import TrainConfig
from olmo_ext.config.schedulers import SCHEDULERS
from olmo_ext.shapes.layers import ModelShape
from olmo_ext.shapes.registry import ATTENTION_TYPES, FFN_TYPES


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """Where training stops."""

    steps: int
    tokens: int
    """Tokens seen at the stop: `steps * tokens_per_step`."""

    tokens_per_step: int
    excess_tokens: int
    """Tokens beyond a `max_duration` given in tokens: its last step is completed, never cut."""

    horizon_steps: int
    """Where a schedule without `t_max` ends, in OLMo: with `max_duration`, wherever `stop_at` stops the run."""

    horizon_tokens: int
    """The same in tokens: a `max_duration` in tokens as it is written, no whole steps."""


def run_length(config: TrainConfig, *, instances: int | None = None, where: str | None = None) -> RunLength:
    """Steps and tokens of a run.

    :param config: a resolved config.
    :param instances: training instances in one epoch, needed when `max_duration` is in epochs.
    :param where: the config's name, for errors.
    :raises InputError: if the duration is not positive, or is in epochs and the data is unknown or too small.
    """
    batch = config.global_train_batch_size
    tokens_per_step = batch * config.model.max_sequence_length
    if batch < 1:
        raise InputError(f"global_train_batch_size is {batch}", where=where, right="at least 1")
    duration = config.max_duration
    asked_tokens = None
    if isinstance(duration, int):
        steps = duration
    elif duration.endswith("ep"):
        if instances is None:
            raise InputError(
                f"max_duration {duration} is in epochs and the data is not there to count them",
                where=where,
                right="give steps, or tokens as in 2.5BT",
            )
        check_one_batch(instances, batch, where=where)
        steps = int(duration[:-2]) * (instances // batch)
    else:
        asked_tokens = int(duration[:-1])
        steps = math.ceil(asked_tokens / tokens_per_step)
    if steps < 1:
        raise InputError(f"max_duration {duration} is no training at all", where=where, right="at least one step")
    horizon_steps = steps
    horizon_tokens = steps * tokens_per_step if asked_tokens is None else asked_tokens
    stops = [config.stop_at]
    if not config.load_path or config.reset_trainer_state:
        # After a warm start that keeps its position it counts from there, which the config does not tell.
        stops.append(config.stop_after)
    steps = min([steps, *(stop for stop in stops if stop is not None)])
    tokens = steps * tokens_per_step
    return RunLength(
        steps=steps,
        tokens=tokens,
        tokens_per_step=tokens_per_step,
        excess_tokens=max(0, tokens - horizon_tokens),
        horizon_steps=horizon_steps,
        horizon_tokens=horizon_tokens,
    )


def check_one_batch(instances: int, batch: int, *, where: str | None = None) -> None:
    """:raises InputError: if the data holds less than one global batch, both counted in instances."""
    if instances < batch:
        raise InputError(
            f"the data holds {instances} instances, less than one batch of {batch}",
            where=where,
            right="more data or a smaller global_train_batch_size",
        )


def batch_per_rank(config: TrainConfig, world_size: int, *, where: str | None = None) -> int:
    """Instances per rank and step.

    :param world_size: number of ranks.
    :param where: the config's name, for errors.
    :raises InputError: naming the numbers where they do not divide.
    """
    batch, micro = config.global_train_batch_size, config.device_train_microbatch_size
    if batch % world_size:
        near = [n for n in range(1, batch + 1) if batch % n == 0]
        raise InputError(
            f"global_train_batch_size {batch} does not divide over {world_size} ranks",
            where=where,
            right=f"a multiple of {world_size}, or one of {', '.join(map(str, near[-6:]))} ranks",
        )
    per_rank = batch // world_size
    if micro < 1:
        raise InputError(f"device_train_microbatch_size is {micro}", where=where, right="at least 1")
    if per_rank > micro and per_rank % micro:
        raise InputError(
            f"{per_rank} instances a rank do not divide into micro-batches of {micro}"
            f" (global_train_batch_size {batch} over {world_size} ranks)",
            where=where,
            right=f"device_train_microbatch_size {math.gcd(per_rank, micro)}",
        )
    return per_rank


def schedule_warnings(config: TrainConfig, shape: ModelShape, length: RunLength) -> list[str]:
    """What a run's length makes of its learning rate and its update periods that its author may not have meant, and
    what its sequences' length makes of its token mixers."""
    of_length = [*learning_rate_warnings(config, length), *period_warnings(shape, length.steps)]
    return [*of_length, *sequence_warnings(shape)]


def sequence_warnings(shape: ModelShape) -> list[str]:
    """What `max_sequence_length` makes of the options of the layers' token mixers; the same of several layers once."""
    texts = (
        text
        for layer in shape.layers
        for text in ATTENTION_TYPES.get(layer.attention.type).remarks(layer.attention, shape.max_sequence_length)
    )
    return list(dict.fromkeys(texts))


def period_warnings(shape: ModelShape, steps: int) -> list[str]:
    """What `steps` optimizer steps leave unapplied at levels that are updated every C-th."""
    spec = shape.layers[0].ffn
    return [
        f"the level with update period {period} is never updated: the run has {steps} steps"
        if steps < period
        else f"the gradients of the last {steps % period} steps of the level with update period {period} are not"
        f" applied: {steps} steps are no multiple"
        for period in sorted(set(FFN_TYPES.get(spec.type).update_periods(spec)))
        if steps % period
    ]


def learning_rate_warnings(config: TrainConfig, length: RunLength) -> list[str]:
    """What a schedule does that its author may not have meant."""
    scheduler = config.scheduler
    kind = SCHEDULERS.get(scheduler.name)
    in_tokens = scheduler.units == "tokens"
    total = length.tokens if in_tokens else length.steps
    unit = "tokens" if in_tokens else "steps"
    warnings = []
    if kind.warms_up and scheduler.t_warmup >= total:
        share = scheduler.t_warmup / total
        warnings.append(
            f"warm-up of {format_count(scheduler.t_warmup)} {unit} is {share:.1f} x the run:"
            " the peak learning rate is never reached"
        )
    horizon = scheduler.t_max
    if horizon is None:
        horizon = length.horizon_tokens if in_tokens else length.horizon_steps
    # Completing the last step goes beyond a horizon in tokens by less than a step, which is meant.
    ends_with_run = total - length.excess_tokens <= horizon <= total if in_tokens else horizon == total
    if not ends_with_run and kind.ends_at_horizon:
        warnings.append(
            f"the schedule ends at {format_count(horizon)} {unit}, the run at {format_count(total)}:"
            " the last learning rate is not the schedule's end"
        )
    return warnings
