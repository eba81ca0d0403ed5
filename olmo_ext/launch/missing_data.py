"""The `olmo-ext data fetch` command that brings the data that the runs of a sweep miss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import InputError
from olmo_ext.config.run_length import run_length


def fetch_arguments(configs: Sequence[Mapping[str, Any]], *, parts: int, source: str | None) -> list[str]:
    """Arguments of `olmo-ext` that fetch what the longest run reads; `{part}` stands for the array element's number.

    :param configs: the values of every run's config.
    :param parts: jobs that share the work.
    :param source: a source or manifest as `data fetch` takes it; its default if None.
    :raises InputError: if the runs read no subset, or several, or their length depends on the data.
    """
    subsets = {str(values["data"]["subset"]) for values in configs}
    if subsets == {"None"} or len(subsets) != 1:
        found = "no data.subset" if subsets == {"None"} else ", ".join(sorted(subsets))
        raise InputError(f"the runs read {found}", where="--fetch", right="one data.subset for all runs")
    subset = subsets.pop()
    seeds = {int(values["data"]["seed"]) for values in configs}
    if len(seeds) != 1:
        raise InputError(f"the runs read the orders of seeds {sorted(seeds)}", where="--fetch", right="one data.seed")
    instances = max(run_length(values).steps * values["global_train_batch_size"] for values in configs)
    return [
        "data",
        "fetch",
        *([source] if source else []),
        f"--instances={instances}",
        f"--output={Path(subset).absolute()}",
        f"--seed={seeds.pop()}",
        f"--part={{part}}/{parts}",
    ]
