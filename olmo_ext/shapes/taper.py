"""Widths over depth: pure functions from (layers, base width, rule) to one width per layer.

The built-in schedules are those of Tapered Language Models (arXiv 2606.23670): multiples of the base width that fall
from `start` at the first layer to `end` at the last, with x = l / (L - 1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from olmo_ext.shapes.registry import TAPER_SCHEDULES, TaperSchedule, register_taper

DEFAULT_MULTIPLE = 16
SNAP = 1e-9
"""Multiples closer than this to a half or a whole number are taken as it, so that 0.1 + 0.2 does not decide a width."""


@dataclass(frozen=True, kw_only=True)
class Taper:
    """A rule for the width of each layer; exactly one of schedule, groups and widths is set."""

    schedule: str | None = None
    start: float = 1.0
    end: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keys of the schedule itself; those that are left out have its defaults."""

    groups: tuple[float, ...] = ()
    widths: tuple[int, ...] = ()
    multiple_of: int = DEFAULT_MULTIPLE


@dataclass(frozen=True, kw_only=True)
class Tapered:
    """Widths per layer, and how far their mean is from the base."""

    widths: tuple[int, ...]
    base: int
    notes: tuple[str, ...] = ()

    @property
    def mean(self) -> float:
        return sum(self.widths) / len(self.widths)

    @property
    def deviation(self) -> float:
        """(mean - base) / base."""
        return self.mean / self.base - 1.0


@register_taper
class Linear(TaperSchedule):
    name = "linear"

    def remaining(self, x: float, options: Mapping[str, Any]) -> float:
        return 1.0 - x


@register_taper
class Cosine(TaperSchedule):
    name = "cosine"

    def remaining(self, x: float, options: Mapping[str, Any]) -> float:
        return (1.0 + math.cos(math.pi * x)) / 2


@register_taper
class Sigmoid(TaperSchedule):
    """Rescaled so that its first and last values are `start` and `end`."""

    name = "sigmoid"
    options = {"steepness": 10.0}  # The paper does not give it; this is our choice.

    def check(self, options: Mapping[str, Any]) -> str | None:
        steepness = options["steepness"]
        return None if steepness > 0 else f"steepness {steepness:g} must be positive"

    def remaining(self, x: float, options: Mapping[str, Any]) -> float:
        steepness = options["steepness"]
        low, high = _logistic(-steepness / 2), _logistic(steepness / 2)
        return (_logistic(steepness * (0.5 - x)) - low) / (high - low)


