"""However the ranks share the model, they train what one rank trains; copies that differ stop the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from olmo_ext.base.errors import InputError
from olmo_ext.shapes.sharding import model_copies
from olmo_ext.training.train import train

STEPS = 10
LAYOUTS = {
    1: {"ddp": (1, ()), "full": (1, ("FULL_SHARD",)), "hybrid": (1, ("HYBRID_SHARD",))},
    2: {
        "ddp": (2, ()),
        "ddp over two nodes": (1, ()),
        "full": (2, ("FULL_SHARD",)),
        "full over two nodes": (1, ("FULL_SHARD",)),
        "gradients": (2, ("SHARD_GRAD_OP",)),
        "hybrid, one copy": (2, ("HYBRID_SHARD",)),
    },
    4: {
        "ddp over two nodes": (2, ()),
        "full over two nodes": (2, ("FULL_SHARD",)),
        "gradients": (4, ("SHARD_GRAD_OP",)),
        "hybrid over two nodes": (2, ("HYBRID_SHARD",)),
        "hybrid, two copies on a node": (4, ("HYBRID_SHARD", "2")),
        "hybrid of gradients": (2, ("_HYBRID_SHARD_ZERO2",)),
    },
}
"""Ranks -> layout -> ranks a node, sharding strategy, copies of the model."""


def overrides_of(sharding: tuple[str, ...]) -> list[str]:
    """AdamW with a large eps: the update then follows the gradient instead of its sign, which rounding can turn."""
    chosen = [f"max_duration={STEPS}", "optimizer.eps=0.1", "device_train_microbatch_size=2", "max_grad_norm=0.5"]
    if sharding:
        chosen += ["distributed_strategy=fsdp", "fsdp.wrapping_strategy=by_block"]
        chosen.append(f"fsdp.sharding_strategy={sharding[0]}")
    if len(sharding) > 1:
        chosen.append(f"fsdp.hybrid_sharding_num_model_replicas={sharding[1]}")
    return chosen


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("one") / "rank"


@pytest.mark.parametrize("number", sorted(LAYOUTS))
def test_every_layout_has_the_loss_gradient_norm_and_weights_of_one_rank(
    number, on_ranks, forked, config, metric_rows, tmp_path, reference
):
    if not reference.exists():
        assert forked(lambda: train(config(*overrides_of(())), run_directory=reference)).code == 0
    expected = load_file(reference / f"checkpoints/step{STEPS}/model.safetensors")
    first = metric_rows(reference, "train")[0]["values"]
    assert first["optim/total_grad_norm"] > 0.5  # clipped: a wrong norm would change the weights

    def child(rank: int) -> int:
        join = torch.distributed.init_process_group
        for name, (per_node, sharding) in LAYOUTS[number].items():
            store = torch.distributed.FileStore(str(tmp_path / f"{name}.store"), number)
            together = {"store": store, "rank": rank, "world_size": number}
            torch.distributed.init_process_group = lambda together=together, **options: join(**together, **options)
            os.environ |= {"LOCAL_WORLD_SIZE": str(per_node), "LOCAL_RANK": str(rank % per_node)}
            if code := train(config(*overrides_of(sharding)), run_directory=tmp_path / name):
                return code
        return 0

    ended = on_ranks(number, child, seconds=240)
    assert [end.code for end in ended] == [0] * number, ended
    for name in LAYOUTS[number]:
        values = metric_rows(tmp_path / name, "train")[0]["values"]
        for key in ("train/CrossEntropyLoss", "optim/total_grad_norm"):
            assert values[key] == pytest.approx(first[key], rel=1e-5), (name, key)
        final = load_file(tmp_path / name / f"checkpoints/step{STEPS}/model.safetensors")
        for key, tensor in expected.items():
            torch.testing.assert_close(final[key], tensor, rtol=1e-4, atol=1e-6, msg=f"{name}: {key}")


@pytest.mark.parametrize("sharding, world, nodes, asked, words", [
    ("HYBRID_SHARD", 2, 2, None, "never averages"),
    ("_HYBRID_SHARD_ZERO2", 4, 1, 4, "never averages"),
    ("HYBRID_SHARD", 4, 1, 3, "do not divide"),
    ("NO_SHARD", 2, 1, None, "sqrt"),
])  # fmt: skip
def test_layouts_that_train_wrongly_are_refused_with_what_is_right(sharding, world, nodes, asked, words):
    with pytest.raises(InputError, match=words) as refusal:
        model_copies(sharding, world_size=world, nodes=nodes, asked=asked)
    assert refusal.value.right and refusal.value.where.startswith("fsdp.")


def test_a_run_whose_copies_would_never_meet_is_refused_before_its_first_step(on_ranks, config, tmp_path):
    def child(rank: int) -> int:
        os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        return train(config(*overrides_of(("HYBRID_SHARD",))), run_directory=tmp_path / "run")

    ended = on_ranks(2, child)
    assert all(end.code == 2 and "never averages the gradients" in end.output for end in ended), ended


@pytest.mark.parametrize("sharding, number, odd", [((), 2, "rank 1 "), (("HYBRID_SHARD",), 4, "rank 3 ")])
def test_one_bit_in_one_weight_of_one_copy_stops_the_run_at_the_next_save(
    on_ranks, config, tmp_path, sharding, number, odd
):
    run = tmp_path / "run"

    def child(rank: int) -> int:
        from olmo_ext.training.session import Session

        original = Session.wants_metrics

        def wants(self: Session, at: int) -> bool:
            if at == 3 and rank == number - 1:
                with torch.no_grad():
                    weight = max(self.trainer.dist_model.parameters(), key=torch.Tensor.numel)
                    weight.view(torch.int32).view(-1)[0] ^= 1
            return original(self, at)

        Session.wants_metrics = wants  # type: ignore[method-assign]
        os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}
        return train(config(*overrides_of(sharding), "save_interval=2"), run_directory=run)

    ended = on_ranks(number, child)
    assert all(end.code == 1 for end in ended), ended
    assert odd in ended[0].output and "so it is not saved" in ended[0].output
    assert sorted(path.name for path in (run / "checkpoints").glob("step*")) == ["step2"]
