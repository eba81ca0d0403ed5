"""Downstream scores of `olmo-ext eval` (with standard errors) and of the evaluations during training (without)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from olmo_ext.compare.collect import Run
from olmo_ext.compare.group import GroupResult
from olmo_ext.compare.statistics import Difference, paired_difference

NEEDLE_KEYS = ("length", "depth")
_IN_LOOP_METRICS = ("len_norm", "ce_loss", "pmi_dc", "acc", "f1", "bpb")
"""Suffixes of OLMo's names in the loop, which join task and metric with an underscore."""


Key = tuple[str, str, str, str, int | None]
"""Task, metric, version, source, early step: scores of one key may be averaged and compared."""


@dataclass(frozen=True, kw_only=True)
class DownstreamScore:
    """One group on one task."""

    task: str
    metric: str
    version: str
    group: str
    value: float
    """Mean over the seeds."""

    standard_error: float | None
    """Of the mean, from the items: sqrt(sum of the runs' squared errors) / runs; none where no run says."""

    items: int | None
    seeds: int
    source: str
    """`eval` (evals/*.jsonl) or `training`."""

    step: int | None = None
    """Of the checkpoint, where it is not the end of the run."""

    difference: Difference | None = None
    """To the group's baseline, paired by seed."""

    @property
    def key(self) -> Key:
        return self.task, self.metric, self.version, self.source, self.step


def run_scores(run: Run) -> dict[Key, tuple[float, float | None, int | None]]:
    """Key -> value, standard error, items of one run; the newest step of each task, metric and version wins."""
    newest: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in sorted(run.evaluations, key=lambda row: row.get("step") or 0):
        if any(row.get(key) is not None for key in NEEDLE_KEYS) or not isinstance(row.get("value"), (int, float)):
            continue
        newest[str(row.get("task")), str(row.get("metric")), str(row.get("task_version", ""))] = row
    scores: dict[Key, tuple[float, float | None, int | None]] = {
        (*key, "eval", run.early_step(row.get("step"))): (float(row["value"]), row.get("stderr"), row.get("items"))
        for key, row in newest.items()
    }
    in_loop = run.downstream()
    for name, value in in_loop.items():
        if name.endswith("_items"):
            continue
        suffix = next((metric for metric in _IN_LOOP_METRICS if name.endswith(f"_{metric}")), "")
        task = name.removesuffix(f"_{suffix}") if suffix else name
        items = in_loop.get(f"{task}_items")
        scores[(task, suffix, "", "training", None)] = (value, None, None if items is None else int(items))
    return scores


def downstream_scores(groups: list[GroupResult]) -> list[DownstreamScore]:
    """Scores of every group, tasks in the order in which they were met."""
    by_group = {group.name: {run.seed: run_scores(run) for run in group.finished} for group in groups}
    keys = list(dict.fromkeys(key for runs in by_group.values() for scores in runs.values() for key in scores))
    result = []
    for key in keys:
        for group in groups:
            scored = {seed: scores[key] for seed, scores in by_group[group.name].items() if key in scores}
            if not scored:
                continue
            errors = [error for _, error, _ in scored.values() if error is not None]
            items = {count for _, _, count in scored.values() if count is not None}
            difference = None
            if group.baseline is not None and group.same_training:
                others = {s: scores[key][0] for s, scores in by_group[group.baseline].items() if key in scores}
                difference = paired_difference({seed: value for seed, (value, _, _) in scored.items()}, others)
            result.append(
                DownstreamScore(
                    task=key[0],
                    metric=key[1],
                    version=key[2],
                    source=key[3],
                    step=key[4],
                    group=group.name,
                    value=sum(value for value, _, _ in scored.values()) / len(scored),
                    standard_error=(
                        math.sqrt(sum(error**2 for error in errors)) / len(errors)
                        if len(errors) == len(scored)
                        else None
                    ),
                    items=items.pop() if len(items) == 1 else None,
                    seeds=len(scored),
                    difference=difference,
                )
            )
    return result
