"""One attempt of a run: builds the parts, restores, trains, saves, and leaves a state that says what happened."""

from __future__ import annotations

import logging
import time
import traceback
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from olmo_ext.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, InputError, OlmoExtError, WorkError
from olmo_ext.base.run_directory import RunDirectory, RunState
from olmo_ext.base.sweep_directory import SweepDirectory
from olmo_ext.config.run_config import RunConfig
from olmo_ext.config.run_length import batch_per_rank, run_length, schedule_warnings
from olmo_ext.data.loader import data_fingerprint, evaluation_fingerprints
from olmo_ext.training import checkpoint
from olmo_ext.training import reporting as lines
from olmo_ext.training.building import build_trainer, effective_config
from olmo_ext.training.distributed import Ranks, agree, any_rank, failure_of_another_rank
from olmo_ext.training.early_stopping import early_stopping_reason
from olmo_ext.training.evaluators import evaluation_is_due
from olmo_ext.training.profiling import torch_profiler
from olmo_ext.training.provenance import describe_run, processor_name, slurm_job
from olmo_ext.training.recording import Recording
from olmo_ext.training.replicas import check_replicas_agree
from olmo_ext.training.restore import Restorer, own_checkpoint
from olmo_ext.training.samples import SampleLog
from olmo_ext.training.saving import Saver
from olmo_ext.training.signals import StopRequest, TimeLimit, scheduler_end_time
from olmo_ext.training.unused import unused_keys
from olmo_ext.weights_and_biases import live_run as wandb_run

log = logging.getLogger("olmo_ext.training")

HEARTBEAT_SECONDS = 15.0


