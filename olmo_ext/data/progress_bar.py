"""Progress of long data work: one moving line on a terminal, a plain line now and then elsewhere. On stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from olmo_ext.base.quantities import format_seconds

PLAIN_INTERVAL = 20.0
"""Seconds between two lines where nobody watches."""


class Progress:
    """Share, rate and remaining time of one piece of work.

    :param what: what is done, in one word.
    :param total: how much there is.
    :param show: an amount in words, as in `12.3 GiB`.
    :param begin_at: what was done by an earlier process; it does not count in the rate.
    """

    def __init__(
        self, what: str, total: float, *, show: Callable[[float], str], quiet: bool = False, begin_at: float = 0
    ) -> None:
        self.what, self.total, self.show, self.quiet = what, total, show, quiet
        self.begin_at, self.done = begin_at, begin_at
        self.terminal = sys.stderr.isatty()
        self.started = time.monotonic()
        self._last = self.started if not self.terminal else 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if not self.quiet:
            self._write(last=True)

    def to(self, done: float) -> None:
        """`done` of the total is finished."""
        self.done = done
        now = time.monotonic()
        if not self.quiet and now - self._last >= (0.2 if self.terminal else PLAIN_INTERVAL):
            self._last = now
            self._write()

    def add(self, amount: float) -> None:
        """So much more of the total is finished."""
        self.to(self.done + amount)

    def line(self) -> str:
        """What is printed."""
        seconds = time.monotonic() - self.started
        share = self.done / self.total if self.total else 1.0
        text = f"{self.what}: {share:6.1%}  {self.show(self.done)} of {self.show(self.total)}"
        moved = self.done - self.begin_at
        if seconds > 0 and moved > 0:
            rate = moved / seconds
            text += f", {self.show(rate)}/s"
            text += f", {format_seconds((self.total - self.done) / rate)} left" if self.done < self.total else ""
        return f"{text}, {format_seconds(seconds)}"

    def _write(self, *, last: bool = False) -> None:
        if self.terminal:
            print(f"\r\x1b[2K{self.line()}", end="\n" if last else "", file=sys.stderr, flush=True)
        else:
            print(self.line(), file=sys.stderr, flush=True)
