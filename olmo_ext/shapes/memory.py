"""Memory of a training step on one device, from the shape alone.

What is counted: fp32 weights, gradients and both AdamW moments as OLMo keeps them, and the gradients that levels with
an update period sum (`olmo_ext.training.update_periods`); what the layers save for the
backward pass; the logits and their copies in OLMo's loss; and what the strategy adds. The estimate is for a step in the
middle of gradient accumulation, when gradients already exist. Attention is taken as fused (SDPA or flash: no score
matrix). Checked against measured peaks in `benchmarks/memory_estimate.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from olmo_ext.base.sections import TrainConfig
from olmo_ext.base.upstream_sections import FSDPConfig
from olmo_ext.shapes.counts import LayerCounts, ShapeCounts, count_layers
from olmo_ext.shapes.layers import ModelShape
from olmo_ext.shapes.sharding import model_copies

PRECISIONS = ("fp32", "amp_bf16", "amp_fp16", "bf16")

NORM_BYTES = {"fp32": 4.0, "amp": 10 / 3, "bf16": 2.0}
"""Per element that norms keep. Autocast: fp32 input and normalised value, the scaled one in the matrix's 2 bytes."""

ATTENTION_BYTES = {"fp32": 4.0, "amp": 3.0, "bf16": 2.0}
"""Per element that attention keeps. Autocast: 2, and QK-norm works on an fp32 copy of q and k."""

FFN_BYTES = {"fp32": 4.0, "amp": 2.0, "bf16": 2.0}

LOGIT_BYTES = {"fp32": 20.0, "amp": 20.0, "bf16": 20.0}
"""Per logit at the peak, with the z-loss: OLMo's contiguous copy without the last position, the log-softmax, and in the
backward pass three gradients of that size."""

LOGIT_BYTES_WITHOUT_Z_LOSS = {"fp32": 16.0, "amp": 16.0, "bf16": 16.0}

LOSS_CHUNK = {"cpu": 256, "cuda": 2048}
"""Tokens whose logits the chunked loss holds at a time. On a CPU, 256 was as fast as any and has the smallest peak."""

USABLE = 0.92
"""Share of a GPU's memory that a plan fills: the rest is the CUDA context, workspaces and fragmentation."""

CHECKPOINTED_LAYERS = {
    "whole_layer": lambda layer: True,
    "one_in_two": lambda layer: layer % 2 == 0,
    "one_in_three": lambda layer: layer % 3 == 0,
    "one_in_four": lambda layer: layer % 4 == 0,
    "one_in_eight": lambda layer: layer % 8 == 0,
    "two_in_three": lambda layer: layer % 3 != 0,
    "three_in_four": lambda layer: layer % 4 != 0,
}
"""OLMo's strategies by the layers that they recompute; `fine_grained` recomputes parts of every layer."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How a step runs, as far as its memory depends on it."""

    precision: str | None = "amp_bf16"
    strategy: str | None = None
    """`ddp`, `fsdp` (weights, gradients and moments sharded over all devices) or None for one device."""

    num_devices: int = 1
    checkpointing: str | None = None
    z_loss: bool = True
    loss: str = "full"
    """`chunked` holds the logits of `LOSS_CHUNK` tokens, `full` those of the micro-batch."""

    sharding: str = "FULL_SHARD"
    """FSDP's strategy. SHARD_GRAD_OP and its hybrid form keep every gathered weight until its backward pass."""

    replicas: int = 1
    """Copies of the model that the hybrid strategies keep, one per node unless the config says otherwise."""

    @classmethod
    def of(
        cls, config: TrainConfig, *, strategy: str | None, checkpointing: str | None, num_devices: int, nodes: int
    ) -> StepSettings:
        """As a resolved config has it, on that many devices of that many nodes.

        :raises InputError: for sharding that does not divide the devices or would train wrongly.
        """
        fsdp = config.fsdp or FSDPConfig()
        sharding, asked = fsdp.sharding_strategy, fsdp.hybrid_sharding_num_model_replicas
        sharded = strategy == "fsdp"
        replicas = model_copies(sharding, world_size=num_devices, nodes=nodes, asked=asked) if sharded else 1
        return cls(
            precision=config.precision,
            strategy=strategy,
            num_devices=num_devices,
            checkpointing=checkpointing,
            z_loss=bool(config.softmax_auxiliary_loss),
            loss=config.loss,
            sharding=sharding,
            replicas=replicas,
        )

    @property
    def num_shards(self) -> int:
        """Devices that share one copy of weights, gradients and moments."""
        if self.strategy != "fsdp" or self.sharding == "NO_SHARD":
            return 1
        return self.num_devices // self.replicas if "HYBRID" in self.sharding else self.num_devices

    @property
    def gathers_again(self) -> bool:
        """Whether a layer's weights are given back after its forward pass."""
        return self.sharding in ("FULL_SHARD", "HYBRID_SHARD")


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes per device at the peak of a step."""

    weights: int
    gradients: int
    moments: int
    sums: int
    """Summed gradients of the levels that are not updated in every step."""

    copies: int
    """Autocast copies of the weights; DDP's reduction buckets; FSDP's gathered layers."""

    activations: int
    """What all layers keep at the end of the forward pass."""

    recomputed: int
    """Under checkpointing, the most that is held while a layer is computed again: it, and what earlier layers keep. The
    logits are gone by then."""

    logits: int
    optimizer: int
    """Temporaries of the optimizer's step, which does not coincide with activations and logits."""

    micro_batch: int
    """Sequences per device and pass."""

    @property
    def fixed(self) -> int:
        return self.weights + self.gradients + self.moments + self.sums + self.copies

    @property
    def total(self) -> int:
        return self.fixed + max(self.activations + self.logits, self.recomputed, self.optimizer)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def _kind(precision: str | None) -> str:
    return "amp" if precision in ("amp_bf16", "amp_fp16") else ("bf16" if precision == "bf16" else "fp32")


