"""A diagnosis as a plain table and as a plot. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from olmo_ext.base.files import write_atomically

COLUMNS = (
    ("layer", "layer", "d"),
    ("rho_mlp", "rho MLP", ".4f"),
    ("rho_block", "rho block", ".4f"),
    ("rho_attention", "rho attn", ".4f"),
    ("residual_norm", "|residual|", ".3f"),
    ("attention_update_norm", "|attn|", ".3f"),
    ("ffn_update_norm", "|FFN|", ".3f"),
    ("ffn_over_attention", "FFN/attn", ".3f"),
    ("d_ff", "d_ff", "d"),
    ("effective_rank", "eff. rank", ".1f"),
    ("dead_share", "dead", ".2%"),
)


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def diagnosis_table(diagnosis: Mapping[str, Any]) -> str:
    """One line per layer, below it one per sub-MLP where there are several, then r with depth."""
    rows = [[title for _, title, _ in COLUMNS]]
    for layer in diagnosis["layers"]:
        rows.append([_cell(layer.get(name), form) for name, _, form in COLUMNS])
        parts = layer["sub_mlps"]
        for number, part in enumerate(parts if len(parts) > 1 else ()):
            own = {
                "rho_mlp": part["rho"],
                "ffn_update_norm": part["update_norm"],
                **{name: part.get(name) for name in ("d_ff", "effective_rank", "dead_share")},
            }
            cells = [_cell(own[name], form) if name in own else "" for name, _, form in COLUMNS]
            rows.append([f"  .{number}", *cells[1:]])
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for name, value in diagnosis["pearson_with_depth"].items():
        lines.append(f"Pearson r with depth, {name}: {'-' if value is None else format(value, '+.3f')}")
    lines.append(f"{diagnosis['tokens']:,} tokens; {diagnosis['pooling']}")
    return "\n".join(lines)


def write_plot(diagnosis: Mapping[str, Any], path: Path, *, title: str) -> None:
    """A page that stands alone: cosines, update sizes, effective rank and dead units over depth."""
    import plotly.graph_objects as graph
    from plotly.subplots import make_subplots

    layers = diagnosis["layers"]
    panels = (
        ("cosine with the residual stream", ("rho_mlp", "rho_block", "rho_attention")),
        ("length of the update", ("ffn_update_norm", "attention_update_norm", "block_update_norm")),
        ("effective rank / inner width", ("effective_rank_share",)),
        ("share of inner units never active", ("dead_share",)),
    )
    figure = make_subplots(rows=2, cols=2, subplot_titles=[name for name, _ in panels])
    for number, (_, names) in enumerate(panels):
        for name in names:
            values = [layer.get(name) for layer in layers]
            if all(value is None for value in values):
                continue
            figure.add_trace(
                graph.Scatter(x=[layer["layer"] for layer in layers], y=values, name=name, mode="lines+markers"),
                row=number // 2 + 1,
                col=number % 2 + 1,
            )
    figure.update_xaxes(title_text="layer", tickformat="d", dtick=max(1, len(layers) // 8))
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(title=title, template="plotly_white", height=760)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, figure.to_html(include_plotlyjs=True, full_html=True))
