"""Reports read the surviving rows of run directories, and say what they could not read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from olmo_ext.compare.collect import read_surviving, read_sweep, split_seed
from olmo_ext.errors import InputError
from olmo_ext.rundir import RunDirectory

from .synthetic import make_run, make_sweep


def test_fast_reader_equals_the_run_directorys_own(tmp_path: Path) -> None:
    make_run(tmp_path / "run", final=3.0, attempts=2, steps=60)
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind": "train", "torn": \xff')
    rows = read_surviving(RunDirectory(tmp_path / "run"))
    reference = RunDirectory(tmp_path / "run").read_metrics()
    assert [(r["kind"], r["step"], r["values"]) for r in rows] == [(r.kind, r.step, r.values) for r in reference]
    assert not any(99.0 in row["values"].values() for row in rows)


def test_rows_of_a_lost_attempt_reach_no_series(tmp_path: Path) -> None:
    make_sweep(tmp_path / "sweep", {"a": {"final": 3.0, "attempts": 2, "steps": 40}}, baseline="a", seeds=[1])
    run = read_sweep(tmp_path / "sweep").runs[0]
    loss = run.series["train/CrossEntropyLoss"]
    assert loss.step.tolist() == list(range(1, 41))
    assert loss.value.max() < 99
    assert run.progress()[:2] == (40, 40 * 8192)


def test_metrics_that_no_report_shows_are_read_when_asked_for(tmp_path: Path) -> None:
    path = make_sweep(tmp_path / "sweep", {"a": {"final": 3.0, "steps": 10}}, baseline="a", seeds=[1])
    assert "optim/learning_rate" not in read_sweep(path).runs[0].series
    assert "optim/learning_rate" in read_sweep(path, every_metric=True).runs[0].series


def test_without_sweep_json_groups_follow_names_and_the_baseline_is_asked_for(tmp_path: Path) -> None:
    path = make_sweep(
        tmp_path / "s",
        {"a": {"final": 3.0, "steps": 10}, "b": {"final": 3.1, "steps": 10}},
        baseline="a",
        declare=False,
    )
    with pytest.raises(InputError, match="--baseline is needed.*one of: a, b"):
        read_sweep(path)
    sweep = read_sweep(path, baseline="b")
    assert {name: [run.seed for run in runs] for name, runs in sweep.groups().items()} == {
        "b": [1, 2, 3],
        "a": [1, 2, 3],
    }
    with pytest.raises(InputError, match="'c' is no group"):
        read_sweep(path, baseline="c")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wide-s2", ("wide", 2)),
        ("wide-seed12", ("wide", 12)),
        ("wide_seed=3", ("wide", 3)),
        ("k4-l6", ("k4-l6", None)),
        ("layers6", ("layers6", None)),
        ("s2", ("s2", None)),
    ],
)
def test_seed_part_of_a_name(name: str, expected: tuple[str, int | None]) -> None:
    assert split_seed(name) == expected


def test_runs_that_never_started_and_folders_the_sweep_forgot_are_listed(tmp_path: Path) -> None:
    path = make_sweep(tmp_path / "s", {"a": {"final": 3.0, "steps": 10}}, baseline="a", seeds=[1, 2], skip=("a-s2",))
    make_run(path / "old-s1", final=3.0, steps=10)
    runs = {run.name: run for run in read_sweep(path).runs}
    assert runs["a-s2"].state.status == "pending" and "not started" in runs["a-s2"].problems[0]
    assert runs["old-s1"].problems == ["not named by sweep.json"]


@pytest.mark.parametrize("content", ["{", "{}", '{"name": "s", "baseline": "a", "runs": [{}]}'])
def test_an_unreadable_sweep_json_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(InputError, match="sweep.json: unreadable"):
        read_sweep(tmp_path)


def test_a_folder_that_is_no_sweep_says_what_would_be_right(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither sweep.json nor"):
        read_sweep(tmp_path)
    make_run(tmp_path / "run", final=3.0, steps=5)
    with pytest.raises(InputError, match="this is one run"):
        read_sweep(tmp_path / "run")
    with pytest.raises(InputError, match="no such folder"):
        read_sweep(tmp_path / "nowhere")


def test_speed_is_the_median_without_the_warm_up(tmp_path: Path) -> None:
    make_run(tmp_path / "s" / "a-s1", final=3.0, steps=100, speed=500.0)
    lines = (tmp_path / "s" / "a-s1" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows[1:8]:
        if "throughput/tokens_per_second" in row["values"]:
            row["values"]["throughput/tokens_per_second"] = 1.0
    (tmp_path / "s" / "a-s1" / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert read_sweep(tmp_path / "s", baseline="a").runs[0].tokens_per_second() == 500.0


def test_missing_or_broken_files_of_a_run_are_reported_not_fatal(tmp_path: Path) -> None:
    path = make_sweep(tmp_path / "s", {"a": {"final": 3.0, "steps": 10}}, baseline="a", seeds=[1])
    (path / "a-s1" / "shape.json").write_text("{")
    (path / "a-s1" / "evals").mkdir()
    (path / "a-s1" / "evals" / "x.jsonl").write_text('{"task": "t"}\nnot json\n')
    run = read_sweep(path).runs[0]
    assert run.problems == ["no readable shape.json", "evals/x.jsonl line 2 is not JSON"]
    assert len(run.evaluations) == 1
    assert np.isfinite(run.last("eval/corpus/CrossEntropyLoss") or np.nan)
