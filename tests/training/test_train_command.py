"""The commands as a user types them: torchrun with two ranks, stopped by a signal, continued by `olmo-ext train`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from olmo_ext.base.run_directory import RunDirectory

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]


def wait_for_step(run: Path, step: int, process: subprocess.Popen, *, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if any(row.step >= step for row in RunDirectory(run).read_metrics()):
            return
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not reached")


def test_torchrun_stopped_by_a_signal_is_continued_by_one_process(config, tmp_path):
    path, run = tmp_path / "tiny.yaml", tmp_path / "run"
    # Long enough to be caught in the middle, on any machine.
    values = config("max_duration=3000", "save_interval=1000", "save_data_indices=false", "scheduler.t_max=4000")
    path.write_text(yaml.safe_dump(values.plain()))
    port = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *port]
    command += [str(ROOT / "scripts/train.py"), str(path), "--run-directory", str(run), "--model.init_std=0.02"]
    log = open(tmp_path / "torchrun.log", "w")
    process = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path)
    try:
        wait_for_step(run, 5, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=180) != 0
    finally:
        if process.poll() is None:
            process.kill()
        log.close()
    text = (tmp_path / "torchrun.log").read_text()
    state = RunDirectory(run).read_state()
    assert state.status == "requeued" and "SIGTERM" in state.reason, text
    assert (run / f"checkpoints/step{state.step}/complete.json").is_file() and state.step >= 5
    # One process goes on from there, for a few steps more; SIGUSR1 as Slurm's warning sends it.
    command = [sys.executable, "-m", "olmo_ext.cli", "train", str(path), "--run-directory", str(run)]
    command = [sys.executable, "-c", "from olmo_ext.cli import main; main()", *command[3:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path, text=True) as one:
        wait_for_step(run, state.step + 1, one)
        one.send_signal(signal.SIGUSR1)
        output = one.communicate(timeout=180)[0]
    assert one.returncode == 75, output
    assert f"continuing from {run}/checkpoints/step{state.step}" in output and "Traceback" not in output
    after = RunDirectory(run).read_state()
    assert after.status == "requeued" and after.attempt == 2 and after.step > state.step
    # Plain lines, not one per step.
    assert len(re.findall(r"^step \d+/3000", output, re.MULTILINE)) < 10
    assert oct(os.stat(run / "metrics.jsonl").st_mode).endswith("44")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.yaml"], "missing.yaml"),
        (["tiny.yaml", "model.d_modle=512"], "d_model"),
        (["tiny.yaml", "--model.d_modle=512"], "d_model"),
        (["tiny.yaml", "max_duration=1e3.5"], "max_duration"),
        (["tiny.yaml", "--time-limit", "soon"], "time_limit"),
        (["tiny.yaml", "node=nonsense"], "node: unknown node type 'nonsense'; known: b200, rtx6000ada"),
        (["tiny.yaml", "run_name=.."], "cannot name"),
        (["tiny.yaml", "run_name=a/../../b"], "cannot name"),
        (["tiny.yaml", "run_name=/tmp/x"], "cannot name"),
        (["tiny.yaml", "run_name=../evil"], "folders below runs/, as a or a/b; each at most 120 bytes"),
        (["tiny.yaml", "run_name="], "run_name: is empty"),
        (["tiny.yaml", "model.flash_attention=true"], "model.flash_attention: the flash-attn package"),
        (["tiny.yaml", "fused_loss=true"], "fused_loss: the flash-attn package"),
        (["tiny.yaml", "model.init_fn=fan_in"], "'fan_in' is the name of a checkpoint's past"),
        (["tiny.yaml", "model.init_fn=kaiming_normal"], "one of normal, mitchell, full_megatron"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(config, tmp_path, monkeypatch, arguments, said):
    from olmo_ext.base.errors import InputError
    from olmo_ext.training.train_command import train

    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(config().dump())
    result = CliRunner().invoke(train, arguments)
    assert isinstance(result.exception, InputError) and result.exception.exit_code == 2
    assert said in str(result.exception)
    assert not Path("runs").exists()


def test_the_default_folder_is_named_for_the_run(config, tmp_path, monkeypatch):
    from olmo_ext.training import train as run
    from olmo_ext.training import train_command as command

    seen = {}

    def record(loaded, **options):
        seen.update(options, loaded=loaded)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "train", record)
    Path("tiny.yaml").write_text(config().dump())
    assert CliRunner().invoke(command.train, ["tiny.yaml", "run_name=a/b c"]).exit_code == 0
    assert seen["run_directory"] == Path("runs/a/b c")
    arguments = ["tiny.yaml", "run_name=other", "--model.n_layers=3", "--time-limit", "12:30:00", "--extend"]
    result = CliRunner().invoke(command.train, arguments)
    assert result.exit_code == 0, result
    assert seen["run_directory"] == Path("runs/other") and seen["extend"] is True
    assert seen["loaded"].time_limit == 45000 and seen["loaded"].shape.n_layers == 3
