"""The main table: one row per group, its runs folded under it."""

from __future__ import annotations

import math
from html import escape

from olmo_ext.compare import words
from olmo_ext.compare.cells import Cell, row_cells
from olmo_ext.compare.collect import Run
from olmo_ext.compare.group import GroupResult
from olmo_ext.compare.outcome import Comparison
from olmo_ext.compare.report.drawings import interval_glyph, interval_scale
from olmo_ext.compare.report.html import Html, scrollable
from olmo_ext.compare.statistics import METHOD_DOCUMENTS
from olmo_ext.compare.verdict import is_sure

COLUMNS = {
    "loss": ("Loss", "validation, nats"),
    "ppl": ("PPL", ""),
    "difference": ("Difference to the baseline", "nats, 95 % interval"),
    "p_value": ("p", "Holm"),
    "seeds": ("Seeds", "finished runs"),
    "seeds_needed": ("Seeds needed", "for 80 % power"),
    "non_embedding": ("Parameters", "non-embedding"),
    "flops_per_token": ("FLOPs", "per token, training"),
    "tokens": ("Tokens", "seen"),
    "tokens_per_second": ("Tokens/s", ""),
}
"""Cell of a group's row -> heading and what stands under it, after the group's name."""


def results_table(result: Comparison) -> Html:
    """Sortable by each heading; the boxes hide runs in the plots."""
    head = []
    for number, (name, unit) in enumerate([("Group", ""), *COLUMNS.values()]):
        small = f"<small>{escape(unit)}</small>" if unit else ""
        css = ' class="num"' if number else ""
        head.append(
            f'<th scope="col"{css} aria-sort="none"><button type="button" class="sort" data-column="{number}">'
            f"{escape(name)}{small}</button></th>"
        )
    scale = interval_scale([group.nats for group in result.groups if group.nats is not None])
    bodies = "".join(_group(result, number, group, scale) for number, group in enumerate(result.groups))
    return scrollable(
        "Results by group",
        '<table id="results" class="results">'
        "<caption><span>One row per group of runs that differ in their seed only. The boxes show and hide runs in the "
        "plots and change no statistics; the headings sort.</span></caption>"
        f'<thead><tr><td class="box"><span class="visually-hidden">shown</span></td>{"".join(head)}</tr></thead>'
        f"{bodies}</table>",
    )


def _group(result: Comparison, number: int, group: GroupResult, scale: float) -> str:
    cells = row_cells(group)
    deviation = "" if group.loss_deviation is None else f"<small>± {group.loss_deviation:.4f} sd</small>"
    shown = {"loss": cells["loss"].text + deviation, "difference": _difference(group, scale)}
    row = "".join(
        f'<td class="num" data-value="{"" if cells[name].value is None else repr(cells[name].value)}">'
        f"{shown.get(name) or _with_change(cells[name])}</td>"
        for name in COLUMNS
    )
    marks = []
    if group.baseline is None:
        marks.append('<span class="mark">baseline</span>')
    elif group.baseline != result.sweep.baseline:
        marks.append(f'<span class="mark">against {escape(group.baseline)}</span>')
    if group.blocking:
        marks.append('<span class="mark warn">not compared</span>')
    if group.missing:
        marks.append('<span class="mark warn">incomplete</span>')
    name = escape(group.name)
    members = "".join(_run(run, group) for run in group.runs)
    return (
        f'<tbody data-group="{number}"><tr class="group"><td class="box"><input type="checkbox" checked '
        f'data-group="{number}" aria-label="show {name} in the plots"></td><th scope="row" data-value="{name}">'
        f'<button type="button" class="fold" aria-expanded="false" aria-label="runs of {name}"></button>'
        f'<i class="swatch" data-group="{number}"></i><span class="name">{name}</span> {"".join(marks)}</th>'
        f"{row}</tr>{members}</tbody>"
    )


def _with_change(cell: Cell) -> str:
    return escape(cell.text) + ("" if cell.change is None else f"<small>{words.percent(cell.change)}</small>")


def _difference(group: GroupResult, scale: float) -> str:
    nats = group.nats
    if nats is None:
        return f'<small class="warn">{escape(group.blocking[0])}</small>' if group.blocking else words.DASH
    ppl = "" if group.perplexity is None else f" · {words.signed(group.perplexity.mean, 2)} PPL"
    how = " · over documents" if nats.method == METHOD_DOCUMENTS else ""
    bounds = words.interval(nats) if nats.known else "interval unknown: one seed"
    glyph = interval_glyph(nats, scale, sure=is_sure(nats, group.adjusted_p))
    return (
        f'<div class="difference">{glyph}<span><b>{words.signed(nats.mean)}</b>{ppl}<small>{bounds}{how}</small>'
        "</span></div>"
    )


def _run(run: Run, group: GroupResult) -> str:
    loss = group.losses.get(run.seed) if run.finished else None
    status = "" if run.finished else f' <span class="mark warn">{escape(run.state.status)}</span>'
    each = dict(zip(group.nats.seeds, group.nats.each, strict=True)) if group.nats is not None else {}
    tokens = run.progress()[1]
    cells = {
        "loss": words.number(loss, 4),
        "ppl": words.number(None if loss is None else math.exp(loss), 2),
        "difference": words.signed(each.get(run.seed)),
        "seeds": "" if run.seed is None else f"seed {run.seed}",
        "tokens": words.count(tokens or None),
        "tokens_per_second": words.whole(run.tokens_per_second()),
    }
    name = escape(run.name)
    return (
        f'<tr class="run" hidden><td class="box"><input type="checkbox" checked data-run="{name}" '
        f'aria-label="show {name} in the plots"></td><th scope="row">{name}{status}</th>'
        + "".join(f'<td class="num">{escape(cells.get(name, ""))}</td>' for name in COLUMNS)
        + "</tr>"
    )
