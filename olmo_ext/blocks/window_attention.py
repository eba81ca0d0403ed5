"""Causal softmax attention over the last tokens alone, with learned keys that are always in sight.

Needs torch and its neighbour alone: an exported Hugging Face folder runs a copy of this very file.

B batch, T new tokens, H heads, D head_dim, P persistent tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from olmo_ext.blocks.heads import Heads, rotate

KeysValues = tuple[Tensor, Tensor]


class WindowAttention(Heads):
    """Each token sees itself and the `window - 1` tokens before it. There is no output projection here.

    More new tokens than the window are cut into blocks of a window that look at themselves and the block before, so
    that work grows linearly. Persistent tokens have keys and values at the first token's position, and every token sees
    them at any distance.
    """

    def __init__(self, *, window: int, dropout: float = 0.0, full_precision: bool = True, **heads: Any) -> None:
        """
        :param dropout: of the attention weights, in training.
        :param full_precision: compute RoPE in fp32.
        :param heads: as `Heads` takes them.
        """
        super().__init__(**heads)
        self.window, self.dropout, self.full_precision = window, dropout, full_precision

    def forward(
        self,
        h: Tensor,
        *,
        angles: tuple[Tensor, Tensor] | None,
        past: KeysValues | None = None,
        keep: Tensor | None = None,
        persistent: Tensor | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """
        :param angles: cos and sin of the new tokens' positions for `rotate`; None without RoPE.
        :param past: keys and values of the last `window - 1` tokens, or fewer at the start.
        :param keep: [B, past + T] False for padding; None where nothing is padded.
        :param persistent: [P, d_model].
        :returns: [B, T, H * D], and what the next call needs.
        """
        q, k, v = self.by_head(*self.qkv(h))
        if angles is not None:
            q, k = (rotate(part, *angles, full_precision=self.full_precision) for part in (q, k))
        if past is not None:
            k = torch.cat((past[0].to(k.dtype), k), dim=2)
            v = torch.cat((past[1].to(v.dtype), v), dim=2)
        length = k.shape[2]
        last = length - min(length, self.window - 1)
        present = (k[:, :, last:], v[:, :, last:])
        extra = None
        if persistent is not None:
            _, *extra = self.by_head(*self.qkv(persistent.to(h.dtype).unsqueeze(0)))
            extra = self.for_every_head(*extra)
        if keep is not None:
            keep = keep[:, -length:]
        k, v = self.for_every_head(k, v)
        mix = self._blocks if h.shape[1] > self.window else self._whole
        return mix(q, k, v, keep, extra).transpose(1, 2).flatten(2), present

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, extra: list[Tensor] | None) -> Tensor:
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

    def _blocks(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, extra: list[Tensor] | None) -> Tensor:
        """Blocks of a window against themselves and the block before, folded into the batch."""
        batch, heads, time, dim = q.shape
        size, length = self.window, k.shape[2]
        number = -(-time // size)
        missing = number * size - time
        before = size - (length - time)  # keys that the block before the first query lacks

        def fold(x: Tensor) -> Tensor:
            return x.transpose(1, 2).reshape(batch * number, size, heads, dim).transpose(1, 2)

        def pairs(x: Tensor) -> Tensor:
            """[B, H, past + T, D] -> [B * blocks, H, 2 size, D]."""
            blocks = F.pad(x, (0, 0, before, missing)).unfold(2, 2 * size, size)
            return blocks.permute(0, 2, 1, 4, 3).reshape(batch * number, heads, 2 * size, dim)

        distance = torch.arange(size, 2 * size, device=q.device)[:, None] - torch.arange(2 * size, device=q.device)
        near = (distance >= 0) & (distance < size)
        there = torch.ones(1, length, dtype=torch.bool, device=q.device) if keep is None else keep
        there = F.pad(there, (before, missing)).unfold(1, 2 * size, size)
        mask = (near & there.unsqueeze(2)) | (distance == 0)
        mask = mask.expand(batch, -1, -1, -1).reshape(batch * number, 1, size, 2 * size)
        mixed = self._attend(fold(F.pad(q, (0, 0, 0, missing))), pairs(k), pairs(v), mask, extra)
        return mixed.transpose(1, 2).reshape(batch, number * size, heads, dim).transpose(1, 2)[:, :, :time]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, extra: list[Tensor] | None) -> Tensor:
        if extra is not None:
            k, v = (
                torch.cat((more.expand(len(q), -1, -1, -1).to(own.dtype), own), dim=2)
                for more, own in zip(extra, (k, v), strict=True)
            )
            mask = F.pad(mask, (extra[0].shape[2], 0), value=True)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self._dropout())

    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0
