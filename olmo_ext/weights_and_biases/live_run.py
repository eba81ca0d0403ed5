"""W&B logging that cannot stop or stall training.

The SDK lives in a process of its own (`wandb_writer`): the training process imports no wandb, waits for no server and
writes rows into a queue. `wandb.run` stays None here, so upstream's own logging and its cancel check, which asks the
server while all ranks wait, are off without a patch. Whatever happens to the other process, the run's metrics are in
metrics.jsonl and `olmo-ext sync` brings them up.

Only rank 0 calls this: one W&B run for a run, whatever its world size.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.weights_and_biases.settings import (
    cancel_check_wanted,
    check_names,
    choose_mode,
    group_of_run,
    is_configured,
    run_id,
    wandb_config,
    wanted,
)

__all__ = ["NullRun", "WandbRun", "Writer", "cancel_check_wanted", "check_names", "is_configured", "start"]

log = logging.getLogger(__name__)

START_SECONDS = 20.0
"""Seconds that the writer waits for the server before it continues offline. Training does not wait at all."""

FINISH_SECONDS = 20.0
"""Seconds that the end of training waits for the last rows to be uploaded; later `olmo-ext sync` has to upload them."""

FLUSH_SECONDS = 2
"""Seconds of the offline file that a SIGKILL may lose; wandb's own default is 15."""

MAX_QUEUED = 200_000
"""Most rows that wait for a stalled writer; further rows are dropped and counted."""


class NullRun:
    """Logs nothing: no `wandb` section, WANDB_MODE=disabled, or a writer that did not start."""

    url: str | None = None
    cancel_requested: str | None = None

    def log(
        self, values: Mapping[str, Any], *, step: int, tokens: int, flops: float, when: float | None = None
    ) -> None:
        """Do nothing."""

    def finish(self, exit_code: int = 0) -> None:
        """Do nothing."""


class Writer:
    """The training process's handle of the writer process: rows are queued to it, its reports are collected."""

    def __init__(self, settings: dict[str, Any], *, log_path: str, environment: Mapping[str, str]) -> None:
        """:raises OSError: when the process cannot be started."""
        with open(log_path, "ab") as log_file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "olmo_ext.weights_and_biases.writer"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env={key: value for key, value in environment.items() if key != "WANDB_SERVICE"},
                # Ctrl-C in a terminal goes to the training process alone, which then finishes the run.
                start_new_session=True,
            )
        self.ready: dict[str, Any] | None = None
        self.finished: dict[str, Any] | None = None
        self.cancel: str | None = None
        self.unsent = 0
        """Rows that a full queue has dropped."""
        self._queue: queue.Queue[str | None] = queue.Queue(MAX_QUEUED)
        self.became_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, name="wandb-events", daemon=True)
        self._sender = threading.Thread(target=self._send, name="wandb-rows", daemon=True)
        self._reader.start()
        self._sender.start()
        self.put({"settings": settings})

    def put(self, message: dict[str, Any], *, wait: bool = False) -> None:
        """Queue a message; with `wait`, which training never asks for, until there is room or the writer has ended."""
        text = json.dumps(message, default=str)
        while True:
            try:
                self._queue.put(text, block=wait, timeout=1.0)
                return
            except queue.Full:
                if not wait or self.process.poll() is not None:
                    self.unsent += 1
                    return

    def _send(self) -> None:
        pipe: IO[bytes] = self.process.stdin  # type: ignore[assignment]
        try:
            while (text := self._queue.get()) is not None:
                pipe.write(text.encode() + b"\n")
                pipe.flush()
            pipe.close()
        except (OSError, ValueError):
            pass  # The writer is gone; its end is reported by `_read`.

    def _read(self) -> None:
        pipe: IO[bytes] = self.process.stdout  # type: ignore[assignment]
        for line in pipe:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            kind = event.get("event")
            if kind == "ready":
                self.ready = event
                self.became_ready.set()
            elif kind == "finished":
                self.finished = event
            elif kind == "cancel":
                self.cancel = event.get("reason")
            elif kind == "warning":
                log.warning("W&B: %s", event.get("text"))
        self.became_ready.set()

    def close(self, *, exit_code: int, seconds: float) -> bool:
        """Tell the writer to finish and wait at most `seconds`; then end it. True when it reported success."""
        self.put({"finish": exit_code, "seconds": seconds})
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass
        try:
            # The writer ends itself at its own limit; the margin is for its last report.
            self.process.wait(timeout=seconds + 3.0)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join(timeout=2.0)
        return bool(self.finished and self.finished.get("ok"))

    def kill(self) -> None:
        """End the writer; wandb's own service process ends with it."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (OSError, ProcessLookupError):
            pass
        try:
            self.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            pass


class WandbRun:
    """One attempt of a run on W&B, online or offline. Made by `start`."""

    def __init__(self, writer: Writer, *, log_interval: int, mode: str) -> None:
        self._writer = writer
        self._log_interval = log_interval
        self._closed = False
        self.mode = mode
        """What was asked for: `online` falls back to offline when the server does not answer."""

    @property
    def url(self) -> str | None:
        """The run's page, once the server has answered."""
        return self._writer.ready.get("url") if self._writer.ready else None

    @property
    def cancel_requested(self) -> str | None:
        """Why the run should stop, if a user tagged it `cancel` on the server and OLMO_EXT_WANDB_CANCEL=1 asked us to
        look. Reading it costs nothing: the writer asks the server in the background."""
        return self._writer.cancel

    def log(
        self, values: Mapping[str, Any], *, step: int, tokens: int, flops: float, when: float | None = None
    ) -> None:
        """Log a row; returns at once. Rows between `wandb.log_interval` steps are left to metrics.jsonl alone.

        :param step: optimizer step; rows of a step that an earlier attempt has already sent are dropped by the writer.
        :param tokens: tokens seen by the surviving history, the default x axis.
        :param flops: training FLOPs of the surviving history, the other x axis.
        :param when: unix time of the row, now by default.
        """
        if self._closed or not wanted(step, values, self._log_interval):
            return
        row = {**values, "tokens": tokens, "flops": flops, "_timestamp": when or time.time()}
        self._writer.put({"row": row, "step": step})

    def finish(self, exit_code: int = 0) -> None:
        """Send what is left, within FINISH_SECONDS; never raises, never changes the process's exit code."""
        if self._closed:
            return
        self._closed = True
        try:
            done = self._writer.close(exit_code=exit_code, seconds=FINISH_SECONDS)
        except Exception as error:  # noqa: BLE001  (W&B must not end a training that went well)
            log.warning("W&B: %s; `olmo-ext sync` uploads this run from metrics.jsonl", error)
            return
        if self._writer.unsent:
            log.warning("W&B: %d rows were not taken; `olmo-ext sync` has all rows", self._writer.unsent)
        if not done:
            log.warning("W&B: not everything was taken within %.0f s; `olmo-ext sync` uploads the rest", FINISH_SECONDS)


