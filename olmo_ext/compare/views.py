"""The same comparison at equal tokens, equal FLOPs and equal time, and how much sooner the baseline's loss is reached.

Values between two evaluations are interpolated linearly in the logarithm of the axis; nothing is extrapolated. Except
at equal tokens of runs of equal length, one side is read in the middle of its learning-rate schedule, which counts
against it: the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from olmo_ext.compare.collect import Run, Series
from olmo_ext.compare.statistics import Difference, first_reach, interpolate, paired_difference

AXES = ("tokens", "flops", "seconds")
AXIS_NAMES = {"tokens": "tokens", "flops": "training FLOPs", "seconds": "training seconds"}


@dataclass(frozen=True, kw_only=True)
class View:
    """A group against its baseline at one point of one axis."""

    axis: str
    at: float | None
    """The largest budget that every paired run of both sides has reached."""

    difference: Difference | None
    """Nats; none where the curves do not overlap."""

    note: str = ""


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """Tokens of the baseline over tokens of the group for the same loss; above 1 the group is sooner.

    Where the group never reaches the baseline's final loss, the group's own final loss is the target: the ratio is then
    below 1 and says how much sooner the baseline got there.
    """

    ratio: float
    """Geometric mean over the paired seeds."""

    low: float | None
    high: float | None
    """95 % interval over the seeds, Student's t on the logarithms of their ratios; none for one seed."""

    seeds: int
    """Paired seeds whose ratio is known."""

    pairs: int
    """All paired seeds: the others' curves lie below the target from their first evaluation on, or never reach it."""

    reached: int
    """Seeds in which the group reaches the baseline's final loss."""


def curves_by_seed(runs: list[Run], metric: str) -> dict[int | None, Series]:
    """The validation curve of each finished run."""
    return {run.seed: run.series[metric] for run in runs if run.finished and metric in run.series}


def equal_budget(
    axis: str,
    treatment: Mapping[int | None, Series],
    baseline: Mapping[int | None, Series],
    *,
    same_device: bool = True,
) -> View:
    """Compare at the largest budget that both sides have reached.

    :param axis: one of `AXES`.
    :param same_device: whether all runs used the same kind of device; time is not compared across kinds.
    """
    seeds = [seed for seed in treatment if seed in baseline]
    if not seeds:
        return View(axis=axis, at=None, difference=None, note="no shared seed")
    if axis == "seconds" and not same_device:
        return View(axis=axis, at=None, difference=None, note="other devices: time is not compared")
    at = min(float(curve.axis(axis)[-1]) for seed in seeds for curve in (treatment[seed], baseline[seed]))
    if at <= 0:
        return View(axis=axis, at=None, difference=None, note=f"{AXIS_NAMES[axis]} not recorded")
    left = {seed: interpolate(treatment[seed].axis(axis), treatment[seed].value, at) for seed in seeds}
    right = {seed: interpolate(baseline[seed].axis(axis), baseline[seed].value, at) for seed in seeds}
    both = [seed for seed in seeds if left[seed] is not None and right[seed] is not None]
    difference = paired_difference({s: left[s] or 0.0 for s in both}, {s: right[s] or 0.0 for s in both})
    note = "" if len(both) == len(seeds) else f"{len(seeds) - len(both)} seeds have no value there"
    return View(axis=axis, at=at, difference=difference, note=note)


def speed_up(treatment: Mapping[int | None, Series], baseline: Mapping[int | None, Series]) -> SpeedUp | None:
    """How much sooner, in tokens, the group reaches the baseline's final loss; none where no seed can say."""
    logs, reached = [], 0
    paired = [(seed, curve) for seed, curve in treatment.items() if seed in baseline]
    for seed, curve in paired:
        other = baseline[seed]
        at = first_reach(curve.tokens, curve.value, float(other.value[-1]))
        if at is not None:
            reached += 1
            logs.append(math.log(float(other.tokens[-1]) / at))
            continue
        at = first_reach(other.tokens, other.value, float(curve.value[-1]))
        if at is not None:
            logs.append(math.log(at / float(curve.tokens[-1])))
    difference = paired_difference(dict(enumerate(logs)), dict.fromkeys(range(len(logs)), 0.0))
    if difference is None:
        return None
    return SpeedUp(
        ratio=math.exp(difference.mean),
        low=None if difference.low is None else math.exp(difference.low),
        high=None if difference.high is None else math.exp(difference.high),
        seeds=len(logs),
        pairs=len(paired),
        reached=reached,
    )


