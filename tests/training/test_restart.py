"""A run that is stopped, killed or started again is the run that was never interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.base.run_directory import MetricsRow, RunDirectory
from olmo_ext.training.identity import check_same_run
from olmo_ext.training.train import train

pytestmark = pytest.mark.once


def stop_at(step: int, number: int, *, rank: int = 0) -> None:
    """Send ourselves a signal inside a step."""
    from olmo_ext.training.session import Session

    original = Session.wants_metrics

    def wants(self: Session, at: int) -> bool:
        if at == step and self.ranks.rank == rank and not self.stop.is_set:
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        return original(self, at)

    Session.wants_metrics = wants  # type: ignore[method-assign]


def values_of(run: Path, metric_rows) -> dict[int, tuple]:
    directory = RunDirectory(run)
    names = ("train/CrossEntropyLoss", "optim/total_grad_norm", "optim/learning_rate")
    return {
        row.step: (row.tokens, row.flops, *(row.values[name] for name in names))
        for row in directory.read_metrics()
        if row.kind == "train"
    }


@pytest.fixture
def straight(forked, config, tmp_path):
    """Nine steps with dropout, never interrupted; 96 samples, so the second epoch begins after step 12."""
    run = tmp_path / "straight"
    assert forked(lambda: train(config(*OVERRIDES), run_directory=run)).code == 0
    return run


OVERRIDES = ("max_duration=15", "model.residual_dropout=0.1", "save_interval=4", "eval_interval=6")


def test_resume_equals_an_uninterrupted_run(
    forked, config, tmp_path, straight, same_checkpoint, sample_ids, metric_rows
):
    run = tmp_path / "stopped"
    text = config(*OVERRIDES)

    def interrupted(step: int, number: int):
        stop_at(step, number)
        return train(text, run_directory=run)

    first = forked(lambda: interrupted(5, signal.SIGUSR2))
    assert first.code == 75, first.output
    state = RunDirectory(run).read_state()
    assert (state.status, state.step, state.max_steps) == ("requeued", 5, 15) and "SIGUSR2" in state.reason
    # In the second epoch as well, and at a step that is due for a save anyway.
    assert forked(lambda: interrupted(12, signal.SIGTERM)).code == 75
    assert forked(lambda: interrupted(13, signal.SIGUSR1)).code == 75
    # The last step of a run is not interrupted by a signal: the run is done.
    last = forked(lambda: interrupted(15, signal.SIGINT))
    assert last.code == 0, last.output
    same_checkpoint(straight / "checkpoints/step15", run / "checkpoints/step15")
    assert values_of(run, metric_rows) == values_of(straight, metric_rows)
    assert sample_ids(run) == sample_ids(straight)
    assert sorted(sum((ids for step, ids in sample_ids(run).items() if step <= 12), [])) == list(range(96))
    evaluations = [(row["step"], row["values"]) for row in metric_rows(run, "eval")]
    assert evaluations == [(row["step"], row["values"]) for row in metric_rows(straight, "eval")]
    assert [step for step, _ in evaluations] == [6, 12, 15]
    attempts = [(row["attempt"], row["step"]) for row in metric_rows(run, "attempt")]
    assert attempts == [(1, 0), (2, 5), (3, 12), (4, 13)]
    state = RunDirectory(run).read_state()
    assert (state.status, state.step, state.attempt) == ("done", 15, 4)
    assert sorted(path.name for path in (run / "logs").glob("*.log")) == [f"attempt{n}-rank0.log" for n in range(1, 5)]


@pytest.mark.parametrize(
    "setting",
    [
        ("early_stopping_factor=3",),
        ("scheduler.grad_clip_warmup_steps=5", "scheduler.grad_clip_warmup_factor=0.1"),
    ],
    ids=["the loss before", "the norm to clip to"],
)
def test_what_a_step_takes_from_the_step_before_is_the_same_after_a_restart(
    forked, config, tmp_path, same_checkpoint, setting
):
    straight, run = tmp_path / "straight", tmp_path / "run"
    text = config(*setting, "max_duration=7")

    def half():
        stop_at(3, signal.SIGTERM)
        return train(text, run_directory=run)

    assert forked(lambda: train(text, run_directory=straight)).code == 0
    assert forked(half).code == 75
    ended = forked(lambda: train(text, run_directory=run))
    assert ended.code == 0, ended.output
    same_checkpoint(straight / "checkpoints/step7", run / "checkpoints/step7")
    states = [json.loads((path / "checkpoints/step7/train_state.json").read_text()) for path in (straight, run)]
    assert states[0]["train_loss"] == states[1]["train_loss"] and states[0]["min_train_loss"] < float("inf")


def test_killed_anywhere_a_run_ends_with_the_same_weights(forked, config, tmp_path, straight, same_checkpoint):
    run = tmp_path / "killed"
    text = config(*OVERRIDES, "save_interval=2")

    def killed(step: int):
        stop_at(step, signal.SIGKILL)
        return train(text, run_directory=run)

    for step in (1, 3, 8, 14):
        assert forked(lambda step=step: killed(step)).code == -signal.SIGKILL
        assert RunDirectory(run).read_state().status == "running"
    assert forked(lambda: train(text, run_directory=run)).code == 0
    same_checkpoint(straight / "checkpoints/step15", run / "checkpoints/step15")
    steps = [row.step for row in RunDirectory(run).read_metrics() if row.kind == "train"]
    assert steps == list(range(1, 16))


def test_a_kill_between_the_last_save_and_its_evaluation_loses_no_evaluation(forked, config, tmp_path, metric_rows):
    run = tmp_path / "run"

    def killed():
        from olmo_ext.upstream.trainer import RunTrainer

        RunTrainer.eval = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        return train(config(), run_directory=run)

    assert forked(killed).code == -signal.SIGKILL
    assert metric_rows(run, "eval") == []
    again = forked(lambda: train(config(), run_directory=run))
    assert again.code == 0, again.output
    assert [row["step"] for row in metric_rows(run, "eval")] == [4]
    assert [row["step"] for row in metric_rows(run, "train")] == [1, 2, 3, 4]


def test_the_same_command_in_a_finished_run_exits_at_once_and_changes_nothing(forked, config, tmp_path):
    run = tmp_path / "run"
    assert forked(lambda: train(config(), run_directory=run)).code == 0
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*")}
    began = time.monotonic()
    assert train(config("console_log_interval=2", "device_train_microbatch_size=4"), run_directory=run) == 0
    assert time.monotonic() - began < 2
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*")} == before


def test_another_config_in_a_run_is_refused_and_the_difference_named(forked, config, tmp_path, tokens):
    run = tmp_path / "run"
    assert forked(lambda: train(config(), run_directory=run)).code == 0
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    for override, named in (
        ("model.ffn.d_ff=32", "d_ff: 24 -> 32"),
        ("optimizer.learning_rate=2e-2", "learning_rate: 0.01 -> 0.02"),
        ("seed=4", "seed: 3 -> 4"),
        ("global_train_batch_size=4", "global_train_batch_size: 8 -> 4"),
        ("max_duration=8", "--extend"),
    ):
        with pytest.raises(InputError, match=named.replace("(", ".")):
            train(config(override), run_directory=run)
    with pytest.raises(InputError, match="explicit scheduler.t_max"):
        train(config("max_duration=8"), run_directory=run, extend=True)
    with pytest.raises(InputError, match="shorter"):
        train(config("max_duration=3"), run_directory=run, extend=True)
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before


def test_a_run_that_never_took_a_step_takes_a_corrected_config(forked, config, tmp_path, metric_rows):
    run = tmp_path / "run"

    def dies_in_its_first_step(text):
        from olmo_ext.upstream.trainer import RunTrainer

        def die(self, batch):
            raise AssertionError("no such kernel")

        RunTrainer.train_batch = die  # type: ignore[method-assign]
        return train(text, run_directory=run)

    assert forked(lambda: dies_in_its_first_step(config("model.ffn.d_ff=32"))).code == 1
    assert [row["kind"] for row in metric_rows(run)] == ["attempt"]
    ended = forked(lambda: train(config(), run_directory=run))
    assert ended.code == 0, ended.output
    assert RunDirectory(run).read_config()["model"]["ffn"]["d_ff"] == 24
    assert [(row["kind"], row["attempt"]) for row in metric_rows(run)][:2] == [("attempt", 1), ("attempt", 2)]


@pytest.mark.parametrize("left", ["row", "checkpoint", "torn row"])
def test_whatever_an_attempt_left_beside_itself_holds_the_config(config, tmp_path, left):
    run = RunDirectory(tmp_path / "run")
    run.write_config(config("model.ffn.d_ff=32").plain())
    run.append_metrics(MetricsRow(kind="attempt", attempt=1, step=0))
    check_same_run(config(), run, extend=False)
    if left == "row":
        run.append_metrics(MetricsRow(kind="train", attempt=1, step=1))
    elif left == "torn row":
        with open(run.metrics_path, "a") as file:
            file.write('{"kind": "tra')
    else:
        run.checkpoints.mkdir()
    with pytest.raises(InputError, match="another config"):
        check_same_run(config(), run, extend=False)


@pytest.mark.parametrize("lost", ["deleted", "empty", "edited"])
def test_another_config_is_refused_by_the_checkpoint_where_the_runs_own_was_lost(forked, config, tmp_path, lost):
    run = tmp_path / "run"

    def half():
        stop_at(2, signal.SIGTERM)
        return train(config("save_interval=2"), run_directory=run)

    assert forked(half).code == 75
    own, first = run / "config.yaml", {path: path.read_bytes() for path in (run / "logs").iterdir()}
    if lost == "deleted":
        own.unlink()
    else:
        own.write_text("" if lost == "empty" else config("optimizer.learning_rate=2e-2").dump())
    (run / "state.json").unlink()
    with pytest.raises(InputError, match="learning_rate: 0.01 -> 0.02"):
        train(config("optimizer.learning_rate=2e-2"), run_directory=run)
    if lost != "edited":
        ended = forked(lambda: train(config("save_interval=2"), run_directory=run))
        assert ended.code == 0 and "continuing from" in ended.output, ended.output
        # The attempt has its own number, and with it its own files, although state.json no longer said the last one.
        assert [row.attempt for row in RunDirectory(run).read_metrics() if row.kind == "attempt"] == [1, 2]
        assert first and all(path.read_bytes() == content for path, content in first.items())


def test_a_run_with_a_schedule_horizon_can_be_extended(forked, config, tmp_path, same_checkpoint):
    short, long = tmp_path / "short", tmp_path / "long"
    horizon = "scheduler.t_max=6"
    assert forked(lambda: train(config(horizon), run_directory=short)).code == 0
    ended = forked(lambda: train(config(horizon, "max_duration=6"), run_directory=short, extend=True))
    assert ended.code == 0, ended.output
    assert forked(lambda: train(config(horizon, "max_duration=6"), run_directory=long)).code == 0
    same_checkpoint(short / "checkpoints/step6", long / "checkpoints/step6")
    assert RunDirectory(short).read_config()["max_duration"] == 6


def test_moved_data_is_accepted_and_changed_data_refused(forked, config, tmp_path, tokens):
    folder = tmp_path / "moved"
    shutil.copytree(tokens, folder)
    run = tmp_path / "run"

    def text(*names: str):
        section = {"paths": [str(folder / f"{name}.bin") for name in names], "memmap_dtype": "uint16"}
        return config("save_interval=2", data=section)

    def half():
        stop_at(2, signal.SIGTERM)
        return train(config("save_interval=2"), run_directory=run)

    assert forked(half).code == 75
    swapped = forked(lambda: train(text("b", "a"), run_directory=run))
    assert swapped.code == 2 and "same in another order" in swapped.output
    assert forked(lambda: train(config("device_train_microbatch_size=3"), run_directory=run)).code == 2
    state = RunDirectory(run).read_state()
    assert (state.status, state.step, state.max_steps) == ("failed", 2, 4)
    content = bytearray((folder / "b.bin").read_bytes())
    content[0] ^= 1
    (folder / "b.bin").write_bytes(content)
    changed = forked(lambda: train(text("a", "b"), run_directory=run))
    assert changed.code == 2 and "b.bin" in changed.output
    shutil.copy(tokens / "b.bin", folder / "b.bin")
    assert forked(lambda: train(text("a", "b"), run_directory=run)).code == 0


def test_two_processes_cannot_train_one_run(forked, config, tmp_path):
    run = tmp_path / "run"

    def both():
        from olmo_ext.training.train import only_one

        with only_one(RunDirectory(run)):
            return train(config(), run_directory=run)

    ended = forked(both)
    assert ended.code == 2 and "is training this run" in ended.output


def test_a_second_interrupt_leaves_at_once(forked, config, tmp_path):
    run = tmp_path / "run"

    def twice():
        from olmo_ext.training import signals
        from olmo_ext.training.session import Session
        from olmo_ext.weights_and_biases import live_run as wandb_run

        signals.REPEAT_SECONDS = 0.05
        # A server that does not answer is not waited for.
        wandb_run.NullRun.finish = lambda self, code=0: time.sleep(100)  # type: ignore[method-assign]
        original = Session.wants_metrics

        def wants(self: Session, step: int) -> bool:
            if step == 2:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            return original(self, step)

        Session.wants_metrics = wants  # type: ignore[method-assign]
        return train(config(), run_directory=run)

    ended = forked(twice, seconds=60)
    assert ended.code == 130, ended.output
    assert "Ctrl-C again leaves at once" in ended.output
    assert RunDirectory(run).read_state().status == "failed"
    assert forked(lambda: train(config(), run_directory=run)).code == 0


def test_interrupts_after_the_end_leave_what_was_written(forked, config, tmp_path):
    """While W&B takes the last rows: the run is done, whatever comes."""
    run = tmp_path / "run"

    def late():
        from olmo_ext.training import signals
        from olmo_ext.weights_and_biases import live_run as wandb_run

        signals.REPEAT_SECONDS = 0.05

        def finish(self, code: int = 0) -> None:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)

        wandb_run.NullRun.finish = finish  # type: ignore[method-assign]
        return train(config("max_duration=2"), run_directory=run)

    ended = forked(late)
    assert ended.code == 130, ended.output
    state = RunDirectory(run).read_state()
    assert (state.status, state.step, state.reason) == ("done", 2, "")


def test_a_time_limit_counts_from_the_command_and_not_from_the_end_of_the_imports(forked, config, tmp_path):
    def slow():
        from olmo_ext.training import distributed, session

        group, limit = distributed.process_group, session.TimeLimit

        @contextmanager
        def late():
            time.sleep(0.5)
            with group() as ranks:
                yield ranks

        def recorded(*, seconds, end_time):
            print("seconds left:", seconds)
            return limit(seconds=seconds, end_time=end_time)

        distributed.process_group, session.TimeLimit = late, recorded
        return train(config("max_duration=1", "time_limit=1000"), run_directory=tmp_path / "run")

    ended = forked(slow)
    left = [float(line.split()[-1]) for line in ended.output.splitlines() if line.startswith("seconds left:")]
    assert ended.code == 0 and len(left) == 1 and left[0] <= 999.5, ended.output


def test_a_damaged_checkpoint_beyond_the_end_is_not_taken_for_the_last_one(forked, config, tmp_path):
    run = tmp_path / "run"
    assert forked(lambda: train(config("max_duration=6", "save_interval=2"), run_directory=run)).code == 0
    weights = run / "checkpoints/step6/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    ended = forked(lambda: train(config("max_duration=6", "save_interval=2", "stop_at=5"), run_directory=run))
    assert ended.code == 0 and "step6: model.safetensors is damaged" in ended.output, ended.output
    assert RunDirectory(run).read_state().step == 5


def test_the_run_saves_before_its_time_limit(forked, config, tmp_path):
    run = tmp_path / "run"
    text = config("max_duration=100000", "time_limit=6", "save_data_indices=false", "console_log_interval=100")
    began = time.monotonic()
    ended = forked(lambda: train(text, run_directory=run))
    assert ended.code == 75, ended.output
    assert time.monotonic() - began < 60
    state = RunDirectory(run).read_state()
    assert state.status == "requeued" and state.reason == "time limit" and state.step > 0
    saved = json.loads((run / f"checkpoints/step{state.step}/train_state.json").read_text())
    assert saved["step"] == state.step


def test_a_signal_before_the_first_step_loses_nothing(forked, config, tmp_path, straight, same_checkpoint):
    from olmo_ext.training.signals import StopRequest

    run = tmp_path / "run"

    def asked_before():
        stop = StopRequest()
        stop.request("signal SIGTERM")
        return train(config(*OVERRIDES), run_directory=run, stop=stop)

    for attempt in (1, 2):
        assert forked(asked_before).code == 75
        state = RunDirectory(run).read_state()
        assert (state.status, state.step, state.attempt) == ("requeued", 0, attempt)
    assert forked(lambda: train(config(*OVERRIDES), run_directory=run)).code == 0
    same_checkpoint(straight / "checkpoints/step15", run / "checkpoints/step15")


def test_a_process_that_starts_while_another_finishes_the_run_leaves_it_as_it_is(forked, config, tmp_path):
    """Seen: importing torch takes seconds, the run was done by then, and its folder got one more, empty attempt."""
    run = tmp_path / "run"

    def late(*overrides: str) -> int:
        import olmo_ext.training.train as module

        only_one = module.only_one

        @contextmanager
        def after_another(directory: RunDirectory):
            module.only_one = only_one
            assert train(config("max_duration=2"), run_directory=run) == 0
            (tmp_path / "metrics").write_bytes(directory.metrics_path.read_bytes())
            with only_one(directory):
                yield

        module.only_one = after_another
        return train(config("max_duration=2", *overrides), run_directory=run)

    ended = forked(late)
    assert ended.code == 0 and "done at step 2, nothing to do" in ended.output, ended.output
    assert RunDirectory(run).metrics_path.read_bytes() == (tmp_path / "metrics").read_bytes()
    assert RunDirectory(run).read_state().attempt == 1
    shutil.rmtree(run)
    other = forked(lambda: late("seed=4"))
    assert other.code == 2 and "seed" in other.output, other.output
    assert RunDirectory(run).read_state().status == "done"
