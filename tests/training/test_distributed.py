"""One, two and four ranks, DDP and FSDP: the same weights, gradients, samples and numbers; one fails, all stop."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from olmo_ext.base.errors import InputError
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.training.train import check_environment, train

FSDP = ("distributed_strategy=fsdp", "fsdp.wrapping_strategy=by_block")


def save_first_step(folder: Path) -> None:
    """Write initial weights and the gradients of step 1, gathered as a checkpoint gathers them, into `folder`."""
    from olmo_ext.training.session import Session
    from olmo_ext.training.tensor_state import gather

    original = Session.stop_requested

    def keep(self: Session, step: int) -> str | None:
        if step == 1:
            from torch.distributed.fsdp import FullyShardedDataParallel as Sharded

            from olmo_ext.upstream.parameter_names import clean_name

            weights, _ = gather(self.trainer.dist_model, self.trainer.optim)
            model = self.trainer.dist_model
            if isinstance(model, Sharded):
                with Sharded.summon_full_params(model, with_grads=True, writeback=False):
                    gradients = {clean_name(n): p.grad.clone() for n, p in model.named_parameters()}
            else:
                gradients = {clean_name(n): p.grad.clone() for n, p in model.named_parameters()}
            if self.ranks.is_first:
                folder.mkdir(parents=True)
                torch.save({"weights": weights, "gradients": gradients}, folder / "first.pt")
        return original(self, step)

    Session.stop_requested = keep  # type: ignore[method-assign]


@pytest.fixture
def first_step(forked, on_ranks, config, tmp_path):
    """`first_step(name, ranks, *overrides)` -> initial weights, gradients of step 1, the run's folder."""

    def run(name: str, number: int, *overrides: str, **sections):
        folder = tmp_path / name
        text = config(*overrides, **sections)

        def child(rank: int = 0):
            save_first_step(folder / "kept")
            return train(text, run_directory=folder)

        ended = on_ranks(number, child) if number else [forked(child)]
        assert [end.code for end in ended] == [0] * len(ended), ended
        kept = torch.load(folder / "kept/first.pt")
        return kept["weights"], kept["gradients"], folder

    return run


def test_weights_gradients_and_losses_are_the_same_for_every_strategy_and_number_of_ranks(
    first_step, config, metric_rows
):
    from olmo_ext.upstream.shaped_model import build_model

    text = config()
    built = build_model(text).state_dict()
    runs = {
        "single": first_step("single", 0),
        "micro-batches": first_step("micro", 0, "device_train_microbatch_size=2"),
        "one rank": first_step("one", 1),
        "ddp": first_step("ddp", 2, "device_train_microbatch_size=2"),
        "fsdp": first_step("fsdp", 2, *FSDP),
        "fsdp, one wrapper": first_step("flat", 2, "distributed_strategy=fsdp"),
        "fsdp, one rank": first_step("fsdp1", 0, *FSDP),
    }
    weights, gradients, folder = runs["single"]
    losses = [row["values"]["train/CrossEntropyLoss"] for row in metric_rows(folder, "train")]
    evaluation = metric_rows(folder, "eval")[-1]["values"]
    for name, (other_weights, other_gradients, other_folder) in runs.items():
        assert other_weights.keys() == built.keys()
        for key, tensor in built.items():
            assert torch.equal(other_weights[key], tensor), (name, key)
        for key, tensor in gradients.items():
            torch.testing.assert_close(
                other_gradients[key], tensor, rtol=1e-6, atol=1e-6 * float(tensor.abs().max()), msg=f"{name}: {key}"
            )
        rows = metric_rows(other_folder, "train")
        assert [row["values"]["train/CrossEntropyLoss"] for row in rows] == pytest.approx(losses, rel=1e-6)
        found = metric_rows(other_folder, "eval")[-1]["values"]
        # 21 instances on one and on two ranks: each counts once.
        assert found["eval/held-out/tokens"] == evaluation["eval/held-out/tokens"] == 21 * 15
        assert found == pytest.approx(evaluation, rel=1e-6)
        final = load_file(other_folder / "checkpoints/step4/model.safetensors")
        for key, tensor in load_file(folder / "checkpoints/step4/model.safetensors").items():
            torch.testing.assert_close(final[key], tensor, rtol=1e-4, atol=1e-5)


