"""What the page's script draws from: thinned curves per run, points per figure. Short keys, short numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from olmo_ext.compare.collect import TRAIN_LOSS, Run, Series, validation_metric
from olmo_ext.compare.comparable import same_device
from olmo_ext.compare.group import GroupResult
from olmo_ext.compare.outcome import Comparison
from olmo_ext.compare.report.thinning import extremes, means
from olmo_ext.compare.views import shape_names

MOST_BUCKETS = 133
RUNS_AT_MOST_BUCKETS = 50
LABELLED = 9
"""Groups drawn in colour and named in the plots; in a larger sweep the others are grey."""


def payload(result: Comparison) -> dict[str, Any]:
    """The page's data as plain JSON."""
    runs = [run for group in result.groups for run in group.runs]
    index = {group.name: number for number, group in enumerate(result.groups)}
    count = max(24, min(MOST_BUCKETS, MOST_BUCKETS * RUNS_AT_MOST_BUCKETS // max(1, len(runs))))
    strong = emphasised(result.groups)
    return {
        "label": result.label,
        "groups": [
            {
                "n": group.name,
                "base": group.baseline is None,
                "of": index.get(group.baseline or ""),
                "strong": group.name in strong,
            }
            for group in result.groups
        ],
        "runs": [
            _run(run, index[group.name], group, result.label, count) for group in result.groups for run in group.runs
        ],
        "figures": figures(result, index),
    }


def emphasised(groups: list[GroupResult]) -> set[str]:
    """The groups to name in plots: all of a small sweep, else the baselines, the best and the worst."""
    if len(groups) <= LABELLED + 1:
        return {group.name for group in groups}
    ordered = sorted((group for group in groups if group.loss is not None), key=lambda group: group.loss or 0.0)
    chosen = [group for group in ordered if group.baseline is None][:3]
    for group in [*ordered[:5], *ordered[-2:], *ordered]:
        if group not in chosen and len(chosen) < LABELLED:
            chosen.append(group)
    return {group.name for group in chosen}


def _round(values: np.ndarray, digits: int) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in np.round(values, digits).tolist()]


def _curve(tokens: np.ndarray, seconds: np.ndarray, value: np.ndarray) -> dict[str, list[Any]]:
    return {"t": np.rint(tokens).astype(np.int64).tolist(), "s": _round(seconds, 1), "y": _round(value, 4)}


def _thinned(series: Series | None, count: int) -> dict[str, list[Any]] | None:
    if series is None or not len(series):
        return None
    keep = extremes(series.tokens, series.value, count)
    return _curve(series.tokens[keep], series.seconds[keep], series.value[keep])


def _run(run: Run, group: int, result: GroupResult, label: str | None, count: int) -> dict[str, Any]:
    train = run.series.get(TRAIN_LOSS)
    mean = None
    if train is not None and len(train):
        mean = _curve(*means(train.tokens, [train.tokens, train.seconds, train.value], count))
    _, tokens, flops = run.progress()
    return {
        "n": run.name,
        "g": group,
        "s": run.seed,
        "done": run.finished,
        "k": flops / tokens if tokens else result.features.flops_per_token or 0,
        "v": _thinned(run.series.get(validation_metric(label)), count) if label else None,
        "r": _thinned(train, count),
        "m": mean,
    }


def _points(result: Comparison, index: dict[str, int], x_of: Any, y_of: Any) -> list[dict[str, Any]]:
    points = []
    for group in result.groups:
        # Only what may stand on one axis: a group of other data or length has another meaning of "loss".
        if group.blocking:
            continue
        for run in group.finished:
            x, y = x_of(group, run), y_of(group, run)
            if x is not None and y is not None and math.isfinite(x) and math.isfinite(y):
                points.append({"g": index[group.name], "r": run.name, "x": float(f"{x:.6g}"), "y": round(y, 4)})
    return points


def _loss(group: GroupResult, run: Run) -> float | None:
    return group.losses.get(run.seed)


def _perplexity(group: GroupResult, run: Run) -> float | None:
    loss = group.losses.get(run.seed)
    return None if loss is None else math.exp(loss)


def figures(result: Comparison, index: dict[str, int]) -> list[dict[str, Any]]:
    """Figures of points, those whose axes exist in this sweep."""
    panels: list[dict[str, Any]] = []

    def add(name: str, x_of: Any, y_of: Any, x_name: str, y_name: str, **more: Any) -> None:
        points = _points(result, index, x_of, y_of)
        if points:
            panels.append({"id": name, "x": x_name, "y": y_name, "points": points, **more})

    loss_name, ppl_name = "Validation loss (nats)", "Validation perplexity"
    wide = spread([run.progress()[2] for group in result.groups for run in group.finished])
    add("pareto-flops", lambda g, r: r.progress()[2] or None, _loss, "Training FLOPs", loss_name, front="min", log=wide)
    if one_device(result):
        add("pareto-speed", lambda g, r: r.tokens_per_second(), _loss, "Tokens per second", loss_name, front="max")
    for name, of, x_name in (
        ("aspect", lambda group: group.features.aspect if _near(result, group) else None, "d_model / layers"),
        ("ratio", lambda group: group.features.ratio, "d_ff of one sub-MLP / d_model"),
    ):
        varied = varying_families(result, of)
        if varied:
            chosen = [g for g in result.groups if g.features.family in varied or g.baseline is None]
            add(name, lambda g, r, of=of, chosen=chosen: of(g) if g in chosen else None, _perplexity, x_name, ppl_name,
                log=True, lines=_families(result, index))  # fmt: skip
    if result.learning_rate_axis:
        axis = result.learning_rate_axis
        rates = sorted({rate for row in result.learning_rates for rate in row.losses})
        add("learning-rate", lambda g, r: _number(r.axes.get(axis)), _loss, "Peak learning rate", loss_name, log=True,
            lines=_rate_lines(result, index), ticks=rates)  # fmt: skip
    if result.scaling is not None:
        fits = [
            {
                "name": fit.family,
                "g": [index[name] for name in fit.groups],
                "x": _significant(fit.grid),
                "y": _round(np.array(fit.fitted), 4),
                "lo": _round(np.array(fit.low), 4),
                "hi": _round(np.array(fit.high), 4),
            }
            for fit in result.scaling.fits
        ]
        add("scaling", lambda g, r: g.features.non_embedding, _loss, "Non-embedding parameters", loss_name, log=True,
            fits=fits)  # fmt: skip
    return panels


def one_device(result: Comparison) -> bool:
    """Whether the speeds of all finished runs may stand on one axis."""
    return same_device([run for group in result.groups for run in group.finished])


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _significant(values: Any) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def spread(values: list[float]) -> bool:
    """Whether positive values span enough for a logarithmic axis."""
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) > 5 * min(positive)


