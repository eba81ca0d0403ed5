"""Readers of a run's folder see the surviving history and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from olmo_ext.errors import InputError
from olmo_ext.rundir import MetricsRow, RunDirectory, RunState


def _row(kind: str, attempt: int, step: int, value: float = 0.0) -> MetricsRow:
    return MetricsRow(kind=kind, attempt=attempt, step=step, values={"train/CrossEntropyLoss": value})


def test_rows_of_a_lost_attempt_beyond_the_restored_step_do_not_count(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.append_metrics(_row("attempt", 1, 0))
    for step in range(1, 20):
        run.append_metrics(_row("train", 1, step, value=1.0))
    run.append_metrics(_row("attempt", 2, 10))
    for step in range(11, 15):
        run.append_metrics(_row("train", 2, step, value=2.0))
    run.append_metrics(_row("attempt", 3, 0))
    run.append_metrics(_row("train", 3, 1, value=3.0))
    run.append_metrics(_row("attempt", 4, 1))
    run.append_metrics(_row("train", 4, 2, value=4.0))
    train = [(row.step, row.values["train/CrossEntropyLoss"]) for row in run.read_metrics() if row.kind == "train"]
    assert train == [(1, 3.0), (2, 4.0)]
    assert len(run.read_all_metrics()) == 4 + 19 + 4 + 1 + 1


def test_two_attempts_show_the_first_up_to_the_restored_step_then_the_second(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    for attempt, restored, last in ((1, 0, 19), (2, 10, 12)):
        run.append_metrics(_row("attempt", attempt, restored))
        for step in range(restored + 1, last + 1):
            run.append_metrics(_row("train", attempt, step))
    rows = [(row.attempt, row.step) for row in run.read_metrics() if row.kind == "train"]
    assert rows == [(1, step) for step in range(1, 11)] + [(2, 11), (2, 12)]


def test_a_torn_line_costs_that_line_only(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.append_metrics(_row("train", 1, 1))
    with open(run.metrics_path, "ab") as file:
        file.write(b'{"kind": "train", "attempt": 1, "st\xff')
    run.append_metrics(_row("train", 1, 2))
    assert [row.step for row in run.read_metrics()] == [1, 2]


def test_an_empty_or_torn_state_counts_as_never_written(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    assert run.read_state().status == "pending"
    run.write_state(RunState(status="running", attempt=2, step=7))
    assert (run.read_state().attempt, run.read_state().step) == (2, 7)
    for torn in ("", '{"status": "run'):
        run.state_path.write_text(torn)
        assert run.read_state().status == "pending"


def test_reading_a_folder_that_is_no_run_is_one_clear_line_and_creates_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "nothing")
    for read in (run.read_config, run.read_shape, run.read_provenance):
        with pytest.raises(InputError, match="nothing"):
            read()
    assert run.read_metrics() == [] and not run.path.exists()
