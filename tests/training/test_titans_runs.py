"""A memory trains as any mixer does: the same on one and on two ranks, and over a restart."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from olmo_ext.training.train import train

pytestmark = pytest.mark.once

TITANS = ("model.attention.type=titans", "model.attention.form=mag", "model.attention.window=6")
TITANS += ("model.attention.chunk_size=5", "model.attention.persistent_tokens=2")
FSDP = ("distributed_strategy=fsdp", "fsdp.wrapping_strategy=by_block")


def test_ranks_strategies_and_restarts_give_the_same_memory(
    forked, on_ranks, config, tmp_path, metric_rows, same_checkpoint
):
    text = config(*TITANS, "model.residual_dropout=0.1", "save_interval=2")
    for stop_after in ("stop_after=2", "stop_after=null"):
        part = config(*TITANS, "model.residual_dropout=0.1", "save_interval=2", stop_after)
        assert forked(lambda part=part: train(part, run_directory=tmp_path / "parts")).code == 0
    assert forked(lambda: train(text, run_directory=tmp_path / "straight")).code == 0
    same_checkpoint(tmp_path / "straight/checkpoints/step4", tmp_path / "parts/checkpoints/step4")

    runs = {"single": (0, ()), "ddp": (2, ("device_train_microbatch_size=2",)), "fsdp": (2, FSDP)}
    for name, (number, more) in runs.items():
        own = config(*TITANS, *more)

        def child(rank: int = 0, own=own, name=name) -> int:
            return train(own, run_directory=tmp_path / name)

        ended = on_ranks(number, child) if number else [forked(child)]
        assert {end.code for end in ended} == {0}, ended
    losses = [row["values"]["train/CrossEntropyLoss"] for row in metric_rows(tmp_path / "single", "train")]
    reference = load_file(tmp_path / "single/checkpoints/step4/model.safetensors")
    for name in ("ddp", "fsdp"):
        found = [row["values"]["train/CrossEntropyLoss"] for row in metric_rows(tmp_path / name, "train")]
        assert found == pytest.approx(losses, rel=1e-5)
        weights = load_file(tmp_path / name / "checkpoints/step4/model.safetensors")
        assert weights.keys() == reference.keys()
        for key, tensor in reference.items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-3, atol=1e-4)
