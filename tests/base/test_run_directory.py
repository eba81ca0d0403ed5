"""Readers of a run's folder see the surviving history and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.base.run_directory import MetricsRow, RunDirectory, RunState


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


@pytest.mark.parametrize(
    "content",
    [
        b"\x00\xff\xfe binary", b"[]", b"5", b"null", b"{}", b'{"status": "flying"}',
        b'{"status": "done", "step": "7"}', b'{"status": "running", "attempt": null}',
        b'{"status": "done", "step": 1e3}', b'{"status": ["done"]}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_state_of_any_content_counts_as_never_written(tmp_path: Path, content: bytes) -> None:
    run = RunDirectory(tmp_path)
    run.state_path.write_bytes(content)
    assert run.read_state() == RunState()


def test_the_last_attempt_is_known_without_the_state(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    assert run.last_attempt() == 0
    run.write_state(RunState(status="running", attempt=4))
    run.logs.mkdir()
    for name in ("attempt2-rank0.log", "attempt12-rank1.failure", "attempt12-rank0.samples.tsv.gz", "attempt-rank"):
        (run.logs / name).touch()
    assert run.last_attempt() == 12
    (run.logs / "attempt12-rank1.failure").unlink()
    (run.logs / "attempt12-rank0.samples.tsv.gz").unlink()
    assert run.last_attempt() == 4


def test_a_state_of_a_later_version_keeps_what_is_known(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.state_path.write_text('{"status": "done", "attempt": 2, "step": 7, "mood": "good"}')
    assert (run.read_state().status, run.read_state().step) == ("done", 7)


def test_rows_of_any_content_cost_themselves_only_for_every_reader(tmp_path: Path) -> None:
    from olmo_ext.launch.run_progress import read_progress

    run = RunDirectory(tmp_path)
    odd = [
        b"\x00\xff\xfe", b"[]", b"5", b"null", b"{}", b'"kind"', b'{"kind": "train"}', b"{" * 3000, b"\r",
        b"[" * 100_000,
        b'{"kind": "train", "attempt": 1, "step": "9"}', b'{"kind": "attempt", "attempt": 1, "step": null}',
        b'{"kind": "train", "attempt": 1, "step": 9, "values": [1]}', b'{"kind": ["train"], "attempt": 1, "step": 9}',
        b'{"kind": "train", "attempt": 1, "step": 9, "tokens": "many"}',
        b'{"kind": "train", "attempt": 1, "step": 1e400}',
        b'{"kind": "train", "attempt": 1, "step": 9, "time": "noon"}',
        b'{"kind": "train", "attempt": 1, "step": ' + b"9" * 30 + b"}",
    ]  # fmt: skip
    for step, line in enumerate(odd, 1):
        run.append_metrics(_row("train", 1, step, value=1.0))
        with open(run.metrics_path, "ab") as file:
            file.write(line + b"\n")
    steps = list(range(1, len(odd) + 1))
    assert [row.step for row in run.read_metrics()] == steps
    assert [row["step"] for row in run.read_plain_metrics()] == steps
    progress = read_progress(run)
    assert progress is not None and progress.step == steps[-1] and progress.loss == 1.0


@pytest.mark.parametrize("content", ["", "5", "- a", "a: [", "\x00", "[" * 10_000])
def test_a_config_or_description_that_is_none_is_one_line(tmp_path: Path, content: str) -> None:
    run = RunDirectory(tmp_path)
    for path, read in ((run.config_path, run.read_config), (run.shape_path, run.read_shape)):
        path.write_text(content)
        with pytest.raises(InputError, match=path.name):
            read()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    reads = {run.state_path: run.read_state, run.metrics_path: run.read_metrics, run.config_path: run.read_config}
    for path, read in {**reads, run.shape_path: run.read_shape}.items():
        path.mkdir()
        with pytest.raises(InputError, match=f"{path.name}: cannot be read"):
            read()


def test_reading_a_folder_that_is_no_run_is_one_clear_line_and_creates_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "nothing")
    for read in (run.read_config, run.read_shape, run.read_provenance):
        with pytest.raises(InputError, match="nothing"):
            read()
    assert run.read_metrics() == [] and not run.path.exists()
