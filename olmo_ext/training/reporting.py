"""What a person sees while a run trains: a bar on a terminal, plain lines elsewhere, and a log per attempt and rank."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from olmo_ext.base.quantities import format_count, format_seconds

log = logging.getLogger("olmo_ext.training")

LINE_SECONDS = 5.0
"""Least time between two plain lines about steps, in seconds."""

LOGGERS = ("olmo", "olmo_ext", "torch", "py.warnings")
"""Loggers whose messages go into a run's log."""


class Reporter:
    """Speaks for rank 0; silent on the others.

    :param progress: a bar; by default where stdout is a terminal.
    """

    def __init__(self, *, speaks: bool, total: int, progress: bool | None) -> None:
        self._speaks, self._total = speaks, total
        self._last_line = 0.0
        self._bar: Any = None
        self._task: Any = None
        if speaks and (sys.stdout.isatty() if progress is None else progress):
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            )
            self._task = self._bar.add_task("training", total=total)
            self._bar.start()

    def say(self, text: str) -> None:
        """Print one line at once, and write it to the log."""
        log.info(text)
        if not self._speaks:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def step(self, step: int, values: Mapping[str, float], *, last: bool) -> None:
        """Show a step's loss and speed.

        :param values: by their names in metrics.jsonl.
        :param last: whether it is the run's last step, which is always shown.
        """
        loss = values.get("train/CrossEntropyLoss")
        rate = values.get("throughput/tokens_per_second")
        parts = [f"loss {loss:.4f}" if loss is not None else "", f"{rate:,.0f} tokens/s" if rate else ""]
        if (mfu := values.get("throughput/mfu")) is not None:
            parts.append(f"MFU {100 * mfu:.1f} %")
        text = ", ".join(part for part in parts if part)
        log.info("step %d/%d: %s", step, self._total, text)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        elif self._speaks:
            now = time.monotonic()
            if last or now - self._last_line >= LINE_SECONDS:
                self._last_line = now
                print(f"step {step}/{self._total}: {text}", flush=True)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Print an evaluation's values in one line, without counts and perplexities (they follow from the losses)."""
        shown = {
            name.removeprefix("eval/"): value
            for name, value in values.items()
            if not name.endswith(("/tokens", "_items", "/Perplexity"))
        }
        self.say(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in shown.items()))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def open_log(path: Path) -> logging.Handler:
    """Write what olmo, torch and we log to a file; upstream's chatter about every step is left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)
    for name in ("olmo", "olmo_ext"):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("olmo.train").setLevel(logging.WARNING)
    return handler


def close_log(handler: logging.Handler) -> None:
    for name in LOGGERS:
        logging.getLogger(name).removeHandler(handler)
    handler.close()


def start_line(*, name: str, counts: Any, steps: int, tokens_per_step: int, done: int, where: str) -> str:
    """One line that describes the run: parameters, FLOPs, steps and device."""
    text = (
        f"{name}: {format_count(counts.total)} parameters ({format_count(counts.non_embedding)} non-embedding),"
        f" {format_count(counts.training_flops_per_token)} FLOPs a token,"
        f" {steps:,} steps of {tokens_per_step:,} tokens on {where}"
    )
    return f"{text}, from step {done:,}" if done else text


def end_line(*, step: int, tokens: int, seconds: float) -> str:
    return f"step {step}: {format_count(tokens)} tokens in {format_seconds(seconds)} of training"
