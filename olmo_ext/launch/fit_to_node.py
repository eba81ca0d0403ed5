"""Fit a config to a node type: settings that change how a run computes, and not what.

They are chosen in this order:

1. precision amp_bf16 (both node types have bf16 tensor cores).
2. PyTorch's own attention (SDPA, which picks its flash kernel on both): the flash-attn package is not needed on Ada and
   has no kernels for B200. `model.flash_attention=true` asks for the package.
3. torch.compile per block, default mode.
4. DDP where weights, gradients, moments and one sequence fit on one GPU: it communicates least, and an Ada node has
   PCIe alone. Else FSDP over all GPUs; on several nodes sharded within a node, replicated between them.
5. Activation checkpointing (whole layers) only where not even one sequence fits without it; sharding over all nodes
   only where not even that is enough.
6. The largest micro-batch that divides a GPU's share of the global batch and fits into 92 % of its memory.

A key that the launched file itself or the command line sets is kept. A key that a file reached through `extends` sets
is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from olmo_ext.base.errors import InputError
from olmo_ext.base.nodes import Node
from olmo_ext.base.quantities import format_bytes
from olmo_ext.config.run_config import RunConfig
from olmo_ext.config.run_length import batch_per_rank
from olmo_ext.shapes.memory import MemoryEstimate, StepSettings, estimate_memory, largest_micro_batch


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where each run of a sweep goes."""

    node: Node
    num_nodes: int
    gpus_per_node: int

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.num_nodes} x {self.gpus_per_node} {self.node.gpu.name}"


def node_settings(config: RunConfig, placement: Placement) -> Mapping[str, Any]:
    """The settings as dotted keys and values.

    :raises InputError: if the batch does not divide, or nothing makes the model fit.
    """
    world = placement.world_size
    per_device, remainder = divmod(config.global_train_batch_size, world)
    if remainder or not per_device:
        batch_per_rank(dataclasses.replace(config, device_train_microbatch_size=1), world)
    settings: dict[str, Any] = {
        "node": placement.node.name,
        "precision": "amp_bf16",
        "model.flash_attention": False,
        "compile": {},
    }
    # Copies of one GPU each would not be copies of one model: see `model_copies`.
    hybrid = placement.num_nodes > 1 and placement.gpus_per_node > 1
    ways = [("ddp", "")] if world == 1 else [("ddp", ""), ("fsdp", "HYBRID_SHARD" if hybrid else "FULL_SHARD")]
    tried = [(*way, checkpointing) for checkpointing in (None, "whole_layer") for way in ways]
    if hybrid:
        tried += [("fsdp", "FULL_SHARD", checkpointing) for checkpointing in (None, "whole_layer")]
    for strategy, sharding, checkpointing in tried:
        step = StepSettings(
            strategy=strategy,
            num_devices=world,
            sharding=sharding,
            replicas=placement.num_nodes,
            checkpointing=checkpointing,
            z_loss=bool(config.softmax_auxiliary_loss),
            loss=config.loss,
        )
        memory = placement.node.gpu.usable_memory
        micro_batch = largest_micro_batch(config.shape, config.counts, step, memory=memory, per_device=per_device)
        if micro_batch:
            break
    else:
        raise InputError(
            f"not even one sequence of {config.shape.max_sequence_length} tokens fits on {placement} with FSDP and"
            " activation checkpointing",
            right="more GPUs, or a smaller model",
        )
    settings |= {
        "distributed_strategy": strategy,
        "activation_checkpointing": checkpointing,
        "device_train_microbatch_size": micro_batch,
    }
    if strategy == "fsdp":
        settings |= {
            "fsdp.sharding_strategy": sharding,
            "fsdp.wrapping_strategy": "by_block",
            "fsdp.precision": "mixed",
        }
    return settings


def estimate(config: RunConfig, placement: Placement) -> MemoryEstimate:
    """Memory per GPU of a config as it will really run."""
    per_device = batch_per_rank(config, placement.world_size)
    step = StepSettings.of(
        config,
        strategy=config.distributed_strategy,
        checkpointing=config.activation_checkpointing,
        num_devices=placement.world_size,
        nodes=placement.num_nodes,
    )
    micro_batch = min(config.device_train_microbatch_size, per_device)
    return estimate_memory(config.shape, config.counts, step, micro_batch=micro_batch)


def describe(config: RunConfig, placement: Placement) -> str:
    """One line on how a run will run."""
    needed = estimate(config, placement)
    words = [
        config.distributed_strategy or "single",
        config.precision or "fp32",
        "flash-attn" if config.model.flash_attention else "SDPA",
        "compiled" if config.compile is not None else "eager",
        f"micro-batch {needed.micro_batch}",
        f"checkpointing {config.activation_checkpointing or 'off'}",
        f"{format_bytes(needed.total)} of {format_bytes(placement.node.gpu.usable_memory)} a GPU",
    ]
    return ", ".join(words)
