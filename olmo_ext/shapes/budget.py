"""Whether a shape keeps the budget that its config declares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from olmo_ext.base.errors import InputError
from olmo_ext.base.quantities import SUFFIXES, format_count, parse_number
from olmo_ext.base.sections import BudgetSection
from olmo_ext.shapes.counts import ShapeCounts
from olmo_ext.shapes.layers import ModelShape

QUANTITIES = ("non_embedding", "total", "training_flops_per_token")
"""What a budget may be given in: parameters, or training FLOPs per token."""


@dataclass(frozen=True, kw_only=True)
class BudgetReport:
    """Declared against actual."""

    quantity: str
    target: int
    actual: float
    tolerance: float

    @property
    def deviation(self) -> float:
        """(actual - target) / target."""
        return self.actual / self.target - 1.0

    @property
    def within(self) -> bool:
        # A hair of slack, so that a deviation of exactly the tolerance passes in floating point.
        return abs(self.deviation) <= self.tolerance * (1 + 1e-12)

    def to_json(self) -> dict[str, Any]:
        return {
            "quantity": self.quantity,
            "target": self.target,
            "actual": self.actual,
            "deviation": self.deviation,
            "tolerance": self.tolerance,
        }


def check_budget(
    section: BudgetSection,
    counts: ShapeCounts,
    shape: ModelShape,
    *,
    where: str | None = None,
    enforce: bool = True,
) -> BudgetReport:
    """Compare a shape with the `budget` section of its config.

    :param section: one of `QUANTITIES`, a tolerance, and the counts `attention`
        and `ffn` as a source prints them: `28.31M` holds for everything that rounds to it.
    :param enforce: whether a miss is an error.
    :raises InputError: beyond the tolerance, by how much and which width would fit.
    """
    place = f"{where}, budget" if where else "budget"
    given = [name for name in QUANTITIES if getattr(section, name) is not None]
    if len(given) != 1:
        named = " and ".join(given) if given else "no quantity"
        inherited = "; set an inherited one to null" if given else ""
        raise InputError(f"{named} given", where=place, right=f"one of {', '.join(QUANTITIES)}{inherited}")
    quantity = given[0]
    target = getattr(section, quantity)
    if target < 1:
        raise InputError(f"{target} is not positive", where=f"{place}.{quantity}")
    report = BudgetReport(
        quantity=quantity, target=target, actual=getattr(counts, quantity), tolerance=section.tolerance
    )
    if not enforce:
        return report
    if not report.within:
        short, exact = format_count(report.actual), f"{report.actual:,.0f}"
        raise InputError(
            f"{quantity} is {short if short == exact else f'{short} ({exact})'}, {report.deviation:+.2%} off "
            f"{format_count(target)} at a tolerance of {report.tolerance:.3g}",
            where=place,
            right=_what_fits(report, counts, shape),
        )
    for group, stated, actual in (
        ("attention", section.attention, counts.attention_matrices),
        ("ffn", section.ffn, counts.ffn_matrices),
    ):
        if stated is not None:
            low, high = printed_interval(stated, where=f"{place}.{group}")
            if not low <= actual <= high:
                raise InputError(f"{group} has {actual:,} weights, which is not {stated}", where=f"{place}.{group}")
    return report


def printed_interval(stated: object, *, where: str | None = None) -> tuple[Decimal, Decimal]:
    """What rounds to a printed count: `28.31M` (or `2.831e7`) is 28,305,000 to 28,315,000.

    :raises InputError: for text that is no number.
    """
    text = str(stated).strip()
    try:
        value = parse_number(text)
    except ValueError as error:
        raise InputError(str(error), where=where, right="a count as printed, as in 28.31M") from None
    suffix = text[-1] if text[-1:] in SUFFIXES and text[-1:] else ""
    mantissa, _, exponent = text[: len(text) - len(suffix)].strip().lower().partition("e")
    digits = mantissa.partition(".")[2].replace("_", "")
    half = Decimal(5).scaleb(SUFFIXES[suffix] + int(exponent or 0) - len(digits) - 1)
    return value - half, value + half


def _what_fits(report: BudgetReport, counts: ShapeCounts, shape: ModelShape) -> str:
    """The FFN width that would meet the budget, everything else as it is."""
    widths = [d_ff for layer in shape.layers for d_ff in layer.ffn.d_ff]
    mean = sum(widths) / len(widths)
    # Every quantity is linear in the FFN's weights: 6 FLOPs a weight in training, 1 parameter otherwise.
    each = 6 if report.quantity == "training_flops_per_token" else 1
    needed = counts.ffn_matrices + (report.target - report.actual) / each
    if needed <= 0:
        excess = format_count(-needed * each)
        return f"even without an FFN it is {excess} too much: lower n_layers, d_model or the attention width"
    exact = mean * needed / counts.ffn_matrices
    multiple = next((size for size in (64, 16, 8, 2) if all(width % size == 0 for width in widths)), 1)
    width = max(multiple, round(exact / multiple) * multiple)
    off = counts.ffn_matrices * (width - exact) / mean * each / report.target
    if abs(off) > report.tolerance:
        width, off = round(exact), counts.ffn_matrices * (round(exact) - exact) / mean * each / report.target
    kind = "mean d_ff" if len(set(widths)) > 1 else "d_ff"
    if not math.isfinite(off) or width < 1:
        return "change n_layers or d_model"
    return f"{kind} {width} instead of {mean:.6g} would be {off:+.2%} off; `olmo-ext solve` searches others"
