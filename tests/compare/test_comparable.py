"""What is unlike is neither compared nor averaged, and says why."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmo_ext.compare.collect import read_sweep
from olmo_ext.compare.comparison import compare_sweep
from olmo_ext.compare.report.page import render
from olmo_ext.compare.statistics import METHOD_NONE

from .known import BASE, SHORT, compared, documents
from .synthetic import BATCH_TOKENS, make_run, make_sweep


def test_runs_whose_corpus_lay_in_different_folders_are_compared(tmp_path: Path) -> None:
    sides = {"base": ("/scratch/me", BASE), "wide": ("/home/you", 2.9)}
    groups = {
        name: {"final": final, "data": {"tokenizer": f"{folder}/corpus/tokenizer.json"}}
        for name, (folder, final) in sides.items()
    }
    assert compared(tmp_path / "s", groups).group("wide").nats is not None


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
    result = compared(tmp_path / "s", {"base": {"final": BASE, **tasks}, "wide": {"final": 2.0, **tasks, **change}})
    group = result.group("wide")
    assert result.downstream
    assert group.nats is None and group.speed_up is None
    assert all(score.difference is None for score in result.downstream if "evaluation" not in change.get("data", {}))
    assert any(text.startswith(reason) for text in group.blocking), group.blocking
    assert result.comparisons == 0 and "Nothing here can be compared" in result.verdict


def test_a_run_that_ends_without_a_number_enters_no_mean_and_is_named(tmp_path: Path) -> None:
    result = compared(tmp_path / "s", {"base": {"final": BASE}, "wide": {"final": [2.9, 2.91, math.nan]}})
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
    assert compared(tmp_path / "s", groups).group("wide").blocking == ["validation set corpus two against one"]


def test_runs_of_unequal_length_are_compared_at_equal_tokens_only(tmp_path: Path) -> None:
    result = compared(tmp_path / "s", {"base": {"final": BASE}, "short": {"final": 3.5, "steps": 20}})
    view = result.group("short").views["tokens"]
    assert view.at == 20 * BATCH_TOKENS and view.difference is not None
    assert result.group("short").nats is None


def test_time_is_not_compared_across_devices(tmp_path: Path) -> None:
    path = tmp_path / "s"
    make_sweep(path, {"base": {**SHORT, "final": BASE}, "wide": {**SHORT, "final": 2.9}}, baseline="base")
    for seed in (1, 2, 3):
        file = path / f"wide-s{seed}" / "provenance.json"
        file.write_text(file.read_text().replace('"device": "cpu"', '"device": "gpu"'))
    group = compare_sweep(read_sweep(path)).group("wide")
    assert group.views["seconds"].difference is None and "other devices" in group.views["seconds"].note
    assert "device: gpu against cpu" in group.remarks


def test_documents_of_an_earlier_checkpoint_say_nothing_of_the_final_loss(tmp_path: Path) -> None:
    base = np.random.default_rng(0).normal(3, 0.4, 300)
    early = [{**row, "step": 20} for row in documents(base - 0.5)]
    groups: dict[str, dict[str, Any]] = {
        "base": {"final": 3.0, "evals": documents(base)},
        "wide": {"final": 2.95, "evals": early},
    }
    nats = compared(tmp_path / "s", groups, seeds=[1]).group("wide").nats
    assert nats is not None and nats.method == METHOD_NONE


def test_scores_of_different_checkpoints_are_neither_averaged_nor_subtracted(tmp_path: Path) -> None:
    def score(value: float, step: int) -> dict[str, Any]:
        return {"task": "arc", "metric": "acc", "task_version": "1", "value": value, "stderr": 0.1, "step": step}

    groups: dict[str, dict[str, Any]] = {
        "base": {"final": BASE, "evals": [score(0.2, 20), score(0.4, 40)]},
        "wide": {"final": 2.9, "evals": [score(0.3, 20)]},
    }
    result = compared(tmp_path / "s", groups)
    found = {(row.group, row.step): (row.value, row.difference) for row in result.downstream}
    assert found == {("base", None): (pytest.approx(0.4), None), ("wide", 20): (pytest.approx(0.3), None)}
    assert "at step 20" in render(result)


def test_settings_that_differ_besides_the_shape_are_listed(tmp_path: Path) -> None:
    result = compared(
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