@dataclass(frozen=True, kw_only=True)
class LearningRateRow:
    """One shape over its learning rates."""

    shape: str
    losses: dict[float, float]
    """Learning rate -> mean final loss."""

    best: float
    best_group: str
    at_edge: bool
    """Whether the best is the smallest or largest tried, or the only one: the optimum may lie beyond."""

    best_difference: Difference | None = None
    """Best against the baseline's best, each at its own learning rate."""

    equal_differences: dict[float, Difference | None] | None = None
    """Learning rate -> difference at the same learning rate."""


def learning_rate_axis(axes: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The axis that is a learning rate, if any group's axes have one with several values."""
    names = {name for values in axes.values() for name in values if name.rpartition(".")[2] == "learning_rate"}
    for name in sorted(names):
        if len({values.get(name) for values in axes.values()}) > 1:
            return name
    return None


def shape_names(axes: Mapping[str, Mapping[str, Any]], rate_axis: str) -> dict[str, str]:
    """Group -> the name of its shape: its values but the learning rate, with their keys where two would read alike.

    :param axes: group -> the values by which the sweep made it.
    """
    parts = {name: [(k, str(v)) for k, v in values.items() if k != rate_axis] for name, values in axes.items()}
    short = {name: " · ".join(value for _, value in pairs) for name, pairs in parts.items()}
    if len(set(short.values())) < len({tuple(pairs) for pairs in parts.values()}):
        short = {name: " · ".join(f"{key}={value}" for key, value in pairs) for name, pairs in parts.items()}
    return {name: text or "all" for name, text in short.items()}


def learning_rate_rows(
    axis: str,
    axes: Mapping[str, Mapping[str, Any]],
    losses: Mapping[str, Mapping[int | None, float]],
    baseline: str,
    names: Mapping[str, str],
) -> list[LearningRateRow]:
    """Best-over-learning-rate and equal-learning-rate comparisons of every shape with the baseline's shape.

    :param axes: group -> its axes.
    :param losses: group -> seed -> final loss, for groups that may be compared.
    :param names: group -> the name of its shape, learning rate left out.
    """
    shapes: dict[str, dict[float, str]] = {}
    for group, values in axes.items():
        if axis in values and losses.get(group):
            shapes.setdefault(names[group], {})[float(values[axis])] = group

    def mean(group: str) -> float:
        return sum(losses[group].values()) / len(losses[group])

    home = names.get(baseline, baseline)
    rows = []
    for shape, by_rate in shapes.items():
        ordered = dict(sorted(by_rate.items()))
        best = min(ordered, key=lambda rate: mean(ordered[rate]))
        row: dict[str, Any] = {
            "shape": shape,
            "losses": {rate: mean(group) for rate, group in ordered.items()},
            "best": best,
            "best_group": ordered[best],
            "at_edge": best in (min(ordered), max(ordered)),
        }
        if shape != home and home in shapes:
            base_best = min(shapes[home], key=lambda rate: mean(shapes[home][rate]))
            row["best_difference"] = paired_difference(losses[ordered[best]], losses[shapes[home][base_best]])
            row["equal_differences"] = {
                rate: paired_difference(losses[group], losses[shapes[home][rate]])
                for rate, group in ordered.items()
                if rate in shapes[home]
            }
        rows.append(LearningRateRow(**row))
    return sorted(rows, key=lambda row: (row.shape != home, row.losses[row.best]))
