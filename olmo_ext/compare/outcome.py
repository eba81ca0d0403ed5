"""The whole comparison of a sweep as plain data, which the terminal, JSON and the page show."""

from __future__ import annotations

from dataclasses import dataclass

from olmo_ext.compare.collect import RecordedSweep, Run
from olmo_ext.compare.downstream import DownstreamScore
from olmo_ext.compare.group import GroupResult
from olmo_ext.compare.paper import PaperRow
from olmo_ext.compare.scaling import ScalingResult
from olmo_ext.compare.views import LearningRateRow


@dataclass(kw_only=True)
class Comparison:
    """All results of a sweep."""

    sweep: RecordedSweep
    label: str | None
    """The validation set that is compared."""

    labels: list[str]
    groups: list[GroupResult]
    learning_rate_axis: str | None
    learning_rates: list[LearningRateRow]
    scaling: ScalingResult | None
    paper: list[PaperRow]
    downstream: list[DownstreamScore]
    notes: list[str]
    verdict: str = ""

    @property
    def comparisons(self) -> int:
        """Differences with a p-value: what Holm's correction counts."""
        return sum(1 for group in self.groups if group.nats is not None and group.nats.p_value is not None)

    def group(self, name: str) -> GroupResult:
        return next(group for group in self.groups if group.name == name)

    @property
    def unfinished(self) -> list[Run]:
        return [run for group in self.groups for run in group.missing]
