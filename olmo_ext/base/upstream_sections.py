"""The config of ai2-olmo 0.6.0 as plain dataclasses: its names, types and defaults.

`scripts/generate_upstream_sections.py` writes this file, and a test compares it with the installed ai2-olmo. Words that
OLMo holds in enums are strings here, and its tuples are lists, as YAML has them.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

Duration = Annotated[int | str, "duration"]
Number = Annotated[int | float, "number"]

ActivationType = Annotated[Literal["gelu", "relu", "swiglu"], "enum:ActivationType"]
BlockType = Annotated[Literal["sequential", "llama"], "enum:BlockType"]
LayerNormType = Annotated[Literal["default", "low_precision", "rms"], "enum:LayerNormType"]
InitFnType = Annotated[Literal["mitchell", "normal", "kaiming_normal", "fan_in", "full_megatron"], "enum:InitFnType"]
OptimizerType = Annotated[Literal["lionw", "adamw"], "enum:OptimizerType"]
SchedulerType = Annotated[
    Literal[
        "cosine_with_warmup",
        "linear_with_warmup",
        "inverse_sqrt_with_warmup",
        "max_scheduler",
        "constant",
        "cosine_linear_envelope",
        "constant_with_warmup",
    ],
    "enum:SchedulerType",
]
SchedulerUnits = Annotated[Literal["steps", "tokens"], "enum:SchedulerUnits"]
PaddingDirection = Annotated[Literal["right", "left"], "enum:PaddingDirection"]
EvaluatorType = Annotated[Literal["downstream", "lm"], "enum:EvaluatorType"]
TruncationDirection = Annotated[Literal["right", "left"], "enum:TruncationDirection"]
ShardedCheckpointerType = Annotated[
    Literal["torch_new", "torch_legacy", "local", "olmo_core"], "enum:ShardedCheckpointerType"
]
DistributedStrategy = Annotated[Literal["ddp", "fsdp"], "enum:DistributedStrategy"]
ShardingStrategy = Annotated[
    Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"], "enum:ShardingStrategy"
]
FSDPWrapStrategy = Annotated[
    Literal[
        "by_block",
        "by_block_and_size",
        "by_block_group",
        "by_block_group_and_size",
        "size_based",
        "one_in_two",
        "one_in_three",
        "one_in_four",
        "one_in_five",
    ],
    "enum:FSDPWrapStrategy",
]
FSDPPrecision = Annotated[Literal["pure", "mixed"], "enum:FSDPPrecision"]
DDPGradSyncMode = Annotated[Literal["batch", "micro_batch"], "enum:DDPGradSyncMode"]
ActivationCheckpointingStrategy = Annotated[
    Literal[
        "whole_layer",
        "one_in_two",
        "one_in_three",
        "one_in_four",
        "one_in_eight",
        "two_in_three",
        "three_in_four",
        "fine_grained",
    ],
    "enum:ActivationCheckpointingStrategy",
]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    d_model: int = 768
    n_heads: int = 12
    n_kv_heads: int | None = None
    clip_qkv: float | None = None
    n_layers: int = 12
    mlp_ratio: int = 4
    mlp_hidden_size: int | None = None
    activation_type: ActivationType = "swiglu"
    block_type: BlockType = "sequential"
    block_group_size: int = 1
    alibi: bool = False
    alibi_bias_max: float = 8.0
    rope: bool = False
    rope_full_precision: bool = True
    rope_theta: int = 10000
    flash_attention: bool = False
    attention_dropout: float = 0.1
    multi_query_attention: bool | None = None
    attention_layer_norm: bool = False
    residual_dropout: float = 0.1
    embedding_dropout: float = 0.1
    embedding_layer_norm: bool = False
    layer_norm_type: LayerNormType = "default"
    layer_norm_with_affine: bool = True
    layer_norm_eps: float = 1e-05
    attention_layer_norm_with_affine: bool = True
    max_sequence_length: int = 1024
    include_bias: bool = True
    bias_for_layer_norm: bool | None = None
    scale_logits: bool = False
    vocab_size: int = 50257
    embedding_size: int | None = 50304
    weight_tying: bool = True
    eos_token_id: int = 50256
    pad_token_id: int = 50256
    init_device: str | None = None
    init_fn: InitFnType = "normal"
    init_std: float = 0.02
    init_cutoff_factor: float | None = None
    precision: str | None = None
    scale_emb_init: bool = False
    emb_init_std: float | None = None
    norm_after: bool = False


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: OptimizerType = "lionw"
    learning_rate: float = 0.0001
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-05
    no_decay_norm_and_bias: bool | None = None
    selective_updates: bool = False
    decay_norm_and_bias: bool = False
    decay_embeddings: bool = False
    metrics_log_interval: int | None = None
    record_update_metrics: bool = False


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    name: SchedulerType = "cosine_with_warmup"
    units: SchedulerUnits = "steps"
    t_warmup: Number = 100
    t_max: Number | None = None
    alpha_f: float = 0.1
    grad_clip_warmup_steps: Number | None = None
    grad_clip_warmup_factor: float | None = None
    warmup_min_lr: float | None = None


@dataclass(frozen=True, kw_only=True)
class InstanceFilterConfig:
    repetition_max_period: int = 13
    repetition_min_period: int = 1
    repetition_max_count: int = 32


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    paths: list[str] | None = None
    memmap_dtype: str = "uint16"
    datasets: dict[str, list[str]] | None = None
    label_mask_paths: list[str] | None = None
    pad_direction: PaddingDirection = "right"
    generate_attention_mask: bool = False
    generate_doc_lengths: bool = False
    num_workers: int = 0
    drop_last: bool = False
    pin_memory: bool = False
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    timeout: int = 0
    seed: int | None = None
    instance_filter: InstanceFilterConfig | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluatorConfig:
    label: str
    type: EvaluatorType = "lm"
    data: DataConfig = field(default_factory=DataConfig)
    device_eval_batch_size: int | None = None
    subset_num_batches: int | None = None


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    identifier: str = "gpt2"
    truncate_direction: TruncationDirection = "right"


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    project: str | None = None
    entity: str | None = "ai2-llm"
    group: str | None = None
    name: str | None = None
    tags: list[str] | None = field(default_factory=lambda: ["watching"])
    log_artifacts: bool = False
    rank_zero_only: bool = True
    log_interval: int = 1


@dataclass(frozen=True, kw_only=True)
class SpeedMonitorConfig:
    window_size: int = 100
    gpu_flops_available: Number | None = None


@dataclass(frozen=True, kw_only=True)
class CompilerConfig:
    mode: str | None = None
    fullgraph: bool = False
    backend: str = "inductor"
    dynamic: bool | None = None


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    use_orig_params: bool = True
    sharding_strategy: ShardingStrategy = "FULL_SHARD"
    wrapping_strategy: FSDPWrapStrategy | None = None
    precision: FSDPPrecision | None = "pure"
    hybrid_sharding_num_model_replicas: int | None = None


@dataclass(frozen=True, kw_only=True)
class DDPConfig:
    grad_sync_mode: DDPGradSyncMode = "batch"
    find_unused_params: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    run_name: str | None = None
    seed: int = 6198
    epoch: int | None = None
    dry_run: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    restore_dataloader: bool = True
    fast_forward_batches: int | None = None
    evaluators: list[EvaluatorConfig] = field(default_factory=list)
    eval_interval: int = 1000
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    save_folder: str = "./"
    remote_save_folder: str | None = None
    canceled_check_interval: int = 50
    save_interval: int | None = 1000
    save_interval_unsharded: int | None = None
    save_interval_ephemeral: int | None = None
    save_num_checkpoints_to_keep: int = -1
    save_num_unsharded_checkpoints_to_keep: int = -1
    save_overwrite: bool = False
    force_save_unsharded: bool = False
    no_pre_train_checkpoint: bool = False
    load_path: str | None = None
    load_path_sharded_checkpointer: ShardedCheckpointerType | None = None
    try_load_latest_save: bool = False
    reset_optimizer_state: bool = False
    reset_trainer_state: bool = False
    sharded_checkpointer: ShardedCheckpointerType = "torch_legacy"
    new_style_checkpoints: bool | None = None
    max_duration: Duration = 10000
    global_train_batch_size: int = 512
    device_train_batch_size: int | None = None
    device_train_microbatch_size: int = 16
    device_eval_batch_size: int = 16
    eval_subset_num_batches: int = -1
    eval_on_load: bool = False
    device_train_grad_accum: int | None = None
    max_grad_norm: float | None = None
    max_grad_norm_ratio: float | None = None
    precision: str | None = None
    wandb: WandbConfig | None = None
    speed_monitor: SpeedMonitorConfig = field(default_factory=SpeedMonitorConfig)
    console_log_interval: int = 1
    gen1_gc_interval: int | None = 1
    compile: CompilerConfig | None = None
    distributed_strategy: DistributedStrategy | None = "fsdp"
    fsdp: FSDPConfig | None = field(default_factory=FSDPConfig)
    ddp: DDPConfig | None = None
    softmax_auxiliary_loss: bool = False
    auxiliary_loss_multiplier: float | None = 0.0001
    time_limit: float | None = None
    extra_steps_after_cancel: int = 10
    early_stopping_factor: float | None = None
    save_data_indices: bool = True
    python_profiling: bool = False
    torch_profiling: bool = False
    stop_at: int | None = None
    stop_after: int | None = None
    activation_checkpointing: ActivationCheckpointingStrategy | None = None
    fused_loss: bool | None = None
    hf_datasets_cache_dir: str | None = None
    module_outputs_save_steps: list[int] | None = None
