"""The points that `solve` looks at, as columns, and the widths that the constraints leave at each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import olmo_ext.shapes.types  # noqa: F401  (registers the built-in types)
from olmo_ext.base.errors import InputError
from olmo_ext.shapes.registry import ATTENTION_TYPES, FFN_TYPES, FFNType
from olmo_ext.solve.problem import Interval, Problem, attention_spec, ffn_spec, layer_widths

HEAD_DIMS = (64, 128, 96, 80, 112, 72, 88, 104, 120, 56, 48, 40, 32, 24, 16)
"""Head sizes tried in this order where none is asked for: the first that divides d_model, into four heads or more."""

MAX_PER_POINT = 64
"""Multiples of d_ff kept per point of the grid, those nearest to the budget."""

MAX_POINTS = 4_000_000


@dataclass
class Grid:
    """Columns over all (layers, d_model, num_sub_mlps, heads, head_dim) points."""

    layers: np.ndarray
    d_model: np.ndarray
    sub_mlps: np.ndarray
    heads: np.ndarray
    head_dim: np.ndarray
    attention: np.ndarray
    """Attention weights of all layers."""

    base: np.ndarray
    """Value of the budget's quantity without the FFN's d_ff-dependent part."""

    slope: np.ndarray
    """Growth of the quantity per unit of d_ff."""

    ffn_base: np.ndarray
    ffn_slope: np.ndarray

    def keep(self, mask: np.ndarray) -> Grid:
        return Grid(**{name: column[mask] for name, column in vars(self).items()})


def head_choices(problem: Problem, d_model: int) -> list[tuple[int, int]]:
    """(heads, head_dim) to look at for a d_model."""
    if problem.heads and problem.head_dim:
        return [(h, dim) for h in problem.heads for dim in problem.head_dim]
    if problem.heads:
        return [(h, d_model // h) for h in problem.heads if d_model % h == 0 and d_model // h % 2 == 0]
    if problem.head_dim:
        return [(d_model // dim, dim) for dim in problem.head_dim if d_model % dim == 0]
    # At least four heads where d_model is small; then whatever divides.
    dividing = [dim for dim in HEAD_DIMS if d_model % dim == 0]
    several = [dim for dim in dividing if d_model // dim >= 4]
    even = sorted((dim for dim in range(2, 257, 2) if d_model % dim == 0), key=lambda dim: abs(dim - 64))
    return [(d_model // dim, dim) for dim in (several or dividing or even)[:1]]


def _line(kind: FFNType, size: Callable[[int], int]) -> tuple[int, int]:
    """A size that depends on d_ff as (constant, per unit of d_ff).

    :raises InputError: if it is not linear in d_ff.
    """
    low, high, far = (size(d_ff) for d_ff in (128, 256, 1024))
    slope = (high - low) // 128
    constant = low - 128 * slope
    if slope < 0 or constant + 1024 * slope != far:
        raise InputError(f"FFN type {kind.name!r} does not grow linearly with d_ff", right="solve cannot search it")
    return constant, slope


def _ffn_lines(problem: Problem, d_model: int) -> tuple[int, int, int, int]:
    """Weights of one sub-MLP, then its parameters beside matrices, each as (constant, per unit of d_ff).

    :raises InputError: for a type whose weights do not grow linearly with d_ff.
    """
    kind = FFN_TYPES.get(problem.ffn_type)

    def weights(d_ff: int) -> int:
        return sum(rows * columns for rows, columns in kind.matrices(d_model, d_ff, ffn_spec(problem, (d_ff,))))

    def vectors(d_ff: int) -> int:
        return kind.vector_parameters(d_model, d_ff, ffn_spec(problem, (d_ff,)))

    constant, slope = _line(kind, weights)
    if slope == 0:
        raise InputError(f"FFN type {kind.name!r} does not grow with d_ff", right="solve cannot search it")
    return constant, slope, *_line(kind, vectors)


def make_grid(problem: Problem) -> Grid:
    """Every point, with its coefficients, all exact whole numbers (held in int64 or, for FLOPs, float64)."""
    mixer_type = ATTENTION_TYPES.get(problem.attention_type)
    rows: list[tuple[int, ...]] = []
    for d_model in problem.d_model:
        ffn = _ffn_lines(problem, d_model)
        for heads, head_dim in head_choices(problem, d_model):
            if heads < 1 or head_dim % 2 or (problem.kv_heads and heads % problem.kv_heads):
                continue
            spec = attention_spec(problem, heads, head_dim)
            if mixer_type.check(spec, d_model) is not None:
                continue
            tables = mixer_type.table_parameters(d_model, spec)
            weights = sum(a * b for a, b in mixer_type.matrices(d_model, spec)) + tables
            # Tables are weights that no token is multiplied with: taken off what the weights stand for below.
            mixing = mixer_type.mixing_flops(d_model, spec, problem.max_sequence_length) - 2 * tables
            qk = mixer_type.qk_norm_features(spec) if problem.qk_norm else 0
            qk += mixer_type.norm_features(d_model, spec) + mixer_type.vector_parameters(d_model, spec)
            qk += mixer_type.bias_parameters(d_model, spec, include_bias=False)
            rows.append((d_model, heads, head_dim, weights, int(mixing), qk, *ffn))
    per_width = np.array(rows, dtype=np.int64).reshape(len(rows), 10)
    layers = np.array(problem.layers, dtype=np.int64)
    sub_mlps = np.array(problem.num_sub_mlps, dtype=np.int64)
    if len(rows) * len(layers) * len(sub_mlps) > MAX_POINTS:
        raise InputError(
            f"{len(rows) * len(layers) * len(sub_mlps):,} points to search, at most {MAX_POINTS:,}",
            right="narrower ranges or larger steps",
        )
    i, j, k = (index.ravel() for index in np.meshgrid(*(np.arange(n) for n in (len(rows), len(layers), len(sub_mlps)))))
    columns = per_width[i]
    d_model, heads, head_dim, weights, mixing, qk, constant, slope, beside, beside_slope = columns.T
    count, repeats = layers[j], sub_mlps[k]
    attention = count * weights
    ffn_base, ffn_slope = count * repeats * constant, count * repeats * slope
    head = problem.embedding_size * d_model
    base, per_unit = attention + ffn_base, ffn_slope
    if problem.quantity == "total":
        norms = count * ((1 + repeats) * d_model + qk) + d_model
        base = base + head * (1 if problem.weight_tying else 2) + norms + count * repeats * beside
        per_unit = per_unit + count * repeats * beside_slope
    elif problem.quantity == "training_flops_per_token":
        base, per_unit = 6 * (base + head) + 3 * count * mixing, 6 * ffn_slope
    return Grid(
        layers=count,
        d_model=d_model,
        sub_mlps=repeats,
        heads=heads,
        head_dim=head_dim,
        attention=attention,
        base=base,
        slope=per_unit,
        ffn_base=ffn_base,
        ffn_slope=ffn_slope,
    )


def within(values: np.ndarray, interval: Interval | None) -> np.ndarray:
    if interval is None:
        return np.ones(len(values), dtype=bool)
    return (values >= interval[0] - 1e-9) & (values <= interval[1] + 1e-9)


def _d_ff_bounds(problem: Problem, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Inclusive real bounds on d_ff from everything but the budget's tolerance."""
    low = np.ones(len(grid.layers))
    high = np.full(len(grid.layers), np.inf)

    def cut(interval: Interval | None, per_unit: np.ndarray | float, offset: np.ndarray | float = 0.0) -> None:
        """offset + per_unit * d_ff lies in the interval."""
        nonlocal low, high
        if interval is not None:
            low = np.maximum(low, (interval[0] - offset) / per_unit)
            high = np.minimum(high, (interval[1] - offset) / per_unit)

    cut(problem.d_ff, 1.0)
    if problem.ratio is not None and problem.ratio[0] == problem.ratio[1]:
        exact = problem.ratio[0] * grid.d_model
        nearest = np.round(exact / problem.multiple_of) * problem.multiple_of
        low, high = np.maximum(low, nearest), np.minimum(high, nearest)
    else:
        cut(problem.ratio, 1.0 / grid.d_model)
    cut(problem.total_ratio, grid.sub_mlps / grid.d_model)
    cut(problem.ffn, grid.ffn_slope, grid.ffn_base)
    if problem.attention_share is not None:
        smallest, largest = problem.attention_share
        ffn = (grid.attention * (1 / largest - 1), grid.attention * (1 / max(smallest, 1e-9) - 1))
        low = np.maximum(low, (ffn[0] - grid.ffn_base) / grid.ffn_slope)
        high = np.minimum(high, (ffn[1] - grid.ffn_base) / grid.ffn_slope)
    return low, high


