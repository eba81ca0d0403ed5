"""The instance filter decides as upstream's own function does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_ext.data.repetition import RepetitionFilter


def upstream_keeps(tokens: np.ndarray, chosen: RepetitionFilter) -> bool:
    from olmo.data.util import find_periodic_sequences

    found = find_periodic_sequences(
        tokens.astype(np.int64),
        max_period=chosen.repetition_max_period,
        min_period=chosen.repetition_min_period,
    )
    return not any(one.times >= chosen.repetition_max_count for one in found)


@st.composite
def instances(draw: st.DrawFn) -> np.ndarray:
    length = draw(st.integers(16, 700))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    tokens = generator.integers(0, draw(st.sampled_from([2, 3, 1000])), length, dtype=np.uint32)
    for _ in range(draw(st.integers(0, 3))):
        period = draw(st.integers(1, 15))
        times = draw(st.one_of(st.integers(1, 8), st.integers(28, 36)))
        start = draw(st.integers(0, length - 1))
        piece = np.tile(generator.integers(0, 1000, period), times + 1)[: period * times + draw(st.integers(0, period))]
        tokens[start : start + len(piece)] = piece[: length - start]
    return tokens


@settings(max_examples=400)
@given(instances(), st.sampled_from([(13, 1, 32), (13, 1, 3), (5, 2, 8), (13, 1, 30), (13, 1, 20), (13, 1, 1)]))
def test_the_filter_decides_as_upstream_does(tokens: np.ndarray, setting: tuple[int, int, int]) -> None:
    names = ("repetition_max_period", "repetition_min_period", "repetition_max_count")
    chosen = RepetitionFilter(**dict(zip(names, setting, strict=True)))
    assert chosen.keeps(tokens) == upstream_keeps(tokens, chosen)


@pytest.mark.parametrize("period", [1, 2, 7, 13])
def test_the_decision_turns_at_the_same_repetition_as_upstreams(period: int) -> None:
    """Around the limit every offset and length is tried: both sides of the decision occur."""
    chosen = RepetitionFilter()
    decisions = set()
    for start in range(100, 100 + period):
        for extra in range(-2 * period, period + 1):
            tokens = np.arange(5000, 5000 + 1024, dtype=np.uint32)
            end = start + 32 * period + extra
            tokens[start:end] = np.resize(np.arange(period), end - start)
            decided = chosen.keeps(tokens)
            assert decided == upstream_keeps(tokens, chosen)
            decisions.add(decided)
    assert decisions == {True, False}


def test_many_instances_are_decided_as_each_one_is() -> None:
    generator = np.random.default_rng(1)
    instances = generator.integers(0, 40, (300, 512), dtype=np.uint32)
    for row in range(0, 300, 3):
        period, times = int(generator.integers(1, 14)), int(generator.integers(28, 36))
        start = int(generator.integers(0, 100))
        instances[row, start : start + period * times] = np.resize(generator.integers(0, 40, period), period * times)[
            : 512 - start
        ]
    for count in (32, 3):
        chosen = RepetitionFilter(repetition_max_count=count)
        decided = chosen.keeps_each(instances)
        assert decided.tolist() == [upstream_keeps(tokens, chosen) for tokens in instances]
        assert decided.any() and not decided.all()
