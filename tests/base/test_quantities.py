"""Quantities are exact or refused."""

from __future__ import annotations

import pytest

from olmo_ext.base.quantities import (
    format_bytes,
    format_count,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_fraction,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2.5B", 2_500_000_000),
        ("113.25M", 113_250_000),
        ("1e3", 1000),
        (" 4_096 ", 4096),
        (3.0, 3),
        ("21B", 21 * 10**9),
        ("1,500", 1500),
        ("-12,345,678", -12_345_678),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_counts_are_exact(text: object, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text",
    ["1.5", "1365.33", "", "B", "1e-3", "0x10", "2.5b", "--3", "inf", "nan", None, True]
    + ["0,5", "1,5", "1,50", "0,000", "1,2345", ",", "1e30", "9223372036854775808", "1e999999999", "1e-999999999"],
)
def test_what_is_no_whole_number_is_refused(text: object) -> None:
    with pytest.raises(ValueError):
        parse_count(text)


def test_fractions_seconds_and_bytes() -> None:
    assert parse_fraction("0.5%") == parse_fraction("0.005") == 0.005
    assert [parse_seconds(t) for t in ("90", "90s", "1:30", "00:01:30", "0-00:01:30", "1.5m")] == [90.0] * 6
    assert parse_seconds("90:00") == 5400 and parse_seconds("1-00:30") == 88_200
    for text in ("1:60", "12:99:00", "12:00:75", "0-00:60:00"):
        with pytest.raises(ValueError, match="is not a number"):
            parse_seconds(text)
    assert parse_bytes("20MB") == 20_000_000 and parse_bytes("1GiB") == 2**30 and parse_bytes(7) == 7
    with pytest.raises(ValueError):
        parse_bytes("1.0000001KB")


@pytest.mark.parametrize("read", [parse_fraction, parse_seconds, parse_bytes])
@pytest.mark.parametrize("text", ["0,5", "1e999999999", "1e-999999999", "1e999999999h", "1e999999999KB"])
def test_a_decimal_comma_and_what_no_float_holds_are_refused_everywhere(read, text: str) -> None:
    with pytest.raises(ValueError):
        read(text)


def test_formats_for_people() -> None:
    assert format_count(113_246_208) == "113.25M" and format_count(4096) == "4,096"
    assert format_bytes(2**30) == "1.0 GiB"
    assert [format_seconds(s) for s in (45, 200, 18120)] == ["45 s", "3 min 20 s", "5 h 02 min"]
