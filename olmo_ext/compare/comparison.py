"""Comparing a sweep: every group with its baseline, then what all together say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from olmo_ext.base.errors import InputError
from olmo_ext.compare import comparable, documents
from olmo_ext.compare.collect import RecordedSweep, Run, validation_metric
from olmo_ext.compare.downstream import downstream_scores
from olmo_ext.compare.features import Features, features
from olmo_ext.compare.group import GroupResult
from olmo_ext.compare.outcome import Comparison
from olmo_ext.compare.paper import paper_rows
from olmo_ext.compare.scaling import fit_scaling
from olmo_ext.compare.statistics import Difference, holm, paired_difference, seeds_needed
from olmo_ext.compare.verdict import notes, verdict
from olmo_ext.compare.views import (
    AXES,
    LearningRateRow,
    curves_by_seed,
    equal_budget,
    learning_rate_axis,
    learning_rate_rows,
    shape_names,
    speed_up,
)

SAME_SIZE = 0.05
"""Two groups this close in non-embedding parameters are of one size when a sweep has a baseline per size."""


def compare_sweep(sweep: RecordedSweep, *, label: str | None = None, expected: Path | None = None) -> Comparison:
    """Compare every group of a sweep with its baseline.

    :param label: validation set; the first one that all finished runs logged if left out.
    :param expected: an `expected.yaml` with a paper's figures; the one in the sweep's folder, if any, if left out.
    :raises InputError: for a validation set that no run has.
    """
    if expected is None and (sweep.path / "expected.yaml").is_file():
        expected = sweep.path / "expected.yaml"
    labels = list(dict.fromkeys(name for run in sweep.runs for name in run.validation_labels()))
    if label is not None and label not in labels:
        known = f"one of: {', '.join(labels)}" if labels else "the runs logged none"
        raise InputError(f"no run has a validation set {label!r}", where=str(sweep.path), right=known)
    if label is None:
        finished = [set(run.validation_labels()) for run in sweep.runs if run.finished]
        shared = [name for name in labels if all(name in sets for sets in finished)]
        label = next(iter(shared or labels), None)
    groups = [_group(name, runs, label) for name, runs in sweep.groups().items()]
    _choose_baselines(groups, sweep.baseline)
    by_name = {group.name: group for group in groups}
    for group in groups:
        if group.baseline is not None:
            _compare_group(group, by_name[group.baseline], label, labels)
    adjusted = holm([group.nats.p_value if group.nats is not None else None for group in groups])
    for group, value in zip(groups, adjusted, strict=True):
        group.adjusted_p = value
    downstream = downstream_scores(groups)
    rate_axis = learning_rate_axis({group.name: group.runs[0].axes for group in groups if group.runs})
    rates = _learning_rates(groups, sweep.baseline, rate_axis) if rate_axis else []
    # A fit over sizes is one of each size's best learning rate, not of a mean over all that were tried.
    best_rates = {row.best_group for row in rates}
    result = Comparison(
        sweep=sweep,
        label=label,
        labels=labels,
        groups=groups,
        learning_rate_axis=rate_axis,
        learning_rates=rates,
        scaling=fit_scaling(
            {
                group.name: (group.features.family, group.features.non_embedding, group.losses)
                for group in groups
                if group.features.non_embedding
                and group.losses
                and not group.blocking
                and (not rates or group.name in best_rates or rate_axis not in group.runs[0].axes)
            }
        ),
        paper=[] if expected is None else paper_rows(groups, expected, label=label, downstream=downstream),
        downstream=downstream,
        notes=[],
    )
    result.notes = notes(result)
    if expected is not None and not result.paper:
        result.notes.append(f"No figure of {expected} belongs to a group of this sweep.")
    result.verdict = verdict(result)
    return result


def _group(name: str, runs: list[Run], label: str | None) -> GroupResult:
    described = next((run for run in runs if run.shape), runs[0] if runs else None)
    group = GroupResult(name=name, runs=runs, features=features(described) if described else Features(), baseline=None)
    finished = group.finished
    if label is not None:
        for run in finished:
            value = run.last(validation_metric(label))
            problem = f"its last loss on {label} is {value}: no mean holds it"
            if value is not None and math.isfinite(value):
                group.losses[run.seed] = value
            elif value is not None and problem not in run.problems:
                run.problems.append(problem)
    group.unlike = comparable.unlike_runs(finished, label)
    group.blocking = list(group.unlike)
    if finished:
        group.tokens = max(comparable.final_tokens(run, label) for run in finished)
        group.total_flops = max(run.progress()[2] for run in finished)
    speeds = [speed for run in finished or runs if (speed := run.tokens_per_second()) is not None]
    group.tokens_per_second = float(np.median(speeds)) if speeds else None
    return group


def _close(left: float | None, right: float | None) -> bool:
    return bool(left and right and abs(left / right - 1) <= SAME_SIZE)


def _choose_baselines(groups: list[GroupResult], declared: str) -> None:
    """Compare with the declared baseline, or with its counterpart of the group's own size.

    A scaling sweep has one baseline per size: a group of the declared baseline's family whose size another family
    shares. Everything else is compared with the declared one, and the inequality is shown.
    """
    home = next(group for group in groups if group.name == declared)
    local = []
    for group in groups:
        size = group.features.non_embedding
        if group is home or group.features.family != home.features.family or _close(size, home.features.non_embedding):
            continue
        if any(
            other.features.family != home.features.family
            and _close(other.features.non_embedding, size)
            and not _close(other.features.non_embedding, home.features.non_embedding)
            for other in groups
        ):
            local.append(group)
    for group in groups:
        if group is home or group in local:
            continue
        size = group.features.non_embedding
        candidates = [other for other in local if size and _close(other.features.non_embedding, size)]
        if candidates and not _close(size, home.features.non_embedding):
            nearest = min(candidates, key=lambda other: abs((other.features.non_embedding or 0) - (size or 0)))
            group.baseline = nearest.name
        else:
            group.baseline = declared


def _change(left: float | None, right: float | None) -> float | None:
    return left / right - 1 if left and right else None


def _compare_group(group: GroupResult, baseline: GroupResult, label: str | None, labels: list[str]) -> None:
    group.size_change = _change(group.features.non_embedding, baseline.features.non_embedding)
    group.flops_change = _change(group.features.flops_per_token, baseline.features.flops_per_token)
    if not group.finished or not baseline.finished:
        return
    left = {run.seed: run for run in group.finished}
    right = {run.seed: run for run in baseline.finished}
    # Runs of unknown seed are no pair.
    pairs = [(left[seed], right[seed]) for seed in left if seed in right and seed is not None]
    checked = pairs or [(group.finished[0], baseline.finished[0])]
    own = [*group.unlike, *(f"in the baseline: {reason}" for reason in baseline.unlike)]
    group.blocking = own + _distinct(comparable.blocking_differences(a, b, label) for a, b in checked)
    alike = not any(comparable.unlike_runs(side.finished, None) for side in (group, baseline))
    group.same_training = (
        alike and bool(pairs) and not any(comparable.blocking_differences(a, b, None) for a, b in pairs)
    )
    group.remarks = _distinct(comparable.remarks(a, b, label) for a, b in checked)
    if not pairs:
        group.blocking.append("no seed that both have: unpaired runs are not compared")
    if label is None:
        group.blocking.append("no validation loss")
        return
    length_only = bool(group.blocking) and all(reason.startswith("tokens seen") for reason in group.blocking)
    if group.blocking and not length_only:
        return
    metric = validation_metric(label)
    curves, base_curves = curves_by_seed(group.finished, metric), curves_by_seed(baseline.finished, metric)
    device = comparable.same_device([*group.finished, *baseline.finished])
    group.views = {axis: equal_budget(axis, curves, base_curves, same_device=device) for axis in AXES}
    if group.blocking:
        return
    by_document = documents.paired_documents(pairs, label) if len(pairs) == 1 else None
    group.nats = paired_difference(group.losses, baseline.losses, documents=by_document)
    group.perplexity = _perplexity(group, baseline)
    if group.nats is not None:
        group.seeds_needed = seeds_needed(group.nats)
    group.speed_up = speed_up(curves, base_curves)
    for other in labels:
        if other == label:
            continue
        name = validation_metric(other)
        if any(reason for a, b in pairs for reason in comparable.blocking_differences(a, b, other)):
            continue
        values = [
            {run.seed: value for run in side if (value := run.last(name)) is not None}
            for side in (group.finished, baseline.finished)
        ]
        if values[0]:
            mean = sum(values[0].values()) / len(values[0])
            group.other_sets[other] = (mean, paired_difference(values[0], values[1]))


def _perplexity(group: GroupResult, baseline: GroupResult) -> Difference | None:
    """The difference in PPL; over documents the bounds follow from those in nats at the baseline's PPL."""
    left = {seed: math.exp(value) for seed, value in group.losses.items()}
    right = {seed: math.exp(value) for seed, value in baseline.losses.items()}
    difference = paired_difference(left, right)
    nats = group.nats
    if difference is None or nats is None or difference.known or nats.low is None or nats.high is None:
        return difference
    base = right[difference.seeds[0]]
    return dataclasses.replace(
        difference,
        low=base * math.expm1(nats.low),
        high=base * math.expm1(nats.high),
        p_value=nats.p_value,
        method=nats.method,
    )


def _distinct(lists: Iterable[list[str]]) -> list[str]:
    """What stands in any of the lists, once."""
    return list(dict.fromkeys(text for texts in lists for text in texts))


def _learning_rates(groups: list[GroupResult], baseline: str, axis: str) -> list[LearningRateRow]:
    axes: dict[str, Mapping[str, Any]] = {group.name: group.runs[0].axes for group in groups if group.runs}
    # Groups of another length or data cannot be the best of anything.
    losses = {group.name: group.losses for group in groups if not group.blocking}
    return learning_rate_rows(axis, axes, losses, baseline, shape_names(axes, axis))
