"""What `solve` is asked and what it answers, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from olmo_ext.shapes.budget import EQUAL_WITHIN
from olmo_ext.shapes.layers import AttentionSpec, FFNSpec, LayerShape, ModelShape
from olmo_ext.shapes.taper import Taper, taper_widths

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is fixed and what is free. Intervals are inclusive; None leaves a quantity free."""

    quantity: str
    """non_embedding, total or training_flops_per_token."""

    target: int
    tolerance: float = EQUAL_WITHIN
    layers: tuple[int, ...] = tuple(range(2, 49))
    d_model: tuple[int, ...] = tuple(range(64, 8193, 64))
    num_sub_mlps: tuple[int, ...] = (1,)
    heads: tuple[int, ...] | None = None
    head_dim: tuple[int, ...] | None = None
    """Without heads and head_dim the attention is as wide as d_model; with both it has its own width."""

    kv_heads: int | None = None
    d_ff: Interval | None = None
    multiple_of: int = 16
    ratio: Interval | None = None
    """d_ff / d_model; a single value means the multiple nearest to it."""

    total_ratio: Interval | None = None
    """num_sub_mlps * d_ff / d_model."""

    attention: Interval | None = None
    """Weights of all attention matrices."""

    ffn: Interval | None = None
    attention_share: Interval | None = None
    """attention / (attention + FFN)."""

    aspect: Interval | None = None
    """d_model / layers."""

    ffn_type: str = "conventional"
    activation: str = "swiglu"
    ffn_options: Mapping[str, Any] = field(default_factory=dict)
    attention_type: str = "softmax"
    attention_options: Mapping[str, Any] = field(default_factory=dict)
    taper: Taper | None = None
    embedding_size: int = 100_352
    max_sequence_length: int = 4096
    weight_tying: bool = False
    qk_norm: bool = True


@dataclass(frozen=True, kw_only=True)
class Solution:
    """One shape, with exact counts."""

    layers: int
    d_model: int
    num_sub_mlps: int
    d_ff: int
    heads: int
    head_dim: int
    attention: int
    ffn: int
    actual: float
    """The budget's quantity."""

    deviation: float

    @property
    def alignment(self) -> int:
        """Largest power of two, up to 128, that divides d_model, d_ff and the attention's width."""
        return int(np.gcd.reduce([self.d_model, self.d_ff, self.heads * self.head_dim, 128]))


def attention_spec(problem: Problem, heads: int, head_dim: int) -> AttentionSpec:
    """The attention of a candidate."""
    return AttentionSpec(
        type=problem.attention_type,
        n_heads=heads,
        n_kv_heads=problem.kv_heads or heads,
        head_dim=head_dim,
        options=problem.attention_options,
    )


def ffn_spec(problem: Problem, d_ff: tuple[int, ...]) -> FFNSpec:
    """The FFN of a candidate's layer."""
    return FFNSpec(type=problem.ffn_type, d_ff=d_ff, activation=problem.activation, options=problem.ffn_options)


def shape_of(problem: Problem, solution: Solution) -> ModelShape:
    """The full shape of a solution, as a config would resolve it."""
    widths = layer_widths(problem, solution.d_ff, solution.layers)
    mixer = attention_spec(problem, solution.heads, solution.head_dim)
    layers = tuple(
        LayerShape(ffn=ffn_spec(problem, (width,) * solution.num_sub_mlps), attention=mixer) for width in widths
    )
    return ModelShape(
        d_model=solution.d_model,
        layers=layers,
        embedding_size=problem.embedding_size,
        max_sequence_length=problem.max_sequence_length,
        weight_tying=problem.weight_tying,
        attention_layer_norm=problem.qk_norm,
    )


def layer_widths(problem: Problem, d_ff: int, layers: int) -> tuple[int, ...]:
    """d_ff of each layer, tapered or not."""
    if problem.taper is None:
        return (d_ff,) * layers
    return taper_widths(base=d_ff, num_layers=layers, taper=problem.taper).widths
