"""Parameters, FLOPs, cache and activations of a shape, without building it.

Conventions: `non_embedding` is the weight matrices of attention (gates and persistent tokens included) and FFN, as in
the papers' sizes; no norms, no biases, no output head. FLOPs count two per multiply-accumulate of every matrix applied
to a token, the output head included and the embedding lookup not, plus the attention term of PaLM (arXiv 2204.02311,
appendix B); training is three times the forward pass.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import olmo_ext.shapes.types  # noqa: F401  (registers the built-in types)
from olmo_ext.shapes.layers import LayerShape, ModelShape
from olmo_ext.shapes.registry import ATTENTION_TYPES, FFN_TYPES, Matrix


@dataclass(frozen=True, kw_only=True)
class ShapeCounts:
    """Exact counts of a built model, by group."""

    embedding: int
    """Token table, and the position table where there is one."""

    attention: int
    """Every parameter of the mixers but QK-norm: matrices, biases, scales."""

    ffn: int
    norm: int
    """All norms, QK-norm included."""

    head: int
    """The output projection; 0 when it is tied to the embedding."""

    attention_matrices: int
    ffn_matrices: int
    forward_flops_per_token: float
    training_flops_per_token: float
    """6 (non_embedding + head matrix) + 12 L heads head_dim S for softmax attention: no causal discount."""

    training_flops_per_token_causal: float
    """The same with only the attended half of the positions."""

    kv_cache_elements_per_token: int
    state_elements: int
    """Decoding state per sequence that does not grow with its length."""

    activation_elements_per_token: int
    """Elements that the layers keep for the backward pass without checkpointing (embedding and logits not counted)."""

    @property
    def non_embedding(self) -> int:
        return self.attention_matrices + self.ffn_matrices

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.ffn + self.norm + self.head

    def parameters(self) -> dict[str, int]:
        """Parameters by group, with the two sums."""
        groups = {name: getattr(self, name) for name in ("embedding", "attention", "ffn", "norm", "head")}
        return groups | {"non_embedding": self.non_embedding, "total": self.total}

    def to_json(self) -> dict[str, Any]:
        """The counts part of a run's `shape.json`; the cache in bytes of a 2-byte type, the state of fp32."""
        return {
            "parameters": self.parameters(),
            "flops_per_token": {
                "forward": self.forward_flops_per_token,
                "training": self.training_flops_per_token,
                "training_causal": self.training_flops_per_token_causal,
            },
            "kv_cache_bytes_per_token": 2 * self.kv_cache_elements_per_token,
            "state_bytes": 4 * self.state_elements,
            "activation_elements_per_token": self.activation_elements_per_token,
        }

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _size(matrices: list[Matrix]) -> tuple[int, int]:
    """Weights, and outputs (the size of the biases)."""
    return sum(rows * columns for rows, columns in matrices), sum(rows for rows, _ in matrices)


@dataclass(frozen=True, kw_only=True)
class LayerCounts:
    """One layer's share."""

    attention_matrices: int
    """Tables included."""

    attention_tables: int
    """Weights that no token is multiplied with."""

    ffn_matrices: int
    attention: int
    ffn: int
    norm: int
    waiting: int
    """Parameters, norms included, of the sub-MLPs with an update period above 1: gradients of several steps are summed
    for them."""

    mixing_flops: float
    mixing_flops_causal: float
    cache_elements: int
    state_elements: int
    norm_activations: int
    """Elements per token kept for the backward pass by the layer's norms: input, normalised, scaled (RMSNorm as OLMo
    writes it)."""

    attention_activations: int
    ffn_activations: int

    @property
    def activation_elements(self) -> int:
        return self.norm_activations + self.attention_activations + self.ffn_activations


