"""The main table: one row per group, its runs folded under it."""

from __future__ import annotations

import math
from html import escape

from olmo_ext.compare import words
from olmo_ext.compare.collect import Run
from olmo_ext.compare.group import GroupResult
from olmo_ext.compare.outcome import Comparison
from olmo_ext.compare.report.drawings import interval_glyph, interval_scale
from olmo_ext.compare.report.html import Html, text
from olmo_ext.compare.statistics import METHOD_DOCUMENTS, METHOD_SEEDS
from olmo_ext.compare.table import seeds_text
from olmo_ext.compare.verdict import BUDGET_TOLERANCE, is_sure

COLUMNS = (
    ("Group", "", "text"),
    ("Loss", "validation, nats", "num"),
    ("PPL", "", "num"),
    ("Difference to the baseline", "nats, 95 % interval", "num"),
    ("p", "Holm", "num"),
    ("Seeds", "finished runs", "num"),
    ("Seeds needed", "for 80 % power", "num"),
    ("Parameters", "non-embedding", "num"),
    ("FLOPs", "per token, training", "num"),
    ("Tokens", "seen", "num"),
    ("Tokens/s", "", "num"),
)


def results_table(result: Comparison) -> Html:
    """Sortable by each heading; the boxes hide runs in the plots."""
    head = []
    for number, (name, unit, kind) in enumerate(COLUMNS):
        small = f"<small>{escape(unit)}</small>" if unit else ""
        css = ' class="num"' if kind == "num" else ""
        head.append(
            f'<th scope="col"{css} aria-sort="none"><button type="button" class="sort" data-column="{number}">'
            f"{escape(name)}{small}</button></th>"
        )
    scale = interval_scale([group.nats for group in result.groups if group.nats is not None])
    bodies = "".join(_group(result, number, group, scale) for number, group in enumerate(result.groups))
    return Html(
        '<div class="scroll" role="region" tabindex="0" aria-label="Results by group"><table id="results" '
        'class="results">'
        "<caption><span>One row per group of runs that differ in their seed only. The boxes show and hide runs in the "
        "plots and change no statistics; the headings sort.</span></caption>"
        f'<thead><tr><td class="box"><span class="visually-hidden">shown</span></td>{"".join(head)}</tr></thead>'
        f"{bodies}"
        "</table></div>"
    )


def _group(result: Comparison, number: int, group: GroupResult, scale: float) -> str:
    row = "".join(
        f'<td class="num" data-value="{"" if value is None else repr(value)}">{text(content)}</td>'
        for value, content in _cells(group, scale)
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


def _relative(value: float | None) -> str:
    return f"<small>{words.percent(value)}</small>" if value is not None and abs(value) > BUDGET_TOLERANCE else ""


def _cells(group: GroupResult, scale: float) -> list[tuple[float | None, object]]:
    shape, nats = group.features, group.nats
    difference: object = words.DASH
    if nats is not None:
        sure = is_sure(nats, group.adjusted_p)
        ppl = "" if group.perplexity is None else f" · {words.signed(group.perplexity.mean, 2)} PPL"
        how = {METHOD_SEEDS: "", METHOD_DOCUMENTS: " · over documents"}.get(nats.method, "")
        bounds = words.interval(nats) if nats.known else "interval unknown: one seed"
        difference = Html(
            f'<div class="difference">{interval_glyph(nats, scale, sure=sure)}<span><b>{words.signed(nats.mean)}</b>'
            f"{ppl}"
            f"<small>{bounds}{how}</small></span></div>"
        )
    elif group.blocking:
        difference = Html(f'<small class="warn">{escape(group.blocking[0])}</small>')
    deviation = group.loss_deviation
    spread = f"<small>± {deviation:.4f} sd</small>" if deviation is not None else ""
    speed = group.tokens_per_second
    return [
        (group.loss, Html(words.number(group.loss, 4) + spread)),
        (group.ppl, words.number(group.ppl, 2)),
        (None if nats is None else nats.mean, difference),
        (group.adjusted_p, words.p_value(group.adjusted_p)),
        (float(len(group.finished)), seeds_text(group)),
        (
            None if group.seeds_needed is None else float(group.seeds_needed),
            words.seeds_needed(nats, group.seeds_needed),
        ),
        (shape.non_embedding, Html(words.count(shape.non_embedding) + _relative(group.size_change))),
        (shape.flops_per_token, Html(words.count(shape.flops_per_token) + _relative(group.flops_change))),
        (float(group.tokens) if group.finished else None, words.count(group.tokens) if group.finished else words.DASH),
        (speed, words.DASH if speed is None else f"{speed:,.0f}"),
    ]


def _run(run: Run, group: GroupResult) -> str:
    loss = group.losses.get(run.seed) if run.finished else None
    speed = run.tokens_per_second()
    status = "" if run.finished else f' <span class="mark warn">{escape(run.state.status)}</span>'
    each = dict(zip(group.nats.seeds, group.nats.each, strict=True)) if group.nats is not None else {}
    tokens = run.progress()[1]
    cells = [
        words.number(loss, 4),
        words.number(None if loss is None else math.exp(loss), 2),
        words.signed(each[run.seed]) if run.seed in each else words.DASH,
        "",
        "" if run.seed is None else f"seed {run.seed}",
        "",
        "",
        "",
        words.count(tokens) if tokens else words.DASH,
        words.DASH if speed is None else f"{speed:,.0f}",
    ]
    name = escape(run.name)
    return (
        f'<tr class="run" hidden><td class="box"><input type="checkbox" checked data-run="{name}" '
        f'aria-label="show {name} in the plots"></td><th scope="row">{name}{status}</th>'
        + "".join(f'<td class="num">{escape(cell)}</td>' for cell in cells)
        + "</tr>"
    )
