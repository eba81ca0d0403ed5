"""The scripts beside the command line end as it does: an exit code that means the same, one line for bad input."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import click
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize("raised", [KeyboardInterrupt, click.Abort])
def test_a_ctrl_c_while_training_is_being_loaded_is_130_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: type[BaseException]
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise raised

    monkeypatch.setattr("olmo_ext.training.train_command.train.callback", interrupted)
    monkeypatch.setattr(sys, "argv", ["train.py", "config.yaml"])
    assert runpy.run_path(str(SCRIPTS / "train.py"))["main"]() == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"runs": [{}]}', '{"runs": [{"name": 7}]}', "\x00"])
def test_a_damaged_description_of_a_sweep_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text(text)
    command = [sys.executable, str(SCRIPTS / "copy_metrics.py"), "sweep", "copy"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "copy").exists()
    assert done.stderr.startswith("copy_metrics: sweep/sweep.json: not a sweep's description")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["compare", "nowhere"], ["tarin"], ["--version"]], ids=" ".join)
def test_a_command_inside_a_job_prints_and_ends_as_on_a_command_line(tmp_path: Path, arguments: list[str]) -> None:
    entry = str(SCRIPTS.parent / "olmo_ext" / "launch" / "entry" / "command.py")
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parent)}
    ends = []
    for start in ([entry], ["-m", "olmo_ext"]):
        command = [sys.executable, *start, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        ends.append((done.returncode, done.stdout, done.stderr))
    assert ends[0] == ends[1] and (ends[0][1] or ends[0][2])
