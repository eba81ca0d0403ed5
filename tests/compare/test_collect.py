"""Reports read the surviving rows of run directories, and say what they could not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.compare.collect import read_sweep, split_seed

from .synthetic import make_run, make_sweep


def test_fast_reader_equals_the_run_directorys_own(tmp_path: Path) -> None:
    make_run(tmp_path / "run", final=3.0, attempts=2, steps=60)
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind": "train", "torn": \xff')
    rows = RunDirectory(tmp_path / "run").read_plain_metrics()
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


def test_a_second_run_of_one_seed_does_not_stand_in_for_the_first(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for name, final in (("base-s1", 3.0), ("wide-s1", 2.9), ("wide-seed1", 2.0)):
        make_run(path / name, final=final, steps=10)
    sweep = read_sweep(path, baseline="base")
    assert {run.name: run.group for run in sweep.runs} == {
        "base-s1": "base",
        "wide-s1": "wide",
        "wide-seed1": "wide-seed1",
    }
    assert sweep.runs[2].problems == ["seed 1 of group wide, as wide-s1: shown as a group of its own"]


def test_runs_that_never_started_and_folders_the_sweep_forgot_are_listed(tmp_path: Path) -> None:
    path = make_sweep(tmp_path / "s", {"a": {"final": 3.0, "steps": 10}}, baseline="a", seeds=[1, 2], skip=("a-s2",))
    make_run(path / "old-s1", final=3.0, steps=10)
    runs = {run.name: run for run in read_sweep(path).runs}
    assert runs["a-s2"].state.status == "pending" and "not started" in runs["a-s2"].problems[0]
    assert runs["old-s1"].problems == ["not named by sweep.json"]


@pytest.mark.parametrize(
    "content",
    [
        "{", "{}", "[]", "5", "null", "\x00", '{"name": "s", "baseline": "a", "runs": [{}]}',
        '{"name": 5, "baseline": "a", "runs": [{"name": "a", "group": "a"}]}',
        '{"name": "s", "baseline": [], "runs": [{"name": "a", "group": "a"}]}',
        '{"name": "s", "baseline": "a", "runs": [{"name": 5, "group": "a"}]}',
        '{"name": "s", "baseline": "a", "runs": [{"name": "a", "group": "a", "seed": "x"}]}',
        '{"name": "s", "baseline": "a", "runs": [{"name": "a", "group": "a", "values": [1]}]}',
        b"\x84\xff",
    ],
)  # fmt: skip
def test_an_unreadable_sweep_json_is_named(tmp_path: Path, content: str | bytes) -> None:
    (tmp_path / "sweep.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match="sweep.json: unreadable"):
        read_sweep(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x84\xff", b"[1]", b"5", b"null", b"{}", b"{"])
@pytest.mark.parametrize("name", ["config.yaml", "shape.json", "provenance.json", "state.json", "metrics.jsonl"])
def test_a_sweep_is_compared_whatever_one_file_of_one_run_holds(tmp_path: Path, name: str, content: bytes) -> None:
    from olmo_ext.compare.comparison import compare_sweep
    from olmo_ext.compare.table import to_csv, to_json

    groups: dict[str, dict[str, Any]] = {"a": {"final": 3.0, "steps": 10}, "b": {"final": 2.9, "steps": 10}}
    path = make_sweep(tmp_path / "s", groups, baseline="a", seeds=[1, 2])
    (path / "b-s1" / name).write_bytes(content)
    sweep = read_sweep(path)
    result = compare_sweep(sweep, label=None, expected=None)
    assert json.loads(json.dumps(to_json(result))) and "a-s2" in to_csv(sweep)
    broken = next(run for run in sweep.runs if run.name == "b-s1")
    if name in ("shape.json", "provenance.json", "config.yaml") and content != b"{}":
        assert f"no readable {name}" in broken.problems
    if name == "state.json":
        assert not broken.finished


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
    (path / "a-s1" / "evals" / "x.jsonl").write_text('{"task": "t"}\nnot json\n[1]\n')
    (path / "a-s1" / "diagnosis").mkdir()
    (path / "a-s1" / "diagnosis" / "step10.json").write_text("[1]")
    run = read_sweep(path).runs[0]
    assert run.problems == [
        "no readable shape.json",
        "evals/x.jsonl line 2 is not JSON",
        "evals/x.jsonl line 3 is no JSON object",
        "diagnosis/step10.json is no readable JSON object",
    ]
    assert len(run.evaluations) == 1
    assert np.isfinite(run.last("eval/corpus/CrossEntropyLoss") or np.nan)
