"""Causal softmax attention over the last tokens alone, with learned keys that are always in sight."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from olmo_ext.base.errors import InputError
from olmo_ext.blocks.attention import head_norms, rotary_embedding, split_clipped
from olmo_ext.shapes.layers import AttentionSpec

KeysValues = tuple[torch.Tensor, torch.Tensor]


class WindowAttention(nn.Module):
    """q, k, v, QK-norm and RoPE as OLMo's attention; each token sees itself and the `window - 1` tokens before it.

    A sequence longer than the window is cut into blocks of a window that look at themselves and the block before, so
    that work grows linearly. Persistent tokens have keys and values at the first token's position, and every token sees
    them at any distance. There is no output projection here.
    """

    def __init__(self, *, d_model: int, spec: AttentionSpec, window: int, config: Any, cache: Any) -> None:
        super().__init__()
        if config.alibi:
            raise InputError("ALiBi is not made for a window", where="model.alibi", right="rope: true")
        self.config, self.spec, self.window = config, spec, window
        self.fused_dims = (spec.width, spec.kv_width, spec.kv_width)
        self.att_proj = nn.Linear(d_model, sum(self.fused_dims), bias=config.include_bias, device=config.init_device)
        self.q_norm, self.k_norm = head_norms(config, spec)
        self.rotary_emb = rotary_embedding(config, spec, cache)

    def project(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v, each [B, heads, T, head_dim]."""
        q, k, v = split_clipped(self.att_proj(h), self.fused_dims, self.config.clip_qkv)
        dtype = k.dtype
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(dtype=dtype), self.k_norm(k).to(dtype=dtype)
        q, k, v = (tensor.unflatten(-1, (-1, self.spec.head_dim)).transpose(1, 2) for tensor in (q, k, v))
        return q, k, v

    def forward(
        self,
        h: torch.Tensor,
        past: KeysValues | None,
        keep: torch.Tensor | None,
        persistent: torch.Tensor | None,
        *,
        start: int,
    ) -> tuple[torch.Tensor, KeysValues]:
        """
        :param past: keys and values of the last `window - 1` tokens, or fewer at the start.
        :param keep: [B, start + T] False for padding; None where nothing is padded.
        :param start: tokens before these.
        :param persistent: [P, d_model].
        :returns: [B, T, heads * head_dim], and what the next call needs.
        """
        batch, time, _ = h.shape
        q, k, v = self.project(h)
        if self.rotary_emb is not None:
            q, k = self._rotate(q, k, keep, start)
        if past is not None:
            k = torch.cat((past[0].to(k.dtype), k), dim=2)
            v = torch.cat((past[1].to(v.dtype), v), dim=2)
        length = k.shape[2]
        last = length - min(length, self.window - 1)
        present = (k[:, :, last:], v[:, :, last:])
        extra = None
        if persistent is not None:
            _, extra_k, extra_v = self.project(persistent.to(h.dtype).unsqueeze(0))
            extra = (extra_k, extra_v)
        if keep is not None:
            keep = keep[:, -length:]
        shared = self.spec.n_heads // self.spec.n_kv_heads
        if shared > 1:
            k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
            if extra is not None:
                extra = (extra[0].repeat_interleave(shared, dim=1), extra[1].repeat_interleave(shared, dim=1))
        if past is None and length > self.window:
            mixed = self._blocks(q, k, v, keep, extra)
        else:
            mixed = self._whole(q, k, v, keep, extra)
        return mixed.transpose(1, 2).reshape(batch, time, self.spec.width), present

    def _rotate(
        self, q: torch.Tensor, k: torch.Tensor, keep: torch.Tensor | None, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """RoPE at the tokens' own positions; padding has none, so that persistent tokens stay as far away."""
        assert self.rotary_emb is not None
        end = start + q.shape[2]
        sin, cos = self.rotary_emb.get_rotary_embedding(end, q.device)
        if keep is None:
            sin, cos = sin[:, :, start:end], cos[:, :, start:end]
        else:
            positions = (keep.long().cumsum(1) - 1).clamp(min=0)[:, start:end]
            sin, cos = sin[0, 0][positions].unsqueeze(1), cos[0, 0][positions].unsqueeze(1)
        wide = torch.promote_types(q.dtype, torch.float32) if self.config.rope_full_precision else q.dtype
        sin, cos = sin.to(wide), cos.to(wide)
        with torch.autocast(q.device.type, enabled=False):
            turned = (self.rotary_emb.apply_rotary_pos_emb(sin, cos, x.to(wide)).to(x.dtype) for x in (q, k))
            q, k = turned
        return q, k

    def _dropout(self) -> float:
        return self.config.attention_dropout if self.training else 0.0

    def _whole(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor | None, extra: KeysValues | None
    ) -> torch.Tensor:
        """Every query against every key, masked."""
        time, length = q.shape[2], k.shape[2]
        if keep is None and extra is None and time == length <= self.window:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=self._dropout(), is_causal=True)
        distance = torch.arange(length - time, length, device=q.device)[:, None] - torch.arange(length, device=q.device)
        mask = ((distance >= 0) & (distance < self.window))[None, None]
        if keep is not None:
            # A padded query sees itself: a softmax over nothing would be NaN, and spread.
            mask = (mask & keep[:, None, None]) | (distance == 0)
        return self._attend(q, k, v, mask, extra)

    def _blocks(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor | None, extra: KeysValues | None
    ) -> torch.Tensor:
        """Blocks of a window against themselves and the block before, folded into the batch."""
        batch, heads, time, dim = q.shape
        size = self.window
        number = -(-time // size)
        missing = number * size - time

        def fold(x: torch.Tensor) -> torch.Tensor:
            return x.transpose(1, 2).reshape(batch * number, size, heads, dim).transpose(1, 2)

        def pairs(x: torch.Tensor) -> torch.Tensor:
            """[B, H, T, D] -> [B * blocks, H, 2 size, D]."""
            blocks = F.pad(x, (0, 0, size, missing)).unfold(2, 2 * size, size)
            return blocks.permute(0, 2, 1, 4, 3).reshape(batch * number, heads, 2 * size, dim)

        distance = torch.arange(size, 2 * size, device=q.device)[:, None] - torch.arange(2 * size, device=q.device)
        near = (distance >= 0) & (distance < size)
        there = torch.ones(1, time, dtype=torch.bool, device=q.device) if keep is None else keep
        there = F.pad(there, (size, missing)).unfold(1, 2 * size, size)
        mask = (near & there.unsqueeze(2)) | (distance == 0)
        mask = mask.expand(batch, -1, -1, -1).reshape(batch * number, 1, size, 2 * size)
        if extra is not None:
            extra = (extra[0].expand(batch * number, -1, -1, -1), extra[1].expand(batch * number, -1, -1, -1))
        mixed = self._attend(fold(F.pad(q, (0, 0, 0, missing))), pairs(k), pairs(v), mask, extra)
        return mixed.transpose(1, 2).reshape(batch, number * size, heads, dim).transpose(1, 2)[:, :, :time]

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, extra: KeysValues | None
    ) -> torch.Tensor:
        if extra is not None:
            k = torch.cat((extra[0].expand(q.shape[0], -1, -1, -1).to(k.dtype), k), dim=2)
            v = torch.cat((extra[1].expand(q.shape[0], -1, -1, -1).to(v.dtype), v), dim=2)
            mask = F.pad(mask, (extra[0].shape[2], 0), value=True)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self._dropout())
