"""Config sections that the loader reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from olmo_ext.base.sections import TrainConfig
from tests.sections import typed

VOCABULARY = 1000


def make_values(paths: list[Path] | None = None, *, length: int = 16, **changes: Any) -> TrainConfig:
    """What the loader needs of a resolved config; `changes` go to `data`, or to the top where they belong there."""
    values: dict[str, Any] = {
        "model": {"max_sequence_length": length, "vocab_size": VOCABULARY, "pad_token_id": 1, "eos_token_id": 0},
        "data": {"paths": [str(path) for path in paths or []] or None, "memmap_dtype": "uint32", "seed": 6198},
        "global_train_batch_size": 8,
        "max_duration": 4,
        "stop_at": None,
        "stop_after": None,
        "load_path": None,
        "reset_trainer_state": False,
    }
    for name, value in changes.items():
        values[name if name in values else "data"] = value if name in values else {**values["data"], name: value}
    return typed(values)
