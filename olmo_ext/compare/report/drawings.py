"""Drawings as inline SVG that follow the page's colours: a model's silhouette, an interval on a common scale."""

from __future__ import annotations

from html import escape

from olmo_ext.base.quantities import format_count
from olmo_ext.compare import words
from olmo_ext.compare.features import Features
from olmo_ext.compare.statistics import Difference

WIDTH, LAYER, GAP = 232, 13, 3


def silhouette(shape: Features, *, scale: float, name: str) -> str:
    """Every layer as a row, the first at the bottom as in the papers: the sub-MLPs' inner widths as bars around the
    residual stream (the pale column), the attention width as a thin dark bar.

    :param scale: pixels per unit of width, the same for all drawings of a page.
    """
    middle = WIDTH / 2
    rows: list[str] = []
    # A deep model is drawn with thinner layers, so that a drawing stays on one screen.
    layer = LAYER if shape.n_layers is not None and shape.n_layers <= 16 else 6
    height = 0.0
    for widths, attention in zip(reversed(shape.sub_widths), reversed(shape.attention_widths), strict=True):
        each = max(1.6, layer / len(widths) - (0.8 if len(widths) > 1 else 0))
        for width in reversed(widths):
            size = max(1.0, width * scale)
            rows.append(
                f'<rect class="ffn" x="{middle - size / 2:.1f}" y="{height:.1f}" '
                f'width="{size:.1f}" height="{each:.1f}"/>'
            )
            height += each + (0.8 if len(widths) > 1 else 0)
        size = max(1.0, attention * scale)
        rows.append(
            f'<rect class="att" x="{middle - size / 2:.1f}" y="{height + 0.4:.1f}" width="{size:.1f}" height="2.2"/>'
        )
        height += 2.6 + (GAP if layer == LAYER else 1.5)
    stream = (shape.d_model or 0) * scale
    column = f'<rect class="stream" x="{middle - stream / 2:.1f}" y="0" width="{stream:.1f}" height="{height:.1f}"/>'
    lows, highs = min(map(min, shape.sub_widths)), max(map(max, shape.sub_widths))
    inner = f"{lows:,}" if lows == highs else f"{lows:,} to {highs:,}"
    subs = "" if shape.num_sub_mlps == 1 else f", {shape.num_sub_mlps or 'several'} sub-MLPs a layer"
    text = f"{name}: {shape.n_layers} layers, residual stream {shape.d_model:,}, FFN inner width {inner}{subs}"
    return (
        f'<svg class="silhouette" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" role="img" '
        f'aria-label="{escape(text)}">{column}{"".join(rows)}</svg>'
    )  # fmt: skip


def share_bar(shape: Features) -> str:
    """Attention against FFN parameters."""
    if not shape.attention or not shape.ffn:
        return ""
    share = shape.attention / (shape.attention + shape.ffn)
    text = f"Attention {format_count(shape.attention)} ({share:.0%}), FFN {format_count(shape.ffn)} ({1 - share:.0%})"
    return (
        f'<div class="share" role="img" aria-label="{escape(text)}">'
        f'<span class="share-att" style="width:{100 * share:.1f}%"></span><span class="share-ffn"></span></div>'
        f'<div class="share-text"><span>attention {format_count(shape.attention)} · {share:.0%}</span>'
        f"<span>FFN {format_count(shape.ffn)}</span></div>"
    )


def interval_scale(differences: list[Difference]) -> float:
    """Half the width, in nats, of the axis on which all intervals of a page fit."""
    bounds = [abs(v) for d in differences for v in (d.mean, d.low, d.high) if v is not None]
    # An interval of a whole axis' width hides the others: the axis follows the means, long whiskers are cut.
    means = [abs(d.mean) for d in differences]
    return max(min(max(bounds, default=0.0), 4 * max(means, default=0.0)) * 1.08, 1e-9)


def interval_glyph(difference: Difference, scale: float, *, sure: bool) -> str:
    """A dot with whiskers on an axis from -scale to scale with a line at zero; an arrow head where it is cut."""
    width, height = 124.0, 22.0

    def at(value: float) -> float:
        return width / 2 + max(-1.0, min(1.0, value / scale)) * (width / 2 - 5)

    parts = [f'<line class="zero" x1="{width / 2}" x2="{width / 2}" y1="0" y2="{height}"/>']
    middle = height / 2
    if difference.low is not None and difference.high is not None:
        parts.append(
            f'<line class="whisker" x1="{at(difference.low):.1f}" x2="{at(difference.high):.1f}" '
            f'y1="{middle}" y2="{middle}"/>'
        )  # fmt: skip
        for bound, way in ((difference.low, -1), (difference.high, 1)):
            x = at(bound)
            if abs(bound) > scale:
                parts.append(
                    f'<path class="whisker" d="M{x - 4 * way:.1f} {middle - 3.5}L{x:.1f} {middle}'
                    f'L{x - 4 * way:.1f} {middle + 3.5}"/>'
                )
            else:
                parts.append(
                    f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{middle - 3.5}" y2="{middle + 3.5}"/>'
                )
    kind = "dot sure" if sure else "dot"
    parts.append(f'<circle class="{kind}" cx="{at(difference.mean):.1f}" cy="{middle}" r="4"/>')
    text = f"{words.signed(difference.mean)} nats, interval {words.interval(difference)}"
    return (
        f'<svg class="interval" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        f'role="img" aria-label="{escape(text)}">{"".join(parts)}</svg>'
    )
