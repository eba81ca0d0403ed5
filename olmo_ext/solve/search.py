"""Shapes of equal budget: an exact search over whole numbers.

Every budget (non-embedding or total parameters, training FLOPs per token) is linear in `d_ff` once layers, d_model,
sub-MLPs and heads are chosen. So the search runs over those in one vectorised pass: at each point the constraints
leave an interval of `d_ff`, and the multiples inside it are the shapes. The coefficients come from the counts of a
type's own `matrices()`, so that a registered type is searched like a built-in one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from olmo_ext.base.errors import InputError
from olmo_ext.shapes.counts import count
from olmo_ext.shapes.layers import FFNSpec, LayerShape
from olmo_ext.shapes.registry import ATTENTION_TYPES, FFN_TYPES
from olmo_ext.solve.problem import Interval, Problem, Solution
from olmo_ext.solve.refusals import accepted_ffns, distinct

MAX_PER_POINT = 64
"""Multiples of d_ff looked at per point, those nearest to the budget."""

MAX_POINTS = 4_000_000

Columns = dict[str, Any]
"""One array per quantity, all of one length: a row is a point, or a shape."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The best feasible shapes, and how many were looked at and are feasible."""

    solutions: tuple[Solution, ...]
    num_candidates: int
    num_feasible: int


def search(problem: Problem, *, limit: int = 20, by: str = "deviation") -> Outcome:
    """The feasible shapes, best first.

    :param by: `deviation` (then alignment) or `alignment` (then deviation).
    :raises InputError: for a search that is too large.
    """
    feasible, num_candidates = feasible_shapes(problem)
    # Ties beyond a millionth of a percent are broken by alignment, then by fewer layers.
    keys = [-feasible.alignment, np.round(feasible.tolerance, 8)]
    first, second = keys if by == "alignment" else reversed(keys)
    best = np.arange(len(first))
    if len(first) > limit:
        # A selection is much faster than a sort of everything.
        best = np.flatnonzero(first <= np.partition(first, limit - 1)[limit - 1])
    order = best[np.lexsort((feasible.rows(best).layers, second[best], first[best]))]
    solutions = tuple(feasible.rows(row) for row in order[:limit])
    return Outcome(solutions=solutions, num_candidates=num_candidates, num_feasible=len(first))


def feasible_shapes(problem: Problem) -> tuple[Solution, int]:
    """All feasible shapes as columns, and the number of points and shapes looked at."""
    points = _points(problem)
    num_points = len(points["layers"])
    inside = _within(points["attention"], problem.attention)
    points = _rows(points, inside & _within(points["d_model"] / points["layers"], problem.aspect))
    row, d_ff = _multiples(problem, points)
    columns = _rows(points, row) | {"d_ff": d_ff}
    widths = _sums_of_widths(problem, columns["layers"], d_ff)
    columns["ffn"] = columns["ffn_constant"] + columns["ffn_slope"] * widths
    columns["actual"] = columns["constant"] + columns["slope"] * widths
    columns["deviation"] = columns["actual"] / problem.target - 1.0
    shapes = Solution(**{field.name: columns[field.name] for field in fields(Solution)})
    # A hair of slack, so that a deviation of exactly the tolerance passes in floating point.
    kept = (widths > 0) & (shapes.tolerance <= problem.tolerance * (1 + 1e-12)) & _within(columns["ffn"], problem.ffn)
    shapes = shapes.rows(kept)
    return shapes.rows(accepted_ffns(problem, shapes)), num_points + len(row)


def _rows(columns: Columns, index: np.ndarray) -> Columns:
    return {name: column[index] for name, column in columns.items()}


def _within(values: np.ndarray, interval: Interval | None) -> np.ndarray:
    low, high = interval or (-np.inf, np.inf)
    return (values >= low - 1e-9) & (values <= high + 1e-9)


def _points(problem: Problem) -> Columns:
    """Every combination of layers, d_model, num_sub_mlps and heads.

    With W the sum of d_ff over the layers, the budget's quantity is `constant + slope W` and the FFN has
    `ffn_constant + ffn_slope W` weights; all four are whole numbers.
    """
    rows = np.array(_sizes_per_width(problem), dtype=np.int64).reshape(-1, 10)
    lengths = len(rows), len(problem.layers), len(problem.num_sub_mlps)
    if (number := math.prod(lengths)) > MAX_POINTS:
        raise InputError(
            f"{number:,} points to search, at most {MAX_POINTS:,}", right="narrower ranges or larger steps"
        )
    i, j, k = (index.ravel() for index in np.meshgrid(*map(np.arange, lengths)))
    layers, sub_mlps = np.array(problem.layers)[j], np.array(problem.num_sub_mlps)[k]
    d_model, heads, head_dim, weights, around, per_layer, ffn, per_sub_mlp, ffn_slope, slope = rows[i].T
    return {
        "layers": layers,
        "d_model": d_model,
        "num_sub_mlps": sub_mlps,
        "heads": heads,
        "head_dim": head_dim,
        "attention": layers * weights,
        "ffn_constant": layers * sub_mlps * ffn,
        "ffn_slope": sub_mlps * ffn_slope,
        "constant": around + layers * (per_layer + sub_mlps * per_sub_mlp),
        "slope": sub_mlps * slope,
    }


