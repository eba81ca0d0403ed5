"""How large a difference is and how surely: paired by seed, or over evaluation documents for a single seed.

Intervals are two-sided 95 %. Over seeds: Student's t on the paired differences. Over documents: the percentile
bootstrap of the token-weighted mean difference, which covers the choice of documents and not the choice of seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

LEVEL = 0.95
POWER = 0.8
MINIMUM_SEEDS_FOR_PLANNING = 3
"""Below three seeds the observed deviation says next to nothing about the true one."""

METHOD_SEEDS = "t over paired seeds"
METHOD_DOCUMENTS = "bootstrap over evaluation documents"
METHOD_NONE = "unknown"
RESAMPLING_SEED = 6198
"""Fixed, so that the same runs give the same page."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A paired difference, treatment minus baseline."""

    mean: float
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    """Two-sided, of no difference; not corrected for several comparisons."""

    deviation: float | None = None
    """Standard deviation of the paired differences, one degree of freedom removed."""

    seeds: tuple[int | None, ...] = ()
    """The seeds that both sides have."""

    each: tuple[float, ...] = field(default=(), repr=False)
    """The difference of each seed."""

    method: str = METHOD_NONE

    @property
    def known(self) -> bool:
        return self.low is not None and self.high is not None

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def contains(self, value: float) -> bool:
        return self.low is not None and self.high is not None and self.low <= value <= self.high


def t_quantile(degrees: int) -> float:
    """The quantile of Student's t that bounds a two-sided interval at `LEVEL`."""
    # scipy.special and not scipy.stats: the same functions, a second less to import.
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + LEVEL / 2))


def two_sided_p(statistic: float, degrees: int) -> float:
    """P(|T| >= |statistic|) for Student's t."""
    from scipy.special import stdtr

    return float(2 * stdtr(degrees, -abs(statistic)))


def paired_difference(
    treatment: Mapping[int | None, float], baseline: Mapping[int | None, float], *, documents: Difference | None = None
) -> Difference | None:
    """Mean of the differences over the seeds that both have.

    :param treatment: seed -> value.
    :param documents: what is known from evaluation documents; used where there is one paired seed only.
    :return: none without a shared seed: unpaired runs differ in their initial weights as well.
    """
    seeds = tuple(seed for seed in treatment if seed in baseline)
    each = np.array([treatment[seed] - baseline[seed] for seed in seeds], dtype=np.float64)
    if not len(each) or not np.all(np.isfinite(each)):
        return None
    mean = float(each.mean())
    if len(each) == 1:
        if documents is None:
            return Difference(mean=mean, seeds=seeds, each=tuple(each))
        return Difference(
            mean=mean,
            low=documents.low,
            high=documents.high,
            p_value=documents.p_value,
            seeds=seeds,
            each=tuple(each),
            method=METHOD_DOCUMENTS,
        )
    deviation = float(each.std(ddof=1))
    error = deviation / math.sqrt(len(each))
    half = t_quantile(len(each) - 1) * error
    if error > 0:
        p_value = two_sided_p(mean / error, len(each) - 1)
    else:
        p_value = 1.0 if mean == 0 else 0.0
    return Difference(
        mean=mean,
        low=mean - half,
        high=mean + half,
        p_value=p_value,
        deviation=deviation,
        seeds=seeds,
        each=tuple(each),
        method=METHOD_SEEDS,
    )


def seeds_needed(difference: Difference, *, limit: int = 100_000) -> int | None:
    """Paired seeds that tell the observed difference from zero: two-sided 5 %, power 80 %, observed deviation.

    :return: none below three seeds, for a difference of zero, or beyond `limit`.
    """
    if len(difference.each) < MINIMUM_SEEDS_FOR_PLANNING or difference.deviation is None or difference.mean == 0:
        return None
    if difference.deviation == 0:
        return 2
    effect = abs(difference.mean) / difference.deviation
    low, high = 2, 2
    while _power(effect, high) < POWER:
        low, high = high, high * 2
        if high > limit:
            return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _power(effect, middle) >= POWER else (middle + 1, high)
    return low


def _power(effect: float, count: int) -> float:
    """Power of the two-sided paired t-test; `effect` in standard deviations of the differences."""
    from scipy.special import nctdtr, stdtrit

    degrees, shift = count - 1, effect * math.sqrt(count)
    if shift > 30:
        return 1.0
    critical = float(stdtrit(degrees, 0.975))
    return float(1 - nctdtr(degrees, shift, critical) + nctdtr(degrees, shift, -critical))


def document_difference(
    treatment: np.ndarray, baseline: np.ndarray, weights: np.ndarray | None = None, *, resamples: int = 4000
) -> Difference:
    """Percentile bootstrap over the documents that both models were scored on.

    :param treatment: mean nats per token of each document, [documents].
    :param baseline: the same of the same documents in the same order, [documents].
    :param weights: tokens of each document, [documents]; equal weights if left out.
    :return: nats per token; p is twice the share of resamples on the other side of zero, each counted with one more.
    """
    difference = np.asarray(treatment, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    tokens = np.ones_like(difference) if weights is None else np.asarray(weights, dtype=np.float64)
    count = len(difference)
    generator = np.random.default_rng(RESAMPLING_SEED)
    means = np.empty(resamples)
    rows = max(1, min(resamples, 4_000_000 // max(count, 1)))
    for start in range(0, resamples, rows):
        picks = generator.integers(0, count, size=(min(rows, resamples - start), count))
        chosen = tokens[picks]
        means[start : start + len(picks)] = (difference[picks] * chosen).sum(1) / chosen.sum(1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    tail = (1 + min(int((means <= 0).sum()), int((means >= 0).sum()))) / (resamples + 1)
    return Difference(
        mean=float((difference * tokens).sum() / tokens.sum()),
        low=float(low),
        high=float(high),
        p_value=min(1.0, 2 * tail),
        method=METHOD_DOCUMENTS,
    )


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction (Scandinavian Journal of Statistics 6, 1979) over the comparisons with a p-value; the
    others stay none."""
    known = [p for p in p_values if p is not None]
    if len(known) < 2:
        return list(p_values)
    from statsmodels.stats.multitest import multipletests

    corrected = iter(multipletests(known, method="holm")[1])
    return [None if p is None else float(next(corrected)) for p in p_values]


def interpolate(budget: np.ndarray, value: np.ndarray, at: float) -> float | None:
    """A curve at one point of its axis, linear in the logarithm of the axis; none outside its ends.

    :param budget: tokens, FLOPs or seconds, not falling.
    """
    good = (budget > 0) & np.isfinite(value)
    budget, value = budget[good], value[good]
    if not len(budget) or at < budget[0] or at > budget[-1]:
        return None
    return float(np.interp(math.log(at), np.log(budget), value))


def first_reach(budget: np.ndarray, value: np.ndarray, target: float) -> float | None:
    """Where a falling curve first reaches `target`, with the interpolation of `interpolate`; none if it never does,
    or if it is below from its first point on (the crossing was not seen)."""
    good = (budget > 0) & np.isfinite(value)
    budget, value = budget[good], value[good]
    below = np.nonzero(value <= target)[0]
    if not len(below) or below[0] == 0:
        return None if not len(below) or value[0] < target else float(budget[0])
    index = int(below[0])
    upper, lower = value[index - 1], value[index]
    share = (upper - target) / (upper - lower)
    left, right = math.log(budget[index - 1]), math.log(budget[index])
    return math.exp(left + share * (right - left))
