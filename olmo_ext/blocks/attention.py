"""Softmax attention whose heads and head_dim are its own, and the same with a gate on its output."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from olmo.model import BufferCache, LayerNormBase, OLMoBlock, RotaryEmbedding
from torch import nn

from olmo_ext.blocks.heads import Heads, gated
from olmo_ext.shapes.layers import AttentionSpec
from olmo_ext.shapes.types.gated import gate_width

Cache = tuple[torch.Tensor, torch.Tensor]


def cache_for(cache: Any, head_dim: int, default_head_dim: int) -> Any:
    """The buffer cache for one head_dim.

    OLMo keeps one table of RoPE angles for the whole model, under a fixed name: layers of another head_dim get a
    cache of their own inside it.
    """
    if head_dim == default_head_dim:
        return cache
    return cache.setdefault(f"head_dim_{head_dim}", BufferCache())


def heads_like_olmo(d_model: int, spec: AttentionSpec, config: Any) -> dict[str, Any]:
    """What `Heads` takes, as OLMo's config asks for it."""

    def make_norm(width: int) -> LayerNormBase:
        return LayerNormBase.build(config, size=width, elementwise_affine=config.attention_layer_norm_with_affine)

    return {
        "d_model": d_model,
        "n_heads": spec.n_heads,
        "n_kv_heads": spec.n_kv_heads,
        "head_dim": spec.head_dim,
        "bias": config.include_bias,
        "make_norm": make_norm if config.attention_layer_norm else None,
        "clip": config.clip_qkv,
        "device": config.init_device,
    }


def rotary_embedding(config: Any, spec: AttentionSpec, cache: Any) -> RotaryEmbedding | None:
    """RoPE for the layer's own head_dim; None without `rope`."""
    if not config.rope:
        return None
    # OLMo's RoPE takes its dimension from d_model // n_heads of the config it is given.
    own = dataclasses.replace(config, d_model=spec.width, n_heads=spec.n_heads)
    return RotaryEmbedding(own, cache_for(cache, spec.head_dim, config.d_model // config.n_heads))


class SoftmaxAttention(Heads):
    """Projections and QK-norm (`Heads`), RoPE, causal softmax attention, output projection.

    B batch, T new tokens, H heads, D head_dim.
    """

    def __init__(self, *, d_model: int, spec: AttentionSpec, config: Any, cache: Any) -> None:
        super().__init__(**heads_like_olmo(d_model, spec, config))
        self.config, self.spec = config, spec
        self.attn_out = nn.Linear(spec.width, d_model, bias=config.include_bias, device=config.init_device)
        self.attn_out._is_residual = True  # type: ignore[assignment]
        self.rotary_emb = rotary_embedding(config, spec, cache)
        self.flash_attn_func: Any = None
        self.flash_attn_varlen_func: Any = None
        if config.flash_attention:
            try:
                from flash_attn import flash_attn_func, flash_attn_varlen_func

                self.flash_attn_func, self.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
            except ModuleNotFoundError:
                # As in OLMo: torch's own attention then, which uses the same kernels where it can.
                pass
        self.checkpoint_function: Any = None
        """Set by the block under fine-grained activation checkpointing: recompute the mixing in the backward."""

    def forward(
        self,
        h: torch.Tensor,
        attention_bias: torch.Tensor | None = None,
        layer_past: Cache | None = None,
        use_cache: bool = False,
        max_doc_len: int | None = None,
        cu_doc_lens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Cache | None]:
        q, k, v = self.qkv(h)
        arguments = (q, k, v, attention_bias, layer_past, use_cache, max_doc_len, cu_doc_lens)
        if self.checkpoint_function is None:
            mixed, present = self.mix(*arguments)
        else:
            mixed, present = self.checkpoint_function(self.mix, *arguments)
        return self.attn_out(self.gate(mixed, h)), present

    def gate(self, mixed: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """Where Gated Attention acts: on [B, T, H * D], with the layer's normed input at hand."""
        return mixed

    def mix(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention_bias: torch.Tensor | None,
        layer_past: Cache | None,
        use_cache: bool,
        max_doc_len: int | None,
        cu_doc_lens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Cache | None]:
        """From projections to head outputs side by side, [B, T, H * D], and what decoding keeps (k before RoPE)."""
        time, dtype = q.shape[1], k.dtype
        q, k, v = self.by_head(q, k, v)
        if layer_past is not None:
            k = torch.cat((layer_past[0], k), dim=-2)
            v = torch.cat((layer_past[1], v), dim=-2)
        present = (k, v) if use_cache else None
        length = k.shape[-2]
        if self.rotary_emb is not None:
            q, k = self.rotary_emb(q, k)
        if attention_bias is not None:
            attention_bias = OLMoBlock._cast_attn_bias(attention_bias[:, :, length - time : length, :length], dtype)
        mixed = OLMoBlock._scaled_dot_product_attention(
            self,  # type: ignore[arg-type]  # it reads nothing but the two flash attention functions
            q,
            k,
            v,
            attn_mask=attention_bias,
            dropout_p=self.config.attention_dropout if self.training else 0.0,
            is_causal=attention_bias is None,
            max_doc_len=max_doc_len,
            cu_doc_lens=cu_doc_lens,
        )
        return mixed.transpose(1, 2).flatten(2), present


class GatedAttention(SoftmaxAttention):
    """Softmax attention times `gate_scale * sigmoid(gate_proj(h))`, before the output projection."""

    def __init__(self, *, d_model: int, spec: AttentionSpec, config: Any, cache: Any) -> None:
        super().__init__(d_model=d_model, spec=spec, config=config, cache=cache)
        self.scale = float(spec.options.get("gate_scale", 1.0))
        self.gate_proj = nn.Linear(d_model, gate_width(spec), bias=config.include_bias, device=config.init_device)
        if spec.options.get("gate_init", "normal") == "zero":
            self.gate_proj._is_zero = True  # type: ignore[assignment]

    def gate(self, mixed: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return gated(mixed, self.gate_proj(h), scale=self.scale)
