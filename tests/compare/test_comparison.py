"""A sweep with known effects gives them back, and what is not comparable is not compared."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from olmo_ext.compare.collect import read_sweep
from olmo_ext.compare.comparison import Comparison, compare_sweep
from olmo_ext.compare.paper import judge, read_expected
from olmo_ext.compare.report.page import render
from olmo_ext.compare.statistics import METHOD_DOCUMENTS, METHOD_NONE, Difference
from olmo_ext.compare.table import print_comparison
from olmo_ext.compare.views import shape_names
from olmo_ext.errors import InputError

from .synthetic import BATCH_TOKENS, make_run, make_shape, make_sweep

BASE = [3.000, 3.020, 2.990]
SHORT: dict[str, Any] = {"steps": 40, "evaluations": 8, "extra_metrics": 0}


def _compared(path: Path, groups: dict[str, dict[str, Any]], **options: Any) -> Comparison:
    full = {name: {**SHORT, **given} for name, given in groups.items()}
    make_sweep(path, full, **{"baseline": next(iter(groups)), **options})
    return compare_sweep(read_sweep(path))


def _shifted(*changes: float) -> list[float]:
    return [base + change for base, change in zip(BASE, changes, strict=False)]


def test_a_known_effect_comes_back_with_the_paired_interval_in_nats_and_ppl(tmp_path: Path) -> None:
    treatment = _shifted(-0.030, -0.028, -0.033)
    result = _compared(tmp_path / "s", {"base": {"final": BASE}, "wide": {"final": treatment}})
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
        "wide": {"final": _shifted(-0.03, -0.028, -0.033), "steps": steps},
    }
    result = _compared(tmp_path / "s", groups)
    caution = f"The runs are too short to say anything about trained models: {words} a non-embedding parameter."
    assert result.verdict.startswith("wide is better")
    assert result.verdict.endswith(caution) if words else "too short" not in result.verdict
    # Terminal and page show the verdict as it is.
    console = Console(record=True, width=2000, file=io.StringIO())
    print_comparison(result, console)
    for shown in (console.export_text(), render(result)):
        assert ("too short to say anything" in shown) == (words is not None)


def test_a_difference_within_the_noise_is_not_called_one(tmp_path: Path) -> None:
    result = _compared(tmp_path / "s", {"base": {"final": BASE}, "same": {"final": _shifted(0.01, -0.012, 0.001)}})
    assert "No shape is shown to be better" in result.verdict
    needed = result.group("same").seeds_needed
    assert needed is not None and needed > 100


def test_no_difference_over_three_seeds_is_not_said_to_want_three_seeds(tmp_path: Path) -> None:
    result = _compared(tmp_path / "s", {"base": {"final": BASE}, "same": {"final": BASE}})
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
    result = _compared(tmp_path / "s", {"base": {"final": BASE}, "wide": {"final": 2.9}}, skip=("base-s1", "wide-s3"))
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


def test_runs_whose_corpus_lay_in_different_folders_are_compared(tmp_path: Path) -> None:
    sides = {"base": ("/scratch/me", BASE), "wide": ("/home/you", 2.9)}
    groups = {
        name: {"final": final, "data": {"tokenizer": f"{folder}/corpus/tokenizer.json"}}
        for name, (folder, final) in sides.items()
    }
    assert _compared(tmp_path / "s", groups).group("wide").nats is not None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"data": {"tokenizer": "/scratch/other.json"}}, "tokenizer other.json against tttt"),
        ({"data": {"fingerprint": "other"}}, "training data other against ffff"),
        ({"data": {"tokenizer": "other"}}, "tokenizer other against tttt"),
        ({"data": {"tokenizer": f"{'t' * 16}-v2"}}, f"tokenizer {'t' * 16}-v2 against {'t' * 16}"),
        ({"data": {"evaluation": {"corpus": "other"}}}, "validation set corpus other against eeee"),
        ({"data": {"fingerprint": None}}, "training data not recorded against"),
        ({"steps": 20}, f"tokens seen {20 * BATCH_TOKENS:,} against {40 * BATCH_TOKENS:,}"),
    ],
)
def test_what_is_not_comparable_is_not_compared_and_says_why(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    tasks = {"downstream": {"arc_easy_acc": 0.35}}
    result = _compared(tmp_path / "s", {"base": {"final": BASE, **tasks}, "wide": {"final": 2.0, **tasks, **change}})
    group = result.group("wide")
    assert result.downstream
    assert group.nats is None and group.speed_up is None
    assert all(score.difference is None for score in result.downstream if "evaluation" not in change.get("data", {}))
    assert any(text.startswith(reason) for text in group.blocking), group.blocking
    assert result.comparisons == 0 and "Nothing here can be compared" in result.verdict


def test_a_run_that_ends_without_a_number_enters_no_mean_and_is_named(tmp_path: Path) -> None:
    result = _compared(tmp_path / "s", {"base": {"final": BASE}, "wide": {"final": [2.9, 2.91, math.nan]}})
    assert result.group("wide").losses == {1: 2.9, 2: 2.91}
    (sick,) = [run for run in result.sweep.runs if run.problems]
    assert sick.name == "wide-s3" and sick.problems == ["its last loss on corpus is nan: no mean holds it"]
    assert sick.problems[0] in render(result)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"steps": 20}, f"tokens seen {20 * BATCH_TOKENS:,} against {40 * BATCH_TOKENS:,} (NAME-s9 and NAME-s1)"),
        ({"data": {"evaluation": {"corpus": "other"}}}, "validation set corpus other against eeee"),
        ({"data": {"fingerprint": "other"}}, "training data other against ffff"),
    ],
)
def test_seeds_that_differ_in_more_than_the_seed_have_no_mean(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    """Each pair is comparable, and a mean over the pairs would be over unlike differences."""
    path = tmp_path / "s"
    groups: dict[str, dict[str, Any]] = {"base": {**SHORT, "final": BASE}, "wide": {**SHORT, "final": 2.9}}
    make_sweep(path, groups, baseline="base")
    for name in groups:
        make_run(path / f"{name}-s9", final=2.0, seed=9, **{**SHORT, **change})
    result = compare_sweep(read_sweep(path))
    for name in groups:
        group = result.group(name)
        assert group.loss is None and group.ppl is None and group.nats is None
        assert any(text.startswith(reason.replace("NAME", name)) for text in group.blocking), group.blocking
    assert any(text.startswith("in the baseline: ") for text in result.group("wide").blocking)


def test_seeds_that_change_the_order_of_the_data_have_a_mean(tmp_path: Path) -> None:
    path = tmp_path / "s"
    make_sweep(path, {"base": {**SHORT, "final": BASE}, "wide": {**SHORT, "final": 2.9}}, baseline="base")
    for run in read_sweep(path).runs:
        file = run.path / "provenance.json"
        changed = file.read_text().replace("6198", str(run.seed)).replace("f" * 16, f"data-{run.seed}")
        file.write_text(changed)
    group = compare_sweep(read_sweep(path)).group("wide")
    assert group.blocking == [] and group.nats is not None and len(group.nats.seeds) == 3


def test_runs_of_unknown_seed_are_no_pair(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for name in ("base", "wide"):
        make_run(path / name, final=3.0, **SHORT)
        (path / name / "config.yaml").write_text("run_name: x\n")
    group = compare_sweep(read_sweep(path, baseline="base")).group("wide")
    assert group.nats is None and "no seed that both have: unpaired runs are not compared" in group.blocking


def test_sets_inside_one_evaluator_are_told_apart_by_that_evaluators_fingerprint(tmp_path: Path) -> None:
    evaluators = [{"label": "v3", "data": {"datasets": {"corpus": ["a.npy"]}}}]
    groups: dict[str, dict[str, Any]] = {
        "base": {"final": BASE, "config": {"evaluators": evaluators}, "data": {"evaluation": {"v3": "one"}}},
        "wide": {"final": 2.0, "config": {"evaluators": evaluators}, "data": {"evaluation": {"v3": "two"}}},
    }
    assert _compared(tmp_path / "s", groups).group("wide").blocking == ["validation set corpus two against one"]


def test_runs_of_unequal_length_are_compared_at_equal_tokens_only(tmp_path: Path) -> None:
    result = _compared(tmp_path / "s", {"base": {"final": BASE}, "short": {"final": 3.5, "steps": 20}})
    view = result.group("short").views["tokens"]
    assert view.at == 20 * BATCH_TOKENS and view.difference is not None
    assert result.group("short").nats is None


def test_views_read_both_curves_at_the_largest_common_budget(tmp_path: Path) -> None:
    cheap = make_shape(d_model=128, n_layers=2)
    dear = make_shape(d_model=128, n_layers=4)
    result = _compared(
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


def test_time_is_not_compared_across_devices(tmp_path: Path) -> None:
    path = tmp_path / "s"
    make_sweep(path, {"base": {**SHORT, "final": BASE}, "wide": {**SHORT, "final": 2.9}}, baseline="base")
    for seed in (1, 2, 3):
        file = path / f"wide-s{seed}" / "provenance.json"
        file.write_text(file.read_text().replace('"device": "cpu"', '"device": "gpu"'))
    group = compare_sweep(read_sweep(path)).group("wide")
    assert group.views["seconds"].difference is None and "other devices" in group.views["seconds"].note
    assert "device: gpu against cpu" in group.remarks


def test_speed_up_is_the_ratio_of_tokens_to_the_baselines_loss(tmp_path: Path) -> None:
    result = _compared(tmp_path / "s", {"base": {"final": BASE}, "wide": {"final": _shifted(-0.1, -0.1, -0.1)}})
    found = result.group("wide").speed_up
    assert found is not None and found.reached == 3
    # final + 0.7 ((t/T)^-0.35 - 1) = final + 0.1 has one root.
    exact = (1 + 0.1 / 0.7) ** (1 / 0.35)
    assert found.ratio == pytest.approx(exact, rel=0.01)
    worse = _compared(tmp_path / "t", {"base": {"final": BASE}, "bad": {"final": _shifted(0.1, 0.1, 0.1)}})
    slow = worse.group("bad").speed_up
    assert slow is not None and slow.reached == 0 and slow.ratio == pytest.approx(1 / exact, rel=0.01)


def test_a_seed_whose_crossing_was_not_seen_is_counted_as_left_out(tmp_path: Path) -> None:
    result = _compared(tmp_path / "s", {"base": {"final": BASE}, "wide": {"final": _shifted(-0.1, -0.1, -9.0)}})
    found = result.group("wide").speed_up
    assert found is not None and (found.seeds, found.pairs, found.reached) == (2, 3, 2)
    assert "reached by 2 of 3 seeds, 1 left out" in render(result)


def test_holm_counts_every_comparison_of_the_sweep(tmp_path: Path) -> None:
    groups: dict[str, dict[str, Any]] = {"base": {"final": BASE}}
    for number in range(5):
        groups[f"g{number}"] = {"final": _shifted(-0.02, -0.021, -0.0185 - 0.0005 * number)}
    result = _compared(tmp_path / "s", groups)
    raw = [group.nats.p_value for group in result.groups if group.nats is not None]
    adjusted = [group.adjusted_p for group in result.groups if group.nats is not None]
    assert result.comparisons == 5
    assert min(filter(None, adjusted)) == pytest.approx(5 * min(filter(None, raw)))
    assert any("5 comparisons" in note for note in result.notes)


def _documents(losses: np.ndarray, label: str = "corpus", version: str = "1") -> list[dict[str, Any]]:
    return [
        {
            "task": label,
            "task_version": version,
            "metric": "CrossEntropyLoss",
            "value": float(losses.mean()),
            "stderr": 0.1,
            "items": len(losses),
            "step": 40,
            "document_losses": losses.tolist(),
            "document_tokens": [128] * len(losses),
        }
    ]


def test_one_seed_uses_documents_where_they_exist_and_the_page_can_tell(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    base = generator.normal(3, 0.4, 300)
    better = base - 0.05 + generator.normal(0, 0.05, 300)
    groups: dict[str, dict[str, Any]] = {
        "base": {"final": 3.0, "evals": _documents(base)},
        "wide": {"final": 2.95, "evals": _documents(better)},
        "other-version": {"final": 2.95, "evals": _documents(better, version="2")},
        "none": {"final": 2.95},
    }
    result = _compared(tmp_path / "s", groups, seeds=[1])
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


def test_documents_of_an_earlier_checkpoint_say_nothing_of_the_final_loss(tmp_path: Path) -> None:
    base = np.random.default_rng(0).normal(3, 0.4, 300)
    early = [{**row, "step": 20} for row in _documents(base - 0.5)]
    groups: dict[str, dict[str, Any]] = {
        "base": {"final": 3.0, "evals": _documents(base)},
        "wide": {"final": 2.95, "evals": early},
    }
    nats = _compared(tmp_path / "s", groups, seeds=[1]).group("wide").nats
    assert nats is not None and nats.method == METHOD_NONE


def test_scores_of_different_checkpoints_are_neither_averaged_nor_subtracted(tmp_path: Path) -> None:
    def score(value: float, step: int) -> dict[str, Any]:
        return {"task": "arc", "metric": "acc", "task_version": "1", "value": value, "stderr": 0.1, "step": step}

    groups: dict[str, dict[str, Any]] = {
        "base": {"final": BASE, "evals": [score(0.2, 20), score(0.4, 40)]},
        "wide": {"final": 2.9, "evals": [score(0.3, 20)]},
    }
    result = _compared(tmp_path / "s", groups)
    found = {(row.group, row.step): (row.value, row.difference) for row in result.downstream}
    assert found == {("base", None): (pytest.approx(0.4), None), ("wide", 20): (pytest.approx(0.3), None)}
    assert "at step 20" in render(result)


def test_other_validation_sets_are_compared_beside_the_chosen_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    options = {**SHORT, "labels": ("corpus", "wiki")}
    make_sweep(
        path, {"a": {**options, "final": BASE}, "b": {**options, "final": _shifted(-0.1, -0.1, -0.1)}}, baseline="a"
    )
    result = compare_sweep(read_sweep(path))
    mean, difference = result.group("b").other_sets["wiki"]
    assert mean == pytest.approx(np.mean(BASE) + 0.4) and difference is not None
    assert difference.mean == pytest.approx(-0.1)
    assert compare_sweep(read_sweep(path), label="wiki").group("a").loss == pytest.approx(np.mean(BASE) + 0.5)
    with pytest.raises(InputError, match="no run has a validation set 'wikki'"):
        compare_sweep(read_sweep(path), label="wikki")


def test_settings_that_differ_besides_the_shape_are_listed(tmp_path: Path) -> None:
    result = _compared(
        tmp_path / "s",
        {
            "base": {"final": BASE},
            "hot": {"final": 2.9, "config": {"optimizer.learning_rate": 8e-4}, "data": {"order_seed": 1}},
        },
    )
    assert result.group("hot").remarks == [
        "data order: seed 1 against 6198",
        "optimizer.learning_rate: 0.0008 against 0.0004",
    ]


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
    result = _compared(tmp_path / "s", groups, baseline="conventional-0.0004")
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
    result = _compared(tmp_path / "s", groups, baseline="conventional-0.0004")
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
    result = _compared(tmp_path / "s", groups, baseline="d64-0.0004", budget_checked=False)
    assert result.scaling is not None
    assert result.scaling.fits[0].groups == ("d64-0.0004", "d128-0.0004", "d256-0.0004")


def test_a_scaling_sweep_compares_each_size_with_its_own_baseline(tmp_path: Path) -> None:
    groups: dict[str, dict[str, Any]] = {}
    for number, width in enumerate((64, 128, 256)):
        groups[f"conv-{number}"] = {"final": [b - 0.3 * number for b in BASE], "shape": make_shape(d_model=width)}
        hourglass = make_shape(d_model=width, d_ff=[[width] * 4] * 4, ffn_type="hourglass")
        groups[f"hour-{number}"] = {"final": [b - 0.3 * number - 0.01 for b in BASE], "shape": hourglass}
    result = _compared(tmp_path / "s", groups, budget_checked=False)
    assert {group.name: group.baseline for group in result.groups} == {
        "conv-0": None, "hour-0": "conv-0", "conv-1": None, "hour-1": "conv-1", "conv-2": None, "hour-2": "conv-2",
    }  # fmt: skip
    for number in range(3):
        nats = result.group(f"hour-{number}").nats
        assert nats is not None and nats.mean == pytest.approx(-0.01)


def test_unequal_sizes_of_one_family_are_all_compared_with_the_declared_baseline(tmp_path: Path) -> None:
    groups = {f"d{width}": {"final": BASE, "shape": make_shape(d_model=width)} for width in (64, 128, 256)}
    result = _compared(tmp_path / "s", groups, budget_checked=False)
    assert [group.baseline for group in result.groups] == [None, "d64", "d64"]


def test_a_sweep_without_a_finished_run_says_so(tmp_path: Path) -> None:
    result = _compared(tmp_path / "s", {"base": {"final": 3.0, "status": "running", "stop": 10}})
    assert result.verdict.startswith("No run has finished yet")


@pytest.mark.parametrize(
    ("paper", "low", "high", "verdict"),
    [
        (-0.03, -0.04, -0.02, "reproduced"),
        (-0.03, -0.04, 0.01, "undecided"),
        (-0.03, -0.02, 0.01, "contradicted"),
        (-0.03, 0.01, 0.02, "contradicted"),
        (None, -0.04, -0.02, "undecided"),
    ],
)
def test_a_papers_difference_is_judged_by_our_interval(
    paper: float | None, low: float, high: float, verdict: str
) -> None:
    assert judge(paper, Difference(mean=(low + high) / 2, low=low, high=high))[0] == verdict
    assert judge(paper, Difference(mean=0.0))[0] == "undecided"


EXPECTED = """
conditions: {{tokens: {tokens}, data: ffffffffffffffff, evaluation: corpus}}
figures:
  - {{run: base, metric: ppl, value: 20.0, source: t}}
  - {{run: wide, metric: ppl, value: {value}, source: t}}
  - {{run: wide, metric: ppl, value: 19.0, source: wiki, evaluation: wikitext}}
  - {{run: wide, metric: arc_easy acc, value: 0.4, source: tasks}}
  - {{run: elsewhere, metric: ppl, value: 1.0}}
