"""Small sweeps with known losses, compared: what the tests of the comparison start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from olmo_ext.compare.collect import read_sweep
from olmo_ext.compare.comparison import compare_sweep
from olmo_ext.compare.outcome import Comparison

from .synthetic import make_sweep

BASE = [3.000, 3.020, 2.990]
"""Final losses of a baseline's three seeds, nats."""

SHORT: dict[str, Any] = {"steps": 40, "evaluations": 8, "extra_metrics": 0}


def compared(path: Path, groups: dict[str, dict[str, Any]], **options: Any) -> Comparison:
    """Make a sweep of short runs, the first group its baseline, and compare it."""
    full = {name: {**SHORT, **given} for name, given in groups.items()}
    make_sweep(path, full, **{"baseline": next(iter(groups)), **options})
    return compare_sweep(read_sweep(path))


def shifted(*changes: float) -> list[float]:
    """The baseline's losses, each changed by so many nats."""
    return [base + change for base, change in zip(BASE, changes, strict=False)]


def documents(losses: np.ndarray, label: str = "corpus", version: str = "1") -> list[dict[str, Any]]:
    """The row of evals/*.jsonl that holds a loss per document, [documents], at the last step of a short run."""
    return [
        {
            "task": label,
            "task_version": version,
            "metric": "CrossEntropyLoss",
            "value": float(losses.mean()),
            "stderr": 0.1,
            "items": len(losses),
            "step": 40,
            "document_losses": losses.tolist(),
            "document_tokens": [128] * len(losses),
        }
    ]
