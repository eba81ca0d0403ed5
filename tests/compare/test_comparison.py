"""A sweep with known effects gives them back, with the words that they deserve."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from olmo_ext.base.errors import InputError
from olmo_ext.compare.collect import read_sweep
from olmo_ext.compare.comparison import compare_sweep
from olmo_ext.compare.report.page import render
from olmo_ext.compare.statistics import METHOD_DOCUMENTS, METHOD_NONE
from olmo_ext.compare.table import print_comparison
from olmo_ext.compare.views import shape_names

from .known import BASE, SHORT, compared, documents, shifted
from .synthetic import BATCH_TOKENS, make_shape, make_sweep


def test_a_known_effect_comes_back_with_the_paired_interval_in_nats_and_ppl(tmp_path: Path) -> None:
    treatment = shifted(-0.030, -0.028, -0.033)
    result = compared(tmp_path / "s", {"base": {"final": BASE}, "wide": {"final": treatment}})
    group = result.group("wide")
    for found, left, right in (
        (group.nats, treatment, BASE),
        (group.perplexity, list(map(math.exp, treatment)), list(map(math.exp, BASE))),
    ):
        assert found is not None
        reference = stats.ttest_rel(left, right)
        interval = reference.confidence_interval(0.95)
        assert found.mean == pytest.approx(np.mean(left) - np.mean(right))
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-6)
    assert result.group("base").nats is None and result.group("base").baseline is None
    assert group.ppl == pytest.approx(np.mean(np.exp(treatment)))
    assert result.verdict.startswith("wide is better than the baseline base: −0.0303 nats")


@pytest.mark.parametrize(("steps", "words"), [(6, "at most 0.047 tokens"), (127, "at most 0.99 tokens"), (129, None)])
def test_runs_of_less_than_a_token_a_parameter_say_nothing_about_trained_models(
    tmp_path: Path, steps: int, words: str | None
) -> None:
    """At 8,192 tokens a step and 1,048,576 parameters, 128 steps are one token a parameter."""
    groups = {
        "base": {"final": BASE, "steps": steps},
        "wide": {"final": shifted(-0.03, -0.028, -0.033), "steps": steps},
    }
    result = compared(tmp_path / "s", groups)
    caution = f"The runs are too short to say anything about trained models: {words} a non-embedding parameter."
    assert result.verdict.startswith("wide is better")
    assert result.verdict.endswith(caution) if words else "too short" not in result.verdict
    # Terminal and page show the verdict as it is.
    console = Console(record=True, width=2000, file=io.StringIO())
    print_comparison(result, console)
    for shown in (console.export_text(), render(result)):
        assert ("too short to say anything" in shown) == (words is not None)


def test_a_difference_within_the_noise_is_not_called_one(tmp_path: Path) -> None:
    result = compared(tmp_path / "s", {"base": {"final": BASE}, "same": {"final": shifted(0.01, -0.012, 0.001)}})
    assert "No shape is shown to be better" in result.verdict
    needed = result.group("same").seeds_needed
    assert needed is not None and needed > 100


def test_no_difference_over_three_seeds_is_not_said_to_want_three_seeds(tmp_path: Path) -> None:
    result = compared(tmp_path / "s", {"base": {"final": BASE}, "same": {"final": BASE}})
    assert result.group("same").seeds_needed is None
    assert "fewer than three" not in result.verdict and "too small to be told from zero" in result.verdict


def test_intervals_over_seeds_that_change_the_data_too_are_said_to_cover_its_order(tmp_path: Path) -> None:
    path = tmp_path / "s"
    make_sweep(path, {"base": {**SHORT, "final": BASE}, "wide": {**SHORT, "final": 2.9}}, baseline="base")
    for run in read_sweep(path).runs:
        file = run.path / "provenance.json"
        file.write_text(file.read_text().replace('"order_seed": 6198', f'"order_seed": {run.seed}'))
    notes = " ".join(compare_sweep(read_sweep(path)).notes)
    assert "is not the same for all runs" in notes and "do not cover data-order variance" not in notes


def test_only_seeds_that_both_have_are_paired_and_missing_ones_are_listed(tmp_path: Path) -> None:
    result = compared(tmp_path / "s", {"base": {"final": BASE}, "wide": {"final": 2.9}}, skip=("base-s1", "wide-s3"))
    group = result.group("wide")
    assert group.nats is not None and group.nats.seeds == (2,)
    assert group.nats.method == METHOD_NONE
    assert {run.name for run in result.unfinished} == {"base-s1", "wide-s3"}
    assert "unknown" in result.verdict


def test_runs_that_failed_or_still_run_enter_no_mean_and_are_listed_with_their_reason(tmp_path: Path) -> None:
    path = tmp_path / "s"
    make_sweep(path, {"base": {**SHORT, "final": BASE}, "wide": {**SHORT, "final": 2.9}}, baseline="base", seeds=[1, 2])
    make_sweep(
        path,
        {"sick": {**SHORT, "final": 1.0, "status": "failed", "stop": 20, "reason": "loss is NaN"}},
        baseline="base",
        seeds=[1, 2],
        declare=False,
    )
    result = compare_sweep(read_sweep(path))
    sick = result.group("sick")
    assert sick.losses == {} and sick.nats is None and sick.loss is None
    assert [(run.name, run.state.reason) for run in result.unfinished] == [
        ("sick-s1", "loss is NaN"),
        ("sick-s2", "loss is NaN"),
    ]


def test_views_read_both_curves_at_the_largest_common_budget(tmp_path: Path) -> None:
    cheap = make_shape(d_model=128, n_layers=2)
    dear = make_shape(d_model=128, n_layers=4)
    result = compared(
        tmp_path / "s",
        {
            "base": {"final": BASE, "shape": dear, "speed": 1000.0},
            "cheap": {"final": BASE, "shape": cheap, "speed": 2000.0},
        },
        budget_checked=False,
    )
    group, total = result.group("cheap"), 40 * BATCH_TOKENS
    ratio = cheap["flops_per_token"]["training"] / dear["flops_per_token"]["training"]
    assert group.flops_change == pytest.approx(ratio - 1)
    assert group.views["flops"].at == pytest.approx(total * cheap["flops_per_token"]["training"])
    assert group.views["seconds"].at == pytest.approx(total / 2000.0)
    # Equal losses at equal tokens: with fewer FLOPs or seconds a token, the cheap shape is ahead at equal cost.
    assert group.views["tokens"].difference is not None and group.views["tokens"].difference.mean == pytest.approx(0)
    for axis in ("flops", "seconds"):
        view = group.views[axis]
        assert view.difference is not None and view.difference.mean < -0.01
    assert any("Budgets differ" in note for note in result.notes)


def test_speed_up_is_the_ratio_of_tokens_to_the_baselines_loss(tmp_path: Path) -> None:
    result = compared(tmp_path / "s", {"base": {"final": BASE}, "wide": {"final": shifted(-0.1, -0.1, -0.1)}})
    found = result.group("wide").speed_up
    assert found is not None and found.reached == 3
    # final + 0.7 ((t/T)^-0.35 - 1) = final + 0.1 has one root.
    exact = (1 + 0.1 / 0.7) ** (1 / 0.35)
    assert found.ratio == pytest.approx(exact, rel=0.01)
    worse = compared(tmp_path / "t", {"base": {"final": BASE}, "bad": {"final": shifted(0.1, 0.1, 0.1)}})
    slow = worse.group("bad").speed_up
    assert slow is not None and slow.reached == 0 and slow.ratio == pytest.approx(1 / exact, rel=0.01)


def test_a_seed_whose_crossing_was_not_seen_is_counted_as_left_out(tmp_path: Path) -> None:
    result = compared(tmp_path / "s", {"base": {"final": BASE}, "wide": {"final": shifted(-0.1, -0.1, -9.0)}})
    found = result.group("wide").speed_up
    assert found is not None and (found.seeds, found.pairs, found.reached) == (2, 3, 2)
    assert "reached by 2 of 3 seeds, 1 left out" in render(result)


def test_holm_counts_every_comparison_of_the_sweep(tmp_path: Path) -> None:
    groups: dict[str, dict[str, Any]] = {"base": {"final": BASE}}
    for number in range(5):
        groups[f"g{number}"] = {"final": shifted(-0.02, -0.021, -0.0185 - 0.0005 * number)}
    result = compared(tmp_path / "s", groups)
    raw = [group.nats.p_value for group in result.groups if group.nats is not None]
    adjusted = [group.adjusted_p for group in result.groups if group.nats is not None]
    assert result.comparisons == 5
    assert min(filter(None, adjusted)) == pytest.approx(5 * min(filter(None, raw)))
    assert any("5 comparisons" in note for note in result.notes)


def test_one_seed_uses_documents_where_they_exist_and_the_page_can_tell(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    base = generator.normal(3, 0.4, 300)
    better = base - 0.05 + generator.normal(0, 0.05, 300)
    groups: dict[str, dict[str, Any]] = {
        "base": {"final": 3.0, "evals": documents(base)},
        "wide": {"final": 2.95, "evals": documents(better)},
        "other-version": {"final": 2.95, "evals": documents(better, version="2")},
        "none": {"final": 2.95},
    }
    result = compared(tmp_path / "s", groups, seeds=[1])
    wide = result.group("wide").nats
    assert wide is not None and wide.method == METHOD_DOCUMENTS and wide.low is not None and wide.high is not None
    assert wide.low < -0.05 < wide.high < 0
    perplexity = result.group("wide").perplexity
    assert perplexity is not None and perplexity.low == pytest.approx(math.exp(3.0) * math.expm1(wide.low))
    for name in ("other-version", "none"):
        unknown = result.group(name).nats
        assert unknown is not None and unknown.method == METHOD_NONE
    assert any("bootstrap over evaluation documents" in note for note in result.notes)
    assert any("unknown" in note for note in result.notes)


def test_other_validation_sets_are_compared_beside_the_chosen_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    options = {**SHORT, "labels": ("corpus", "wiki")}
    make_sweep(
        path, {"a": {**options, "final": BASE}, "b": {**options, "final": shifted(-0.1, -0.1, -0.1)}}, baseline="a"
    )
    result = compare_sweep(read_sweep(path))
    mean, difference = result.group("b").other_sets["wiki"]
    assert mean == pytest.approx(np.mean(BASE) + 0.4) and difference is not None
    assert difference.mean == pytest.approx(-0.1)
    assert compare_sweep(read_sweep(path), label="wiki").group("a").loss == pytest.approx(np.mean(BASE) + 0.5)
    with pytest.raises(InputError, match="no run has a validation set 'wikki'"):
        compare_sweep(read_sweep(path), label="wikki")


def test_every_shape_at_its_best_learning_rate_and_at_equal_ones(tmp_path: Path) -> None:
    groups: dict[str, dict[str, Any]] = {}
    for shape, best, gain in (("conventional", 4e-4, 0.0), ("hourglass", 8e-4, -0.05)):
        for rate in (2e-4, 4e-4, 8e-4, 1.6e-3):
            final = [
                base + gain + 0.01 * math.log2(rate / best) ** 2 + 0.001 * (-1) ** i for i, base in enumerate(BASE)
            ]
            groups[f"{shape}-{rate:g}"] = {
                "final": final,
                "axes": {"shape": shape, "optimizer.learning_rate": rate},
                "config": {"optimizer.learning_rate": rate},
            }
    result = compared(tmp_path / "s", groups, baseline="conventional-0.0004")
    conventional, hourglass = result.learning_rates
    assert (conventional.shape, conventional.best, conventional.at_edge) == ("conventional", 4e-4, False)
    assert (hourglass.best, hourglass.best_group) == (8e-4, "hourglass-0.0008")
    assert hourglass.best_difference is not None and hourglass.best_difference.mean == pytest.approx(-0.05)
    equal = hourglass.equal_differences
    assert equal is not None and equal[4e-4] is not None and equal[4e-4].mean == pytest.approx(-0.04)
    assert result.verdict.startswith("Each at its best learning rate, hourglass is −0.0500 nats")


def test_one_learning_rate_alone_is_no_range_with_the_best_inside(tmp_path: Path) -> None:
    groups: dict[str, dict[str, Any]] = {}
    for shape, rates in (("conventional", (2e-4, 4e-4, 8e-4)), ("hourglass", (4e-4,))):
        for rate in rates:
            final = [base + 0.01 * math.log2(rate / 4e-4) ** 2 for base in BASE]
            groups[f"{shape}-{rate:g}"] = {
                "final": final,
                "axes": {"shape": shape, "optimizer.learning_rate": rate},
            }
    result = compared(tmp_path / "s", groups, baseline="conventional-0.0004")
    assert {row.shape: row.at_edge for row in result.learning_rates} == {"conventional": False, "hourglass": True}
    assert "best learning rate of hourglass is the smallest or largest tried" in result.verdict


def test_shapes_whose_values_read_alike_are_not_taken_for_one_over_learning_rates() -> None:
    rate = "optimizer.learning_rate"
    axes: dict[str, dict[str, Any]] = {
        "a": {"layers": 4, rate: 1e-4},
        "b": {"sub_mlps": 4, rate: 1e-4},
        "c": {rate: 2e-4},
    }
    assert shape_names(axes, rate) == {"a": "layers=4", "b": "sub_mlps=4", "c": "all"}
    assert shape_names({"a": axes["a"], "c": axes["c"]}, rate) == {"a": "4", "c": "all"}


def test_a_fit_over_sizes_is_of_each_sizes_best_learning_rate(tmp_path: Path) -> None:
    groups: dict[str, dict[str, Any]] = {}
    for width in (64, 128, 256):
        for rate, loss in ((2e-4, 0.5), (4e-4, 0.0), (8e-4, 0.7)):
            groups[f"d{width}-{rate:g}"] = {
                "final": [base - 0.002 * width + loss for base in BASE],
                "shape": make_shape(d_model=width),
                "axes": {"model.d_model": width, "optimizer.learning_rate": rate},
            }
    result = compared(tmp_path / "s", groups, baseline="d64-0.0004", budget_checked=False)
    assert result.scaling is not None
    assert result.scaling.fits[0].groups == ("d64-0.0004", "d128-0.0004", "d256-0.0004")


def test_a_scaling_sweep_compares_each_size_with_its_own_baseline(tmp_path: Path) -> None:
    groups: dict[str, dict[str, Any]] = {}
    for number, width in enumerate((64, 128, 256)):
        groups[f"conv-{number}"] = {"final": [b - 0.3 * number for b in BASE], "shape": make_shape(d_model=width)}
        hourglass = make_shape(d_model=width, d_ff=[[width] * 4] * 4, ffn_type="hourglass")
        groups[f"hour-{number}"] = {"final": [b - 0.3 * number - 0.01 for b in BASE], "shape": hourglass}
    result = compared(tmp_path / "s", groups, budget_checked=False)
    assert {group.name: group.baseline for group in result.groups} == {
        "conv-0": None, "hour-0": "conv-0", "conv-1": None, "hour-1": "conv-1", "conv-2": None, "hour-2": "conv-2",
    }  # fmt: skip
    for number in range(3):
        nats = result.group(f"hour-{number}").nats
        assert nats is not None and nats.mean == pytest.approx(-0.01)


def test_unequal_sizes_of_one_family_are_all_compared_with_the_declared_baseline(tmp_path: Path) -> None:
    groups = {f"d{width}": {"final": BASE, "shape": make_shape(d_model=width)} for width in (64, 128, 256)}
    result = compared(tmp_path / "s", groups, budget_checked=False)
    assert [group.baseline for group in result.groups] == [None, "d64", "d64"]


def test_a_sweep_without_a_finished_run_says_so(tmp_path: Path) -> None:
    result = compared(tmp_path / "s", {"base": {"final": 3.0, "status": "running", "stop": 10}})
    assert result.verdict.startswith("No run has finished yet")
