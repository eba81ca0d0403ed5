"""The mixer of Titans: its forms (`titans_forms`) under OLMo's attention contract.

Decoding: a layer's cache is a pair of tensors, as OLMo's own, with the batch in front. The first has no elements and
tells OLMo how many tokens are past, [B, 1, past, 0]; the second, [B, state], holds everything in fp32: OLMo's beam
search may expand and reorder both like keys and values.

B batch, T new tokens, H memory heads, D head_dim, W width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from olmo.model import LayerNorm, RMSLayerNorm
from torch import nn

from olmo_ext.base.errors import InputError
from olmo_ext.blocks.attention import Cache, heads_like_olmo, rotary_embedding
from olmo_ext.blocks.titans_forms import TitansForm
from olmo_ext.blocks.titans_layer import MemoryState
from olmo_ext.blocks.titans_memory import Memory
from olmo_ext.blocks.window_attention import KeysValues
from olmo_ext.shapes.layers import AttentionSpec
from olmo_ext.shapes.types.titans_sizes import TitansSizes


class TitansMixer(TitansForm):
    """OLMo's attention contract (see `AttentionType.build`)."""

    def __init__(self, *, d_model: int, spec: AttentionSpec, sizes: TitansSizes, config: Any, cache: Any) -> None:
        if sizes.has_attention and config.alibi:
            raise InputError("ALiBi is not made for a window", where="model.alibi", right="rope: true")
        place = {"bias": config.include_bias, "device": config.init_device}
        super().__init__(
            d_model=d_model,
            sizes=sizes,
            head_norm=RMSLayerNorm(config, size=sizes.head_dim),
            make_norm=lambda width: LayerNorm.build(config, size=width),
            window={
                **heads_like_olmo(d_model, spec, config),
                "dropout": config.attention_dropout,
                "full_precision": config.rope_full_precision,
            },
            **place,
        )
        self.spec = spec
        self.rotary_emb = rotary_embedding(config, spec, cache) if sizes.has_attention else None
        self.attn_out = nn.Linear(spec.width, d_model, **place)
        self.attn_out._is_residual = True  # type: ignore[assignment]
        self.checkpoint_function: Any = None
        """Set by the block under fine-grained activation checkpointing: the whole mixing is computed again."""

    def forward(
        self,
        h: torch.Tensor,
        attention_bias: torch.Tensor | None = None,
        layer_past: Cache | None = None,
        use_cache: bool = False,
        max_doc_len: int | None = None,
        cu_doc_lens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Cache | None]:
        """
        :raises InputError: for document masks, and for an attention bias that is not causal with padding.
        """
        if max_doc_len is not None or cu_doc_lens is not None:
            raise InputError(
                "the memory of Titans does not begin anew at each document",
                where="model.attention.type titans",
                right="data.generate_doc_lengths: false",
            )
        past = 0 if layer_past is None else layer_past[0].shape[-2]
        keep = kept_positions(attention_bias, past=past, time=h.shape[1])
        keep = None if keep is None else keep.expand(h.shape[0], -1)
        if self.checkpoint_function is None or layer_past is not None or use_cache:
            mixed, present = self.mix(h, keep, layer_past, use_cache)
        else:
            mixed, present = self.checkpoint_function(self.mix, h, keep, None, False)
        return self.attn_out(mixed), present

    def mix(
        self, h: torch.Tensor, keep: torch.Tensor | None, layer_past: Cache | None, use_cache: bool
    ) -> tuple[torch.Tensor, Cache | None]:
        """Everything before the output projection.

        :param keep: [B, past + T] False for padding.
        """
        batch, time, _ = h.shape
        past = 0 if layer_past is None else layer_past[0].shape[-2]
        state, keys_values = (None, None) if layer_past is None else self._unpack(layer_past[1], past)
        angles = self.angles(keep, start=past, end=past + time, device=h.device)
        mixed, state, keys_values = self.compose(h, state, keys_values, angles=angles, keep=keep)
        if not use_cache:
            return mixed, None
        length = h.new_empty(batch, 1, past + time, 0)
        return mixed, (length, self._pack(state, keys_values))

    def angles(
        self, keep: torch.Tensor | None, *, start: int, end: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """cos and sin at the tokens' own positions, from OLMo's tables, [B or 1, 1, T, D/2]; padding has no position,
        so that persistent tokens stay as far away."""
        if self.rotary_emb is None:
            return None
        if keep is None:
            positions = torch.arange(start, end, device=device)[None]
        else:
            positions = (keep.long().cumsum(1) - 1).clamp(min=0)[:, start:end]
        sin, cos = self.rotary_emb.get_rotary_embedding(end, device)
        half = self.spec.head_dim // 2
        return cos[0, 0, :, :half][positions].unsqueeze(1), sin[0, 0, :, :half][positions].unsqueeze(1)

    # -- the decoding state as one tensor ----------------------------------------------------------------------------

    def _pack(self, state: MemoryState, keys_values: KeysValues | None) -> torch.Tensor:
        memory = state.memory
        parts = [*memory.weights, *(memory.momentum or ())]
        if self.sizes.chunk_size > 1:
            parts += memory.anchor
        parts += [state.tail, state.seen, *(keys_values or ())]
        wide = torch.promote_types(memory.weights[0].dtype, torch.float32)
        return torch.cat([part.reshape(len(state.seen), -1).to(wide) for part in parts], dim=1)

    def _unpack(self, packed: torch.Tensor, past: int) -> tuple[MemoryState, KeysValues | None]:
        sizes, spec, at = self.sizes, self.spec, 0

        def take(*shape: int) -> torch.Tensor:
            nonlocal at
            part = packed[:, at : at + math.prod(shape)].reshape(len(packed), *shape)
            at += math.prod(shape)
            return part

        heads, dim, hidden = sizes.heads, sizes.head_dim, sizes.hidden
        shapes = ((heads, dim, hidden), (heads, hidden, dim)) if sizes.depth == 2 else ((heads, dim, dim),)
        weights = tuple(take(*shape) for shape in shapes)
        momentum = tuple(take(*shape) for shape in shapes) if sizes.momentum else None
        anchor = tuple(take(*shape) for shape in shapes) if sizes.chunk_size > 1 else weights
        tail = take(3 * sizes.width, sizes.conv_width - 1)
        seen = take(1)[:, 0]
        keys_values = None
        if self.window is not None:
            kept = (spec.n_kv_heads, min(past, sizes.window - 1), spec.head_dim)
            keys_values = (take(*kept), take(*kept))
        memory = Memory(weights=weights, momentum=momentum, anchor=anchor)
        return MemoryState(memory=memory, tail=tail, seen=seen), keys_values


def kept_positions(attention_bias: torch.Tensor | None, *, past: int, time: int) -> torch.Tensor | None:
    """Which positions are tokens, [B, past + time], read off the bias that OLMo makes of a padding mask.

    :raises InputError: if the bias forbids more than later positions and padding.
    """
    if attention_bias is None:
        return None
    length = past + time
    allowed = attention_bias[:, 0, past:length, :length] > torch.finfo(attention_bias.dtype).min / 2
    keep = allowed[:, -1]
    rows = torch.arange(past, length, device=keep.device)
    causal = torch.arange(length, device=keep.device) <= rows[:, None]
    if not bool((allowed == (causal & keep[:, None])).all()):
        raise InputError(
            "an attention bias that is not causal with padding has no meaning for a memory",
            where="model.attention.type titans",
            right="an attention_mask, or no bias",
        )
    return None if bool(keep.all()) else keep
