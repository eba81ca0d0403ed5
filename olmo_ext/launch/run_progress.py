"""The progress of a run, read from the ends of its files: no torch, and cheap enough to ask every second."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from olmo_ext.base.run_directory import RunDirectory, RunState, parse_rows

TAIL_BYTES = 1 << 16
TORCHRUN_REPORT = "torch/distributed/elastic/multiprocessing/api.py"
RATE_ROWS = 50
"""Rows over which speed is averaged."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What the last rows of `metrics.jsonl` say."""

    attempt: int
    step: int
    loss: float | None
    tokens_per_second: float | None
    """Over the last rows of the current attempt, evaluation and saving included; None before two rows."""

    seconds_per_step: float | None
    time: float | None
    """Unix time of the last row."""


def tail_of(path: Path, limit: int = TAIL_BYTES) -> bytes:
    """The last `limit` bytes of a file, from the start of a line; nothing for a file that is not there."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - limit))
            data = file.read()
    except OSError:
        return b""
    return data if size <= limit else data.partition(b"\n")[2]


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log that hold anything."""
    lines = [line.rstrip() for line in tail_of(path).decode(errors="replace").splitlines()]
    return [line for line in lines if line][-count:]


def read_progress(directory: RunDirectory) -> Progress | None:
    """The last attempt's step, loss and speed; None before the first row."""
    rows = parse_rows(tail_of(directory.metrics_path))
    if not rows:
        return None
    last = rows[-1]
    train = [row for row in rows if row["attempt"] == last["attempt"] and row["kind"] == "train"]
    losses = [row.get("values", {}).get("train/CrossEntropyLoss") for row in train]
    losses = [loss for loss in losses if type(loss) in (int, float)]
    first, end = (train[-RATE_ROWS:][0], train[-1]) if len(train) > 1 else (last, last)
    seconds, steps = end.get("time", 0) - first.get("time", 0), end["step"] - first["step"]
    known = seconds > 0 and steps > 0
    return Progress(
        attempt=last["attempt"],
        step=last["step"],
        loss=losses[-1] if losses else None,
        tokens_per_second=(end.get("tokens", 0) - first.get("tokens", 0)) / seconds if known else None,
        seconds_per_step=seconds / steps if known else None,
        time=last.get("time"),
    )


def pid_lives(pid: int) -> bool:
    """Whether a process of this machine exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def process_lives(state: RunState) -> bool:
    """Whether the process that wrote the state runs on this machine."""
    return state.host == socket.gethostname() and pid_lives(state.pid)


def newest_log(directory: RunDirectory) -> Path | None:
    """The log of the last attempt that wrote anything."""
    logs = [path for path in directory.logs.rglob("*.log") if path.is_file() and path.stat().st_size]
    return max(logs, key=lambda path: path.stat().st_mtime, default=None)


def failure_lines(directory: RunDirectory, count: int = 5) -> Sequence[str]:
    """The last lines of a failed run's newest log.

    Left out are torchrun's own report and the reason that `state.json` has, which the callers show beside these lines.
    """
    log = newest_log(directory)
    if log is None:
        return []
    lines = last_lines(log, 1000)
    ends = [index for index, line in enumerate(lines) if TORCHRUN_REPORT in line]
    reason = directory.read_state().reason
    kept = [line for line in lines[: ends[0] if ends else None] if not reason or reason not in line]
    return kept[-count:]
