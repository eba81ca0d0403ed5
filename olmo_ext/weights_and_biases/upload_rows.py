"""The rows of a run that go to W&B, and how two attempts over the same steps are told apart."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

from olmo_ext.base.run_directory import MetricsRow, RunDirectory
from olmo_ext.weights_and_biases.settings import wanted

NOT_COMPARED = ("throughput/", "memory/", "System/", "system/")
"""Values that may differ between two attempts over the same steps although both trained equally."""


def history(rows: list[MetricsRow], *, log_interval: int) -> list[tuple[int, dict[str, Any]]]:
    """The rows to send, one a step in increasing order; training and evaluation of a step become one row."""
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        if row.kind in ("train", "eval") and wanted(row.step, row.values, log_interval):
            content = merged.setdefault(row.step, {})
            content.update(row.values)
            content.update(tokens=row.tokens, flops=row.flops, seconds=row.seconds, _timestamp=row.time)
    return sorted(merged.items())


def digest(rows: list[tuple[int, dict[str, Any]]]) -> str:
    """A hash of what was trained: the values that a bitwise equal repetition reproduces."""
    kept = [
        [step, {k: v for k, v in row.items() if k not in ("seconds", "_timestamp") and not k.startswith(NOT_COMPARED)}]
        for step, row in rows
    ]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def overtaken_steps(run: RunDirectory, rows: list[tuple[int, dict[str, Any]]]) -> list[int]:
    """Steps among `rows` that a lost attempt had logged with clearly other values (a thousandth and more: a repetition
    on a GPU need not be exact)."""
    surviving = dict(rows)
    overtaken = set()
    for lost in run.read_all_metrics():
        kept = surviving.get(lost.step, {})
        for name, value in lost.values.items():
            if name in kept and not name.startswith(NOT_COMPARED):
                if not math.isclose(value, kept[name], rel_tol=1e-3, abs_tol=1e-9):
                    overtaken.add(lost.step)
    return sorted(overtaken)
