"""Which runs a folder holds: one answer for launch, status, compare and sync."""

from __future__ import annotations

from pathlib import Path

import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.base.run_directory import RunDirectory, RunState
from olmo_ext.base.sweep_directory import SweepDirectory


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDirectory:
    for name in ("b", "a"):
        RunDirectory(tmp_path / name).write_config({"run_name": name})
    (tmp_path / "logs").mkdir()
    return SweepDirectory(tmp_path)


def test_runs_trained_one_by_one_are_the_folders_with_a_config_by_name(sweep: SweepDirectory) -> None:
    assert not sweep.is_declared()
    assert [run.name for run in sweep.runs()] == ["a", "b"]


def test_a_declared_sweep_has_the_runs_and_the_order_of_its_description(sweep: SweepDirectory) -> None:
    sweep.write_description({"runs": [{"name": "b"}, {"name": "never begun"}]})
    assert [run.name for run in sweep.runs()] == ["b", "never begun"]
    assert [run.name for run in sweep.run_folders()] == ["a", "b"]


def test_a_runs_folder_is_a_sweep_of_one_and_lies_in_the_sweep_above_it(sweep: SweepDirectory) -> None:
    waiting = RunDirectory(sweep.path / "waiting")
    waiting.write_state(RunState())
    for path in (sweep.path / "a", waiting.path):
        assert [run.path for run in SweepDirectory(path).runs()] == [path]
        assert SweepDirectory.around(path).path == sweep.path
    assert SweepDirectory.around(sweep.path).path == sweep.path


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"runs": [{}]}', '{"runs": [{"name": 1}]}', '{"runs": 5}'])
def test_what_is_no_description_is_named(sweep: SweepDirectory, text: str) -> None:
    sweep.description_path.write_text(text)
    with pytest.raises(InputError, match="sweep.json: not a sweep's description"):
        sweep.runs()
