"""Norms and softmax attention of OLMo-style models: over everything, or over a window. Needs torch alone.

B batch, T new positions, S past and new positions, H heads, D head_dim.
"""

import torch
import torch.nn.functional as F
from torch import nn


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

    def extra_repr(self):
        return f"{self.size}, eps={self.eps}"


class OlmoExtLayerNorm(OlmoExtRMSNorm):
    """Mean and variance normalisation with the same parameters."""

    def forward(self, x):
        return F.layer_norm(x, (self.size,), weight=self.weight, bias=self.bias, eps=self.eps)


def make_norm(config, size, *, affine):
    kind = OlmoExtRMSNorm if config.norm_type == "rms" else OlmoExtLayerNorm
    return kind(size, eps=config.norm_eps, affine=affine, bias=config.norm_bias)


def rotate(x, cos, sin):
    """RoPE on the pairs (i, i + D/2) of [B, H, T, D]; cos and sin are [B, 1, T, D/2], fp32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class OlmoExtHeads(nn.Module):
    """Queries, keys and values of one layer's own heads, with QK-norm and RoPE."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx, self.head_dim, self.clip = layer_idx, config.head_dim, config.clip_qkv
        self.num_heads, self.num_kv_heads = config.layer_heads(layer_idx), config.layer_kv_heads(layer_idx)
        self.width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.width, bias=config.use_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.use_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.use_bias)
        self.q_norm = make_norm(config, self.width, affine=config.qk_norm_affine) if config.qk_norm else None
        self.k_norm = make_norm(config, kv_width, affine=config.qk_norm_affine) if config.qk_norm else None

    def project(self, x, angles):
        """[B, T, d] -> q [B, H, T, D], k and v [B, key-value heads, T, D]."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.clip is not None:
            q, k, v = (t.clamp(-self.clip, self.clip) for t in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for t in (q, k, v))
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        return q, k, v

    def shared(self, *tensors):
        """Each key-value head once for every head that reads it."""
        times = self.num_heads // self.num_kv_heads
        return [t if times == 1 else t.repeat_interleave(times, dim=1) for t in tensors]


class OlmoExtAttention(OlmoExtHeads):
    """Causal softmax attention, with a sigmoid gate on its output where the layer has one."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.o_proj = nn.Linear(self.width, config.hidden_size, bias=config.use_bias)
        self.gate_proj = None
        if config.attention_types[layer_idx] == "gated":
            self.headwise, self.gate_scale = config.attention_gate == "headwise", config.gate_scale
            gates = self.num_heads if self.headwise else self.width
            self.gate_proj = nn.Linear(config.hidden_size, gates, bias=config.use_bias)

    def forward(self, x, *, angles, mask, keep, cache):
        q, k, v = self.project(x, angles)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        k, v = self.shared(k, v)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        mixed = mixed.transpose(1, 2)  # [B, T, H, D]
        if self.gate_proj is not None:
            gate = (torch.sigmoid(self.gate_proj(x).float()) * self.gate_scale).to(mixed.dtype)
            mixed = mixed * (gate.unsqueeze(-1) if self.headwise else gate.view_as(mixed))
        return self.o_proj(mixed.flatten(2))


class OlmoExtWindow(OlmoExtHeads):
    """Softmax attention over the last `window` tokens, with learned keys that are always in sight."""

    def __init__(self, config, layer_idx, window):
        super().__init__(config, layer_idx)
        self.window = window

    def forward(self, x, *, angles, keep, persistent, past):
        """
        :param keep: [B, S] False for padding, or None.
        :param persistent: [P, d] inputs that stand before the sequence, or None.
        :param past: keys and values of the last `window - 1` tokens, or None.
        :returns: [B, T, H * D], and what the next call needs.
        """
        q, k, v = self.project(x, angles)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        time, length = q.shape[2], k.shape[2]
        first = max(0, length - self.window + 1)
        present = (k[:, :, first:], v[:, :, first:])
        extra = None
        if persistent is not None:
            _, *extra = self.project(persistent.to(x.dtype).unsqueeze(0), None)
            extra = [t.expand(len(x), -1, -1, -1) for t in self.shared(*extra)]
        k, v = self.shared(k, v)
        keep = None if keep is None else keep[:, None, None, -length:]
        # A window of queries at a time, so that work and memory grow linearly with the sequence.
        blocks = [
            self.block(q, k, v, keep, extra, start=start, end=min(start + self.window, time))
            for start in range(0, time, self.window)
        ]
        return torch.cat(blocks, dim=2).transpose(1, 2).flatten(2), present

    def block(self, q, k, v, keep, extra, *, start, end):
        """Queries [start, end) against the keys that any of them sees."""
        past = k.shape[2] - q.shape[2]
        low, high = max(0, past + start - self.window + 1), past + end
        rows, columns = torch.arange(past + start, high, device=q.device), torch.arange(low, high, device=q.device)
        distance = rows[:, None] - columns
        mask = ((distance >= 0) & (distance < self.window))[None, None]
        if keep is not None:
            # A padding position looks at itself, or its softmax would have nothing to divide by.
            mask = mask & keep[..., low:high] | (distance == 0)
        k, v = k[:, :, low:high], v[:, :, low:high]
        if extra is not None:
            k, v = torch.cat((extra[0], k), dim=2), torch.cat((extra[1], v), dim=2)
            mask = F.pad(mask, (extra[0].shape[2], 0), value=True)
        return F.scaled_dot_product_attention(q[:, :, start:end], k, v, attn_mask=mask)
