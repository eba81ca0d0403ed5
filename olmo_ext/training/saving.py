"""When a run saves, what it keeps, and how long the ranks wait for it.

`save_interval` and `save_interval_unsharded` (one kind here) and the last step give permanent checkpoints, of which
`save_num_checkpoints_to_keep` newest are kept (-1: all, 0: none); `save_interval_ephemeral` and signals give others,
of which the newest is kept. The newest complete one is always kept, and nothing is removed before the next is
complete.

Every rank waits while the state is gathered in rank 0's main memory. On a GPU that copy is apart from the parameters,
so a thread writes it while training goes on; on a CPU it is the parameters themselves, and training waits for it.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from olmo_ext.base.errors import WorkError
from olmo_ext.base.files import sync_file
from olmo_ext.base.sections import TrainConfig
from olmo_ext.training import checkpoint
from olmo_ext.training.distributed import Ranks, agree
from olmo_ext.training.replicas import check_replicas_agree
from olmo_ext.training.tensor_state import gather, gather_random_state
from olmo_ext.upstream.trainer import RunTrainer

log = logging.getLogger("olmo_ext.training")

PERMANENT = ("save_interval", "save_interval_unsharded")
ASSUMED_WRITE_RATE = 200e6
"""Bytes per second, before a save was measured."""


def writes_in_background(device: torch.device) -> bool:
    return device.type == "cuda"


class Saver:
    """Saves one run.

    :param config: the run's resolved config, `config_text` the same as YAML.
    :param checkpoint_bytes: size of one checkpoint, as it is estimated.
    :param rows: the file of metrics, which outlasts a crash of the machine up to the step of every checkpoint.
    :param extra: what goes into `train_state.json` beside the trainer's position.
    :param saved: called on rank 0, in the training thread, with the step of a checkpoint that has become complete.
    """

    def __init__(
        self,
        store: checkpoint.CheckpointStore,
        *,
        config: TrainConfig,
        config_text: str,
        checkpoint_bytes: int,
        rows: Path,
        ranks: Ranks,
        extra: Mapping[str, Any],
        saved: Callable[[int], None],
    ) -> None:
        self.store, self.config, self.ranks = store, config, ranks
        self._config_text, self._extra, self._saved = config_text, extra, saved
        self._checkpoint_bytes, self._rows = checkpoint_bytes, rows
        self.save_seconds: float | None = None
        """Longest time from the beginning of a save to its end on the disk; None before the first."""

        self._thread: threading.Thread | None = None
        self._written: int | None = None
        self._error: str | None = None

    # -- when -------------------------------------------------------------------------------------------------------

    def is_permanent(self, step: int, stop_step: int) -> bool:
        intervals = [getattr(self.config, name) for name in PERMANENT]
        return step == stop_step or any(interval and step % interval == 0 for interval in intervals)

    def is_due(self, step: int, stop_step: int) -> bool:
        ephemeral = self.config.save_interval_ephemeral
        return self.is_permanent(step, stop_step) or bool(ephemeral and step % ephemeral == 0)

    def check_space(self, steps: int) -> str | None:
        """A warning if what the run keeps will not fit.

        :raises InputError: if not even two checkpoints fit.
        """
        keep = self.config.save_num_checkpoints_to_keep
        intervals = {interval for name in PERMANENT if (interval := getattr(self.config, name))}
        many = sum((steps - 1) // interval for interval in intervals) + 1
        if len(intervals) == 2:
            many -= (steps - 1) // math.lcm(*intervals)
        kept = max(1, many if keep < 0 else min(keep, many))
        return checkpoint.check_space(self.store.path, size=self._checkpoint_bytes, kept=kept)

    def expected_seconds(self) -> float:
        """How long the next save will take."""
        if self.save_seconds is not None:
            return self.save_seconds
        return self._checkpoint_bytes / ASSUMED_WRITE_RATE

    # -- how --------------------------------------------------------------------------------------------------------

    def save(self, trainer: RunTrainer) -> None:
        """Save the present step. All ranks take part; where the write is not in the background, all fail with rank 0.

        :raises WorkError: if rank 0 cannot write, or copies of the model have come to differ.
        """
        began = time.monotonic()
        self.wait()
        check_replicas_agree(trainer.dist_model, self.ranks, when=f"at step {trainer.global_step}, so it is not saved")
        weights, moments = gather(trainer.dist_model, trainer.optim)
        random_state = gather_random_state()
        background = writes_in_background(self.ranks.device)
        if self.ranks.is_first:
            snapshot = checkpoint.Snapshot(
                step=trainer.global_step,
                tensors={
                    checkpoint.MODEL: weights,
                    checkpoint.OPTIMIZER: {
                        f"{key}/{name}": t for name, own in moments.items() for key, t in own.items()
                    },
                    checkpoint.RNG: random_state,
                },
                texts={checkpoint.TRAIN_STATE: json.dumps(self._train_state(trainer), indent=1)}
                | {checkpoint.CONFIG: self._config_text},
            )
            stop_step = trainer.stop_step
            if background:
                if self.ranks.device.type == "cpu":
                    snapshot = _copied(snapshot)
                self._thread = threading.Thread(
                    target=self._write, args=(snapshot, stop_step, began), name=f"save-step{snapshot.step}"
                )
                self._thread.start()
            else:
                self._write(snapshot, stop_step, began)
        if not background:
            self.wait()
        log.info("step %d: the save held the ranks for %.2f s", trainer.global_step, time.monotonic() - began)

    def _write(self, snapshot: checkpoint.Snapshot, stop_step: int, began: float) -> None:
        try:
            # First: a restart from this checkpoint writes no row of an earlier step again.
            sync_file(self._rows)
            self.store.write(snapshot)
            self.store.retain(
                written=snapshot.step,
                permanent=lambda step: self.is_permanent(step, stop_step),
                keep=self.config.save_num_checkpoints_to_keep,
            )
        except Exception as error:  # noqa: BLE001  (reported to all ranks by `wait` or `failure`)
            self._error = str(error) if isinstance(error, WorkError) else f"{type(error).__name__}: {error}"
            return
        self.save_seconds = max(self.save_seconds or 0.0, time.monotonic() - began)
        self._written = snapshot.step
        log.info("step %d: saved after %.2f s", snapshot.step, time.monotonic() - began)

    def poll(self) -> str | None:
        """Notice a write that has ended; the error of one that failed. Rank 0 asks at every step."""
        if self._written is not None and (self._thread is None or not self._thread.is_alive()):
            self._saved(self._written)
            self._written = None
        return self._error

    def wait(self) -> None:
        """Until nothing is being written, on all ranks.

        :raises WorkError: on all ranks, if the last write failed.
        """
        self.join()
        error = agree(self.poll() if self.ranks.is_first else None, self.ranks)
        if error is not None:
            raise WorkError(error)

    def join(self) -> None:
        """Let a write end; no other rank is asked."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _train_state(self, trainer: RunTrainer) -> dict[str, Any]:
        return {
            "format": checkpoint.FORMAT,
            "step": trainer.global_step,
            "epoch": trainer.epoch or 0,
            "examples_seen_this_epoch": trainer.global_train_examples_seen_this_epoch,
            "tokens": trainer.global_train_tokens_seen,
            "seconds": trainer.seconds,
            "first_step": trainer.first_step,
            "train_loss": trainer.cur_train_loss if trainer.cur_train_loss < float("inf") else None,
            "min_train_loss": trainer.min_train_loss if trainer.min_train_loss < float("inf") else None,
            "bolt_on_warmup": trainer.bolt_on_warmup,
            "world_size": self.ranks.world_size,
            "save_seconds": self.save_seconds,
            **self._extra,
        }


def _copied(snapshot: checkpoint.Snapshot) -> checkpoint.Snapshot:
    tensors = {file: {name: t.clone() for name, t in own.items()} for file, own in snapshot.tensors.items()}
    return checkpoint.Snapshot(step=snapshot.step, tensors=tensors, texts=snapshot.texts)
