"""The sections that every page has: curves, shapes, cost. Each is empty where the sweep has no such data."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from olmo_ext.base.quantities import format_count, format_seconds
from olmo_ext.compare import words
from olmo_ext.compare.collect import TRAIN_LOSS, validation_metric
from olmo_ext.compare.group import GroupResult
from olmo_ext.compare.outcome import Comparison
from olmo_ext.compare.report.drawings import WIDTH, share_bar, silhouette
from olmo_ext.compare.report.html import Html, behind, plot, section, table
from olmo_ext.compare.report.payload import one_device
from olmo_ext.compare.statistics import interpolate
from olmo_ext.compare.views import AXES, AXIS_NAMES

CURVE_TABLE_POINTS = 8
DECODING = ("KV bytes/token", "State bytes/sequence")
"""What decoding keeps: per token of the past in a 2-byte type, and per sequence whatever its length in fp32."""


def _choice(name: str, legend: str, options: list[tuple[str, str]]) -> str:
    inputs = "".join(
        f'<label><input type="radio" name="{name}" value="{value}"{" checked" if number == 0 else ""}>'
        f"<span>{title}</span></label>"
        for number, (value, title) in enumerate(options)
    )
    return f'<fieldset class="choice"><legend>{legend}</legend>{inputs}</fieldset>'


def curves(result: Comparison) -> Html:
    """Loss over tokens, FLOPs and seconds."""
    if not any(run.series for run in result.sweep.runs):
        return Html()
    loss = [("v", "validation"), ("t", "training")] if result.label else [("t", "training")]
    controls = '<div class="controls">' + "".join(
        [
            _choice("curve-x", "over", [("t", "tokens"), ("f", "FLOPs"), ("s", "seconds")]),
            _choice("curve-y", "loss", loss),
            _choice("curve-show", "as", [("loss", "loss"), ("difference", "difference to the baseline")]),
            _choice("curve-smooth", "smoothing", [("1", "light"), ("2", "strong"), ("0", "none")]),
            '<label class="check"><input type="checkbox" id="curve-log"><span>log axis</span></label>',
        ]
    ) + "</div>"  # fmt: skip
    metric = validation_metric(result.label) if result.label else TRAIN_LOSS
    caption = (
        "<b>Loss during training.</b> Lines are means over the seeds that are shown, bands reach from the lowest to "
        "the "
        "highest seed; unfinished runs are dotted. Long curves are thinned to the extremes of each stretch. Smoothing "
        "acts on the training loss alone. Drag to zoom, double-click to return."
    )
    return section(
        "curves", "Loss during training",
        plot("curves", f"Curves of {metric} for every group; the numbers are in the table below", caption,
             behind(_curve_table(result, metric)), controls=controls, css="tall"), short="Curves")  # fmt: skip


def _curve_table(result: Comparison, metric: str) -> str:
    ends = [int(run.series[metric].tokens[-1]) for run in result.sweep.runs if metric in run.series]
    if not ends:
        return "<p>No values.</p>"
    points = np.rint(np.linspace(0, max(ends), CURVE_TABLE_POINTS + 1)[1:]).astype(int)
    rows = []
    for group in result.groups:
        runs = [run.series[metric] for run in group.runs if metric in run.series]
        row: list[object] = [group.name]
        for point in points:
            interpolated = [interpolate(series.tokens, series.value, float(point)) for series in runs]
            values = [value for value in interpolated if value is not None]
            row.append(words.number(sum(values) / len(values), 4) if values else words.DASH)
        rows.append(row)
    head = ["Group", *(f"{format_count(point)} tokens" for point in points)]
    return table(head, rows, caption=f"{metric}, mean over the seeds that have come so far")


def shapes(result: Comparison) -> Html:
    """A drawing per group."""
    drawn = [group for group in result.groups if group.features.sub_widths and group.features.d_model]
    if not drawn:
        return Html()
    widest = max(
        max(max(map(max, g.features.sub_widths)), *g.features.attention_widths, g.features.d_model or 0) for g in drawn
    )
    cards, rows = [], []
    for group in drawn:
        shape = group.features
        subs = "" if shape.num_sub_mlps == 1 else f" · K = {shape.num_sub_mlps or 'varied'}"
        number = result.groups.index(group)
        cards.append(
            f'<figure class="shape" data-group="{number}"><figcaption><i class="swatch" data-group="{number}"></i>'
            f"<b>{escape(group.name)}</b><small>{shape.n_layers} layers · d<sub>model</sub> {shape.d_model:,}{subs}"
            f"</small><small>{escape(_distinct(shape.ffn_kinds))} · {escape(_distinct(shape.mixer_kinds))}</small>"
            "</figcaption>"
            f"{silhouette(shape, scale=(WIDTH - 2) / widest, name=group.name)}{share_bar(shape)}</figure>"
        )
        widths = [
            " + ".join(f"{w:,}" for w in layer)
            if len(set(layer)) > 1
            else (f"{len(layer)} × " if len(layer) > 1 else "") + f"{layer[0]:,}"
            for layer in shape.sub_widths
        ]
        rows.append([group.name, shape.n_layers, f"{shape.d_model:,}", _runs_of(shape.ffn_kinds, between="; "),
                     _runs_of(widths), _runs_of(shape.mixer_kinds, between="; "),
                     _runs_of([f"{w:,}" for w in shape.attention_widths]), words.count(shape.attention),
                     words.count(shape.ffn), words.count(shape.total), *_decoding(group)])  # fmt: skip
    head = [
        "Group",
        "Layers",
        "d_model",
        "FFN type",
        "FFN inner width, first to last layer",
        "Attention type",
        "Attention width",
        "Attention",
        "FFN",
        "Total",
        *DECODING,
    ]
    legend = (
        '<p class="legend"><span><i class="key key-ffn"></i>inner width of each sub-MLP</span><span><i class="key '
        'key-att">'
        '</i>attention width (heads × head size)</span><span><i class="key key-stream"></i>residual stream, d<sub>'
        "model</sub>"
        "</span><span>first layer at the bottom; all drawings on one scale</span></p>"
    )
    return section(
        "shapes", "Where the parameters sit", legend, f'<div class="shapes">{"".join(cards)}</div>',
        behind(table(head, rows, caption="Widths per layer and parameters by group of weights", css="wrap")),
        short="Shapes",
    )  # fmt: skip


def _decoding(group: GroupResult) -> list[str]:
    """What decoding keeps: a dash where the run is older than the figure."""
    shape = group.features
    return [words.count(shape.kv_cache_bytes_per_token), words.count(shape.state_bytes)]


def _distinct(kinds: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(kinds))


def _runs_of(values: Sequence[str], *, between: str = ", ") -> str:
    """Repeated neighbours folded: `3072 (×12)`."""
    folded: list[tuple[str, int]] = []
    for value in values:
        if folded and folded[-1][0] == value:
            folded[-1] = (value, folded[-1][1] + 1)
        else:
            folded.append((value, 1))
    return between.join(value if many == 1 else f"{value} (× {many})" for value, many in folded)


def cost(result: Comparison) -> Html:
    """Loss against FLOPs and speed; the views at equal budget."""
    compared = [group for group in result.groups if group.views]
    if not any(group.losses for group in result.groups):
        return Html()
    rows = [
        [g.name, words.engineering(g.total_flops), "" if g.tokens_per_second is None else f"{g.tokens_per_second:,.0f}",
         words.number(g.loss, 4), *_decoding(g)]
        for g in result.groups if g.losses
    ]  # fmt: skip
    data = behind(table(["Group", "Training FLOPs", "Tokens/s", "Loss", *DECODING], rows, caption="Cost and loss"))
    flops_caption = (
        "<b>Loss against training FLOPs.</b> Small dots are seeds, large ones their mean; the dotted steps are the "
        "frontier."
    )
    speed_caption = "<b>Loss against speed</b> on this sweep's machine. Better is down and to the right."
    pair = (
        '<div class="pair">'
        + plot("pareto-flops", "Validation loss against training FLOPs", flops_caption, "")
        + plot("pareto-speed", "Validation loss against tokens per second", speed_caption, "")
        + "</div>"
    )  # fmt: skip
    parts = [pair, data]
    if not one_device(result):
        parts.append('<p class="aside">The runs used different devices: loss against speed is not drawn.</p>')
    if compared:
        parts.append(_views_table(compared))
    return section("cost", "At what cost", *parts, short="Cost")


def _views_table(compared: list[GroupResult]) -> str:
    rows = []
    for group in compared:
        row: list[object] = [group.name]
        for axis in AXES:
            view = group.views[axis]
            if view.difference is None or view.at is None:
                row.append(view.note or words.DASH)
                continue
            at = (
                format_seconds(view.at)
                if axis == "seconds"
                else words.engineering(view.at)
                if axis == "flops"
                else words.count(view.at)
            )
            note = f"; {view.note}" if view.note else ""
            row.append(Html(f"{words.estimate(view.difference)}<small>at {at}{note}</small>"))
        speed = group.speed_up
        if speed is None:
            row.append(words.DASH)
        else:
            bounds = "" if speed.low is None else f"[{speed.low:.3f}, {speed.high:.3f}] "
            reached = f"reached by {speed.reached} of {speed.pairs} seeds"
            if speed.seeds < speed.pairs:
                reached += f", {speed.pairs - speed.seeds} left out: the crossing was not seen"
            row.append(Html(f"{speed.ratio:.3f} ×<small>{bounds}{reached}</small>"))
        rows.append(row)
    head = ["Group", *(f"Equal {AXIS_NAMES[axis]}" for axis in AXES), "Tokens to the baseline's loss"]
    note = (
        '<p class="aside">Each column compares at the largest budget that every paired run of both sides has reached, '
        "interpolated between evaluations (linear in the logarithm of the axis) and never beyond them. Where that is "
        "not "
        "the end of a run, the run is read in the middle of its learning-rate schedule, which counts against it. The "
        "last "
        "column is the baseline's tokens over the group's tokens for the same loss: above 1 the group is sooner; "
        "where it "
        "never reaches the baseline's loss, the baseline's tokens for the group's final loss over the group's.</p>"
    )
    return table(head, rows, caption="Difference in nats at equal budgets, paired by seed, 95 % intervals") + note
