"""Norms and softmax attention of OLMo-style models. Needs torch and its neighbour alone."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from olmo_ext.blocks.heads import Heads, gated, rotate


class OlmoExtRMSNorm(nn.Module):
    """x / rms(x), computed in fp32, then scale and bias where there are any."""

    def __init__(self, size, *, eps, affine, bias):
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.ones(size)) if affine else None
        self.bias = nn.Parameter(torch.zeros(size)) if affine and bias else None

    def forward(self, x):
        wide = x.float()
        x = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        if self.weight is not None:
            x = self.weight * x
        return x if self.bias is None else x + self.bias


class OlmoExtLayerNorm(OlmoExtRMSNorm):
    """Mean and variance normalisation with the same parameters."""

    def forward(self, x):
        return F.layer_norm(x, (self.size,), weight=self.weight, bias=self.bias, eps=self.eps)


def make_norm(config, size, *, affine):
    kind = OlmoExtRMSNorm if config.norm_type == "rms" else OlmoExtLayerNorm
    return kind(size, eps=config.norm_eps, affine=affine, bias=config.norm_bias)


def layer_heads(config, layer_idx):
    """What `Heads` takes for one layer."""
    return {
        "d_model": config.hidden_size,
        "n_heads": config.of_layer("num_attention_heads", layer_idx),
        "n_kv_heads": config.of_layer("num_key_value_heads", layer_idx),
        "head_dim": config.head_dim,
        "bias": config.use_bias,
        "fused": False,
        "make_norm": partial(make_norm, config, affine=config.qk_norm_affine) if config.qk_norm else None,
        "clip": config.clip_qkv,
    }


class OlmoExtAttention(Heads):
    """Causal softmax attention, with a sigmoid gate on its output where the layer has one."""

    def __init__(self, config, layer_idx):
        super().__init__(**layer_heads(config, layer_idx))
        self.layer_idx, width = layer_idx, self.n_heads * self.head_dim
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.use_bias)
        self.gate_proj = None
        if config.attention_types[layer_idx] == "gated":
            self.gate_scale = config.gate_scale
            gates = self.n_heads if config.attention_gate == "headwise" else width
            self.gate_proj = nn.Linear(config.hidden_size, gates, bias=config.use_bias)

    def forward(self, x, *, angles, mask, keep, cache):
        q, k, v = self.by_head(*self.qkv(x))
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        k, v = self.for_every_head(k, v)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        mixed = mixed.transpose(1, 2).flatten(2)
        if self.gate_proj is not None:
            mixed = gated(mixed, self.gate_proj(x), scale=self.gate_scale)
        return self.o_proj(mixed)
