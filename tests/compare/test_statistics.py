"""Differences, intervals and corrections equal those of scipy and statsmodels; interpolation never leaves the data."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from olmo_ext.compare.statistics import (
    METHOD_DOCUMENTS,
    METHOD_NONE,
    METHOD_SEEDS,
    Difference,
    document_difference,
    first_reach,
    holm,
    interpolate,
    paired_difference,
    seeds_needed,
)


def _pairs(count: int, effect: float, deviation: float) -> tuple[dict, dict]:
    generator = np.random.default_rng(count)
    base = {seed: 3.0 + generator.normal(0, 0.05) for seed in range(count)}
    return {seed: value + effect + generator.normal(0, deviation) for seed, value in base.items()}, base


@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_interval_and_p_value_are_those_of_the_paired_t_test(count: int) -> None:
    treatment, baseline = _pairs(count, -0.02, 0.01)
    ours = paired_difference(treatment, baseline)
    assert ours is not None and ours.method == METHOD_SEEDS
    reference = stats.ttest_rel(list(treatment.values()), list(baseline.values()))
    interval = reference.confidence_interval(0.95)
    assert ours.p_value == pytest.approx(reference.pvalue, rel=1e-9)
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_pairing_uses_shared_seeds_only_and_none_without_any() -> None:
    found = paired_difference({1: 2.9, 2: 2.8, 9: 0.0}, {1: 3.0, 2: 3.0, 3: 100.0})
    assert found is not None and found.seeds == (1, 2)
    assert found.mean == pytest.approx(-0.15)
    assert paired_difference({1: 2.0}, {2: 2.0}) is None


def test_a_single_seed_says_unknown_unless_documents_measured_it() -> None:
    alone = paired_difference({1: 2.9}, {1: 3.0})
    assert alone is not None and alone.method == METHOD_NONE and not alone.known and not alone.excludes_zero
    documents = Difference(mean=-0.1, low=-0.12, high=-0.08, p_value=0.001, method=METHOD_DOCUMENTS)
    measured = paired_difference({1: 2.9}, {1: 3.0}, documents=documents)
    assert measured is not None and measured.method == METHOD_DOCUMENTS and measured.excludes_zero


def test_documents_are_not_used_where_seeds_say_more() -> None:
    documents = Difference(mean=-0.1, low=-0.12, high=-0.08, method=METHOD_DOCUMENTS)
    found = paired_difference({1: 2.9, 2: 2.95}, {1: 3.0, 2: 3.0}, documents=documents)
    assert found is not None and found.method == METHOD_SEEDS


@pytest.mark.parametrize("effect", [0.3, 0.8, 1.5, 3.0])
def test_seeds_needed_has_the_power_that_statsmodels_computes(effect: float) -> None:
    from statsmodels.stats.power import TTestPower

    difference = Difference(mean=-effect * 0.01, deviation=0.01, each=(0.0,) * 3, seeds=(1, 2, 3))
    needed = seeds_needed(difference)
    assert needed is not None
    power = TTestPower().power
    assert power(effect, needed, 0.05, alternative="two-sided") >= 0.8
    assert needed == 2 or power(effect, needed - 1, 0.05, alternative="two-sided") < 0.8


def test_seeds_needed_is_unknown_below_three_seeds_and_for_no_difference() -> None:
    assert seeds_needed(Difference(mean=-0.1, deviation=0.01, each=(0.1, 0.1))) is None
    assert seeds_needed(Difference(mean=0.0, deviation=0.01, each=(0.1,) * 3)) is None
    assert seeds_needed(Difference(mean=1e-9, deviation=1.0, each=(0.1,) * 3)) is None


def test_holm_keeps_unknowns_and_equals_the_definition() -> None:
    raw = [0.01, None, 0.04, 0.03]
    # Sorted: 0.01 x 3, 0.03 x 2, 0.04 x 1, each at least the one before.
    assert holm(raw) == [pytest.approx(0.03), None, pytest.approx(0.06), pytest.approx(0.06)]
    assert holm([0.03, None]) == [0.03, None]


def test_bootstrap_interval_agrees_with_the_normal_one_for_many_documents() -> None:
    generator = np.random.default_rng(3)
    base = generator.normal(3, 0.5, 2000)
    change = generator.normal(-0.02, 0.1, 2000)
    found = document_difference(base + change, base)
    error = change.std(ddof=1) / np.sqrt(2000)
    assert found.low == pytest.approx(change.mean() - 1.96 * error, abs=0.3 * error)
    assert found.high == pytest.approx(change.mean() + 1.96 * error, abs=0.3 * error)
    assert found.excludes_zero and found.p_value is not None and found.p_value < 0.01


def test_documents_weigh_by_their_tokens() -> None:
    found = document_difference(np.array([1.0, 3.0]), np.array([1.0, 2.0]), np.array([300.0, 100.0]))
    assert found.mean == pytest.approx(0.25)


def test_the_weighted_bootstrap_interval_is_that_of_scipy() -> None:
    generator = np.random.default_rng(5)
    base, tokens = generator.normal(3, 0.5, 300), generator.integers(10, 2000, 300).astype(float)
    # Long documents gain more, so that weights move the mean and the interval.
    change = generator.normal(0, 0.1, 300) - tokens / 20_000
    found = document_difference(base + change, base, tokens)
    reference = stats.bootstrap(
        (change, tokens),
        lambda d, w, axis=-1: (d * w).sum(axis) / w.sum(axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=4000,
        rng=np.random.default_rng(1),
    )
    half = (reference.confidence_interval.high - reference.confidence_interval.low) / 2
    bounds = (reference.confidence_interval.low, reference.confidence_interval.high)
    assert (found.low, found.high) == pytest.approx(bounds, abs=0.15 * half)
    assert found.mean == pytest.approx(np.average(change, weights=tokens))
    assert abs(found.mean - change.mean()) > half, "unweighted, the test would not pass"


def test_interpolation_is_exact_at_points_logarithmic_between_and_none_outside() -> None:
    x, y = np.array([0.0, 10.0, 1000.0]), np.array([9.0, 4.0, 2.0])
    assert interpolate(x, y, 10) == pytest.approx(4.0) and interpolate(x, y, 1000) == pytest.approx(2.0)
    assert interpolate(x, y, 100) == pytest.approx(3.0)
    assert interpolate(x, y, 1001) is None and interpolate(x, y, 9.9) is None
    assert interpolate(np.zeros(0), np.zeros(0), 1) is None


def test_first_reach_inverts_interpolation_and_says_none_where_the_crossing_was_not_seen() -> None:
    x, y = np.array([10.0, 100.0, 1000.0]), np.array([4.0, 3.0, 2.0])
    at = first_reach(x, y, 2.5)
    assert at is not None and interpolate(x, y, at) == pytest.approx(2.5)
    assert first_reach(x, y, 1.9) is None
    assert first_reach(x, y, 4.5) is None, "below from the first point on: how much earlier is unknown"
