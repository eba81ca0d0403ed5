"""Which numbers and words the keys of a config may have: what training could only stumble over, or take without a word.

Shapes have their own, in `olmo_ext.shapes.resolve`; here stand the keys that are used as they are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from olmo_ext.base.sections import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Range:
    """An interval of numbers, for a list for each of its elements."""

    low: float
    high: float | None = None
    low_belongs: bool = True
    high_belongs: bool = True

    def holds(self, value: Any) -> bool:
        if isinstance(value, list):
            return all(self.holds(item) for item in value)
        above = value >= self.low if self.low_belongs else value > self.low
        if self.high is None or not above:
            return above
        return value <= self.high if self.high_belongs else value < self.high

    def __str__(self) -> str:
        low = f"at least {self.low:.15g}" if self.low_belongs else f"more than {self.low:.15g}"
        if self.high is None:
            return low
        return f"{low} and {'at most' if self.high_belongs else 'less than'} {self.high:.15g}"


COUNTED = Range(low=1)
NOT_NEGATIVE = Range(low=0)
POSITIVE = Range(low=0, low_belongs=False)
SHARE = Range(low=0, high=1)
ALL_OR_COUNTED = Range(low=-1)
"""-1 means all."""

RANGES: Mapping[str, Mapping[str, Range]] = {
    "TrainConfig": {
        # What numpy's and torch's generators both take.
        "seed": Range(low=0, high=2**32 - 1),
        **dict.fromkeys(("epoch", "fast_forward_batches", "extra_steps_after_cancel"), NOT_NEGATIVE),
        # 0 is as good as null: never.
        **dict.fromkeys(("save_interval", "save_interval_unsharded", "save_interval_ephemeral"), NOT_NEGATIVE),
        **dict.fromkeys(("eval_interval", "console_log_interval", "canceled_check_interval"), COUNTED),
        **dict.fromkeys(("gen1_gc_interval", "stop_at", "stop_after", "global_train_batch_size"), COUNTED),
        **dict.fromkeys(("device_train_microbatch_size", "device_eval_batch_size"), COUNTED),
        **dict.fromkeys(("save_num_checkpoints_to_keep", "save_num_unsharded_checkpoints_to_keep"), ALL_OR_COUNTED),
        "eval_subset_num_batches": ALL_OR_COUNTED,
        **dict.fromkeys(("max_grad_norm", "max_grad_norm_ratio", "early_stopping_factor", "time_limit"), POSITIVE),
        "auxiliary_loss_multiplier": NOT_NEGATIVE,
    },
    "ModelConfig": {
        **dict.fromkeys(("attention_dropout", "residual_dropout", "embedding_dropout"), SHARE),
        **dict.fromkeys(("layer_norm_eps", "emb_init_std"), NOT_NEGATIVE),
        **dict.fromkeys(("init_std", "rope_theta", "alibi_bias_max", "clip_qkv", "init_cutoff_factor"), POSITIVE),
        **dict.fromkeys(("block_group_size", "embedding_size"), COUNTED),
        # Every layer is an entry in memory: a slip of the finger must not fill it.
        "n_layers": Range(low=1, high=10_000),
    },
    "FFNSection": {"num_sub_mlps": Range(low=1, high=10_000), "ratio": Range(low=0, low_belongs=False, high=10_000)},
    "OptimizerConfig": {
        **dict.fromkeys(("learning_rate", "weight_decay", "eps"), NOT_NEGATIVE),
        "betas": Range(low=0, high=1, high_belongs=False),
        "metrics_log_interval": COUNTED,
    },
    "SchedulerConfig": {
        **dict.fromkeys(("t_warmup", "alpha_f", "grad_clip_warmup_steps", "warmup_min_lr"), NOT_NEGATIVE),
        **dict.fromkeys(("t_max", "grad_clip_warmup_factor"), POSITIVE),
    },
    "DataConfig": {
        **dict.fromkeys(("num_workers", "timeout", "seed"), NOT_NEGATIVE),
        "prefetch_factor": COUNTED,
    },
    "InstanceFilterConfig": dict.fromkeys(
        ("repetition_max_period", "repetition_min_period", "repetition_max_count"), COUNTED
    ),
    "EvaluatorConfig": {"device_eval_batch_size": COUNTED, "subset_num_batches": ALL_OR_COUNTED},
    "WandbConfig": {"log_interval": COUNTED},
    "SpeedMonitorConfig": {"window_size": COUNTED, "gpu_flops_available": POSITIVE},
    "FSDPConfig": {"hybrid_sharding_num_model_replicas": COUNTED},
    "BudgetSection": {"tolerance": NOT_NEGATIVE},
}

CHOICES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "TrainConfig": {"precision": ("amp_bf16", "amp_fp16", "fp32")},
    "DataConfig": {"memmap_dtype": ("uint8", "uint16", "uint32", "uint64")},
    "CompilerConfig": {"mode": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")},
}
"""Keys that OLMo types as text and that are one of a few words."""


def out_of_range(name: str, key: str, value: Any) -> str | None:
    """What would be right where a typed value cannot be used, else None.

    :param name: the section's class, as in the schema.
    """
    if value is None:
        return None
    if (words := CHOICES.get(name, {}).get(key)) is not None and value not in words:
        return f"one of {', '.join(words)}"
    if (allowed := RANGES.get(name, {}).get(key)) is not None and not allowed.holds(value):
        return str(allowed)
    if (name, key) == ("OptimizerConfig", "betas") and len(value) != 2:
        return "two numbers"
    return None


def contradiction(config: TrainConfig) -> tuple[str, str, str] | None:
    """Two keys of a typed config that exclude each other, where OLMo would stop in the middle of something.

    :returns: the key, what is wrong and what would be right; None where all is well.
    """
    model, data = config.model, config.data
    layers, group = model.n_layers, model.block_group_size
    if model.alibi and model.rope:
        return "model.alibi", "beside rope: a model has one kind of positions", "alibi: false, or rope: false"
    if config.loss == "chunked" and model.scale_logits:
        return "loss", "chunked beside model.scale_logits, which scales logits that are never made", "full"
    if config.loss == "chunked" and config.fused_loss:
        return "fused_loss", "beside loss: chunked: the loss is computed once", "one of the two"
    if layers % group:
        return "model.block_group_size", f"{group} does not divide n_layers {layers}", "a divisor of n_layers"
    if data.generate_doc_lengths and not model.flash_attention:
        what = "documents are kept apart by flash attention alone"
        right = "false, or model.flash_attention: true (which needs a GPU and the flash-attn package)"
        return "data.generate_doc_lengths", what, right
    evaluators = ((f"evaluators.{number}.data", each.data) for number, each in enumerate(config.evaluators))
    for place, section in (("data", data), *evaluators):
        if section.timeout and not section.num_workers:
            return f"{place}.timeout", "there is no worker to wait for", f"0, or {place}.num_workers above 0"
        chosen = section.instance_filter
        if chosen is not None and chosen.repetition_min_period > chosen.repetition_max_period:
            low, high = chosen.repetition_min_period, chosen.repetition_max_period
            what = f"repetition_min_period {low} is above repetition_max_period {high}: nothing would be filtered"
            return f"{place}.instance_filter", what, "min at most max"
    return None