def test_masked_instances_do_not_shrink_the_gradient_on_any_number_of_ranks(first_step, config, tokens, tmp_path):
    """Upstream divides by all tokens. Here the loss is the mean over the labels that count, of all ranks."""
    import numpy as np

    random = np.random.default_rng(1)
    masks = []
    for name in ("a", "b"):
        mask = random.random((48, 16)) < 0.5
        mask[:12] = False
        mask.astype(np.bool_).tofile(tmp_path / f"{name}.mask")
        masks.append(str(tmp_path / f"{name}.mask"))
    paths = [str(tokens / "a.bin"), str(tokens / "b.bin")]
    data = {"paths": paths, "label_mask_paths": masks, "memmap_dtype": "uint16"}
    settings = ("max_grad_norm=null", "max_duration=2", "softmax_auxiliary_loss=true", "auxiliary_loss_multiplier=1e-2")
    _, gradients, folder = first_step("single", 0, *settings, data=data)
    for name, number, *more in (("ddp", 2), ("micro", 0, "device_train_microbatch_size=2"), ("fsdp", 2, *FSDP)):
        _, other, _ = first_step(name, number, *settings, *more, data=data)
        for key, tensor in gradients.items():
            torch.testing.assert_close(other[key], tensor, rtol=1e-5, atol=1e-6 * float(tensor.abs().max()))
    # By hand: the mean over the unmasked labels of the first batch.
    from olmo_ext.data.loader import build_train_loader
    from olmo_ext.upstream.shaped_model import build_model

    text = config(*settings, data=data)
    batch = next(iter(build_train_loader(text, rank=0, world_size=1, work_dir=folder)))
    model = build_model(text)
    logits = model(batch["input_ids"]).logits[:, :-1]
    keep = batch["label_mask"][:, 1:]
    assert 0 < keep.sum() < keep.numel()
    losses = torch.nn.functional.cross_entropy(logits[keep], batch["input_ids"][:, 1:][keep], reduction="sum")
    z = 1e-2 * logits[keep].logsumexp(-1).pow(2).sum()
    # Upstream's convention: S tokens an instance although S - 1 are predicted.
    ((losses + z) / keep.sum() * 15 / 16).backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_same_samples_and_losses_on_two_ranks_then_one_then_four(
    forked, on_ranks, config, tmp_path, sample_ids, metric_rows, strategy
):
    """A checkpoint does not depend on the number of ranks, nor on the strategy; a resumed run goes on saving."""
    run, straight = tmp_path / "run", tmp_path / "straight"
    more = FSDP if strategy == "fsdp" else ()
    text = config("max_duration=12", "save_interval=2", *more)
    assert forked(lambda: train(config("max_duration=12"), run_directory=straight)).code == 0

    def until(step: int, *changes: str):
        from olmo_ext.training.session import Session

        original = Session.wants_metrics

        def wants(self: Session, at: int) -> bool:
            # Only the last rank is told; all stop at the same step.
            if at == step and self.ranks.rank == self.ranks.world_size - 1:
                os.kill(os.getpid(), signal.SIGUSR2)
            return original(self, at)

        Session.wants_metrics = wants  # type: ignore[method-assign]
        changed = config("max_duration=12", "save_interval=2", *more, *changes)
        return train(changed, run_directory=run)

    assert [end.code for end in on_ranks(2, lambda rank: until(4))] == [75, 75]
    assert forked(lambda: until(9, "device_train_microbatch_size=4")).code == 75
    last = on_ranks(4, lambda rank: train(text, run_directory=run))
    assert [end.code for end in last] == [0] * 4, last
    assert sample_ids(run) == sample_ids(straight) and len(sample_ids(run)) == 12
    expected = [row["values"]["train/CrossEntropyLoss"] for row in metric_rows(straight, "train")]
    found = [row["values"]["train/CrossEntropyLoss"] for row in metric_rows(run, "train")]
    assert found == pytest.approx(expected, rel=1e-4)
    # That of step 9 was made because a signal came: it is kept until the next one.
    assert sorted(path.name for path in (run / "checkpoints").glob("step*")) == sorted(
        f"step{step}" for step in (2, 4, 6, 8, 10, 12)
    )
    assert [(row["attempt"], row["step"]) for row in metric_rows(run, "attempt")] == [(1, 0), (2, 4), (3, 9)]
    # Each rank has its log of its attempt.
    assert len(list((run / "logs").glob("attempt3-rank*.log"))) == 4