"""


def test_paper_figures_stand_beside_ours_and_only_equal_conditions_are_judged(tmp_path: Path) -> None:
    path = tmp_path / "s"
    options = {**SHORT, "downstream": {"arc_easy_acc": 0.35, "arc_easy_items": 100}}
    wide = _shifted(-0.030, -0.028, -0.033)
    make_sweep(path, {"base": {**options, "final": BASE}, "wide": {**options, "final": wide}}, baseline="base")
    expected = tmp_path / "expected.yaml"
    expected.write_text(EXPECTED.format(tokens=40 * BATCH_TOKENS, value=20 * math.exp(-0.031)))
    rows = compare_sweep(read_sweep(path), expected=expected).paper
    assert [row.verdict for row in rows] == ["", "reproduced", "not comparable", "undecided"]
    assert rows[1].paper_difference == pytest.approx(-0.031)
    assert rows[2].why == "evaluation set corpus against wikitext"
    assert rows[3].our_value == pytest.approx(0.35)
    expected.write_text(EXPECTED.format(tokens="2.5B", value=19))
    rows = compare_sweep(read_sweep(path), expected=expected).paper
    assert all(row.verdict == "not comparable" and "tokens" in row.why for row in rows)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "configs").glob("*/expected.yaml")), ids=lambda path: path.parent.name
)
def test_the_repositorys_paper_figures_are_read(path: Path) -> None:
    assert len(read_expected(path)) >= 10


def test_a_papers_difference_is_to_its_baseline_after_as_many_tokens(tmp_path: Path) -> None:
    path = tmp_path / "s"
    make_sweep(path, {"base": {**SHORT, "final": BASE}, "wide": {**SHORT, "final": 2.9}}, baseline="base")
    figures = [
        {"run": run, "metric": "loss", "value": value, "tokens": tokens}
        for run, tokens, value in (("base", 10, 3.5), ("wide", 10, 3.4), ("base", 90, 3.0), ("wide", 90, 2.8))
    ]
    expected = tmp_path / "expected.yaml"
    expected.write_text(json.dumps({"figures": figures}))
    rows = [row for row in compare_sweep(read_sweep(path), expected=expected).paper if row.group == "wide"]
    assert [row.paper_difference for row in rows] == pytest.approx([-0.1, -0.2])


@pytest.mark.parametrize(
    "content",
    [
        "figures: 3",
        "figures: [{run: a}]",
        "figures: [{run: a, metric: ppl, value: x}]",
        "figures: [{run: a, metric: ppl, value: 0}]",
        "figures: [{run: a, metric: loss, value: .nan}]",
        "{conditions: [1], figures: []}",
    ],
)
def test_a_broken_expected_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "expected.yaml").write_text(content)
    with pytest.raises(InputError, match="expected.yaml"):
        read_expected(tmp_path / "expected.yaml")