def _sizes_per_width(problem: Problem) -> list[tuple[int, ...]]:
    """One row per d_model and its heads: d_model, heads, head_dim, the attention weights of a layer, the budget's
    quantity without any layer, what a layer without an FFN adds to it, and `_ffn_lines`.
    """
    attention_type, rows = ATTENTION_TYPES.get(problem.attention_type), []
    # The embedding, the output head and the last norm grow linearly with d_model.
    around_per_width = int(getattr(count(problem.model(1, ())), problem.quantity))
    for d_model in problem.d_model:
        around, ffn = around_per_width * d_model, _ffn_lines(problem, d_model)
        for heads, head_dim in problem.head_choices(d_model):
            spec = problem.attention_spec(heads, head_dim)
            if attention_type.check(spec, d_model) is None:
                layer = LayerShape(ffn=FFNSpec(type="conventional", d_ff=()), attention=spec)
                counts = count(problem.model(d_model, (layer,)))
                per_layer = int(getattr(counts, problem.quantity)) - around
                rows.append((d_model, heads, head_dim, counts.attention_matrices, around, per_layer, *ffn))
    return rows


def _ffn_lines(problem: Problem, d_model: int) -> list[int]:
    """Weights of one sub-MLP and what it adds to the budget's quantity: both at d_ff 0, then both per unit of d_ff.

    :raises InputError: for a type that does not grow linearly with d_ff.
    """
    kind = FFN_TYPES.get(problem.ffn_type)

    def sizes(d_ff: int) -> np.ndarray:
        spec = problem.ffn_spec(d_ff)
        quantity = weights = sum(rows * columns for rows, columns in kind.matrices(d_model, d_ff, spec))
        if problem.quantity == "total":
            norm = d_model
            quantity += kind.vector_parameters(d_model, d_ff, spec) + norm
        elif problem.quantity == "training_flops_per_token":
            quantity *= 6
        return np.array((weights, quantity))

    low, high, far = sizes(128), sizes(256), sizes(1024)
    slopes = (high - low) // 128
    if (slopes <= 0).any() or (low + (1024 - 128) * slopes != far).any():
        how = "" if (low == far).any() else "linearly "
        raise InputError(f"FFN type {kind.name!r} does not grow {how}with d_ff", right="solve cannot search it")
    return [*(low - 128 * slopes).tolist(), *slopes.tolist()]


def _multiples(problem: Problem, points: Columns) -> tuple[np.ndarray, np.ndarray]:
    """The multiples of d_ff that the constraints leave at each point, as (rows of the points, d_ff).

    A taper rounds the width of each layer, so that some of its multiples miss the budget: the caller counts exactly.
    """
    layers, multiple = points["layers"], problem.multiple_of
    low, high = _d_ff_bounds(problem, points)
    slope = points["slope"] * layers
    ideal = (problem.target - points["constant"]) / slope
    slack = problem.target * problem.tolerance / slope + (problem.taper.multiple_of if problem.taper else 0)
    first = np.ceil((np.maximum(low, ideal - slack) - 1e-9) / multiple)
    last = np.floor((np.minimum(np.minimum(high, ideal + slack), 1e9) + 1e-9) / multiple)
    # Without a tolerance only the multiple nearest to the budget is wanted.
    reach = MAX_PER_POINT // 2 if np.isfinite(problem.tolerance) else 0
    centre = np.clip(np.round(ideal / multiple), first, last)
    first = np.maximum(first, centre - reach).astype(np.int64)
    last = np.minimum(last, centre + reach).astype(np.int64)
    numbers = np.maximum(last - first + 1, 0)
    row = np.repeat(np.arange(len(numbers)), numbers)
    starts = np.cumsum(numbers) - numbers
    return row, (first[row] + np.arange(len(row)) - starts[row]) * multiple


def _d_ff_bounds(problem: Problem, points: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Smallest and largest d_ff that everything but the budget allows, not rounded."""
    d_model, attention = points["d_model"], points["attention"]
    ratio = problem.ratio, 0, 1 / d_model
    if problem.ratio is not None and problem.ratio[0] == problem.ratio[1]:
        nearest = np.round(problem.ratio[0] * d_model / problem.multiple_of) * problem.multiple_of
        ratio = (nearest, nearest), 0, 1
    ffn_of_share = None
    if problem.attention_share is not None:
        smallest, largest = problem.attention_share
        ffn_of_share = attention * (1 / largest - 1), attention * (1 / max(smallest, 1e-9) - 1)
    ffn_line = points["ffn_constant"], points["ffn_slope"] * points["layers"]
    low, high = np.ones(len(d_model)), np.full(len(d_model), np.inf)
    # Each says that constant + slope * d_ff lies in an interval.
    for interval, constant, slope in (
        (problem.d_ff, 0, 1),
        ratio,
        (problem.total_ratio, 0, points["num_sub_mlps"] / d_model),
        (problem.ffn, *ffn_line),
        (ffn_of_share, *ffn_line),
    ):
        if interval is not None:
            low = np.maximum(low, (interval[0] - constant) / slope)
            high = np.minimum(high, (interval[1] - constant) / slope)
    return low, high


def _sums_of_widths(problem: Problem, layers: np.ndarray, d_ff: np.ndarray) -> np.ndarray:
    """Sum of d_ff over the layers, exact; 0 where the taper does not fit."""
    if problem.taper is None:
        return layers * d_ff
    first, place = distinct(layers, d_ff)
    sums = np.zeros(len(first), dtype=np.int64)
    for position, row in enumerate(first):
        try:
            sums[position] = sum(problem.layer_widths(int(d_ff[row]), int(layers[row])))
        except ValueError:
            continue
    return sums[place]