def layer_activation_bytes(layer: LayerCounts, *, precision: str | None = "fp32") -> float:
    """Bytes per token that one layer keeps without checkpointing."""
    kind = _kind(precision)
    return (
        layer.norm_activations * NORM_BYTES[kind]
        + layer.attention_activations * ATTENTION_BYTES[kind]
        + layer.ffn_activations * FFN_BYTES[kind]
    )


def activation_bytes_per_token(
    shape: ModelShape, *, precision: str | None, checkpointing: str | None
) -> tuple[float, float]:
    """Bytes per token that the layers keep at the end of the forward pass, and the most while one is recomputed.

    :raises ValueError: for an unknown checkpointing strategy.
    """
    layers = count_layers(shape)
    full = [layer_activation_bytes(layer, precision=precision) for layer in layers]
    kind = _kind(precision)
    # The final norm's three; the embedding's output is the first layer's input.
    outside = 3 * shape.d_model * NORM_BYTES[kind]
    if checkpointing is None:
        return sum(full) + outside, 0.0
    stream = shape.d_model * (2.0 if kind == "bf16" else 4.0)
    if checkpointing == "fine_grained":
        # Kept: the residual stream and norm outputs, q, k, v and the mixed values, the two FFN products' inputs.
        attention = sum(layer.attention_activations for layer in layers) * ATTENTION_BYTES[kind] * 2 / 3
        ffn = sum(layer.ffn_activations for layer in layers) * FFN_BYTES[kind] * 3 / 4
        norms = sum(layer.norm_activations for layer in layers) * NORM_BYTES[kind] * 2 / 3
        return attention + ffn + norms + outside, 0.0
    if checkpointing not in CHECKPOINTED_LAYERS:
        raise ValueError(f"unknown strategy {checkpointing!r}")
    kept = most = 0.0
    for index, size in enumerate(full):
        if CHECKPOINTED_LAYERS[checkpointing](index):
            kept += stream
            most = max(most, kept + size)
        else:
            kept += size
    return kept + outside, most


def _loss_bytes(shape: ModelShape, settings: StepSettings, tokens: int) -> float:
    """Logits and what the loss makes of them, for so many tokens of a device."""
    kind = _kind(settings.precision)
    if settings.loss == "full":
        per_logit = (LOGIT_BYTES if settings.z_loss else LOGIT_BYTES_WITHOUT_Z_LOSS)[kind]
        return tokens * shape.embedding_size * per_logit
    chunk = min(tokens, LOSS_CHUNK["cpu" if kind == "fp32" else "cuda"])
    # A chunk's logits, which become its softmax and its gradient in place, and their copy in the matrix's type; the
    # gradients of head and hidden states, formed beside those of earlier micro-batches.
    of_chunk = chunk * shape.embedding_size * (4.0 if kind == "fp32" else 8.0)
    head_copies = 4.0 if kind == "fp32" else 6.0
    return of_chunk + shape.embedding_size * shape.d_model * head_copies + 4.0 * tokens * shape.d_model


def estimate_memory(
    shape: ModelShape, counts: ShapeCounts, settings: StepSettings, *, micro_batch: int
) -> MemoryEstimate:
    """Bytes per device at the peak of a training step."""
    kind = _kind(settings.precision)
    share = settings.num_shards
    parameters = counts.total
    layers = count_layers(shape)
    head = shape.embedding_size * shape.d_model
    copies = 0.0
    if share > 1:
        # Two layers are gathered at a time (the running one and the next), and the root: embeddings and head.
        per_layer = max(layer.attention + layer.ffn + layer.norm for layer in layers)
        gathered = 2 * per_layer + counts.embedding + counts.head
        copies = (gathered if settings.gathers_again else parameters) * (2.0 if kind == "amp" else 4.0)
    else:
        if kind == "amp":
            copies += 2.0 * (counts.non_embedding + head)
        if settings.strategy == "ddp" and settings.num_devices > 1:
            copies += 4.0 * parameters
    tokens = micro_batch * shape.max_sequence_length
    kept, recomputed = activation_bytes_per_token(
        shape, precision=settings.precision, checkpointing=settings.checkpointing
    )
    return MemoryEstimate(
        weights=4 * parameters // share,
        gradients=4 * parameters // share,
        moments=8 * parameters // share,
        sums=4 * sum(layer.waiting for layer in layers) // share,
        copies=round(copies),
        activations=round(tokens * kept),
        recomputed=round(tokens * recomputed),
        logits=round(_loss_bytes(shape, settings, tokens)),
        # One temporary of every parameter (the square root of the second moment, taken for all of them at once).
        optimizer=4 * parameters // share,
        micro_batch=micro_batch,
    )


def largest_micro_batch(
    shape: ModelShape, counts: ShapeCounts, settings: StepSettings, *, memory: int, per_device: int
) -> int:
    """The largest divisor of the device's batch whose step fits into `memory` bytes; 0 if one sequence does not."""
    for micro_batch in sorted((n for n in range(1, per_device + 1) if per_device % n == 0), reverse=True):
        estimate = estimate_memory(shape, counts, settings, micro_batch=micro_batch)
        if estimate.total <= memory * USABLE:
            return micro_batch
    return 0
