"""OLMo's Trainer with its faults corrected in overridden methods; its loop `fit` stays as it is.

Each override says which behaviour of ai2-olmo 0.6.0 it replaces. Checkpoints, signals, metrics and reports are not
here: the trainer calls the `Hooks` it is given.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import olmo.train
import torch
import torch.distributed as dist
import torch.nn.functional as F
from olmo.config import DDPGradSyncMode, DistributedStrategy, EvaluatorType, TrainConfig
from olmo.optim import BoltOnWarmupScheduler, LionW
from olmo.torch_util import get_world_size
from olmo.train import Trainer
from torch.distributed.fsdp import FullyShardedDataParallel

from olmo_ext.config.run_config import RunConfig
from olmo_ext.upstream.chunked_loss import IGNORED, chunked_cross_entropy, chunked_loss, loss_in_place_of_logits
from olmo_ext.upstream.divergence import LARGEST_LOSS, DivergedError, divergence
from olmo_ext.upstream.scheduler import scheduler_values
from olmo_ext.upstream.shaped_model import shaped_model_config

UPSTREAM_Z_LOSS = 1e-4


class Hooks(Protocol):
    """Calls from the training loop into the run, around each step."""

    def stop_requested(self, step: int) -> str | None:
        """Why this rank wants to stop after this step, or None; the ranks agree afterwards."""

    def save_failed(self) -> bool:
        """Whether this rank knows that a save in the background has failed."""

    def stop_for_failed_save(self) -> None:
        """Raise on every rank: at least one rank knows that a save has failed."""

    def stopping(self, reason: str) -> None:
        """All ranks have agreed to stop after this step."""

    def after_step(self, metrics: dict[str, float], *, batch_seconds: float) -> None: ...

    def after_evaluation(self, metrics: dict[str, float], *, seconds: float) -> None: ...

    def save_due(self, step: int) -> bool: ...

    def save(self) -> None: ...

    def wants_metrics(self, step: int) -> bool: ...

    def record_samples(self, step: int, indices: list[int]) -> None: ...

    def samples_file(self) -> str | None:
        """Where in the run's folder all ranks record what they read, if they do."""


class _NoWandb:
    """Stands in for the `wandb` module inside `olmo.train`: what W&B gets is the run's business, and a server that
    does not answer may not stop training."""

    run = None


@contextmanager
def without_upstream_wandb() -> Iterator[None]:
    """Upstream's loop logs to any W&B run of the process and asks the server whether the run was cancelled."""
    original = olmo.train.wandb
    olmo.train.wandb = _NoWandb  # type: ignore[assignment]
    try:
        yield
    finally:
        olmo.train.wandb = original


OUR_KEYS = ("budget", "plugins", "node", "loss")
OUR_DATA_KEYS = ("subset", "corpus")


def train_config(config: RunConfig) -> TrainConfig:
    """OLMo's typed config of a run: everything but our own keys, and the model section with its shape."""

    def data(section: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in section.items() if key not in OUR_DATA_KEYS}

    values = {key: value for key, value in config.plain().items() if key not in (*OUR_KEYS, "model")}
    values["data"] = data(values["data"])
    values["scheduler"] = scheduler_values(values["scheduler"])
    values["evaluators"] = [{**item, "data": data(item["data"])} for item in values["evaluators"]]
    cfg = TrainConfig.new(**values)
    cfg.model = shaped_model_config(config.model, config.shape)
    return cfg


def loop_settings(cfg: TrainConfig, *, per_rank: int, save_folder: str) -> None:
    """Set the keys that upstream's script would set, and those through which its loop calls the hooks.

    :param per_rank: instances per rank and step.
    """
    cfg.device_train_batch_size = per_rank
    cfg.device_train_microbatch_size = min(cfg.device_train_microbatch_size, per_rank)
    cfg.device_train_grad_accum = per_rank // cfg.device_train_microbatch_size
    cfg.save_folder = save_folder
    cfg.model.precision = cfg.precision
    # The deprecated switch that upstream's script, not its optimizer, applies.
    if cfg.optimizer.no_decay_norm_and_bias is not None:
        cfg.optimizer.decay_norm_and_bias = not cfg.optimizer.no_decay_norm_and_bias
        cfg.optimizer.decay_embeddings = not cfg.optimizer.no_decay_norm_and_bias
        cfg.optimizer.no_decay_norm_and_bias = None
    # Under DDP upstream fills in the save intervals on a fresh start only: a resumed run saves nothing.
    # Here `save_checkpoint` is called after every step, whatever the strategy, and decides itself.
    cfg.save_interval, cfg.save_interval_ephemeral, cfg.save_interval_unsharded = None, None, 1
    cfg.save_num_unsharded_checkpoints_to_keep = -1
    cfg.canceled_check_interval, cfg.console_log_interval = 1, 1
    cfg.load_path, cfg.stop_after, cfg.wandb, cfg.torch_profiling = None, None, None, False


