"""Asking a run to stop: signals and the time limit. No torch: handlers are installed before anything heavy is imported.

A signal only sets a flag. The ranks agree on it at the next step boundary, write one complete checkpoint and leave with
exit code 75. A second Ctrl-C leaves at once.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
EXIT_INTERRUPTED = 130
REPEAT_SECONDS = 1.0
"""A second SIGINT within this time is the same Ctrl-C: torchrun passes on what the terminal has already sent."""


class StopRequest:
    """Context manager: turns the stop signals into a request that training reads at a step boundary.

    Handlers can only be installed in the main thread; elsewhere the request stays what `request` makes it.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.on_leave: Callable[[], None] | None = None
        """Called before a second Ctrl-C ends the process."""

        self._first_interrupt: float | None = None
        self._owner = os.getpid()
        self._previous: dict[int, Any] = {}

    @property
    def is_set(self) -> bool:
        return self.reason is not None

    def request(self, reason: str) -> None:
        """Ask for a checkpoint and an exit; the first reason stays."""
        if self.reason is None:
            self.reason = reason

    def __enter__(self) -> StopRequest:
        self._owner = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            # A forked loader worker: the terminal's Ctrl-C reaches it too, and it is its parent's to end.
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._first_interrupt is None:
                self._first_interrupt = now
            elif now - self._first_interrupt >= REPEAT_SECONDS:
                _tell("olmo-ext: second Ctrl-C, leaving without a checkpoint")
                if self.on_leave is not None:
                    self.on_leave()
                os._exit(EXIT_INTERRUPTED)
        if self.reason is None:
            again = "; Ctrl-C again leaves at once" if number == signal.SIGINT else ""
            _tell(f"olmo-ext: {name}: saving a checkpoint at the next step boundary{again}")
        self.request(f"signal {name}")


def _tell(text: str) -> None:
    """Write to stderr without a buffer: a handler may run inside a print."""
    try:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{text}\n".encode())
    except (OSError, ValueError):
        pass


class TimeLimit:
    """When a run has to start its last save, so that the save ends before the limit.

    :param seconds: from now; None if there is no such limit.
    :param end_time: unix time at which the scheduler ends the job (`SLURM_JOB_END_TIME`), or None.
    """

    MARGIN_SECONDS = 10.0
    SAVE_FACTOR = 1.5
    """A save may take this many times the longest one seen."""

    def __init__(self, *, seconds: float | None, end_time: float | None = None) -> None:
        # A clock that is set back must not lengthen a limit in seconds; the scheduler's end is a time of that clock.
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self.end_time = end_time
        # A margin of ten seconds would swallow a limit of a few seconds.
        self.margin = min(self.MARGIN_SECONDS, 0.1 * max(self.seconds_left(), 0.0))

    def seconds_left(self) -> float:
        """Until the earlier of the two ends; infinite if there is none."""
        left = [] if self._deadline is None else [self._deadline - time.monotonic()]
        left += [] if self.end_time is None else [self.end_time - time.time()]
        return min(left, default=math.inf)

    def is_reached(self, *, save_seconds: float, step_seconds: float) -> bool:
        """Whether one more step and a save would pass the limit."""
        return step_seconds + self.SAVE_FACTOR * save_seconds + self.margin >= self.seconds_left()


def scheduler_end_time() -> float | None:
    """Unix time at which Slurm ends this job, where the job was told."""
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isdigit() else None