class Session:
    """The hooks of one attempt (see `olmo_ext.upstream.trainer.Hooks`). Built on every rank; rank 0 writes.

    :param began: when the run was asked for, on `time.monotonic`: its time limit counts from there.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        directory: RunDirectory,
        stop: StopRequest,
        ranks: Ranks,
        progress: bool | None,
        began: float,
    ) -> None:
        self.config = config
        self.directory, self.stop, self.ranks = directory, stop, ranks
        self.progress = progress
        self.state = RunState()
        self.store = checkpoint.CheckpointStore(directory.checkpoints, report=self.say)
        self.reporter: lines.Reporter | None = None
        self.wandb_run: Any = wandb_run.NullRun()
        self.final_reason: str | None = None
        """Why the run stops for good although it is not done."""

        self.stop_reason: str | None = None
        self.step_seconds, self.evaluation_seconds = 0.0, 0.0
        self._began = began
        self._heartbeat = 0.0
        self.saver: Any = None
        self._profiler: Any = None

    # -- the attempt -----------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Returns the exit code; a failure is written to `state.json` and raised."""
        with ExitStack() as stack:
            self._open(stack)
            try:
                return self._attempt(stack)
            except KeyboardInterrupt:
                self._fail("interrupted")
                raise
            except OlmoExtError as error:
                self._fail(str(error))
                raise
            except Exception as error:
                log.error("%s", traceback.format_exc())
                # What a collective raises when another rank is gone is a RuntimeError.
                other = None
                if isinstance(error, RuntimeError):
                    other = failure_of_another_rank(self.directory.logs, self.state.attempt, self.ranks)
                self._fail(other or f"{type(error).__name__}: {error}")
                if other:
                    raise WorkError(other) from None
                raise

    def _open(self, stack: ExitStack) -> None:
        before = self.directory.read_state()
        attempt = agree(self.directory.last_attempt() + 1, self.ranks)
        self.state = RunState(
            status="running", attempt=attempt, step=before.step, max_steps=before.max_steps, slurm_job=slurm_job()
        )
        name = f"attempt{attempt}-rank{self.ranks.rank}"
        handler = lines.open_log(self.directory.logs / f"{name}.log")
        stack.callback(lines.close_log, handler)
        logging.captureWarnings(True)
        stack.callback(logging.captureWarnings, False)
        self._failure_path = self.directory.logs / f"{name}.failure"
        self.stop.on_leave = self._leave

    def _attempt(self, stack: ExitStack) -> int:
        config, ranks = self.config, self.ranks
        where = str(self.config.source or self.directory.path)
        per_rank = batch_per_rank(config, ranks.world_size, where=where)
        data = data_fingerprint(config)
        length = run_length(config, instances=data["instances"], where=where)
        self.state.max_steps = length.steps
        self.saver = Saver(
            self.store,
            config=config,
            config_text=self.config.dump(),
            checkpoint_bytes=checkpoint.estimated_bytes(config, self.config.shape),
            rows=self.directory.metrics_path,
            ranks=ranks,
            extra={"data": data, "attempt": self.state.attempt, "run_name": config.run_name},
            saved=self._saved,
        )
        if ranks.is_first and (warning := self.saver.check_space(length.steps)):
            self.say(f"note: {warning}")
        own = own_checkpoint(self.store, data, ranks)
        if ranks.is_first:
            self.provenance, self.shape = describe_run(
                self.config,
                directory=self.directory,
                device=self._device_name(),
                world_size=ranks.world_size,
                data=data,
                evaluation=evaluation_fingerprints(config),
            )
            self.directory.write_state(self.state)
        cfg = effective_config(self.config, per_rank=per_rank, directory=self.directory, ranks=ranks)
        self.reporter = lines.Reporter(speaks=ranks.is_first, total=length.steps, progress=self.progress)
        stack.callback(self.reporter.close)
        for note in (*unused_keys(config), *schedule_warnings(config, self.config.shape, length)):
            self.say(f"note: {note}")
        if config.precision not in (None, cfg.precision):
            self.say(f"note: {cfg.precision} instead of {config.precision} on this device")

        trainer, self.compile_report = build_trainer(
            self.config, cfg, steps=length.steps, directory=self.directory, ranks=ranks, hooks=self, where=where
        )
        self.trainer = trainer
        self.samples = SampleLog(
            self.directory.logs,
            stack,
            attempt=self.state.attempt,
            rank=ranks.rank,
            wanted=self.config.save_data_indices,
        )
        done = self._restore(own, length.steps)
        trainer.stop_step = self._stop_step(length.steps)
        if own is None and done >= trainer.stop_step:
            raise InputError(
                f"load_path goes on from step {done}, the run ends at {trainer.stop_step}",
                where=where,
                right="a longer max_duration, or reset_trainer_state: true",
            )
        limit = config.time_limit
        left = None if limit is None else limit - (time.monotonic() - self._began)
        self.time_limit = TimeLimit(seconds=left, end_time=scheduler_end_time())
        strategy = str(cfg.distributed_strategy)
        place = f"{self._device_name()} ({ranks.world_size} x {strategy}, {cfg.precision})"
        self.say(
            lines.start_line(
                name=self.directory.name,
                counts=self.config.counts,
                steps=length.steps,
                tokens_per_step=length.tokens_per_step,
                done=done,
                where=place,
            )
        )
        self._start_recording()
        stack.callback(trainer.close)
        return self._train()

    def _train(self) -> int:
        trainer = self.trainer
        if any_rank(self.stop.is_set, self.ranks):
            # Nothing was trained yet, so the checkpoint that is there, or the seed, is all there is to keep.
            return self._end(EXIT_REQUEUE, "requeued", self.stop.reason or "a signal on another rank")
        if evaluation_is_due(trainer, self.directory, self.ranks):
            trainer.eval()
            trainer.dist_model.train()
        if self.config.torch_profiling and self.ranks.is_first:
            folder = self.directory.path / "profiler"
            self._profiler = torch_profiler(folder, self.ranks.device, step=lambda: trainer.global_step)
        with self._profiler or nullcontext():
            trainer.fit()
        self.saver.wait()
        # Rank 0 alone knows the time and the losses, another one perhaps the signal.
        self.final_reason = agree(self.final_reason, self.ranks)
        self.stop_reason = agree(self.stop_reason, self.ranks)
        if self.final_reason is not None:
            self._end(EXIT_FAILED, "failed", self.final_reason)
            raise WorkError(f"stopped at step {trainer.global_step}: {self.final_reason}")
        if self.stop_reason is not None and trainer.global_step < trainer.stop_step:
            return self._end(EXIT_REQUEUE, "requeued", self.stop_reason)
        if trainer.global_step < trainer.stop_step:
            raise WorkError(
                f"the data ended at step {trainer.global_step} of {trainer.stop_step}: epoch or fast_forward_batches"
                " lie beyond the run"
            )
        last = self.store.folder(trainer.global_step)
        if self.ranks.is_first and (missing := checkpoint.incomplete_because(last, verify=False)):
            raise WorkError(f"no checkpoint of the last step {trainer.global_step}: {missing}")
        if evaluation_is_due(trainer, self.directory, self.ranks):
            # A signal in the last step: upstream's loop left without its evaluation.
            trainer.eval()
        return self._end(EXIT_DONE, "done", "")

    def _end(self, code: int, status: str, reason: str) -> int:
        trainer = self.trainer
        text = lines.end_line(
            step=trainer.global_step, tokens=trainer.global_train_tokens_seen, seconds=trainer.seconds
        )
        self.say(f"{text}; {status}{f': {reason}' if reason else ''}")
        if status == "done":
            self.state.step = trainer.global_step
        self._write_state(status, reason)
        if self.ranks.is_first:
            # From here on a second Ctrl-C ends the wait for W&B, and what was written stays true.
            self.stop.on_leave = None
            self.wandb_run.finish(code)
        return code

    def _fail(self, reason: str) -> None:
        """Leave the reason where the next one looks: rank 0's in state.json, others' beside their log."""
        if self.saver is not None and self.ranks.is_first:
            # A write that is under way is of a step that was fine.
            self.saver.join()
            self.saver.poll()
        try:
            self._write_state("failed", reason)
            if self.ranks.is_first:
                self.stop.on_leave = None
                self.wandb_run.finish(EXIT_FAILED)
            else:
                self._failure_path.write_text(f"rank {self.ranks.rank}: {reason}\n")
        except OSError as error:
            log.error("state not written: %s", error)

    def _leave(self) -> None:
        """A second Ctrl-C: leave at once, without waiting for a write or for W&B, whose writer ends by itself."""
        try:
            self._write_state("failed", "a second Ctrl-C, before a checkpoint was written")
        except OSError as error:
            log.error("state not written: %s", error)

    def _write_state(self, status: str, reason: str) -> None:
        """How the attempt ends; rank 0 writes it down."""
        self.state.status, self.state.reason = status, reason
        if self.ranks.is_first:
            self.directory.write_state(self.state)

    def say(self, text: str) -> None:
        if self.reporter is not None:
            self.reporter.say(text)
        else:
            log.info(text)
            if self.ranks.is_first:
                print(text, flush=True)

    # -- what is written at the start ------------------------------------------------------------------------------

    def _device_name(self) -> str:
        return torch.cuda.get_device_name() if self.ranks.device.type == "cuda" else processor_name()

    def _start_recording(self) -> None:
        if self.ranks.is_first:
            sweep = SweepDirectory(self.directory.path.resolve().parent)
            self.wandb_run = wandb_run.start(
                self.config.plain(),
                run_directory=self.directory,
                shape=self.shape,
                provenance=self.provenance,
                sweep=sweep.path.name if sweep.is_declared() else None,
                attempt=self.state.attempt,
            )
        assert self.reporter is not None
        self.recording = Recording(
            self.trainer,
            config=self.config,
            directory=self.directory,
            ranks=self.ranks,
            reporter=self.reporter,
            wandb_run=self.wandb_run,
            attempt=self.state.attempt,
        )

    # -- restoring -------------------------------------------------------------------------------------------------

    def _restore(self, own: Path | None, steps: int) -> int:
        """Bring trainer, data and random state to where the run was left; returns the step."""
        restorer = Restorer(self.trainer, config=self.config, steps=steps, ranks=self.ranks, say=self.say)
        if own is not None:
            self.saver.save_seconds = restorer.from_own(own)["save_seconds"]
        elif self.config.load_path:
            restorer.from_elsewhere(self.config.load_path)
        else:
            restorer.fresh()
        check_replicas_agree(self.trainer.dist_model, self.ranks, when="before the first step")
        self.state.step = self.trainer.global_step if own is not None else 0
        return self.trainer.global_step

    def _stop_step(self, steps: int) -> int:
        """Where this run ends. `stop_after` counts from where a warm start begins."""
        after = self.config.stop_after
        return steps if after is None else min(steps, self.trainer.first_step + after)

    # -- hooks -----------------------------------------------------------------------------------------------------

    def stop_requested(self, step: int) -> str | None:
        if self._profiler is not None:
            self._profiler.step()
        if not self.ranks.is_first:
            return self.stop.reason
        if self.time_limit.is_reached(
            save_seconds=self.saver.expected_seconds(), step_seconds=self._seconds_ahead(step)
        ):
            self.stop.request("time limit")
        self.final_reason = self._reason_to_give_up()
        return self.final_reason or self.stop.reason

    def _seconds_ahead(self, step: int) -> float:
        """Time until this rank can next stop: one step, and first the evaluation after `step` if it is due."""
        evaluates = step % self.trainer.cfg.eval_interval == 0
        return self.step_seconds + (self.evaluation_seconds if evaluates else 0.0)

    def _reason_to_give_up(self) -> str | None:
        """Why the run should end for good, not done."""
        if (reason := early_stopping_reason(self.trainer, self.config)) is not None:
            return reason
        cancelled = self.wandb_run.cancel_requested
        return f"cancelled on W&B: {cancelled}" if cancelled is not None else None

    def save_failed(self) -> bool:
        return self.ranks.is_first and self.saver.poll() is not None

    def stop_for_failed_save(self) -> None:
        self.saver.wait()

    def stopping(self, reason: str) -> None:
        if self.final_reason is None:
            self.stop_reason = reason
        self.say(f"step {self.trainer.global_step}: stopping, {reason}")

    def record_samples(self, step: int, indices: list[int]) -> None:
        self.samples.record(step, indices)

    def samples_file(self) -> str | None:
        return self.samples.pattern

    def wants_metrics(self, step: int) -> bool:
        return step % self.config.console_log_interval == 0 or step == self.trainer.stop_step

    def after_step(self, metrics: dict[str, float], *, batch_seconds: float) -> None:
        step = self.trainer.global_step
        if not self.step_seconds and self.compile_report is not None:
            for text in self.compile_report.lines(batch_seconds):
                self.say(text)
        self.step_seconds = batch_seconds
        wanted = self.wants_metrics(step)
        self.recording.step(metrics, batch_seconds=batch_seconds, wanted=wanted)
        if wanted and self.ranks.is_first and time.monotonic() - self._heartbeat >= HEARTBEAT_SECONDS:
            self._heartbeat = time.monotonic()
            self.directory.write_state(self.state)

    def after_evaluation(self, metrics: dict[str, float], *, seconds: float) -> None:
        self.evaluation_seconds = seconds
        self.recording.evaluation(metrics)

    # -- saving and evaluating ----------------------------------------------------------------------------------------

    def save_due(self, step: int) -> bool:
        return self.saver.is_due(step, self.trainer.stop_step)

    def save(self) -> None:
        self.saver.save(self.trainer)
        self.samples.flush()

    def _saved(self, step: int) -> None:
        self.state.step = step
        self.directory.write_state(self.state)
