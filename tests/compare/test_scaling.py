"""Fits give back the law that made the data, and say so where the data cannot tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from olmo_ext.compare.scaling import fit_scaling

SIZES = (1e6, 4e6, 16e6, 64e6, 256e6)


def _family(
    name: str, law: Callable[[float], float], noise: float, *, seeds: int = 3, sizes: Sequence[float] = SIZES
) -> dict[str, tuple[str, int, dict[int | None, float]]]:
    generator = np.random.default_rng(len(name))
    return {
        f"{name}-{size:g}": (name, int(size), {s: law(size) + generator.normal(0, noise) for s in range(seeds)})
        for size in sizes
    }


def test_an_offset_power_law_is_recovered_within_its_own_interval() -> None:
    result = fit_scaling(_family("conventional", lambda n: 1.8 + 30 * n**-0.25, 0.002))
    assert result is not None
    (fit,) = result.fits
    assert fit.form == "E + A N^-alpha"
    assert fit.exponent_interval is not None
    assert fit.exponent_interval[0] < 0.25 < fit.exponent_interval[1]
    assert fit.predict(30e6) == pytest.approx(1.8 + 30 * 30e6**-0.25, abs=0.01)
    assert all(low <= middle <= high for low, middle, high in zip(fit.low, fit.fitted, fit.high, strict=True))


def test_three_sizes_give_a_plain_power_law_and_fewer_none() -> None:
    result = fit_scaling(
        _family("a", lambda n: 12 * n**-0.1, 0.001, sizes=SIZES[:3]) | _family("b", lambda n: 3.0, 0.1, sizes=SIZES[:2])
    )
    assert result is not None
    (fit,) = result.fits
    assert (fit.form, fit.offset) == ("A N^-alpha", 0.0)
    assert fit.exponent == pytest.approx(0.1, abs=0.002)
    assert result.skipped == {"b": "2 sizes, 3 needed"}
    assert fit_scaling(_family("b", lambda n: 3.0, 0.1, sizes=SIZES[:2])) is None


def test_sizes_that_hardly_differ_are_no_scaling() -> None:
    assert fit_scaling(_family("a", lambda n: 3.0, 0.01, sizes=(1e6, 1.3e6, 1.7e6))) is None


def test_a_crossing_is_found_where_the_laws_cross() -> None:
    groups = _family("left", lambda n: 12 * n**-0.10, 0.001) | _family("right", lambda n: 15.9 * n**-0.118, 0.001)
    exact = (15.9 / 12) ** (1 / 0.018)
    result = fit_scaling(groups)
    assert result is not None
    (crossing,) = result.crossings
    assert crossing.text == "they cross" and crossing.low is not None and crossing.high is not None
    assert crossing.low < exact < crossing.high


def test_a_family_that_is_better_throughout_does_not_cross_and_noise_cannot_say() -> None:
    apart = fit_scaling(_family("low", lambda n: 11 * n**-0.1, 0.001) | _family("high", lambda n: 12 * n**-0.1, 0.001))
    assert apart is not None and "low is lower throughout" in apart.crossings[0].text
    mixed = fit_scaling(_family("one", lambda n: 12 * n**-0.1, 0.05) | _family("another", lambda n: 12 * n**-0.1, 0.05))
    assert mixed is not None and "cannot say" in mixed.crossings[0].text


def test_the_noise_of_two_families_does_not_cancel_in_their_crossing() -> None:
    """At any size the variance of the difference of two fits is the sum of both variances."""
    result = fit_scaling(
        _family("left", lambda n: 12 * n**-0.10, 0.02) | _family("right", lambda n: 15.9 * n**-0.118, 0.02)
    )
    assert result is not None
    left, right = (fit.draws[:, 0] + np.exp(fit.draws[:, 1]) * 16e6 ** -fit.draws[:, 2] for fit in result.fits)
    assert np.var(left - right) == pytest.approx(np.var(left) + np.var(right), rel=0.25)
    assert abs(np.corrcoef(left, right)[0, 1]) < 0.2