@dataclass
class RunTrainer(Trainer):
    """One run's trainer. `hooks` and `stop_step` are set before `fit`."""

    hooks: Hooks | None = None
    stop_step: int = 0
    """The step after which training ends, exactly."""

    seconds: float = 0.0
    """Time in training steps, data included, evaluation and saving not."""

    chunked_loss: bool = False
    """Whether losses are computed without holding the logits (see `olmo_ext.upstream.chunked_loss`)."""

    first_step: int = 0
    """Where this run began: 0, or the step of the checkpoint that it was started from."""

    bolt_on_warmup: tuple[int, int] | None = None
    """Begin and end of a warm-up put on top of the schedule after a warm start, in the schedule's units (steps, or
    tokens)."""

    _clock: float = 0.0
    _logits_wanted: bool = True
    _agreed_stop: bool = False
    _sample_ids: list[int] | None = None
    _batch_loss: torch.Tensor | None = None
    _batch_z_loss: torch.Tensor | None = None
    _grad_norm: torch.Tensor | None = None
    """Gradient norm before clipping."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.z_loss_multiplier = UPSTREAM_Z_LOSS
        if self.cfg.softmax_auxiliary_loss and self.cfg.auxiliary_loss_multiplier is not None:
            # Upstream reads `auxiliary_loss_multiplier` nowhere: its z-loss is weighted with 1e-4 whatever it says.
            self.z_loss_multiplier = self.cfg.auxiliary_loss_multiplier
            self.loss_fn = functools.partial(self.loss_fn, z_loss_multiplier=self.z_loss_multiplier)
        self._clip_gradients = self.optim.clip_grads_and_collect_metrics
        self.optim.clip_grads_and_collect_metrics = self._clip_and_remember  # type: ignore[method-assign]
        self.optim.register_step_pre_hook(self._before_update)

    def _clip_and_remember(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        metrics = self._clip_gradients(*args, **kwargs)
        self._grad_norm = metrics["total_grad_norm"]
        return metrics

    @property
    def dataset(self) -> Any:
        return self.train_loader.dataset

    def set_bolt_on_warmup(self, first: int, last: int) -> None:
        """Warm up from 0 to the schedule's value between two points in the schedule's units, as upstream does when the
        optimizer is new (it begins at the step, also where the units are tokens)."""
        self.bolt_on_warmup = (first, last)
        self.scheduler = BoltOnWarmupScheduler.wrap(self.scheduler, first, last)

    # -- the loop ---------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to `stop_step`. Without `stop_at`, upstream's loop runs ten steps past `max_duration`."""
        assert self.hooks is not None
        if self.global_step >= self.stop_step:
            return
        self.cfg.stop_at = self.stop_step
        self._clock = time.monotonic()
        with without_upstream_wandb():
            super().fit()

    def close(self, exit_code: int = 0) -> None:
        with without_upstream_wandb():
            super().close(exit_code)

    def should_log_this_step(self) -> bool:
        # Upstream's speed monitor counts the local shard under FSDP, and its logs go to W&B alone.
        return False

    def should_log_optim_metrics_this_step(self) -> bool:
        interval = self.cfg.optimizer.metrics_log_interval
        if isinstance(self.optim, LionW) and not isinstance(self.dist_model, FullyShardedDataParallel):
            return False  # Upstream's LionW asserts FSDP when it reports on its updates.
        return interval is not None and self.global_step % interval == 0

    def system_metrics(self) -> dict[str, float]:
        return {}

    def log_metrics_to_console(self, prefix: str, metrics: dict[str, float]) -> None:
        """The run prints its own lines."""

    @property
    def max_epochs(self) -> int:
        # `stop_step` ends the loop; upstream's count ends it early when batches were skipped at the start.
        return 2**31

    def save_checkpoint(self, checkpoint_type: Any = None) -> tuple[Any, Any]:
        """Called by upstream's loop after every step (see `loop_settings`), before an evaluation of that step."""
        del checkpoint_type
        assert self.hooks is not None
        if self.last_unsharded_checkpoint_step == self.global_step:
            return None, None
        if self._agreed_stop or self.global_step >= self.stop_step or self.hooks.save_due(self.global_step):
            self.optim.zero_grad(set_to_none=True)
            self.hooks.save()
            self.last_unsharded_checkpoint_step = self.global_step
            self._clock = time.monotonic()
        return None, None

    def eval(self) -> dict[str, Any]:
        """Upstream's evaluation, run eagerly: it compiles a version per batch shape and then resets the compiler, so
        that every block is compiled again after each evaluation."""
        assert self.hooks is not None
        began = time.monotonic()
        compiled, self.cfg.compile = self.cfg.compile, None
        try:
            with torch.compiler.set_stance("force_eager") if compiled is not None else nullcontext():
                metrics = super().eval()
        finally:
            self.cfg.compile = compiled
        self._clock = time.monotonic()
        self.hooks.after_evaluation(metrics, seconds=self._clock - began)
        return metrics

    def eval_step(self, batch: dict[str, Any], evaluator: Any) -> None:
        # A language-model evaluator takes the losses alone; a task is scored by its logits.
        self._logits_wanted = evaluator.type != EvaluatorType.lm
        super().eval_step(batch, evaluator)

    def eval_batch(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss per label, [instances, positions - 1], where upstream averages over masked positions as well."""
        with self.autocast():
            if self.chunked_loss and not self._logits_wanted:
                ce_loss = logits = self._losses(batch, chunked_cross_entropy)[..., :-1]
            else:
                ce_loss, _, logits = self.model_forward(batch, loss_reduction="none")
        batch["predicted"] = self.get_labels(batch) != -100
        return ce_loss, logits

    def check_if_cancelled(self) -> tuple[bool, int]:
        """Upstream asks W&B's server here, for 19 s where nothing answers. The ranks agreed in `_before_update`."""
        return self._agreed_stop, 0

    # -- one step ---------------------------------------------------------------------------------------------------

    def train_step(self, batch: dict[str, Any], reduce_global_loss: bool = True) -> dict[str, float]:
        assert self.hooks is not None
        index = batch.get("index")
        self._sample_ids = None if index is None else [int(i) for i in index]
        if self._sample_ids is not None:
            self.hooks.record_samples(self.global_step, self._sample_ids)
        wanted = self.hooks.wants_metrics(self.global_step)
        metrics = super().train_step(batch, reduce_global_loss=wanted)
        now = time.monotonic()
        batch_seconds, self._clock = now - self._clock, now
        self.seconds += batch_seconds
        metrics["optim/learning_rate"] = self.optim.param_groups[0]["lr"]
        self.hooks.after_step(metrics, batch_seconds=batch_seconds)
        return metrics

    def loss_divisor(self, batch: dict[str, Any]) -> float:
        """What the summed loss of this rank's batch is divided by, so that the mean over ranks is the loss.

        Upstream divides by batch x sequence length although one label fewer is predicted, and counts masked labels as
        well. With nothing masked this is the same integer; with masks, the same share of the labels that count, taken
        over all ranks: instances that are masked do not shrink the others' gradient.
        """
        tokens = batch["input_ids"].numel()
        if all(batch.get(name) is None for name in ("label_mask", "attention_mask", "instance_mask")):
            return tokens
        labels = self.get_labels(batch)
        counts = torch.stack([(labels != -100).sum(), torch.tensor(labels.numel(), device=labels.device)]).double()
        dist.all_reduce(counts)
        unmasked, total = counts.tolist()
        if unmasked == total:
            return tokens
        return max(unmasked, 1.0) / get_world_size() * tokens / labels.numel()

    def train_batch(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As upstream's, with the divisor above and autocast on the device in use: upstream's asks for "cuda"."""
        divisor: Any = self.loss_divisor(batch)
        micro_batches = self.split_batch(batch)
        del batch
        loss_sum = torch.tensor(0.0, device=self.device)
        z_sum = torch.tensor(0.0, device=self.device) if self.cfg.softmax_auxiliary_loss else None
        once = (
            self.cfg.distributed_strategy == DistributedStrategy.ddp
            and self.cfg.ddp is not None
            and self.cfg.ddp.grad_sync_mode == DDPGradSyncMode.batch
        )
        for number, micro_batch in enumerate(micro_batches, start=1):
            local_only = once and number < len(micro_batches)
            handles = self._setup_module_output_save_hooks(number - 1)
            with self.dist_model.no_sync() if local_only else nullcontext():
                with self.autocast():
                    loss, ce_loss, z_loss = self.train_micro_batch(micro_batch, divisor)
                    loss_sum += ce_loss.detach()
                    if z_sum is not None and z_loss is not None:
                        z_sum += z_loss.detach()
                loss.backward()
            for handle in handles:
                handle.remove()
        # The reduction of upstream's train_step works in place, so the check before the update gets a copy.
        self._batch_loss, self._batch_z_loss = loss_sum.clone(), z_sum.clone() if z_sum is not None else None
        return loss_sum, z_sum

    def train_micro_batch(
        self, micro_batch: dict[str, Any], batch_size_in_tokens: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The loss to differentiate, and its two parts, each divided by what `loss_divisor` says."""
        if not self.chunked_loss:
            return super().train_micro_batch(micro_batch, batch_size_in_tokens)
        multiplier = self.z_loss_multiplier if self.cfg.softmax_auxiliary_loss else 0.0
        compute = functools.partial(chunked_loss, z_multiplier=multiplier)
        loss, ce_loss, z_loss = (part / batch_size_in_tokens for part in self._losses(micro_batch, compute))
        return loss, ce_loss, z_loss if self.cfg.softmax_auxiliary_loss else None

    def _losses(self, batch: dict[str, Any], compute: Callable[..., Any]) -> Any:
        """What `compute(hidden, head, labels)` gives inside the model's forward, with a label for every position."""
        labels = F.pad(self.get_labels(batch), (0, 1), value=IGNORED)
        with loss_in_place_of_logits(self.model, lambda hidden, head: compute(hidden, head, labels)):
            return self.dist_model(
                input_ids=batch["input_ids"],
                attention_mask=batch.get("attention_mask"),
                attention_bias=batch.get("attention_bias"),
                doc_lens=batch.get("doc_lens"),
                max_doc_lens=batch.get("max_doc_lens"),
            ).logits

    def autocast(self) -> Any:
        """Mixed precision on a GPU; on a CPU nothing is cast, and nothing warns."""
        if self.device.type == "cpu":
            return nullcontext()
        return torch.autocast(self.device.type, enabled=True, dtype=self.cfg.autocast_precision)

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Runs between clipping and the update: upstream looks for NaN only after the update.

        One small all-reduce a step tells every rank whether some rank's numbers are unusable and whether some rank
        wants to stop, so that all do the same.
        """
        del optimizer, args, kwargs
        assert self.hooks is not None and self._batch_loss is not None and self._grad_norm is not None
        value = self._batch_loss.double()
        if self._batch_z_loss is not None:
            value = value + self._batch_z_loss.double()
        norm = self._grad_norm
        unusable = ~torch.isfinite(value) | (self._batch_loss > LARGEST_LOSS) | ~torch.isfinite(norm)
        reason = self.hooks.stop_requested(self.global_step)
        known = torch.tensor([reason is not None, self.hooks.save_failed()], dtype=torch.float64, device=self.device)
        flags = torch.cat([unusable.double().view(1), known])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        any_unusable, stop, save_failed = flags.tolist()
        if any_unusable:
            self._report_divergence(value.item(), norm.item())
        if save_failed:
            self.hooks.stop_for_failed_save()
        self._agreed_stop = bool(stop)
        if stop:
            self.hooks.stopping(reason or "another rank asked")

    def _report_divergence(self, value: float, norm: float) -> None:
        """
        :param value: this rank's loss, auxiliary loss included.
        :raises DivergedError: on every rank, in the same words.
        """
        assert self.hooks is not None and self._batch_loss is not None
        everyone: list[Any] = [None] * get_world_size()
        dist.all_gather_object(everyone, (self._sample_ids or [], value, self._batch_loss.item()))
        raise DivergedError(divergence(self.global_step, everyone, norm, self.hooks.samples_file()))
