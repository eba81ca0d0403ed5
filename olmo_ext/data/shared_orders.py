"""Runs of a sweep that read the data in one and the same order, though their seeds differ. No numpy.

OLMo shuffles epoch e of `data.seed` s with a generator of s + e: seed 1 epoch 1 and seed 2 epoch 0 are one order, and
no second sample of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from olmo_ext.base.errors import InputError
from olmo_ext.base.sections import TrainConfig
from olmo_ext.config.run_length import run_length

SeedAndEpoch = tuple[int, int]
MOST_TOLD = 3


def epochs_begun(config: TrainConfig, instances: int | None) -> int | None:
    """How many epochs a run reads from, at least 1; None where neither its duration nor its data tells.

    :param config: a resolved config.
    :param instances: training instances of one epoch, None where the data is not there.
    """
    duration = str(config.max_duration)
    if instances is None:
        return int(duration[:-2]) if duration.endswith("ep") else None
    try:
        steps = run_length(config, instances=instances).steps
    except InputError:
        return None  # said by the checks of data and duration
    return max(1, math.ceil(steps / max(1, instances // config.global_train_batch_size)))


def orders_shared(epochs: Mapping[SeedAndEpoch, int]) -> list[tuple[SeedAndEpoch, SeedAndEpoch]]:
    """Pairs of (seed, epoch) that have the same order.

    :param epochs: (`data.seed`, `epoch`) that runs begin with -> epochs that the longest of them reads from.
    """
    first: dict[int, SeedAndEpoch] = {}
    shared = []
    for seed, start in sorted(epochs):
        for epoch in range(start, start + epochs[seed, start]):
            other = first.setdefault(seed + epoch, (seed, epoch))
            if other[0] != seed:
                shared.append((other, (seed, epoch)))
    return shared


def order_warnings(runs: Iterable[tuple[TrainConfig, int | None]]) -> list[str]:
    """What to say of the orders of several runs.

    :param runs: resolved configs, each with the training instances of an epoch where they are known. A subset of the
        official order is read once, whatever the seed.
    """
    epochs: dict[SeedAndEpoch, int] = {}
    unknown = False
    for config, instances in runs:
        if config.data.subset:
            continue
        begun = epochs_begun(config, instances)
        unknown |= begun is None
        assert config.data.seed is not None  # `load_run_config` fills it
        key = (config.data.seed, config.epoch or 0)
        epochs[key] = max(epochs.get(key, 1), 2 if begun is None else begun)
    shared = orders_shared(epochs)
    condition = ", if a run is longer than an epoch" if unknown else ""
    texts = [
        f"data.seed {seed} epoch {epoch} and data.seed {other} epoch {other_epoch} are the same order of the data"
        + condition
        for (seed, epoch), (other, other_epoch) in shared[:MOST_TOLD]
    ]
    return texts + ([f"and {len(shared) - MOST_TOLD} more pairs of orders"] if len(shared) > MOST_TOLD else [])
