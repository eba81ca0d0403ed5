"""OLMo's instance filter: instances with one short period repeated many times do not count in the loss. No torch.

`olmo.data.util.find_periodic_sequences` lays the tokens out in rows of `period` and looks for rows equal to the row
before. Its decision in closed form: a group of R such rows, extended by the trailing matches `s` of the row before
the group and the leading matches `e` of the row after it, repeats `R + 1 + (s + e) // period` times.

Nearly every instance is cleared by a few hundred comparisons (see `_may_repeat`); the rest take the exact path.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass

import numpy as np

from olmo_ext.base.upstream_sections import InstanceFilterConfig


@dataclass(frozen=True, kw_only=True)
class RepetitionFilter:
    """The settings of `data.instance_filter`."""

    repetition_max_period: int = 13
    repetition_min_period: int = 1
    repetition_max_count: int = 32

    @classmethod
    def from_config(cls, section: InstanceFilterConfig | None) -> RepetitionFilter | None:
        """The filter of a resolved config's `data.instance_filter`, None where it is off."""
        return None if section is None else cls(**asdict(section))

    def to_json(self) -> dict[str, int]:
        """The settings as a manifest and a fingerprint hold them."""
        return asdict(self)

    def keeps(self, tokens: np.ndarray) -> bool:
        """Whether the instance counts in the loss, exactly as upstream decides.

        :param tokens: one instance, shape (sequence_length,), any integer type.
        """
        max_period = min(self.repetition_max_period, len(tokens) // 3)
        if self.repetition_max_count >= _SMALLEST_SCREENED_COUNT:
            plan = _screen(len(tokens), self.repetition_min_period, max_period, self.repetition_max_count)
            periods = plan.periods_to_check(tokens)
        else:
            periods = list(range(self.repetition_min_period, max_period + 1))
        # A count of 1 or 2 means 3 upstream, which sees nothing shorter.
        limit = max(self.repetition_max_count, 3)
        return not any(_repeats(tokens, period) >= limit for period in periods)

    def keeps_each(self, instances: np.ndarray) -> np.ndarray:
        """`keeps` of each row of (count, sequence_length), shape (count,), bool; they are screened together."""
        length = instances.shape[1]
        max_period = min(self.repetition_max_period, length // 3)
        if self.repetition_max_count < _SMALLEST_SCREENED_COUNT:
            return np.fromiter((self.keeps(tokens) for tokens in instances), bool, len(instances))
        plan = _screen(length, self.repetition_min_period, max_period, self.repetition_max_count)
        kept = np.ones(len(instances), dtype=bool)
        for begin in range(0, len(instances), _ROWS_AT_ONCE):
            rows = instances[begin : begin + _ROWS_AT_ONCE]
            for row in np.flatnonzero(plan.suspects(rows)):
                kept[begin + row] = self.keeps(rows[row])
        return kept


_ROWS_AT_ONCE = 64
"""Rows that are screened together: their compared tokens stay in the cache."""


def _repeats(tokens: np.ndarray, period: int) -> int:
    """The largest number of repetitions that upstream reports for one period, 0 if it sees none."""
    whole_rows = len(tokens) // period
    equal = np.zeros((whole_rows + 1, period), dtype=bool)
    rows = tokens[: whole_rows * period].reshape(whole_rows, period)
    equal[1:whole_rows] = rows[1:] == rows[:-1]
    rest = tokens[whole_rows * period :]
    # The last row is filled up with a value that no token has, so it never equals the row before as a whole.
    equal[whole_rows, : len(rest)] = rest == rows[-1, : len(rest)]
    full = np.flatnonzero(equal.all(axis=1))
    most = 0
    for group in np.split(full, np.flatnonzero(np.diff(full) != 1) + 1):
        if len(group) == 0:
            continue
        before, after = equal[group[0] - 1], equal[group[-1] + 1]
        extra = _leading(before[::-1]) + _leading(after)
        most = max(most, len(group) + 1 + extra // period)
    return most


def _leading(flags: np.ndarray) -> int:
    """How many flags are set before the first that is not."""
    return len(flags) if flags.all() else int(np.argmin(flags))


_SMALLEST_SCREENED_COUNT = 19
"""From here on a stride is at least the 8 neighbours that are looked at."""


class _Screen:
    """Positions whose comparison rules out long repetitions.

    A group that repeats `count` times has at least `count - 2` equal rows, so `tokens[t] == tokens[t - period]` holds
    for a run of at least `(count - 2) * period` positions t. Every run longer than a stride contains a multiple of
    it: comparing at these positions alone finds every such run, and the neighbours tell chance from repetition.
    """

    def __init__(self, length: int, min_period: int, max_period: int, count: int) -> None:
        at, before, periods = [], [], []
        for period in range(min_period, max_period + 1):
            run = (count - 3) * period
            positions = np.arange(period, length, run // 2)
            at.append(positions)
            before.append(positions - period)
            periods.append(np.full(len(positions), period))
        self.at = np.concatenate(at) if at else np.zeros(0, dtype=np.int64)
        self.before = np.concatenate(before) if before else np.zeros(0, dtype=np.int64)
        self.period = np.concatenate(periods) if periods else np.zeros(0, dtype=np.int64)

    def suspects(self, instances: np.ndarray) -> np.ndarray:
        """Which rows may hold a long repetition: a superset of those with `periods_to_check`."""
        equal = instances[:, self.at] == instances[:, self.before]
        hits = equal[:, :-1] & equal[:, 1:]
        repeats = np.zeros(len(instances), dtype=bool)
        rows, columns = np.nonzero(hits)
        if len(rows):
            # A run goes on behind its first position: the neighbours of a chance hit differ.
            near = np.arange(1, 9)
            later = np.minimum(self.at[columns, None] + near, instances.shape[1] - 1)
            earlier = later - self.period[columns, None]
            alike = (instances[rows[:, None], later] == instances[rows[:, None], earlier]).all(axis=1)
            repeats[rows[alike]] = True
        return repeats

    def periods_to_check(self, tokens: np.ndarray) -> list[int]:
        """Periods of one instance that the exact path has to decide; of all others none repeats too often."""
        equal = tokens[self.at] == tokens[self.before]
        # Each run covers two neighbouring positions of the same period.
        hits = np.flatnonzero(equal[:-1] & equal[1:])
        if len(hits) == 0:
            return []
        near = np.arange(1, 9)
        later = np.minimum(self.at[hits, None] + near, len(tokens) - 1)
        alike = (tokens[later] == tokens[later - self.period[hits, None]]).all(axis=1)
        return sorted({int(period) for period in self.period[hits][alike]})


@functools.lru_cache(maxsize=64)
def _screen(length: int, min_period: int, max_period: int, count: int) -> _Screen:
    return _Screen(length, min_period, max_period, count)
