"""What a run will be, before it costs anything: counts, length, rates, memory, hours, and likely mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from olmo_ext.base.errors import InputError
from olmo_ext.base.nodes import Node
from olmo_ext.config.run_config import RunConfig
from olmo_ext.config.run_length import RunLength, batch_per_rank, run_length, schedule_warnings, sequence_warnings
from olmo_ext.plan.learning_rate import LearningRates, learning_rates
from olmo_ext.shapes.layers import ModelShape
from olmo_ext.shapes.memory import MemoryEstimate, StepSettings, estimate_memory, largest_micro_batch
from olmo_ext.shapes.resolve import resolution_notes


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the plan reckons with."""

    node: Node | None
    num_gpus: int
    mfu: float | None
    mfu_source: str

    @property
    def peak(self) -> float | None:
        """Dense bf16 FLOP/s of all GPUs together."""
        return None if self.node is None else self.node.gpu.peak_bf16 * self.num_gpus


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """One way to keep activations."""

    checkpointing: str | None
    estimate: MemoryEstimate
    """At the config's own micro-batch."""

    largest_micro_batch: int | None
    """The largest that fits the node's GPU; 0 if none does, None without a node."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Everything `plan` says about one run."""

    name: str
    config: RunConfig
    machine: Machine
    length: RunLength | None
    """None where the length is in epochs."""

    rates: LearningRates | None
    strategy: str | None
    memory: tuple[MemoryPlan, ...]
    hours: float | None
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def total_training_flops(self) -> float | None:
        return None if self.length is None else self.length.tokens * self.config.counts.training_flops_per_token

    def to_json(self) -> dict[str, Any]:
        """The plan as numbers; memory in bytes, rates as they are, FLOPs per token and in all."""
        counts, shape = self.config.counts, self.config.shape
        tokens = None if self.length is None else self.length.tokens
        return {
            "name": self.name,
            "source": None if self.config.source is None else str(self.config.source),
            "shape": {
                "d_model": shape.d_model,
                "n_layers": shape.n_layers,
                "d_ff": [list(layer.ffn.d_ff) for layer in shape.layers],
                "ffn": [layer.ffn.type for layer in shape.layers],
                "ffn_options": [dict(layer.ffn.options) for layer in shape.layers],
                "attention": [layer.attention.type for layer in shape.layers],
                "attention_options": [dict(layer.attention.options) for layer in shape.layers],
                "attention_width": [layer.attention.width for layer in shape.layers],
            },
            **counts.to_json(),
            "budget": None if self.config.budget_report is None else self.config.budget_report.to_json(),
            "steps": None if self.length is None else self.length.steps,
            "tokens": tokens,
            "tokens_per_parameter": None if tokens is None else tokens / counts.non_embedding,
            "total_training_flops": self.total_training_flops,
            "learning_rate": None
            if self.rates is None
            else {"configured": self.rates.configured, "peak": self.rates.peak, "last": self.rates.last},
            "strategy": self.strategy,
            "gpus": self.machine.num_gpus,
            "node": None if self.machine.node is None else self.machine.node.name,
            "memory": [
                {
                    "checkpointing": plan.checkpointing,
                    "largest_micro_batch": plan.largest_micro_batch,
                    **plan.estimate.to_json(),
                }
                for plan in self.memory
            ],
            "hours": self.hours,
            "mfu": self.machine.mfu,
            "mfu_source": self.machine.mfu_source,
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }


