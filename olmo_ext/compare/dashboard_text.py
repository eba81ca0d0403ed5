"""The comparison in words and tables, as the markdown that W&B shows in a panel or a report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from olmo_ext.compare import words
from olmo_ext.compare.cells import row_cells

if TYPE_CHECKING:
    from olmo_ext.compare.outcome import Comparison


COLUMNS = {
    "group": "shape",
    "seeds": "seeds",
    "non_embedding": "parameters (non-emb.)",
    "flops_per_token": "FLOPs a token",
    "tokens": "tokens",
    "loss": "loss",
    "ppl": "PPL",
    "difference": "difference in nats [95 %]",
    "p_value": "Holm p",
    "tokens_per_second": "tokens/s",
}
"""Cell of a group's row -> its heading."""


def comparison_table(result: Comparison) -> str:
    """The table of the comparison as markdown."""
    lines = [_line(COLUMNS.values()), "|" + "---|" * len(COLUMNS)]
    for group in result.groups:
        texts = {name: cell.text for name, cell in row_cells(group).items()}
        texts["seeds"] = f"{len(group.finished)} of {len(group.runs)}"
        if group.nats is None and group.blocking:
            texts["difference"] = "not compared: " + ", ".join(group.blocking)
        lines.append(_line(texts[name] for name in COLUMNS))
    return "\n".join(lines)


def _line(texts: Iterable[str]) -> str:
    """A line of a markdown table."""
    cells = (text.replace("|", "\\|").replace("\n", " ") for text in texts)
    return f"| {' | '.join(cells)} |"


def paper_table(result: Comparison) -> str:
    """The papers' figures beside ours as markdown; empty without an expected.yaml."""
    if not result.paper:
        return ""
    lines = ["| shape | metric | paper | ours | verdict | why | source |", "|---|---|---|---|---|---|---|"]
    for row in result.paper:
        ours = words.number(row.our_value, 3)
        cells = [row.group, row.metric, f"{row.paper_value:g}", ours, row.verdict or "shown", row.why, row.source]
        lines.append(_line(cells))
    return "\n".join(lines)


def answer(result: Comparison) -> list[str]:
    """Verdict, table, the papers' figures and the notes, a markdown text each."""
    parts = [result.verdict, comparison_table(result)]
    if papers := paper_table(result):
        parts += ["### The papers' figures beside ours", papers]
    if result.notes:
        parts.append("\n".join(f"- {note}" for note in result.notes))
    return [part for part in parts if part]
