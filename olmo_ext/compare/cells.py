"""A group's row of the comparison; the terminal, the page and the markdown table lay the same cells out."""

from __future__ import annotations

from dataclasses import dataclass

from olmo_ext.compare import words
from olmo_ext.compare.group import GroupResult


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One quantity of a group."""

    text: str
    value: float | None = None
    """The number itself, in the unit of the text; none where it is unknown or the cell holds words."""

    change: float | None = None
    """Relative difference to the baseline's; none where the two count as equal."""


def row_cells(group: GroupResult) -> dict[str, Cell]:
    """Name of a quantity -> its cell."""
    shape, nats, done = group.features, group.nats, len(group.finished)
    tokens = group.tokens if done else None
    needed = group.seeds_needed
    seeds = str(done) if done == len(group.runs) else f"{done} of {len(group.runs)}"
    return {
        "group": Cell(text=group.name + (" (baseline)" if group.baseline is None else "")),
        "seeds": Cell(text=seeds, value=float(done)),
        "non_embedding": Cell(
            text=words.count(shape.non_embedding), value=shape.non_embedding, change=group.unequal.get("non_embedding")
        ),
        "flops_per_token": Cell(
            text=words.count(shape.flops_per_token),
            value=shape.flops_per_token,
            change=group.unequal.get("flops_per_token"),
        ),
        "tokens": Cell(text=words.count(tokens), value=None if tokens is None else float(tokens)),
        "loss": Cell(text=words.number(group.loss, 4), value=group.loss),
        "ppl": Cell(text=words.number(group.ppl, 2), value=group.ppl),
        "difference": Cell(text=words.estimate(nats), value=None if nats is None else nats.mean),
        "p_value": Cell(text=words.p_value(group.adjusted_p), value=group.adjusted_p),
        "seeds_needed": Cell(text=words.seeds_needed(nats, needed), value=None if needed is None else float(needed)),
        "tokens_per_second": Cell(text=words.whole(group.tokens_per_second), value=group.tokens_per_second),
    }
