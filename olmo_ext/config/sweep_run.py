"""One run of a sweep, as the expansion gives it and everything after it takes it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from olmo_ext.config.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """One member of a sweep."""

    name: str
    """The folder's name, and `run_name` of the config."""

    group: str
    """The name without its seed: runs of one group differ in seed only."""

    seed: int
    values: dict[str, Any]
    """Axis -> value (the option's name where the axis names options); for a listed run, dotted key -> value."""

    config: RunConfig