@pytest.mark.once
def test_resumed_fsdp_equals_an_uninterrupted_one_to_the_bit(on_ranks, config, tmp_path, same_checkpoint):
    run, straight = tmp_path / "run", tmp_path / "straight"
    overrides = ("max_duration=6", "save_interval=3", "model.residual_dropout=0.1", *FSDP)
    assert {end.code for end in on_ranks(2, lambda rank: train(config(*overrides), run_directory=straight))} == {0}

    def half(rank: int):
        from olmo_ext.training.session import Session

        original = Session.wants_metrics

        def wants(self: Session, at: int) -> bool:
            if at == 3:
                self.stop.request("test")
            return original(self, at)

        Session.wants_metrics = wants  # type: ignore[method-assign]
        return train(config(*overrides), run_directory=run)

    assert {end.code for end in on_ranks(2, half)} == {75}
    assert {end.code for end in on_ranks(2, lambda rank: train(config(*overrides), run_directory=run))} == {0}
    same_checkpoint(straight / "checkpoints/step6", run / "checkpoints/step6")


@pytest.mark.parametrize("way", ["killed", "raises"])
def test_one_rank_of_two_dies_and_all_are_gone_soon(on_ranks, config, tmp_path, way):
    run = tmp_path / "run"

    def child(rank: int):
        from olmo_ext.training.session import Session

        original = Session.wants_metrics

        def wants(self: Session, at: int) -> bool:
            if at == 3 and rank == 1:
                if way == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("rank 1 is broken")
            return original(self, at)

        Session.wants_metrics = wants  # type: ignore[method-assign]
        return train(config("save_interval=2"), run_directory=run)

    began = time.monotonic()
    ended = on_ranks(2, child, seconds=60)
    assert time.monotonic() - began < 60
    assert all(end.code not in (0, 75, -999) for end in ended), ended
    state = RunDirectory(run).read_state()
    assert state.status == "failed" and state.step == 2
    if way == "raises":
        assert "rank 1" in state.reason and "is broken" in state.reason


def test_a_shard_deleted_while_training_stops_all_ranks_and_is_named(on_ranks, config, tmp_path, tokens):
    import shutil

    folder, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(tokens, folder)
    data = {"paths": [str(folder / "a.bin"), str(folder / "b.bin")], "memmap_dtype": "uint16"}
    text = config("max_duration=8", "save_interval=2", data=data)

    def child(rank: int):
        from olmo_ext.training.session import Session

        original = Session.wants_metrics

        def wants(self: Session, at: int) -> bool:
            if at == 3:
                (folder / "b.bin").unlink(missing_ok=True)
            return original(self, at)

        Session.wants_metrics = wants  # type: ignore[method-assign]
        return train(text, run_directory=run)

    ended = on_ranks(2, child, seconds=60)
    assert all(end.code not in (0, 75, -999) for end in ended), ended
    state = RunDirectory(run).read_state()
    assert state.status == "failed" and "b.bin" in state.reason, state


def test_ranks_without_a_local_world_size_are_refused(monkeypatch, config, tmp_path):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="LOCAL_WORLD_SIZE.*torchrun"):
        train(config(), run_directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    check_environment()


def test_batches_that_do_not_divide_name_the_numbers(on_ranks, forked, config, tmp_path):
    ended = on_ranks(4, lambda rank: train(config("global_train_batch_size=10"), run_directory=tmp_path / "a"))
    assert all(end.code == 2 and "10 does not divide over 4 ranks" in end.output for end in ended), ended
    uneven = config("global_train_batch_size=6", "device_train_microbatch_size=4")
    ended = forked(lambda: train(uneven, run_directory=tmp_path / "b"))
    assert ended.code == 2 and "6 instances a rank" in ended.output and "micro-batches of 4" in ended.output
    ended = forked(lambda: train(config("global_train_batch_size=128"), run_directory=tmp_path / "c"))
    assert ended.code == 2 and "96 instances" in ended.output and "128" in ended.output
    assert json.loads((tmp_path / "c/state.json").read_text())["status"] == "failed"
