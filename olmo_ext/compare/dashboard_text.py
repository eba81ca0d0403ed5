"""The comparison in words and tables, as the markdown that W&B shows in a panel or a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from olmo_ext.compare import words

if TYPE_CHECKING:
    from olmo_ext.compare.group import GroupResult
    from olmo_ext.compare.outcome import Comparison


def comparison_table(result: Comparison) -> str:
    """The table of the comparison as markdown."""
    heads = ["shape", "seeds", "parameters (non-emb.)", "FLOPs a token", "tokens", "loss", "PPL"]
    heads += ["difference in nats [95 %]", "Holm p", "tokens/s"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for group in result.groups:
        lines.append("| " + " | ".join(_cell(text) for text in _cells(group)) + " |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _cells(group: GroupResult) -> list[str]:
    difference = words.DASH
    if group.nats is not None:
        difference = f"{words.signed(group.nats.mean)} {words.interval(group.nats)}"
    elif group.blocking:
        difference = "not compared: " + ", ".join(group.blocking)
    speed = group.tokens_per_second
    return [
        group.name + (" (baseline)" if group.baseline is None else ""),
        f"{len(group.finished)} of {len(group.runs)}",
        words.count(group.features.non_embedding),
        words.count(group.features.flops_per_token),
        words.count(group.tokens) if group.finished else words.DASH,
        words.number(group.loss, 4),
        words.number(group.ppl, 2),
        difference,
        words.p_value(group.adjusted_p),
        words.DASH if speed is None else f"{speed:,.0f}",
    ]


def paper_table(result: Comparison) -> str:
    """The papers' figures beside ours as markdown; empty without an expected.yaml."""
    if not result.paper:
        return ""
    lines = ["| shape | metric | paper | ours | verdict | why | source |", "|---|---|---|---|---|---|---|"]
    for row in result.paper:
        ours = words.number(row.our_value, 3)
        cells = [row.group, row.metric, f"{row.paper_value:g}", ours, row.verdict or "shown", row.why, row.source]
        lines.append("| " + " | ".join(_cell(text) for text in cells) + " |")
    return "\n".join(lines)


def answer(result: Comparison) -> list[str]:
    """Verdict, table, the papers' figures and the notes, a markdown text each."""
    parts = [result.verdict, comparison_table(result)]
    if papers := paper_table(result):
        parts += ["### The papers' figures beside ours", papers]
    if result.notes:
        parts.append("\n".join(f"- {note}" for note in result.notes))
    return [part for part in parts if part]
