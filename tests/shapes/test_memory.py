"""The memory estimate's parts; its agreement with measured peaks is in benchmarks/memory_estimate.py."""

from __future__ import annotations

import pytest

from olmo_ext.config.run_config import load_run_config
from olmo_ext.shapes.memory import CHECKPOINTED_LAYERS, StepSettings, estimate_memory, largest_micro_batch


def estimate(checkpointing=None, micro_batch=2, **settings):
    config = load_run_config(
        {
            "model": {
                "d_model": 128, "n_layers": 8, "n_heads": 4, "rope": True, "include_bias": False, "weight_tying": False,
                "vocab_size": 512, "embedding_size": 512, "max_sequence_length": 64, "ffn": {"d_ff": 512},
            }
        }
    )  # fmt: skip
    step = StepSettings(checkpointing=checkpointing, **settings)
    return config.counts.total, estimate_memory(config.shape, config.counts, step, micro_batch=micro_batch)


def test_fixed_parts_are_four_bytes_of_weight_and_gradient_and_eight_of_moments():
    total, found = estimate(precision="fp32")
    assert (found.weights, found.gradients, found.moments, found.copies) == (4 * total, 4 * total, 8 * total, 0)


def test_sums_of_slow_levels_are_fixed_memory_and_are_sharded_like_the_rest():
    model = {"d_model": 64, "n_layers": 3, "n_heads": 4, "include_bias": False}
    ffn = {"type": "hope", "d_ff": [32, 16], "update_periods": [1, 4]}
    found = {}
    for name, periods in (("slow", [1, 4]), ("even", [1, 1])):
        config = load_run_config({"model": {**model, "ffn": {**ffn, "num_sub_mlps": 2, "update_periods": periods}}})
        for devices in (1, 4):
            step = StepSettings(precision="fp32", strategy="fsdp", num_devices=devices)
            found[name, devices] = estimate_memory(config.shape, config.counts, step, micro_batch=1)
    # SwiGLU of width 16 and its norm's 64 weights.
    assert found["slow", 1].sums == 4 * 3 * (3 * 64 * 16 + 64) and found["even", 1].sums == 0
    assert found["slow", 4].sums == found["slow", 1].sums // 4
    assert found["slow", 1].total - found["even", 1].total == found["slow", 1].sums


def test_ddp_adds_its_buckets_and_fsdp_divides_what_it_shards():
    total, ddp = estimate(precision="fp32", strategy="ddp", num_devices=4)
    assert ddp.copies == 4 * total
    _, fsdp = estimate(precision="fp32", strategy="fsdp", num_devices=4)
    assert fsdp.weights == total and fsdp.moments == 2 * total
    _, kept = estimate(precision="fp32", strategy="fsdp", num_devices=4, sharding="SHARD_GRAD_OP")
    assert kept.copies > fsdp.copies
    _, whole = estimate(precision="fp32", strategy="fsdp", num_devices=4, sharding="NO_SHARD")
    assert whole.weights == 4 * total
    _, hybrid = estimate(precision="fp32", strategy="fsdp", num_devices=8, sharding="HYBRID_SHARD", replicas=2)
    assert hybrid == fsdp


def test_activations_of_a_layer_by_hand():
    _, found = estimate(precision="fp32")
    # Per layer: two norms keep 3 d each; q, k, v (3 d), rotated q and k (2 d), mixed values (d); SwiGLU 4 d_ff.
    layer = 2 * 3 * 128 + 6 * 128 + 4 * 512
    assert found.activations == 2 * 64 * 4 * (8 * layer + 3 * 128)
    assert found.logits == 2 * 64 * 512 * 20


@pytest.mark.parametrize("strategy", [*CHECKPOINTED_LAYERS, "fine_grained"])
def test_every_strategy_of_olmo_keeps_less_than_none(strategy):
    assert estimate(strategy)[1].activations < estimate(None)[1].activations


def test_the_strategies_recompute_the_layers_that_olmo_recomputes():
    from olmo.config import ActivationCheckpointingStrategy
    from olmo.model import should_checkpoint_block

    for name, recomputed in CHECKPOINTED_LAYERS.items():
        ours = [recomputed(layer) for layer in range(24)]
        assert ours == [should_checkpoint_block(ActivationCheckpointingStrategy(name), layer) for layer in range(24)]
    assert {*CHECKPOINTED_LAYERS, "fine_grained"} == {strategy.value for strategy in ActivationCheckpointingStrategy}


def test_the_largest_micro_batch_fits_and_the_next_does_not():
    config = load_run_config({"model": {"rope": True}})
    memory = 40 * 10**9
    step = StepSettings()
    found = largest_micro_batch(config.shape, config.counts, step, memory=memory, per_device=512)
    assert found > 1
    sizes = {
        size: estimate_memory(config.shape, config.counts, step, micro_batch=size).total for size in (found, 2 * found)
    }
    assert sizes[found] <= 0.92 * memory < sizes[2 * found]
    assert largest_micro_batch(config.shape, config.counts, step, memory=10**9, per_device=512) == 0
