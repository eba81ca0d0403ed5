"""A model's shape as plain data: one entry per layer, nothing left to a rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FFNSpec:
    """One layer's feed-forward part: one or more sub-MLPs, each with its own norm and residual."""

    type: str
    """A name in `olmo_ext.shapes.registry.FFN_TYPES`."""

    d_ff: tuple[int, ...]
    """Inner width of one branch, per sub-MLP (what Hugging Face calls `intermediate_size`)."""

    activation: str = "swiglu"
    """`swiglu` (three matrices a sub-MLP), `gelu` or `relu` (two)."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the type itself."""

    @property
    def num_sub_mlps(self) -> int:
        return len(self.d_ff)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One layer's token mixer."""

    type: str
    """A name in `olmo_ext.shapes.registry.ATTENTION_TYPES`."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """`n_heads * head_dim`, which need not be d_model."""
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    ffn: FFNSpec
    attention: AttentionSpec


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Everything that parameter counts, FLOPs and memory follow from."""

    d_model: int
    layers: tuple[LayerShape, ...]
    embedding_size: int
    """Rows of the embedding table (the vocabulary, padded)."""

    max_sequence_length: int
    weight_tying: bool = False
    include_bias: bool = False
    bias_for_layer_norm: bool = False
    layer_norm_with_affine: bool = True
    attention_layer_norm: bool = False
    """QK-norm, over the whole q (k) vector."""

    attention_layer_norm_with_affine: bool = True
    embedding_layer_norm: bool = False
    positional_embedding: bool = False
    """A learned position table (neither RoPE nor ALiBi)."""

    norm_after: bool = False

    @property
    def n_layers(self) -> int:
        return len(self.layers)