def _near(result: Comparison, group: GroupResult) -> bool:
    """Whether a group is about as large as the baseline: depth against width is a question at a fixed budget."""
    size, home = group.features.non_embedding, result.group(result.sweep.baseline).features.non_embedding
    return bool(size and home and abs(size / home - 1) <= 0.1)


def varying_families(result: Comparison, of: Any) -> set[str]:
    """Families in which a quantity takes at least three values: those for which its plot says something."""
    sizes: dict[str, set[float]] = {}
    for group in result.groups:
        value = of(group)
        if value is not None and group.losses:
            # Neighbours within rounding (an inner width of 427 at a ratio of 0.417) are one value.
            sizes.setdefault(group.features.family, set()).add(float(f"{value:.3g}"))
    return {family for family, values in sizes.items() if len(values) >= 3}


def _families(result: Comparison, index: dict[str, int]) -> list[dict[str, Any]]:
    lines: dict[str, list[int]] = {}
    for group in result.groups:
        lines.setdefault(group.features.family, []).append(index[group.name])
    return [{"name": name, "g": members} for name, members in lines.items()]


def _rate_lines(result: Comparison, index: dict[str, int]) -> list[dict[str, Any]]:
    axes = {group.name: group.runs[0].axes if group.runs else {} for group in result.groups}
    lines: dict[str, list[int]] = {}
    for group, name in shape_names(axes, result.learning_rate_axis or "").items():
        lines.setdefault(name, []).append(index[group])
    return [{"name": name, "g": members} for name, members in lines.items()]
