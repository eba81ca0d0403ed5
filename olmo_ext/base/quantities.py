"""Numbers as people write them in a YAML or on a command line, read the same way everywhere.

Everything is exact: `2.5B` is 2,500,000,000 and `1.5` where a whole number belongs is an error, never 1.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

EQUAL_WITHIN = 0.005
"""Relative difference of two sizes, costs or numbers of tokens up to which they count as equal."""

SUFFIXES = {"": 0, "K": 3, "M": 6, "B": 9, "G": 9, "T": 12}
BYTE_SUFFIXES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTE_SUFFIXES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
LARGEST_COUNT = 2**63 - 1
"""What an array, a file or a JSON reader can still hold."""

_GROUPED = re.compile(r"\s*[+-]?[1-9]\d{0,2}(,\d{3})+(?!\d)")
_NUMBER = r"[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"


def _decimal(text: str) -> Decimal:
    try:
        number = Decimal(text.replace("_", ""))
    except InvalidOperation:
        raise ValueError(f"{text!r} is not a number") from None
    if number and number.is_finite() and abs(number.adjusted()) > 300:
        raise ValueError(f"{text!r} is out of range")
    return number


def parse_number(value: object) -> Decimal:
    """`4e-4`, `113.25M`, `1_000` or a YAML number as an exact decimal.

    :raises ValueError: for anything else, booleans included.
    """
    if isinstance(value, bool) or value is None:
        raise ValueError(f"{value!r} is not a number")
    if isinstance(value, (int, float)):
        return Decimal(repr(value))
    text = str(value)
    if _GROUPED.match(text):
        # 1,500,000; a comma anywhere else might be a decimal point: 0,5 is neither 5 nor 0.5.
        text = text.replace(",", "")
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([KMBGT]?)\s*", text)
    if not match:
        raise ValueError(f"{value!r} is not a number")
    return _decimal(match[1]).scaleb(SUFFIXES[match[2]])


def parse_count(value: object) -> int:
    """A whole number: `2.5B`, `1e3`, `10_000`. The suffixes are K, M, B (or G) and T.

    :raises ValueError: if it is no number or has a fraction.
    """
    number = parse_number(value)
    if not number.is_finite() or number != number.to_integral_value():
        raise ValueError(f"{value!r} is not a whole number")
    if abs(number) > LARGEST_COUNT:
        raise ValueError(f"{value!r} is out of range: at most {LARGEST_COUNT:,}")
    return int(number)


def parse_fraction(value: object) -> float:
    """`0.5%` and `0.005` alike, as 0.005.

    :raises ValueError: if it is no number.
    """
    text = str(value).strip()
    return float(parse_number(text[:-1]) / 100) if text.endswith("%") else float(parse_number(value))


def parse_seconds(value: object) -> float:
    """Seconds from a number, `HH:MM:SS`, `MM:SS`, Slurm's `D-HH:MM:SS` and `D-HH:MM`, or `90s`, `45m`, `12h`, `2d`.

    :raises ValueError: for anything else, 60 and more minutes or seconds behind a colon included.
    """
    text = str(value).strip()
    if match := re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d)(?::([0-5]\d))?", text):
        days, first, second, third = (int(part or 0) for part in match.groups())
        if match[4] is None and match[1] is None:
            return float(first * 60 + second)
        return float(((days * 24 + first) * 60 + second) * 60 + third)
    if match := re.fullmatch(rf"({_NUMBER})\s*([smhd])", text):
        return float(_decimal(match[1])) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    return float(parse_number(value))


def parse_bytes(value: object) -> int:
    """Bytes from a whole number, `20MB` (10^6) or `1GiB` (2^30).

    :raises ValueError: if it is no number, or no whole number of bytes.
    """
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([KMGT]i?B|B)\s*", str(value))
    if not match:
        return parse_count(value)
    number = _decimal(match[1]) * BYTE_SUFFIXES[match[2]]
    if number != number.to_integral_value():
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return int(number)


def format_count(number: float) -> str:
    """A count for people: 113.25M, 1.07B, 4,096."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if abs(number) >= size:
            return f"{number / size:.2f}{suffix}"
    return f"{number:,.0f}"


def format_bytes(number: float) -> str:
    """Bytes for people, in binary units."""
    for suffix, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(number) >= size:
            return f"{number / size:.1f} {suffix}"
    return f"{number:.0f} B"


def format_seconds(seconds: float) -> str:
    """A duration for people: 45 s, 3 min 20 s, 5 h 02 min."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"
