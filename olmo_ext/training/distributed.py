"""Join the process group and wrap the model in DDP or FSDP, so that every setting starts from the same weights."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from olmo.config import DDPConfig, DDPGradSyncMode, DistributedStrategy, FSDPConfig, TrainConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.nn.parallel import DistributedDataParallel as DDP

from olmo_ext.base.errors import InputError
from olmo_ext.config.run_config import RunConfig
from olmo_ext.shapes.sharding import model_copies
from olmo_ext.training.host_memory import keep_freed_memory
from olmo_ext.upstream.compile import CompileReport, compile_blocks
from olmo_ext.upstream.shaped_model import build_model

TIMEOUT = datetime.timedelta(minutes=30)
"""Time limit of one collective. The other ranks wait in one while rank 0 evaluates or saves."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process's place among all processes of the run."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


@contextmanager
def process_group() -> Iterator[Ranks]:
    """Join torchrun's ranks (gloo on CPU, nccl on GPU), or make a group of one process that needs no port."""
    on_gpu = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if on_gpu and local_rank >= torch.cuda.device_count():
        raise InputError(
            f"local rank {local_rank} has no GPU, {torch.cuda.device_count()} are visible",
            where="torchrun --nproc-per-node",
            right="at most one process per GPU",
        )
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    options: dict[str, Any] = {"backend": "nccl" if on_gpu else "gloo", "timeout": TIMEOUT}
    if on_gpu:
        options["device_id"] = device
    if "RANK" in os.environ:
        dist.init_process_group(**options)
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)
    world_size = dist.get_world_size()
    try:
        yield Ranks(rank=dist.get_rank(), world_size=world_size, local_rank=local_rank, device=device)
    except BaseException:
        # The other ranks may wait in a collective that will never come: leave the group as it is, the process ends.
        if world_size == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def agree(value: Any, ranks: Ranks) -> Any:
    """Rank 0's value, on every rank."""
    if ranks.world_size == 1:
        return value
    box = [value if ranks.is_first else None]
    dist.broadcast_object_list(box, src=0, device=ranks.device)
    return box[0]


def failure_of_another_rank(logs: Path, attempt: int, ranks: Ranks) -> str | None:
    """The error that another rank wrote beside its log; rank 0 itself has only seen a closed connection."""
    if not ranks.is_first or ranks.world_size == 1:
        return None
    deadline = time.monotonic() + 3.0
    while time.monotonic() < deadline:
        for path in sorted(logs.glob(f"attempt{attempt}-rank*.failure")):
            if text := path.read_text().strip():
                return text
        time.sleep(0.1)
    return None


def any_rank(flag: bool, ranks: Ranks) -> bool:
    """Whether the flag is set on at least one rank."""
    tensor = torch.tensor(float(flag), device=ranks.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return bool(tensor.item())


def build_wrapped_model(config: RunConfig, cfg: TrainConfig, ranks: Ranks) -> tuple[Any, Any, CompileReport | None]:
    """The model, its DDP or FSDP wrapper, and what was compiled, with initial weights that depend on the seed alone.

    Rank 0 draws the weights on its CPU before wrapping and the wrapper broadcasts them: upstream draws them after
    wrapping, which gives other values for FSDP than for DDP, and other values for each world size.
    """
    model: Any = build_model(config, device="cpu" if ranks.is_first else "meta")
    report = None
    if cfg.compile is not None:
        if model.config.block_group_size != 1:
            raise InputError("compile works on single blocks", where="model.block_group_size", right="1")
        report = compile_blocks(model, cfg.compile)
    model.set_activation_checkpointing(cfg.activation_checkpointing)
    if cfg.distributed_strategy == DistributedStrategy.fsdp:
        wrapper: Any = _wrap_fsdp(model, cfg, ranks)
    else:
        wrapper = _wrap_ddp(model, cfg, ranks)
    model.config.init_device = str(ranks.device)
    return model, wrapper, report


def _wrap_ddp(model: Any, cfg: TrainConfig, ranks: Ranks) -> DDP:
    cfg.ddp = cfg.ddp or DDPConfig()
    if cfg.ddp.find_unused_params and cfg.ddp.grad_sync_mode != DDPGradSyncMode.micro_batch:
        raise InputError(
            "find_unused_params needs gradients synchronised in every micro-batch",
            where="ddp.grad_sync_mode",
            right="micro_batch",
        )
    model = model.to(ranks.device) if ranks.is_first else model.to_empty(device=ranks.device)
    return DDP(model, find_unused_parameters=cfg.ddp.find_unused_params, gradient_as_bucket_view=True)


def _wrap_fsdp(model: Any, cfg: TrainConfig, ranks: Ranks) -> FSDP:
    cfg.fsdp = cfg.fsdp or FSDPConfig()
    if cfg.compile is not None and not cfg.fsdp.use_orig_params:
        raise InputError("compile needs the original parameters", where="fsdp.use_orig_params", right="true")
    options: dict[str, Any] = {}
    copies = model_copies(
        cfg.fsdp.sharding_strategy.name,
        world_size=ranks.world_size,
        # One process without a launcher has no LOCAL_WORLD_SIZE.
        nodes=max(1, ranks.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))),
        asked=cfg.fsdp.hybrid_sharding_num_model_replicas,
    )
    if cfg.fsdp.sharding_strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        options["device_mesh"] = init_device_mesh(ranks.device.type, (copies, ranks.world_size // copies))

    def materialise(module: torch.nn.Module) -> None:
        module.to_empty(device=ranks.device, recurse=False)

    on_cpu = ranks.device.type == "cpu"
    if on_cpu:
        # FSDP broadcasts the weights from GPUs only.
        model = model if ranks.is_first else model.to_empty(device="cpu")
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0)
    return FSDP(
        model,
        sharding_strategy=cfg.fsdp.sharding_strategy,
        # fp32 on a CPU: see `effective_precision`.
        mixed_precision=None if on_cpu else cfg.fsdp_precision,
        auto_wrap_policy=model.get_fsdp_wrap_policy(cfg.fsdp.wrapping_strategy),
        use_orig_params=cfg.fsdp.use_orig_params,
        limit_all_gathers=True,
        # Without a device id FSDP looks for an accelerator, which a CPU machine lacks.
        device_id=ranks.device,
        param_init_fn=None if ranks.is_first or on_cpu else materialise,
        sync_module_states=not on_cpu,
        **options,
    )


def effective_precision(asked: str | None, device: torch.device) -> str:
    """fp32 on a CPU, where bf16 is many times slower; else what the config says, bf16 by default."""
    return "fp32" if device.type == "cpu" else asked or "amp_bf16"
