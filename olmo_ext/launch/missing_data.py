"""The `olmo-ext data fetch` command that brings the data that the runs of a sweep miss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from olmo_ext.base.errors import InputError
from olmo_ext.config.run_config import RunConfig
from olmo_ext.config.run_length import run_length


def fetch_arguments(configs: Sequence[RunConfig], *, parts: int, source: str | None) -> list[str]:
    """Arguments of `olmo-ext` that fetch what the longest run reads; `{part}` stands for the array element's number.

    :param configs: every run's config.
    :param parts: jobs that share the work.
    :param source: a source or manifest as `data fetch` takes it; its default if None.
    :raises InputError: if the runs read no subset, or several, or their length depends on the data.
    """
    subsets = {str(config.data.subset) for config in configs}
    if subsets == {"None"} or len(subsets) != 1:
        named = "no data.subset" if subsets == {"None"} else ", ".join(sorted(subsets))
        raise InputError(f"the runs read {named}", where="--fetch", right="one data.subset for all runs")
    subset = subsets.pop()
    seeds = {config.data.seed for config in configs}
    if len(seeds) != 1:
        raise InputError(
            f"the runs read the orders of seeds {sorted(seeds, key=str)}", where="--fetch", right="one data.seed"
        )
    instances = max(run_length(config).steps * config.global_train_batch_size for config in configs)
    return [
        "data",
        "fetch",
        *([source] if source else []),
        f"--instances={instances}",
        f"--output={Path(subset).absolute()}",
        f"--seed={seeds.pop()}",
        f"--part={{part}}/{parts}",
    ]