def count_layer(layer: LayerShape, shape: ModelShape) -> LayerCounts:
    """Counts of one layer of `shape`."""
    d_model, spec, mixer = shape.d_model, layer.ffn, layer.attention
    attention_type, ffn_type = ATTENTION_TYPES.get(mixer.type), FFN_TYPES.get(spec.type)
    bias = int(shape.include_bias)
    attention_tables = attention_type.table_parameters(d_model, mixer)
    attention_matrices = _size(attention_type.matrices(d_model, mixer))[0] + attention_tables
    attention = attention_matrices + attention_type.vector_parameters(d_model, mixer)
    attention += attention_type.bias_parameters(d_model, mixer, include_bias=shape.include_bias)
    per_feature = int(shape.layer_norm_with_affine) * (1 + int(shape.bias_for_layer_norm))
    ffn_matrices = ffn = waiting = 0
    attention_activations = attention_type.activation_elements(d_model, mixer)
    if shape.attention_layer_norm:
        attention_activations += attention_type.qk_norm_features(mixer)
    ffn_activations = 0
    for d_ff, period in zip(spec.d_ff, ffn_type.update_periods(spec), strict=True):
        matrices, outputs = _size(ffn_type.matrices(d_model, d_ff, spec))
        parameters = matrices + bias * outputs + ffn_type.vector_parameters(d_model, d_ff, spec)
        ffn_matrices += matrices
        ffn += parameters
        waiting += parameters + d_model * per_feature if period > 1 else 0
        ffn_activations += ffn_type.activation_elements(d_model, d_ff, spec)
    norm = ((1 + spec.num_sub_mlps) * d_model + attention_type.norm_features(d_model, mixer)) * per_feature
    if shape.attention_layer_norm and shape.attention_layer_norm_with_affine:
        norm += attention_type.qk_norm_features(mixer) * (1 + int(shape.bias_for_layer_norm))
    length = shape.max_sequence_length
    return LayerCounts(
        attention_matrices=attention_matrices,
        attention_tables=attention_tables,
        ffn_matrices=ffn_matrices,
        attention=attention,
        ffn=ffn,
        norm=norm,
        waiting=waiting,
        mixing_flops=attention_type.mixing_flops(d_model, mixer, length),
        mixing_flops_causal=attention_type.mixing_flops(d_model, mixer, length, causal=True),
        cache_elements=attention_type.cache_elements_per_token(mixer),
        state_elements=attention_type.state_elements(d_model, mixer),
        norm_activations=3 * d_model * (1 + spec.num_sub_mlps),
        attention_activations=attention_activations,
        ffn_activations=ffn_activations,
    )


def count_layers(shape: ModelShape) -> list[LayerCounts]:
    """Counts per layer; equal layers are counted once."""
    known: list[tuple[LayerShape, LayerCounts]] = []
    result = []
    for layer in shape.layers:
        layer_counts = next((counts for seen, counts in reversed(known) if seen == layer), None)
        if layer_counts is None:
            layer_counts = count_layer(layer, shape)
            known.append((layer, layer_counts))
        result.append(layer_counts)
    return result


def count(shape: ModelShape) -> ShapeCounts:
    """All counts of a shape.

    :raises InputError: for a type that is not registered.
    """
    layers = count_layers(shape)
    d_model, rows = shape.d_model, shape.embedding_size
    per_feature = int(shape.layer_norm_with_affine) * (1 + int(shape.bias_for_layer_norm))
    head = 0 if shape.weight_tying else rows * d_model + int(shape.include_bias) * rows
    attention_matrices = sum(layer.attention_matrices for layer in layers)
    ffn_matrices = sum(layer.ffn_matrices for layer in layers)
    # A tied head has no parameters of its own and costs the same product.
    multiplied = attention_matrices - sum(layer.attention_tables for layer in layers) + ffn_matrices
    products = 2.0 * (multiplied + rows * d_model)
    forward = products + sum(layer.mixing_flops for layer in layers)
    forward_causal = products + sum(layer.mixing_flops_causal for layer in layers)
    return ShapeCounts(
        embedding=rows * d_model + int(shape.positional_embedding) * shape.max_sequence_length * d_model,
        attention=sum(layer.attention for layer in layers),
        ffn=sum(layer.ffn for layer in layers),
        norm=sum(layer.norm for layer in layers) + d_model * per_feature * (1 + int(shape.embedding_layer_norm)),
        head=head,
        attention_matrices=attention_matrices,
        ffn_matrices=ffn_matrices,
        forward_flops_per_token=forward,
        training_flops_per_token=3 * forward,
        training_flops_per_token_causal=3 * forward_causal,
        kv_cache_elements_per_token=sum(layer.cache_elements for layer in layers),
        state_elements=sum(layer.state_elements for layer in layers),
        activation_elements_per_token=sum(layer.activation_elements for layer in layers),
    )
