"""Which torch module computes a registered type: what the type itself builds, or, for a built-in type and the
subclasses of one, the module that stands for its class here."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from torch import nn

from olmo_ext.base.errors import InputError
from olmo_ext.blocks.attention import GatedAttention, SoftmaxAttention
from olmo_ext.blocks.mlp import MLP
from olmo_ext.blocks.titans_mixer import TitansMixer
from olmo_ext.shapes.layers import AttentionSpec, FFNSpec
from olmo_ext.shapes.registry import ATTENTION_TYPES, FFN_TYPES
from olmo_ext.shapes.types.conventional import MLPType
from olmo_ext.shapes.types.gated import GatedAttentionType
from olmo_ext.shapes.types.softmax import SoftmaxAttentionType
from olmo_ext.shapes.types.titans import TitansType, sizes_of


def ffn_module(d_model: int, d_ff: int, spec: FFNSpec, config: Any) -> nn.Module:
    """One sub-MLP of an FFN type; arguments as in `FFNType.build`."""
    kind = FFN_TYPES.get(spec.type)
    module = kind.build(d_model, d_ff, spec, config)
    return _built_in_ffn(kind, d_model, d_ff, spec, config) if module is None else module


def attention_module(d_model: int, spec: AttentionSpec, config: Any, layer_id: int, cache: Any) -> nn.Module:
    """The mixer of one layer; arguments as in `AttentionType.build`."""
    kind = ATTENTION_TYPES.get(spec.type)
    module = kind.build(d_model, spec, config, layer_id, cache)
    return _built_in_attention(kind, d_model, spec, config, cache) if module is None else module


@singledispatch
def _built_in_ffn(kind: Any, d_model: int, d_ff: int, spec: FFNSpec, config: Any) -> nn.Module:
    raise InputError(f"FFN type {spec.type!r} builds no module", right="its `build` returns a torch.nn.Module")


@_built_in_ffn.register
def _(kind: MLPType, d_model: int, d_ff: int, spec: FFNSpec, config: Any) -> nn.Module:
    return MLP(d_model=d_model, d_ff=d_ff, activation=spec.activation, config=config)


@singledispatch
def _built_in_attention(kind: Any, d_model: int, spec: AttentionSpec, config: Any, cache: Any) -> nn.Module:
    raise InputError(f"attention type {spec.type!r} builds no module", right="its `build` returns a torch.nn.Module")


@_built_in_attention.register
def _(kind: SoftmaxAttentionType, d_model: int, spec: AttentionSpec, config: Any, cache: Any) -> nn.Module:
    return SoftmaxAttention(d_model=d_model, spec=spec, config=config, cache=cache)


@_built_in_attention.register
def _(kind: GatedAttentionType, d_model: int, spec: AttentionSpec, config: Any, cache: Any) -> nn.Module:
    return GatedAttention(d_model=d_model, spec=spec, config=config, cache=cache)


@_built_in_attention.register
def _(kind: TitansType, d_model: int, spec: AttentionSpec, config: Any, cache: Any) -> nn.Module:
    return TitansMixer(d_model=d_model, spec=spec, sizes=sizes_of(spec), config=config, cache=cache)
