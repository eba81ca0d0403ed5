"""What makes the runs of a sweep comparable: no run twice, one budget, one length. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence

from olmo_ext.base.errors import InputError
from olmo_ext.base.quantities import EQUAL_WITHIN, format_count
from olmo_ext.config.run_config import RunConfig
from olmo_ext.config.run_length import run_length
from olmo_ext.config.sweep_run import SweepRun


def refuse_twins(runs: Sequence[SweepRun], *, where: str) -> None:
    """Refuse two runs of one name, and two names for one config: the second would only seem to be evidence.

    :raises InputError: naming both.
    """
    names: set[str] = set()
    configs: dict[str, str] = {}
    for run in runs:
        if run.name.casefold() in names:
            raise InputError(f"two runs are called {run.name!r}", where=where, right="give them different names")
        names.add(run.name.casefold())
        values = {k: v for k, v in run.config.plain().items() if k not in ("run_name", "wandb")}
        text = json.dumps(values, sort_keys=True, default=str)
        if text in configs:
            raise InputError(
                f"runs {configs[text]!r} and {run.name!r} are the same config",
                where=where,
                right="drop one, or `seeds`",
            )
        configs[text] = run.name


def _training_tokens(config: RunConfig) -> int | str:
    """Tokens of a run, or the words of its duration where only the data can tell."""
    try:
        return run_length(config).tokens
    except InputError:
        return str(config.max_duration)


def check_equal_budgets(runs: Sequence[SweepRun], *, where: str) -> None:
    """Refuse runs that cannot be compared at equal budget: other targets, sizes (where none declares one) or tokens.

    :raises InputError: naming the runs that differ.
    """
    waive = "equal budgets, or `unequal_budgets: true`"
    first = runs[0]

    def declared(run: SweepRun) -> dict[str, int]:
        declared = run.config.budget_report
        return {} if declared is None else {declared.quantity: declared.target}

    for run in runs[1:]:
        if declared(run) != declared(first):
            ours, theirs = declared(first) or "none", declared(run) or "none"
            raise InputError(
                f"budgets differ: {first.name!r} declares {ours}, {run.name!r} {theirs}",
                where=where,
                right=waive,
            )
    if not declared(first):
        smallest, largest = (pick(runs, key=lambda run: run.config.counts.non_embedding) for pick in (min, max))
        low, high = smallest.config.counts.non_embedding, largest.config.counts.non_embedding
        if high > low * (1 + EQUAL_WITHIN):
            raise InputError(
                f"budgets differ: {smallest.name!r} has {format_count(low)} non-embedding parameters,"
                f" {largest.name!r} {format_count(high)} ({high / low - 1:.1%} more)",
                where=where,
                right=waive,
            )
    tokens = [_training_tokens(run.config) for run in runs]
    for run, count in zip(runs, tokens, strict=True):
        equal = count == tokens[0]
        if isinstance(count, int) and isinstance(tokens[0], int):
            equal = abs(count - tokens[0]) <= EQUAL_WITHIN * tokens[0]
        if not equal:
            raise InputError(
                f"training lengths differ: {first.name!r} sees {tokens[0]} tokens, {run.name!r} {count}",
                where=where,
                right=waive,
            )
