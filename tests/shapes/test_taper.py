"""Widths over depth: the papers' widths, exact means, pinned ends, every odd case."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmo_ext.shapes.registry import TAPER_SCHEDULES, TaperSchedule
from olmo_ext.shapes.taper import (
    Taper,
    apportion,
    group_sizes,
    round_half_even,
    schedule_multiples,
    taper_widths,
)

SCHEDULES = ("cosine", "linear", "sigmoid")


def test_the_built_in_schedules_are_the_papers():
    assert set(SCHEDULES) <= set(TAPER_SCHEDULES)


def widths(base: int, layers: int, **rule) -> tuple[int, ...]:
    return taper_widths(base=base, num_layers=layers, taper=Taper(**rule)).widths


def test_the_papers_cosine_widths_for_twelve_layers():
    got = widths(3072, 12, schedule="cosine", start=1.5, end=0.5)
    assert got == (4608, 4544, 4368, 4080, 3712, 3296, 2848, 2432, 2064, 1776, 1600, 1536)
    assert sum(got) == 12 * 3072


def test_the_papers_32_layers_keep_the_sum_in_every_cell_of_the_table():
    for schedule in SCHEDULES:
        for off in (0.25, 0.375, 0.5, 0.625, 0.75):
            got = widths(4096, 32, schedule=schedule, start=1 + off, end=1 - off)
            assert sum(got) == 32 * 4096, (schedule, off)
            assert (got[0], got[-1]) == (4096 * (1 + off), 4096 * (1 - off))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_formulas_of_the_schedules(schedule):
    got = schedule_multiples(schedule=schedule, num_layers=5, start=1.5, end=0.5)
    x = [0, 0.25, 0.5, 0.75, 1]
    if schedule == "linear":
        want = [1.5 - v for v in x]
    elif schedule == "cosine":
        want = [0.5 + 0.5 * (1 + math.cos(math.pi * v)) for v in x]
    else:
        raw = [1 / (1 + math.exp(10 * (v - 0.5))) for v in x]
        want = [0.5 + (r - raw[-1]) / (raw[0] - raw[-1]) for r in raw]
    assert got == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0.9, 0.5, 0.0), "goes from 0.9 to 0; it has to fall from 1 to 0"),
        ((1.0, 0.5, 0.1), "goes from 1 to 0.1; it has"),
        ((1.0, 1.2, 0.0), "rises between"),
        ((1.0, math.nan, 0.0), "rises between"),
    ],
)
def test_a_schedule_that_does_not_fall_from_one_to_zero_is_refused(values, message, monkeypatch):
    class Odd(TaperSchedule):
        name = "odd"

        def remaining(self, x, options):
            return values[round(2 * x)]

    monkeypatch.setitem(TAPER_SCHEDULES._types, "odd", Odd())
    with pytest.raises(ValueError, match=message):
        schedule_multiples(schedule="odd", num_layers=3, start=1.5, end=0.5)


def test_one_and_two_layers_and_equal_ends():
    assert widths(1024, 1, schedule="cosine", start=1.5, end=0.5) == (1024,)
    assert widths(1024, 2, schedule="cosine", start=1.5, end=0.5) == (1536, 512)
    assert widths(1024, 7, schedule="sigmoid", start=1.0, end=1.0) == (1024,) * 7


def test_start_below_end_is_the_mirror_image():
    falling = widths(3072, 12, schedule="cosine", start=1.5, end=0.5)
    assert widths(3072, 12, schedule="cosine", start=0.5, end=1.5) == falling[::-1]


def test_half_a_multiple_goes_to_the_even_one_and_float_noise_does_not_decide():
    assert [round_half_even(v) for v in (0.5, 1.5, 2.5, 2.5 + 1e-12, 2.5 - 1e-12)] == [0, 2, 2, 2, 2]


def test_groups_of_32_layers_are_11_10_11_and_the_middle_takes_the_difference():
    assert group_sizes(32, 3) == [11, 10, 11]
    tapered = taper_widths(base=4096, num_layers=32, taper=Taper(groups=(0.75, 1.5, 0.75)))
    assert sum(tapered.widths) == 32 * 4096
    assert tapered.widths[:11] == tapered.widths[21:] == (3072,) * 11
    assert set(tapered.widths[11:21]) == {6336, 6352}  # 1.55 * 4096 = 6348.8
    assert "0.75/1.55/0.75" in tapered.notes[0]


def test_groups_whose_layers_average_one_are_used_as_written():
    for groups in ((1.5, 1.0, 0.5), (0.5, 1.0, 1.5), (0.75, 1.55, 0.75)):
        tapered = taper_widths(base=2560, num_layers=32, taper=Taper(groups=groups))
        assert sum(tapered.widths) == 32 * 2560 and not tapered.notes


def test_explicit_widths_are_taken_or_refused():
    assert widths(64, 2, widths=(96, 32), multiple_of=1) == (96, 32)
    with pytest.raises(ValueError, match="2 widths for 3 layers"):
        widths(64, 3, widths=(96, 32))
    with pytest.raises(ValueError, match="97 is no positive multiple of 16"):
        widths(64, 2, widths=(97, 32))


def test_a_width_that_would_vanish_is_refused():
    with pytest.raises(ValueError, match="layer 3 would be 6.4 wide"):
        widths(64, 4, schedule="linear", start=1.9, end=0.1)


def test_taper_rounded_to_256_over_16_layers_reports_its_deviation():
    tapered = taper_widths(
        base=2750, num_layers=16, taper=Taper(schedule="linear", start=1.3, end=0.7, multiple_of=256)
    )
    assert all(width % 256 == 0 for width in tapered.widths)
    # 16 x 2750 = 44,000 lies between 171 and 172 multiples of 256: 44,032 is the nearest sum.
    assert sum(tapered.widths) == 44_032
    assert tapered.deviation == pytest.approx(32 / 44_000)


@given(
    base=st.integers(32, 6000),
    layers=st.integers(1, 48),
    start=st.floats(0.3, 2.0),
    end=st.floats(0.3, 2.0),
    multiple=st.sampled_from([1, 2, 8, 16]),
    schedule=st.sampled_from(SCHEDULES),
)
def test_ends_pinned_monotone_and_mean_as_near_as_the_multiple_allows(base, layers, start, end, multiple, schedule):
    exact = [m * base for m in schedule_multiples(schedule=schedule, num_layers=layers, start=start, end=end)]
    if min(exact) < multiple:
        return
    got = widths(base, layers, schedule=schedule, start=start, end=end, multiple_of=multiple)
    assert all(width % multiple == 0 and width > 0 for width in got)
    steps = [b - a for a, b in zip(got, got[1:], strict=False)]
    assert all(s <= 0 for s in steps) if start >= end else all(s >= 0 for s in steps)
    assert got[0] == round_half_even(exact[0] / multiple) * multiple
    assert got[-1] == round_half_even(exact[-1] / multiple) * multiple
    inside = got[1:-1]
    if inside and multiple * len(inside) < abs(got[0] - got[-1]) * len(inside):
        room_up, room_down = max(got) * len(got) - sum(got), sum(got) - min(got) * len(got)
        error = sum(exact) - sum(got)
        assert abs(error) <= multiple / 2 + 1e-6 or min(room_up, room_down) < multiple


@given(st.lists(st.floats(1, 50), min_size=1, max_size=20))
def test_apportioning_keeps_the_sum_and_moves_no_value_further_than_needed(exact):
    got = apportion(exact, pin_ends=False, monotone=False)
    assert sum(got) == round_half_even(math.fsum(exact))
    assert all(abs(g - e) <= 1 + 1e-9 for g, e in zip(got, exact, strict=True))
