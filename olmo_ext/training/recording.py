"""Turn a trainer's numbers into rows of metrics.jsonl, W&B rows and console lines."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from typing import Any

import torch

from olmo_ext.base.nodes import peak_flops_of_device
from olmo_ext.base.run_directory import MetricsRow, RunDirectory
from olmo_ext.config.run_config import RunConfig
from olmo_ext.training.distributed import Ranks
from olmo_ext.training.reporting import Reporter
from olmo_ext.upstream.trainer import RunTrainer

KEPT = {"train/CrossEntropyLoss", "train/Perplexity", "train/ZLoss", "train/masked_instances_local_rank"}
KEPT |= {"optim/total_grad_norm", "optim/learning_rate"}
"""Upstream also hands out the gradient norm of every parameter, at every step."""


class Recording:
    """One attempt's rows. Every rank calls it; rank 0 writes.

    :param wandb_run: see `olmo_ext.weights_and_biases.live_run`.
    """

    def __init__(
        self,
        trainer: RunTrainer,
        *,
        config: RunConfig,
        directory: RunDirectory,
        ranks: Ranks,
        reporter: Reporter,
        wandb_run: Any,
        attempt: int,
    ) -> None:
        self._trainer, self._config, self._directory = trainer, config, directory
        self._ranks, self._reporter, self._wandb_run, self._attempt = ranks, reporter, wandb_run, attempt
        self._flops_per_token = config.counts.training_flops_per_token
        self._tokens, self._seconds = 0, 0.0
        """Since the last row."""

        self._peak_flops = self._find_peak_flops()
        if ranks.is_first:
            self._write("attempt", {})

    def step(self, metrics: Mapping[str, float], *, batch_seconds: float, wanted: bool) -> None:
        """Count a step; write a row if it is wanted."""
        trainer = self._trainer
        self._tokens += trainer.tokens_per_batch
        self._seconds += batch_seconds
        if not wanted:
            return
        peak = self._peak_memory()
        if not self._ranks.is_first:
            return
        everything = trainer.should_log_optim_metrics_this_step()
        values = {
            name: float(value)
            for name, value in metrics.items()
            if everything or name in KEPT or name.startswith("optim/period")
        }
        rate = self._tokens / self._seconds
        self._tokens, self._seconds = 0, 0.0
        values["throughput/tokens_per_second"] = rate
        if self._peak_flops is not None:
            values["throughput/mfu"] = rate * self._flops_per_token / (self._peak_flops * self._ranks.world_size)
        values["memory/peak_bytes"] = peak
        self._write("train", values)
        self._reporter.step(trainer.global_step, values, last=trainer.global_step == trainer.stop_step)

    def evaluation(self, metrics: Mapping[str, float]) -> None:
        if self._ranks.is_first and metrics:
            self._write("eval", metrics)
            self._reporter.evaluation(self._trainer.global_step, metrics)

    def _write(self, kind: str, values: Mapping[str, float]) -> None:
        trainer = self._trainer
        tokens = trainer.global_train_tokens_seen
        row = MetricsRow(
            kind=kind,
            attempt=self._attempt,
            step=trainer.global_step,
            tokens=tokens,
            flops=tokens * self._flops_per_token,
            seconds=trainer.seconds,
            time=time.time(),
            values=dict(values),
        )
        self._directory.append_metrics(row)
        if kind != "attempt":
            self._wandb_run.log(row.values, step=row.step, tokens=tokens, flops=row.flops, when=row.time)

    def _peak_memory(self) -> float:
        """Peak memory over all ranks, in bytes: GPU memory, or resident main memory on a CPU."""
        if self._ranks.device.type == "cuda":
            own = float(torch.cuda.max_memory_allocated())
        else:
            own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
        if self._ranks.world_size == 1:
            return own
        tensor = torch.tensor(own, dtype=torch.float64, device=self._ranks.device)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
        return tensor.item()

    def _find_peak_flops(self) -> float | None:
        """Dense bf16 FLOP/s of one device; None on a CPU and where the GPU is unknown to the hardware table."""
        if self._ranks.device.type != "cuda":
            return None
        return peak_flops_of_device(torch.cuda.get_device_name(), node=self._config.node)
