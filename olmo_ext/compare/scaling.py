"""L(N) per family, with its uncertainty, and where two families cross.

Four sizes or more: L = E + A N^-alpha. Three sizes: L = A N^-alpha, since three points cannot tell an offset from a
curvature. N is non-embedding parameters. The uncertainty is a bootstrap that draws, at every size, as many losses as it
has seeds around the fit with the pooled deviation between seeds; with single seeds the deviation is that of the
residuals (sizes minus parameters degrees of freedom), which few sizes estimate badly. Families are drawn independently:
where their runs are paired by seed and errors go together, a crossing is better known than its interval says.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from olmo_ext.compare.statistics import RESAMPLING_SEED

MINIMUM_SIZES = 3
MINIMUM_SPAN = 2.5
"""Largest over smallest size; a sweep over widths at about one size says nothing about scaling."""

RESAMPLES = 200


@dataclass(frozen=True, kw_only=True)
class FamilyFit:
    """A fitted family."""

    family: str
    sizes: tuple[int, ...]
    losses: tuple[float, ...]
    """Mean over seeds at each size."""

    groups: tuple[str, ...]
    form: str
    offset: float
    factor: float
    exponent: float
    exponent_interval: tuple[float, float] | None
    draws: np.ndarray = field(repr=False)
    """Resampled (offset, log factor, exponent), [draws, 3]."""

    grid: tuple[float, ...] = ()
    fitted: tuple[float, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    """The fit and its 95 % band on `grid`, within the sizes seen."""

    def predict(self, size: float) -> float:
        return self.offset + self.factor * size**-self.exponent


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Whether two fits cross within the sizes that both have."""

    left: str
    right: str
    size: float | None
    low: float | None = None
    high: float | None = None
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class ScalingResult:
    fits: list[FamilyFit]
    crossings: list[Crossing]
    skipped: dict[str, str]
    """Family -> why it has no fit."""


def fit_scaling(groups: Mapping[str, tuple[str, int, Mapping[int | None, float]]]) -> ScalingResult | None:
    """Fit every family with at least three sizes; none where no family has them.

    :param groups: group -> family, non-embedding parameters, seed -> final loss.
    """
    families: dict[str, list[tuple[int, str, list[float]]]] = {}
    for group, (family, size, losses) in groups.items():
        families.setdefault(family, []).append((size, group, list(losses.values())))
    fits, skipped = [], {}
    for family, entries in families.items():
        entries.sort()
        sizes = [size for size, _, _ in entries]
        distinct = 1 + sum(1 for a, b in zip(sizes, sizes[1:], strict=False) if b > 1.05 * a)
        if distinct < MINIMUM_SIZES:
            skipped[family] = f"{distinct} size{'s' if distinct > 1 else ''}, {MINIMUM_SIZES} needed"
            continue
        if sizes[-1] < MINIMUM_SPAN * sizes[0]:
            skipped[family] = f"its sizes span a factor of {sizes[-1] / sizes[0]:.1f}, {MINIMUM_SPAN} needed"
            continue
        fits.append(_fit(family, entries, distinct))
    if not fits:
        return None
    crossings = [_crossing(a, b) for index, a in enumerate(fits) for b in fits[index + 1 :]]
    return ScalingResult(fits=fits, crossings=crossings, skipped=skipped)


