"""Numbers of a comparison as text, the same on the terminal and on the page."""

from __future__ import annotations

from olmo_ext.base.quantities import format_count
from olmo_ext.compare.statistics import METHOD_NONE, Difference

MINUS = "\N{MINUS SIGN}"
DASH = "\N{EN DASH}"


def number(value: float | None, digits: int = 3) -> str:
    """A plain number, `–` for none."""
    return DASH if value is None else f"{value:.{digits}f}".replace("-", MINUS)


def signed(value: float | None, digits: int = 4) -> str:
    """With its sign, and a real minus; zero has none."""
    if value is None:
        return DASH
    text = f"{value:+.{digits}f}"
    if float(text) == 0:
        return text[1:]
    return text.replace("-", MINUS)


def percent(value: float | None, digits: int = 1) -> str:
    return DASH if value is None else signed(100 * value, digits) + " %"


def count(value: float | None) -> str:
    return DASH if value is None else format_count(value)


def whole(value: float | None) -> str:
    """`12,345`."""
    return DASH if value is None else f"{value:,.0f}"


def engineering(value: float | None) -> str:
    """1.93e+15 as `1.93 × 10^15`, with superscripts."""
    if value is None or value <= 0:
        return DASH
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    power = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{mantissa} × 10{power}"


def interval(difference: Difference | None, digits: int = 4) -> str:
    """`[−0.041, −0.021]`, or `unknown`."""
    if difference is None:
        return DASH
    if difference.low is None or difference.high is None:
        return METHOD_NONE
    return f"[{signed(difference.low, digits)}, {signed(difference.high, digits)}]"


def estimate(difference: Difference | None, digits: int = 4) -> str:
    """`−0.0397 [−0.0456, −0.0339]`."""
    return DASH if difference is None else f"{signed(difference.mean, digits)} {interval(difference, digits)}"


def p_value(value: float | None) -> str:
    if value is None:
        return DASH
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def seeds_needed(difference: Difference | None, needed: int | None) -> str:
    if difference is None:
        return DASH
    return METHOD_NONE if needed is None else f"{needed:,}"


def plural(amount: int, noun: str) -> str:
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"
