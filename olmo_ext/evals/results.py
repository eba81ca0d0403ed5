"""Evaluation results as JSON lines in a run's folder, and as a table. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from olmo_ext.base.files import write_atomically


@dataclass(frozen=True, kw_only=True)
class Result:
    """One number of one task."""

    task: str
    task_version: str
    """Changes when the items or the way of scoring change: equal versions may be compared."""

    metric: str
    value: float
    stderr: float | None
    """Standard error over the items."""

    items: int
    length: int | None = None
    """Tokens of the text, for long-context tasks."""

    depth: float | None = None
    """Where in the text the needle lies, 0 to 1."""

    details: dict[str, Any] = field(default_factory=dict)
    """Further keys of the row: truncated items, tokens left out, losses per document."""

    def row(self, *, step: int | None, checkpoint_sha256: str) -> dict[str, Any]:
        """The line of evals/*.jsonl."""
        content = asdict(self)
        details = content.pop("details")
        place = {key: content.pop(key) for key in ("length", "depth")}
        present = {key: value for key, value in place.items() if value is not None}
        return {**content, "step": step, "checkpoint_sha256": checkpoint_sha256, **present, **details}


IDENTITY = ("task", "task_version", "metric", "step", "length", "depth")
"""With the version: twenty items of a quick look do not take the place of a whole evaluation."""


def write_results(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows to a file; a row of the same task, version, metric, step and place replaces the older one.

    Lines that are no row (a kill has torn them) are left out of what is written.
    """
    new = list(rows)
    replaced = {tuple(row.get(key) for key in IDENTITY) for row in new}
    old = []
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if not isinstance(row, dict):
                continue
            if tuple(row.get(key) for key in IDENTITY) not in replaced:
                old.append(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in [*old, *new]))


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error (sample deviation over the root of the number)."""
    number = len(values)
    mean = math.fsum(values) / number
    if number < 2:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (number - 1)
    return mean, math.sqrt(variance / number)


def results_table(results: Sequence[Result]) -> str:
    """One line per task and metric, long-context cells left to the heat map."""
    rows = [("task", "metric", "value", "stderr", "items", "")]
    for result in results:
        if result.depth is not None:
            continue
        error = "" if result.stderr is None else f"{result.stderr:.4f}"
        notes = [f"{value:,} {key.replace('_', ' ')}" for key, value in result.details.items() if _is_note(value)]
        rows.append((result.task, result.metric, f"{result.value:.4f}", error, f"{result.items:,}", ", ".join(notes)))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = []
    for row in rows:
        left = [row[column].ljust(widths[column]) for column in (0, 1)]
        right = [row[column].rjust(widths[column]) for column in (2, 3, 4)]
        lines.append("  ".join([*left, *right, row[5]]).rstrip())
    return "\n".join(lines)


def _is_note(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