def _solve(sizes: np.ndarray, losses: np.ndarray, with_offset: bool) -> tuple[float, float, float]:
    """Least squares of log(L - E) on log N; E by a search over a grid that is refined, 0 without an offset."""
    log_n = np.log(sizes)

    def line(offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        logs = np.log(losses[None, :] - offsets[:, None])
        centred = log_n - log_n.mean()
        slope = (logs * centred).sum(1) / (centred**2).sum()
        intercept = logs.mean(1) - slope * log_n.mean()
        predicted = offsets[:, None] + np.exp(intercept[:, None] + slope[:, None] * log_n[None, :])
        return ((predicted - losses) ** 2).sum(1), intercept, slope

    low, high = 0.0, float(losses.min()) * (1 - 1e-4)
    offsets = np.zeros(1)
    for _ in range(4 if with_offset else 1):
        if with_offset:
            offsets = np.linspace(low, high, 60)
        error, intercept, slope = line(offsets)
        best = int(np.argmin(error))
        if with_offset:
            step = offsets[1] - offsets[0]
            low, high = max(0.0, offsets[best] - step), min(float(losses.min()) * (1 - 1e-6), offsets[best] + step)
    return float(offsets[best]), float(intercept[best]), float(-slope[best])


def _fit(family: str, entries: list[tuple[int, str, list[float]]], distinct: int) -> FamilyFit:
    sizes = np.array([size for size, _, _ in entries], dtype=np.float64)
    means = np.array([np.mean(losses) for _, _, losses in entries])
    counts = np.array([len(losses) for _, _, losses in entries])
    with_offset = distinct > MINIMUM_SIZES
    offset, log_factor, exponent = _solve(sizes, means, with_offset)
    fitted = offset + np.exp(log_factor) * sizes**-exponent
    freedom = int((counts - 1).sum())
    if freedom > 0:
        variance = sum(((np.array(losses) - np.mean(losses)) ** 2).sum() for _, _, losses in entries) / freedom
    else:
        remaining = len(sizes) - (3 if with_offset else 2)
        variance = ((means - fitted) ** 2).sum() / remaining if remaining > 0 else math.nan
    draws = np.empty((0, 3))
    if math.isfinite(variance) and variance > 0:
        # The same page at every build, and not the same noise in every family: it would cancel in their difference.
        generator = np.random.default_rng([RESAMPLING_SEED, zlib.crc32(family.encode())])
        noise = generator.standard_normal((RESAMPLES, len(sizes))) * np.sqrt(variance / counts)
        draws = np.array([_solve(sizes, np.maximum(fitted + row, 1e-6), with_offset) for row in noise])
    grid = np.geomspace(sizes[0], sizes[-1], 40)
    low = high = np.empty(0)
    interval = None
    if len(draws):
        low, high = np.quantile(_curve(draws, grid), [0.025, 0.975], axis=0)
        bounds = np.quantile(draws[:, 2], [0.025, 0.975])
        interval = (float(bounds[0]), float(bounds[1]))
    return FamilyFit(
        family=family,
        sizes=tuple(int(size) for size in sizes),
        losses=tuple(float(loss) for loss in means),
        groups=tuple(group for _, group, _ in entries),
        form="E + A N^-alpha" if with_offset else "A N^-alpha",
        offset=offset,
        factor=math.exp(log_factor),
        exponent=exponent,
        exponent_interval=interval,
        draws=draws,
        grid=tuple(grid),
        fitted=tuple(offset + math.exp(log_factor) * grid**-exponent),
        low=tuple(low),
        high=tuple(high),
    )


def _curve(parameters: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Losses in nats, [fits, points], of rows (offset, log factor, exponent) at the sizes of `grid`."""
    return parameters[:, :1] + np.exp(parameters[:, 1:2]) * grid[None, :] ** -parameters[:, 2:]


def _first_crossings(difference: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Size of the first sign change of each row, nan where there is none."""
    change = np.sign(difference[:, :-1]) * np.sign(difference[:, 1:]) < 0
    crossings = np.full(len(difference), np.nan)
    rows = np.nonzero(change.any(1))[0]
    index = change[rows].argmax(1)
    left, right = difference[rows, index], difference[rows, index + 1]
    share = left / (left - right)
    crossings[rows] = np.exp(np.log(grid[index]) + share * (np.log(grid[index + 1]) - np.log(grid[index])))
    return crossings


def _crossing(left: FamilyFit, right: FamilyFit) -> Crossing:
    low, high = max(left.sizes[0], right.sizes[0]), min(left.sizes[-1], right.sizes[-1])
    if low >= high:
        return Crossing(left=left.family, right=right.family, size=None, text="the sizes of the two do not overlap")
    grid = np.geomspace(low, high, 200)
    point = np.array([[fit.offset, math.log(fit.factor), fit.exponent] for fit in (left, right)])
    values = _curve(point, grid)
    at = _first_crossings(values[:1] - values[1:], grid)[0]
    size = None if math.isnan(at) else float(at)
    count = min(len(left.draws), len(right.draws))
    if not count:
        return Crossing(
            left=left.family, right=right.family, size=size, text="the data cannot say: no measure of their noise"
        )
    difference = _curve(left.draws[:count], grid) - _curve(right.draws[:count], grid)
    crossings = _first_crossings(difference, grid)
    share = float(np.mean(np.isfinite(crossings)))
    if share >= 0.95 and size is not None:
        bounds = np.nanquantile(crossings, [0.025, 0.975])
        return Crossing(
            left=left.family,
            right=right.family,
            size=size,
            low=float(bounds[0]),
            high=float(bounds[1]),
            text="they cross",
        )
    if share <= 0.05:
        better = left.family if difference.mean() < 0 else right.family
        return Crossing(
            left=left.family,
            right=right.family,
            size=None,
            text=f"they do not cross within the sizes seen: {better} is lower throughout",
        )
    return Crossing(
        left=left.family,
        right=right.family,
        size=size,
        text=f"the data cannot say: {share:.0%} of the resampled fits cross within the sizes seen",
    )
