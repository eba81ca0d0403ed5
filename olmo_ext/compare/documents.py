"""Losses per evaluation document, for an interval where there is a single seed.

A row of evals/*.jsonl may carry, beside its mean `value`, the list `document_losses` (mean nats per token of each
document, in the order of the evaluation set) and `document_tokens` (their lengths). Such rows are of the metric
CrossEntropyLoss, and their `task` is the validation set's label. Only the end of a run counts: the loss that is
compared is that of its last step, of which an earlier checkpoint's documents say nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from olmo_ext.compare.collect import Run
from olmo_ext.compare.statistics import Difference, document_difference


def document_losses(run: Run, label: str) -> tuple[np.ndarray, np.ndarray, dict[str, Any]] | None:
    """Losses (nats a token) and tokens per document, [documents] each, and the row that holds them.

    :return: of the newest row for this validation set at the run's last step; none where none were saved.
    """
    for row in reversed(sorted(run.evaluations, key=lambda row: row.get("step") or 0)):
        losses = row.get("document_losses")
        if run.early_step(row.get("step")) is not None:
            continue
        if row.get("task") == label and row.get("metric") == "CrossEntropyLoss" and losses:
            values = np.asarray(losses, dtype=np.float64)
            tokens = np.asarray(row.get("document_tokens") or np.ones(len(values)), dtype=np.float64)
            if len(values) == len(tokens) and np.all(np.isfinite(values)) and tokens.sum() > 0:
                return values, tokens, row
    return None


def paired_documents(pairs: list[tuple[Run, Run]], label: str) -> Difference | None:
    """The difference over the documents of one pair of runs; none unless both were scored on the same documents."""
    treatment, baseline = pairs[0]
    left, right = document_losses(treatment, label), document_losses(baseline, label)
    if left is None or right is None:
        return None
    if left[2].get("task_version") != right[2].get("task_version") or not np.array_equal(left[1], right[1]):
        return None
    return document_difference(left[0], right[0], left[1])
