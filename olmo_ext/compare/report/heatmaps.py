"""Layer geometry as strips over depth, needle-in-a-haystack scores as length x depth grids."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from olmo_ext.compare import words
from olmo_ext.compare.group import GroupResult
from olmo_ext.compare.outcome import Comparison
from olmo_ext.compare.report.html import behind, heatmap, section, table

QUANTITIES = {
    "rho_mlp": "ρ MLP: cosine of the FFN's output with the residual stream",
    "rho_block": "ρ block: cosine of the whole block's update with the residual stream",
    "rho_attention": "ρ attention: cosine of the attention's output with the residual stream",
    "ffn_over_attention": "FFN update over attention update",
    "effective_rank_share": "Effective rank of the FFN's inner activations over their number",
    "dead_share": "Share of inner units that are never active",
}
"""What the page shows of a diagnosis, in this order; the file holds more."""


def layer_values(diagnosis: Mapping[str, Any]) -> dict[str, list[float]]:
    """Quantity -> value per layer, from a diagnosis file's `layers` (one mapping per layer, in order)."""
    layers = diagnosis.get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, Mapping) for layer in layers):
        return {}
    names = [name for name, value in (layers[0] if layers else {}).items() if _is_number(value) and name in QUANTITIES]
    return {
        name: [float(layer[name]) for layer in layers]
        for name in names
        if all(_is_number(layer.get(name)) for layer in layers)
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def diagnosed_step(group: GroupResult) -> int | None:
    """The step of the checkpoints that `layer_means` is of; none for the end of the runs, or without a diagnosis."""
    steps = [run.early_step(run.diagnosis.get("step")) for run in group.finished if run.diagnosis]
    return None if None in steps else max((step for step in steps if step is not None), default=None)


def layer_means(group: GroupResult) -> dict[str, list[float]]:
    """Means over those of the group's finished runs that were diagnosed at the same, the latest, step.

    Layers become more alike or less during training: a mean over different steps would be of neither.
    """
    by_quantity: dict[str, list[list[float]]] = {}
    latest = diagnosed_step(group)
    for run in group.finished:
        if run.early_step(run.diagnosis.get("step")) != latest:
            continue
        for name, values in layer_values(run.diagnosis).items():
            by_quantity.setdefault(name, []).append(values)
    return {
        name: [sum(column) / len(column) for column in zip(*rows, strict=True)]
        for name, rows in by_quantity.items()
        if len({len(row) for row in rows}) == 1
    }


def diagnosis(result: Comparison) -> str:
    """A strip per group and quantity, first layer left, all strips of one width whatever their number of layers."""
    means = {number: layer_means(group) for number, group in enumerate(result.groups)}
    parts = []
    for name, title in QUANTITIES.items():
        shown = {number: values[name] for number, values in means.items() if name in values}
        if not shown:
            continue
        every = [value for values in shown.values() for value in values]
        low, high = min(every), max(every)
        strips, rows = [], []
        for number, values in shown.items():
            group, early = result.groups[number].name, diagnosed_step(result.groups[number])
            group += "" if early is None else f", step {early:,}"
            cells = "".join(
                f'<span style="--v:{_share(value, low, high):.3f}" title="layer {layer}: {value:.3f}"></span>'
                for layer, value in enumerate(values)
            )
            strips.append(
                f'<div class="strip" data-group="{number}"><span class="strip-name">{escape(group)}</span>'
                f'<span class="strip-cells" role="img" aria-label="{escape(group)}, {len(values)} layers, first '
                f'{values[0]:.3f}, last {values[-1]:.3f}">{cells}</span></div>'
            )
            rows.append([group, ", ".join(f"{value:.3f}" for value in values)])
        data = behind(table(["Group", "First to last layer"], rows, caption=title, css="wrap", numeric_from=2))
        scale = (
            f'<p class="scale"><span>{words.number(low)}</span><i></i><span>{words.number(high)}</span>'
            "<span>first layer left, last right</span></p>"
        )
        parts.append(f"<figure>{''.join(strips)}{scale}<figcaption><b>{escape(title)}.</b></figcaption>{data}</figure>")
    return section("diagnosis", "Inside the layers", *parts, short="Layers") if parts else ""


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5


def needle_scores(group: GroupResult) -> dict[tuple[str, str], dict[tuple[float, float], list[float]]]:
    """(task, metric) -> (depth, length) -> the value of each finished run of the group, at its newest step."""
    scores: dict[tuple[str, str], dict[tuple[float, float], list[float]]] = {}
    for run in group.finished:
        newest: dict[tuple[tuple[str, str], tuple[float, float]], float] = {}
        for row in sorted(run.evaluations, key=lambda row: row.get("step") or 0):
            # Rows without a depth are sums over depths: the grid shows them already.
            if row.get("length") is None or row.get("depth") is None or not _is_number(row.get("value")):
                continue
            place = (float(row["depth"]), float(row["length"]))
            key = (str(row.get("task")), str(row.get("metric")))
            newest[key, place] = float(row["value"])
        for (key, place), value in newest.items():
            scores.setdefault(key, {}).setdefault(place, []).append(value)
    return scores


def needles(result: Comparison) -> str:
    """One grid per group and task: share of needles found by length and depth."""
    grids: dict[str, list[str]] = {}
    for number, group in enumerate(result.groups):
        for (task, metric), cells in needle_scores(group).items():
            grids.setdefault(f"{task}, {metric}", []).append(_grid(number, group.name, cells))
    if not grids:
        return ""
    parts = [f'<h3>{escape(task)}</h3><div class="needles">{"".join(drawn)}</div>' for task, drawn in grids.items()]
    caption = (
        '<p class="aside">Share found, by length of the text (columns) and depth of the needle (rows), mean over the '
        "seeds.</p>"
    )
    return section("needles", "Needles in long text", caption, *parts, short="Needles")


def _grid(number: int, name: str, cells: Mapping[tuple[float, float], list[float]]) -> str:
    lengths, depths = sorted({length for _, length in cells}), sorted({depth for depth, _ in cells})
    most = max(1.0, *(max(values) for values in cells.values()))
    rows = []
    for depth in depths:
        row = []
        for length in lengths:
            values = cells.get((depth, length))
            if values is None:
                row.append(f"<td>{words.DASH}</td>")
                continue
            mean = sum(values) / len(values)
            row.append(f'<td class="heat good" style="--v:{mean / most:.3f}">{mean:.2f}</td>')
        rows.append((f"{100 * depth:.0f} %" if depth <= 1 else f"{depth:g}", row))
    return heatmap(name, name, map(_length, lengths), rows, css="heatmap small", group=number)


def _length(length: float) -> str:
    return f"{length / 1024:g}K" if length % 1024 == 0 else f"{length:g}"