def _logistic(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def schedule_multiples(
    *, schedule: str, num_layers: int, start: float, end: float, options: Mapping[str, Any] | None = None
) -> list[float]:
    """Exact multiples of the base width, one per layer.

    A single layer gets the mean of start and end, which is what keeps the mean width.

    :raises InputError: for an unknown schedule.
    :raises ValueError: for a schedule that does not fall from 1 to 0.
    """
    kind = TAPER_SCHEDULES.get(schedule)
    if num_layers == 1:
        return [(start + end) / 2]
    given = {**kind.options, **(options or {})}
    remaining = [kind.remaining(layer / (num_layers - 1), given) for layer in range(num_layers)]
    falls = all(after <= before + SNAP for before, after in zip(remaining, remaining[1:], strict=False))
    if not (falls and abs(remaining[0] - 1) < SNAP and abs(remaining[-1]) < SNAP):
        raise ValueError(
            f"schedule {schedule!r} goes from {remaining[0]:.6g} to {remaining[-1]:.6g}"
            f"{'' if falls else ' and rises between'}; it has to fall from 1 to 0"
        )
    return [end + (start - end) * share for share in remaining]


def group_sizes(num_layers: int, num_groups: int) -> list[int]:
    """Layers per group, as equal and as symmetric as they can be: 32 in three are 11, 10, 11."""
    if not 1 <= num_groups <= num_layers:
        raise ValueError(f"{num_groups} groups for {num_layers} layers")
    edges = [(2 * i * num_layers + num_groups) // (2 * num_groups) for i in range(num_groups + 1)]
    return [after - before for before, after in zip(edges, edges[1:], strict=False)]


def group_multiples(num_layers: int, groups: Sequence[float]) -> tuple[list[float], list[str]]:
    """Multiples per layer for groups of consecutive layers, and what had to be changed.

    Multiples that average 1 keep the mean width although the groups differ in size: the groups of the rarer size take
    the difference (0.75, 1.5, 0.75 over 11, 10, 11 layers becomes 0.75, 1.55, 0.75). Multiples whose mean over the
    layers is 1 already, or that do not average 1, are used as written.
    """
    sizes = group_sizes(num_layers, len(groups))
    used = list(groups)
    notes: list[str] = []
    weighted = sum(s * g for s, g in zip(sizes, groups, strict=True)) / num_layers
    if abs(weighted - 1) > SNAP and abs(sum(groups) / len(groups) - 1) < SNAP:
        frequency = Counter(sizes)
        rare = min(frequency, key=lambda size: (frequency[size], size))
        taking = [i for i, size in enumerate(sizes) if size == rare]
        change = (1 - weighted) * num_layers / (rare * len(taking))
        for i in taking:
            used[i] = groups[i] + change
        notes.append(
            f"groups of {'/'.join(map(str, sizes))} layers: multiples {_listed(groups)} became {_listed(used)} "
            "so that the mean width stays the base"
        )
    return [multiple for size, multiple in zip(sizes, used, strict=True) for _ in range(size)], notes


def _listed(values: Sequence[float]) -> str:
    return "/".join(f"{value:.6g}" for value in values)


def round_half_even(value: float) -> int:
    """The nearest integer, halves to the even one; values within 1e-9 of a half count as it."""
    nearest_half = round(value * 2) / 2
    return round(nearest_half if abs(value - nearest_half) < SNAP else value)


def apportion(exact: Sequence[float], *, pin_ends: bool, monotone: bool) -> list[int]:
    """Whole numbers near `exact` whose sum is as near to the sum of `exact` as can be.

    Starts from the nearest whole numbers and moves single units where that costs the least squared error, the earliest
    layer first among equals, never across a neighbour when `monotone`, never the first and last when `pin_ends`.
    """
    result = [round_half_even(value) for value in exact]
    target = round_half_even(math.fsum(exact))
    low, high = min(result), max(result)
    falling = exact[0] >= exact[-1]
    free = range(1, len(exact) - 1) if pin_ends else range(len(exact))

    def allowed(index: int, step: int) -> bool:
        value = result[index] + step
        if value < 1:
            return False
        if not monotone:
            return True
        before = result[index - 1] if index else (high if falling else low)
        after = result[index + 1] if index + 1 < len(result) else (low if falling else high)
        return before >= value >= after if falling else before <= value <= after

    while (missing := target - sum(result)) != 0:
        step = 1 if missing > 0 else -1
        candidates = [i for i in free if allowed(i, step)]
        if not candidates:
            break
        cost = {i: round((result[i] + step - exact[i]) ** 2 - (result[i] - exact[i]) ** 2, 9) for i in candidates}
        result[min(candidates, key=lambda i: (cost[i], i))] += step
    return result


def taper_widths(*, base: int, num_layers: int, taper: Taper) -> Tapered:
    """The width of every layer.

    The mean is as near to the exact rule's mean (the base, for start + end = 2) as `multiple_of` allows, the first and
    last layers of a schedule are pinned to their own nearest multiple, and the widths keep the schedule's direction.

    :raises ValueError: for a rule that does not fit the layers, or a width that would be 0.
    """
    if taper.widths:
        if len(taper.widths) != num_layers:
            raise ValueError(f"{len(taper.widths)} widths for {num_layers} layers")
        bad = [width for width in taper.widths if width % taper.multiple_of or width < 1]
        if bad:
            raise ValueError(f"width {bad[0]} is no positive multiple of {taper.multiple_of}")
        return Tapered(widths=tuple(taper.widths), base=base)
    notes: list[str] = []
    if taper.groups:
        multiples, notes = group_multiples(num_layers, taper.groups)
    else:
        multiples = schedule_multiples(
            schedule=taper.schedule or "linear",
            num_layers=num_layers,
            start=taper.start,
            end=taper.end,
            options=taper.options,
        )
    exact = [multiple * base / taper.multiple_of for multiple in multiples]
    scheduled = not taper.groups
    units = apportion(exact, pin_ends=scheduled, monotone=scheduled)
    if min(units) < 1:
        raise ValueError(
            f"layer {units.index(min(units))} would be {min(exact) * taper.multiple_of:.4g} wide, "
            f"which rounds to no multiple of {taper.multiple_of}"
        )
    return Tapered(widths=tuple(unit * taper.multiple_of for unit in units), base=base, notes=tuple(notes))
