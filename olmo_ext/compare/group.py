"""What is known of one group of a sweep after it was compared: one row of the table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from olmo_ext.base.quantities import EQUAL_WITHIN
from olmo_ext.compare.collect import Run
from olmo_ext.compare.features import Features
from olmo_ext.compare.statistics import Difference
from olmo_ext.compare.views import SpeedUp, View


@dataclass(kw_only=True)
class GroupResult:
    """One row of the table."""

    name: str
    runs: list[Run] = field(repr=False)
    features: Features
    baseline: str | None
    """The group it is compared with; none for a baseline itself."""

    tokens: int = 0
    """Tokens at the last evaluation of the finished runs, the most of any."""

    total_flops: float = 0.0
    """Training FLOPs of a finished run, the most of any."""

    losses: dict[int | None, float] = field(default_factory=dict)
    """Seed -> final validation loss of the finished runs, nats; without those whose loss is no finite number."""

    unlike: list[str] = field(default_factory=list)
    """What differs between its own runs besides the seed: such runs have no mean."""

    tokens_per_second: float | None = None
    blocking: list[str] = field(default_factory=list)
    """Why its losses are not compared with the baseline's."""

    same_training: bool = True
    """Whether data, tokenizer and tokens seen are the baseline's, whatever the validation set says."""

    remarks: list[str] = field(default_factory=list)
    nats: Difference | None = None
    perplexity: Difference | None = None
    adjusted_p: float | None = None
    """Holm's correction over all comparisons of the sweep."""

    seeds_needed: int | None = None
    views: dict[str, View] = field(default_factory=dict)
    speed_up: SpeedUp | None = None
    other_sets: dict[str, tuple[float, Difference | None]] = field(default_factory=dict)
    """Validation set -> mean loss, difference to the baseline."""

    size_change: float | None = None
    """Non-embedding parameters relative to the baseline's, minus one."""

    flops_change: float | None = None
    """Training FLOPs per token relative to the baseline's, minus one."""

    @property
    def unequal(self) -> dict[str, float]:
        """The relative differences to the baseline by which the budgets are unequal; empty where they are equal."""
        changes = {"non_embedding": self.size_change, "flops_per_token": self.flops_change}
        return {name: change for name, change in changes.items() if change and abs(change) > EQUAL_WITHIN}

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.finished]

    @property
    def loss(self) -> float | None:
        """Mean over the seeds, nats."""
        return sum(self.losses.values()) / len(self.losses) if self.losses and not self.unlike else None

    @property
    def loss_deviation(self) -> float | None:
        """Standard deviation over the seeds, nats, one degree of freedom removed."""
        known = len(self.losses) > 1 and not self.unlike
        return float(np.std(list(self.losses.values()), ddof=1)) if known else None

    @property
    def ppl(self) -> float | None:
        """Mean over the seeds of exp(loss)."""
        known = self.losses and not self.unlike
        return sum(map(math.exp, self.losses.values())) / len(self.losses) if known else None

    @property
    def missing(self) -> list[Run]:
        """Runs that were asked for and have not finished."""
        return [run for run in self.runs if not run.finished]