def plan_run(name: str, config: RunConfig, machine: Machine) -> RunPlan:
    """Plan one run.

    :raises InputError: if the batch does not divide over the GPUs.
    """
    counts = config.counts
    length: RunLength | None = None
    rates: LearningRates | None = None
    warnings = shape_warnings(config)
    try:
        length = run_length(config)
    except InputError as error:
        warnings.append(str(error))
    if length is None:
        warnings += sequence_warnings(config.shape)
    else:
        rates = learning_rates(config, length)
        warnings += schedule_warnings(config, config.shape, length)
    per_device = batch_per_rank(config, machine.num_gpus, where=name)
    strategy = config.distributed_strategy if machine.num_gpus > 1 else None
    hours = None
    if machine.peak is not None and machine.mfu is not None and length is not None:
        hours = length.tokens * counts.training_flops_per_token / (machine.peak * machine.mfu) / 3600
    return RunPlan(
        name=name,
        config=config,
        machine=machine,
        length=length,
        rates=rates,
        strategy=strategy,
        memory=_memory_plans(config, machine, per_device=per_device, strategy=strategy),
        hours=hours,
        notes=tuple(resolution_notes(config, where=name)),
        warnings=tuple(warnings),
    )


def _memory_plans(
    config: RunConfig, machine: Machine, *, per_device: int, strategy: str | None
) -> tuple[MemoryPlan, ...]:
    micro_batch = min(config.device_train_microbatch_size, per_device)
    ways: list[str | None] = [None, "whole_layer"]
    if config.activation_checkpointing not in ways:
        ways.append(config.activation_checkpointing)
    nodes = 1 if machine.node is None else -(-machine.num_gpus // machine.node.gpus_per_node)
    plans = []
    for checkpointing in ways:
        settings = StepSettings.of(
            config, strategy=strategy, checkpointing=checkpointing, num_devices=machine.num_gpus, nodes=nodes
        )
        largest = None
        if machine.node is not None:
            memory = machine.node.gpu.usable_memory
            largest = largest_micro_batch(config.shape, config.counts, settings, memory=memory, per_device=per_device)
        estimate = estimate_memory(config.shape, config.counts, settings, micro_batch=micro_batch)
        plans.append(MemoryPlan(checkpointing=checkpointing, estimate=estimate, largest_micro_batch=largest))
    return tuple(plans)


def shape_warnings(config: RunConfig) -> list[str]:
    """Sizes that hardware dislikes, embeddings that outweigh the body, and stacks that begin louder than others."""
    shape, counts = config.shape, config.counts
    warnings = _width_warnings(shape)
    for head_dim in sorted({layer.attention.head_dim for layer in shape.layers}):
        if head_dim % 8:
            warnings.append(f"head_dim {head_dim} is no multiple of 8: fused attention kernels pad it or refuse it")
    if counts.embedding + counts.head > counts.non_embedding:
        # Without the figures, which stand with the parameters: the runs of a sweep then share one sentence.
        warnings.append(
            "embedding and head hold more parameters than the body: equal non-embedding parameters are not equal models"
        )
    stacked = max(layer.ffn.num_sub_mlps for layer in shape.layers)
    if shape.norm_after and stacked > 1:
        warnings.append(
            f"norm_after with {stacked} sub-MLPs a layer: each adds an update of unit size at initialisation, the"
            " residual's variance grows as L (1 + K); the hourglass paper has norm_after: false"
        )
    return warnings


def _width_warnings(shape: ModelShape) -> list[str]:
    widths = {"d_model": [shape.d_model]}
    widths["d_ff"] = sorted({d_ff for layer in shape.layers for d_ff in layer.ffn.d_ff})
    widths["attention width"] = sorted({layer.attention.width for layer in shape.layers})
    warnings = []
    for name, values in widths.items():
        for multiple, effect in ((8, "tensor cores want multiples of 8, and run fastest at 64"), (64, "")):
            bad = [value for value in values if value % multiple]
            if multiple == 8 and bad:
                warnings.append(f"{name} {_some(bad)} no multiple of 8: {effect}")
                break
            if bad:
                warnings.append(f"{name} {_some(bad)} no multiple of 64, the tile of tensor-core kernels")
    return warnings


def _some(values: Sequence[int]) -> str:
    if len(values) == 1:
        return f"{values[0]} is"
    listed = ", ".join(map(str, values[:3]))
    return f"{listed} are" if len(values) <= 3 else f"{listed} and {len(values) - 3} more are"