def start(
    config_values: Mapping[str, Any],
    *,
    run_directory: RunDirectory,
    shape: Mapping[str, Any],
    provenance: Mapping[str, Any],
    sweep: str | None,
    attempt: int,
) -> WandbRun | NullRun:
    """Begin logging one attempt; only rank 0 logs, and this returns in milliseconds whether or not a server answers.

    :param shape: what shape.json holds.
    :param provenance: what provenance.json holds.
    :param sweep: the sweep's name, the W&B group unless `wandb.group` is set.
    :param attempt: counted from 1.
    :raises InputError: for a name over W&B's limits, the same check that `launch` makes at submit.
    """
    check_names(config_values, sweep=sweep, run=run_directory.name)
    mode = choose_mode()
    if not is_configured(config_values) or mode == "disabled" or os.environ.get("RANK", "0") != "0":
        return NullRun()
    if mode == "offline" and os.environ.get("WANDB_MODE", "").lower() == "online":
        log.warning("W&B: WANDB_MODE=online without a login is offline; `olmo-ext sync` uploads the run later")
    try:
        settings = writer_settings(
            config_values,
            run_directory=run_directory,
            shape=shape,
            provenance=provenance,
            sweep=sweep,
            mode=mode,
        )
        settings["attempt"] = attempt
        settings["stats_pid"] = os.getpid()
        settings["cancel_check"] = mode == "online" and cancel_check_wanted()
        run_directory.wandb.mkdir(parents=True, exist_ok=True)
        environment = {"WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": str(FLUSH_SECONDS), **os.environ}
        writer = Writer(settings, log_path=str(run_directory.wandb / "writer.log"), environment=environment)
    except Exception as error:  # noqa: BLE001  (W&B must not keep a run from starting)
        log.warning("W&B is off: %s; `olmo-ext sync` can upload this run from metrics.jsonl", error)
        return NullRun()
    return WandbRun(writer, log_interval=config_values["wandb"].get("log_interval") or 1, mode=mode)


def writer_settings(
    config_values: Mapping[str, Any],
    *,
    run_directory: RunDirectory,
    shape: Mapping[str, Any],
    provenance: Mapping[str, Any],
    sweep: str | None,
    mode: str,
) -> dict[str, Any]:
    """What a writer needs to know, as plain JSON; no key or password is among it."""
    section = config_values.get("wandb") or {}
    return {
        "mode": mode,
        "id": run_id(run_directory),
        "directory": str(run_directory.path.resolve()),
        "lock": str(run_directory.wandb.resolve() / "online.lock"),
        "project": section.get("project") or os.environ.get("WANDB_PROJECT"),
        # None is the login's own default entity; upstream's default, its authors' team, is never used.
        "entity": section.get("entity") or os.environ.get("WANDB_ENTITY"),
        "group": section.get("group") or sweep,
        "name": section.get("name") or run_directory.name,
        "tags": [str(tag) for tag in section.get("tags") or []],
        "job_type": "train",
        "config": wandb_config(
            config_values,
            shape=shape,
            provenance=provenance,
            sweep=sweep,
            shape_name=group_of_run(run_directory),
            run_name=run_directory.name,
        ),
        "start_seconds": START_SECONDS,
    }
