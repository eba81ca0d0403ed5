"""What `solve` is asked and what it answers, as plain data."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from olmo_ext.base.quantities import EQUAL_WITHIN
from olmo_ext.shapes.layers import AttentionSpec, FFNSpec, LayerShape, ModelShape
from olmo_ext.shapes.taper import Taper, taper_widths

Interval = tuple[float, float]
"""Smallest and largest value allowed."""

HEAD_DIMS = (64, 128, 96, 80, 112, 72, 88, 104, 120, 56, 48, 40, 32, 24, 16)
"""Head sizes tried in this order where none is asked for: the first that divides d_model, into four heads or more."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is fixed and what is free. None leaves a quantity free."""

    quantity: str
    """What the budget counts: non_embedding, total or training_flops_per_token."""

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
    """What d_ff is a multiple of."""

    ratio: Interval | None = None
    """d_ff / d_model; a single value means the multiple nearest to it."""

    total_ratio: Interval | None = None
    """num_sub_mlps * d_ff / d_model."""

    attention: Interval | None = None
    """Weights of all attention matrices."""

    ffn: Interval | None = None
    """Weights of all FFN matrices."""

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

    def head_choices(self, d_model: int) -> list[tuple[int, int]]:
        """(heads, head_dim) to look at for a d_model; rotary embeddings turn pairs, so head_dim is even."""
        choices: Iterable[tuple[int, int]]
        if self.heads and self.head_dim:
            choices = itertools.product(self.heads, self.head_dim)
        elif self.heads:
            choices = [(heads, d_model // heads) for heads in self.heads if d_model % heads == 0]
        elif self.head_dim:
            choices = [(d_model // dim, dim) for dim in self.head_dim if d_model % dim == 0]
        else:
            dividing = [dim for dim in HEAD_DIMS if d_model % dim == 0]
            four_or_more = [dim for dim in dividing if d_model // dim >= 4]
            even = sorted((dim for dim in range(2, 257, 2) if d_model % dim == 0), key=lambda dim: abs(dim - 64))
            choices = [(d_model // dim, dim) for dim in (four_or_more or dividing or even)[:1]]
        return [(heads, dim) for heads, dim in choices if heads and dim % 2 == 0 and heads % (self.kv_heads or 1) == 0]

    def attention_spec(self, heads: int, head_dim: int) -> AttentionSpec:
        """The attention of a candidate."""
        return AttentionSpec(
            type=self.attention_type,
            n_heads=heads,
            n_kv_heads=self.kv_heads or heads,
            head_dim=head_dim,
            options=self.attention_options,
        )

    def ffn_spec(self, *d_ff: int) -> FFNSpec:
        """The FFN of a candidate's layer, from the width of each sub-MLP."""
        return FFNSpec(type=self.ffn_type, d_ff=d_ff, activation=self.activation, options=self.ffn_options)

    def layer_widths(self, d_ff: int, layers: int) -> tuple[int, ...]:
        """d_ff of each layer, tapered or not.

        :raises ValueError: where the taper does not fit the layers or a width would be 0.
        """
        if self.taper is None:
            return (d_ff,) * layers
        return taper_widths(base=d_ff, num_layers=layers, taper=self.taper).widths

    def model(self, d_model: int, layers: tuple[LayerShape, ...]) -> ModelShape:
        """A model of these layers with the embedding, sequence length and norms that are asked for."""
        return ModelShape(
            d_model=d_model,
            layers=layers,
            embedding_size=self.embedding_size,
            max_sequence_length=self.max_sequence_length,
            weight_tying=self.weight_tying,
            attention_layer_norm=self.qk_norm,
        )


@dataclass(frozen=True, kw_only=True)
class Solution:
    """One shape with exact counts, or many: then each value is an array with one entry per shape."""

    layers: int
    d_model: int
    num_sub_mlps: int
    d_ff: int
    heads: int
    head_dim: int
    attention: int
    ffn: int
    actual: int
    """The budget's quantity."""

    deviation: float
    """actual / target - 1."""

    # What constraints bound, by the names of `Problem`.
    tolerance = property(lambda self: abs(self.deviation))
    multiple_of = property(lambda self: self.d_ff & -self.d_ff)
    ratio = property(lambda self: self.d_ff / self.d_model)
    total_ratio = property(lambda self: self.num_sub_mlps * self.d_ff / self.d_model)
    attention_share = property(lambda self: self.attention / (self.attention + self.ffn))
    aspect = property(lambda self: self.d_model / self.layers)

    @property
    def alignment(self) -> Any:
        """Largest power of two, up to 128, that divides d_model, d_ff and the attention's width."""
        return np.gcd(np.gcd(self.d_model, self.d_ff), np.gcd(self.heads * self.head_dim, 128))

    def rows(self, index: Any) -> Solution:
        """The shapes at an index, or of a mask; of a single number the one shape, in Python's own numbers."""
        picked = {name: column[index] for name, column in vars(self).items()}
        return Solution(**{name: value.item() if value.ndim == 0 else value for name, value in picked.items()})


def shape_of(problem: Problem, solution: Solution) -> ModelShape:
    """The full shape of a solution, as a config would resolve it."""
    attention = problem.attention_spec(solution.heads, solution.head_dim)
    return problem.model(
        solution.d_model,
        tuple(
            LayerShape(ffn=problem.ffn_spec(*(width,) * solution.num_sub_mlps), attention=attention)
            for width in problem.layer_widths(solution.d_ff, solution.layers)
        ),
    )