def expand(problem: Problem, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Indices into the grid, and the multiples of d_ff that the constraints leave; tapers are checked exactly after."""
    multiple = problem.multiple_of
    low, high = _d_ff_bounds(problem, grid)
    ideal = (problem.target - grid.base) / grid.slope
    if np.isfinite(problem.tolerance):
        slack = problem.target * problem.tolerance / grid.slope
        if problem.taper is not None:
            # The realised mean may differ from d_ff by half a multiple, which the exact check settles.
            slack = slack + problem.taper.multiple_of
        low, high = np.maximum(low, ideal - slack), np.minimum(high, ideal + slack)
        first = np.ceil((low - 1e-9) / multiple).astype(np.int64)
        last = np.floor((np.minimum(high, 1e9) + 1e-9) / multiple).astype(np.int64)
        centre = np.clip(np.round(ideal / multiple), -1e9, 1e9).astype(np.int64)
        first = np.maximum(np.maximum(first, 1), centre - MAX_PER_POINT // 2)
        last = np.minimum(last, centre + MAX_PER_POINT // 2)
    else:
        # Without a tolerance the multiple nearest to the budget that the other constraints allow is the one.
        lowest = np.maximum(np.ceil((low - 1e-9) / multiple), 1)
        highest = np.floor((np.minimum(high, 1e9) + 1e-9) / multiple)
        first = np.clip(np.round(ideal / multiple), lowest, highest).astype(np.int64)
        last = np.where(lowest <= highest, first, first - 1)
    numbers = np.maximum(last - first + 1, 0)
    index = np.repeat(np.arange(len(numbers)), numbers)
    starts = np.repeat(np.cumsum(numbers) - numbers, numbers)
    return index, (first[index] + np.arange(len(index)) - starts) * multiple


def sums_of_widths(problem: Problem, layers: np.ndarray, d_ff: np.ndarray) -> np.ndarray:
    """Sum of d_ff over layers, exact: tapered widths are made once per distinct (layers, d_ff)."""
    if problem.taper is None:
        return layers * d_ff
    pairs, inverse = np.unique(np.stack([layers, d_ff]), axis=1, return_inverse=True)
    sums = np.empty(pairs.shape[1], dtype=np.int64)
    for position, (count, width) in enumerate(pairs.T):
        try:
            sums[position] = sum(layer_widths(problem, int(width), int(count)))
        except ValueError:
            sums[position] = -1
    return sums[inverse.ravel()]
