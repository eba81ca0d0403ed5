"""Saves in the background, as on a GPU: training goes on, and a failed write stops it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.base.sections import TrainConfig
from olmo_ext.training.train import train

pytestmark = pytest.mark.once


def in_background(*, fails: bool = False, after: str = "") -> None:
    """Write in a thread; the checkpoint of step 2 only after the run has recorded `after`."""
    from olmo_ext.base.errors import WorkError
    from olmo_ext.training import saving
    from olmo_ext.training.checkpoint import CheckpointStore

    saving.writes_in_background = lambda device: True  # type: ignore[assignment]
    original = CheckpointStore.write

    def write(self, snapshot):
        deadline = time.monotonic() + 30
        while snapshot.step == 2 and after not in (self.path.parent / "metrics.jsonl").read_text():
            assert time.monotonic() < deadline, "training has waited for the write"
            time.sleep(0.01)
        if fails and snapshot.step > 2:
            raise WorkError(f"step{snapshot.step} could not be written")
        return original(self, snapshot)

    CheckpointStore.write = write  # type: ignore[method-assign]


def test_what_was_gathered_does_not_count_the_steps_that_follow():
    """AdamW counts in place, on the CPU beside weights on a GPU, while a thread writes: the counter would be ahead."""
    import torch

    from olmo_ext.training.tensor_state import gather

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "param_names": ["weight", "bias"]}])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    _, moments = gather(model, optimizer)
    optimizer.step()
    assert {float(own["step"]) for own in moments.values()} == {1.0}


def test_rows_up_to_a_checkpoint_are_on_the_disk_before_it_is_complete(forked, config, tmp_path):
    """A crash of the machine, unlike a kill, loses what was written and not fsynced; no later attempt repeats it."""
    run = tmp_path / "run"

    def recorded() -> int:
        synced, rename = os.fsync, os.rename
        rows = run / "metrics.jsonl"
        durable = [0]

        def fsync(descriptor: int) -> None:
            synced(descriptor)
            if os.readlink(f"/proc/self/fd/{descriptor}") == str(rows):
                durable[0] = rows.stat().st_size

        def renamed(source, target) -> None:
            if Path(target).name.startswith("step"):
                last = json.loads(rows.read_bytes()[: durable[0]].splitlines()[-1])
                print("in place:", Path(target).name, "rows until step", last["step"])
            rename(source, target)

        os.fsync, os.rename = fsync, renamed  # type: ignore[assignment]
        return train(config("save_interval=2", "max_duration=4"), run_directory=run)

    ended = forked(recorded)
    assert ended.code == 0, ended.output
    lines = [line for line in ended.output.splitlines() if line.startswith("in place:")]
    assert lines == [f"in place: step{step} rows until step {step}" for step in (2, 4)]


def test_the_checkpoints_that_are_kept_are_counted_from_every_interval(config, monkeypatch):
    from olmo_ext.training import saving

    seen: list[int] = []
    monkeypatch.setattr(saving.checkpoint, "check_space", lambda path, *, size, kept: seen.append(kept))
    store = type("Store", (), {"path": None})()
    for first, second in ((2, 3), (2, 2), (4, None), (None, 5), (None, None), (7, 12), (100, 1)):
        config = TrainConfig(save_interval=first, save_interval_unsharded=second)
        saver = saving.Saver(
            store,
            config=config,
            config_text="",
            checkpoint_bytes=1,
            rows=Path("none"),
            ranks=None,
            extra={},
            saved=lambda step: None,
        )
        saver.check_space(12)
        assert seen.pop() == sum(saver.is_permanent(step, 12) for step in range(1, 13)), (first, second)


@pytest.mark.parametrize("number", [1, 2])
def test_training_goes_on_while_a_checkpoint_is_written_and_it_is_that_of_its_step(
    forked, on_ranks, config, tmp_path, same_checkpoint, number
):
    background, plain = tmp_path / "background", tmp_path / "plain"
    text = config("save_interval=2", "max_duration=5")

    def child(rank: int = 0):
        in_background(after='"step": 3')
        return train(text, run_directory=background)

    if number == 1:
        assert forked(child).code == 0
        assert forked(lambda: train(text, run_directory=plain)).code == 0
    else:
        ended = on_ranks(2, child)
        assert [end.code for end in ended] == [0, 0], ended
        assert {end.code for end in on_ranks(2, lambda rank: train(text, run_directory=plain))} == {0}
    for step in (2, 4, 5):
        same_checkpoint(plain / f"checkpoints/step{step}", background / f"checkpoints/step{step}")
    assert RunDirectory(background).read_state().step == 5


def test_a_write_that_fails_in_the_background_stops_all_ranks_and_the_older_one_stays(on_ranks, config, tmp_path):
    run = tmp_path / "run"
    text = config("save_interval=2", "max_duration=10000", "save_data_indices=false")

    def child(rank: int):
        in_background(fails=True)
        return train(text, run_directory=run)

    ended = on_ranks(2, child, seconds=60)
    assert [end.code for end in ended] == [1, 1], ended
    state = RunDirectory(run).read_state()
    assert state.status == "failed" and "step4 could not be written" in state.reason and state.step == 2
    assert (run / "checkpoints/latest").resolve().name == "step2"


@pytest.mark.parametrize("number", [1, 2])
def test_a_signal_during_a_background_write_ends_with_one_checkpoint_of_its_step(
    forked, on_ranks, config, tmp_path, number
):
    """The last rank alone is told, in the middle of the write of step 2: all agree on step 3."""
    run = tmp_path / "run"

    def child(rank: int = 0):
        from olmo_ext.training.session import Session

        in_background(after='"step": 3')
        original = Session.wants_metrics

        def wants(self: Session, step: int) -> bool:
            if step == 3 and rank == number - 1:
                os.kill(os.getpid(), signal.SIGUSR2)
            return original(self, step)

        Session.wants_metrics = wants  # type: ignore[method-assign]
        return train(config("save_interval=2", "max_duration=50"), run_directory=run)

    ended = [forked(child)] if number == 1 else on_ranks(2, child)
    assert {end.code for end in ended} == {75}, ended
    assert RunDirectory(run).read_state().step == 3
    complete = sorted(path.parent.name for path in run.glob("checkpoints/*/complete.json"))
    assert complete == ["latest", "step2", "step3"] and len(list((run / "checkpoints").iterdir())) == 3
