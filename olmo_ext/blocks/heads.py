"""Queries, keys and values of a layer's own heads, RoPE, and the gate on what the heads return.

Needs torch alone: an exported Hugging Face folder runs a copy of this very file.

B batch, T new tokens, H heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, full_precision: bool = True) -> Tensor:
    """RoPE on the pairs (i, i + D/2) of [B, H, T, D].

    :param cos: [B or 1, 1, T, D/2] in fp32, as `sin`.
    :param full_precision: compute in fp32 whatever the type of x.
    """
    wide = torch.promote_types(x.dtype, torch.float32) if full_precision else x.dtype
    cos, sin = cos.to(wide), sin.to(wide)
    with torch.autocast(x.device.type, enabled=False):
        first, second = x.to(wide).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def gated(mixed: Tensor, gate: Tensor, *, scale: float) -> Tensor:
    """`mixed` times `scale * sigmoid(gate)`.

    :param mixed: what the heads return, [B, T, H * D].
    :param gate: of the same shape, or [B, T, H] for one gate per head.
    """
    # The sigmoid is in fp32 whatever autocast does: a bf16 gate near 1 has steps of 0.4 %.
    open_part = (torch.sigmoid(gate.float()) * scale).to(mixed.dtype)
    if gate.shape != mixed.shape:
        return (mixed.unflatten(-1, (gate.shape[-1], -1)) * open_part.unsqueeze(-1)).flatten(-2)
    return mixed * open_part


class Heads(nn.Module):
    """The projections to queries, keys and values, clipping, and QK-norm over the whole vectors of all heads."""

    def __init__(
        self,
        *,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        bias: bool,
        fused: bool = True,
        make_norm: Callable[[int], nn.Module] | None = None,
        clip: float | None = None,
        device: str | None = None,
    ) -> None:
        """
        :param fused: one matrix `att_proj` holds q, k and v one above the other, as OLMo's does; otherwise they are
            `q_proj`, `k_proj` and `v_proj`, as in Hugging Face models.
        :param make_norm: makes the QK-norm of vectors of a width; None leaves it out.
        :param clip: q, k and v are clipped to +-`clip`.
        """
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim, self.clip = n_heads, n_kv_heads, head_dim, clip
        self.fused = fused
        self.fused_dims = (n_heads * head_dim, n_kv_heads * head_dim, n_kv_heads * head_dim)
        if fused:
            self.att_proj = nn.Linear(d_model, sum(self.fused_dims), bias=bias, device=device)
        else:
            self.q_proj, self.k_proj, self.v_proj = (
                nn.Linear(d_model, width, bias=bias, device=device) for width in self.fused_dims
            )
        self.q_norm, self.k_norm = (None if make_norm is None else make_norm(width) for width in self.fused_dims[:2])

    def qkv(self, h: Tensor) -> list[Tensor]:
        """q [B, T, H * D], k and v [B, T, key-value heads * D], clipped."""
        if self.fused:
            parts = self.att_proj(h).split(self.fused_dims, dim=-1)
        else:
            parts = self.q_proj(h), self.k_proj(h), self.v_proj(h)
        return [part if self.clip is None else part.clamp(min=-self.clip, max=self.clip) for part in parts]

    def by_head(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """QK-norm, then q [B, H, T, D], k and v [B, key-value heads, T, D]."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(k.dtype), self.k_norm(k).to(k.dtype)
        return [part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (q, k, v)]

    def for_every_head(self, *tensors: Tensor) -> list[Tensor]:
        """Keys or values [B, key-value heads, T, D] once for every head that reads them, [B, H, T, D]."""
        times = self.n_heads // self.n_kv_heads
        return [tensor if times == 1 else tensor.repeat_interleave(times, dim=1) for tensor in tensors]
